"""ds_galore: GaLore's low-rank optimizer states under DeepSpeed's ZeRO, chosen by one JSON configuration.

Names are imported when they are first used, so that the offline commands start without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "APOLLOAdamW": "ds_galore.optim.galore",
    "BindingError": "ds_galore.errors",
    "CheckpointMismatchError": "ds_galore.errors",
    "ConfigError": "ds_galore.errors",
    "DataError": "ds_galore.errors",
    "DsGaloreError": "ds_galore.errors",
    "FiraAdamW": "ds_galore.optim.galore",
    "GaLoreAdafactor": "ds_galore.optim.galore",
    "GaLoreAdamW": "ds_galore.optim.galore",
    "GaLoreAdamW8bit": "ds_galore.optim.galore",
    "PeerError": "ds_galore.errors",
    "check_deepspeed_config": "ds_galore.plugin",
    "enable": "ds_galore.plugin",
    "load_state_dict": "ds_galore.tools.merge",
    "merge_checkpoint": "ds_galore.tools.merge",
    "reshard_checkpoint": "ds_galore.tools.reshard",
}

__all__ = [
    "APOLLOAdamW",
    "BindingError",
    "CheckpointMismatchError",
    "ConfigError",
    "DataError",
    "DsGaloreError",
    "FiraAdamW",
    "GaLoreAdafactor",
    "GaLoreAdamW",
    "GaLoreAdamW8bit",
    "PeerError",
    "__version__",
    "check_deepspeed_config",
    "enable",
    "load_state_dict",
    "merge_checkpoint",
    "reshard_checkpoint",
]

if TYPE_CHECKING:
    from ds_galore.errors import (
        BindingError,
        CheckpointMismatchError,
        ConfigError,
        DataError,
        DsGaloreError,
        PeerError,
    )
    from ds_galore.optim.galore import APOLLOAdamW, FiraAdamW, GaLoreAdafactor, GaLoreAdamW, GaLoreAdamW8bit
    from ds_galore.plugin import check_deepspeed_config, enable
    from ds_galore.tools.merge import load_state_dict, merge_checkpoint
    from ds_galore.tools.reshard import reshard_checkpoint


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
