"""Which parameters are projected.

``target_modules`` follows Hugging Face's ``optim_target_modules``: a string is a regular expression that must match a
whole module name; a list holds module names, parts of them, or such expressions; ``"all-linear"`` means every linear
layer. As in PEFT, the output head is not one of them: embeddings, norms, biases and the head stay on plain AdamW
unless a pattern names the head. Imports torch alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from ds_galore.errors import ConfigError
from ds_galore.zero.binding import full_shape

__all__ = ["Described", "describe_model", "describe_names", "select_targets"]

#: Classes of linear layers beside torch.nn.Linear and its subclasses, by name (GPT-2's stores its weight transposed).
_LINEAR_CLASSES = frozenset({"Conv1D", "LinearLayer", "LinearAllreduce"})


@dataclass(frozen=True)
class Described:
    """What is known of a parameter.

    Parameters
    ----------
    name
        Its first name in the model.
    shape
        Of the whole parameter.
    kind
        ``"linear"``, ``"head"`` (the linear layer that yields the logits), ``"embedding"``, ``"other"``, or
        ``"unknown"`` where only the name is known.
    """

    name: str
    shape: tuple[int, ...]
    kind: str

    @property
    def module(self) -> str:
        """The name that patterns are matched against: the module's, or the parameter's own if it is no ``weight``."""
        return self.name.removesuffix(".weight")


def describe_model(model: nn.Module) -> dict[Tensor, Described]:
    """Every parameter of a model, tied ones once and under their first name (``zero.Init`` shapes are whole ones)."""
    owners: dict[Tensor, nn.Module] = {}
    embedding_weights: set[Tensor] = set()
    for module in model.modules():
        for _, parameter in module.named_parameters(recurse=False):
            owners.setdefault(parameter, module)
            if isinstance(module, nn.Embedding):
                embedding_weights.add(parameter)
    head = _output_head(model)
    described: dict[Tensor, Described] = {}
    for name, parameter in model.named_parameters():
        module = owners[parameter]
        if parameter in embedding_weights:
            kind = "embedding"
        elif not (isinstance(module, nn.Linear) or type(module).__name__ in _LINEAR_CLASSES):
            kind = "other"
        else:
            kind = "head" if module is head else "linear"
        described[parameter] = Described(name, full_shape(parameter), kind)
    return described


def _output_head(model: nn.Module) -> nn.Module | None:
    find = getattr(model, "get_output_embeddings", None)
    if callable(find):
        try:
            head = find()
        except NotImplementedError:
            head = None
        if isinstance(head, nn.Module):
            return head
    return next((module for name, module in model.named_modules() if name.split(".")[-1] == "lm_head"), None)


def describe_names(named: Iterable[tuple[str, Tensor]]) -> dict[Tensor, Described]:
    """Parameters of which nothing but the name is known."""
    return {parameter: Described(name, full_shape(parameter), "unknown") for name, parameter in named}


def select_targets(
    described: Mapping[Tensor, Described], target_modules: str | list[str] | None
) -> tuple[set[Tensor], list[str]]:
    """The parameters that are to be projected.

    Parameters
    ----------
    described
        The candidates.
    target_modules
        As in the configuration. None means ``"all-linear"``.

    Returns
    -------
    set of Tensor
        Those with two dimensions or more that match.
    list of str
        Names of modules that a pattern matches although they cannot be projected: embeddings and norms.

    Raises
    ------
    ConfigError
        If nothing matches (with what exists), if a pattern is no regular expression, or if ``"all-linear"`` is asked
        for where the kinds of layers are not known.
    """
    everything = target_modules is None or (
        isinstance(target_modules, str) and target_modules.replace("_", "-") == "all-linear"
    )
    if everything and any(each.kind == "unknown" for each in described.values()):
        raise ConfigError(
            "target_modules 'all-linear' needs to know the model's layers: pass model=..., or name the modules in"
            " target_modules, or give the parameter group to be projected a 'rank'"
        )
    chosen, ignored = set(), []
    for parameter, each in described.items():
        if everything:
            matches = each.kind == "linear"
        else:
            assert target_modules is not None
            matches = _matches(each.module, target_modules)
        if matches and len(each.shape) >= 2 and each.kind != "embedding":
            chosen.add(parameter)
        elif matches and each.name.endswith(".weight"):
            ignored.append(each.module)
    if not chosen:
        available = sorted({_generic(each.module) for each in described.values() if len(each.shape) >= 2})
        found = "linear layer" if everything else f"match for {target_modules!r}"
        raise ConfigError(f"target_modules: no {found} in the model; modules with matrices are {', '.join(available)}")
    return chosen, ignored


def _matches(module: str, patterns: str | list[str]) -> bool:
    try:
        if isinstance(patterns, str):
            return re.fullmatch(patterns, module) is not None
        return any(pattern in module or re.fullmatch(pattern, module) is not None for pattern in patterns)
    except re.error as error:
        raise ConfigError(f"target_modules: {error.pattern!r} is not a regular expression: {error}") from None


def _generic(module: str) -> str:
    """A module's name with layer numbers replaced, so that a list of all stays short."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", module)
