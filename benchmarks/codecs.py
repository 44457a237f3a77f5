"""How small the weights of a checkpoint become, and how fast: each codec on the same tensors of a really trained model.

    .venv/bin/python benchmarks/codecs.py               # Llama of hidden 512, 8 layers, rank 128, 200 + 50 steps
    .venv/bin/python benchmarks/codecs.py --tiny        # the tiny model, rank 64, 100 + 50 steps: two minutes

Trains with GaLoreAdamW on the standard library's sources, takes the projected weights as base, trains 50 steps more,
and encodes them. ``--stagger`` refreshes bases between, ``--weight-decay`` decays. One process; sizes against float32.

Then the same on ``--speed-mb`` of these weights, on one core, in turns: seconds to encode and to decode. Ours alone
(byte planes without a base) is what stands beside zipnn and ``zstd``, which know no base either; z4ai has both forms.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import zstandard
from common import ROOT, arguments, median_ratio, spread, take_turns, write

sys.path.insert(0, str(ROOT / "launch"))

from text_data import SampleOrder, load_corpus

from ds_galore import GaLoreAdamW
from ds_galore.checkpoint.codecs import CODECS, ZSTD, Encoded, Reference, decode, encode

Bits = np.ndarray[Any, np.dtype[np.uint32]]
#: What encodes an array given its reference, and what decodes that again.
Way = tuple[Callable[[Bits, Reference], Any], Callable[[Any, Bits, Reference], Any]]


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


def trained(options: Any) -> dict[str, tuple[Bits, Reference]]:
    """By name, projected weights at the end, and what they can be predicted from."""
    model = build(options.tiny)
    corpus = load_corpus([], tokenizer=None, length=256)
    order = SampleOrder(len(corpus.train), seed=0)
    optimizer = GaLoreAdamW(
        model.parameters(),
        model=model,
        lr=0.01,
        rank=64 if options.tiny else 128,
        update_proj_gap=200 if options.stagger else 10**6,
        stagger_refresh=options.stagger,
        weight_decay=options.weight_decay,
    )
    projected = {plan.name for plan in optimizer.parameter_plans() if plan.side}
    weights = {name: p for name, p in model.named_parameters() if name in projected}
    first, last = options.steps
    base: dict[str, tuple[Bits, Any]] = {}
    for step in range(1, first + last + 1):
        tokens = corpus.train[order.take(options.batch)].long()
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        if step % 25 == 0:
            print(f"step {step}/{first + last} loss {float(loss.detach()):.3f}", file=sys.stderr, flush=True)
        if step == first:
            base = {name: (bits(p), optimizer.state[p]["projector"].numpy().copy()) for name, p in weights.items()}
    found = {}
    for name, parameter in weights.items():
        before, old = base[name]
        basis = optimizer.state[parameter]["projector"].numpy()
        factors = {"projector": basis} if np.array_equal(basis, old) else {"projector": basis, "base/projector": old}
        found[name] = bits(parameter), Reference(before, factors, parameter.shape[1], 0)
    return found


def bits(parameter: torch.Tensor) -> Bits:
    """A copy of a parameter's bit patterns."""
    return parameter.detach().numpy().reshape(-1).view(np.uint32).copy()


def sizes(weights: dict[str, tuple[Bits, Reference]]) -> dict[str, Any]:
    """Bytes of all of them by some codecs, and by the one that is chosen."""
    totals = dict.fromkeys(("float32", "zstd -3", "planes", "chosen"), 0)
    chosen: dict[str, int] = {}
    seconds = 0.0
    for now, reference in weights.values():
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
    print(f"{len(weights)} projected matrices, {totals['float32'] / 1e6:.1f} MB in float32")
    for name, size in totals.items():
        print(f"{name:10} {size / 1e6:8.2f} MB  {totals['float32'] / size:5.2f}x")
    print(f"codecs chosen: {chosen}; encoded and checked at {totals['float32'] / 1e6 / seconds:.0f} MB/s")
    return {**totals, "codecs": chosen, "matrices": len(weights)}


# ---------------------------------------------------------------------- speed


def _ours(codec: str, *, based: bool) -> Way:
    def encoded(now: Bits, reference: Reference) -> Encoded:
        found = CODECS[codec].encode(now, reference if based else Reference(), floating=True, compressor=ZSTD)
        assert found is not None
        return found

    def decoded(code: Encoded, now: Bits, reference: Reference) -> Bits:
        return decode(code, now.size, 4, reference if based else Reference(), floating=True)

    return encoded, decoded


