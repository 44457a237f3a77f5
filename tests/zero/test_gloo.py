"""The same algebra, and failing together, between real processes over gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ds_galore.errors import ConfigError, PeerError
from ds_galore.zero.exchange import CutRowExchange
from ds_galore.zero.group import Guard, RankGroup
from ds_galore.zero.layout import MatrixLayout, even_ranges
from tests.zero.simulated import random
from tests.zero.test_layout import TOLERANCE, scale

SHAPES = [(13, 7), (1, 50), (50, 1), (3, 40), (2, 3), (64, 33)]
RANK = 3


def algebra() -> dict[tuple[int, int], torch.Tensor]:
    group = RankGroup(dist.group.WORLD)
    layouts, shares, grads, bases = [], [], [], []
    for index, shape in enumerate(SHAPES):
        numel = shape[0] * shape[1]
        layout = MatrixLayout(
            shape, tuple(even_ranges(numel, -(-numel // group.world_size), group.world_size)), group.rank
        )
        grad, basis = random(*shape, seed=index), random(shape[1], RANK, seed=100 + index)
        part = grad.reshape(-1)[layout.local.start : layout.local.stop].clone()
        layouts.append(layout)
        grads.append((grad, part))
        bases.append(basis)
        shares.append(layout.local.project(part, basis))
    CutRowExchange(layouts).run(group, shares)
    rows = {}
    for index, (layout, (grad, part), basis, share) in enumerate(zip(layouts, grads, bases, shares, strict=True)):
        local, expected = layout.local, grad @ basis
        touched = slice(local.first_row, local.end_row)
        torch.testing.assert_close(share, expected[touched], rtol=0, atol=TOLERANCE * scale(expected))
        sketch, whole = group.all_reduce(local.sketch(part, share)), grad.t() @ expected
        torch.testing.assert_close(sketch, whole, rtol=0, atol=TOLERANCE * scale(whole))
        weight = grad.reshape(-1)[local.start : local.stop].clone()
        local.apply(weight, share, basis, alpha=-0.5, beta=0.9)
        updated = (0.9 * grad - 0.5 * expected @ basis.t()).reshape(-1)[local.start : local.stop]
        torch.testing.assert_close(weight, updated, rtol=0, atol=TOLERANCE * scale(updated))
        gathered = group.gather_flat(part, layout.ranges, index % group.world_size)
        assert (gathered is not None) == (group.rank == index % group.world_size)
        if gathered is not None:
            assert torch.equal(gathered.view(grad.shape), grad)
        rows.update({(index, local.first_row + offset): row for offset, row in enumerate(share)})
    return rows


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_products_agree_with_dense_ones_and_shared_rows_with_each_other(pool, world_size):
    seen: dict[tuple[int, int], torch.Tensor] = {}
    for rows in pool.run(world_size, algebra):
        for key, row in rows.items():
            assert torch.equal(seen.setdefault(key, row), row)


def collectives() -> None:
    group = RankGroup(dist.group.WORLD)
    rank, size = group.rank, group.world_size
    assert torch.equal(
        group.all_gather(torch.full((3,), float(rank))), torch.arange(float(size)).view(-1, 1).expand(size, 3)
    )
    blocks = torch.arange(float(size)).view(size, 1).expand(size, 2) + rank
    assert torch.equal(group.reduce_scatter(blocks), torch.full((2,), float(rank * size + sum(range(size)))))
    assert torch.equal(group.broadcast(torch.full((2,), float(rank)), size - 1), torch.full((2,), float(size - 1)))
    total = group.reduce(torch.ones(2), 0)
    assert rank != 0 or torch.equal(total, torch.full((2,), float(size)))
    assert group.exchange({}, {}) == {}
    flags = torch.zeros(4, dtype=torch.uint8)
    flags[rank] = 1
    assert group.vote(flags, None).tolist() == [1] * size + [0] * (4 - size)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_collectives(pool, world_size):
    pool.run(world_size, collectives)


def fail_on(rank: int) -> tuple[str, str, int | None]:
    group = RankGroup(dist.group.WORLD)
    try:
        with group.together():
            if group.rank == rank:
                raise ConfigError("rank is 0")
    except (ConfigError, PeerError) as error:
        return type(error).__name__, str(error), error.exit_code
    return "nothing", "", None


def test_one_ranks_failure_reaches_the_others_with_its_cause_and_exit_status(pool):
    outcomes = pool.run(3, fail_on, 1, timeout=30)
    assert outcomes[1] == ("ConfigError", "rank is 0", 2)
    for rank in (0, 2):
        assert outcomes[rank] == ("PeerError", "rank 1 failed, and no rank can go on: ConfigError: rank is 0", 2)


def test_a_guard_keeps_the_first_error_and_lets_interrupts_through():
    guard = Guard()
    assert guard.run(lambda: 1, lambda: 2) == 1
    assert guard.run(lambda: 1 // 0, lambda: 2) == 2
    assert guard.run(lambda: 1, lambda: 2) == 2
    assert isinstance(guard.error, ZeroDivisionError)
    with guard:
        raise ValueError("later")
    assert isinstance(guard.error, ZeroDivisionError)
    with pytest.raises(KeyboardInterrupt), guard:
        raise KeyboardInterrupt
    with pytest.raises(ZeroDivisionError):
        RankGroup(None).vote(torch.zeros(0, dtype=torch.uint8), guard.error)
