"""A configuration in plain words: what it will use, what is ignored, what conflicts, and what else is to be known.

Works where neither torch nor DeepSpeed is installed. What is refused is :mod:`.config`'s to say, with what DeepSpeed
would refuse by the tables in :mod:`.deepspeed_keys`; the words for what is used are in :mod:`.wording`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ds_galore import wording
from ds_galore.config import GALORE_OPTIMIZERS, nearest, section
from ds_galore.conflicts import conflicts
from ds_galore.deepspeed_keys import (
    AUTO,
    CLOSED_SECTIONS,
    DEEPSPEED_OPTIMIZERS,
    OPEN_SECTIONS,
    REMOVED,
    SCHEDULERS,
    TOP_LEVEL_KEYS,
    UNUSED_BY_STAGE_3,
    UNUSED_BY_STAGES_1_AND_2,
)
from ds_galore.errors import ConfigError
from ds_galore.parameters import OPTIMIZERS, named

__all__ = ["Explanation", "explain"]

#: Schedulers that set the rate themselves, by the parameter that says it.
_OWN_RATE = {"WarmupDecayLR": "warmup_max_lr", "OneCycle": "cycle_max_lr", "LRRangeTest": "lr_range_test_min_lr"}
_NEEDED = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}


@dataclass(frozen=True)
class Explanation:
    """What is to be said of a configuration, a line each.

    Parameters
    ----------
    uses
        What a job with it does; empty where it conflicts, since no job would start.
    ignored
        Keys that nobody reads, or that have no effect beside the others.
    conflicts
        Why it is refused.
    warnings
        What else is to be known.
    """

    uses: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def fine(self) -> bool:
        """Whether nothing conflicts."""
        return not self.conflicts


def explain(config: Mapping[str, Any]) -> Explanation:
    """Explain a DeepSpeed configuration.

    Parameters
    ----------
    config
        As :func:`.load_config` gives it.
    """
    found = [line for told in (conflicts(config, DEEPSPEED_OPTIMIZERS), _deepspeeds(config)) for line in _lines(told)]
    found = list(dict.fromkeys(found))
    return Explanation(
        uses=[] if found else list(wording.uses(config)),
        ignored=list(dict.fromkeys(_ignored(config))),
        conflicts=found,
        warnings=list(_warnings(config)),
    )


def _lines(messages: Iterator[str]) -> Iterator[str]:
    for message in messages:
        yield from message.splitlines()


def part(config: Mapping[str, Any], *path: str) -> dict[str, Any]:
    """As :func:`.section`; empty also where something else than an object stands, which is a conflict already."""
    try:
        return section(config, *path)
    except ConfigError:
        return {}


def _ours(config: Mapping[str, Any]) -> str | None:
    """The optimizer's name in this package, if it is one of it."""
    kind = part(config, "optimizer").get("type")
    return named(kind, {})[0] if isinstance(kind, str) and kind in GALORE_OPTIMIZERS else None


# ---------------------------------------------------------------------- what DeepSpeed would refuse


def _deepspeeds(config: Mapping[str, Any]) -> Iterator[str]:
    for path in (*CLOSED_SECTIONS, *OPEN_SECTIONS):
        try:
            section(config, *path.split("."))
        except ConfigError as error:
            yield str(error)
    for path, known in CLOSED_SECTIONS.items():
        for key in part(config, *path.split(".")):
            if key not in known and f"{path}.{key}" not in REMOVED:
                yield f"{path}.{key}: unknown key{nearest(key, known)}"
    for path in sorted(REMOVED):
        *parents, key = path.split(".")
        if key in (part(config, *parents) if parents else config):
            yield f"{path}: DeepSpeed 0.19.8 refuses this key: what it was for has been removed"
    enabled = [name for name in ("bf16", "fp16") if part(config, name).get("enabled") is True]
    if len(enabled) == 2:
        yield "bf16.enabled and fp16.enabled are both true: DeepSpeed takes one of them"
    yield from _in_batches(config)
    yield from _in_scheduler(part(config, "scheduler"))


def _in_batches(config: Mapping[str, Any]) -> Iterator[str]:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for key in keys:
        value = config.get(key)
        if value not in (None, "auto") and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            yield f"{key} is {value!r}: it must be a whole number above 0"
            return
    whole, micro, steps = (value if isinstance(value := config.get(key), int) else None for key in keys)
    if whole is not None and micro is not None and whole % (micro * (steps or 1)):
        by = f"{keys[1]} {micro}" + (f" times {keys[2]} {steps}" if steps else "")
        yield f"train_batch_size is {whole}: it must be a multiple of {by}, once for each rank"


