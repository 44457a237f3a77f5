"""An optimizer's step under ZeRO-3 on some ranks: seconds, bytes sent, and bytes kept, ours beside DeepSpeed's others.

    deepspeed --num_accelerators 2 benchmarks/zero.py [--shape 60m|1b] [--layers N]

Layers of a Llama in fp32 on random tokens: GaLoreAdamW with replicated and with sharded projectors, torch's AdamW and
DeepSpeed's Muon, in engines of their own, which take turns. Timed is ``engine.step()``; between refreshes, and over a
whole gap with one refresh of each matrix. Bytes are those of all messages of one training step that torch's profiler
sees gloo send, by what each operation takes in a ring; what exceeds AdamW's is the optimizer's. Kept are the tensors of
the optimizer's state.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import defaultdict
from typing import Any

import torch
from common import ROOT, arguments, bytes_of, median_ratio, spread, write

SHAPES = {"60m": ("llama_60m", 128), "1b": ("llama_1b", 512)}
PARAMS = {"lr": 1e-4, "first_basis": "random"}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    "GaLoreAdamW, replicated": {"type": "GaLoreAdamW", "params": {**PARAMS, "projector_storage": "replicated"}},
    "GaLoreAdamW, sharded": {"type": "GaLoreAdamW", "params": {**PARAMS, "projector_storage": "sharded"}},
    "Muon": {"type": "Muon", "params": {"lr": 1e-4, "momentum": 0.95}},
}
NEVER = 10**6


def main() -> None:
    """Run on this rank; the first writes."""
    parser = arguments(__doc__)
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--shape", choices=SHAPES, default="60m")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gap", type=int, default=200, help="steps that refreshes are spread over")
    parser.add_argument("--tokens", type=int, default=64, help="of a sequence, one a rank")
    parser.add_argument("--vocabulary", type=int, default=256)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.layers, options.tokens = 1, 1, 16

    import deepspeed
    import torch.distributed as dist

    import ds_galore

    if options.quick:  # Muon's Adam would be compiled for a minute; DeepSpeed then takes an own one
        from deepspeed.ops.op_builder import FusedAdamBuilder

        FusedAdamBuilder.is_compatible = lambda *_: False
    ds_galore.enable()
    deepspeed.init_distributed("gloo", verbose=False)
    name, rank = SHAPES[options.shape]
    engines = {kind: _engine(name, settings, rank, options, gap=NEVER) for kind, settings in OPTIMIZERS.items()}
    engines["GaLoreAdamW, refreshing"] = _engine(name, OPTIMIZERS["GaLoreAdamW, replicated"], rank, options, gap=1)
    found: dict[str, Any] = {"shape": name, "layers": options.layers, "rank": rank, "world_size": dist.get_world_size()}
    seconds = _turns(engines, options)
    adamw, steady = seconds["AdamW"], seconds["GaLoreAdamW, replicated"]
    refresh = [max(all_ - none, 0.0) for all_, none in zip(seconds["GaLoreAdamW, refreshing"], steady, strict=True)]
    # At a gap of 1 every matrix is refreshed in every step: a gap of many steps holds one such step.
    amortised = [none + more / options.gap for none, more in zip(steady, refresh, strict=True)]
    seconds["GaLoreAdamW, amortised"] = amortised
    found["seconds"] = {
        kind: {**spread(taken), "of_adamw": median_ratio(taken, adamw)} for kind, taken in seconds.items()
    }
    found["bytes"] = {kind: _traffic(engine, options) for kind, engine in engines.items()}
    found["state_bytes"] = {kind: _state(engine) for kind, engine in engines.items()}
    plans = engines["GaLoreAdamW, replicated"].basic_optimizer.parameter_plans()
    world = dist.get_world_size()
    found["parameters"] = sum(plan.numel for plan in plans)
    # What gathering whole gradients, stepping on one rank and scattering updates would send.
    found["all_gather_galore"] = round(4 * 2 * sum(plan.numel for plan in plans if plan.side) * (world - 1) / world)
    if dist.get_rank() == 0:
        print(json.dumps(found, indent=1))
        write(f"zero-{options.shape}-{world}", options, found)


def _engine(name: str, settings: dict[str, Any], rank: int, options: argparse.Namespace, *, gap: int) -> Any:
    import deepspeed
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    shape = AutoConfig.from_pretrained(str(ROOT / "configs" / "models" / f"{name}.json"))
    shape.num_hidden_layers, shape.vocab_size = options.layers, options.vocabulary
    if settings["type"].startswith("GaLore"):
        own = {"rank": rank, "update_proj_gap": gap}
        settings = {**settings, "params": {**settings["params"], **own}}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": settings,
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 20_000_000,
            "sub_group_size": 100_000_000,
            "stage3_param_persistence_threshold": 0,
            "reduce_scatter": settings["type"] != "Muon",  # with which DeepSpeed refuses Muon
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    model = AutoModelForCausalLM.from_config(shape)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    return engine


def _backward(engine: Any, options: argparse.Namespace, number: int) -> None:
    import torch.distributed as dist

    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    tokens = torch.randint(options.vocabulary, (1, options.tokens), generator=generator).to(engine.device)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)


def _turns(engines: dict[str, Any], options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of ``engine.step()``, by engine and round; the order rotates."""
    import torch.distributed as dist

    times: dict[str, list[float]] = {kind: [] for kind in engines}
    kinds = list(engines)
    for number in range(-2, options.rounds):  # the first steps make states and bases
        for kind in kinds[number % len(kinds) :] + kinds[: number % len(kinds)]:
            _backward(engines[kind], options, number + 2)
            dist.barrier()
            begin = time.perf_counter()
            engines[kind].step()
            dist.barrier()
            if number >= 0:
                times[kind].append(time.perf_counter() - begin)
    return times


#: What a rank sends in a ring of W ranks, by the bytes that it hands to an operation.
_SENT = {
    "gloo:all_gather": lambda size, world: size * (world - 1),
    "gloo:all_reduce": lambda size, world: 2 * size * (world - 1) / world,
    "gloo:reduce_scatter": lambda size, world: size * (world - 1) / world,
    "gloo:broadcast": lambda size, world: size * (world - 1) / world,
    "gloo:reduce": lambda size, world: size * (world - 1) / world,
    "gloo:send": lambda size, world: size,
    "gloo:recv": lambda size, world: 0,
}
_WIDTHS = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "int": 4, "long int": 8}


def _traffic(engine: Any, options: argparse.Namespace) -> dict[str, int]:
    """By operation, the bytes that this rank sends in one training step."""
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        _backward(engine, options, 99)
        engine.step()
    assert seen.profiler is not None
    world = dist.get_world_size()
    sent: dict[str, float] = defaultdict(float)
    for event in seen.profiler.kineto_results.events():
        if event.name().startswith("gloo:"):
            pairs = zip(event.shapes(), event.dtypes(), strict=False)
            size = sum(math.prod(shape) * _WIDTHS.get(dtype, 1) for shape, dtype in pairs if shape)
            sent[event.name()] += _SENT[event.name()](size, world)
    found = {name: round(size) for name, size in sorted(sent.items())}
    return {**found, "total": sum(found.values())}


def _state(engine: Any) -> int:
    momentum = getattr(engine.optimizer, "muon_momentum_buffer_partitioned_groups_flat", None) or {}
    return sum(bytes_of(state) for state in [*engine.optimizer.optimizer.state.values(), momentum])


if __name__ == "__main__":
    main()
