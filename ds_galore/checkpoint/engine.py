"""DeepSpeed's CheckpointEngine on the store: differential checkpoints behind ``engine.save_checkpoint``.

DeepSpeed hands its engine a state dict and a ``.pt`` path at a time. Here the tensors of all of them go into one data
file a rank, as logical tensors, and the rest into a JSON file a path. The engine calls itself decoupled, so that
DeepSpeed leaves committing and ``latest`` to it; the plugin calls :meth:`SaveEngine.finish` at the end of
``save_checkpoint``. Seen in DeepSpeed 0.19.8.

A save has two parts. Before ``save_checkpoint`` returns, all ranks agree on what it differs from, copy their state to
host memory, and link the files of the base. Encoding and writing follow, in a thread or at once. When a rank's files
are durable it says so (:mod:`.boards`); when all ranks have, rank 0's thread writes the manifest and ``latest``.
Nothing in a thread is a collective: ranks tell each other about failures at the next call.
"""

from __future__ import annotations

import contextlib
import io
import logging
import secrets
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from torch import Tensor

from ds_galore.checkpoint.agreeing import agree_on_rounded, whole_projectors
from ds_galore.checkpoint.base import Base, OpenBase, Source, in_budget
from ds_galore.checkpoint.boards import DirectoryBoard
from ds_galore.checkpoint.codecs import Compressor, words
from ds_galore.checkpoint.errors import DamageError, FormatError
from ds_galore.checkpoint.files import FileRecord, replace_file
from ds_galore.checkpoint.job import Factors, Plan, SaveJob
from ds_galore.checkpoint.job import plan as plan_save
from ds_galore.checkpoint.loading import load_file
from ds_galore.checkpoint.manifest import Manifest
from ds_galore.checkpoint.nodes import Nodes
from ds_galore.checkpoint.pieces import MASTER, WEIGHT, StateMap
from ds_galore.checkpoint.restoring import Restorer
from ds_galore.checkpoint.siblings import is_rotated, kept_copy, try_to_keep
from ds_galore.checkpoint.snapshot import Background, HostBuffers
from ds_galore.checkpoint.store import CheckpointStore
from ds_galore.checkpoint.tree import flatten
from ds_galore.config import CheckpointConfig
from ds_galore.errors import ConfigError
from ds_galore.tools.zero_to_fp32 import SCRIPT
from ds_galore.zero.group import Guard, RankGroup

if TYPE_CHECKING:
    from ds_galore.monitoring.monitor import Monitor
    from ds_galore.monitoring.saves import SaveRecord

__all__ = ["SaveEngine"]

logger = logging.getLogger(__name__)


