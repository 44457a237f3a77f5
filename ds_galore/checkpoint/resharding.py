"""State dicts for a number of ranks, or a layout, other than those that saved.

DeepSpeed loads what its own rank saved. Here that state dict is made anew, in the layout of the engine that loads: its
tensors from the logical ones, everything else from the first rank's state file, since ranks agree in it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ds_galore.checkpoint.pieces import MASTER, Piece, Read, assemble, describe, frozen_pieces, low_rank_pieces
from ds_galore.checkpoint.tree import restore
from ds_galore.errors import CheckpointMismatchError
from ds_galore.optim.optimizer import LowRankOptimizer
from ds_galore.zero.binding import FlatParts, flat_parts, inner_optimizer

__all__ = ["fits", "frozen_fragments", "masters", "optimizer_state"]


class _Later:
    """A tensor of a saved state dict that is not read: it is a part of a logical one, in the writer's layout."""

    def __init__(self, description: Mapping[str, Any]) -> None:
        self.kind = str(description["pieces"][0][0]).rpartition("/")[2]
        self.dtype = getattr(torch, str(description["dtype"]))


def fits(values: Mapping[str, Any], engine: Any) -> bool:
    """Whether a rank's saved optimizer state is laid out as this engine's: then it can be taken as it is.

    Everything is compared that DeepSpeed would stumble over, so that it makes no difference whether other ranks take
    theirs as they are, or have them made anew.

    Parameters
    ----------
    values
        The state file's content.
    """
    try:
        return _same_layout(values["state"]["optimizer_state_dict"], values["tensors"], engine)
    except (KeyError, TypeError, IndexError, AttributeError):
        return False


def _same_layout(saved: Mapping[str, Any], described: Mapping[str, Any], engine: Any) -> bool:
    zero, flats, optimizer = engine.optimizer, flat_parts(engine), inner_optimizer(engine)
    stage3 = "fp32_flat_groups" in saved
    paddings = [0] * len(flats) if stage3 else getattr(zero, "groups_padding", [0] * len(flats))
    held = []
    for reference in saved["fp32_flat_groups" if stage3 else "single_partition_of_fp32_groups"]:
        description = described[reference["$"][1]]
        pieces = [tuple(piece) for piece in description["pieces"] if piece[3]]
        held.append((list(description["shape"]), pieces))
    wanted = [
        ([flat.tensor.numel() - padding], [(p.name, p.start, p.offset, p.numel) for p in _pieces(flat, MASTER)])
        for flat, padding in zip(flats, paddings, strict=True)
    ]
    if held != wanted:
        return False
    alignment = getattr(zero, "round_robin_bit16_padding", None)
    if not stage3 and saved.get("param_alignment_paddings", alignment) != alignment:
        return False
    inner = saved["optimizer_state_dict" if stage3 else "base_optimizer_state"]
    if isinstance(inner, Mapping):
        count = len(zero.optimizer.param_groups)
        members = [sum(flat.group == number for flat in flats) for number in range(count)]
        if [len(group["params"]) for group in inner["param_groups"]] != members:
            return False
    if not isinstance(optimizer, LowRankOptimizer):
        return True
    # Projectors may be kept whole or in parts, whatever the layout of the weights.
    states = dict(_low_rank_states(inner))
    factors = [piece for flat in flats for piece, _ in low_rank_pieces(optimizer, flat, states).values()]
    names = {piece.name for piece in factors}
    there = (piece for description in described.values() for piece in description["pieces"])
    low = {(name, start, numel) for name, start, _, numel in there if name in names and numel}
    return low <= {(piece.name, piece.start, piece.numel) for piece in factors}


def _low_rank_states(tree: Any) -> Iterator[tuple[str, Any]]:
    """By parameter, the states of projected matrices in a state file."""
    if isinstance(tree, list):
        for each in tree:
            yield from _low_rank_states(each)
    elif isinstance(tree, Mapping):
        for name, each in tree.items():
            if isinstance(each, Mapping) and "has_basis" in each:
                yield name, each
            else:
                yield from _low_rank_states(each)


def masters(engine: Any, read: Read) -> list[Tensor]:
    """The flat fp32 tensors of this rank, padding zero, from the logical master weights."""
    return [_flat(flat, MASTER, flat.tensor.dtype, read) for flat in flat_parts(engine)]


def frozen_fragments(engine: Any, names: Iterable[str], read: Read) -> dict[str, Tensor]:
    """This rank's partitions of frozen parameters, by name, from the logical ones."""
    by_name = {name: parameter for parameter, name in engine.param_names.items()}
    found = {}
    for name in names:
        if name not in by_name:
            raise CheckpointMismatchError(f"{name}: is a frozen parameter in the checkpoint, and not in the model")
        like = by_name[name].ds_tensor
        found[name] = assemble(describe(like, frozen_pieces(by_name[name], name, like.numel())), read)
    return found


