"""Directories of runs as jobs leave them: small ones, written by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

GALORE = {"weights": 4000, "master_weights": 2000, "gradients": 2000, "moments": 900, "projectors": 300}
ADAMW = {"weights": 4000, "master_weights": 2000, "gradients": 2000, "moments": 4000, "projectors": 0}
MODULES = ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.down_proj")


def write_lines(path: Path, lines: Iterable[dict[str, Any] | str]) -> Path:
    """Objects as JSON, and texts as they are, a line each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in lines))
    return path


def matrices(layers: int) -> list[str]:
    """Names of parameters, as a Llama has them."""
    return [f"model.layers.{layer}.{module}.weight" for layer in range(layers) for module in MODULES]


def start(step: int = 0, **values: Any) -> dict[str, Any]:
    """A start or a resume."""
    common = {"event": "start", "time": 1.0, "version": "0.1.0", "world_size": 2, "zero_stage": 3}
    config = {"optimizer": {"type": "GaLoreAdamW", "params": {"lr": 0.01, "rank": 64}}, "train_batch_size": 8}
    memory = {"GaLoreAdamW": GALORE, "AdamW": ADAMW}
    return {**common, "optimizer": "GaLoreAdamW", "step": step, "config": config, "memory": memory, **values}


def refresh(step: int, values: dict[str, tuple[float | None, float | None]], seconds: float = 0.4) -> dict[str, Any]:
    """A step in which bases of matrices were renewed: energies and overlaps."""
    found = {name: {"energy": energy, "overlap": overlap, "rank": 64} for name, (energy, overlap) in values.items()}
    return {"event": "refresh", "time": 2.0, "step": step, "seconds": seconds, "matrices": found}


def saved(step: int, kind: str = "differential", **values: Any) -> dict[str, Any]:
    """A checkpoint."""
    numbers = {"stall": 0.5, "seconds": 4.0, "bytes": 1000, "logical_bytes": 3000, "ratio": 3.0}
    return {"event": "save", "time": 3.0, "step": step, "tag": f"step-{step}", "kind": kind, **numbers, **values}


def failed(step: int, message: str = "rank 1: no space left on device") -> dict[str, Any]:
    """A checkpoint that did not become one."""
    return {"event": "save_failed", "time": 3.0, "step": step, "tag": f"step-{step}", "message": message}


def warning(step: int, message: str) -> dict[str, Any]:
    """A warning."""
    return {"event": "warning", "time": 3.0, "step": step, "message": message}


def metric(step: int, loss: float | None = None, **values: Any) -> dict[str, Any]:
    """A step of ``launch/train.py``."""
    loss = 2 + 3 * math.exp(-step / 30) + 0.05 * math.sin(step) if loss is None else loss
    numbers = {"lr": 0.01, "grad_norm": 1.0, "tokens_per_s": 1000.0 + step, "seconds": 0.5, "memory_bytes": 10**9}
    return {"step": step, "loss": loss, **numbers, **values}


def whole_run(directory: Path, *, steps: int = 120, layers: int = 4, message: str = "energy fell") -> Path:
    """A run of ``launch/train.py`` with everything in it."""
    names = matrices(layers)
    lines: list[dict[str, Any] | str] = []
    for step in range(1, steps + 1):
        lines.append(metric(step))
        if step % 30 == 0:
            lines.append({"step": step, "validation_loss": 2.1 + 3 * math.exp(-step / 30)})
    write_lines(directory / "metrics.jsonl", lines)
    events: list[dict[str, Any] | str] = [start()]
    for step in range(1, steps + 1, 20):
        overlap = None if step == 1 else min(step / steps, 1.0)
        events.append(
            refresh(step, {name: (0.6 + 0.3 * index / len(names), overlap) for index, name in enumerate(names)})
        )
    events += [saved(20, "full", bytes=2500, ratio=1.2), saved(40), failed(60), saved(80), saved(100, "incremental")]
    events.append(warning(70, message))
    write_lines(directory / "ds_galore.jsonl", events)
    return directory