class SaveEngine(CheckpointEngine):  # type: ignore[misc]
    """Saves and loads through :class:`~ds_galore.checkpoint.store.CheckpointStore`.

    Parameters
    ----------
    settings
        The ``ds_galore.checkpoint`` section.
    monitor
        Told what becomes of saves, if the run is watched.
    """

    def __init__(self, settings: CheckpointConfig, monitor: Monitor | None = None) -> None:
        super().__init__(None)
        self.name = "ds_galore"
        self._settings, self._monitor = settings, monitor
        self._record: SaveRecord | None = None
        self._begun = 0.0
        self._compressor = Compressor(settings.compression.codec, settings.compression.level)
        self._engine: Any = lambda: None
        self._guard = Guard()
        self._info: Any = None
        self._pending: list[tuple[str, Any, dict[str, Tensor]]] = []
        self.restorer = Restorer(settings)
        self._buffers = HostBuffers()
        self._base: Base | None = None
        self._base_copies: list[Tensor] = []  # the memory of the base's arrays
        self._frozen: tuple[FileRecord, list[Path]] | None = None  # of this rank, and where it may be linked from
        self._flight: tuple[SaveJob, Background] | None = None
        self._last_dir: Path | None = None
        self._token, self._saves = "", 0
        self._told = False
        self.hook: Callable[[str], None] = lambda point: None  #: called at the points of a save, for tests
        self.nodes: Nodes | None = None  #: where each node has storage of its own
        self.last_copied_bytes = 0  #: of this rank's state, by the last save
        self.peak_host_bytes = 0  #: the most that copies, base and encoded data have taken on this rank

    def attach(self, engine: Any, *, node_local: bool = False) -> None:
        """Know the DeepSpeed engine whose states are saved, without keeping it alive.

        Parameters
        ----------
        engine
            DeepSpeed's.
        node_local
            Whether each node saves to storage of its own. Collective where it does.

        Raises
        ------
        ConfigError
            For model or pipeline parallelism and mixtures of experts, which write other files.
        """
        from deepspeed.runtime.pipe.module import PipelineModule

        self._engine = weakref.ref(engine)
        if engine.mp_world_size > 1 or engine.has_moe_layers or isinstance(engine.module, PipelineModule):
            raise ConfigError(
                "ds_galore.checkpoint: tensor and pipeline parallelism and mixtures of experts are not supported; leave"
                " the section out for DeepSpeed's own checkpoints"
            )
        if words.compiled is None and engine.global_rank == 0:
            logger.warning(
                "the loops of the codecs were not compiled when ds_galore was installed: checkpoints are the same, and"
                " saves and loads take several times as long; install it again where there is a C compiler (pip's"
                " --no-cache-dir --force-reinstall)"
            )
        if node_local:
            self.nodes = Nodes(RankGroup(dist.group.WORLD), int(engine.local_rank))

    # ------------------------------------------------------------------ what DeepSpeed calls

    def create(self, info: Any) -> None:
        """Begin a save."""
        self._info, self._pending = info, []

    def makedirs(self, path: Any, exist_ok: bool = False) -> None:
        """Make a directory; what goes wrong is told at the end of the save, where all ranks wait for each other."""
        with self._guard:
            Path(path).mkdir(parents=True, exist_ok=exist_ok)

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
        prepared = self.restorer.state_for(target)
        return prepared if prepared is not None else load_file(target, map_location)

    def commit(self, info: Any) -> bool:
        """End what is no checkpoint (16-bit weights): a save ends in :meth:`finish`."""
        guard, self._guard = self._guard, Guard()
        if guard.error is not None:
            raise guard.error
        return True

    def is_decoupled(self) -> bool:
        """Keep DeepSpeed from writing ``latest``."""
        return True

    def get_commit_info(self) -> None:
        """Give DeepSpeed nothing to commit; it asks at each step, which is the time to log a failure of the writer."""
        if self._flight is None or self._told:
            return
        work = self._flight[1]
        error = work.error or work.follow_up_error
        if error is not None:
            self._told = True
            logger.error("%s: could not be saved; the next save or load raises: %s", self._flight[0].tag, error)

    def cleanup(self) -> None:
        """Let the save in flight come to its end, when the DeepSpeed engine is destroyed. Not collective.

        Raises
        ------
        BaseException
            What this rank's part of it ran into.
        """
        if self._flight is not None:
            (job, work), self._flight = self._flight, None
            job.leaving = True
            work.wait()
            if self._monitor is not None:
                self._monitor.flush()
            error = work.error or work.follow_up_error
            if error is not None:
                raise error

    # ------------------------------------------------------------------ saving

    def wait(self) -> None:
        """Return when the save in flight, if any, is committed. Collective.

        Raises
        ------
        BaseException
            What this rank's part of it ran into.
        PeerError
            If another rank failed. ``latest`` then still names the checkpoint before.
        """
        if self._flight is None:
            return
        (job, work), group, guard = self._flight, RankGroup(dist.group.WORLD), Guard()
        work.wait_for_work()
        guard.error = work.error
        try:
            group.agree([], guard.error)
            work.wait()  # all ranks' files are there
            group.agree([], work.follow_up_error)
        except BaseException as error:
            self._flight, self._told = None, False
            if job.record is not None:
                job.record.failed(f"{type(error).__name__}: {error}")
            job.abandoned = True  # rank 0 need not wait for ranks that have nothing to tell
            work.wait()
            self._release(job)
            if getattr(error, "exit_code", None) in (DamageError.exit_code, FormatError.exit_code):
                self._drop_base()  # the next checkpoint is full; one rank without a base is enough for that
            raise
        self._flight = None
        self._count(job)
        self._adopt(job)
        if self._monitor is not None:
            self._monitor.flush()

    def begin(self) -> None:
        """Wait for the save in flight, before another. Collective; raises as :meth:`wait`."""
        self._begun = time.monotonic()
        self.wait()
        if self._monitor is not None:
            self._monitor.waited(self._engine().global_steps, time.monotonic() - self._begun)
        self._guard = Guard()

    def returned(self) -> None:
        """``save_checkpoint`` is about to return to the user."""
        if self._record is not None:
            self._record.returned(time.monotonic() - self._begun)

    def finish(self, save_latest: bool) -> None:
        """Copy what :meth:`save` took, and have it written. Collective; fails on all ranks together."""
        info, pending, self._info, self._pending = self._info, self._pending, None, []
        group, guard, engine = RankGroup(dist.group.WORLD), self._guard, self._engine()
        self._guard = Guard()
        store = CheckpointStore(Path(info.save_dir).absolute(), self.hook, links=self._settings.links)
        factors = whole_projectors(engine, guard)
        rounded = agree_on_rounded(engine, group, guard)
        plan = guard.run(lambda: plan_save(StateMap(engine, rounded), pending), lambda: ([], [], {}))
        kind, base = self._next_kind()
        self._record = None
        if not self._token:  # agreed on once; with the number of the save it tells this attempt from any other
            self._token = f"{int(group.broadcast(torch.tensor([secrets.randbits(62)]), 0)):016x}"
        self._saves += 1
        opened = guard.run(lambda: self._open_base(base, store, info.tag, group.rank, plan, factors), lambda: None)
        job = guard.run(
            lambda: self._copy(store, info.tag, group, plan, kind, opened, factors, save_latest), lambda: None
        )
        try:
            without_base = group.agree([opened is None], guard.error)[0]
        except BaseException:
            if job is not None:
                self._release(job)
            raise
        assert job is not None
        if without_base:  # of some rank: then of none
            job.kind, job.base, job.linked, job.metadata["saves"] = "full", None, [], 1
        if self._leads(group) and self._last_dir not in (None, store.directory) and is_rotated(store.directory):
            assert self._last_dir is not None
            if kept_copy(self._last_dir).exists() and self._last_dir.exists():
                try_to_keep(self._last_dir)  # with what the trainer has written beside since
        self._last_dir = store.directory
        self._told = False
        if self._monitor is not None:
            self._record = job.record = self._monitor.record(job.metadata["step"], job.tag, job.kind)
            job.record.begin = self._begun
        self._flight = job, Background(job.write, job.commit)
        if not self._settings.asynchronous:
            self.wait()

    def _leads(self, group: RankGroup) -> bool:
        """Whether this rank does what is done once for a directory."""
        return group.rank == 0 if self.nodes is None else self.nodes.is_leader

    def _next_kind(self) -> tuple[str, Base | None]:
        """Kind and base of the next checkpoint, decided alike on all ranks."""
        mode, base = self._settings.mode, self._base
        if mode == "full" or base is None or base.saves >= self._settings.full_every:
            return "full", None
        return mode, base

    @staticmethod
    def _open_base(
        base: Base | None,
        store: CheckpointStore,
        tag: str,
        rank: int,
        plan: Plan,
        factors: Factors,
    ) -> OpenBase | None:
        """The base, if its files are there and this rank's hold the ranges of weights that are to be written.

        States of a matrix whose rank has changed since are written whole.
        Whatever the thread will read of them is open then, so that they may be removed meanwhile.
        """
        if base is None:
            return None
        store.path(tag).mkdir(parents=True, exist_ok=True)
        opened = base.open(rank, store.path(tag))
        if opened is None or not opened.hold_open(factors):
            return None
        weights = [each for each in plan[1] if each.piece.name.endswith((f"/{MASTER}", f"/{WEIGHT}"))]
        wanted = {(*each.key, each.key[1] + each.piece.numel * each.scale) for each in weights or plan[1]}
        return opened if wanted <= opened.held.keys() else None

    def _copy(
        self,
        store: CheckpointStore,
        tag: str,
        group: RankGroup,
        plan: Plan,
        kind: str,
        base: OpenBase | None,
        factors: Factors,
        latest: bool,
    ) -> SaveJob:
        """Copy this rank's state, and have the base's files in the directory before anybody can remove them."""
        tensors, ranges, states = plan
        engine = self._engine()
        store.path(tag).mkdir(parents=True, exist_ok=True)
        linked = store.link(tag, group.rank, base.reader) if base is not None else []
        frozen = self._link_frozen(store, tag)
        saves = 1 if base is None else base.base.saves + 1
        metadata = {
            "step": engine.global_steps,
            "zero_stage": int(engine.zero_optimization_stage()),
            "optimizer": type(engine.basic_optimizer).__name__,
            "saves": saves,
            **({"node_local": True} if self.nodes is not None else {}),
        }
        token = f"{self._token}-{self._saves}"
        board = DirectoryBoard(store.path(tag), token) if self.nodes is None else self.nodes.board(token)
        copies = self._buffers.copy(tensors)
        self.last_copied_bytes = sum(each.nbytes for each in copies)
        return SaveJob(
            store=store,
            tag=tag,
            board=board,
            nodes=self.nodes,
            rank=group.rank,
            world_size=group.world_size,
            kind=kind,
            base=base,
            linked=linked,
            frozen=frozen,
            copies=copies,
            ranges=ranges,
            factors=factors,
            states=states,
            metadata=metadata,
            latest=latest,
            settings=self._settings,
            compressor=self._compressor,
            hook=self.hook,
        )

    def _link_frozen(self, store: CheckpointStore, tag: str) -> list[FileRecord]:
        """Have the file of weights that are not trained in a checkpoint's directory, if it is still somewhere."""
        if self._frozen is not None:
            record, places = self._frozen
            for place in places:
                with contextlib.suppress(OSError, DamageError):
                    return store.link_files(tag, place, [record])
        return []

    def write_recovery_script(self, save_dir: str) -> None:
        """Put the script that merges our checkpoints where DeepSpeed puts its own, unless it is there already."""
        path, text = Path(save_dir) / "zero_to_fp32.py", SCRIPT.encode()
        with self._guard:
            with contextlib.suppress(OSError):
                if path.read_bytes() == text:  # training waits meanwhile: a save makes nothing durable that is
                    return
            replace_file(path, [text], mode=0o755)

    # ------------------------------------------------------------------ after a save

    def _count(self, job: SaveJob) -> None:
        """Remember the most host memory that saves have taken."""
        factors = [*job.factors.values(), *(self._base.factors.values() if self._base is not None else ())]
        used = (
            self._buffers.nbytes + sum(each.nbytes for each in factors) + job.encoded_bytes
        )  # the base is in the buffers
        self.peak_host_bytes = max(self.peak_host_bytes, used)

    def _adopt(self, job: SaveJob) -> None:
        """Let a committed checkpoint be what the next one differs from, or remember that it holds the base's files."""
        directory = job.store.path(job.tag)
        places = [directory]
        if is_rotated(job.store.directory):
            places.insert(0, kept_copy(job.store.directory) / job.tag)
        self._remember_frozen(job.files, places)
        if self._settings.mode == "full":
            self._release(job)
            return
        if job.kind == "differential" and job.base is not None:
            self._base = job.base.base.after(*(Source(place, 1) for place in places))
            self._release(job)
            return
        budget = self._settings.base_memory_gb * 1e9
        arrays, factors = in_budget(job.written, job.factors, f"/{MASTER}", budget)
        saves = int(job.metadata["saves"])
        sources = tuple(Source(place) for place in places)
        self._base = Base(job.tag, sources, saves, arrays, factors, self._ranks_here())
        in_use = {each.copy for each in job.ranges if each.key in arrays}
        free = [copy for number, copy in enumerate(job.copies) if number not in in_use]
        self._buffers.give_back([*free, *self._base_copies])
        self._base_copies = [copy for number, copy in enumerate(job.copies) if number in in_use]

    def _ranks_here(self) -> range | None:
        """Whose files this node's directories hold; None: everybody's."""
        return None if self.nodes is None else self.nodes.own

    def _remember_frozen(self, files: Sequence[FileRecord], places: list[Path]) -> None:
        found = next((each for each in files if ".frozen" in each.name), None)
        self._frozen = None if found is None else (found, places)

    def _drop_base(self) -> None:
        self._buffers.give_back(self._base_copies)
        self._base_copies, self._base = [], None

    def _release(self, job: SaveJob) -> None:
        self._buffers.give_back(job.copies)

    # ------------------------------------------------------------------ loading

    def prepare_load(self, load_dir: Any, tag: Any, arguments: Mapping[str, Any]) -> str | None:
        """Begin a load, before DeepSpeed's first collective of it: as :meth:`.Restorer.prepare`. Collective.

        Returns
        -------
        str or None
            The tag that is loaded; None leaves everything to DeepSpeed.
        """
        self.wait()
        found = self.restorer.prepare(self._engine(), load_dir, tag, arguments, self.nodes)
        if found is None:
            return None
        store, chosen, manifest = found
        self._continue_from(store, chosen, manifest, RankGroup(dist.group.WORLD))
        return chosen

    def _continue_from(self, store: CheckpointStore, tag: str, manifest: Manifest, group: RankGroup) -> None:
        """Let the next checkpoint differ from what the loaded one differs from."""
        saves = manifest.metadata.get("saves")
        self._drop_base()
        own = manifest.files[group.rank] if manifest.world_size == group.world_size else ()
        self._remember_frozen(own, [store.path(tag)])
        if (
            not isinstance(saves, int)
            or manifest.world_size != group.world_size
            or manifest.kind
            not in (
                "full",
                self._settings.mode,
            )
        ):
            return
        drop = 1 if manifest.kind == "differential" else 0
        base_tag = str(manifest.base) if drop else tag
        self._base = Base(base_tag, (Source(store.path(tag), drop),), saves, ranks=self._ranks_here())


def _torch_bytes(state_dict: Any) -> list[bytes]:
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    return [buffer.getvalue()]
