"""The core of the benchmarks on one GPU, in minutes: kernels timed by events, without a DeepSpeed job.

    python benchmarks/gpu_check.py [--output gpu.json]
    python benchmarks/gpu_check.py --quick --device cpu     # to see that it runs

Needs torch, numpy and pydantic, and this package's sources; neither DeepSpeed nor transformers, and no
network. galore-torch takes part where it is installed. It measures

- a step amortised over a refresh gap, on the matrices of a layer of the 1B size: the floor (bare arithmetic), ours,
  galore-torch, torch's AdamW (fused);
- a basis refresh against ``torch.linalg.svd``;
- the copy of a snapshot to pinned memory while kernels compute: how much longer both take together than the longer one;
- the prediction that differential checkpoints rest on, in fp64 on the GPU and on the CPU: whether the bits agree.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from common import ROOT, arguments, spread, write
from torch import Tensor, nn

sys.path.insert(0, str(ROOT))

import ds_galore

HIDDEN, INTERMEDIATE, RANK, GAP = 2048, 5461, 512, 200
NEVER = 10**9


class Clock:
    """Seconds of work on a device: by events where kernels run behind the program."""

    def __init__(self, device: torch.device) -> None:
        self.events = device.type == "cuda"

    def seconds(self, work: Callable[[], object]) -> float:
        """Of one run."""
        if not self.events:
            begin = time.perf_counter()
            work()
            return time.perf_counter() - begin
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def turns(self, works: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
        """Seconds of each in each round, after one to warm up; who begins rotates."""
        times: dict[str, list[float]] = {name: [] for name in works}
        names = list(works)
        for number in range(-1, rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                taken = self.seconds(works[name])
                if number >= 0:
                    times[name].append(taken)
        return times


def shapes(scale: int) -> list[tuple[int, int]]:
    """The matrices of a layer."""
    hidden, inner = HIDDEN // scale, INTERMEDIATE // scale
    return [*[(hidden, hidden)] * 4, *[(inner, hidden)] * 2, (hidden, inner)]


def steps(device: torch.device, clock: Clock, scale: int, rounds: int) -> dict[str, Any]:
    """Seconds of a step between refreshes, of one with a refresh of all matrices, and with these spread over a gap."""
    rank = RANK // scale
    generator = torch.Generator(device).manual_seed(0)
    grads = [torch.randn(shape, generator=generator, device=device) for shape in shapes(scale)]

    def parameters() -> list[nn.Parameter]:
        found = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
        for parameter, grad in zip(found, grads, strict=True):
            parameter.grad = grad
        return found

    def ours(gap: int, **settings: Any) -> torch.optim.Optimizer:
        group = {"params": parameters(), "rank": rank, "update_proj_gap": gap}
        optimizer = ds_galore.GaLoreAdamW([group], lr=1e-4, **settings)
        optimizer.step()
        return optimizer

    works: dict[str, Callable[[], object]] = {
        "floor": _floor(grads, rank),
        "ours": ours(NEVER).step,
        "ours, all refresh": ours(1, stagger_refresh=False).step,
        "torch AdamW": torch.optim.AdamW(parameters(), lr=1e-4, fused=device.type == "cuda").step,
    }
    try:
        from galore_torch import GaLoreAdamW
    except ImportError:
        print("galore-torch is not installed: left out", file=sys.stderr)
    else:
        for name, gap in (("galore-torch", NEVER), ("galore-torch, all refresh", 1)):
            group = {"params": parameters(), "rank": rank, "update_proj_gap": gap, "scale": 0.25, "proj_type": "right"}
            peer = GaLoreAdamW([group], lr=1e-4, no_deprecation_warning=True)
            peer.step()
            works[name] = peer.step
    with torch.no_grad():
        times = clock.turns(works, rounds)
    found: dict[str, Any] = {name: spread(taken) for name, taken in times.items()}
    for name in ("ours", "galore-torch"):
        if name in found:
            plain, refreshing = found[name]["seconds"], found[f"{name}, all refresh"]["seconds"]
            found[f"{name}, amortised"] = plain + max(refreshing - plain, 0.0) / GAP
    if "galore-torch, amortised" in found:
        found["times_faster_than_galore_torch"] = found["galore-torch, amortised"] / found["ours, amortised"]
    found["of_floor"] = found["ours, amortised"] / found["floor"]["seconds"]
    return found


def _floor(grads: list[Tensor], rank: int) -> Callable[[], None]:
    weights = [torch.zeros_like(grad) for grad in grads]
    bases = [torch.linalg.qr(torch.randn(grad.shape[1], rank, device=grad.device))[0] for grad in grads]
    first = [grad.new_zeros(grad.shape[0], rank) for grad in grads]
    second = [torch.zeros_like(each) for each in first]

    def step() -> None:
        for weight, grad, basis, exp_avg, exp_avg_sq in zip(weights, grads, bases, first, second, strict=True):
            low = grad @ basis
            exp_avg.lerp_(low, 0.1)
            exp_avg_sq.mul_(0.999).addcmul_(low, low, value=0.001)
            torch.sqrt(exp_avg_sq, out=low)
            torch.div(exp_avg, low.add_(1e-6), out=low)
            weight.addmm_(low, basis.t(), alpha=-1e-4)

    return step


def refresh(device: torch.device, clock: Clock, scale: int, rounds: int) -> dict[str, Any]:
    """Seconds of a basis of the down projection's gradient by SVD, and by the optimizer, all of its step included."""
    rows, columns, rank = HIDDEN // scale, INTERMEDIATE // scale, RANK // scale
    generator = torch.Generator(device).manual_seed(1)
    factors = [torch.randn(size, 2 * rank, generator=generator, device=device) for size in (rows, columns)]
    strength = torch.logspace(0, -3, 2 * rank, device=device)
    grad = (factors[0] * strength) @ factors[1].t()
    parameter = nn.Parameter(torch.zeros_like(grad))
    parameter.grad = grad
    group = {"params": [parameter], "rank": rank, "update_proj_gap": 1}
    optimizer = ds_galore.GaLoreAdamW([group], lr=0.0)
    optimizer.step()
    with torch.no_grad():
        times = clock.turns(
            {"torch.linalg.svd": lambda: torch.linalg.svd(grad, full_matrices=False), "a step of ours": optimizer.step},
            rounds,
        )
        basis = optimizer.state[parameter]["projector"]
        values = torch.linalg.svdvals(grad)
        best = float(values[:rank].square().sum() / values.square().sum())
        energy = float((grad @ basis).square().sum() / grad.square().sum())
    found: dict[str, Any] = {name: spread(taken) for name, taken in times.items()}
    return found | {"energy_of_svd": energy / best}


