"""Update rules as pure functions on tensors: no layout, no ranks, no optimizer.

Imports torch alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = [
    "adafactor_decay",
    "adafactor_rate",
    "adamw_direction",
    "adamw_step_size",
    "channel_scaling",
    "growth_limiter",
    "reproject",
]

#: What APOLLO and Fira add to norms that they divide by.
TINY = 1e-8


def adamw_direction(
    grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, betas: tuple[float, float], eps: float
) -> Tensor:
    """Update the moments in place and return ``exp_avg / (sqrt(exp_avg_sq) + eps)``.

    This is AdamW as galore-torch and the former transformers.AdamW have it: ``eps`` is added before the bias of the
    second moment is corrected (Loshchilov and Hutter, arXiv 1711.05101, differ from torch.optim.AdamW only in that).

    Parameters
    ----------
    grad, exp_avg, exp_avg_sq
        Of one shape and dtype. ``grad`` is used as scratch space and returned as the direction.
    betas, eps
        As in Adam.
    """
    beta1, beta2 = betas
    exp_avg.lerp_(grad, 1.0 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
    torch.sqrt(exp_avg_sq, out=grad)
    return torch.div(exp_avg, grad.add_(eps), out=grad)


def adamw_step_size(lr: float, step: int, *, betas: tuple[float, float], correct_bias: bool) -> float:
    """The factor on :func:`adamw_direction` at update number ``step``, counted from 1."""
    if not correct_bias:
        return lr
    return lr * math.sqrt(1.0 - betas[1] ** step) / (1.0 - betas[0] ** step)


def adafactor_decay(step: int, decay_rate: float) -> float:
    """The decay of second moments at update number ``step``: ``1 - step^decay_rate`` (arXiv 1804.04235, 7.2)."""
    return float(1.0 - step**decay_rate)


def adafactor_rate(lr: float, step: int, *, relative_step: bool, warmup_init: bool, scale: float) -> float:
    """The learning rate at update number ``step``, counted from 1 (arXiv 1804.04235, algorithm 5).

    Parameters
    ----------
    lr
        As configured: the rate itself, or with ``relative_step`` not used.
    relative_step
        The smaller of ``1 / sqrt(step)`` and 0.01, or ``step / 10^6`` with ``warmup_init``.
    scale
        What it is multiplied by: the parameter's root mean square, or 1.
    """
    if relative_step:
        lr = min(1e-6 * step if warmup_init else 1e-2, 1.0 / math.sqrt(step))
    return lr * scale


def channel_scaling(direction_squares: Tensor, gradient_squares: Tensor) -> Tensor:
    """By how much Adam scales each channel of a low-rank gradient: ``|N_i| / |R_i|``.

    APOLLO (arXiv 2412.05270, equation 4) scales the full gradient by it, Fira (arXiv 2410.01623, section 4.2) what the
    projection leaves of it.

    Parameters
    ----------
    direction_squares, gradient_squares
        Squared norms of the channels of Adam's direction and of the low-rank gradient, ``(channels,)``, or of the
        whole matrix, ``()``.
    """
    return direction_squares.sqrt().div_(gradient_squares.sqrt().add_(TINY))


def growth_limiter(norm: float, before: float, limit: float | None) -> float:
    """The factor that keeps ``norm`` from growing to more than ``limit`` times what it was ``before``.

    The norm-growth limiter of Fira (arXiv 2410.01623, section 4.3), which APOLLO uses too. 1 at the first update, where
    ``before`` is 0, and without a limit.
    """
    if limit is None or before == 0.0 or not norm > limit * (before + TINY):
        return 1.0
    return limit * (before + TINY) / norm


def reproject(
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    transition: Tensor,
    *,
    step: int,
    betas: tuple[float, float],
    product: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
) -> tuple[Tensor, Tensor]:
    """The moments in a new basis, from those in an old one.

    With ``C = Q_old^T Q_new`` the first moment, a mean of gradients, becomes ``M C``. The second moment is a mean of
    squares in coordinates that change: with ``m`` and ``v`` the bias-corrected moments, the variance ``v - m^2`` of
    coordinates taken as uncorrelated becomes ``(v - m^2) (C o C)``, to which the new mean's square is added (the
    projection-aware step of LDAdam, arXiv 2410.16103, section 3, also used by SubTrack++, arXiv 2502.01586).

    Parameters
    ----------
    exp_avg, exp_avg_sq
        ``(rows, old rank)``.
    transition
        ``C``, ``(old rank, new rank)``.
    step
        Number of updates that the moments have seen; with 0 they are zero, and stay so.
    betas
        As in Adam.
    product
        How ``(rows, old rank)`` is multiplied with ``(old rank, new rank)``; see :meth:`.FlatSlice.rowwise`.

    Returns
    -------
    Tensor, Tensor
        ``(rows, new rank)`` each.
    """
    if step == 0:
        shape = (exp_avg.shape[0], transition.shape[1])
        return exp_avg.new_zeros(shape), exp_avg_sq.new_zeros(shape)
    correction1, correction2 = 1.0 - betas[0] ** step, 1.0 - betas[1] ** step
    variance = torch.addcmul(exp_avg_sq / correction2, exp_avg, exp_avg, value=-1.0 / correction1**2).clamp_(min=0.0)
    mean = product(exp_avg, transition)
    spread = product(variance, transition.square())
    return mean, spread.addcmul_(mean, mean, value=1.0 / correction1**2).mul_(correction2)
