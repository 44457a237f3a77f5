"""Reading ``torch.save`` files without torch and without executing anything that they hold.

Such a file is a zip archive with a pickle and, uncompressed, the storages of its tensors. The pickle is read by an
unpickler that knows a list of names; each stands for a description made here, never for the class that it names, so a
malicious file is refused or harmless. Of storages nothing is read before it is asked for. Imports NumPy and the
standard library.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
import threading
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ds_galore.checkpoint.codecs.base import Bits
from ds_galore.checkpoint.errors import DamageError, FormatError

__all__ = ["DType", "Opaque", "Size", "TorchFile", "TorchTensor"]

#: safetensors' names, and bytes of an element, by torch's storage classes and dtypes.
STORAGES = {
    "DoubleStorage": ("F64", 8),
    "FloatStorage": ("F32", 4),
    "HalfStorage": ("F16", 2),
    "BFloat16Storage": ("BF16", 2),
    "LongStorage": ("I64", 8),
    "IntStorage": ("I32", 4),
    "ShortStorage": ("I16", 2),
    "CharStorage": ("I8", 1),
    "ByteStorage": ("U8", 1),
    "BoolStorage": ("BOOL", 1),
    "UntypedStorage": ("U8", 1),
}
DTYPES = {
    "float64": ("F64", 8),
    "double": ("F64", 8),
    "float32": ("F32", 4),
    "float": ("F32", 4),
    "float16": ("F16", 2),
    "half": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int64": ("I64", 8),
    "long": ("I64", 8),
    "int32": ("I32", 4),
    "int": ("I32", 4),
    "int16": ("I16", 2),
    "short": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
MAX_PICKLE = 2**31
_BLOCK = 2**22
#: Classes that DeepSpeed and users' states hold, of which only the fields are of interest.
OPAQUE = frozenset(
    {
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.utils.tensor_fragment.fragment_address",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "torch.device",
        "numpy.dtype",
        "numpy.ndarray",
        "numpy.core.multiarray._reconstruct",
        "numpy._core.multiarray._reconstruct",
        "numpy.core.multiarray.scalar",
        "numpy._core.multiarray.scalar",
        "argparse.Namespace",
    }
)


class DType(str):
    """A torch dtype's name where a dtype stands."""


class Size(tuple[int, ...]):
    """A ``torch.Size``."""


class Opaque:
    """An object of a class that is not built: its name, the arguments it was made from, and its state."""

    name = ""
    arguments: tuple[Any, ...] = ()
    state: Any = None

    called = False  #: whether it was made by a call of its class, rather than as an object to be filled

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.called = True

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, value: Any) -> None:
        """As pickles of lists' subclasses ask for; forgotten."""

    def extend(self, values: Any) -> None:
        """As pickles of lists' subclasses ask for; forgotten."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """As pickles of dicts' subclasses ask for; forgotten."""


@dataclass(frozen=True)
class TorchTensor:
    """A tensor in a file, not read yet.

    Parameters
    ----------
    file
        That holds it.
    key
        Of its storage.
    dtype
        safetensors' name.
    itemsize
        Bytes of an element.
    shape, stride, offset
        In elements of the storage.
    """

    file: TorchFile
    key: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def __setstate__(self, state: Any) -> None:
        raise DamageError("a pickle changes a tensor's description")

    def _check(self) -> None:
        """Refuse what a pickle could have made of the description, before memory is read or allocated by it."""
        numbers = [self.offset, *self.shape, *self.stride]
        if any(type(each) is not int or each < 0 for each in numbers) or len(self.shape) != len(self.stride):
            raise DamageError(f"{self.file.path}: an impossible tensor")
        if self.numel > self.file.elements(self.key, self.itemsize):
            raise DamageError(f"{self.file.path}: a tensor of {self.numel} elements, more than its storage has")

    def bits(self, start: int = 0, stop: int | None = None) -> Bits:
        """Elements ``[start, stop)`` in row-major order as bit patterns.

        Raises
        ------
        DamageError
            If the storage does not hold them.
        """
        self._check()
        stop = self.numel if stop is None else stop
        if not 0 <= start <= stop <= self.numel:
            raise ValueError(f"[{start}, {stop}) does not lie in a tensor of {self.numel} elements")
        if stop == start:
            return np.zeros(0, dtype=f"u{self.itemsize}")
        if self.stride == _contiguous(self.shape):
            return self.file.read(self.key, self.itemsize, self.offset + start, stop - start)
        span = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        held = self.file.read(self.key, self.itemsize, self.offset, span)
        steps = [step * self.itemsize for step in self.stride]
        view = np.lib.stride_tricks.as_strided(held, self.shape, steps, writeable=False)
        return np.ascontiguousarray(view).reshape(-1)[start:stop]


