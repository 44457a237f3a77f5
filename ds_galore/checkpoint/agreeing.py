"""What all ranks have to know of a state before each copies its part of it. Imports torch and its neighbours."""

from __future__ import annotations

from typing import Any

import torch

from ds_galore.checkpoint.job import Factors
from ds_galore.checkpoint.pieces import rounded_weights
from ds_galore.optim.matrices import RIGHT
from ds_galore.optim.optimizer import LowRankOptimizer
from ds_galore.optim.states import effective
from ds_galore.zero.binding import flat_parts
from ds_galore.zero.group import Guard, RankGroup

__all__ = ["agree_on_rounded", "whole_projectors"]


def agree_on_rounded(engine: Any, group: RankGroup, guard: Guard) -> frozenset[str]:
    """Parameters whose weights all ranks find to be their masters, rounded. Collective under ZeRO 1 and 2."""
    if int(engine.zero_optimization_stage()) not in (1, 2):
        return frozenset()
    nothing: list[tuple[str, bool]] = []
    found = guard.run(lambda: list(rounded_weights(engine)), lambda: nothing)
    group.agree([], guard.error)
    differ = group.agree([not exact for _, exact in found], guard.error)
    return frozenset(name for (name, _), differs in zip(found, differ, strict=True) if not differs)


def whole_projectors(engine: Any, guard: Guard) -> Factors:
    """By parameter, the right projectors, whole and in float32. Collective where they are sharded."""
    optimizer = engine.basic_optimizer
    found: Factors = {}
    if not isinstance(optimizer, LowRankOptimizer):
        return found
    for flat in flat_parts(engine):
        plan, state = optimizer.plan_of(flat.tensor), optimizer.state.get(flat.tensor, {})
        for batch in plan.batches if plan is not None and optimizer.updates_are_low_rank else ():
            if batch.side is not RIGHT or plan is None or batch.matrices[0].name not in state:
                continue
            states = [state[matrix.name] for matrix in batch.matrices]
            matrices = [effective(matrix, own) for matrix, own in zip(batch.matrices, states, strict=True)]
            like = torch.empty(0, dtype=torch.float32, device=flat.tensor.device)
            bases = RIGHT.load(matrices, states, plan.group, guard, like)
            with guard:
                for matrix, basis in zip(matrices, bases, strict=True):
                    if optimizer.projector_is_packed:  # as the offline reader sees it: whole bytes
                        basis = torch.nn.functional.pad(basis, (0, matrix.rank % 2))
                    found[matrix.name] = basis.to("cpu", copy=True).numpy()
    return found
