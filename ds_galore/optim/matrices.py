"""One projected matrix as a rank sees it, and the two sides from which it can be projected.

A *side* answers what the walker in :mod:`.galore` and the refresh in :mod:`.refresh` need to know: which tensors make
up the state, which product lowers a gradient, how the ranks' shares become whole, and which two factors make up the
update. With ``Q`` of ``n x r`` (right) or ``P`` of ``m x r`` (left):

=====  ==================================  ====================================  ==============================
side   low-rank gradient                   its parts become whole by             projector
=====  ==================================  ====================================  ==============================
right  ``G Q``, the touched rows           cut rows, between neighbours          whole, or ``1/W`` and gathered
left   ``(P^T G)^T``, ``1/W`` of n rows    reduce-scatter; the direction is      the rows that this rank
                                           gathered again                        touches: partitioned as ``W``
=====  ==================================  ====================================  ==============================

Imports torch and :mod:`ds_galore.zero`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_galore.optim.formats import RowFormat
from ds_galore.optim.noise import gaussian, key_of
from ds_galore.zero.exchange import cut_row_exchange
from ds_galore.zero.group import Guard, RankGroup
from ds_galore.zero.layout import MatrixLayout

__all__ = ["LEFT", "RIGHT", "SIDES", "Matrix", "Side", "State"]

#: The state of one parameter: numbers, and tensors on the device of its weights.
State = dict[str, Any]


@dataclass(frozen=True)
class Matrix:
    """A projected matrix: what does not change from step to step.

    Parameters
    ----------
    name
        The parameter's name.
    layout
        Who holds which range.
    offset
        Where this rank's range begins in the flat tensor.
    rank
        Of the projection.
    energy
        The share of the gradient's energy by which the rank is chosen, up to ``rank``; None where it is fixed.
    index
        Its number among all projected matrices of the optimizer, the same on all ranks.
    number
        Its number among all parameters of the optimizer.
    phase, gap
        On which step of how many it refreshes.
    sharded
        Whether a right projector is kept in parts.
    projector
        What the projector is stored and sent as; None where it is drawn anew at each step.
    seed
        Of random bases.
    unit_columns
        Whether the columns of random bases have length 1, in the mean; else their rows do, as APOLLO's.
    """

    name: str
    layout: MatrixLayout
    offset: int
    rank: int
    energy: float | None
    index: int
    number: int
    phase: int
    gap: int
    sharded: bool
    projector: RowFormat | None
    seed: int = 0
    unit_columns: bool = True

    def at_rank(self, rank: int) -> Matrix:
        """The same matrix with another rank."""
        return self if rank == self.rank else replace(self, rank=rank)

    @property
    def owner(self) -> int:
        """The rank that stores what all ranks have."""
        return self.index % self.layout.world_size

    def narrow(self, flat: Tensor) -> Tensor:
        """This rank's elements of the matrix in a flat tensor: a view ``(numel,)``."""
        numel = self.layout.local.numel
        return flat.view(-1) if flat.numel() == numel else flat.view(-1).narrow(0, self.offset, numel)


