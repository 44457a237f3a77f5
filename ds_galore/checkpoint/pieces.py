"""From the tensors of a DeepSpeed engine's state to ranges of logical tensors, and back.

Imports torch, NumPy and this package; what it reads of DeepSpeed's objects comes from :mod:`ds_galore.zero.binding`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_galore.checkpoint.codecs.base import Bits
from ds_galore.checkpoint.errors import DamageError
from ds_galore.errors import DsGaloreError
from ds_galore.optim.optimizer import LowRankOptimizer
from ds_galore.zero.binding import FlatParts, flat_parts, full_shape, inner_optimizer

__all__ = [
    "MASTER",
    "WEIGHT",
    "Piece",
    "Read",
    "StateMap",
    "assemble",
    "describe",
    "frozen_pieces",
    "low_rank_pieces",
    "rounded_weights",
    "to_bits",
]

#: The last part of a logical tensor's name: fp32 master weights, and weights that have no master.
MASTER, WEIGHT = "fp32", "weight"

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
_DTYPES = {name: dtype for dtype, name in NAMES.items()}
#: Called with a logical tensor's name, ``start``, ``stop`` and an array to put the words in: see :func:`assemble`.
Read = Callable[[str, int, int, Bits], tuple[Bits, str]]
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
    moment
        Whether it is an optimizer's moment, which may be stored in fewer bits by choice.
    frozen
        Whether it is a weight that is not trained.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    offset: int
    numel: int
    stored: bool = True
    moment: bool = False
    frozen: bool = False


def to_bits(tensor: Tensor) -> tuple[Bits, str]:
    """The bit patterns of a contiguous tensor on the host, ``(numel,)``, sharing its memory; and the dtype's name."""
    flat = tensor.detach().reshape(-1)
    name = NAMES.get(flat.dtype)
    if name is None:
        return flat.view(torch.uint8).numpy(), "U8"
    return flat.view(_WORDS[flat.element_size()]).numpy().view(f"u{flat.element_size()}"), name


class StateMap:
    """Knows of which logical tensors the tensors of an engine's state dicts are parts.

    Parameters
    ----------
    engine
        DeepSpeed's.
    rounded
        Names of parameters whose weights are their masters, rounded: see :func:`rounded_weights`.
    """

    def __init__(self, engine: Any, rounded: frozenset[str] = frozenset()) -> None:
        self._by_name = {name: parameter for parameter, name in engine.param_names.items()}
        self._by_address: dict[tuple[int, torch.dtype], list[Piece]] = {}
        optimizer = inner_optimizer(engine)
        for flat in flat_parts(engine):
            self._add(flat.tensor, _pieces(flat, MASTER))
            state: Mapping[str, Any] = optimizer.state.get(flat.tensor, {})
            if isinstance(optimizer, LowRankOptimizer):
                for (name, key), (piece, _) in low_rank_pieces(optimizer, flat).items():
                    if name in state and key in state[name]:
                        self._add(state[name][key], [piece])
                continue
            for key, value in state.items():
                if isinstance(value, Tensor) and value.numel() == flat.tensor.numel() and value.dim() > 0:
                    self._add(value, _pieces(flat, key, moment=True))
        for parameter, name in engine.param_names.items():
            if not hasattr(parameter, "ds_tensor"):  # whole on every rank
                kind, stored = (MASTER, False) if name in rounded else (WEIGHT, True)
                shape, frozen = tuple(parameter.shape), not parameter.requires_grad
                whole = Piece(f"{name}/{kind}", shape, 0, 0, parameter.numel(), stored, frozen=frozen)
                self._add(parameter, [whole])

    def _add(self, tensor: Tensor, pieces: list[Piece]) -> None:
        if tensor.numel():  # tensors without elements share an address
            self._by_address[tensor.data_ptr(), tensor.dtype] = pieces

    def pieces(self, path: str, tensor: Tensor) -> list[Piece]:
        """The pieces of the tensor at a path of a state file; of one that is nobody's part, itself under its path."""
        fragment = path.partition("/frozen_param_fragments/")[2]
        frozen = self._frozen(fragment, tensor) if fragment else None
        if frozen is not None:
            return frozen
        known = self._by_address.get((tensor.data_ptr(), tensor.dtype)) if tensor.numel() else None
        if known is not None and max((p.offset + p.numel for p in known), default=0) <= tensor.numel():
            return known
        return [Piece(path, tuple(tensor.shape), 0, 0, tensor.numel())]

    def _frozen(self, name: str, tensor: Tensor) -> list[Piece] | None:
        """Of a frozen parameter: DeepSpeed stores a copy of this rank's partition, at stages below 3 of the whole."""
        found = self._by_name.get(name)
        return None if found is None else frozen_pieces(found, name, tensor.numel())


def frozen_pieces(parameter: Tensor, name: str, numel: int) -> list[Piece]:
    """What this rank's copy of a frozen parameter, or of its partition, consists of."""
    shape = full_shape(parameter)
    total = math.prod(shape)
    if not total:
        return []
    if not hasattr(parameter, "ds_tensor"):
        return [Piece(f"{name}/{WEIGHT}", shape, 0, 0, numel, stored=False)]  # the module's own, which is stored
    first = min(numel * _partition_rank(parameter), total)
    return [Piece(f"{name}/{WEIGHT}", shape, first, 0, min(first + numel, total) - first, frozen=True)]


