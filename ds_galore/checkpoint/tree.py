"""Nested state as JSON and tensors, without pickle.

State dicts of DeepSpeed and of users hold more than JSON knows: tuples, sets, bytes, integer keys, arrays,
enumerations, loss scalers. Each gets a tagged form, and what has none is refused when it is saved, with the path to it.
On loading, only the classes named in :data:`OBJECTS` and :data:`ENUMERATIONS` are ever built, from the fields there.

A tag is an object with the single key ``"$"`` and a list. Imports torch and NumPy; classes of DeepSpeed are imported by
name when a state holds them.
"""

from __future__ import annotations

import base64
import importlib
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_galore.checkpoint.errors import DamageError
from ds_galore.checkpoint.forms import ENUMERATIONS, OBJECTS
from ds_galore.errors import ConfigError, DsGaloreError

__all__ = ["flatten", "restore"]

_DTYPES = {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}


def flatten(state: Any, *, root: str = "") -> tuple[Any, dict[str, Tensor]]:
    """Take a nested state apart.

    Parameters
    ----------
    state
        Of dicts, lists, tuples, sets, numbers, strings, bytes, None, tensors, NumPy arrays and scalars, torch dtypes,
        devices and sizes, and objects of the known classes.
    root
        What paths begin with in messages and in names of tensors.

    Returns
    -------
    Any
        JSON, in which a tensor is ``{"$": ["tensor", name]}``.
    dict
        The tensors by name: their paths. They are not copied.

    Raises
    ------
    ConfigError
        For anything else, naming its path and class.
    """
    tensors: dict[str, Tensor] = {}

    def name_for(path: str, tensor: Tensor) -> str:
        name, number = path, 1
        while name in tensors:  # keys may hold what separates keys in a path
            number += 1
            name = f"{path}#{number}"
        tensors[name] = tensor
        return name

    def items(values: Any, path: str) -> list[Any]:
        return [walk(value, f"{path}[{index}]") for index, value in enumerate(values)]

    def walk(value: Any, path: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$": ["float", value.hex() if value == value else "nan"]}
        if isinstance(value, Tensor):
            tag = "parameter" if isinstance(value, torch.nn.Parameter) else "tensor"
            return {"$": [tag, name_for(path, value.detach())]}
        if kind is np.ndarray:
            if str(value.dtype) not in _DTYPES:
                raise ConfigError(f"{path}: arrays of {value.dtype} cannot be saved; convert it to numbers or a list")
            return {"$": ["array", name_for(path, torch.from_numpy(value.copy()))]}
        if isinstance(value, np.generic):
            return {"$": ["scalar", str(value.dtype), walk(value.item(), path)]}
        if kind in (dict, OrderedDict):
            return mapping(value, path, ordered=kind is OrderedDict)
        if kind is list:
            return items(value, path)
        if kind is tuple:
            return {"$": ["tuple", *items(value, path)]}
        if kind is torch.Size:
            return {"$": ["size", *value]}
        if kind in (set, frozenset):
            return {"$": [kind.__name__, *items(sorted(value, key=repr), path)]}
        if kind in (bytes, bytearray):
            return {"$": [kind.__name__, base64.b64encode(value).decode()]}
        if kind is torch.dtype:
            return {"$": ["dtype", str(value).removeprefix("torch.")]}
        if kind is torch.device:
            return {"$": ["device", str(value)]}
        full = f"{kind.__module__}.{kind.__qualname__}"
        if isinstance(value, Enum) and full in ENUMERATIONS:
            return {"$": ["enum", full, value.value]}
        if full in OBJECTS:
            unknown = sorted(set(vars(value)) - set(OBJECTS[full]))
            if unknown:
                raise ConfigError(
                    f"{path}: {full} has a field {unknown[0]!r}, which this version does not know how to save"
                )
            return {"$": ["object", full, {key: walk(each, f"{path}.{key}") for key, each in vars(value).items()}]}
        raise ConfigError(
            f"{path}: an object of class {full} cannot be saved; give numbers, strings, tensors or containers of them"
        )

    def mapping(value: Mapping[Any, Any], path: str, *, ordered: bool) -> Any:
        plain = not ordered and "$" not in value and all(type(key) is str for key in value)
        if plain:
            return {key: walk(each, f"{path}/{key}") for key, each in value.items()}
        pairs = [[walk(key, f"{path}/(key)"), walk(each, f"{path}/{key}")] for key, each in value.items()]
        return {"$": ["ordered" if ordered else "dict", *pairs]}

    return walk(state, root), tensors


def restore(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Put a state together again.

    Parameters
    ----------
    value
        JSON, as :func:`flatten` gave it.
    tensor
        Gives a tensor by its name.

    Raises
    ------
    DamageError
        If it holds a form that :func:`flatten` never gives, or names a class that is not in the lists.
    """
    if isinstance(value, list):
        return [restore(each, tensor) for each in value]
    if not isinstance(value, dict):
        return value
    if "$" not in value:
        return {key: restore(each, tensor) for key, each in value.items()}
    form = value["$"]
    try:
        tag, *rest = form
        if tag in _TENSORS:
            (name,) = rest
            kind = _TENSORS[tag]
        else:
            return _FORMS[tag](rest, tensor)
    except DsGaloreError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        raise DamageError(f"a saved state holds the impossible form {form!r}: {error}") from None
    try:
        return kind(tensor(name))
    except (KeyError, TypeError) as error:  # anything else that reading a tensor runs into is no matter of the form
        raise DamageError(f"a saved state holds the impossible form {form!r}: no such tensor: {error}") from None


def _all(values: list[Any], tensor: Callable[[str], Tensor]) -> list[Any]:
    return [restore(each, tensor) for each in values]


def _pairs(rest: list[Any], tensor: Callable[[str], Tensor]) -> list[tuple[Any, Any]]:
    return [(restore(key, tensor), restore(value, tensor)) for key, value in rest]


def _class(name: str) -> Any:
    module, _, qualname = name.rpartition(".")
    return getattr(importlib.import_module(module), qualname)


def _enumeration(rest: list[Any], tensor: Callable[[str], Tensor]) -> Any:
    name, value = rest
    if name not in ENUMERATIONS:
        raise ValueError(f"{name!r} is no known enumeration")
    return _class(name)(value)


def _object(rest: list[Any], tensor: Callable[[str], Tensor]) -> Any:
    name, fields = rest
    if name not in OBJECTS or not set(fields) <= set(OBJECTS[name]):
        raise ValueError(f"{name!r} is no known class, or has other fields")
    kind = _class(name)
    made = kind.__new__(kind)
    for field, value in fields.items():
        object.__setattr__(made, field, restore(value, tensor))
    return made


def _scalar(rest: list[Any], tensor: Callable[[str], Tensor]) -> Any:
    name, value = rest
    if name not in _DTYPES:
        raise ValueError(f"{name!r} is no dtype of numbers")
    return np.dtype(name).type(restore(value, tensor))


_TENSORS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda tensor: tensor,
    "parameter": lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
    "array": lambda tensor: tensor.numpy(),
}
_FORMS: dict[str, Callable[[list[Any], Callable[[str], Tensor]], Any]] = {
    "float": lambda rest, _: float.fromhex(rest[0]),
    "scalar": _scalar,
    "dict": lambda rest, tensor: dict(_pairs(rest, tensor)),
    "ordered": lambda rest, tensor: OrderedDict(_pairs(rest, tensor)),
    "tuple": lambda rest, tensor: tuple(_all(rest, tensor)),
    "size": lambda rest, _: torch.Size(rest),
    "set": lambda rest, tensor: set(_all(rest, tensor)),
    "frozenset": lambda rest, tensor: frozenset(_all(rest, tensor)),
    "bytes": lambda rest, _: base64.b64decode(rest[0], validate=True),
    "bytearray": lambda rest, _: bytearray(base64.b64decode(rest[0], validate=True)),
    "dtype": lambda rest, _: _DTYPES[rest[0]],
    "device": lambda rest, _: torch.device(rest[0]),
    "enum": _enumeration,
    "object": _object,
}
