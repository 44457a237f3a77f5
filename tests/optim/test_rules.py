"""Update rules against torch's and plain definitions."""

from __future__ import annotations

import pytest
import torch

from ds_galore.optim.rules import adamw_direction, adamw_step_size, reproject
from tests.zero.simulated import random

BETAS = (0.9, 0.99)


def test_the_direction_is_adams_without_its_bias_correction():
    exp_avg, exp_avg_sq = torch.zeros(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    weight = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
    reference = torch.optim.Adam([weight], lr=0.1, betas=BETAS, eps=0.0)
    position = torch.zeros(5, dtype=torch.float64)
    for step in range(1, 6):
        grad = random(5, seed=step)
        weight.grad = grad.clone()
        reference.step()
        direction = adamw_direction(grad.clone(), exp_avg, exp_avg_sq, betas=BETAS, eps=0.0)
        position -= adamw_step_size(0.1, step, betas=BETAS, correct_bias=True) * direction
        torch.testing.assert_close(position, weight.detach())
    assert adamw_step_size(0.1, 3, betas=BETAS, correct_bias=False) == 0.1


def test_moments_carried_into_a_rotated_basis_keep_their_mean_and_total_variance():
    turn, _ = torch.linalg.qr(random(4, 4, seed=1))
    exp_avg, exp_avg_sq = random(6, 4, seed=2) * 0.1, random(6, 4, seed=3).square() + 0.5
    mean, squares = reproject(exp_avg, exp_avg_sq, turn, step=9, betas=BETAS)
    torch.testing.assert_close(mean, exp_avg @ turn)
    assert (squares >= 0).all()
    torch.testing.assert_close(squares.sum(1), exp_avg_sq.sum(1))  # a rotation moves energy, and loses none


def test_the_identity_changes_nothing_and_moments_that_saw_nothing_stay_zero():
    exp_avg, exp_avg_sq = random(6, 4, seed=2) * 0.1, random(6, 4, seed=3).square() + 0.5
    mean, squares = reproject(exp_avg, exp_avg_sq, torch.eye(4, dtype=torch.float64), step=5, betas=BETAS)
    torch.testing.assert_close(mean, exp_avg)
    torch.testing.assert_close(squares, exp_avg_sq)
    for moment in reproject(torch.zeros(2, 4), torch.zeros(2, 4), torch.ones(4, 3), step=0, betas=BETAS):
        assert moment.shape == (2, 3)
        assert not moment.any()


@pytest.mark.parametrize("step", [1, 50])
def test_a_mean_of_squares_below_the_square_of_the_mean_is_not_carried_as_negative(step):
    exp_avg, exp_avg_sq = torch.ones(3, 2), torch.zeros(3, 2)
    mean, squares = reproject(exp_avg, exp_avg_sq, torch.eye(2), step=step, betas=BETAS)
    torch.testing.assert_close(mean, exp_avg)
    assert (squares >= 0).all()
