"""One save: what it stores, and the work in the background that makes a checkpoint of it.

When a rank's files are durable it says so on a board; when all ranks have, rank 0's thread writes the manifest and
``latest``, and where nodes have storage of their own the first rank of each does the same there. Nothing here is a
collective.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from ds_galore.checkpoint.base import OpenBase
from ds_galore.checkpoint.boards import Board
from ds_galore.checkpoint.codecs import Compressor
from ds_galore.checkpoint.codecs.base import Bits
from ds_galore.checkpoint.digests import digest_of, file_digest, matches
from ds_galore.checkpoint.files import FORMAT, VERSION, DataFile, FileRecord, sync_directory
from ds_galore.checkpoint.manifest import MANIFEST, Manifest
from ds_galore.checkpoint.nodes import Nodes
from ds_galore.checkpoint.pieces import MASTER, NAMES, Piece, StateMap, describe, to_bits
from ds_galore.checkpoint.siblings import is_rotated, try_to_keep
from ds_galore.checkpoint.store import CheckpointStore, Shard
from ds_galore.config import CheckpointConfig
from ds_galore.errors import PeerError
from ds_galore.monitoring.saves import SaveRecord

__all__ = ["Factors", "Plan", "Range", "SaveJob", "plan"]

logger = logging.getLogger(__name__)

Factors = dict[str, npt.NDArray[np.float32]]
#: Ends of names of tensors that tell nothing about themselves some steps later: differences to them gain nothing.
FIRST_MOMENTS = ("/exp_avg", "/momentum_buffer")
#: Seconds between two looks for the other ranks' ``.done`` files.
POLL = 0.05
#: Once the interpreter is ending: how long rank 0 waits for the others, in seconds and in multiples of its own work.
LAST_WAIT, LAST_WAIT_TIMES = 60.0, 3.0


@dataclass(frozen=True)
class Range:
    """A range of a logical tensor that this rank writes: which of the copied tensors it is in, and where."""

    piece: Piece
    copy: int
    scale: int  # stored elements for each of the tensor: bytes, where safetensors does not know the dtype

    @property
    def key(self) -> tuple[str, int]:
        """Its name and start, in stored elements."""
        return self.piece.name, self.piece.start * self.scale

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor as it is stored."""
        return self.piece.shape if self.scale == 1 else (*self.piece.shape, self.scale)


#: The tensors to copy, the ranges of logical tensors in them, and the state files.
Plan = tuple[list[Tensor], list[Range], dict[str, Any]]


def plan(known: StateMap, pending: list[tuple[str, Any, dict[str, Tensor]]]) -> Plan:
    """The tensors to copy, the ranges of logical tensors in them, and the state files."""
    tensors: list[Tensor] = []
    ranges: list[Range] = []
    states: dict[str, Any] = {}
    seen: set[tuple[str, int]] = set()
    for name, value, found in pending:
        described = {}
        for path, tensor in found.items():
            pieces = known.pieces(path, tensor)
            described[path] = describe(tensor, pieces)
            scale = 1 if tensor.dtype in NAMES else tensor.element_size()
            stored = [Range(piece, len(tensors), scale) for piece in pieces if piece.stored]
            stored = [each for each in stored if each.key not in seen]
            seen.update(each.key for each in stored)
            if stored:
                ranges += stored
                tensors.append(tensor)
        states[name] = {"format": FORMAT, "version": VERSION, "state": value, "tensors": described}
    return tensors, ranges, states


