"""The planner against figures by hand, torch.optim, galore-torch, and what DeepSpeed writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from galore_torch import GaLoreAdamW as TheirGaLore

from ds_galore.errors import ConfigError
from ds_galore.tools.estimate import Job, estimate, parse_count
from ds_galore.tools.llamas import FAMILY, Llama
from ds_galore.tools.memory import ParameterPlan
from ds_galore.tools.optimizers import OPTIMIZERS, optimizer_named
from ds_galore.tools.storage import Schedule
from ds_galore.tools.tables import PAPER, paper_table
from tests import jobs
from tests.checkpoint.engines import ADAMW, BATCH, BF16
from tests.test_cli import CONFIG, command


def answer(*arguments: str) -> Any:
    done = command("estimate", *arguments, "--json", block="torch")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("arguments", "gigabytes"),
    [
        (["--params", "7e9", "--optimizer", "adamw", "--precision", "fp16", "--state-precision", "fp16"], 42),
        (["--params", "7B", "--optimizer", "AdamW", "--precision", "fp16"], 98),
        (["--params", "7e9", "--precision", "bf16", "--zero-stage", "3"], 84),  # DeepSpeed stores masters alone there
        (["--params", "100e6", "--optimizer", "sgd", "--precision", "fp32"], 0.4),
        (["--params", "100M", "--optimizer", "adam", "--precision", "bf16", "--state-precision", "bf16"], 0.6),
        (["--params", "1e9", "--optimizer", "lion", "--precision", "fp32"], 8),
        (["--params", "1e9", "--optimizer", "adamw-8bit", "--precision", "fp32"], 4 + 2 * (1 + 4 / 256)),
    ],
)
def test_a_checkpoint_is_parameters_times_copies_times_bytes(arguments, gigabytes):
    found = answer(*arguments)
    assert found["total_bytes"] == pytest.approx(gigabytes * 1e9, rel=1e-5)
    parts = ("weights", "master_weights", "moments", "projectors", "metadata")
    assert found["total_bytes"] == sum(found["checkpoint"][part] for part in parts)
    assert found["memory_total"]["total"] == sum(
        value for kind, value in found["memory_total"].items() if kind != "total"
    )


def test_the_papers_table_is_beside_ours():
    rows = {(row["model"], row["method"]): row for row in paper_table()}
    assert {name: (rows[name, "full-rank"]["paper_g"], rows[name, "GaLore"]["paper_g"]) for name in PAPER} == {
        "60M": (0.36, 0.24),
        "130M": (0.76, 0.52),
        "350M": (2.06, 1.22),
        "1B": (7.80, 4.38),
    }
    for name in ("130M", "350M"):
        assert abs(rows[name, "full-rank"]["difference"]) < 0.02
    # 350M by hand: 2 bytes a weight, and two moments.
    matrices = 24 * (4 * 1024 * 1024 + 3 * 1024 * 2736)
    numel = 2 * 32000 * 1024 + matrices + (2 * 24 + 1) * 1024
    assert rows["350M", "full-rank"]["bytes"] == 6 * numel
    # A square matrix keeps two moments of 1024 x 256 and a projector as large; a wide one has moments of 2736 x 256.
    low = 24 * (4 * 3 * 1024 * 256 + 3 * (2 * 2736 + 1024) * 256)
    assert rows["350M", "GaLore"]["bytes"] == 2 * numel + 2 * (2 * (numel - matrices) + low)


@pytest.mark.parametrize("name", ["130m", "1b"])
def test_models_of_the_paper_are_recognised_by_their_shapes(name):
    done = command("estimate", "--model-config", f"configs/models/llama_{name}.json", "--json")
    found = json.loads(done.stdout)
    assert found["parameters"] == FAMILY[name.upper()].parameters
    assert {row["model"] for row in found["paper"]} == {name.upper()}


def model(hidden: int = 64) -> torch.nn.Module:
    return jobs.tiny_llama(hidden=hidden)


def plans_of(module: torch.nn.Module) -> list[ParameterPlan]:
    return [
        ParameterPlan(name, each.numel(), each.shape[-1] if each.dim() == 2 else 0)
        for name, each in module.named_parameters()
    ]


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = [each for state in optimizer.state.values() for each in state.values() if isinstance(each, torch.Tensor)]
    return sum(each.numel() * each.element_size() for each in tensors if each.dim() > 0)


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("sgd", lambda p: torch.optim.SGD(p, lr=0.1)),
        ("sgd_momentum", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        ("adam", lambda p: torch.optim.Adam(p)),
        ("adamw", lambda p: torch.optim.AdamW(p)),
        ("adafactor", lambda p: torch.optim.Adafactor(p)),
    ],
)
def test_moments_are_those_of_torchs_optimizers(name, build):
    module = model()
    optimizer = build(module.parameters())
    tokens = jobs.batches(1, 2)[0]
    module(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    found = estimate(Job(plans_of(module), OPTIMIZERS[name], precision="fp32"))
    assert found.memory_per_rank["moments"] == state_bytes(optimizer)
    assert found.memory_per_rank["weights"] == sum(4 * each.numel() for each in module.parameters())
    assert found.memory_per_rank["master_weights"] == 0


def test_galore_is_as_large_as_galore_torchs():
    module, rank = model(), 16
    matrices = [each for name, each in module.named_parameters() if "_proj" in name]
    others = [each for name, each in module.named_parameters() if "_proj" not in name]
    group = {"params": matrices, "rank": rank, "update_proj_gap": 10, "scale": 1.0, "proj_type": "std"}
    optimizer = TheirGaLore([{"params": others}, group], no_deprecation_warning=True)
    tokens = jobs.batches(1, 2)[0]
    module(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    projectors = [state["projector"].ortho_matrix for state in optimizer.state.values() if "projector" in state]
    plans = []
    for name, each in module.named_parameters():
        rows, columns = (each.shape[0], each.shape[-1]) if each.dim() == 2 else (0, 0)
        side = ("right" if rows >= columns else "left") if "_proj" in name else ""
        plans.append(ParameterPlan(name, each.numel(), columns, rank if side else 0, side))
    found = estimate(Job(plans, OPTIMIZERS["galore_adamw"], precision="fp32"))
    assert found.memory_per_rank["moments"] == state_bytes(optimizer)
    assert found.memory_per_rank["projectors"] == sum(4 * each.numel() for each in projectors)


def saved_by_deepspeed(directory: str, extra: dict[str, Any]) -> int:
    """Bytes of DeepSpeed's own checkpoint after a step."""
    import torch.distributed as dist

    from ds_galore.tools.inspect import list_checkpoints

    settings = jobs.config(ADAMW, micro=BATCH // dist.get_world_size(), **extra)
    engine = jobs.start(model(256), settings)
    jobs.train(engine, jobs.batches(1, BATCH))
    engine.save_checkpoint(directory, tag="t")
    dist.barrier()
    return int(list_checkpoints(Path(directory))[0]["bytes"])


@pytest.mark.parametrize(
    ("extra", "precision"),
    [
        ({"zero": {"stage": 0}}, "fp32"),
        ({"zero": {"stage": 1}}, "fp32"),
        ({"zero": {"stage": 2}, **BF16}, "bf16"),
        ({"zero": {"stage": 3}}, "fp32"),
        ({"zero": {"stage": 3}, **BF16}, "bf16"),
    ],
)
def test_deepspeeds_checkpoints_have_the_size_that_is_told(pool, tmp_path, extra, precision):
    found = pool.run(2, saved_by_deepspeed, str(tmp_path), extra)[0]
    job = Job(plans_of(model(256)), OPTIMIZERS["adamw"], precision, stage=extra["zero"]["stage"], world_size=2)
    assert estimate(job).total_bytes == pytest.approx(found, rel=0.02)


def test_memory_of_the_stages_is_partitioned_as_zero_says():
    plans = [ParameterPlan("p", 1_000_000)]
    sizes = [
        estimate(Job(plans, OPTIMIZERS["adamw"], "bf16", stage=stage, world_size=4)).memory_per_rank
        for stage in range(4)
    ]
    assert [(s["weights"], s["gradients"], s["master_weights"], s["moments"]) for s in sizes] == [
        (2_000_000, 2_000_000, 4_000_000, 8_000_000),
        (2_000_000, 2_000_000, 1_000_000, 2_000_000),
        (2_000_000, 500_000, 1_000_000, 2_000_000),
        (500_000, 500_000, 1_000_000, 2_000_000),
    ]
    traffic = [
        estimate(Job(plans, OPTIMIZERS["sgd"], "bf16", stage=stage, world_size=4)).traffic_per_step
        for stage in range(4)
    ]
    assert [each["total"] for each in traffic] == [
        3_000_000,
        3_000_000,
        3_000_000,
        4_500_000,
    ]  # (W - 1)/W of 2, 2, 2, 3


def test_storage_counts_what_stays_and_what_is_written():
    job = Job([ParameterPlan("p", 1_000_000)], OPTIMIZERS["adamw"], "fp32", stage=3)
    found = estimate(job, Schedule(steps=1000, save_every=40, keep_last=3, full_every=10))
    storage, checkpoint = found.storage, found.checkpoint
    assert storage is not None
    # Saves 0 to 24 are made, 22 to 24 stay: differences from number 20, whose files they share.
    assert (storage["saves"], storage["kept"], storage["full_on_disk"], storage["differential_on_disk"]) == (
        25,
        3,
        1,
        3,
    )
    full, diff = checkpoint["full_compressed"], checkpoint["differential_compressed"]
    assert storage["ours"] == [full[0] + 3 * diff[0], full[1] + 3 * diff[1]]
    assert storage["ours_written"] == [3 * full[0] + 22 * diff[0], 3 * full[1] + 22 * diff[1]]
    assert storage["deepspeed"] == 3 * found.total_bytes
    assert storage["deepspeed_written"] == 25 * found.total_bytes
    everything = estimate(job, Schedule(steps=1000, save_every=100, full_every=1)).storage
    assert everything is not None
    assert (everything["kept"], everything["full_on_disk"], everything["differential_on_disk"]) == (10, 10, 0)
    # Increments: 23 and 24 need 20, which is full, and all between; 12 and 18 (after 520 and 760 steps) stay as well.
    chain = estimate(job, Schedule(1000, 40, 2, 10, incremental=True)).storage
    assert chain is not None
    assert (chain["kept"], chain["full_on_disk"], chain["differential_on_disk"]) == (2, 1, 4)
    more = estimate(job, Schedule(1000, 40, 2, 10, keep_every=400)).storage
    assert more is not None  # after 400 and 800 steps: saves 9 and 19, of two other bases
    assert (more["kept"], more["full_on_disk"], more["differential_on_disk"]) == (4, 3, 4)
    with pytest.raises(ConfigError, match="save_every is 2000, and the run has 1000 steps: nothing is saved"):
        estimate(job, Schedule(steps=1000, save_every=2000))


def test_a_number_of_parameters_alone_takes_the_shapes_of_a_similar_llama_and_says_so():
    found = answer("--params", "350e6", "--optimizer", "galore_adamw", "--rank", "256", "--precision", "bf16")
    assert any("shapes are those of a Llama 350M" in each for each in found["assumptions"])
    exact = estimate(Job(FAMILY["350M"].plans(256), OPTIMIZERS["galore_adamw"], "bf16"))
    ratio = 350e6 / exact.parameters
    assert found["parameters"] == 350_000_000
    assert found["memory_per_rank"]["weights"] == 700_000_000
    assert found["memory_per_rank"]["moments"] == pytest.approx(ratio * exact.memory_per_rank["moments"], rel=1e-6)
    assert found["plain_adamw"]["memory_per_rank"]["moments"] == 8 * 350_000_000


def test_a_configuration_gives_what_options_do_not():
    found = json.loads(
        command("estimate", "--config", CONFIG, "--model-config", "configs/models/tiny.json", "--json").stdout
    )
    assert (found["optimizer"], found["zero_stage"], found["precision"]) == ("galore_adamw", 3, "bf16")
    other = json.loads(
        command(
            *("estimate", "--config", CONFIG, "--model-config", "configs/models/tiny.json", "--json"),
            *("--optimizer", "lion", "--zero-stage", "2", "--precision", "fp16"),
        ).stdout
    )
    assert (other["optimizer"], other["zero_stage"], other["precision"]) == ("lion", 2, "fp16")


def test_all_of_a_configuration_counts(tmp_path):
    def asked(config: dict[str, Any], *more: str) -> Any:
        path = tmp_path / "config.json"
        path.write_text(
            json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, **config})
        )
        done = command("estimate", "--config", str(path), "--params", "1e9", *more, "--json", block="torch")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    assert asked({})["precision"] == "fp32"
    assert asked({"bf16": {"enabled": False}})["precision"] == "fp32"
    automatic = asked({"bf16": {"enabled": "auto"}})
    assert automatic["precision"] == "bf16"
    assert any("bf16 weights" in each for each in automatic["assumptions"])
    run = ("--steps", "100", "--save-every", "1")
    adamw = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 3}}
    full = asked({**adamw, "ds_galore": {"checkpoint": {"mode": "full"}}}, *run)["storage"]
    assert (full["full_on_disk"], full["differential_on_disk"]) == (100, 0)
    section = {"mode": "incremental", "full_every": 5, "keep_last": 2, "keep_every": 100}
    chain = asked({**adamw, "ds_galore": {"checkpoint": section}}, *run)["storage"]
    assert (chain["kept"], chain["full_on_disk"], chain["differential_on_disk"]) == (2, 1, 4)
    exact = asked(adamw)["checkpoint"]
    small = asked({**adamw, "ds_galore": {"checkpoint": {"state_dtype": "int8"}}})["checkpoint"]
    assert exact["full"] - small["full"] == pytest.approx(2 * 1e9 * (4 - 1 - 4 / 256))
    galore = {"type": "GaLoreAdamW", "params": {"rank": 256, "projector_dtype": "bf16"}}
    halved = asked({"optimizer": galore, "zero_optimization": {"stage": 3}})
    galore["params"] = {"rank": 256}
    whole = asked({"optimizer": galore, "zero_optimization": {"stage": 3}})
    assert whole["memory_per_rank"]["projectors"] == pytest.approx(
        2 * halved["memory_per_rank"]["projectors"], rel=1e-6
    )


