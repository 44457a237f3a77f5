"""Which checkpoint a load takes, and what else it could take.

Imports torch and its neighbours.
"""

from __future__ import annotations

import contextlib
import logging

import torch.distributed as dist

from ds_galore.checkpoint.loading import is_placeholder
from ds_galore.checkpoint.manifest import MANIFEST
from ds_galore.checkpoint.nodes import Nodes
from ds_galore.checkpoint.siblings import is_rotated, newest_intact_sibling
from ds_galore.checkpoint.store import CheckpointStore
from ds_galore.zero.group import RankGroup

__all__ = ["is_ours", "latest_or_unfinished", "other_than"]

logger = logging.getLogger(__name__)

#: Words about a checkpoint, and its tag if it is in the same save directory.
Other = tuple[str, str | None]
_LOOKING = "%s: cannot be loaded; looking for the newest intact checkpoint"
_NONE: Other = ("no intact checkpoint is beside it", None)


def latest_or_unfinished(store: CheckpointStore) -> str | None:
    """What ``latest`` names; without it, the unfinished checkpoint in a save directory that is to hold one.

    The Trainer takes the newest of its directories, finished or not. Elsewhere a run that died in its first save has no
    checkpoint, which DeepSpeed tells by returning None.
    """
    latest = store.latest()
    if latest is None and is_rotated(store.directory) and store.directory.is_dir():
        found = sorted(path.name for path in store.directory.glob("global_step*") if path.is_dir())
        return next((name for name in found if is_ours(store, name)), None)
    return latest


def is_ours(store: CheckpointStore, tag: str) -> bool:
    """Whether a checkpoint is of our format, finished or not, or missing: that is told here as well."""
    directory = store.path(tag)
    return (directory / MANIFEST).exists() or all(is_placeholder(path) for path in directory.glob("*_states.pt"))


def other_than(
    store: CheckpointStore, tag: str, tried: set[str], group: RankGroup, nodes: Nodes | None = None
) -> Other:
    """What else could be loaded, the same on all ranks. Collective.

    Parameters
    ----------
    store, tag
        What could not be loaded.
    tried
        Tags of the store that are not to be named.
    nodes
        Where each has storage of its own.
    """
    if nodes is not None:
        if group.rank == 0:
            logger.warning(_LOOKING, store.path(tag))
        newest = nodes.newest_intact(store, frozenset(tried))
        return _NONE if newest is None else _found(store, newest)
    found: list[Other] = [_NONE]
    with group.together(), contextlib.suppress(OSError):  # one rank searches; the others must not wait in vain
        if group.rank == 0:
            found = [_search(store, tag, tried)]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def _found(store: CheckpointStore, tag: str) -> Other:
    return f"the newest intact checkpoint is {store.path(tag)}", tag


def _search(store: CheckpointStore, tag: str, tried: set[str]) -> Other:
    logger.warning(_LOOKING, store.path(tag))
    other = next((each for each in store.intact() if each not in tried), None)
    if other is not None:
        return _found(store, other)
    sibling = newest_intact_sibling(store.directory)
    return _NONE if sibling is None else (f"the newest intact checkpoint is {sibling}", None)
