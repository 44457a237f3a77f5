"""The states of each rank of another number of ranks. No torch, no DeepSpeed."""

from __future__ import annotations

import copy
import json
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ds_galore.checkpoint.errors import DamageError
from ds_galore.errors import DataError
from ds_galore.parameters import OPTIMIZERS
from ds_galore.tools.formats import BLOCK
from ds_galore.tools.reshard.checkpoint import (
    MODEL,
    OPTIMIZER,
    Checkpoint,
    inner_state,
    pieces_of,
    shape_of,
    zero_section,
)
from ds_galore.tools.reshard.layout import Flat, Part, round_robin, split, stage3, sub_groups, undo_round_robin
from ds_galore.tools.states import Form, Leaf, Object, Piece, leaves, mapped

__all__ = ["Layout", "Resharder", "check_sizes", "fragment"]

#: DeepSpeed's default of ``zero_optimization.sub_group_size``.
SUB_GROUP_SIZE = 1_000_000_000


class Layout:
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

    def __init__(self, source: Checkpoint, ranks: int, sub_group_size: int | None = None) -> None:
        self.ranks, self.stage = ranks, source.stage
        tree = source.optim[0]
        saved = [
            {name: shape_of(shape) for name, shape in group.items()}
            for group in source.model[0].get("param_shapes") or []
        ]
        for name, shape in (item for group in saved for item in group.items()):
            held = source.tensors.get(f"{name}/fp32")
            if held is None or held.info.shape != shape:
                found = "not there" if held is None else f"of shape {held.info.shape}"
                raise DamageError(
                    f"{source.directory}: {name} has shape {shape} in its state, and its data are {found}"
                )
        groups = inner_state(source, tree)["param_groups"]
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
        config = zero_section(source)
        state = tree["optimizer_state_dict"]
        paddings = state.get("param_alignment_paddings")
        self.bf16 = "param_alignment_paddings" not in state and "zero_stage" not in state
        reorder = bool(config.get("round_robin_gradients")) and not self.bf16
        wanted = config.get("parameter_alignment", bool(paddings) and any(any(each) for each in paddings))
        aligned = 16 // _weight_bytes(source) if wanted and not self.bf16 else 1
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


def _weight_bytes(source: Checkpoint) -> int:
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


def fragment(like: Leaf, name: str, shape: tuple[int, ...], rank: int, count: int | None = None) -> Leaf:
    """A rank's partition of a frozen parameter at stage 3, ``count`` elements long."""
    count, numel = like.numel if count is None else count, math.prod(shape)
    if not numel:
        return replace(like, pieces=(), own=False).copied()
    first = min(rank * count, numel)
    piece = (f"{name}/weight", first, 0, min(first + count, numel) - first)
    return replace(like, shape=(count,), pieces=(piece,), own=False).copied()