def _in_scheduler(scheduler: Mapping[str, Any]) -> Iterator[str]:
    kind = scheduler.get("type")
    known = SCHEDULERS.get(kind) if isinstance(kind, str) else None
    if known is None:
        return
    params = part(scheduler, "params")
    for key in params:
        if key not in known:
            yield f"scheduler.params.{key}: {kind} has no such parameter{nearest(key, known)}"
    for key in _NEEDED.get(str(kind), ()):
        if key not in params:
            yield f"scheduler.params.{key} is missing: {kind} needs it"


# ---------------------------------------------------------------------- what has no effect


def _ignored(config: Mapping[str, Any]) -> Iterator[str]:
    for key in config:
        if key not in TOP_LEVEL_KEYS and key not in REMOVED:
            yield f"{key}: neither DeepSpeed nor ds_galore reads it"
    for path, known in OPEN_SECTIONS.items():
        for key in part(config, path):
            if key not in known:
                yield f"{path}.{key}: DeepSpeed does not read it"
    yield from _by_stage(config)
    yield from _by_precision(config)
    yield from _of_optimizer(config)
    yield from _of_checkpoints(config)
    if "aio" in config and "nvme" not in str(part(config, "zero_optimization")):
        yield "aio: it is about NVMe, to which nothing is offloaded"


def _by_stage(config: Mapping[str, Any]) -> Iterator[str]:
    zero = part(config, "zero_optimization")
    stage = zero.get("stage", 0)
    if stage == 0:
        for key in zero:
            if key != "stage":
                yield f"zero_optimization.{key}: at stage 0 there is no ZeRO"
        if "zero_allow_untested_optimizer" in config:
            yield "zero_allow_untested_optimizer: at stage 0 there is no ZeRO"
    for key in zero:
        if stage in (1, 2) and (key in UNUSED_BY_STAGES_1_AND_2 or key.startswith("stage3_")):
            yield f"zero_optimization.{key}: stage {stage} does not use it"
        elif stage == 3 and key in UNUSED_BY_STAGE_3:
            yield f"zero_optimization.{key}: stage 3 does not use it"
    if "zero_force_ds_cpu_optimizer" in config:
        if part(zero, "offload_optimizer").get("device") != "cpu":
            yield "zero_force_ds_cpu_optimizer: the optimizer is not offloaded"
        elif "optimizer" in config:
            yield (
                "zero_force_ds_cpu_optimizer: it is about optimizer objects that a program passes, and there is an"
                " optimizer in the configuration"
            )


def _by_precision(config: Mapping[str, Any]) -> Iterator[str]:
    for name in ("bf16", "fp16", "torch_autocast"):
        present = part(config, name)
        if present.get("enabled", False) is False:
            for key in present:
                if key != "enabled":
                    yield f"{name}.{key}: {name} is not enabled"
    fp16 = part(config, "fp16")
    if fp16.get("enabled") and fp16.get("loss_scale", 0):
        for key in ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis"):
            if key in fp16:
                yield f"fp16.{key}: it is for dynamic loss scaling, and loss_scale is fixed at {fp16['loss_scale']}"


def _of_optimizer(config: Mapping[str, Any]) -> Iterator[str]:
    params, scheduler = part(config, "optimizer", "params"), part(config, "scheduler")
    schedule = part(scheduler, "params")
    kind = str(scheduler.get("type"))
    rate = _OWN_RATE.get(kind) or ("warmup_max_lr" if kind == "WarmupLR" and "warmup_max_lr" in schedule else None)
    if rate is not None and "lr" in params and schedule.get(rate, 0.001) != params["lr"]:
        value = schedule.get(rate, "0.001, its default")
        yield f"optimizer.params.lr: {kind} sets the rate from scheduler.params.{rate} ({value})"
    name = _ours(config)
    if name is None:
        return
    if "legacy_fusion" in part(config, "optimizer"):
        yield f"optimizer.legacy_fusion: it is for DeepSpeed's own Adam, not for {name}"
    defaults = {key: each.default for key, each in OPTIMIZERS[name].model_fields.items()}
    for key, reason in _idle_parameters({**defaults, **params}, config):
        if key in params:
            yield f"optimizer.params.{key}: {reason}"
    if params.get("relative_step") is True and scheduler:
        yield "scheduler: relative_step sets the rate"


