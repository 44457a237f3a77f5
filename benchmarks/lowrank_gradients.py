"""Low-rank gradients beside full ones and AdamW: time of a step, and memory, the paths alternating in one run.

    deepspeed --num_accelerators 2 benchmarks/lowrank_gradients.py --model llama_60m --accumulation 4

Prints medians over the steps after the first two and their ratio; the most bytes of projected matrices' gradients that
a rank kept at any arrival, the first step included, beside the bound of 1.15 of their low-rank size and the largest set
that refreshes together; and by kind what weights, gradients, moments and projectors take, by the tensors and by the
start-up table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from common import ROOT, arguments, write

KINDS = ("adamw", "full", "lowrank")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--model", default="llama_60m", help="a name in configs/models")
    parser.add_argument("--rank", type=int, default=128)
    parser.add_argument("--gap", type=int, default=20, help="steps between two refreshes of a matrix")
    parser.add_argument("--steps", type=int, default=22)
    parser.add_argument("--batch", type=int, default=4, help="sequences a rank and micro-batch")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--accumulation", type=int, default=1)
    options = parser.parse_args()
    if options.quick:
        options.model, options.rank, options.steps, options.batch, options.length = "tiny", 64, 3, 1, 16

    import deepspeed
    import torch.distributed as dist
    from transformers import AutoConfig, AutoModelForCausalLM

    import ds_galore
    from ds_galore.monitoring.accounting import memory_by_kind

    ds_galore.enable()
    shape = AutoConfig.from_pretrained(str(ROOT / "configs" / "models" / f"{options.model}.json"))
    engines: dict[str, Any] = {}
    peaks: dict[str, dict[str, int]] = {}
    for kind in KINDS:
        params = {"lr": 1e-3, "rank": options.rank, "update_proj_gap": options.gap, "first_basis": "random"}
        optimizer = {"type": "GaLoreAdamW", "params": {**params, "gradients": kind}}
        if kind == "adamw":
            optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
        settings = {
            "train_micro_batch_size_per_gpu": options.batch,
            "gradient_accumulation_steps": options.accumulation,
            "gradient_clipping": 1.0,
            "optimizer": optimizer,
            "zero_optimization": {"stage": 3, "reduce_bucket_size": 20_000_000, "sub_group_size": 100_000_000},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1_000_000,
        }
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(shape)
        engines[kind], *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=settings
        )
        peaks[kind] = _watch(engines[kind].optimizer)
    seconds: dict[str, list[float]] = {kind: [] for kind in engines}
    losses: dict[str, list[float]] = {kind: [] for kind in engines}
    for step in range(options.steps):
        for kind, engine in engines.items():
            generator = torch.Generator().manual_seed(step * 1000 + dist.get_rank())
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(options.accumulation):
                tokens = torch.randint(shape.vocab_size, (options.batch, options.length), generator=generator)
                tokens = tokens.to(engine.device)
                loss = engine(input_ids=tokens, labels=tokens).loss
                engine.backward(loss)
                engine.step()
            seconds[kind].append(time.perf_counter() - begin)
            losses[kind].append(float(loss.detach()))
    medians = {kind: statistics.median(found[2:]) for kind, found in seconds.items()}
    zero = engines["full"].optimizer
    projected = [
        (parameter.partition_numel(), parameter.ds_shape)
        for group in zero.fp16_groups
        for parameter in group
        if zero.optimizer.projected_name(parameter) is not None
    ]
    whole = 4 * sum(numel for numel, _ in projected)
    low = 4 * sum(numel * options.rank / columns for numel, (_, columns) in projected)
    together = peaks["lowrank"]["refreshing"]
    table = memory_by_kind(engines["lowrank"], dist.get_world_size())
    assert table is not None
    found = {
        "median_seconds": medians,
        "ratio": medians["lowrank"] / medians["full"],
        "largest_loss_difference": max(abs(a - b) for a, b in zip(losses["full"], losses["lowrank"], strict=True)),
        "projected_gradients": {
            "full": whole,
            "most_kept": peaks["lowrank"]["projected"],
            "refreshing_together": together,
            "bound": round(1.15 * low + together),
        },
        "memory": {kind: {**_kept(engine), "gradients": peaks[kind]["all"]} for kind, engine in engines.items()},
        "start_up_table": {
            "lowrank": table["GaLoreAdamW"],
            "full": (memory_by_kind(engines["full"], dist.get_world_size()) or {})["GaLoreAdamW"],
            "adamw": table["AdamW"],
        },
    }
    for sizes in found["memory"].values():
        sizes["total"] = sum(sizes.values())
    for sizes in found["start_up_table"].values():
        sizes["total"] = sum(sizes.values())
    if dist.get_rank() == 0:
        print(json.dumps(found, indent=1))
        write(f"lowrank-{options.model}-{options.accumulation}", options, found)


def _kept(engine: Any) -> dict[str, int]:
    """Bytes of a rank's tensors, by kind; memory that two kinds share counts for the first."""
    zero, seen = engine.optimizer, set()

    def size(tensors: Iterable[torch.Tensor]) -> int:
        total = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
        return total

    weights = size(zero.fp16_partitioned_groups_flat)
    masters = size(zero.fp32_partitioned_groups_flat)
    tensors = list(_tensors(zero.optimizer.state, ""))
    projectors = size(tensor for key, tensor in tensors if "projector" in key)
    return {
        "weights": weights,
        "master_weights": masters,
        "projectors": projectors,
        "moments": size(tensor for _, tensor in tensors),
    }


def _tensors(state: Any, key: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(state, torch.Tensor):
        yield key, state
    elif isinstance(state, dict):
        for name, value in state.items():
            yield from _tensors(value, str(name) if isinstance(name, str) else key)


def _watch(zero: Any) -> dict[str, int]:
    """Note the most that is kept of gradients whenever some have arrived: of all, of projected ones, of due ones."""
    original = zero.partition_grads
    most = {"all": 0, "projected": 0, "refreshing": 0}

    def partition_grads(*args: Any) -> Any:
        result = original(*args)
        windows = [window.gradients for window in getattr(zero, "_windows", {}).values()]
        projected = sum(gradients.nbytes for gradients in windows)
        due = sum(piece.nbytes for gradients in windows for piece in gradients.pieces.values())
        now = {"all": zero.grad_partitions_flat_buffer.nbytes + projected, "projected": projected, "refreshing": due}
        most.update({key: max(most[key], value) for key, value in now.items()})
        return result

    zero.partition_grads = partition_grads
    return most


if __name__ == "__main__":
    main()
