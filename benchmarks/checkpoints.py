"""Checkpoints of a really trained model on two ranks: how large, how long training stands still, how much memory.

    make bench                                 # all of it, and what else is measured
    deepspeed --num_accelerators 2 benchmarks/checkpoints.py --row galore
    deepspeed --num_accelerators 2 benchmarks/checkpoints.py --row stall
    deepspeed --num_accelerators 2 benchmarks/checkpoints.py --row load

A Llama of hidden 512, 8 layers, intermediate 1376 and byte vocabulary (25.6M parameters) is trained in fp32 under
ZeRO-3 on the standard library's sources, 4 samples of 256 tokens a step, at a constant learning rate. Rows:

galore      GaLoreAdamW, rank 128, no refresh between the base at step 200 and the difference at step 250
staggered   the same with the shipped staggered refresh every 200 steps
decay       as galore, with weight decay 0.1
8bit        as galore, with GaLoreAdamW8bit
adamw       AdamW at its learning rate, 5e-4
stall       time until ``save_checkpoint`` returns and until all is on the disk, ours and others in turn: DeepSpeed's
            own engine, its Decoupled engine, torch.distributed.checkpoint's save and async_save; and training speed
            with a save of ours
stall-adamw the times, with AdamW's larger state
load        time of a load and the memory that it takes for a moment: ours full and differential, DeepSpeed's own,
            torch.distributed.checkpoint's; from the kernel's cache, and from the disk
load-adamw  the same of AdamW's state

The size rows also compress the projected weights by zstd, byte planes, zipnn and z4ai, where those are installed
(``pip install -e '.[bench]'``). Sizes are of all files that a save writes; what it links is not counted.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from common import ROOT, bytes_of, median_ratio, spread, write
from common import arguments as parser_with

sys.path.insert(0, str(ROOT / "launch"))

from text_data import SampleOrder, load_corpus

import ds_galore

MODEL = {
    "vocab_size": 256,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "use_cache": False,
}
GALORE = {"lr": 0.01, "rank": 128, "scale": 0.25, "update_proj_gap": 250, "stagger_refresh": False}
ROWS: dict[str, dict[str, Any]] = {
    "galore": {"type": "GaLoreAdamW", "params": GALORE},
    "staggered": {"type": "GaLoreAdamW", "params": {**GALORE, "update_proj_gap": 200, "stagger_refresh": True}},
    "decay": {"type": "GaLoreAdamW", "params": {**GALORE, "weight_decay": 0.1}},
    "8bit": {"type": "GaLoreAdamW8bit", "params": GALORE},
    "adamw": {"type": "AdamW", "params": {"lr": 5e-4, "torch_adam": True}},
}
ROWS |= {"stall": ROWS["galore"], "stall-adamw": ROWS["adamw"], "load": ROWS["galore"], "load-adamw": ROWS["adamw"]}


class Run:
    """A model in training."""

    def __init__(self, row: str, micro: int, hidden: int = 512, layers: int = 8) -> None:
        import deepspeed
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        shape = {**MODEL, "hidden_size": hidden, "intermediate_size": hidden * 43 // 16, "num_hidden_layers": layers}
        model = LlamaForCausalLM(LlamaConfig(**shape))
        config = {
            "train_micro_batch_size_per_gpu": micro,
            "optimizer": ROWS[row],
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 3, "sub_group_size": 100_000_000, "overlap_comm": False},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
            "ds_galore": {"checkpoint": {"mode": "differential"}},
        }
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
        self.corpus = load_corpus([], tokenizer=None, length=256)
        self.order = SampleOrder(len(self.corpus.train), seed=0)
        self.micro, self.rank, self.ranks = micro, dist.get_rank(), dist.get_world_size()

    def train(self, steps: int) -> float:
        """Seconds for a number of steps; the loss is reported every 25."""
        begin = time.perf_counter()
        for _ in range(steps):
            chosen = self.order.take(self.micro * self.ranks)[self.rank * self.micro :][: self.micro]
            tokens = self.corpus.train[chosen].long()
            loss = self.engine(input_ids=tokens, labels=tokens).loss
            self.engine.backward(loss)
            self.engine.step()
            if self.rank == 0 and self.engine.global_steps % 25 == 0:
                print(f"step {self.engine.global_steps} loss {loss.item():.3f}", file=sys.stderr, flush=True)
        dist.barrier()
        return time.perf_counter() - begin

    def save(self, directory: Path, tag: str) -> float:
        """Save ours; seconds until the call returns."""
        begin = time.perf_counter()
        self.engine.save_checkpoint(str(directory), tag=tag)
        return time.perf_counter() - begin

    def save_native(self, directory: Path, tag: str) -> float:
        """Save the same state by DeepSpeed's own engine; seconds until the call returns."""
        with self.by(self.native):
            begin = time.perf_counter()
            self.engine.save_checkpoint.__wrapped__(str(directory), tag=tag)
            return time.perf_counter() - begin

    @cached_property
    def native(self) -> Any:
        """DeepSpeed's own checkpoint engine."""
        from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

        return TorchCheckpointEngine(self.engine._config)

    @cached_property
    def decoupled(self) -> Any:
        """DeepSpeed's engine that writes in a process of its own, by its writer in Python (the other needs libaio)."""
        from deepspeed.runtime.checkpoint_engine.decoupled_checkpoint_engine import DecoupledCheckpointEngine
        from deepspeed.runtime.model_checkpointing import CHECKPOINT_WRITER
        from deepspeed.runtime.model_checkpointing.config import get_checkpoint_writer_config
        from deepspeed.runtime.model_checkpointing.utils import create_data_parallel_writer_config
        from deepspeed.utils import groups

        settings = self.engine._config
        writer = get_checkpoint_writer_config({CHECKPOINT_WRITER: {"type": "python", "decoupled": True}})
        settings.checkpoint_config = {**settings.checkpoint_config, CHECKPOINT_WRITER: writer}  # others share it
        who = create_data_parallel_writer_config(groups, parallel_unit=None, zero_stage=3, has_moe_layers=False)
        return DecoupledCheckpointEngine(settings, who, True)

    @contextmanager
    def by(self, other: Any) -> Iterator[None]:
        """Another checkpoint engine in the place of ours."""
        ours, self.engine.checkpoint_engine = self.engine.checkpoint_engine, other
        try:
            yield
        finally:
            self.engine.checkpoint_engine = ours

    def load_native(self, directory: Path) -> None:
        """Load what DeepSpeed's own engine saved, by itself."""
        with self.by(self.native):
            self.engine.load_checkpoint.__wrapped__(str(directory))


