"""From DeepSpeed's objects to matrices on flat slices.

DeepSpeed builds an optimizer from the model's own parameters and later hands its ``step()`` tensors of its own:

=====================================  ==========================================================================
stage 0, fp32                          the parameters themselves
stage 0, bf16 and fp16                 fp32 copies of the parameters (``FP16_UnfusedOptimizer``)
stages 1 and 2, ``BF16_Optimizer``     for each parameter group, this rank's equal part of the flattened group
stage 3                                for each sub-group, this rank's equal parts of its parameters, in sequence
=====================================  ==========================================================================

The object that made them, here the *holder*, knows what it put where; this module asks it once and keeps integers,
never views, because DeepSpeed replaces the storage when states are offloaded. At stage 3 every parameter leads to the
holder; elsewhere :func:`ds_galore.enable` has the engine tell. What ``_hp_mapping`` says at stages 1 and 2 is not used:
under ``round_robin_gradients`` it is wrong (DeepSpeed 0.19.8), and it tells nothing of other ranks.

Reads attributes of DeepSpeed's objects (seen in 0.17.6, 0.18.9 and 0.19.8) and imports torch alone, so that the
optimizers also work where DeepSpeed is not installed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from ds_galore.errors import BindingError
from ds_galore.zero.group import RankGroup
from ds_galore.zero.layout import even_ranges, group_ranges

__all__ = [
    "FlatBinding",
    "FlatParts",
    "Part",
    "Placement",
    "bind",
    "bind_whole",
    "flat_parts",
    "full_shape",
    "inner_optimizer",
    "is_linked",
]

#: Where the holders keep their flat tensors: stage 3, stages 1 and 2, BF16_Optimizer.
_FLAT_TENSORS = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one parameter lies in a flat tensor.

    Parameters
    ----------
    parameter
        The model's own parameter; only its identity is used.
    offset
        Index in this rank's flat tensor at which its range of the parameter begins; 0 where the range is empty and
        DeepSpeed keeps no place for it.
    ranges
        By rank within the group, the range ``[start, stop)`` of the parameter's elements that it holds.
    """

    parameter: Parameter
    offset: int
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class FlatBinding:
    """What one flat tensor consists of.

    Parameters
    ----------
    group
        The ranks that hold it together.
    placements
        Its parameters, in the order in which they lie there, which is the same on all ranks.
    names
        By position in ``placements``, the parameter's name in the model, or None where DeepSpeed does not tell.
    whole
        Whether it is one whole parameter, in its own shape, which every process has for itself.
    """

    group: RankGroup
    placements: tuple[Placement, ...]
    names: tuple[str | None, ...]
    whole: bool = False


def full_shape(parameter: Tensor) -> tuple[int, ...]:
    """The shape of the whole parameter, also when ``zero.Init`` has partitioned it."""
    shape = getattr(parameter, "ds_shape", None)
    return tuple(parameter.shape if shape is None else shape)


def bind_whole(parameter: Parameter) -> FlatBinding:
    """The binding of an ordinary parameter, or of a copy of it, which this process holds whole."""
    numel = math.prod(full_shape(parameter))
    return FlatBinding(RankGroup(None), (Placement(parameter, 0, ((0, numel),)),), (None,), whole=True)


def is_linked(parameters: Iterable[Tensor]) -> bool:
    """Whether one of DeepSpeed's ZeRO optimizers holds the parameters; it says so once it is built."""
    return any(hasattr(each, "_z3_optimizer") or hasattr(each, "_hp_mapping") for each in parameters)


