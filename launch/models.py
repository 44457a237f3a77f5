"""Models by the names that ``--model`` takes: a size in ``configs/models``, or a Hugging Face directory or file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ds_galore import DataError
from ds_galore.config import section

MODELS = Path(__file__).resolve().parent.parent / "configs" / "models"


def load_model_config(name: str) -> tuple[Any, Path | None]:
    """The model's Hugging Face configuration, and the directory of its weights if there are any."""
    from transformers import AutoConfig

    path = MODELS / f"{name}.json" if (MODELS / f"{name}.json").is_file() else Path(name)
    if not path.exists():
        names = ", ".join(sorted(each.stem for each in MODELS.glob("*.json")))
        raise DataError(f"--model {name}: neither a known size ({names}) nor a directory or file")
    if path.is_dir() and not (path / "config.json").is_file():
        raise DataError(f"--model {name}: the directory has no config.json")
    try:
        config = AutoConfig.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # noqa: BLE001 - transformers raises many kinds for files it cannot use
        raise DataError(f"--model {name}: cannot be loaded: {str(error).splitlines()[0]}") from None
    weights = path.is_dir() and any([*path.glob("*.safetensors"), *path.glob("pytorch_model*.bin")])
    return config, path if weights else None


def dtype_of(config: dict[str, Any]) -> torch.dtype:
    """What a DeepSpeed configuration without ``"auto"`` trains in."""
    for key, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if section(config, key).get("enabled"):
            return dtype
    return torch.float32


def build_model(
    model_config: Any, weights: Path | None, *, dtype: torch.dtype, seed: int, zero3: dict[str, Any] | None = None
) -> torch.nn.Module:
    """The model; under ZeRO-3 it is partitioned while it is built and never whole on a rank.

    Parameters
    ----------
    model_config, weights
        From :func:`load_model_config`.
    dtype
        Of the weights.
    seed
        Of those that are not loaded.
    zero3
        The DeepSpeed configuration, where its stage is 3 and neither Accelerate nor the Trainer has told transformers.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    keep = HfDeepSpeedConfig(zero3) if zero3 is not None else None  # transformers looks for it while it is alive
    torch.manual_seed(seed)
    model_config.use_cache = False
    try:
        if weights is not None:
            model = AutoModelForCausalLM.from_pretrained(
                str(weights), config=model_config, dtype=dtype, local_files_only=True
            )
        else:
            model = AutoModelForCausalLM.from_config(model_config, dtype=dtype)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise DataError(f"--model {weights or ''}: cannot be built: {str(error).splitlines()[0]}") from None
    del keep
    return model