def local_state(run: Run) -> dict[str, Any]:
    """This rank's tensors under names of its own, as torch.distributed.checkpoint takes them."""
    zero = run.engine.optimizer
    found: dict[str, Any] = {
        f"rank{run.rank}/weights/{index}": flat.detach() for index, flat in enumerate(zero.fp32_partitioned_groups_flat)
    }

    def collect(value: Any, name: str) -> None:
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, dict):
            for key, each in value.items():
                collect(each, f"{name}/{key}")

    for index, state in enumerate(zero.optimizer.state.values()):
        collect(state, f"rank{run.rank}/state/{index}")
    return found


def dcp_writer(directory: Path, *, compressed: bool) -> Any:
    """A writer of torch.distributed.checkpoint, with its ZStandard extension or without."""
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint._extension import ZStandard

    return FileSystemWriter(directory, **({"_extensions": [ZStandard()]} if compressed else {}))


def save_dcp(run: Run, directory: Path, *, compressed: bool = False) -> float:
    """Save by torch.distributed.checkpoint; seconds until the call returns."""
    import torch.distributed.checkpoint as dcp

    begin = time.perf_counter()
    dcp.save(local_state(run), storage_writer=dcp_writer(directory, compressed=compressed))
    return time.perf_counter() - begin


def compressed_files(directory: Path, level: int) -> int:
    """Bytes that all files take after ``zstd`` of a level."""
    import zstandard

    compressor = zstandard.ZstdCompressor(level=level, threads=-1)
    return sum(len(compressor.compress(path.read_bytes())) for path in directory.rglob("*") if path.is_file())


def size_of(directory: Path, without: Path | None = None) -> int:
    """Bytes of all files, but for those that are links to files of another directory."""
    known = {path.stat().st_ino for path in without.rglob("*")} if without is not None else set()
    files = [path.stat() for path in directory.rglob("*") if path.is_file()]
    return sum(each.st_size for each in files if each.st_ino not in known)


