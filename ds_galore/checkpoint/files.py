"""Writing and reading one data file: encoded shards in a safetensors file.

Imports NumPy, safetensors and the codecs.
"""

from __future__ import annotations

import builtins
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from ds_galore.checkpoint.codecs import Encoded
from ds_galore.checkpoint.codecs.base import Bytes
from ds_galore.checkpoint.digests import PREFIX, Digest, small_digest
from ds_galore.checkpoint.errors import DamageError, FormatError
from ds_galore.checkpoint.scratch import Kept, KeptEncoded

__all__ = [
    "DTYPES",
    "FORMAT",
    "READABLE",
    "VERSION",
    "DataFile",
    "Entry",
    "FileRecord",
    "replace_file",
    "write_data_file",
]

FORMAT = "ds_galore.checkpoint"
VERSION = 2
#: Versions that this program reads; in version 1 all digests are BLAKE2b's.
READABLE = (1, 2)
#: Bytes of an element by safetensors' dtype name, and which are floating-point.
DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1} | {
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}
MAX_ELEMENTS = 2**40


def reads() -> str:
    """What to say where a version is none of :data:`READABLE`."""
    return f"this program reads versions {' and '.join(map(str, READABLE))}; install a newer one for others"


@dataclass(frozen=True)
class Entry:
    """A shard's line in the table of a data file; see docs/format.md."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    codec: str
    params: Mapping[str, Any]
    parts: tuple[str, ...]
    digest: str

    @property
    def numel(self) -> int:
        """Elements in the shard."""
        return self.stop - self.start

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype]

    @property
    def floating(self) -> bool:
        """Whether its elements are floating-point numbers."""
        return self.dtype in ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class FileRecord:
    """A written file as the manifest lists it.

    Parameters
    ----------
    name, bytes, digest
        Of the whole file.
    header
        Digest of its header alone, which is checked whenever the file is opened: the names and ranges in it are
        covered by no other digest that a reader of some tensors computes.
    """

    name: str
    bytes: int
    digest: str
    header: str = ""

    @classmethod
    def of(cls, name: str, data: builtins.bytes, like: str = PREFIX) -> FileRecord:
        """The record of a file that holds ``data``, its digest of the kind of ``like``."""
        state = Digest(like)
        state.update(data)
        return cls(name, len(data), state.text)


def sync_directory(path: Path) -> None:
    """Make renames in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(
    path: Path, blocks: Iterable[bytes | memoryview], *, mode: int = 0o644, like: str = PREFIX
) -> FileRecord:
    """Write a file so that its name holds either what it held before or all of ``blocks``, durably.

    The digest in its record is of the kind of ``like``.

    Raises
    ------
    OSError
        If it cannot be written; the temporary file is then gone.
    """
    temporary = path.with_name(f".writing-{os.getpid()}-{path.name}")
    state, size = Digest(like), 0
    try:
        with temporary.open("wb") as file:
            for block in blocks:
                file.write(block)
                state.update(block)
                size += len(block)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
    return FileRecord(path.name, size, state.text)


