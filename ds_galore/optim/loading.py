"""Whether a saved state can be continued, and with which hyperparameters.

Imports torch and its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_galore.errors import CheckpointMismatchError
from ds_galore.optim.matrices import State
from ds_galore.optim.plan import GROUP_KEYS, SETTINGS, FlatPlan

__all__ = ["check_groups", "check_state", "settle_group", "to_device"]

#: Hyperparameters that decide what the state looks like: a checkpoint with another value cannot be continued.
STRUCTURAL_KEYS = ("rank", "proj_type")
STRUCTURAL_SETTINGS = ("projector_dtype",)


def check_groups(groups: Sequence[Mapping[str, Any]], saved_groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a checkpoint with other parameter groups, ranks or sides.

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
        pairs = [(key, saved.get(key), group[key]) for key in STRUCTURAL_KEYS]
        pairs += [(key, saved.get("settings", {}).get(key), group["settings"][key]) for key in STRUCTURAL_SETTINGS]
        for key, found, wanted in pairs:
            if found != wanted:
                raise CheckpointMismatchError(
                    f"param_groups[{number}].{key}: the checkpoint has {found!r}, the configuration {wanted!r};"
                    f" set it to {found!r} to continue that run"
                )


def check_state(plan: FlatPlan, tensor: Tensor, saved: State) -> None:
    """Refuse the saved state of a tensor that consists of other parameters, or of tensors of other shapes.

    Raises
    ------
    CheckpointMismatchError
        Naming the parameter, what was found and what was expected.
    """
    expected: dict[str, dict[str, tuple[int, ...]]] = {}
    for each in plan.plain:
        shape = (each.numel,) if plan.nested else tuple(tensor.shape)
        expected[each.name] = {"exp_avg": shape, "exp_avg_sq": shape}
    for batch in plan.batches:
        for matrix in batch.matrices:
            moments, projector = batch.side.moment_shape(matrix), batch.side.projector_shape(matrix)
            expected[matrix.name] = {"exp_avg": moments, "exp_avg_sq": moments, "projector": projector}
    states = saved if plan.nested else {next(iter(expected)): saved}
    if states.keys() != expected.keys():
        odd = sorted(states.keys() ^ expected.keys())[0]
        raise CheckpointMismatchError(
            f"{odd}: is {'in the checkpoint' if odd in states else 'not in the checkpoint'} and"
            f" {'' if odd in expected else 'not '}trained by this optimizer; the model differs from the saved one"
        )
    for name, shapes in expected.items():
        if "projector" not in shapes and "projector" in states[name]:
            raise CheckpointMismatchError(f"{name}: projected in the checkpoint, not in the configuration")
        for key, shape in shapes.items():
            value = states[name].get(key)
            found = tuple(value.shape) if isinstance(value, Tensor) else None
            if found != shape:
                raise CheckpointMismatchError(
                    f"{name}: the checkpoint's {key} has shape {found}, expected {shape}; the checkpoint was written"
                    " with other target_modules, another projector_storage or another number of ranks"
                )


def settle_group(group: dict[str, Any], ours: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
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

    for key in GROUP_KEYS:
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
    for key in SETTINGS:
        compare(key, saved.get("settings", {}).get(key), ours["settings"][key])
    group["settings"] = ours["settings"]
    return told


def to_device(value: Any, device: torch.device) -> Any:
    """A copy of a nested state with its tensors on ``device``, in the dtypes that they have."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, dict):
        return {key: to_device(each, device) for key, each in value.items()}
    return value