def bind(flat: Tensor, parameters: Iterable[Tensor], holder: Any = None) -> FlatBinding:
    """What a tensor consists of that DeepSpeed put into a parameter group in place of the parameters.

    Nothing is sent. What is found, and whether it fails, depends on what is the same on all ranks.

    Parameters
    ----------
    flat
        The tensor.
    parameters
        The parameters with which the optimizer was built.
    holder
        DeepSpeed's optimizer that wraps ours, ``engine.optimizer``; None where nobody told, which is enough at stage 3.

    Raises
    ------
    BindingError
        If the tensor is none of DeepSpeed's, or DeepSpeed lays out its partitions in a way that is not known here.
    """
    if holder is None:
        parameters = list(parameters)
        holder = next((z for each in parameters if (z := getattr(each, "_z3_optimizer", None)) is not None), None)
        if holder is None and is_linked(parameters):
            raise BindingError(
                "the parameters are partitioned by ZeRO stage 1 or 2, and the engine did not tell how: call"
                " ds_galore.enable() before deepspeed.initialize"
            )
        if holder is None:
            raise BindingError(
                "step() was given a tensor that is none of the parameters with which the optimizer was built; if it is"
                " one of a DeepSpeed engine in bf16 or fp16, call ds_galore.enable() before deepspeed.initialize"
            )
    index = next((i for i, each in enumerate(_flats(holder)) if each is flat), None)
    if index is None:
        raise BindingError(
            f"step() was given a tensor that is none of those of DeepSpeed's {type(holder).__name__}: it belongs to"
            " another engine, or this version of DeepSpeed keeps its tensors in another way"
        )
    return _bind_index(holder, index)


def _flats(holder: Any) -> list[Tensor]:
    """The tensors that a holder puts into the parameter groups, in order."""
    for name in _FLAT_TENSORS:
        if hasattr(holder, name):
            return list(getattr(holder, name))
    if hasattr(holder, "fp32_groups") and hasattr(holder, "fp16_groups"):
        return [copied for group in holder.fp32_groups for copied in group]
    raise BindingError(f"{type(holder).__name__}: its partitions are laid out in a way that ds_galore does not know")


def _bind_index(holder: Any, index: int) -> FlatBinding:
    if hasattr(holder, "fp32_partitioned_groups_flat"):
        return _bind_sub_group(holder, index)
    if hasattr(holder, "round_robin_bit16_groups"):  # stages 1 and 2: in the order in which they lie there
        parameters = holder.round_robin_bit16_groups[index]
        found = getattr(holder, "round_robin_bit16_offsets", None)  # before DeepSpeed 0.19 nothing lies between them
        offsets = _in_sequence(parameters) if found is None else zip(parameters, found[index], strict=True)
        return _bind_group(holder, index, holder.single_partition_of_fp32_groups[index].numel(), offsets)
    if hasattr(holder, "fp32_groups_flat_partition"):  # BF16_Optimizer: stage 1 with fp32 accumulation
        offsets = _in_sequence(holder.bf16_groups[index])
        return _bind_group(holder, index, holder.fp32_groups_flat_partition[index].numel(), offsets)
    return _bind_copy(holder, index)


def _in_sequence(parameters: Iterable[Parameter]) -> Iterator[tuple[Parameter, int]]:
    """Parameters that lie one after the other, each with its offset."""
    offset = 0
    for parameter in parameters:
        yield parameter, offset
        offset += parameter.numel()


def _bind_copy(holder: Any, index: int) -> FlatBinding:
    """Stage 0 in bf16 or fp16: an fp32 copy of a parameter."""
    originals = [parameter for group in holder.fp16_groups for parameter in group]
    copied = _flats(holder)
    if [each.shape for each in originals] != [each.shape for each in copied]:
        raise BindingError(f"{type(holder).__name__} keeps other fp32 copies than one of each of its parameters")
    return bind_whole(originals[index])


def _bind_group(holder: Any, index: int, partition_numel: int, offsets: Iterable[tuple[Parameter, int]]) -> FlatBinding:
    """Stages 1 and 2: a parameter group in sequence, of which every rank holds an equal part."""
    group = RankGroup(holder.real_dp_process_group[index])
    begin, position = group.rank * partition_numel, 0
    placements, names = [], []
    for parameter, offset in offsets:
        if offset < position:
            raise BindingError(
                f"DeepSpeed places a parameter at {offset} of parameter group {index}, where another one ends at"
                f" {position}: this version of DeepSpeed lays out its partitions in another way"
            )
        position = offset + parameter.numel()
        ranges = group_ranges(offset, parameter.numel(), partition_numel, group.world_size)
        start, stop = ranges[group.rank]
        placements.append(Placement(parameter, offset + start - begin if stop > start else 0, tuple(ranges)))
        names.append(_name(holder, parameter))
    if position > partition_numel * group.world_size:
        raise BindingError(
            f"parameter group {index} holds {position} elements, more than {group.world_size} partitions of"
            f" {partition_numel}: this version of DeepSpeed lays out its partitions in another way"
        )
    return FlatBinding(group, tuple(placements), tuple(names))


