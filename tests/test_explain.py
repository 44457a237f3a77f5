"""Configurations in plain words: what is used, ignored, in conflict; and the tables of DeepSpeed's keys."""

from __future__ import annotations

import copy
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ds_galore.config import load_config
from ds_galore.conflicts import check_config
from ds_galore.deepspeed_keys import (
    AUTO,
    CLOSED_SECTIONS,
    DEEPSPEED_OPTIMIZERS,
    OPEN_SECTIONS,
    REMOVED,
    SCHEDULERS,
    UNUSED_BY_STAGE_3,
    UNUSED_BY_STAGES_1_AND_2,
)
from ds_galore.errors import ConfigError
from ds_galore.explain import explain
from tests.test_cli import ROOT, command

CONFIGS = sorted((ROOT / "configs").glob("*.json"))


def changed(**changes: Any) -> dict[str, Any]:
    """The shipped ZeRO-3 configuration, without "auto", with some keys replaced; ``params`` are the optimizer's."""
    config = load_config(ROOT / "configs" / "zero3_galore.json")
    config["bf16"] = {"enabled": True}
    del config["scheduler"]
    config["optimizer"]["params"].update(changes.pop("params", {}))
    config["zero_optimization"].update(changes.pop("zero", {}))
    return {**config, **changes}


def keys(lines: list[str]) -> set[str]:
    return {line.partition(":")[0] for line in lines}


# ---------------------------------------------------------------------- what is used


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_configuration_is_fine_and_explained(path):
    config = load_config(path)
    found = explain(config)
    assert found.fine
    told = {line.partition(":")[0]: line for line in found.uses}
    assert config["optimizer"]["type"] in told["optimizer"]
    stage = config["zero_optimization"]["stage"]
    assert f"ZeRO {stage}" in told
    assert told["checkpoints"].startswith("checkpoints: DeepSpeed's own")
    if config["optimizer"]["type"] != "AdamW":
        assert f"at rank {config['optimizer']['params']['rank']}" in told["projected"]
        assert f"new every {config['optimizer']['params']['update_proj_gap']} steps" in told["bases"]
    assert keys(found.ignored) == ({"zero_force_ds_cpu_optimizer"} if "offload" in path.stem else set())


