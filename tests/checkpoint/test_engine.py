"""Our checkpoints through DeepSpeed's own calls, against what DeepSpeed's native engine saves of the same state."""

from __future__ import annotations

import hashlib
import logging
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_galore.checkpoint.codecs import words
from ds_galore.checkpoint.errors import DamageError
from ds_galore.checkpoint.reader import CheckpointReader
from ds_galore.checkpoint.store import CheckpointStore
from tests import jobs
from tests.checkpoint.engines import ADAMW, BATCH, BF16, FP16, assert_same, blanked, logical, make, masters, save
from tests.checkpoint.test_tree import same


def resume(directory: str, optimizer: dict[str, Any], mode: str, extra: dict[str, Any]) -> None:
    """Save after 4, 6, 8 and 10 steps, go on to 14; a new engine loads each and must go on in the very same way."""
    data = jobs.batches(14, BATCH)
    whole = make(optimizer, mode, **extra)
    losses, states = [], {}
    for begin, end in [(0, 4), (4, 6), (6, 8), (8, 10)]:
        losses += jobs.train(whole, data[begin:end])
        whole.save_checkpoint(directory, client_state={"consumed": (end, "samples")})
        states[end] = logical(whole)
    losses += jobs.train(whole, data[10:])
    whole.checkpoint_engine.wait()
    for step in (4, 6, 10):
        again = make(optimizer, mode, **extra)
        path, client = again.load_checkpoint(directory, tag=None if step == 10 else f"global_step{step}")
        assert path is not None
        assert client["consumed"] == (step, "samples")
        assert again.global_steps == step
        assert_same(states[step], logical(again))
        assert jobs.train(again, data[step:]) == losses[step:]
        assert_same(logical(whole), logical(again))


