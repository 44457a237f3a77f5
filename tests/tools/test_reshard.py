"""Resharding against what DeepSpeed itself saves and loads on that number of ranks."""

from __future__ import annotations

import collections
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ds_galore.checkpoint.reader import CheckpointReader
from ds_galore.errors import ConfigError, DataError
from ds_galore.tools.merge import load_state_dict
from ds_galore.tools.reshard import reshard_checkpoint
from tests import jobs
from tests.checkpoint.engines import ADAMW, BATCH, BF16, assert_same, contents, logical, make, save

GALORE = jobs.galore(update_proj_gap=3)
CLIENT = {"epoch": 3, "seen": np.arange(4), "half": 0.5, "names": ("a", {"b"}), "nan": float("nan"), "b": b"xy"}


def trained(directory: str, optimizer: dict[str, Any], extra: dict[str, Any]) -> None:
    """The same state, saved as ours and as DeepSpeed's own."""
    import torch.distributed as dist
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

    engine = make(optimizer, **extra)
    jobs.train(engine, jobs.batches(5, BATCH))
    save(engine, f"{directory}/ours", "t", **CLIENT)
    engine.checkpoint_engine = TorchCheckpointEngine(engine._config)
    engine.save_checkpoint.__wrapped__(f"{directory}/native", tag="t", client_state=CLIENT)
    dist.barrier()


def loaded_and_saved(directory: str, out: str, optimizer: dict[str, Any], extra: dict[str, Any]) -> Any:
    """Load one of our checkpoints, save it again, and go on."""
    engine = make(optimizer, **extra)
    path, client = engine.load_checkpoint(directory)
    assert path is not None
    before = logical(engine)
    save(engine, out, "t", **{key: client[key] for key in CLIENT})  # DeepSpeed gives more back than was given
    return before, jobs.train(engine, jobs.batches(3, BATCH, seed=5))


def loaded_by_deepspeed(directory: str, optimizer: dict[str, Any], extra: dict[str, Any]) -> Any:
    """Load a checkpoint with DeepSpeed's own engine, without our checkpoints; and go on."""
    engine = make(optimizer, mode=None, **extra)
    path, client = engine.load_checkpoint(directory)
    assert path is not None
    assert type(engine.checkpoint_engine).__module__.startswith("deepspeed.")
    return logical(engine), jobs.train(engine, jobs.batches(3, BATCH, seed=5)), client


def states_of(directory: Path) -> dict[str, Any]:
    """The state files of one of our checkpoints, without what says where and when it was saved."""
    reader = CheckpointReader(directory)
    return {name: reader.state(name) for name in sorted(reader.manifest.states)}


