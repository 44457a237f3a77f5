"""DeepSpeed's CheckpointEngine on the store: differential checkpoints behind ``engine.save_checkpoint``.

DeepSpeed hands its engine a state dict and a ``.pt`` path at a time. Here the tensors of all of them go into one data
file a rank, as logical tensors, and the rest into a JSON file under the ``.pt`` path, which DeepSpeed looks for when it
loads. The engine calls itself decoupled, so that DeepSpeed leaves committing and ``latest`` to
:meth:`SaveEngine.finish`, which the plugin calls at the end of ``save_checkpoint``. Seen in DeepSpeed 0.19.8.
"""

from __future__ import annotations

import io
import json
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from torch import Tensor

from ds_galore.checkpoint.codecs import Reference
from ds_galore.checkpoint.errors import DamageError, FormatError, NotCommittedError
from ds_galore.checkpoint.files import FORMAT, VERSION, FileRecord, replace_file
from ds_galore.checkpoint.manifest import MANIFEST
from ds_galore.checkpoint.pieces import Piece, assemble, place, state_pieces, to_bits
from ds_galore.checkpoint.reader import CheckpointReader
from ds_galore.checkpoint.store import CheckpointStore, Shard
from ds_galore.checkpoint.tree import flatten, restore
from ds_galore.config import CheckpointConfig
from ds_galore.errors import ConfigError
from ds_galore.optim.galore import GaLoreAdamW
from ds_galore.optim.matrices import RIGHT
from ds_galore.zero.group import Guard, RankGroup

__all__ = ["SaveEngine"]


