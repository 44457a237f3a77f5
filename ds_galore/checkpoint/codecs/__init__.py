"""Lossless codecs for checkpoint tensors, and the choice between them.

Each is one file: an id, ``encode`` and ``decode``. Adding one means a file and an entry in :data:`CODECS`; the shared
test suite then covers it. Imports NumPy and zstandard alone.
"""

from __future__ import annotations

import numpy as np

from ds_galore.checkpoint.codecs.base import Bits, Codec, CodecError, Encoded, Reference
from ds_galore.checkpoint.codecs.lowrank import LowRankCodec
from ds_galore.checkpoint.codecs.planes import PlanesCodec
from ds_galore.checkpoint.codecs.same import SameCodec
from ds_galore.checkpoint.codecs.store import StoreCodec

__all__ = ["CODECS", "CodecError", "Encoded", "Reference", "decode", "encode"]

CODECS: dict[str, Codec] = {codec.id: codec for codec in (SameCodec(), LowRankCodec(), PlanesCodec(), StoreCodec())}


def encode(bits: Bits, reference: Reference, *, floating: bool, level: int = 1) -> Encoded:
    """The smallest encoding of an array that decodes to its very bits.

    Parameters
    ----------
    bits
        ``(numel,)`` unsigned integers of 1, 2, 4 or 8 bytes: the patterns of the elements.
    reference
        What it may be predicted from.
    floating
        Whether the patterns are of floating-point numbers.
    level
        Of zstd; 1 was as good as 3 on byte planes.

    Returns
    -------
    Encoded
        Every candidate smaller than the best so far is decoded and compared before it is taken; storing always works.
    """
    best: Encoded | None = None
    for codec in CODECS.values():
        if codec.id == "planes" and reference.base is not None:
            candidates = [codec.encode(bits, each, floating=floating, level=level) for each in (reference, Reference())]
        else:
            candidates = [codec.encode(bits, reference, floating=floating, level=level)]
        for candidate in candidates:
            if candidate is None or (best is not None and candidate.nbytes >= best.nbytes):
                continue
            decoded = decode(candidate, bits.size, bits.dtype.itemsize, reference, floating=floating)
            if np.array_equal(decoded, bits):
                best = candidate
        if best is not None and best.codec == SameCodec.id:
            break
    if best is None:
        raise CodecError(
            f"no codec gives {bits.size} elements of {bits.dtype} back; this is a defect, please report it"
        )
    return best


def decode(encoded: Encoded, numel: int, itemsize: int, reference: Reference, *, floating: bool) -> Bits:
    """The array again.

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
    return codec.decode(encoded, numel, itemsize, reference, floating=floating)
