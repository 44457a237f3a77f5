"""Moving the walks of many parameters through a step together, so that what they ask for travels together.

Imports torch and its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ds_galore.optim.matrices import Matrix, Side
from ds_galore.optim.walks import Request, Update, Walk
from ds_galore.zero.exchange import cut_row_exchange
from ds_galore.zero.group import Guard, RankGroup
from ds_galore.zero.layout import MatrixLayout

__all__ = ["Traveller", "drive"]


@dataclass
class Traveller:
    """One parameter's walk.

    Parameters
    ----------
    walk
        Begins the walk.
    requests
        What it will ask for; of the same kinds for all that are driven together.
    matrix
        Where it is projected, as what.
    layouts
        By kind of request, of the rows that ``cut`` and ``cut_max`` are about; kinds that are not there ask for
        nothing.
    """

    walk: Callable[[], Walk]
    requests: Sequence[Request]
    matrix: Matrix | None = None
    layouts: Mapping[str, MatrixLayout] = field(default_factory=dict)


def drive(
    travellers: Sequence[Traveller], side: Side | None, group: RankGroup, guard: Guard, like: Tensor
) -> list[Update]:
    """Let every walk arrive. Collective: the same parameters in the same order on all ranks.

    Parameters
    ----------
    travellers
        The walks.
    side
        Of the projected matrices, all of one side.
    like
        A tensor of the dtype and on the device that is computed in.

    Returns
    -------
    list of Update
        Where each arrived; empty once this rank has failed, which the next vote tells.
    """
    if not travellers:
        return []
    nothing: list[Walk] = []
    walks = guard.run(lambda: [each.walk() for each in travellers], lambda: nothing)
    replies: list[Tensor] = []
    for index, first in enumerate(travellers[0].requests):
        shapes = [each.requests[index].shape for each in travellers]
        shares = guard.run(partial(_advance, walks, replies), partial(_zeros, like, shapes))
        replies = _exchange(first.kind, travellers, shares, side, group, guard)

    def arrive() -> list[Update]:
        found = []
        for number, walk in enumerate(walks):
            try:
                walk.send(replies[number]) if replies else next(walk)
            except StopIteration as end:
                found.append(end.value)
            else:
                raise AssertionError("a rule asks for more than it announced")
        return found

    return guard.run(arrive, list)


def _advance(walks: Sequence[Walk], replies: Sequence[Tensor]) -> list[Tensor]:
    return [walk.send(replies[number]) if replies else next(walk) for number, walk in enumerate(walks)]


def _zeros(like: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    return [like.new_zeros(shape) for shape in shapes]


def _exchange(
    kind: str, travellers: Sequence[Traveller], shares: list[Tensor], side: Side | None, group: RankGroup, guard: Guard
) -> list[Tensor]:
    if group.world_size == 1:
        return shares
    if kind == "sum":
        sizes = [share.numel() for share in shares]
        packed = guard.run(lambda: torch.cat(shares), lambda: shares[0].new_zeros(sum(sizes)))
        return list(torch.split(group.all_reduce(packed), sizes))
    if kind == "spread":
        matrices = [each.matrix for each in travellers if each.matrix is not None]
        assert side is not None
        return side.spread(matrices, shares, group, guard)
    layouts = {number: each.layouts[kind] for number, each in enumerate(travellers) if kind in each.layouts}
    if layouts:
        rows = [shares[number].contiguous() for number in layouts]
        cut_row_exchange(tuple(layouts.values())).run(group, rows, maximum=kind == "cut_max")
        for number, block in zip(layouts, rows, strict=True):
            shares[number] = block
    return shares
