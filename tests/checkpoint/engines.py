"""Engines for the tests of checkpoints, and what they hold, without padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from ds_galore.checkpoint.reader import CheckpointReader
from ds_galore.zero.binding import flat_parts
from tests import jobs

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
BATCH = 12
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3}}


def make(
    optimizer: dict[str, Any],
    mode: str | None = "differential",
    *,
    checkpoint: Any = None,
    special: bool = False,
    hidden: int = 32,
    node_local: bool = False,
    **x: Any,
) -> Any:
    """An engine with our checkpoints; ``special``: with tied embeddings, frozen parameters and buffers of integers."""
    import torch.distributed as dist

    if "fp16" in x:
        from deepspeed.accelerator import get_accelerator

        get_accelerator().is_fp16_supported = lambda: True
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 1e-2}}
    section = {"ds_galore": {"checkpoint": {"mode": mode, "full_every": 4, **(checkpoint or {})}}} if mode else {}
    if node_local:
        section["checkpoint"] = {"use_node_local_storage": True}
    micro = BATCH // dist.get_world_size()
    model = jobs.tiny_llama(tied=special, hidden=hidden)
    if special:
        model.model.register_buffer("counts", torch.arange(7) * 3)
        model.model.layers[1].register_buffer("mask", torch.tensor([True, False, True]))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.0.self_attn" not in name)
    settings = jobs.config(optimizer, micro=micro, scheduler=schedule, **section, **x)
    return jobs.start(model, settings, model_parameters=[p for p in model.parameters() if p.requires_grad])


def masters(engine: Any) -> list[Any]:
    """The engine's flat tensors of master weights with their parts; none without ZeRO."""
    return flat_parts(engine)


def blanked(flat: Any, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor laid out as a flat one, with zeros for padding, which stage 3 leaves uninitialised."""
    out = torch.zeros(flat.tensor.numel(), dtype=tensor.dtype)
    for part in flat.parts:
        chosen = slice(part.offset, min(part.offset + part.numel, tensor.numel()))
        out[chosen] = tensor.detach().cpu()[chosen]
    return out[: tensor.numel()]


def logical(engine: Any) -> dict[str, Any]:
    """Masters, optimizer state, 16-bit weights and buffers of an engine without padding."""
    found: dict[str, Any] = {}
    optimizer = engine.basic_optimizer

    def add(key: str, flat: Any, value: Any) -> None:
        if isinstance(value, dict):
            for name, each in value.items():
                add(f"{key}/{name}", flat, each)
        elif isinstance(value, torch.Tensor):
            whole = flat is not None and value.numel() == flat.tensor.numel() and value.dim() == 1
            found[key] = blanked(flat, value) if whole else value.detach().cpu().clone()
        else:
            found[key] = value

    for index, flat in enumerate(flat_parts(engine)):
        found[f"{index}/fp32"] = blanked(flat, flat.tensor)
        add(f"{index}/state", flat, optimizer.state.get(flat.tensor, {}))
    if not found:
        for index, (_, state) in enumerate(optimizer.state.items()):
            add(f"{index}/state", None, state)
    for name, parameter in engine.module.named_parameters():
        tensor = getattr(parameter, "ds_tensor", parameter)
        count = tensor.numel()
        if hasattr(parameter, "ds_tensor"):
            begin = count * torch.distributed.get_rank(parameter.ds_process_group)
            count = min(max(parameter.ds_numel - begin, 0), count)
        found[f"weight/{name}"] = tensor.detach().cpu().reshape(-1)[:count].clone()
    for name, buffer in engine.module.named_buffers():
        found[f"buffer/{name}"] = buffer.detach().cpu().clone()
    return found


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Bit for bit."""
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    for key, left in a.items():
        right = b[key]
        if isinstance(left, torch.Tensor):
            assert (left.dtype, left.shape) == (right.dtype, right.shape), key
            if left.numel():
                views = [each.contiguous().reshape(-1).view(torch.uint8) for each in (left, right)]
                assert torch.equal(*views), f"{key}: {(views[0] != views[1]).sum()} bytes differ"
        else:
            assert left == right, key


def contents(directory: Path) -> dict[str, tuple[Any, ...]]:
    """The logical tensors of a checkpoint that belong to parameters: dtype, shape and bytes."""
    reader = CheckpointReader(directory)
    return {
        name: (tensor.dtype, tensor.shape, np.ascontiguousarray(reader.bits(name)).tobytes())
        for name, tensor in reader.tensors.items()
        if "_states.pt" not in name
    }


def save(engine: Any, directory: Any, tag: str, **client: Any) -> None:
    """Save, and see it through."""
    engine.save_checkpoint(str(directory), tag=tag, client_state=client)
    engine.checkpoint_engine.wait()
