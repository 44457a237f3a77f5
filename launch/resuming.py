"""What a run needs to go on exactly: random states, the position in the data, signals, and which checkpoint to take."""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ds_galore import DataError
from ds_galore.checkpoint.errors import DamageError, FormatError, NotCommittedError
from ds_galore.checkpoint.manifest import MANIFEST, Manifest
from ds_galore.checkpoint.nodes import Nodes
from ds_galore.checkpoint.store import CheckpointStore
from ds_galore.zero.group import RankGroup

#: Exit status of a run that a signal ended, and that saved before: "try again later" in the manner of sysexits.h.
INTERRUPTED = 75
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Interruption:
    """While it is entered, remembers that SIGTERM or SIGUSR1 came, instead of ending the process."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        self._before = {each: signal.signal(each, self._remember) for each in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal = number


def random_states() -> dict[str, Any]:
    """The states of every generator that this rank draws from: Python's, NumPy's, torch's, the accelerator's."""
    found = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    accelerator = _accelerator()
    if accelerator is not None:
        found["accelerator"] = accelerator.get_rng_state().cpu()
    return found


def set_random_states(states: dict[str, Any]) -> None:
    """Let the generators go on from what :func:`random_states` gave."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    accelerator = _accelerator()
    if accelerator is not None and "accelerator" in states:
        accelerator.set_rng_state(states["accelerator"])


def seed_new_rank(seed: int, rank: int, consumed: int) -> None:
    """Random states for a rank that did not exist when the checkpoint was saved: its own, the same at every attempt."""
    mixed = np.random.SeedSequence([seed, rank, consumed]).generate_state(2)
    random.seed(int(mixed[0]))
    np.random.seed(int(mixed[1]))
    torch.manual_seed(int(mixed[0]) << 31 | int(mixed[1]) >> 1)  # the accelerator's generators as well


def _accelerator() -> Any:
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    return accelerator if accelerator.device_name() != "cpu" else None


def client_state(group: RankGroup, consumed: int) -> dict[str, Any]:
    """What a checkpoint holds of the run beside the engine: random states by rank, and how far the data have been read.

    Collective. Only the first rank's client state is saved below ZeRO stage 3, so each holds those of all ranks.
    """
    states: list[Any] = [None] * group.world_size
    dist.all_gather_object(states, random_states())
    return {"consumed": consumed, "random": dict(enumerate(states))}


def find_checkpoint(group: RankGroup, directory: Path, wanted: str, nodes: Nodes | None = None) -> str | None:
    """The tag to continue from, the same on all ranks. Collective.

    Parameters
    ----------
    directory
        The save directory.
    wanted
        ``"latest"``: what the file of that name names; ``"auto"``: the newest checkpoint in which nothing is wrong, or
        None, a new run, where there is none; else a tag.
    nodes
        Where each node has a save directory of its own.

    Raises
    ------
    DataError
        If it is not there.
    """
    if nodes is not None:
        return _find_on_nodes(nodes, directory, wanted)
    found: list[str | None] = [wanted]
    with group.together():
        if group.rank == 0:
            found = [_find(directory, wanted)]
        elif wanted not in ("latest", "auto") and not (directory / wanted).is_dir():
            raise DataError(f"--resume {wanted}: {directory / wanted} is not there on rank {group.rank}")
    dist.broadcast_object_list(found, src=0)
    return found[0]


def _find_on_nodes(nodes: Nodes, directory: Path, wanted: str) -> str | None:
    store = CheckpointStore(directory)
    if wanted == "auto":
        return nodes.newest_intact(store)
    found = nodes.latest(store) if wanted == "latest" else wanted
    if found is None:
        raise DataError(f"--resume: {directory} holds no checkpoint on any node (no file 'latest')")
    return found


def _find(directory: Path, wanted: str) -> str | None:
    store = CheckpointStore(directory)
    if wanted == "auto":
        newest = newest_intact(directory)
        return newest if newest is not None else store.latest() if not store.tags() else None
    if wanted == "latest":
        latest = store.latest()
        if latest is None:
            raise DataError(f"--resume: {directory} holds no checkpoint (no file 'latest')")
        return latest
    if not (directory / wanted).is_dir():
        found = sorted(each.name for each in directory.glob("*") if each.is_dir() and each.name[0] != ".")
        raise DataError(f"--resume {wanted}: no such checkpoint; {directory} holds {', '.join(found) or 'none'}")
    return wanted


def newest_intact(directory: Path, *, up_to_step: int = sys.maxsize) -> str | None:
    """The newest of our checkpoints in which nothing is wrong, of those after at most a number of steps."""
    store = CheckpointStore(directory)
    for tag in reversed(store.tags()):
        try:
            reader = store.open(tag)
            step = reader.manifest.metadata.get("step")
            if isinstance(step, int) and step <= up_to_step and not reader.verify():
                return tag
        except (DamageError, FormatError, NotCommittedError):
            continue
    return None


def is_ours(directory: Path, tag: str) -> bool:
    """Whether a checkpoint is of our format, which any number of ranks can load."""
    return (directory / tag / MANIFEST).exists()


def is_node_local(directory: Path) -> bool:
    """Whether a checkpoint's directory may hold the files of one node alone."""
    try:
        return bool(Manifest.read(directory).metadata.get("node_local"))
    except (DamageError, FormatError, NotCommittedError):
        return False


def newest_complete(group: RankGroup, root: Path, names: Sequence[str]) -> Path | None:
    """The newest of the directories that the Trainer or Accelerate made in which nothing is missing or wrong.

    The same on all ranks, for which the first searches. Collective.

    Parameters
    ----------
    root
        Where they are.
    names
        Files that are written beside our checkpoint, without which a run cannot go on exactly.
    """
    found: list[Path | None] = [None]
    with group.together():
        found = [_newest_complete(root, names) if group.rank == 0 else None]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def _newest_complete(root: Path, names: Sequence[str]) -> Path | None:
    found = [each for each in root.glob("checkpoint[-_]*") if each.name[len("checkpoint_") :].isdecimal()]
    for each in sorted(found, key=lambda path: int(path.name[len("checkpoint_") :]), reverse=True):
        manifests = list(each.glob(f"*/{MANIFEST}"))
        if any(is_node_local(path.parent) for path in manifests):
            raise DataError(
                f"{each}: was saved with checkpoint.use_node_local_storage, where each node has its own files; name the"
                " checkpoint to go on from"
            )
        ours = bool(manifests)
        saved = (each / "latest").is_file() and (not ours or newest_intact(each) is not None)
        if saved and all((each / name).is_file() for name in names):
            return each
    return None
