"""Checkpoints of one run in one directory: written whole or not at all, found again, thinned out.

One process a rank writes its data file; when all have, one of them commits. Nothing here talks to other ranks: who
waits for whom is the caller's. Imports NumPy and its neighbours; neither torch nor DeepSpeed.
"""

from __future__ import annotations

import datetime
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ds_galore.checkpoint.codecs import Reference, encode
from ds_galore.checkpoint.codecs.base import Bits
from ds_galore.checkpoint.errors import DamageError, FormatError, NotCommittedError
from ds_galore.checkpoint.files import (
    DTYPES,
    Entry,
    FileRecord,
    digest_of,
    file_digest,
    replace_file,
    sync_directory,
    write_data_file,
)
from ds_galore.checkpoint.manifest import MANIFEST, Manifest
from ds_galore.checkpoint.reader import CheckpointReader
from ds_galore.errors import ConfigError

__all__ = ["CheckpointStore", "Shard"]

LATEST = "latest"
_REMOVED = ".removed-"
_DATA = re.compile(r"rank-\d{5,}-of-\d{5,}\.(full|diff)(\.\d+)?\.safetensors")


@dataclass(frozen=True)
class Shard:
    """A range of a logical tensor, to be written.

    Parameters
    ----------
    name, dtype, shape
        As in docs/format.md.
    start
        Index of the first element in the whole tensor.
    bits
        The elements' bit patterns.
    reference
        What the range may be predicted from. It has to be what a reader will find: the same range in the newest file of
        the base, and the projectors of this checkpoint and the base.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    bits: Bits
    reference: Reference = field(default_factory=Reference)


class CheckpointStore:
    """The checkpoints in ``directory``.

    Parameters
    ----------
    directory
        The save directory; it is made when the first file is written.
    hook
        Called with the name of each point that a write passes, for tests that stop there.
    """

    def __init__(self, directory: Path, hook: Callable[[str], None] = lambda point: None) -> None:
        self.directory = directory
        self._hook = hook

    def path(self, tag: str) -> Path:
        """The directory of a checkpoint.

        Raises
        ------
        ConfigError
            If the tag is no plain directory name.
        """
        if not tag or tag.startswith(".") or "/" in tag or "\\" in tag or "\0" in tag or tag == LATEST:
            raise ConfigError(f"tag {tag!r}: a tag is a plain directory name, without separators or a leading dot")
        return self.directory / tag

    # ------------------------------------------------------------------ writing

    def write(
        self,
        tag: str,
        rank: int,
        world_size: int,
        shards: Iterable[Shard],
        *,
        base: CheckpointReader | None = None,
        level: int = 1,
    ) -> list[FileRecord]:
        """Write one rank's data file durably, and link what it builds on.

        Parameters
        ----------
        tag
            Of the checkpoint.
        rank, world_size
            Of the writer.
        shards
            What it holds; taken one by one, so that only one is in memory in encoded form beside those before it.
        base
            The checkpoint that the shards' references are from; None for a full checkpoint.
        level
            Of zstd.

        Returns
        -------
        list of FileRecord
            This rank's files, the oldest first: its line in the manifest.
        """
        directory = self.path(tag)
        directory.mkdir(parents=True, exist_ok=True)
        encoded = []
        for shard in shards:
            code = encode(shard.bits, shard.reference, floating=_floating(shard.dtype), level=level)
            start, stop = shard.start, shard.start + shard.bits.size
            if shard.bits.dtype.itemsize != DTYPES[shard.dtype]:
                raise ConfigError(f"{shard.name}: {shard.bits.dtype} elements cannot be stored as {shard.dtype}")
            digest = digest_of(shard.bits)
            entry = Entry(shard.name, shard.dtype, shard.shape, start, stop, code.codec, code.params, (), digest)
            encoded.append((entry, code))
        self._hook("encoded")
        older = self._link(base, rank, directory) if base is not None else []
        self._hook("linked")
        kind = "full" if base is None else "diff"  # named after the links, whose names it must not take
        path = self._free_name(directory, f"rank-{rank:05}-of-{world_size:05}.{kind}")
        record = write_data_file(path, encoded)
        self._hook("written")
        return [*older, record]

    @staticmethod
    def _free_name(directory: Path, stem: str) -> Path:
        """A name that no earlier save of the tag uses: its files stay until the new manifest replaces theirs."""
        generation = 0
        while True:
            path = directory / f"{stem}{f'.{generation}' if generation else ''}.safetensors"
            if not path.exists():
                return path
            generation += 1

    def _link(self, base: CheckpointReader, rank: int, directory: Path) -> list[FileRecord]:
        """Have the files of a rank in the base in ``directory`` too."""
        records = []
        for record in base.manifest.files[rank]:
            source, target = base.directory / record.name, directory / record.name
            if source.parent.resolve() != directory.resolve():
                if target.exists() and file_digest(target) != record.digest:
                    target = self._free_name(directory, record.name.removesuffix(".safetensors"))
                if not target.exists():
                    self._link_or_copy(source, target, record)
            records.append(replace(record, name=target.name))
        sync_directory(directory)
        return records

    @staticmethod
    def _link_or_copy(source: Path, target: Path, record: FileRecord) -> None:
        try:
            os.link(source, target)
        except OSError:  # another device, another user's file, a file system without links
            with source.open("rb") as file:
                copied = replace_file(target, iter(lambda: file.read(2**22), b""), mode=0o444)
            if copied.digest != record.digest:
                target.unlink()
                raise DamageError(f"{source}: is not what was written (its digest differs)") from None

    def commit(
        self,
        tag: str,
        files: Sequence[Sequence[FileRecord]],
        *,
        base: str | None = None,
        kind: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        latest: bool = True,
        states: Mapping[str, FileRecord] | None = None,
    ) -> Manifest:
        """Declare a checkpoint complete, once all ranks have written theirs.

        Parameters
        ----------
        tag
            Of the checkpoint.
        files
            By rank, what :meth:`write` returned.
        base
            Tag of the checkpoint that it differs from.
        kind
            ``"full"``, ``"differential"`` or ``"incremental"``; by default the first two, by whether there is a base.
        metadata
            JSON of the caller's.
        latest
            Whether ``latest`` is to name it.
        states
            Files of what is no tensor, by name.

        Raises
        ------
        DamageError
            If a file is not there with its size.
        """
        directory = self.path(tag)
        for record in [*(record for rank in files for record in rank), *(states or {}).values()]:
            found = directory / record.name
            if not found.is_file() or found.stat().st_size != record.bytes:
                raise DamageError(f"{found}: is not there as it was written; the checkpoint is not committed")
        created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        manifest = Manifest(
            tag,
            created,
            kind or ("full" if base is None else "differential"),
            base,
            tuple(tuple(rank) for rank in files),
            dict(metadata or {}),
            dict(states or {}),
        )
        self._hook("committing")
        manifest.write(directory)
        self._hook("committed")
        if latest:
            self.set_latest(tag)
        self._hook("latest")
        self._sweep(directory, manifest)
        self._hook("swept")
        return manifest

    def set_latest(self, tag: str) -> None:
        """Let ``latest`` name a checkpoint, atomically."""
        replace_file(self.directory / LATEST, [tag.encode()])

    @staticmethod
    def _sweep(directory: Path, manifest: Manifest) -> None:
        """Remove what an earlier or an interrupted save of the same tag left behind."""
        named = {record.name for rank in manifest.files for record in rank}
        for path in directory.iterdir():
            if path.name.startswith(".writing-") or (_DATA.fullmatch(path.name) and path.name not in named):
                path.unlink(missing_ok=True)

    # ------------------------------------------------------------------ finding

    def open(self, tag: str) -> CheckpointReader:
        """A committed checkpoint.

        Raises
        ------
        NotCommittedError, FormatError, DamageError
            As :class:`CheckpointReader`.
        """
        return CheckpointReader(self.path(tag))

    def latest(self) -> str | None:
        """The tag that ``latest`` names, or None."""
        try:
            return (self.directory / LATEST).read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return None

    def tags(self) -> list[str]:
        """The tags of committed checkpoints, the oldest first (by the time of their commit)."""
        if not self.directory.is_dir():
            return []
        found = [path for path in self.directory.iterdir() if (path / MANIFEST).is_file() and path.name[0] != "."]
        return [path.name for path in sorted(found, key=lambda path: ((path / MANIFEST).stat().st_mtime_ns, path.name))]

    def newest_intact(self) -> str | None:
        """The newest checkpoint in which nothing is wrong, or None. Reads and decodes everything of those it tries."""
        for tag in reversed(self.tags()):
            try:
                if not self.open(tag).verify():
                    return tag
            except (DamageError, FormatError, NotCommittedError):
                continue
        return None

    # ------------------------------------------------------------------ thinning out

    def remove(self, tag: str) -> None:
        """Remove a checkpoint: it is gone at once, or still whole, whenever this is interrupted.

        Raises
        ------
        ConfigError
            If ``latest`` names it.
        """
        if self.latest() == tag:
            raise ConfigError(f"{self.path(tag)}: 'latest' names this checkpoint; it is not removed")
        doomed = self.directory / f"{_REMOVED}{tag}"
        self._hook("removing")
        if self.path(tag).exists():
            if doomed.exists():
                shutil.rmtree(doomed)
            self.path(tag).rename(doomed)
            sync_directory(self.directory)
        self._hook("renamed")
        if doomed.exists():
            shutil.rmtree(doomed)

    def retain(self, *, keep_last: int, keep: Callable[[Manifest], bool] = lambda manifest: False) -> list[str]:
        """Remove all but the newest checkpoints, and finish removals that were interrupted.

        Parameters
        ----------
        keep_last
            How many of the newest stay, at least 1.
        keep
            Others that are to stay.

        Returns
        -------
        list of str
            The tags that were removed.
        """
        if keep_last < 1:
            raise ConfigError(f"keep_last is {keep_last}: at least one checkpoint has to stay")
        if self.directory.is_dir():
            for path in self.directory.glob(f"{_REMOVED}*"):
                shutil.rmtree(path)
        removed = []
        for tag in self.tags()[:-keep_last]:
            try:
                stays = tag == self.latest() or keep(Manifest.read(self.path(tag)))
            except (DamageError, FormatError):
                stays = True  # a damaged one is a matter for people
            if not stays:
                self.remove(tag)
                removed.append(tag)
        return removed


def _floating(dtype: str) -> bool:
    return dtype in ("F64", "F32", "F16", "BF16")
