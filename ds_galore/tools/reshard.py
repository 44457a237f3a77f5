"""A checkpoint for another number of ranks, ours or DeepSpeed's own on either side, without torch or DeepSpeed.

What belongs to parameters is cut anew, as :mod:`ds_galore.tools.layout` computes; what belongs to a rank is the rank's,
or the first rank's where there was none; all else agrees on all ranks. Tensors are decoded one by one into a scratch
file inside the directory that is being made, and read from there in ranges, so that memory is bounded by the largest
tensor and the number of workers.
"""

from __future__ import annotations

import copy
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ds_galore.checkpoint.codecs.base import Bits
from ds_galore.checkpoint.errors import DamageError
from ds_galore.checkpoint.files import DTYPES, FORMAT, VERSION, FileRecord
from ds_galore.checkpoint.manifest import MANIFEST
from ds_galore.checkpoint.reader import CheckpointReader
from ds_galore.checkpoint.scratch import Scratch
from ds_galore.checkpoint.store import CheckpointStore, Shard
from ds_galore.errors import ConfigError, DataError
from ds_galore.tools.layout import Flat, Part, round_robin, split, stage3, sub_groups, undo_round_robin
from ds_galore.tools.output import cast, in_threads, new_directory
from ds_galore.tools.source import Info, NativeSource, natural, open_source, resolve
from ds_galore.tools.states import (
    SAFE_NAMES,
    Form,
    Leaf,
    Object,
    Piece,
    Tensor,
    freeze,
    from_pickle,
    leaves,
    mapped,
    thaw,
)
from ds_galore.tools.torchfile import TorchFile
from ds_galore.tools.torchwriter import STORAGES, write_torch_file
from ds_galore.tools.zero_to_fp32 import SCRIPT

__all__ = ["FORMATS", "ReshardReport", "reshard_checkpoint"]

FORMATS = ("ds_galore", "deepspeed")
MODEL, OPTIMIZER = "_model_states.pt", "_optim_states.pt"
#: DeepSpeed's default of ``zero_optimization.sub_group_size``.
SUB_GROUP_SIZE = 1_000_000_000
#: Elements of a tensor that are read at a time.
CHUNK = 2**24


@dataclass
class ReshardReport:
    """What was written: directories, the tag and step, numbers of ranks, and bytes of all files."""

    source: str
    out: str
    tag: str
    step: int | None
    format: str
    from_world_size: int
    world_size: int
    bytes: int = 0


@dataclass
class _Checkpoint:
    """A checkpoint's states, whoever wrote them."""

    directory: Path
    stage: int
    ranks: int
    model: list[Any]  # by rank; one under ZeRO 0, 1 and 2
    optim: list[Any]  # by rank; none without ZeRO
    prefix: str  # of the names of the optimizer's files
    tensors: dict[str, Tensor]
    metadata: dict[str, Any] = field(default_factory=dict)
    decode: bool = False  # whether reading a range decodes more than that

    @property
    def step(self) -> int | None:
        """After which it was saved."""
        step = self.metadata.get("step")
        return step if isinstance(step, int) else None


