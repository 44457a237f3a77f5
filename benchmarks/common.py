"""What the benchmarks share: turns, ratios, what they ran on, and where results go.

Each benchmark writes its results as JSON to ``runs/bench``, with what it ran on and the command that repeats it;
``report.py`` makes docs/benchmarks.md of them. A quick run writes nothing: it shows that a benchmark still runs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "RESULTS",
    "ROOT",
    "adam_direction",
    "arguments",
    "bytes_of",
    "machine",
    "median_ratio",
    "spread",
    "take_turns",
    "write",
]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "runs" / "bench"
PACKAGES = (
    *("torch", "deepspeed", "transformers", "bitsandbytes", "zstandard"),
    *("galore-torch", "apollo-torch", "zipnn", "z4ai"),
)


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with what every benchmark has."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small and few, to see that it runs; judges nothing")
    parser.add_argument("--output", type=Path, help="where results go, as JSON (default runs/bench/NAME.json)")
    return parser


def adam_direction(
    low: Any, exp_avg: Any, exp_avg_sq: Any, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6
) -> None:
    """Adam's bare arithmetic in a step's floor: the moments take a gradient in, and the direction takes its place."""
    import torch

    exp_avg.lerp_(low, 1.0 - betas[0])
    exp_avg_sq.mul_(betas[1]).addcmul_(low, low, value=1.0 - betas[1])
    torch.sqrt(exp_avg_sq, out=low)
    torch.div(exp_avg, low.add_(eps), out=low)


def machine() -> dict[str, Any]:
    """Versions and the machine."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    model = platform.processor() or platform.machine()
    cpu = Path("/proc/cpuinfo")
    if cpu.exists():
        names = [line.partition(":")[2].strip() for line in cpu.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {"versions": versions, "cpu": model, "cores": os.cpu_count(), "day": time.strftime("%Y-%m-%d")}


def take_turns(
    works: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each in each round, after one to warm up; who begins rotates."""
    times: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for number in range(-1, rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            begin = clock()
            works[name]()
            if number >= 0:
                times[name].append(clock() - begin)
    return times


def bytes_of(value: object) -> int:
    """Bytes of the tensors in an optimizer's state, galore-torch's projectors included.

    Counters of steps are left out, and the tables and shared tensors that bitsandbytes keeps beside its states.
    """
    if hasattr(value, "element_size"):
        numel = int(value.numel())  # type: ignore[attr-defined]
        return numel * int(value.element_size()) if numel > 1 else 0
    if isinstance(value, Mapping):
        return sum(bytes_of(each) for key, each in value.items() if key not in ("qmap1", "qmap2", "params"))
    return bytes_of(value.ortho_matrix) if hasattr(value, "ortho_matrix") else 0


def median_ratio(taken: Sequence[float], others: Sequence[float]) -> float:
    """The median of the ratios within a round, so that a slow moment of the machine falls on both."""
    return statistics.median(one / other for one, other in zip(taken, others, strict=True))


def spread(taken: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest, in seconds."""
    return {"seconds": statistics.median(taken), "least": min(taken), "greatest": max(taken)}


def write(name: str, options: argparse.Namespace, found: Any) -> None:
    """Keep results, unless they are of a quick run."""
    if options.quick:
        return
    path = options.output or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    words = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
    command = shlex.join([os.path.relpath(sys.argv[0], ROOT), *words])
    if "WORLD_SIZE" in os.environ:
        command = f"deepspeed --num_accelerators {os.environ['WORLD_SIZE']} {command}"
    path.write_text(json.dumps({"command": command, **machine(), "found": found}, indent=1) + "\n")
    print(f"written to {path}", file=sys.stderr)
