"""Low-rank gradients beside full ones: time of a step, and memory of gradients, the two alternating in one run.

    deepspeed --num_accelerators 2 benchmarks/lowrank_gradients.py --model llama_60m

Prints medians over the steps after the first two, the ratio, and the most bytes of gradients that a rank kept at any
arrival, the first step included, beside what full ones take.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--model", default="llama_60m", help="a name in configs/models")
    parser.add_argument("--rank", type=int, default=128)
    parser.add_argument("--gap", type=int, default=20, help="steps between two refreshes of a matrix")
    parser.add_argument("--steps", type=int, default=22)
    parser.add_argument("--batch", type=int, default=4, help="sequences a rank and micro-batch")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--accumulation", type=int, default=1)
    options = parser.parse_args()

    import deepspeed
    import torch.distributed as dist
    from transformers import AutoConfig, AutoModelForCausalLM

    import ds_galore

    ds_galore.enable()
    shape = AutoConfig.from_pretrained(str(ROOT / "configs" / "models" / f"{options.model}.json"))
    engines, peaks = {}, {"full": 0, "lowrank": 0}
    for kind in peaks:
        params = {"lr": 1e-3, "rank": options.rank, "update_proj_gap": options.gap, "first_basis": "random"}
        settings = {
            "train_micro_batch_size_per_gpu": options.batch,
            "gradient_accumulation_steps": options.accumulation,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "GaLoreAdamW", "params": {**params, "gradients": kind}},
            "zero_optimization": {"stage": 3, "reduce_bucket_size": 20_000_000, "sub_group_size": 100_000_000},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1_000_000,
        }
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(shape)
        engines[kind], *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=settings
        )
        _watch(engines[kind].optimizer, peaks, kind)
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
    full, lowered = (engines[kind].optimizer for kind in ("full", "lowrank"))
    projected = sum(
        parameter.partition_numel()
        for group in full.fp16_groups
        for parameter in group
        if full.optimizer.projected_name(parameter) is not None
    )
    others = lowered.grad_partitions_flat_buffer.nbytes
    found = {
        "median_seconds": medians,
        "ratio": medians["lowrank"] / medians["full"],
        "largest_loss_difference": max(abs(a - b) for a, b in zip(losses["full"], losses["lowrank"], strict=True)),
        "gradient_bytes": peaks,
        "projected_full_bytes": projected * 4,
        "projected_lowrank_share": (peaks["lowrank"] - others) / (projected * 4),
        "rank_over_columns": options.rank / shape.hidden_size,
    }
    if dist.get_rank() == 0:
        print(json.dumps(found, indent=1))


def _watch(zero: Any, peaks: dict[str, int], kind: str) -> None:
    """Note what is kept of gradients whenever some have arrived."""
    original = zero.partition_grads

    def partition_grads(*args: Any) -> Any:
        result = original(*args)
        taken = sum(window.gradients.nbytes for window in getattr(zero, "_windows", {}).values())
        peaks[kind] = max(peaks[kind], zero.grad_partitions_flat_buffer.nbytes + taken)
        return result

    zero.partition_grads = partition_grads


if __name__ == "__main__":
    main()
