"""What users may write: the optimizer's parameters, the ``ds_galore`` section, and how a mistake is told.

Imports pydantic alone, so that a configuration can be checked on any machine. The models here are the only list of
keys; the optimizers and the plugin validate through them.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ds_galore.errors import ConfigError
from ds_galore.parameters import ALIASES, LAYERWISE, OPTIMIZERS

__all__ = [
    "GALORE_OPTIMIZERS",
    "CheckpointConfig",
    "DsGaloreConfig",
    "MonitorConfig",
    "load_config",
    "resolve_auto",
    "validate",
]

#: Optimizer types that ``enable()`` registers with DeepSpeed, by their names in the JSON.
GALORE_OPTIMIZERS: tuple[str, ...] = (*OPTIMIZERS, *ALIASES, *LAYERWISE)

Model = TypeVar("Model", bound=BaseModel)


class CompressionConfig(BaseModel):
    """How bytes are compressed."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    codec: Annotated[
        Literal["zstd", "lz4"], Field(description="The compressor of byte planes; lz4 is faster and larger.")
    ] = "zstd"
    level: Annotated[int, Field(ge=1, le=19, description="Its level; 1 was as good as 3 on byte planes.")] = 1

    @model_validator(mode="after")
    def _lz4(self) -> CompressionConfig:
        if self.codec == "lz4" and importlib.util.find_spec("lz4") is None:
            raise ValueError("codec lz4 needs the package lz4, which is not installed: pip install lz4")
        if self.codec == "lz4" and self.level > 13:
            raise ValueError(f"level {self.level}: lz4 has levels 1 to 13")
        return self


class CheckpointConfig(BaseModel):
    """``ds_galore.checkpoint``: checkpoints in our format instead of DeepSpeed's."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    mode: Annotated[
        Literal["full", "differential", "incremental"],
        Field(description="What a checkpoint holds: everything, or what changed since the last full or the last one."),
    ] = "differential"
    full_every: Annotated[int, Field(ge=1, description="Every so many-th checkpoint is full.")] = 10
    asynchronous: Annotated[
        bool, Field(alias="async", description="Encode and write in the background, from a copy in host memory.")
    ] = True
    base_memory_gb: Annotated[
        float,
        Field(
            ge=0,
            allow_inf_nan=False,
            description="Host memory a rank may keep the base in (10^9 bytes); the rest is read back from disk.",
        ),
    ] = 4.0
    keep_last: Annotated[int | None, Field(ge=1, description="How many of the newest stay; None keeps all.")] = None
    keep_every: Annotated[
        int | None, Field(ge=1, description="Checkpoints of steps that are multiples of it stay as well.")
    ] = None
    on_damage: Annotated[
        Literal["fail", "previous"],
        Field(description="What a load does where a checkpoint is damaged: fail, or load the newest intact one."),
    ] = "fail"
    state_dtype: Annotated[
        Literal["exact", "bf16", "int8"],
        Field(description="What an optimizer's moments are stored as; all but exact lose digits of them."),
    ] = "exact"
    links: Annotated[
        Literal["hardlink", "copy"], Field(description="How a checkpoint comes to hold its base's files.")
    ] = "hardlink"
    compression: Annotated[CompressionConfig, Field(description="How bytes are compressed.")] = CompressionConfig()

    @model_validator(mode="after")
    def _keeps(self) -> CheckpointConfig:
        if self.keep_every is not None and self.keep_last is None:
            raise ValueError("keep_every says what stays beside the newest: give keep_last, how many of those")
        return self


class MonitorConfig(BaseModel):
    """``ds_galore.monitor``: what a run tells about refreshes and saves, beside what goes to DeepSpeed's monitors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    log: Annotated[
        str | None,
        Field(min_length=1, description="File that the first rank appends events to, for `ds-galore report`."),
    ] = None


