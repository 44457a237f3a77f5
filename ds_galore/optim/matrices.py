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

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ds_galore.zero.exchange import CutRowExchange
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
    index
        Its number among all projected matrices of the optimizer, the same on all ranks.
    phase
        On which step of the gap it refreshes.
    sharded
        Whether a right projector is kept in parts.
    projector_dtype
        What the projector is stored and sent as.
    """

    name: str
    layout: MatrixLayout
    offset: int
    rank: int
    index: int
    phase: int
    sharded: bool
    projector_dtype: torch.dtype

    def narrow(self, flat: Tensor) -> Tensor:
        """This rank's elements of the matrix in a flat tensor: a view ``(numel,)``."""
        return flat.view(-1).narrow(0, self.offset, self.layout.local.numel)


def shard_rows(rows: int, world_size: int) -> int:
    """How many of ``rows`` a rank holds when they are spread evenly; the last ranks' are padded with zero rows."""
    return -(-rows // world_size)


def pad_rows(block: Tensor, rows: int) -> Tensor:
    """``block`` with zero rows appended up to ``rows``."""
    missing = rows - block.shape[0]
    return block if missing == 0 else torch.cat([block, block.new_zeros((missing, block.shape[1]))])


def gather_rows(group: RankGroup, shards: Sequence[Tensor], rows: Sequence[int], guard: Guard) -> list[Tensor]:
    """Whole blocks ``(rows[i], r)`` from the evenly spread ``shards[i]``, ``(shard_rows, r)``, in one collective."""
    sizes = [shard.numel() for shard in shards]
    packed = guard.run(
        lambda: torch.cat([shard.reshape(-1) for shard in shards]), lambda: shards[0].new_zeros(sum(sizes))
    )
    parts = torch.split(group.all_gather(packed), sizes, dim=1)
    return [part.reshape(-1, shard.shape[1])[:count] for part, shard, count in zip(parts, shards, rows, strict=True)]


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
    def projector_shape(self, matrix: Matrix) -> tuple[int, int]:
        """Shape of the projector as it is stored on this rank."""

    @abstractmethod
    def share_shape(self, matrix: Matrix) -> tuple[int, int]:
        """Shape of what :meth:`share` returns on this rank."""

    @abstractmethod
    def store(self, matrix: Matrix, basis: Tensor, group: RankGroup) -> Tensor:
        """What this rank keeps of a whole basis ``(basis_rows, r)``: a tensor of its own, in the projector's dtype."""

    @abstractmethod
    def load(
        self,
        matrices: Sequence[Matrix],
        states: Sequence[State],
        group: RankGroup,
        guard: Guard,
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """The bases in ``dtype``, whole on the right, the touched rows on the left. Collective for sharded ones."""

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
        """``Q_old^T Q_new``, ``(r, r)``, the same on all ranks. Collective on the left."""

    @abstractmethod
    def moment_product(self, matrix: Matrix, moment: Tensor, square: Tensor) -> Tensor:
        """``moment @ square`` for moments ``(rows, r)`` and ``(r, r)``; rows on several ranks stay identical."""


class _Right(Side):
    name = "right"

    def basis_rows(self, matrix: Matrix) -> int:
        return matrix.layout.shape[1]

    def moment_shape(self, matrix: Matrix) -> tuple[int, int]:
        return matrix.layout.local.num_rows, matrix.rank

    def projector_shape(self, matrix: Matrix) -> tuple[int, int]:
        rows = self.basis_rows(matrix)
        return (shard_rows(rows, matrix.layout.world_size) if matrix.sharded else rows), matrix.rank

    def share_shape(self, matrix: Matrix) -> tuple[int, int]:
        return self.moment_shape(matrix)

    def store(self, matrix: Matrix, basis: Tensor, group: RankGroup) -> Tensor:
        if matrix.sharded:
            count = shard_rows(basis.shape[0], group.world_size)
            basis = pad_rows(basis[group.rank * count : (group.rank + 1) * count], count)
        return basis.to(matrix.projector_dtype, copy=True)

    def load(
        self,
        matrices: Sequence[Matrix],
        states: Sequence[State],
        group: RankGroup,
        guard: Guard,
        dtype: torch.dtype,
    ) -> list[Tensor]:
        stored: list[Tensor] = [state["projector"] for state in states]
        parts = [index for index, matrix in enumerate(matrices) if matrix.sharded]
        if parts:
            rows = [self.basis_rows(matrices[index]) for index in parts]
            whole = gather_rows(group, [stored[index] for index in parts], rows, guard)
            for index, block in zip(parts, whole, strict=True):
                stored[index] = block
        return [block.to(dtype) for block in stored]

    def share(self, matrix: Matrix, grad: Tensor, basis: Tensor) -> Tensor:
        return matrix.layout.local.project(grad, basis)

    def combine(
        self, matrices: Sequence[Matrix], shares: Sequence[Tensor], group: RankGroup, guard: Guard
    ) -> list[Tensor]:
        _cut_rows(tuple(matrix.layout for matrix in matrices)).run(group, shares)
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
            lambda: [after.new_zeros((matrix.rank, matrix.rank)) for matrix, after in zip(matrices, new, strict=True)],
        )

    def moment_product(self, matrix: Matrix, moment: Tensor, square: Tensor) -> Tensor:
        return matrix.layout.local.rowwise(moment, square)


class _Left(Side):
    name = "left"

    def basis_rows(self, matrix: Matrix) -> int:
        return matrix.layout.shape[0]

    def moment_shape(self, matrix: Matrix) -> tuple[int, int]:
        return shard_rows(matrix.layout.shape[1], matrix.layout.world_size), matrix.rank

    def projector_shape(self, matrix: Matrix) -> tuple[int, int]:
        return matrix.layout.local.num_rows, matrix.rank

    def share_shape(self, matrix: Matrix) -> tuple[int, int]:
        return matrix.layout.shape[1], matrix.rank

    def store(self, matrix: Matrix, basis: Tensor, group: RankGroup) -> Tensor:
        local = matrix.layout.local
        return basis[local.first_row : local.end_row].to(matrix.projector_dtype, copy=True)

    def load(
        self,
        matrices: Sequence[Matrix],
        states: Sequence[State],
        group: RankGroup,
        guard: Guard,
        dtype: torch.dtype,
    ) -> list[Tensor]:
        return [state["projector"].to(dtype) for state in states]

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

        numbers = [matrix.rank**2 for matrix in matrices]
        summed = group.all_reduce(guard.run(local, lambda: new[0].new_zeros(sum(numbers))))
        return [part.view(matrix.rank, -1) for part, matrix in zip(torch.split(summed, numbers), matrices, strict=True)]

    def moment_product(self, matrix: Matrix, moment: Tensor, square: Tensor) -> Tensor:
        return moment @ square


@lru_cache(maxsize=256)
def _cut_rows(layouts: tuple[MatrixLayout, ...]) -> CutRowExchange:
    return CutRowExchange(layouts)


RIGHT: Side = _Right()
LEFT: Side = _Left()
SIDES: dict[str, Side] = {side.name: side for side in (RIGHT, LEFT)}
