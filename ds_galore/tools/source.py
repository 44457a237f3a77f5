"""The weights and optimizer states of a checkpoint by name, whoever wrote it: ds_galore, or DeepSpeed natively.

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
from ds_galore.checkpoint.errors import DamageError, FormatError, NotCommittedError
from ds_galore.checkpoint.files import DTYPES
from ds_galore.checkpoint.manifest import MANIFEST
from ds_galore.checkpoint.reader import CheckpointReader
from ds_galore.errors import DataError, DsGaloreError
from ds_galore.tools.torchfile import Opaque, TorchFile, TorchTensor

__all__ = ["Info", "NativeSource", "Source", "as_array", "natural", "open_source", "resolve"]

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
    try:
        named = (path / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise DataError(
            f"{path}: is no checkpoint and has no file 'latest'; it holds {_choices(path)}; choose one with --tag"
        ) from None
    if not named or "/" in named or named.startswith(".") or not (path / named).is_dir():
        raise DataError(f"{path}: 'latest' names {named!r}, which is not there; it holds {_choices(path)}")
    return path / named


def _choices(path: Path) -> str:
    found = sorted(each.name for each in path.iterdir() if each.is_dir() and not each.name.startswith("."))
    if not found:
        return "no checkpoints"
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
    try:
        return OurSource(directory) if ours else NativeSource(directory)
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


# ---------------------------------------------------------------------- DeepSpeed's own


@dataclass(frozen=True)
class _Part:
    """A range of one of a rank's tensors."""

    tensor: TorchTensor
    start: int
    stop: int


