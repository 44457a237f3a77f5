"""The optimizers that the planner knows, by name, and what each keeps with its parameters. Imports nothing of torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ds_galore.errors import ConfigError
from ds_galore.parameters import ALIASES, LAYERWISE
from ds_galore.parameters import OPTIMIZERS as _TYPES
from ds_galore.tools.formats import FORMATS
from ds_galore.tools.memory import Kept

__all__ = [
    "OPTIMIZERS",
    "Optimizer",
    "configured",
    "largest_rank",
    "optimizer_named",
]

#: Hyperparameters that decide what is kept, and how.
_KEPT_BY = ("moment_dtype", "unprojected_moment_dtype", "projector_dtype", "refresh", "beta1")
_KEPT_AS = ("projector_storage", "proj_type")


@dataclass(frozen=True)
class Optimizer:
    """What an optimizer keeps.

    Parameters
    ----------
    name
        Of :data:`OPTIMIZERS`.
    moments
        Numbers for each element; of a factored one, first moments only.
    factored
        Whether the second moment of a matrix is kept as a row and a column (Adafactor). Of optimizers that are not ours
        this is not so under ZeRO 1 to 3, which hand them flat vectors.
    low_rank
        Whether gradients of matrices are projected.
    low_rank_update
        Whether the updates of those matrices are of low rank too, as GaLore's are, and APOLLO's and Fira's are not.
    ours
        Whether this package has it.
    moment_dtype
        Of the moments; None is for the precision of the states.
    unprojected_moment_dtype
        The same of what is not projected; None is as ``moment_dtype``.
    projector_dtype
        Of projectors.
    refresh
        How a basis is found; ``"random"`` keeps no projectors.
    gap
        Steps between two refreshes of a matrix.
    lowered
        Whether gradients of projected matrices are lowered when they arrive.
    """

    name: str
    moments: int
    factored: bool = False
    low_rank: bool = False
    low_rank_update: bool = False
    ours: bool = False
    moment_dtype: str | None = None
    unprojected_moment_dtype: str | None = None
    projector_dtype: str = "fp32"
    refresh: str = "subspace"
    gap: int = 200
    lowered: bool = False

    @property
    def keeps_projectors(self) -> bool:
        """Whether it does."""
        return self.low_rank and self.refresh != "random"

    def kept(self, state_precision: str = "fp32") -> Kept:
        """What it keeps, where states are of ``state_precision`` unless it says otherwise."""
        moments = FORMATS[self.moment_dtype or state_precision]
        unprojected = FORMATS[self.unprojected_moment_dtype] if self.unprojected_moment_dtype else moments
        factored = FORMATS["fp32" if self.ours else state_precision] if self.factored else None
        return Kept(
            self.moments,
            projected=moments,
            unprojected=unprojected,
            projectors=FORMATS[self.projector_dtype] if self.keeps_projectors else None,
            factored=factored,
            flat=not self.ours,
            lowered_gap=self.gap if self.lowered else None,
        )


def _optimizers() -> dict[str, Optimizer]:
    plain = {"sgd": 0, "sgd_momentum": 1, "adam": 2, "adamw": 2, "lion": 1, "adafactor": 0}
    found = []
    for low_rank in (False, True):
        for name, moments in plain.items():
            each = Optimizer(f"galore_{name}" if low_rank else name, moments, name == "adafactor", low_rank, low_rank)
            found += [each] if not moments else [each, replace(each, name=f"{each.name}_8bit", moment_dtype="8bit")]
    ours = ("galore_adamw", "galore_adamw_8bit", "galore_adafactor")
    found = [replace(each, ours=each.name in ours) for each in found]
    found.append(Optimizer("apollo_adamw", 2, low_rank=True, ours=True, refresh="random"))
    found.append(Optimizer("fira_adamw", 2, low_rank=True, ours=True))
    return {each.name: each for each in found}


OPTIMIZERS = _optimizers()
#: Of those that are ours, the types by the names above.
_OURS = {**ALIASES, "fira_adamw": "FiraAdamW"}
#: By the names above, the hyperparameters of those that are ours.
_PARAMETERS = {name: _TYPES[kind] for name, kind in _OURS.items()}


def _plain(name: str) -> str:
    return re.sub(r"_?8_?bit$", "_8bit", name.lower().replace("-", "_"))


#: Names that DeepSpeed, torch and this package have for some of them.
_ALIASES = {
    **{_plain(kind): name for name, kind in _OURS.items()},
    **{name: name.removesuffix("_layerwise") for name in LAYERWISE},
    "fusedadam": "adamw",
    "deepspeedcpuadam": "adamw",
    "fusedlion": "lion",
}


def optimizer_named(name: str) -> Optimizer:
    """An optimizer by its name, whatever its case and dashes.

    Raises
    ------
    ConfigError
        If none has it.
    """
    plain = _plain(name)
    found = OPTIMIZERS.get(_ALIASES.get(plain, plain))
    if found is None:
        from ds_galore.config import nearest

        raise ConfigError(f"optimizer is {name!r}: no such optimizer{nearest(plain, OPTIMIZERS)}")
    return found


def configured(optimizer: Optimizer, params: Mapping[str, Any], *, where: str = "optimizer.params") -> Optimizer:
    """One of our optimizers with its parameters.

    Parameters
    ----------
    optimizer
        By whose name.
    params
        As in ``optimizer.params`` of the JSON; those that say nothing of what is kept are left alone.
    where
        What to call their place in messages.

    Raises
    ------
    ConfigError
        For a value that is not allowed.
    """
    if not optimizer.ours:
        return optimizer
    from ds_galore.config import validate

    model = _PARAMETERS[optimizer.name]
    keys = [key for key in (*_KEPT_BY, *_KEPT_AS) if key in model.model_fields and params.get(key) is not None]
    checked = validate(model, {key: params[key] for key in keys}, where=where)
    found: dict[str, Any] = {"projector_dtype": checked.projector_dtype, "refresh": checked.refresh}
    for key in ("moment_dtype", "unprojected_moment_dtype"):
        if key in keys:  # else as the precision of the states
            found[key] = getattr(checked, key)
    gap = params.get("update_proj_gap")
    found["gap"] = gap if isinstance(gap, int) and gap > 0 else model.model_fields["update_proj_gap"].default
    found["lowered"] = params.get("gradients") == "lowrank"
    if optimizer.factored and "beta1" in keys:
        return replace(optimizer, moments=1, **found)
    return replace(optimizer, **found)


def largest_rank(rank: object, *, where: str = "optimizer.params.rank") -> int | None:
    """The rank for which memory is planned: the largest that a rank by energy may come to.

    Raises
    ------
    ConfigError
        If it is no rank, or names no largest one.
    """
    most = rank.get("max") if isinstance(rank, Mapping) else rank
    if most is None and not isinstance(rank, Mapping):
        return None
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise ConfigError(f"{where} is {rank!r}: it must be a whole number above 0, or name one as its 'max'")
    return most
