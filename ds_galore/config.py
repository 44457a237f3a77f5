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
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ds_galore.errors import ConfigError
from ds_galore.parameters import ALIASES, OPTIMIZERS

__all__ = [
    "DEEPSPEED_OPTIMIZERS",
    "GALORE_OPTIMIZERS",
    "TOP_LEVEL_KEYS",
    "CheckpointConfig",
    "DsGaloreConfig",
    "MonitorConfig",
    "check_config",
    "load_config",
    "resolve_auto",
    "validate",
]

#: Optimizer types that ``enable()`` registers with DeepSpeed, by their names in the JSON.
GALORE_OPTIMIZERS: tuple[str, ...] = (*OPTIMIZERS, *ALIASES)

#: Optimizer types that DeepSpeed 0.19 and torch.optim know, for checks where neither is installed.
DEEPSPEED_OPTIMIZERS: tuple[str, ...] = (
    *("adam", "adamw", "adagrad", "lamb", "lion", "muadam", "muadamw", "musgd", "muon", "Adam", "AdamW", "Lamb"),
    *("Lion", "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adamax", "LBFGS", "Muon", "NAdam", "RAdam", "RMSprop"),
    *("Rprop", "SGD"),
)

#: Top-level keys that DeepSpeed 0.19 reads. Others are left alone, unless they differ from one of these by little.
TOP_LEVEL_KEYS: frozenset[str] = frozenset(
    (
        "activation_checkpointing",
        "aio",
        "amp",
        "autotuning",
        "bf16",
        "bfloat16",
        "checkpoint",
        "comet",
        "comms_logger",
        "communication_data_type",
        "compile",
        "compression_training",
        "csv_monitor",
        "curriculum_learning",
        "data_efficiency",
        "data_types",
        "dataloader_drop_last",
        "datastates_ckpt",
        "disable_allgather",
        "disable_python_gc",
        "expert_parallel",
        "gradient_allreduce_op",
        "log_level",
        "managed_gradient_accumulation",
        "ds_galore",
        "dump_state",
        "eigenvalue",
        "elasticity",
        "flops_profiler",
        "fp16",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "gradient_predivide_factor",
        "graph_harvesting",
        "hybrid_engine",
        "keep_in_fp32_modules",
        "load_universal_checkpoint",
        "memory_breakdown",
        "monitor_config",
        "nebula",
        "optimizer",
        "pipeline",
        "prescale_gradients",
        "progressive_layer_drop",
        "quantize_training",
        "scheduler",
        "seq_parallel_communication_data_type",
        "sequence_parallel_size",
        "sparse_attention",
        "sparse_gradients",
        "steps_per_print",
        "tensor_parallel",
        "tensorboard",
        "timers",
        "torch_autocast",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "use_data_before_expert_parallelism",
        "use_data_before_expert_parallel_",
        "use_node_local_storage",
        "vocabulary_size",
        "wall_clock_breakdown",
        "wandb",
        "zenflow",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "zero_optimization",
    )
)

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


def _refuse(key: str, value: object, reason: str) -> NoReturn:
    raise ConfigError(f"{key} is {value!r}: {reason}")


def check_config(config: Mapping[str, Any], known_optimizers: Iterable[str] = ()) -> None:
    """Refuse what cannot work, before training starts.

    Parameters
    ----------
    config
        A whole DeepSpeed configuration.
    known_optimizers
        Optimizer types that DeepSpeed knows beside ours; without them the type's spelling is not checked.

    Raises
    ------
    ConfigError
        For a mistake in the ``ds_galore`` section, a top-level key that DeepSpeed would ignore although it is almost
        one that it knows, an unknown optimizer type, and, where the optimizer is one of ours, mistakes in its
        parameters and DeepSpeed features with which it does not work.
    """
    ours = validate(DsGaloreConfig, section(config, "ds_galore"), where="ds_galore")
    if ours.checkpoint is not None:
        _check_checkpoint(config)
    for key in config:
        hint = "" if key in TOP_LEVEL_KEYS else nearest(key, TOP_LEVEL_KEYS)
        if "did you mean" in hint and difflib.SequenceMatcher(None, key, hint.split("'")[1]).ratio() >= 0.8:
            raise ConfigError(f"{key}: DeepSpeed does not know this key and would ignore it{hint}")
    for name, keys in (("optimizer", ("type", "params", "legacy_fusion")), ("scheduler", ("type", "params"))):
        present = section(config, name)
        for key in present:
            if key not in keys:
                raise ConfigError(f"{name}.{key}: unknown key{nearest(key, keys)}")
        if present and not isinstance(present.get("type"), str):
            raise ConfigError(f"{name}.type is {present.get('type')!r}: it must be a name")
    kind = section(config, "optimizer").get("type")
    if kind is None:
        return
    if kind not in GALORE_OPTIMIZERS:
        known = [*GALORE_OPTIMIZERS, *known_optimizers]
        exact = known_optimizers and str(kind) not in known and str(kind).lower() not in known
        if exact or str(kind).lower() in (name.lower() for name in GALORE_OPTIMIZERS):
            raise ConfigError(f"optimizer.type is {kind!r}: no such optimizer{nearest(str(kind), known)}")
        return
    parameters = {key: value for key, value in section(config, "optimizer", "params").items() if value != "auto"}
    validate(OPTIMIZERS[ALIASES.get(kind, kind)], parameters, where="optimizer.params")
    _check_zero(config, kind)


