"""The reference of configuration keys, made of the models that check them: nothing is written down twice.

``{config-reference} optimizers`` stands for all of ``optimizer.params``, ``{config-reference} ds_galore`` for the
section of that name. A constraint that this module cannot put in words stops the build.
"""

from __future__ import annotations

import ast
import json
import re
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from docutils import nodes
from docutils.parsers.rst import directives
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from ds_galore.config import DsGaloreConfig
from ds_galore.parameters import ALIASES, LAYERWISE, OPTIMIZERS, LowRankParameters

__all__ = ["Key", "common_keys", "keys_of", "optimizers_text", "own_keys", "section_text", "setup"]

#: Constraints on numbers: of a lower bound the sign before and after the number, of an upper one that after it.
_LOWER, _UPPER = {"ge": ("≤", "≥"), "gt": ("<", ">")}, {"le": "≤", "lt": "<"}


@dataclass(frozen=True)
class Key:
    """A key as a user may write it.

    Parameters
    ----------
    name
        With the names of the objects that it lies in: ``rank.energy``.
    allowed, default, meaning
        Markdown.
    """

    name: str
    allowed: str
    default: str
    meaning: str


def keys_of(model: type[BaseModel], prefix: str = "") -> list[Key]:
    """The keys of a model, and of the objects in it."""
    found = []
    for name, field in model.model_fields.items():
        name = prefix + (field.alias or name)
        inner = _models_in(field.annotation)
        default = "required" if field.is_required() else _default(field.default)
        found.append(Key(name, _allowed(field.annotation, field.metadata), default, _sentence(field.description)))
        for each in inner:
            found += keys_of(each, f"{name}.")
    return found


def common_keys() -> list[Key]:
    """The keys that all optimizers have, with the defaults of most."""
    return keys_of(LowRankParameters)


def own_keys(model: type[LowRankParameters]) -> list[Key]:
    """The keys of an optimizer that others do not have, or have with other values."""
    common = set(common_keys())
    return [key for key in keys_of(model) if key not in common]