def _process_group(holder: Any, index: int) -> Any:
    """The ranks that share a sub-group; before DeepSpeed 0.19 the same ones share all of them."""
    find = getattr(holder, "_get_sub_group_process_group", None)
    return holder.dp_process_group if find is None else find(index)


def _name(holder: Any, parameter: Parameter) -> str | None:
    """A parameter's name; at stage 3 DeepSpeed tells it since 0.18."""
    found = getattr(holder, "param_names", {}).get(parameter)
    return None if found is None else str(found)


def _bind_sub_group(holder: Any, index: int) -> FlatBinding:
    """Stage 3: this rank's partitions of one sub-group's parameters, in sequence."""
    flat = holder.fp32_partitioned_groups_flat[index]
    group = RankGroup(_process_group(holder, index))
    placements, names, expected = [], [], 0
    for parameter in holder.fp16_groups[index]:
        sub_group, offset, partition_numel = holder.grad_position[holder.get_param_id(parameter)]
        if sub_group != index or offset != expected:
            raise BindingError(
                f"DeepSpeed places a parameter of sub-group {index} at offset {offset} of sub-group {sub_group},"
                f" where {expected} was expected: this version of DeepSpeed lays out its partitions in another way"
            )
        expected += partition_numel
        ranges = even_ranges(parameter.ds_numel, partition_numel, group.world_size)
        placements.append(Placement(parameter, offset, tuple(ranges)))
        names.append(_name(holder, parameter))
    if expected != flat.numel():
        raise BindingError(f"sub-group {index} holds {flat.numel()} elements where its parameters need {expected}")
    return FlatBinding(group, tuple(placements), tuple(names))


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank's flat tensor holds of one parameter.

    Parameters
    ----------
    parameter, name, shape
        The model's own parameter; its name and whole shape.
    start
        Index among the parameter's elements, row-major, at which the part begins.
    offset, numel
        Where it lies in the flat tensor, and how many elements it has; 0 where the rank holds nothing of it.
    """

    parameter: Parameter
    name: str
    shape: tuple[int, ...]
    start: int
    offset: int
    numel: int


@dataclass(frozen=True)
class FlatParts:
    """A flat tensor of fp32 master weights, as any ZeRO stage makes them.

    Parameters
    ----------
    tensor
        The flat tensor, which is also the key of its state in the optimizer.
    group
        Index of its parameter group.
    parts
        What it holds, in order; what is between and after them is padding.
    """

    tensor: Tensor
    group: int
    parts: tuple[Part, ...]


def inner_optimizer(engine: Any) -> Any:
    """The optimizer whose states are saved: what ZeRO wraps, which for Adagrad is not what it was given."""
    return getattr(engine.optimizer, "optimizer", None) or engine.basic_optimizer


def flat_parts(engine: Any) -> list[FlatParts]:
    """The flat tensors of a DeepSpeed engine's ZeRO optimizer on this rank; none without ZeRO.

    Unlike a :class:`FlatBinding`, they tell what this rank holds, and nothing of the others.

    Raises
    ------
    BindingError
        If the optimizer lays out its partitions in a way that is not known here.
    """
    holder = engine.optimizer
    if not engine.zero_optimization() and not any(hasattr(holder, name) for name in _FLAT_TENSORS):
        return []
    found = []
    for index, flat in enumerate(_flats(holder)):
        group = holder.sub_group_to_group_id[index] if hasattr(holder, "sub_group_to_group_id") else index
        binding, parts = _bind_index(holder, index), []
        for placement, name in zip(binding.placements, binding.names, strict=True):
            start, stop = placement.ranges[binding.group.rank]
            shape = full_shape(placement.parameter)
            name = engine.param_names[placement.parameter] if name is None else name
            parts.append(Part(placement.parameter, str(name), shape, start, placement.offset, stop - start))
        found.append(FlatParts(flat, int(group), tuple(parts)))
    return found
