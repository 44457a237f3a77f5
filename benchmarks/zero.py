"""An optimizer's step under ZeRO-3 on some ranks: seconds, bytes sent, and bytes kept, ours beside DeepSpeed's others.

    deepspeed --num_accelerators 2 benchmarks/zero.py [--shape 60m|1b] [--layers N]

Layers of a Llama in fp32 on random tokens: GaLoreAdamW with replicated and with sharded projectors, torch's AdamW and
DeepSpeed's Muon, in engines of their own, which take turns. Timed is ``engine.step()``; between refreshes, and over a
whole gap with one refresh of each matrix. Bytes are those of all messages of one training step that torch's profiler
sees gloo send, by what each operation takes in a ring; what exceeds AdamW's is the optimizer's. Kept are the tensors of
the optimizer's state.

Of it, the optimizer's own ``step()`` is timed too, beside its floor: the bare arithmetic of this rank's rows in plain
torch, on all ranks at the same time. ZeRO-3's norms, copies and gathers are in neither; what the optimizer itself
sends, and its waiting for other ranks, are in its own time alone.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from common import ROOT, adam_direction, arguments, bytes_of, median_ratio, spread, write

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
    found["rounds"] = options.rounds
    plans = engines["GaLoreAdamW, replicated"].basic_optimizer.parameter_plans()
    seconds, inner = _turns(engines, _floor(plans, dist.get_world_size()), options)
    found["inner_seconds"] = {
        kind: {**spread(taken), "of_floor": median_ratio(taken, inner["floor"])} for kind, taken in inner.items()
    }
    refreshing = inner.get("GaLoreAdamW, refreshing", [])
    inner_amortised = [
        none + max(all_ - none, 0.0) / options.gap
        for all_, none in zip(refreshing, inner["GaLoreAdamW, replicated"], strict=True)
    ]
    found["inner_seconds"]["GaLoreAdamW, amortised"] = {
        **spread(inner_amortised),
        "of_floor": median_ratio(inner_amortised, inner["floor"]),
    }
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


def _floor(plans: Sequence[Any], world: int) -> Callable[[], None]:
    """The bare arithmetic of a step of GaLore on one rank's share of all parameters, as in step.py."""
    lr = 1e-4
    held = []
    for plan in plans:
        columns = plan.columns if plan.side else 1
        rows = -(-plan.numel // columns // world)
        weight, grad = torch.randn(rows, columns), torch.randn(rows, columns)
        if not plan.side:
            held.append((plan, weight, grad, None, torch.zeros_like(grad), torch.zeros_like(grad)))
            continue
        right = plan.side == "right"
        basis = torch.linalg.qr(torch.randn(columns if right else max(rows, plan.rank), plan.rank))[0]
        low = torch.zeros(rows, plan.rank) if right else torch.zeros(plan.rank, -(-columns // world))
        held.append((plan, weight, grad, basis if right else basis[:rows], low, low.clone()))

    def step() -> None:
        for plan, weight, grad, basis, exp_avg, exp_avg_sq in held:
            low = grad.clone() if basis is None else grad @ basis if plan.side == "right" else basis.t() @ grad
            own = low if low.shape == exp_avg.shape else low[:, : exp_avg.shape[1]]  # of a left one, a rank's share
            adam_direction(own, exp_avg, exp_avg_sq)
            if basis is None:
                weight.add_(low, alpha=-lr)
            elif plan.side == "right":
                weight.addmm_(low, basis.t(), alpha=-lr)
            else:
                weight.addmm_(basis, low, alpha=-lr)

    return step


class _Timed:
    """Counts the seconds of a function's calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self.seconds = function, 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return self._function(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - begin


def _turns(
    engines: dict[str, Any], floor: Callable[[], None], options: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of ``engine.step()`` and of the optimizer's in it, by engine and round; the order rotates."""
    import torch.distributed as dist

    times: dict[str, list[float]] = {kind: [] for kind in engines}
    kinds = [*engines, "floor"]
    inner: dict[str, list[float]] = {kind: [] for kind in kinds if kind != "Muon"}  # whose step is the engine's
    clocks = {}
    for kind in inner:
        if kind != "floor":
            optimizer = engines[kind].optimizer.optimizer
            clocks[kind] = optimizer.step = _Timed(optimizer.step)
    for number in range(-2, options.rounds):  # the first steps make states and bases
        for kind in kinds[number % len(kinds) :] + kinds[: number % len(kinds)]:
            if kind != "floor":
                _backward(engines[kind], options, number + 2)
            before = clocks[kind].seconds if kind in clocks else 0.0
            dist.barrier()
            begin = time.perf_counter()
            if kind == "floor":
                with torch.no_grad():
                    floor()
                own = time.perf_counter() - begin
            else:
                engines[kind].step()
                own = clocks[kind].seconds - before if kind in clocks else 0.0
            dist.barrier()
            if number < 0:
                continue
            if kind in inner:
                inner[kind].append(own)
            if kind != "floor":
                times[kind].append(time.perf_counter() - begin)
    return times, inner


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
