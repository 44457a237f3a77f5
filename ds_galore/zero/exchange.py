"""Summing the rows that slice boundaries cut, between the ranks that share them and only those.

A rank shares two rows of a matrix at most: its first with ranks before it, its last with ranks after it. Almost always
two ranks share a row; they swap their parts. Where a row is longer than a partition more ranks do, and the parts are
summed along a balanced binary tree over those ranks, whose ends are leaves, and the sum is sent back the same way: its
depth grows with the logarithm of their number. Either way a rank sends and receives at most three rows of one matrix
each way, whatever the world size, and all ranks that share a row end with bit-identical sums.

Imports torch alone, and :mod:`.layout`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from ds_galore.zero.layout import MatrixLayout

__all__ = ["CutRowExchange", "Exchanger", "TreePosition", "cut_row_exchange", "tree_position"]


class Exchanger(Protocol):
    """What of :class:`~ds_galore.zero.group.RankGroup` is needed here."""

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Point-to-point messages, all in flight together."""


@dataclass(frozen=True, slots=True)
class TreePosition:
    """The place of one member in the summing tree: members are numbered in the order of their ranks.

    Parameters
    ----------
    depth
        Number of edges to the root.
    parent
        None for the root.
    children
        Two at most, ascending.
    """

    depth: int
    parent: int | None
    children: tuple[int, ...]


def tree_position(member: int, count: int) -> TreePosition:
    """The place of ``member`` among ``count >= 2`` members.

    The inner members ``1 .. count - 2`` form a balanced search tree; the first and the last hang below its ends, so
    that a rank that is last in one tree and first in the next still sends no more than an inner one. Two members have
    no inner one: the first is the root.
    """
    if count == 2:
        return TreePosition(0, None, (1,)) if member == 0 else TreePosition(1, 0, ())
    low, high, depth = 1, count - 2, 0
    parent: int | None = None
    target = min(max(member, 1), count - 2)
    while True:
        middle = (low + high) // 2
        if middle == target:
            break
        parent, depth = middle, depth + 1
        low, high = (low, middle - 1) if target < middle else (middle + 1, high)
    if member != target:
        return TreePosition(depth + 1, target, ())
    children = []
    if low < middle:
        children.append((low + middle - 1) // 2)
    elif middle == 1:
        children.append(0)
    if middle < high:
        children.append((middle + 1 + high) // 2)
    elif middle == count - 2:
        children.append(count - 1)
    return TreePosition(depth, parent, tuple(children))


@dataclass(slots=True)
class _Round:
    """One batch of messages: by peer, the (matrix, row) pairs, in the same order on both sides."""

    sends: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    receives: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))


class CutRowExchange:
    """The messages by which this rank and its neighbours sum the cut rows of some matrices.

    Planned once from the layouts, then run each step.

    Parameters
    ----------
    layouts
        The matrices, in the same order on all ranks, all laid out over the same group.
    """

    def __init__(self, layouts: Sequence[MatrixLayout]) -> None:
        self._swap = _Round()
        upward: dict[int, _Round] = defaultdict(_Round)
        downward: dict[int, _Round] = defaultdict(_Round)
        for matrix, layout in enumerate(layouts):
            for cut in layout.cut_rows():
                key, ranks = (matrix, cut.index), cut.ranks
                member = ranks.index(layout.rank)
                if len(ranks) == 2:
                    self._swap.sends[ranks[1 - member]].append(key)
                    self._swap.receives[ranks[1 - member]].append(key)
                    continue
                place = tree_position(member, len(ranks))
                if place.parent is not None:
                    upward[place.depth].sends[ranks[place.parent]].append(key)
                    downward[place.depth].receives[ranks[place.parent]].append(key)
                for child in place.children:
                    upward[place.depth + 1].receives[ranks[child]].append(key)
                    downward[place.depth + 1].sends[ranks[child]].append(key)
        self._upward = [upward[depth] for depth in sorted(upward, reverse=True)]
        self._downward = [downward[depth] for depth in sorted(downward)]

    @property
    def rows_sent(self) -> int:
        """Number of rows that this rank sends in one run."""
        rounds = [self._swap, *self._upward, *self._downward]
        return sum(len(keys) for each in rounds for keys in each.sends.values())

    def run(self, group: Exchanger, rows: Sequence[Tensor], *, maximum: bool = False) -> None:
        """Turn partial rows into sums, or into the largest of each element.

        Parameters
        ----------
        group
            Its ranks are those of the layouts.
        rows
            For each matrix what :meth:`.FlatSlice.project` returned, ``(num_rows, r)``, r as on the other ranks;
            the cut rows are overwritten with their sums.
        maximum
            Whether the largest is wanted instead of the sum.
        """

        def merge(matrix: int, index: int, part: Tensor) -> None:
            own = rows[matrix][index]
            # Of two terms both sides get the same bits in either order.
            rows[matrix][index] = torch.maximum(own, part) if maximum else own + part

        received = self._run_round(group, self._swap, rows)
        for peer, keys in self._swap.receives.items():
            for (matrix, index), part in zip(keys, received[peer], strict=True):
                merge(matrix, index, part)
        for each in self._upward:
            received = self._run_round(group, each, rows)
            for peer in sorted(each.receives):
                for (matrix, index), part in zip(each.receives[peer], received[peer], strict=True):
                    merge(matrix, index, part)
        for each in self._downward:
            received = self._run_round(group, each, rows)
            for peer, keys in each.receives.items():
                for (matrix, index), part in zip(keys, received[peer], strict=True):
                    rows[matrix][index] = part

    @staticmethod
    def _run_round(group: Exchanger, each: _Round, rows: Sequence[Tensor]) -> dict[int, list[Tensor]]:
        def flat(keys: list[tuple[int, int]]) -> Tensor:
            return torch.cat([rows[matrix][index] for matrix, index in keys])

        if not each.sends and not each.receives:
            return {}
        sends = {peer: flat(keys) for peer, keys in each.sends.items()}
        templates = {peer: flat(keys) for peer, keys in each.receives.items()}
        received = group.exchange(sends, templates)
        return {
            peer: list(torch.split(received[peer], [rows[matrix].shape[1] for matrix, _ in keys]))
            for peer, keys in each.receives.items()
        }


@lru_cache(maxsize=512)
def cut_row_exchange(layouts: tuple[MatrixLayout, ...]) -> CutRowExchange:
    """The exchange of some matrices, planned at its first use; layouts are compared by identity."""
    return CutRowExchange(layouts)