@pytest.mark.parametrize("mode", ["full", "differential", "incremental"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_run_goes_on_bit_for_bit_from_any_of_its_checkpoints(pool, tmp_path, mode, world_size):
    optimizer = jobs.galore(update_proj_gap=5, projector_storage="sharded" if world_size == 3 else "replicated")
    pool.run(world_size, resume, str(tmp_path), optimizer, mode, {"zero": {"sub_group_size": 3000}})
    store = CheckpointStore(tmp_path)
    assert store.latest() == "global_step10"
    kinds = [store.open(tag).manifest.kind for tag in store.tags()]
    assert kinds == ["full", mode, mode, mode]
    for tag in store.tags():
        assert store.open(tag).verify() == []


ACCUMULATE_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}


@pytest.mark.parametrize(
    ("optimizer", "extra"),
    [
        (ADAMW, {}),
        (ADAMW, BF16),
        (jobs.galore(update_proj_gap=5, proj_type="std", projector_dtype="bf16"), BF16),
        (jobs.galore(update_proj_gap=5), {"special": True}),
        (jobs.galore(update_proj_gap=5), {"zero": {"offload_optimizer": {"device": "cpu"}}}),
        (ADAMW, {"zero": {"stage": 0}}),
        (ADAMW, {"zero": {"stage": 1}}),
        (ADAMW, {"zero": {"stage": 2}, "special": True}),
        (ADAMW, {"zero": {"stage": 2, "round_robin_gradients": True}}),
        (ADAMW, {"zero": {"stage": 1}, **BF16, **ACCUMULATE_FP32}),
        (ADAMW, {"zero": {"stage": 2}, **BF16}),
        ({"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}, {"zero": {"stage": 2}}),
    ],
)
def test_other_optimizers_stages_and_precisions_go_on_bit_for_bit_too(pool, tmp_path, optimizer, extra):
    pool.run(2, resume, str(tmp_path), optimizer, "differential", extra)


def against_native(directory: str, optimizer: dict[str, Any], extra: dict[str, Any]) -> None:
    """The state dicts that our engine gives back are those that DeepSpeed's native engine saved, tensor by tensor."""
    import torch.distributed as dist
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

    engine = make(optimizer, "differential", **extra)
    data = jobs.batches(6, BATCH)
    jobs.train(engine, data[:3])
    engine.save_checkpoint(f"{directory}/ours", tag="a")
    jobs.train(engine, data[3:])
    engine.save_checkpoint(f"{directory}/ours", tag="b")
    engine.checkpoint_engine.wait()
    ours, save = engine.checkpoint_engine, engine.save_checkpoint
    engine.checkpoint_engine, engine.save_checkpoint = TorchCheckpointEngine(engine._config), save.__wrapped__
    engine.save_checkpoint(f"{directory}/native", tag="b")
    dist.barrier()
    again = make(optimizer, "differential", **extra)
    again.load_checkpoint(f"{directory}/native", tag="b")  # native ones still load
    assert_same(logical(engine), logical(again))
    files = sorted(Path(directory, "native", "b").glob("*_states.pt"))
    stage = engine.zero_optimization_stage()
    assert len(files) == (2 * dist.get_world_size() if stage == 3 else 1 + dist.get_world_size())
    for path in files:
        native = torch.load(path, map_location="cpu", weights_only=False)
        mine = ours.load(f"{directory}/ours/b/{path.name}")
        if "optimizer_state_dict" in native:
            if f"rank_{dist.get_rank()}_mp" not in path.name:
                continue  # another rank's, which knows its padding and compares it
            for state in (native, mine):
                blank_padding(engine, state)
        same(mine, native, path.name)


def blank_padding(engine: Any, state: dict[str, Any]) -> None:
    """Zero the padding of this rank's flat tensors in a native or one of our state dicts."""
    outer = state["optimizer_state_dict"]
    stage3 = "fp32_flat_groups" in outer
    flats = outer["fp32_flat_groups" if stage3 else "single_partition_of_fp32_groups"]
    states = outer["optimizer_state_dict" if stage3 else "base_optimizer_state"]["state"]
    for index, flat in enumerate(masters(engine)):
        if flats[index].numel() == flat.tensor.numel():
            flats[index] = blanked(flat, flats[index])
        each = states.get(index, {})
        for key, value in each.items():
            if isinstance(value, torch.Tensor) and value.numel() == flat.tensor.numel():
                each[key] = blanked(flat, value)


GALORE = jobs.galore(update_proj_gap=100)


@pytest.mark.parametrize(
    ("optimizer", "extra"),
    [
        (ADAMW, {}),
        (ADAMW, BF16),
        (GALORE, {}),
        (GALORE, BF16),
        (GALORE, {"special": True}),
        (ADAMW, {"zero": {"stage": 1}}),
        (ADAMW, {"zero": {"stage": 2}, "special": True}),
        (ADAMW, {"zero": {"stage": 2}, **BF16}),
    ],
)
def test_every_tensor_is_what_deepspeeds_native_engine_saves(pool, tmp_path, optimizer, extra):
    pool.run(2, against_native, str(tmp_path), optimizer, extra)
    reader = CheckpointReader(tmp_path / "ours" / "b")
    weight = reader.tensors["model.layers.1.self_attn.q_proj.weight/fp32"]
    assert weight.shape == (32, 32)
    assert all(files[-1].bytes < files[-2].bytes for files in reader.manifest.files)


def test_fp16_is_saved_as_deepspeeds_native_engine_saves_it_and_goes_on_bit_for_bit(pool, tmp_path):
    for number, (optimizer, stage) in enumerate([(GALORE, 3), (ADAMW, 3), (ADAMW, 2), (ADAMW, 1)]):
        extra = {"zero": {"stage": stage}, **FP16}
        pool.run(2, against_native, str(tmp_path / f"native{number}"), optimizer, extra)
        pool.run(2, resume, str(tmp_path / f"resume{number}"), optimizer, "differential", extra)
    pool.close()  # the workers' accelerator says that it supports fp16 now


def test_what_does_not_change_is_stored_once_and_masters_stand_for_their_weights(pool, tmp_path):
    pool.run(2, against_native, str(tmp_path), ADAMW, {"zero": {"stage": 2}, "special": True, **BF16})
    full, diff = CheckpointReader(tmp_path / "ours" / "a"), CheckpointReader(tmp_path / "ours" / "b")
    names = set(full.tensors)
    frozen = {name for name in names if "layers.0.self_attn" in name}
    assert {name.rpartition("/")[2] for name in frozen} == {"weight"}
    assert not any(name.endswith("/weight") for name in names - frozen), "bf16 weights follow from their masters"
    assert not any("lm_head" in name for name in names), "tied"
    codecs = {entry.name: entry.codec for entry in diff.held_by(0).values()}
    assert {codecs[name] for name in frozen} == {"same"}
    assert {codecs[name] for name in names if "counts" in name or "mask" in name} == {"same"}


def failing(directory: str) -> str:
    import torch.distributed as dist

    engine = make(jobs.galore(), "differential")
    jobs.train(engine, jobs.batches(1, BATCH))
    save(engine, directory, "good")  # also its writer has come to its end
    if dist.get_rank() == 1:
        original = CheckpointStore.write

        def broken(*_: Any, **__: Any) -> Any:
            raise OSError(28, "No space left on device")

        CheckpointStore.write = broken
    try:
        engine.save_checkpoint(directory, tag="bad")
        engine.checkpoint_engine.wait()
    except Exception as error:  # noqa: BLE001 - reported
        return f"{type(error).__name__}: {error}"
    finally:
        if dist.get_rank() == 1:
            CheckpointStore.write = original
    return "nothing"


def test_a_rank_that_cannot_write_fails_the_save_on_all_and_leaves_the_last_checkpoint(pool, tmp_path):
    outcomes = pool.run(3, failing, str(tmp_path), timeout=60)
    assert outcomes[1] == "OSError: [Errno 28] No space left on device"
    for rank in (0, 2):
        assert outcomes[rank].startswith("PeerError: rank 1 failed, and no rank can go on: OSError")
    store = CheckpointStore(tmp_path)
    assert (store.latest(), store.tags(), store.newest_intact()) == ("good", ["good"], "good")


def damaged(directory: str) -> str:
    engine = make(jobs.galore(), "differential")
    try:
        engine.load_checkpoint(directory, tag="broken")
    except DamageError as error:
        return str(error)
    return "nothing"


def saved(directory: str) -> None:
    engine = make(jobs.galore(), "differential")
    jobs.train(engine, jobs.batches(1, BATCH))
    engine.save_checkpoint(directory, tag="good")
    engine.checkpoint_engine.wait()


def strange_client_state(directory: str) -> str:
    import torch.distributed as dist

    engine = make(jobs.galore(), "differential")
    jobs.train(engine, jobs.batches(1, BATCH))
    try:
        engine.save_checkpoint(directory, tag="bad", client_state={"it": object()} if dist.get_rank() == 1 else {})
    except Exception as error:  # noqa: BLE001 - reported
        return str(error)
    return "nothing"


def test_a_client_state_that_one_rank_cannot_save_fails_the_save_on_all(pool, tmp_path):
    outcomes = pool.run(2, strange_client_state, str(tmp_path), timeout=60)
    assert "states.pt/it: an object of class builtins.object cannot be saved" in outcomes[1]
    assert outcomes[0].startswith("rank 1 failed, and no rank can go on: ConfigError")
    assert CheckpointStore(tmp_path).latest() is None


def rotating(directory: str) -> None:
    section = {"ds_galore": {"checkpoint": {"full_every": 4, "keep_last": 1}}}
    engine = jobs.start(jobs.tiny_llama(), jobs.config(jobs.galore(), micro=2, **section))
    for step, data in enumerate(jobs.batches(6, 4)):
        jobs.train(engine, data[None])
        engine.save_checkpoint(directory, tag=f"save-{step}")
    engine.checkpoint_engine.wait()


def test_retention_keeps_the_base_while_differences_are_made_against_it(pool, tmp_path):
    pool.run(2, rotating, str(tmp_path))
    store = CheckpointStore(tmp_path)
    assert store.tags() == ["save-4", "save-5"]  # the second full one, and the newest
    assert [store.open(tag).manifest.kind for tag in store.tags()] == ["full", "differential"]
    assert all(store.open(tag).verify() == [] for tag in store.tags())


def save_thrice(directory: str) -> None:
    """Save, save again, and after DeepSpeed's own script was put in the place of ours."""
    import torch.distributed as dist

    engine, path = make(ADAMW, "full"), Path(directory) / "zero_to_fp32.py"
    text = b""
    for tag in "abc":
        first = dist.get_rank() == 0
        if tag == "c" and first:
            path.write_text("another\n")
        before = path.stat().st_ino if tag == "b" and first else 0
        save(engine, directory, tag)
        if first:
            text = text or path.read_bytes()
            assert path.read_bytes() == text
            assert tag != "b" or path.stat().st_ino == before


def save_by_numpy(directory: str) -> list[str]:
    """The same run twice, in the second the codecs' loops are not compiled, which is told; each loads the other's."""
    told = Told()
    logging.getLogger("ds_galore.checkpoint.engine").addHandler(told)
    engines, data, there = [], jobs.batches(4, BATCH), words.compiled
    try:
        for name, words.compiled in (("compiled", there), ("numpy", None)):
            engine = make(jobs.galore(update_proj_gap=50), "differential")
            for steps in (data[:2], data[2:]):
                jobs.train(engine, steps)
                engine.save_checkpoint(f"{directory}/{name}")
                engine.checkpoint_engine.wait()
            engines.append(engine)
        whole = logical(engines[0])
        for engine, name, words.compiled in ((engines[1], "compiled", None), (engines[0], "numpy", there)):
            for tag in ("global_step2", "global_step4"):
                engine.load_checkpoint(f"{directory}/{name}", tag=tag)
            assert_same(whole, logical(engine))
    finally:
        words.compiled = there
        logging.getLogger("ds_galore.checkpoint.engine").removeHandler(told)
    return told.messages


class Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def test_without_a_compiler_checkpoints_are_the_same_and_it_is_said(pool, tmp_path):
    told = pool.run(2, save_by_numpy, str(tmp_path))
    assert ["not compiled when ds_galore was installed" in text for text in told[0]] == [True]
    assert told[1] == []
    of = {}
    for name in ("compiled", "numpy"):
        files = sorted((tmp_path / name).glob("*/*.safetensors"))
        of[name] = {str(path.relative_to(tmp_path / name)): path.read_bytes() for path in files}
    assert len(of["numpy"]) >= 4
    assert of["compiled"] == of["numpy"]


def test_the_script_that_merges_is_written_where_it_is_not_yet(pool, tmp_path):
    pool.run(2, save_thrice, str(tmp_path))
    assert b"ds_galore" in (tmp_path / "zero_to_fp32.py").read_bytes()


def test_a_damaged_state_file_is_not_loaded(pool, tmp_path):
    pool.run(1, saved, str(tmp_path))
    shutil.copytree(tmp_path / "good", tmp_path / "broken")
    path = tmp_path / "broken" / "zero_pp_rank_0_mp_rank_00_model_states.json"
    path.write_text(path.read_text().replace('"global_steps": 1', '"global_steps": 2'))
    assert "is not what was written" in pool.run(1, damaged, str(tmp_path))[0]


def load_broken(directory: str) -> str:
    engine = make(jobs.galore(), "differential")
    try:
        engine.load_checkpoint(directory, tag="good")
    except Exception as error:  # noqa: BLE001 - reported
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_damage_that_one_rank_meets_fails_the_load_on_all_without_a_hang(pool, tmp_path):
    pool.run(2, saved, str(tmp_path))
    path = next((tmp_path / "good").glob("rank-00001-*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    outcomes = pool.run(2, load_broken, str(tmp_path), timeout=60)
    assert outcomes[1].startswith("DamageError: "), outcomes
    assert path.name in outcomes[1]
    assert outcomes[0].startswith("PeerError: rank 1 failed") or outcomes[0].startswith("DamageError: ")


# ---------------------------------------------------------------------- the whole job is killed

RUNS: dict[str, tuple[dict[str, Any], int]] = {
    "adamw-1": (ADAMW, 1),
    "adamw-2": (ADAMW, 2),
    "adamw-3": (ADAMW, 3),
    "galore-3": (jobs.galore(update_proj_gap=15), 3),  # refreshes on both sides of step 20
}


def digest(engine: Any) -> str:
    """Of all weights, moments and buffers of this rank, without padding."""
    found = hashlib.sha256()
    for key, value in sorted(logical(engine).items()):
        found.update(key.encode())
        data = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if hasattr(value, "numpy") else None
        found.update(repr(value).encode() if data is None else data)
    return found.hexdigest()


def in_one_go(name: str) -> tuple[list[float], str]:
    optimizer, stage = RUNS[name]
    engine = make(optimizer, zero={"stage": stage})
    return jobs.train(engine, jobs.batches(40, BATCH)), digest(engine)


def first_half(directory: str, name: str) -> list[float]:
    """20 steps, saved; five more, and a save that will be in flight when the job is killed."""
    optimizer, stage = RUNS[name]
    engine = make(optimizer, zero={"stage": stage})
    losses = jobs.train(engine, jobs.batches(40, BATCH)[:15])
    save(engine, directory, "step-15")
    losses += jobs.train(engine, jobs.batches(40, BATCH)[15:20])
    save(engine, directory, "step-20")
    jobs.train(engine, jobs.batches(40, BATCH)[20:25])
    engine.checkpoint_engine.hook = lambda point: time.sleep(300) if point == "encoded" else None
    engine.save_checkpoint(directory, tag="step-25")
    return losses


def second_half(directory: str, name: str) -> tuple[list[float], str]:
    optimizer, stage = RUNS[name]
    engine = make(optimizer, zero={"stage": stage})
    engine.load_checkpoint(directory)
    assert engine.global_steps == 20
    return jobs.train(engine, jobs.batches(40, BATCH)[20:]), digest(engine)


@pytest.mark.crashtest
def test_after_sigkill_of_the_whole_job_forty_steps_are_twenty_and_twenty(pool, tmp_path):
    expected = {name: pool.run(2, in_one_go, name) for name in RUNS}
    begun = {name: pool.run(2, first_half, str(tmp_path / name), name) for name in RUNS}
    pool.close()  # SIGKILL
    for name in RUNS:
        assert (tmp_path / name / "step-25").is_dir()
        for rank, (losses, state) in enumerate(pool.run(2, second_half, str(tmp_path / name), name)):
            whole, final = expected[name][rank]
            assert begun[name][rank] + losses == whole, name
            assert state == final, name