def test_each_part_is_told_by_what_is_configured():
    config = changed(
        params={
            "rank": {"energy": 0.9, "max": 96},
            "proj_type": "left",
            "target_modules": "all-linear",
            "moment_dtype": "bf16",
            "unprojected_moment_dtype": "fp32",
            "projector_dtype": "int8",
            "adaptive_gap": True,
            "refresh_budget": 3,
            "first_basis": "random",
            "stochastic_rounding": True,
        },
        bf16={"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        tensorboard={"enabled": True},
        csv_monitor={"enabled": False},
        ds_galore={
            "monitor": {"log": "run/events.jsonl"},
            "checkpoint": {"mode": "incremental", "full_every": 4, "keep_last": 2, "keep_every": 100, "async": False},
        },
    )
    found = explain(config)
    assert found.conflicts == []
    text = "\n".join(found.uses)
    for expected in (
        "at the rank that captures 90% of a gradient, at most 96",
        "all linear layers but the head",
        "from the left",
        "up to 8 times as seldom while a basis overlaps by 0.6",
        "3 at most on one",
        "at random until a matrix's first turn",
        "moments bf16 (fp32 of what is not projected), projectors int8",
        "no fp32 masters, updates rounded stochastically",
        "incremental: every 4th is full, the others hold what changed since the one before",
        "written before save_checkpoint returns",
        "the newest 2 and those of every 100th step stay",
        "schedule: WarmupLR (warmup_num_steps 5)",
    ):
        assert expected in text
    assert found.uses[-1] == "monitors: tensorboard and the file run/events.jsonl"
    assert any("keep_last thins out" in line for line in found.warnings)


def test_what_is_told_of_the_optimizer_is_what_the_optimizer_takes():
    """A hyperparameter's default is told where the configuration has none."""
    config = changed()
    del config["optimizer"]["params"]["update_proj_gap"], config["optimizer"]["params"]["target_modules"]
    told = "\n".join(explain(config).uses)
    assert "new every 200 steps" in told
    assert "all linear layers but the head" in told
    assert "whole on every rank or in parts" in told


def test_where_nodes_have_storage_of_their_own_that_is_told():
    config = {**changed(), "ds_galore": {"checkpoint": {}}, "checkpoint": {"use_node_local_storage": True}}
    assert any(
        "each node its own ranks, in the directory that the program saves to" in line for line in explain(config).uses
    )


# ---------------------------------------------------------------------- what is ignored


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (changed(params={"stable_overlap": 0.9, "max_gap_factor": 2}), {"stable_overlap", "max_gap_factor"}),
        (changed(params={"stable_overlap": 0.9, "adaptive_gap": True}), set()),
        (changed(params={"refresh": "svd", "power_iterations": 2}), {"power_iterations"}),
        (changed(params={"refresh": "random", "projector_dtype": "fp32"}), {"projector_dtype"}),
        (changed(params={"projector_rounding": "nearest"}), {"projector_rounding"}),
        (changed(params={"projector_rounding": "nearest", "projector_dtype": "int8"}), set()),
        (changed(params={"projector_storage": "sharded", "proj_type": "left"}), {"projector_storage"}),
        (changed(params={"stochastic_rounding": True}), {"stochastic_rounding"}),
    ],
)
def test_hyperparameters_without_effect_are_named(config, expected):
    found = explain(config)
    assert found.conflicts == []
    assert keys(found.ignored) == {f"optimizer.params.{key}" for key in expected}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (changed(my_own_section={"a": 1}), {"my_own_section"}),
        (
            changed(activation_checkpointing={"partition": True, "profile": True}),
            {"activation_checkpointing.partition"},
        ),
        (changed(data_types={"grad_accum": "fp32"}), {"data_types.grad_accum"}),
        (changed(fp16={"hysteresis": 3}), {"fp16.hysteresis"}),
        (
            changed(bf16={}, fp16={"enabled": True, "loss_scale": 128, "loss_scale_window": 5}),
            {"fp16.loss_scale_window"},
        ),
        (
            changed(zero={"stage": 2}),
            {
                "zero_optimization.sub_group_size",
                "zero_optimization.stage3_prefetch_bucket_size",
                "zero_optimization.stage3_param_persistence_threshold",
            },
        ),
        (
            changed(zero={"stage": 2, "offload_param": {"device": "cpu"}, "round_robin_gradients": True}),
            {
                "zero_optimization.sub_group_size",
                "zero_optimization.stage3_prefetch_bucket_size",
                "zero_optimization.stage3_param_persistence_threshold",
                "zero_optimization.offload_param",
            },
        ),
        (changed(zero={"round_robin_gradients": True}), {"zero_optimization.round_robin_gradients"}),
        (changed(zero_force_ds_cpu_optimizer=False), {"zero_force_ds_cpu_optimizer"}),
        (changed(aio={"block_size": 1}), {"aio"}),
        (
            changed(ds_galore={"checkpoint": {"mode": "full", "full_every": 3, "base_memory_gb": 1.0, "keep_last": 2}}),
            {"ds_galore.checkpoint.full_every", "ds_galore.checkpoint.base_memory_gb"},
        ),
        (
            changed(ds_galore={"checkpoint": {"mode": "differential", "full_every": 1}}),
            {"ds_galore.checkpoint.mode"},
        ),
        (changed(ds_galore={"checkpoint": {"mode": "differential", "full_every": 2}}), set()),
        (
            changed(scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}),
            {"optimizer.params.lr"},  # 0.001 is the schedule's own default
        ),
        (
            changed(scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_max_lr": 0.01}}),
            set(),
        ),
        (changed(scheduler={"type": "WarmupLR", "params": {}}), set()),
        (
            changed(optimizer={"type": "GaLoreAdafactor", "params": {"rank": 8, "lr": 0.1, "relative_step": True}}),
            {"optimizer.params.lr"},
        ),
        (
            changed(
                optimizer={"type": "GaLoreAdamW", "params": {"rank": 8}, "legacy_fusion": True},
            ),
            {"optimizer.legacy_fusion"},
        ),
    ],
)
def test_keys_without_effect_are_named(config, expected):
    found = explain(config)
    assert found.conflicts == []
    assert keys(found.ignored) == expected


def test_without_zero_nothing_of_it_is_read():
    config = changed(zero_optimization={"stage": 0, "reduce_bucket_size": 5}, params={"projector_storage": "sharded"})
    assert keys(explain(config).ignored) == {
        "zero_optimization.reduce_bucket_size",
        "zero_allow_untested_optimizer",
        "optimizer.params.projector_storage",
    }


# ---------------------------------------------------------------------- what conflicts


