"""The log that ds_galore writes beside a run, ``ds_galore.jsonl``: one JSON object a line, each an event.

A log ends wherever its job was killed: lines that cannot be read are counted and left out. Imports neither torch nor
DeepSpeed, and no plotting.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ds_galore.checkpoint.manifest import KINDS
from ds_galore.tools.report.curves import as_number, as_step
from ds_galore.tools.report.runs import KINDS_OF_MEMORY, Note, Refresh, Run, Save, Start

__all__ = ["read_log", "take_objects"]


def take_objects(run: Run, path: Path, take: Callable[[dict[str, Any]], bool]) -> None:
    """Give every line's object to ``take``, which tells whether it made sense of it; count those that are none."""
    try:
        file = path.open("rb")
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        run.problems.append(f"{path.name}: cannot be read: {error.strerror}")
        return
    run.sources.append(path.name)
    damaged = 0
    with file:
        try:
            for line in file:
                if line.strip():
                    found = _object(line)
                    damaged += found is None or not take(found)
        except OSError as error:
            run.problems.append(f"{path.name}: cannot be read to its end: {error.strerror}")
    if damaged:
        run.damaged[path.name] = damaged


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def read_log(run: Run, path: Path) -> None:
    """Starts, refreshes, saves and warnings; of two lines about one step the later one counts."""
    saves: dict[int, Save] = {}
    notes: dict[tuple[int | None, str], Note] = {}

    def take(line: dict[str, Any]) -> bool:
        step = as_step(line.get("step"))
        match line.get("event"):
            case "start":
                if step is None:
                    return False
                run.starts.append(_start(line, step))
                _forget(run, step)
            case "refresh":
                return step is not None and _refresh(run, step, line)
            case "save" | "save_failed":
                save = None if step is None else _save(line, step)
                if save is None:
                    return False
                saves[save.step] = save
            case "warning":
                message = line.get("message")
                if not isinstance(message, str):
                    return False
                notes[step, message] = Note(step, message)
        return True  # events that later versions may write are no damage

    take_objects(run, path, take)
    run.saves.extend(saves.values())
    run.notes.extend(notes.values())


def _forget(run: Run, step: int) -> None:
    """What was refreshed after the step from which the run goes on is no longer part of it."""
    run.refresh_seconds = {each: seconds for each, seconds in run.refresh_seconds.items() if each <= step}
    for name, by_step in list(run.refreshes.items()):
        run.refreshes[name] = {each: refresh for each, refresh in by_step.items() if each <= step}
        if not run.refreshes[name]:
            del run.refreshes[name]


def _start(line: Mapping[str, Any], step: int) -> Start:
    config = line.get("config")
    return Start(
        step,
        _text(line.get("version")),
        as_step(line.get("world_size")),
        as_step(line.get("zero_stage")),
        _text(line.get("optimizer")),
        config if isinstance(config, dict) else None,
        _memory(line.get("memory")),
    )


def _memory(value: object) -> dict[str, dict[str, int]]:
    if not isinstance(value, dict):
        return {}
    plans = {}
    for name, kinds in value.items():
        if isinstance(kinds, dict):
            sizes = {kind: as_step(kinds.get(kind)) for kind in KINDS_OF_MEMORY}
            plans[name] = {kind: size for kind, size in sizes.items() if size is not None}
    return {name: sizes for name, sizes in plans.items() if any(sizes.values())}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _refresh(run: Run, step: int, line: Mapping[str, Any]) -> bool:
    matrices = line.get("matrices")
    if not isinstance(matrices, dict):
        return False
    seconds = _finite(line.get("seconds"))
    if seconds is not None:
        run.refresh_seconds[step] = seconds
    for name, each in matrices.items():
        if not isinstance(each, dict):
            return False
        found = Refresh(_finite(each.get("energy")), _finite(each.get("overlap")), as_step(each.get("rank")))
        run.refreshes.setdefault(name, {})[step] = found
    return True


def _finite(value: object) -> float | None:
    number = as_number(value)
    return None if number is None or math.isnan(number) else number


def _save(line: Mapping[str, Any], step: int) -> Save | None:
    tag, kind = line.get("tag"), line.get("kind")
    if not isinstance(tag, str):
        return None
    if line["event"] == "save_failed":
        return Save(step, tag, "failed", message=_text(line.get("message")) or "")
    if kind not in KINDS:
        return None
    size, logical, ratio = (_finite(line.get(key)) for key in ("bytes", "logical_bytes", "ratio"))
    if ratio is None and size and logical:
        ratio = logical / size
    return Save(step, tag, kind, size, logical, ratio, _finite(line.get("stall")), _finite(line.get("seconds")))
