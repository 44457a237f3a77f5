"""Writing ``torch.save`` files without torch, tensor by tensor.

The format is that of torch 1.6 and later: a zip archive of a pickle (protocol 2) and, uncompressed, one file a storage.
Classes are written by name and need not be there. Imports NumPy and the standard library.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from base64 import b64decode
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ds_galore.checkpoint.codecs.base import Bits
from ds_galore.checkpoint.errors import DamageError
from ds_galore.errors import DataError, DsGaloreError
from ds_galore.tools.states import Form, Leaf, Object
from ds_galore.tools.torchfile import Opaque

__all__ = ["write_torch_file"]

#: torch's storage classes, and bytes of an element, by dtype.
STORAGES = {
    "float64": ("DoubleStorage", 8),
    "float32": ("FloatStorage", 4),
    "float16": ("HalfStorage", 2),
    "bfloat16": ("BFloat16Storage", 2),
    "int64": ("LongStorage", 8),
    "int32": ("IntStorage", 4),
    "int16": ("ShortStorage", 2),
    "int8": ("CharStorage", 1),
    "uint8": ("ByteStorage", 1),
    "bool": ("BoolStorage", 1),
    "complex64": ("ComplexFloatStorage", 8),
    "complex128": ("ComplexDoubleStorage", 16),
}
#: Bytes at whose multiples torch lets storages begin.
ALIGNMENT = 64

Read = Callable[[Leaf], Iterable[Bits]]


class _Global:
    """Something that is written as a module and a name."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    @classmethod
    def of(cls, full: str) -> _Global:
        module, _, name = full.rpartition(".")
        return cls(module, name)

    def __call__(self) -> None:
        """The pickler wants what is reduced to be callable."""


_Base: Any = pickle._Pickler  # the one in Python, whose methods can be replaced


class _Pickler(_Base):  # type: ignore[misc]
    dispatch: ClassVar[dict[Any, Any]] = dict(_Base.dispatch)

    def __init__(self, file: Any, path: Path, read: Read) -> None:
        super().__init__(file, protocol=2)
        self._path = path
        self._values = read
        self.storages: dict[tuple[Any, ...], Leaf] = {}  #: in the order of their keys
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._globals: dict[str, _Global] = {}

    def _named(self, full: str) -> _Global:
        return self._globals.setdefault(full, _Global.of(full))  # one object a name, so that it is written once

    def save_global_name(self, value: _Global) -> None:
        self.write(pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode())
        self.memoize(value)

    def save_leaf(self, leaf: Leaf) -> None:
        if leaf.tag == "array":
            bits = list(self._values(leaf))
            whole = np.concatenate(bits) if bits else np.zeros(0, dtype=np.uint8)
            self.save(whole.view(leaf.dtype).reshape(leaf.shape).copy())
            return
        if leaf.tag == "parameter":
            tensor = Leaf("tensor", leaf.dtype, leaf.shape, leaf.pieces, leaf.own, leaf.serial)
            self.save_reduce(self._named("torch._utils._rebuild_parameter"), (tensor, False, OrderedDict()))
            return
        if leaf.dtype not in STORAGES:
            raise DataError(f"{self._path}: tensors of {leaf.dtype} cannot be written in torch's format")
        same = (leaf.pieces, leaf.dtype, leaf.shape, leaf.serial)
        self.storages.setdefault(same, leaf)
        number = self._numbers.setdefault(same, len(self._numbers))
        steps, step = [], 1
        for size in reversed(leaf.shape):
            steps.append(step)
            step *= max(size, 1)
        self.save(self._named("torch._utils._rebuild_tensor_v2"))
        self.write(pickle.MARK)
        storage = self._named(f"torch.{STORAGES[leaf.dtype][0]}")
        self.save(("storage", storage, str(number), "cpu", leaf.numel))
        self.write(pickle.BINPERSID)
        arguments: tuple[Any, ...] = (0, tuple(leaf.shape), tuple(reversed(steps)), False, OrderedDict())
        for argument in arguments:
            self.save(argument)
        self.write(pickle.TUPLE + pickle.REDUCE)

    def save_object(self, value: Object) -> None:
        self._save_new(value.name, (), dict(value.fields))

    def _save_new(self, name: str, arguments: tuple[Any, ...], state: Any) -> None:
        self.save(self._named(name))
        self.save(arguments)
        self.write(pickle.NEWOBJ)
        if state is not None:
            self.save(state)
            self.write(pickle.BUILD)

    def save_opaque(self, value: Opaque) -> None:
        if value.called:
            self.save_reduce(self._named(value.name), value.arguments, state=value.state)
        else:
            self._save_new(value.name, value.arguments, value.state)

    def save_form(self, form: Form) -> None:
        tag, *rest = form.value
        calls = {"size": ("torch.Size", (tuple(rest),)), "device": ("torch.device", tuple(rest[:1]))}
        if tag == "dtype":
            self.save(self._named(f"torch.{rest[0]}"))
        elif tag == "enum":
            self.save_reduce(self._named(str(rest[0])), (rest[1],))
        elif tag in calls:
            self.save_reduce(self._named(calls[tag][0]), calls[tag][1])
        elif tag == "float":
            self.save(float.fromhex(rest[0]))
        elif tag == "scalar":
            self.save(np.dtype(rest[0]).type(_plain(rest[1])))
        elif tag in ("set", "frozenset"):
            self.save({"set": set, "frozenset": frozenset}[tag](_plain(each) for each in rest))
        elif tag in ("bytes", "bytearray"):
            self.save({"bytes": bytes, "bytearray": bytearray}[tag](b64decode(rest[0])))
        else:
            raise DataError(f"{self._path}: a value of the unknown form {tag!r} cannot be written")

    dispatch[_Global] = save_global_name
    dispatch[Leaf] = save_leaf
    dispatch[Object] = save_object
    dispatch[Form] = save_form

    def save(self, value: Any, save_persistent_id: bool = True) -> None:
        if isinstance(value, Opaque):  # a class of its own for each name
            self.save_opaque(value)
        elif type(value).__module__.startswith("ds_galore.") and type(value) not in self.dispatch:
            raise DataError(f"{self._path}: a {type(value).__name__} stands where it cannot be written")
        else:
            super().save(value, save_persistent_id)