def optimizer_state(engine: Any, values: Mapping[str, Any], read: Read) -> dict[str, Any]:
    """The content of an ``_optim_states.pt`` for this rank.

    Parameters
    ----------
    engine
        DeepSpeed's, which loads.
    values
        The content of any rank's optimizer state file.
    read
        As :func:`~ds_galore.checkpoint.pieces.assemble` takes it.

    Raises
    ------
    CheckpointMismatchError
        For other parameter groups, a state that belongs to no parameter, or one that is missing.
    """
    described = values["tensors"]

    def tensor(path: str) -> Any:
        pieces = described[path]["pieces"]
        is_part = bool(pieces) and pieces[0][0] != path
        return _Later(described[path]) if is_part else assemble(described[path], read)

    restored: dict[str, Any] = restore(values["state"], tensor)
    zero, saved = engine.optimizer, restored["optimizer_state_dict"]
    stage3 = "fp32_flat_groups" in saved
    inner_key = "optimizer_state_dict" if stage3 else "base_optimizer_state"
    flats = flat_parts(engine)
    if not isinstance(saved[inner_key], dict):
        raise CheckpointMismatchError("an elastic checkpoint cannot be loaded on another number of ranks")
    saved[inner_key] = _inner(engine, flats, saved[inner_key], read)
    saved["partition_count"] = zero.partition_count
    if stage3:
        saved["fp32_flat_groups"] = masters(engine, read)
        return restored
    saved["single_partition_of_fp32_groups"] = masters(engine, read)
    saved["zero_stage"] = engine.zero_optimization_stage()
    saved["param_slice_mappings"] = zero._param_slice_mappings
    for key, name in (
        ("group_paddings", "groups_padding"),
        ("group_paddings", "group_paddings"),
        ("param_alignment_paddings", "round_robin_bit16_padding"),
    ):
        if hasattr(zero, name):
            saved[key] = getattr(zero, name)
    return restored


def _pieces(flat: FlatParts, kind: str) -> list[Piece]:
    return [Piece(f"{p.name}/{kind}", p.shape, p.start, p.offset, p.numel) for p in flat.parts if p.numel]


def _flat(flat: FlatParts, kind: str, dtype: torch.dtype, read: Read) -> Tensor:
    like = torch.empty(0, dtype=dtype)
    return assemble({**describe(like, _pieces(flat, kind)), "shape": list(flat.tensor.shape)}, read)


def _inner(engine: Any, flats: list[FlatParts], saved: dict[str, Any], read: Read) -> dict[str, Any]:
    """The state dict of the optimizer that DeepSpeed wraps, its parameters numbered as the engine's flat tensors."""
    groups = saved["param_groups"]
    count = len(engine.optimizer.optimizer.param_groups)
    if len(groups) != count:
        raise CheckpointMismatchError(
            f"the checkpoint has {len(groups)} parameter groups, and the configuration {count}"
        )
    members: list[list[FlatParts]] = [[flat for flat in flats if flat.group == number] for number in range(count)]
    state: dict[int, Any] = {}
    new_groups, index = [], 0
    for group, own in zip(groups, members, strict=True):
        old = [saved["state"][number] for number in group["params"] if number in saved["state"]]
        for offset, flat in enumerate(own):
            if old:
                state[index + offset] = _state_of(engine, flat, old, read)
        new_groups.append({**group, "params": list(range(index, index + len(own)))})
        index += len(own)
    return {**saved, "state": state, "param_groups": new_groups}


def _state_of(engine: Any, flat: FlatParts, old: list[dict[str, Any]], read: Read) -> dict[str, Any]:
    """The state of one flat tensor from the states of its parameter group in the writer's layout."""
    optimizer = inner_optimizer(engine)
    if isinstance(optimizer, LowRankOptimizer):
        return _low_rank_state(optimizer, flat, {name: state for each in old for name, state in each.items()}, read)
    made: dict[str, Any] = {}
    for key, value in old[0].items():
        if isinstance(value, _Later):
            made[key] = _flat(flat, value.kind, value.dtype, read)
        elif isinstance(value, Tensor) and value.dim() > 0:
            raise CheckpointMismatchError(
                f"{type(optimizer).__name__}'s state {key!r} of shape {tuple(value.shape)} belongs to a rank and not to"
                " parameters: this checkpoint can be loaded on the number of ranks that saved it only"
            )
        else:
            made[key] = copy.deepcopy(value)  # torch counts steps in a tensor, which sub-groups must not share
    return made


def _low_rank_state(
    optimizer: LowRankOptimizer, flat: FlatParts, old: Mapping[str, Mapping[str, Any]], read: Read
) -> dict[str, Any]:
    made: dict[str, Any] = {}
    layout = low_rank_pieces(optimizer, flat, old)
    for name in (part.name for part in flat.parts):
        if name not in old:
            continue
        made[name] = {}
        for key, value in old[name].items():
            if (name, key) in layout:
                piece, shape = layout[name, key]
                like = torch.empty(0, dtype=value.dtype)
                made[name][key] = assemble({**describe(like, [piece]), "shape": list(shape)}, read)
            elif isinstance(value, _Later):
                raise CheckpointMismatchError(f"{name}: has {key!r} in the checkpoint, and not in the configuration")
            else:
                made[name][key] = value
    return made
