"""A rank of a real DeepSpeed job that saves at every step and is killed: by itself at a named point, or from outside.

``python -m tests.checkpoint.crashing DIR RANK WORLD STORE VICTIM POINT COUNT CASE``: rank VICTIM kills itself when it
passes POINT for the COUNT-th time. CASE is one of :data:`.test_family.CASES`, or empty. Prints ``ack N`` when the save
after step N has been acknowledged.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

STEPS = 12
BATCH = 12
CHECKPOINT = {"full_every": 3, "keep_last": 2}


def build(case: str, **settings: Any) -> Any:
    from tests import jobs
    from tests.checkpoint.engines import make
    from tests.checkpoint.test_family import CASES

    optimizer, extra = CASES[case] if case else (jobs.galore(update_proj_gap=5), {})
    return make(optimizer, **settings, **extra)


def reference(directory: str, case: str = "") -> None:
    """The same run without a crash, keeping everything."""
    from tests import jobs
    from tests.checkpoint.engines import save

    engine = build(case, mode="full")
    for step, data in enumerate(jobs.batches(STEPS, BATCH), start=1):
        jobs.train(engine, data[None])
        save(engine, directory, f"step-{step}")


def main(directory: str, rank: str, world: str, store: str, victim: str, point: str, count: str, case: str) -> None:
    import deepspeed
    import torch.distributed as dist

    from tests import jobs

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.set_num_threads(1)
    os.environ.update(RANK=rank, WORLD_SIZE=world, LOCAL_RANK=rank, MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world))
    deepspeed.init_distributed("gloo", verbose=False)
    engine = build(case, checkpoint=CHECKPOINT)
    if Path(directory, "latest").exists():
        engine.load_checkpoint(directory)
    passed = 0

    def hook(name: str) -> None:
        nonlocal passed
        passed += name == point
        if rank == victim and passed == int(count):
            os.kill(os.getpid(), signal.SIGKILL)

    engine.checkpoint_engine.hook = hook
    print(f"begin {engine.global_steps}", flush=True)
    data = jobs.batches(STEPS, BATCH)
    for step in range(engine.global_steps + 1, STEPS + 1):
        jobs.train(engine, data[step - 1 : step])
        engine.save_checkpoint(directory, tag=f"step-{step}")  # waits for the one before
        print(f"ack {step - 1}", flush=True)
    engine.checkpoint_engine.wait()
    print(f"ack {STEPS}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
