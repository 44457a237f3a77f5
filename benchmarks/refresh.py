"""Time and quality of a basis refresh: block power iteration against SVDs, on a gradient of a trained model.

    make bench        or        .venv/bin/python benchmarks/refresh.py

Trains one Llama layer of the "1B" size (hidden 2048, intermediate 5461) on the standard library's sources, takes the
gradient of its down projection (2048 x 5461) at the end and some steps before, and finds rank-512 bases of it: by the
optimizer's own code, by ``torch.linalg.svd``, by ``torch.svd_lowrank`` and by galore-torch's projector. They alternate,
and medians are reported. Energy is ``|G Q|^2 / |G|^2``.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable

import torch
from common import ROOT, arguments, median_ratio, spread, take_turns, write
from torch import Tensor

sys.path.insert(0, str(ROOT / "launch"))

from text_data import SampleOrder, load_corpus

from ds_galore import GaLoreAdamW
from ds_galore.optim.formats import Floating
from ds_galore.optim.matrices import RIGHT, Matrix
from ds_galore.optim.refresh import RefreshJob, refresh_bases
from ds_galore.zero.group import Guard, RankGroup
from ds_galore.zero.layout import MatrixLayout

RANK = 512


def trained_gradients(steps: int, age: int, model_name: str, rank: int) -> tuple[Tensor, Tensor]:
    """The down projection's gradients after ``steps - age`` and after ``steps`` steps, ``(hidden, intermediate)``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = json.loads((ROOT / "configs" / "models" / f"{model_name}.json").read_text())
    shape.update(num_hidden_layers=1, vocab_size=256)
    model = LlamaForCausalLM(LlamaConfig(**{key: value for key, value in shape.items() if key != "architectures"}))
    weight = model.model.layers[0].mlp.down_proj.weight
    corpus = load_corpus([], tokenizer=None, length=256)
    order = SampleOrder(len(corpus.train), seed=0)
    optimizer = GaLoreAdamW(model.parameters(), model=model, lr=2e-3, rank=rank, update_proj_gap=200)
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
            best = energy(grad, find(grad, None, "svd", rank=64))
            shares.append(energy(grad, find(grad, None, "subspace", rank=64)) / best)
    return shares


def energy(grad: Tensor, basis: Tensor) -> float:
    """The share of a gradient's energy that a basis captures."""
    return float((grad @ basis).square().sum() / grad.square().sum())


def find(grad: Tensor, basis: Tensor | None, method: str, rank: int) -> Tensor:
    """A basis as the optimizer finds it."""
    rows, columns = grad.shape
    layout = MatrixLayout((rows, columns), ((0, rows * columns),), 0)
    matrix = Matrix("down_proj", layout, 0, rank, None, 0, 0, 0, 200, sharded=False, projector=Floating(torch.float32))
    job = RefreshJob(matrix, grad.reshape(-1), basis)
    found = refresh_bases(RIGHT, [job], RankGroup(None), Guard(), method=method, passes=1, seed=0)[0]
    assert found is not None
    return found


def by_galore_torch(grad: Tensor, rank: int) -> Tensor:
    """A basis as galore-torch finds it."""
    from galore_torch.galore_projector import GaLoreProjector

    basis: Tensor = GaLoreProjector(rank).get_orthogonal_matrix(grad, rank, type="right")
    return basis.t()


def main() -> int:
    """Run, print a table, and fail if a target is missed."""
    parser = arguments(__doc__)
    parser.add_argument("--train-steps", type=int, default=40)
    parser.add_argument("--age", type=int, default=10, help="steps between the old basis and the gradient")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    model, rank = ("llama_1b", RANK)
    if options.quick:
        model, rank, options.train_steps, options.age, options.repeats = "llama_60m", 128, 2, 1, 1
    older, grad = trained_gradients(options.train_steps, options.age, model, rank)
    old_basis = find(older, None, "subspace", rank)
    cases: dict[str, Callable[[], Tensor]] = {
        "torch.linalg.svd": lambda: find(grad, None, "svd", rank),
        "galore-torch": lambda: by_galore_torch(grad, rank),
        "torch.svd_lowrank": lambda: torch.svd_lowrank(grad, q=rank, niter=2)[2],
        "ours, from the basis in use": lambda: find(grad, old_basis, "subspace", rank),
        "ours, first (random start)": lambda: find(grad, None, "subspace", rank),
    }
    with torch.no_grad():
        times = take_turns(cases, options.repeats)
        energies = {name: energy(grad, work()) for name, work in cases.items()}
    best, svd = energies["torch.linalg.svd"], times["torch.linalg.svd"]
    rows = {}
    print(f"gradient {tuple(grad.shape)}, rank {rank}, {torch.get_num_threads()} threads; medians (least, greatest)")
    for name, taken in times.items():
        row = {**spread(taken), "speedup": 1 / median_ratio(taken, svd), "energy": energies[name]}
        rows[name] = row | {"of_svd": energies[name] / best}
        between = f"({row['least']:.3f}, {row['greatest']:.3f})"
        print(
            f"{name:30} {row['seconds']:7.3f} s {between:18} {row['speedup']:6.1f}x"
            f"  energy {row['energy']:.4f}, {rows[name]['of_svd']:.4f} of the SVD's"
        )
    kept = energy(grad, old_basis) / best
    print(f"the old basis as it is: {kept:.4f} of the SVD's energy")
    shares = quality_on_tiny(2 if options.quick else 60)
    print(
        f"first bases of rank 64 of the {len(shares)} matrices of 'tiny': {min(shares):.4f} (least),"
        f" {statistics.mean(shares):.4f} (mean) of the SVD's energy"
    )
    found = {"gradient": list(grad.shape), "rank": rank, "rows": rows, "old_basis": kept}
    write("refresh", options, {**found, "tiny": {"least": min(shares), "mean": statistics.mean(shares)}})
    ours = [row for name, row in rows.items() if name.startswith("ours")]
    met = all(row["speedup"] >= 10 and row["of_svd"] >= 0.98 for row in ours)
    if not options.quick:
        print("targets (10x, 0.98): " + ("met" if met else "MISSED"))
    return 0 if met or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())