class Resharder:
    """The states of each of ``ranks`` ranks, from those of the source."""

    def __init__(self, source: Checkpoint, ranks: int, sub_group_size: int | None) -> None:
        self._source, self._ranks = source, ranks
        self._layout: Layout | None = None
        if source.optim:
            size = sub_group_size if sub_group_size is not None else zero_section(source).get("sub_group_size")
            size = int(size) if isinstance(size, int | float) and size >= 1 else SUB_GROUP_SIZE
            self._layout = Layout(source, ranks, size)
        names = source.tensors
        ours = source.metadata.get("optimizer") in OPTIMIZERS
        self.low_rank = ours or any(name.endswith("/projector") for name in names)  # without ZeRO too
        self._shards_projectors = self.low_rank and bool(source.optim) and _shards_projectors(source, ranks)

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
            shapes = {name: shape_of(form) for name, form in tree["frozen_param_shapes"].items()}
            fragments = tree["frozen_param_fragments"]
            tree["frozen_param_fragments"] = type(fragments)(
                (name, fragment(leaf, name, shapes[name], rank, -(-math.prod(shapes[name]) // self._ranks)))
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
        inner = inner_state(source, tree)
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
            if isinstance(value, Leaf) and name not in self._source.tensors:
                raise DataError(
                    f"{self._source.directory}: holds low-rank states in DeepSpeed's own files, which cannot be"
                    " resharded: load it on the number of ranks that saved it, and save it with ds_galore.checkpoint"
                )
            if not isinstance(value, Leaf):
                made[key] = self._other(value, key)
            elif "has_basis" not in old:
                made[key] = self._unprojected(part, key, value)
            else:
                made[key] = self._factor(part, key, value, group, rank)
        return made

    def _unprojected(self, part: Part, key: str, like: Leaf) -> Leaf:
        """Of a parameter that is not projected: see :mod:`ds_galore.optim.states`."""
        name = f"{part.name}/{key}"
        shape, unit = self._source.tensors[name].info.shape, 0
        if key.endswith("_absmax"):
            unit = BLOCK
        elif key.endswith("_row"):
            unit = math.prod(part.shape[1:])
        elif key.endswith("_col"):
            return _with(like, shape, (name, 0, 0, math.prod(shape)))
        if not unit:
            return _with(like, (part.numel,), (name, part.start, 0, part.numel))
        first = part.start // unit
        count = -(-(part.start + part.numel) // unit) - first if part.numel else 0
        return _with(like, (count, 1), (name, first, 0, count))

    def _factor(self, part: Part, key: str, like: Leaf, group: Mapping[str, Any], rank: int) -> Leaf:
        name, (rows, columns) = f"{part.name}/{key}", (part.shape[0], math.prod(part.shape[1:]))
        shape = self._source.tensors[name].info.shape
        width = shape[1]
        right = _is_right(str(group.get("proj_type", "std")), rows, columns)
        if key.endswith("_col"):
            return _with(like, shape, (name, 0, 0, width))
        if right == (not key.startswith("projector")):  # the rows that this rank touches
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


def _shards_projectors(source: Checkpoint, ranks: int) -> bool:
    """Whether right projectors are kept in parts: the rule of :class:`ds_galore.optim.plan.Decisions`."""
    config = source.optim[0].get("ds_config") or {}
    storage = ((config.get("optimizer") or {}).get("params") or {}).get("projector_storage", "auto")
    if ranks == 1 or storage != "auto":
        return storage == "sharded" and ranks > 1
    layout = Layout(source, 1, SUB_GROUP_SIZE)
    kinds = [str(group.get("proj_type", "std")) for group in inner_state(source, source.optim[0])["param_groups"]]
    own: dict[str, dict[str, int]] = {}
    for full, held in source.tensors.items():
        name, _, key = full.rpartition("/")
        if key.startswith(("exp_avg", "projector")):
            own.setdefault(name, {})[key] = held.info.nbytes
    projectors = moments = 0
    for number, shapes in zip(layout.groups, layout.shapes, strict=True):
        for name, shape in shapes.items():
            tensor = source.tensors.get(f"{name}/projector")
            if tensor is not None and _is_right(kinds[number], shape[0], math.prod(shape[1:])):
                for other, each in own[name].items():
                    if other.startswith("projector"):
                        projectors += each
                    else:
                        moments += each
    return projectors * ranks > moments


def _with(like: Leaf, shape: tuple[int, ...], piece: Piece) -> Leaf:
    empty = not math.prod(shape)  # tensors without elements are nobody's part
    return replace(like, shape=shape, pieces=() if empty else (piece,), own=empty).copied()


def _flat_leaf(like: Leaf, flat: Flat, kind: str, numel: int) -> Leaf:
    return replace(like, shape=(numel,), pieces=pieces_of(flat, kind) if numel else (), own=not numel).copied()


def _size(shape: tuple[int, ...]) -> Form:
    return Form(json.dumps({"$": ["size", *shape]}))


def check_sizes(source: Checkpoint, files: Mapping[str, Any], ranks: int) -> set[str]:
    """Before anything is allocated by them: that tensors of a rank's states are no larger than the data that they name.

    Returns
    -------
    set of str
        The logical tensors of which they consist.

    Raises
    ------
    DamageError
        If one is.
    """
    known = sum(tensor.info.numel for tensor in source.tensors.values())
    needed = set()
    for leaf in (leaf for state in files.values() for leaf in leaves(state)):
        position = 0
        for name, start, offset, numel in sorted(leaf.pieces, key=lambda piece: piece[2]):
            if not numel:
                continue
            if name not in source.tensors:
                raise DamageError(f"{source.directory}: its state names {name}, which its data do not hold")
            needed.add(name)
            info = source.tensors[name].info
            whole = leaf.numel * (info.shape[-1] if info.dtype == "U8" and leaf.dtype != "uint8" else 1)
            fits = info.numel == whole if leaf.own else start + numel <= info.numel
            if not fits or offset < position or start < 0:
                raise DamageError(f"{source.directory}: its state places {name} where it does not fit")
            position = offset + numel
        if position > leaf.numel or leaf.numel > known + 64 * ranks * (len(leaf.pieces) + 1):
            raise DamageError(
                f"{source.directory}: a tensor of its state has {leaf.numel} elements, more than its data"
            )
    return needed
