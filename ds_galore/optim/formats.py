"""What moments and projectors are stored as: containers for blocks of which each row is encoded for itself.

A row that is cut between ranks must be the same bits on all of them, and a checkpoint must load on any number of ranks;
so no block of a quantiser ever spans two rows, and rounding noise depends on a row's place in the whole matrix alone.
Imports torch, and bitsandbytes where moments are 8-bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ds_galore.errors import ConfigError
from ds_galore.optim.noise import round_to_bf16, uniform
from ds_galore.tools.formats import BLOCK

__all__ = [
    "Dynamic",
    "Floating",
    "Integers",
    "RowFormat",
    "moment_format",
    "projector_format",
    "require_bitsandbytes",
]


class RowFormat(ABC):
    """How a block ``(rows, columns)`` of numbers is kept: as one tensor or two, each with as many rows."""

    @abstractmethod
    def parts(self, columns: int) -> dict[str, tuple[int, torch.dtype]]:
        """By what is appended to a state's key, the columns and the dtype of a tensor; ``""`` comes first."""

    @abstractmethod
    def encode(self, block: Tensor, key: int, first_row: int) -> dict[str, Tensor]:
        """The tensors of a block.

        Parameters
        ----------
        block
            ``(rows, columns)``, float32 or float64.
        key
            Of the noise for stochastic rounding.
        first_row
            Where in the whole matrix the rows begin.
        """

    @abstractmethod
    def decode(self, parts: Mapping[str, Tensor], columns: int, dtype: torch.dtype) -> Tensor:
        """The block ``(rows, columns)`` again; where nothing had to be converted, the stored tensor itself."""


@dataclass(frozen=True)
class Floating(RowFormat):
    """Numbers of a floating-point dtype; bfloat16 is rounded stochastically where that is asked for."""

    dtype: torch.dtype
    stochastic: bool = False

    def parts(self, columns: int) -> dict[str, tuple[int, torch.dtype]]:
        """Its dtypes and widths."""
        return {"": (columns, self.dtype)}

    def encode(self, block: Tensor, key: int, first_row: int) -> dict[str, Tensor]:
        """Convert; the arguments are those of the base class."""
        if self.stochastic:
            return {"": round_to_bf16(block.float(), key, first_row * block.shape[1])}
        return {"": block.to(self.dtype)}

    def decode(self, parts: Mapping[str, Tensor], columns: int, dtype: torch.dtype) -> Tensor:
        """Convert back."""
        return parts[""].to(dtype)