def _latin1(*arguments: Any) -> bytes:
    """As pickles of protocol 2 ask for, for bytes."""
    if len(arguments) != 2 or not isinstance(arguments[0], str) or arguments[1] not in ("latin1", "latin-1"):
        raise DamageError("impossible bytes")
    return arguments[0].encode("latin-1")


def _bytearray(*arguments: Any) -> bytearray:
    """As pickles of bytearrays ask for; never of a size alone, which would be allocated."""
    if any(not isinstance(each, bytes | str) for each in arguments):
        raise DamageError("an impossible bytearray")
    return bytearray(*arguments)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= max(size, 1)
    return tuple(reversed(steps))


class TorchFile:
    """A file that ``torch.save`` wrote.

    Parameters
    ----------
    path
        Of the file.

    Raises
    ------
    FormatError
        If it is none, or of the format from before torch 1.6.
    DamageError
        If it is cut off or damaged, or names something that is not in the list of what may be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                if file.read(2) != b"PK":
                    raise FormatError(f"{path}: is no zip archive, as torch.save writes since torch 1.6")
            archive = zipfile.ZipFile(path)
        except OSError as error:
            raise DamageError(f"{path}: cannot be read: {error.strerror or error}") from None
        except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            raise DamageError(f"{path}: is damaged: {error}") from None
        with archive:
            members = {each.filename: each for each in archive.infolist()}
            name = next((each for each in members if each.endswith("/data.pkl")), None)
            if name is None:
                raise FormatError(f"{path}: is a zip archive, and none that torch.save wrote (no data.pkl)")
            prefix = name.removesuffix("data.pkl")
            if archive.getinfo(name).file_size > MAX_PICKLE:
                raise DamageError(f"{path}: its pickle claims {archive.getinfo(name).file_size} bytes")
            order = members.get(f"{prefix}byteorder")
            try:
                if order is not None and order.file_size > 16:
                    raise DamageError(f"{path}: is damaged: its byte order takes {order.file_size} bytes")
                if order is not None and archive.read(order).strip() not in (b"little", b""):
                    raise FormatError(f"{path}: was written on a big-endian machine, which is not supported")
                data = archive.read(name)
            except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError) as error:
                raise DamageError(f"{path}: is damaged: {error}") from None
        self._size = path.stat().st_size
        self._storages = {
            each.removeprefix(f"{prefix}data/"): info
            for each, info in members.items()
            if each.startswith(f"{prefix}data/")
        }
        self._begins: dict[str, int] = {}
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._checked: set[str] = set()
        try:
            self.content: Any = _Unpickler(self, data).load()
        except (FormatError, DamageError):
            raise
        except Exception as error:  # noqa: BLE001 - a damaged pickle raises nearly anything
            raise DamageError(f"{path}: its pickle is damaged: {type(error).__name__}: {error}") from None

    def _read_into(self, view: memoryview, position: int) -> int:
        """Bytes from the file into memory; how many. It is open only meanwhile: a checkpoint may have many files."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            raise DamageError(f"{self.path}: is gone") from None
        try:
            done = 0
            while done < len(view):
                got = os.preadv(descriptor, [view[done : done + 2**30]], position + done)
                if not got:
                    break
                done += got
            return done
        finally:
            os.close(descriptor)

    def read(self, key: str, itemsize: int, start: int, count: int) -> Bits:
        """Elements of a storage as bit patterns. Safe from several threads.

        The archive's checksum of a storage is checked before the first of its elements is given.

        Raises
        ------
        DamageError
            If they are not there, or the storage is not what was written.
        """
        self.check(key)
        begin, length = self._where(key), self._storages[key].file_size
        if start < 0 or (start + count) * itemsize > length:
            raise DamageError(f"{self.path}: a tensor reaches beyond its storage {key!r}")
        data = np.empty(count * itemsize, dtype=np.uint8)
        if self._read_into(data.data, begin + start * itemsize) < data.nbytes:
            raise DamageError(f"{self.path}: ends before storage {key!r} does")
        return data.view(f"<u{itemsize}").astype(f"=u{itemsize}", copy=False)

    def storages(self) -> list[str]:
        """The keys of all storages."""
        return list(self._storages)

    def check(self, key: str) -> None:
        """Compare a storage with the archive's checksum, once.

        Raises
        ------
        DamageError
            If it is not what was written.
        """
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key in self._checked:
                return
            position, left, checksum = self._where(key), self._storages[key].file_size, 0
            buffer = bytearray(min(left, _BLOCK))
            while left:
                view = memoryview(buffer)[: min(left, _BLOCK)]
                if self._read_into(view, position) < len(view):
                    raise DamageError(f"{self.path}: ends before storage {key!r} does")
                checksum, position, left = zlib.crc32(view, checksum), position + len(view), left - len(view)
            if checksum != self._storages[key].CRC:
                raise DamageError(f"{self.path}: is damaged at storage {key!r}: its checksum differs")
            self._checked.add(key)

    def elements(self, key: str, itemsize: int) -> int:
        """How many elements a storage has, by the archive's table."""
        info = self._storages.get(key)
        return info.file_size // itemsize if info is not None else 0

    def _where(self, key: str) -> int:
        """Where a storage begins in the file."""
        if key in self._begins:
            return self._begins[key]
        info = self._storages.get(key)
        if info is None:
            raise DamageError(f"{self.path}: storage {key!r} is missing")
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise DamageError(f"{self.path}: storage {key!r} is compressed, which torch.save never does")
        head = bytearray(30)
        if self._read_into(memoryview(head), info.header_offset) < 30 or head[:4] != b"PK\x03\x04":
            raise DamageError(f"{self.path}: storage {key!r} is not where the archive says")
        name_length, extra_length = struct.unpack("<HH", head[26:30])
        begin: int = info.header_offset + 30 + name_length + extra_length
        if begin + info.file_size > self._size:
            raise DamageError(f"{self.path}: storage {key!r} reaches beyond the end of the file")
        self._begins[key] = begin
        return begin