def ways(quick: bool) -> dict[str, Way]:
    """What takes turns; a peer that is not installed is left out, and said so."""
    found: dict[str, Way] = {
        "ours: byte planes": _ours("planes", based=False),
        "ours: byte planes of the difference": _ours("planes", based=True),
        "ours: low rank": _ours("lowrank", based=True),
        "zstd -3": (
            lambda now, _: zstandard.ZstdCompressor(level=3).compress(now.data),
            lambda code, *_: zstandard.ZstdDecompressor().decompress(code),
        ),
    }
    try:
        import zipnn
    except ImportError:
        print("zipnn is not installed: left out", file=sys.stderr)
    else:
        machine = zipnn.ZipNN(input_format="byte", bytearray_dtype="float32", threads=1)
        found["zipnn"] = (
            lambda now, _: machine.compress(bytearray(now.data)),
            lambda code, *_: machine.decompress(code),
        )
    try:
        import z4ai
    except ImportError:
        print("z4ai is not installed: left out", file=sys.stderr)
    else:
        if not quick:  # seconds a megabyte
            found["z4ai"] = (
                lambda now, _: z4ai.compress(now.tobytes(), dtype="fp32"),
                lambda code, *_: z4ai.decompress(code),
            )
            found["z4ai, delta"] = (
                lambda now, reference: z4ai.compress_delta(
                    now.tobytes(), reference=reference.base.tobytes(), dtype="fp32"
                ),
                lambda code, now, reference: z4ai.decompress_delta(code, reference=reference.base.tobytes()),
            )
    return found


def speeds(weights: dict[str, tuple[Bits, Reference]], megabytes: float, rounds: int, quick: bool) -> dict[str, Any]:
    """By way, megabytes a second of encoding and decoding on one core, and the ratio; each gives the bits back."""
    chosen: list[tuple[Bits, Reference]] = []
    for now, reference in sorted(weights.values(), key=lambda each: each[0].size):
        if not chosen or sum(each.nbytes for each, _ in chosen) + now.nbytes <= 1e6 * megabytes:
            chosen.append((now, reference))
    total = sum(now.nbytes for now, _ in chosen) / 1e6
    candidates = ways(quick)
    codes = {name: [encode_(*each) for each in chosen] for name, (encode_, _) in candidates.items()}
    for name, (_, decode_) in candidates.items():
        for code, (now, reference) in zip(codes[name], chosen, strict=True):
            assert np.array_equal(np.frombuffer(decode_(code, now, reference), dtype=np.uint32), now), name
    encoding = {
        name: (lambda encode_=encode_: [encode_(*each) for each in chosen]) for name, (encode_, _) in candidates.items()
    }
    decoding = {
        name: (
            lambda decode_=decode_, own=codes[name]: [
                decode_(code, *each) for code, each in zip(own, chosen, strict=True)
            ]
        )
        for name, (_, decode_) in candidates.items()
    }
    times = {"encode": take_turns(encoding, rounds), "decode": take_turns(decoding, rounds)}
    peer = "zipnn" if "zipnn" in candidates else "zstd -3"
    rows: dict[str, Any] = {}
    print(f"\none core, {total:.1f} MB in {len(chosen)} matrices; MB/s, medians of {rounds} (against {peer})")
    for name in candidates:
        size = sum(getattr(code, "nbytes", None) or len(code) for code in codes[name]) / 1e6
        rows[name] = {"ratio": total / size}
        for what, taken in times.items():
            rows[name][what] = {
                **spread(taken[name]),
                "mb_s": total / spread(taken[name])["seconds"],
                "of_peer": 1 / median_ratio(taken[name], taken[peer]),
            }
        shown = "  ".join(
            f"{what} {rows[name][what]['mb_s']:7.1f} ({rows[name][what]['of_peer']:.2f}x)" for what in times
        )
        print(f"{name:36} {shown}  {rows[name]['ratio']:.2f}x smaller")
    return {"megabytes": total, "matrices": len(chosen), "rounds": rounds, "peer": peer, "rows": rows}


def main() -> int:
    """Train, encode, print tables, and fail if the low-rank codec misses 2.5x."""
    parser = arguments(__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--stagger", action="store_true", help="refresh every 200 steps, staggered; else never")
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--batch", type=int, default=4, help="samples of 256 tokens")
    parser.add_argument("--steps", type=int, nargs=2, metavar=("FIRST", "MORE"), help="to the base, and from there")
    parser.add_argument("--speed-mb", type=float, default=12.0, help="of weights, whose encoding is timed")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    if options.quick:
        options.tiny, options.steps, options.speed_mb, options.rounds, options.batch = True, [1, 1], 1.0, 1, 1
    options.steps = options.steps or ([100, 50] if options.tiny else [200, 50])
    weights = trained(options)
    torch.set_num_threads(1)
    found = sizes(weights)
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1):
        found["speeds"] = speeds(weights, options.speed_mb, options.rounds, options.quick)
    write("codecs", options, {**found, "steps": options.steps, "tiny": options.tiny})
    return 0 if options.quick or found["float32"] >= 2.5 * found["chosen"] else 1


if __name__ == "__main__":
    sys.exit(main())
