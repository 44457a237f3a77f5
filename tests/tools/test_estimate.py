"""The planner against figures by hand, torch.optim, galore-torch, and what DeepSpeed writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from galore_torch import GaLoreAdamW as TheirGaLore

from ds_galore.cli.described import job_of, settings_of
from ds_galore.cli.planning import estimate as estimate_command
from ds_galore.errors import ConfigError
from ds_galore.tools.estimate import Job, estimate, parse_count
from ds_galore.tools.llamas import FAMILY, Llama
from ds_galore.tools.memory import ParameterPlan
from ds_galore.tools.optimizers import OPTIMIZERS, optimizer_named
from ds_galore.tools.storage import Schedule
from ds_galore.tools.tables import PAPER, crossover_table, eight_bit_table, optimizer_bytes, paper_table
from tests import jobs
from tests.checkpoint.engines import ADAMW, BATCH, BF16
from tests.test_cli import CONFIG, ROOT, command


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


# ---------------------------------------------------------------------- states in few bits

#: A Llama 7B by hand: rows and columns of the seven matrices of a layer, and what is not projected.
ROWS, COLUMNS = 4 * 4096 + 2 * 11008 + 4096, 4 * 4096 + 2 * 4096 + 11008
UNPROJECTED, NORMS = 2 * 32000 * 4096, 65 * 4096
NUMEL = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + UNPROJECTED + NORMS
SCALED = 1024 + 4 * 4  # a row of 1024 bytes and its scales


def rows_of_table() -> dict[tuple[Any, ...], dict[str, Any]]:
    keys = ("optimizer", "rank", "moments", "unprojected_moments", "projectors")
    return {tuple(row[key] for key in keys): row for row in eight_bit_table()}


def test_8_bit_galore_of_7b_is_over_82_percent_below_bf16_adamw():
    table = rows_of_table()
    bf16 = table["adamw", None, "bf16", "bf16", None]["bytes"]["1"]
    assert bf16 == 4 * NUMEL == 26_953_662_464
    moments = 2 * (32 * ROWS * SCALED + (UNPROJECTED + NORMS) * 260 // 256)
    for projectors, row, saved in (("int8", SCALED, 0.8313), ("int4", 512 + 16, 0.8530)):
        found = table["galore_adamw_8bit", 1024, "8bit", "8bit", projectors]
        assert found["bytes"]["1"] == moments + 32 * COLUMNS * row
        assert found["below_bf16_adamw"] >= 0.825
        assert found["below_bf16_adamw"] == pytest.approx(saved, abs=1e-4)
        assert found["sharded"] == {"1": False, "8": True, "64": True}


def test_sharded_8_bit_galore_wins_against_8_bit_adamw_on_many_ranks():
    table = rows_of_table()
    adamw = table["adamw_8bit", None, "8bit", "8bit", None]["bytes"]
    parts = {size: NUMEL // size for size in (1, 8, 64)}
    assert adamw == {str(size): 2 * (part + 4 * -(-part // 256)) for size, part in parts.items()}
    for projectors in ("bf16", "int8", "int4"):
        found = table["galore_adamw_8bit", 1024, "8bit", "8bit", projectors]["bytes"]
        assert all(found[size] < 0.42 * adamw[size] for size in ("8", "64"))
    # Every shape divides by 64, so that a rank holds a 64th of it all; of a norm's block it still has the whole scale.
    found = table["galore_adamw_8bit", 1024, "8bit", "8bit", "int8"]["bytes"]
    assert found["8"] == found["1"] // 8
    assert found["64"] == found["1"] // 64 + 2 * 65 * (4 - 1)


def test_other_rows_of_the_table_by_hand():
    table = rows_of_table()
    low, others = 32 * ROWS * 1024, UNPROJECTED + NORMS
    sizes = {key: row["bytes"]["1"] for key, row in table.items()}
    assert sizes["galore_adamw", 1024, "fp32", "fp32", "fp32"] == 8 * (low + others) + 4 * 32 * COLUMNS * 1024
    assert sizes["galore_adamw", 1024, "bf16", "bf16", "bf16"] == 4 * (low + others) + 2 * 32 * COLUMNS * 1024
    assert sizes["apollo_adamw", 1024, "fp32", "fp32", None] == 8 * (low + others)
    assert sizes["apollo_adamw", 1, "fp32", "fp32", None] == 8 * (32 * ROWS + others)
    assert sizes["apollo_adamw", 1, "8bit", "8bit", None] == 2 * (32 * ROWS * 5 + others * 260 // 256)
    assert sizes["fira_adamw", 1024, "fp32", "fp32", "fp32"] == sizes["galore_adamw", 1024, "fp32", "fp32", "fp32"]
    factored = 4 * (32 * (ROWS + 7 * 1024) + 2 * (32000 + 4096) + NORMS)
    adafactor = table["galore_adafactor", 1024, "factored", "factored", "int8"]["bytes"]
    assert adafactor["1"] == factored + 32 * COLUMNS * SCALED
    # Columns are on every rank: 7 x 1024 of a layer, 4096 of embeddings and of the head.
    whole = 4 * (32 * 7 * 1024 + 2 * 4096)
    assert adafactor["8"] == (factored - whole + 32 * COLUMNS * SCALED) // 8 + whole


def test_from_how_many_ranks_projectors_weigh():
    rows = {(row["moments"], row["projectors"]): row for row in crossover_table()}
    assert all(row["sharded_loses_from"] is None for row in rows.values())
    assert {key: (row["sharded_from"], row["replicated_loses_from"]) for key, row in rows.items()} == {
        ("fp32", "fp32"): (3, 9),
        ("fp32", "bf16"): (5, 18),
        ("bf16", "bf16"): (3, 9),
        ("8bit", "bf16"): (2, 5),
        ("8bit", "int8"): (3, 9),
        ("8bit", "int4"): (5, 18),
    }
    # By hand, fp32: AdamW has 8 bytes a parameter on W ranks; we the moments on W ranks, and projectors on each.
    moments = 8 * (32 * ROWS * 1024 + UNPROJECTED + NORMS)
    assert 8 < (8 * NUMEL - moments) / (4 * 32 * COLUMNS * 1024) < 9


def test_tables_are_shown():
    done = command("estimate", "--table", "8bit", block="torch")
    assert (done.returncode, done.stderr) == (0, "")
    line = next(line for line in done.stdout.splitlines() if "galore_adamw_8bit" in line and "int4" in line)
    assert all(part in line for part in ("4.0 GB", "495.3 MB", "61.9 MB", "85.3%", "0.29"))
    assert answer("--table", "8bit") == eight_bit_table()
    assert "replicated loses" in command("estimate", "--table", "crossover", block="torch").stdout
    assert answer("--table", "crossover") == crossover_table()


def test_the_documented_tables_are_these():
    text = (ROOT / "docs" / "estimate.md").read_text(encoding="utf-8")
    for row in eight_bit_table():
        size = {ranks: value / 1e9 for ranks, value in row["bytes"].items()}
        cells = [row["optimizer"], row["rank"] or "-", row["moments"], row["unprojected_moments"]]
        cells += [row["projectors"] or "-", f"{size['1']:.2f}", f"{size['8']:.2f}", f"{size['64']:.3f}"]
        cells += [f"{row['below_bf16_adamw']:.1%}", f"{row['of_adamw_8bit']['64']:.2f}"]
        assert f"| {' | '.join(map(str, cells))} |" in text
    for row in crossover_table():
        beside = {"8bit": "8 bits"}.get(row["moments"], row["moments"])
        cells = [row["moments"], row["projectors"], beside, row["sharded_from"], row["replicated_loses_from"]]
        assert f"| {' | '.join(map(str, cells))} | never |" in text


def test_options_plan_what_the_table_has():
    asked = ("--params", str(NUMEL), "--rank", "1024", "--proj-type", "right", "--zero-stage", "3", "--world-size", "8")
    int4 = ("--optimizer", "GaLoreAdamW8bit", "--projector-dtype", "int4")
    found = answer(*asked, *int4)
    expected = optimizer_bytes(replace(OPTIMIZERS["galore_adamw_8bit"], projector_dtype="int4"), 1024, 8)
    memory = found["memory_per_rank"]
    assert (memory["moments"] + memory["projectors"], True) == expected
    assert memory["projectors"] == 32 * COLUMNS * (512 + 16) // 8
    assert found["formats"] == {
        "master_weights": "fp32",
        "moments": "8bit",
        "unprojected_moments": "8bit",
        "factored_moments": None,
        "projectors": "int4",
    }
    whole = answer(*asked, *int4, "--projector-storage", "replicated", "--unprojected-moment-dtype", "fp32")
    assert whole["memory_per_rank"]["projectors"] == 32 * COLUMNS * (512 + 16)
    assert whole["memory_per_rank"]["moments"] == 2 * (32 * ROWS * SCALED + 4 * (UNPROJECTED + NORMS)) // 8
    assert found["traffic_per_step"]["low_rank"] == 32 * COLUMNS * (512 + 16) * 7 // 8  # gathered as it is kept
    assert whole["traffic_per_step"]["low_rank"] == 0
    drawn = answer(*asked, "--optimizer", "galore_adamw", "--moment-dtype", "bf16", "--refresh", "random")
    assert drawn["memory_per_rank"]["projectors"] == drawn["traffic_per_step"]["low_rank"] == 0
    assert drawn["memory_per_rank"]["moments"] == 4 * (32 * ROWS * 1024 + UNPROJECTED + NORMS) // 8


def planned(config: dict[str, Any], *arguments: str) -> Any:
    """The estimate of a configuration that has been checked, with options."""
    options = estimate_command.make_context("estimate", ["--params", str(NUMEL), *arguments]).params
    return estimate(*job_of(options, settings_of(config)))


ZERO3 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}


@pytest.mark.parametrize(
    ("kind", "params", "states"),
    [
        ("GaLoreAdamW", {}, ("fp32", "fp32", None, "fp32")),
        ("galore_adamw", {"moment_dtype": "bf16", "projector_dtype": "bf16"}, ("bf16", "bf16", None, "bf16")),
        ("GaLoreAdamW", {"moment_dtype": "8bit", "unprojected_moment_dtype": "fp32"}, ("8bit", "fp32", None, "fp32")),
        ("GaLoreAdamW", {"unprojected_moment_dtype": None, "moment_dtype": "8bit"}, ("8bit", "8bit", None, "fp32")),
        ("GaLoreAdamW8bit", {"projector_dtype": "int8"}, ("8bit", "8bit", None, "int8")),
        ("galore_adamw_8bit", {"unprojected_moment_dtype": "bf16"}, ("8bit", "bf16", None, "int8")),
        ("GaLoreAdafactor", {}, (None, None, "fp32", "fp32")),
        ("galore_adafactor", {"beta1": 0.9, "moment_dtype": "bf16"}, ("bf16", "bf16", "fp32", "fp32")),
        ("APOLLOAdamW", {}, ("fp32", "fp32", None, None)),
        ("apollo_adamw", {"refresh": "svd", "projector_dtype": "int4"}, ("fp32", "fp32", None, "int4")),
        ("GaLoreAdamW", {"refresh": "random", "moment_dtype": "8bit"}, ("8bit", "8bit", None, None)),
        ("GaLoreAdamW8bit", {}, ("8bit", "8bit", None, "int8")),
    ],
)
def test_a_configuration_says_what_states_are_kept_in(kind, params, states):
    found = planned({**ZERO3, "optimizer": {"type": kind, "params": {"rank": 1024, **params}}})
    assert tuple(found.formats.values()) == ("fp32", *states)
    assert any("projected from the right" in each for each in found.assumptions)
    assert not any("is not in this package" in each for each in found.assumptions)
    assert (found.memory_per_rank["projectors"] > 0) == (states[3] is not None)
    moments = {"bf16": 4 * 1024, "8bit": 2 * SCALED, "fp32": 8 * 1024}
    if states[2] is None:
        others = {"bf16": 4, "8bit": 2 * 260 / 256, "fp32": 8}[str(states[1])] * (UNPROJECTED + NORMS)
        assert found.memory_per_rank["moments"] == 32 * ROWS * moments[str(states[0])] + others


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        (
            "GaLoreAdamW",
            {"moment_dtype": "fp8"},
            "optimizer.params.moment_dtype is 'fp8': input should be 'fp32', 'bf16' or '8bit'",
        ),
        (
            "GaLoreAdamW",
            {"unprojected_moment_dtype": 8},
            "optimizer.params.unprojected_moment_dtype is 8: input should be",
        ),
        (
            "FiraAdamW",
            {"projector_dtype": "int2"},
            "projector_dtype is 'int2': input should be 'fp32', 'bf16', 'int8' or 'int4'",
        ),
        (
            "GaLoreAdamW8bit",
            {"moment_dtype": "fp32"},
            "optimizer.params.moment_dtype is 'fp32': input should be '8bit'",
        ),
        ("APOLLOAdamW", {"refresh": "never"}, "refresh is 'never': input should be 'random', 'subspace' or 'svd'"),
        ("FiraAdamW", {"refresh": "random"}, "optimizer.params: refresh is 'random'"),
        ("GaLoreAdamW", {"rank": {"energy": 0.95}}, "rank is {'energy': 0.95}: it must be a whole number above 0"),
        ("GaLoreAdamW", {"rank": "half"}, "rank is 'half': it must be a whole number above 0"),
    ],
)
def test_impossible_parameters_are_named(kind, params, message):
    with pytest.raises(ConfigError) as error:
        planned({**ZERO3, "optimizer": {"type": kind, "params": {"rank": 64, **params}}})
    assert message in str(error.value)


def test_a_rank_by_energy_is_planned_at_its_largest():
    galore = {"type": "GaLoreAdamW", "params": {"rank": {"energy": 0.95, "max": 256}}}
    found = planned({**ZERO3, "optimizer": galore})
    assert found.memory_per_rank["projectors"] == 4 * 32 * COLUMNS * 256
    assert "rank by energy: the largest, 256, for every matrix" in found.assumptions
    assert planned({**ZERO3, "optimizer": galore}, "--rank", "128").memory_per_rank["projectors"] == (
        4 * 32 * COLUMNS * 128
    )


def test_an_option_stands_for_another_type_in_the_same_configuration():
    galore = {
        "rank": 1024,
        "moment_dtype": "bf16",
        "projector_dtype": "int8",
        "refresh": "subspace",
        "proj_type": "std",
    }
    config = {**ZERO3, "optimizer": {"type": "GaLoreAdamW", "params": galore}}
    eight = planned(config, "--optimizer", "galore_adamw_8bit").formats
    assert (eight["moments"], eight["projectors"]) == ("8bit", "int8")
    apollo = planned(config, "--optimizer", "apollo_adamw")
    assert (apollo.formats["moments"], apollo.formats["projectors"]) == ("bf16", None)
    assert any("projected as std does" in each for each in apollo.assumptions)
    assert planned(config, "--optimizer", "adamw").formats["moments"] == "fp32"


def test_masters_of_deepspeed_may_be_bf16():
    galore = {"type": "GaLoreAdamW", "params": {"rank": 1024}}
    narrow = {**ZERO3, "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
    found = planned({**narrow, "optimizer": galore})
    assert (found.formats["master_weights"], found.formats["moments"]) == ("bf16", "fp32")
    assert found.memory_per_rank["master_weights"] == found.memory_per_rank["gradients"] == 2 * NUMEL
    both = {**ZERO3, "bf16": {**narrow["bf16"], "bf16_optimizer_states": True}}
    assert planned({**both, "optimizer": galore}).formats["moments"] == "fp32"  # ours has its own key for them
    adamw = planned({**both, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}})
    assert adamw.memory_per_rank["moments"] == 4 * NUMEL
    assert planned({**narrow, "optimizer": galore}, "--state-precision", "fp32").formats["master_weights"] == "fp32"


def test_only_moments_in_fp32_are_made_smaller_in_a_checkpoint():
    def full(params: dict[str, Any], state_dtype: str) -> int:
        config = {"optimizer": {"type": "GaLoreAdamW", "params": {"rank": 1024, **params}}, **ZERO3}
        config["ds_galore"] = {"checkpoint": {"state_dtype": state_dtype}}
        return int(planned(config).checkpoint["full"])

    def saved(params: dict[str, Any]) -> int:
        return full(params, "exact") - full(params, "bf16")

    low, others = 32 * ROWS * 1024, UNPROJECTED + NORMS
    assert saved({}) == 4 * (low + others)
    assert saved({"moment_dtype": "8bit", "unprojected_moment_dtype": "fp32"}) == 4 * others
    assert saved({"moment_dtype": "8bit"}) == saved({"moment_dtype": "bf16"}) == 0


def test_compression_is_told_as_measured_only_where_it_was():
    def basis(kind: str, **params: Any) -> tuple[str, float]:
        found = planned({"optimizer": {"type": kind, "params": {"rank": 1024, **params}}, **ZERO3}).checkpoint
        return found["basis"].split()[0], round(found["full"] / found["differential_compressed"][0], 2)

    assert basis("GaLoreAdamW") == ("measured", 2.45)
    assert basis("GaLoreAdamW", projector_dtype="int8") == ("not", 2.45)
    assert basis("APOLLOAdamW") == basis("FiraAdamW") == ("not", 1.27)  # their updates are not of low rank
    assert basis("GaLoreAdamW", refresh="random") == ("not", 1.27)


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
    galore = {"type": "GaLoreAdamW", "params": {"lr": 1e-3, "rank": 256}}
    zero = {"zero_optimization": {"stage": 3}}
    plain = asked({"optimizer": galore, **zero})["memory_per_rank"]
    chosen = {**galore, "params": {**galore["params"], "gradients": "lowrank"}}
    lowered = asked({"optimizer": chosen, **zero})
    assert lowered == asked({"optimizer": {**galore, "type": "galore_adamw_layerwise"}, **zero})
    assert lowered["memory_per_rank"]["gradients"] < 0.35 * plain["gradients"]
    assert lowered["memory_per_rank"]["moments"] == plain["moments"]
    other = asked({"optimizer": chosen, **zero}, "--optimizer", "apollo_adamw")
    assert other["memory_per_rank"]["gradients"] == plain["gradients"]
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
        (["--params", "7e9", "--optimizer", "GaLoreAdamW", "--moment-dtype", "fp8"], "'fp8' is not one of"),
        (["--params", "7e9", "--optimizer", "GaLoreAdamW", "--projector-dtype", "8bit"], "'8bit' is not one of"),
        (
            ["--params", "7e9", "--optimizer", "GaLoreAdamW8bit", "--moment-dtype", "bf16"],
            "optimizer.params.moment_dtype is 'bf16': input should be '8bit'",
        ),
        (["--params", "7e9", "--moment-dtype", "8bit"], "--moment-dtype goes with an optimizer of this package"),
        (
            ["--params", "7e9", "--optimizer", "apollo_adamw", "--projector-dtype", "int8"],
            "--projector-dtype: apollo_adamw with refresh random keeps no projectors",
        ),
        (["--params", "7e9", "--optimizer", "fira_adamw", "--beta1", "0.9"], "--beta1 goes with galore_adafactor"),
        (
            ["--params", "7e9", "--optimizer", "GaLoreAdafactor", "--moment-dtype", "bf16"],
            "--moment-dtype: galore_adafactor has factored moments alone",
        ),
        (["--paper", "--table", "8bit"], "--paper and --table 8bit are two tables: give one of them"),
        (["--table", "4bit"], "'4bit' is not one of"),
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
    for ours, name in (
        ("GaLoreAdamW8bit", "galore_adamw_8bit"),
        ("GaLoreAdafactor", "galore_adafactor"),
        ("APOLLOAdamW", "apollo_adamw"),
        ("FiraAdamW", "fira_adamw"),
    ):
        assert optimizer_named(ours) is optimizer_named(name)
        assert optimizer_named(ours).ours
    assert parse_count("1.5B") == 1_500_000_000
    assert parse_count(" 7e9 ") == 7_000_000_000
    with pytest.raises(ValueError, match="is no number"):
        parse_count("0")
    with pytest.raises(ConfigError, match="zero_stage is 4"):
        Job([], OPTIMIZERS["sgd"], stage=4)
    with pytest.raises(ConfigError, match="precision is 'int4'"):
        Job([], OPTIMIZERS["sgd"], precision="int4")
    assert Llama(8, 16, 1, 10).parameters == 2 * 80 + 4 * 64 + 3 * 128 + 3 * 8
