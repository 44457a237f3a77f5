"""Bit patterns as integers that are worth compressing, taken apart into byte planes and put together again.

Each in one pass where ``compiled.c`` was compiled at installation, and in NumPy where it was not, to the same bits. The
loops release the GIL. Imports NumPy alone.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import numpy.typing as npt

from ds_galore.checkpoint.codecs.base import Bits, Bytes

__all__ = [
    "How",
    "compiled",
    "difference",
    "join",
    "join_sorted",
    "ordered",
    "restored",
    "split",
    "split_sorted",
    "unordered",
]

#: What was compiled at installation; None where that was not possible.
compiled: ModuleType | None
try:
    from ds_galore.checkpoint.codecs import _compiled as compiled

    if getattr(compiled, "VERSION", None) != 3:  # of an older source, left beside this one
        compiled = None
except ImportError:
    compiled = None

Planes = Sequence[Bytes | None]


class How(enum.IntEnum):
    """What is done to words before they are taken apart; ``compiled.c`` has the same numbers."""

    PLAIN = 0  #: nothing
    ROTATED = 1  #: the sign to the lowest bit, so that exponents of float32 and bfloat16 fill the highest byte
    DIFFERENCE = 2  #: the difference to a base, by :func:`difference`
    ORDERED = 3  #: the difference of :func:`ordered` floating-point numbers to a base of such


def ordered(bits: Bits) -> Bits:
    """Floating-point patterns as unsigned integers whose order, with wrap-around, is that of the numbers.

    A negative number's magnitude bits are inverted; all patterns, NaNs included, keep distinct images.
    """
    width = bits.dtype.itemsize * 8
    sign = (bits >> (width - 1)).astype(bits.dtype)
    mask = bits.dtype.type(2 ** (width - 1) - 1)
    inverted: Bits = bits ^ (sign * mask)
    return inverted


def unordered(values: Bits) -> Bits:
    """The inverse of :func:`ordered`, which is its own."""
    return ordered(values)


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


def split(values: Bits, how: How = How.PLAIN, base: Bits | None = None) -> list[Bytes | None]:
    """Byte planes of words, the least significant first; None for a plane of zeros.

    Parameters
    ----------
    values
        ``(numel,)`` words of 1, 2, 4 or 8 bytes.
    how
        What is done to them first.
    base
        As many words, where ``how`` says that there are.
    """
    width = values.dtype.itemsize
    if compiled is not None:
        planes = tuple(np.empty(values.size, np.uint8) for _ in range(width))
        held = compiled.split(np.ascontiguousarray(values), _whole(base), how, width, planes)
        return _but_zeros(planes, held)
    if how == How.ROTATED:
        values = (values << 1) | (values >> (width * 8 - 1))
    elif base is not None:
        values = difference(ordered(values), ordered(base)) if how == How.ORDERED else difference(values, base)
    return _taken_apart(values)


def join(planes: Planes, out: Bits, how: How = How.PLAIN, base: Bits | None = None) -> None:
    """Put the words that :func:`split` took apart into ``out``, which is contiguous."""
    if compiled is not None:
        compiled.join(tuple(planes), _whole(base), how, out.itemsize, out)
        return
    words = _put_together(planes, out)
    if how == How.ROTATED:
        words = (words >> 1) | (words << (out.itemsize * 8 - 1))
    elif base is not None:
        words = unordered(restored(words, ordered(base))) if how == How.ORDERED else restored(words, base)
    out[:] = words


def split_sorted(values: Bits, prediction: Bits) -> list[Bytes | None]:
    """As :func:`split` by :attr:`How.ORDERED`, of float32 patterns in the order of their predictions' exponents.

    So differences of one size are neighbours.
    """
    if compiled is not None:
        planes = tuple(np.empty(values.size, np.uint8) for _ in range(4))
        held = compiled.split_sorted(np.ascontiguousarray(values), np.ascontiguousarray(prediction), planes)
        return _but_zeros(planes, held)
    return _taken_apart(difference(ordered(values), ordered(prediction))[_by_exponent(prediction)])


def join_sorted(planes: Planes, prediction: Bits) -> None:
    """Put the float32 patterns that :func:`split_sorted` took apart where the prediction is, which is contiguous."""
    if compiled is not None:
        compiled.join_sorted(tuple(planes), prediction)
        return
    words = np.empty(prediction.size, np.uint32)
    words[_by_exponent(prediction)] = _put_together(planes, prediction)
    prediction[:] = unordered(restored(words, ordered(prediction)))


def _whole(base: Bits | None) -> Bits | None:
    return None if base is None else np.ascontiguousarray(base)


def _but_zeros(planes: Sequence[Bytes], held: int) -> list[Bytes | None]:
    return [plane if held >> number & 1 else None for number, plane in enumerate(planes)]


def _taken_apart(values: Bits) -> list[Bytes | None]:
    little = np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<"), copy=False)
    rows = little.view(np.uint8).reshape(-1, values.dtype.itemsize)
    planes = [np.ascontiguousarray(rows[:, plane]) for plane in range(values.dtype.itemsize)]
    return [plane if plane.any() else None for plane in planes]


def _put_together(planes: Planes, like: Bits) -> Bits:
    width = like.itemsize
    rows = np.empty((like.size, width), dtype=np.uint8)
    for number, plane in enumerate(planes):
        rows[:, number] = 0 if plane is None else plane
    return rows.reshape(-1).view(f"<u{width}").astype(f"=u{width}", copy=False)


def _by_exponent(prediction: Bits) -> npt.NDArray[np.intp]:
    return np.argsort(((prediction >> 23) & np.uint32(0xFF)).astype(np.uint8), kind="stable")
