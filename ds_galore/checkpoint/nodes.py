"""Nodes that save to storage of their own (DeepSpeed's ``checkpoint.use_node_local_storage``).

A node's directory holds the files of its own ranks, and the manifest of the whole checkpoint: copied together, the
nodes' directories are an ordinary checkpoint. Ranks tell each other over the network what they have written. A load
first brings what a node lacks from one that has it, so that any rank can read anything, whatever ranks saved it.

The first rank of each node, its *leader*, does all that is done once for a directory.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Set
from pathlib import Path

import torch
import torch.distributed as dist

from ds_galore.checkpoint.boards import NetworkBoard, serve
from ds_galore.checkpoint.digests import file_digest
from ds_galore.checkpoint.errors import DamageError, NotCommittedError
from ds_galore.checkpoint.files import FileRecord, replace_file
from ds_galore.checkpoint.manifest import Manifest
from ds_galore.checkpoint.store import CheckpointStore
from ds_galore.errors import ConfigError, DsGaloreError
from ds_galore.zero.group import Guard, RankGroup

__all__ = ["Nodes"]

#: Bytes of a file that are sent at a time.
CHUNK = 2**26
#: By which the newest of several manifests is known: when it was written, and after how many steps.
Age = tuple[str, int, str]


class Nodes:
    """Which ranks share storage, and what they do together. Made collectively.

    Parameters
    ----------
    group
        All ranks.
    local_rank
        This rank's number on its node, as the launcher gave it.

    Raises
    ------
    ConfigError
        If the ranks of a node do not follow each other.
    """

    def __init__(self, group: RankGroup, local_rank: int) -> None:
        numbers = group.all_gather(torch.tensor([local_rank])).view(-1).tolist()
        if numbers[0] != 0 or any(after not in (0, before + 1) for before, after in itertools.pairwise(numbers)):
            raise ConfigError(
                "checkpoint.use_node_local_storage: the ranks of a node have to follow each other, and the launcher"
                f" gave the local ranks {numbers}"
            )
        leaders = [rank for rank, number in enumerate(numbers) if number == 0]
        ends = [*leaders[1:], group.world_size]
        self._world = group
        self.leaders = tuple(leaders)
        node = max(number for number, leader in enumerate(leaders) if leader <= group.rank)
        self.own = range(leaders[node], ends[node])  #: the ranks of this node
        self.is_leader = group.rank == leaders[node]
        made = dist.new_group(list(leaders))
        self._group = RankGroup(made) if self.is_leader else None
        self._store = serve(group)

    def board(self, token: str) -> NetworkBoard:
        """Where the ranks leave word of a save."""
        return NetworkBoard(self._store, token)

    # ------------------------------------------------------------------ which checkpoint

    def latest(self, store: CheckpointStore) -> str | None:
        """The tag that the newest of the nodes' ``latest`` files names, or None. Collective."""
        found = self._gathered(lambda: [(_age(store, tag), tag)] if (tag := store.latest()) is not None else [])
        return max(found)[1] if found else None

    def newest_intact(
        self, store: CheckpointStore, tried: Set[str] = frozenset(), *, up_to_step: int = sys.maxsize
    ) -> str | None:
        """The newest checkpoint in which nothing is wrong on any node, brought to all of them. Collective.

        Parameters
        ----------
        store
            This node's.
        tried
            Tags to leave out.
        up_to_step
            The last step after which it may have been saved.
        """
        found = self._gathered(lambda: [(_age(store, tag), tag) for tag in store.tags()])
        for (_, step, _), tag in sorted(set(found), reverse=True):
            if tag in tried or step > up_to_step:
                continue
            try:
                self.bring(store, tag)
                with self._world.together():
                    problems = store.open(tag).verify() if self.is_leader else []
                    if problems:
                        raise DamageError(problems[0])
            except Exception:  # noqa: BLE001 - all ranks are here: one by any error of its own, the others by PeerError
                continue
            return tag
        return None

    def _gathered(self, listed: Callable[[], list[tuple[Age, str]]]) -> list[tuple[Age, str]]:
        """What the leaders list, on all ranks."""
        own: list[tuple[Age, str]] = []
        with self._world.together():
            own = listed() if self.is_leader else []
        everything: list[list[tuple[Age, str]]] = [[] for _ in range(self._world.world_size)]
        dist.all_gather_object(everything, own)
        return [each for node in everything for each in node]

    # ------------------------------------------------------------------ bringing it here

    def bring(self, store: CheckpointStore, tag: str) -> None:
        """Have all files of a checkpoint on every node. Collective; fails on all ranks together.

        Raises
        ------
        NotCommittedError
            If no node holds a manifest of it.
        DamageError
            If a file is on no node, or is not what was written on the one that it is taken from.
        OSError
            If it cannot be written here.
        """
        with self._world.together():
            if self._group is not None:
                self._bring(self._group, store, tag)

    def _bring(self, leaders: RankGroup, store: CheckpointStore, tag: str) -> None:
        directory, guard = store.path(tag), Guard()
        own = guard.run(lambda: _manifest(directory), lambda: None)
        ages: list[Age | None] = [None] * leaders.world_size
        dist.all_gather_object(ages, None if own is None else _age_of(own), group=leaders.process_group)
        leaders.agree([], guard.error)
        newest = max((age for age in ages if age is not None), default=None)
        if newest is None:
            raise NotCommittedError(f"{directory}: holds no finished checkpoint on any node")
        source = ages.index(newest)
        text = [own.to_json() if leaders.rank == source and own is not None else b""]
        dist.broadcast_object_list(text, src=self.leaders[source], group=leaders.process_group)
        manifest = Manifest.parse(text[0], directory)
        records = list({record.name: record for record in manifest.records()}.values())
        held = leaders.all_gather(torch.tensor([_is_there(directory, each) for each in records], dtype=torch.uint8))
        for record, column in zip(records, held.T.tolist(), strict=True):
            if not any(column):
                raise DamageError(f"{directory / record.name}: is on no node as it was written")
            if not all(column):
                self._send(leaders, directory, record, column.index(1), bool(column[leaders.rank]))
        with guard:
            store.put_placeholders(directory, manifest)
            if own is None or _age_of(own) != newest:
                manifest.write(directory)
        leaders.agree([], guard.error)

    @staticmethod
    def _send(leaders: RankGroup, directory: Path, record: FileRecord, source: int, held: bool) -> None:
        """Copy a file from one node to those that lack it."""
        guard, path = Guard(), directory / record.name

        def blocks() -> Iterator[memoryview]:
            with contextlib.ExitStack() as stack:
                file = None
                if leaders.rank == source:
                    with guard:
                        file = stack.enter_context(path.open("rb"))
                for begin in range(0, record.bytes, CHUNK):
                    block = torch.zeros(min(CHUNK, record.bytes - begin), dtype=torch.uint8)
                    if file is not None:
                        with guard:
                            file.readinto(block.numpy().data)
                    yield leaders.broadcast(block, source).numpy().data

        sent = blocks()
        if not held:
            with guard:
                path.parent.mkdir(parents=True, exist_ok=True)
                mode = 0o444 if path.suffix == ".safetensors" else 0o644
                written = replace_file(path, sent, mode=mode, like=record.digest)
                if written.digest != record.digest:
                    path.unlink()
                    raise DamageError(
                        f"{path}: is not what was written on the node that it was brought from (node {source})"
                    )
        for _ in sent:  # also where it cannot be written: the others are still in it
            pass
        leaders.agree([], guard.error)


def _manifest(directory: Path) -> Manifest | None:
    try:
        return Manifest.read(directory)
    except NotCommittedError:
        return None


def _age_of(manifest: Manifest) -> Age:
    step = manifest.metadata.get("step")
    return manifest.created, step if isinstance(step, int) else -1, manifest.digest


def _age(store: CheckpointStore, tag: str) -> Age:
    """Of a checkpoint; one without a readable manifest is older than any other."""
    try:
        return _age_of(Manifest.read(store.path(tag)))
    except DsGaloreError:  # loading it will tell
        return "", -1, ""


def _is_there(directory: Path, record: FileRecord) -> bool:
    """Whether a file is there as it was written; one that has rotted, or is of an older save, is brought anew."""
    path = directory / record.name
    try:
        return path.stat().st_size == record.bytes and file_digest(path, record.digest) == record.digest
    except OSError:
        return False
