"""Checkpoints of one run in one directory: written whole or not at all, found again, thinned out.

One process a rank writes its data file; when all have, one of them commits. Nothing here talks to other ranks: who
waits for whom is the caller's. Imports NumPy and its neighbours; neither torch nor DeepSpeed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ds_galore.checkpoint.codecs import CODECS, ZSTD, Compressor, Encoded, Reference, decode, encode
from ds_galore.checkpoint.codecs.base import Bits
from ds_galore.checkpoint.codecs.same import SameCodec
from ds_galore.checkpoint.digests import digest_of, file_digest
from ds_galore.checkpoint.errors import DamageError, FormatError, NotCommittedError
from ds_galore.checkpoint.files import (
    DTYPES,
    FORMAT,
    VERSION,
    Entry,
    FileRecord,
    replace_file,
    sync_directory,
    write_data_file,
)
from ds_galore.checkpoint.manifest import MANIFEST, Manifest
from ds_galore.checkpoint.reader import CheckpointReader
from ds_galore.checkpoint.scratch import KeptEncoded, Scratch
from ds_galore.errors import ConfigError

__all__ = ["CheckpointStore", "Shard"]

LATEST = "latest"
#: What stands in the files that DeepSpeed looks for by name. Written anew at each save, and always the same.
PLACEHOLDER = (
    json.dumps({"format": FORMAT, "version": VERSION, "state": "in the files that manifest.json names"}) + "\n"
).encode()
_REMOVED = ".removed-"
_SAID: set[str] = set()  # directories where a warning has been given
logger = logging.getLogger(__name__)
_DATA = re.compile(r"rank-\d{5,}-of-\d{5,}\.(frozen|full|diff)(\.\d+)?\.safetensors")
_OURS = re.compile(rf"{_DATA.pattern}|.*_states(\.\d+)?\.json|\.(writing|done)-.*")


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
    unchanged
        Whether the base is known to hold the very same range: then nothing of it is written, and ``digest`` is given.
    digest
        Of the bits, where it is known already.
    lossy
        Digits that may be lost by the user's choice: ``"int8"`` (blocks with a scale), or None.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    bits: Bits
    reference: Reference = field(default_factory=Reference)
    unchanged: bool = False
    digest: str | None = None
    lossy: str | None = None


class CheckpointStore:
    """The checkpoints in ``directory``.

    Parameters
    ----------
    directory
        The save directory; it is made when the first file is written.
    hook
        Called with the name of each point that a write passes, for tests that stop there.
    links
        ``"hardlink"``: files of a base are linked, and copied where that is impossible; ``"copy"``: always copied.
    """

    def __init__(
        self, directory: Path, hook: Callable[[str], None] = lambda point: None, *, links: str = "hardlink"
    ) -> None:
        self.directory = directory
        self._hook = hook
        self._links = links

    def path(self, tag: str) -> Path:
        """The directory of a checkpoint.

        Raises
        ------
        ConfigError
            If the tag is no plain directory name.
        """
        if tag == LATEST:
            raise ConfigError(
                f"tag {tag!r}: a tag is a plain directory name, and this is the file that names the newest checkpoint"
            )
        if not tag or tag.startswith(".") or "/" in tag or "\\" in tag or "\0" in tag:
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
        linked: Sequence[FileRecord] | None = None,
        compressor: Compressor = ZSTD,
        scratch: Scratch | None = None,
        kind: str | None = None,
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
        linked
            What :meth:`link` returned, where the base's files are in the directory already.
        compressor
            Of byte planes.
        scratch
            Where encoded shards wait for the last of them; in memory by default.
        kind
            For the file's name: ``"frozen"``, ``"full"`` or ``"diff"``; by default one of the last two, by whether it
            builds on others.

        Returns
        -------
        list of FileRecord
            This rank's files, the oldest first: its line in the manifest.
        """
        directory = self.path(tag)
        directory.mkdir(parents=True, exist_ok=True)
        encoded: list[tuple[Entry, Encoded | KeptEncoded]] = []
        for shard in shards:
            if shard.bits.dtype.itemsize != DTYPES[shard.dtype]:
                raise ConfigError(f"{shard.name}: {shard.bits.dtype} elements cannot be stored as {shard.dtype}")
            code, kept = _encoded(shard, compressor)
            digest = shard.digest if shard.digest is not None else digest_of(kept)
            start, stop = shard.start, shard.start + shard.bits.size
            entry = Entry(shard.name, shard.dtype, shard.shape, start, stop, code.codec, code.params, (), digest)
            encoded.append((entry, code if scratch is None else scratch.keep_encoded(code)))
        self._hook("encoded")
        older = list(linked) if linked is not None else [] if base is None else self.link(tag, rank, base)
        self._hook("linked")
        kind = kind or ("diff" if older else "full")  # named after the links, whose names it must not take
        path = self._free_name(directory, f"rank-{rank:05}-of-{world_size:05}.{kind}", ".safetensors")
        record = write_data_file(path, encoded)
        self._hook("written")
        return [*older, record]

    def write_state(self, tag: str, name: str, text: str) -> FileRecord:
        """Write a state file durably, and a file of the name that DeepSpeed looks for, which says where to look.

        Parameters
        ----------
        tag
            Of the checkpoint.
        name
            DeepSpeed's name for it, such as ``mp_rank_00_model_states.pt``.
        text
            JSON.
        """
        directory = self.path(tag)
        directory.mkdir(parents=True, exist_ok=True)
        record = replace_file(self._free_name(directory, name.removesuffix(".pt"), ".json"), [text.encode()])
        if not (directory / name).exists():  # a native checkpoint's stays until the manifest replaces it
            replace_file(directory / name, [PLACEHOLDER])
        return record

    @staticmethod
    def _free_name(directory: Path, stem: str, suffix: str) -> Path:
        """A name that no earlier save of the tag uses: its files stay until the new manifest replaces theirs."""
        generation = 0
        while True:
            path = directory / f"{stem}{f'.{generation}' if generation else ''}{suffix}"
            if not path.exists():
                return path
            generation += 1

    def link(self, tag: str, rank: int, base: CheckpointReader) -> list[FileRecord]:
        """Have the files of a rank in the base in a checkpoint's directory too.

        Training waits meanwhile, so that the directory is made durable only with what is written there next.

        Returns
        -------
        list of FileRecord
            The files, the oldest first, under the names that they have there.

        Raises
        ------
        DamageError
            If a file had to be copied and is not what was written.
        """
        return self.link_files(tag, base.directory, base.manifest.files[rank])

    def link_files(self, tag: str, place: Path, wanted: Sequence[FileRecord]) -> list[FileRecord]:
        """The same for some files of a checkpoint's directory, ``place``.

        Raises
        ------
        OSError
            If one is not there.
        DamageError
            If a file had to be copied and is not what was written.
        """
        directory = self.path(tag)
        directory.mkdir(parents=True, exist_ok=True)
        records = []
        for record in wanted:
            source, target = place / record.name, directory / record.name
            if source.parent.resolve() != directory.resolve():
                if target.exists() and file_digest(target, record.digest) != record.digest:
                    target = self._free_name(directory, record.name.removesuffix(".safetensors"), ".safetensors")
                if not target.exists():
                    self._link_or_copy(source, target, record)
            records.append(replace(record, name=target.name))
        return records

    def _link_or_copy(self, source: Path, target: Path, record: FileRecord) -> None:
        try:
            if self._links == "copy":
                raise OSError(errno.EPERM, "not wanted")
            os.link(source, target)
        except OSError as error:  # another device, another user's file, a file system without links
            if self._links != "copy" and str(self.directory) not in _SAID:
                _SAID.add(str(self.directory))
                logger.warning(
                    "%s: files of the base are copied into each checkpoint, since they cannot be linked: %s",
                    self.directory,
                    error.strerror,
                )
            with source.open("rb") as file:
                copied = replace_file(target, iter(lambda: file.read(2**22), b""), mode=0o444, like=record.digest)
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
        kind = kind or ("full" if base is None else "differential")
        manifest = Manifest.now(tag, kind, base, files, metadata or {}, states or {})
        self.publish(manifest, latest=latest)
        return manifest

    def publish(self, manifest: Manifest, *, latest: bool = True, here: Collection[str] | None = None) -> None:
        """Put a manifest into the directory of its checkpoint, which is complete from then on.

        Parameters
        ----------
        manifest
            Of the checkpoint.
        latest
            Whether ``latest`` is to name it.
        here
            Names of the files that have to be there; all that the manifest names, unless they are on several nodes.

        Raises
        ------
        DamageError
            If a file is not there with its size.
        """
        directory = self.path(manifest.tag)
        for record in manifest.records():
            found = directory / record.name
            if here is not None and record.name not in here:
                continue
            if not found.is_file() or found.stat().st_size != record.bytes:
                raise DamageError(f"{found}: is not there as it was written; the checkpoint is not committed")
        self._hook("committing")
        manifest.write(directory)
        self._hook("committed")
        self.put_placeholders(directory, manifest)
        if latest:
            self.set_latest(manifest.tag)
        self._hook("latest")
        self._sweep(directory, manifest)
        self._hook("swept")

    @staticmethod
    def put_placeholders(directory: Path, manifest: Manifest) -> None:
        """Have files of the names that DeepSpeed looks for, in place of a native checkpoint's."""
        for name in manifest.states:
            path = directory / name
            if not path.exists() or path.stat().st_size != len(PLACEHOLDER):
                replace_file(path, [PLACEHOLDER])

    def set_latest(self, tag: str) -> None:
        """Let ``latest`` name a checkpoint, atomically."""
        replace_file(self.directory / LATEST, [tag.encode()])

    @staticmethod
    def _sweep(directory: Path, manifest: Manifest) -> None:
        """Remove what an earlier or an interrupted save of the same tag left behind; never another node's files."""
        named = {record.name for record in manifest.records()}
        for path in directory.iterdir():
            if _OURS.fullmatch(path.name) and path.name not in named:
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
        found = []
        for path in self.directory.iterdir():
            with contextlib.suppress(OSError):  # one that is being removed is none
                if path.name[0] != ".":
                    found.append(((path / MANIFEST).stat().st_mtime_ns, path.name))
        return [name for _, name in sorted(found)]

    def newest_intact(self) -> str | None:
        """The newest checkpoint in which nothing is wrong, or None. Reads and decodes everything of those it tries."""
        return next(self.intact(), None)

    def intact(self) -> Iterator[str]:
        """The checkpoints in which nothing is wrong, the newest first; each is read and decoded when its turn comes."""
        for tag in reversed(self.tags()):
            try:
                if not self.open(tag).verify():
                    yield tag
            except (DamageError, FormatError, NotCommittedError):
                continue

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
            _delete(doomed)
            with contextlib.suppress(FileNotFoundError):  # another node that sees this directory was faster
                self.path(tag).rename(doomed)
            sync_directory(self.directory)
        self._hook("renamed")
        _delete(doomed)

    @staticmethod
    def _is_unfinished(path: Path) -> bool:
        """Whether a directory holds data files of ours, and nothing that finishes them."""
        return not (path / MANIFEST).exists() and any(_DATA.fullmatch(each.name) for each in path.glob("rank-*"))

    def retain(self, *, keep_last: int, keep: Callable[[Manifest], bool] = lambda manifest: False) -> list[str]:
        """Remove all but the newest checkpoints, what a crash left unfinished, and finish interrupted removals.

        Not while another checkpoint is being written.

        Parameters
        ----------
        keep_last
            How many of the newest stay, at least 1.
        keep
            Others that are to stay.

        Returns
        -------
        list of str
            The tags that were removed; unfinished ones are not among them.
        """
        if keep_last < 1:
            raise ConfigError(f"keep_last is {keep_last}: at least one checkpoint has to stay")
        if self.directory.is_dir():
            for path in self.directory.glob(f"{_REMOVED}*"):
                _delete(path)
            for path in self.directory.iterdir():
                if path.name[0] != "." and path.name != self.latest() and self._is_unfinished(path):
                    self.remove(path.name)
        removed = []
        for tag in self.tags()[:-keep_last]:
            try:
                stays = tag == self.latest() or keep(Manifest.read(self.path(tag)))
            except NotCommittedError:
                continue  # another node that sees this directory has removed it meanwhile
            except (DamageError, FormatError):
                stays = True  # a damaged one is a matter for people
            if not stays:
                self.remove(tag)
                removed.append(tag)
        return removed


def _delete(path: Path) -> None:
    """Delete a directory, of which another node that sees it may be deleting files too."""
    while path.exists():
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)


def _encoded(shard: Shard, compressor: Compressor) -> tuple[Encoded, Bits]:
    """A shard's encoding, and the bits that a reader will get: the shard's own but for what may be lost."""
    if shard.unchanged:
        return Encoded(SameCodec.id, {}, {}), shard.bits
    floating = _floating(shard.dtype)
    if shard.lossy is not None:
        code = CODECS[shard.lossy].encode(shard.bits, Reference(), floating=floating, compressor=compressor)
        if code is not None:
            return code, decode(code, shard.bits.size, shard.bits.dtype.itemsize, Reference(), floating=floating)
    return encode(shard.bits, shard.reference, floating=floating, compressor=compressor), shard.bits


def _floating(dtype: str) -> bool:
    return dtype in ("F64", "F32", "F16", "BF16")
