"""The nested states of a checkpoint as plain Python, whoever wrote it, without torch.

Containers are Python's own. What has no counterpart there keeps the tagged form of :mod:`ds_galore.checkpoint.tree`
(:class:`Form`), and a tensor is a :class:`Leaf`: what it is, and of which logical tensors it consists. :func:`thaw` and
:func:`freeze` go between this and the JSON of a state file; :func:`from_pickle` takes what ``torch.save`` wrote.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ds_galore.checkpoint.codecs.base import Bits
from ds_galore.checkpoint.errors import DamageError
from ds_galore.checkpoint.forms import ENUMERATIONS, OBJECTS
from ds_galore.errors import DataError
from ds_galore.tools.source import Info
from ds_galore.tools.torchfile import DType, Opaque, Size, TorchTensor

__all__ = [
    "SAFE_NAMES",
    "Form",
    "Leaf",
    "Object",
    "Piece",
    "Tensor",
    "freeze",
    "from_pickle",
    "leaves",
    "mapped",
    "thaw",
]

_NUMPY = {"numpy.core.multiarray", "numpy._core.multiarray"}

#: ``(logical tensor, start in it, offset in this tensor, number of elements)``.
Piece = tuple[str, int, int, int]
_serial = itertools.count(1)


@dataclass(frozen=True)
class Form:
    """A value in its tagged form, as JSON text: hashable, so that it can be a key."""

    text: str

    @property
    def value(self) -> list[Any]:
        """The tag and what follows it."""
        form: list[Any] = json.loads(self.text)["$"]
        return form


@dataclass(frozen=True)
class Object:
    """An object of a known class, as its fields."""

    name: str
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Leaf:
    """A tensor of a state.

    Parameters
    ----------
    tag
        ``"tensor"``, ``"parameter"`` or ``"array"``.
    dtype
        torch's name, such as ``"float32"``.
    shape
        Of this tensor.
    pieces
        What it consists of; elements of no piece are zero.
    own
        Whether it belongs to this state alone, and to no parameter: its single piece is named after its place.
    serial
        Tells copies from one another; tensors of one serial number and the same pieces are one tensor.
    """

    tag: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    own: bool
    serial: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def kind(self) -> str:
        """What it is of a parameter, such as ``exp_avg``; empty for one that belongs to none."""
        return "" if self.own or not self.pieces else self.pieces[0][0].rpartition("/")[2]

    def copied(self) -> Leaf:
        """The same values in a tensor of their own."""
        return replace(self, serial=next(_serial))


@dataclass(frozen=True)
class Tensor:
    """A logical tensor: what it is, and how its elements ``[start, stop)`` are read."""

    info: Info
    read: Callable[[int, int], Bits]


def _form(tag: str, *rest: Any) -> Form:
    return Form(json.dumps({"$": [tag, *rest]}))


# ---------------------------------------------------------------------- our state files


def thaw(value: Any, tensors: Mapping[str, Any]) -> Any:
    """The state in a state file.

    Parameters
    ----------
    value, tensors
        Its ``state`` and ``tensors``.

    Raises
    ------
    DamageError
        If it holds a form that is never written.
    """
    if isinstance(value, list):
        return [thaw(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    if "$" not in value:
        return {key: thaw(each, tensors) for key, each in value.items()}
    try:
        tag, *rest = value["$"]
        if tag in ("dict", "ordered"):
            pairs = [(thaw(key, tensors), thaw(each, tensors)) for key, each in rest]
            return OrderedDict(pairs) if tag == "ordered" else dict(pairs)
        if tag == "tuple":
            return tuple(thaw(each, tensors) for each in rest)
        if tag == "object" and rest[0] not in OBJECTS:
            raise ValueError(f"{rest[0]!r} is no known class")
        if tag == "enum" and rest[0] not in ENUMERATIONS:
            raise ValueError(f"{rest[0]!r} is no known enumeration")
        if tag == "object":
            return Object(str(rest[0]), {str(key): thaw(each, tensors) for key, each in rest[1].items()})
        if tag in ("tensor", "parameter", "array"):
            return _leaf(str(tag), str(rest[0]), tensors[rest[0]])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise DamageError(f"a state file holds an impossible form: {type(error).__name__}: {error}") from None
    return Form(json.dumps(value))


def _leaf(tag: str, path: str, described: Mapping[str, Any]) -> Leaf:
    pieces = tuple(
        (str(name), int(start), int(offset), int(numel)) for name, start, offset, numel in described["pieces"]
    )
    shape = tuple(int(size) for size in described["shape"])
    if any(number < 0 for number in (*shape, *(n for piece in pieces for n in piece[1:]))):
        raise ValueError(f"{path} has a negative size")
    return Leaf(tag, str(described["dtype"]), shape, pieces, own=[piece[0] for piece in pieces] == [path])


def freeze(state: Any, root: str) -> tuple[Any, dict[str, Leaf]]:
    """The JSON of a state, and its tensors by their places, as :func:`ds_galore.checkpoint.tree.flatten` names them.

    Raises
    ------
    DataError
        For an object that has no form.
    """
    found: dict[str, Leaf] = {}

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, Leaf):
            name, number = path, 1
            while name in found:
                number += 1
                name = f"{path}#{number}"
            found[name] = value
            return {"$": [value.tag, name]}
        if isinstance(value, Form):
            return {"$": value.value}
        if isinstance(value, Object):
            return {
                "$": ["object", value.name, {key: walk(each, f"{path}.{key}") for key, each in value.fields.items()}]
            }
        if isinstance(value, list):
            return [walk(each, f"{path}[{index}]") for index, each in enumerate(value)]
        if isinstance(value, tuple):
            return {"$": ["tuple", *(walk(each, f"{path}[{index}]") for index, each in enumerate(value))]}
        if isinstance(value, dict):
            return mapping(value, path)
        if isinstance(value, Opaque):
            raise DataError(f"{path}: an object of class {value.name} cannot be written to a checkpoint of ds_galore")
        if value is not None and type(value) not in (bool, int, float, str):
            raise DataError(f"{path}: a {type(value).__name__} cannot be written to a checkpoint of ds_galore")
        return value

    def mapping(values: Mapping[Any, Any], path: str) -> Any:
        ordered = isinstance(values, OrderedDict)
        if not ordered and "$" not in values and all(type(key) is str for key in values):
            return {key: walk(each, f"{path}/{key}") for key, each in values.items()}
        pairs = [[walk(key, f"{path}/(key)"), walk(each, f"{path}/{key}")] for key, each in values.items()]
        return {"$": ["ordered" if ordered else "dict", *pairs]}

    return walk(state, root), found


def leaves(state: Any) -> Iterator[Leaf]:
    """The tensors of a state."""
    if isinstance(state, Leaf):
        yield state
    elif isinstance(state, Object):
        yield from leaves(state.fields)
    elif isinstance(state, Opaque):
        yield from leaves(state.arguments)
        yield from leaves(state.state)
    elif isinstance(state, dict):
        for value in state.values():
            yield from leaves(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from leaves(value)


def mapped(state: Any, change: Callable[[Leaf], Leaf]) -> Any:
    """A copy of a state with each of its tensors changed."""
    if isinstance(state, Leaf):
        return change(state)
    if isinstance(state, Object):
        return Object(state.name, {key: mapped(each, change) for key, each in state.fields.items()})
    if isinstance(state, Opaque):
        made = type(state).__new__(type(state))
        made.arguments, made.state = mapped(state.arguments, change), mapped(state.state, change)
        made.called = state.called
        return made
    if isinstance(state, dict):
        return type(state)((key, mapped(each, change)) for key, each in state.items())
    if isinstance(state, list | tuple):
        return type(state)(mapped(each, change) for each in state)
    return state


# ---------------------------------------------------------------------- what torch.save wrote

#: torch's dtypes by safetensors' names, as :mod:`ds_galore.tools.torchfile` gives them.
TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
SAFE_NAMES = {name: dtype for dtype, name in TORCH_NAMES.items()}


def from_pickle(content: Any, root: str, tensors: dict[str, Tensor]) -> Any:
    """A state that :class:`~ds_galore.tools.torchfile.TorchFile` has read.

    Parameters
    ----------
    content
        What it holds.
    root
        What the places of its tensors begin with.
    tensors
        Gets each tensor, by the name of its only piece.
    """
    known: dict[tuple[Any, ...], Leaf] = {}

    def unique(path: str) -> str:
        name, number = path, 1
        while name in tensors:  # keys may look alike, or hold what separates keys in a path
            number += 1
            name = f"{path}#{number}"
        return name

    def tensor(value: TorchTensor, path: str) -> Leaf:
        same = (id(value.file), value.key, value.offset, value.shape, value.stride, value.dtype)
        if same not in known or not value.numel:
            name = unique(path)
            tensors[name] = Tensor(Info(value.dtype, value.shape), value.bits)
            piece = (name, 0, 0, value.numel)
            known[same] = Leaf("tensor", TORCH_NAMES[value.dtype], value.shape, (piece,), own=True)
        return known[same]

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, TorchTensor):
            return tensor(value, path)
        if isinstance(value, Opaque):
            return opaque(value, path)
        if isinstance(value, type) and issubclass(value, Opaque):
            raise DamageError(f"{path}: the class {value.name} stands where a value belongs")
        if isinstance(value, Size):
            return _form("size", *value)
        if isinstance(value, DType):
            return _form("dtype", str(value))
        if isinstance(value, float) and not math.isfinite(value):
            return _form("float", value.hex() if value == value else "nan")
        if isinstance(value, bytes | bytearray):
            return _form(type(value).__name__, base64.b64encode(value).decode())
        if isinstance(value, set | frozenset):
            inner = [freeze(walk(each, path), path)[0] for each in sorted(value, key=repr)]
            return _form("frozenset" if isinstance(value, frozenset) else "set", *inner)
        if isinstance(value, OrderedDict):
            return OrderedDict((walk(key, path), walk(each, f"{path}/{key}")) for key, each in value.items())
        if isinstance(value, dict):
            return {walk(key, path): walk(each, f"{path}/{key}") for key, each in value.items()}
        if isinstance(value, list):
            return [walk(each, f"{path}[{index}]") for index, each in enumerate(value)]
        if isinstance(value, tuple):
            return tuple(walk(each, f"{path}[{index}]") for index, each in enumerate(value))
        if callable(value):
            raise DataError(f"{path}: a class stands where a value belongs")
        return value

    def opaque(value: Opaque, path: str) -> Any:
        module, _, name = value.name.rpartition(".")
        if value.name in OBJECTS and isinstance(value.state, dict):
            return Object(value.name, {key: walk(each, f"{path}.{key}") for key, each in value.state.items()})
        if value.name in ENUMERATIONS and len(value.arguments) == 1:
            return _form("enum", value.name, value.arguments[0])
        if value.name == "torch.device":
            return _form("device", ":".join(str(each) for each in value.arguments))
        if module in _NUMPY and name == "_reconstruct" and isinstance(value.state, tuple):
            return array(value.state, path)
        if module in _NUMPY and name == "scalar" and len(value.arguments) == 2:
            dtype = _numpy_dtype(value.arguments[0], path)
            item = np.frombuffer(_bytes(value.arguments[1], path), dtype=dtype, count=1)[0].item()
            return _form("scalar", dtype.name, freeze(walk(item, path), path)[0])
        kept = type(value).__new__(type(value))
        kept.arguments = tuple(walk(each, f"{path}({number})") for number, each in enumerate(value.arguments))
        kept.state, kept.called = walk(value.state, path), value.called
        return kept

    def array(state: tuple[Any, ...], path: str) -> Leaf:
        _, shape, dtype, fortran, data = state
        stored = _numpy_dtype(dtype, path)
        values = np.frombuffer(_bytes(data, path), dtype=stored, count=math.prod(shape))
        values = values.reshape(shape, order="F" if fortran else "C").astype(stored.newbyteorder("="))
        kind, path = values.dtype, unique(path)
        known = kind.name in TORCH_NAMES.values()
        bits = np.ascontiguousarray(values).reshape(-1).view(f"u{kind.itemsize}" if known else "u1")
        info = Info(SAFE_NAMES[kind.name], tuple(shape)) if known else Info("U8", (*shape, kind.itemsize))
        tensors[path] = Tensor(info, lambda start, stop: bits[start:stop])
        return Leaf("array", kind.name, tuple(shape), ((path, 0, 0, values.size),), own=True)

    try:
        return walk(content, root)
    except (KeyError, TypeError, ValueError) as error:
        raise DamageError(f"{root}: holds an impossible state: {type(error).__name__}: {error}") from None


def _bytes(value: Any, path: str) -> bytes:
    if not isinstance(value, bytes):
        raise DamageError(f"{path}: {type(value).__name__} where bytes belong")
    return value


def _numpy_dtype(value: Any, path: str) -> np.dtype[Any]:
    if not isinstance(value, Opaque) or value.name != "numpy.dtype" or not value.arguments:
        raise DamageError(f"{path}: an array without a dtype")
    dtype = np.dtype(str(value.arguments[0]))
    order: Any = value.state[1] if isinstance(value.state, tuple) and len(value.state) > 1 else "|"
    if dtype.kind not in "biufc" or order not in ("<", ">", "|", "="):
        raise DataError(f"{path}: an array of {dtype} cannot be taken along")
    return dtype.newbyteorder(order) if order in ("<", ">") else dtype
