"""What the trainer shows and writes: the memory table, the progress bar, the metrics file. Rank 0 only."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ds_galore.tools.memory import MemoryPlan


def show_memory(plan: MemoryPlan, adamw: MemoryPlan, *, optimizer: str, world_size: int) -> None:
    """Print what the largest rank will need for the model's states, beside plain AdamW."""
    table = Table(title=f"model states on each of {world_size} rank(s), without activations and buckets")
    table.add_column("")
    names = ["weights", "master weights", "gradients", "moments", "projectors", "total"]
    for name in names:
        table.add_column(name, justify="right")
    for label, each in ((optimizer, plan), ("plain AdamW", adamw)):
        values = [each.weights, each.master_weights, each.gradients, each.moments, each.projectors, each.total]
        table.add_row(label, *(size(value) for value in values))
    Console(stderr=True, width=None if sys.stderr.isatty() else 110).print(table)


def size(value: float) -> str:
    """Bytes for people: powers of 1024."""
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


class Progress:
    """A progress bar on a terminal, a line now and then elsewhere."""

    def __init__(self, steps: int, *, done: int, tokens_per_step: int, every: int, enabled: bool) -> None:
        self._enabled, self._every, self._steps = enabled, every, steps
        self._tokens_per_step = tokens_per_step
        self._bar: Any = None
        self._start, self._first, self._spent = time.monotonic(), done, 0.0
        if enabled and sys.stderr.isatty():
            from tqdm import tqdm

            shape = "{percentage:3.0f}%|{bar:20}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"
            self._bar = tqdm(total=steps, initial=done, unit="step", dynamic_ncols=True, bar_format=shape)

    def update(self, step: int, loss: float, *, seconds: float, memory: int) -> float:
        """Show step ``step``; returns tokens a second of that step, over all ranks."""
        speed = self._tokens_per_step / seconds
        self._spent += seconds
        left = self._spent / (step - self._first) * (self._steps - step)
        text = f"loss {loss:.4f}, {speed:,.0f} tokens/s, {size(memory)}"
        if self._bar is not None:
            self._bar.update(1)
            self._bar.set_postfix_str(text)
        elif self._enabled and (step % self._every == 0 or step == self._steps):
            print(f"step {step}/{self._steps} {text}, {left:.0f} s left", file=sys.stderr, flush=True)
        return speed

    def say(self, text: str) -> None:
        """Print a line of results on standard output."""
        if self._bar is not None:
            self._bar.clear()
        if self._enabled:
            print(text, flush=True)

    def close(self) -> None:
        """End the bar's line."""
        if self._bar is not None:
            self._bar.close()


class Metrics:
    """A file with one JSON object a line, appended to when a run is resumed."""

    def __init__(self, path: Path | None) -> None:
        self._file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")

    def write(self, **values: Any) -> None:
        """Append one line."""
        if self._file is not None:
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
