"""Digests by which damage is found: of decoded tensors and of whole files.

They tell what a disk or a network did to the data, not what somebody did on purpose: a checkpoint is not signed.
XXH3 (128 bits) takes a thirtieth of BLAKE2b's time, which was the largest part of a load's. Imports xxhash and NumPy.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from ds_galore.checkpoint.codecs.base import Bits

__all__ = ["PREFIX", "Digest", "digest_of", "file_digest", "matches", "small_digest"]

#: What stands before an XXH3 digest. One without a prefix is BLAKE2b's: format version 1 knows no other.
PREFIX = "xxh3:"

_CHUNK = 2**22


class _State(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


class Digest:
    """A digest of bytes that come in blocks.

    Parameters
    ----------
    like
        A digest of the wanted kind, where it is to be compared with that; by default the one that is written.
    """

    def __init__(self, like: str = PREFIX) -> None:
        self._prefix = PREFIX if like.startswith(PREFIX) else ""
        self._state: _State = xxhash.xxh3_128() if self._prefix else hashlib.blake2b(digest_size=16)

    def update(self, data: bytes | memoryview) -> None:
        """Take in a block."""
        self._state.update(data)

    @property
    def text(self) -> str:
        """Of all blocks, as it stands in tables and manifests."""
        return self._prefix + self._state.hexdigest()


def digest_of(bits: Bits, like: str = PREFIX) -> str:
    """The digest of an array's little-endian bytes, of the kind of ``like``."""
    little = np.ascontiguousarray(bits.astype(bits.dtype.newbyteorder("<"), copy=False))
    found = Digest(like)
    found.update(little.view(np.uint8).data)
    return found.text


def matches(bits: Bits, digest: str) -> bool:
    """Whether an array has a digest, of whatever kind that is."""
    return digest_of(bits, digest) == digest


def file_digest(path: Path, like: str = PREFIX) -> str:
    """The digest of a whole file, of the kind of ``like``.

    Raises
    ------
    OSError
        If it cannot be read.
    """
    found = Digest(like)
    with path.open("rb") as file:
        while block := file.read(_CHUNK):
            found.update(block)
    return found.text


def small_digest(data: bytes) -> str:
    """BLAKE2b of 16 bytes, hexadecimal: of what is small, headers and manifests, in every version of the format."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()
