"""int8 with a scale for each block of elements: lossy, and used where the user chose it for moments.

A block's scale is its largest magnitude over 127. Where no element is negative, as in second moments, square roots
are quantised to 1 .. 255 instead, and only a zero becomes zero: an update divides by them. Blocks whose largest
magnitude is below ``2^-120`` become zero, so that no denormal takes part.

Block-wise quantisation of Adam's moments is from Dettmers et al., *8-bit Optimizers via Block-wise Quantization*
(2022); the levels here are linear, not their dynamic ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ds_galore.checkpoint.codecs.base import Bits, CodecError, Compressor, Encoded, Reference, pack, room, unpack
from ds_galore.checkpoint.codecs.words import join, split

__all__ = ["BlocksCodec"]

BLOCK = 256


class BlocksCodec:
    """Finite float32 as 8 bits and a scale a block; never chosen for being small, since it loses digits."""

    id = "int8"

    def encode(self, bits: Bits, reference: Reference, *, floating: bool, compressor: Compressor) -> Encoded | None:
        """Applies to finite float32; what is not finite is to be stored exactly."""
        if not floating or bits.dtype.itemsize != 4 or not bits.size:
            return None
        values = bits.view(np.float32)
        if not np.isfinite(values).all():
            return None
        root = bool((values >= 0).all())
        blocks = _blocks(np.sqrt(values.astype(np.float64)) if root else values.astype(np.float64))
        scales = (np.abs(blocks).max(axis=1) / (255 if root else 127)).astype(np.float32)
        scales[scales < 2.0**-120] = 0
        unit = np.where(scales > 0, scales, 1).astype(np.float64)[:, None]
        levels = np.rint(blocks / unit)
        if root:
            levels = np.where(blocks > 0, np.clip(levels, 1, 255), 0)
            stored: Bits = (levels * (scales > 0)[:, None]).astype(np.uint8)
        else:
            stored = (np.clip(levels, -127, 127) * (scales > 0)[:, None]).astype(np.int8).view(np.uint8)
        parts = pack(split(stored.reshape(-1)[: bits.size]), compressor)
        parts.update(pack(split(scales.view(np.uint32)), compressor, "s"))
        return Encoded(self.id, {"block": BLOCK, "root": root}, parts)

    def decode(self, encoded: Encoded, out: Bits, reference: Reference, *, floating: bool) -> None:
        """As in :class:`~ds_galore.checkpoint.codecs.base.Codec`."""
        if out.itemsize != 4 or not floating or encoded.params.get("block") != BLOCK:
            raise CodecError(f"blocks of int8 with impossible parameters: {dict(encoded.params)!r}")
        stored, units = room(out.size, 1), room(-(-out.size // BLOCK), 4)
        join(unpack(encoded.parts, stored.size, 1), stored)
        join(unpack(encoded.parts, units.size, 4, "s"), units)
        scales = units.view(np.float32).astype(np.float64)[:, None]
        root = encoded.params.get("root") is True
        values = _blocks((stored if root else stored.view(np.int8)).astype(np.float64)) * scales
        if root:
            values = values * values
        out[:] = values.reshape(-1)[: out.size].astype(np.float32).view(np.uint32)


def _blocks(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    padded = np.zeros(-(-values.size // BLOCK) * BLOCK)
    padded[: values.size] = values
    return padded.reshape(-1, BLOCK)
