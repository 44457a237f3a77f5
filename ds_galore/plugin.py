"""``enable()``: the only place that registers anything in DeepSpeed.

DeepSpeed looks an optimizer type that it does not know up in ``torch.optim``. A parameter there has no name, so the
engine's method that builds the optimizer is wrapped to hand ours the model; the one that checks an engine's
configuration is wrapped to refuse mistakes before anything is built. Seen in DeepSpeed 0.19.8.
"""

from __future__ import annotations

import difflib
import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from ds_galore.config import GALORE_OPTIMIZERS, check_config, nearest
from ds_galore.errors import ConfigError
from ds_galore.optim.galore import GaLoreAdamW

__all__ = ["check_deepspeed_config", "enable"]

_OPTIMIZERS: dict[str, type[GaLoreAdamW]] = {"GaLoreAdamW": GaLoreAdamW}
_MARK = "_ds_galore_wrapped"

#: Where DeepSpeed defines the names of the top-level keys that it reads, as string constants or as models' fields.
_KEY_MODULES = (
    "deepspeed.runtime.constants",
    "deepspeed.autotuning.constants",
    "deepspeed.compression.constants",
    "deepspeed.elasticity.constants",
    "deepspeed.nebula.constants",
    "deepspeed.profiling.constants",
    "deepspeed.runtime.activation_checkpointing.config",
    "deepspeed.runtime.data_pipeline.constants",
    "deepspeed.runtime.swap_tensor.constants",
    "deepspeed.runtime.zero.config",
    "deepspeed.monitor.constants",
)


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


def _built_with_model(original: Callable[..., Any], engine: Any, model_parameters: Any) -> Any:
    optimizer = _OPTIMIZERS.get(engine.optimizer_name())
    if optimizer is None:
        return original(engine, model_parameters)
    return optimizer(model_parameters, model=engine.module, **(engine.optimizer_params() or {}))


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
        As :func:`ds_galore.config.check_config`; also for a top-level key that DeepSpeed does not know and would ignore
        although it differs from one that it knows by little.
    """
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    known_keys = _top_level_keys()
    for key in config:
        if key not in known_keys:
            hint = nearest(key, known_keys)
            if "did you mean" in hint and _close(key, hint):
                raise ConfigError(f"{key}: DeepSpeed does not know this key and would ignore it{hint}")
    torch_optimizers = [
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    ]
    if isinstance(client_optimizer, tuple(_OPTIMIZERS.values())):
        name = next(name for name, kind in _OPTIMIZERS.items() if isinstance(client_optimizer, kind))
        config = {
            **config,
            "optimizer": {"type": name, "params": {"rank": 1}},
        }  # its own parameters are checked already
    check_config(config, [*DEEPSPEED_OPTIMIZERS, *(name for name in torch_optimizers if name not in GALORE_OPTIMIZERS)])


def _close(key: str, hint: str) -> bool:
    return difflib.SequenceMatcher(None, key.lower(), hint.split("'")[1].lower()).ratio() >= 0.85


@functools.cache
def _top_level_keys() -> frozenset[str]:
    keys = {"ds_galore", "optimizer", "scheduler", "fp16", "bf16", "torch_autocast", "zero_optimization"}
    for name in _KEY_MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue  # DeepSpeed moved it; fewer keys known means fewer refused
        keys.update(value for value in vars(module).values() if isinstance(value, str))
    return frozenset(keys)
