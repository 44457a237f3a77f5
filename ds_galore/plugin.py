"""``enable()``: the only place that registers anything in DeepSpeed.

DeepSpeed looks an optimizer type that it does not know up in ``torch.optim``. A parameter there has no name, so the
engine's method that builds the optimizer is wrapped to hand ours the model, and the one around it to tell ours, or the
user's of our kind, which of DeepSpeed's optimizers holds it. Those that check an engine's configuration are wrapped to
refuse mistakes before anything is built. Seen in DeepSpeed 0.19.8.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from ds_galore import huggingface
from ds_galore.config import GALORE_OPTIMIZERS, CheckpointConfig, DsGaloreConfig, nearest, section, validate
from ds_galore.conflicts import check_config
from ds_galore.errors import BindingError, ConfigError
from ds_galore.optim import galore
from ds_galore.optim.optimizer import LowRankOptimizer
from ds_galore.parameters import ALIASES, LAYERWISE, OPTIMIZERS

__all__ = ["check_deepspeed_config", "enable"]

#: By every name that a configuration may have for it, what makes an optimizer.
_OPTIMIZERS: dict[str, Callable[..., LowRankOptimizer]] = {
    **{name: getattr(galore, name) for name in OPTIMIZERS},
    **{alias: getattr(galore, name) for alias, name in ALIASES.items()},
    **{alias: functools.partial(getattr(galore, name), gradients="lowrank") for alias, name in LAYERWISE.items()},
}
_MARK = "_ds_galore_wrapped"


def enable() -> None:
    """Make DeepSpeed know the optimizers of this package.

    Call it once, before ``deepspeed.initialize``, ``accelerator.prepare`` or the Trainer is built; further calls change
    nothing. From then on ``"optimizer": {"type": "GaLoreAdamW", "params": {...}}`` works in a DeepSpeed configuration,
    and an engine refuses a configuration that :func:`check_deepspeed_config` refuses.

    Raises
    ------
    ImportError
        If DeepSpeed is not installed.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine

    for name, optimizer in _OPTIMIZERS.items():
        setattr(torch.optim, name, optimizer)
    _wrap(DeepSpeedEngine, "_do_sanity_check", _checked)
    _wrap(DeepSpeedEngine, "_configure_basic_optimizer", _built_with_model)
    _wrap(DeepSpeedEngine, "_do_optimizer_sanity_check", _checked_when_built)
    _wrap(DeepSpeedEngine, "_configure_optimizer", _attached)
    _wrap(DeepSpeedEngine, "_configure_zero_optimizer", _lowered)
    _wrap(DeepSpeedEngine, "_configure_checkpointing", _with_checkpoints)
    huggingface.register()


