"""What ``enable()`` registers with Hugging Face's transformers and accelerate, where they are installed.

The Trainer knows GaLore and APOLLO by ``TrainingArguments(optim="galore_adamw")`` and makes galore-torch's and
apollo-torch's optimizers of them, which fail on DeepSpeed's flat partitions; with an optimizer in the DeepSpeed
configuration it ignores the name and trains with that one. Here the names become ours under DeepSpeed, and a conflict
is refused. Without DeepSpeed everything stays as it was. Seen in transformers 5.24 and accelerate 1.15.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import wrapt
from torch import nn

from ds_galore.checkpoint.loading import is_placeholder
from ds_galore.checkpoint.manifest import MANIFEST, Manifest
from ds_galore.checkpoint.reader import CheckpointReader
from ds_galore.errors import ConfigError, DataError, DsGaloreError
from ds_galore.optim import galore
from ds_galore.optim.optimizer import LowRankOptimizer
from ds_galore.parameters import ALIASES, LAYERWISE, named

__all__ = ["register"]

SUFFIX = "_layerwise"
#: The Trainer's names that are ours under DeepSpeed.
NAMES = (*ALIASES, *(f"{name}{SUFFIX}" for name in ALIASES))
#: What the Trainer sets for a low-rank optimizer where ``optim_args`` does not.
DEFAULTS: Mapping[str, Any] = {"rank": 128, "update_proj_gap": 200, "proj_type": "std"}
#: By apollo-torch's names, ours.
RENAMED: Mapping[str, str] = {"proj": "refresh", "scale_type": "scaling"}
#: The Trainer's default of ``adam_epsilon``, which it does not hand to galore-torch.
ADAM_EPSILON = 1e-8
_MARK = "_ds_galore_wrapped"


def register() -> None:
    """Register everything, once, when the modules are imported that it concerns, or now where they are.

    Nothing is imported here: of a job that uses neither the Trainer nor accelerate they would be half of the start.
    """
    wrapt.register_post_import_hook(_keep_ours_under_offload, "accelerate.accelerator")
    wrapt.register_post_import_hook(_take_names, "transformers.trainer_optimizer")
    wrapt.register_post_import_hook(_refuse_conflicts, "transformers.integrations.deepspeed")
    wrapt.register_post_import_hook(_refuse_unfinished, "transformers.trainer_utils")


def _keep_ours_under_offload(module: Any) -> None:
    """Keep accelerate from putting its CPU Adam in place of an optimizer of ours where the optimizer is offloaded."""
    original = getattr(module, "map_pytorch_optim_to_deepspeed", None)
    if original is None or hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def mapped(optimizer: Any) -> Any:
        if isinstance(optimizer, LowRankOptimizer):
            raise ConfigError(
                f"zero_force_ds_cpu_optimizer is true (accelerate's default): with an offloaded optimizer accelerate"
                f" would train with DeepSpeedCPUAdam in place of {type(optimizer).__name__}; set it to false in the"
                " DeepSpeed configuration"
            )
        return original(optimizer)

    setattr(mapped, _MARK, True)
    module.map_pytorch_optim_to_deepspeed = mapped


# ---------------------------------------------------------------------- the Trainer's names


def _take_names(module: Any) -> None:
    handlers = module._OPTIMIZER_HANDLERS
    for name in NAMES:
        original = handlers.get(name)
        if original is not None and not hasattr(original, _MARK):
            handler = functools.partial(_handled, original)
            setattr(handler, _MARK, True)
            handlers[name] = handler


def _handled(original: Callable[[Any], Any], context: Any) -> tuple[Any, dict[str, Any]]:
    """What the Trainer's handler of one of the names returns: a class or a maker, and its arguments."""
    if not _uses_deepspeed(context.args):
        found: tuple[Any, dict[str, Any]] = original(context)
        return found
    name = str(getattr(context.args.optim, "value", context.args.optim))
    if name.endswith(SUFFIX) and name not in LAYERWISE:
        raise ConfigError(
            f"optim is {name!r}: it updates with full gradients; use {name.removesuffix(SUFFIX)!r}, whose states ZeRO"
            " partitions"
        )
    values = _hyperparameters(context, name.removesuffix(SUFFIX))
    if name in LAYERWISE and "proj_type" not in context.optim_args:
        values["proj_type"] = "right"  # from where gradients can be lowered when they arrive
    own, values = named(name, values)
    kind = getattr(galore, own)
    decay = float(context.args.weight_decay)
    return _maker, {"kind": kind, "decay": decay, "values": values}


def _uses_deepspeed(arguments: Any) -> bool:
    return getattr(arguments, "deepspeed_plugin", None) is not None


def _hyperparameters(context: Any, name: str) -> dict[str, Any]:
    """Keyword arguments of our optimizer from the Trainer's arguments."""
    arguments, given = context.args, dict(context.optim_args)
    values: dict[str, Any] = {**DEFAULTS, "target_modules": arguments.optim_target_modules}
    if arguments.optim_target_modules is None:
        raise ConfigError(
            f"optim_target_modules is None: optim {name!r} needs it, such as ['attn', 'mlp'] or 'all-linear'"
        )
    values["lr"] = arguments.learning_rate
    if name != "galore_adafactor":
        values["betas"] = (arguments.adam_beta1, arguments.adam_beta2)
        if name == "apollo_adamw" or arguments.adam_epsilon != ADAM_EPSILON:
            values["eps"] = arguments.adam_epsilon
    for key, text in given.items():
        values[RENAMED.get(key, key)] = _value(text)
    return values


