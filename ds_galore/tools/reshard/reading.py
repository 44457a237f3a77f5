"""Reading the states of all ranks. No torch, no DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ds_galore.checkpoint.codecs.base import Bits
from ds_galore.checkpoint.errors import DamageError
from ds_galore.checkpoint.reader import CheckpointReader
from ds_galore.errors import DataError
from ds_galore.tools.native import NativeSource
from ds_galore.tools.output import cast
from ds_galore.tools.reshard.checkpoint import (
    MODEL,
    OPTIMIZER,
    Checkpoint,
    inner_state,
    pieces_of,
    shape_of,
    state_numbers,
)
from ds_galore.tools.reshard.cutting import Layout, fragment
from ds_galore.tools.source import Info, natural, open_source
from ds_galore.tools.states import Leaf, Tensor, from_pickle, thaw
from ds_galore.tools.torchfile import TorchFile

__all__ = ["read_native", "read_ours"]

#: Elements of a tensor that are compared at a time.
CHUNK = 2**24


def read_ours(directory: Path) -> Checkpoint:
    """One of our checkpoints.

    Raises
    ------
    NotCommittedError, FormatError, DamageError
        If it is not what was written.
    """
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
    return Checkpoint(directory, stage, ranks, model, list(optim.values()), prefix, tensors, metadata, decode=True)


def _prefix(name: str) -> str:
    return "bf16_" if name.startswith("bf16_") else ""


def read_native(directory: Path, *, ours: bool) -> Checkpoint:
    """One of DeepSpeed's own; ``ours``: described so that it can become one of ours.

    Raises
    ------
    NotCommittedError, FormatError, DamageError, DataError
        If it cannot be read.
    """
    source = open_source(directory)
    if not isinstance(source, NativeSource):
        raise DataError(
            f"{directory}: is a universal checkpoint, which DeepSpeed loads on any number of ranks; it is not resharded"
        )
    assert source.stage is not None
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
    found = Checkpoint(
        directory, source.stage, source.world_size, model, list(optim.values()), prefix, tensors, metadata
    )
    _name_partitions(found)
    if ours and found.stage < 3:
        _name_weights(found, source)
    return found


def _name_partitions(source: Checkpoint) -> None:
    """Let the flat tensors of a native checkpoint be described as parts of parameters."""
    layout = Layout(source, source.ranks)
    for rank, tree in enumerate(source.optim):
        state = tree["optimizer_state_dict"]
        flats = layout.flats(rank)
        key = "fp32_flat_groups" if source.stage == 3 else "single_partition_of_fp32_groups"
        for leaf, flat in zip(state[key], flats, strict=True):
            if leaf.numel not in (flat.numel, flat.numel - flat.padding):
                raise DataError(
                    f"{source.directory}: a flat tensor of rank {rank} has {leaf.numel} elements, and {flat.numel} were"
                    " expected: its partitions are laid out in a way that is not known"
                )
        state[key] = [
            replace(leaf, pieces=pieces_of(flat, "fp32"), own=not leaf.numel)
            for leaf, flat in zip(state[key], flats, strict=True)
        ]
        inner = inner_state(source, tree)
        for number, flat in zip(state_numbers(inner), flats, strict=True):
            for name, leaf in inner["state"].get(number, {}).items():
                if isinstance(leaf, Leaf) and leaf.shape == (flat.numel,) and flat.numel:
                    inner["state"][number][name] = replace(leaf, pieces=pieces_of(flat, name), own=False)
    for rank, tree in enumerate(source.model if source.stage == 3 else []):
        fragments = tree.get("frozen_param_fragments") or {}
        for name in fragments:
            fragments[name] = fragment(fragments[name], name, shape_of(tree["frozen_param_shapes"][name]), rank)


def _name_weights(source: Checkpoint, native: NativeSource) -> None:
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
