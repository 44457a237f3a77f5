"""The tensors of an optimizer's state: their shapes on this rank, and of which logical tensors they are ranges.

Creating, checking, saving and resharding a state all go by this one description. Imports torch and its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ds_galore.optim.formats import Dynamic
from ds_galore.optim.matrices import Matrix, Side, State
from ds_galore.optim.walks import Plain, Slot
from ds_galore.tools.formats import BLOCK
from ds_galore.zero.layout import MatrixLayout

__all__ = ["StateTensor", "effective", "plain_tensors", "projected_tensors"]


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a parameter's state.

    Parameters
    ----------
    key
        In the parameter's state.
    shape, dtype
        On this rank.
    logical
        The shape of the logical tensor.
    start, numel
        The range of it that this rank's tensor begins with; what follows is padding.
    stored
        Whether this rank writes it to checkpoints: of what all ranks have, one does.
    moment
        Whether it is a moment in floating point, which may be stored in fewer bits by choice.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    logical: tuple[int, ...]
    start: int
    numel: int
    stored: bool = True
    moment: bool = False


def effective(matrix: Matrix, state: State) -> Matrix:
    """A matrix with the rank that it has at present, where that is chosen by energy."""
    return matrix.at_rank(int(state.get("rank", matrix.rank)))


def projected_tensors(side: Side, matrix: Matrix, slots: list[Slot]) -> Iterator[StateTensor]:
    """The state of a projected matrix, the projector last."""
    rows, rank = side.moment_shape(matrix)[0], matrix.rank
    first, count, total = side.moment_rows(matrix)
    owns = matrix.layout.rank == matrix.owner
    for slot in slots:
        for suffix, (width, dtype) in slot.format.parts(1 if slot.extent == "row" else rank).items():
            key = slot.key + suffix
            if slot.extent == "column":
                yield StateTensor(key, (1, width), dtype, (1, width), 0, width, stored=owns)
                continue
            moment = slot.extent == "element" and dtype.is_floating_point and not suffix
            yield StateTensor(key, (rows, width), dtype, (total, width), first * width, count * width, moment=moment)
    if matrix.projector is None:
        return
    begin, kept = side.projector_rows(matrix)
    whole = side.basis_rows(matrix)
    real = min(begin + kept, whole) - begin
    everywhere = side.name == "right" and not matrix.sharded
    for suffix, (width, dtype) in matrix.projector.parts(rank).items():
        yield StateTensor(
            f"projector{suffix}",
            (kept, width),
            dtype,
            (whole, width),
            begin * width,
            real * width,
            stored=owns or not everywhere,
        )


def plain_tensors(plain: Plain, slots: list[Slot], shape: tuple[int, ...]) -> Iterator[StateTensor]:
    """The state of a parameter that is not projected.

    Parameters
    ----------
    shape
        Of what is kept for each element on this rank.
    """
    owns = plain.rank == 0
    for slot in slots:
        if slot.extent == "element":
            dtype = slot.format.parts(1)[""][1]
            moment = dtype.is_floating_point
            yield StateTensor(slot.key, shape, dtype, plain.shape, plain.start, plain.numel, moment=moment)
            if isinstance(slot.format, Dynamic):
                assert plain.blocks is not None
                yield _by_rows(f"{slot.key}_absmax", plain.blocks, torch.float32)
            continue
        assert plain.matrix is not None
        dtype = slot.format.parts(1)[""][1]
        if slot.extent == "row":
            yield _by_rows(slot.key, plain.matrix, dtype)
        else:
            columns = plain.matrix.shape[1]
            yield StateTensor(slot.key, (1, columns), dtype, (1, columns), 0, columns, stored=owns)


def _by_rows(key: str, layout: MatrixLayout, dtype: torch.dtype) -> StateTensor:
    local = layout.local
    shape = (local.num_rows, 1)
    return StateTensor(key, shape, dtype, (layout.shape[0], 1), local.first_row, local.num_rows)


def block_layout(shape: tuple[int, ...], ranges: tuple[tuple[int, int], ...], rank: int) -> MatrixLayout:
    """The layout of a parameter seen as rows of 256 elements, the last one filled up by the rank that holds its end."""
    numel = math.prod(shape)
    padded = -(-numel // BLOCK) * BLOCK
    filled = tuple((start, padded if stop == numel and stop > start else stop) for start, stop in ranges)
    return MatrixLayout((padded // BLOCK, BLOCK), filled, rank)
