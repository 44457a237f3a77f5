"""The job that a command's options and a configuration describe. Imports torch only for a model's own shapes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_galore.errors import ConfigError, DataError

__all__ = ["decoder_of", "job_of", "settings_from", "settings_of"]

#: Of GaLore's projection, where nothing says another.
DEFAULT_RANK = 128
CHECKPOINT_KEYS = ("keep_last", "keep_every", "full_every", "mode", "state_dtype")
#: Options that say what ``optimizer.params`` would, of optimizers of this package.
PARAM_OPTIONS = (
    *("moment_dtype", "unprojected_moment_dtype", "projector_dtype", "projector_storage", "proj_type", "refresh"),
    "beta1",
)


def job_of(options: Mapping[str, Any], settings: Mapping[str, Any]) -> tuple[Any, Any]:
    """The job and its schedule, if it has one.

    Parameters
    ----------
    options
        Of the command, by their names; they override the settings.
    settings
        As :func:`settings_of` gives them.

    Raises
    ------
    ConfigError
        For options that contradict each other or change nothing, and for impossible values.
    DataError
        For a model that cannot be read.
    """
    from ds_galore.tools.estimate import Job
    from ds_galore.tools.llamas import assumed
    from ds_galore.tools.optimizers import configured, largest_rank
    from ds_galore.tools.storage import Schedule

    optimizer, params = _optimizer(options, settings)
    _refuse_idle(options, optimizer, params)
    optimizer = configured(optimizer, params)
    assumptions = list(settings["assumptions"])
    rank = options["rank"] or largest_rank(params.get("rank"))
    if optimizer.low_rank and rank is None:
        rank = DEFAULT_RANK
        assumptions.append(f"rank {rank}; --rank gives another")
    elif options["rank"] is None and isinstance(params.get("rank"), Mapping):
        assumptions.append(f"rank by energy: the largest, {rank}, for every matrix")
    if options["precision"] is None and settings["precision"] is None:
        assumptions.append("bf16 weights and gradients; --precision gives others")
    stage = settings["stage"] if options["zero_stage"] is None else options["zero_stage"]
    if not isinstance(stage, int):
        raise ConfigError(f"zero_optimization.stage is {stage!r}: give --zero-stage")
    own: dict[str, Any] = {}
    storage = params.get("projector_storage", "auto")
    if storage != "auto":
        own["sharded"] = storage == "sharded" and stage > 0 and options["world_size"] > 1
    if (options["params"] is None) == (options["model_config"] is None):
        raise ConfigError("give the model by --params NUMBER or by --model-config PATH, and not by both")
    if options["params"] is not None:
        proj_type = params.get("proj_type", "std")
        plans, scale, more = assumed(options["params"], optimizer, rank, proj_type)
        if scale != 1.0:
            own |= {"scale": scale, "parameters": options["params"]}
        assumptions += more
    else:
        plans = _plans(options["model_config"], optimizer.low_rank, params, rank)
    explicit = options["state_precision"]
    job = Job(
        plans,
        optimizer=optimizer,
        precision=options["precision"] or settings["precision"] or "bf16",
        state_precision=explicit or settings["state_precision"],
        master_precision=None if explicit else settings["master_precision"],
        stage=stage,
        world_size=options["world_size"],
        state_dtype=settings["state_dtype"],
        **own,
        assumptions=tuple(assumptions),
    )
    if options["steps"] is None:
        return job, None
    every = {"full": 1}.get(settings["mode"], options["full_every"] or settings["full_every"])
    return job, Schedule(
        options["steps"],
        options["save_every"],
        options["keep_last"] or settings["keep_last"],
        every,
        settings["keep_every"],
        incremental=settings["mode"] == "incremental",
    )


def _optimizer(options: Mapping[str, Any], settings: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The optimizer, and its parameters: the configuration's where that is for one of ours; options override them."""
    from ds_galore.tools.optimizers import optimizer_named

    optimizer = optimizer_named(options["optimizer"] or settings["optimizer"] or "adamw")
    configured = optimizer_named(settings["optimizer"]) if settings["optimizer"] is not None else None
    params: dict[str, Any] = {}
    if configured is not None and configured.ours and optimizer.low_rank:
        params = {"proj_type": "right", **settings["params"]}
        if configured.name != optimizer.name:  # --optimizer stands for another type in the same configuration
            for key in _of_its_own(optimizer):
                params.pop(key, None)
        if options["state_precision"] is None:  # a bf16 state of DeepSpeed's is no bf16 moment of ours
            params.setdefault("moment_dtype", optimizer.moment_dtype or "fp32")
    return optimizer, {**params, **{key: options[key] for key in PARAM_OPTIONS if options.get(key) is not None}}


def _of_its_own(optimizer: Any) -> list[str]:
    """Parameters that an optimizer does not take from the configuration of another one."""
    found = ["beta1"]
    if optimizer.moment_dtype is not None:
        found.append("moment_dtype")
    if optimizer.refresh == "random":
        found += ["refresh", "projector_dtype", "projector_storage"]
    if not optimizer.low_rank_update:
        found.append("gradients")
    return found


