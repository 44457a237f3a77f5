"""Arrays that wait in a file instead of memory.

Imports NumPy and the codecs.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_galore.checkpoint.codecs.base import Encoded

__all__ = ["Kept", "KeptEncoded", "Scratch"]


class Scratch:
    """A file of arrays that are to leave memory for a while; it has no name any more once it is open.

    Safe from several threads.

    Parameters
    ----------
    path
        Where it is made.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("x+b")
        path.unlink()
        self._lock = threading.Lock()
        self._end = 0

    def keep(self, array: npt.NDArray[Any]) -> Kept:
        """Write a flat array."""
        data = np.ascontiguousarray(array).view(np.uint8).data
        with self._lock:
            begin, self._end = self._end, self._end + len(data)
        position = begin
        while data:
            written = os.pwrite(self._file.fileno(), data[: 2**26], position)
            data, position = data[written:], position + written
        return Kept(self._file.fileno(), begin, array.size, array.dtype)

    def keep_encoded(self, encoded: Encoded) -> KeptEncoded:
        """Write the parts of an encoded array."""
        parts = {name: self.keep(part) for name, part in encoded.parts.items()}
        return KeptEncoded(encoded.codec, encoded.params, parts)

    def close(self) -> None:
        """Let it go."""
        self._file.close()


@dataclass(frozen=True)
class Kept:
    """A flat array in a scratch file."""

    descriptor: int
    begin: int
    size: int
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Of the array."""
        return self.size * self.dtype.itemsize

    def elements(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Elements ``[start, stop)``."""
        if not 0 <= start <= stop <= self.size:
            raise ValueError(f"[{start}, {stop}) does not lie in {self.size} elements")
        found = np.empty(stop - start, dtype=self.dtype)
        view, position = found.view(np.uint8).data, self.begin + start * self.dtype.itemsize
        while view:
            got = os.preadv(self.descriptor, [view[: 2**30]], position)
            if got == 0:
                raise OSError(errno.EIO, "a scratch file ended early")
            view, position = view[got:], position + got
        return found


@dataclass(frozen=True)
class KeptEncoded:
    """An encoded array whose parts wait in a scratch file."""

    codec: str
    params: Mapping[str, Any]
    parts: Mapping[str, Kept]
