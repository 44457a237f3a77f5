"""The hyperparameters of the optimizers: ``optimizer.params`` in the JSON, or keyword arguments.

One model for each optimizer; names and meanings are those of galore-torch, of Hugging Face's Trainer and of the
papers. Imports pydantic alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

__all__ = [
    "ALIASES",
    "OPTIMIZERS",
    "APOLLOParameters",
    "AdafactorParameters",
    "EightBitParameters",
    "EnergyRank",
    "FiraParameters",
    "GaLoreParameters",
    "LowRankParameters",
    "choices",
]


def _pair(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


class EnergyRank(BaseModel):
    """``rank`` as a share of a gradient's energy: the smallest rank whose basis captures it, found at each refresh."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    energy: Annotated[float, Field(gt=0, lt=1, description="Share of the gradient's squared norm to be captured.")]
    max: Annotated[int, Field(ge=1, description="The largest rank, which memory is planned for.")]


class LowRankParameters(BaseModel):
    """What all optimizers of the family have in common: projection, refreshes, storage."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    #: Hyperparameters that a parameter group may set for itself.
    GROUP_KEYS: ClassVar[tuple[str, ...]] = ("lr", "weight_decay", "rank", "update_proj_gap", "scale", "proj_type")
    #: Those of the whole optimizer that decide how it goes on from a state.
    SETTINGS: ClassVar[tuple[str, ...]] = (
        "refresh",
        "power_iterations",
        "first_basis",
        "adaptive_gap",
        "stable_overlap",
        "max_gap_factor",
        "refresh_budget",
        "stagger_refresh",
        "reproject_moments",
        "moment_dtype",
        "unprojected_moment_dtype",
        "projector_dtype",
        "projector_rounding",
        "stochastic_rounding",
        "seed",
        "gradients",
    )
    #: Those that decide what the state looks like: a state saved with another value cannot be continued.
    STRUCTURE: ClassVar[tuple[str, ...]] = ("moment_dtype", "unprojected_moment_dtype", "projector_dtype")

    lr: Annotated[float, Field(ge=0, allow_inf_nan=False, description="Learning rate.")] = 1e-3
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False, description="Decoupled weight decay.")] = 0.0
    rank: Annotated[
        Annotated[
            Annotated[int, Field(ge=1), Tag("<number>")] | Annotated[EnergyRank, Tag("<section>")],
            Discriminator(lambda value: "<section>" if isinstance(value, dict | EnergyRank) else "<number>"),
        ]
        | None,
        Field(
            description="Rank of the projection; or {'energy': 0.95, 'max': 256}, to let each matrix have the rank that"
            " captures so much of its gradient's energy; None projects nothing."
        ),
    ] = None
    update_proj_gap: Annotated[int, Field(ge=1, description="Steps between two refreshes of a matrix's basis.")] = 200
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False, description="Factor on a projected matrix's update.")] = (
        0.25
    )
    proj_type: Annotated[
        Literal["right", "left", "std", "reverse_std"],
        Field(
            description="Side of the projection. std: right where rows >= columns, else left; reverse_std: the other."
        ),
    ] = "right"
    refresh: Annotated[
        Literal["subspace", "svd", "random"],
        Field(
            description="How a basis is found: block power iteration from the old one, a full SVD, or drawn at random"
            " from the seed, which stores and sends nothing."
        ),
    ] = "subspace"
    power_iterations: Annotated[int, Field(ge=1, le=16, description="Passes of a subspace refresh.")] = 1
    first_basis: Annotated[
        Literal["gradient", "random"],
        Field(
            description="The first basis: of the first gradient, or at random until a matrix's turn in the first gap."
        ),
    ] = "gradient"
    gradients: Annotated[
        Literal["full", "lowrank"],
        Field(
            description="How gradients are kept until the step: at full size, or, under ZeRO 3, of projected matrices"
            " the low-rank gradient alone."
        ),
    ] = "full"
    adaptive_gap: Annotated[
        bool, Field(description="Double a matrix's gap while its basis is stable, and go back to the gap when not.")
    ] = False
    stable_overlap: Annotated[
        float,
        Field(gt=0, le=1, description="Overlap |Q_old^T Q_new|^2 / rank from which a basis counts as stable."),
    ] = 0.6
    max_gap_factor: Annotated[int, Field(ge=1, description="The most that a gap is stretched by.")] = 8
    refresh_budget: Annotated[
        int | None,
        Field(ge=1, description="The most matrices that refresh on one step; stretches the gap where it has to."),
    ] = None
    stagger_refresh: Annotated[bool, Field(description="Refresh different matrices on different steps of the gap.")] = (
        True
    )
    reproject_moments: Annotated[bool, Field(description="Carry the moments into the new basis at a refresh.")] = True
    target_modules: Annotated[
        str | list[str] | None,
        Field(
            description="Which modules are projected, as Hugging Face's optim_target_modules: a regular expression for"
            " the whole module name, a list of such expressions or parts of names, or 'all-linear' (the default where"
            " the model is known), which leaves out the output head."
        ),
    ] = None
    moment_dtype: Annotated[
        Literal["fp32", "bf16", "8bit"],
        Field(
            description="What moments are kept as: bf16 is rounded stochastically, 8bit quantised block-wise"
            " (bitsandbytes' dynamic map)."
        ),
    ] = "fp32"
    unprojected_moment_dtype: Annotated[
        Literal["fp32", "bf16", "8bit"] | None,
        Field(description="The same for embeddings, head and norms; None is as moment_dtype."),
    ] = None
    projector_storage: Annotated[
        Literal["auto", "replicated", "sharded"],
        Field(description="Right projectors on every rank, or 1/world_size on each and gathered at each step."),
    ] = "auto"
    projector_dtype: Annotated[
        Literal["fp32", "bf16", "int8", "int4"],
        Field(description="What projectors are stored and sent as; int8 and int4 with a scale per 256 numbers."),
    ] = "fp32"
    projector_rounding: Annotated[
        Literal["nearest", "stochastic"], Field(description="How projectors are rounded to bf16, int8 or int4.")
    ] = "nearest"
    stochastic_rounding: Annotated[
        bool, Field(description="Round updates of bf16 weights without fp32 masters stochastically.")
    ] = False
    seed: Annotated[int, Field(ge=0, description="Seed of random bases and of stochastic rounding.")] = 0

    @model_validator(mode="before")
    @classmethod
    def _first_at_random(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("gradients") == "lowrank":
            return {"first_basis": "random", **values}
        return values

    @model_validator(mode="after")
    def _together(self) -> LowRankParameters:
        if isinstance(self.rank, EnergyRank):
            if not self.reproject_moments:
                raise ValueError("reproject_moments is False: a rank by energy changes, and the moments must follow it")
            if self.refresh == "random":
                raise ValueError("refresh is 'random': a random basis has no energy to choose a rank by")
        if self.refresh == "random" and self.adaptive_gap:
            raise ValueError("adaptive_gap is True, and refresh is 'random': random bases are never stable")
        for key in ("projector_storage", "projector_dtype", "projector_rounding"):
            if self.refresh == "random" and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} is {getattr(self, key)!r}, and refresh 'random': random bases are not stored")
        if self.projector_rounding == "stochastic" and self.projector_dtype == "fp32":
            raise ValueError("projector_rounding is 'stochastic', and projector_dtype 'fp32': nothing is rounded")
        if self.gradients == "lowrank":
            if self.proj_type != "right":
                raise ValueError(
                    f"gradients is 'lowrank', and proj_type {self.proj_type!r}: gradients are lowered from the right"
                )
            if not self.stagger_refresh:
                raise ValueError("gradients is 'lowrank', and stagger_refresh False: all are whole when all refresh")
            if self.first_basis != "random":
                raise ValueError(
                    "gradients is 'lowrank', and first_basis 'gradient': all first gradients would have to be whole"
                )
        if self.first_basis == "random" and not self.stagger_refresh:
            raise ValueError(
                "first_basis is 'random', and stagger_refresh False: all matrices refresh on the first step"
            )
        if self.refresh_budget is not None and not self.stagger_refresh:
            raise ValueError("refresh_budget is set, and stagger_refresh False: all matrices refresh on the same step")
        return self


class GaLoreParameters(LowRankParameters):
    """``GaLoreAdamW``: AdamW on low-rank gradients (Zhao et al., arXiv 2403.03507)."""

    GROUP_KEYS: ClassVar[tuple[str, ...]] = (*LowRankParameters.GROUP_KEYS, "betas", "eps", "correct_bias")

    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]],
        BeforeValidator(_pair),
        Field(description="Decay rates of the first and the second moment."),
    ] = (0.9, 0.999)
    eps: Annotated[float, Field(gt=0, allow_inf_nan=False, description="Added to the root of the second moment.")] = (
        1e-6
    )
    correct_bias: Annotated[bool, Field(description="Correct the moments' bias towards zero in early steps.")] = True


class EightBitParameters(GaLoreParameters):
    """``GaLoreAdamW8bit``: the same with 8-bit moments."""

    moment_dtype: Annotated[Literal["8bit"], Field(description="What moments are kept as.")] = "8bit"
    projector_dtype: Annotated[
        Literal["fp32", "bf16", "int8", "int4"],
        Field(description="What projectors are stored and sent as; int8 and int4 with a scale per 256 numbers."),
    ] = "int8"  # as good a loss as fp32 projectors, for a quarter of the memory: docs/performance.md


class AdafactorParameters(LowRankParameters):
    """``GaLoreAdafactor``: Adafactor (Shazeer and Stern, arXiv 1804.04235) on low-rank gradients."""

    GROUP_KEYS: ClassVar[tuple[str, ...]] = (
        *LowRankParameters.GROUP_KEYS,
        *("eps", "clip_threshold", "decay_rate", "scale_parameter", "relative_step", "warmup_init"),
    )
    SETTINGS: ClassVar[tuple[str, ...]] = (*LowRankParameters.SETTINGS, "beta1")

    eps: Annotated[
        tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]],
        BeforeValidator(_pair),
        Field(description="Added to squared gradients, and the least scale of a parameter."),
    ] = (1e-30, 1e-3)
    clip_threshold: Annotated[float, Field(gt=0, description="The most that an update's root mean square may be.")] = (
        1.0
    )
    decay_rate: Annotated[float, Field(lt=0, description="Exponent of the second moments' decay.")] = -0.8
    beta1: Annotated[
        float | None, Field(ge=0, lt=1, description="Decay rate of the first moment; None keeps none.")
    ] = None
    scale_parameter: Annotated[bool, Field(description="Scale the learning rate by the parameter's RMS.")] = False
    relative_step: Annotated[
        bool, Field(description="A learning rate that falls with the steps from 0.01 on, in place of lr.")
    ] = False
    warmup_init: Annotated[bool, Field(description="Let relative steps grow from zero.")] = False

    @model_validator(mode="after")
    def _steps(self) -> AdafactorParameters:
        if self.warmup_init and not self.relative_step:
            raise ValueError("warmup_init is True: it is for relative_step, which is False")
        if self.beta1 is None:
            for key in ("moment_dtype", "unprojected_moment_dtype"):
                if getattr(self, key) not in (None, "fp32"):
                    raise ValueError(
                        f"{key} is {getattr(self, key)!r}, and beta1 None: without a first moment all moments are fp32"
                    )
        return self


def _refuse_lowrank_gradients(parameters: LowRankParameters, kind: str) -> None:
    if parameters.gradients == "lowrank":
        raise ValueError(f"gradients is 'lowrank': {kind} updates with full gradients")


class APOLLOParameters(GaLoreParameters):
    """``APOLLOAdamW``: full-rank gradients scaled by low-rank AdamW (Zhu et al., arXiv 2412.05270)."""

    SETTINGS: ClassVar[tuple[str, ...]] = (*LowRankParameters.SETTINGS, "scaling", "norm_growth_limit")

    scale: Annotated[float, Field(gt=0, allow_inf_nan=False, description="Factor on a projected matrix's update.")] = (
        1.0
    )
    refresh: Annotated[
        Literal["random", "subspace", "svd"],
        Field(description="How a basis is found: drawn at random from the seed, or as in GaLore."),
    ] = "random"
    reproject_moments: Annotated[bool, Field(description="Carry the moments into the new basis at a refresh.")] = False
    scaling: Annotated[
        Literal["channel", "tensor"],
        Field(description="One factor for each row (column, from the left), or one for a matrix (APOLLO-Mini)."),
    ] = "channel"
    norm_growth_limit: Annotated[
        float | None,
        Field(gt=1, allow_inf_nan=False, description="The most that an update's norm may grow by; None is no limit."),
    ] = 1.01

    @model_validator(mode="after")
    def _whole(self) -> APOLLOParameters:
        _refuse_lowrank_gradients(self, "APOLLO")
        return self


class FiraParameters(GaLoreParameters):
    """``FiraAdamW``: GaLore, and what it leaves of the gradient, scaled (Chen et al., arXiv 2410.01623)."""

    SETTINGS: ClassVar[tuple[str, ...]] = (*LowRankParameters.SETTINGS, "norm_growth_limit")

    norm_growth_limit: Annotated[
        float | None,
        Field(gt=1, allow_inf_nan=False, description="The most that the residual's norm may grow by; None: no limit."),
    ] = 1.01

    @model_validator(mode="after")
    def _orthonormal(self) -> FiraParameters:
        if self.refresh == "random":
            raise ValueError(
                "refresh is 'random': what Fira adds needs a basis of orthonormal columns, which it is not"
            )
        _refuse_lowrank_gradients(self, "Fira")
        return self


#: By the name of an optimizer, as ``enable()`` registers it with DeepSpeed, its hyperparameters.
OPTIMIZERS: Mapping[str, type[LowRankParameters]] = {
    "GaLoreAdamW": GaLoreParameters,
    "GaLoreAdamW8bit": EightBitParameters,
    "GaLoreAdafactor": AdafactorParameters,
    "APOLLOAdamW": APOLLOParameters,
    "FiraAdamW": FiraParameters,
}


def choices(key: str) -> tuple[str, ...]:
    """The words that a hyperparameter may be."""

    def words(annotation: Any) -> list[str]:
        found = [word for word in get_args(annotation) if isinstance(word, str)]
        return found or [word for each in get_args(annotation) for word in words(each)]

    return tuple(words(LowRankParameters.model_fields[key].annotation))


#: Hugging Face's names of some of them.
ALIASES: Mapping[str, str] = {
    "galore_adamw": "GaLoreAdamW",
    "galore_adamw_8bit": "GaLoreAdamW8bit",
    "galore_adafactor": "GaLoreAdafactor",
    "apollo_adamw": "APOLLOAdamW",
}
#: Hugging Face's names of those that keep low-rank gradients alone, and what they stand for with ``gradients`` so set.
LAYERWISE: Mapping[str, str] = {
    f"{name}_layerwise": ALIASES[name] for name in ("galore_adamw", "galore_adamw_8bit", "galore_adafactor")
}


def named(kind: str, values: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """An optimizer and its hyperparameters from one of its names, as a configuration has them."""
    if kind in LAYERWISE:
        return LAYERWISE[kind], {"gradients": "lowrank", **values}
    return ALIASES.get(kind, kind), dict(values)
