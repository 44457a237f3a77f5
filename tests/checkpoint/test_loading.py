"""Loading on another number of ranks, without optimizer states, of another model, and where something is damaged."""

from __future__ import annotations

import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_galore.checkpoint.errors import DamageError
from ds_galore.checkpoint.loading import PreparedLoad
from ds_galore.checkpoint.reader import CheckpointReader
from ds_galore.checkpoint.store import CheckpointStore
from tests import jobs
from tests.checkpoint.engines import ADAMW, BATCH, BF16, assert_same, contents, logical, make, masters, save

GALORE = jobs.galore(update_proj_gap=5)
ALIGNED = {"parameter_alignment": True}


def write(directory: str, optimizer: dict[str, Any], extra: dict[str, Any]) -> list[float]:
    """Save after 6 and 8 steps; the losses of the steps from 8 to 14."""
    engine = make(optimizer, **extra)
    data = jobs.batches(14, BATCH)
    jobs.train(engine, data[:6])
    save(engine, directory, "base")
    jobs.train(engine, data[6:8])
    save(engine, directory, "moved", consumed=8)
    return jobs.train(engine, data[8:])


def move(directory: str, target: str, optimizer: dict[str, Any], extra: dict[str, Any]) -> list[float]:
    """Load, save what was loaded, and train on."""
    engine = make(optimizer, **extra)
    path, client = engine.load_checkpoint(directory, tag="moved")
    assert path is not None
    assert client["consumed"] == 8
    assert engine.global_steps == 8
    save(engine, target, "moved", consumed=8)
    return jobs.train(engine, jobs.batches(14, BATCH)[8:])


def moments(directory: str, optimizer: dict[str, Any], extra: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Masters and moments after a load, whole, by DeepSpeed's own functions."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    engine = make(optimizer, **extra)
    engine.load_checkpoint(directory, tag="moved")
    if engine.zero_optimization_stage() < 3:
        engine.optimizer._lazy_init_hp_params_optimizer_state()  # else at the first step
    found = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            found[f"{name}/fp32"] = safe_get_full_fp32_param(parameter).clone()
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"{name}/{key}"] = safe_get_full_optimizer_state(parameter, key).clone()
    return found


@pytest.mark.parametrize(
    ("optimizer", "extra"),
    [
        (GALORE, {"zero": {"sub_group_size": 3000}}),
        ({**GALORE, "params": {**GALORE["params"], "proj_type": "std"}}, {"special": True, **BF16}),
        (GALORE, {"zero": {"stage": 2, "round_robin_gradients": True, **ALIGNED}, **BF16}),
        (ADAMW, {"zero": {"sub_group_size": 3000}, "special": True}),
        (ADAMW, {"zero": {"stage": 2}, "special": True}),
        (ADAMW, {"zero": {"stage": 2, "round_robin_gradients": True}}),
        (ADAMW, {"zero": {"stage": 1}, **BF16}),
        (ADAMW, {"zero": {"stage": 1}, **BF16, "data_types": {"grad_accum_dtype": "fp32"}}),
    ],
)
def test_two_ranks_checkpoint_goes_on_with_one_three_and_four(pool, tmp_path, optimizer, extra):
    expected = pool.run(2, write, str(tmp_path / "run"), optimizer, extra)[0]
    saved = contents(tmp_path / "run" / "moved")
    assert any(name.endswith("/exp_avg_sq") for name in saved)
    tolerance = 2e-3 if "bf16" in extra else 1e-5
    for ranks in (1, 3, 4):
        losses = pool.run(ranks, move, str(tmp_path / "run"), str(tmp_path / str(ranks)), optimizer, extra)
        assert all(each == losses[0] for each in losses)
        assert max(abs(a - b) for a, b in zip(losses[0], expected, strict=True)) < tolerance
        found = contents(tmp_path / str(ranks) / "moved")
        assert found.keys() == saved.keys()
        assert [name for name in saved if found[name] != saved[name]] == []