@dataclass
class SaveJob:
    """A save from the moment at which its state is copied."""

    store: CheckpointStore
    tag: str
    board: Board
    nodes: Nodes | None  # where they have storage of their own
    rank: int
    world_size: int
    kind: str
    base: OpenBase | None
    linked: list[FileRecord]
    frozen: list[FileRecord]  # linked: of weights that were not trained, or none
    copies: list[Tensor]
    ranges: list[Range]
    factors: Factors
    states: dict[str, Any]
    metadata: dict[str, Any]
    latest: bool
    settings: CheckpointConfig
    compressor: Compressor
    hook: Callable[[str], None]
    written: dict[tuple[str, int], Bits] = field(default_factory=dict)
    files: list[FileRecord] = field(default_factory=list)
    seconds: float = 0.0
    encoded_bytes: int = 0
    logical_bytes: int = 0
    record: SaveRecord | None = None  # where somebody watches
    leaving: bool = False  # nobody will call wait() any more
    abandoned: bool = False  # some rank could not write its part

    def write(self) -> None:
        """Write this rank's files durably, and say so to rank 0."""
        begin = time.monotonic()
        self.hook("writing")
        try:
            # Not more: BLAS threads that wait for cores on which training runs took three times the time of one alone.
            with threadpool_limits(1, user_api="blas"):
                older = self._with_frozen() if self.base is None else self.linked
                known = {record.name for record in [*self.linked, *self.frozen]}
                self.files = files = self._write(self._shards(), older, "full" if self.base is None else "diff")
            states = {name: self.store.write_state(self.tag, name, json.dumps(v)) for name, v in self.states.items()}
            report = {
                "files": [asdict(each) for each in files],
                "states": {k: asdict(v) for k, v in states.items()},
                "new_bytes": sum(each.bytes for each in files if each.name not in known),
                "logical_bytes": self.logical_bytes,
            }
            self.encoded_bytes = files[-1].bytes
        except BaseException as error:
            self._try_to_tell(_name(self.rank), error)
            if self.rank == 0:
                self._tell_failure(f"{type(error).__name__}: {error}")
            raise
        self.hook("telling")
        self.board.post(_name(self.rank), report)
        self.seconds = time.monotonic() - begin

    def _write(self, shards: Iterable[Shard], older: list[FileRecord], kind: str) -> list[FileRecord]:
        return self.store.write(
            self.tag, self.rank, self.world_size, shards, linked=older, compressor=self.compressor, kind=kind
        )

    def _with_frozen(self) -> list[FileRecord]:
        """What a full file builds on: weights that are not trained are in a file of their own, written once."""
        ranges = [each for each in self.ranges if each.piece.frozen]
        if not ranges:
            return []
        for record in self.frozen:
            path = self.store.path(self.tag) / record.name
            # A full checkpoint must not build on what has rotted since.
            if file_digest(path, record.digest) != record.digest:
                continue
            held = {(entry.name, entry.start): entry.digest for entry in DataFile(path, record.header).entries}
            if held.keys() == {each.key for each in ranges} and all(
                matches(self._bits(each)[0], held[each.key]) for each in ranges
            ):
                return self.frozen

        def shards() -> Iterator[Shard]:
            for each in ranges:
                bits, dtype = self._bits(each)
                yield Shard(each.piece.name, dtype, each.shape, each.key[1], bits)

        self.frozen = []
        return self._write(shards(), [], "frozen")

    def _bits(self, each: Range) -> tuple[Bits, str]:
        """The bit patterns of a range as they are, and the name of their dtype."""
        piece = each.piece
        return to_bits(self.copies[each.copy][piece.offset : piece.offset + piece.numel])

    def _shards(self) -> Iterator[Shard]:
        """The ranges of this rank as they are to be stored."""
        for each in self.ranges:
            piece = each.piece
            flat = self.copies[each.copy][piece.offset : piece.offset + piece.numel]
            lossy = self.settings.state_dtype if piece.moment and flat.dtype == torch.float32 else "exact"
            if lossy == "bf16":
                flat = flat.to(torch.bfloat16)
            bits, dtype = to_bits(flat)
            self.logical_bytes += piece.numel * self.copies[each.copy].element_size()
            shape = each.shape
            start = each.key[1]
            int8 = "int8" if lossy == "int8" else None
            if piece.frozen and self.base is None:  # in the file before
                yield Shard(piece.name, dtype, shape, start, bits, unchanged=True, digest=digest_of(bits))
                continue
            if lossy == "exact" and not piece.frozen and not piece.name.endswith(FIRST_MOMENTS):
                self.written[piece.name, start] = bits
            held = self.base.holds(piece.name, start, start + bits.size) if self.base is not None else None
            if self.base is None or held is None or (held.dtype, held.shape) != (dtype, shape):
                yield Shard(piece.name, dtype, shape, start, bits, lossy=int8)
                continue
            digest = digest_of(bits)
            if int8 is None and matches(bits, held.digest):
                yield Shard(piece.name, dtype, shape, start, bits, unchanged=True, digest=digest)
                continue
            if lossy != "exact" or piece.name.endswith(FIRST_MOMENTS):
                known = digest if int8 is None else None  # of int8 the digest is that of what comes back
                yield Shard(piece.name, dtype, shape, start, bits, digest=known, lossy=int8)
                continue
            factor = None
            if piece.name.endswith(f"/{MASTER}"):
                factor = self.factors.get(piece.name.rpartition("/")[0])
            # Second moments gain about 10% from their base: not enough to read it back from the disk for that.
            reference = self.base.reference(held, shape, factor, from_disk=not piece.moment)
            yield Shard(piece.name, dtype, shape, start, bits, reference, digest=digest)

    def commit(self, ok: bool) -> None:
        """On rank 0, and the first rank of each node: when all ranks have written, declare the checkpoint complete."""
        if not ok:
            return
        if self.rank != 0:
            if self.nodes is not None and self.nodes.is_leader:
                self._commit_here()
            return
        try:
            self._commit()
        except BaseException as error:
            if self.nodes is not None:
                self._try_to_tell(MANIFEST, error)
            self._tell_failure(f"{type(error).__name__}: {error}")
            raise

    def _tell_failure(self, message: str) -> None:
        if self.record is not None:
            self.record.failed(message)

    def _commit(self) -> None:
        reports = [self._await(_name(rank), f"rank {rank}") for rank in range(self.world_size)]
        files = [[FileRecord(**each) for each in report["files"]] for report in reports]
        states = {name: FileRecord(**each) for report in reports for name, each in report["states"].items()}
        base = None if self.base is None else self.base.base.tag
        manifest = Manifest.now(self.tag, self.kind, base, files, self.metadata, states)
        names = [[each["name"] for each in (*report["files"], *report["states"].values())] for report in reports]
        self._publish(manifest, names)
        if self.nodes is not None:
            self.board.post(MANIFEST, {"text": manifest.to_json().decode(), "names": names})
            for leader in self.nodes.leaders[1:]:  # rank 0 serves the board until then, but not for a node that is lost
                self._await(_name(leader, MANIFEST), f"rank {leader}", patient=False)
            told = [_name(leader, MANIFEST) for leader in self.nodes.leaders[1:]]
            self.board.forget([MANIFEST, *told, *map(_name, range(self.world_size))])
        if self.record is not None:
            new = sum(report["new_bytes"] for report in reports) + sum(each.bytes for each in states.values())
            self.record.durable(new, sum(report["logical_bytes"] for report in reports))
        self._thin_out(base)

    def _publish(self, manifest: Manifest, names: Sequence[Iterable[str]]) -> None:
        """Complete the checkpoint here; ``names`` gives the files of each rank."""
        here = None if self.nodes is None else {name for rank in self.nodes.own for name in names[rank]}
        for made in (self.store.path(self.tag), self.store.directory):  # the save may have been the first there
            sync_directory(made.parent)
        self.store.publish(manifest, latest=self.latest, here=here)

    def _commit_here(self) -> None:
        """Put rank 0's manifest into this node's directory too."""
        try:
            word = self._await(MANIFEST, "rank 0")
            manifest = Manifest.parse(word["text"].encode(), self.store.path(self.tag))
            self._publish(manifest, word["names"])
        except BaseException as error:
            self._try_to_tell(_name(self.rank, MANIFEST), error)
            raise
        self.board.post(_name(self.rank, MANIFEST), {})
        self._thin_out(manifest.base)

    def _thin_out(self, base: str | None) -> None:
        """Remove what is not to be kept, or keep what others are to remove."""
        if is_rotated(self.store.directory):
            try_to_keep(self.store.directory)
        if self.settings.keep_last is not None:
            # The next difference is made against the anchor, which therefore stays a little longer.
            anchor = base if self.kind == "differential" else self.tag
            every = self.settings.keep_every

            def keep(manifest: Manifest) -> bool:
                step = manifest.metadata.get("step")
                return manifest.tag == anchor or (every is not None and isinstance(step, int) and step % every == 0)

            try:
                self.store.retain(keep_last=self.settings.keep_last, keep=keep)
            except OSError as error:
                logger.warning("%s: old checkpoints could not be removed: %s", self.store.directory, error)

    def _try_to_tell(self, name: str, error: BaseException) -> None:
        # The disk, or a rank that is gone, may be what failed: the next call tells.
        with contextlib.suppress(OSError, RuntimeError):
            self.board.post(name, {"error": f"{type(error).__name__}: {error}"})

    def _await(self, name: str, who: str, *, patient: bool = True) -> Any:
        """What another rank left under a name, once it has; unless ``patient``, within a time."""
        ending: float | None = None
        while True:
            word = self.board.find(name)
            if word is None:
                if self.abandoned:
                    raise PeerError(f"{self.tag}: not committed, since another rank failed")
                # Where nobody can tell any more that a rank has died:
                if self.leaving or not patient or not threading.main_thread().is_alive():
                    ending = ending if ending is not None else time.monotonic()
                    if time.monotonic() - ending > max(LAST_WAIT, LAST_WAIT_TIMES * self.seconds):
                        raise PeerError(f"{self.tag}: not committed, since {who} did not finish its part")
                time.sleep(POLL)
                continue
            if "error" in word:
                raise PeerError(f"{who} failed, and {self.tag} is not committed: {word['error']}")
            return word


def _name(rank: int, what: str = "") -> str:
    """Under which a rank says that its files, or something else, are durable."""
    return f"{what}{rank:05}"
