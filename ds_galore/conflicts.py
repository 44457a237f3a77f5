"""What cannot work in a DeepSpeed configuration, told before training starts. Imports neither torch nor DeepSpeed."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ds_galore.config import GALORE_OPTIMIZERS, DsGaloreConfig, nearest, section, validate
from ds_galore.deepspeed_keys import TOP_LEVEL_KEYS
from ds_galore.errors import ConfigError
from ds_galore.parameters import OPTIMIZERS, named

__all__ = ["check_config", "conflicts"]


def _refusal(key: str, value: object, reason: str) -> str:
    return f"{key} is {value!r}: {reason}"


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
        For the first of :func:`conflicts`.
    """
    for conflict in conflicts(config, known_optimizers):
        raise ConfigError(conflict)


def conflicts(config: Mapping[str, Any], known_optimizers: Iterable[str] = ()) -> Iterator[str]:
    """All that cannot work in a configuration, each as :func:`check_config` would tell it.

    That is a mistake in the ``ds_galore`` section, a top-level key that DeepSpeed would ignore although it is almost
    one that it knows, an unknown optimizer type, and, where the optimizer is one of ours, mistakes in its parameters
    and DeepSpeed features with which it does not work. Parameters as those of :func:`check_config`.
    """
    checks: list[Callable[[], Iterator[str]]] = [
        lambda: _in_our_section(config),
        lambda: _in_names(config),
        lambda: _in_optimizer(config, known_optimizers),
    ]
    for check in checks:
        try:
            yield from check()
        except ConfigError as error:  # of something that later checks of the same kind rest on
            yield str(error)


def _in_our_section(config: Mapping[str, Any]) -> Iterator[str]:
    ours = validate(DsGaloreConfig, section(config, "ds_galore"), where="ds_galore")
    if ours.checkpoint is not None:
        yield from _check_checkpoint(config)


def _in_names(config: Mapping[str, Any]) -> Iterator[str]:
    """Keys that are almost known ones."""
    for key in config:
        hint = "" if key in TOP_LEVEL_KEYS else nearest(key, TOP_LEVEL_KEYS)
        if "did you mean" in hint and difflib.SequenceMatcher(None, key, hint.split("'")[1]).ratio() >= 0.8:
            yield f"{key}: DeepSpeed does not know this key and would ignore it{hint}"
    for name, keys in (("optimizer", ("type", "params", "legacy_fusion")), ("scheduler", ("type", "params"))):
        present = section(config, name)
        for key in present:
            if key not in keys:
                yield f"{name}.{key}: unknown key{nearest(key, keys)}"
        if present and not isinstance(present.get("type"), str):
            yield f"{name}.type is {present.get('type')!r}: it must be a name"


def _in_optimizer(config: Mapping[str, Any], known_optimizers: Iterable[str]) -> Iterator[str]:
    kind = section(config, "optimizer").get("type")
    if not isinstance(kind, str):
        return
    if kind not in GALORE_OPTIMIZERS:
        known = [*GALORE_OPTIMIZERS, *known_optimizers]
        exact = known_optimizers and kind not in known and kind.lower() not in known
        if exact or kind.lower() in (name.lower() for name in GALORE_OPTIMIZERS):
            yield f"optimizer.type is {kind!r}: no such optimizer{nearest(kind, known)}"
        return
    try:
        given = {key: value for key, value in section(config, "optimizer", "params").items() if value != "auto"}
        name, parameters = named(kind, given)
        validate(OPTIMIZERS[name], parameters, where="optimizer.params")
        if parameters.get("gradients") == "lowrank":
            yield from _check_lowered(config)
    except ConfigError as error:
        yield str(error)
    yield from _check_zero(config, kind)


def _check_lowered(config: Mapping[str, Any]) -> Iterator[str]:
    """With what gradients cannot be lowered when they arrive."""
    stage = section(config, "zero_optimization").get("stage", 0)
    if stage != 3:
        yield _refusal(
            "zero_optimization.stage",
            stage,
            "optimizer.params.gradients 'lowrank' lowers what ZeRO 3 has partitioned; use 3",
        )
    device = section(config, "zero_optimization", "offload_optimizer").get("device", "none")
    if device != "none":
        yield _refusal(
            "zero_optimization.offload_optimizer.device",
            device,
            "DeepSpeed would keep whole gradients in host memory; optimizer.params.gradients 'lowrank' is for none",
        )


