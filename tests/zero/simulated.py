"""Many ranks in one process, for property tests: each rank is a thread, and messages are queues between threads.

What is simulated is the transport alone; plans, products and sums are the package's own. The same tests run over real
gloo processes in test_gloo.py.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


class Transport:
    """``exchange`` of one simulated rank, with a count of what it sent and received."""

    def __init__(self, rank: int, queues: dict[tuple[int, int], queue.Queue[Tensor]]) -> None:
        self.rank = rank
        self.sent = self.received = 0
        self._queues = queues

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> dict[int, Tensor]:
        for peer, tensor in sends.items():
            self.sent += tensor.numel()
            self._queues[self.rank, peer].put(tensor.clone())
        received = {}
        for peer, template in receives.items():
            received[peer] = self._queues[peer, self.rank].get(timeout=10)
            assert received[peer].shape == template.shape
            self.received += template.numel()
        return received


def on_all_ranks(world_size: int, work: Callable[[int, Transport], Any]) -> list[Any]:
    """What ``work(rank, transport)`` returns on each of ``world_size`` threads."""
    queues: dict[tuple[int, int], queue.Queue[Tensor]] = {
        (a, b): queue.Queue() for a in range(world_size) for b in range(world_size)
    }
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank, Transport(rank, queues))
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert all(each.empty() for each in queues.values()), "a message was sent that nobody received"
    return results


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
