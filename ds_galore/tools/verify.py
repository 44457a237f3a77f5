"""Checking checkpoints, and going back to an intact one.

Imports NumPy and its neighbours; neither torch nor DeepSpeed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ds_galore.checkpoint.errors import DamageError, FormatError, NotCommittedError
from ds_galore.checkpoint.manifest import MANIFEST
from ds_galore.checkpoint.reader import CheckpointReader
from ds_galore.checkpoint.store import CheckpointStore
from ds_galore.errors import ConfigError, DataError
from ds_galore.tools.source import checkpoints_in, open_source
from ds_galore.tools.torchfile import TorchFile

__all__ = ["Verification", "native_problems", "rollback", "verify_checkpoint"]


@dataclass
class Verification:
    """What was found in a checkpoint.

    Parameters
    ----------
    directory
        Of the checkpoint.
    problems
        What is wrong, by file and tensor; empty if nothing is.
    checked, ranges
        How many ranges of tensors were decoded, of how many; of DeepSpeed's own, storages whose checksums were
        compared.
    newest_intact
        Where something is wrong: the tag of the newest other checkpoint in the save directory in which nothing is.
    """

    directory: str
    problems: list[str] = field(default_factory=list)
    checked: int = 0
    ranges: int = 0
    newest_intact: str | None = None
    quick: bool = False


def verify_checkpoint(directory: Path, *, quick: bool = False, sample: tuple[int, int] = (1, 1)) -> Verification:
    """Check a checkpoint.

    Parameters
    ----------
    directory
        Of the checkpoint; of DeepSpeed's own, the archives' checksums and the structure are checked.
    quick
        Structure and sizes only.
    sample
        ``(n, t)``: the n-th of t parts of the data, so that t runs check everything.

    Raises
    ------
    ConfigError
        For an impossible sample.
    DataError
        If the directory holds no checkpoint.
    """
    part, parts = sample
    if not 1 <= part <= parts:
        raise ConfigError(f"sample is {part}/{parts}: it must be n/t with 1 <= n <= t")
    found = Verification(str(directory), quick=quick)
    try:
        if (directory / MANIFEST).exists():
            reader = CheckpointReader(directory)
            found.problems = reader.verify(quick=quick, sample=sample)
            with contextlib.suppress(DamageError, FormatError):
                found.ranges = sum(len(tensor.shards) for tensor in reader.tensors.values())
                found.checked = 0 if quick else len(range(part - 1, found.ranges, parts))
        else:
            _verify_native(directory, found, quick, sample)
    except (DamageError, FormatError, NotCommittedError) as error:
        found.problems.append(str(error))
    if found.problems:
        found.newest_intact = next(_intact_beside(directory), None)
    return found


def _verify_native(directory: Path, found: Verification, quick: bool, sample: tuple[int, int]) -> None:
    """The structure of DeepSpeed's own, and the checksums of its storages."""
    open_source(directory)
    part, parts = sample
    number = 0
    for path in sorted(directory.rglob("*.pt")):
        file = TorchFile(path)
        for key in file.storages():
            number += 1
            if quick or (number - part) % parts:
                continue
            found.checked += 1
            try:
                file.check(key)
            except DamageError as error:
                found.problems.append(str(error))
    found.ranges = number


def native_problems(directory: Path) -> list[str]:
    """What is wrong with one of DeepSpeed's own."""
    found = Verification(str(directory))
    _verify_native(directory, found, quick=False, sample=(1, 1))
    return found.problems


def _intact_beside(directory: Path) -> Iterator[str]:
    """The other checkpoints in the save directory in which nothing is wrong, the newest first."""
    absolute = directory.absolute()
    others = [path for path in checkpoints_in(absolute.parent) if path.name != absolute.name]
    for path in sorted(others, key=lambda path: -_written(path)):
        try:
            problems = CheckpointReader(path).verify() if (path / MANIFEST).exists() else native_problems(path)
        except (DamageError, FormatError, NotCommittedError, DataError):
            continue
        if not problems:
            yield path.name


def _written(path: Path) -> int:
    """When a checkpoint was finished."""
    files = [path / MANIFEST] if (path / MANIFEST).exists() else list(path.glob("*.pt"))
    return max((each.stat().st_mtime_ns for each in files), default=0)


def rollback(directory: Path, tag: str) -> list[str]:
    """Let ``latest`` name a checkpoint in which nothing is wrong.

    Returns
    -------
    list of str
        The checkpoints that are newer, which stay.

    Raises
    ------
    DataError
        If there is no such checkpoint.
    DamageError
        If something is wrong with it; ``latest`` is unchanged.
    """
    if not directory.is_dir():
        raise DataError(f"{directory}: is {'a file' if directory.exists() else 'no such directory'}")
    store = CheckpointStore(directory)
    target = store.path(tag.rstrip("/"))
    tags = [path.name for path in sorted(checkpoints_in(directory), key=_written)]
    if not target.is_dir():
        raise DataError(f"{target}: no such checkpoint; {directory} holds {', '.join(tags) or 'none'}")
    problems = verify_checkpoint(target).problems
    if problems:
        raise DamageError(f"{problems[0]}; 'latest' is unchanged")
    store.set_latest(target.name)
    return tags[tags.index(target.name) + 1 :] if target.name in tags else []
