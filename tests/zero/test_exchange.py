"""Summing cut rows: exact sums, the same bits everywhere, bounded traffic."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_galore.zero.exchange import CutRowExchange, tree_position
from ds_galore.zero.layout import MatrixLayout, even_ranges
from tests.zero.simulated import on_all_ranks, random
from tests.zero.test_layout import TOLERANCE, cut_matrices, scale


@st.composite
def several(draw):
    """One to four matrices over the same ranks."""
    shape, ranges = draw(cut_matrices())
    world_size, cases = len(ranges), [(shape, ranges)]
    for _ in range(draw(st.integers(0, 3))):
        rows, columns = draw(st.integers(1, 8)), draw(st.integers(1, 40))
        cases.append(((rows, columns), even_ranges(rows * columns, -(-rows * columns // world_size), world_size)))
    return cases


@given(several(), st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_all_ranks_get_the_sums_of_their_rows_within_the_traffic_bound(cases, rank):
    world_size = len(cases[0][1])
    grads = [random(*shape, seed=index) for index, (shape, _) in enumerate(cases)]
    bases = [random(shape[1], rank, seed=10 + index) for index, (shape, _) in enumerate(cases)]

    def work(me, transport):
        layouts = [MatrixLayout(shape, tuple(ranges), me) for shape, ranges in cases]
        rows = [
            layout.local.project(grad.reshape(-1)[layout.local.start : layout.local.stop], basis)
            for layout, grad, basis in zip(layouts, grads, bases, strict=True)
        ]
        plan = CutRowExchange(layouts)
        plan.run(transport, rows)
        assert transport.sent == plan.rows_sent * rank
        bound = 4 * rank * len(cases)
        assert transport.sent <= bound
        assert transport.received <= bound
        return [(layout.local.first_row, part) for layout, part in zip(layouts, rows, strict=True)]

    seen = {}
    for each in on_all_ranks(world_size, work):
        for index, (first, part) in enumerate(each):
            expected = grads[index] @ bases[index]
            torch.testing.assert_close(
                part, expected[first : first + len(part)], rtol=0, atol=TOLERANCE * scale(expected)
            )
            for offset, row in enumerate(part):
                assert torch.equal(seen.setdefault((index, first + offset), row), row)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 7, 8, 9, 64, 1000])
def test_the_tree_is_one_tree_of_logarithmic_depth_with_leaves_at_its_ends(count):
    places = [tree_position(member, count) for member in range(count)]
    assert sum(place.parent is None for place in places) == 1
    for member, place in enumerate(places):
        for child in place.children:
            assert places[child].parent == member
            assert places[child].depth == place.depth + 1
        if place.parent is not None:
            assert member in places[place.parent].children
    assert max(place.depth for place in places) <= math.log2(count) + 2
    # A rank may be last in one tree and first in the next: its two ends must not exceed the bound together.
    if count > 2:
        assert not places[0].children
        assert not places[-1].children
    assert all(len(place.children) + (place.parent is not None) <= 3 for place in places)


@pytest.mark.parametrize("world_size", [8, 64, 512])
def test_traffic_per_rank_does_not_grow_with_the_world_size(world_size):
    shape = (7, 4099)  # rows longer than a partition from 8 ranks on
    ranges = tuple(even_ranges(shape[0] * shape[1], -(-shape[0] * shape[1] // world_size), world_size))
    assert max(CutRowExchange([MatrixLayout(shape, ranges, rank)]).rows_sent for rank in range(world_size)) <= 4
