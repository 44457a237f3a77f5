"""The manifest: what a checkpoint consists of, and the mark that it is complete. See docs/format.md.

Imports the standard library and :mod:`.files`.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ds_galore.checkpoint.digests import small_digest
from ds_galore.checkpoint.errors import DamageError, FormatError, NotCommittedError
from ds_galore.checkpoint.files import FORMAT, READABLE, VERSION, FileRecord, reads, replace_file

__all__ = ["KINDS", "MANIFEST", "Manifest"]

MANIFEST = "manifest.json"
KINDS = ("full", "differential", "incremental")
#: Bytes: a manifest lists files and settings; anything larger is none.
MAX_MANIFEST = 2**28


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Parameters
    ----------
    tag
        Name of its directory when it was written.
    created
        ISO 8601, UTC.
    kind
        One of :data:`KINDS`.
    base
        Tag of the checkpoint that it differs from, or None.
    files
        By rank, its files, the oldest first.
    metadata
        The writer's own, JSON.
    states
        The files of what is no tensor, by the name that DeepSpeed has for their content.
    """

    tag: str
    created: str
    kind: str
    base: str | None
    files: tuple[tuple[FileRecord, ...], ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    states: Mapping[str, FileRecord] = field(default_factory=dict)

    @classmethod
    def now(
        cls,
        tag: str,
        kind: str,
        base: str | None,
        files: Sequence[Sequence[FileRecord]],
        metadata: Mapping[str, Any],
        states: Mapping[str, FileRecord],
    ) -> Manifest:
        """The manifest of a checkpoint that is created now."""
        created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        return cls(tag, created, kind, base, tuple(tuple(rank) for rank in files), dict(metadata), dict(states))

    @property
    def world_size(self) -> int:
        """Number of ranks that wrote it."""
        return len(self.files)

    @property
    def digest(self) -> str:
        """Of everything in it."""
        return _digest(self._values())

    def _values(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "tag": self.tag,
            "created": self.created,
            "world_size": self.world_size,
            "kind": self.kind,
            "base": self.base,
            "files": [[asdict(record) for record in rank] for rank in self.files],
            "metadata": dict(self.metadata),
            "states": {name: asdict(record) for name, record in self.states.items()},
        }

    def records(self) -> Iterator[FileRecord]:
        """Every file that it names."""
        for rank in self.files:
            yield from rank
        yield from self.states.values()

    def to_json(self) -> bytes:
        """What stands in its file."""
        values = self._values()
        return json.dumps({**values, "digest": _digest(values)}, indent=1).encode()

    def write(self, directory: Path) -> None:
        """Put it into a directory: the checkpoint exists from then on."""
        replace_file(directory / MANIFEST, [self.to_json()])

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """The manifest of a directory.

        Raises
        ------
        NotCommittedError
            If there is none.
        FormatError
            If it is of another format or version.
        DamageError
            If it is not what was written.
        """
        path = directory / MANIFEST
        try:
            if path.stat().st_size > MAX_MANIFEST:
                raise DamageError(f"{path}: is too large for a manifest")
            data = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise NotCommittedError(f"{directory}: holds no finished checkpoint (no {MANIFEST})") from None
        except OSError as error:
            raise DamageError(f"{path}: cannot be read: {error}") from None
        return cls.parse(data, directory)

    @classmethod
    def parse(cls, data: bytes, directory: Path) -> Manifest:
        """The manifest that :meth:`to_json` gave, which is to stand in a directory; raises as :meth:`read`."""
        path = directory / MANIFEST
        try:
            values = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise DamageError(f"{path}: is damaged: {error}") from None
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise FormatError(f"{path}: is no manifest of ds_galore")
        if values.get("version") not in READABLE:
            raise FormatError(f"{path}: has format version {values.get('version')!r}; {reads()}")
        claimed = values.pop("digest", None)
        if claimed != _digest(values):
            raise DamageError(f"{path}: is damaged: its digest does not fit")
        try:
            files = tuple(tuple(_record(record) for record in rank) for rank in values["files"])
            states = {name: _record(record) for name, record in values["states"].items()}
            manifest = cls(
                tag=values["tag"],
                created=values["created"],
                kind=values["kind"],
                base=values["base"],
                files=files,
                metadata=values["metadata"],
                states=states,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamageError(f"{path}: is damaged: {error}") from None
        texts = [manifest.tag, manifest.created, manifest.kind, "" if manifest.base is None else manifest.base]
        if any(not isinstance(text, str) for text in texts) or not isinstance(manifest.metadata, dict):
            raise DamageError(f"{path}: is damaged: a value is of a wrong type")
        if manifest.kind not in KINDS or values.get("world_size") != manifest.world_size:
            raise DamageError(f"{path}: is damaged: impossible kind or number of ranks")
        return manifest


def _record(value: Any) -> FileRecord:
    name, size, digest = value["name"], value["bytes"], value["digest"]
    if not isinstance(name, str) or not name or name.startswith(".") or "/" in name or "\\" in name or "\0" in name:
        raise ValueError(f"{name!r} is no plain file name")
    header = value["header"]
    if type(size) is not int or size < 0 or not isinstance(digest, str) or not isinstance(header, str):
        raise ValueError(f"impossible size or digest of {name!r}")
    return FileRecord(name, size, digest, header)


def _digest(values: Mapping[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return small_digest(text.encode())
