"""How much memory a rank needs for the model's states: plain arithmetic on shapes.

Counted are the tensors that live for the whole run and grow with the model: weights, their fp32 masters, the gradient
partition, moments and projectors. Not counted: activations, DeepSpeed's communication buckets and what a step holds
for a moment. Imports nothing of torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from ds_galore.tools.formats import FP32, RowFormat

__all__ = ["SMALLEST_QUANTISED", "Kept", "MemoryPlan", "ParameterPlan", "plan_memory", "shards_projectors"]

#: A parameter of fewer elements keeps moments of 4 bytes where others are quantised (as in bitsandbytes).
SMALLEST_QUANTISED = 4096


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
        Of the projection; 0 for what is not projected.
    side
        ``"right"``, ``"left"``, or ``""`` for what is not projected.
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


@dataclass(frozen=True)
class Kept:
    """What an optimizer keeps of each parameter, and in which formats.

    Of a projected matrix of ``m x n`` numbers it keeps, of rank ``r``, the moments of a low-rank gradient: from the
    right ``m x r``, of which a rank has the rows that it touches; from the left ``n x r``, of which it has
    ``ceil(n / W)`` rows. In the formats of rows each of these is quantised for itself.

    Parameters
    ----------
    moments
        Moments of the gradient's (low-rank) shape: 2 for Adam.
    projected, unprojected
        Their formats: of projected matrices, and of everything else (embeddings, head, norms).
    projectors
        The format of projectors; None where they are drawn anew from a seed, and none is kept.
    factored
        The format of second moments that come on top as a row and a column of a matrix (Adafactor), and as a number
        an element of what is none; None for an optimizer that has no such.
    flat
        Whether ZeRO's flat vectors hide matrices from it, as they do from any optimizer but ours: its second moments
        cannot be factored there, and it quantises small parameters like the rest of the vector.
    lowered_gap
        Where of matrices that are projected from the right low-rank gradients alone are kept: the steps between two
        refreshes of one. Those that refresh together are whole; as many are taken to be as there are on the mean step,
        and these to be the largest.
    """

    moments: int = 2
    projected: RowFormat = FP32
    unprojected: RowFormat = FP32
    projectors: RowFormat | None = FP32
    factored: RowFormat | None = None
    flat: bool = False
    lowered_gap: int | None = None

    def low_rank(self, rows: int, rank: int) -> int:
        """Bytes of the moments of ``rows`` rows of a low-rank gradient."""
        numbers = self.factored.rows(1, rows + rank) if self.factored is not None else 0
        return self.moments * self.projected.rows(rows, rank) + numbers

    def projector(self, rows: int, rank: int) -> int:
        """Bytes of ``rows`` rows of a projector."""
        return self.projectors.rows(rows, rank) if self.projectors is not None else 0


def shards_projectors(parameters: Iterable[ParameterPlan], kept: Kept, world_size: int) -> bool:
    """Whether right projectors are kept in parts: the rule of ``projector_storage: auto``.

    Sharded are those that would take more memory on a rank, if they were whole there, than the moments of the same
    matrices do, whose memory shrinks with the number of ranks.

    Parameters
    ----------
    parameters
        Of which those count that are projected from the right.
    kept
        What is kept of them.
    world_size
        How many ranks share a parameter.
    """
    projectors = moments = 0
    for each in parameters:
        if each.side == "right":
            projectors += kept.projector(each.columns, each.rank)
            moments += kept.low_rank(each.numel // each.columns, each.rank)
    return world_size > 1 and projectors * world_size > moments


def plan_memory(
    parameters: Iterable[ParameterPlan],
    *,
    world_size: int,
    rank: int = 0,
    kept: Kept | None = None,
    sharded: bool = False,
    weight_bytes: int = 4,
    master_bytes: int | None = None,
    gradient_bytes: int | None = None,
    stage: int = 3,
) -> MemoryPlan:
    """The memory of one rank.

    Parameters
    ----------
    parameters
        The trained parameters.
    world_size, rank
        Of how many ranks, and which.
    kept
        What the optimizer keeps; where not given, AdamW's moments, and projectors, in fp32.
    sharded
        Whether right projectors are spread over the ranks.
    weight_bytes
        4 for fp32 training, 2 for bf16 or fp16.
    master_bytes
        Bytes of an element of a separate master copy; where not given, 4, or 0 for fp32 without ZeRO. (Under
        ZeRO-3 DeepSpeed 0.19.8 means to share fp32 weights with their masters, but compares a device with its name,
        and never does.) 2 with DeepSpeed's ``bf16_master_weights_and_grads``.
    gradient_bytes
        Bytes of an element of the gradient partition; ``weight_bytes`` where not given.
    stage
        Of ZeRO: 0 partitions nothing, 1 masters and the optimizer's state, 2 gradients too, 3 everything.

    Returns
    -------
    MemoryPlan
        With the padding that ZeRO-3 adds to each parameter.
    """
    kept = Kept() if kept is None else kept
    ranks, place = (world_size, rank) if stage else (1, 0)
    part_of_rank = elements = in_vectors = moments = projectors = 0
    lowered: list[tuple[int, int]] = []  # of this rank, elements of whole gradients and of low-rank ones
    for each in parameters:
        part = -(-each.numel // ranks)
        elements += each.numel
        part_of_rank += part
        start, stop = min(place * part, each.numel), min((place + 1) * part, each.numel)
        touched = 0
        if each.columns and start < stop:
            touched = (stop - 1) // each.columns - start // each.columns + 1
        if not each.side:
            if kept.flat and stage:
                in_vectors += stop - start
            else:
                moments += _unprojected(kept, each, start, stop, touched)
            continue
        column_share = -(-each.columns // ranks)
        right = each.side == "right"
        if right and kept.lowered_gap is not None:
            lowered.append((part, touched * each.rank))
        moments += kept.low_rank(touched if right else column_share, each.rank)
        basis_rows = (column_share if sharded else each.columns) if right else touched
        projectors += kept.projector(basis_rows, each.rank)
    moments += kept.moments * kept.unprojected.stretch(0, in_vectors)
    moments += kept.factored.rows(1, in_vectors) if kept.factored is not None else 0
    if master_bytes is None:
        master_bytes = 4 if stage or weight_bytes < 4 else 0
    gradients = weight_bytes if gradient_bytes is None else gradient_bytes
    kept_gradients = part_of_rank if stage >= 2 else elements
    if lowered:
        together = -(-len(lowered) // (kept.lowered_gap or 1))
        saved = sorted(whole - low for whole, low in lowered)
        kept_gradients -= sum(saved[: len(saved) - together])
    return MemoryPlan(
        weights=(part_of_rank if stage == 3 else elements) * weight_bytes,
        master_weights=part_of_rank * master_bytes,
        gradients=kept_gradients * gradients,
        moments=moments,
        projectors=projectors,
    )


def _unprojected(kept: Kept, plan: ParameterPlan, start: int, stop: int, touched: int) -> int:
    """Bytes of the moments of the elements ``start`` to ``stop`` of a parameter that is not projected."""
    small = plan.numel < SMALLEST_QUANTISED and kept.unprojected.scaled
    numbers = kept.moments * (FP32 if small else kept.unprojected).stretch(start, stop)
    if kept.factored is not None:
        numbers += kept.factored.rows(1, touched + plan.columns if plan.columns else stop - start)
    return numbers
