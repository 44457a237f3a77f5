"""Checking checkpoints, and going back to an intact one.

Imports NumPy and its neighbours; neither torch nor DeepSpeed.
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from ds_galore.checkpoint.errors import DamageError, FormatError, NotCommittedError
from ds_galore.checkpoint.manifest import MANIFEST
from ds_galore.checkpoint.reader import CheckpointReader
from ds_galore.checkpoint.store import CheckpointStore
from ds_galore.errors import ConfigError, DataError
from ds_galore.tools.native import TorchSource
from ds_galore.tools.source import open_source

__all__ = ["Verification", "rollback", "verify_checkpoint"]


@dataclass
class Verification:
    """What was found in a checkpoint.

    Parameters
    ----------
    directory
        Of the checkpoint.
    problems
        What is wrong, by file and tensor; empty if nothing is.
    checked
        How many ranges of tensors were decoded, of ``ranges``.
    newest_intact
        Where something is wrong: the tag of the newest other checkpoint in the save directory in which nothing is.
    """

    directory: str
    problems: list[str] = field(default_factory=list)
    checked: int = 0
    ranges: int = 0
    newest_intact: str | None = None


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
    found = Verification(str(directory))
    try:
        if (directory / MANIFEST).exists():
            reader = CheckpointReader(directory)
            found.problems = reader.verify(quick=quick, sample=sample)
            found.ranges = sum(len(tensor.shards) for tensor in reader.tensors.values()) if not found.problems else 0
            found.checked = 0 if quick else -(-(found.ranges - part + 1) // parts)
        else:
            _verify_native(directory, found, quick, sample)
    except (DamageError, FormatError, NotCommittedError) as error:
        found.problems.append(str(error))
    if found.problems:
        others = (tag for tag in CheckpointStore(directory.parent).intact() if tag != directory.name)
        found.newest_intact = next(others, None)
    return found


def _verify_native(directory: Path, found: Verification, quick: bool, sample: tuple[int, int]) -> None:
    source = open_source(directory)
    assert isinstance(source, TorchSource)
    found.ranges = len(source.weights) + len(source.optimizer)
    if quick:
        return
    part, parts = sample
    for number, path in enumerate(sorted(directory.rglob("*.pt"))):
        if number % parts != part - 1:
            continue
        with zipfile.ZipFile(path) as archive:
            try:
                bad = archive.testzip()
            except (zipfile.BadZipFile, zlib.error, OSError, EOFError) as error:
                bad = str(error)
        if bad is not None:
            found.problems.append(f"{path}: is damaged at {bad}")
    found.checked = found.ranges


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
        raise DataError(f"{directory}: no such directory")
    store = CheckpointStore(directory)
    target = store.path(tag)
    if not target.is_dir():
        raise DataError(f"{target}: no such checkpoint; {directory} holds {', '.join(store.tags()) or 'none'}")
    problems = verify_checkpoint(target).problems
    if problems:
        raise DamageError(f"{problems[0]}; 'latest' is unchanged")
    tags = store.tags()
    store.set_latest(tag)
    return tags[tags.index(tag) + 1 :] if tag in tags else []
