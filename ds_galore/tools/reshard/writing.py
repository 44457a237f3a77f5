"""Writing the states of all ranks, in either format. No torch, no DeepSpeed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ds_galore.checkpoint.codecs.base import Bits
from ds_galore.checkpoint.errors import DamageError
from ds_galore.checkpoint.files import DTYPES, FORMAT, VERSION, FileRecord, replace_file, sync_directory
from ds_galore.checkpoint.scratch import Scratch
from ds_galore.checkpoint.store import CheckpointStore, Shard
from ds_galore.errors import PeerError
from ds_galore.tools.output import cast, in_threads
from ds_galore.tools.reshard.checkpoint import MODEL, OPTIMIZER, Checkpoint
from ds_galore.tools.source import Info
from ds_galore.tools.states import SAFE_NAMES, Leaf, freeze
from ds_galore.tools.threads import run_all
from ds_galore.tools.torchwriter import STORAGES, write_torch_file
from ds_galore.tools.zero_to_fp32 import SCRIPT

__all__ = ["Holdings", "Meter", "Range", "decode", "write_native", "write_ours"]

#: Elements of a tensor that are read at a time.
CHUNK = 2**24


class Meter:
    """Counts bytes done, and lets threads stop in the middle of their work.

    Parameters
    ----------
    total
        Bytes in all.
    show
        Called with bytes done and bytes in all.
    """

    def __init__(self, total: int, show: Callable[[int, int], None]) -> None:
        self._total, self._show, self._done = total, show, 0
        self._lock = threading.Lock()
        self.stopped = threading.Event()

    def add(self, nbytes: int) -> None:
        """So many more are done; raises where another thread has failed, or the user has had enough."""
        if self.stopped.is_set():
            raise PeerError("another part of the work has failed")
        with self._lock:
            self._done += nbytes
            self._show(self._done, self._total)


def decode(source: Checkpoint, needed: Set[str], scratch: Scratch, workers: int, meter: Meter) -> None:
    """Decode every tensor that is needed once, so that ranges of it can be read."""
    infos = {name: source.tensors[name].info for name in source.tensors if name in needed}

    def decode(name: str) -> None:
        tensor = source.tensors[name]
        source.tensors[name] = replace(tensor, read=scratch.keep(tensor.read(0, tensor.info.numel)).elements)
        meter.add(tensor.info.nbytes)

    in_threads(decode, infos, workers)


def _values(source: Checkpoint, leaf: Leaf, meter: Meter) -> Iterator[Bits]:
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
            meter.add(bits.nbytes)
            yield cast(bits, tensor.info.dtype, target)
    if leaf.numel > position:
        yield np.zeros(leaf.numel - position, dtype=f"u{width}")


def write_native(
    source: Checkpoint,
    files: Callable[[int], Mapping[str, Any]],
    ranks: int,
    directory: Path,
    tag: str,
    workers: int,
    meter: Meter,
) -> None:
    """Write a save directory that DeepSpeed loads without this package: ``files`` gives a rank's states by name."""
    (directory / tag).mkdir()

    def write(rank: int) -> None:
        for name, state in files(rank).items():
            write_torch_file(directory / tag / name, state, lambda leaf: _values(source, leaf, meter))

    run_all(write, range(ranks), workers, stop=meter.stopped.set)
    sync_directory(directory / tag)
    replace_file(directory / "latest", [tag.encode()])


def write_ours(
    source: Checkpoint,
    files: Callable[[int], Mapping[str, Any]],
    held: Sequence[Sequence[Range]],
    directory: Path,
    tag: str,
    scratch: Scratch,
    workers: int,
    meter: Meter,
) -> None:
    """Write a save directory of ours: ``files`` gives a rank's states by name, and ``held`` says what it writes."""
    store = CheckpointStore(directory)
    store.path(tag).mkdir()
    ranks = len(held)

    def shards(rank: int) -> Iterator[Shard]:
        for each in held[rank]:
            info = each.empty or source.tensors[each.source].info
            stop = info.numel if each.stop is None else each.stop
            empty: Bits = np.zeros(0, dtype=f"u{DTYPES[info.dtype]}")
            bits = empty if each.empty else source.tensors[each.source].read(each.start, stop)
            meter.add(bits.nbytes)
            yield Shard(each.name, info.dtype, info.shape, each.start, bits)

    records: list[list[FileRecord]] = [[] for _ in range(ranks)]
    states: list[dict[str, FileRecord]] = [{} for _ in range(ranks)]

    def write(rank: int) -> None:
        records[rank] = store.write(tag, rank, ranks, shards(rank), scratch=scratch)
        for name, state in files(rank).items():
            value, tensors = freeze(state, name)
            described = {path: _described(path, leaf) for path, leaf in tensors.items()}
            text = json.dumps({"format": FORMAT, "version": VERSION, "state": value, "tensors": described})
            states[rank][name] = store.write_state(tag, name, text)

    run_all(write, range(ranks), workers, stop=meter.stopped.set)
    ordered = {name: record for each in states for name, record in each.items()}
    store.commit(tag, records, metadata={**source.metadata, "saves": 1}, states=ordered)
    replace_file(directory / "zero_to_fp32.py", [SCRIPT.encode()], mode=0o755)


def _described(path: str, leaf: Leaf) -> dict[str, Any]:
    pieces = [(path, 0, 0, leaf.numel)] if leaf.own else leaf.pieces
    return {"dtype": leaf.dtype, "shape": list(leaf.shape), "pieces": [list(piece) for piece in pieces]}


@dataclass(frozen=True)
class Range:
    """A range of a logical tensor that a rank writes; ``stop`` of None is its end."""

    name: str
    source: str  # its name in the source; empty for a tensor without elements
    start: int
    stop: int | None
    empty: Info | None = None  # what such a tensor is


class Holdings:
    """Who writes what: everything once, and what several ranks could write, each in turn."""

    def __init__(self, ranks: int) -> None:
        self._own: list[list[Range]] = [[] for _ in range(ranks)]
        self._wanted: dict[str, dict[tuple[str, int, int], list[int]]] = {OPTIMIZER: {}, MODEL: {}}

    def add(self, rank: int, files: Mapping[str, Mapping[str, Leaf]]) -> None:
        """The tensors of a rank's files, by file and place."""
        for file, tensors in files.items():
            wanted = self._wanted[OPTIMIZER if file.endswith(OPTIMIZER) else MODEL]
            for path, leaf in tensors.items():
                if leaf.own:
                    empty = None if leaf.numel else Info(SAFE_NAMES.get(leaf.dtype, "U8"), leaf.shape)
                    self._own[rank].append(Range(path, leaf.pieces[0][0] if leaf.numel else "", 0, None, empty))
                    continue
                for name, start, _, numel in leaf.pieces:
                    if numel:
                        ranks = wanted.setdefault((name, start, start + numel), [])
                        if rank not in ranks[-1:]:
                            ranks.append(rank)

    def by_rank(self) -> list[list[Range]]:
        """What each rank writes. What is in an optimizer's file is not written for a model's as well."""
        found = [list(own) for own in self._own]
        known = {name for name, _, _ in self._wanted[OPTIMIZER]}
        of_models = {key: ranks for key, ranks in self._wanted[MODEL].items() if key[0] not in known}
        for number, ((name, start, stop), ranks) in enumerate({**self._wanted[OPTIMIZER], **of_models}.items()):
            found[ranks[number % len(ranks)]].append(Range(name, name, start, stop))
        return found
