"""What a number of each matrix was over the steps, as rows and columns of a heat map. Imports the standard library."""

from __future__ import annotations

import re
import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ds_galore.tools.report.runs import Refresh

__all__ = ["Grid", "Group", "Row", "make_grid"]

#: Cells of a heat map on the page, as long as that leaves enough columns.
MAX_CELLS, MIN_COLUMNS, MAX_COLUMNS = 36_000, 60, 400
#: Modules in the order in which a block of a transformer has them, which staggered refreshes do not keep.
ORDER = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn", "o_proj", "out_proj", "dense") + (
    *("gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "c_fc", "fc1", "dense_h_to_4h"),
    *("down_proj", "w2", "fc2", "dense_4h_to_h", "c_proj"),
)


@dataclass(frozen=True)
class Row:
    """A matrix.

    Parameters
    ----------
    name
        Of the parameter.
    label
        Short: its module and its layer.
    layer
        Its layer alone, or what else tells it from others of its kind.
    """

    name: str
    label: str
    layer: str


@dataclass(frozen=True)
class Group:
    """Rows ``begin`` to ``end`` (exclusive): the same matrix of every layer."""

    label: str
    begin: int
    end: int


@dataclass(frozen=True)
class Grid:
    """Cells by row and column.

    Parameters
    ----------
    edges
        Steps between which columns lie: one more than there are columns.
    cells
        The value of the basis in use; the mean of those where several were in a column; None before the first.
    merged
        Whether a column covers more than one refresh of a matrix somewhere.
    """

    rows: list[Row]
    groups: list[Group]
    edges: list[int]
    cells: list[list[float | None]]
    merged: bool

    def columns(self) -> list[tuple[int, list[float]]]:
        """By the step at which a column begins, the values in it."""
        found = zip(self.edges, zip(*self.cells, strict=True), strict=False)
        return [(step, [value for value in column if value is not None]) for step, column in found]

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and highest value."""
        values = [value for row in self.cells for value in row if value is not None]
        return min(values), max(values)


def make_grid(refreshes: Mapping[str, Mapping[int, Refresh]], key: str, last_step: int | None) -> Grid | None:
    """The grid of ``"energy"`` or ``"overlap"``, or None where no value was logged.

    Every value holds from its refresh to the next one of the same matrix, as the basis does. Where steps with a
    refresh are more than columns, columns are equal stretches of steps.
    """
    values = {
        name: [(step, getattr(each, key)) for step, each in sorted(by_step.items())]
        for name, by_step in refreshes.items()
    }
    values = {name: points for name, points in values.items() if any(value is not None for _, value in points)}
    if not values:
        return None
    rows, groups = _order(list(values))
    steps = sorted({step for points in values.values() for step, _ in points})
    limit = min(max(MAX_CELLS // len(rows), MIN_COLUMNS), MAX_COLUMNS)
    edges = _edges(steps, limit, last_step)
    merged, cells = False, []
    for row in rows:
        line, several = _line(values[row.name], edges)
        cells.append(line)
        merged = merged or several
    return Grid(rows, groups, edges, cells, merged)


def _edges(steps: Sequence[int], limit: int, last_step: int | None) -> list[int]:
    """Every step with a refresh and the end, or equal stretches."""
    usual = round(statistics.median(b - a for a, b in pairwise(steps))) if len(steps) > 1 else 1
    end = max(last_step or 0, steps[-1] + max(usual, 1))
    if len(steps) <= limit:
        return [*steps, end]
    first = steps[0]
    return sorted({first + (end - first) * number // limit for number in range(limit + 1)})


def _line(points: Sequence[tuple[int, float | None]], edges: Sequence[int]) -> tuple[list[float | None], bool]:
    """A row's cells, and whether values had to share one."""
    inside: dict[int, list[float | None]] = {}
    for step, value in points:
        inside.setdefault(bisect_right(edges, step) - 1, []).append(value)
    cells: list[float | None] = []
    current: float | None = None
    for column in range(len(edges) - 1):
        if column in inside:
            known = [value for value in inside[column] if value is not None]
            current = inside[column][-1]
            cells.append(statistics.fmean(known) if known else None)
        else:
            cells.append(current)
    return cells, any(len(each) > 1 for each in inside.values())


# ---------------------------------------------------------------------- rows


def _order(names: Sequence[str]) -> tuple[list[Row], list[Group]]:
    """Rows by kind and layer, kinds in the order of a block where they are known ones, else of the log."""
    found: dict[str, list[tuple[tuple[int, ...], str]]] = {}
    for name in sorted(names, key=_natural):
        kind, numbers = _kind(name)
        found.setdefault(kind, []).append((numbers, name))
    short = _short(list(found))
    rows: list[Row] = []
    groups: list[Group] = []
    for kind, members in sorted(found.items(), key=lambda item: (_place(item[0]), names.index(item[1][0][1]))):
        begin = len(rows)
        for numbers, name in sorted(members):
            layer = ".".join(map(str, numbers))
            rows.append(Row(name, f"{short[kind]} {layer}".strip(), layer or short[kind]))
        groups.append(Group(short[kind], begin, len(rows)))
    return rows, groups


def _place(kind: str) -> int:
    module = kind.rpartition(".")[2]
    return ORDER.index(module) if module in ORDER else len(ORDER)


def _natural(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdecimal() and len(part) < 10 else (1, 0, part) for part in name.split(".")]


def _kind(name: str) -> tuple[str, tuple[int, ...]]:
    """A name with its numbers taken out, and those."""
    parts = name.removesuffix(".weight").split(".")
    numbers = tuple(int(part) for part in parts if re.fullmatch(r"[0-9]{1,9}", part))
    return ".".join("*" if re.fullmatch(r"[0-9]{1,9}", part) else part for part in parts), numbers


def _short(kinds: Sequence[str]) -> dict[str, str]:
    """For each kind the shortest end of it that no other has."""
    found = {}
    for kind in kinds:
        parts = kind.split(".")
        ends = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        found[kind] = next(
            (e for e in ends if e[0] != "*" and not any(_ends(other, e) for other in kinds if other != kind)), kind
        )
    return found


def _ends(kind: str, end: str) -> bool:
    return kind == end or kind.endswith(f".{end}")