class SaveEngine(CheckpointEngine):  # type: ignore[misc]
    """Saves and loads through :class:`~ds_galore.checkpoint.store.CheckpointStore`.

    Parameters
    ----------
    settings
        The ``ds_galore.checkpoint`` section.
    """

    def __init__(self, settings: CheckpointConfig) -> None:
        super().__init__(None)
        self.name = "ds_galore"
        self._settings = settings
        self._engine: Any = lambda: None
        self._guard = Guard()
        self._info: Any = None
        self._pending: list[tuple[str, Any, dict[str, Tensor]]] = []
        self._readers: dict[Path, CheckpointReader] = {}
        self._prepared: dict[Path, Any] = {}
        self._last: tuple[Path, str, int] | None = None  # save directory, tag of the full checkpoint, saves since

    def attach(self, engine: Any) -> None:
        """Know the DeepSpeed engine whose states are saved, without keeping it alive."""
        self._engine = weakref.ref(engine)

    # ------------------------------------------------------------------ what DeepSpeed calls

    def create(self, info: Any) -> None:
        """Begin a save."""
        self._info, self._pending, self._guard = info, [], Guard()

    def save(self, state_dict: Any, path: str) -> None:
        """Take a state dict for the save that :meth:`finish` ends; write other files (16-bit weights) at once."""
        target = Path(path)
        if not target.name.endswith("_states.pt") or target.parent.name != self._info.tag:
            replace_file(target, _torch_bytes(state_dict))
            return
        with self._guard:  # a rank that cannot save its state tells at the end, where all wait for each other
            value, tensors = flatten(state_dict, root=target.name)
            self._pending.append((target.name, value, tensors))

    def load(self, path: str, map_location: Any = None) -> Any:
        """A state dict of one of our checkpoints, or of a native one."""
        target = Path(path)
        if target in self._prepared:
            return self._prepared.pop(target)
        if not (target.parent / MANIFEST).exists():
            if target.is_file() and target.read_bytes()[:1] == b"{":
                raise NotCommittedError(f"{target.parent}: was never finished (no {MANIFEST})")
            return torch.load(path, map_location=map_location, weights_only=False)
        reader = self._readers.get(target.parent)
        if reader is None:
            reader = self._readers[target.parent] = CheckpointReader(target.parent)
        record = reader.manifest.states.get(target.name)
        try:
            data = target.read_bytes()
        except OSError as error:
            raise DamageError(f"{target}: cannot be read: {error.strerror}") from None
        if record is None or (len(data), FileRecord.of(target.name, data).digest) != (record.bytes, record.digest):
            raise DamageError(f"{target}: is not what was written")
        values = json.loads(data)
        if values.get("format") != FORMAT or values.get("version") != VERSION:
            raise FormatError(f"{target}: is of another format or version")
        places = values["tensors"]
        return restore(values["state"], lambda name: assemble(places[name], reader.bits))

    def prepare_load(self, load_dir: Any, tag: Any, arguments: Mapping[str, Any]) -> None:
        """Read what this rank needs of one of our checkpoints, before DeepSpeed's first collective of a load.

        Every rank reads files of its own, so one may find damage that the others do not see: all fail together.
        Collective.

        Raises
        ------
        ConfigError
            For a way to load that is not supported yet, naming the argument or the number of ranks.
        NotCommittedError, FormatError, DamageError
            If the checkpoint is not what was written.
        PeerError
            If that is so on another rank.
        """
        with RankGroup(dist.group.WORLD).together():
            self._prepared.clear()
            self._readers.clear()
            self._prepare(load_dir, tag, arguments)

    def _prepare(self, load_dir: Any, tag: Any, arguments: Mapping[str, Any]) -> None:
        store = CheckpointStore(Path(load_dir))
        tag = store.latest() if tag is None else str(tag)
        if tag is None or not (store.path(tag) / MANIFEST).exists():
            return
        for name, supported in (("load_optimizer_states", True), ("load_module_only", False)):
            if bool(arguments[name]) is not supported:
                raise ConfigError(
                    f"{name} is {arguments[name]!r}: {store.path(tag)} can be loaded with {supported} only, so far"
                )
        written, ranks = store.open(tag).manifest.world_size, dist.get_world_size()
        if written != ranks:
            raise ConfigError(f"{store.path(tag)}: was saved by {written} ranks and cannot be loaded by {ranks} so far")
        for path in store.path(tag).glob(f"*zero_pp_rank_{dist.get_rank()}_*_states.pt"):
            self._prepared[path] = self.load(str(path))

    def commit(self, info: Any) -> bool:
        """Nothing is left to do: a save ends in :meth:`finish`."""
        return True

    def is_decoupled(self) -> bool:
        """Keep DeepSpeed from writing ``latest``."""
        return True

    def get_commit_info(self) -> None:
        """Nothing is ever left for DeepSpeed to commit."""

    def cleanup(self) -> None:
        """Nothing is in flight between saves."""

    # ------------------------------------------------------------------ the end of a save

    def finish(self, save_latest: bool) -> None:
        """Write what :meth:`save` took, and commit it. Collective; fails on all ranks together."""
        info, pending, self._info, self._pending = self._info, self._pending, None, []
        group, guard = RankGroup(dist.group.WORLD), self._guard
        store = CheckpointStore(Path(info.save_dir))
        self._readers.clear()
        engine = self._engine()
        factors = _whole_projectors(engine, guard)
        kind, base_tag = self._base_for(store)
        report = guard.run(
            lambda: self._write(store, info.tag, group, pending, state_pieces(engine), base_tag, factors),
            lambda: ([], {}),
        )
        _vote(group, guard)
        reports: list[Any] = [None] * group.world_size
        dist.all_gather_object(reports, report)
        # Layouts may have changed on some rank: then this checkpoint is a full one after all.
        full = any(len(files) == 1 for files, _ in reports)
        if full and base_tag is not None and any(len(files) > 1 for files, _ in reports):
            report = guard.run(
                lambda: self._write(store, info.tag, group, pending, state_pieces(engine), None, {}), lambda: ([], {})
            )
            _vote(group, guard)
            dist.all_gather_object(reports, report)
        if full:
            kind, base_tag = "full", None
        anchor = info.tag if full or self._settings.mode == "incremental" else str(base_tag)
        if group.rank == 0:
            with guard:
                states = {name: record for _, each in reports for name, record in each.items()}
                files = [files for files, _ in reports]
                metadata = {"step": engine.global_steps, "zero_stage": int(engine.zero_optimization_stage())}
                store.commit(
                    info.tag, files, base=base_tag, kind=kind, metadata=metadata, latest=save_latest, states=states
                )
                if self._settings.keep_last is not None:
                    # The next difference is made against the anchor, which therefore stays a little longer.
                    store.retain(keep_last=self._settings.keep_last, keep=lambda manifest: manifest.tag == anchor)
        _vote(group, guard)
        previous = self._last[2] if self._last is not None and not full else 0
        self._last = (store.directory, anchor, previous + 1)

    def _base_for(self, store: CheckpointStore) -> tuple[str, str | None]:
        """Kind and base of the next checkpoint, decided alike on all ranks."""
        last, mode = self._last, self._settings.mode
        if mode == "full" or last is None or last[0] != store.directory or last[2] >= self._settings.full_every:
            return "full", None
        return mode, last[1]

    def _write(
        self,
        store: CheckpointStore,
        tag: str,
        group: RankGroup,
        pending: list[tuple[str, Any, dict[str, Tensor]]],
        known: dict[int, list[Piece]],
        base_tag: str | None,
        factors: dict[str, np.ndarray[Any, Any]],
    ) -> tuple[list[FileRecord], dict[str, FileRecord]]:
        """Write this rank's files. With a base that does not fit, a full one."""
        placed = [
            (name, tensor, place(name, tensor, known)) for _, _, tensors in pending for name, tensor in tensors.items()
        ]
        base = self._usable_base(store, base_tag, group.rank, placed)

        def shards() -> Any:
            for _, tensor, pieces in placed:
                flat = tensor.detach().reshape(-1)
                for piece in pieces:
                    if piece.stored:
                        bits, dtype = to_bits(flat[piece.offset : piece.offset + piece.numel])
                        scale = bits.size // piece.numel if piece.numel else 1
                        shape = piece.shape if scale == 1 else (*piece.shape, scale)
                        start = piece.start * scale
                        yield Shard(
                            piece.name, dtype, shape, start, bits, _reference(piece, bits, start, base, factors)
                        )

        files = store.write(
            tag, group.rank, group.world_size, shards(), base=base, level=self._settings.compression.level
        )
        records = {}
        for name, value, tensors in pending:
            described = {
                path: {
                    "dtype": str(tensor.dtype).removeprefix("torch."),
                    "shape": list(tensor.shape),
                    "pieces": [[p.name, p.start, p.offset, p.numel] for p in place(path, tensor, known)],
                }
                for path, tensor in tensors.items()
            }
            text = json.dumps({"format": FORMAT, "version": VERSION, "state": value, "tensors": described})
            records[name] = replace_file(store.path(tag) / name, [text.encode()])
        return files, records

    @staticmethod
    def _usable_base(
        store: CheckpointStore, tag: str | None, rank: int, placed: list[tuple[str, Tensor, list[Piece]]]
    ) -> CheckpointReader | None:
        """The base, if it holds the ranges that are to be written."""
        if tag is None:
            return None
        try:
            reader = store.open(tag)
        except (DamageError, FormatError, NotCommittedError):
            return None
        held = reader.ranges_of(rank)
        wanted = {(p.name, p.start, p.start + p.numel) for _, _, pieces in placed for p in pieces if p.stored}
        return reader if wanted <= held else None


