"""Where DeepSpeed puts parameters in the flat tensors of each rank, by arithmetic alone. Seen in DeepSpeed 0.19.8.

Stage 3 (``zero/stage3.py``) cuts each parameter into equal parts, the last padded, and fills sub-groups with them in
order. Stages 1 and 2 (``zero/stage_1_and_2.py``) and BF16_Optimizer put a group's parameters in sequence, pad the end
to twice the number of ranks, and cut that into equal parts. Imports nothing but the standard library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Flat", "Part", "round_robin", "split", "stage3", "undo_round_robin"]

Shapes = Mapping[str, tuple[int, ...]]
#: DeepSpeed's ``nccl_start_alignment_factor``.
ALIGNMENT = 2


@dataclass(frozen=True)
class Part:
    """What a flat tensor holds of one parameter: ``numel`` elements from ``start`` on, at ``offset``."""

    name: str
    shape: tuple[int, ...]
    start: int
    offset: int
    numel: int


@dataclass(frozen=True)
class Flat:
    """A flat tensor of one rank.

    Parameters
    ----------
    group
        Of the optimizer's parameter groups.
    numel
        Elements, padding included.
    parts
        What it holds, in order; parameters of which it holds nothing included.
    padding
        What DeepSpeed counts as padding at its end, and leaves away in some places.
    """

    group: int
    numel: int
    parts: tuple[Part, ...]
    padding: int = 0
    addresses: Mapping[str, tuple[int, int]] = field(default_factory=dict)  #: stages 1 and 2: start, numel by name


def sub_groups(shapes: Shapes, ranks: int, size: int) -> list[dict[str, tuple[int, ...]]]:
    """The sub-groups that stage 3 makes of a parameter group, for a ``sub_group_size``."""
    if not shapes:
        return []  # of a group whose parameters are all frozen
    numels = {name: -(-math.prod(shape) // ranks) for name, shape in shapes.items()}
    if size >= sum(numels.values()):
        return [dict(shapes)]
    found: list[dict[str, tuple[int, ...]]] = []
    pending: dict[str, tuple[int, ...]] = {}
    filled = 0
    for name, shape in shapes.items():
        pending[name] = shape
        filled += numels[name]
        if filled >= size:
            found.append(pending)
            pending, filled = {}, 0
    return [*found, pending] if pending else found


def stage3(group: int, shapes: Shapes, ranks: int, rank: int) -> Flat:
    """A rank's flat tensor of a sub-group."""
    offset, parts = 0, []
    for name, shape in shapes.items():
        numel = math.prod(shape)
        count = -(-numel // ranks)
        start = min(rank * count, numel)
        parts.append(Part(name, shape, start, offset, min(start + count, numel) - start))
        offset += count
    return Flat(group, offset, tuple(parts))


def split(
    group: int, shapes: Shapes, ranks: int, rank: int, *, paddings: Sequence[int], original: Sequence[str], bf16: bool
) -> Flat:
    """A rank's flat tensor of a parameter group at stages 1 and 2.

    Parameters
    ----------
    shapes
        In the order in which they lie there.
    paddings
        Elements after each.
    original
        Their names in the order of the group.
    bf16
        Whether it is BF16_Optimizer's, which counts padding on the last rank only.
    """
    offsets, end = {}, 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        offsets[name] = end
        end += math.prod(shape) + padding
    total = -(-end // (ALIGNMENT * ranks)) * ALIGNMENT * ranks
    numel = total // ranks
    begin = rank * numel
    parts = []
    for name, shape in shapes.items():
        start = min(max(begin - offsets[name], 0), math.prod(shape))
        stop = min(max(begin + numel - offsets[name], start), math.prod(shape))
        parts.append(Part(name, shape, start, offsets[name] + start - begin if stop > start else 0, stop - start))
    lean = min(max(end - begin, 0), numel)
    padding = (total - end if rank == ranks - 1 else 0) if bf16 else numel - lean
    return Flat(group, numel, tuple(parts), padding, _addresses(shapes, offsets, original, paddings, begin, numel))


def _addresses(
    shapes: Shapes,
    offsets: Mapping[str, int],
    original: Sequence[str],
    paddings: Sequence[int],
    begin: int,
    numel: int,
) -> dict[str, tuple[int, int]]:
    """DeepSpeed's ``param_slice_mappings``; without paddings it takes the group's order, whatever lies where."""
    found, position = {}, 0
    for name in original:
        count = math.prod(shapes[name])
        offset = offsets[name] if any(paddings) else position
        position += count
        start, stop = max(offset, begin), min(offset + count, begin + numel)
        if start < stop:
            found[name] = (start - begin, stop - start)
    return found


def round_robin(names: Sequence[str], ranks: int) -> list[str]:
    """The order that ``round_robin_gradients`` makes of a group's."""
    return [name for first in range(ranks) for name in names[first::ranks]]


def undo_round_robin(names: Sequence[str], ranks: int) -> list[str]:
    """The group's order from the one that ``round_robin_gradients`` made of it."""
    places = round_robin([str(index) for index in range(len(names))], ranks)
    by_place = dict(zip((int(place) for place in places), names, strict=True))
    return [by_place[index] for index in range(len(names))]