def _idle_parameters(values: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Hyperparameters of ours that change nothing beside the others, and why."""
    refresh = values["refresh"]
    if values["adaptive_gap"] is False:
        for key in ("stable_overlap", "max_gap_factor"):
            yield key, "it is for adaptive_gap, which is false"
    if refresh != "subspace":
        yield "power_iterations", f"it is for refresh 'subspace', and refresh is {refresh!r}"
    if refresh == "random":
        yield "first_basis", "with refresh 'random' all bases are drawn at random"
        for key in ("projector_dtype", "projector_rounding", "projector_storage"):
            yield key, "with refresh 'random' no projector is stored"
    elif values["projector_dtype"] == "fp32":
        yield "projector_rounding", "projectors are fp32, and nothing is rounded"
    if refresh != "random" and values["proj_type"] == "left":
        yield "projector_storage", "it is about right projectors, and proj_type is 'left'"
    elif refresh != "random" and part(config, "zero_optimization").get("stage", 0) == 0:
        yield "projector_storage", "at stage 0 no rank shares a matrix, and projectors are whole"
    if not part(config, "bf16").get("bf16_master_weights_and_grads"):
        yield "stochastic_rounding", "weights have fp32 masters (no bf16.bf16_master_weights_and_grads)"
    if values.get("relative_step") is True:
        yield "lr", "relative_step sets the rate"
    if "beta1" in values and values["beta1"] is None:
        for key in ("moment_dtype", "unprojected_moment_dtype"):
            yield key, "without beta1 there is no first moment, and the others are fp32"


def _of_checkpoints(config: Mapping[str, Any]) -> Iterator[str]:
    checkpoint = part(config, "ds_galore", "checkpoint")
    where = "ds_galore.checkpoint"
    if checkpoint.get("mode") == "full":
        for key in ("full_every", "base_memory_gb", "links"):
            if key in checkpoint:
                yield f"{where}.{key}: every checkpoint is full (mode)"
    elif checkpoint.get("full_every") == 1 and "mode" in checkpoint:
        yield f"{where}.mode: every checkpoint is full (full_every is 1)"
    if checkpoint and "checkpoint_serialization" in part(config, "checkpoint"):
        yield f"checkpoint.checkpoint_serialization: {where} writes checkpoints"


# ---------------------------------------------------------------------- what else is to be known


def _warnings(config: Mapping[str, Any]) -> Iterator[str]:
    yield from _auto(config)
    if "train_batch_size" not in config and "train_micro_batch_size_per_gpu" not in config:
        yield "neither train_batch_size nor train_micro_batch_size_per_gpu is there: DeepSpeed wants one of them"
    for target in ("optimizer", "param"):
        offload = part(config, "zero_optimization", f"offload_{target}")
        if offload.get("device") == "cpu" and offload.get("pin_memory") is False:
            yield (
                f"zero_optimization.offload_{target}.pin_memory is false: right on a machine without a GPU; with one,"
                " true is faster"
            )
    name = _ours(config)
    if name is None:
        if part(config, "zero_optimization").get("stage", 0) and "optimizer" not in config:
            yield "optimizer is missing: the program has to pass one to deepspeed.initialize"
        return
    params = part(config, "optimizer", "params")
    if params.get("rank") is None:
        yield "optimizer.params.rank is missing: it must be in the program's parameter groups, or nothing is projected"
    kept = {params.get(key) for key in ("moment_dtype", "unprojected_moment_dtype")}
    if (name == "GaLoreAdamW8bit" or "8bit" in kept) and importlib.util.find_spec("bitsandbytes") is None:
        yield "8-bit moments need bitsandbytes, which is not installed here: pip install 'ds_galore[8bit]'"
    if part(config, "ds_galore", "checkpoint").get("keep_last") is not None:
        yield (
            "ds_galore.checkpoint.keep_last thins out the checkpoints of one save directory; accelerate and the Trainer"
            " make a directory for each: leave it out there, and set total_limit or save_total_limit"
        )


def _auto(config: Mapping[str, Any]) -> Iterator[str]:
    """Who puts a value in the place of each ``"auto"``."""
    by_resolvers: dict[tuple[str, ...], list[str]] = {}
    for key in _auto_keys(config, ""):
        who = tuple(name for name, keys in AUTO.items() if key in keys)
        by_resolvers.setdefault(who, []).append(key)
    for who, keys in by_resolvers.items():
        are = "is" if len(keys) == 1 else "are"
        if who:
            yield f'{", ".join(keys)} {are} "auto": {wording.listed(who)} put{"s" * (len(who) == 1)} a value there'
        else:
            yield f'{", ".join(keys)} {are} "auto": nobody known here puts a value there'
    every = [key for keys in by_resolvers.values() for key in keys]
    alone = [key for key in every if key.rpartition(".")[0] in CLOSED_SECTIONS]
    if alone:
        means = ", which is to train in fp32" if {"bf16.enabled", "fp16.enabled"} & set(alone) else ""
        yield f"deepspeed.initialize alone takes its own default for {wording.listed(alone)}{means}"
    if len(alone) < len(every):
        others = wording.listed([key for key in every if key not in alone])
        yield f'deepspeed.initialize alone does not know what "auto" is for {others}'


def _auto_keys(value: Any, key: str) -> Iterator[str]:
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _auto_keys(each, f"{key}.{name}" if key else str(name))
    elif value == "auto" and key not in ("optimizer.params.projector_storage",):
        yield key