def _reference(
    piece: Piece, bits: Any, start: int, base: CheckpointReader | None, factors: dict[str, np.ndarray[Any, Any]]
) -> Reference:
    if base is None:
        return Reference()
    old = base.bits(piece.name, start, start + bits.size)
    parameter, _, key = piece.name.rpartition("/")
    projector = f"{parameter}/projector"
    if key != "fp32" or parameter not in factors or len(piece.shape) < 2 or projector not in base.tensors:
        return Reference(old)
    now, before = factors[parameter], base.matrix(projector)
    named = {"projector": now} if np.array_equal(now, before) else {"projector": now, "base/projector": before}
    return Reference(old, named, int(np.prod(piece.shape[1:])), start)


def _whole_projectors(engine: Any, guard: Guard) -> dict[str, np.ndarray[Any, Any]]:
    """By parameter, the right projectors, whole and in float32. Collective where they are sharded."""
    optimizer = engine.basic_optimizer
    if not isinstance(optimizer, GaLoreAdamW):
        return {}
    found = {}
    for flat in engine.optimizer.fp32_partitioned_groups_flat:
        plan = optimizer.plan_of(flat)
        for batch in plan.batches if plan is not None else ():
            if batch.side is RIGHT and plan is not None:
                states = [optimizer.state[flat][matrix.name] for matrix in batch.matrices]
                bases = RIGHT.load(batch.matrices, states, plan.group, guard, torch.float32)
                with guard:
                    for matrix, basis in zip(batch.matrices, bases, strict=True):
                        found[matrix.name] = basis.cpu().numpy()
    return found


def _vote(group: RankGroup, guard: Guard) -> None:
    group.vote(torch.zeros(0, dtype=torch.uint8), guard.error)


def _torch_bytes(state_dict: Any) -> list[bytes]:
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    return [buffer.getvalue()]
