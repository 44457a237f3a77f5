"""From the tensors of a ZeRO-3 state to ranges of logical tensors, and back.

Imports torch, NumPy and this package; reads attributes of DeepSpeed's objects through :mod:`ds_galore.zero.binding`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_galore.checkpoint.codecs.base import Bits
from ds_galore.checkpoint.errors import DamageError
from ds_galore.optim.galore import GaLoreAdamW
from ds_galore.optim.matrices import RIGHT, Matrix, Side
from ds_galore.zero.binding import FlatBinding, bind_zero3, full_shape

__all__ = ["Piece", "assemble", "place", "state_pieces", "to_bits"]

#: safetensors' names of torch's dtypes; others are stored as bytes.
NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Piece:
    """A part of a tensor of this rank that is a range of a logical one.

    Parameters
    ----------
    name, shape
        Of the logical tensor.
    start
        Where in it the range begins.
    offset, numel
        Where in this rank's tensor, and how long.
    stored
        Whether this rank writes it; of a replicated tensor one rank does.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    offset: int
    numel: int
    stored: bool = True


def to_bits(tensor: Tensor) -> tuple[Bits, str]:
    """A tensor's bit patterns on the host, ``(numel,)``, a copy of its own; and the dtype's name."""
    flat = tensor.detach().reshape(-1).to("cpu", copy=True).contiguous()
    name = NAMES.get(flat.dtype)
    if name is None:
        return flat.view(torch.uint8).numpy(), "U8"
    width = flat.element_size()
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    return flat.view(signed).numpy().view(f"u{width}"), name


def state_pieces(engine: Any) -> dict[int, list[Piece]]:
    """By address, the tensors of a ZeRO-3 optimizer's state that consist of ranges of parameters' states."""
    zero, optimizer = engine.optimizer, engine.basic_optimizer
    found: dict[int, list[Piece]] = {}
    parameters = [p for group in zero.fp16_groups for p in group]
    for flat in zero.fp32_partitioned_groups_flat:
        binding = bind_zero3(flat, parameters)
        found[flat.data_ptr()] = _split(binding, "fp32")
        state: Mapping[str, Any] = optimizer.state.get(flat, {})
        if isinstance(optimizer, GaLoreAdamW):
            _low_rank(optimizer, flat, state, found)
            continue
        for key, value in state.items():
            if isinstance(value, Tensor) and value.numel() == flat.numel() and value.numel() > 1:
                found[value.data_ptr()] = _split(binding, key)
    found.pop(0, None)  # tensors without elements share that address
    return found


def _split(binding: FlatBinding, key: str) -> list[Piece]:
    pieces = []
    for placement, name in zip(binding.placements, binding.names, strict=True):
        start, stop = placement.ranges[binding.group.rank]
        shape = full_shape(placement.parameter)
        pieces.append(Piece(f"{name}/{key}", shape, start, placement.offset, stop - start))
    return pieces


def _low_rank(optimizer: GaLoreAdamW, flat: Tensor, state: Mapping[str, Any], found: dict[int, list[Piece]]) -> None:
    plan = optimizer.plan_of(flat)
    if plan is None:
        return
    for each in plan.plain:
        layout = next(piece for piece in found[flat.data_ptr()] if piece.name == f"{each.name}/fp32")
        for key in ("exp_avg", "exp_avg_sq"):
            if each.name in state:
                piece = Piece(f"{each.name}/{key}", layout.shape, layout.start, 0, layout.numel)
                found[state[each.name][key].data_ptr()] = [piece]
    for batch in plan.batches:
        for matrix in batch.matrices:
            if matrix.name in state:
                for key in ("exp_avg", "exp_avg_sq", "projector"):
                    found[state[matrix.name][key].data_ptr()] = [_of_matrix(batch.side, matrix, key)]


def _of_matrix(side: Side, matrix: Matrix, key: str) -> Piece:
    """Rows by which a matrix's moments and projectors are spread: those touched, equal parts, or all."""
    layout, rank = matrix.layout, matrix.rank
    rows, columns = layout.shape
    name = f"{matrix.name}/{key}"
    if (side is RIGHT) == (key != "projector"):  # the rows that this rank touches
        first = layout.local.first_row
        return Piece(name, (rows, rank), first * rank, 0, layout.local.num_rows * rank)
    if side is RIGHT and not matrix.sharded:
        owner = matrix.index % layout.world_size
        return Piece(name, (columns, rank), 0, 0, columns * rank, stored=layout.rank == owner)
    count = -(-columns // layout.world_size)
    first = min(layout.rank * count, columns)
    return Piece(name, (columns, rank), first * rank, 0, (min(first + count, columns) - first) * rank)


def place(name: str, tensor: Tensor, known: Mapping[int, list[Piece]]) -> list[Piece]:
    """The pieces of a tensor; of one that is nobody's part, itself under its own name."""
    pieces = known.get(tensor.data_ptr()) if tensor.numel() else None
    return pieces or [Piece(name, tuple(tensor.shape), 0, 0, tensor.numel())]


def assemble(description: Mapping[str, Any], bits: Callable[[str, int, int], Bits]) -> Tensor:
    """A tensor from its description in a state file.

    Parameters
    ----------
    description
        ``dtype``, ``shape`` and ``pieces``, ``[name, start, offset, numel]`` each. Elements of no piece are padding: 0.
    bits
        Gives a range ``[start, stop)`` of a logical tensor.

    Raises
    ------
    DamageError
        If the description is impossible.
    """
    dtype, shape = getattr(torch, str(description["dtype"]), None), [int(size) for size in description["shape"]]
    if not isinstance(dtype, torch.dtype):
        raise DamageError(f"a state file names the dtype {description['dtype']!r}")
    flat = torch.zeros(math.prod(shape), dtype=dtype)
    width = flat.element_size() if dtype in NAMES else 1
    view = flat.view(torch.uint8).numpy().view(f"u{width}")
    for name, start, offset, numel in description["pieces"]:
        scale = flat.element_size() // width
        part = bits(name, start * scale, (start + numel) * scale)
        if part.dtype.itemsize != width or (offset + numel) * scale > view.size:
            raise DamageError(f"a state file places {name} where it does not fit")
        view[offset * scale : (offset + numel) * scale] = np.ascontiguousarray(part)
    return flat.view(shape)
