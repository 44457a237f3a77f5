"""Watching an engine's run: refreshes, saves, and signs of trouble.

Values go through DeepSpeed's own monitor, to whatever the configuration enables there, named as DeepSpeed names its
own; everything goes into the run log, where the configuration asks for one. Sending happens in the thread that trains.
Seen in DeepSpeed 0.19.8.
"""

from __future__ import annotations

import functools
import logging
import math
import statistics
import weakref
from collections import deque
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_galore import __version__
from ds_galore.config import MonitorConfig
from ds_galore.errors import ConfigError
from ds_galore.monitoring.accounting import memory_by_kind
from ds_galore.monitoring.log import RunLog
from ds_galore.monitoring.saves import SaveRecord
from ds_galore.optim.optimizer import LowRankOptimizer
from ds_galore.optim.watching import Refreshed, Watch
from ds_galore.zero.group import RankGroup

__all__ = ["Monitor"]

logger = logging.getLogger(__name__)

#: A warning is given each time that the captured energy has fallen to this share of what it was at the last one.
ENERGY_FALL = 0.75
#: Seconds that a save may wait for the one before, until that is worth a warning.
PATIENCE = 0.1


class Monitor:
    """Watches one engine.

    Collective, as everything that builds an engine is.

    Parameters
    ----------
    engine
        DeepSpeed's; its ``backward`` and ``step`` are wrapped.
    settings
        The ``ds_galore.monitor`` section.

    Raises
    ------
    ConfigError
        If the log cannot be written to, on all ranks.
    """

    def __init__(self, engine: Any, settings: MonitorConfig) -> None:
        self._engine = weakref.ref(engine)
        self._first = dist.get_rank() == 0
        self._log: RunLog | None = None
        with RankGroup(dist.group.WORLD).together():
            if settings.log is not None and self._first:
                try:
                    self._log = RunLog(Path(settings.log))
                except OSError as error:
                    raise ConfigError(
                        f"ds_galore.monitor.log is {settings.log!r}: cannot be written to: {error.strerror}"
                    ) from None
        self._watch: Watch | None = None
        if isinstance(engine.basic_optimizer, LowRankOptimizer):
            self._watch = engine.basic_optimizer.watch = Watch()
        self._steps = engine.global_steps
        self._loss: Any = None
        self._was_finite = True
        self._energies: dict[str, float] = {}
        self._reference: float | None = None
        self._saved: deque[SaveRecord] = deque()
        self._wrap(engine)

    @classmethod
    def wanted(cls, engine: Any, settings: MonitorConfig | None) -> MonitorConfig | None:
        """The settings of a monitor for this engine, or None if the configuration asks for none."""
        if settings is None and engine.monitor.enabled:
            return MonitorConfig()
        return settings

    def _wrap(self, engine: Any) -> None:
        backward, step = engine.backward, engine.step

        @functools.wraps(backward)
        def watched_backward(loss: Any, *args: Any, **kwargs: Any) -> Any:
            self._loss = loss.detach() if hasattr(loss, "detach") else None
            return backward(loss, *args, **kwargs)

        @functools.wraps(step)
        def watched_step(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            self.after_step()
            return result

        engine.backward, engine.step = watched_backward, watched_step

    def start(self) -> None:
        """Log what is about to run; once the engine is built."""
        engine = self._engine()
        if self._log is None or engine is None:
            return
        world_size = dist.get_world_size()
        self._log.write(
            "start",
            version=__version__,
            world_size=world_size,
            zero_stage=int(engine.zero_optimization_stage()),
            optimizer=type(engine.basic_optimizer).__name__,
            step=engine.global_steps,
            config=engine._config._param_dict,
            memory=self._memory(engine, world_size),
        )

    @staticmethod
    def _memory(engine: Any, world_size: int) -> dict[str, dict[str, int]] | None:
        """By kind; None for an engine whose tensors are laid out as we do not know, of which only this rank asks."""
        try:
            return memory_by_kind(engine, world_size)
        except (AttributeError, IndexError, TypeError, StopIteration):
            return None

    # ------------------------------------------------------------------ steps

    def after_step(self) -> None:
        """Tell what has happened since the last optimizer step."""
        engine = self._engine()
        if engine is None or engine.global_steps == self._steps:
            return
        if engine.global_steps == self._steps + 1:
            self._check_loss(engine.global_steps)
        self._steps = engine.global_steps
        if self._watch is not None:
            refreshed, seconds = self._watch.take()
            if refreshed and self._first:
                self._tell_refreshes(engine, refreshed, seconds)
        while self._saved:
            self._send_save(engine, self._saved.popleft())

    def _check_loss(self, step: int) -> None:
        finite = self._loss is None or math.isfinite(float(self._loss))
        if not finite and self._was_finite:
            self.warn(step, f"the loss on rank {dist.get_rank()} is {float(self._loss)}")
        self._was_finite, self._loss = finite, None

    def _tell_refreshes(self, engine: Any, refreshed: list[Refreshed], seconds: float) -> None:
        if self._log is not None:
            matrices = {
                each.name: {"energy": _short(each.energy), "overlap": _short(each.overlap), "rank": each.rank}
                for each in refreshed
            }
            self._log.write("refresh", step=engine.global_steps, seconds=round(seconds, 4), matrices=matrices)
        values = {"refreshed_matrices": float(len(refreshed)), "refresh_seconds": seconds}
        for name, found in (
            ("captured_energy", [each.energy for each in refreshed if each.energy is not None]),
            ("basis_overlap", [each.overlap for each in refreshed if each.overlap is not None]),
        ):
            if found:
                values[name], values[f"{name}_least"] = statistics.fmean(found), min(found)
        self._send(engine, {f"GaLore/{name}": value for name, value in values.items()})
        self._check_energy(engine.global_steps, refreshed)

    def _check_energy(self, step: int, refreshed: list[Refreshed]) -> None:
        """Warn when the bases capture much less than they once did."""
        again = [each for each in refreshed if each.name in self._energies]
        self._energies.update({each.name: each.energy for each in refreshed if each.energy is not None})
        if not self._energies:
            return
        mean = statistics.fmean(self._energies.values())
        if self._reference is None or not again:
            self._reference = mean
        elif mean < ENERGY_FALL * self._reference:
            self.warn(
                step,
                f"the bases capture {mean:.0%} of the gradients' energy, and captured {self._reference:.0%}: a larger"
                " rank or a smaller update_proj_gap may be needed",
            )
            self._reference = mean

    # ------------------------------------------------------------------ saves

    def record(self, step: int, tag: str, kind: str) -> SaveRecord:
        """A record of a save that begins."""
        return SaveRecord(step, tag, kind, self._ended)

    def waited(self, step: int, seconds: float) -> None:
        """A save had to wait for the one before."""
        if seconds > PATIENCE:
            self.warn(
                step,
                f"the save before was still being written, and training waited {seconds:.1f} s for it: saves are closer"
                " together than a save takes",
            )

    def _ended(self, record: SaveRecord) -> None:
        """Log a save; in whichever thread it ended."""
        if not self._first:
            return
        if self._log is not None and record.error is not None:
            self._log.write("save_failed", step=record.step, tag=record.tag, message=record.error)
        elif self._log is not None:
            self._log.write(
                "save",
                step=record.step,
                tag=record.tag,
                kind=record.kind,
                stall=_short(record.stall),
                seconds=_short(record.seconds),
                bytes=record.bytes,
                logical_bytes=record.logical_bytes,
                ratio=_short(record.ratio),
            )
        self._saved.append(record)

    def flush(self) -> None:
        """Send what has ended since the last step."""
        engine = self._engine()
        while engine is not None and self._saved:
            self._send_save(engine, self._saved.popleft())

    def _send_save(self, engine: Any, record: SaveRecord) -> None:
        if record.error is not None:
            self._send(engine, {"Checkpoint/failed": 1.0})
            return
        values = {
            "stall_seconds": record.stall,
            "seconds": record.seconds,
            "bytes": float(record.bytes),
            "ratio": record.ratio,
        }
        self._send(engine, {f"Checkpoint/{key}": value for key, value in values.items() if value is not None})

    # ------------------------------------------------------------------ both

    def warn(self, step: int, message: str) -> None:
        """Log a warning, here and in the run log."""
        logger.warning("step %d: %s", step, message)
        if self._log is not None:
            self._log.write("warning", step=step, message=message)

    def _send(self, engine: Any, values: dict[str, float]) -> None:
        if not (engine.monitor.enabled and self._first):
            return
        events = [(f"Train/{name}", value, engine.global_samples) for name, value in values.items()]
        try:
            engine.monitor.write_events(events)
        except Exception as error:  # noqa: BLE001 - raised on this rank alone, it would leave the others waiting
            logger.warning("step %d: DeepSpeed's monitor failed: %s", engine.global_steps, error)


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 5)
