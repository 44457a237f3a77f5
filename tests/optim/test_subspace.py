"""Bases of leading subspaces against the SVD."""

from __future__ import annotations

import pytest
import torch

from ds_galore.optim.subspace import OVERSAMPLING, leading_basis, random_start, singular_basis
from tests.zero.simulated import random


def spectrum(rows: int, columns: int, values: torch.Tensor, seed: int = 0) -> torch.Tensor:
    left, _ = torch.linalg.qr(random(rows, len(values), seed=seed))
    right, _ = torch.linalg.qr(random(columns, len(values), seed=seed + 1))
    return left @ torch.diag(values.double()) @ right.t()


@pytest.mark.parametrize("decay", [0.0, -2.0, -4.0, -6.0, -12.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_basis_is_orthonormal_and_ordered_whatever_the_blocks_condition(decay, dtype):
    block = spectrum(60, 20, torch.logspace(0, decay, 20)).to(dtype)
    basis = leading_basis(block, 12)
    assert basis.dtype == dtype
    torch.testing.assert_close(basis.t() @ basis, torch.eye(12, dtype=dtype), atol=2e-6, rtol=0)
    energy = (basis.t() @ block).norm(dim=1)
    assert (energy[1:] <= energy[:-1] * (1 + 1e-4) + 1e-6).all()
    if -6 <= decay < 0:
        exact = torch.linalg.svdvals(block.double())[:12]
        torch.testing.assert_close(energy.double(), exact, rtol=1e-3, atol=1e-6)


def test_a_block_of_too_low_a_rank_still_gives_orthonormal_columns():
    basis = leading_basis(spectrum(30, 10, torch.tensor([3.0, 2.0, 1.0])).float(), 6)
    torch.testing.assert_close(basis.t() @ basis, torch.eye(6), atol=1e-5, rtol=0)


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_a_block_that_tells_nothing_gives_no_basis(bad):
    block = torch.zeros(6, 4)
    block[2, 1] = bad
    assert leading_basis(block, 2) is None
    assert singular_basis(block, 2, left=True) is None


def test_tiny_blocks_do_not_underflow():
    block = (spectrum(20, 8, torch.logspace(0, -1, 8)) * 1e-35).float()
    basis = leading_basis(block, 4)
    torch.testing.assert_close(basis.t() @ basis, torch.eye(4), atol=1e-5, rtol=0)


@pytest.mark.parametrize("left", [True, False])
def test_singular_bases_are_the_leading_singular_vectors(left):
    matrix = random(9, 7, seed=3)
    basis = singular_basis(matrix, 3, left=left)
    u, _, vh = torch.linalg.svd(matrix)
    assert torch.equal(basis, u[:, :3] if left else vh[:3].t())


def test_random_starts_differ_between_matrices_and_seeds_and_are_the_same_on_every_rank():
    like = torch.zeros(1)
    first = random_start(50, 4, seed=1, index=2, like=like)
    assert first.shape == (50, 4 + OVERSAMPLING)
    assert torch.equal(first, random_start(50, 4, seed=1, index=2, like=like))
    assert not torch.equal(first, random_start(50, 4, seed=1, index=3, like=like))
    assert not torch.equal(first, random_start(50, 4, seed=2, index=2, like=like))
    assert random_start(6, 4, seed=0, index=0, like=like).shape == (6, 6)
