"""Update rules as pure functions on tensors: no layout, no ranks, no optimizer.

Imports torch alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["adamw_direction", "adamw_step_size", "reproject"]


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


def reproject(
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    transition: Tensor,
    *,
    step: int,
    betas: tuple[float, float],
    product: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
) -> None:
    """Carry the moments from an old basis into a new one, in place.

    With ``C = Q_old^T Q_new`` the first moment, a mean of gradients, becomes ``M C``. The second moment is a mean of
    squares in coordinates that change: with ``m`` and ``v`` the bias-corrected moments, the variance ``v - m^2`` of
    coordinates taken as uncorrelated becomes ``(v - m^2) (C o C)``, to which the new mean's square is added (the
    projection-aware step of LDAdam, arXiv 2410.16103, section 3, also used by SubTrack++, arXiv 2502.01586).

    Parameters
    ----------
    exp_avg, exp_avg_sq
        ``(rows, rank)``, overwritten.
    transition
        ``C``, ``(rank, rank)``.
    step
        Number of updates that the moments have seen; with 0 they are zero, and stay so.
    betas
        As in Adam.
    product
        How ``(rows, rank)`` is multiplied with ``(rank, rank)``; see :meth:`.FlatSlice.rowwise`.
    """
    if step == 0:
        return
    correction1, correction2 = 1.0 - betas[0] ** step, 1.0 - betas[1] ** step
    variance = torch.addcmul(exp_avg_sq / correction2, exp_avg, exp_avg, value=-1.0 / correction1**2).clamp_(min=0.0)
    exp_avg.copy_(product(exp_avg, transition))
    spread = product(variance, transition.square())
    exp_avg_sq.copy_(spread.addcmul_(exp_avg, exp_avg, value=1.0 / correction1**2).mul_(correction2))