def _plain(value: Any) -> Any:
    """A member of a set, or the value of a scalar, out of its tagged form."""
    if not isinstance(value, dict):
        return value
    tag, *rest = value["$"]
    if tag == "float":
        return float.fromhex(rest[0])
    if tag in ("tuple", "frozenset"):
        return {"tuple": tuple, "frozenset": frozenset}[tag](_plain(each) for each in rest)
    if tag == "bytes":
        return b64decode(rest[0])
    if tag == "scalar":
        return np.dtype(rest[0]).type(_plain(rest[1]))
    raise DataError(f"a value of the form {tag!r} cannot be written here")


def write_torch_file(path: Path, state: Any, read: Read) -> None:
    """Write a state as ``torch.save`` would, durably.

    Parameters
    ----------
    path
        Of the file; it must not exist.
    state
        As :mod:`ds_galore.tools.states` describes.
    read
        Gives the bit patterns of a tensor in row-major order, in one or more arrays.

    Raises
    ------
    DataError
        For a value or a dtype that torch's format does not have.
    """
    with path.open("xb") as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            buffer = _Buffer()
            pickler = _Pickler(buffer, path, read)
            try:
                pickler.dump(state)
            except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError) as error:
                if isinstance(error, DsGaloreError):
                    raise
                raise DamageError(f"{path}: cannot be written: {type(error).__name__}: {error}") from error
            archive.writestr("archive/data.pkl", bytes(buffer))
            archive.writestr("archive/byteorder", b"little")
            for number, leaf in enumerate(pickler.storages.values()):
                width = STORAGES[leaf.dtype][1]
                size = leaf.numel * width
                with archive.open(_entry(file, f"archive/data/{number}", size), "w", force_zip64=size >= 2**31) as out:
                    for bits in read(leaf):
                        little = bits.astype(bits.dtype.newbyteorder("<"), copy=False)
                        data = np.ascontiguousarray(little).view(np.uint8).data
                        while data:
                            out.write(data[: 2**26])
                            data = data[2**26 :]
                        size -= little.nbytes
                if size:
                    raise ValueError(f"{path}: {size} bytes of a tensor of {leaf.numel} elements are missing")
            archive.writestr("archive/version", b"3\n")
        file.flush()
        os.fsync(file.fileno())


class _Buffer(bytearray):
    """A pickle in memory."""

    def write(self, data: bytes) -> None:
        self.extend(data)


def _entry(file: Any, name: str, size: int) -> zipfile.ZipInfo:
    """The header of a storage, padded so that its data begin at a multiple of ``ALIGNMENT``."""
    info = zipfile.ZipInfo(name)
    info.compress_type = zipfile.ZIP_STORED
    info.file_size = size
    begin = file.tell() + 30 + len(name) + 4 + (20 if size >= 2**31 else 0)
    padding = -begin % ALIGNMENT
    info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    return info
