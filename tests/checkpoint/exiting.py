"""A program of one rank that saves and ends: ``python -m tests.checkpoint.exiting DIR RANK WORLD STORE FATE``.

Run by the tests once a rank. FATE: ``leave`` returns right after the second save; ``die`` kills rank 1 while it writes;
``raise`` lets rank 1 fail there.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch


def main(directory: str, rank: str, world: str, store: str, fate: str) -> None:
    import deepspeed
    import torch.distributed as dist

    from ds_galore.checkpoint import job as module
    from tests import jobs
    from tests.checkpoint.engines import make

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.set_num_threads(1)
    os.environ.update(RANK=rank, WORLD_SIZE=world, LOCAL_RANK=rank, MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world))
    deepspeed.init_distributed("gloo", verbose=False)
    module.LAST_WAIT = 2.0
    engine = make(jobs.galore())
    jobs.train(engine, jobs.batches(2, 12))
    engine.save_checkpoint(directory, tag="first")
    engine.checkpoint_engine.wait()

    def slowly(point: str) -> None:
        if point == "writing":
            time.sleep(1.0)
            if rank == "1" and fate == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == "1" and fate == "raise":
                raise RuntimeError("broken on purpose")

    engine.checkpoint_engine.hook = slowly
    jobs.train(engine, jobs.batches(1, 12, seed=5))
    engine.save_checkpoint(directory, tag="second")
    print("returned", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