def _wrap(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method by ``wrapper(original, self, ...)``, once."""
    original = getattr(owner, name)
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(original, self, *args, **kwargs)

    setattr(method, _MARK, True)
    setattr(owner, name, method)


def _checked(original: Callable[..., Any], engine: Any) -> Any:
    check_deepspeed_config(engine._config._param_dict, client_optimizer=engine.client_optimizer)
    return original(engine)


def _checked_when_built(original: Callable[..., Any], engine: Any, basic_optimizer: Any) -> Any:
    """Check for an optimizer that the user's function has built, which :func:`_checked` has not seen yet."""
    if isinstance(basic_optimizer, LowRankOptimizer) and basic_optimizer is not engine.client_optimizer:
        check_deepspeed_config(engine._config._param_dict, client_optimizer=basic_optimizer)
    return original(engine, basic_optimizer)


def _attached(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Tell an optimizer of ours which of DeepSpeed's holds it: its tensors lead there at stage 3 only."""
    result = original(engine, *args, **kwargs)
    basic: Any = engine.basic_optimizer
    if isinstance(basic, LowRankOptimizer):
        basic.attach(engine.optimizer)
        if hasattr(engine.optimizer, "real_dp_process_group"):
            _refuse_full_states(engine.optimizer, type(basic).__name__)
    return result


def _lowered(original: Callable[..., Any], engine: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Put our ZeRO-3 optimizer in place of DeepSpeed's where gradients are to be lowered when they arrive."""
    if not isinstance(optimizer, LowRankOptimizer) or not optimizer.lowers_gradients:
        return original(engine, optimizer, *args, **kwargs)
    from deepspeed.runtime.zero import stage3

    from ds_galore.zero.lowered import lowered_stage3

    theirs = stage3.DeepSpeedZeroOptimizer_Stage3
    try:
        stage3.DeepSpeedZeroOptimizer_Stage3 = lowered_stage3()  # imported by this name, once, below
        return original(engine, optimizer, *args, **kwargs)
    finally:
        stage3.DeepSpeedZeroOptimizer_Stage3 = theirs


def _refuse_full_states(holder: Any, kind: str) -> None:
    """See that all ranks refuse the full optimizer state of a parameter at stages 1 and 2.

    DeepSpeed 0.19.8 asks the fragment that a rank holds, which knows no low-rank state and raises; ranks that hold
    nothing of the parameter would wait in an all-reduce. It links parameters anew after a load.
    """
    link = holder._link_all_hp_params

    def refusing(method: Callable[..., Any], position: int) -> Callable[..., Any]:
        def full(*args: Any, **kwargs: Any) -> Any:
            key = kwargs.get("optim_state_key", args[position] if len(args) > position else None)
            if key is not None:
                raise BindingError(
                    f"{key!r} of a whole parameter does not exist: {kind} keeps low-rank states, by parameter name, in"
                    " optimizer.state; DeepSpeed's functions for full optimizer states do not work with it"
                )
            return method(*args, **kwargs)

        return full

    def refuse() -> None:
        for group in getattr(holder, "bit16_groups", None) or holder.bf16_groups:
            for parameter in group:
                parameter.get_full_hp_param = refusing(parameter.get_full_hp_param, 0)
                parameter.set_full_hp_param = refusing(parameter.set_full_hp_param, 1)

    def link_all_hp_params() -> None:
        link()
        refuse()

    holder._link_all_hp_params = link_all_hp_params
    refuse()


def _built_with_model(original: Callable[..., Any], engine: Any, model_parameters: Any) -> Any:
    optimizer = _OPTIMIZERS.get(engine.optimizer_name())
    if optimizer is None:
        return original(engine, model_parameters)
    return optimizer(model_parameters, model=engine.module, **(engine.optimizer_params() or {}))


def _with_checkpoints(original: Callable[..., Any], engine: Any) -> Any:
    """Put our checkpoint engine in place of DeepSpeed's where the configuration asks for it; watch the run likewise."""
    ours = validate(DsGaloreConfig, section(engine._config._param_dict, "ds_galore"), where="ds_galore")
    from ds_galore.monitoring.monitor import Monitor

    settings = Monitor.wanted(engine, ours.monitor)
    monitor = None if settings is None else Monitor(engine, settings)
    if ours.checkpoint is None:
        original(engine)
    else:
        _put_checkpoints(original, engine, ours.checkpoint, monitor)
    if monitor is not None:
        monitor.start()


def _put_checkpoints(original: Callable[..., Any], engine: Any, settings: CheckpointConfig, monitor: Any) -> None:
    from deepspeed.runtime import engine as module

    from ds_galore.checkpoint.engine import SaveEngine

    made = SaveEngine(settings, monitor)
    # Ours to do: DeepSpeed would have every node save what one rank saves.
    node_local, engine._config.use_node_local_storage = bool(engine._config.use_node_local_storage), False
    theirs = module.create_checkpoint_engine
    try:
        module.create_checkpoint_engine = lambda **_: made  # called by this name, once, below
        original(engine)
    finally:
        module.create_checkpoint_engine = theirs
    made.attach(engine, node_local=node_local)
    save = engine.save_checkpoint

    @functools.wraps(save)  # the Trainer looks at its signature
    def save_checkpoint(save_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(save).bind(save_dir, tag, *args, **kwargs)
        bound.apply_defaults()
        made.begin()
        result = save(save_dir, tag, *args, **kwargs)
        made.finish(bool(bound.arguments["save_latest"]))
        made.returned()
        return result

    load = engine.load_checkpoint

    @functools.wraps(load)
    def load_checkpoint(load_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(load).bind(load_dir, tag, *args, **kwargs)
        bound.apply_defaults()
        if engine.load_universal_checkpoint():
            return load(load_dir, tag, *args, **kwargs)
        chosen = made.prepare_load(load_dir, tag, bound.arguments)
        if chosen is None:
            return load(load_dir, tag, *args, **kwargs)
        return made.restorer.run(engine, load, bound.arguments, chosen)

    names, zero = engine._get_all_ckpt_names, engine._load_zero_checkpoint

    @functools.wraps(names)
    def get_all_ckpt_names(checkpoints_path: Any, tag: Any) -> Any:
        return made.restorer.name_for_this_rank(names(checkpoints_path, tag), checkpoints_path, tag)

    @functools.wraps(zero)
    def load_zero_checkpoint(load_dir: Any, tag: Any, load_optimizer_states: bool = True) -> Any:
        return zero(load_dir, tag, load_optimizer_states=load_optimizer_states and not made.restorer.loads_weights_only)

    @functools.wraps(engine._copy_recovery_script)
    def copy_recovery_script(save_path: Any) -> None:
        made.write_recovery_script(save_path)

    engine._copy_recovery_script = copy_recovery_script
    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint
    engine._get_all_ckpt_names, engine._load_zero_checkpoint = get_all_ckpt_names, load_zero_checkpoint


def check_deepspeed_config(config: dict[str, Any], *, client_optimizer: Any = None) -> None:
    """Refuse a DeepSpeed configuration that cannot work with this package, before training starts.

    Parameters
    ----------
    config
        The whole configuration, as a dict.
    client_optimizer
        An optimizer object that is given to ``deepspeed.initialize`` in place of the ``optimizer`` section.

    Raises
    ------
    ConfigError
        As :func:`ds_galore.conflicts.check_config`; also for keys that DeepSpeed would refuse or stumble over later:
        unknown ones in ``zero_optimization``, and unknown schedulers or parameters of them.
    """
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    torch_optimizers = [
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    ]
    if isinstance(client_optimizer, LowRankOptimizer):
        name = type(client_optimizer).__name__
        params = {"gradients": "lowrank"} if client_optimizer.lowers_gradients else {}
        config = {**config, "optimizer": {"type": name, "params": params}}  # the others are checked already
    check_config(config, [*DEEPSPEED_OPTIMIZERS, *(name for name in torch_optimizers if name not in GALORE_OPTIMIZERS)])
    _check_zero_keys(config)
    _check_scheduler(config)


def _check_zero_keys(config: dict[str, Any]) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = DeepSpeedZeroConfig.model_fields
    known = {*fields, *(field.alias for field in fields.values() if field.alias)}
    for key in section(config, "zero_optimization"):
        if key not in known:
            raise ConfigError(f"zero_optimization.{key}: unknown key{nearest(key, known)}")


def _check_scheduler(config: dict[str, Any]) -> None:
    from deepspeed.runtime import lr_schedules

    scheduler = section(config, "scheduler")
    if not scheduler:
        return
    kind = scheduler["type"]
    found = getattr(lr_schedules, kind, None) if kind in lr_schedules.VALID_LR_SCHEDULES else None
    if found is None:
        found = getattr(torch.optim.lr_scheduler, kind, None)
    if not isinstance(found, type):
        raise ConfigError(
            f"scheduler.type is {kind!r}: no such scheduler{nearest(kind, lr_schedules.VALID_LR_SCHEDULES)}"
        )
    known = [name for name in inspect.signature(found).parameters if name != "optimizer"]
    for key in section(scheduler, "params"):
        if key not in known:
            raise ConfigError(f"scheduler.params.{key}: {kind} has no such parameter{nearest(key, known)}")
