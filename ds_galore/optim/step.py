"""One step of AdamW on the plain and the projected parameters of a flat tensor, on all ranks that hold it.

Every function here is collective. Local work runs under a guard, so that a rank that fails stays in step with the
others until the next vote, where all raise. Imports torch, :mod:`ds_galore.zero` and its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_galore.config import GaLoreParameters
from ds_galore.optim.matrices import RIGHT, Matrix, Side, State
from ds_galore.optim.plan import Batch, FlatPlan, compute_dtype
from ds_galore.optim.refresh import RefreshJob, refresh_bases
from ds_galore.optim.rules import adamw_direction, adamw_step_size, reproject
from ds_galore.zero.group import Guard

__all__ = ["FlatStep"]


class FlatStep:
    """The step of one tensor.

    Parameters
    ----------
    tensor, grad
        The tensor and its gradient.
    group
        Its parameter group.
    plan
        What it consists of.
    state
        The optimizer's state of the tensor.
    parameters
        The optimizer's hyperparameters.
    skipped
        Told the name of each parameter whose gradient is not finite.
    """

    def __init__(
        self,
        tensor: Tensor,
        grad: Tensor,
        group: Mapping[str, Any],
        plan: FlatPlan,
        state: State,
        parameters: GaLoreParameters,
        skipped: Callable[[str], None],
    ) -> None:
        self._tensor, self._grad, self._group, self._plan = tensor, grad, group, plan
        self._state, self._parameters, self._skipped = state, parameters, skipped
        self._compute = compute_dtype(tensor)
        self._guard = Guard()

    def run(self) -> None:
        """Update the tensor and its state.

        Raises
        ------
        Exception
            What this rank ran into.
        PeerError
            If another rank did.
        """
        if self._plan.plain:
            self._step_plain()
        for batch in self._plan.batches:
            self._step_batch(batch)
        self._vote(self._flags(0))

    def _flags(self, number: int) -> Tensor:
        return torch.zeros(number, dtype=torch.uint8, device=self._tensor.device)

    def _vote(self, flags: Tensor) -> list[bool]:
        return [bool(flag) for flag in self._plan.group.vote(flags, self._guard.error)]

    def _state_of(self, name: str) -> State:
        state: State = self._state.setdefault(name, {}) if self._plan.nested else self._state
        return state

    def _zeros(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype or self._compute, device=self._tensor.device)

    def _factors(self, step: int, *, scale: float) -> tuple[float, float]:
        """The factor on the direction, and the one on the weights afterwards, in galore-torch's order."""
        group = self._group
        size = adamw_step_size(group["lr"], step, betas=group["betas"], correct_bias=group["correct_bias"])
        return size * scale, 1.0 - group["lr"] * group["weight_decay"]

    def _direction(self, grad: Tensor, state: State) -> Tensor:
        state["step"] += 1
        return adamw_direction(
            grad, state["exp_avg"], state["exp_avg_sq"], betas=self._group["betas"], eps=self._group["eps"]
        )

    # ------------------------------------------------------------------ plain AdamW

    def _step_plain(self) -> None:
        flags = self._flags(len(self._plan.plain))
        with self._guard:
            for number, each in enumerate(self._plan.plain):
                flags[number] = ~_is_finite(each.narrow(self._grad))
        refused = self._vote(flags)
        with self._guard:
            for each, bad in zip(self._plan.plain, refused, strict=True):
                state = self._state_of(each.name)
                if not state:
                    shape = (each.numel,) if self._plan.nested else tuple(self._tensor.shape)
                    state.update(step=0, exp_avg=self._zeros(shape), exp_avg_sq=self._zeros(shape))
                if bad:
                    self._skipped(each.name)
                    continue
                grad = each.narrow(self._grad).to(self._compute, copy=True).view(state["exp_avg"].shape)
                direction = self._direction(grad, state).view(-1)
                alpha, beta = self._factors(state["step"], scale=1.0)
                weight = each.narrow(self._tensor)
                if weight.dtype == direction.dtype:
                    weight.add_(direction, alpha=-alpha).mul_(beta)
                else:
                    weight.copy_(weight.to(direction.dtype).add_(direction, alpha=-alpha).mul_(beta))

    # ------------------------------------------------------------------ projected matrices

    def _gradient(self, matrix: Matrix) -> Tensor:
        return matrix.narrow(self._grad).to(self._compute)

    def _step_batch(self, batch: Batch) -> None:
        side, group, guard = batch.side, self._plan.group, self._guard
        states = [self._state_of(matrix.name) for matrix in batch.matrices]
        if not all(states):  # the same on all ranks
            with guard:
                for matrix, state in zip(batch.matrices, states, strict=True):
                    if not state:
                        self._create(state, side, matrix)
            self._vote(self._flags(0))
        bases = side.load(batch.matrices, states, group, guard, self._compute)
        gap = self._group["update_proj_gap"]
        due = [
            not state["has_basis"] or (state["step"] > 0 and (state["step"] - matrix.phase) % gap == 0)
            for matrix, state in zip(batch.matrices, states, strict=True)
        ]

        # This rank's shares of the low-rank gradients whose basis stays, and what is wrong with its gradients.
        shares: dict[int, Tensor] = {}
        flags = self._flags(len(states))
        with guard:
            for number, matrix in enumerate(batch.matrices):
                telling = self._gradient(matrix)
                if not due[number]:
                    telling = shares[number] = side.share(matrix, telling, bases[number])  # as telling, and smaller
                flags[number] = ~_is_finite(telling)
        refused = self._vote(flags)
        for matrix, bad in zip(batch.matrices, refused, strict=True):
            if bad:
                self._skipped(matrix.name)
        active = [number for number, bad in enumerate(refused) if not bad]

        self._refresh(batch, [number for number in active if due[number]], states, bases, shares)
        # A matrix whose first gradients are zero has no basis yet, and nothing to be updated by.
        active = [number for number in active if states[number]["has_basis"]]
        if not active:
            return
        matrices = [batch.matrices[number] for number in active]

        def missing_shares() -> list[Tensor]:
            for number, matrix in zip(active, matrices, strict=True):
                if number not in shares:
                    shares[number] = side.share(matrix, self._gradient(matrix), bases[number])
            return [shares[number] for number in active]

        def no_shares() -> list[Tensor]:
            return [self._zeros(side.share_shape(matrix)) for matrix in matrices]

        low_rank = side.combine(matrices, guard.run(missing_shares, no_shares), group, guard)

        def directions() -> list[Tensor]:
            return [self._direction(grad, states[number]) for number, grad in zip(active, low_rank, strict=True)]

        spread = side.spread(matrices, guard.run(directions, lambda: low_rank), group, guard)
        with guard:
            for number, matrix, direction in zip(active, matrices, spread, strict=True):
                alpha, beta = self._factors(states[number]["step"], scale=self._group["scale"])
                weight = matrix.narrow(self._tensor)
                wide = weight.to(self._compute)  # itself, unless the weights are kept in 16 bits
                side.apply(matrix, wide, direction, bases[number], -alpha * beta, beta)
                if wide is not weight:
                    weight.copy_(wide)

    def _create(self, state: State, side: Side, matrix: Matrix) -> None:
        state.update(
            step=0,
            exp_avg=self._zeros(side.moment_shape(matrix)),
            exp_avg_sq=self._zeros(side.moment_shape(matrix)),
            projector=self._zeros(side.projector_shape(matrix), matrix.projector_dtype),
            has_basis=0,
        )

    def _refresh(
        self,
        batch: Batch,
        numbers: Sequence[int],
        states: Sequence[State],
        bases: list[Tensor],
        shares: dict[int, Tensor],
    ) -> None:
        """Renew the bases of ``numbers``, in ``bases`` and in the state, and carry their moments over."""
        if not numbers:
            return
        side, group, guard = batch.side, self._plan.group, self._guard

        def jobs(gradient: Callable[[Matrix], Tensor]) -> list[RefreshJob]:
            return [
                RefreshJob(
                    batch.matrices[number],
                    gradient(batch.matrices[number]),
                    bases[number] if states[number]["has_basis"] else None,
                )
                for number in numbers
            ]

        found = refresh_bases(
            side,
            guard.run(
                lambda: jobs(self._gradient),
                lambda: jobs(lambda matrix: self._zeros((matrix.layout.local.numel,))),
            ),
            group,
            guard,
            method=self._parameters.refresh,
            passes=self._parameters.power_iterations,
            seed=self._parameters.seed,
        )
        carried, old, new = [], [], []
        for number, basis in zip(numbers, found, strict=True):
            if basis is None:
                continue
            matrix, state, before = batch.matrices[number], states[number], bases[number]
            with guard:
                # What is stored is what is used: rounded, and on the left the touched rows only.
                bases[number] = _as_stored(side, matrix, basis).to(self._compute)
                state["projector"] = side.store(matrix, basis, group)
            if state["has_basis"]:
                carried.append(number)
                old.append(before)
                new.append(bases[number])
            state["has_basis"] = 1
            shares.pop(number, None)
        if not carried or not self._parameters.reproject_moments:
            return
        matrices = [batch.matrices[number] for number in carried]
        transitions = side.transitions(matrices, old, new, group, guard)
        with guard:
            for number, matrix, transition in zip(carried, matrices, transitions, strict=True):
                state = states[number]
                reproject(
                    state["exp_avg"],
                    state["exp_avg_sq"],
                    transition,
                    step=state["step"],
                    betas=self._group["betas"],
                    product=_product(side, matrix),
                )


def _as_stored(side: Side, matrix: Matrix, basis: Tensor) -> Tensor:
    rounded = basis.to(matrix.projector_dtype)
    local = matrix.layout.local
    return rounded if side is RIGHT else rounded[local.first_row : local.end_row]


def _product(side: Side, matrix: Matrix) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda moment, square: side.moment_product(matrix, moment, square)


def _is_finite(tensor: Tensor) -> Tensor:
    """Whether all elements are finite, as a boolean scalar, in one pass without a temporary of the tensor's size."""
    if tensor.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    return torch.isfinite(torch.linalg.vector_norm(tensor, ord=float("inf")))