def _check_checkpoint(config: Mapping[str, Any]) -> Iterator[str]:
    """What our checkpoints do not hold yet, or what would write them as well."""
    if section(config, "zero_optimization").get("elastic_checkpoint"):
        yield _refusal(
            "zero_optimization.elastic_checkpoint", True, "ds_galore.checkpoint loads on any number of ranks anyway"
        )
    for target in ("optimizer", "param"):
        device = section(config, "zero_optimization", f"offload_{target}").get("device")
        if device == "nvme":
            yield _refusal(
                f"zero_optimization.offload_{target}.device", device, "ds_galore.checkpoint does not support NVMe"
            )
    if section(config, "checkpoint").get("writer"):
        yield _refusal(
            "checkpoint.writer", section(config, "checkpoint")["writer"], "ds_galore.checkpoint is a writer itself"
        )
    if section(config, "datastates_ckpt"):
        yield _refusal("datastates_ckpt", config["datastates_ckpt"], "ds_galore.checkpoint is a writer itself")


def _check_zero(config: Mapping[str, Any], kind: str) -> Iterator[str]:
    """ZeRO features with which our optimizers do not work."""
    zero = section(config, "zero_optimization")
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        yield _refusal("zero_optimization.stage", stage, f"{kind} supports the stages 0, 1, 2 and 3")
    yield from _check_precision(config, kind, stage)
    if stage == 0:
        return
    if config.get("zero_allow_untested_optimizer") is not True:
        found = config.get("zero_allow_untested_optimizer")
        yield _refusal("zero_allow_untested_optimizer", found, f"DeepSpeed wants true here for {kind}")
    for target in ("optimizer", "param"):
        device = section(config, "zero_optimization", f"offload_{target}").get("device")
        if device == "nvme":
            yield _refusal(
                f"zero_optimization.offload_{target}.device", device, f"{kind} does not support NVMe; use cpu or none"
            )
    offload = section(config, "zero_optimization", "offload_optimizer")
    if offload.get("ratio", 1) != 1:
        yield _refusal(
            "zero_optimization.offload_optimizer.ratio", offload["ratio"], f"{kind} is offloaded whole (1) or not"
        )
    if offload.get("super_offload"):
        yield _refusal("zero_optimization.offload_optimizer.super_offload", True, f"{kind} does not support it")
    for key, neutral in (("elastic_checkpoint", False), ("zenflow", None)):
        if zero.get(key, neutral) not in (neutral, None, False):
            yield _refusal(
                f"zero_optimization.{key}", zero[key], f"{kind} does not support it; use {json.dumps(neutral)}"
            )
    if section(config, "checkpoint").get("load_universal"):
        yield _refusal(
            "checkpoint.load_universal", True, f"universal checkpoints have no place for {kind}'s low-rank states"
        )


def _check_precision(config: Mapping[str, Any], kind: str, stage: int) -> Iterator[str]:
    """Combinations of dtypes that DeepSpeed keeps for its own Adam, or would ignore."""
    masters, states = "bf16_master_weights_and_grads", "bf16_optimizer_states"
    bf16 = section(config, "bf16")
    if bf16.get(masters):
        if stage == 0:
            yield _refusal(
                f"bf16.{masters}", True, "without ZeRO DeepSpeed ignores it and keeps fp32 masters; use stage 1 to 3"
            )
        if section(config, "zero_optimization", "offload_optimizer").get("device") == "cpu":
            yield _refusal(f"bf16.{masters}", True, "with a CPU-offloaded optimizer DeepSpeed wants its own Adam")
        if not bf16.get(states):
            yield _refusal(
                f"bf16.{states}", bf16.get(states, False), f"beside bf16.{masters} DeepSpeed wants true here"
            )
        if stage == 1 and section(config, "data_types").get("grad_accum_dtype") in ("fp32", "float32"):
            yield _refusal(
                f"bf16.{masters}", True, "with fp32 accumulation at stage 1 DeepSpeed ignores it; use stage 2"
            )
    fp16 = section(config, "fp16")
    if stage == 0 and fp16.get("enabled") not in (None, False, "auto") and fp16.get("loss_scale", 0) != 1:
        yield _refusal(
            "fp16.loss_scale",
            fp16.get("loss_scale", 0),
            "without ZeRO DeepSpeed divides gradients by it and does not scale the loss; use 1, or stage 1 to 3",
        )
    if fp16.get("fp16_master_weights_and_grads"):
        yield _refusal(
            "fp16.fp16_master_weights_and_grads", True, f"DeepSpeed wants its own CPU-offloaded Adam, not {kind}"
        )
    autocast = section(config, "torch_autocast")
    if stage and autocast.get("enabled") and autocast.get("dtype") in ("float16", "fp16"):
        yield _refusal(
            "torch_autocast.dtype",
            autocast["dtype"],
            "at stage 3 DeepSpeed takes no step with it, and at 1 and 2 ranks skip steps each for itself; use bfloat16",
        )
