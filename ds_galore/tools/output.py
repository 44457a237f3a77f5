"""Writing safetensors files tensor by tensor, and directories that appear complete or not at all.

Imports NumPy, ml_dtypes and the standard library.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import struct
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from ds_galore.checkpoint.codecs.base import Bits
from ds_galore.checkpoint.files import DTYPES, sync_directory
from ds_galore.errors import DataError
from ds_galore.tools.source import Info
from ds_galore.tools.threads import run_all

__all__ = ["SafetensorsFile", "cast", "in_threads", "keep_apart", "new_directory", "plan_shards"]

FLOATS = ("F64", "F32", "F16", "BF16")


def _numpy_dtype(name: str) -> np.dtype[np.generic]:
    if name == "BF16":
        import ml_dtypes

        bfloat16: np.dtype[np.generic] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype({"F64": np.float64, "F32": np.float32, "F16": np.float16}[name])


def cast(bits: Bits, source: str, target: str) -> Bits:
    """Bit patterns of floating-point numbers in another floating-point dtype: rounded to nearest even, or widened.

    Patterns of equal dtypes, and of what is no floating-point number, are returned as they are.
    """
    if source == target or source not in FLOATS:
        return bits
    with np.errstate(over="ignore", invalid="ignore"):  # overflow becomes infinity
        values = np.ascontiguousarray(bits).view(_numpy_dtype(source)).astype(_numpy_dtype(target))
    return values.view(f"u{values.dtype.itemsize}")


def plan_shards(tensors: Mapping[str, Info], limit: int) -> list[list[str]]:
    """Names of tensors by file, in their order, so that no file of several tensors is over ``limit`` bytes."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, info in tensors.items():
        if shards[-1] and size + info.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += info.nbytes
    return shards


@dataclass(frozen=True)
class _Place:
    offset: int
    nbytes: int


def _reserve(descriptor: int, nbytes: int) -> None:
    """Let a file have its length; a full disk is told now, where the file system can."""
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(descriptor, nbytes)


class SafetensorsFile:
    """A safetensors file whose tensors are written one by one, in any order, from several threads.

    Parameters
    ----------
    path
        Of the file; it must not exist.
    tensors
        By name, what will be written.
    metadata
        Strings for its ``__metadata__``.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Info], metadata: Mapping[str, str]) -> None:
        self.path = path
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        self._places: dict[str, _Place] = {}
        offset = 0
        # Larger elements first, as the format's own writer orders them, so that each is aligned.
        for name, info in sorted(tensors.items(), key=lambda item: -DTYPES[item[1].dtype]):
            end = offset + info.nbytes
            header[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [offset, end]}
            self._places[name] = _Place(offset, info.nbytes)
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._begin = 8 + len(text)
        self.nbytes = self._begin + offset
        self._file = path.open("xb")
        try:
            self._file.write(struct.pack("<Q", len(text)) + text)
            self._file.flush()
            _reserve(self._file.fileno(), self.nbytes)
        except BaseException:
            self._file.close()
            raise

    def write(self, name: str, bits: Bits) -> None:
        """Write a tensor."""
        place = self._places[name]
        little = np.ascontiguousarray(bits.astype(bits.dtype.newbyteorder("<"), copy=False))
        data = little.view(np.uint8).data if little.size else memoryview(b"")
        if len(data) != place.nbytes:
            raise ValueError(f"{name}: {len(data)} bytes where {place.nbytes} belong")
        position = self._begin + place.offset
        while data:
            written = os.pwrite(self._file.fileno(), data[: 2**26], position)
            data, position = data[written:], position + written

    def close(self) -> None:
        """Make it durable."""
        try:
            os.fsync(self._file.fileno())
        finally:
            self._file.close()


@contextlib.contextmanager
def new_directory(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """A directory to write into, which takes the name ``path`` when the block ends, and is gone if it fails.

    Raises
    ------
    DataError
        If ``path`` is a file, or a directory that is not empty and is not to be overwritten.
    """
    path = path.resolve()  # a link's target is what is meant
    if path == Path.cwd() or os.path.ismount(path):
        what = "a mount point" if os.path.ismount(path) else "the current directory"
        raise DataError(f"{path}: is {what}, which cannot be replaced; name a directory in it")
    if path.exists() and not path.is_dir():
        raise DataError(f"{path}: is a file, and a directory is to be written")
    if path.is_dir() and any(path.iterdir()) and not overwrite:
        raise DataError(f"{path}: is not empty; give another directory, or --overwrite to replace it")
    parent = path.absolute().parent
    if not parent.is_dir():
        raise DataError(f"{parent}: no such directory, and {path.name} is to be made in it")
    try:
        made = Path(tempfile.mkdtemp(prefix=f".{path.name}.partial-", dir=parent))
    except OSError as error:
        raise DataError(f"{parent}: cannot be written to: {error.strerror}") from None
    old = made.with_name(f"{made.name}-replaced")
    try:
        yield made
        made.chmod(0o755)
        sync_directory(made)
        if path.exists():
            path.rename(old)
        try:
            made.rename(path)
        except BaseException:
            if old.exists():
                old.rename(path)
            raise
        sync_directory(parent)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


def keep_apart(target: Path, read: Path, name: str) -> None:
    """Refuse to write into what is read, or over it.

    Raises
    ------
    DataError
        If one is, or lies in, the other.
    """
    inner, outer = target.resolve(), read.resolve()
    if inner == outer or inner in outer.parents:
        raise DataError(f"{target}: is, or holds, {name} that is read; give another directory")
    if outer in inner.parents:
        raise DataError(f"{target}: lies in {name} that is read; give another directory")


def copy_files(source: Path, target: Path, names: Iterable[str]) -> Sequence[str]:
    """Copy those of some files that exist; which those were."""
    copied = []
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
            copied.append(name)
    return copied


def in_threads(
    work: Callable[[str], None],
    tensors: Mapping[str, Info],
    workers: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Work on every tensor, the largest first; the first error ends it."""
    total, done, lock = sum(info.nbytes for info in tensors.values()), 0, threading.Lock()

    def one(name: str) -> None:
        nonlocal done
        work(name)
        with lock:
            done += tensors[name].nbytes
            progress(done, total)

    with threadpool_limits(1, user_api="blas"):  # the workers are the parallelism
        run_all(one, sorted(tensors, key=lambda name: -tensors[name].nbytes), workers)
