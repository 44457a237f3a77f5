"""How much memory a rank needs for the model's states: plain arithmetic on shapes.

Counted are the tensors that live for the whole run and grow with the model: weights, their fp32 masters, the gradient
partition, moments and projectors. Not counted: activations, DeepSpeed's communication buckets and what a step holds
for a moment. Imports nothing of torch.
"""

from __future__ import annotations

import math
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
        Columns of the matrix as which it is projected, or factored; 0 for what is no matrix.
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
    stage: int = 3,
    moments: int = 2,
    moment_bytes: float = 4,
    factored: bool = False,
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
        Bytes of an element of a separate master copy; where not given, 4, or 0 for fp32 without ZeRO. (Under
        ZeRO-3 DeepSpeed 0.19.8 means to share fp32 weights with their masters, but compares a device with its name,
        and never does.)
    gradient_bytes
        Bytes of an element of the gradient partition; ``weight_bytes`` where not given.
    projector_bytes
        4 for fp32, 2 for bf16.
    sharded
        Whether right projectors are spread over the ranks.
    stage
        Of ZeRO: 0 partitions nothing, 1 masters and the optimizer's state, 2 gradients too, 3 everything.
    moments, moment_bytes
        Numbers that the optimizer keeps for each element, of a matrix that is projected for each element of its
        low-rank gradient; and their bytes.
    factored
        Whether second moments come on top: of a matrix a row and a column, where nothing is partitioned; of anything
        else, and under ZeRO, a number an element.

    Returns
    -------
    MemoryPlan
        With the padding that ZeRO-3 adds to each parameter.
    """
    ranks, place = (world_size, rank) if stage else (1, 0)
    part_of_rank = elements = numbers = projectors = 0
    for each in parameters:
        part = -(-each.numel // ranks)
        elements += each.numel
        part_of_rank += part
        start, stop = min(place * part, each.numel), min((place + 1) * part, each.numel)
        touched = 0
        if each.columns and start < stop:
            touched = (stop - 1) // each.columns - start // each.columns + 1
        column_share = -(-each.columns // ranks)
        if not each.side:
            held, rows, columns = stop - start, touched, each.columns
        elif each.side == "right":
            held, rows, columns = touched * each.rank, touched, each.rank
            projectors += (column_share if sharded else each.columns) * each.rank
        else:
            held, rows, columns = column_share * each.rank, column_share, each.rank
            projectors += touched * each.rank
        numbers += moments * held
        if factored:
            numbers += rows + columns if each.columns and not stage else held
    if master_bytes is None:
        master_bytes = 4 if stage or weight_bytes < 4 else 0
    gradients = weight_bytes if gradient_bytes is None else gradient_bytes
    return MemoryPlan(
        weights=(part_of_rank if stage == 3 else elements) * weight_bytes,
        master_weights=part_of_rank * master_bytes,
        gradients=(part_of_rank if stage >= 2 else elements) * gradients,
        moments=math.ceil(numbers * moment_bytes),
        projectors=projectors * projector_bytes,
    )
