"""What the workers of the pool run: small models under DeepSpeed."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

VOCABULARY = 64


def tiny_llama(*, seed: int = 0, tied: bool = False, hidden: int = 32, layers: int = 2) -> nn.Module:
    """A Llama of a few thousand parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=hidden * 5 // 2 + 3,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
            use_cache=False,
        )
    )


def batches(steps: int, size: int, *, seed: int = 1, length: int = 16) -> torch.Tensor:
    """Token ids ``(steps, size, length)`` with something to learn: runs of a fixed random walk."""
    generator = torch.Generator().manual_seed(seed)
    follow = torch.randint(VOCABULARY, (VOCABULARY,), generator=generator)
    tokens = torch.randint(VOCABULARY, (steps, size, 1), generator=generator)
    columns = [tokens]
    for _ in range(length - 1):
        noise = torch.randint(VOCABULARY, tokens.shape, generator=generator)
        keep = torch.rand(tokens.shape, generator=generator) < 0.8
        columns.append(torch.where(keep, follow[columns[-1]], noise))
    return torch.cat(columns, dim=-1)


def config(optimizer: dict[str, Any], *, micro: int, accumulation: int = 1, **extra: Any) -> dict[str, Any]:
    """A ZeRO-3 configuration with small buffers."""
    zero = {
        "stage": 3,
        "reduce_bucket_size": 200_000,
        "stage3_prefetch_bucket_size": 1_000_000,  # without, collectives by the module: twice the time
        "stage3_param_persistence_threshold": 0,
        **extra.pop("zero", {}),
    }
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "optimizer": copy.deepcopy(optimizer),  # DeepSpeed before 0.19 takes keys out of it
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000,
        **extra,
    }


def galore(**params: Any) -> dict[str, Any]:
    """An ``optimizer`` section for GaLoreAdamW."""
    return {"type": "GaLoreAdamW", "params": {"lr": 1e-2, "rank": 8, "update_proj_gap": 10, **params}}


def start(model: nn.Module, settings: dict[str, Any], **kwargs: Any) -> Any:
    """A DeepSpeed engine with this package enabled."""
    import deepspeed

    import ds_galore

    ds_galore.enable()
    kwargs.setdefault("model_parameters", list(model.parameters()) if "optimizer" not in kwargs else None)
    engine, *_ = deepspeed.initialize(model=model, config=settings, **kwargs)
    return engine


def train(engine: Any, data: torch.Tensor) -> list[float]:
    """Train over ``data``, ``(steps, global batch, length)``: by step, the mean loss over ranks and micro-batches."""
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
    micro, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    losses = []
    for step in data:
        total = torch.zeros(1)
        for part in range(accumulation):
            begin = (part * world_size + rank) * micro
            tokens = step[begin : begin + micro].to(engine.device)
            assert len(tokens) == micro, "the global batch does not fit"
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach().float().cpu() / accumulation
        dist.all_reduce(total)
        losses.append(float(total / world_size))
    return losses


def whole_weights(engine: Any) -> dict[str, torch.Tensor]:
    """Every parameter of a ZeRO-3 engine, gathered, in float32 from its master weights."""
    from deepspeed.utils import safe_get_full_fp32_param

    return {
        name: safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters() if p.requires_grad
    }
