"""Our checkpoints through DeepSpeed's own calls, against what DeepSpeed's native engine saves of the same state."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_galore.checkpoint.errors import DamageError
from ds_galore.checkpoint.reader import CheckpointReader
from ds_galore.checkpoint.store import CheckpointStore
from ds_galore.zero.binding import bind_zero3
from tests import jobs
from tests.checkpoint.test_tree import same
from tests.optim.test_engine import compare, snapshot

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
DATA = 12


def make(optimizer: dict[str, Any], mode: str | None, **extra: Any) -> Any:
    import torch.distributed as dist

    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 1e-2}}
    section = {"ds_galore": {"checkpoint": {"mode": mode, "full_every": 4}}} if mode else {}
    micro = DATA // dist.get_world_size()
    return jobs.start(jobs.tiny_llama(), jobs.config(optimizer, micro=micro, scheduler=schedule, **section, **extra))


def resume(directory: str, optimizer: dict[str, Any], mode: str, extra: dict[str, Any]) -> None:
    """Save after 4, 6, 8 and 10 steps, go on to 14; a new engine loads each and must go on in the very same way."""
    data = jobs.batches(14, DATA)
    whole = make(optimizer, mode, **extra)
    losses = []
    for begin, end in [(0, 4), (4, 6), (6, 8), (8, 10)]:
        losses += jobs.train(whole, data[begin:end])
        whole.save_checkpoint(directory, client_state={"consumed": (end, "samples")})
    losses += jobs.train(whole, data[10:])
    for step in (4, 6, 10):
        again = make(optimizer, mode, **extra)
        path, client = again.load_checkpoint(directory, tag=None if step == 10 else f"global_step{step}")
        assert path is not None
        assert client["consumed"] == (step, "samples")
        assert again.global_steps == step
        assert jobs.train(again, data[step:]) == losses[step:]
        compare(logical(whole), logical(again))


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


@pytest.mark.parametrize(
    ("optimizer", "extra"),
    [
        (ADAMW, {}),
        (ADAMW, {"bf16": {"enabled": True}}),
        (jobs.galore(update_proj_gap=5, proj_type="std", projector_dtype="bf16"), {"bf16": {"enabled": True}}),
    ],
)
def test_other_optimizers_and_precisions_go_on_bit_for_bit_too(pool, tmp_path, optimizer, extra):
    pool.run(2, resume, str(tmp_path), optimizer, "differential", extra)


def pieces(engine: Any) -> list[tuple[int, int, int]]:
    """The elements of parameters in the flat tensors: (sub-group, begin, end); what is between them is padding.

    Stage 3 leaves the padding of its partitions uninitialised, and never reads it.
    """
    zero = engine.optimizer
    found = []
    for index, flat in enumerate(zero.fp32_partitioned_groups_flat):
        binding = bind_zero3(flat, zero.fp16_groups[index])
        for placement in binding.placements:
            start, stop = placement.ranges[binding.group.rank]
            found.append((index, placement.offset, placement.offset + stop - start))
    return found


def blanked(engine: Any, flat: torch.Tensor, index: int) -> torch.Tensor:
    out = torch.zeros_like(flat)
    for group, begin, end in pieces(engine):
        if group == index:
            out[begin:end] = flat[begin:end]
    return out


def logical(engine: Any) -> dict[str, Any]:
    """Weights and state of an engine without padding."""
    found = snapshot(engine)
    found["weights"] = [blanked(engine, flat, index) for index, flat in enumerate(found["weights"])]
    for index, state in enumerate(found["state"]):
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.numel() == found["weights"][index].numel():
                state[key] = blanked(engine, value, index)
    return found


def against_native(directory: str, optimizer: dict[str, Any], extra: dict[str, Any]) -> None:
    """The state dicts that our engine gives back are those that DeepSpeed's native engine saved, tensor by tensor."""
    import torch.distributed as dist
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

    engine = make(optimizer, "differential", **extra)
    data = jobs.batches(6, DATA)
    jobs.train(engine, data[:3])
    engine.save_checkpoint(f"{directory}/ours", tag="a")
    jobs.train(engine, data[3:])
    engine.save_checkpoint(f"{directory}/ours", tag="b")
    ours, save = engine.checkpoint_engine, engine.save_checkpoint
    engine.checkpoint_engine, engine.save_checkpoint = TorchCheckpointEngine(None), save.__wrapped__
    engine.save_checkpoint(f"{directory}/native", tag="b")
    dist.barrier()
    again = make(optimizer, "differential", **extra)
    again.load_checkpoint(f"{directory}/native", tag="b")  # native ones still load
    compare(logical(engine), logical(again))
    files = sorted(Path(directory, "native", "b").glob("*_states.pt"))
    assert len(files) == 2 * dist.get_world_size()
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
    inner = state["optimizer_state_dict"]
    flats = inner["fp32_flat_groups"]
    for index, flat in enumerate(flats):
        flats[index] = blanked(engine, flat.detach(), index)
        each = inner["optimizer_state_dict"]["state"].get(index, {})
        for key, value in each.items():
            if isinstance(value, torch.Tensor) and value.numel() == flat.numel():
                each[key] = blanked(engine, value, index)


