"""A tensor that did not change since the base."""

from __future__ import annotations

import numpy as np

from ds_galore.checkpoint.codecs.base import Bits, CodecError, Compressor, Encoded, Reference

__all__ = ["SameCodec"]


class SameCodec:
    """An array that equals its base: no bytes at all."""

    id = "same"

    def encode(self, bits: Bits, reference: Reference, *, floating: bool, compressor: Compressor) -> Encoded | None:
        """Applies where every bit is equal."""
        same = reference.base is not None and np.array_equal(bits, reference.base)
        return Encoded(self.id, {}, {}) if same else None

    def decode(self, encoded: Encoded, out: Bits, reference: Reference, *, floating: bool) -> None:
        """As in :class:`~ds_galore.checkpoint.codecs.base.Codec`."""
        base = reference.base
        if base is None or (base.size, base.itemsize) != (out.size, out.itemsize):
            raise CodecError("an unchanged tensor cannot be decoded without its base")
        out[:] = base
