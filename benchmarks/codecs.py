"""How small the weights of a checkpoint become: each codec on the same tensors of a really trained model.

    .venv/bin/python benchmarks/codecs.py               # Llama of hidden 512, 8 layers, rank 128, 200 + 50 steps
    .venv/bin/python benchmarks/codecs.py --tiny        # the tiny model, rank 64, 100 + 50 steps: two minutes

Trains with GaLoreAdamW on the standard library's sources, takes the projected weights as base, trains 50 steps more,
and encodes them. ``--stagger`` refreshes bases between, ``--weight-decay`` decays. One process; sizes against float32.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch
import zstandard

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "launch"))

from text_data import SampleOrder, load_corpus  # noqa: E402

from ds_galore import GaLoreAdamW  # noqa: E402
from ds_galore.checkpoint.codecs import CODECS, ZSTD, Reference, encode  # noqa: E402


def build(tiny: bool) -> torch.nn.Module:
    """The model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    hidden, inner, layers, heads = (256, 688, 4, 4) if tiny else (512, 1376, 8, 8)
    shape = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_key_value_heads=heads, use_cache=False, **shape))


def main() -> int:
    """Train, encode, print a table, and fail if the low-rank codec misses 2.5x."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--stagger", action="store_true", help="refresh every 200 steps, staggered; else never")
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--batch", type=int, default=4, help="samples of 256 tokens")
    arguments = parser.parse_args()
    model = build(arguments.tiny)
    corpus = load_corpus([], tokenizer=None, length=256)
    order = SampleOrder(len(corpus.train), seed=0)
    optimizer = GaLoreAdamW(
        model.parameters(),
        model=model,
        lr=0.01,
        rank=64 if arguments.tiny else 128,
        update_proj_gap=200 if arguments.stagger else 10**6,
        stagger_refresh=arguments.stagger,
        weight_decay=arguments.weight_decay,
    )
    projected = {plan.name for plan in optimizer.parameter_plans() if plan.side}
    weights = {name: p for name, p in model.named_parameters() if name in projected}
    first = 100 if arguments.tiny else 200
    base: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for step in range(1, first + 51):
        tokens = corpus.train[order.take(arguments.batch)].long()
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        if step % 25 == 0:
            print(f"step {step}/{first + 50} loss {float(loss.detach()):.3f}", file=sys.stderr, flush=True)
        if step == first:
            base = {name: (bits(p), optimizer.state[p]["projector"].numpy().copy()) for name, p in weights.items()}
    totals = dict.fromkeys(("float32", "zstd -3", "planes", "chosen"), 0)
    chosen: dict[str, int] = {}
    seconds = 0.0
    for name, parameter in weights.items():
        now, (before, old) = bits(parameter), base[name]
        basis = optimizer.state[parameter]["projector"].numpy()
        factors = {"projector": basis} if np.array_equal(basis, old) else {"projector": basis, "base/projector": old}
        reference = Reference(before, factors, parameter.shape[1], 0)
        begin = time.perf_counter()
        best = encode(now, reference, floating=True)
        seconds += time.perf_counter() - begin
        chosen[best.codec] = chosen.get(best.codec, 0) + 1
        planes = CODECS["planes"].encode(now, reference, floating=True, compressor=ZSTD)
        assert planes is not None
        totals["float32"] += now.nbytes
        totals["zstd -3"] += len(zstandard.ZstdCompressor(level=3).compress(now.tobytes()))
        totals["planes"] += planes.nbytes
        totals["chosen"] += best.nbytes
    print(f"{len(weights)} projected matrices, {totals['float32'] / 1e6:.1f} MB in float32, differences over 50 steps")
    for name, size in totals.items():
        print(f"{name:10} {size / 1e6:8.2f} MB  {totals['float32'] / size:5.2f}x")
    print(f"codecs chosen: {chosen}; encoded and checked at {totals['float32'] / 1e6 / seconds:.0f} MB/s")
    return 0 if totals["float32"] >= 2.5 * totals["chosen"] else 1


def bits(parameter: torch.Tensor) -> np.ndarray:
    """A copy of a parameter's bit patterns."""
    return parameter.detach().numpy().reshape(-1).view(np.uint32).copy()


if __name__ == "__main__":
    sys.exit(main())