def _check_checkpoint(config: Mapping[str, Any]) -> None:
    """Refuse what our checkpoints do not hold yet, or what would write them as well."""
    if section(config, "zero_optimization").get("elastic_checkpoint"):
        _refuse(
            "zero_optimization.elastic_checkpoint", True, "ds_galore.checkpoint loads on any number of ranks anyway"
        )
    for target in ("optimizer", "param"):
        device = section(config, "zero_optimization", f"offload_{target}").get("device")
        if device == "nvme":
            _refuse(f"zero_optimization.offload_{target}.device", device, "ds_galore.checkpoint does not support NVMe")
    if section(config, "checkpoint").get("writer"):
        _refuse("checkpoint.writer", section(config, "checkpoint")["writer"], "ds_galore.checkpoint is a writer itself")
    if section(config, "checkpoint").get("use_node_local_storage"):
        _refuse(
            "checkpoint.use_node_local_storage",
            True,
            "ds_galore.checkpoint needs one directory that all ranks see, to commit what they wrote together",
        )
    if section(config, "datastates_ckpt"):
        _refuse("datastates_ckpt", config["datastates_ckpt"], "ds_galore.checkpoint is a writer itself")


def _check_zero(config: Mapping[str, Any], kind: str) -> None:
    """Refuse the ZeRO features with which our optimizers do not work."""
    zero = section(config, "zero_optimization")
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        _refuse("zero_optimization.stage", stage, f"{kind} supports the stages 0, 1, 2 and 3")
    _check_precision(config, kind, stage)
    if stage == 0:
        return
    if config.get("zero_allow_untested_optimizer") is not True:
        found = config.get("zero_allow_untested_optimizer")
        _refuse("zero_allow_untested_optimizer", found, f"DeepSpeed wants true here for {kind}")
    for target in ("optimizer", "param"):
        device = section(config, "zero_optimization", f"offload_{target}").get("device")
        if device == "nvme":
            _refuse(
                f"zero_optimization.offload_{target}.device", device, f"{kind} does not support NVMe; use cpu or none"
            )
    offload = section(config, "zero_optimization", "offload_optimizer")
    if offload.get("ratio", 1) != 1:
        _refuse("zero_optimization.offload_optimizer.ratio", offload["ratio"], f"{kind} is offloaded whole (1) or not")
    if offload.get("super_offload"):
        _refuse("zero_optimization.offload_optimizer.super_offload", True, f"{kind} does not support it")
    for key, neutral in (("elastic_checkpoint", False), ("zenflow", None)):
        if zero.get(key, neutral) not in (neutral, None, False):
            _refuse(f"zero_optimization.{key}", zero[key], f"{kind} does not support it; use {json.dumps(neutral)}")
    if section(config, "checkpoint").get("load_universal"):
        _refuse("checkpoint.load_universal", True, f"universal checkpoints have no place for {kind}'s low-rank states")


def _check_precision(config: Mapping[str, Any], kind: str, stage: int) -> None:
    """Refuse combinations of dtypes that DeepSpeed keeps for its own Adam, or would ignore."""
    masters, states = "bf16_master_weights_and_grads", "bf16_optimizer_states"
    bf16 = section(config, "bf16")
    if bf16.get(masters):
        if stage == 0:
            _refuse(
                f"bf16.{masters}", True, "without ZeRO DeepSpeed ignores it and keeps fp32 masters; use stage 1 to 3"
            )
        if section(config, "zero_optimization", "offload_optimizer").get("device") == "cpu":
            _refuse(f"bf16.{masters}", True, "with a CPU-offloaded optimizer DeepSpeed wants its own Adam")
        if not bf16.get(states):
            _refuse(f"bf16.{states}", bf16.get(states, False), f"beside bf16.{masters} DeepSpeed wants true here")
        if stage == 1 and section(config, "data_types").get("grad_accum_dtype") in ("fp32", "float32"):
            _refuse(f"bf16.{masters}", True, "with fp32 accumulation at stage 1 DeepSpeed ignores it; use stage 2")
    fp16 = section(config, "fp16")
    if stage == 0 and fp16.get("enabled") not in (None, False, "auto") and fp16.get("loss_scale", 0) != 1:
        _refuse(
            "fp16.loss_scale",
            fp16.get("loss_scale", 0),
            "without ZeRO DeepSpeed divides gradients by it and does not scale the loss; use 1, or stage 1 to 3",
        )
    if fp16.get("fp16_master_weights_and_grads"):
        _refuse("fp16.fp16_master_weights_and_grads", True, f"DeepSpeed wants its own CPU-offloaded Adam, not {kind}")
    autocast = section(config, "torch_autocast")
    if stage and autocast.get("enabled") and autocast.get("dtype") in ("float16", "fp16"):
        _refuse(
            "torch_autocast.dtype",
            autocast["dtype"],
            "at stage 3 DeepSpeed takes no step with it, and at 1 and 2 ranks skip steps each for itself; use bfloat16",
        )


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