@dataclass(frozen=True)
class Dynamic(RowFormat):
    """8-bit dynamic quantisation (Dettmers et al., arXiv 2110.02861), in blocks of 256 columns, by bitsandbytes.

    Zero stays zero, and a number that is not zero does not become zero where there is no sign: a second moment of zero
    under a first one that is not would make the next update huge.
    """

    signed: bool

    def parts(self, columns: int) -> dict[str, tuple[int, torch.dtype]]:
        """Its dtypes and widths."""
        return {"": (columns, torch.uint8), "_absmax": (-(-columns // BLOCK), torch.float32)}

    def encode(self, block: Tensor, key: int, first_row: int) -> dict[str, Tensor]:
        """Convert; the arguments are those of the base class."""
        rows, columns = block.shape
        if not rows:
            return {
                "": block.to(torch.uint8),
                "_absmax": block.new_zeros((0, -(-columns // BLOCK)), dtype=torch.float32),
            }
        size = _block_size(columns)
        padding = -columns % size
        padded = torch.nn.functional.pad(block.float(), (0, padding)) if padding else block.float().contiguous()
        codes, absmax = self.quantise(padded.view(-1), size)
        return {"": codes.view(rows, -1)[:, :columns].contiguous(), "_absmax": absmax.view(rows, -1)}

    def decode(self, parts: Mapping[str, Tensor], columns: int, dtype: torch.dtype) -> Tensor:
        """Convert back."""
        codes, absmax = parts[""], parts["_absmax"]
        rows = codes.shape[0]
        if not rows:
            return codes.to(dtype)
        size = _block_size(columns)
        padding = -columns % size
        padded = torch.nn.functional.pad(codes, (0, padding)) if padding else codes
        return self.restore(padded.view(-1), absmax.view(-1), size).view(rows, -1)[:, :columns].to(dtype)

    def quantise(self, flat: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Codes ``(numel,)`` uint8 and the largest magnitudes of each ``size`` elements."""
        functional, code = _bitsandbytes(), _dynamic_map(self.signed, flat.device)
        codes, state = functional.quantize_blockwise(flat.float(), code=code, blocksize=size)
        if not self.signed:
            codes.clamp_(min=1)
        # bitsandbytes' kernel for the CPU makes a zero 2e-5 of the largest magnitude.
        codes.masked_fill_(flat == 0, 127 if self.signed else 0)
        # A block of zeros is zero bytes, as one that has not been written: rows that only fill a rank's part up.
        codes.view(-1, size).masked_fill_((state.absmax == 0).unsqueeze(1), 0)
        return codes, state.absmax

    def restore(self, codes: Tensor, absmax: Tensor, size: int) -> Tensor:
        """The numbers ``(numel,)``, float32."""
        code = _dynamic_map(self.signed, codes.device)
        restored: Tensor = _bitsandbytes().dequantize_blockwise(codes, absmax=absmax, code=code, blocksize=size)
        return restored


def _block_size(columns: int) -> int:
    """A size that bitsandbytes' kernels have: a row shorter than a block is padded to a power of two."""
    return BLOCK if columns > BLOCK // 2 else max(64, 1 << (columns - 1).bit_length())


def require_bitsandbytes() -> None:
    """Fail if it is needed and not there.

    Raises
    ------
    ConfigError
        If it cannot be imported.
    """
    _bitsandbytes()


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes.functional
    except ImportError as error:
        raise ConfigError(
            "8-bit moments (GaLoreAdamW8bit, moment_dtype '8bit') need bitsandbytes, which cannot be imported"
            f" ({error}): pip install bitsandbytes"
        ) from None
    return bitsandbytes.functional


@lru_cache(maxsize=16)
def _dynamic_map(signed: bool, device: torch.device) -> Tensor:
    code: Tensor = _bitsandbytes().create_dynamic_map(signed)
    return code.to(device)


@dataclass(frozen=True)
class Integers(RowFormat):
    """Multiples of a scale, one for 256 columns of a row: of 8 bits, or of 4, two to a byte."""

    bits: int
    stochastic: bool = False

    @property
    def _largest(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def parts(self, columns: int) -> dict[str, tuple[int, torch.dtype]]:
        """Its dtypes and widths."""
        width, dtype = (columns, torch.int8) if self.bits == 8 else (-(-columns // 2), torch.uint8)
        return {"": (width, dtype), "_scale": (-(-columns // BLOCK), torch.float32)}

    def encode(self, block: Tensor, key: int, first_row: int) -> dict[str, Tensor]:
        """Convert; the arguments are those of the base class."""
        rows, columns = block.shape
        blocks = -(-columns // BLOCK)
        padded = torch.nn.functional.pad(block.float(), (0, blocks * BLOCK - columns)).view(rows, blocks, BLOCK)
        # Rounded down where it would give an infinity when multiplied again.
        most = torch.finfo(torch.float32).max / self._largest * (1.0 - 2.0**-22)
        scale = padded.abs().amax(dim=2).div_(self._largest).clamp_(max=most)
        numbers = (padded / scale.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(2)).view(rows, blocks * BLOCK)[
            :, :columns
        ]
        if self.stochastic:
            noise = uniform(key, first_row * columns, rows * columns, block.device).view(rows, columns)
            numbers = numbers.add(noise).floor_()
        else:
            numbers = numbers.round()
        whole = numbers.clamp_(-self._largest, self._largest).to(torch.int8)
        return {"": whole.contiguous() if self.bits == 8 else _pack(whole), "_scale": scale}

    def decode(self, parts: Mapping[str, Tensor], columns: int, dtype: torch.dtype) -> Tensor:
        """Convert back."""
        codes, scale = parts[""], parts["_scale"]
        whole = codes if self.bits == 8 else _unpack(codes, columns)
        scales = scale.repeat_interleave(BLOCK, dim=1)[:, :columns] if scale.shape[1] > 1 else scale
        return (whole.float() * scales).to(dtype)


def _pack(whole: Tensor) -> Tensor:
    """Two numbers from -8 to 7 a byte, the first in its lower half; a row of odd length ends with a zero."""
    padded = torch.nn.functional.pad(whole, (0, whole.shape[1] % 2)).view(torch.uint8).bitwise_and(15)
    return padded[:, 0::2] | padded[:, 1::2] << 4


def _unpack(codes: Tensor, columns: int) -> Tensor:
    halves = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)[:, :columns]
    return halves.view(torch.int8).bitwise_xor(8).sub_(8)  # the sign of four bits


def moment_format(name: str, *, signed: bool, compute: torch.dtype) -> RowFormat:
    """The format of a moment: ``"fp32"`` is the dtype that is computed in."""
    if name == "8bit":
        return Dynamic(signed)
    return Floating(torch.bfloat16, stochastic=True) if name == "bf16" else Floating(compute)


def projector_format(name: str, *, stochastic: bool, compute: torch.dtype) -> RowFormat:
    """The format of a projector: ``"fp32"`` is the dtype that is computed in."""
    if name in ("int8", "int4"):
        return Integers(int(name[3:]), stochastic)
    return Floating(torch.bfloat16, stochastic) if name == "bf16" else Floating(compute)
