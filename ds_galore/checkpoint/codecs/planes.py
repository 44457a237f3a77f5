"""Byte planes, of an array itself or of its integer difference to an earlier one.

Floating-point patterns are mapped to integers in the order of the numbers, so that a small change of a value is a small
integer; its sign goes to the lowest bit (zigzag), and the bytes of equal significance are compressed together. Measured
smaller than XOR on weights of consecutive checkpoints.
"""

from __future__ import annotations

from ds_galore.checkpoint.codecs.base import Bits, CodecError, Compressor, Encoded, Reference, pack, unpack
from ds_galore.checkpoint.codecs.words import How, join, split

__all__ = ["PlanesCodec"]


class PlanesCodec:
    """Byte planes of the difference to the base, or of the array itself where there is none."""

    id = "planes"

    def encode(self, bits: Bits, reference: Reference, *, floating: bool, compressor: Compressor) -> Encoded | None:
        """Always applies."""
        base = reference.base
        planes = split(bits, _how(base is not None, floating), base)
        return Encoded(self.id, {"base": base is not None}, pack(planes, compressor))

    def decode(self, encoded: Encoded, out: Bits, reference: Reference, *, floating: bool) -> None:
        """As in :class:`~ds_galore.checkpoint.codecs.base.Codec`."""
        base = reference.base if encoded.params.get("base") else None
        if encoded.params.get("base") and (base is None or (base.size, base.itemsize) != (out.size, out.itemsize)):
            raise CodecError("a difference cannot be decoded without the base that it was made from")
        join(unpack(encoded.parts, out.size, out.itemsize), out, _how(base is not None, floating), base)


def _how(against_base: bool, floating: bool) -> How:
    if against_base:
        return How.ORDERED if floating else How.DIFFERENCE
    return How.ROTATED if floating else How.PLAIN
