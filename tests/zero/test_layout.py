"""The three products of a flat slice against dense ones, for any shape and any cut."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_galore.zero.layout import FlatSlice, MatrixLayout, even_ranges, matrix_shape
from tests.zero.simulated import random

TOLERANCE = 1e-12


@st.composite
def cut_matrices(draw: st.DrawFn) -> tuple[tuple[int, int], list[tuple[int, int]]]:
    """A shape, and the ranges that 1 to 9 ranks hold of it: ZeRO-3's even ones, or any."""
    rows, columns = draw(st.integers(1, 14)), draw(st.integers(1, 14))
    if draw(st.booleans()):
        rows, columns = draw(st.sampled_from([(1, columns * 3), (rows * 3, 1)]))
    world_size, numel = draw(st.integers(1, 9)), rows * columns
    if draw(st.booleans()):
        return (rows, columns), even_ranges(numel, -(-numel // world_size), world_size)
    cuts = sorted(draw(st.lists(st.integers(0, numel), min_size=world_size - 1, max_size=world_size - 1)))
    edges = [0, *cuts, numel]
    return (rows, columns), list(itertools.pairwise(edges))


def scale(*tensors: torch.Tensor) -> float:
    return max([1.0, *(float(t.abs().max()) for t in tensors if t.numel())])


@given(cut_matrices(), st.integers(1, 5))
@settings(max_examples=300, deadline=None)
def test_the_shares_of_all_slices_add_up_to_the_dense_products(case, rank):
    shape, ranges = case
    rows, columns = shape
    grad, basis, factor = random(rows, columns, seed=1), random(columns, rank, seed=2), random(rows, rank, seed=3)
    projected, sketched = torch.zeros(rows, rank, dtype=torch.float64), torch.zeros(columns, rank, dtype=torch.float64)
    for start, stop in ranges:
        part = FlatSlice(shape, start, stop)
        flat = grad.reshape(-1)[start:stop]
        projected[part.first_row : part.end_row] += part.project(flat, basis)
        sketched += part.sketch(flat, factor[part.first_row : part.end_row])
    torch.testing.assert_close(projected, grad @ basis, rtol=0, atol=TOLERANCE * scale(grad @ basis))
    torch.testing.assert_close(sketched, grad.t() @ factor, rtol=0, atol=TOLERANCE * scale(grad.t() @ factor))


@given(cut_matrices(), st.integers(1, 5), st.floats(-2, 2), st.floats(-2, 2))
@settings(max_examples=300, deadline=None)
def test_apply_changes_the_slice_in_place_as_the_dense_update_would(case, rank, alpha, beta):
    shape, ranges = case
    rows, columns = shape
    weight, basis, factor = random(rows, columns, seed=4), random(columns, rank, seed=5), random(rows, rank, seed=6)
    expected = beta * weight + alpha * (factor @ basis.t())
    flat = weight.clone().reshape(-1)
    for start, stop in ranges:
        part = FlatSlice(shape, start, stop)
        part.apply(flat[start:stop], factor[part.first_row : part.end_row], basis, alpha=alpha, beta=beta)
    torch.testing.assert_close(flat.view(shape), expected, rtol=0, atol=TOLERANCE * scale(expected))


@given(cut_matrices())
@settings(max_examples=300, deadline=None)
def test_cut_rows_name_exactly_the_ranks_that_hold_a_part(case):
    shape, ranges = case
    holders: dict[int, list[int]] = {}
    for rank, (start, stop) in enumerate(ranges):
        for row in range(shape[0]):
            if max(start, row * shape[1]) < min(stop, (row + 1) * shape[1]):
                holders.setdefault(row, []).append(rank)
    counted: list[int] = []
    for rank in range(len(ranges)):
        layout = MatrixLayout(shape, tuple(ranges), rank)
        found = {layout.local.first_row + cut.index: list(cut.ranks) for cut in layout.cut_rows()}
        assert found == {row: ranks for row, ranks in holders.items() if rank in ranks and len(ranks) > 1}
        assert len(found) <= 2
        counted += [layout.local.first_row + index for index in layout.counted_rows()]
    assert sorted(counted) == list(range(shape[0]))


@given(cut_matrices(), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_rowwise_gives_a_shared_row_the_same_bits_on_all_its_ranks(case, rank):
    shape, ranges = case
    moments = random(shape[0], rank, seed=7).float()
    square = random(rank, rank, seed=8).float()
    seen: dict[int, torch.Tensor] = {}
    for start, stop in ranges:
        part = FlatSlice(shape, start, stop)
        product = part.rowwise(moments[part.first_row : part.end_row].clone(), square)
        torch.testing.assert_close(product, (moments @ square)[part.first_row : part.end_row])
        for index in part.partial_rows():
            row = part.first_row + index
            assert torch.equal(seen.setdefault(row, product[index].clone()), product[index])


def test_full_rows_are_used_as_views_without_a_copy():
    part = FlatSlice((5, 4), 2, 18)
    flat = torch.arange(16.0)
    _, body, _ = part._parts(flat)
    assert body.data_ptr() == flat[2:].data_ptr()
    assert body.shape == (3, 4)


def test_an_empty_slice_holds_and_gives_nothing():
    part = FlatSlice((3, 4), 12, 12)
    empty = torch.zeros(0, dtype=torch.float64)
    assert (part.num_rows, part.head, part.tail) == (0, None, None)
    assert part.project(empty, random(4, 2, seed=1)).shape == (0, 2)
    assert torch.equal(
        part.sketch(empty, torch.zeros(0, 2, dtype=torch.float64)), torch.zeros(4, 2, dtype=torch.float64)
    )
    part.apply(empty, torch.zeros(0, 2, dtype=torch.float64), random(4, 2, seed=1), alpha=1.0)


def test_a_slice_inside_one_row_is_all_head():
    part = FlatSlice((2, 10), 12, 15)
    assert (part.head, part.tail, part.num_rows) == ((2, 5), None, 1)


def test_padding_of_the_last_ranks_is_never_part_of_a_range():
    assert even_ranges(10, 3, 4) == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert even_ranges(2, 1, 4) == [(0, 1), (1, 2), (2, 2), (2, 2)]
    with pytest.raises(ValueError, match="cannot hold 10 elements"):
        even_ranges(10, 2, 4)


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        (((0, 4), (5, 12)), "rank 1 holds"),
        (((0, 6), (4, 12)), "rank 1 holds"),
        (((0, 6), (6, 10)), "hold 10 of the 12"),
    ],
)
def test_gaps_overlaps_and_missing_ends_are_refused(ranges, message):
    with pytest.raises(ValueError, match=message):
        MatrixLayout((3, 4), ranges, 0)


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="slice of 4 elements was given a tensor of 5"):
        FlatSlice((2, 4), 0, 4).project(torch.zeros(5), torch.zeros(4, 1))
    with pytest.raises(ValueError, match="does not lie in"):
        FlatSlice((2, 4), 0, 9)
    with pytest.raises(ValueError, match="at least one row"):
        FlatSlice((0, 4), 0, 0)


def test_more_than_two_dimensions_are_seen_as_first_and_rest():
    assert matrix_shape((6, 2, 3)) == (6, 6)
    with pytest.raises(ValueError, match="two dimensions"):
        matrix_shape((6,))
