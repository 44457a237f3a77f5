"""A small run whose state at any step is known, saved through the store by two ranks in one process.

Also a program, killed by the crash tests: ``python -m tests.checkpoint.runs DIRECTORY STEPS POINT COUNT`` saves each
step, prints ``ack TAG`` after each commit, and kills itself when it passes POINT for the COUNT-th time.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np

from ds_galore.checkpoint.codecs import Reference
from ds_galore.checkpoint.reader import CheckpointReader
from ds_galore.checkpoint.store import CheckpointStore, Shard

RANKS, ROWS, COLUMNS, RANK, FULL_EVERY = 2, 24, 32, 4, 3
SHAPES = {
    "layer.weight/fp32": (ROWS, COLUMNS),
    "layer.weight/exp_avg": (ROWS, RANK),
    "layer.weight/projector": (COLUMNS, RANK),
    "frozen.weight/fp32": (5, 7),
    "counts/buffer": (9,),
    "empty/fp32": (0, 3),
}


def state(step: int) -> dict[str, np.ndarray]:
    """The run's tensors after ``step`` steps: low-rank updates, a basis that changes at step 6."""
    generator = np.random.default_rng(7)
    weight = generator.standard_normal((ROWS, COLUMNS)).astype(np.float32)
    bases = [np.linalg.qr(generator.standard_normal((COLUMNS, RANK)))[0].astype(np.float32) for _ in range(2)]
    frozen = generator.standard_normal((5, 7)).astype(np.float32)
    moment = np.zeros((ROWS, RANK), np.float32)
    basis = bases[0]
    for number in range(1, step + 1):
        basis = bases[int(number >= 6)]
        moment = generator.standard_normal((ROWS, RANK)).astype(np.float32)
        weight = (weight - np.float32(1e-3) * moment @ basis.T).astype(np.float32)
    values = [weight, moment, basis, frozen, np.arange(9, dtype=np.int64) * step, np.zeros((0, 3), np.float32)]
    return dict(zip(SHAPES, values, strict=True))


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}")


def ranges(numel: int, ranks: int) -> list[tuple[int, int]]:
    edges = [numel * rank // ranks for rank in range(ranks + 1)]
    return list(zip(edges[:-1], edges[1:], strict=True))  # noqa: RUF007


def shards(step: int, rank: int, base: CheckpointReader | None, ranks: int = RANKS) -> list[Shard]:
    """What a rank writes at a step."""
    now = state(step)
    result = []
    for name, array in now.items():
        start, stop = ranges(array.size, ranks)[rank]
        reference = Reference()
        if base is not None:
            old = base.bits(name, start, stop)
            factors = {}
            if name == "layer.weight/fp32":
                before = base.bits("layer.weight/projector").view(np.float32).reshape(COLUMNS, RANK)
                factors = {"projector": now["layer.weight/projector"], "base/projector": before}
                if np.array_equal(before, now["layer.weight/projector"]):
                    del factors["base/projector"]
            reference = Reference(old, factors, COLUMNS, start)
        dtype = "F32" if array.dtype == np.float32 else "I64"
        result.append(Shard(name, dtype, array.shape, start, bits(array)[start:stop], reference))
    return result


def save(
    store: CheckpointStore, step: int, *, base: str | None = None, tag: str | None = None, kind: str | None = None
):
    """Save a step by both ranks, and commit."""
    tag = tag or f"step-{step}"
    reader = store.open(base) if base is not None else None
    files = [store.write(tag, rank, RANKS, shards(step, rank, reader), base=reader) for rank in range(RANKS)]
    return store.commit(tag, files, base=base, kind=kind, metadata={"step": step})


def check(reader: CheckpointReader) -> None:
    """Every tensor is that of the step in the metadata, bit for bit, whatever ranges are asked for."""
    expected = state(reader.manifest.metadata["step"])
    assert set(reader.tensors) == set(expected)
    for name, array in expected.items():
        assert reader.tensors[name].shape == array.shape
        assert np.array_equal(reader.bits(name), bits(array)), name
        for start, stop in ranges(array.size, 3):
            assert np.array_equal(reader.bits(name, start, stop), bits(array)[start:stop])


def main(directory: str, steps: str, point: str, count: str) -> None:
    """The program."""
    passed = 0

    def hook(name: str) -> None:
        nonlocal passed
        passed += name == point
        if passed == int(count):
            os.kill(os.getpid(), signal.SIGKILL)

    store = CheckpointStore(Path(directory), hook)
    full: str | None = None
    for step in range(1, int(steps) + 1):
        base = None if step % FULL_EVERY == 1 else full
        save(store, step, base=base)
        if base is None:
            full = f"step-{step}"
        print(f"ack step-{step}", flush=True)
        store.retain(keep_last=2)


if __name__ == "__main__":
    main(*sys.argv[1:])
