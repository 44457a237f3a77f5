"""The run log: one JSON object a line, appended to by the first rank; docs/monitoring.md lists the events.

Imports the standard library.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from pathlib import Path
from typing import Any

__all__ = ["RunLog"]

logger = logging.getLogger(__name__)


class RunLog:
    """Appends events to a file; safe to use from several threads.

    A log that cannot be written to must not end a run: that is said once.

    Parameters
    ----------
    path
        Of the file; its directory is made.

    Raises
    ------
    OSError
        If it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._lock = path, threading.Lock()
        self._file = path.open("a", encoding="utf-8")
        if self._file.tell() and not _ends_with_a_line(path):
            self._file.write("\n")  # what a killed job left half written is no part of the next event

    def write(self, event: str, **values: Any) -> None:
        """Append an event; numbers that JSON does not have become null."""
        line = json.dumps({"event": event, "time": round(time.time(), 3), **_plain(values)})
        with self._lock:
            try:
                self._file.write(line + "\n")
                self._file.flush()
            except (OSError, ValueError) as error:
                if self._path is not None:
                    logger.warning("%s: cannot be written to, and the log ends here: %s", self._path, error)
                self._file.close()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()


def _ends_with_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"


def _plain(value: Any) -> Any:
    """A value with what JSON has no word for replaced."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | bool | None) else str(value)
