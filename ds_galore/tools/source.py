"""The weights and optimizer states of a checkpoint by name, whoever wrote it: ds_galore, or DeepSpeed.

Imports NumPy and its neighbours; neither torch nor DeepSpeed.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_galore.checkpoint.codecs.base import Bits
from ds_galore.checkpoint.errors import DamageError, NotCommittedError
from ds_galore.checkpoint.files import DTYPES
from ds_galore.checkpoint.manifest import MANIFEST
from ds_galore.checkpoint.reader import CheckpointReader
from ds_galore.errors import DataError, DsGaloreError

__all__ = ["Info", "Source", "as_array", "checkpoints_in", "looks_like_one", "natural", "open_source", "resolve"]

LATEST = "latest"
#: Kinds of logical tensors: see docs/format.md.
MASTER, WEIGHT = "fp32", "weight"


@dataclass(frozen=True)
class Info:
    """What a tensor is: safetensors' dtype and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.numel * DTYPES[self.dtype]


class Source(ABC):
    """A checkpoint's tensors. Reading is safe from several threads.

    Parameters
    ----------
    directory
        Of the checkpoint.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    #: Weights and persistent buffers by their name in the model, in its order; masters where there are some.
    weights: Mapping[str, Info]
    #: Those of the weights that were not trained.
    frozen: frozenset[str]
    #: Tied names that are not among the weights, by the name that is.
    aliases: Mapping[str, str]
    #: Tensors of the optimizer by ``<parameter>/<key>``.
    optimizer: Mapping[str, Info]
    #: The step after which it was saved, if it is known.
    step: int | None

    @abstractmethod
    def weight(self, name: str) -> Bits:
        """A weight or buffer as bit patterns, ``(numel,)``."""

    @abstractmethod
    def state(self, name: str) -> Bits:
        """A tensor of the optimizer as bit patterns, ``(numel,)``."""


def as_array(bits: Bits, info: Info) -> npt.NDArray[Any]:
    """Bit patterns as an array of the tensor's shape and dtype; bfloat16 by ml_dtypes."""
    if info.dtype == "BF16":
        import ml_dtypes

        array: npt.NDArray[Any] = bits.view(ml_dtypes.bfloat16).reshape(info.shape)
        return array
    kinds = {"F64": "f8", "F32": "f4", "F16": "f2", "BOOL": "?"}
    kind = kinds.get(info.dtype) or f"{info.dtype[0].lower()}{int(info.dtype[1:]) // 8}"
    return np.ascontiguousarray(bits).view(kind).reshape(info.shape)


def resolve(path: Path, tag: str | None = None) -> Path:
    """The directory of the checkpoint that a user means.

    Parameters
    ----------
    path
        A checkpoint's directory, or a save directory with a file ``latest``.
    tag
        Which checkpoint of a save directory; the latest by default.

    Raises
    ------
    DataError
        If there is none, saying what is there.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file or directory")
    if not path.is_dir():
        raise DataError(f"{path}: is a file; give a checkpoint's directory, or a save directory with a file 'latest'")
    if tag is not None:
        if (path / tag).is_dir():
            return path / tag
        raise DataError(f"{path / tag}: no such checkpoint; {path} holds {_choices(path)}")
    if (path / MANIFEST).exists() or any(path.glob("*_states.pt")):
        return path
    mark = path / LATEST
    if not mark.exists() and (path / f"{LATEST}_universal").exists():
        mark = path / f"{LATEST}_universal"
    try:
        named = mark.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise DataError(
            f"{path}: is no checkpoint and has no file 'latest' (--tag chooses a checkpoint); it holds {_choices(path)}"
        ) from None
    if not named or "/" in named or named.startswith(".") or not (path / named).is_dir():
        raise DataError(f"{path}: {mark.name!r} names {named!r}, which is not there; it holds {_choices(path)}")
    return path / named


def looks_like_one(path: Path) -> bool:
    """Whether a directory is, or was to be, a checkpoint of ours or of DeepSpeed's."""
    return (path / MANIFEST).exists() or any(path.glob("*_states.pt")) or any(path.glob("rank-*.safetensors"))


def checkpoints_in(path: Path) -> list[Path]:
    """The directories in a save directory that look like checkpoints, by name."""
    found = (each for each in path.iterdir() if each.is_dir() and not each.name.startswith("."))
    return sorted((each for each in found if looks_like_one(each)), key=lambda each: natural(each.name))


def _choices(path: Path) -> str:
    """What a save directory holds, and what to give instead."""
    found = [each.name for each in checkpoints_in(path)]
    if not found:
        deeper = (each for each in sorted(path.iterdir()) if each.is_dir() and not each.name.startswith("."))
        inside = next((each for each in deeper if checkpoints_in(each)), None)
        return f"no checkpoints; {inside} does" if inside is not None else "no checkpoints"
    return ", ".join(found[:10]) + (f" and {len(found) - 10} more" if len(found) > 10 else "")