class NativeSource(Source):
    """A checkpoint that DeepSpeed wrote itself under ZeRO 1, 2 or 3.

    The layout is that of ``deepspeed/utils/zero_to_fp32.py``, 0.19.8: stage 3 cuts each parameter into equal parts, a
    rank's lying in sequence; stages 1 and 2 cut the sequence of a group's parameters.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        optim = sorted(directory.glob("*_optim_states.pt"), key=lambda path: natural(path.name))
        model = sorted(directory.glob("*_model_states.pt"), key=lambda path: natural(path.name))
        if not model or not optim:
            raise DataError(f"{directory}: has no files named *_{'optim' if model else 'model'}_states.pt")
        first = TorchFile(optim[0])
        ranks = self._ranks(first.content, optim[0])
        if ranks != len(optim):
            raise DamageError(
                f"{directory}: was written by {ranks} ranks, and {len(optim)} *_optim_states.pt are there"
            )
        self.world_size = ranks
        states = [_inner(first.content, optim[0]), *(_inner(TorchFile(path).content, path) for path in optim[1:])]
        self.stage = _integer(states[0].get("zero_stage", 1))
        if self.stage == 3 and len(model) != ranks:
            raise DamageError(
                f"{directory}: was written by {ranks} ranks, and {len(model)} *_model_states.pt are there"
            )
        models = [TorchFile(path).content for path in (model if self.stage == 3 else model[:1])]
        top = models[0]
        if not isinstance(top, dict) or "param_shapes" not in top or "buffer_names" not in top:
            raise FormatError(f"{model[0]}: is no model state file of DeepSpeed's ZeRO")
        step = top.get("global_steps")
        self.step = step if isinstance(step, int) else None
        shapes = [dict(group) for group in top["param_shapes"]]
        self._parts: dict[str, list[_Part]] = {}
        infos: dict[str, Info] = {}
        for name in top["buffer_names"]:
            tensor = top["module"].get(name)
            if isinstance(tensor, TorchTensor):
                infos[name] = Info(tensor.dtype, tensor.shape)
                self._parts[name] = [_Part(tensor, 0, tensor.numel)]
        frozen = top.get("frozen_param_shapes") or {}
        fragments = [each.get("frozen_param_fragments") or {} for each in models]
        for name, shape in frozen.items():
            parts = [each[name] for each in fragments]
            self._parts[name] = list(_cut([_Part(each, 0, each.numel) for each in parts], math.prod(shape)))
            infos[name] = Info(parts[0].dtype, tuple(shape))
        self._state_parts: dict[str, list[_Part]] = {}
        self._state_infos: dict[str, Info] = {}
        self.optimizer = self._state_infos
        if self.stage == 3:
            self._stage3(states, shapes, infos, ranks)
        else:
            self._stage12(states, shapes, infos, ranks)
        self.weights = infos
        self.frozen = frozenset(frozen)
        shared = top.get("shared_params") or {}
        self.aliases = {a: b for a, b in shared.items() if b in infos and a not in infos}

    @staticmethod
    def _ranks(content: Any, path: Path) -> int:
        count = _inner(content, path).get("partition_count")
        return max(_integer(each) for each in count) if isinstance(count, list | tuple) else _integer(count)

    def _stage3(
        self, states: list[dict[str, Any]], shapes: list[dict[str, Any]], infos: dict[str, Info], ranks: int
    ) -> None:
        flats = [state["fp32_flat_groups"] for state in states]
        ends = np.cumsum([0, *(flat.numel for flat in flats[0])]).tolist()
        inner = [state.get("optimizer_state_dict") or {} for state in states]
        numbers = [n for group in inner[0].get("param_groups", []) for n in group["params"]]
        position = 0
        for name, shape in (item for group in shapes for item in group.items()):
            numel = math.prod(shape)
            length = -(-numel // ranks)
            group = next(
                (i for i in range(len(ends) - 1) if ends[i] <= position and position + length <= ends[i + 1]), None
            )
            if group is None:
                raise DamageError(f"{self.directory}: {name} does not lie in one of the ranks' flat tensors")
            start = position - ends[group]
            infos[name] = Info(flats[0][group].dtype, tuple(shape))
            parts = [_Part(flat[group], start, start + length) for flat in flats]
            self._parts[name] = list(_cut(parts, numel))
            if group < len(numbers):
                each = [state.get("state", {}).get(numbers[group], {}) for state in inner]
                self._moments(name, tuple(shape), each, flats[0][group].numel, start, start + length, numel)
            position += length

    def _stage12(
        self, states: list[dict[str, Any]], shapes: list[dict[str, Any]], infos: dict[str, Info], ranks: int
    ) -> None:
        paddings = states[0].get("param_alignment_paddings")
        inner = [state.get("base_optimizer_state") or {} for state in states]
        for index, group in enumerate(shapes):
            flats = [state["single_partition_of_fp32_groups"][index] for state in states]
            whole = [_Part(flat, 0, flat.numel) for flat in flats]
            position = 0
            for number, (name, shape) in enumerate(group.items()):
                numel = math.prod(shape)
                infos[name] = Info(flats[0].dtype, tuple(shape))
                self._parts[name] = list(_cut(whole, numel, skip=position))
                if isinstance(inner[0], dict) and "param_groups" in inner[0]:
                    key = inner[0]["param_groups"][index]["params"][0]
                    self._flat_moments(name, tuple(shape), [s["state"].get(key, {}) for s in inner], position, numel)
                position += numel + (paddings[index][number] if paddings else 0)
            held = sum(flat.numel for flat in flats)
            if not position <= held + 2 * ranks * max(1, len(group)):
                raise DamageError(f"{self.directory}: group {index} holds {held} elements, and {position} are needed")

    def _moments(
        self, name: str, shape: tuple[int, ...], states: list[Any], flat: int, start: int, stop: int, numel: int
    ) -> None:
        for key, value in states[0].items():
            if isinstance(value, TorchTensor) and value.numel == flat and value.shape:
                parts = [_Part(state[key], start, stop) for state in states]
                self._state_parts[f"{name}/{key}"] = list(_cut(parts, numel))
                self._state_infos[f"{name}/{key}"] = Info(value.dtype, shape)

    def _flat_moments(self, name: str, shape: tuple[int, ...], states: list[Any], position: int, numel: int) -> None:
        for key, value in states[0].items():
            if isinstance(value, TorchTensor) and len(value.shape) == 1 and value.numel > 1:
                parts = [_Part(state[key], 0, state[key].numel) for state in states]
                self._state_parts[f"{name}/{key}"] = list(_cut(parts, numel, skip=position))
                self._state_infos[f"{name}/{key}"] = Info(value.dtype, shape)

    def weight(self, name: str) -> Bits:
        """As in :class:`Source`."""
        return self._joined(name, self._parts[name], self.weights[name])

    def state(self, name: str) -> Bits:
        """As in :class:`Source`."""
        return self._joined(name, self._state_parts[name], self.optimizer[name])

    def weight_range(self, name: str, start: int, stop: int) -> Bits:
        """Elements ``[start, stop)`` of a weight or buffer."""
        return self._range(name, self._parts[name], start, stop)

    def state_range(self, name: str, start: int, stop: int) -> Bits:
        """Elements ``[start, stop)`` of a tensor of the optimizer."""
        return self._range(name, self._state_parts[name], start, stop)

    def _range(self, name: str, parts: list[_Part], start: int, stop: int) -> Bits:
        kind = f"u{DTYPES[parts[0].tensor.dtype]}" if parts else "u1"
        return self._joined(name, list(_cut(parts, stop - start, skip=start)), Info("", (stop - start,)), kind)

    def _joined(self, name: str, parts: list[_Part], info: Info, empty: str = "u1") -> Bits:
        arrays = [part.tensor.bits(part.start, part.stop) for part in parts]
        found: Bits = np.zeros(0, dtype=empty)
        if arrays:
            found = np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
        if found.size != info.numel:
            raise DamageError(f"{self.directory}: {found.size} elements of {name} are there, and it has {info.numel}")
        return found


def _cut(parts: list[_Part], numel: int, *, skip: int = 0) -> Iterator[_Part]:
    """The parts that hold elements ``skip`` to ``skip + numel`` of a sequence of parts."""
    for part in parts:
        length = part.stop - part.start
        begin = min(skip, length)
        end = min(begin + numel, length)
        if end > begin:
            yield _Part(part.tensor, part.start + begin, part.start + end)
        numel -= end - begin
        skip -= begin


def _inner(content: Any, path: Path) -> dict[str, Any]:
    state = content.get("optimizer_state_dict") if isinstance(content, dict) else None
    if not isinstance(state, dict):
        raise FormatError(f"{path}: is no optimizer state file of DeepSpeed's ZeRO")
    return state


def _integer(value: Any) -> int:
    """An integer, or the value of an enumeration's member."""
    if isinstance(value, Opaque) and value.arguments:
        value = value.arguments[0]
    if type(value) is not int:
        raise DamageError(f"a native checkpoint holds {value!r} where a number belongs")
    return value