def _partition_rank(parameter: Any) -> int:
    return int(torch.distributed.get_rank(parameter.ds_process_group))


def _pieces(flat: FlatParts, kind: str, *, moment: bool = False) -> list[Piece]:
    return [
        Piece(f"{part.name}/{kind}", part.shape, part.start, part.offset, part.numel, moment=moment)
        for part in flat.parts
        if part.numel
    ]


def low_rank_pieces(
    optimizer: LowRankOptimizer, flat: FlatParts, state: Mapping[str, Any] | None = None
) -> dict[tuple[str, str], tuple[Piece, tuple[int, ...]]]:
    """By parameter and key, what the tensors of our optimizer's state consist of, and their shapes on this rank.

    Parameters
    ----------
    state
        By parameter, its state, where that is not the optimizer's present one.
    """
    found: dict[tuple[str, str], tuple[Piece, tuple[int, ...]]] = {}
    for name, tensors in optimizer.state_tensors(
        flat.tensor, flat.group, None if state is None else dict(state)
    ).items():
        for key, each in tensors.items():
            stored, moment = each.stored, each.moment
            piece = Piece(f"{name}/{key}", each.logical, each.start, 0, each.numel, stored=stored, moment=moment)
            found[name, key] = piece, each.shape
    return found


def rounded_weights(engine: Any) -> Iterator[tuple[str, bool]]:
    """By parameter, whether this rank's part of its weight is exactly its part of the master, rounded.

    Only of parameters that are whole on every rank (ZeRO 1 and 2): where all ranks agree, the weight need not be
    stored. The names and their order are the same on all ranks.
    """
    for flat in flat_parts(engine):
        for part in flat.parts:
            if hasattr(part.parameter, "ds_tensor"):
                return
            weight = part.parameter.detach().reshape(-1)[part.start : part.start + part.numel]
            master = flat.tensor.detach()[part.offset : part.offset + part.numel]
            yield part.name, bool(torch.equal(_words(weight), _words(master.to(weight.device, weight.dtype))))


def _words(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(_WORDS[tensor.element_size()])


def assemble(description: Mapping[str, Any], read: Read) -> Tensor:
    """A tensor from its description in a state file.

    Parameters
    ----------
    description
        ``dtype``, ``shape`` and ``pieces``, ``[name, start, offset, numel]`` each. Elements of no piece are padding: 0.
    read
        Gives a range ``[start, stop)`` of a logical tensor, and the name of its dtype; the words are in the array that
        it is called with, if that has words of their size, and in one of their own else. A floating-point tensor may be
        described with another floating-point dtype than its logical tensor's: it is rounded, or widened.

    Raises
    ------
    DamageError
        If the description is impossible.
    """
    try:
        return _assembled(description, read)
    except DsGaloreError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise DamageError(f"a state file describes a tensor as {description!r:.200}: {error}") from None


def _assembled(description: Mapping[str, Any], read: Read) -> Tensor:
    dtype, shape = getattr(torch, str(description["dtype"]), None), [int(size) for size in description["shape"]]
    if not isinstance(dtype, torch.dtype):
        raise DamageError(f"a state file names the dtype {description['dtype']!r}")
    if any(size < 0 for size in shape):
        raise DamageError(f"a state file describes a tensor of shape {shape}")
    flat = _empty(math.prod(shape), dtype)
    width = flat.element_size() if dtype in NAMES else 1
    scale = flat.element_size() // width
    view = flat.view(torch.uint8).numpy().view(f"u{width}")
    known = 0
    for name, start, offset, numel in description["pieces"]:
        if offset < 0 or numel < 0 or offset + numel > flat.numel():
            raise DamageError(f"a state file places {name} where it does not fit")
        if offset > known:
            flat[known:offset] = 0
        known = max(known, offset + numel)
        place = view[offset * scale : (offset + numel) * scale]
        bits, found = read(name, start * scale, (start + numel) * scale, place)
        source = _DTYPES.get(found)
        if source is not None and source != dtype and source.is_floating_point and dtype.is_floating_point:
            flat[offset : offset + numel] = _from_bits(bits, source).to(dtype)
        elif bits.dtype.itemsize != width:
            raise DamageError(f"a state file describes {name} as {dtype}, and it is stored as {found}")
        elif bits is not place:
            place[:] = bits
    flat[known:] = 0
    return flat.view(shape)


def _empty(numel: int, dtype: torch.dtype) -> Tensor:
    """A tensor in memory of NumPy's, which asks for huge pages: to write to it first takes a fifth of the time.

    It begins, as torch's do, at a multiple of 64 bytes.
    """
    nbytes = numel * dtype.itemsize
    raw = np.empty(nbytes + 64, np.uint8)
    begin = -raw.ctypes.data % 64
    return torch.from_numpy(raw[begin : begin + nbytes]).view(dtype)


def _from_bits(bits: Bits, dtype: torch.dtype) -> Tensor:
    signed = np.ascontiguousarray(bits).view(f"i{bits.dtype.itemsize}")
    return torch.from_numpy(signed).view(dtype)


def describe(tensor: Tensor, pieces: Sequence[Piece]) -> dict[str, Any]:
    """What :func:`assemble` makes the tensor from."""
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "pieces": [[piece.name, piece.start, piece.offset, piece.numel] for piece in pieces],
    }
