"""What a codec is: an id, numbers that describe an encoding, byte parts; encode and decode are exact inverses.

Codecs work on NumPy arrays of bit patterns (unsigned integers of the element's size), so that the offline tools decode
without torch and no floating-point rule can change a value on its way. Imports NumPy and zstandard alone.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import zstandard

from ds_galore.errors import DsGaloreError

__all__ = [
    "ZSTD",
    "Bits",
    "Bytes",
    "Codec",
    "CodecError",
    "Compressor",
    "Encoded",
    "Reference",
    "decompress",
    "pack",
    "room",
    "unpack",
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

    def encode(self, bits: Bits, reference: Reference, *, floating: bool, compressor: Compressor) -> Encoded | None:
        """Encode, or None where this codec does not apply.

        Parameters
        ----------
        bits
            ``(numel,)`` bit patterns.
        reference
            What it may be predicted from.
        floating
            Whether the patterns are of IEEE floating-point numbers (bfloat16 included).
        compressor
            Of byte planes.
        """

    def decode(self, encoded: Encoded, out: Bits, reference: Reference, *, floating: bool) -> None:
        """Put the array into ``out``, ``(numel,)`` contiguous words of its element size.

        Raises
        ------
        CodecError
            If the parts do not make up as many elements of that size; ``out`` may then hold anything.
        """


@dataclass(frozen=True)
class Compressor:
    """What compresses byte planes.

    Parameters
    ----------
    name
        ``"zstd"``, or ``"lz4"``, which needs the package lz4: faster, and larger.
    level
        Its level.
    """

    name: str = "zstd"
    level: int = 1

    @property
    def mark(self) -> str:
        """What names of parts that it made end in."""
        return "z" if self.name == "zstd" else "l"

    def compress(self, data: Bytes) -> Bytes:
        """A frame with its content size and checksum; the GIL is released meanwhile."""
        if self.name == "lz4":
            level = {"compression_level": self.level - 1, "content_checksum": True, "store_size": True}
            return np.frombuffer(lz4_frame().compress(data.data, **level), dtype=np.uint8)
        usual, few = _ways(self.level)
        frame = few.compress(data.data)
        begin = max(data.size - SAMPLE, 0) // 2
        part = data[begin : begin + SAMPLE]
        if len(usual.compress(part.data)) * data.size < len(frame) * part.size:
            frame = min(frame, usual.compress(data.data), key=len)
        return np.frombuffer(frame, dtype=np.uint8)


#: Level 1 was as good as 3 on byte planes.
ZSTD = Compressor()

#: Bytes from the middle of a plane on which it is decided whether to look for repetitions in the whole of it.
SAMPLE = 2**14

_OWN = threading.local()  # a compressor serves one thread at a time, and takes longer to make than to use


def _ways(level: int) -> tuple[zstandard.ZstdCompressor, zstandard.ZstdCompressor]:
    """How zstd may compress a plane: as its level says, or looking for hardly any repetitions.

    Exponents are few values in an order that does not repeat: what zstd finds there by chance takes more room than
    Huffman's code of each by itself, and three times the time (docs/performance.md).
    """
    made: dict[int, tuple[zstandard.ZstdCompressor, zstandard.ZstdCompressor]] = _OWN.__dict__.setdefault("ways", {})
    if level not in made:
        usual, few = (
            zstandard.ZstdCompressor(
                compression_params=zstandard.ZstdCompressionParameters.from_level(
                    level, write_checksum=True, write_content_size=True, **changed
                )
            )
            for changed in ({}, {"strategy": zstandard.STRATEGY_FAST, "hash_log": 6, "min_match": 7})
        )
        made[level] = usual, few
    return made[level]


def lz4_frame() -> Any:
    """The module ``lz4.frame``.

    Raises
    ------
    CodecError
        If the package lz4 is not installed.
    """
    try:
        import lz4.frame
    except ImportError:
        raise CodecError("the package lz4 is needed, and not installed: pip install lz4") from None
    return lz4.frame


def decompress(frame: Bytes, nbytes: int, mark: str = "z") -> Bytes:
    """The ``nbytes`` that a frame holds; its claim is checked before anything is allocated.

    Raises
    ------
    CodecError
        If it is no intact frame of that size.
    """
    if mark == "l":
        return _decompress_lz4(frame, nbytes)
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


def _decompress_lz4(frame: Bytes, nbytes: int) -> Bytes:
    lz4 = lz4_frame()
    try:
        claimed = lz4.get_frame_info(frame.data)["content_size"]
        if claimed != nbytes or nbytes > MAX_PART:
            raise CodecError(f"a compressed part claims {claimed} bytes where {nbytes} belong")
        decompressor = lz4.LZ4FrameDecompressor()
        data = decompressor.decompress(frame.data, max_length=nbytes + 1)  # one more, to come to the checksum
    except RuntimeError as error:
        raise CodecError(f"a compressed part is damaged: {error}") from None
    if len(data) != nbytes or not decompressor.eof or decompressor.unused_data:
        raise CodecError(f"a compressed part holds other than the {nbytes} bytes that belong there")
    return np.frombuffer(data, dtype=np.uint8)


def room(numel: int, itemsize: int) -> Bits:
    """Memory for so many words.

    Raises
    ------
    CodecError
        If there is none, or a tensor cannot have so many.
    """
    try:
        if numel * itemsize <= MAX_PART:
            return np.empty(numel, dtype=f"=u{itemsize}")
    except MemoryError:
        pass
    raise CodecError(f"{numel} elements of {itemsize} bytes are more than there is memory for")


def pack(planes: Sequence[Bytes | None], compressor: Compressor, prefix: str = "") -> dict[str, Bytes]:
    """Byte planes, as :func:`ds_galore.checkpoint.codecs.words.split` makes them, each compressed where that helps.

    Plane ``0`` is the least significant. A name ends in ``z`` for a zstd frame, in ``l`` for an lz4 frame and in ``r``
    for raw bytes; a plane of zeros is left out.
    """
    parts = {}
    for number, plane in enumerate(planes):
        if plane is None:
            continue
        frame = compressor.compress(plane)
        smaller = frame.nbytes < plane.nbytes
        parts[f"{prefix}{number}{compressor.mark if smaller else 'r'}"] = frame if smaller else plane
    return parts


def unpack(parts: Mapping[str, Bytes], numel: int, itemsize: int, prefix: str = "") -> tuple[Bytes | None, ...]:
    """The byte planes that :func:`pack` compressed.

    Raises
    ------
    CodecError
        If a part is of another size than ``numel`` or damaged.
    """
    planes: list[Bytes | None] = []
    for number in range(itemsize):
        found = [mark for mark in "zlr" if f"{prefix}{number}{mark}" in parts]
        if len(found) > 1:
            raise CodecError(f"plane {number} is there twice")
        if not found:
            planes.append(None)
            continue
        raw = parts[f"{prefix}{number}{found[0]}"]
        if found[0] == "r" and raw.nbytes != numel:
            raise CodecError(f"plane {number} has {raw.nbytes} bytes where {numel} belong")
        planes.append(raw if found[0] == "r" else decompress(raw, numel, found[0]))
    return tuple(planes)
