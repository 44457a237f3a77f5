"""DeepSpeed's own checkpoints: those that it writes under ZeRO 1, 2 and 3, and universal ones.

Imports NumPy; neither torch nor DeepSpeed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ds_galore.checkpoint.codecs.base import Bits
from ds_galore.checkpoint.errors import DamageError, FormatError
from ds_galore.checkpoint.files import DTYPES
from ds_galore.errors import DataError
from ds_galore.tools.source import Info, Source, natural
from ds_galore.tools.torchfile import Opaque, TorchFile, TorchTensor

__all__ = ["NativeSource", "TorchSource", "UniversalSource"]


@dataclass(frozen=True)
class _Part:
    """A range of one of a rank's tensors."""

    tensor: TorchTensor
    start: int
    stop: int


class TorchSource(Source):
    """A checkpoint of ``torch.save`` files."""

    #: Number of files that ranks wrote, and the ZeRO stage, where they are known.
    world_size: int
    stage: int | None

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._parts: dict[str, list[_Part]] = {}
        self._state_parts: dict[str, list[_Part]] = {}
        self._infos: dict[str, Info] = {}
        self._state_infos: dict[str, Info] = {}
        self.weights, self.optimizer = self._infos, self._state_infos

    def _take_models(self, models: list[Any]) -> dict[str, Info]:
        """What model state files tell: buffers, frozen parameters, tied names and the step. Trained ones go behind."""
        top = models[0]
        step = top.get("global_steps")
        self.step = step if isinstance(step, int) else None
        infos = self._infos
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
        self.frozen = frozenset(frozen)
        self._shared = top.get("shared_params") or {}
        return infos

    @property
    def aliases(self) -> dict[str, str]:  # type: ignore[override]
        """As in :class:`Source`."""
        return {a: b for a, b in self._shared.items() if b in self._infos and a not in self._infos}

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


class NativeSource(TorchSource):
    """A checkpoint that DeepSpeed wrote itself under ZeRO 1, 2 or 3.

    The layout is that of ``deepspeed/utils/zero_to_fp32.py``, 0.19.8: stage 3 cuts each parameter into equal parts, a
    rank's lying in sequence; stages 1 and 2 cut the sequence of a group's parameters.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        optim = sorted(directory.glob("*_optim_states.pt"), key=lambda path: natural(path.name))
        model = sorted(directory.glob("*_model_states.pt"), key=lambda path: natural(path.name))
        if not model or not optim:
            raise DamageError(f"{directory}: has no files named *_{'optim' if model else 'model'}_states.pt")
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
        shapes = [dict(group) for group in top["param_shapes"]]
        infos = self._take_models(models)
        if self.stage == 3:
            self._stage3(states, shapes, infos, ranks)
        else:
            self._stage12(states, shapes, infos, ranks)

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


class UniversalSource(TorchSource):
    """A universal checkpoint, as DeepSpeed's ``ds_to_universal.py`` makes one: a directory a parameter in ``zero/``."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        model = sorted(directory.glob("*_model_states.pt"), key=lambda path: natural(path.name))
        if not model:
            raise DataError(f"{directory}: has no files named *_model_states.pt")
        first = TorchFile(model[0]).content
        if not isinstance(first, dict) or "buffer_names" not in first:
            raise FormatError(f"{model[0]}: is no model state file of DeepSpeed's ZeRO")
        self.world_size, self.stage = _integer(first.get("dp_world_size", len(model))), None
        per_rank = model[0].name.startswith("zero_pp_rank_")
        self._take_models([first, *(TorchFile(path).content for path in (model[1:] if per_rank else []))])
        shapes = {name: tuple(shape) for group in first.get("param_shapes") or [] for name, shape in group.items()}
        there = sorted(path.parent.name for path in (directory / "zero").glob("*/fp32.pt"))
        missing = sorted(shapes.keys() - set(there))
        if missing:
            raise DamageError(f"{directory / 'zero' / missing[0] / 'fp32.pt'}: is missing")
        for name in [*shapes, *(each for each in there if each not in shapes)]:
            for path in sorted((directory / "zero" / name).glob("*.pt")):
                tensor = self._tensor(path)
                if tensor is None:
                    continue
                info = Info(tensor.dtype, shapes.get(name, tensor.shape))
                if info.numel != tensor.numel:
                    raise DamageError(f"{path}: has {tensor.numel} elements, and the parameter has {info.numel}")
                whole = [_Part(tensor, 0, tensor.numel)]
                if path.stem == "fp32":
                    self._infos[name], self._parts[name] = info, whole
                else:
                    self._state_infos[f"{name}/{path.stem}"], self._state_parts[f"{name}/{path.stem}"] = info, whole

    @staticmethod
    def _tensor(path: Path) -> TorchTensor | None:
        """The tensor in a file; None of one that holds a number, such as the optimizer's step."""
        content = TorchFile(path).content
        content = content.get("param") if isinstance(content, dict) else content
        return content if isinstance(content, TorchTensor) and content.shape else None


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
