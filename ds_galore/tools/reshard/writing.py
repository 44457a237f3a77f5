"""Writing the states of all ranks, in either format. No torch, no DeepSpeed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
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
from ds_galore.tools.states import SAFE_NAMES, Leaf, leaves
from ds_galore.tools.torchwriter import STORAGES, write_torch_file
from ds_galore.tools.zero_to_fp32 import SCRIPT

__all__ = ["Meter", "decode", "needed_bytes", "write_native", "write_ours"]

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


def needed_bytes(source: Checkpoint, files: Sequence[Mapping[str, Any]]) -> int:
    """Bytes of the logical tensors of which all ranks' states consist."""
    found = {name for each in files for state in each.values() for leaf in leaves(state) for name, *_ in leaf.pieces}
    return sum(source.tensors[name].info.nbytes for name in found if name in source.tensors)


def decode(source: Checkpoint, states: Sequence[Any], scratch: Scratch, workers: int, meter: Meter) -> None:
    """Decode every tensor that is needed once, so that ranges of it can be read."""
    needed = {piece[0] for state in states for leaf in leaves(state) for piece in leaf.pieces if piece[3]}
    missing = needed - source.tensors.keys()
    if missing:
        raise DamageError(f"{source.directory}: its state names {min(missing)}, which its data do not hold")
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
    source: Checkpoint, files: Sequence[Mapping[str, Any]], directory: Path, tag: str, workers: int, meter: Meter
) -> None:
    """Write a save directory that DeepSpeed loads without this package: ``files`` are each rank's states by name."""
    (directory / tag).mkdir()
    jobs = [(directory / tag / name, state) for each in files for name, state in each.items()]
    _all(lambda job: write_torch_file(job[0], job[1], lambda leaf: _values(source, leaf, meter)), jobs, workers, meter)
    sync_directory(directory / tag)
    replace_file(directory / "latest", [tag.encode()])


def write_ours(
    source: Checkpoint,
    frozen: Sequence[Mapping[str, tuple[Any, Mapping[str, Leaf]]]],
    directory: Path,
    tag: str,
    scratch: Scratch,
    workers: int,
    meter: Meter,
) -> None:
    """Write a save directory of ours: ``frozen`` are each rank's states by name, as :func:`freeze` gives them."""
    store = CheckpointStore(directory)
    store.path(tag).mkdir()
    held = _who_holds_what(frozen)
    ranks = len(frozen)

    def shards(rank: int) -> Iterator[Shard]:
        for each in held[rank]:
            info = each.empty or source.tensors[each.source].info
            stop = info.numel if each.stop is None else each.stop
            empty: Bits = np.zeros(0, dtype=f"u{DTYPES[info.dtype]}")
            bits = empty if each.empty else source.tensors[each.source].read(each.start, stop)
            meter.add(bits.nbytes)
            yield Shard(each.name, info.dtype, info.shape, each.start, bits)

    records: list[list[FileRecord]] = [[] for _ in range(ranks)]
    states: dict[str, FileRecord] = {}

    def write(rank: int) -> None:
        records[rank] = store.write(tag, rank, ranks, shards(rank), scratch=scratch)
        for name, (value, tensors) in frozen[rank].items():
            described = {path: _described(path, leaf) for path, leaf in tensors.items()}
            text = json.dumps({"format": FORMAT, "version": VERSION, "state": value, "tensors": described})
            states[name] = store.write_state(tag, name, text)

    _all(write, range(ranks), workers, meter)
    ordered = {name: states[name] for each in frozen for name in each}
    store.commit(tag, records, metadata={**source.metadata, "saves": 1}, states=ordered)
    replace_file(directory / "zero_to_fp32.py", [SCRIPT.encode()], mode=0o755)


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


def _all(work: Callable[[Any], None], items: Sequence[Any], workers: int, meter: Meter) -> None:
    """Do the work on all items in threads; the first error, in their order of time, ends it."""
    pool = ThreadPoolExecutor(workers)
    try:
        for future in as_completed([pool.submit(work, item) for item in items]):
            future.result()
    except BaseException:
        meter.stopped.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
