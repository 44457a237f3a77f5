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

__all__ = ["FlatBinding", "Placement", "bind_whole", "bind_zero3", "full_shape"]


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