def test_all_conflicts_are_told_and_the_first_is_what_is_raised():
    config = changed(
        params={"rank": 0, "proj_typ": "left"},
        zero={"zenflow": {"topk_ratio": 0.1}, "bucket_size": 3, "mics_shard_size": 2},
        fp16={"enabled": True},
        ds_galore={"checkpoint": {"mode": "diff", "keep_lst": 2}},
        scheduler={"type": "WarmupCosineLR", "params": {"warmup_steps": 3}},
        train_batch_size=6,
        amp={"enabled": True},
    )
    del config["zero_allow_untested_optimizer"]
    found = explain(config)
    assert [line.partition(":")[0].partition(" is ")[0] for line in found.conflicts] == [
        "ds_galore.checkpoint.mode",
        "ds_galore.checkpoint.keep_lst",
        "optimizer.params.rank",
        "optimizer.params.proj_typ",
        "zero_allow_untested_optimizer",
        "zero_optimization.zenflow",
        "zero_optimization.bucket_size",
        "amp",
        "zero_optimization.mics_shard_size",
        "bf16.enabled and fp16.enabled are both true",
        "train_batch_size",
        "scheduler.params.warmup_steps",
        "scheduler.params.total_num_steps",
    ]
    assert found.uses == []
    with pytest.raises(ConfigError) as error:
        check_config(config, DEEPSPEED_OPTIMIZERS)
    assert str(error.value).splitlines() == found.conflicts[:2]


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if path:
        yield path
    if isinstance(value, dict):
        for key, each in value.items():
            yield from leaves(each, (*path, key))


def test_whatever_stands_at_a_key_is_explained_or_a_conflict():
    """No value at any key makes the explanation itself fail."""
    config = load_config(ROOT / "configs" / "zero3_galore_offload.json")
    config.update(
        ds_galore={"checkpoint": {"mode": "differential", "compression": {"codec": "zstd"}}, "monitor": {"log": "x"}},
        fp16={"enabled": False, "loss_scale": 0},
        torch_autocast={"enabled": False},
        tensorboard={"enabled": True},
        checkpoint={"writer": None},
        data_types={"grad_accum_dtype": "fp32"},
        activation_checkpointing={},
        train_batch_size=8,
    )
    odd = [None, True, 0, -1, 1.5, 10**30, float("inf"), "auto", "x", [], [1], {}, {"a": 1}]
    for *parents, key in leaves(copy.deepcopy(config)):
        for value in odd:
            changed = copy.deepcopy(config)
            place = changed
            for each in parents:
                place = place[each]
            place[key] = value
            found = explain(changed)
            assert bool(found.uses) == found.fine


@pytest.mark.parametrize(
    "section",
    ["optimizer", "zero_optimization", "bf16", "fp16", "scheduler", "ds_galore", "wandb", "activation_checkpointing"],
)
@pytest.mark.parametrize("value", [3, "auto", [1], True])
def test_what_is_no_section_is_a_conflict_and_no_crash(section, value):
    found = explain(changed(**{section: value}))
    assert any(line.startswith(f"{section} is {value!r}: it must be an object") for line in found.conflicts)


@pytest.mark.parametrize("value", ["4", 0, 1.5, True])
def test_a_batch_is_a_whole_number(value):
    found = explain(changed(train_micro_batch_size_per_gpu=value))
    assert found.conflicts == [f"train_micro_batch_size_per_gpu is {value!r}: it must be a whole number above 0"]


# ---------------------------------------------------------------------- "auto" and other warnings


def test_who_resolves_auto_is_told():
    config = load_config(ROOT / "configs" / "zero3_galore.json")
    config["optimizer"]["params"]["lr"] = "auto"
    config["steps_per_print"] = "auto"
    found = explain(config)
    assert found.warnings == [
        'bf16.enabled, scheduler.params.total_num_steps, scheduler.params.warmup_num_steps are "auto":'
        " launch/train.py, accelerate and the Trainer put a value there",
        'optimizer.params.lr is "auto": accelerate and the Trainer put a value there',
        'steps_per_print is "auto": nobody known here puts a value there',
        "deepspeed.initialize alone takes its own default for bf16.enabled, which is to train in fp32",
        'deepspeed.initialize alone does not know what "auto" is for scheduler.params.total_num_steps,'
        " scheduler.params.warmup_num_steps, optimizer.params.lr and steps_per_print",
    ]