@pytest.mark.parametrize("form", ["ds_galore", "deepspeed"])
def test_client_states_of_many_types_come_through(pool, tmp_path, form):
    client = {
        "h": {1: np.arange(3), "1": np.arange(3, 6), "x": {}},
        "a/b": np.arange(2),
        "a": {"b": np.arange(2, 4)},
        "big": np.arange(3, dtype=">i4"),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "empty": np.zeros(0),
        "none": b"",
        "sets": {frozenset({1}), b"x"},
        "half": np.float16(1.5),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "shared": torch.arange(3),
        "counts": collections.defaultdict(int, {"a": 1}),
    }
    pool.run(2, trained_with, str(tmp_path), client)
    for source in ("ours", "native"):
        out = tmp_path / f"{source}-out"
        reshard_checkpoint(tmp_path / source, out, world_size=3, format=form)
        found = pool.run(3, loaded_client, str(out), form == "ds_galore")[2]
        assert found["h"][1].tolist() == [0, 1, 2]
        assert found["h"]["1"].tolist() == [3, 4, 5]
        assert (found["a/b"].tolist(), found["a"]["b"].tolist()) == ([0, 1], [2, 3])
        assert found["big"].tolist() == [0, 1, 2]
        assert found["fortran"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert (found["empty"].shape, found["none"]) == ((0,), b"")
        assert (found["sets"], found["half"], found["size"]) == ({frozenset({1}), b"x"}, 1.5, (2, 3))
        assert found["dtype"] is torch.bfloat16
        assert found["shared"].tolist() == [0, 1, 2]
        assert found["counts"] == {"a": 1}


def trained_with(directory: str, client: dict[str, Any]) -> None:
    import torch.distributed as dist
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

    engine = make(ADAMW)
    jobs.train(engine, jobs.batches(1, BATCH))
    save(engine, f"{directory}/ours", "t", **{**client, "counts": dict(client["counts"])})
    engine.checkpoint_engine = TorchCheckpointEngine(engine._config)
    engine.save_checkpoint.__wrapped__(f"{directory}/native", tag="t", client_state=client)
    dist.barrier()


def loaded_client(directory: str, ours: bool) -> Any:
    engine = make(ADAMW, mode="differential" if ours else None)
    return engine.load_checkpoint(directory)[1]


def test_arguments_in_a_client_state_go_to_deepspeed_and_not_into_ours(pool, tmp_path):
    from argparse import Namespace

    client = {"args": Namespace(params_dtype=torch.bfloat16, sizes=torch.arange(3), names=["a"], array=np.arange(2))}
    pool.run(1, native_with, str(tmp_path), client)
    reshard_checkpoint(tmp_path / "native", tmp_path / "out", world_size=2, format="deepspeed")
    code = (
        "import torch, sys\n"
        "sys.modules['ds_galore'] = None\n"
        "found = torch.load(sys.argv[1], weights_only=False)['args']\n"
        "assert found.params_dtype is torch.bfloat16 and found.sizes.tolist() == [0, 1, 2], found\n"
        "assert found.names == ['a'] and found.array.tolist() == [0, 1], found\n"
    )
    path = tmp_path / "out" / "t" / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    subprocess.run([sys.executable, "-c", code, path], check=True)
    for value, message in (
        (client, r"class argparse.Namespace cannot be written"),
        ({"z": 1 + 2j}, "a complex cannot"),
    ):
        shutil.rmtree(tmp_path / "native")
        pool.run(1, native_with, str(tmp_path), value)
        with pytest.raises(DataError, match=message):
            reshard_checkpoint(tmp_path / "native", tmp_path / "refused", world_size=2)
        assert not (tmp_path / "refused").exists()


def native_with(directory: str, client: dict[str, Any]) -> None:
    engine = make(ADAMW, mode=None)
    jobs.train(engine, jobs.batches(1, BATCH))
    engine.save_checkpoint(f"{directory}/native", tag="t", client_state=client)


def grouped(engine_of: Any, frozen: bool) -> Any:
    """Three groups, the first of frozen parameters alone, which DeepSpeed takes at stage 3."""
    model = jobs.tiny_llama()
    named = dict(model.named_parameters())
    first = [p for name, p in named.items() if "embed" in name]
    decay = [p for name, p in named.items() if p.dim() > 1 and "embed" not in name]
    rest = [p for name, p in named.items() if p.dim() == 1]
    for each in first:
        each.requires_grad_(not frozen)
    groups = [
        {"params": first, "weight_decay": 0.0},
        {"params": decay, "weight_decay": 0.1, "lr": 2e-2},
        {"params": rest, "weight_decay": 0.0},
    ]
    return engine_of(model, groups)


def groups_engine(mode: str | None, extra: dict[str, Any], optimizer: dict[str, Any]) -> Any:
    import torch.distributed as dist

    section = {"ds_galore": {"checkpoint": {"mode": mode}}} if mode else {}
    settings = jobs.config(optimizer, micro=BATCH // dist.get_world_size(), **section, **extra)
    frozen = extra["zero"]["stage"] == 3
    return grouped(lambda model, groups: jobs.start(model, settings, model_parameters=groups), frozen)


def groups_trained(directory: str, extra: dict[str, Any], optimizer: dict[str, Any]) -> None:
    import torch.distributed as dist
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

    engine = groups_engine("full", extra, optimizer)
    jobs.train(engine, jobs.batches(2, BATCH))
    save(engine, f"{directory}/ours", "t")
    engine.checkpoint_engine = TorchCheckpointEngine(engine._config)
    engine.save_checkpoint.__wrapped__(f"{directory}/native", tag="t")
    dist.barrier()


def groups_loaded(directory: str, mode: str | None, extra: dict[str, Any], optimizer: dict[str, Any]) -> Any:
    engine = groups_engine(mode, extra, optimizer)
    assert engine.load_checkpoint(directory)[0] is not None
    return logical(engine), jobs.train(engine, jobs.batches(2, BATCH, seed=7))


@pytest.mark.parametrize(
    ("extra", "kind"),
    [
        ({"zero": {"stage": 3, "sub_group_size": 2000}}, "AdamW"),
        ({"zero": {"stage": 3}}, "SGD"),
        ({"zero": {"stage": 2, "round_robin_gradients": True, "parameter_alignment": True}}, "AdamW"),
    ],
)
def test_groups_of_parameters_and_other_optimizers(pool, tmp_path, extra, kind):
    params = {"AdamW": {"lr": 1e-2, "torch_adam": True}, "SGD": {"lr": 1e-2, "momentum": 0.9}}[kind]
    optimizer = {"type": kind, "params": params}
    pool.run(2, groups_trained, str(tmp_path), extra, optimizer)
    wanted = pool.run(3, groups_loaded, str(tmp_path / "ours"), "full", extra, optimizer)
    for source in ("ours", "native"):
        for form, mode in (("ds_galore", "full"), ("deepspeed", None)):
            out = tmp_path / f"{source}-{form}"
            reshard_checkpoint(tmp_path / source, out, world_size=3, format=form)
            found = pool.run(3, groups_loaded, str(out), mode, extra, optimizer)
            for (state, losses), (state_found, losses_found) in zip(wanted, found, strict=True):
                assert_same(state, state_found)
                assert losses == losses_found


def test_outputs_that_cannot_be_replaced_are_refused_and_links_are_followed(saved, tmp_path, monkeypatch):
    source = saved / "galore" / "ours"
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    reshard_checkpoint(source, tmp_path / "link", world_size=2)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "latest").read_text() == "t"
    monkeypatch.chdir(tmp_path / "real")
    with pytest.raises(DataError, match="is the current directory, which cannot be replaced"):
        reshard_checkpoint(source, Path(), world_size=2, overwrite=True)
    with pytest.raises(DataError, match="lies in the checkpoint that is read"):
        reshard_checkpoint(source, source / "t" / "inside", world_size=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


SMALL = {"zero": {"sub_group_size": 3000}}
CASES = [
    (GALORE, {}, 2, 3),
    (GALORE, {"special": True, **SMALL}, 3, 2),
    (jobs.galore(update_proj_gap=3, proj_type="left"), SMALL, 1, 4),
    (jobs.galore(update_proj_gap=3, projector_storage="sharded"), {}, 4, 2),
    (GALORE, {"zero": {"stage": 0}}, 2, 3),
    (ADAMW, {"special": True, **SMALL}, 2, 3),
    (ADAMW, {"zero": {"stage": 1}}, 1, 3),
    (ADAMW, {"zero": {"stage": 2}, "special": True}, 3, 2),
    (ADAMW, {"zero": {"stage": 2, "round_robin_gradients": True, "parameter_alignment": True}, **BF16}, 2, 4),
    (ADAMW, {"zero": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}, "special": True, **BF16}, 2, 3),
]


def normal(value: Any) -> Any:
    """State as JSON text, so that values that are not equal to themselves compare; without the configuration."""
    return json.dumps({key: each for key, each in value.items() if key != "ds_config"}, sort_keys=True, indent=1)


@pytest.mark.parametrize(("optimizer", "extra", "before", "after"), CASES)
def test_what_is_written_is_what_that_number_of_ranks_saves(pool, tmp_path, optimizer, extra, before, after):
    pool.run(before, trained, str(tmp_path), optimizer, extra)
    first = pool.run(after, loaded_and_saved, str(tmp_path / "ours"), str(tmp_path / "again"), optimizer, extra)
    report = reshard_checkpoint(tmp_path / "ours", tmp_path / "new", world_size=after)
    assert (report.from_world_size, report.world_size, report.step, report.tag) == (before, after, 5, "t")
    expected, found = states_of(tmp_path / "again" / "t"), states_of(tmp_path / "new" / "t")
    assert expected.keys() == found.keys()
    for name in expected:
        assert normal(found[name]["state"]) == normal(expected[name]["state"]), name
        assert normal(found[name]["tensors"]) == normal(expected[name]["tensors"]), name
    assert contents(tmp_path / "new" / "t") == contents(tmp_path / "again" / "t")
    assert CheckpointReader(tmp_path / "new" / "t").verify() == []

    def loads(source: str, form: str) -> None:
        """Load what was written, by our engine or by DeepSpeed alone, and see that all is as in the first load."""
        out = tmp_path / f"{source}-{form}"
        if not out.exists():
            reshard_checkpoint(tmp_path / source, out, world_size=after, format=form)
        if form == "ds_galore":
            ranks = pool.run(after, loaded_and_saved, str(out), str(tmp_path / f"{source}-saved"), optimizer, extra)
        else:
            assert not list(out.rglob("*.json"))
            ranks = pool.run(after, loaded_by_deepspeed, str(out), optimizer, extra)
        for (state, losses), (state_found, losses_found, *client) in zip(first, ranks, strict=True):
            assert_same(state, state_found)
            assert losses == losses_found
            assert all(each["epoch"] == 3 and each["names"] == ("a", {"b"}) for each in client)

    (tmp_path / "new").rename(tmp_path / "ours-ds_galore")
    loads("ours", "ds_galore")
    if optimizer["type"] != "AdamW":
        with pytest.raises(ConfigError, match="low-rank states"):
            reshard_checkpoint(tmp_path / "ours", tmp_path / "refused", world_size=after, format="deepspeed")
        return
    loads("ours", "deepspeed")
    loads("native", "deepspeed")
    if extra.get("zero", {}).get("stage") != 1:  # as at stage 2
        loads("native", "ds_galore")
        assert contents(tmp_path / "native-ds_galore" / "t") == contents(tmp_path / "again" / "t")


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    pool.run(2, trained, str(directory / "galore"), GALORE, {})
    pool.run(2, trained, str(directory / "adamw"), ADAMW, {"special": True})
    return directory


def test_there_and_back_is_the_same(saved, tmp_path):
    for kind in ("galore", "adamw"):
        first = tmp_path / f"{kind}-5"
        reshard_checkpoint(saved / kind / "ours", first, world_size=5)
        reshard_checkpoint(first, tmp_path / f"{kind}-2", world_size=2)
        back, start = tmp_path / f"{kind}-2" / "t", saved / kind / "ours" / "t"
        assert contents(back) == contents(start)
        assert normal(states_of(back)) == normal(states_of(start))


def test_weights_of_what_is_written_are_the_same(saved, tmp_path):
    reshard_checkpoint(saved / "adamw" / "ours", tmp_path / "native", world_size=7, format="deepspeed")
    found, expected = load_state_dict(tmp_path / "native"), load_state_dict(saved / "adamw" / "native")
    assert set(found) == set(expected)
    for name in expected:
        assert found[name].dtype == expected[name].dtype
        assert found[name].tobytes() == expected[name].tobytes(), name
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    theirs = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "native"))
    assert set(theirs) == set(expected)
    for name, tensor in theirs.items():
        assert torch.equal(tensor, torch.from_numpy(np.ascontiguousarray(expected[name]))), name


