"""How cost grows with the model: step, save, load and merge of one, two and four times as many layers.

    deepspeed --num_accelerators 2 benchmarks/growth.py

Layers of ``llama_60m`` (hidden 512, bytes for tokens) in fp32 under ZeRO-3, GaLoreAdamW of rank 128: seconds of
``engine.step()``, between refreshes; seconds that a differential save of ours and a save of DeepSpeed's own stand in
the way, and until ours is on the disk; bytes of both; seconds to load ours. Then ``ds-galore merge`` of our checkpoint
and DeepSpeed's ``zero_to_fp32.py`` of its own, each in a process of its own: seconds and peak memory.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from checkpoints import Run, size_of
from common import arguments, write
from merge import PEER, ways


def grown(layers: int, directory: Path, rounds: int) -> dict[str, Any]:
    """All figures of one size; medians."""
    import torch.distributed as dist

    run = Run("galore", 1, layers=layers)
    steps, ours, durable, native, load = [], [], [], [], []
    run.train(5)  # a base without moments and projectors would have them all in the difference
    run.save(directory / "ours", "base")
    run.engine.checkpoint_engine.wait()
    for number in range(rounds):
        run.train(3)
        steps.append(_step(run))
        dist.barrier()
        begin = time.perf_counter()
        ours.append(run.save(directory / "ours", f"diff{number}"))
        run.engine.checkpoint_engine.wait()
        dist.barrier()
        durable.append(time.perf_counter() - begin)
        native.append(run.save_native(directory / "native", "a"))
        dist.barrier()
        begin = time.perf_counter()
        run.engine.load_checkpoint(str(directory / "ours"))
        dist.barrier()
        load.append(time.perf_counter() - begin)
    found: dict[str, Any] = {
        "parameters": sum(parameter.ds_numel for parameter in run.engine.module.parameters()),
        "step_s": statistics.median(steps),
        "save_s": statistics.median(ours),
        "durable_s": statistics.median(durable),
        "native_save_s": statistics.median(native),
        "load_s": statistics.median(load),
        "bytes": size_of(directory / "ours" / f"diff{rounds - 1}", directory / "ours" / "base"),
        "native_bytes": size_of(directory / "native"),
    }
    dist.barrier()
    run.engine.destroy()
    return found


def _step(run: Run) -> float:
    """Seconds of one update."""
    import torch.distributed as dist

    tokens = run.corpus.train[run.order.take(1)].long()
    run.engine.backward(run.engine(input_ids=tokens, labels=tokens).loss)
    dist.barrier()
    begin = time.perf_counter()
    run.engine.step()
    dist.barrier()
    return time.perf_counter() - begin


def main() -> None:
    """Grow the model."""
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=Path("runs/bench-growth"), help="of the checkpoints")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.layers, options.rounds = [1], 1
    import deepspeed
    import torch.distributed as dist

    import ds_galore

    warnings.filterwarnings("ignore", category=FutureWarning)
    ds_galore.enable()
    deepspeed.init_distributed("gloo", verbose=False)
    torch.set_num_threads(1)
    rows: dict[str, Any] = {}
    for layers in options.layers:
        directory = options.directory / str(layers)
        if dist.get_rank() == 0:
            shutil.rmtree(directory, ignore_errors=True)
        dist.barrier()
        rows[str(layers)] = grown(layers, directory, options.rounds)
    if dist.get_rank() == 0:
        for layers in options.layers:  # the other ranks have nothing left to do
            merged = ways(options.directory / str(layers), [PEER, "ds-galore merge, ours"], options.rounds)
            rows[str(layers)]["merge"] = merged
        print(json.dumps(rows, indent=1))
        write("growth", options, {"world_size": dist.get_world_size(), "rows": rows})
    dist.barrier()


if __name__ == "__main__":
    main()
