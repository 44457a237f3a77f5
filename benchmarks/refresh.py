"""Time and quality of a basis refresh: block power iteration against a full SVD, on a gradient of a trained model.

    make bench        or        .venv/bin/python benchmarks/refresh.py

Trains one Llama layer of the "1B" size (hidden 2048, intermediate 5461) on the standard library's sources, takes the
gradient of its down projection (2048 x 5461) at the end and some steps before, and finds rank-512 bases of it. Each
method runs the optimizer's own code; they alternate, and medians are reported. Energy is ``|G Q|^2 / |G|^2``.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "launch"))

from text_data import SampleOrder, load_corpus  # noqa: E402

from ds_galore import GaLoreAdamW  # noqa: E402
from ds_galore.optim.matrices import RIGHT, Matrix  # noqa: E402
from ds_galore.optim.refresh import RefreshJob, refresh_bases  # noqa: E402
from ds_galore.zero.group import Guard, RankGroup  # noqa: E402
from ds_galore.zero.layout import MatrixLayout  # noqa: E402

RANK = 512


def trained_gradients(steps: int, age: int) -> tuple[Tensor, Tensor]:
    """The down projection's gradients after ``steps - age`` and after ``steps`` steps, ``(2048, 5461)`` each."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = json.loads((ROOT / "configs" / "models" / "llama_1b.json").read_text())
    shape.update(num_hidden_layers=1, vocab_size=256)
    model = LlamaForCausalLM(LlamaConfig(**{key: value for key, value in shape.items() if key != "architectures"}))
    weight = model.model.layers[0].mlp.down_proj.weight
    corpus = load_corpus([], tokenizer=None, length=256)
    order = SampleOrder(len(corpus.train), seed=0)
    optimizer = GaLoreAdamW(model.parameters(), model=model, lr=2e-3, rank=RANK, update_proj_gap=200)
    taken: dict[int, Tensor] = {}
    for step in range(1, steps + 1):
        tokens = corpus.train[order.take(8)].long()
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if step in (steps - age, steps):
            taken[step] = weight.grad.clone()
        optimizer.step()
        if step == 1 or step % 10 == 0:
            print(f"training step {step}/{steps}: loss {float(loss.detach()):.3f}", file=sys.stderr, flush=True)
    return taken[steps - age], taken[steps]


def quality_on_tiny(steps: int) -> list[float]:
    """For each projected matrix of ``tiny``, trained so long: energy of a first basis, as a share of the SVD's."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(ROOT / "configs" / "models" / "tiny.json"))
    corpus = load_corpus([], tokenizer=None, length=256)
    order = SampleOrder(len(corpus.train), seed=0)
    optimizer = GaLoreAdamW(model.parameters(), model=model, lr=1e-2, rank=64)
    for _ in range(steps):
        optimizer.step()
        tokens = corpus.train[order.take(4)].long()
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
    projected = {plan.name for plan in optimizer.parameter_plans() if plan.side}
    shares = []
    for name, parameter in model.named_parameters():
        if name in projected:
            grad = parameter.grad
            assert grad is not None
            best = energy(grad, find(grad, None, "svd", 1, rank=64)[0])
            shares.append(energy(grad, find(grad, None, "subspace", 1, rank=64)[0]) / best)
    return shares


def energy(grad: Tensor, basis: Tensor) -> float:
    """The share of a gradient's energy that a basis captures."""
    return float((grad @ basis).square().sum() / grad.square().sum())


def find(grad: Tensor, basis: Tensor | None, method: str, passes: int, rank: int = RANK) -> tuple[Tensor, float]:
    """A basis as the optimizer finds it, and the seconds that took."""
    rows, columns = grad.shape
    layout = MatrixLayout((rows, columns), ((0, rows * columns),), 0)
    matrix = Matrix("down_proj", layout, 0, rank, 0, 0, sharded=False, projector_dtype=torch.float32)
    job = RefreshJob(matrix, grad.reshape(-1), basis)
    begin = time.perf_counter()
    found = refresh_bases(RIGHT, [job], RankGroup(None), Guard(), method=method, passes=passes, seed=0)[0]
    seconds = time.perf_counter() - begin
    assert found is not None
    return found, seconds


def main() -> int:
    """Run, print a table, and fail if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--train-steps", type=int, default=40)
    parser.add_argument("--age", type=int, default=10, help="steps between the old basis and the gradient")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, help="also write the results as JSON")
    arguments = parser.parse_args()
    older, grad = trained_gradients(arguments.train_steps, arguments.age)
    old_basis, _ = find(older, None, "subspace", 1)
    cases = {
        "svd": (None, "svd", 1),
        "subspace, from the basis in use": (old_basis, "subspace", 1),
        "subspace, first (random start)": (None, "subspace", 1),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    bases: dict[str, Tensor] = {}
    with torch.no_grad():
        for _ in range(arguments.repeats):
            for name, (basis, method, passes) in cases.items():
                bases[name], seconds = find(grad, basis, method, passes)
                times[name].append(seconds)
    best = energy(grad, bases["svd"])
    svd = statistics.median(times["svd"])
    results = {}
    print(f"gradient {tuple(grad.shape)}, rank {RANK}, torch {torch.__version__}, {torch.get_num_threads()} threads,")
    print(f"{platform.processor() or platform.machine()}; median of {arguments.repeats} (least, greatest)")
    for name in cases:
        median, captured = statistics.median(times[name]), energy(grad, bases[name])
        results[name] = {"seconds": median, "speedup": svd / median, "energy": captured, "of_svd": captured / best}
        spread = f"({min(times[name]):.3f}, {max(times[name]):.3f})"
        print(
            f"{name:34} {median:7.3f} s {spread:18} {svd / median:6.1f}x"
            f"  energy {captured:.4f}, {captured / best:.4f} of the SVD's"
        )
    print(f"the old basis as it is: {energy(grad, old_basis) / best:.4f} of the SVD's energy")
    shares = quality_on_tiny(60)
    print(
        f"first bases of rank 64 of the {len(shares)} matrices of 'tiny' after 60 steps: {min(shares):.4f} (least),"
        f" {statistics.mean(shares):.4f} (mean) of the SVD's energy"
    )
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=2) + "\n")
    refreshed = [results[name] for name in cases if name != "svd"]
    met = all(each["speedup"] >= 10 and each["of_svd"] >= 0.98 for each in refreshed)
    print("targets (10x, 0.98): " + ("met" if met else "MISSED"))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
