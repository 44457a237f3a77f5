"""Where each checkpoint is a save directory of its own, and somebody else removes old ones.

The Trainer writes ``checkpoint-500/global_step500``, accelerate ``checkpoints/checkpoint_3/pytorch_model``; both remove
the oldest such directory by themselves, accelerate before a save and the Trainer right after ``save_checkpoint``
returned, when the new checkpoint may still be on its way to the disk. So that the last durable checkpoint outlives
that, its files are also linked into a hidden directory beside, until a newer one is durable.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from ds_galore.checkpoint.errors import DamageError, FormatError, NotCommittedError
from ds_galore.checkpoint.files import replace_file, sync_directory
from ds_galore.checkpoint.manifest import MANIFEST
from ds_galore.checkpoint.reader import CheckpointReader

__all__ = ["KEPT", "is_rotated", "keep_copy", "kept_copy", "newest_intact_sibling", "try_to_keep"]

logger = logging.getLogger(__name__)

#: The hidden directory beside rotated ones.
KEPT = ".ds_galore-last-durable"
_ROTATED = re.compile(r"checkpoint[-_]\d+")


def is_rotated(save_dir: Path) -> bool:
    """Whether a save directory is named as those that the Trainer and accelerate rotate."""
    return _ROTATED.fullmatch(save_dir.name) is not None


def _kept_root(save_dir: Path) -> Path:
    # accelerate takes everything in its "checkpoints" for one of them.
    parent = save_dir.absolute().parent
    return (parent.parent if parent.name == "checkpoints" else parent) / KEPT


def kept_copy(save_dir: Path) -> Path:
    """Where the copy of a rotated save directory is, if it is the last durable one."""
    return _kept_root(save_dir) / save_dir.name


def keep_copy(save_dir: Path) -> None:
    """Link everything in a save directory into its kept copy, and remove the copies of others.

    A copy has the directory's name once it is complete. Files that cannot be linked are copied.
    """
    target, root = kept_copy(save_dir), _kept_root(save_dir)
    fresh = root / f".making-{save_dir.name}"
    root.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(save_dir, fresh, copy_function=_link_or_copy)
    for made in (fresh, *(path for path in fresh.rglob("*") if path.is_dir())):
        sync_directory(made)
    old = root / f".old-{save_dir.name}"
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    fresh.rename(target)
    sync_directory(root)
    sync_directory(root.parent)
    for other in root.iterdir():
        if other != target:
            shutil.rmtree(other, ignore_errors=True)


def _link_or_copy(source: str, target: str) -> None:
    try:
        if (
            Path(source).stat().st_size < 2**16
        ):  # small files may be written over in place; large ones are only replaced
            raise OSError
        os.link(source, target)
    except OSError:
        with Path(source).open("rb") as file:  # durably: the original may be removed right after
            replace_file(Path(target), iter(lambda: file.read(2**22), b""))
        shutil.copystat(source, target)


def _tags(save_dir: Path) -> Iterator[Path]:
    try:
        yield from (path for path in save_dir.iterdir() if (path / MANIFEST).is_file())
    except OSError:
        return


def newest_intact_sibling(save_dir: Path) -> Path | None:
    """The newest checkpoint in the directories beside a save directory, or kept, in which nothing is wrong.

    Returns
    -------
    Path or None
        The checkpoint's directory. Everything in those that are tried is read and decoded.
    """
    parent = save_dir.absolute().parent
    places = [path for path in _children(parent) if is_rotated(path)] + list(_children(_kept_root(save_dir)))
    found = [tag for place in places if place.name != save_dir.name or KEPT in place.parts for tag in _tags(place)]
    for tag in sorted(found, key=lambda path: (path / MANIFEST).stat().st_mtime_ns, reverse=True):
        try:
            if not CheckpointReader(tag).verify():
                return tag
        except (DamageError, FormatError, NotCommittedError):
            continue
    return None


def _children(directory: Path) -> Iterator[Path]:
    try:
        yield from (path for path in directory.iterdir() if path.is_dir())
    except OSError:
        return


def try_to_keep(save_dir: Path) -> None:
    """As :func:`keep_copy`; what goes wrong is logged."""
    try:
        keep_copy(save_dir)
    except OSError as error:
        logger.warning(
            "%s: could not be linked beside, in case it is removed before the next is durable: %s", save_dir, error
        )