def sizes(run: Run, row: str, output: Path, steps: int, gap: int, levels: list[int]) -> dict[str, Any]:
    """Train, save, train, save; sizes in bytes, also of files compressed by ``zstd`` of some levels."""
    run.train(steps)
    run.save(output / "ours", "base")
    run.engine.checkpoint_engine.wait()
    run.train(gap)
    run.save(output / "ours", "diff")
    run.engine.checkpoint_engine.wait()
    run.save_native(output / "native", "diff")
    for name in ("dcp", "dcp zstd"):
        save_dcp(run, output / name, compressed=name != "dcp")
    dist.barrier()
    if run.rank:
        return {}
    full, diff = size_of(output / "ours" / "base"), size_of(output / "ours" / "diff", output / "ours" / "base")
    native = size_of(output / "native" / "diff")
    found: dict[str, Any] = {"row": row, "steps": steps, "gap": gap, "full": full, "difference": diff, "native": native}
    found["of_native"] = native / diff
    found["others"] = {name: size_of(output / name) for name in ("dcp", "dcp zstd")}
    for level in levels:
        found["others"][f"native zstd -{level}"] = compressed_files(output / "native" / "diff", level)
    found["peak_host_bytes_of_rank_0"] = run.engine.checkpoint_engine.peak_host_bytes
    parts = by_part(output / "ours" / "diff")
    found["parts"] = parts
    if row != "adamw":
        found["projected_weights"] = compare(output / "ours")
    return found


def by_part(directory: Path) -> dict[str, dict[str, int]]:
    """By what a tensor is: bytes of its elements, and bytes written."""
    from ds_galore.checkpoint.reader import CheckpointReader

    reader = CheckpointReader(directory)
    found: dict[str, dict[str, int]] = {}
    for rank in range(reader.manifest.world_size):
        file = reader._file(rank, 0)
        for index, entry in enumerate(file.entries):
            kind = entry.name.rpartition("/")[2] if "_states.pt" not in entry.name else "other"
            if kind == "fp32":
                projected = f"{entry.name.rpartition('/')[0]}/projector" in reader.tensors
                kind = "projected weights" if projected else "other weights"
            each = found.setdefault(kind, {"elements": 0, "written": 0})
            each["elements"] += entry.numel * entry.itemsize
            each["written"] += file.encoded(index).nbytes
    return found


def compare(directory: Path) -> dict[str, Any]:
    """What others make of the projected weights of both ranks: bytes."""
    from ds_galore.checkpoint.codecs import CODECS, ZSTD, Reference
    from ds_galore.checkpoint.reader import CheckpointReader

    base, diff = (CheckpointReader(directory / tag) for tag in ("base", "diff"))
    names = [name for name in diff.tensors if name.endswith("/fp32")]
    names = [name for name in names if name.replace("/fp32", "/projector") in diff.tensors]
    found: dict[str, float] = {}
    ways: dict[str, Any] = {
        "zstd -3": lambda now, old: len(_zstd(now)),
        "byte planes": lambda now, old: _planes(CODECS, ZSTD, Reference, now, old),
    }
    try:
        import zipnn

        ways["zipnn"] = lambda now, old: len(
            zipnn.ZipNN(input_format="byte", bytearray_dtype="float32").compress(bytearray(now.tobytes()))
        )
    except ImportError:
        found["zipnn"] = float("nan")
    try:
        import z4ai

        ways["z4ai"] = lambda now, old: len(z4ai.compress(now.tobytes(), dtype="fp32"))
        ways["z4ai delta"] = lambda now, old: len(
            z4ai.compress_delta(now.tobytes(), reference=old.tobytes(), dtype="fp32")
        )
    except ImportError:
        found["z4ai"] = float("nan")
    total = 0
    seconds = dict.fromkeys(ways, 0.0)
    for name in names:
        now, old = diff.bits(name), base.bits(name)
        total += now.nbytes
        for way, size in ways.items():
            begin = time.perf_counter()
            found[way] = found.get(way, 0) + size(now, old)
            seconds[way] += time.perf_counter() - begin
    return {"float32": total, "sizes": found, "seconds": {way: round(each, 2) for way, each in seconds.items()}}


def _zstd(now: np.ndarray[Any, Any]) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(level=3).compress(now.tobytes())


def _planes(codecs: Any, compressor: Any, reference: Any, now: Any, old: Any) -> int:
    encoded = codecs["planes"].encode(now, reference(old), floating=True, compressor=compressor)
    return int(encoded.nbytes)


Way = tuple[Callable[[str], Any], Callable[[Any], Any]]


