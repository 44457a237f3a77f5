"""What one rank needs of a checkpoint, read and checked before DeepSpeed's first collective of a load.

Imports torch and this package. Nothing here is collective.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from ds_galore.checkpoint.codecs.base import Bits
from ds_galore.checkpoint.errors import DamageError, NotCommittedError
from ds_galore.checkpoint.manifest import MANIFEST
from ds_galore.checkpoint.pieces import MASTER, assemble
from ds_galore.checkpoint.reader import CheckpointReader
from ds_galore.checkpoint.resharding import fits, frozen_fragments, masters, optimizer_state
from ds_galore.checkpoint.store import CheckpointStore
from ds_galore.checkpoint.tree import restore
from ds_galore.errors import CheckpointMismatchError, ConfigError
from ds_galore.parameters import OPTIMIZERS
from ds_galore.tools.threads import run_all
from ds_galore.zero.binding import flat_parts
from ds_galore.zero.group import RankGroup

__all__ = ["PreparedLoad", "is_placeholder", "load_file"]

MODEL, OPTIMIZER = "_model_states.pt", "_optim_states.pt"
#: Threads of a rank that read; each may hold a tensor and its base for a moment.
MOST_WORKERS = 8


class PreparedLoad:
    """A checkpoint's state dicts for this rank, whatever number of ranks saved them.

    Parameters
    ----------
    store, tag
        Where it is.
    engine
        DeepSpeed's, which loads.
    arguments
        Of its ``load_checkpoint``, by name.
    group
        All ranks.

    Raises
    ------
    ConfigError, CheckpointMismatchError
        For a checkpoint of another ZeRO stage, model or optimizer.
    NotCommittedError, FormatError, DamageError
        If the checkpoint is not what was written.
    """

    def __init__(
        self, store: CheckpointStore, tag: str, engine: Any, arguments: Mapping[str, Any], group: RankGroup
    ) -> None:
        self.directory = store.path(tag).absolute()
        self._reader = reader = store.open(tag)
        self.manifest = reader.manifest
        self._stage = int(engine.zero_optimization_stage())
        _check_stage(self.directory, reader.manifest.metadata.get("zero_stage"), self._stage)
        wants_state = bool(arguments["load_optimizer_states"]) and not arguments["load_module_only"]
        self.weights_only = (
            self._stage > 0 and not wants_state
        )  #: whether DeepSpeed must not load the optimizer's state
        _check_parameters(self.directory, reader, engine)
        self._states = {MODEL: self._model(engine, group.rank)}
        if wants_state:
            _check_optimizer(self.directory, reader.manifest.metadata.get("optimizer"), engine.basic_optimizer)
        if self._stage == 3 or (self._stage > 0 and wants_state):
            self._states[OPTIMIZER] = self._optimizer(engine, group)

    def state_for(self, path: Path) -> Any:
        """The state dict that this rank is to get for a path that DeepSpeed asks for; None if it is none of ours."""
        if path.parent.absolute() != self.directory:
            return None
        return next((state for suffix, state in self._states.items() if path.name.endswith(suffix)), None)

    def settle_weights(self, engine: Any) -> None:
        """After DeepSpeed has loaded without the optimizer's state: see that the weights are the saved ones.

        At stage 3, DeepSpeed 0.19.8 does nothing for ``load_module_only``; at stages 1 and 2 it makes master weights
        from the 16-bit ones. Collective at stage 3.
        """
        zero = engine.optimizer
        if self._stage == 3:
            state = {
                "loss_scaler": zero.loss_scaler,
                "dynamic_loss_scale": zero.dynamic_loss_scale,
                "overflow": zero.overflow,
                "fp32_flat_groups": self._states[OPTIMIZER]["optimizer_state_dict"]["fp32_flat_groups"],
            }
            zero.checkpoint_event_prologue()
            ranks = torch.distributed.get_world_size(zero.dp_process_group)
            zero.load_state_dict(state_dict_list=[state] * ranks, load_optimizer_states=False)
            zero.checkpoint_event_epilogue()
        elif self._stage > 0:
            for flat, saved in zip(flat_parts(engine), masters(engine, self._read), strict=True):
                flat.tensor.data.copy_(saved)

    def _read(self, name: str, start: int, stop: int, out: Bits) -> tuple[Bits, str]:
        tensor = self._reader.tensors.get(name)
        if tensor is None:
            raise CheckpointMismatchError(f"{self.directory}: holds no {name}, which this model and optimizer need")
        try:
            return self._reader.bits(name, start, stop, out), tensor.dtype
        except ValueError:
            raise CheckpointMismatchError(
                f"{self.directory}: {name} has shape {tensor.shape}, and elements {start} to {stop} are needed"
            ) from None

    def _assembled(self, values: Mapping[str, Any]) -> Any:
        places = values["tensors"]
        workers = self._workers()
        if workers == 1:
            return restore(values["state"], lambda path: assemble(places[path], self._read))
        found: dict[str, Tensor] = {}

        def read(path: str) -> None:
            found[path] = assemble(places[path], self._read)

        with threadpool_limits(1, user_api="blas"):  # the workers are the parallelism
            run_all(read, list(places), workers)
        return restore(values["state"], found.__getitem__)

    @staticmethod
    def _workers() -> int:
        """Threads that a rank may read in: the cores that it has, shared with the other ranks of its host."""
        ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or ""
        sharing = int(ranks) if ranks.isdecimal() else torch.distributed.get_world_size()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, min(MOST_WORKERS, cores // max(1, sharing)))

    def _model(self, engine: Any, rank: int) -> Any:
        values = self._values(MODEL, rank)
        state = self._assembled(values)
        if self._stage == 3 and state.get("frozen_param_fragments"):
            state["frozen_param_fragments"] = frozen_fragments(engine, state["frozen_param_fragments"], self._read)
        state["dp_world_size"] = engine.seq_dp_world_size
        return state

    def _optimizer(self, engine: Any, group: RankGroup) -> Any:
        values = self._values(OPTIMIZER, group.rank)
        if self._reader.manifest.world_size == group.world_size and fits(values, engine):
            return self._assembled(values)
        return optimizer_state(engine, values, self._read)

    def _values(self, suffix: str, rank: int) -> Any:
        """The content of this rank's state file, or of the first rank's where there is none."""
        names = self._reader.manifest.states
        for number in (rank, 0):
            own = f"zero_pp_rank_{number}_mp_rank_00{suffix}"
            found = [name for name in names if name in (own, f"bf16_{own}", f"mp_rank_00{suffix}")]
            if found:
                return self._reader.state(found[0])
        raise DamageError(f"{self.directory}: its manifest names no file for {suffix}")


def load_file(target: Path, map_location: Any = None) -> Any:
    """The state dict at a path, as it was saved: one of our checkpoints, or a native one.

    Raises
    ------
    NotCommittedError, FormatError, DamageError
        If one of ours is not what was written.
    """
    if not (target.parent / MANIFEST).exists():
        if is_placeholder(target):
            raise NotCommittedError(f"{target.parent}: was never finished (no {MANIFEST})")
        return torch.load(str(target), map_location=map_location, weights_only=False)
    reader = CheckpointReader(target.parent)
    values = reader.state(target.name)
    places = values["tensors"]

    def tensor(path: str) -> Tensor:
        return assemble(
            places[path], lambda name, a, b, out: (reader.bits(name, a, b, out), reader.tensors[name].dtype)
        )

    return restore(values["state"], tensor)


def is_placeholder(path: Path) -> bool:
    """Whether a file is what stands in our checkpoints under a name that DeepSpeed looks for."""
    try:
        with path.open("rb") as file:
            return file.read(1) == b"{"
    except OSError:
        return False


def _check_stage(directory: Path, saved: object, stage: int) -> None:
    kinds = [{0}, {1, 2}, {3}]
    if isinstance(saved, int) and not any({saved, stage} <= kind for kind in kinds):
        raise ConfigError(
            f"{directory}: was saved under ZeRO stage {saved}, and zero_optimization.stage is {stage}; DeepSpeed"
            " converts between stages 1 and 2 only"
        )


def _check_optimizer(directory: Path, saved: object, optimizer: Any) -> None:
    """Refuse our optimizer's state for another, and the other way round; torch's Adams load each other's."""
    own = type(optimizer).__name__
    if isinstance(saved, str) and saved != own and (saved in OPTIMIZERS or own in OPTIMIZERS):
        raise CheckpointMismatchError(
            f"{directory}: holds the state of {saved}, and optimizer.type is {own}; load_optimizer_states=False takes"
            " the weights alone"
        )


def _check_parameters(directory: Path, reader: CheckpointReader, engine: Any) -> None:
    """Refuse a checkpoint of another model."""
    wanted = {part.name: part.shape for flat in flat_parts(engine) for part in flat.parts}
    if not wanted:
        return
    ending = f"/{MASTER}"
    found = {
        name.removesuffix(ending): tensor.shape for name, tensor in reader.tensors.items() if name.endswith(ending)
    }
    for name in sorted(wanted.keys() | found.keys()):
        if name not in found or name not in wanted:
            raise CheckpointMismatchError(
                f"{directory}: {name} is {'not ' if name not in found else ''}trained in the checkpoint, and"
                f" {'not ' if name not in wanted else ''}trained by this engine"
            )
        if found[name] != wanted[name]:
            raise CheckpointMismatchError(
                f"{directory}: {name} has shape {found[name]} in the checkpoint, and {wanted[name]} in the model"
            )
