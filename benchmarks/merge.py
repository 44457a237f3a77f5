"""Merging: time and peak memory of ``ds-galore merge`` and of DeepSpeed's ``zero_to_fp32.py``, on the same checkpoint.

    deepspeed --num_accelerators 2 benchmarks/merge.py --make runs/bench-merge --model llama_350m
    .venv/bin/python benchmarks/merge.py --compare runs/bench-merge

The first saves a model of random weights under ZeRO-3, AdamW, on two ranks: DeepSpeed's checkpoint in ``native/``, ours
in ``ours/``, and the weights alone in ``sharded/``, by torch.distributed.checkpoint's HuggingFaceStorageWriter from a
DTensor a parameter. The second merges them, each program in a process of its own, in turns: seconds and peak resident
memory (``ru_maxrss``). ``--compare`` also takes what ``checkpoints.py`` left.
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
import warnings
from pathlib import Path
from typing import Any

from common import ROOT, arguments, median_ratio, spread, write

PEER = "zero_to_fp32.py, native"
#: What torch.distributed.checkpoint has for merging such shards, as a program.
DCP = """
import sys
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
source, target = sys.argv[1:]
import os; os.makedirs(target)
import glob, json, struct
names = set()
for path in glob.glob(source + "/*.safetensors"):
    with open(path, "rb") as file:
        names |= set(json.loads(file.read(struct.unpack("<Q", file.read(8))[0])))
names.discard("__metadata__")
consolidate_safetensors_files(source, target, dict.fromkeys(names, 1), num_threads=2)
"""


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
    save_sharded(model, directory / "sharded")
    dist.barrier()


def save_sharded(model: Any, directory: Path) -> None:
    """The weights in rows over the ranks, as FSDP has them, by torch.distributed.checkpoint in safetensors."""
    import deepspeed
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {}
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            whole = parameter.detach()
            part = whole.chunk(mesh.size())[mesh.get_rank()].clone()  # uneven sizes are those of chunk, as DTensor's
            shape, stride = whole.shape, whole.stride()
        state[name] = DTensor.from_local(part, mesh, [Shard(0)], shape=shape, stride=stride, run_check=False)
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(directory), save_distributed=True))


#: Started in between, since the peak of a process that is started counts what its parent had in memory.
STARTER = """
import json, os, subprocess, sys, time
begin = time.perf_counter()
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
print(json.dumps([time.perf_counter() - begin, usage.ru_maxrss * 1024 / 1e6]))
sys.exit(os.waitstatus_to_exitcode(status))
"""


def measure(command: list[str], out: Path) -> tuple[float, float]:
    """Seconds and megabytes (10^6) of a program."""
    shutil.rmtree(out, ignore_errors=True)
    done = subprocess.run([sys.executable, "-S", "-c", STARTER, *command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command} failed: {done.stderr}")
    seconds, megabytes = json.loads(done.stdout)
    return seconds, megabytes


def ways(directory: Path, names: list[str] | None = None, rounds: int = 5) -> dict[str, Any]:
    """Merge each way in turns: seconds and megabytes."""
    script = subprocess.check_output(
        [sys.executable, "-c", "import deepspeed.utils.zero_to_fp32 as z; print(z.__file__)"], text=True
    ).splitlines()[-1]
    with tempfile.TemporaryDirectory(dir=directory) as work:
        out = Path(work) / "out"
        script = shutil.copy(script, work)  # beside its package's modules it would import those for torch
        merge = [sys.executable, "-m", "ds_galore", "merge"]
        native, ours, sharded = (str(directory / name) for name in ("native", "ours", "sharded"))
        commands = {
            PEER: [sys.executable, script, native, str(out), "--safe_serialization"],
            "ds-galore merge, native": [*merge, native, str(out)],
            "ds-galore merge, ours": [*merge, ours, str(out)],
            "DCP's consolidation, of HuggingFaceStorageWriter's shards": [sys.executable, "-c", DCP, sharded, str(out)],
        }
        if names is None:
            names = [name for name in commands if (directory / "sharded").exists() or not name.startswith("DCP")]
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for number in range(rounds):
            for name in (*names[number % len(names) :], *names[: number % len(names)]):
                taken[name].append(measure(commands[name], out))
    found = {}
    peer = [seconds for seconds, _ in taken[PEER]]
    for name, values in taken.items():
        seconds, memory = (list(each) for each in zip(*values, strict=True))
        found[name] = {
            **spread(seconds),
            "of_peer": median_ratio(seconds, peer),
            "megabytes": statistics.median(memory),
            "memory_of_peer": statistics.median(memory) / statistics.median(each for _, each in taken[PEER]),
        }
    return found


def compare(directory: Path, options: argparse.Namespace) -> None:
    """Merge each way, and print."""
    found = ways(directory, rounds=options.rounds)
    for name, row in found.items():
        print(f"{name:58} {row['seconds']:6.2f} s ({row['of_peer']:.2f}x) {row['megabytes']:8.0f} MB")
    of_weights = sum(path.stat().st_size for path in (directory / "sharded").glob("*.safetensors")) / 1e6
    write("merge", options, {"rows": found, "weights_megabytes": of_weights})


def main() -> None:
    """One of the two."""
    parser = arguments(__doc__)
    parser.add_argument("--make", type=Path, metavar="DIR")
    parser.add_argument("--model", default="llama_350m")
    parser.add_argument("--layers", type=int, help="of the model, in place of its own number")
    parser.add_argument("--compare", type=Path, metavar="DIR")
    parser.add_argument("--rounds", type=int, default=5, help="how often each merges")
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.model, options.layers, options.rounds = "llama_60m", 1, 1
    if options.make:
        make(options.make, options.model, options.layers)
    if options.compare:
        compare(options.compare, options)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
