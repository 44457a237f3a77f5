"""The optimizers that the planner knows, by name, and what each keeps with its parameters. Imports nothing of torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ds_galore.errors import ConfigError
from ds_galore.tools.formats import FORMATS, MOMENT_DTYPES, PROJECTOR_DTYPES, format_named
from ds_galore.tools.memory import Kept

__all__ = [
    "OPTIMIZERS",
    "PROJ_TYPES",
    "REFRESHES",
    "STORAGES",
    "Optimizer",
    "configured",
    "largest_rank",
    "optimizer_named",
]

REFRESHES = ("subspace", "svd", "random")
STORAGES = ("auto", "replicated", "sharded")
PROJ_TYPES = ("right", "left", "std", "reverse_std")


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
    found = [replace(each, projector_dtype="int8") if each.name == "galore_adamw_8bit" else each for each in found]
    found.append(Optimizer("apollo_adamw", 2, low_rank=True, ours=True, refresh="random"))
    found.append(Optimizer("fira_adamw", 2, low_rank=True, ours=True))
    return {each.name: each for each in found}


OPTIMIZERS = _optimizers()
#: Names that DeepSpeed, torch and this package have for some of them.
_ALIASES = {
    "galoreadamw": "galore_adamw",
    "galoreadamw_8bit": "galore_adamw_8bit",
    "galoreadafactor": "galore_adafactor",
    "apolloadamw": "apollo_adamw",
    "firaadamw": "fira_adamw",
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
    plain = re.sub(r"_?8_?bit$", "_8bit", name.lower().replace("-", "_"))
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
    given = {key: value for key, value in params.items() if value is not None}
    found: dict[str, Any] = {}
    for key, allowed in (
        ("moment_dtype", MOMENT_DTYPES if optimizer.moment_dtype is None else (optimizer.moment_dtype,)),
        ("unprojected_moment_dtype", MOMENT_DTYPES),
        ("projector_dtype", PROJECTOR_DTYPES),
    ):
        if key in given:
            found[key] = format_named(given[key], allowed, where=f"{where}.{key}").name
    for key, allowed in (("refresh", REFRESHES), ("projector_storage", STORAGES), ("proj_type", PROJ_TYPES)):
        if key in given and given[key] not in allowed:
            raise ConfigError(f"{where}.{key} is {given[key]!r}: it must be {', '.join(allowed)}")
    if "refresh" in given:
        found["refresh"] = given["refresh"]
    if optimizer.factored and given.get("beta1") is not None:
        found["moments"] = 1
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