def _value(text: str) -> Any:
    """A number, a boolean or a word from ``optim_args``."""
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except json.JSONDecodeError:
        return text


def _maker() -> Callable[..., LowRankOptimizer]:
    """What the Trainer calls with the model and the arguments."""
    return _make


def _make(model: nn.Module, *, kind: type[LowRankOptimizer], decay: float, values: dict[str, Any]) -> LowRankOptimizer:
    """An optimizer whose weight decay spares what the Trainer's own spares: biases and norms."""
    from transformers import Trainer

    decayed = set(Trainer.get_decay_parameter_names(None, model)) if decay else set()
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for name, parameter in trained if (name in decayed) == wanted], "weight_decay": factor}
        for wanted, factor in ((True, decay), (False, 0.0))
    ]
    groups = [group for group in groups if group["params"]]
    lr = values["lr"]
    if isinstance(lr, float | int) and not isinstance(lr, bool):
        values = {**values, "lr": float(lr)}
    return kind(groups, model=model, **values)


def _refuse_conflicts(module: Any) -> None:
    """Refuse an optimizer in the DeepSpeed configuration beside one of the names, which the Trainer would ignore."""
    original = module.deepspeed_optim_sched
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def chosen(trainer: Any, hf_deepspeed_config: Any, args: Any, *rest: Any, **options: Any) -> Any:
        name = str(getattr(args.optim, "value", args.optim))
        config = hf_deepspeed_config.config
        if name in NAMES:
            if "transformers.trainer_optimizer" not in sys.modules:
                raise ConfigError(
                    f"optim is {name!r}: this version of transformers makes galore-torch's or apollo-torch's optimizer"
                    " of it, which cannot work on ZeRO's partitions; install a newer one (5.24 is known to do), or"
                    " choose the optimizer in the DeepSpeed configuration"
                )
            if "optimizer" in config:
                raise ConfigError(
                    f"optim is {name!r}, and the DeepSpeed configuration has optimizer.type"
                    f" {config['optimizer'].get('type')!r}, which would train instead: give one of them (without optim"
                    " the configuration's is used)"
                )
            config["zero_force_ds_cpu_optimizer"] = False  # as it sets zero_allow_untested_optimizer for all
        return original(trainer, hf_deepspeed_config, args, *rest, **options)

    setattr(chosen, _MARK, True)
    module.deepspeed_optim_sched = chosen


# ---------------------------------------------------------------------- the Trainer's newest checkpoint


def _refuse_unfinished(module: Any) -> None:
    """Refuse, in what ``resume_from_checkpoint=True`` looks for, a newest directory of ours that is not complete."""
    original = module.get_last_checkpoint
    if not hasattr(original, _MARK):

        @functools.wraps(original)
        def newest(folder: Any) -> Any:
            found = original(folder)
            if found is not None:
                _check_complete(Path(found))
            return found

        setattr(newest, _MARK, True)
        module.get_last_checkpoint = newest
    trainer = sys.modules.get("transformers.trainer")
    if trainer is not None:
        vars(trainer)["get_last_checkpoint"] = module.get_last_checkpoint


def _check_complete(directory: Path) -> None:
    """Raise if a directory of the Trainer's is one of ours, or among ours, and lacks something."""
    if _is_native(directory) or not (_tags(directory) or any(_manifests(each) for each in _siblings(directory))):
        return
    missing = _missing(directory)
    if missing is None:
        return
    good = next((each for each in _siblings(directory) if _missing(each) is None and _is_intact(each)), None)
    advice = (
        "there is no complete checkpoint beside it"
        if good is None
        else f"the newest complete checkpoint is {good}: pass it as resume_from_checkpoint, or remove {directory.name}"
    )
    raise DataError(f"{directory}: is not finished: {missing}; {advice}")


def _tags(directory: Path) -> list[Path]:
    return [each for each in directory.glob("global_step*") if each.is_dir()]


def _manifests(directory: Path) -> list[Path]:
    return [each / MANIFEST for each in _tags(directory) if (each / MANIFEST).is_file()]


def _is_native(directory: Path) -> bool:
    """Whether it holds a checkpoint in DeepSpeed's own format."""
    states = [path for each in _tags(directory) for path in each.glob("*_states.pt")]
    return any(not is_placeholder(path) for path in states)


def _siblings(directory: Path) -> list[Path]:
    """The Trainer's other directories of the run, the newest first."""
    found = [each for each in directory.parent.glob("checkpoint-*") if each.name[len("checkpoint-") :].isdecimal()]
    found.sort(key=lambda path: int(path.name[len("checkpoint-") :]), reverse=True)
    return [each for each in found if each != directory]


def _missing(directory: Path) -> str | None:
    """What a directory of the Trainer's lacks; None if it is complete."""
    manifests = _manifests(directory)
    if not manifests:
        return f"it holds no {MANIFEST}"
    try:
        manifest = Manifest.read(manifests[0].parent)
    except DsGaloreError as error:
        return str(error)
    # Of a node's own storage nothing more can be said here; the load brings the other nodes' files.
    ranks = 0 if manifest.metadata.get("node_local") else manifest.world_size
    wanted = [f"rng_state_{rank}.pth" for rank in range(ranks)] if ranks != 1 else ["rng_state.pth"]
    names = [name for name in ("trainer_state.json", *wanted) if not (directory / name).is_file()]
    return f"it holds no {names[0]}" if names else None


def _is_intact(directory: Path) -> bool:
    try:
        return all(not CheckpointReader(path.parent).verify() for path in _manifests(directory))
    except DsGaloreError:
        return False