@pytest.mark.parametrize("optimizer", [ADAMW, jobs.galore(update_proj_gap=100)], ids=["adamw", "galore"])
@pytest.mark.parametrize("extra", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_every_tensor_is_what_deepspeeds_native_engine_saves(pool, tmp_path, optimizer, extra):
    pool.run(2, against_native, str(tmp_path), optimizer, extra)
    reader = CheckpointReader(tmp_path / "ours" / "b")
    weight = reader.tensors["model.layers.0.self_attn.q_proj.weight/fp32"]
    assert weight.shape == (32, 32)
    assert all(difference.bytes < full.bytes for full, difference in reader.manifest.files)


def failing(directory: str) -> str:
    import torch.distributed as dist

    engine = make(jobs.galore(), "differential")
    jobs.train(engine, jobs.batches(1, DATA))
    engine.save_checkpoint(directory, tag="good")
    if dist.get_rank() == 1:
        original = CheckpointStore.write

        def broken(*_: Any, **__: Any) -> Any:
            raise OSError(28, "No space left on device")

        CheckpointStore.write = broken
    try:
        engine.save_checkpoint(directory, tag="bad")
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
    jobs.train(engine, jobs.batches(1, DATA))
    engine.save_checkpoint(directory, tag="good")


def strange_client_state(directory: str) -> str:
    import torch.distributed as dist

    engine = make(jobs.galore(), "differential")
    jobs.train(engine, jobs.batches(1, DATA))
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


def test_retention_keeps_the_base_while_differences_are_made_against_it(pool, tmp_path):
    pool.run(2, rotating, str(tmp_path))
    store = CheckpointStore(tmp_path)
    assert store.tags() == ["save-4", "save-5"]  # the second full one, and the newest
    assert [store.open(tag).manifest.kind for tag in store.tags()] == ["full", "differential"]
    assert all(store.open(tag).verify() == [] for tag in store.tags())


def refused(directory: str, **arguments: Any) -> str:
    from ds_galore.errors import ConfigError

    engine = make(jobs.galore(), "differential")
    try:
        engine.load_checkpoint(directory, **arguments)
    except ConfigError as error:
        return str(error)
    return "nothing"


def test_ways_to_load_that_are_not_supported_yet_are_refused_by_name(pool, tmp_path):
    pool.run(1, saved, str(tmp_path))
    for name, value in (("load_optimizer_states", False), ("load_module_only", True)):
        assert pool.run(1, refused, str(tmp_path), **{name: value})[0].startswith(f"{name} is {value}: ")
    for found in pool.run(2, refused, str(tmp_path), timeout=60):
        assert "was saved by 1 ranks and cannot be loaded by 2" in found


def test_a_damaged_state_file_is_not_loaded(pool, tmp_path):
    pool.run(1, saved, str(tmp_path))
    shutil.copytree(tmp_path / "good", tmp_path / "broken")
    path = tmp_path / "broken" / "zero_pp_rank_0_mp_rank_00_model_states.pt"
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