def test_adafactor_under_zero_has_a_number_an_element():
    found = answer(*("--params", "1e9", "--optimizer", "adafactor", "--zero-stage", "2", "--world-size", "4"))
    assert found["memory_per_rank"]["moments"] == pytest.approx(1e9, rel=1e-3)
    assert found["memory_per_rank"]["projectors"] == 0
    assert found["total_bytes"] == pytest.approx(10e9, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give the model by --params NUMBER or by --model-config PATH"),
        (["--params", "7e9", "--model-config", "x"], "and not by both"),
        (["--params", "many"], "'many' is no number of parameters such as 7e9, 7B or 350M"),
        (["--params", "-5"], "'-5' is no number of parameters"),
        (["--params", "7e9", "--optimizer", "adamv"], "optimizer is 'adamv': no such optimizer; did you mean 'adam'?"),
        (["--params", "7e9", "--steps", "10"], "--steps and --save-every go together"),
        (["--params", "7e9", "--steps", "10", "--save-every", "20"], "nothing is saved"),
        (["--params", "1e400"], "'1e400' is no number of parameters"),
        (["--params", "7e9", "--keep-last", "3"], "--keep-last is about a run: give --steps and --save-every too"),
        (["--params", "7e9", "--rank", "5"], "--rank goes with an optimizer that projects"),
        (["--params", "7e9", "--optimizer", "galore_adamw", "--rank", "100000"], "rank is 100000: no matrix"),
        (["--params", "7e9", "--precision", "fp8"], "'fp8' is not one of"),
        (["--params", "7e9", "--world-size", "0"], "0 is not in the range x>=1"),
        (["--params", "7e9", "--config", "nowhere.json"], "nowhere.json"),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    done = command("estimate", *arguments, block="torch")
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_names_and_numbers():
    assert optimizer_named("GaLoreAdamW").name == "galore_adamw"
    assert optimizer_named("galore-adamw-8bit") == optimizer_named("galore_adamw8bit")
    assert parse_count("1.5B") == 1_500_000_000
    assert parse_count(" 7e9 ") == 7_000_000_000
    with pytest.raises(ValueError, match="is no number"):
        parse_count("0")
    with pytest.raises(ConfigError, match="zero_stage is 4"):
        Job([], OPTIMIZERS["sgd"], stage=4)
    with pytest.raises(ConfigError, match="precision is 'int4'"):
        Job([], OPTIMIZERS["sgd"], precision="int4")
    assert Llama(8, 16, 1, 10).parameters == 2 * 80 + 4 * 64 + 3 * 128 + 3 * 8