def shard_rows(rows: int, world_size: int) -> int:
    """How many of ``rows`` a rank holds when they are spread evenly; the last ranks' are padded with zero rows."""
    return -(-rows // world_size)


def pad_rows(block: Tensor, rows: int) -> Tensor:
    """``block`` with zero rows appended up to ``rows``."""
    missing = rows - block.shape[0]
    return block if missing == 0 else torch.cat([block, block.new_zeros((missing, block.shape[1]))])


def gather_rows(group: RankGroup, shards: Sequence[Tensor], rows: Sequence[int], guard: Guard) -> list[Tensor]:
    """Whole blocks ``(rows[i], r)`` from the evenly spread ``shards[i]``, ``(shard_rows, r)``, in one collective.

    Of several dtypes, they travel as bytes.
    """
    mixed = len({shard.dtype for shard in shards}) > 1
    views = [shard.contiguous().view(torch.uint8) if mixed else shard for shard in shards]
    sizes = [view.numel() for view in views]
    packed = guard.run(lambda: torch.cat([view.reshape(-1) for view in views]), lambda: views[0].new_zeros(sum(sizes)))
    parts = torch.split(group.all_gather(packed), sizes, dim=1)
    whole = [part.reshape(-1, view.shape[1])[:count] for part, view, count in zip(parts, views, rows, strict=True)]
    return [block.clone().view(shard.dtype) for block, shard in zip(whole, shards, strict=True)] if mixed else whole


def _parts_of(matrix: Matrix, state: State) -> dict[str, Tensor]:
    """By suffix, the tensors that a projector is stored as."""
    assert matrix.projector is not None
    return {suffix: state[f"projector{suffix}"] for suffix in matrix.projector.parts(matrix.rank)}


def random_basis(matrix: Matrix, rows: int, draw: int, like: Tensor) -> Tensor:
    """The ``draw``-th random basis of a matrix, ``(rows, rank)``: Gaussian, nearly orthogonal where rank << rows."""
    scale = 1.0 / math.sqrt(rows if matrix.unit_columns else matrix.rank)
    key = key_of(matrix.seed, matrix.number, draw)
    return gaussian(key, rows, matrix.rank, like.device).mul_(scale).to(like.dtype)


class Side(ABC):
    """What differs between projecting from the right and from the left."""

    name: str

    @abstractmethod
    def basis_rows(self, matrix: Matrix) -> int:
        """Rows of the whole basis: n on the right, m on the left."""

    @abstractmethod
    def moment_shape(self, matrix: Matrix) -> tuple[int, int]:
        """Shape of the moments, and of the low-rank gradient once it is whole, on this rank."""

    @abstractmethod
    def moment_rows(self, matrix: Matrix) -> tuple[int, int, int]:
        """Where this rank's rows of the moments begin, how many they are without padding, and of how many in all."""

    @abstractmethod
    def counted(self, matrix: Matrix) -> slice:
        """Which of this rank's rows of the moments it counts for the group: each row once."""

    @abstractmethod
    def projector_rows(self, matrix: Matrix) -> tuple[int, int]:
        """Where this rank's rows of the stored projector begin, and how many it stores, padding included."""

    @abstractmethod
    def share_shape(self, matrix: Matrix) -> tuple[int, int]:
        """Shape of what :meth:`share` returns on this rank."""

    def settle(self, matrix: Matrix, basis: Tensor, group: RankGroup, key: int) -> tuple[Tensor, dict[str, Tensor]]:
        """What a new whole basis ``(basis_rows, r)`` comes to: as :meth:`load` will give it, and what is stored.

        Parameters
        ----------
        key
            Of the noise of stochastic rounding.
        """
        assert matrix.projector is not None
        parts = matrix.projector.encode(basis, key, 0)
        begin, count = self.projector_rows(matrix)
        stored = {
            f"projector{suffix}": pad_rows(part[begin : begin + count], count).clone() for suffix, part in parts.items()
        }
        return self.touched(matrix, matrix.projector.decode(parts, matrix.rank, basis.dtype)), stored

    @abstractmethod
    def touched(self, matrix: Matrix, basis: Tensor) -> Tensor:
        """Of a whole basis what a step needs: all of it on the right, the touched rows on the left."""

    def load(
        self, matrices: Sequence[Matrix], states: Sequence[State], group: RankGroup, guard: Guard, like: Tensor
    ) -> list[Tensor]:
        """The bases in the dtype and on the device of ``like``, whole on the right, the touched rows on the left.

        Collective where they are stored in parts.
        """
        found: dict[int, Tensor] = {}
        gathered = [index for index, matrix in enumerate(matrices) if matrix.sharded and matrix.projector is not None]
        if gathered:
            parts = [_parts_of(matrices[index], states[index]) for index in gathered]
            flat = [part for each in parts for part in each.values()]
            rows = [self.basis_rows(matrices[index]) for index, each in zip(gathered, parts, strict=True) for _ in each]
            whole = iter(gather_rows(group, flat, rows, guard))
            parts = [{suffix: next(whole) for suffix in each} for each in parts]
            with guard:
                for index, each in zip(gathered, parts, strict=True):
                    matrix = matrices[index]
                    if matrix.projector is not None:
                        found[index] = matrix.projector.decode(each, matrix.rank, like.dtype)
        for index, (matrix, state) in enumerate(zip(matrices, states, strict=True)):
            if index not in found:
                found[index] = guard.run(
                    partial(self._local_basis, matrix, state, like),
                    partial(like.new_zeros, (self._local_rows(matrix), matrix.rank)),
                )
        return [found[index] for index in range(len(matrices))]

    def _local_rows(self, matrix: Matrix) -> int:
        """Rows of what :meth:`load` gives."""
        return self.basis_rows(matrix) if self is RIGHT else matrix.layout.local.num_rows

    def _local_basis(self, matrix: Matrix, state: State, like: Tensor) -> Tensor:
        if matrix.projector is None:
            return self.touched(matrix, random_basis(matrix, self.basis_rows(matrix), state["draw"], like))
        return matrix.projector.decode(_parts_of(matrix, state), matrix.rank, like.dtype)

    @abstractmethod
    def share(self, matrix: Matrix, grad: Tensor, basis: Tensor) -> Tensor:
        """This rank's share of the low-rank gradient: local."""

    @abstractmethod
    def combine(
        self, matrices: Sequence[Matrix], shares: Sequence[Tensor], group: RankGroup, guard: Guard
    ) -> list[Tensor]:
        """The low-rank gradients ``moment_shape`` from all ranks' shares. Collective."""

    @abstractmethod
    def spread(
        self, matrices: Sequence[Matrix], directions: Sequence[Tensor], group: RankGroup, guard: Guard
    ) -> list[Tensor]:
        """The directions as :meth:`apply` needs them. Collective on the left."""

    @abstractmethod
    def apply(
        self, matrix: Matrix, weight: Tensor, direction: Tensor, basis: Tensor, alpha: float, beta: float
    ) -> None:
        """Change this rank's elements of the weight in place: local."""

    @abstractmethod
    def transitions(
        self, matrices: Sequence[Matrix], old: Sequence[Tensor], new: Sequence[Tensor], group: RankGroup, guard: Guard
    ) -> list[Tensor]:
        """``Q_old^T Q_new``, ``(old rank, new rank)``, of bases as :meth:`load` gives them. Collective on the left."""

    @abstractmethod
    def moment_product(self, matrix: Matrix, moment: Tensor, square: Tensor) -> Tensor:
        """``moment @ square`` of ``(rows, r)`` and ``(r, s)``; rows on several ranks stay identical."""


class _Right(Side):
    name = "right"

    def basis_rows(self, matrix: Matrix) -> int:
        return matrix.layout.shape[1]

    def moment_shape(self, matrix: Matrix) -> tuple[int, int]:
        return matrix.layout.local.num_rows, matrix.rank

    def moment_rows(self, matrix: Matrix) -> tuple[int, int, int]:
        local = matrix.layout.local
        return local.first_row, local.num_rows, matrix.layout.shape[0]

    def counted(self, matrix: Matrix) -> slice:
        rows = matrix.layout.counted_rows()
        return slice(rows[0], rows[-1] + 1) if rows else slice(0)

    def projector_rows(self, matrix: Matrix) -> tuple[int, int]:
        rows = self.basis_rows(matrix)
        if not matrix.sharded:
            return 0, rows
        count = shard_rows(rows, matrix.layout.world_size)
        return min(matrix.layout.rank * count, rows), count

    def share_shape(self, matrix: Matrix) -> tuple[int, int]:
        return self.moment_shape(matrix)

    def touched(self, matrix: Matrix, basis: Tensor) -> Tensor:
        return basis

    def share(self, matrix: Matrix, grad: Tensor, basis: Tensor) -> Tensor:
        return matrix.layout.local.project(grad, basis)

    def combine(
        self, matrices: Sequence[Matrix], shares: Sequence[Tensor], group: RankGroup, guard: Guard
    ) -> list[Tensor]:
        cut_row_exchange(tuple(matrix.layout for matrix in matrices)).run(group, shares)
        return list(shares)

    def spread(
        self, matrices: Sequence[Matrix], directions: Sequence[Tensor], group: RankGroup, guard: Guard
    ) -> list[Tensor]:
        return list(directions)

    def apply(
        self, matrix: Matrix, weight: Tensor, direction: Tensor, basis: Tensor, alpha: float, beta: float
    ) -> None:
        matrix.layout.local.apply(weight, direction, basis, alpha=alpha, beta=beta)

    def transitions(
        self, matrices: Sequence[Matrix], old: Sequence[Tensor], new: Sequence[Tensor], group: RankGroup, guard: Guard
    ) -> list[Tensor]:
        return guard.run(
            lambda: [before.t() @ after for before, after in zip(old, new, strict=True)],
            lambda: [
                after.new_zeros((before.shape[1], after.shape[1])) for before, after in zip(old, new, strict=True)
            ],
        )

    def moment_product(self, matrix: Matrix, moment: Tensor, square: Tensor) -> Tensor:
        return matrix.layout.local.rowwise(moment, square)


class _Left(Side):
    name = "left"

    def basis_rows(self, matrix: Matrix) -> int:
        return matrix.layout.shape[0]

    def moment_shape(self, matrix: Matrix) -> tuple[int, int]:
        return shard_rows(matrix.layout.shape[1], matrix.layout.world_size), matrix.rank

    def moment_rows(self, matrix: Matrix) -> tuple[int, int, int]:
        total, count = matrix.layout.shape[1], self.moment_shape(matrix)[0]
        first = min(matrix.layout.rank * count, total)
        return first, min(first + count, total) - first, total

    def counted(self, matrix: Matrix) -> slice:
        return slice(self.moment_rows(matrix)[1])

    def projector_rows(self, matrix: Matrix) -> tuple[int, int]:
        return matrix.layout.local.first_row, matrix.layout.local.num_rows

    def share_shape(self, matrix: Matrix) -> tuple[int, int]:
        return matrix.layout.shape[1], matrix.rank

    def touched(self, matrix: Matrix, basis: Tensor) -> Tensor:
        local = matrix.layout.local
        return basis[local.first_row : local.end_row]

    def share(self, matrix: Matrix, grad: Tensor, basis: Tensor) -> Tensor:
        return matrix.layout.local.sketch(grad, basis)

    def combine(
        self, matrices: Sequence[Matrix], shares: Sequence[Tensor], group: RankGroup, guard: Guard
    ) -> list[Tensor]:
        counts = [self.moment_shape(matrix)[0] for matrix in matrices]
        sizes = [count * matrix.rank for count, matrix in zip(counts, matrices, strict=True)]

        def pack() -> Tensor:
            padded = [pad_rows(share, count * group.world_size) for share, count in zip(shares, counts, strict=True)]
            return torch.cat([block.view(group.world_size, -1) for block in padded], dim=1)

        packed = guard.run(pack, lambda: shares[0].new_zeros((group.world_size, sum(sizes))))
        parts = torch.split(group.reduce_scatter(packed), sizes)
        return [part.view(count, -1) for part, count in zip(parts, counts, strict=True)]

    def spread(
        self, matrices: Sequence[Matrix], directions: Sequence[Tensor], group: RankGroup, guard: Guard
    ) -> list[Tensor]:
        return gather_rows(group, directions, [matrix.layout.shape[1] for matrix in matrices], guard)

    def apply(
        self, matrix: Matrix, weight: Tensor, direction: Tensor, basis: Tensor, alpha: float, beta: float
    ) -> None:
        matrix.layout.local.apply(weight, basis, direction, alpha=alpha, beta=beta)

    def transitions(
        self, matrices: Sequence[Matrix], old: Sequence[Tensor], new: Sequence[Tensor], group: RankGroup, guard: Guard
    ) -> list[Tensor]:
        def local() -> Tensor:
            shares = []
            for matrix, before, after in zip(matrices, old, new, strict=True):
                counted = matrix.layout.counted_rows()
                shares.append((before[counted].t() @ after[counted]).view(-1))
            return torch.cat(shares)

        shapes = [(before.shape[1], after.shape[1]) for before, after in zip(old, new, strict=True)]
        numbers = [rows * columns for rows, columns in shapes]
        summed = group.all_reduce(guard.run(local, lambda: new[0].new_zeros(sum(numbers))))
        return [part.view(shape) for part, shape in zip(torch.split(summed, numbers), shapes, strict=True)]

    def moment_product(self, matrix: Matrix, moment: Tensor, square: Tensor) -> Tensor:
        return moment @ square


RIGHT: Side = _Right()
LEFT: Side = _Left()
SIDES: dict[str, Side] = {side.name: side for side in (RIGHT, LEFT)}
