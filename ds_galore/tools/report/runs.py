"""What is known about a run: pure data, whatever files it came from. Imports the standard library."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ds_galore.tools.report.curves import Curve, rounded

__all__ = ["CURVES", "KINDS_OF_MEMORY", "Note", "Refresh", "Run", "Save", "Start", "summary"]

#: Names of curves.
CURVES = ("loss", "validation_loss", "lr", "grad_norm", "tokens_per_s", "seconds", "memory_bytes")
KINDS_OF_MEMORY = ("weights", "master_weights", "gradients", "moments", "projectors")
#: Kinds of saves that are checkpoints.
SAVED = ("full", "differential", "incremental", "native", "universal")


@dataclass(frozen=True)
class Start:
    """A start of the job, or a resume of it.

    Parameters
    ----------
    step
        Where it goes on.
    memory
        By optimizer and kind, bytes on the largest rank.
    """

    step: int
    version: str | None
    world_size: int | None
    zero_stage: int | None
    optimizer: str | None
    config: Mapping[str, Any] | None
    memory: Mapping[str, Mapping[str, int]]


class Refresh(NamedTuple):
    """A basis that was renewed: the share of the gradient it captures, and how much of the old one is in it."""

    energy: float | None
    overlap: float | None
    rank: int | None


@dataclass(frozen=True)
class Save:
    """A checkpoint, or an attempt at one.

    Parameters
    ----------
    kind
        One of :data:`SAVED`, or ``"failed"``.
    stall, seconds
        That training stood still, and until it was durable.
    bytes, logical_bytes
        Written, and what DeepSpeed's own checkpoint would have been.
    on_disk
        Whether it was found in the run's directory.
    """

    step: int
    tag: str
    kind: str
    bytes: float | None = None
    logical_bytes: float | None = None
    ratio: float | None = None
    stall: float | None = None
    seconds: float | None = None
    message: str = ""
    on_disk: bool = False


@dataclass(frozen=True)
class Note:
    """A warning in the log."""

    step: int | None
    message: str


@dataclass
class Run:
    """All that was found of a run.

    Parameters
    ----------
    unit
        What curves go over: ``"step"``, or ``"sample"`` where DeepSpeed's CSV monitor is all there is and the global
        batch is not known.
    refreshes
        By matrix and step.
    refresh_seconds
        By step.
    damaged
        By file, lines that could not be read.
    problems
        Other things that could not be read, in words.
    sources
        Names of the files and directories it is made of.
    """

    name: str
    directory: Path
    unit: str = "step"
    curves: dict[str, Curve] = field(default_factory=lambda: {name: Curve() for name in CURVES})
    starts: list[Start] = field(default_factory=list)
    refreshes: dict[str, dict[int, Refresh]] = field(default_factory=dict)
    refresh_seconds: dict[int, float] = field(default_factory=dict)
    saves: list[Save] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    damaged: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show."""
        logged = self.starts or self.refreshes or self.saves or self.notes
        return not logged and not any(len(curve) for curve in self.curves.values())

    @property
    def config(self) -> Mapping[str, Any] | None:
        """The newest configuration."""
        return next((start.config for start in reversed(self.starts) if start.config is not None), None)

    @property
    def memory(self) -> Mapping[str, Mapping[str, int]]:
        """The newest plan of memory."""
        return next((start.memory for start in reversed(self.starts) if start.memory), {})

    @property
    def resumes(self) -> list[int]:
        """Steps from which the run went on."""
        return [start.step for start in self.starts if start.step > 0]

    @property
    def last_step(self) -> int | None:
        """The last step of which anything is known."""
        curves = () if self.unit != "step" else self.curves.values()
        steps = [curve.steps[-1] for curve in curves if len(curve)]
        steps += [max(by_step) for by_step in self.refreshes.values() if by_step]
        steps += [save.step for save in self.saves] + [start.step for start in self.starts]
        return max(steps, default=None)


def _last(curve: Curve) -> float | None:
    """The last value; None if it is not finite, as a loss that the run ended on may be."""
    return rounded(curve.values[-1]) if len(curve) else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def summary(run: Run) -> dict[str, Any]:
    """What was found, in numbers for JSON: None where there is nothing to tell."""
    loss, validation, speed = (run.curves[name].finite() for name in ("loss", "validation_loss", "tokens_per_s"))
    best = min(validation, key=lambda point: point[1], default=None)
    broken = run.curves["loss"].broken()
    kinds = Counter(save.kind for save in run.saves)
    newest = run.starts[-1] if run.starts else None
    written, logical, stall = (_total(run, key) for key in ("bytes", "logical_bytes", "stall"))
    seconds = list(run.refresh_seconds.values())
    energies, overlaps = (latest_mean(run, key) for key in ("energy", "overlap"))
    return {
        "name": run.name,
        "directory": str(run.directory),
        "sources": run.sources,
        "step": run.last_step,
        "unit": run.unit,
        "last_loss": _last(run.curves["loss"]),
        "lowest_loss": rounded(min(loss.values, default=None)),
        "not_finite_losses": len(broken),
        "first_not_finite_loss": broken[0] if broken else None,
        "last_validation_loss": _last(run.curves["validation_loss"]),
        "best_validation_loss": rounded(best[1]) if best else None,
        "best_validation_step": best[0] if best else None,
        "tokens_per_s": rounded(statistics.median(speed.values)) if len(speed) else None,
        "peak_memory_bytes": _whole(max(run.curves["memory_bytes"].finite().values, default=None)),
        "optimizer": newest.optimizer if newest else None,
        "world_size": newest.world_size if newest else None,
        "zero_stage": newest.zero_stage if newest else None,
        "version": newest.version if newest else None,
        "resumes": run.resumes,
        "refreshes": len({step for by_step in run.refreshes.values() for step in by_step}),
        "matrices": len(run.refreshes),
        "captured_energy": rounded(energies),
        "basis_overlap": rounded(overlaps),
        "refresh_seconds": rounded(statistics.mean(seconds)) if seconds else None,
        "checkpoints": {kind: kinds[kind] for kind in SAVED if kinds[kind]},
        "checkpoints_on_disk": sum(save.on_disk for save in run.saves),
        "failed_saves": kinds["failed"],
        "written_bytes": _whole(written),
        "logical_bytes": _whole(logical),
        "ratio": overall_ratio(run),
        "stall_seconds": rounded(stall),
        "warnings": len(run.notes),
        "damaged_lines": dict(run.damaged),
        "problems": list(run.problems),
    }


def overall_ratio(run: Run) -> float | None:
    """What DeepSpeed's own checkpoints would have been over what was written, of saves of which both are known."""
    pairs = [(save.bytes, save.logical_bytes) for save in run.saves if save.bytes and save.logical_bytes]
    return rounded(sum(b for _, b in pairs if b) / sum(a for a, _ in pairs if a), 4) if pairs else None


def _total(run: Run, key: str) -> float | None:
    values = [getattr(save, key) for save in run.saves if getattr(save, key) is not None]
    return sum(values) if values else None


def latest_mean(run: Run, key: str) -> float | None:
    """The mean over matrices of each one's latest energy or overlap."""
    found = []
    for by_step in run.refreshes.values():
        values = [value for _, each in sorted(by_step.items()) if (value := getattr(each, key)) is not None]
        found += values[-1:]
    return statistics.mean(found) if found else None
