"""What a run's checkpoints take on disk: arithmetic on how often it saves, and what stays."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ds_galore.errors import ConfigError

__all__ = ["Schedule", "peak_storage", "storage"]


@dataclass(frozen=True)
class Schedule:
    """How often a run saves, and what it keeps.

    Parameters
    ----------
    steps, save_every
        Steps of the run, and between two saves.
    keep_last
        How many of the newest stay; all without.
    full_every
        Every which checkpoint is full.
    keep_every
        Checkpoints after multiples of so many steps stay too.
    incremental
        Whether a difference is to the checkpoint before, and not to the last full one.
    """

    steps: int
    save_every: int
    keep_last: int | None = None
    full_every: int = 10
    keep_every: int | None = None
    incremental: bool = False


def storage(schedule: Schedule, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Bytes that a run's checkpoints take in the end, and that are written to get there."""
    for name, value in (
        ("steps", schedule.steps),
        ("save_every", schedule.save_every),
        ("full_every", schedule.full_every),
    ):
        if value < 1:
            raise ConfigError(f"{name} is {value}: it must be positive")
    if schedule.keep_last is not None and schedule.keep_last < 1:
        raise ConfigError(f"keep_last is {schedule.keep_last}: at least one checkpoint has to stay")
    saves = schedule.steps // schedule.save_every
    if not saves:
        raise ConfigError(
            f"save_every is {schedule.save_every}, and the run has {schedule.steps} steps: nothing is saved"
        )
    last = saves if schedule.keep_last is None else min(schedule.keep_last, saves)
    every = schedule.keep_every
    stays = [
        index
        for index in range(saves)
        if index >= saves - last or (every is not None and (index + 1) * schedule.save_every % every == 0)
    ]
    kept = len(stays)
    fulls = math.ceil(saves / schedule.full_every)
    files = _files(schedule, stays)
    bases = sum(1 for index in files if index % schedule.full_every == 0)
    differences = len(files) - bases
    full, diff = checkpoint["full_compressed"], checkpoint["differential_compressed"]
    return {
        "saves": saves,
        "kept": kept,
        "full_on_disk": bases,
        "differential_on_disk": differences,
        "deepspeed": kept * checkpoint["total"],
        "ours": [bases * a + differences * b for a, b in zip(full, diff, strict=True)],
        "deepspeed_written": saves * checkpoint["total"],
        "ours_written": [fulls * a + (saves - fulls) * b for a, b in zip(full, diff, strict=True)],
    }


def _files(schedule: Schedule, stays: Iterable[int]) -> set[int]:
    """What checkpoints consist of: the indices of the saves that wrote their files."""
    files: set[int] = set()
    for index in stays:
        base = index // schedule.full_every * schedule.full_every
        files |= set(range(base, index + 1)) if schedule.incremental else {base, index}
    return files


def peak_storage(schedule: Schedule, full: int, difference: int) -> int:
    """The most bytes that checkpoints take while a run goes on: those that stay, and the next one beside them.

    Parameters
    ----------
    schedule
        Of which ``keep_last`` and what kinds of checkpoints there are count.
    full, difference
        Bytes of one.
    """
    keep, every = schedule.keep_last or 1, schedule.full_every
    most = 0
    for newest in range(keep + 2 * every):  # every way in which the kept ones can lie to their bases
        files = _files(schedule, range(max(0, newest - keep), newest + 1))
        bases = sum(1 for index in files if index % every == 0)
        most = max(most, bases * full + (len(files) - bases) * difference)
    return most
