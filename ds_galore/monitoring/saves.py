"""What became of a save: how long training stood still, how long it took, how much was written.

Imports the standard library.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["SaveRecord"]


@dataclass
class SaveRecord:
    """A save on the first rank, from its beginning; the thread that trains and the one that writes both add to it.

    Parameters
    ----------
    step, tag, kind
        Of the checkpoint.
    tell
        Told of the record once ``save_checkpoint`` has returned and the save has ended, by the thread that comes last.
    stall
        Seconds that ``save_checkpoint`` took.
    seconds
        From its beginning until the checkpoint was durable on all ranks.
    bytes, logical_bytes
        Written by all ranks; and what the tensors are that the checkpoint holds.
    error
        What went wrong, or None.
    """

    step: int
    tag: str
    kind: str
    tell: Callable[[SaveRecord], None]
    stall: float | None = None
    seconds: float | None = None
    bytes: int = 0
    logical_bytes: int = 0
    error: str | None = None
    begin: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _told: bool = False

    @property
    def ratio(self) -> float | None:
        """How many times smaller the checkpoint is than what it holds."""
        return self.logical_bytes / self.bytes if self.bytes else None

    def returned(self, stall: float) -> None:
        """``save_checkpoint`` has returned."""
        self.stall = stall
        self._settle()

    def durable(self, written: int, logical: int) -> None:
        """The checkpoint is committed."""
        self.seconds, self.bytes, self.logical_bytes = time.monotonic() - self.begin, written, logical
        self._settle()

    def failed(self, error: str) -> None:
        """It will not be."""
        self.error = error
        self._settle()

    def _settle(self) -> None:
        with self._lock:
            ready = self.error is not None or (self.stall is not None and self.seconds is not None)
            if self._told or not ready:
                return
            self._told = True
        self.tell(self)