def ways_to_save(run: Run, output: Path) -> dict[str, Way]:
    """By name, what begins a save under a tag, and what waits until all of it is on the disk."""
    import torch.distributed.checkpoint as dcp

    background = dist.new_group(backend="gloo")  # of its own: async_save talks while training does

    def asynchronous(tag: str) -> Any:
        return dcp.async_save(
            local_state(run),
            storage_writer=dcp_writer(output / "dcp async" / tag, compressed=False),
            process_group=background,
        )

    def decoupled(tag: str) -> None:
        with run.by(run.decoupled):
            run.engine.save_checkpoint.__wrapped__(str(output / "decoupled" / tag), tag=tag)

    def committed(_: Any) -> None:  # which DeepSpeed waits for before the next update
        with run.by(run.decoupled):
            run.engine._commit_decoupled_checkpoint()
        os.sync()

    return {
        "ours": (lambda tag: run.save(output / "ours", tag), lambda _: run.engine.checkpoint_engine.wait()),
        "native": (lambda tag: run.save_native(output / "native", tag), lambda _: os.sync()),
        "decoupled": (decoupled, committed),
        "dcp": (lambda tag: save_dcp(run, output / "dcp" / tag), lambda _: None),
        "dcp async": (asynchronous, lambda future: future.result()),
    }


def _saved(way: Way, tag: str) -> tuple[float, float]:
    """Seconds until a save returns, and until it is on the disk, on all ranks."""
    begin, wait = way
    dist.barrier()
    start = time.perf_counter()
    handle = begin(tag)
    stood = time.perf_counter() - start
    wait(handle)
    dist.barrier()
    return stood, time.perf_counter() - start


