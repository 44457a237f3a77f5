"""What a CPU's allocator hands out while something runs, as torch's profiler sees it: kernels' own memory too."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["alive", "rise"]


def rise(work: Callable[[], Any]) -> int:
    """By how many bytes what is allocated rises above what it is at first, at most, while ``work`` runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    assert seen.profiler is not None
    events = [each for each in seen.profiler.kineto_results.events() if each.name() == "[memory]"]
    assert events, "the profiler saw no allocations"
    now = most = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def alive() -> int:
    """Bytes of all tensors that Python reaches, those that share memory counted once."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor):
            try:
                storage = each.untyped_storage()
            except (NotImplementedError, RuntimeError):  # of no memory
                continue
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