def _allowed(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """The values of a type, in words of JSON."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _allowed(arguments[0], [*arguments[1:], *metadata])
    if origin in (Union, types.UnionType):  # what holds for the union holds for the number in it
        return ", ".join(_allowed(each, metadata if each in (int, float, str) else ()) for each in arguments)
    if origin is Literal:
        return ", ".join(_json(each) for each in arguments)
    if origin is list:
        return f"list of {_allowed(arguments[0])}s"
    if origin is tuple:
        parts = {_allowed(each) for each in arguments}
        return f"list of {len(arguments)}: {' and '.join(sorted(parts))}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "object"
    known = {bool: "`true`, `false`", int: "integer", float: "number", str: "string", type(None): "`null`"}
    if annotation not in known:
        raise TypeError(f"{annotation!r} has no words in docs/_ext/config_reference.py")
    if annotation is str and list(_flat(metadata)) == [annotated_types.MinLen(1)]:
        return "string, not empty"
    return _limited(known[annotation], metadata)


def _limited(word: str, metadata: Iterable[Any]) -> str:
    """A word for numbers with what they are held to."""
    low: tuple[Any, str, str] | None = None
    high = ""
    for each in _flat(metadata):
        lower = [(getattr(each, name), *signs) for name, signs in _LOWER.items() if hasattr(each, name)]
        upper = [f" {sign} {getattr(each, name)}" for name, sign in _UPPER.items() if hasattr(each, name)]
        if isinstance(each, annotated_types.BaseMetadata) and not lower + upper:
            raise TypeError(f"{each!r} has no words in docs/_ext/config_reference.py")
        low, high = (lower or [low])[0], (upper or [high])[0]
    if low is None:
        return word + high
    return f"{low[0]} {low[1]} {word}{high}" if high else f"{word} {low[2]} {low[0]}"


def _flat(metadata: Iterable[Any]) -> Iterator[Any]:
    for each in metadata:
        if isinstance(each, FieldInfo):
            yield from each.metadata
        else:
            yield each


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for each in get_args(annotation) for found in _models_in(each)]


def _json(value: Any) -> str:
    return f"`{json.dumps(value)}`"


def _default(value: Any) -> str:
    return "its keys' defaults" if isinstance(value, BaseModel) else _json(value)


def _sentence(description: str | None) -> str:
    """A description as Markdown for a cell, with JSON's words for Python's."""
    if not description:
        raise ValueError("a field has no description")
    text = re.sub(r"{.*?}", lambda found: _json(ast.literal_eval(found[0])), description)
    return re.sub(r"\bNone\b", "`null`", text).replace("|", "\\|")


# ---------------------------------------------------------------------- as Markdown


def optimizers_text() -> str:
    """The parameters of all optimizers."""
    lines = ["## `optimizer.params`: common to all optimizers", "", *_table(common_keys(), "params")]
    lines += ["", f"A parameter group may set for itself: {_list(LowRankParameters.GROUP_KEYS)}."]
    for name, model in OPTIMIZERS.items():
        also = [alias for alias, of in ALIASES.items() if of == name]
        layerwise = [alias for alias, of in LAYERWISE.items() if of == name]
        lines += ["", f"## `{name}`", "", _first_sentence(model)]
        lines += ["", f"Also known as {_list(also)}."] if also else []
        lines += ["", f"{_list(layerwise)} is the same with `gradients` `lowrank`."] if layerwise else []
        own = own_keys(model)
        lines += ["", "All of the common keys, and:" if own else "The common keys.", ""]
        lines += _table(own, name) if own else []
        groups = [key for key in model.GROUP_KEYS if key not in LowRankParameters.GROUP_KEYS]
        lines += ["", f"A parameter group may set for itself, too: {_list(groups)}."] if groups else []
    return "\n".join(lines)


def section_text() -> str:
    """The ``ds_galore`` section, an object at a time."""
    lines: list[str] = []
    for name, keys in _by_object(keys_of(DsGaloreConfig, "ds_galore.")):
        lines += [f"## `{name}`", "", *_table(keys, "", name), ""]
    return "\n".join(lines)


def _by_object(keys: Iterable[Key]) -> list[tuple[str, list[Key]]]:
    """Keys by the object that they lie in."""
    found: dict[str, list[Key]] = {}
    for key in keys:
        found.setdefault(key.name.rpartition(".")[0], []).append(key)
    return list(found.items())


def _table(keys: Iterable[Key], scope: str, inside: str = "") -> list[str]:
    rows = ["| key | values | default | meaning |", "|---|---|---|---|"]
    for key in keys:
        shown = key.name.removeprefix(f"{inside}.")
        rows.append(f"| [`{shown}`]{{#{anchor(key, scope)}}} | {key.allowed} | {key.default} | {key.meaning} |")
    return rows


def anchor(key: Key, scope: str = "") -> str:
    """By which a key is linked to."""
    return re.sub(r"[^a-z0-9]+", "-", f"{scope} {key.name}".lower()).strip("-")


def _first_sentence(model: type[BaseModel]) -> str:
    text = " ".join((model.__doc__ or "").split("\n\n")[0].split()).replace("``", "`")
    return text.partition(": ")[2][:1].upper() + text.partition(": ")[2][1:]


def _list(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


# ---------------------------------------------------------------------- in Sphinx


class ConfigReference(SphinxDirective):
    """``{config-reference} optimizers`` or ``ds_galore``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """What the directive stands for."""
        texts = {"optimizers": optimizers_text, "ds_galore": section_text}
        chosen = directives.choice(self.arguments[0], tuple(texts))
        for module in ("parameters", "config"):
            self.env.note_dependency(f"../ds_galore/{module}.py")
        found: list[nodes.Node] = self.parse_text_to_nodes(texts[chosen](), allow_section_headings=True)
        return found


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("config-reference", ConfigReference)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
