"""Byte planes, of an array itself or of its integer difference to an earlier one.

Floating-point patterns are mapped to integers in the order of the numbers, so that a small change of a value is a small
integer; its sign goes to the lowest bit (zigzag), and the bytes of equal significance are compressed together. Measured
smaller than XOR on weights of consecutive checkpoints.
"""

from __future__ import annotations

from ds_galore.checkpoint.codecs.base import Bits, CodecError, Compressor, Encoded, Reference, from_planes, planes

__all__ = ["PlanesCodec", "difference", "ordered", "restored", "unordered"]

BLOCK = 2**15


def ordered(bits: Bits, *, floating: bool) -> Bits:
    """Bit patterns as unsigned integers whose order, with wrap-around, is that of the numbers.

    A negative float's magnitude bits are inverted; all patterns, NaNs included, keep distinct images.
    """
    if not floating:
        return bits
    width = bits.dtype.itemsize * 8
    sign = (bits >> (width - 1)).astype(bits.dtype)
    mask = bits.dtype.type(2 ** (width - 1) - 1)
    inverted: Bits = bits ^ (sign * mask)
    return inverted


def unordered(values: Bits, *, floating: bool) -> Bits:
    """The inverse of :func:`ordered`, which is its own."""
    return ordered(values, floating=floating)


def difference(values: Bits, base: Bits) -> Bits:
    """``values - base`` modulo the word, zigzag: 0, -1, 1, -2, ... become 0, 1, 2, 3, ..."""
    width = values.dtype.itemsize * 8
    delta = values - base
    negative = (delta >> (width - 1)).astype(values.dtype)
    ones = values.dtype.type(2**width - 1)
    zigzag: Bits = (delta << 1) ^ (negative * ones)
    return zigzag


def restored(zigzag: Bits, base: Bits) -> Bits:
    """The inverse of :func:`difference`."""
    ones = zigzag.dtype.type(2 ** (zigzag.dtype.itemsize * 8) - 1)
    values: Bits = ((zigzag >> 1) ^ ((zigzag & 1) * ones)) + base
    return values


def _rotated(bits: Bits) -> Bits:
    """Sign in the lowest bit: the exponent of float32 and bfloat16 then fills the highest byte."""
    rotated = bits << 1
    rotated |= bits >> (bits.dtype.itemsize * 8 - 1)
    return rotated


def _rotate_back(bits: Bits) -> Bits:
    """The inverse of :func:`_rotated`, in place, in blocks that stay in a core's cache."""
    left = bits.dtype.itemsize * 8 - 1
    for start in range(0, bits.size, BLOCK):
        block = bits[start : start + BLOCK]
        sign = block << left
        block >>= 1
        block |= sign
    return bits


class PlanesCodec:
    """Byte planes of the difference to the base, or of the array itself where there is none."""

    id = "planes"

    def encode(self, bits: Bits, reference: Reference, *, floating: bool, compressor: Compressor) -> Encoded | None:
        """Always applies."""
        base = reference.base
        if base is None:
            values = _rotated(bits) if floating else bits
        else:
            values = difference(ordered(bits, floating=floating), ordered(base, floating=floating))
        return Encoded(self.id, {"base": base is not None}, planes(values, compressor))

    def decode(self, encoded: Encoded, numel: int, itemsize: int, reference: Reference, *, floating: bool) -> Bits:
        """As in :class:`~ds_galore.checkpoint.codecs.base.Codec`."""
        values = from_planes(encoded.parts, numel, itemsize)
        if not encoded.params.get("base"):
            return _rotate_back(values) if floating else values
        base = reference.base
        if base is None or base.size != numel or base.dtype.itemsize != itemsize:
            raise CodecError("a difference cannot be decoded without the base that it was made from")
        return unordered(restored(values, ordered(base, floating=floating)), floating=floating)
