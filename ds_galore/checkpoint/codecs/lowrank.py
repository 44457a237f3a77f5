"""Predicting a projected weight from an earlier one: the change lies in the span of the projector.

Between two refreshes every update of a matrix ``W`` is ``N Q^T`` for some ``N``, so ``W = a W_base + C Q^T`` up to
rounding, with ``C = (W - a W_base) Q`` of ``rows x r`` numbers and ``a`` the product of all weight-decay factors.
Stored are ``C``, in integers, and the exact integer difference between the weight's bits and the prediction's.

The prediction is the same on every machine and BLAS. ``C`` is rounded to integers with one power-of-two scale a row,
``Q`` to multiples of ``2^-22``; their product is taken in float64, where every partial sum is an integer below ``2^53``
(which is checked), so that any order of summation gives the same integers. Scaling by powers of two is exact, ``a`` has
29 bits so that ``a W_base`` is exact as well, and adding the two rounds once. Denormals are taken as zero by their
bits, since ``set_flush_denormal`` changes what arithmetic makes of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_galore.checkpoint.codecs import words
from ds_galore.checkpoint.codecs.base import Bits, Bytes, CodecError, Compressor, Encoded, Reference, pack, room, unpack
from ds_galore.checkpoint.codecs.words import How, join, join_sorted, split, split_sorted

__all__ = ["LowRankCodec"]

Float64 = npt.NDArray[np.float64]

#: Bits of a coefficient of ``C`` (with its sign) and of the fraction of an element of ``Q``. Fewer bits of ``C`` cost
#: more in the residual than they save; measured at 14, 17, 20.
COEFFICIENT_BITS = 20
FACTOR_BITS = 22
DECAY_BITS = 29
EXACT = 2.0**53
#: Elements that are in float64 at the same time: bounds the memory, not the result.
CHUNK = 2**17


class LowRankCodec:
    """Low-rank prediction and exact residual, for float32 ranges of a matrix with a base and projectors."""

    id = "lowrank"

    def encode(self, bits: Bits, reference: Reference, *, floating: bool, compressor: Compressor) -> Encoded | None:
        """Applies to float32 with a base and factors of fitting shapes, where the exactness bound holds."""
        if not floating or bits.dtype.itemsize != 4 or reference.base is None or not reference.factors or not bits.size:
            return None
        if any(factor.shape[0] != reference.columns for factor in reference.factors.values()):
            return None
        names = sorted(reference.factors)
        span = _joined(reference, names)
        integers = _integers(span)
        if integers is None:
            return None
        solve = _solver(span)
        decay = _estimate_decay(bits, reference, span, solve)
        coefficients, exponents = _coefficients(bits, reference, solve, decay)
        if not _is_exact(coefficients, integers):
            return None
        prediction: Bits = np.empty_like(bits)
        _predict(coefficients, exponents, integers, decay, reference, prediction)
        parts = pack(split_sorted(bits, prediction), compressor)
        for prefix, numbers in (("c", coefficients.astype(np.int32)), ("e", exponents.astype(np.int16))):
            signed = numbers.reshape(-1).view(numbers.dtype.str.replace("i", "u"))
            parts.update(pack(split(signed, How.DIFFERENCE, np.zeros_like(signed)), compressor, prefix))
        return Encoded(self.id, {"factors": names, "decay": decay, "rank": span.shape[1]}, parts)

    def decode(self, encoded: Encoded, out: Bits, reference: Reference, *, floating: bool) -> None:
        """As in :class:`~ds_galore.checkpoint.codecs.base.Codec`."""
        names, decay = _checked_params(encoded.params, reference)
        base = reference.base
        if out.itemsize != 4 or base is None or (base.size, base.itemsize) != (out.size, 4):
            raise CodecError("a low-rank difference needs the float32 base that it was made from")
        span = _joined(reference, names)
        rows, rank = _rows(reference, out.size), span.shape[1]
        integers = _integers(span)
        coefficients = _signed(encoded.parts, rows * rank, 4, "c").astype(np.float64).reshape(rows, rank)
        exponents = _signed(encoded.parts, rows, 2, "e").astype(np.int64)
        if integers is None or not _is_exact(coefficients, integers) or np.abs(exponents).max(initial=0) > 400:
            raise CodecError("a low-rank difference exceeds the range in which its prediction is exact")
        _predict(coefficients, exponents, integers, decay, reference, out)
        join_sorted(unpack(encoded.parts, out.size, 4), out)


def _checked_params(params: Any, reference: Reference) -> tuple[list[str], int]:
    names, decay, rank = params.get("factors"), params.get("decay"), params.get("rank")
    if not isinstance(names, list) or not names or not isinstance(decay, int) or not 0 < decay <= 2**DECAY_BITS:
        raise CodecError(f"a low-rank difference has impossible parameters: {dict(params)!r}")
    missing = [name for name in names if name not in reference.factors]
    if missing:
        raise CodecError(f"a low-rank difference needs {missing[0]!r}, which is not there")
    if reference.columns < 1:
        raise CodecError("a low-rank difference of a matrix without columns")
    found = sum(reference.factors[name].shape[1] for name in names)
    if found != rank or any(reference.factors[name].shape[0] != reference.columns for name in names):
        raise CodecError(f"a low-rank difference of rank {rank} does not fit factors of rank {found}")
    return names, decay


def _signed(parts: Mapping[str, Bytes], numel: int, width: int, prefix: str) -> npt.NDArray[Any]:
    """Integers of either sign from their byte planes."""
    planes, found = unpack(parts, numel, width, prefix), room(numel, width)
    join(planes, found, How.DIFFERENCE, np.zeros_like(found))
    return found.view(f"=i{width}")


def _joined(reference: Reference, names: list[str]) -> Float64:
    return np.concatenate([reference.factors[name] for name in names], axis=1, dtype=np.float64)


def _integers(span: Float64) -> Float64 | None:
    """``Q`` in units of ``2^-FACTOR_BITS``: integers in float64. None where it is not finite."""
    if not (span.max(initial=0.0) <= 4.0 and span.min(initial=0.0) >= -4.0):  # a NaN is neither
        return None
    scaled = span * 2.0**FACTOR_BITS  # exact
    return np.rint(scaled, out=scaled)


def _is_exact(coefficients: Float64, integers: Float64) -> bool:
    """Whether every partial sum of every order stays an integer below ``2^53``."""
    return bool(np.abs(coefficients).max(initial=0.0) * np.abs(integers).sum(axis=1).max(initial=0.0) < EXACT)


def _rows(reference: Reference, numel: int) -> int:
    """Rows of the matrix that the range touches."""
    return -(-(reference.start + numel) // reference.columns) - reference.start // reference.columns


def _chunks(reference: Reference, numel: int) -> Iterator[tuple[slice, slice, int]]:
    """By groups of rows: the rows, the elements of the range, and at which column the first row begins."""
    columns, lead = reference.columns, reference.start % reference.columns
    step = max(1, CHUNK // columns)
    rows = _rows(reference, numel)
    for first in range(0, rows, step):
        last = min(first + step, rows)
        begin, end = max(first * columns - lead, 0), min(last * columns - lead, numel)
        yield slice(first, last), slice(begin, end), lead if first == 0 else 0


def _wide(bits: Bits) -> Float64:
    """float32 patterns in float64, exactly; denormals, infinities and NaNs as zero."""
    exponent = bits & np.uint32(0x7F800000)
    usable = (exponent != 0) & (exponent != np.uint32(0x7F800000))
    return np.where(usable, bits, np.uint32(0)).view(np.float32).astype(np.float64)


def _estimate_decay(bits: Bits, reference: Reference, span: Float64, solve: Float64) -> int:
    """The factor of the base outside the span, in units of ``2^-DECAY_BITS``, from some full rows."""
    assert reference.base is not None
    columns, lead = reference.columns, (-reference.start) % reference.columns
    rows = min((bits.size - lead) // columns, max(1, 2**16 // columns))
    one: int = 2**DECAY_BITS
    if rows < 1 or span.shape[1] >= columns:
        return one
    chosen = slice(lead, lead + rows * columns)
    new, old = (_wide(each[chosen]).reshape(rows, columns) for each in (bits, reference.base))
    new, old = (each - (each @ solve) @ span.T for each in (new, old))
    energy = (old * old).sum(axis=1)
    telling = energy > 0
    # The median over rows, so that a value of 3e38 somewhere spoils its row alone.
    decay = float(np.median((new * old).sum(axis=1)[telling] / energy[telling])) if telling.any() else 1.0
    if not np.isfinite(decay) or not 0.5 < decay < 1.0 - 2.0 ** (3 - DECAY_BITS):
        return one
    return round(decay * one)


def _solver(span: Float64) -> Float64:
    """The transposed pseudo-inverse of the span: ``C`` is the change times it.

    Of one orthonormal projector it is, nearly, the projector itself, which is good enough: what ``C`` misses is in the
    residual. Two projectors may overlap.
    """
    gram = span.T @ span
    if np.abs(gram - np.eye(len(gram))).max(initial=0.0) < 1e-4:
        return span
    solved: Float64 = span @ np.linalg.pinv(gram, rcond=1e-12, hermitian=True)
    return solved


def _coefficients(
    bits: Bits, reference: Reference, solve: Float64, decay: int
) -> tuple[Float64, npt.NDArray[np.int64]]:
    """``C`` in integers, ``(rows, r)``, and the exponent of the unit of each row."""
    assert reference.base is not None
    rows, rank = _rows(reference, bits.size), solve.shape[1]
    coefficients, exponents = np.empty((rows, rank)), np.zeros(rows, dtype=np.int64)
    for held, elements, lead in _chunks(reference, bits.size):
        change = np.zeros((held.stop - held.start) * reference.columns)  # zero where a partial row is not held
        _change(bits[elements], reference.base[elements], decay, change[lead:][: elements.stop - elements.start])
        exact = change.reshape(-1, reference.columns) @ solve
        largest = np.abs(exact).max(axis=1, initial=0.0)
        exponent = np.where(largest > 0, np.frexp(largest)[1] - (COEFFICIENT_BITS - 1), 0)
        exponent = np.clip(exponent, -400, 400)
        coefficients[held] = np.rint(exact * np.ldexp(1.0, -exponent)[:, None])
        exponents[held] = exponent
    return coefficients, exponents


def _change(bits: Bits, base: Bits, decay: int, out: Float64) -> None:
    """Put ``bits - a * base`` into ``out``; zero for what is not finite, which tells nothing."""
    factor = float(np.ldexp(float(decay), -DECAY_BITS))
    if words.compiled is not None:
        words.compiled.change(np.ascontiguousarray(bits), np.ascontiguousarray(base), factor, out)
        return
    new, old = _wide(bits), _wide(base)
    out[:] = np.where((new != 0) & (old != 0), new - factor * old, 0.0)


def _predict(
    coefficients: Float64,
    exponents: npt.NDArray[np.int64],
    integers: Float64,
    decay: int,
    reference: Reference,
    prediction: Bits,
) -> None:
    """Put the bit patterns of what is predicted into ``prediction``."""
    assert reference.base is not None
    base, factor = reference.base, float(np.ldexp(float(decay), -DECAY_BITS))
    for held, elements, lead in _chunks(reference, base.size):
        product = coefficients[held] @ integers.T
        scales = np.ldexp(1.0, exponents[held] - FACTOR_BITS)  # exact: powers of two
        old, out = base[elements], prediction[elements]
        if words.compiled is not None:
            words.compiled.predict(product, scales, np.ascontiguousarray(old), factor, lead, reference.columns, out)
            continue
        product *= scales[:, None]
        value = factor * _wide(old) + product.reshape(-1)[lead : lead + old.size]
        magnitude = np.abs(value)
        usable = (magnitude >= 2.0**-126) & (magnitude < 2.0**127)
        out[:] = np.where(usable, value, 0.0).astype(np.float32).view(np.uint32)
