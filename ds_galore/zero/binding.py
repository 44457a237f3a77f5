"""From DeepSpeed's objects to matrices on flat slices.

DeepSpeed builds an optimizer from the model's own parameters and later hands its ``step()`` flat tensors of its own.
Every parameter leads back to DeepSpeed's ZeRO optimizer, which knows what it put where; this module asks it once and
keeps integers, never views, because DeepSpeed replaces the storage when states are offloaded.

Reads attributes of DeepSpeed's objects (seen in 0.19.8) and imports torch alone, so that the optimizers also work
where DeepSpeed is not installed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from ds_galore.errors import BindingError
from ds_galore.zero.group import RankGroup
from ds_galore.zero.layout import even_ranges

__all__ = [
    "FlatBinding",
    "FlatParts",
    "Part",
    "Placement",
    "bind_whole",
    "bind_zero3",
    "flat_parts",
    "full_shape",
    "inner_optimizer",
]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one parameter lies in a flat tensor.

    Parameters
    ----------
    parameter
        The model's own parameter; only its identity is used.
    offset
        Index in this rank's flat tensor at which the parameter's partition begins.
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
    """

    group: RankGroup
    placements: tuple[Placement, ...]
    names: tuple[str | None, ...]


def full_shape(parameter: Tensor) -> tuple[int, ...]:
    """The shape of the whole parameter, also when ``zero.Init`` has partitioned it."""
    shape = getattr(parameter, "ds_shape", None)
    return tuple(parameter.shape if shape is None else shape)


def bind_whole(parameter: Parameter) -> FlatBinding:
    """The binding of an ordinary parameter, which this process holds whole."""
    numel = 1
    for size in full_shape(parameter):
        numel *= size
    return FlatBinding(RankGroup(None), (Placement(parameter, 0, ((0, numel),)),), (None,))


def bind_zero3(flat: Tensor, parameters: Iterable[Parameter]) -> FlatBinding:
    """What a flat tensor of ZeRO stage 3 consists of.

    Parameters
    ----------
    flat
        The tensor that DeepSpeed put into a parameter group: this rank's partitions of one sub-group, in sequence.
    parameters
        The parameters with which the optimizer was built.

    Raises
    ------
    BindingError
        If the tensor is none of DeepSpeed's stage-3 partitions, or belongs to a configuration that is not supported.
    """
    zero: Any = None
    for parameter in parameters:
        zero = getattr(parameter, "_z3_optimizer", None)
        if zero is not None:
            break
        if hasattr(parameter, "_hp_mapping"):
            raise BindingError(
                "the parameters are partitioned by ZeRO stage 1 or 2 or by DeepSpeed's BF16_Optimizer, and ds_galore"
                ' supports stage 3 and unpartitioned models so far: set "zero_optimization": {"stage": 3}'
            )
    if zero is None:
        raise BindingError(
            "step() was given a tensor that is none of the parameters with which the optimizer was built, and they do"
            " not belong to a ZeRO-3 engine; only DeepSpeed's ZeRO stage 3 and unpartitioned models are supported"
        )
    if getattr(zero, "zero_hpz_partition_size", 1) > 1:
        raise BindingError(
            f"zero_hpz_partition_size is {zero.zero_hpz_partition_size}; ds_galore does not support hpZ so far: use 1"
        )
    index = next((i for i, each in enumerate(zero.fp32_partitioned_groups_flat) if each is flat), None)
    if index is None:
        raise BindingError("step() was given a tensor that is none of DeepSpeed's stage-3 partitions")
    group = RankGroup(zero._get_sub_group_process_group(index))
    placements, names, expected = [], [], 0
    for parameter in zero.fp16_groups[index]:
        sub_group, offset, partition_numel = zero.grad_position[zero.get_param_id(parameter)]
        if sub_group != index or offset != expected:
            raise BindingError(
                f"DeepSpeed places a parameter of sub-group {index} at offset {offset} of sub-group {sub_group},"
                f" where {expected} was expected: this version of DeepSpeed lays out its partitions in another way"
            )
        expected += partition_numel
        ranges = even_ranges(parameter.ds_numel, partition_numel, group.world_size)
        placements.append(Placement(parameter, offset, tuple(ranges)))
        names.append(zero.param_names.get(parameter))
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
    zero = engine.optimizer
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        return [_stage3_parts(zero, index) for index in range(len(zero.fp32_partitioned_groups_flat))]
    if hasattr(zero, "round_robin_bit16_offsets"):  # stages 1 and 2; with the order of round_robin_gradients
        return [
            _split_parts(
                engine,
                index,
                flat,
                zip(zero.round_robin_bit16_groups[index], zero.round_robin_bit16_offsets[index], strict=True),
                RankGroup(zero.real_dp_process_group[index]).rank * flat.numel(),
            )
            for index, flat in enumerate(zero.single_partition_of_fp32_groups)
        ]
    if hasattr(zero, "fp32_groups_flat_partition"):  # BF16_Optimizer: stage 1 with fp32 accumulation
        found = []
        for index, flat in enumerate(zero.fp32_groups_flat_partition):
            offsets, offset = [], 0
            for parameter in zero.bf16_groups[index]:
                offsets.append((parameter, offset))
                offset += parameter.numel()
            rank = RankGroup(zero.real_dp_process_group[index]).rank
            found.append(_split_parts(engine, index, flat, offsets, rank * flat.numel()))
        return found
    if engine.zero_optimization():
        raise BindingError(f"{type(zero).__name__}: its partitions are laid out in a way that ds_galore does not know")
    return []


def _stage3_parts(zero: Any, index: int) -> FlatParts:
    flat = zero.fp32_partitioned_groups_flat[index]
    binding = bind_zero3(flat, zero.fp16_groups[index])
    parts = []
    for placement, name in zip(binding.placements, binding.names, strict=True):
        start, stop = placement.ranges[binding.group.rank]
        shape = full_shape(placement.parameter)
        parts.append(Part(placement.parameter, str(name), shape, start, placement.offset, stop - start))
    return FlatParts(flat, int(zero.sub_group_to_group_id[index]), tuple(parts))


def _split_parts(
    engine: Any, group: int, flat: Tensor, offsets: Iterable[tuple[Parameter, int]], begin: int
) -> FlatParts:
    """Parameters that lie in sequence in a group, of which the flat tensor is the range from ``begin`` on."""
    parts = []
    for parameter, offset in offsets:
        start = min(max(begin - offset, 0), parameter.numel())
        stop = min(max(begin + flat.numel() - offset, start), parameter.numel())
        place = offset + start - begin if stop > start else 0
        parts.append(Part(parameter, engine.param_names[parameter], tuple(parameter.shape), start, place, stop - start))
    return FlatParts(flat, group, tuple(parts))