def write_data_file(path: Path, shards: Iterable[tuple[Entry, Encoded | KeptEncoded]]) -> FileRecord:
    """Write encoded shards as a read-only safetensors file.

    Parameters
    ----------
    path
        Where; an existing file is replaced at the end, by a rename.
    shards
        Each with its entry, whose ``parts`` are those of the encoding.
    """
    table, header, parts, offset = [], {}, [], 0
    for index, (entry, encoded) in enumerate(shards):
        table.append(
            {
                "name": entry.name,
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "range": [entry.start, entry.stop],
                "codec": encoded.codec,
                "params": dict(encoded.params),
                "parts": list(encoded.parts),
                "digest": entry.digest,
            }
        )
        for part, data in encoded.parts.items():
            end = offset + data.nbytes
            header[f"{index}/{part}"] = {"dtype": "U8", "shape": [data.nbytes], "data_offsets": [offset, end]}
            parts.append(data)
            offset = end
    metadata = {"format": FORMAT, "version": str(VERSION), "shards": json.dumps(table, separators=(",", ":"))}
    text = json.dumps({"__metadata__": metadata, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    head = struct.pack("<Q", len(text)) + text

    def blocks() -> Iterator[bytes | memoryview]:
        yield head
        for data in parts:
            yield (data.elements(0, data.size) if isinstance(data, Kept) else np.ascontiguousarray(data)).data

    return replace(replace_file(path, blocks(), mode=0o444), header=small_digest(head))


class DataFile:
    """A data file; its table is checked when it is opened. Reading is safe from several threads.

    Parameters
    ----------
    path
        Of the file.
    header
        Digest of its header.

    Raises
    ------
    FormatError
        If it is of another format or version.
    DamageError
        If it is missing, cut off, or its table is impossible.
    """

    def __init__(self, path: Path, header: str) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
            size = os.fstat(self._descriptor).st_size
            (length,) = struct.unpack("<Q", os.pread(self._descriptor, 8, 0).ljust(8, b"\0"))
            if length > size:
                raise DamageError(f"{path}: its header claims {length} bytes, more than the file has")
            head = os.pread(self._descriptor, 8 + length, 0)
            if small_digest(head) != header:
                raise DamageError(f"{path}: its header is not what was written (its digest differs)")
            opened: Any = safe_open
            file = opened(str(path), framework="numpy")  # which checks the header
            metadata = file.metadata() or {}
            self._parts = {
                key: (8 + length + value["data_offsets"][0], 8 + length + value["data_offsets"][1], value["dtype"])
                for key, value in json.loads(head[8:]).items()
                if key != "__metadata__"
            }
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise DamageError(f"{path}: cannot be read: {error}") from None
        if metadata.get("format") != FORMAT:
            raise FormatError(f"{path}: is no data file of ds_galore (format {metadata.get('format')!r})")
        if metadata.get("version") not in [str(version) for version in READABLE]:
            raise FormatError(f"{path}: has format version {metadata.get('version')!r}; {reads()}")
        try:
            table = json.loads(metadata.get("shards", ""))
            self.entries = [_entry(each) for each in table]
        except (json.JSONDecodeError, RecursionError, KeyError, TypeError, ValueError) as error:
            raise DamageError(f"{path}: its table of shards is damaged: {error}") from None
        for index, entry in enumerate(self.entries):
            missing = [part for part in entry.parts if f"{index}/{part}" not in self._parts]
            if missing:
                raise DamageError(f"{path}: part {missing[0]!r} of {entry.name} is missing")

    def __del__(self) -> None:
        descriptor, self._descriptor = getattr(self, "_descriptor", -1), -1
        if descriptor >= 0:
            os.close(descriptor)

    def _read(self, begin: int, end: int) -> Bytes:
        """Bytes of the file. Not mapped: what has been read would count as this process's memory."""
        data = np.empty(end - begin, dtype=np.uint8)
        view = data.data
        while view:
            try:
                got = os.preadv(self._descriptor, [view[: 2**30]], begin)
            except OSError as error:
                raise DamageError(f"{self.path}: cannot be read: {error.strerror}") from None
            if got == 0:
                raise DamageError(f"{self.path}: ends before its data do")
            view, begin = view[got:], begin + got
        return data

    def stored(self, index: int) -> int:
        """Bytes of the encoded form of shard ``index``."""
        places = (self._parts[f"{index}/{part}"] for part in self.entries[index].parts)
        return sum(end - begin for begin, end, _ in places)

    def encoded(self, index: int) -> Encoded:
        """The encoded form of shard ``index``."""
        entry = self.entries[index]
        parts: dict[str, Bytes] = {}
        for part in entry.parts:
            begin, end, dtype = self._parts[f"{index}/{part}"]
            if dtype != "U8":
                raise DamageError(f"{self.path}: part {part!r} of {entry.name} is {dtype}, expected bytes")
            parts[part] = self._read(begin, end)
        return Encoded(entry.codec, entry.params, parts)


def _entry(value: Any) -> Entry:
    shape, (start, stop) = tuple(value["shape"]), value["range"]
    numbers = [*shape, start, stop]
    if any(type(number) is not int or not 0 <= number <= MAX_ELEMENTS for number in numbers):
        raise ValueError(f"impossible shape {shape} or range [{start}, {stop})")
    if not start <= stop <= math.prod(shape):
        raise ValueError(f"the range [{start}, {stop}) does not lie in a tensor of shape {shape}")
    texts = [value["name"], value["dtype"], value["codec"], value["digest"], *value["parts"]]
    if any(not isinstance(text, str) for text in texts) or not isinstance(value["params"], dict):
        raise ValueError(f"impossible entry for {value['name']!r}")
    if value["dtype"] not in DTYPES:
        raise ValueError(f"unknown dtype {value['dtype']!r}")
    parts = tuple(value["parts"])
    return Entry(
        value["name"], value["dtype"], shape, start, stop, value["codec"], value["params"], parts, value["digest"]
    )
