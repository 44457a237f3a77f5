"""How much memory a rank needs for the model's states: plain arithmetic on shapes.

Counted are the tensors that live for the whole run and grow with the model: weights, their fp32 masters, the gradient
partition, moments and projectors. Not counted: activations, DeepSpeed's communication buckets and what a step holds
for a moment. Imports nothing of torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

__all__ = ["MemoryPlan", "ParameterPlan", "plan_memory"]


@dataclass(frozen=True)
class ParameterPlan:
    """A trained parameter as the optimizer sees it.

    Parameters
    ----------
    name
        Of the parameter.
    numel
        Number of elements.
    columns
        Columns of the matrix as which it is projected; 0 for plain AdamW.
    rank
        Of the projection; 0 for plain AdamW.
    side
        ``"right"``, ``"left"``, or ``""`` for plain AdamW.
    """

    name: str
    numel: int
    columns: int = 0
    rank: int = 0
    side: str = ""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one rank."""

    weights: int = 0
    master_weights: int = 0
    gradients: int = 0
    moments: int = 0
    projectors: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def optimizer(self) -> int:
        """Moments and projectors."""
        return self.moments + self.projectors


def plan_memory(
    parameters: Iterable[ParameterPlan],
    *,
    world_size: int,
    rank: int = 0,
    weight_bytes: int = 4,
    master_bytes: int | None = None,
    gradient_bytes: int | None = None,
    projector_bytes: int = 4,
    sharded: bool = False,
    partitioned: bool = True,
) -> MemoryPlan:
    """The memory of one rank.

    Parameters
    ----------
    parameters
        The trained parameters.
    world_size, rank
        Of how many ranks, and which.
    weight_bytes
        4 for fp32 training, 2 for bf16 or fp16.
    master_bytes
        Bytes of an element of a separate master copy; where not given, 4, or 0 for fp32 without partitioning. (Under
        ZeRO-3 DeepSpeed 0.19.8 means to share fp32 weights with their masters, but compares a device with its name,
        and never does.)
    gradient_bytes
        Bytes of an element of the gradient partition; ``weight_bytes`` where not given.
    projector_bytes
        4 for fp32, 2 for bf16.
    sharded
        Whether right projectors are spread over the ranks.
    partitioned
        Whether ZeRO-3 partitions everything; False for one whole copy a rank.

    Returns
    -------
    MemoryPlan
        With the padding that ZeRO-3 adds to each parameter.
    """
    ranks, place = (world_size, rank) if partitioned else (1, 0)
    elements = moments = projectors = 0
    for each in parameters:
        part = -(-each.numel // ranks)
        elements += part
        start, stop = min(place * part, each.numel), min((place + 1) * part, each.numel)
        if not each.side:
            moments += stop - start
            continue
        touched = 0 if start == stop else (stop - 1) // each.columns - start // each.columns + 1
        column_share = -(-each.columns // ranks)
        if each.side == "right":
            moments += touched * each.rank
            projectors += (column_share if sharded else each.columns) * each.rank
        else:
            moments += column_share * each.rank
            projectors += touched * each.rank
    if master_bytes is None:
        master_bytes = 4 if partitioned or weight_bytes < 4 else 0
    return MemoryPlan(
        weights=elements * weight_bytes,
        master_weights=elements * master_bytes,
        gradients=elements * (weight_bytes if gradient_bytes is None else gradient_bytes),
        moments=2 * 4 * moments,
        projectors=projectors * projector_bytes,
    )
