"""Time of an optimizer step: ours against the bare arithmetic, galore-torch and torch's AdamW, and beside backward.

    make bench        or        .venv/bin/python benchmarks/step.py [--shapes 60m 1b] [--profile]

On the matrices of Llama 60M (all layers, rank 128) and on those of one layer of the 1B size (rank 512), fp32, in one
process:

- *between refreshes*: every optimizer has weights of its own and the same gradients; they take turns, and the order
  rotates. The *floor* is what a step of GaLore cannot do without, in plain torch: ``L = G Q``, Adam on ``L``
  (rows x r), ``W.addmm_(N, Q^T)``. Ratios are medians of the ratios within a round, so that a slow moment of the
  machine falls on both.
- *refreshes*: some gaps are run as configured, staggered (on one layer, of four steps a matrix, to save time); a
  step's time is its median over the gaps. What the steps with a refresh take more is then spread over ``--gap`` steps.
  galore-torch takes the SVDs of all matrices in one step; each shape's is timed once.
- *share*: forward and backward of one layer, and the optimizer's step on it.
- *unprojected*: an embedding of 32000 x 512, which is updated in segments that stay in a cache, against one pass over
  all of it, and torch's AdamW.

Where other programs keep the cores busy, threads wait for each other: ``--cpu-time`` tells more there.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from common import ROOT, adam_direction, median_ratio, spread, take_turns, write
from common import arguments as parser_with
from torch import Tensor, nn

import ds_galore
from ds_galore.optim.walks import SEGMENT

BETAS, EPS, LR = (0.9, 0.999), 1e-6, 1e-4
NEVER = 10**9  # an update_proj_gap that no run here reaches
OURS, PEER, FLOOR = "GaLoreAdamW", "galore-torch GaLoreAdamW", "floor"

#: What is read for the time.
CLOCK: list[Callable[[], float]] = [time.perf_counter]

#: Our optimizers: the class and its settings, beside lr, rank and update_proj_gap.
RULES: dict[str, tuple[str, dict[str, Any]]] = {
    OURS: ("GaLoreAdamW", {}),
    "GaLoreAdamW, int8 projectors": ("GaLoreAdamW", {"projector_dtype": "int8"}),
    "GaLoreAdamW, bf16 moments": ("GaLoreAdamW", {"moment_dtype": "bf16"}),
    "GaLoreAdamW8bit": ("GaLoreAdamW8bit", {}),
    "GaLoreAdafactor": ("GaLoreAdafactor", {}),
    "APOLLOAdamW": ("APOLLOAdamW", {}),
    "FiraAdamW": ("FiraAdamW", {}),
}
TARGETS = {"of_floor": 1.3, "of_peer": 1.0, "refresh_share": 0.05, "worst": 3.0}


@dataclass(frozen=True)
class Shapes:
    """Matrices of a model: its configuration, how many of its layers, and the rank."""

    config: str
    layers: int
    rank: int

    def model_config(self) -> dict[str, Any]:
        """The model's configuration."""
        found: dict[str, Any] = json.loads((ROOT / "configs" / "models" / f"{self.config}.json").read_text())
        return found


SHAPES = {"60m": Shapes("llama_60m", 8, 128), "1b": Shapes("llama_1b", 1, 512)}


def one_layer(shapes: Shapes) -> nn.Module:
    """A Llama of one layer, without embeddings to speak of."""
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = {key: value for key, value in shapes.model_config().items() if key != "architectures"}
    return LlamaModel(LlamaConfig(**{**config, "num_hidden_layers": 1, "vocab_size": 256}))


def projected(model: nn.Module) -> list[nn.Parameter]:
    """The weights of the linear layers: seven."""
    return [module.weight for module in model.modules() if isinstance(module, nn.Linear)]


def forward_backward(model: nn.Module, samples: int, length: int) -> float:
    """Seconds for both on random activations; leaves the gradients."""
    hidden = torch.randn(samples, length, model.config.hidden_size, requires_grad=True)
    model.zero_grad()
    begin = CLOCK[0]()
    out = model(inputs_embeds=hidden).last_hidden_state
    out.backward(torch.randn_like(out) / out.numel())
    return CLOCK[0]() - begin


# ---------------------------------------------------------------------- what takes turns