def reshard_checkpoint(
    path: str | Path,
    out: str | Path,
    *,
    world_size: int,
    tag: str | None = None,
    format: str = "ds_galore",
    sub_group_size: int | None = None,
    overwrite: bool = False,
    workers: int = 2,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ReshardReport:
    """Write a checkpoint of ours, or of DeepSpeed's own under ZeRO, as ``world_size`` ranks would have saved it.

    Parameters
    ----------
    path, tag
        As for :func:`ds_galore.tools.merge.load_state_dict`.
    out
        A save directory to make, with the checkpoint under its tag, and ``latest``; it appears complete or not at all.
    world_size
        Number of data-parallel ranks.
    format
        ``"ds_galore"``, or ``"deepspeed"``: files that DeepSpeed loads without this package.
    sub_group_size
        ``zero_optimization.sub_group_size`` of the configuration that will load it, for DeepSpeed's stage 3; by
        default what the checkpoint was saved with.
    overwrite
        Whether a directory that is not empty may be replaced.
    workers
        Threads; each has one tensor in memory.
    progress
        Called with bytes done and bytes in all.

    Raises
    ------
    ConfigError
        For an impossible option, and for a state that DeepSpeed alone cannot load (GaLoreAdamW's).
    DataError, NotCommittedError, FormatError, DamageError
        If the source cannot be read, holds what cannot be cut anew, or ``out`` cannot be made. Nothing is left then.
    """
    if format not in FORMATS:
        raise ConfigError(f"format is {format!r}: it must be {' or '.join(FORMATS)}")
    for name, value in (("world_size", world_size), ("workers", workers), ("sub_group_size", sub_group_size or 1)):
        if value < 1:
            raise ConfigError(f"{name} is {value}: it must be positive")
    source_directory = resolve(Path(path), tag)
    target = Path(out)
    if target.resolve() in (source_directory.resolve(), *source_directory.resolve().parents):
        raise DataError(f"{target}: is, or holds, the checkpoint that is read; give another directory")
    if (source_directory / MANIFEST).exists():
        source = _ours(source_directory)
    else:
        source = _native(source_directory, ours=format == "ds_galore")
    name = source_directory.resolve().name
    report = ReshardReport(str(source_directory), str(target), name, source.step, format, source.ranks, world_size)
    resharder = _Resharder(source, world_size, sub_group_size)
    if format == "deepspeed" and resharder.low_rank:
        raise ConfigError(
            f"{source_directory}: holds GaLoreAdamW's state, which DeepSpeed loads with this package only; use the"
            " format ds_galore, or merge it to have the weights"
        )
    with new_directory(target, overwrite=overwrite) as directory:
        scratch = Scratch(directory / ".scratch")
        try:
            files = [resharder.files(rank) for rank in range(world_size)]
            if source.decode:
                _decode(source, [state for each in files for state in each.values()], scratch, workers, progress)
            if format == "ds_galore":
                _write_ours(source, files, directory, name, scratch, workers)
            else:
                _write_native(source, files, directory, name, workers)
        finally:
            scratch.close()
        report.bytes = sum(each.stat().st_size for each in directory.rglob("*") if each.is_file())
    return report


# ---------------------------------------------------------------------- reading


def _ours(directory: Path) -> _Checkpoint:
    reader = CheckpointReader(directory)
    values = {name: reader.state(name) for name in sorted(reader.manifest.states, key=natural)}
    trees = {name: thaw(each["state"], each["tensors"]) for name, each in values.items()}
    model = [tree for name, tree in trees.items() if name.endswith(MODEL)]
    optim = {name: tree for name, tree in trees.items() if name.endswith(OPTIMIZER)}
    if not model or len(model) + len(optim) != len(trees):
        raise DamageError(f"{directory}: its manifest does not name the state files of a checkpoint")

    def reading(name: str) -> Callable[[int, int], Bits]:
        return lambda start, stop: reader.bits(name, start, stop)

    tensors = {name: Tensor(Info(tensor.dtype, tensor.shape), reading(name)) for name, tensor in reader.tensors.items()}
    metadata = dict(reader.manifest.metadata)
    stage = metadata.get("zero_stage")
    if type(stage) is not int:
        raise DamageError(f"{directory}: its manifest does not tell the ZeRO stage")
    prefix = _prefix(next(iter(optim), ""))
    ranks = reader.manifest.world_size
    return _Checkpoint(directory, stage, ranks, model, list(optim.values()), prefix, tensors, metadata, decode=True)


def _prefix(name: str) -> str:
    return "bf16_" if name.startswith("bf16_") else ""


def _native(directory: Path, *, ours: bool) -> _Checkpoint:
    source = open_source(directory)
    assert isinstance(source, NativeSource)
    tensors: dict[str, Tensor] = {}
    trees: dict[str, Any] = {}
    for path in sorted(directory.glob("*_states.pt"), key=lambda path: natural(path.name)):
        trees[path.name] = from_pickle(TorchFile(path).content, path.name, tensors)
    model = [tree for name, tree in trees.items() if name.endswith(MODEL)]
    optim = {name: tree for name, tree in trees.items() if name.endswith(OPTIMIZER)}

    def ranged(read: Callable[[str, int, int], Bits], name: str) -> Callable[[int, int], Bits]:
        return lambda start, stop: read(name, start, stop)

    for name, info in source.weights.items():
        kind = "weight" if name in source.frozen else "fp32"
        tensors[f"{name}/{kind}"] = Tensor(info, ranged(source.weight_range, name))
    for name, info in source.optimizer.items():
        tensors[name] = Tensor(info, ranged(source.state_range, name))
    metadata = {"zero_stage": source.stage, **({"step": source.step} if source.step is not None else {})}
    prefix = _prefix(next(iter(optim)))
    found = _Checkpoint(
        directory, source.stage, source.world_size, model, list(optim.values()), prefix, tensors, metadata
    )
    _name_partitions(found)
    if ours and found.stage < 3:
        _name_weights(found, source)
    return found


def _name_partitions(source: _Checkpoint) -> None:
    """Let the flat tensors of a native checkpoint be described as parts of parameters."""
    layout = _Layout(source, source.ranks)
    for rank, tree in enumerate(source.optim):
        state = tree["optimizer_state_dict"]
        flats = layout.flats(rank)
        key = "fp32_flat_groups" if source.stage == 3 else "single_partition_of_fp32_groups"
        state[key] = [
            replace(leaf, pieces=_pieces(flat, "fp32"), own=not leaf.numel)
            for leaf, flat in zip(state[key], flats, strict=True)
        ]
        inner = _inner(source, tree)
        for number, flat in zip(_numbers(inner), flats, strict=True):
            for name, leaf in inner["state"].get(number, {}).items():
                if isinstance(leaf, Leaf) and leaf.shape == (flat.numel,) and flat.numel:
                    inner["state"][number][name] = replace(leaf, pieces=_pieces(flat, name), own=False)
    for rank, tree in enumerate(source.model if source.stage == 3 else []):
        fragments = tree.get("frozen_param_fragments") or {}
        for name in fragments:
            fragments[name] = _fragment(fragments[name], name, _shape(tree["frozen_param_shapes"][name]), rank)


def _fragment(like: Leaf, name: str, shape: tuple[int, ...], rank: int, count: int | None = None) -> Leaf:
    """A rank's partition of a frozen parameter at stage 3, ``count`` elements long."""
    count, numel = like.numel if count is None else count, math.prod(shape)
    if not numel:
        return replace(like, pieces=(), own=False).copied()
    first = min(rank * count, numel)
    piece = (f"{name}/weight", first, 0, min(first + count, numel) - first)
    return replace(like, shape=(count,), pieces=(piece,), own=False).copied()


def _name_weights(source: _Checkpoint, native: NativeSource) -> None:
    """Under ZeRO 1 and 2: weights that are their masters, rounded, are not to be stored again."""
    tree = source.model[0]
    shared = tree.get("shared_params") or {}
    fragments = tree.get("frozen_param_fragments") or {}
    for name, leaf in tree["module"].items():
        owner = shared.get(name, name)
        if not isinstance(leaf, Leaf) or owner not in native.weights or owner in tree["buffer_names"] or not leaf.numel:
            continue
        info, own = native.weights[owner], source.tensors[leaf.pieces[0][0]]
        kind = "weight" if owner in native.frozen else "fp32"
        if kind == "fp32" and not _is_rounded(source.tensors[f"{owner}/fp32"], own):
            kind = "weight"
            source.tensors[f"{owner}/weight"] = own
        described = replace(leaf, pieces=((f"{owner}/{kind}", 0, 0, info.numel),), own=False)
        tree["module"][name] = described
        if name in fragments:
            fragments[name] = replace(described, shape=fragments[name].shape)


def _is_rounded(master: Tensor, weight: Tensor) -> bool:
    for start in range(0, master.info.numel, CHUNK):
        stop = min(start + CHUNK, master.info.numel)
        rounded = cast(master.read(start, stop), master.info.dtype, weight.info.dtype)
        if not np.array_equal(rounded, weight.read(start, stop)):
            return False
    return True


# ---------------------------------------------------------------------- where things lie


def _inner(source: _Checkpoint, tree: Any) -> dict[str, Any]:
    """The state dict of the optimizer that DeepSpeed wraps."""
    inner = tree["optimizer_state_dict"]["optimizer_state_dict" if source.stage == 3 else "base_optimizer_state"]
    if not isinstance(inner, dict) or "param_groups" not in inner:
        raise DataError(f"{source.directory}: an elastic checkpoint cannot be resharded")
    found: dict[str, Any] = inner
    return found


def _numbers(inner: Mapping[str, Any]) -> list[int]:
    """The numbers under which an optimizer's states are, in the order of DeepSpeed's flat tensors."""
    return [number for group in inner["param_groups"] for number in group["params"]]


def _shape(form: Any) -> tuple[int, ...]:
    if isinstance(form, Form):
        return tuple(int(size) for size in form.value[1:])
    return tuple(int(size) for size in form)


def _pieces(flat: Flat, kind: str) -> tuple[Piece, ...]:
    return tuple((f"{part.name}/{kind}", part.start, part.offset, part.numel) for part in flat.parts if part.numel)


class _Layout:
    """What lies where on ``ranks`` ranks.

    Parameters
    ----------
    source
        Of which the parameter groups and settings are taken.
    ranks
        Number of ranks.
    sub_group_size
        Of stage 3; None takes the source's sub-groups as they are.
    """

    def __init__(self, source: _Checkpoint, ranks: int, sub_group_size: int | None = None) -> None:
        self.ranks, self.stage = ranks, source.stage
        tree = source.optim[0]
        saved = [
            {name: _shape(shape) for name, shape in group.items()}
            for group in source.model[0].get("param_shapes") or []
        ]
        groups = _inner(source, tree)["param_groups"]
        self.groups: list[int] = []  # by flat tensor, its parameter group
        self.shapes: list[dict[str, tuple[int, ...]]] = []  # by flat tensor, in the order of its parameters
        if self.stage == 3:
            position = 0
            for number, group in enumerate(groups):
                mine = saved[position : position + len(group["params"])]
                position += len(group["params"])
                if sub_group_size is not None:
                    whole = {name: shape for each in mine for name, shape in each.items()}
                    mine = sub_groups(whole, ranks, sub_group_size)
                self.shapes += mine
                self.groups += [number] * len(mine)
            if position != len(saved):
                raise DamageError(f"{source.directory}: has {len(saved)} sub-groups, and states of {position}")
            return
        if len(saved) != len(groups):
            raise DamageError(f"{source.directory}: has {len(saved)} parameter groups, and states of {len(groups)}")
        config = _zero_section(source)
        state = tree["optimizer_state_dict"]
        paddings = state.get("param_alignment_paddings")
        self.bf16 = "param_alignment_paddings" not in state and "zero_stage" not in state
        reorder = bool(config.get("round_robin_gradients")) and not self.bf16
        aligned = 16 // _weight_bytes(source) if paddings and any(any(each) for each in paddings) else 1
        self.original: list[list[str]] = []
        self.paddings: list[list[int]] = []
        for number, group in enumerate(saved):
            original = undo_round_robin(list(group), source.ranks) if reorder else list(group)
            order = round_robin(original, ranks) if reorder else original
            self.groups.append(number)
            self.shapes.append({name: group[name] for name in order})
            self.original.append(original)
            self.paddings.append(_alignment(self.shapes[-1], aligned))

    def flats(self, rank: int) -> list[Flat]:
        """A rank's flat tensors."""
        numbered = enumerate(zip(self.groups, self.shapes, strict=True))
        if self.stage == 3:
            return [stage3(group, shapes, self.ranks, rank) for _, (group, shapes) in numbered]
        return [
            split(
                group,
                shapes,
                self.ranks,
                rank,
                paddings=self.paddings[index],
                original=self.original[index],
                bf16=self.bf16,
            )
            for index, (group, shapes) in numbered
        ]


def _zero_section(source: _Checkpoint) -> Mapping[str, Any]:
    config = source.optim[0].get("ds_config") if source.optim else None
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    return zero if isinstance(zero, dict) else {}


def _weight_bytes(source: _Checkpoint) -> int:
    config = source.optim[0].get("ds_config") or {}
    return 2 if any((config.get(key) or {}).get("enabled") for key in ("bf16", "bfloat16", "fp16")) else 4


def _alignment(shapes: Mapping[str, tuple[int, ...]], multiple: int) -> list[int]:
    """DeepSpeed's padding after each parameter but the last, with ``parameter_alignment``."""
    found, end = [], 0
    for index, shape in enumerate(shapes.values()):
        end += math.prod(shape)
        found.append(0 if index == len(shapes) - 1 else -end % multiple)
        end += found[-1]
    return found


# ---------------------------------------------------------------------- cutting anew


class _Resharder:
    """The states of each of ``ranks`` ranks, from those of the source."""

    def __init__(self, source: _Checkpoint, ranks: int, sub_group_size: int | None) -> None:
        self._source, self._ranks = source, ranks
        self._layout: _Layout | None = None
        if source.optim:
            size = sub_group_size if sub_group_size is not None else _zero_section(source).get("sub_group_size")
            size = int(size) if isinstance(size, int | float) and size >= 1 else SUB_GROUP_SIZE
            self._layout = _Layout(source, ranks, size)
        names = source.tensors
        self.low_rank = any("_states.pt" not in name and name.endswith("/projector") for name in names)
        self._shards_projectors = self.low_rank and _shards_projectors(source, ranks)

    def files(self, rank: int) -> dict[str, Any]:
        """By name, the states in the files of a rank."""
        source, found = self._source, {}
        if source.optim:
            found[f"{source.prefix}zero_pp_rank_{rank}_mp_rank_00{OPTIMIZER}"] = self._optimizer(rank)
        if source.stage == 3:
            found[f"zero_pp_rank_{rank}_mp_rank_00{MODEL}"] = self._model(rank)
        elif rank == 0:
            found[f"mp_rank_00{MODEL}"] = self._model(rank)
        return found

    def _model(self, rank: int) -> Any:
        models = self._source.model
        tree = dict(models[rank if rank < len(models) else 0])
        tree["dp_world_size"] = self._ranks
        if rank and tree.get("shared_params"):
            tree["shared_params"] = {}  # DeepSpeed has them in the first rank's file only
        if self._layout is not None:
            tree["param_shapes"] = [
                OrderedDict((name, _size(shape)) for name, shape in shapes.items()) for shapes in self._layout.shapes
            ]
        if self._source.stage == 3 and tree.get("frozen_param_fragments"):
            shapes = {name: _shape(form) for name, form in tree["frozen_param_shapes"].items()}
            fragments = tree["frozen_param_fragments"]
            tree["frozen_param_fragments"] = type(fragments)(
                (name, _fragment(leaf, name, shapes[name], rank, -(-math.prod(shapes[name]) // self._ranks)))
                for name, leaf in fragments.items()
            )
        return tree

    def _optimizer(self, rank: int) -> Any:
        source, layout = self._source, self._layout
        assert layout is not None
        tree = copy.copy(source.optim[rank if rank < len(source.optim) else 0])
        state = tree["optimizer_state_dict"] = copy.copy(tree["optimizer_state_dict"])
        flats = layout.flats(rank)
        count = state["partition_count"]
        state["partition_count"] = [self._ranks] * len(count) if isinstance(count, list) else self._ranks
        inner = _inner(source, tree)
        if source.stage == 3:
            state["optimizer_state_dict"] = self._states(inner, flats, rank)
            state["fp32_flat_groups"] = self._masters(state["fp32_flat_groups"], flats, lean=False)
            return tree
        state["base_optimizer_state"] = self._states(inner, flats, rank)
        key = "single_partition_of_fp32_groups"
        state[key] = self._masters(state[key], flats, lean=not layout.bf16)
        state["group_paddings"] = [flat.padding for flat in flats]
        if "param_alignment_paddings" in state:
            state["param_alignment_paddings"] = layout.paddings
        if "param_slice_mappings" in state:
            address = "deepspeed.utils.tensor_fragment.fragment_address"
            state["param_slice_mappings"] = [
                OrderedDict(
                    (name, Object(address, {"numel": numel, "start": start}))
                    for name, (start, numel) in flat.addresses.items()
                )
                for flat in flats
            ]
        return tree

    @staticmethod
    def _masters(saved: Sequence[Leaf], flats: Sequence[Flat], *, lean: bool) -> list[Leaf]:
        return [
            _flat_leaf(saved[min(index, len(saved) - 1)], flat, "fp32", flat.numel - (flat.padding if lean else 0))
            for index, flat in enumerate(flats)
        ]

    def _states(self, inner: dict[str, Any], flats: Sequence[Flat], rank: int) -> dict[str, Any]:
        """The state dict of the wrapped optimizer."""
        state: dict[int, Any] = {}
        groups, index = [], 0
        for number, group in enumerate(inner["param_groups"]):
            old = [inner["state"][each] for each in group["params"] if each in inner["state"]]
            mine = [flat for flat in flats if flat.group == number]
            for flat in mine:
                if old:
                    state[index] = self._state(flat, old, group, rank)
                index += 1
            groups.append({**group, "params": list(range(index - len(mine), index))})
        return {**inner, "state": state, "param_groups": groups}

    def _state(self, flat: Flat, old: Sequence[dict[str, Any]], group: Mapping[str, Any], rank: int) -> dict[str, Any]:
        """The state of one flat tensor, from those of its parameter group."""
        names = {part.name for part in flat.parts}
        by_parameter = {name: state for each in old for name, state in each.items() if isinstance(state, dict)}
        if by_parameter.keys() & names:
            return {
                part.name: self._low_rank(part, by_parameter[part.name], group, rank)
                for part in flat.parts
                if part.name in by_parameter
            }
        made: dict[str, Any] = {}
        for key, value in old[0].items():
            if isinstance(value, Leaf) and any(f"{name}/{key}" in self._source.tensors for name in names):
                made[key] = _flat_leaf(value, flat, key, flat.numel)
            else:
                made[key] = self._other(value, key)
        return made

    def _other(self, value: Any, key: str) -> Any:
        """What belongs to no parameter: numbers, which each flat tensor has of its own."""
        for leaf in leaves(value):
            if leaf.shape and leaf.numel:
                raise DataError(
                    f"{self._source.directory}: the optimizer's state {key!r} of shape {leaf.shape} belongs to a rank"
                    " and not to parameters: it cannot be resharded"
                )
        return mapped(value, Leaf.copied)

    def _low_rank(self, part: Part, old: Mapping[str, Any], group: Mapping[str, Any], rank: int) -> dict[str, Any]:
        """Our optimizer's state of one parameter: see :mod:`ds_galore.optim.matrices`."""
        made: dict[str, Any] = {}
        for key, value in old.items():
            name = f"{part.name}/{key}"
            if not isinstance(value, Leaf) or name not in self._source.tensors:
                made[key] = self._other(value, key)
            elif "projector" not in old:
                made[key] = _with(value, (part.numel,), (name, part.start, 0, part.numel))
            else:
                made[key] = self._factor(part, key, value, group, rank)
        return made

    def _factor(self, part: Part, key: str, like: Leaf, group: Mapping[str, Any], rank: int) -> Leaf:
        name, (rows, columns) = f"{part.name}/{key}", (part.shape[0], math.prod(part.shape[1:]))
        width = self._source.tensors[name].info.shape[1]
        right = _is_right(str(group.get("proj_type", "std")), rows, columns)
        if right == (key != "projector"):  # the rows that this rank touches
            first = part.start // columns
            count = -(-(part.start + part.numel) // columns) - first if part.numel else 0
            return _with(like, (count, width), (name, first * width, 0, count * width))
        if right and not self._shards_projectors:
            return _with(like, (columns, width), (name, 0, 0, columns * width))
        count = -(-columns // self._ranks)
        first = min(rank * count, columns)
        return _with(like, (count, width), (name, first * width, 0, (min(first + count, columns) - first) * width))


def _is_right(proj_type: str, rows: int, columns: int) -> bool:
    if proj_type in ("right", "left"):
        return proj_type == "right"
    return (rows >= columns) == (proj_type == "std")


def _shards_projectors(source: _Checkpoint, ranks: int) -> bool:
    """Whether right projectors are kept in parts: the rule of :class:`ds_galore.optim.plan.Decisions`."""
    config = source.optim[0].get("ds_config") or {}
    storage = ((config.get("optimizer") or {}).get("params") or {}).get("projector_storage", "auto")
    if ranks == 1 or storage != "auto":
        return storage == "sharded" and ranks > 1
    layout = _Layout(source, 1, SUB_GROUP_SIZE)
    kinds = [str(group.get("proj_type", "std")) for group in _inner(source, source.optim[0])["param_groups"]]
    projectors = moments = 0
    for number, shapes in zip(layout.groups, layout.shapes, strict=True):
        for name, shape in shapes.items():
            tensor = source.tensors.get(f"{name}/projector")
            if tensor is not None and _is_right(kinds[number], shape[0], math.prod(shape[1:])):
                projectors += tensor.info.nbytes
                moments += 2 * 4 * shape[0] * tensor.info.shape[1]
    return projectors * ranks > moments


def _with(like: Leaf, shape: tuple[int, ...], piece: Piece) -> Leaf:
    empty = not math.prod(shape)  # tensors without elements are nobody's part
    return replace(like, shape=shape, pieces=() if empty else (piece,), own=empty).copied()


def _flat_leaf(like: Leaf, flat: Flat, kind: str, numel: int) -> Leaf:
    return replace(like, shape=(numel,), pieces=_pieces(flat, kind) if numel else (), own=not numel).copied()


def _size(shape: tuple[int, ...]) -> Form:
    return Form(json.dumps({"$": ["size", *shape]}))


# ---------------------------------------------------------------------- writing


def _decode(
    source: _Checkpoint,
    states: Sequence[Any],
    scratch: Scratch,
    workers: int,
    progress: Callable[[int, int], None],
) -> None:
    """Decode every tensor that is needed once, so that ranges of it can be read."""
    needed = {piece[0] for state in states for leaf in leaves(state) for piece in leaf.pieces if piece[3]}
    missing = needed - source.tensors.keys()
    if missing:
        raise DamageError(f"{source.directory}: its state names {min(missing)}, which its data do not hold")
    infos = {name: source.tensors[name].info for name in source.tensors if name in needed}

    def decode(name: str) -> None:
        tensor = source.tensors[name]
        source.tensors[name] = replace(tensor, read=scratch.keep(tensor.read(0, tensor.info.numel)).elements)

    in_threads(decode, infos, workers, progress)


def _values(source: _Checkpoint, leaf: Leaf) -> Iterator[Bits]:
    """The bit patterns of a tensor, in its own dtype."""
    target = SAFE_NAMES.get(leaf.dtype)
    if target is None:  # kept as bytes
        tensor = source.tensors[leaf.pieces[0][0]] if leaf.numel else None
        yield from [tensor.read(0, tensor.info.numel)] if tensor is not None else []
        return
    width, position = STORAGES[leaf.dtype][1], 0
    for name, start, offset, numel in sorted(leaf.pieces, key=lambda piece: piece[2]):
        if offset > position:
            yield np.zeros(offset - position, dtype=f"u{width}")
        position = offset + numel
        tensor = source.tensors.get(name)
        if tensor is None:
            raise DamageError(f"{source.directory}: its state names {name}, which its data do not hold")
        for begin in range(start, start + numel, CHUNK):
            bits = tensor.read(begin, min(begin + CHUNK, start + numel))
            yield cast(bits, tensor.info.dtype, target)
    if leaf.numel > position:
        yield np.zeros(leaf.numel - position, dtype=f"u{width}")


def _write_native(
    source: _Checkpoint, files: Sequence[Mapping[str, Any]], directory: Path, tag: str, workers: int
) -> None:
    (directory / tag).mkdir()
    jobs = [(directory / tag / name, state) for each in files for name, state in each.items()]
    _all(lambda job: write_torch_file(job[0], job[1], lambda leaf: _values(source, leaf)), jobs, workers)
    (directory / "latest").write_text(tag, encoding="utf-8")


def _write_ours(
    source: _Checkpoint,
    files: Sequence[Mapping[str, Any]],
    directory: Path,
    tag: str,
    scratch: Scratch,
    workers: int,
) -> None:
    store = CheckpointStore(directory)
    store.path(tag).mkdir()
    frozen = [{name: freeze(state, name) for name, state in each.items()} for each in files]
    held = _who_holds_what(frozen)
    ranks = len(files)

    def shards(rank: int) -> Iterator[Shard]:
        for each in held[rank]:
            info = each.empty or source.tensors[each.source].info
            stop = info.numel if each.stop is None else each.stop
            empty: Bits = np.zeros(0, dtype=f"u{DTYPES[info.dtype]}")
            bits = empty if each.empty else source.tensors[each.source].read(each.start, stop)
            yield Shard(each.name, info.dtype, info.shape, each.start, bits)

    records: list[list[FileRecord]] = [[] for _ in range(ranks)]
    states: dict[str, FileRecord] = {}

    def write(rank: int) -> None:
        records[rank] = store.write(tag, rank, ranks, shards(rank), scratch=scratch)
        for name, (value, tensors) in frozen[rank].items():
            described = {path: _described(path, leaf) for path, leaf in tensors.items()}
            text = json.dumps({"format": FORMAT, "version": VERSION, "state": value, "tensors": described})
            states[name] = store.write_state(tag, name, text)

    _all(write, range(ranks), workers)
    ordered = {name: states[name] for each in frozen for name in each}
    store.commit(tag, records, metadata={**source.metadata, "saves": 1}, states=ordered)
    script = directory / "zero_to_fp32.py"
    script.write_text(SCRIPT, encoding="utf-8")
    script.chmod(0o755)


def _described(path: str, leaf: Leaf) -> dict[str, Any]:
    pieces = [(path, 0, 0, leaf.numel)] if leaf.own else leaf.pieces
    return {"dtype": leaf.dtype, "shape": list(leaf.shape), "pieces": [list(piece) for piece in pieces]}


@dataclass(frozen=True)
class _Range:
    """A range of a logical tensor that a rank writes; ``stop`` of None is its end."""

    name: str
    source: str  # its name in the source; empty for a tensor without elements
    start: int
    stop: int | None
    empty: Info | None = None  # what such a tensor is


def _who_holds_what(frozen: Sequence[Mapping[str, tuple[Any, Mapping[str, Leaf]]]]) -> list[list[_Range]]:
    """By rank, what it writes: everything is written once, and what several could write by each in turn."""
    wanted: dict[tuple[str, int, int], list[int]] = {}
    found: list[list[_Range]] = [[] for _ in frozen]
    for suffix in (OPTIMIZER, MODEL):
        before = {name for name, _, _ in wanted}
        for rank, each in enumerate(frozen):
            for path, leaf in (
                item for file, (_, held) in each.items() if file.endswith(suffix) for item in held.items()
            ):
                if leaf.own:
                    empty = None if leaf.numel else Info(SAFE_NAMES.get(leaf.dtype, "U8"), leaf.shape)
                    found[rank].append(_Range(path, leaf.pieces[0][0] if leaf.numel else "", 0, None, empty))
                    continue
                for name, start, _, numel in leaf.pieces:
                    if numel and name not in before:
                        ranks = wanted.setdefault((name, start, start + numel), [])
                        if rank not in ranks:
                            ranks.append(rank)
    for number, ((name, start, stop), ranks) in enumerate(wanted.items()):
        found[ranks[number % len(ranks)]].append(_Range(name, name, start, stop))
    return found


def _all(work: Callable[[Any], None], items: Sequence[Any], workers: int) -> None:
    """Do the work on all items in threads; the first error ends it."""
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