def stall(run: Run, row: str, hidden: int, output: Path, repeats: int, pairs: int, steps: int) -> dict[str, Any]:
    """Time until a save returns, alternating with DeepSpeed's own; training speed with and without a save."""
    run.train(3)
    run.save(output / "ours", "warm")
    run.engine.checkpoint_engine.wait()
    ways = ways_to_save(run, output)
    for way in list(ways)[1:]:
        _saved(ways[way], "warm")
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for number in range(repeats):
        run.train(1)
        for way in (*list(ways)[number % len(ways) :], *list(ways)[: number % len(ways)]):
            times[way].append(_saved(ways[way], f"save-{number}"))
        if run.rank == 0:
            for way in list(ways)[1:]:
                shutil.rmtree(output / way)
        dist.barrier()
    ours, native = ([stood for stood, _ in times[way]] for way in ("ours", "native"))
    without, during = [], []
    for number in range(pairs):
        for saves in (False, True) if number % 2 else (True, False):  # what drifts on the machine falls on both alike
            begin = time.perf_counter()
            run.train(steps // 2)
            if saves:
                run.save(output / "ours", f"middle-{number}")
            run.train(steps - steps // 2)
            (during if saves else without).append(time.perf_counter() - begin)
            run.engine.checkpoint_engine.wait()
    if run.rank:
        return {}
    medians = statistics.median(ours), statistics.median(native)
    found: dict[str, Any] = {"row": row, "hidden": hidden, "ours_s": ours, "native_s": native, "medians_s": medians}
    found["ours_of_native"] = median_ratio(ours, native)
    found["ways"] = {
        way: {"stood": [stood for stood, _ in each], "durable": [durable for _, durable in each]}
        for way, each in times.items()
    }
    found["seconds_without"], found["seconds_with"] = without, during
    if during:
        found["speed_with_a_save"] = sum(without) / sum(during)
        found["speed_with_a_save_of_pairs"] = [a / b for a, b in zip(without, during, strict=True)]
    found["bytes_a_rank_copies"] = run.engine.checkpoint_engine.last_copied_bytes
    found["peak_host_bytes_of_rank_0"] = run.engine.checkpoint_engine.peak_host_bytes
    return found


def peak_of(work: Callable[[], object]) -> tuple[float, int]:
    """Seconds of some work, and by how many bytes the most that was resident meanwhile exceeds what was before."""
    gc.collect()
    resident: list[int] = []
    ended = threading.Event()
    page = os.sysconf("SC_PAGE_SIZE")

    def watch() -> None:
        while not ended.wait(0.002):
            resident.append(page * int(Path("/proc/self/statm").read_text().split()[1]))

    before = page * int(Path("/proc/self/statm").read_text().split()[1])
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    begin = time.perf_counter()
    work()
    dist.barrier()
    taken = time.perf_counter() - begin
    ended.set()
    watcher.join()
    return taken, max(resident, default=before) - before


def evict(directory: Path) -> bool:
    """Have files read from the disk again, as on a machine that has just started; whether that can be asked for."""
    dist.barrier()
    can = hasattr(os, "posix_fadvise")
    if can and dist.get_rank() == 0:
        for path in directory.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dist.barrier()
    return can


def loads(run: Run, row: str, hidden: int, output: Path, repeats: int, gap: int) -> dict[str, Any]:
    """Time and memory of loads, in turns; each gives the state that was saved."""
    import torch.distributed.checkpoint as dcp

    def state() -> dict[str, Any]:
        return {name: tensor.clone() for name, tensor in local_state(run).items()}

    run.train(3)
    run.save(output / "ours", "full")
    run.engine.checkpoint_engine.wait()
    of_base = state()
    run.train(gap)
    run.save(output / "ours", "diff")
    run.engine.checkpoint_engine.wait()
    run.save_native(output / "native", "diff")
    save_dcp(run, output / "dcp")
    dist.barrier()
    saved = state()

    def load_dcp() -> None:
        dcp.load(local_state(run), storage_reader=dcp.FileSystemReader(output / "dcp"))

    ways: dict[str, Callable[[], object]] = {
        "ours, full": lambda: run.engine.load_checkpoint(str(output / "ours"), tag="full"),
        "ours, differential": lambda: run.engine.load_checkpoint(str(output / "ours"), tag="diff"),
        "native": lambda: run.load_native(output / "native"),
        "dcp": load_dcp,
    }
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in ways}
    from_disk: dict[str, list[float]] = {name: [] for name in ways}
    # First with all in the kernel's cache, where the round before the first has brought it; then with nothing there.
    rounds = [(False, number) for number in range(-1, repeats)] + [(True, number) for number in range(repeats)]
    for cold, number in rounds:
        turn = number % len(ways)
        for name in (*list(ways)[turn:], *list(ways)[:turn]):
            if cold and not evict(output):
                continue
            taken = peak_of(ways[name])
            if cold:
                from_disk[name].append(taken[0])
            elif number >= 0:
                found[name].append(taken)
            now, expected = local_state(run), of_base if name == "ours, full" else saved
            assert now.keys() == expected.keys(), name
            for key, tensor in expected.items():
                assert torch.equal(now[key], tensor), f"{name}: {key} is not what was saved"
    rows: dict[str, Any] = {}
    for name, each in found.items():
        seconds, peaks = [one for one, _ in each], [float(peak) for _, peak in each]
        rows[name] = {
            **spread(seconds),
            "of_native": median_ratio(seconds, [one for one, _ in found["native"]]),
            "peak_bytes": statistics.median(peaks),
            "peaks": peaks,
        }
        if from_disk[name]:
            of_native = median_ratio(from_disk[name], from_disk["native"])
            rows[name]["from_disk"] = {**spread(from_disk[name]), "of_native": of_native}
    return {"row": row, "hidden": hidden, "state_bytes_of_a_rank": bytes_of(saved), "rows": rows}


def main() -> None:
    """One row."""
    parser = parser_with(__doc__)
    parser.add_argument("--row", choices=sorted(ROWS), required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--gap", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=10, help="saves of each engine whose times are taken")
    parser.add_argument("--pairs", type=int, default=4, help="blocks of --gap steps, with a save and without")
    parser.add_argument("--micro", type=int, default=2, help="samples a rank and step")
    parser.add_argument("--hidden", type=int, default=512, help="of the model, to see how times grow")
    parser.add_argument("--levels", type=int, nargs="*", default=[3, 19], help="of zstd, on DeepSpeed's own files")
    parser.add_argument("--directory", type=Path, default=Path("runs/bench-checkpoints"), help="of the checkpoints")
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps, arguments.gap, arguments.repeats, arguments.pairs, arguments.levels = 1, 1, 1, 0, [3]
        arguments.micro, arguments.hidden = 1, 256
    import deepspeed

    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("WORLD_SIZE", "1"))))
    ds_galore.enable()
    deepspeed.init_distributed("gloo" if not torch.accelerator.is_available() else None, verbose=False)
    output = arguments.directory / arguments.row
    if dist.get_rank() == 0:
        shutil.rmtree(output, ignore_errors=True)
    dist.barrier()
    run = Run(arguments.row, arguments.micro, arguments.hidden)
    if arguments.row.startswith("stall"):
        pairs = arguments.pairs if arguments.row == "stall" else 0
        found = stall(run, arguments.row, arguments.hidden, output, arguments.repeats, pairs, arguments.gap)
        run.decoupled.cleanup()
    elif arguments.row.startswith("load"):
        found = loads(run, arguments.row, arguments.hidden, output, arguments.repeats, arguments.gap)
    else:
        found = sizes(run, arguments.row, output, arguments.steps, arguments.gap, arguments.levels)
    if dist.get_rank() == 0:
        print(json.dumps(found, indent=1), flush=True)
        of_size = "" if arguments.hidden == MODEL["hidden_size"] else f"-{arguments.hidden}"
        write(f"checkpoints-{arguments.row}{of_size}", arguments, found)
    dist.barrier()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