class Workload:
    """Weights to start from and gradients, for the layers of some shapes."""

    def __init__(self, shapes: Shapes, model: nn.Module) -> None:
        self.rank = shapes.rank
        weights = projected(model)
        grads = [weight.grad for weight in weights]
        self.weights = [weight.detach() for _ in range(shapes.layers) for weight in weights]
        self.grads = [grad.clone() for _ in range(shapes.layers) for grad in grads if grad is not None]
        assert len(self.grads) == len(self.weights)

    def parameters(self) -> list[nn.Parameter]:
        """Weights of one's own, with the common gradients."""
        found = [nn.Parameter(weight.clone()) for weight in self.weights]
        for parameter, grad in zip(found, self.grads, strict=True):
            parameter.grad = grad
        return found

    def ours(self, kind: str, settings: dict[str, Any], gap: int) -> torch.optim.Optimizer | None:
        """One of our optimizers; None where this version has none of that name, or not those settings."""
        cls = getattr(ds_galore, kind, None)
        if cls is None:
            return None
        group = {"params": self.parameters(), "rank": self.rank, "update_proj_gap": gap}
        try:
            optimizer: torch.optim.Optimizer = cls([group], lr=LR, **settings)
        except ds_galore.ConfigError as error:
            print(f"{kind} {settings}: not timed: {error}", file=sys.stderr)
            return None
        return optimizer

    def peer(self, bases: Iterable[Tensor]) -> torch.optim.Optimizer:
        """galore-torch's, with these bases already found."""
        from galore_torch import GaLoreAdamW
        from galore_torch.galore_projector import GaLoreProjector

        settings = {"update_proj_gap": NEVER, "scale": 0.25, "proj_type": "right"}
        parameters = self.parameters()
        groups = [{"params": parameters, "rank": self.rank, **settings}]
        optimizer = GaLoreAdamW(groups, lr=LR, no_deprecation_warning=True)
        for parameter, basis in zip(parameters, bases, strict=True):
            projector = GaLoreProjector(self.rank, **settings)
            projector.ortho_matrix = basis.t().contiguous()  # as its SVD leaves it
            optimizer.state[parameter].update(step=1, projector=projector)
        return optimizer

    def apollo(self) -> torch.optim.Optimizer:
        """apollo-torch's, which draws its bases when it begins, and raises for other sides than ``std``."""
        from apollo_torch import APOLLOAdamW

        settings = {"proj": "random", "scale_type": "channel", "scale": 1.0, "proj_type": "std"}
        group = {"params": self.parameters(), "rank": self.rank, "update_proj_gap": NEVER, **settings}
        optimizer: torch.optim.Optimizer = APOLLOAdamW([group], lr=LR)
        return optimizer

    def floor(self, bases: list[Tensor]) -> Callable[[], None]:
        """The bare arithmetic of a step."""
        weights = [weight.clone() for weight in self.weights]
        first = [weight.new_zeros(weight.shape[0], self.rank) for weight in weights]
        second = [torch.zeros_like(each) for each in first]

        def step() -> None:
            for weight, grad, basis, exp_avg, exp_avg_sq in zip(weights, self.grads, bases, first, second, strict=True):
                low = grad @ basis
                adam_direction(low, exp_avg, exp_avg_sq, BETAS, EPS)
                weight.addmm_(low, basis.t(), alpha=-LR)

        return step


def random_bases(work: Workload) -> list[Tensor]:
    return [torch.linalg.qr(torch.randn(grad.shape[1], work.rank))[0] for grad in work.grads]


def between_refreshes(work: Workload, rules: list[str], rounds: int) -> dict[str, Any]:
    """Table rows of everything that takes turns."""
    bases = random_bases(work)
    steps: dict[str, Callable[[], object]] = {FLOOR: work.floor(bases)}
    for name in rules:
        optimizer = work.ours(*RULES[name], gap=NEVER)
        if optimizer is not None:
            optimizer.step()  # finds the bases
            steps[name] = optimizer.step
    steps[PEER] = work.peer(bases).step
    apollo = work.apollo()
    apollo.step()  # draws its bases
    steps["apollo-torch APOLLOAdamW"] = apollo.step
    steps["torch AdamW"] = torch.optim.AdamW(work.parameters(), lr=LR, betas=BETAS, eps=EPS).step
    with torch.no_grad():
        times = take_turns(steps, rounds, CLOCK[0])
    rows = {}
    for name, taken in times.items():
        rows[name] = {
            **spread(taken),
            **{key: median_ratio(taken, times[other]) for key, other in (("of_floor", FLOOR), ("of_peer", PEER))},
        }
        between = f"({1e3 * min(taken):.1f}, {1e3 * max(taken):.1f})"
        print(
            f"{name:30} {1e3 * rows[name]['seconds']:7.1f} ms {between:18}  {rows[name]['of_floor']:5.2f} of the floor"
            f"  {rows[name]['of_peer']:5.2f} of galore-torch's"
        )
    return rows


