"""One pool of real processes over gloo for the whole test session.

Importing torch, DeepSpeed and transformers costs seconds a process, so one process imports them and forks the ranks
(Python's forkserver), which are kept; the process group is rebuilt when a test asks for another number of ranks. A call
that outlives its time limit is a hang: the pool is killed, the test fails, and the next call starts a new pool.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
import traceback
import warnings
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

MAX_WORLD_SIZE = 4
#: What the ranks are forked with: nothing that starts threads.
PRELOADED = [
    "torch",
    "torch.distributed",
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
]
#: Seconds that the other ranks have to answer once one has failed.
GRACE = 20.0


class RemoteError(AssertionError):
    """Some rank raised; the message holds every rank's traceback."""


class Pool:
    """Real ranks, started at the first call.

    Parameters
    ----------
    directory
        For the files by which they find each other.
    """

    def __init__(self, directory: Path) -> None:
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._directory = directory
        self._world_size = self._worlds = 0
        self._store = ""

    def run(self, world_size: int, function: Any, *args: Any, timeout: float = 180.0, **kwargs: Any) -> list[Any]:
        """``function(*args, **kwargs)`` on ranks ``0 .. world_size - 1``: what each returned.

        Parameters
        ----------
        function
            Importable by name; its module is imported in the workers.
        timeout
            Seconds, after which the call counts as hanging.
        """
        outcomes = self.outcomes(world_size, function, *args, timeout=timeout, **kwargs)
        failed = [f"--- rank {rank}\n{text}" for rank, (kind, text) in enumerate(outcomes) if kind == "error"]
        if failed:
            raise RemoteError("\n".join(failed))
        return [value for _, value in outcomes]

    def outcomes(
        self, world_size: int, function: Any, *args: Any, timeout: float = 180.0, **kwargs: Any
    ) -> list[tuple[str, Any]]:
        """Like :meth:`run`, but gives each rank's ``("ok", value)`` or ``("error", traceback)``."""
        if not self._processes:
            self._start()
        if world_size != self._world_size:  # another world: where its ranks meet also tells the workers of the change
            self._worlds += 1
            self._world_size, self._store = world_size, str(self._directory / str(self._worlds))
        for pipe in self._pipes[:world_size]:
            pipe.send((world_size, self._store, function, args, kwargs))
        pending = dict(zip(self._pipes[:world_size], range(world_size), strict=True))
        outcomes: list[tuple[str, Any]] = [("error", "no answer")] * world_size
        deadline = time.monotonic() + timeout
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                told = "".join(
                    f"\n--- rank {rank}\n{text}" for rank, (kind, text) in enumerate(outcomes) if kind == "error"
                )
                raise RemoteError(f"hang: ranks {sorted(pending.values())} did not answer within {timeout} s{told}")
            for pipe in ready:
                rank = pending.pop(pipe)  # type: ignore[call-overload]
                try:
                    outcomes[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    self.close()
                    raise RemoteError(f"rank {rank} died") from None
                if outcomes[rank][0] == "error":
                    deadline = min(deadline, time.monotonic() + GRACE)
        if any(kind == "error" for kind, _ in outcomes):
            self.close()  # a rank that raised may have left its peers' process group in the middle of something
        return outcomes

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        for rank in range(MAX_WORLD_SIZE):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    @property
    def pids(self) -> list[int]:
        """The processes by rank; none before the first call."""
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """Kill the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes, self._world_size = [], [], 0


def _serve(rank: int, pipe: Connection) -> None:
    import torch
    from deepspeed.utils import nvtx

    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    # A twentieth of the time of small steps is what DeepSpeed tells a profiler that CPUs do not have; and for a line of
    # its log it writes out all parameters at every start.
    nvtx.enable_nvtx = False
    torch.set_printoptions(threshold=0, edgeitems=1)
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*is deprecated. Please use.*_single")
    groups = _Groups(rank)
    gc.freeze()
    while True:
        try:
            world_size, store, function, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            groups.prepare(world_size, store)
            outcome = ("ok", function(*args, **kwargs))
        except BaseException as error:
            outcome = ("error", traceback.format_exc())
            if isinstance(error, KeyboardInterrupt):
                raise
        pipe.send(outcome)
        # DeepSpeed collects garbage whenever it makes an engine, and went through all that had been imported.
        gc.collect()
        gc.freeze()


class _Groups:
    """The process group of a worker, and DeepSpeed's idea of it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._store = ""
        self._pristine: dict[str, Any] = {}
        self._linear: Any = None

    def prepare(self, world_size: int, store: str) -> None:
        """Be rank ``rank`` of ``world_size`` in a gloo world."""
        import deepspeed
        import torch.distributed as dist
        from deepspeed.comm import comm
        from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
        from deepspeed.runtime.zero.partition_parameters import Init
        from deepspeed.utils import groups
        from torch.nn import functional

        if not self._pristine:
            self._linear = functional.linear
            # Not needed here, and compiled for over a minute on a fresh machine.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
            self._pristine = {
                name: value.copy() if isinstance(value, dict) else value
                for name, value in vars(groups).items()
                if not name.startswith("__") and (value is None or isinstance(value, dict | int))
            }
        # Ranks that sat out a call would number modules and parameters otherwise than those that took part.
        Init.param_id = 0
        DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
        # Stage 3 replaces it for good. Gradients then arrive in another order, by which stages 1 and 2 add up what
        # ranks send: those of a rank that took part in a stage-3 call do not fit those of one that did not.
        functional.linear = self._linear
        if store == self._store:
            return
        if dist.is_initialized():
            dist.destroy_process_group()
            comm.cdb = None
            for name, value in self._pristine.items():
                setattr(groups, name, value.copy() if isinstance(value, dict) else value)
        os.environ.update(
            RANK=str(self._rank),
            WORLD_SIZE=str(world_size),
            LOCAL_SIZE=str(world_size),  # as DeepSpeed's launcher does: without, numactl is asked at every step
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="29500",
        )
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=self._rank, world_size=world_size)
        deepspeed.init_distributed("gloo", verbose=False)
        self._store = store
