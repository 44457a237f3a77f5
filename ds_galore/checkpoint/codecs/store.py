"""The bytes as they are: what every reader can read, and what nothing else may exceed."""

from __future__ import annotations

import numpy as np

from ds_galore.checkpoint.codecs.base import Bits, CodecError, Compressor, Encoded, Reference

__all__ = ["StoreCodec"]


class StoreCodec:
    """The bytes as they are."""

    id = "store"

    def encode(self, bits: Bits, reference: Reference, *, floating: bool, compressor: Compressor) -> Encoded | None:
        """Always applies."""
        return Encoded(self.id, {}, {"data": bits.astype(bits.dtype.newbyteorder("<"), copy=False).view(np.uint8)})

    def decode(self, encoded: Encoded, out: Bits, reference: Reference, *, floating: bool) -> None:
        """As in :class:`~ds_galore.checkpoint.codecs.base.Codec`."""
        data = encoded.parts.get("data")
        if data is None or data.nbytes != out.nbytes:
            found = "none" if data is None else str(data.nbytes)
            raise CodecError(f"stored bytes: found {found}, expected {out.nbytes}")
        out[:] = np.ascontiguousarray(data).view(f"<u{out.itemsize}")
