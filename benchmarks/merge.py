"""Merging: time and peak memory of ``ds-galore merge`` and of DeepSpeed's ``zero_to_fp32.py``, on the same checkpoint.

    deepspeed --num_accelerators 2 benchmarks/merge.py --make runs/bench-merge --model llama_350m
    .venv/bin/python benchmarks/merge.py --compare runs/bench-merge

The first saves a model of random weights under ZeRO-3, AdamW, on two ranks: DeepSpeed's checkpoint in ``native/``, ours
in ``ours/``. The second merges them, each program in a process of its own, and prints seconds and peak resident memory
(``ru_maxrss``); medians of three, the programs in turn. ``--compare`` also takes what ``checkpoints.py`` left.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def make(directory: Path, name: str, layers: int | None) -> None:
    """Save a model both ways, without training it."""
    import deepspeed
    import torch
    import torch.distributed as dist
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
    from transformers import AutoConfig, AutoModelForCausalLM

    import ds_galore

    warnings.filterwarnings("ignore", category=FutureWarning)
    ds_galore.enable()
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(0)
    shape = AutoConfig.from_pretrained(ROOT / "configs" / "models" / f"{name}.json")
    shape.num_hidden_layers = layers or shape.num_hidden_layers
    model = AutoModelForCausalLM.from_config(shape)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": 3},
        "zero_force_ds_cpu_optimizer": False,
        "ds_galore": {"checkpoint": {"mode": "full", "async": False}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    engine.save_checkpoint(str(directory / "ours"), tag="a")
    ours, engine.checkpoint_engine = engine.checkpoint_engine, TorchCheckpointEngine(engine._config)
    engine.save_checkpoint.__wrapped__(str(directory / "native"), tag="a")
    engine.checkpoint_engine = ours
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def measure(command: list[str], out: Path) -> tuple[float, float]:
    """Seconds and megabytes (10^6) of a program."""
    shutil.rmtree(out, ignore_errors=True)
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begin
    if status:
        assert process.stderr is not None
        raise SystemExit(f"{command} failed: {process.stderr.read()}")
    return seconds, usage.ru_maxrss * 1024 / 1e6


def compare(directory: Path) -> None:
    """Merge each way, three times."""
    script = subprocess.check_output(
        [sys.executable, "-c", "import deepspeed.utils.zero_to_fp32 as z; print(z.__file__)"], text=True
    ).splitlines()[-1]
    with tempfile.TemporaryDirectory(dir=directory) as work:
        out = Path(work) / "out"
        script = shutil.copy(script, work)  # beside its package's modules it would import those for torch
        merge = [sys.executable, "-m", "ds_galore", "merge"]
        ways = {
            "zero_to_fp32.py, native": [sys.executable, script, str(directory / "native"), str(out)],
            "ds-galore merge, native": [*merge, str(directory / "native"), str(out)],
            "ds-galore merge, ours": [*merge, str(directory / "ours"), str(out)],
        }
        ways["zero_to_fp32.py, native"] += ["--safe_serialization"]
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for _ in range(3):
            for way, command in ways.items():
                found[way].append(measure(command, out))
    for way, values in found.items():
        seconds, memory = (statistics.median(each) for each in zip(*values, strict=True))
        print(f"{way:26} {seconds:6.2f} s {memory:8.0f} MB")
    print(json.dumps(found))


def main() -> None:
    """One of the two."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--make", type=Path, metavar="DIR")
    parser.add_argument("--model", default="llama_350m")
    parser.add_argument("--layers", type=int, help="of the model, in place of its own number")
    parser.add_argument("--compare", type=Path, metavar="DIR")
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.make:
        make(arguments.make, arguments.model, arguments.layers)
    if arguments.compare:
        compare(arguments.compare)


if __name__ == "__main__":
    main()