def test_what_else_is_to_be_known():
    config = changed(zero={"offload_optimizer": {"device": "cpu", "pin_memory": False}})
    del config["train_micro_batch_size_per_gpu"], config["optimizer"]["params"]["rank"]
    told = "\n".join(explain(config).warnings)
    assert "DeepSpeed wants one of them" in told
    assert "offload_optimizer.pin_memory is false" in told
    assert "optimizer.params.rank is missing" in told
    assert explain(changed()).warnings == []


# ---------------------------------------------------------------------- the command


def test_the_command_says_fine_first_and_then_what_is_used():
    done = command("config", "check", "configs/zero3_galore.json", block="deepspeed")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "configs/zero3_galore.json: fine"
    assert lines[1] == "uses"
    assert "to be known" in lines


def test_the_command_tells_every_conflict_on_stderr_and_all_in_json(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(changed(params={"rank": 0}, zero={"stage": 5})))
    done = command("config", "check", str(path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        f"ds-galore: error: {path}: optimizer.params.rank is 0: input should be greater than or equal to 1",
        f"{path}: zero_optimization.stage is 5: GaLoreAdamW supports the stages 0, 1, 2 and 3",
    ]
    done = command("config", "check", str(path), "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, done.stderr, found["fine"], len(found["conflicts"])) == (2, "", False, 2)
    assert set(found) == {"path", "fine", "uses", "ignored", "conflicts", "warnings"}


# ---------------------------------------------------------------------- the tables are DeepSpeed's


def test_sections_are_those_of_deepspeed():
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    models = {
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "tensorboard": TensorBoardConfig,
        "csv_monitor": CSVConfig,
        "wandb": WandbConfig,
        "comet": CometConfig,
    }
    assert set(CLOSED_SECTIONS) == set(models)
    for name, model in models.items():
        fields = model.model_fields
        assert CLOSED_SECTIONS[name] == {*fields, *(each.alias for each in fields.values() if each.alias)}, name
        assert model.model_config["extra"] == "forbid"


def test_open_sections_and_removed_keys_are_those_of_deepspeed():
    from deepspeed.runtime import config, constants
    from deepspeed.runtime.activation_checkpointing import config as activations
    from deepspeed.runtime.model_checkpointing import constants as checkpointing

    zero = {f"zero_optimization.{key}" for key in config._REMOVED_ZERO_CONFIG_KEYS}
    assert {*config._REMOVED_TOP_LEVEL_CONFIG_KEYS, *zero} == REMOVED
    names = {value for name, value in vars(activations).items() if re.fullmatch(r"ACT_CHKPT_[A-Z_]+(?<!DEFAULT)", name)}
    assert OPEN_SECTIONS["activation_checkpointing"] == {name for name in names if isinstance(name, str)}
    known = {
        value for module in (constants, checkpointing) for value in vars(module).values() if isinstance(value, str)
    }
    for section in ("checkpoint", "data_types", "torch_autocast"):
        assert OPEN_SECTIONS[section] <= known, section


def test_what_stages_do_not_use_is_what_their_optimizers_are_not_given():
    from deepspeed.runtime import lr_schedules
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    third = set(inspect.signature(DeepSpeedZeroOptimizer_Stage3).parameters)
    second = set(inspect.signature(DeepSpeedZeroOptimizer).parameters)
    assert not UNUSED_BY_STAGE_3 & third
    assert not UNUSED_BY_STAGES_1_AND_2 & second
    assert UNUSED_BY_STAGE_3 - {"allgather_partitions"} <= second
    for name, known in SCHEDULERS.items():
        parameters = inspect.signature(getattr(lr_schedules, name)).parameters
        assert known == set(parameters) - {"optimizer"}
    assert set(SCHEDULERS) == set(lr_schedules.VALID_LR_SCHEDULES)


def test_the_trainers_auto_values_are_those_of_the_table():
    """launch/train.py resolves them in its sources; transformers and accelerate fill theirs by these words."""
    import accelerate.accelerator
    import accelerate.utils.dataclasses
    import transformers.integrations.deepspeed

    modules = accelerate.accelerator, accelerate.utils.dataclasses
    theirs = "".join(Path(module.__file__).read_text() for module in modules)
    sources = {
        "launch/train.py": "".join(path.read_text() for path in sorted((ROOT / "launch").glob("*.py"))),
        "accelerate": theirs,
        "the Trainer": Path(transformers.integrations.deepspeed.__file__).read_text() + theirs,  # it uses accelerate
    }
    assert set(AUTO) == set(sources)
    for who, known in AUTO.items():
        assert [key for key in known if f'"{key}"' not in sources[who]] == [], who