def refreshes(work: Workload, gap: int, gaps: int, peer_seconds: float) -> dict[str, float]:
    """What refreshing takes: spread over ``gap`` steps, and in the worst step."""
    length = min(gap, 4 * len(work.weights))
    optimizer = work.ours(*RULES[OURS], gap=length)
    assert optimizer is not None
    begin = CLOCK[0]()
    optimizer.step()
    first = CLOCK[0]() - begin
    taken: list[list[float]] = [[] for _ in range(length)]
    refreshed = [False] * length
    before = bases_of(optimizer)
    for position in [*range(1, length), *(list(range(length)) * gaps)]:  # the first gap warms up
        begin = CLOCK[0]()
        optimizer.step()
        taken[position].append(CLOCK[0]() - begin)
        after = bases_of(optimizer)
        refreshed[position] |= after != before
        before = after
    medians = [statistics.median(each[-gaps:]) for each in taken]
    plain = statistics.median(each for each, had in zip(medians, refreshed, strict=True) if not had)
    added = sum(each - plain for each, had in zip(medians, refreshed, strict=True) if had)
    svd = svd_seconds(work)
    return {
        "first_step": first,
        "plain": plain,
        "steps_with_refresh": sum(refreshed),
        "refreshes_of_a_gap": added,
        "refresh_share": added / (gap * plain),
        "worst": max(medians) / plain,
        "worst_unsmoothed": max(max(each[-gaps:]) for each in taken) / plain,
        "peer_svds_of_a_gap": svd,
        "peer_refresh_share": svd / (gap * peer_seconds),
        "peer_worst": 1.0 + svd / peer_seconds,
    }


def bases_of(optimizer: torch.optim.Optimizer) -> list[tuple[int, int]]:
    """What changes when a basis does: the tensors' identities and versions."""
    stored = [state["projector"] for state in optimizer.state.values()]
    return [(id(projector), projector._version) for projector in stored]


def svd_seconds(work: Workload) -> float:
    """Seconds of galore-torch's SVDs of all matrices; each shape is timed once."""
    from galore_torch.galore_projector import GaLoreProjector

    seconds: dict[torch.Size, float] = {}
    for grad in work.grads:
        if grad.shape not in seconds:
            begin = CLOCK[0]()
            GaLoreProjector(work.rank).get_orthogonal_matrix(grad, work.rank, type="right")
            seconds[grad.shape] = CLOCK[0]() - begin
    return sum(seconds[grad.shape] for grad in work.grads)


def unprojected(rounds: int, rows: int) -> dict[str, Any]:
    """What takes turns on an embedding that is not projected."""
    grad = torch.randn(rows, 512)

    def parameter() -> nn.Parameter:
        found = nn.Parameter(torch.zeros_like(grad))
        found.grad = grad
        return found

    def ours(segment: int, dtype: str) -> Callable[[], object]:
        matrix = nn.Parameter(torch.zeros(8, 8))  # without a gradient; an optimizer that projects nothing is refused
        groups = [{"params": [matrix], "rank": 2}, {"params": [parameter()]}]
        optimizer = ds_galore.GaLoreAdamW(groups, lr=LR, moment_dtype=dtype)

        def step() -> None:
            usual, SEGMENT["cpu"] = SEGMENT["cpu"], segment
            try:
                optimizer.step()
            finally:
                SEGMENT["cpu"] = usual

        return step

    works: dict[str, Callable[[], object]] = {
        f"{dtype} moments, {how}": ours(size, dtype)
        for dtype in ("fp32", "8bit")
        for how, size in (("segments", SEGMENT["cpu"]), ("one pass", 2**30))
    }
    works["torch AdamW"] = torch.optim.AdamW([parameter()], lr=LR).step
    times = take_turns(works, rounds, CLOCK[0])
    rows_ = {
        name: {**spread(taken), "of_torch": median_ratio(taken, times["torch AdamW"])} for name, taken in times.items()
    }
    print(f"\nan embedding of {rows} x 512, not projected")
    for name, row in rows_.items():
        print(f"{name:30} {1e3 * row['seconds']:7.1f} ms  {row['of_torch']:5.2f} of torch's AdamW")
    return rows_