class DsGaloreConfig(BaseModel):
    """The ``ds_galore`` section of a DeepSpeed configuration."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    checkpoint: Annotated[CheckpointConfig | None, Field(description="Checkpoints in our format.")] = None
    monitor: Annotated[MonitorConfig | None, Field(description="What a run tells about itself.")] = None


def validate(model: type[Model], values: Mapping[str, Any], *, where: str) -> Model:
    """Build ``model`` from ``values``.

    Parameters
    ----------
    model
        One of the models above.
    values
        Keys and values as the user wrote them.
    where
        What to call their place in messages, such as ``optimizer.params``.

    Raises
    ------
    ConfigError
        Naming every bad key, the value found and what is allowed; for an unknown key, the nearest known one.
    """
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        lines = []
        for each in error.errors():
            path = [str(part) for part in each["loc"] if not str(part).startswith("<")]  # tags of alternatives
            key = ".".join([where, *path])
            if each["type"] == "extra_forbidden":
                known = _fields(model, path[:-1])
                lines.append(f"{key}: unknown key{nearest(str(each['loc'][-1]), known)}")
            elif each["type"] == "value_error":  # of a whole section
                lines.append(f"{key}: {each['ctx']['error']}")
            else:
                allowed = each["msg"][:1].lower() + each["msg"][1:]
                lines.append(f"{key} is {each['input']!r}: {allowed}")
        raise ConfigError("\n".join(lines)) from None


def _fields(model: type[BaseModel], path: list[str]) -> Iterable[str]:
    """The keys of the section at ``path`` in a model."""
    for name in path:
        field = next((each for key, each in model.model_fields.items() if name in (key, each.alias)), None)
        found = [] if field is None else _models_in(field.annotation)
        if not found:
            return []
        model = found[0]
    return [field.alias or name for name, field in model.model_fields.items()]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for each in get_args(annotation) for found in _models_in(each)]


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown ``word``: the nearest known one, or all of them."""
    choices = sorted(known)
    found = difflib.get_close_matches(word.lower(), [choice.lower() for choice in choices], n=1, cutoff=0.6)
    if found:
        return f"; did you mean {next(choice for choice in choices if choice.lower() == found[0])!r}?"
    return f"; known are {', '.join(choices)}" if choices else "; this section has no keys"


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen = dict(pairs)
    if len(seen) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ConfigError(f"key {next(key for key in keys if keys.count(key) > 1)!r} appears twice")
    return seen


def load_config(path: str | Path) -> dict[str, Any]:
    """Read a DeepSpeed configuration file.

    Raises
    ------
    ConfigError
        If the file is missing or unreadable, is not JSON (with line and column), repeats a key, or is not an object.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        others = sorted(each.name for each in path.parent.glob("*.json")) if path.parent.is_dir() else []
        hint = f"; {path.parent}/ has {', '.join(others)}" if others else ""
        raise ConfigError(f"{path}: no such configuration file{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    try:
        config = json.loads(text, object_pairs_hook=_refuse_duplicates)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: a configuration is a JSON object, found {type(config).__name__}")
    return config


def section(config: Mapping[str, Any], *path: str) -> dict[str, Any]:
    """The object at ``path`` in ``config``, empty where there is none.

    Raises
    ------
    ConfigError
        If something else than an object stands there.
    """
    current: Any = config
    for depth, key in enumerate(path):
        current = current.get(key)
        if current is None:
            return {}
        if not isinstance(current, dict):
            raise ConfigError(f"{'.'.join(path[: depth + 1])} is {current!r}: it must be an object")
    return dict(current)


def resolve_auto(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a configuration in which every ``"auto"`` is replaced.

    Parameters
    ----------
    config
        As :func:`load_config` gives it.
    values
        By dotted key, such as ``bf16.enabled``, what ``"auto"`` stands for there.

    Raises
    ------
    ConfigError
        For an ``"auto"`` that ``values`` does not name.
    """

    def walk(value: Any, key: str) -> Any:
        if isinstance(value, dict):
            return {name: walk(each, f"{key}.{name}" if key else name) for name, each in value.items()}
        if isinstance(value, list):
            return [walk(each, f"{key}[{index}]") for index, each in enumerate(value)]
        if value == "auto":
            if key not in values:
                raise ConfigError(
                    f"{key} is 'auto', which stands for nothing here; known are {', '.join(sorted(values))}"
                )
            return values[key]
        return value

    return dict(walk(config, ""))
