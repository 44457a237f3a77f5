"""One rank in trouble: all ranks end together or go on together, and none hangs."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from ds_galore.errors import DsGaloreError, PeerError
from tests import jobs
from tests.optim.test_engine import compare, snapshot

#: Every place where a rank computes alone, by module and attribute.
PLACES = [
    "ds_galore.zero.layout:FlatSlice.project",
    "ds_galore.zero.layout:FlatSlice.sketch",
    "ds_galore.zero.layout:FlatSlice.apply",
    "ds_galore.zero.layout:FlatSlice.rowwise",
    "ds_galore.optim.refresh:leading_basis",
    "ds_galore.optim.refresh:singular_basis",
    "ds_galore.optim.updates:adamw_direction",
    "ds_galore.optim.updates:reproject",
    "ds_galore.optim.step:_is_not_finite",
    "ds_galore.optim.step:FlatStep.create",
    "ds_galore.optim.formats:Floating.encode",
    "ds_galore.optim.matrices:Side.settle",
    "ds_galore.optim.matrices:pad_rows",
]


def broken(place: str, settings: dict[str, Any], victim: int, after: int) -> str:
    """Train while ``place`` raises on one rank from its ``after``-th call on; how this rank learnt of it."""
    import torch.distributed as dist

    module, path = place.split(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original, calls = getattr(owner, name), 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise MemoryError("the rank ran out of memory")
        return original(*args, **kwargs)

    engine = jobs.start(jobs.tiny_llama(), jobs.config(jobs.galore(**settings), micro=1))
    if dist.get_rank() == victim:
        setattr(owner, name, failing)
    try:
        jobs.train(engine, jobs.batches(8, dist.get_world_size()))
    except (MemoryError, PeerError) as error:
        with pytest.raises(DsGaloreError, match="an earlier step failed"):
            engine.basic_optimizer.step()
        return f"{type(error).__name__}: {error}"
    finally:
        setattr(owner, name, original)
    return "nothing happened"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("after", [30])
def test_an_exception_on_one_rank_ends_all_ranks_in_the_same_step(pool, place, after):
    settings = {"update_proj_gap": 3}
    if "singular" in place:
        settings["refresh"] = "svd"
    if "sketch" in place or "pad_rows" in place:
        settings["proj_type"] = "left"
    if after and (".create" in place or "_basis" in place or "settle" in place):
        after = 3
    outcomes = pool.run(3, broken, place, settings, 1, after, timeout=60)
    assert outcomes[1] == "MemoryError: the rank ran out of memory"
    for rank in (0, 2):
        assert outcomes[rank] == (
            "PeerError: rank 1 failed, and no rank can go on: MemoryError: the rank ran out of memory"
        )


def poisoned(settings: dict[str, Any], step: int) -> None:
    """A NaN in one rank's slice of one matrix, put there behind DeepSpeed's own check of the norm."""
    import torch.distributed as dist

    engine = jobs.start(jobs.tiny_llama(), jobs.config(jobs.galore(**settings), micro=1))
    data = jobs.batches(12, dist.get_world_size())
    optimizer = engine.basic_optimizer
    if step:
        jobs.train(engine, data[:step])
    original = optimizer.step

    def with_nan(*args: Any, **kwargs: Any) -> Any:
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                if dist.get_rank() == 1:
                    plan = optimizer._plan(tensor, group)
                    matrix = plan.batches[0].matrices[2]
                    matrix.narrow(tensor.grad)[0] = float("nan")
        return original(*args, **kwargs)

    optimizer.step = with_nan
    before = snapshot(engine)
    jobs.train(engine, data[step : step + 1])
    optimizer.step = original
    after = snapshot(engine)
    victim = next(iter(optimizer._plans.values())).batches[0].matrices[2]
    flat = next(iter(optimizer._plans))
    assert torch.equal(victim.narrow(before["weights"][0]), victim.narrow(after["weights"][0]))
    if step:
        compare(before["state"][0][victim.name], after["state"][0][victim.name])
    assert optimizer.state[flat][victim.name]["step"] == step
    others = [state["step"] for name, state in optimizer.state[flat].items() if name != victim.name]
    assert set(others) == {step + 1}
    losses = jobs.train(engine, data[step + 1 :])
    assert all(torch.isfinite(weight).all() for weight in snapshot(engine)["weights"])
    assert all(loss == loss for loss in losses)


@pytest.mark.parametrize("settings", [{}, {"proj_type": "left"}, {"refresh": "svd"}])
@pytest.mark.parametrize("step", [0, 3])
def test_a_nan_in_one_ranks_slice_leaves_that_matrix_alone_on_all_ranks(pool, settings, step):
    pool.run(3, poisoned, {"update_proj_gap": 3, "stagger_refresh": False, **settings}, step, timeout=60)


class Small(torch.nn.Module):
    """Layers so small that some of four ranks hold nothing of their parameters, or only a part of one row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(3, 2, bias=True)
        self.second = torch.nn.Linear(2, 23, bias=True)
        self.last = torch.nn.Linear(23, 2, bias=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(values))))).square().sum()


def with_empty_slices(proj_type: str) -> list[torch.Tensor]:
    optimizer = jobs.galore(rank=1, update_proj_gap=3, proj_type=proj_type, lr=0.05)
    engine = jobs.start(Small(), jobs.config(optimizer, micro=1))
    for step in range(8):
        values = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(values))
        engine.step()
    return list(jobs.whole_weights(engine).values())


@pytest.mark.parametrize("proj_type", ["right", "left"])
def test_ranks_with_empty_slices_take_part(pool, proj_type):
    expected = pool.run(1, with_empty_slices, proj_type)[0]
    for found in pool.run(4, with_empty_slices, proj_type, timeout=60):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