class _Storage:
    def __init__(self, dtype: str, itemsize: int, key: str) -> None:
        self.dtype, self.itemsize, self.key = dtype, itemsize, key

    def __setstate__(self, state: Any) -> None:
        raise DamageError("a pickle changes a storage's description")


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: TorchFile, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._file = file

    def persistent_load(self, identifier: Any) -> Any:
        kind, storage, key, *_ = identifier
        if kind != "storage" or not isinstance(storage, tuple) or not isinstance(key, str):
            raise DamageError(f"{self._file.path}: an unknown kind of storage: {kind!r}")
        return _Storage(storage[0], storage[1], key)

    def find_class(self, module: str, name: str) -> Any:
        full = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        if full == "torch.storage.UntypedStorage":
            return STORAGES["UntypedStorage"]
        if module == "torch" and name in DTYPES:
            return DType(name)
        known: dict[str, Callable[..., Any]] = {
            "collections.OrderedDict": OrderedDict,
            "collections.defaultdict": lambda *_: {},
            "builtins.set": set,
            "builtins.frozenset": frozenset,
            "builtins.bytearray": _bytearray,
            "builtins.bytes": lambda *arguments: bytes(_bytearray(*arguments)),
            **{f"builtins.{each.__name__}": each for each in (list, dict, int, float, str)},
            "builtins.long": int,
            "_codecs.encode": _latin1,
            "builtins.complex": complex,
            "torch.Size": Size,
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_tensor": self._tensor,
            "torch._tensor._rebuild_from_type_v2": self._with_attributes,
            "torch._utils._rebuild_parameter": lambda data, *_: data,
            "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
        }
        if full in known:
            return known[full]
        if full in ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter"):
            return full
        if full in OPAQUE:
            return type("Opaque", (Opaque,), {"name": full})
        raise DamageError(
            f"{self._file.path}: names {full}, which is not among what may be read; the file was not executed"
        )

    def _with_attributes(self, rebuild: Any, kind: Any, arguments: Any, state: Any) -> TorchTensor:
        """A tensor to which somebody has attached attributes, which are of no interest here."""
        if rebuild != self._tensor:
            raise DamageError(f"{self._file.path}: an impossible tensor")
        return self._tensor(*arguments)

    def _tensor(self, storage: _Storage, offset: int, shape: Any, stride: Any, *_: Any) -> TorchTensor:
        numbers = [offset, *shape, *stride]
        if not isinstance(storage, _Storage) or any(type(each) is not int or each < 0 for each in numbers):
            raise DamageError(f"{self._file.path}: an impossible tensor")
        if len(tuple(shape)) != len(tuple(stride)):
            raise DamageError(f"{self._file.path}: an impossible tensor")
        return TorchTensor(
            self._file, storage.key, storage.dtype, storage.itemsize, tuple(shape), tuple(stride), offset
        )
