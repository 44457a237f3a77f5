"""A matrix of which every rank holds one flat, contiguous, row-major range.

ZeRO-3 flattens each parameter, pads it to a multiple of the world size and gives every rank one slice;
ZeRO-1/2 slice a flattened group. Either way a rank holds of an ``m x n`` matrix some full rows and at most
two partial ones. Everything low-rank optimizers need then comes down to three products on such a slice:

========  =====================================  ==========================================================
project   ``G Q``, the rows this rank touches    local, then cut rows are summed (:mod:`.exchange`)
sketch    ``G^T X``, ``n x r``                   local, then summed over the group by the caller
apply     ``W <- beta W + alpha A B^T``          local, in place, without an ``m x n`` temporary
========  =====================================  ==========================================================

Pure arithmetic: imports torch alone; never talks to another rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["CutRow", "FlatSlice", "MatrixLayout", "even_ranges", "group_ranges", "matrix_shape"]


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """The matrix as which a tensor of ``shape`` is seen: ``(first, product of the rest)``.

    Raises
    ------
    ValueError
        For fewer than two dimensions.
    """
    if len(shape) < 2:
        raise ValueError(f"a matrix needs two dimensions, found shape {tuple(shape)}")
    rest = 1
    for size in shape[1:]:
        rest *= int(size)
    return int(shape[0]), rest


def even_ranges(numel: int, partition_numel: int, world_size: int) -> list[tuple[int, int]]:
    """The ranges ``[start, stop)`` of a ZeRO-3 parameter: rank ``k`` starts at ``k * partition_numel``.

    The last ranks hold less, or nothing, where the parameter was padded to a multiple of the world size.
    """
    if partition_numel * world_size < numel:
        raise ValueError(f"{world_size} partitions of {partition_numel} elements cannot hold {numel} elements")
    starts = [min(k * partition_numel, numel) for k in range(world_size)]
    return [(start, min(start + partition_numel, numel)) for start in starts]


def group_ranges(offset: int, numel: int, partition_numel: int, world_size: int) -> list[tuple[int, int]]:
    """The ranges ``[start, stop)`` of a ZeRO-1/2 parameter that lies at ``offset`` of its flattened group.

    Rank ``k`` holds the elements ``[k partition_numel, (k + 1) partition_numel)`` of the group, across the borders of
    parameters.
    """
    edges = [min(max(k * partition_numel - offset, 0), numel) for k in range(world_size + 1)]
    return list(itertools.pairwise(edges))


@dataclass(frozen=True)
class FlatSlice:
    """The elements ``[start, stop)`` of a row-major ``m x n`` matrix.

    A slice *touches* every row of which it holds at least one element. "The rows" of a slice are the touched
    ones, in order: an optional partial first row (``head``), full rows (``body``), an optional partial last row
    (``tail``). A slice that lies inside one row, and does not fill it, is all head. Flat tensors passed to the
    methods have exactly ``stop - start`` elements; padding is the caller's to cut off.

    Parameters
    ----------
    shape
        ``(m, n)``, both positive.
    start, stop
        ``0 <= start <= stop <= m n``. Equal values are an empty slice: it touches no row.
    """

    shape: tuple[int, int]
    start: int
    stop: int

    def __post_init__(self) -> None:
        rows, columns = self.shape
        if rows < 1 or columns < 1:
            raise ValueError(f"a matrix needs at least one row and one column, found shape {self.shape}")
        if not 0 <= self.start <= self.stop <= rows * columns:
            raise ValueError(f"the range [{self.start}, {self.stop}) does not lie in a matrix of shape {self.shape}")

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @cached_property
    def first_row(self) -> int:
        """Index in the matrix of the first touched row (for an empty slice, of the row at ``start``)."""
        return self.start // self.shape[1]

    @cached_property
    def end_row(self) -> int:
        """One past the index in the matrix of the last touched row."""
        return self.first_row if self.numel == 0 else -(-self.stop // self.shape[1])

    @cached_property
    def num_rows(self) -> int:
        """Number of touched rows."""
        return self.end_row - self.first_row

    @cached_property
    def head(self) -> tuple[int, int] | None:
        """Columns ``[c0, c1)`` held of the first touched row, or None where that row is full."""
        columns = self.shape[1]
        if self.numel == 0:
            return None
        first = self.start % columns
        last = min(columns, first + self.numel)
        return None if (first, last) == (0, columns) else (first, last)

    @cached_property
    def tail(self) -> tuple[int, int] | None:
        """Columns ``[0, c1)`` held of the last touched row, or None where it is full or is the head itself."""
        end = self.stop % self.shape[1]
        if end == 0 or self.numel == 0 or (self.num_rows == 1 and self.head is not None):
            return None
        return 0, end

    @cached_property
    def is_whole(self) -> bool:
        """Whether it is the whole matrix."""
        return self.numel == self.shape[0] * self.shape[1]

    def _parts(self, flat: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """Views of ``flat``: the head ``(c,)``, the body ``(rows, n)`` and the tail ``(c,)``."""
        if flat.numel() != self.numel:
            raise ValueError(f"a slice of {self.numel} elements was given a tensor of {flat.numel()}")
        if self.is_whole:
            return None, flat.view(self.shape), None
        head, tail = self.head, self.tail
        begin = head[1] - head[0] if head is not None else 0
        end = self.numel - (tail[1] if tail is not None else 0)
        body = flat[begin:end].view(-1, self.shape[1])
        return (flat[:begin] if head is not None else None), body, (flat[end:] if tail is not None else None)

    def project(self, flat: Tensor, basis: Tensor) -> Tensor:
        """This slice's share of ``G Q`` on the rows it touches.

        Parameters
        ----------
        flat
            The slice of ``G``, ``(numel,)``.
        basis
            ``Q``, ``(n, r)``, of the same dtype and device.

        Returns
        -------
        Tensor
            ``(num_rows, r)``. Body rows are final; the head and the tail are the sums over the columns held here
            and become final when the shares of all ranks that hold the row are added.
        """
        head, body, tail = self._parts(flat)
        if self.is_whole:
            return body @ basis
        out = flat.new_empty((self.num_rows, basis.shape[1]))
        first, last = int(head is not None), self.num_rows - int(tail is not None)
        if last > first:
            torch.mm(body, basis, out=out[first:last])
        if head is not None:
            begin, end = self._head_columns()
            torch.mv(basis[begin:end].t(), head, out=out[0])
        if tail is not None:
            torch.mv(basis[: tail.numel()].t(), tail, out=out[-1])
        return out

    def sketch(self, flat: Tensor, rows: Tensor) -> Tensor:
        """This slice's share of ``G^T X``; the sum over all slices is the product.

        Parameters
        ----------
        flat
            The slice of ``G``, ``(numel,)``.
        rows
            The touched rows of ``X``, ``(num_rows, r)``. A row that several slices touch is given to each of them.

        Returns
        -------
        Tensor
            ``(n, r)``; zero for an empty slice.
        """
        head, body, tail = self._parts(flat)
        first, last = int(head is not None), self.num_rows - int(tail is not None)
        out = body.t() @ rows[first:last]  # zero where there are no full rows
        if head is not None:
            begin, end = self._head_columns()
            out[begin:end].addr_(head, rows[0])
        if tail is not None:
            out[: tail.numel()].addr_(tail, rows[-1])
        return out

    def apply(self, flat: Tensor, rows: Tensor, basis: Tensor, *, alpha: float, beta: float = 1.0) -> None:
        """``W <- beta W + alpha A B^T`` in place on this slice.

        Parameters
        ----------
        flat
            The slice of ``W``, ``(numel,)``, changed in place.
        rows
            The touched rows of ``A``, ``(num_rows, r)``.
        basis
            ``B``, ``(n, r)``.
        alpha, beta
            Scalars, as in BLAS.
        """
        head, body, tail = self._parts(flat)
        first, last = int(head is not None), self.num_rows - int(tail is not None)
        if last > first:
            body.addmm_(rows[first:last], basis.t(), alpha=alpha, beta=beta)
        if head is not None:
            begin, end = self._head_columns()
            head.addmv_(basis[begin:end], rows[0], alpha=alpha, beta=beta)
        if tail is not None:
            tail.addmv_(basis[: tail.numel()], rows[-1], alpha=alpha, beta=beta)

    def row_squares(self, flat: Tensor) -> Tensor:
        """This slice's share of the squared norms of the rows it touches, ``(num_rows,)``; ``flat`` is ``(numel,)``."""
        head, body, tail = self._parts(flat)
        out = flat.new_empty(self.num_rows)
        first, last = int(head is not None), self.num_rows - int(tail is not None)
        if last > first:
            torch.linalg.vector_norm(body, dim=1, out=out[first:last])
        if head is not None:
            out[0] = torch.linalg.vector_norm(head)
        if tail is not None:
            out[-1] = torch.linalg.vector_norm(tail)
        return out.square_()

    def column_squares(self, flat: Tensor) -> Tensor:
        """This slice's share of the squared norms of all columns, ``(n,)``; ``flat`` is ``(numel,)``."""
        head, body, tail = self._parts(flat)
        out = torch.linalg.vector_norm(body, dim=0).square_() if body.shape[0] else flat.new_zeros(self.shape[1])
        if head is not None:
            begin, end = self._head_columns()
            out[begin:end] += head.square()
        if tail is not None:
            out[: tail.numel()] += tail.square()
        return out

    def add_scaled(
        self, flat: Tensor, other: Tensor, *, alpha: float, rows: Tensor | None = None, columns: Tensor | None = None
    ) -> None:
        """``W += alpha diag(rows) G``, or ``W += alpha G diag(columns)``, in place on this slice.

        Parameters
        ----------
        flat, other
            The slices of ``W``, changed in place, and ``G``, ``(numel,)`` each.
        rows, columns
            One of them: factors of the touched rows, ``(num_rows,)``, or of all columns, ``(n,)``.
        """
        for part, addend, factors in zip(
            self._parts(flat), self._parts(other), self._factors(rows, columns), strict=True
        ):
            if part is not None and addend is not None:
                part.addcmul_(addend, factors, value=alpha)

    def multiply(self, flat: Tensor, *, rows: Tensor | None = None, columns: Tensor | None = None) -> None:
        """``W <- diag(rows) W``, or ``W diag(columns)``, in place; the arguments are those of :meth:`add_scaled`."""
        for part, factors in zip(self._parts(flat), self._factors(rows, columns), strict=True):
            if part is not None:
                part.mul_(factors)

    def _factors(self, rows: Tensor | None, columns: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """What the head, the body and the tail are multiplied by, element by element."""
        if rows is not None:
            first, last = int(self.head is not None), self.num_rows - int(self.tail is not None)
            return rows[:1], rows[first:last].unsqueeze(1), rows[-1:]
        assert columns is not None
        begin, end = self.head if self.head is not None else (0, 0)
        tail = self.tail
        return columns[begin:end], columns, columns[: 0 if tail is None else tail[1]]

    def rowwise(self, rows: Tensor, matrix: Tensor) -> Tensor:
        """``A C`` for the touched rows of ``A``, with partial rows multiplied one by one.

        A row that several ranks hold has to stay bit-identical on all of them, and a BLAS may round a row
        differently in blocks of another height; the product of a single row does not depend on its neighbours.

        Parameters
        ----------
        rows
            ``(num_rows, r)``.
        matrix
            ``C``, ``(r, s)``.

        Returns
        -------
        Tensor
            ``(num_rows, s)``.
        """
        out = rows @ matrix
        for index in self.partial_rows():
            out[index] = matrix.t() @ rows[index]
        return out

    def partial_rows(self) -> list[int]:
        """Positions, among the touched rows, of those that are not held in full."""
        found = [0] if self.head is not None else []
        if self.tail is not None:
            found.append(self.num_rows - 1)
        return found

    def _head_columns(self) -> tuple[int, int]:
        head = self.head
        assert head is not None
        return head


@dataclass(frozen=True, slots=True)
class CutRow:
    """A row that a slice boundary cuts: held in parts by two or more ranks.

    Parameters
    ----------
    index
        Its position among the rows that this rank touches.
    ranks
        The ranks (numbers within the group) that hold a part of it, ascending; this rank is one of them.
    """

    index: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class MatrixLayout:
    """Who holds which range of one matrix. Compared by identity.

    Parameters
    ----------
    shape
        ``(m, n)``.
    ranges
        The range ``[start, stop)`` of each rank of the group: disjoint, ascending, covering the matrix.
        Empty ranges are allowed anywhere.
    rank
        This rank's number within the group.

    Raises
    ------
    ValueError
        If the ranges overlap, leave a gap or do not cover the matrix.
    """

    shape: tuple[int, int]
    ranges: tuple[tuple[int, int], ...]
    rank: int

    def __post_init__(self) -> None:
        position = 0
        for rank, (start, stop) in enumerate(self.ranges):
            if start == stop:
                continue
            if start != position or stop < start:
                raise ValueError(
                    f"rank {rank} holds [{start}, {stop}) of a matrix of which [0, {position}) is held before"
                )
            position = stop
        if position != self.shape[0] * self.shape[1]:
            raise ValueError(
                f"the ranks hold {position} of the {self.shape[0] * self.shape[1]} elements of {self.shape}"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranges)

    @cached_property
    def local(self) -> FlatSlice:
        """This rank's slice."""
        return self.slice_of(self.rank)

    def slice_of(self, rank: int) -> FlatSlice:
        """The slice of ``rank`` (its number within the group)."""
        start, stop = self.ranges[rank]
        return FlatSlice(self.shape, start, stop)

    def cut_rows(self) -> list[CutRow]:
        """The rows that this rank shares with others, in order: two at most."""
        local = self.local
        found = []
        for index in local.partial_rows():
            row = local.first_row + index
            ranks = self._holders(row)
            if len(ranks) > 1:
                found.append(CutRow(index, ranks))
        return found

    def counted_rows(self) -> list[int]:
        """Positions of the touched rows that this rank counts for the group: each row of the matrix once."""
        return self._counted_rows

    @cached_property
    def _counted_rows(self) -> list[int]:
        skipped = {cut.index for cut in self.cut_rows() if cut.ranks[0] != self.rank}
        return [index for index in range(self.local.num_rows) if index not in skipped]

    def _holders(self, row: int) -> tuple[int, ...]:
        begin, end = row * self.shape[1], (row + 1) * self.shape[1]
        low = high = self.rank
        # Ranges ascend, so the holders are neighbours of this rank (with empty ranges between them, perhaps).
        while low > 0 and (self.ranges[low - 1][1] > begin or self.ranges[low - 1][0] == self.ranges[low - 1][1]):
            low -= 1
        while high + 1 < self.world_size and (
            self.ranges[high + 1][0] < end or self.ranges[high + 1][0] == self.ranges[high + 1][1]
        ):
            high += 1
        return tuple(
            rank for rank in range(low, high + 1) if max(self.ranges[rank][0], begin) < min(self.ranges[rank][1], end)
        )