def test_files_for_deepspeed_are_torch_files(saved, tmp_path):
    reshard_checkpoint(saved / "adamw" / "ours", tmp_path / "native", world_size=3, format="deepspeed")
    for path in (tmp_path / "native" / "t").glob("*.pt"):
        for options in ({}, {"mmap": True}):
            loaded = torch.load(path, weights_only=False, **options)
            assert isinstance(loaded, dict)
    optim = sorted((tmp_path / "native" / "t").glob("*_optim_states.pt"))
    inner = torch.load(optim[0], weights_only=False)["optimizer_state_dict"]["optimizer_state_dict"]
    steps = [state["step"] for state in inner["state"].values()]
    assert len({step.data_ptr() for step in steps}) == len(steps)


def test_what_cannot_be_done_is_told_before_anything_is_written(saved, tmp_path):
    ours = saved / "galore" / "ours"
    with pytest.raises(ConfigError, match="low-rank states"):
        reshard_checkpoint(ours, tmp_path / "out", world_size=2, format="deepspeed")
    with pytest.raises(ConfigError, match="format is 'zip': it must be ds_galore or deepspeed"):
        reshard_checkpoint(ours, tmp_path / "out", world_size=2, format="zip")
    with pytest.raises(ConfigError, match="world_size is 0"):
        reshard_checkpoint(ours, tmp_path / "out", world_size=0)
    with pytest.raises(DataError, match="is, or holds, the checkpoint that is read"):
        reshard_checkpoint(ours, ours, world_size=2, overwrite=True)
    shutil.copytree(saved / "adamw" / "native", tmp_path / "native")
    (tmp_path / "native" / "t" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(Exception, match="was written by 2 ranks, and 1 "):
        reshard_checkpoint(tmp_path / "native", tmp_path / "out", world_size=2)
    assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["native"]
