"""Saving in the background: consistent, one at a time, never silently failed; safe from who removes old checkpoints."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ds_galore.checkpoint.choosing import latest_or_unfinished
from ds_galore.checkpoint.codecs import CODECS
from ds_galore.checkpoint.reader import CheckpointReader
from ds_galore.checkpoint.siblings import kept_copy, newest_intact_sibling
from ds_galore.checkpoint.store import CheckpointStore
from tests import jobs
from tests.checkpoint.engines import ADAMW, BATCH, BF16, assert_same, contents, logical, make, save

ROOT = Path(__file__).resolve().parent.parent.parent
GALORE = jobs.galore(update_proj_gap=5)


def consistent(directory: str, optimizer: dict[str, Any], extra: dict[str, Any]) -> None:
    """The writer starts when three more steps have been taken; it writes the state from before them."""
    engine = make(optimizer, **extra)
    data = jobs.batches(9, BATCH)
    jobs.train(engine, data[:3])
    engine.save_checkpoint(directory, tag="base")
    jobs.train(engine, data[3:4])
    gate = threading.Event()
    engine.checkpoint_engine.wait()
    engine.checkpoint_engine.hook = lambda point: gate.wait() if point == "writing" else None
    before = logical(engine)
    engine.save_checkpoint(directory, tag="late")
    losses = jobs.train(engine, data[4:7])
    store = CheckpointStore(Path(directory))
    assert (store.latest(), store.tags()) == ("base", ["base"])
    gate.set()
    engine.checkpoint_engine.wait()
    assert store.latest() == "late"
    again = make(optimizer, **extra)
    again.load_checkpoint(directory)
    assert_same(before, logical(again))
    assert jobs.train(again, data[4:7]) == losses


@pytest.mark.parametrize(
    ("optimizer", "extra"),
    [
        (GALORE, {}),
        (GALORE, {"zero": {"offload_optimizer": {"device": "cpu"}}}),
        (GALORE, {"checkpoint": {"base_memory_gb": 0}}),
        (ADAMW, {"zero": {"stage": 2}, **BF16}),
    ],
)
def test_later_steps_do_not_leak_into_a_checkpoint_that_is_written_after_them(pool, tmp_path, optimizer, extra):
    pool.run(2, consistent, str(tmp_path), optimizer, extra)
    assert CheckpointStore(tmp_path).open("late").manifest.kind == "differential"


def one_at_a_time(directory: str) -> dict[str, float]:
    engine = make(GALORE)
    slow = threading.Event()

    def hook(point: str) -> None:
        if point == "writing":
            slow.wait(2.0)

    engine.checkpoint_engine.hook = hook
    seconds = {}
    for number, tag in enumerate(["same", "same", "same", "other"]):
        jobs.train(engine, jobs.batches(1, BATCH, seed=number))
        begin = time.monotonic()
        engine.save_checkpoint(directory, tag=tag, client_state={"number": number})
        seconds[f"{tag}{number}"] = time.monotonic() - begin
    begin = time.monotonic()
    again = make(GALORE)
    _, client = engine.load_checkpoint(directory)  # waits for the save in flight
    seconds["load"] = time.monotonic() - begin
    assert client["number"] == 3
    del again
    return seconds


@pytest.mark.timed
def test_one_save_is_in_flight_at_most_also_of_a_tag_that_is_its_own_base(pool, tmp_path):
    for seconds in pool.run(2, one_at_a_time, str(tmp_path)):
        assert seconds["same0"] < 1.7
        assert all(seconds[key] > 1.7 for key in ("same1", "same2", "other3"))
    store = CheckpointStore(tmp_path)
    assert store.latest() == "other"
    assert [store.open(tag).verify() for tag in store.tags()] == [[], []]
    assert store.open("same").manifest.metadata["step"] == 3
    assert [store.open(tag).manifest.kind for tag in ("same", "other")] == ["differential", "differential"]
    named = {r.name for files in store.open("same").manifest.files for r in files}
    assert {path.name for path in (tmp_path / "same").glob("*.safetensors")} == named
    assert not list((tmp_path / "same").glob(".*"))


def failing(directory: str, where: str, call: str) -> tuple[str, str]:
    """A save that fails in the background on one rank; what the next call raises; then all is well again."""
    import torch.distributed as dist

    engine = make(GALORE)
    jobs.train(engine, jobs.batches(2, BATCH))
    save(engine, directory, "good")
    jobs.train(engine, jobs.batches(1, BATCH, seed=2))
    rank, point = {"write": (1, "writing"), "tell": (2, "telling"), "commit": (0, "committing")}[where]

    def hook(passed: str) -> None:
        if passed == point and dist.get_rank() == rank:
            raise OSError(28, "No space left on device")

    engine.checkpoint_engine.hook = hook
    engine.save_checkpoint(directory, tag="bad")
    jobs.train(engine, jobs.batches(1, BATCH, seed=3))
    told = "nothing"
    try:
        if call == "save":
            engine.save_checkpoint(directory, tag="next")
        elif call == "load":
            engine.load_checkpoint(directory, tag="good")
        else:
            engine.checkpoint_engine.wait()
    except Exception as error:  # noqa: BLE001 - reported
        told = f"{type(error).__name__}: {error}"
    store = CheckpointStore(Path(directory))
    assert (store.latest(), store.tags()) == ("good", ["good"])
    dist.barrier()
    engine.checkpoint_engine.hook = lambda point: None
    save(engine, directory, "bad")  # the same tag again
    assert (store.latest(), store.tags(), store.open("bad").verify()) == ("bad", ["good", "bad"], [])
    return told, store.open("bad").manifest.kind


@pytest.mark.parametrize("call", ["save", "load", "wait"])
@pytest.mark.parametrize(("where", "rank"), [("write", 1), ("tell", 2), ("commit", 0)])
def test_a_writer_that_fails_raises_on_all_ranks_at_the_next_call(pool, tmp_path, where, rank, call):
    outcomes = pool.run(3, failing, str(tmp_path), where, call, timeout=90)
    for number, (told, kind) in enumerate(outcomes):
        if number == rank:
            assert told == "OSError: [Errno 28] No space left on device"
        else:
            assert told.startswith(f"PeerError: rank {rank} failed, and no rank can go on: OSError"), told
        assert kind == "differential"


def synchronous(directory: str) -> bool:
    engine = make(GALORE, checkpoint={"async": False})
    jobs.train(engine, jobs.batches(1, BATCH))
    engine.checkpoint_engine.hook = lambda point: time.sleep(0.3) if point == "writing" else None
    engine.save_checkpoint(directory, tag="a")
    return CheckpointStore(Path(directory)).latest() == "a"


def test_a_synchronous_save_is_committed_when_it_returns(pool, tmp_path):
    assert pool.run(2, synchronous, str(tmp_path)) == [True, True]


@pytest.mark.parametrize(
    "fate", ["die", *(pytest.param(each, marks=pytest.mark.crashtest) for each in ("leave", "raise"))]
)
def test_an_interpreter_that_ends_finishes_the_save_in_flight_or_gives_up(tmp_path, fate):
    command = [sys.executable, "-m", "tests.checkpoint.exiting", str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2", str(tmp_path / "store"), fate],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert all("returned" in output for output in outputs), outputs
    assert ranks[0].returncode == 0
    store = CheckpointStore(tmp_path / "run")
    if fate == "leave":
        assert ranks[1].returncode == 0
        assert (store.latest(), store.newest_intact()) == ("second", "second")
    else:
        assert ranks[1].returncode == (-9 if fate == "die" else 0)
        assert (store.latest(), store.tags(), store.newest_intact()) == ("first", ["first"], "first")


def until_full(directory: str) -> tuple[list[str], str, str]:
    """Save until the disk is full, make room, and save once more."""
    import torch.distributed as dist

    engine = make(GALORE, "full")
    saved: list[str] = []
    told = "nothing"
    for step in range(40):
        jobs.train(engine, jobs.batches(1, BATCH, seed=step))
        try:
            engine.save_checkpoint(directory, tag=f"step-{step}")
            engine.checkpoint_engine.wait()
        except Exception as error:  # noqa: BLE001 - reported
            told = f"{type(error).__name__}: {error}"
            break
        saved.append(f"step-{step}")
    newest = str(CheckpointStore(Path(directory)).newest_intact())
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(Path(directory, saved[0]))
        shutil.rmtree(Path(directory, saved[1]))
    dist.barrier()
    save(engine, directory, "after")
    return saved, told, newest


def test_a_full_disk_fails_the_save_on_all_ranks_and_nothing_is_lost(pool, tmp_path):
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2500k", "tmpfs", str(path)]
    mounted = subprocess.run(mount, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {mounted.stderr.decode().strip()}")
    try:
        outcomes = pool.run(2, until_full, str(path), timeout=120)
        for saved, told, newest in outcomes:
            assert len(saved) >= 3
            assert "No space left on device" in told, told
            assert newest == saved[-1]
        store = CheckpointStore(path)
        assert (store.latest(), store.newest_intact()) == ("after", "after")
    finally:
        subprocess.run(["umount", str(path)], check=True)


# ---------------------------------------------------------------------- save directories that somebody else rotates


def rotated(directory: str, like: str, limit: int, saves: int) -> list[str]:
    """Each checkpoint in its own directory, of which at most ``limit`` stay, in the manner of ``like``."""
    import torch.distributed as dist

    engine = make(GALORE)
    root, problems = Path(directory), []
    kinds = []
    for number in range(saves):
        jobs.train(engine, jobs.batches(1, BATCH, seed=number))
        own = root / (f"checkpoint-{number}" if like == "trainer" else f"checkpoints/checkpoint_{number}")
        before = sorted(own.parent.glob("checkpoint[-_]*"), key=lambda path: int(path.name[11:]))
        if like == "accelerate" and dist.get_rank() == 0:
            for each in before[: max(len(before) + 1 - limit, 0)]:
                shutil.rmtree(each)
        dist.barrier()
        gate = threading.Event()
        if number:
            engine.checkpoint_engine.wait()
        engine.checkpoint_engine.hook = lambda point, gate=gate: gate.wait() if point == "writing" else None
        engine.save_checkpoint(str(own), tag="global_step")
        dist.barrier()
        if dist.get_rank() == 0:
            (own / "trainer_state.json").write_text(str(number))
            if like == "trainer":
                for each in before[: max(len(before) + 1 - limit, 0)]:
                    shutil.rmtree(each)
            # A crash at this moment: the new one is not durable, and whatever had to go is gone.
            found = newest_intact_sibling(own)
            assert latest_or_unfinished(CheckpointStore(own)) == "global_step", "a load tells that it is unfinished"
            if number and (found is None or found.parent.name != before[-1].name):
                problems.append(f"save {number}: {found} is the newest durable checkpoint")
        dist.barrier()
        gate.set()
        engine.checkpoint_engine.wait()
        kinds.append(CheckpointReader(own / "global_step").manifest.kind)
    if problems:
        raise AssertionError(problems)
    return kinds


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("like", ["trainer", "accelerate"])
def test_a_rotation_never_takes_the_last_durable_checkpoint_nor_a_base(pool, tmp_path, like, limit):
    kinds = pool.run(2, rotated, str(tmp_path), like, limit, 6, timeout=120)[0]
    assert kinds == ["full", *["differential"] * 3, "full", "differential"]
    parent = tmp_path if like == "trainer" else tmp_path / "checkpoints"
    left = sorted(parent.glob("checkpoint[-_]*"))
    assert len(left) == limit
    for each in left:
        assert CheckpointReader(each / "global_step").verify() == []
    kept = kept_copy(left[-1])
    assert kept.exists()
    assert [path.name for path in kept.parent.iterdir()] == [left[-1].name]
    assert kept.parent.parent == tmp_path, "accelerate would take a directory among its own for a checkpoint"
    inodes = [{path.stat().st_ino for path in each.glob("global_step/*.safetensors")} for each in (left[-1], kept)]
    assert inodes[0] == inodes[1], "the kept copy costs nothing while the checkpoint is there"


def unfinished(directory: str) -> str:
    engine = make(GALORE)
    try:
        engine.load_checkpoint(directory)
    except Exception as error:  # noqa: BLE001 - reported
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_trainers_unfinished_directory_is_refused_and_the_newest_intact_one_named(pool, tmp_path):
    pool.run(2, rotated, str(tmp_path), "trainer", 1, 2, timeout=120)
    last = tmp_path / "checkpoint-1"
    (last / "latest").unlink()
    (last / "global_step" / "manifest.json").unlink()
    kept = kept_copy(last)
    for told in pool.run(2, unfinished, str(last)):
        assert told.startswith("NotCommittedError: "), told
        assert f"the newest intact checkpoint is {kept / 'global_step'}" in told
    shutil.rmtree(kept)
    assert "no intact checkpoint is beside it" in pool.run(2, unfinished, str(last))[0]


# ---------------------------------------------------------------------- bases, retention, choices


def several(directory: str, checkpoint: dict[str, Any], saves: int) -> int:
    engine = make(GALORE, checkpoint=checkpoint)
    for number in range(saves):
        jobs.train(engine, jobs.batches(1, BATCH, seed=number))
        engine.save_checkpoint(directory, tag=f"step-{number + 1}")
    engine.checkpoint_engine.wait()
    return int(engine.checkpoint_engine.peak_host_bytes)


def test_a_base_in_memory_and_one_on_disk_give_the_same_checkpoint(pool, tmp_path):
    for name, budget in (("memory", 4.0), ("disk", 0.0), ("some", 3e-5)):
        for mode in ("differential", "incremental"):
            settings = {"base_memory_gb": budget, "full_every": 4}
            pool.run(2, several, str(tmp_path / mode / name), {**settings, "mode": mode}, 6)
    for mode in ("differential", "incremental"):
        stores = [CheckpointStore(tmp_path / mode / name) for name in ("memory", "disk", "some")]
        for tag in stores[0].tags():
            found = [contents(store.path(tag)) for store in stores]
            assert found[0] == found[1] == found[2]
            assert all(store.open(tag).verify() == [] for store in stores)
            masters = [
                {k: (e.codec, e.digest) for k, e in store.open(tag).held_by(0).items() if k[0].endswith("/fp32")}
                for store in stores
            ]
            assert masters[0] == masters[1] == masters[2]


def test_keep_last_and_keep_every(pool, tmp_path):
    pool.run(1, several, str(tmp_path), {"keep_last": 2, "keep_every": 3, "full_every": 4}, 8)
    # 5 is the last full one; 3 and 6 are multiples of 3; 7 and 8 are the newest.
    assert CheckpointStore(tmp_path).tags() == [f"step-{number}" for number in (3, 5, 6, 7, 8)]


def resumed(directory: str) -> None:
    engine = make(GALORE)
    engine.load_checkpoint(directory)
    jobs.train(engine, jobs.batches(1, BATCH, seed=77))
    save(engine, directory, "after")
    jobs.train(engine, jobs.batches(1, BATCH, seed=78))
    save(engine, directory, "more")


def test_a_resumed_run_goes_on_with_differences_to_the_same_base(pool, tmp_path):
    pool.run(2, several, str(tmp_path), {"full_every": 4}, 2)
    pool.run(2, resumed, str(tmp_path))
    store = CheckpointStore(tmp_path)
    manifests = [store.open(tag).manifest for tag in ("step-2", "after", "more")]
    assert [(each.kind, each.base) for each in manifests] == [("differential", "step-1")] * 3
    files = {(tmp_path / tag / "rank-00000-of-00002.full.safetensors").stat().st_ino for tag in store.tags()}
    assert len(files) == 1
    pool.run(3, resumed, str(tmp_path))  # another number of ranks: the next one is full
    assert store.open("after").manifest.kind == "full"
    assert store.open("more").manifest.kind == "differential"
    assert all(store.open(tag).verify() == [] for tag in store.tags())


def test_links_can_be_copies_by_choice(pool, tmp_path):
    pool.run(1, several, str(tmp_path), {"links": "copy"}, 2)
    files = list(tmp_path.glob("*/*.full.safetensors"))
    assert len({path.stat().st_ino for path in files}) == len(files) == 2


def lossy(directory: str, dtype: str) -> tuple[list[float], list[float]]:
    data = jobs.batches(30, BATCH)
    engine = make(GALORE, checkpoint={"state_dtype": dtype})
    jobs.train(engine, data[:10])
    save(engine, directory, "a")
    jobs.train(engine, data[10:12])
    save(engine, directory, "b")
    saved = logical(engine)
    losses = jobs.train(engine, data[12:])
    again = make(GALORE, checkpoint={"state_dtype": dtype})
    again.load_checkpoint(directory)
    found = logical(again)
    exact = {key for key in saved if not key.endswith(("exp_avg", "exp_avg_sq"))}
    assert_same({key: saved[key] for key in exact}, {key: found[key] for key in exact})
    changed = {key for key in saved.keys() - exact if not saved[key].equal(found[key])}
    assert bool(changed) == (dtype != "exact")
    return losses, jobs.train(again, data[12:])


def test_moments_in_fewer_bits_are_smaller_leave_weights_exact_and_train_on(pool, tmp_path):
    sizes = {}
    for dtype in ("exact", "bf16", "int8"):
        whole, again = pool.run(2, lossy, str(tmp_path / dtype), dtype)[0]
        reader = CheckpointReader(tmp_path / dtype / "b")
        assert reader.verify() == []
        file = reader._file(0, 0)
        moments = [i for i, e in enumerate(file.entries) if e.name.endswith(("exp_avg", "exp_avg_sq"))]
        entries = [file.entries[index] for index in moments]
        sizes[dtype] = sum(file.encoded(index).nbytes for index in moments)
        assert {entry.dtype for entry in entries} == {"BF16" if dtype == "bf16" else "F32"}
        assert ({entry.codec for entry in entries} == {"int8"}) == (dtype == "int8")
        difference = max(abs(a - b) for a, b in zip(whole, again, strict=True))
        assert difference == 0 if dtype == "exact" else 0 < difference < 0.1
    assert sizes["exact"] > sizes["bf16"] > sizes["int8"]
    assert "int8" in CODECS