def _refuse_idle(options: Mapping[str, Any], optimizer: Any, params: Mapping[str, Any]) -> None:
    """Refuse options that would change nothing."""
    if (options["steps"] is None) != (options["save_every"] is None):
        raise ConfigError("--steps and --save-every go together")
    for name in ("keep_last", "full_every"):
        if options[name] is not None and options["steps"] is None:
            raise ConfigError(f"--{name.replace('_', '-')} is about a run: give --steps and --save-every too")
    if options["rank"] is not None and not optimizer.low_rank:
        raise ConfigError("--rank goes with an optimizer that projects, such as --optimizer galore_adamw")
    given = [name for name in PARAM_OPTIONS if options.get(name) is not None]
    for name in given:
        if not optimizer.ours:
            raise ConfigError(
                f"--{name.replace('_', '-')} goes with an optimizer of this package, such as galore_adamw;"
                f" {optimizer.name} is none"
            )
    if "beta1" in given and not optimizer.factored:
        raise ConfigError(f"--beta1 goes with galore_adafactor; {optimizer.name} has a first moment anyway")
    if "moment_dtype" in given and optimizer.factored and params.get("beta1") is None:
        raise ConfigError(f"--moment-dtype: {optimizer.name} has factored moments alone, in fp32, without --beta1")
    for name in ("projector_dtype", "projector_storage"):
        if name in given and params.get("refresh", optimizer.refresh) == "random":
            raise ConfigError(f"--{name.replace('_', '-')}: {optimizer.name} with refresh random keeps no projectors")


def settings_from(path: Path | None) -> dict[str, Any]:
    """What a configuration file says of a job; None is for options alone."""
    if path is None:
        return settings_of({})
    from ds_galore.config import load_config
    from ds_galore.conflicts import check_config
    from ds_galore.deepspeed_keys import DEEPSPEED_OPTIMIZERS

    config = load_config(path)
    try:
        check_config(config, DEEPSPEED_OPTIMIZERS)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return settings_of(config)


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a configuration says of a job; an empty one is for options alone.

    Parameters
    ----------
    config
        A DeepSpeed configuration that has been checked.
    """
    from ds_galore.config import section
    from ds_galore.parameters import named

    found: dict[str, Any] = {"optimizer": None, "params": {}, "precision": None, "stage": 0, "assumptions": []}
    found.update({"keep_last": None, "keep_every": None, "full_every": 10, "mode": "differential"})
    found.update({"state_dtype": "exact", "state_precision": "fp32", "master_precision": None})
    if not config:
        return found
    params = {k: v for k, v in section(config, "optimizer", "params").items() if v != "auto"}
    kind = section(config, "optimizer").get("type")
    if kind is not None and kind.lower() == "sgd" and params.get("momentum"):
        kind = "sgd_momentum"
    if isinstance(kind, str):
        kind, params = named(kind, params)
    checkpoint = section(config, "ds_galore", "checkpoint")
    enabled = {name: section(config, name).get("enabled", False) for name in ("bf16", "fp16")}
    chosen = [name for name, value in enabled.items() if value is True]
    if chosen:
        found["precision"] = chosen[0]
    elif "auto" not in enabled.values():
        found["precision"] = "fp32"
    if enabled["bf16"]:
        bf16 = section(config, "bf16")
        found["master_precision"] = "bf16" if bf16.get("bf16_master_weights_and_grads") is True else None
        found["state_precision"] = "bf16" if bf16.get("bf16_optimizer_states") is True else "fp32"
    found.update({key: checkpoint[key] for key in CHECKPOINT_KEYS if key in checkpoint})
    found["stage"] = section(config, "zero_optimization").get("stage", 0)
    found.update(optimizer=kind, params=params)
    return found


def _plans(model_config: Path, low_rank: bool, params: Mapping[str, Any], rank: int | None) -> list[Any]:
    """The parameters of a model as its optimizer sees them."""
    from ds_galore.tools.memory import ParameterPlan

    model = _empty_model(model_config)
    plain = [
        ParameterPlan(name, each.numel(), each.shape[-1] if each.dim() == 2 else 0)
        for name, each in model.named_parameters()
    ]
    if not low_rank:
        return plain
    from ds_galore.optim.galore import GaLoreAdamW

    chosen = {key: params[key] for key in ("proj_type", "target_modules") if key in params}
    optimizer = GaLoreAdamW(model.parameters(), model=model, rank=rank, **chosen)  # all project the same matrices
    return optimizer.parameter_plans()


def decoder_of(model_config: Path) -> Any:
    """The shape of a model's layers, for its activations.

    Raises
    ------
    DataError
        If it is no decoder whose configuration tells it.
    """
    from ds_galore.tools.activations import Decoder

    found = Decoder.of(_empty_model(model_config).config)
    if found is None:
        raise DataError(
            f"--model-config {model_config}: its activations are not known, since it names no hidden_size,"
            " intermediate_size, num_hidden_layers or vocab_size; leave --sequence-length out"
        )
    return found


@functools.lru_cache(maxsize=1)
def _empty_model(path: Path) -> Any:
    """The model without its weights."""
    if not path.exists():
        raise DataError(f"--model-config {path}: no such file or directory")
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise DataError(
            f"--model-config {path}: needs {error.name}, which is not installed; --params takes a number"
        ) from None
    try:
        loaded = AutoConfig.from_pretrained(str(path), local_files_only=True)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(loaded)
    except Exception as error:  # noqa: BLE001 - transformers raises many kinds for files it cannot use
        raise DataError(f"--model-config {path}: cannot be loaded: {str(error).splitlines()[0]}") from None
