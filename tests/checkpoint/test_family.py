"""Checkpoints of every update rule, format and stage: exact, on any number of ranks, and resharded offline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds_galore.checkpoint.reader import CheckpointReader
from ds_galore.errors import ConfigError
from ds_galore.tools.reshard import reshard_checkpoint
from tests import jobs
from tests.checkpoint.engines import BATCH, BF16, assert_same, contents, logical, make, save


def case(kind: str, stage: int, *, zero: dict[str, Any] | None = None, extra: Any = None, **params: Any) -> Any:
    optimizer = {"type": kind, "params": {"lr": 1e-2, "rank": 8, "update_proj_gap": 3, **params}}
    return optimizer, {"zero": {"stage": stage, **(zero or {})}, "hidden": 64, **(extra or {})}


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
BF16_MASTERS = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
ENERGY = {"energy": 0.6, "max": 20}
CASES = {
    "8bit int8 sharded": case("GaLoreAdamW8bit", 3, projector_dtype="int8", projector_storage="sharded"),
    "8bit int4 std": case("GaLoreAdamW8bit", 2, projector_dtype="int4", proj_type="std"),
    "8bit adaptive": case("galore_adamw_8bit", 3, zero=OFFLOAD, adaptive_gap=True, stable_overlap=0.1, rank=7),
    "8bit stage 0": case("GaLoreAdamW8bit", 0, projector_dtype="int4", projector_rounding="stochastic", rank=7),
    "adafactor": case("GaLoreAdafactor", 3, zero={"sub_group_size": 3000}, proj_type="std", beta1=0.9),
    "adafactor stage 1": case("GaLoreAdafactor", 1),
    "apollo": case("APOLLOAdamW", 3, moment_dtype="bf16"),
    "apollo mini": case("APOLLOAdamW", 2, rank=1, scaling="tensor", proj_type="std"),
    "fira": case("FiraAdamW", 3, scale=0.5),
    "fira BF16_Optimizer": case("FiraAdamW", 1, extra={**BF16, "data_types": {"grad_accum_dtype": "fp32"}}),
    "energy": case("GaLoreAdamW", 3, rank=ENERGY, stochastic_rounding=True, moment_dtype="bf16", extra=BF16_MASTERS),
    "energy 8bit": case("GaLoreAdamW8bit", 2, rank=ENERGY, projector_dtype="int8", proj_type="std"),
    "random": case("GaLoreAdamW", 2, refresh="random"),
    "random start": case("GaLoreAdamW", 3, first_basis="random", refresh_budget=3),
}


def write(directory: str) -> dict[str, Any]:
    """Of each case, save after 5 and 7 steps, and see that the run goes on bit for bit; the losses afterwards."""
    found = {}
    data = jobs.batches(11, BATCH)
    for name, (optimizer, extra) in CASES.items():
        engine = make(optimizer, **extra)
        jobs.train(engine, data[:5])
        save(engine, f"{directory}/{name}", "base")
        jobs.train(engine, data[5:7])
        before = logical(engine)
        save(engine, f"{directory}/{name}", "moved", consumed=7)
        again = make(optimizer, **extra)
        assert again.load_checkpoint(f"{directory}/{name}")[1]["consumed"] == 7
        assert_same(before, logical(again))
        found[name] = jobs.train(engine, data[7:])
        assert jobs.train(again, data[7:]) == found[name], name
        assert_same(logical(engine), logical(again))
    return found


def move(directory: str, target: str) -> dict[str, Any]:
    """Of each case, load, save what was loaded, and train on."""
    found = {}
    for name, (optimizer, extra) in CASES.items():
        engine = make(optimizer, **extra)
        engine.load_checkpoint(f"{directory}/{name}")
        save(engine, f"{target}/{name}", "moved", consumed=7)
        found[name] = jobs.train(engine, jobs.batches(11, BATCH)[7:])
    return found


@pytest.fixture(scope="module")
def written(pool, tmp_path_factory):
    directory = tmp_path_factory.mktemp("family")
    return directory, pool.run(2, write, str(directory), timeout=600)


def test_every_rule_and_stage_goes_on_bit_for_bit(written):
    directory, losses = written
    assert losses[0] == losses[1]
    for name in CASES:
        reader = CheckpointReader(directory / name / "moved")
        assert reader.manifest.kind == "differential"
        assert reader.verify() == []
        if "stage 0" in name:  # states without the names of parameters, as DeepSpeed has them
            continue
        stored = {each.rpartition("/")[2] for each in reader.tensors}
        if "8bit" in name:
            assert {"exp_avg_absmax", "exp_avg_sq_absmax"} <= stored
            assert reader.tensors["model.embed_tokens.weight/exp_avg"].dtype == "U8"
        assert ("projector" in stored) == ("apollo" not in name and name != "random")
        assert ("projector_scale" in stored) == ("8bit" in name)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.crashtest), 3])
def test_every_rule_and_stage_goes_on_with_another_number_of_ranks(pool, tmp_path, written, ranks):
    directory, expected = written
    losses = pool.run(ranks, move, str(directory), str(tmp_path), timeout=600)
    assert all(each == losses[0] for each in losses)
    for name, (_, extra) in CASES.items():
        tolerance = 5e-3 if "bf16" in extra else 1e-3 if "8bit" in name else 1e-4
        difference = max(abs(a - b) for a, b in zip(losses[0][name], expected[0][name], strict=True))
        assert difference < tolerance, (name, difference)
        saved, found = contents(directory / name / "moved"), contents(tmp_path / name / "moved")
        assert found.keys() == saved.keys()
        assert [key for key in saved if found[key] != saved[key]] == [], name
        if extra["zero"]["stage"] and ranks == 3:
            resharded = tmp_path / f"{name} resharded"
            reshard_checkpoint(directory / name, resharded, world_size=ranks)
            assert contents(resharded / "moved") == saved
            assert CheckpointReader(resharded / "moved").verify() == []
            with pytest.raises(ConfigError, match=r"which DeepSpeed loads with this package only"):
                reshard_checkpoint(directory / name, tmp_path / "no", world_size=ranks, format="deepspeed")
    if ranks == 3:
        for name, found in pool.run(ranks, move_resharded, str(tmp_path), timeout=600)[0].items():
            assert found == losses[0][name], name


def move_resharded(directory: str) -> dict[str, Any]:
    found = {}
    for name, (optimizer, extra) in CASES.items():
        if Path(f"{directory}/{name} resharded").exists():
            engine = make(optimizer, **extra)
            assert engine.load_checkpoint(f"{directory}/{name} resharded")[1]["consumed"] == 7
            found[name] = jobs.train(engine, jobs.batches(11, BATCH)[7:])
    return found
