"""Configurations: what is refused and how it is told; shipped ones work."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import ds_galore
from ds_galore import ConfigError, check_deepspeed_config
from ds_galore.config import load_config, nearest, resolve_auto
from ds_galore.conflicts import check_config
from ds_galore.deepspeed_keys import DEEPSPEED_OPTIMIZERS, TOP_LEVEL_KEYS
from ds_galore.parameters import OPTIMIZERS

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_a_hyperparameter_belongs_to_groups_or_to_the_optimizer(name):
    model = OPTIMIZERS[name]
    assert {*model.GROUP_KEYS, *model.SETTINGS, "target_modules", "projector_storage"} == set(model.model_fields)
    assert not set(model.GROUP_KEYS) & set(model.SETTINGS)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_configurations_are_accepted(path):
    check_deepspeed_config(load_config(path))


@pytest.mark.parametrize("path", sorted((CONFIGS / "models").glob("*.json")), ids=lambda path: path.stem)
def test_shipped_models_have_the_size_of_their_name(path):
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    million = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    named = re.fullmatch(r"llama_(\d+)(m|b)", path.stem)
    if named is None:
        assert million == pytest.approx(3.3, abs=0.1)
    else:
        # The names are round numbers: the paper's "60M" has 58 million, its "1B" 1.3 billion.
        assert million == pytest.approx(int(named[1]) * (1000 if named[2] == "b" else 1), rel=0.35)


def test_the_known_keys_are_those_that_the_installed_deepspeed_looks_up():
    from deepspeed.runtime import config as theirs

    source = Path(theirs.__file__).read_text()
    names = re.findall(r"param_dict(?:\.get)?\s*[,\[(]\s*([A-Z_0-9]+)", source)
    names += re.findall(r"([A-Z_0-9]+) in param_dict", source)
    found = {value for name in names if isinstance(value := getattr(theirs, name, None), str)}
    assert len(found) > 25
    inner = {"dtype", "legacy_fusion", "lower_precision_safe_modules", "params", "type"}  # keys of sections
    assert found - TOP_LEVEL_KEYS == inner


def test_other_optimizers_are_none_of_our_business():
    check_config({"optimizer": {"type": "AdamW", "params": {"anything": 1}}}, DEEPSPEED_OPTIMIZERS)
    check_config({"zero_optimization": {"stage": 2}})
    with pytest.raises(ConfigError, match=r"optimizer.type is 'AdamV': no such optimizer; did you mean 'Adam'"):
        check_config({"optimizer": {"type": "AdamV"}}, DEEPSPEED_OPTIMIZERS)


def test_a_message_names_the_nearest_key_or_all():
    assert nearest("scal", ["rank", "scale"]) == "; did you mean 'scale'?"
    assert nearest("zzz", ["rank", "scale"]) == "; known are rank, scale"
    assert nearest("zzz", []) == "; this section has no keys"


def test_auto_is_resolved_where_it_has_a_meaning_and_the_rest_is_left():
    config = {"bf16": {"enabled": "auto"}, "list": [1, {"x": "auto"}], "other": "text"}
    resolved = resolve_auto(config, {"bf16.enabled": False, "list[1].x": 3})
    assert resolved == {"bf16": {"enabled": False}, "list": [1, {"x": 3}], "other": "text"}
    assert config["bf16"]["enabled"] == "auto"
    with pytest.raises(ConfigError, match=r"bf16\.enabled is 'auto', which stands for nothing here; known are a, b"):
        resolve_auto(config, {"a": 1, "b": 2})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"zero_optimization": {"stage": 4}}, r"zero_optimization\.stage is 4"),
        ({"zero_optimization": {"stage": 0}, "fp16": {"enabled": True}}, r"fp16\.loss_scale is 0: without ZeRO"),
        ({"zero_optimization": {"stage": 3, "elastic_checkpoint": True}}, r"elastic_checkpoint is True"),
        ({"zero_optimization": {"stage": 3, "zenflow": {"topk_ratio": 0.1}}}, r"zenflow is"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, r"offload_param\.device is 'nvme'"),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}},
            r"super_offload is True",
        ),
        (
            {
                "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
                "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
            },
            r"bf16_master_weights_and_grads is True",
        ),
        ({"ds_galore": {"checkpoint": {"mode": "diff"}}}, r"ds_galore\.checkpoint\.mode is 'diff': input should be"),
        ({"ds_galore": {"checkpoint": {"full_evry": 3}}}, r"full_evry: unknown key; did you mean 'full_every'\?"),
        (
            {"ds_galore": {"checkpoint": {}}, "zero_optimization": {"stage": 2, "elastic_checkpoint": True}},
            r"zero_optimization\.elastic_checkpoint is True: ds_galore\.checkpoint loads on any number of ranks",
        ),
        (
            {"ds_galore": {"checkpoint": {"asinc": True}}},
            r"checkpoint\.asinc: unknown key; did you mean 'async'\?",
        ),
        (
            {"ds_galore": {"checkpoint": {"keep_every": 100}}},
            r"^ds_galore\.checkpoint: keep_every says what stays beside the newest: give keep_last",
        ),
        (
            {"ds_galore": {"checkpoint": {"compression": {"codec": "lz4", "level": 14}}}},
            r"^ds_galore\.checkpoint\.compression: level 14: lz4 has levels 1 to 13",
        ),
        (
            {"ds_galore": {"checkpoint": {"state_dtype": "fp8"}}},
            r"checkpoint\.state_dtype is 'fp8': input should be 'exact', 'bf16' or 'int8'",
        ),
        (
            {"ds_galore": {"checkpoint": {"base_memory_gb": -1}}},
            r"checkpoint\.base_memory_gb is -1: input should be greater than or equal to 0",
        ),
        (
            {"ds_galore": {"checkpoint": {}}, "checkpoint": {"writer": {"type": "fast"}}},
            r"checkpoint\.writer is .*: ds_galore\.checkpoint is a writer itself",
        ),
        ({"checkpoint": {"load_universal": True}}, r"checkpoint\.load_universal is True"),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, r"torch_autocast\.dtype is 'float16'"),
        ({"optimizer": {"type": "GaLoreAdamW", "params": 3}}, r"optimizer\.params is 3: it must be an object"),
    ],
)
def test_what_does_not_work_is_refused_by_name(changes, message):
    config = {**load_config(CONFIGS / "zero3_galore.json"), **changes}
    with pytest.raises(ConfigError, match=message):
        check_deepspeed_config(config)


def test_enable_can_be_called_often_and_engines_refuse_by_themselves(tmp_path):
    from deepspeed.runtime.engine import DeepSpeedEngine

    ds_galore.enable()
    first = DeepSpeedEngine._do_sanity_check, DeepSpeedEngine._configure_basic_optimizer
    ds_galore.enable()
    assert (DeepSpeedEngine._do_sanity_check, DeepSpeedEngine._configure_basic_optimizer) == first
    assert torch.optim.GaLoreAdamW is ds_galore.GaLoreAdamW


def engine_with(config: dict[str, object], client: bool) -> str:
    from tests import jobs

    model = jobs.tiny_llama()
    kwargs = {}
    if client:
        kwargs["optimizer"] = ds_galore.GaLoreAdamW(model.parameters(), model=model, rank=8, lr=0.01)
    try:
        engine = jobs.start(model, config, **kwargs)
    except ConfigError as error:
        return str(error)
    import torch.distributed as dist

    losses = jobs.train(engine, jobs.batches(12, 2 * dist.get_world_size()))
    assert losses[-1] < losses[0]
    return type(engine.basic_optimizer).__name__


def test_an_engine_refuses_what_the_check_refuses_also_without_the_trainer(pool):
    from tests import jobs

    wrong = jobs.config(jobs.galore(rnak=3), micro=1)
    for found in pool.run(2, engine_with, wrong, client=False):
        assert found == "optimizer.params.rnak: unknown key; did you mean 'rank'?"
    elastic = jobs.config(jobs.galore(), micro=1, zero={"stage": 2, "elastic_checkpoint": True})
    del elastic["optimizer"]
    assert pool.run(1, engine_with, elastic, client=True)[0].startswith("zero_optimization.elastic_checkpoint is True")


@pytest.mark.parametrize("stage", [2, 3])
def test_an_optimizer_object_of_the_users_is_taken_as_well(pool, stage):
    from tests import jobs

    config = jobs.config({}, micro=2, zero={"stage": stage})
    del config["optimizer"]
    assert pool.run(2, engine_with, config, client=True) == ["GaLoreAdamW", "GaLoreAdamW"]


def test_stage_0_in_fp32_trains_as_well(pool):
    from tests import jobs

    config = jobs.config(jobs.galore(), micro=2)
    config["zero_optimization"] = {"stage": 0}
    assert pool.run(2, engine_with, config, client=False) == ["GaLoreAdamW", "GaLoreAdamW"]


def test_a_file_is_read_or_the_reason_told(tmp_path):
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no such configuration file; .* has other\.json"):
        load_config(tmp_path / "config.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "binary.json")
    assert json.loads((tmp_path / "other.json").read_text()) == load_config(tmp_path / "other.json")
