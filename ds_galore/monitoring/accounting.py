"""The memory of a running engine's model states by kind, beside plain AdamW's.

Imports this package's offline arithmetic and the optimizer; the engine's tensors tell element sizes.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ds_galore.optim.optimizer import LowRankOptimizer
from ds_galore.tools.memory import MemoryPlan, ParameterPlan, plan_memory

__all__ = ["memory_by_kind", "memory_plans"]


def element_sizes(engine: Any) -> dict[str, Any]:
    """What an element of weights, master weights and gradients takes, from the tensors that DeepSpeed made of them."""
    zero = engine.optimizer
    if not hasattr(zero, "fp32_partitioned_groups_flat"):  # no ZeRO: whole weights and gradients of their dtype
        size = next(engine.module.parameters()).element_size()
        masters = 4 if hasattr(zero, "fp32_groups") else 0  # FP16_UnfusedOptimizer's copies
        return {"weight_bytes": size, "master_bytes": masters, "gradient_bytes": size, "stage": 0}
    weights, masters = zero.fp16_partitioned_groups_flat[0], zero.fp32_partitioned_groups_flat[0]
    shared = weights.data_ptr() == masters.data_ptr()
    gradients = zero.grad_partitions_flat_buffer.element_size()
    if zero.offload_optimizer:  # a second copy, where the masters are
        gradients += masters.element_size()
    return {
        "weight_bytes": weights.element_size(),
        "master_bytes": 0 if shared else masters.element_size(),
        "gradient_bytes": gradients,
    }


def memory_plans(engine: Any, world_size: int) -> tuple[MemoryPlan, MemoryPlan] | None:
    """The largest rank's memory and plain AdamW's; None at stages 1 and 2.

    What DeepSpeed makes of gradients there has not been compared with the table.
    """
    if int(engine.zero_optimization_stage()) in (1, 2):
        return None
    optimizer = engine.basic_optimizer
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    adamw = [ParameterPlan("", getattr(p, "ds_numel", p.numel())) for p in trained]
    plans = optimizer.parameter_plans() if isinstance(optimizer, LowRankOptimizer) else adamw
    options = {"world_size": world_size, **element_sizes(engine)}
    own = dict(options)
    if isinstance(optimizer, LowRankOptimizer):
        own["sharded"] = optimizer.shards_projectors(world_size)
        own["kept"] = optimizer.kept
        if optimizer.kept.lowered_gap is not None:  # where alone weights are their own masters
            options["master_bytes"] = engine.optimizer.fp32_partitioned_groups_flat[0].element_size()
    ranks = [plan_memory(plans, rank=rank, **own) for rank in range(world_size)]
    return max(ranks, key=lambda plan: plan.total), plan_memory(adamw, **options)


def memory_by_kind(engine: Any, world_size: int) -> dict[str, dict[str, int]] | None:
    """Bytes by kind, of this optimizer and of plain AdamW, as the run log has them."""
    plans = memory_plans(engine, world_size)
    if plans is None:
        return None
    return {type(engine.basic_optimizer).__name__: asdict(plans[0]), "AdamW": asdict(plans[1])}
