"""Where the ranks of a save leave word for each other, without a collective: any thread may call, at any time.

Imports torch's stores and the standard library.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ds_galore.checkpoint.files import replace_file
from ds_galore.zero.group import Guard, RankGroup

__all__ = ["Board", "DirectoryBoard", "NetworkBoard"]


class Board(Protocol):
    """One save's words, by name."""

    def post(self, name: str, word: Mapping[str, Any]) -> None:
        """Leave a word, JSON; it replaces an earlier one of the name."""

    def find(self, name: str) -> Any | None:
        """What was left under a name; None as long as nothing was."""


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


class NetworkBoard:
    """Words in a ``TCPStore`` that rank 0 serves, for ranks that see no common directory. Made collectively.

    Parameters
    ----------
    group
        All ranks. Rank 0 listens on a free port of the host that ``MASTER_ADDR`` names.

    Raises
    ------
    OSError, RuntimeError
        If rank 0 cannot listen, or another cannot reach it; ``PeerError`` on the other ranks.
    """

    def __init__(self, group: RankGroup) -> None:
        host, guard = os.environ.get("MASTER_ADDR", "localhost"), Guard()
        port = torch.zeros(1, dtype=torch.int64)
        if group.rank == 0:
            with guard:
                self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
                port.fill_(self._store.port)
        port = group.broadcast(port, 0)
        if group.rank != 0 and int(port):
            with guard:
                self._store = TCPStore(host, int(port), is_master=False)
        group.vote(torch.zeros(0, dtype=torch.uint8), guard.error)

    def of(self, token: str) -> Board:
        """The words of one save."""
        return _Words(self._store, token)


class _Words:
    def __init__(self, store: TCPStore, token: str) -> None:
        self._store, self._token = store, token

    def post(self, name: str, word: Mapping[str, Any]) -> None:
        self._store.set(f"{self._token}-{name}", json.dumps(word))

    def find(self, name: str) -> Any | None:
        key = f"{self._token}-{name}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None
