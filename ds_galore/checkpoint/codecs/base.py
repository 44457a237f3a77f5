"""What a codec is: an id, numbers that describe an encoding, byte parts; encode and decode are exact inverses.

Codecs work on NumPy arrays of bit patterns (unsigned integers of the element's size), so that the offline tools decode
without torch and no floating-point rule can change a value on its way. Imports NumPy and zstandard alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import zstandard

from ds_galore.errors import DsGaloreError

__all__ = [
    "Bits",
    "Bytes",
    "Codec",
    "CodecError",
    "Encoded",
    "Reference",
    "compress",
    "decompress",
    "from_planes",
    "planes",
]

Bits = npt.NDArray[Any]  # unsigned integers of 1, 2, 4 or 8 bytes
Bytes = npt.NDArray[np.uint8]

#: Above this, a frame is refused before anything is allocated: no tensor of a rank is larger.
MAX_PART = 2**40


class CodecError(DsGaloreError, ValueError):
    """Encoded data are damaged, made by a newer version, or do not fit what they are decoded against."""

    exit_code = 7


@dataclass(frozen=True)
class Reference:
    """What an array may be predicted from; the decoder needs the very same.

    Parameters
    ----------
    base
        Bit patterns of the same tensor in an earlier checkpoint, of the same size and number.
    factors
        By name, matrices in whose span the change since ``base`` may lie: for a projected weight its projectors,
        ``(columns, rank)``, float32.
    columns
        Columns of the matrix of which the array is a contiguous row-major range, and ...
    start
        ... the index of its first element in that matrix.
    """

    base: Bits | None = None
    factors: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    columns: int = 0
    start: int = 0


@dataclass(frozen=True)
class Encoded:
    """An array in encoded form.

    Parameters
    ----------
    codec
        Its id.
    params
        JSON values that decoding needs.
    parts
        Byte strings by name.
    """

    codec: str
    params: Mapping[str, Any]
    parts: Mapping[str, Bytes]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts.values())


class Codec(Protocol):
    """One way to write an array."""

    id: str

    def encode(self, bits: Bits, reference: Reference, *, floating: bool, level: int) -> Encoded | None:
        """Encode, or None where this codec does not apply.

        Parameters
        ----------
        bits
            ``(numel,)`` bit patterns.
        reference
            What it may be predicted from.
        floating
            Whether the patterns are of IEEE floating-point numbers (bfloat16 included).
        level
            Of zstd.
        """

    def decode(self, encoded: Encoded, numel: int, itemsize: int, reference: Reference, *, floating: bool) -> Bits:
        """The array again.

        Raises
        ------
        CodecError
            If the parts do not make up ``numel`` elements of ``itemsize`` bytes.
        """


def compress(data: Bytes, level: int) -> Bytes:
    """A zstd frame with its content size and checksum; the GIL is released meanwhile."""
    compressor = zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True)
    return np.frombuffer(compressor.compress(data.data), dtype=np.uint8)


def decompress(frame: Bytes, nbytes: int) -> Bytes:
    """The ``nbytes`` that a frame holds; its claim is checked before anything is allocated.

    Raises
    ------
    CodecError
        If it is no intact frame of that size.
    """
    try:
        claimed = zstandard.frame_content_size(frame.data)
        if claimed != nbytes or nbytes > MAX_PART:
            raise CodecError(f"a compressed part claims {claimed} bytes where {nbytes} belong")
        data = zstandard.ZstdDecompressor().decompress(frame.data, max_output_size=nbytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodecError(f"a compressed part is damaged: {error}") from None
    if len(data) != nbytes:
        raise CodecError(f"a compressed part holds {len(data)} bytes where {nbytes} belong")
    return np.frombuffer(data, dtype=np.uint8)


def planes(values: Bits, level: int, prefix: str = "") -> dict[str, Bytes]:
    """Byte planes of integers, each compressed where that helps, by part name.

    Plane ``0`` is the least significant. A name ends in ``z`` for a zstd frame and in ``r`` for raw bytes; a plane of
    zeros is left out.
    """
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    rows = little.view(np.uint8).reshape(-1, values.dtype.itemsize)
    parts = {}
    for plane in range(values.dtype.itemsize):
        data = np.ascontiguousarray(rows[:, plane])
        if not data.any():
            continue
        frame = compress(data, level)
        smaller = frame.nbytes < data.nbytes
        parts[f"{prefix}{plane}{'z' if smaller else 'r'}"] = frame if smaller else data
    return parts


def from_planes(parts: Mapping[str, Bytes], numel: int, itemsize: int, prefix: str = "") -> Bits:
    """The integers that :func:`planes` took apart.

    Raises
    ------
    CodecError
        If a part is of another size than ``numel`` or damaged.
    """
    if numel * itemsize > MAX_PART:
        raise CodecError(f"{numel} elements of {itemsize} bytes are more than a tensor can have")
    rows = np.zeros((numel, itemsize), dtype=np.uint8)
    for plane in range(itemsize):
        frame, raw = parts.get(f"{prefix}{plane}z"), parts.get(f"{prefix}{plane}r")
        if frame is not None and raw is not None:
            raise CodecError(f"plane {plane} is there twice")
        if frame is not None:
            rows[:, plane] = decompress(frame, numel)
        elif raw is not None:
            if raw.nbytes != numel:
                raise CodecError(f"plane {plane} has {raw.nbytes} bytes where {numel} belong")
            rows[:, plane] = raw
    return rows.reshape(-1).view(f"<u{itemsize}").astype(f"=u{itemsize}", copy=False)