def open_source(directory: Path) -> Source:
    """The checkpoint in a directory.

    Raises
    ------
    NotCommittedError, FormatError, DamageError, DataError
        If it is not finished, not readable by this program, not what was written, or no checkpoint.
    """
    states = sorted(directory.glob("*_states.pt"))
    ours = (directory / MANIFEST).exists()
    if not ours and states and all(_is_placeholder(path) for path in states):
        raise NotCommittedError(f"{directory}: was never finished (no {MANIFEST})")
    if not ours and not states:
        raise DataError(f"{directory}: holds no checkpoint: neither {MANIFEST} nor files named *_states.pt")
    from ds_galore.tools.native import NativeSource, UniversalSource

    try:
        if ours:
            return OurSource(directory)
        return UniversalSource(directory) if (directory / "zero").is_dir() else NativeSource(directory)
    except DsGaloreError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise DamageError(
            f"{directory}: its states are not those of a checkpoint: {type(error).__name__}: {error}"
        ) from error


def _is_placeholder(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(1) == b"{"


# ---------------------------------------------------------------------- ours


class OurSource(Source):
    """A checkpoint of ds_galore."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.reader = CheckpointReader(directory)
        step = self.reader.manifest.metadata.get("step")
        self.step = step if isinstance(step, int) else None
        model = self._model_state()
        state = model["state"]
        described: Mapping[str, Any] = model["tensors"]
        self._names: dict[str, str] = {}  # by a weight's name, its logical tensor
        buffers: dict[str, str] = {}
        names = _plain(state.get("buffer_names")) or []
        for name, reference in _pairs(state.get("module")):
            pieces = described.get(_path_of(reference), {}).get("pieces", [])
            if name in names and len(pieces) == 1 and pieces[0][0] == _path_of(reference):
                buffers[name] = pieces[0][0]
        tensors = self.reader.tensors
        order = [name for group in _plain(state.get("param_shapes")) or [] for name in group]
        order += list(_plain(state.get("frozen_param_shapes")) or {})
        found: dict[str, str] = {}
        for name, tensor in tensors.items():
            parameter, _, kind = name.rpartition("/")
            if "_states.pt" not in name and (kind == MASTER or (kind == WEIGHT and parameter not in found)):
                found[parameter] = tensor.name
        empty = {name for name, shape in (_plain(state.get("frozen_param_shapes")) or {}).items() if 0 in shape}
        order = [name for name in order if name not in empty]
        missing = [name for name in order if name not in found]
        if missing:
            raise DamageError(f"{directory}: its state names {missing[0]}, which its data do not hold")
        self._names = {**buffers, **{name: found[name] for name in [*order, *(n for n in found if n not in order)]}}
        self.weights = {name: Info(tensors[where].dtype, tensors[where].shape) for name, where in self._names.items()}
        self.frozen = frozenset(name for name, where in found.items() if where.endswith(f"/{WEIGHT}"))
        shared = _plain(state.get("shared_params")) or {}
        self.aliases = {a: b for a, b in shared.items() if b in self._names and a not in self._names}
        self.optimizer = {
            name: Info(tensor.dtype, tensor.shape)
            for name, tensor in tensors.items()
            if "_states.pt" not in name and name.rpartition("/")[2] not in (MASTER, WEIGHT)
        }

    def _model_state(self) -> Any:
        """The content of the first rank's model state file."""
        records = self.reader.manifest.states
        name = min((each for each in records if each.endswith("_model_states.pt")), key=natural, default=None)
        if name is None:
            raise DamageError(f"{self.directory}: its manifest names no model state file")
        return self.reader.state(name)

    def weight(self, name: str) -> Bits:
        """As in :class:`Source`."""
        return self.reader.bits(self._names[name])

    def state(self, name: str) -> Bits:
        """As in :class:`Source`."""
        return self.reader.bits(name)


def natural(text: str) -> list[Any]:
    """A key by which names with numbers are in the order of the numbers."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)]


def _pairs(value: Any) -> Iterator[tuple[str, Any]]:
    """The items of a mapping in a state file, their values as they stand there."""
    if isinstance(value, dict) and "$" in value:
        tag, *rest = value["$"]
        if tag in ("dict", "ordered"):
            yield from ((_plain(key), each) for key, each in rest)
    elif isinstance(value, dict):
        yield from value.items()


def _path_of(reference: Any) -> str:
    """The path under which a tensor in a state file is described."""
    form = reference.get("$") if isinstance(reference, dict) else None
    return str(form[1]) if form and form[0] in ("tensor", "parameter") else ""


def _plain(value: Any) -> Any:
    """A value of a state file as lists, dicts and scalars; what is none of those stays as it stands there."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "$" not in value:
        return {key: _plain(each) for key, each in value.items()}
    tag, *rest = value["$"]
    if tag in ("dict", "ordered"):
        return {_plain(key): _plain(each) for key, each in rest}
    if tag in ("tuple", "size", "set", "frozenset"):
        return tuple(_plain(each) for each in rest)
    return value