def other_layout(directory: str, write_it: bool, zero: dict[str, Any], tiny: bool) -> Any:
    """Save, or load with another layout, a model whose last parameter has one element; what all ranks hold of it."""
    import torch.distributed as dist

    model = jobs.tiny_llama()
    if tiny:
        model.register_parameter("last", torch.nn.Parameter(torch.ones(1)))
        model.register_forward_hook(lambda module, _, out: setattr(out, "loss", out.loss * module.last.sum()) or out)
    section = {"ds_galore": {"checkpoint": {"mode": "full"}}}
    settings = jobs.config(ADAMW, micro=BATCH // dist.get_world_size(), zero=zero, **section)
    engine = jobs.start(model, settings)
    if write_it:
        jobs.train(engine, jobs.batches(2, BATCH))
        save(engine, directory, "t")
        return None
    try:
        engine.load_checkpoint(directory)
    except Exception as error:  # noqa: BLE001 - what matters is that all ranks come here
        return f"{type(error).__name__}: {error}"
    jobs.train(engine, jobs.batches(1, BATCH))
    return "loaded"


@pytest.mark.parametrize(
    ("before", "after", "tiny", "ranks"),
    [
        ({"stage": 2, "round_robin_gradients": True}, {"stage": 2, "round_robin_gradients": True, **ALIGNED}, False, 3),
        ({"stage": 3, "sub_group_size": 79}, {"stage": 3}, True, 4),
        ({"stage": 3}, {"stage": 3, "sub_group_size": 79}, True, 4),
    ],
)
def test_ranks_agree_where_the_layout_changes_for_some_of_them(pool, tmp_path, before, after, tiny, ranks):
    pool.run(ranks, other_layout, str(tmp_path), True, before, tiny)
    assert pool.run(ranks, other_layout, str(tmp_path), False, after, tiny, timeout=90) == ["loaded"] * ranks


def adagrad(directory: str, write_it: bool) -> Any:
    engine = make({"type": "Adagrad", "params": {"lr": 1e-2}}, "full", zero={"stage": 2})
    if write_it:
        jobs.train(engine, jobs.batches(2, BATCH))
        save(engine, directory, "t")
    else:
        assert engine.load_checkpoint(directory)[0] is not None
    (flat,) = masters(engine)
    state = engine.optimizer.optimizer.state[flat.tensor]["sum"]
    held = state.clone(), [(part.name, part.start, part.offset, part.numel) for part in flat.parts]
    return held, jobs.train(engine, jobs.batches(1, BATCH, seed=3))


def test_adagrad_whose_optimizer_deepspeed_replaces_moves_too(pool, tmp_path):
    written = pool.run(2, adagrad, str(tmp_path), True)
    loaded = pool.run(3, adagrad, str(tmp_path), False)

    def whole(ranks: list[Any]) -> dict[str, torch.Tensor]:
        found: dict[str, list[torch.Tensor]] = {}
        for (state, parts), _ in ranks:
            for name, _, offset, numel in parts:
                found.setdefault(name, []).append(state[offset : offset + numel])
        return {name: torch.cat(pieces) for name, pieces in found.items()}

    before, after = whole(written), whole(loaded)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert any(tensor.abs().sum() > 0 for tensor in before.values())


def test_how_projectors_are_kept_may_change(pool, tmp_path):
    whole = jobs.galore(update_proj_gap=5, projector_storage="replicated")
    parts = jobs.galore(update_proj_gap=5, projector_storage="sharded")
    expected = pool.run(2, write, str(tmp_path / "run"), whole, {})
    saved = contents(tmp_path / "run" / "moved")
    losses = pool.run(2, move, str(tmp_path / "run"), str(tmp_path / "parts"), parts, {})
    again = pool.run(2, move, str(tmp_path / "parts"), str(tmp_path / "whole"), whole, {})
    assert losses == again == expected
    assert contents(tmp_path / "parts" / "moved") == contents(tmp_path / "whole" / "moved") == saved


def test_a_copy_on_another_file_system_loads_when_everything_else_is_gone(pool, tmp_path):
    expected = pool.run(2, write, str(tmp_path / "run"), GALORE, {})[0]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        assert Path(other).stat().st_dev != tmp_path.stat().st_dev
        shutil.copytree(tmp_path / "run" / "moved", Path(other) / "moved")
        shutil.rmtree(tmp_path / "run")
        found = pool.run(2, move, other, str(tmp_path / "again"), GALORE, {})[0]
    assert found == expected
    # The base is on another file system, where it cannot be linked from: the next checkpoint is full.
    assert CheckpointStore(tmp_path / "again").open("moved").manifest.kind == "full"


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeeds_own_functions_find_the_saved_masters_and_moments_on_other_ranks(pool, tmp_path, stage):
    extra = {"zero": {"stage": stage}}
    pool.run(2, write, str(tmp_path), ADAMW, extra)
    expected = pool.run(2, moments, str(tmp_path), ADAMW, extra)[0]
    saved = contents(tmp_path / "moved")
    for ranks in (1, 3):
        for found in pool.run(ranks, moments, str(tmp_path), ADAMW, extra):
            assert_same(expected, found)
    for name, tensor in expected.items():
        assert tensor.numpy().tobytes() == saved[name][2], name


def test_a_moved_run_can_be_moved_back_and_other_sub_groups_are_no_obstacle(pool, tmp_path):
    pool.run(2, write, str(tmp_path / "2"), GALORE, {})
    saved = contents(tmp_path / "2" / "moved")
    pool.run(3, move, str(tmp_path / "2"), str(tmp_path / "3"), GALORE, {"zero": {"sub_group_size": 1000}})
    pool.run(2, move, str(tmp_path / "3"), str(tmp_path / "back"), GALORE, {"zero": {"sub_group_size": 2000}})
    assert contents(tmp_path / "back" / "moved") == saved


def readers(directory: str) -> dict[str, set[str]]:
    """By how many ranks share the host, the threads in which a rank reads a checkpoint."""
    found = {}
    for ranks, variable in ((1, "LOCAL_WORLD_SIZE"), (1, "LOCAL_SIZE"), (4096, "LOCAL_WORLD_SIZE")):
        engine, names, read = make(GALORE), set(), PreparedLoad._read

        def noting(*given: Any, names: set[str] = names, read: Any = read) -> Any:
            names.add(threading.current_thread().name)
            return read(*given)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("os.sched_getaffinity", lambda _: {0, 1})
            patch.setenv(variable, str(ranks))
            patch.setattr(PreparedLoad, "_read", noting)
            engine.load_checkpoint(directory, tag="moved")
        found[f"{variable} {ranks}"] = names
    return found


def test_a_rank_that_has_cores_to_itself_reads_in_threads(pool, tmp_path):
    pool.run(1, write, str(tmp_path), GALORE, {})
    found = pool.run(1, readers, str(tmp_path))[0]
    assert found.pop("LOCAL_WORLD_SIZE 4096") == {"MainThread"}
    assert not any("MainThread" in names for names in found.values())


@pytest.mark.parametrize("codec", ["planes", "lowrank", "same"])
def test_a_damaged_base_is_named_although_only_its_difference_is_checked(pool, tmp_path, codec):
    pool.run(1, write, str(tmp_path), GALORE, {})
    reader = CheckpointReader(tmp_path / "moved")
    older, base = reader.manifest.files[0][0].name, CheckpointReader(tmp_path / "base")
    bases = {each.name: (index, each) for index, each in enumerate(base.file(0).entries) if each.parts}
    entry = next(
        each
        for each in reader.file(0).entries
        if each.codec == codec and (each.params.get("base") or codec != "planes") and each.name in bases
    )
    index, held = bases[entry.name]
    # Damage to a raw plane is for digests alone to find.
    part = next((each for each in held.parts if each.endswith("r")), held.parts[0])
    begin, end, _ = base.file(0)._parts[f"{index}/{part}"]
    for path in (tmp_path / "moved" / older, tmp_path / "base" / older):
        path.chmod(0o644)
    with (tmp_path / "moved" / older).open("r+b") as file:
        file.seek((begin + end) // 2)
        byte = file.read(1)[0]
        file.seek((begin + end) // 2)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(DamageError, match=f"{older}: {entry.name}"):
        CheckpointReader(tmp_path / "moved").bits(entry.name)


def test_without_zero_any_number_of_ranks_goes_on(pool, tmp_path):
    extra = {"zero": {"stage": 0}}
    expected = pool.run(2, write, str(tmp_path / "run"), ADAMW, extra)[0]
    for ranks in (1, 3):
        losses = pool.run(ranks, move, str(tmp_path / "run"), str(tmp_path / str(ranks)), ADAMW, extra)[0]
        assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-5


def switch(directory: str, stage: int) -> tuple[list[float], Any]:
    engine = make(ADAMW, zero={"stage": stage})
    if not Path(directory).exists():
        jobs.train(engine, jobs.batches(4, BATCH))
        save(engine, directory, "a")
    else:
        engine.load_checkpoint(directory)
    return jobs.train(engine, jobs.batches(8, BATCH)[4:]), logical(engine)


def test_stages_one_and_two_load_each_others(pool, tmp_path):
    for written, loaded in ((1, 2), (2, 1)):
        directory = str(tmp_path / str(written))
        expected = pool.run(2, switch, directory, written)
        for (a, state), (b, other) in zip(expected, pool.run(2, switch, directory, loaded), strict=True):
            assert a == b
            assert_same(state, other)


# ---------------------------------------------------------------------- weights alone


def weights_only(directory: str, optimizer: dict[str, Any], extra: dict[str, Any], arguments: dict[str, Any]) -> None:
    engine = make(optimizer, **extra)
    fresh = logical(engine)
    jobs.train(engine, jobs.batches(5, BATCH))
    save(engine, directory, "a", note="mine")
    saved = logical(engine)
    jobs.train(engine, jobs.batches(2, BATCH, seed=9))
    save(engine, directory, "later")  # what 'latest' names must not be taken instead
    again = make(optimizer, **extra)
    _, client = again.load_checkpoint(directory, tag="a", **arguments)
    found = logical(again)
    weights = {key for key in saved if "/state" not in key}
    assert any(key.endswith("/fp32") for key in weights)
    assert_same({key: saved[key] for key in weights}, {key: found[key] for key in weights})
    assert {key for key in found if "/state" in key} == {key for key in fresh if "/state" in key}
    module_only = arguments.get("load_module_only", False)
    assert again.global_steps == (0 if module_only else 5)
    assert client.get("note") == "mine"
    assert again.lr_scheduler.last_batch_iteration == (-1 if module_only else 4) or again.global_steps in (0, 5)
    losses = jobs.train(again, jobs.batches(6, BATCH, seed=3))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("arguments", [{"load_optimizer_states": False}, {"load_module_only": True}], ids=str)
@pytest.mark.parametrize(
    ("optimizer", "extra"),
    [
        (GALORE, {"special": True}),
        (ADAMW, BF16),
        (ADAMW, {"zero": {"stage": 2}, "special": True, **BF16}),
        (ADAMW, {"zero": {"stage": 1}}),
        (GALORE, {"zero": {"stage3_param_persistence_threshold": 100}, **BF16}),
    ],
)
def test_weights_alone_are_loaded_exactly(pool, tmp_path, optimizer, extra, arguments):
    pool.run(2, weights_only, str(tmp_path), optimizer, extra, arguments)


# ---------------------------------------------------------------------- what cannot be loaded


def attempt(directory: str, optimizer: dict[str, Any], extra: dict[str, Any], **arguments: Any) -> str:
    engine = make(optimizer, **extra)
    try:
        engine.load_checkpoint(directory, **arguments)
    except Exception as error:  # noqa: BLE001 - reported
        return f"{type(error).__name__}: {error}"
    return f"loaded after {engine.global_steps} steps"


def test_a_missing_rank_file_damage_and_an_unfinished_checkpoint_name_the_newest_intact_one(pool, tmp_path):
    run = tmp_path / "run"
    pool.run(2, write, str(run), GALORE, {})
    newest = f"the newest intact checkpoint is {run / 'base'}"
    for kind in ("missing", "short", "flipped", "unfinished", "missing state"):
        shutil.rmtree(tmp_path / "broken", ignore_errors=True)
        shutil.copytree(run, tmp_path / "broken")
        tag = tmp_path / "broken" / "moved"
        victim = next(tag.glob("rank-00001-*.diff.safetensors"))
        if kind == "missing":
            victim.unlink()
        elif kind == "short":
            data = victim.read_bytes()
            victim.unlink()
            victim.write_bytes(data[:-10])
        elif kind == "flipped":
            data = bytearray(victim.read_bytes())
            data[-100] ^= 1
            victim.unlink()
            victim.write_bytes(data)
        elif kind == "unfinished":
            (tag / "manifest.json").unlink()
        else:
            (tag / "zero_pp_rank_1_mp_rank_00_optim_states.json").unlink()
        newest = f"the newest intact checkpoint is {tmp_path / 'broken' / 'base'}"
        for outcome in pool.run(2, attempt, str(tmp_path / "broken"), GALORE, {}, timeout=90):
            assert newest in outcome, (kind, outcome)
            assert outcome.startswith(("DamageError", "NotCommittedError", "PeerError")), (kind, outcome)
        previous = {"checkpoint": {"on_damage": "previous"}}
        outcomes = pool.run(2, attempt, str(tmp_path / "broken"), GALORE, previous, timeout=90)
        assert outcomes == ["loaded after 6 steps"] * 2, kind


def test_where_nothing_is_intact_the_error_says_so(pool, tmp_path):
    pool.run(1, write, str(tmp_path), GALORE, {})
    shutil.rmtree(tmp_path / "base")
    next((tmp_path / "moved").glob("*.full.safetensors")).unlink()
    for extra in ({}, {"checkpoint": {"on_damage": "previous"}}):
        outcome = pool.run(1, attempt, str(tmp_path), GALORE, extra)[0]
        assert outcome.startswith("DamageError: "), outcome
        assert outcome.endswith("; no intact checkpoint is beside it"), outcome


def other_model(directory: str, **model: Any) -> str:
    from tests.checkpoint import engines

    original = engines.jobs.tiny_llama
    try:
        engines.jobs.tiny_llama = lambda **_: original(**model)
        return attempt(directory, GALORE, {})
    finally:
        engines.jobs.tiny_llama = original


def test_another_stage_model_or_tag_is_refused_by_name_on_all_ranks(pool, tmp_path):
    pool.run(2, write, str(tmp_path), GALORE, {})
    for ranks in (2, 3):
        for outcome in pool.run(ranks, attempt, str(tmp_path), ADAMW, {"zero": {"stage": 2}}):
            assert outcome.startswith("ConfigError: "), outcome
            assert "was saved under ZeRO stage 3, and zero_optimization.stage is 2" in outcome
        for outcome in pool.run(ranks, other_model, str(tmp_path), layers=3):
            assert outcome.startswith("CheckpointMismatchError: "), outcome
            assert "model.layers.2" in outcome
            assert "is not trained in the checkpoint, and trained by this engine" in outcome
        for outcome in pool.run(ranks, other_model, str(tmp_path), hidden=48):
            assert "has shape (64, 32) in the checkpoint, and (64, 48) in the model" in outcome
        for outcome in pool.run(ranks, attempt, str(tmp_path), ADAMW, {}):
            assert outcome.startswith("CheckpointMismatchError: "), outcome
            assert "holds the state of GaLoreAdamW, and optimizer.type is AdamW" in outcome
    assert pool.run(1, attempt, str(tmp_path / "nowhere"), GALORE, {})[0] == "loaded after 0 steps"
    (tmp_path / "empty").mkdir()
    assert "holds no finished checkpoint" in pool.run(1, attempt, str(tmp_path), GALORE, {}, tag="empty")[0]


# ---------------------------------------------------------------------- rare things


def with_an_empty_parameter(directory: str) -> None:
    """At stage 2; DeepSpeed 0.19.8 cannot train one at stage 3."""
    from tests.checkpoint import engines

    original = engines.jobs.tiny_llama

    def build(**options: Any) -> Any:
        model = original(**options)
        model.model.register_parameter("nothing", torch.nn.Parameter(torch.empty(0, 4)))
        return model

    engines.jobs.tiny_llama = build
    try:
        engine = make(ADAMW, zero={"stage": 2})
        jobs.train(engine, jobs.batches(2, BATCH))
        save(engine, directory, "a")
        again = make(ADAMW, zero={"stage": 2})
        again.load_checkpoint(directory)
        assert_same(logical(engine), logical(again))
    finally:
        engines.jobs.tiny_llama = original


def test_a_parameter_without_elements_is_no_obstacle(pool, tmp_path):
    from ds_galore.tools.merge import merge_checkpoint

    pool.run(2, with_an_empty_parameter, str(tmp_path / "run"))
    merge_checkpoint(tmp_path / "run", tmp_path / "merged")


def rots(directory: str) -> tuple[str, str]:
    """The base rots on the disk, and is not in memory: what the save raises, and of what kind the next one is."""
    import torch.distributed as dist

    engine = make(GALORE, checkpoint={"base_memory_gb": 0})
    jobs.train(engine, jobs.batches(2, BATCH))
    save(engine, directory, "base")
    jobs.train(engine, jobs.batches(1, BATCH, seed=2))
    dist.barrier()
    if dist.get_rank() == 1:
        victim = next(Path(directory, "base").glob("rank-00001-*.safetensors"))
        data = bytearray(victim.read_bytes())
        for position in range(len(data) // 2, len(data), 50):
            data[position] ^= 255
        victim.chmod(0o644)
        with victim.open("r+b") as file:
            file.write(data)
    dist.barrier()
    told = "nothing"
    try:
        save(engine, directory, "next")
    except Exception as error:  # noqa: BLE001 - reported
        told = f"{type(error).__name__}: {error}"
    save(engine, directory, "next")
    return told, CheckpointStore(Path(directory)).open("next").manifest.kind


def test_a_base_that_rots_on_the_disk_fails_one_save_and_the_next_is_full(pool, tmp_path):
    outcomes = pool.run(2, rots, str(tmp_path), timeout=90)
    assert outcomes[1][0].startswith("DamageError: "), outcomes
    assert outcomes[0][0].startswith(("PeerError: rank 1 failed", "DamageError: ")), outcomes
    assert [kind for _, kind in outcomes] == ["full", "full"]
    assert CheckpointStore(tmp_path).open("next").verify() == []


def over_native(directory: str) -> str:
    """Our checkpoint takes the tag of a native one, and fails; the native one must still load."""
    import torch.distributed as dist

    native = make(GALORE, None)
    jobs.train(native, jobs.batches(2, BATCH))
    native.save_checkpoint(directory, tag="last")
    dist.barrier()
    engine = make(GALORE)
    engine.load_checkpoint(directory)
    expected = logical(engine)

    def full(point: str) -> None:
        if point == "committing":
            raise OSError(28, "No space left on device")

    engine.checkpoint_engine.hook = full
    try:
        save(engine, directory, "last")
    except Exception as error:  # noqa: BLE001 - reported
        told = type(error).__name__
    engine.checkpoint_engine.hook = lambda point: None
    again = make(GALORE)
    again.load_checkpoint(directory)
    assert_same(expected, logical(again))
    save(engine, directory, "last")
    dist.barrier()
    ours = make(GALORE)
    ours.load_checkpoint(directory)
    assert_same(expected, logical(ours))
    return told


def test_a_native_checkpoint_is_whole_until_ours_of_the_same_tag_is_committed(pool, tmp_path):
    assert pool.run(2, over_native, str(tmp_path)) == ["OSError", "PeerError"]
    assert all(path.stat().st_size < 200 for path in (tmp_path / "last").glob("*_states.pt"))


def nowhere(directory: str) -> str:
    engine = make(GALORE)
    jobs.train(engine, jobs.batches(1, BATCH))
    try:
        engine.save_checkpoint(directory, tag="a")
    except Exception as error:  # noqa: BLE001 - reported
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_save_directory_that_cannot_be_made_fails_on_all_ranks(pool, tmp_path):
    (tmp_path / "file").write_text("in the way")
    for told in pool.run(2, nowhere, str(tmp_path / "file" / "run"), timeout=60):
        assert "Not a directory" in told or "PeerError" in told, told


def swapped(directory: str, order: list[bool]) -> dict[str, torch.Tensor]:
    """Two parameter groups, in one order or the other."""
    from ds_galore.zero.binding import flat_parts

    model = jobs.tiny_llama()
    norms = [p for n, p in model.named_parameters() if "norm" in n]
    others = [p for n, p in model.named_parameters() if "norm" not in n]
    groups = [{"params": norms if first else others} for first in order]
    section = {"ds_galore": {"checkpoint": {}}}
    engine = jobs.start(model, jobs.config(ADAMW, micro=2, **section), model_parameters=groups)
    if not Path(directory).exists():
        jobs.train(engine, jobs.batches(2, 4))
        save(engine, directory, "a")
    else:
        engine.load_checkpoint(directory)
    return {
        part.name: flat.tensor.detach()[part.offset : part.offset + part.numel].clone()
        for flat in flat_parts(engine)
        for part in flat.parts
    }


def test_parameter_groups_in_another_order_are_found_by_name(pool, tmp_path):
    expected = pool.run(2, swapped, str(tmp_path / "run"), [True, False])
    for a, b in zip(expected, pool.run(2, swapped, str(tmp_path / "run"), [False, True]), strict=True):
        assert_same(dict(sorted(a.items())), dict(sorted(b.items())))
