"""The optimizers of the family, by name: each is the model of its hyperparameters and its update rule.

Imports torch and its neighbours; never DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ds_galore.optim import updates
from ds_galore.optim.optimizer import LowRankOptimizer
from ds_galore.parameters import (
    AdafactorParameters,
    APOLLOParameters,
    EightBitParameters,
    FiraParameters,
    GaLoreParameters,
)

__all__ = ["APOLLOAdamW", "FiraAdamW", "GaLoreAdafactor", "GaLoreAdamW", "GaLoreAdamW8bit", "LowRankOptimizer"]


class _Adam(LowRankOptimizer):
    """What those that are built on Adam have in common: the order of their first arguments."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
        *,
        model: nn.Module | None = None,
        **values: Any,
    ) -> None:
        plain = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "correct_bias": correct_bias}
        super().__init__(params, model=model, **plain, **values)


class GaLoreAdamW(_Adam):
    """AdamW whose moments of chosen matrices live in a low-rank subspace of their gradients.

    The algorithm is GaLore (Zhao et al., arXiv 2403.03507), and with ``refresh="svd"``, ``stagger_refresh=False`` and
    ``reproject_moments=False`` every number is galore-torch's.

    Parameters
    ----------
    params
        Parameters, ``(name, parameter)`` pairs, or groups of either. A group may set ``lr``, ``betas``, ``eps``,
        ``weight_decay``, ``correct_bias``, ``rank``, ``update_proj_gap``, ``scale`` and ``proj_type`` for itself.
        As in galore-torch, all matrices of a group that sets ``rank`` are projected.
    lr, betas, eps, weight_decay, correct_bias
        As in transformers' former AdamW, which galore-torch uses.
    rank
        Of the projection, for parameters outside groups that set their own. A matrix with a side no longer than
        ``rank`` is trained with plain AdamW, and a warning names it. Or ``{"energy": share, "max": rank}``: the
        smallest rank whose basis captures that share of the gradient's squared norm, found at each refresh.
    update_proj_gap
        Steps between two refreshes of a matrix's basis.
    scale
        Factor on the low-rank update (the paper's alpha).
    proj_type
        ``"right"``, ``"left"``, ``"std"`` (right where rows >= columns, else left) or ``"reverse_std"``.
    refresh
        ``"subspace"``: ``power_iterations`` passes of block power iteration from the basis in use, at first from a
        random block. ``"svd"``: the SVD of the gradient, gathered on one rank. ``"random"``: a Gaussian basis drawn
        from ``seed``, anew at each step, so that nothing is stored or sent.
    first_basis
        ``"gradient"``, or ``"random"`` until a matrix's first turn.
    adaptive_gap, stable_overlap, max_gap_factor
        Whether a matrix's gap doubles, up to so many times, after each refresh at which ``|Q_old^T Q_new|^2 / rank``
        is at least ``stable_overlap``; else it falls back to ``update_proj_gap`` (the lazy updates of Q-GaLore, arXiv
        2407.08296, measured on the subspace, so that signs and order of the columns do not matter).
    stagger_refresh
        Matrices refresh on different steps of the gap, spread by what their refreshes cost, instead of all on the
        first.
    refresh_budget
        The most matrices that refresh on one step; the gap is stretched where that needs it.
    reproject_moments
        Carry the moments into the new basis at a refresh (:func:`.reproject`); galore-torch does not.
    target_modules
        Which modules ``rank`` is for: see :mod:`.targets`.
    moment_dtype, unprojected_moment_dtype
        What moments are kept as, and those of embeddings, head and norms: ``"fp32"``, ``"bf16"`` (stochastically
        rounded) or ``"8bit"`` (block-wise dynamic quantisation by bitsandbytes).
    projector_storage
        ``"replicated"``, ``"sharded"``, or ``"auto"``: sharded where replicated right projectors would take more
        memory than the moments. Left projectors are always partitioned as the weights are.
    projector_dtype, projector_rounding
        ``"fp32"``, ``"bf16"``, ``"int8"`` or ``"int4"`` (two to a byte); rounded to the ``"nearest"``, or
        ``"stochastic"``.
    stochastic_rounding
        Round updates of bf16 weights, where there are no fp32 masters, stochastically.
    seed
        Of random starts, random bases and rounding.
    model
        The model that ``params`` belong to: gives their names, and tells layers apart for ``target_modules``.

    Raises
    ------
    ConfigError
        For impossible hyperparameters, unknown group keys, or ``target_modules`` that match nothing.
    """

    parameters_model = GaLoreParameters
    rule_type = updates.AdamW


class GaLoreAdamW8bit(_Adam):
    """:class:`GaLoreAdamW` with moments quantised block-wise to 8 bits, as bitsandbytes' AdamW8bit keeps them.

    Parameters are those of :class:`GaLoreAdamW`. Embeddings and head are 8-bit too unless ``unprojected_moment_dtype``
    says otherwise; parameters of fewer than 4096 elements stay in float32.
    """

    parameters_model = EightBitParameters
    rule_type = updates.AdamW


class GaLoreAdafactor(LowRankOptimizer):
    """Adafactor on low-rank gradients, as galore-torch's GaLoreAdafactor; factored also where ranks share a matrix.

    Parameters beside those of :class:`GaLoreAdamW` that concern projection:

    Parameters
    ----------
    lr
        Learning rate. Other than in galore-torch, ``relative_step`` and ``scale_parameter`` are off unless asked for,
        as Hugging Face's Trainer has them, so that ``lr`` and its scheduler count.
    eps, clip_threshold, decay_rate, beta1, scale_parameter, relative_step, warmup_init
        As in transformers' Adafactor.
    """

    parameters_model = AdafactorParameters
    rule_type = updates.Adafactor


class APOLLOAdamW(_Adam):
    """APOLLO (Zhu et al., arXiv 2412.05270): the full gradient, scaled as AdamW scales a random low-rank image of it.

    Parameters beside those of :class:`GaLoreAdamW`:

    Parameters
    ----------
    scaling
        ``"channel"``: a factor for each row (for each column where projected from the left). ``"tensor"``: one for the
        matrix: APOLLO-Mini, with ``rank=1`` and ``scale=sqrt(128)``.
    norm_growth_limit
        The most that the scaled gradient's norm may grow by from one step to the next; None is no limit.
    """

    parameters_model = APOLLOParameters
    rule_type = updates.APOLLO


class FiraAdamW(_Adam):
    """Fira (Chen et al., arXiv 2410.01623): GaLore's update, and the rest of the gradient, scaled in the same measure.

    Parameters beside those of :class:`GaLoreAdamW`:

    Parameters
    ----------
    norm_growth_limit
        The most that the scaled rest's norm may grow by from one step to the next; None is no limit.
    """

    parameters_model = FiraParameters
    rule_type = updates.Fira
