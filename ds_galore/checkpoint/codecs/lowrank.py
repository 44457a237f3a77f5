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

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_galore.checkpoint.codecs.base import Bits, CodecError, Compressor, Encoded, Reference, from_planes, planes
from ds_galore.checkpoint.codecs.planes import difference, ordered, restored, unordered

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
        prediction = _predict(coefficients, exponents, integers, decay, reference)
        order = _by_exponent(prediction)
        residual = difference(ordered(bits, floating=True), ordered(prediction, floating=True))[order]
        parts = planes(residual, compressor)
        parts.update(planes(_zigzag(coefficients.reshape(-1).astype(np.int32)), compressor, "c"))
        parts.update(planes(_zigzag(exponents.astype(np.int16)), compressor, "e"))
        return Encoded(self.id, {"factors": names, "decay": decay, "rank": span.shape[1]}, parts)

    def decode(self, encoded: Encoded, numel: int, itemsize: int, reference: Reference, *, floating: bool) -> Bits:
        """As in :class:`~ds_galore.checkpoint.codecs.base.Codec`."""
        names, decay = _checked_params(encoded.params, reference)
        base = reference.base
        if itemsize != 4 or base is None or base.size != numel or base.dtype.itemsize != 4:
            raise CodecError("a low-rank difference needs the float32 base that it was made from")
        span = _joined(reference, names)
        rows, rank = _rows(reference, numel), span.shape[1]
        integers = _integers(span)
        coefficients = _unzigzag(from_planes(encoded.parts, rows * rank, 4, "c")).astype(np.float64).reshape(rows, rank)
        exponents = _unzigzag(from_planes(encoded.parts, rows, 2, "e")).astype(np.int64)
        if integers is None or not _is_exact(coefficients, integers) or np.abs(exponents).max(initial=0) > 400:
            raise CodecError("a low-rank difference exceeds the range in which its prediction is exact")
        prediction = _predict(coefficients, exponents, integers, decay, reference)
        residual = np.empty(numel, dtype=np.uint32)
        residual[_by_exponent(prediction)] = from_planes(encoded.parts, numel, 4)
        return unordered(restored(residual, ordered(prediction, floating=True)), floating=True)


def _checked_params(params: Any, reference: Reference) -> tuple[list[str], int]:
    names, decay, rank = params.get("factors"), params.get("decay"), params.get("rank")
    if not isinstance(names, list) or not names or not isinstance(decay, int) or not 0 < decay <= 2**DECAY_BITS:
        raise CodecError(f"a low-rank difference has impossible parameters: {dict(params)!r}")
    missing = [name for name in names if name not in reference.factors]
    if missing:
        raise CodecError(f"a low-rank difference needs {missing[0]!r}, which is not there")
    found = sum(reference.factors[name].shape[1] for name in names)
    if found != rank or any(reference.factors[name].shape[0] != reference.columns for name in names):
        raise CodecError(f"a low-rank difference of rank {rank} does not fit factors of rank {found}")
    return names, decay


def _joined(reference: Reference, names: list[str]) -> Float64:
    return np.concatenate([reference.factors[name].astype(np.float64) for name in names], axis=1)


def _integers(span: Float64) -> Float64 | None:
    """``Q`` in units of ``2^-FACTOR_BITS``: integers in float64. None where it is not finite."""
    if not np.isfinite(span).all() or np.abs(span).max(initial=0.0) > 4.0:
        return None
    return np.rint(np.ldexp(span, FACTOR_BITS))


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


def _block(values: Float64, rows: int, columns: int, lead: int) -> Float64:
    """Elements as ``rows x columns``, with zeros where a partial row is not held."""
    block = np.zeros(rows * columns)
    block[lead : lead + values.size] = values
    return block.reshape(rows, columns)


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
    factor = np.ldexp(float(decay), -DECAY_BITS)
    coefficients, exponents = np.empty((rows, rank)), np.zeros(rows, dtype=np.int64)
    for held, elements, lead in _chunks(reference, bits.size):
        new, old = _wide(bits[elements]), _wide(reference.base[elements])
        change = np.where((new != 0) & (old != 0), new - factor * old, 0.0)  # what is not finite tells nothing
        exact = _block(change, held.stop - held.start, reference.columns, lead) @ solve
        largest = np.abs(exact).max(axis=1, initial=0.0)
        exponent = np.where(largest > 0, np.frexp(largest)[1] - (COEFFICIENT_BITS - 1), 0)
        exponent = np.clip(exponent, -400, 400)
        coefficients[held] = np.rint(exact * np.ldexp(1.0, -exponent)[:, None])
        exponents[held] = exponent
    return coefficients, exponents


def _predict(
    coefficients: Float64, exponents: npt.NDArray[np.int64], integers: Float64, decay: int, reference: Reference
) -> Bits:
    """The prediction's bit patterns."""
    assert reference.base is not None
    base, factor = reference.base, np.ldexp(float(decay), -DECAY_BITS)
    prediction = np.empty(base.size, dtype=np.float32)
    for held, elements, lead in _chunks(reference, base.size):
        product = coefficients[held] @ integers.T
        product *= np.ldexp(1.0, exponents[held] - FACTOR_BITS)[:, None]  # exact: powers of two
        change = product.reshape(-1)
        kept = factor * _wide(base[elements])
        value = kept + change[lead : lead + kept.size]
        magnitude = np.abs(value)
        usable = (magnitude >= 2.0**-126) & (magnitude < 2.0**127)
        prediction[elements] = np.where(usable, value, 0.0).astype(np.float32)
    return prediction.view(np.uint32)


def _by_exponent(prediction: Bits) -> npt.NDArray[np.intp]:
    """An order in which elements whose prediction has one exponent, and so residuals of one size, are neighbours."""
    return np.argsort(((prediction >> 23) & np.uint32(0xFF)).astype(np.uint8), kind="stable")


def _zigzag(values: npt.NDArray[Any]) -> Bits:
    unsigned = values.view(values.dtype.str.replace("i", "u"))
    return difference(unsigned, np.zeros_like(unsigned))


def _unzigzag(values: Bits) -> npt.NDArray[Any]:
    return restored(values, np.zeros_like(values)).view(values.dtype.str.replace("u", "i"))