def snapshot(device: torch.device, clock: Clock, scale: int, rounds: int) -> dict[str, Any]:
    """Seconds of a copy to pinned memory, of matrix products, and of both at once on streams of their own."""
    numel, size = 2**26 // scale**2, 4096 // scale
    source = torch.randn(numel, device=device)
    pinned = torch.empty(numel, pin_memory=device.type == "cuda")
    matrix = torch.randn(size, size, device=device)
    side = torch.cuda.Stream() if device.type == "cuda" else None

    def copy() -> None:
        pinned.copy_(source, non_blocking=True)

    def compute() -> None:
        for _ in range(8):
            matrix @ matrix

    def both() -> None:
        if side is None:
            copy()
            compute()
            return
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            copy()
        compute()
        torch.cuda.current_stream().wait_stream(side)

    with torch.no_grad():
        times = clock.turns({"copy": copy, "compute": compute, "both": both}, rounds)
    found: dict[str, Any] = {name: spread(taken) for name, taken in times.items()}
    longer = max(found["copy"]["seconds"], found["compute"]["seconds"])
    return found | {"both_of_the_longer": found["both"]["seconds"] / longer, "bytes": 4 * numel}


def prediction(device: torch.device, clock: Clock, scale: int) -> dict[str, Any]:
    """Whether ``base + alpha A B^T`` in fp64, rounded to fp32, has the CPU's bits; the share of those that differ."""
    rows, columns, rank = HIDDEN // scale, INTERMEDIATE // scale, RANK // scale
    generator = torch.Generator().manual_seed(2)
    left, right = (torch.randn(size, rank, generator=generator, dtype=torch.float64) for size in (rows, columns))
    base = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    here = torch.addmm(base, left, right.t(), alpha=-1e-3).float()
    there = [each.to(device) for each in (base, left, right)]
    with torch.no_grad():
        seconds = clock.seconds(lambda: torch.addmm(there[0], there[1], there[2].t(), alpha=-1e-3))
        found = torch.addmm(there[0], there[1], there[2].t(), alpha=-1e-3).float().cpu()
    return {"seconds": seconds, "differing": float((here != found).double().mean())}


def main() -> None:
    """Run all of it, print, and keep the results."""
    parser = arguments(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU; --device cpu --quick shows that this runs")
    scale, rounds = (16, 1) if options.quick else (1, options.rounds)
    clock = Clock(device)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "steps": steps(device, clock, scale, rounds),
        "refresh": refresh(device, clock, scale, rounds),
        "snapshot": snapshot(device, clock, scale, rounds),
        "prediction": prediction(device, clock, scale),
    }
    print(json.dumps(found, indent=1))
    write("gpu", options, found)


if __name__ == "__main__":
    main()