def profile(work: Workload, steps: int = 5) -> None:
    """Print which operations a step of ours consists of, and those of the floor."""
    optimizer = work.ours(*RULES[OURS], gap=NEVER)
    assert optimizer is not None
    for name, step in ((OURS, optimizer.step), (FLOOR, work.floor(random_bases(work)))):
        with torch.no_grad():
            step()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
                for _ in range(steps):
                    step()
        print(f"\n{name}, {steps} steps, {len(work.weights)} matrices")
        print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=20, max_name_column_width=40))


def run(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything about one set of shapes."""
    shapes = SHAPES[name]
    model = one_layer(shapes)
    passes = {}
    for samples in arguments.samples:
        passes[samples] = statistics.median(forward_backward(model, samples, 256) for _ in range(3))
    work = Workload(shapes, model)
    print(f"\n{name}: {len(work.weights)} matrices ({shapes.layers} layers of {shapes.config}), rank {shapes.rank}")
    if arguments.profile:
        profile(work)
        return {}
    rows = between_refreshes(work, arguments.rules, arguments.rounds[name])
    found: dict[str, Any] = {"steps": rows}
    if OURS in rows:
        found["refresh"] = refresh = refreshes(work, arguments.gap, arguments.gaps, rows[PEER]["seconds"])
        print(
            f"refreshes over {arguments.gap} steps: ours add {100 * refresh['refresh_share']:.1f}%, the worst step is"
            f" {refresh['worst']:.2f}x the median ({refresh['worst_unsmoothed']:.2f}x in any gap); the very first step"
            f" {refresh['first_step']:.2f} s\n  galore-torch's SVDs add {100 * refresh['peer_refresh_share']:.0f}%, all"
            f" in one step of {refresh['peer_worst']:.0f}x the median"
        )
    found["share"] = {}
    for samples, seconds in passes.items():
        shares = {}
        for row in (OURS, PEER, "torch AdamW"):
            if row in rows:
                step = rows[row]["seconds"] / shapes.layers
                shares[row] = step / (step + seconds)
        found["share"][samples] = {"forward_backward": seconds, **shares}
        listed = ", ".join(f"{row} {100 * share:.1f}%" for row, share in shares.items())
        print(f"one layer, {samples} x 256 tokens: forward and backward {seconds:.3f} s; share of the step: {listed}")
    return found


def missed(name: str, found: dict[str, Any]) -> list[str]:
    """The targets that were missed."""
    if "refresh" not in found:
        return []
    measured = {**found["steps"][OURS], **found["refresh"]}
    return [f"{name}: {key} {measured[key]:.2f} > {limit}" for key, limit in TARGETS.items() if measured[key] > limit]


def main() -> int:
    """Run, print tables, and fail if a target is missed."""
    parser = parser_with(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES), metavar="NAME")
    parser.add_argument("--rounds", type=int, help="turns of each optimizer (default 21 for 60m, 9 for 1b)")
    parser.add_argument("--gap", type=int, default=200, help="update_proj_gap that refreshes are spread over")
    parser.add_argument("--gaps", type=int, default=3, help="how many short gaps are run")
    parser.add_argument("--samples", type=int, nargs="+", default=[4, 16], help="of 256 tokens, for the share")
    parser.add_argument("--threads", type=int, help="torch's threads")
    parser.add_argument("--cpu-time", action="store_true", help="count CPU seconds of one thread instead")
    parser.add_argument("--profile", action="store_true", help="profile a step instead")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.shapes, arguments.rounds, arguments.gaps, arguments.samples = ["60m"], 1, 1, [1]
        SHAPES["60m"] = replace(SHAPES["60m"], layers=1)
    sys.stdout.reconfigure(line_buffering=True)
    if arguments.cpu_time:
        arguments.threads, CLOCK[0] = 1, time.process_time
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    arguments.rounds = {name: arguments.rounds or {"60m": 21, "1b": 9}[name] for name in SHAPES}
    warnings.filterwarnings("ignore", category=FutureWarning)
    clock = ", CPU seconds" if arguments.cpu_time else ""
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads{clock},"
        f" {platform.processor() or platform.machine()}"
    )
    results = {name: run(name, arguments) for name in arguments.shapes}
    if not arguments.profile:
        embedding = unprojected(arguments.rounds["60m"], 1000 if arguments.quick else 32000)
        write("step", arguments, {"shapes": results, "unprojected": embedding})
    failures = [line for name, found in results.items() for line in missed(name, found)]
    limits = ", ".join(f"{key} <= {limit}" for key, limit in TARGETS.items())
    if arguments.quick:
        return 0
    if not arguments.profile:
        print(f"\ntargets ({limits}): " + ("; ".join(["MISSED", *failures]) if failures else "met"))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
