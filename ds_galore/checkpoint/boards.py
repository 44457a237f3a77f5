"""Where the ranks of a save leave word for each other, without a collective: any thread may call, at any time.

Imports torch's stores and the standard library.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ds_galore.checkpoint.files import replace_file
from ds_galore.zero.group import Guard, RankGroup

__all__ = ["Board", "DirectoryBoard", "NetworkBoard", "serve"]


class Board(Protocol):
    """One save's words, by name."""

    def post(self, name: str, word: Mapping[str, Any]) -> None:
        """Leave a word, JSON; it replaces an earlier one of the name."""

    def find(self, name: str) -> Any | None:
        """What was left under a name; None as long as nothing was."""

    def forget(self, names: Iterable[str]) -> None:
        """Once everybody has read them, have words take no memory any more."""


class DirectoryBoard:
    """Words as files in the checkpoint's directory, which all ranks see; the next commit there removes them.

    Parameters
    ----------
    directory
        Of the checkpoint.
    token
        Tells the save from any other.
    """

    def __init__(self, directory: Path, token: str) -> None:
        self._directory, self._token = directory, token

    def _path(self, name: str) -> Path:
        return self._directory / f".done-{self._token}-{name}"

    def post(self, name: str, word: Mapping[str, Any]) -> None:
        """Leave a word durably."""
        replace_file(self._path(name), [json.dumps(word).encode()])

    def find(self, name: str) -> Any | None:
        """What was left under a name; None as long as nothing was."""
        try:
            return json.loads(self._path(name).read_bytes())
        except FileNotFoundError:
            return None

    def forget(self, names: Iterable[str]) -> None:
        """Nothing: the commit has removed the files."""


class NetworkBoard:
    """Words in a store that rank 0 serves, for ranks that see no common directory.

    Parameters
    ----------
    store
        What :func:`serve` gave.
    token
        Tells the save from any other.
    """

    def __init__(self, store: TCPStore, token: str) -> None:
        self._store, self._token = store, token

    def post(self, name: str, word: Mapping[str, Any]) -> None:
        """Leave a word."""
        self._store.set(f"{self._token}-{name}", json.dumps(word))

    def find(self, name: str) -> Any | None:
        """What was left under a name; None as long as nothing was."""
        key = f"{self._token}-{name}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def forget(self, names: Iterable[str]) -> None:
        """Have words take no memory any more."""
        for name in names:
            self._store.delete_key(f"{self._token}-{name}")


def serve(group: RankGroup) -> TCPStore:
    """A store on rank 0, which listens on a free port of the host that ``MASTER_ADDR`` names. Collective.

    Raises
    ------
    OSError, RuntimeError
        If rank 0 cannot listen, or this rank cannot reach it; ``PeerError`` if that is so on another rank.
    """
    host, guard = os.environ.get("MASTER_ADDR", "localhost"), Guard()
    store, port = None, torch.zeros(1, dtype=torch.int64)
    if group.rank == 0:
        with guard:
            store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
            port.fill_(store.port)
    port = group.broadcast(port, 0)
    if group.rank != 0 and int(port):
        with guard:
            store = TCPStore(host, int(port), is_master=False)
    group.agree([], guard.error)
    assert store is not None
    return store
