"""Whether a saved state can be continued, and with which hyperparameters.

Imports torch and its neighbours.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_galore.errors import CheckpointMismatchError
from ds_galore.optim.matrices import State
from ds_galore.optim.plan import FlatPlan
from ds_galore.optim.states import StateTensor
from ds_galore.parameters import LowRankParameters

__all__ = ["check_groups", "check_state", "settle_group", "settle_state", "to_device"]

#: Hyperparameters of a group that decide what the state looks like: with another value it cannot be continued.
STRUCTURAL_KEYS = ("rank", "proj_type")


def check_groups(
    groups: Sequence[Mapping[str, Any]], saved_groups: Sequence[Mapping[str, Any]], kind: type[LowRankParameters]
) -> None:
    """Refuse a checkpoint of another update rule, or with other groups, ranks, sides, formats or random bases.

    Raises
    ------
    CheckpointMismatchError
        Naming the key, and both values.
    """
    sizes = [len(group["params"]) for group in groups]
    saved_sizes = [len(group["params"]) for group in saved_groups]
    if sizes != saved_sizes:
        raise CheckpointMismatchError(
            f"the checkpoint's parameter groups hold {saved_sizes} tensors, this optimizer's {sizes}"
        )
    for number, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        rule, own = saved.get("settings", {}).get("rule"), group["settings"]["rule"]
        if rule not in (None, own):  # what versions before did not tell
            raise CheckpointMismatchError(
                f"param_groups[{number}]: the checkpoint was written by the update rule {rule}, this optimizer's is"
                f" {own}; continue with the optimizer that wrote it"
            )
        pairs = [(key, saved.get(key), group[key]) for key in STRUCTURAL_KEYS]
        pairs += [(key, _setting(saved, key, kind), group["settings"][key]) for key in kind.STRUCTURE]
        if "random" in (_setting(saved, "refresh", kind), group["settings"]["refresh"]):
            # The bases are drawn again, not stored: with another seed the moments would lie in none of them.
            pairs += [(key, _setting(saved, key, kind), group["settings"][key]) for key in ("refresh", "seed")]
        for key, found, wanted in pairs:
            if found != wanted:
                raise CheckpointMismatchError(
                    f"param_groups[{number}].{key}: the checkpoint has {found!r}, the configuration {wanted!r};"
                    f" set it to {found!r} to continue that run"
                )


def _setting(saved: Mapping[str, Any], key: str, kind: type[LowRankParameters]) -> Any:
    """A setting of a saved group; what versions before it did not know was as its default is."""
    return saved.get("settings", {}).get(key, kind.model_fields[key].default)


def check_state(
    plan: FlatPlan, expected: Mapping[str, Mapping[str, StateTensor]], saved: State, numbers: Collection[str]
) -> None:
    """Refuse the saved state of a tensor that consists of other parameters, or of tensors of other shapes.

    Parameters
    ----------
    plan
        What the tensor consists of.
    expected
        By parameter and key, what its state must be.
    saved
        The state.
    numbers
        What the update rule keeps of a projected matrix beside tensors.

    Raises
    ------
    CheckpointMismatchError
        Naming the parameter, what was found and what was expected.
    """
    states = saved if plan.nested else {next(iter(expected)): saved}
    if states.keys() != expected.keys():
        odd = sorted(states.keys() ^ expected.keys())[0]
        raise CheckpointMismatchError(
            f"{odd}: is {'in the checkpoint' if odd in states else 'not in the checkpoint'} and"
            f" {'' if odd in expected else 'not '}trained by this optimizer; the model differs from the saved one"
        )
    for name, tensors in expected.items():
        if "projector" not in tensors and "projector" in states[name]:
            raise CheckpointMismatchError(f"{name}: projected in the checkpoint, not in the configuration")
        surplus = [key for key, value in states[name].items() if isinstance(value, Tensor) and key not in tensors]
        if surplus:
            raise CheckpointMismatchError(
                f"{name}: has {surplus[0]!r} in the checkpoint, which this optimizer does not keep; it was written by"
                " another one"
            )
        for key, each in tensors.items():
            value = states[name].get(key)
            found = (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None
            if found is None or found[0] != each.shape:
                raise CheckpointMismatchError(
                    f"{name}: the checkpoint's {key} has shape {found and found[0]}, expected {each.shape}; the"
                    " checkpoint was written by another optimizer, with other target_modules, another projector_storage"
                    " or on another number of ranks"
                )
            if found[1].is_floating_point != each.dtype.is_floating_point:
                raise CheckpointMismatchError(f"{name}: the checkpoint's {key} is {found[1]}, expected {each.dtype}")
    for name, state in _projected_states(plan, saved):
        missing = [key for key in ("step", "has_basis", *numbers) if key not in state]
        if missing:
            raise CheckpointMismatchError(
                f"{name}: {missing[0]!r} is not in the checkpoint; it was written by another optimizer"
            )


def _projected_states(plan: FlatPlan, state: State) -> list[tuple[str, State]]:
    """The names and states of a tensor's projected matrices."""
    names = [matrix.name for batch in plan.batches for matrix in batch.matrices]
    return [(name, state[name] if plan.nested else state) for name in names]


def settle_state(plan: FlatPlan, state: State, *, adaptive_gap: bool) -> None:
    """Let a state just loaded follow the configuration where that turns the adaptive gap on or off."""
    for _, each in _projected_states(plan, state):
        for key in ("gap_factor", "turns_left"):
            if adaptive_gap:
                each.setdefault(key, 1)
            else:
                each.pop(key, None)


def settle_group(
    group: dict[str, Any], ours: Mapping[str, Any], saved: Mapping[str, Any], kind: type[LowRankParameters]
) -> list[str]:
    """Let the configuration win where it differs from the one that a group was saved with.

    The learning rate is otherwise the saved one, since schedulers move it; ``configured_lr`` remembers what was
    configured.

    Parameters
    ----------
    group
        The group, just loaded; changed in place.
    ours
        Its hyperparameters by the configuration.
    saved
        Those of the checkpoint.
    kind
        The model of the hyperparameters.

    Returns
    -------
    list of str
        What differed, for a message each.
    """
    told: list[str] = []

    def compare(key: str, found: object, wanted: object) -> None:
        if found != wanted:
            told.append(
                f"{key}: the checkpoint has {found!r}, the configuration {wanted!r}; continuing with the latter"
            )

    for key in kind.GROUP_KEYS:
        if key != "lr":
            found = saved.get(key)
            compare(key, tuple(found) if isinstance(found, list) else found, ours[key])
            group[key] = ours[key]
    base, wanted = saved.get("configured_lr"), ours["configured_lr"]
    if base != wanted:
        compare("lr", base, wanted)
        # A scheduler's factor stays: it has moved the saved rate, and has not seen this optimizer yet.
        group["lr"] = saved["lr"] * wanted / base if base else ours["lr"]
    group["configured_lr"] = wanted
    for key in kind.SETTINGS:
        default = kind.model_fields[key].default
        compare(key, saved.get("settings", {}).get(key, default), ours["settings"][key])
    group["settings"] = ours["settings"]
    return told


def to_device(value: Any, device: torch.device) -> Any:
    """A copy of a nested state with its tensors on ``device``, in the dtypes that they have."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, dict):
        return {key: to_device(each, device) for key, each in value.items()}
    return value
