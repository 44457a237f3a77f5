"""Codecs for checkpoint tensors, and the choice between the lossless ones.

Each is one file: an id, ``encode`` and ``decode``. Adding one means a file and an entry in :data:`CODECS`; the shared
test suite then covers it. Imports NumPy and zstandard alone, and lz4 where it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ds_galore.checkpoint.codecs.base import (
    ZSTD,
    Bits,
    Codec,
    CodecError,
    Compressor,
    Encoded,
    Reference,
    room,
)
from ds_galore.checkpoint.codecs.blocks import BlocksCodec
from ds_galore.checkpoint.codecs.lowrank import LowRankCodec
from ds_galore.checkpoint.codecs.planes import PlanesCodec
from ds_galore.checkpoint.codecs.same import SameCodec
from ds_galore.checkpoint.codecs.store import StoreCodec

__all__ = ["CODECS", "LOSSLESS", "ZSTD", "CodecError", "Compressor", "Encoded", "Reference", "decode", "encode"]

LOSSLESS: dict[str, Codec] = {codec.id: codec for codec in (SameCodec(), LowRankCodec(), PlanesCodec(), StoreCodec())}
CODECS: dict[str, Codec] = LOSSLESS | {BlocksCodec.id: BlocksCodec()}

#: Elements from which a choice is first made on a part of the array, and those that the part has.
LARGE, SAMPLE = 2**19, 2**16
#: Encodings that are this much larger than the best on the part are not tried on the whole.
MARGIN = 1.05


def encode(bits: Bits, reference: Reference, *, floating: bool, compressor: Compressor = ZSTD) -> Encoded:
    """The smallest encoding of an array that decodes to its very bits.

    Parameters
    ----------
    bits
        ``(numel,)`` unsigned integers of 1, 2, 4 or 8 bytes: the patterns of the elements.
    reference
        What it may be predicted from.
    floating
        Whether the patterns are of floating-point numbers.
    compressor
        Of byte planes.

    Returns
    -------
    Encoded
        The smallest that, decoded, gives the bits; storing always does. Of an array of :data:`LARGE` elements or more,
        encodings that are over :data:`MARGIN` times the smallest on a part of it are not tried.
    """
    wanted = _promising(bits, reference, floating, compressor) if bits.size >= LARGE else None
    found = [
        candidate
        for number, candidate in _candidates(bits, reference, floating, compressor, wanted)
        if wanted is None or number in wanted
    ]
    for candidate in sorted(found, key=lambda each: each.nbytes):
        if np.array_equal(decode(candidate, bits.size, bits.dtype.itemsize, reference, floating=floating), bits):
            return candidate
    if wanted is not None:  # what looked best on a part does not give the whole back
        code = StoreCodec().encode(bits, Reference(), floating=floating, compressor=compressor)
        if code is not None:
            return code
    raise CodecError(f"no codec gives {bits.size} elements of {bits.dtype} back; this is a defect, please report it")


def _candidates(
    bits: Bits, reference: Reference, floating: bool, compressor: Compressor, wanted: set[int] | None = None
) -> Iterator[tuple[int, Encoded]]:
    """Every applicable encoding with its number; those before an equal base's only, where the base is equal."""
    number = 0
    for codec in LOSSLESS.values():
        with_and_without = codec.id == "planes" and reference.base is not None
        for each in (reference, Reference()) if with_and_without else (reference,):
            number += 1
            if wanted is not None and number not in wanted:
                continue
            code = codec.encode(bits, each, floating=floating, compressor=compressor)
            if code is not None:
                yield number, code
                if code.codec == SameCodec.id:
                    return


def _promising(bits: Bits, reference: Reference, floating: bool, compressor: Compressor) -> set[int]:
    """Numbers of the encodings that are among the smallest on a part from the array's middle.

    ``same`` and ``store`` cost nothing to try. The part is whole rows where there are factors, whose coefficients the
    rows share.
    """
    count = SAMPLE
    begin = (bits.size - count) // 2
    if reference.columns:
        begin -= (reference.start + begin) % reference.columns
        begin = max(begin, 0)
    chosen = slice(begin, begin + count)
    base = None if reference.base is None else reference.base[chosen]
    part = replace(reference, base=base, start=reference.start + begin)
    sizes = {number: code.nbytes for number, code in _candidates(bits[chosen], part, floating, compressor)}
    best = min(sizes.values())
    close = {number for number, size in sizes.items() if size <= MARGIN * best}
    return close | {1}  # whether the whole is equal is cheap to tell


def decode(
    encoded: Encoded,
    numel: int,
    itemsize: int,
    reference: Reference,
    *,
    floating: bool,
    out: Bits | None = None,
) -> Bits:
    """The array again, in ``out`` where that is given: ``(numel,)`` contiguous words of ``itemsize`` bytes.

    Raises
    ------
    CodecError
        If the codec is unknown, or the data are damaged or do not fit the reference.
    """
    codec = CODECS.get(encoded.codec)
    if codec is None:
        known = ", ".join(sorted(CODECS))
        raise CodecError(
            f"codec {encoded.codec!r} is not known to this version, which knows {known}; install a newer one"
        )
    found = room(numel, itemsize) if out is None else out
    codec.decode(encoded, found, reference, floating=floating)
    return found
