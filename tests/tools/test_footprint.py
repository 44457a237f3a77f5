"""What the planner says a rank's device needs, beside what the allocator of a CPU hands out in a real job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from ds_galore.cli import main
from ds_galore.cli.described import job_of, settings_of
from ds_galore.cli.proposing import _JOB_OPTIONS
from ds_galore.errors import DataError
from ds_galore.optim.walks import SEGMENT
from ds_galore.tools.activations import Decoder, activations
from ds_galore.tools.footprint import footprint
from tests import jobs
from tests.allocations import alive, rise

ROOT = Path(__file__).resolve().parent.parent.parent
LENGTH = 48


def shape(layers: int = 4, vocabulary: int = 4000, hidden: int = 192, keys: int = 4) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=keys,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )


def checkpoint(model: Any) -> None:
    """Have layers computed anew; transformers has another name for it since version 5."""
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


# ---------------------------------------------------------------------- activations


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("model", "length"),
    [(shape(vocabulary=2000), 128), (shape(8, vocabulary=300, hidden=96), 256), (shape(keys=1, vocabulary=1000), 128)],
)
def test_activations_are_those_that_the_allocator_sees(model, length, dtype, checkpointing):
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model.torch_dtype = dtype
    llama = LlamaForCausalLM(model).to(dtype).train()
    if checkpointing:
        checkpoint(llama)
    for parameter in llama.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tokens = torch.randint(model.vocab_size, (1, length))

    def work() -> None:
        llama(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()

    work()
    decoder = Decoder.of(model)
    assert decoder is not None
    planned = sum(activations(decoder, length, dtype.itemsize, checkpointing=checkpointing).values())
    # A gradient is there for a moment before it is added; it is the planner's, but not an activation.
    largest = model.vocab_size * model.hidden_size * dtype.itemsize
    assert 0.85 * rise(work) - largest < planned < 1.1 * rise(work)


# ---------------------------------------------------------------------- a job


def configuration(kind: str) -> dict[str, Any]:
    """The shipped configuration for one card, made small; or another one with its sizes."""
    shipped = json.loads((ROOT / "configs" / "zero3_galore_7b_24gb.json").read_text())
    shipped.pop("scheduler")
    params = shipped["optimizer"]["params"]
    params |= {"rank": 48, "lr": 1e-3, "update_proj_gap": 7}
    shipped["zero_optimization"] |= {"reduce_bucket_size": 100_000, "sub_group_size": 500_000}
    if kind != "lowrank, bf16 masters, 8 bits":
        for key in ("gradients", "stochastic_rounding", "projector_dtype"):
            params.pop(key)
        shipped["optimizer"]["type"] = "APOLLOAdamW" if kind == "APOLLO, fp32" else "GaLoreAdamW"
        shipped["bf16"] = {"enabled": kind == "full, bf16"}
    if kind == "lowrank, fp32":
        params["gradients"] = "lowrank"
    if kind == "APOLLO, fp32":
        for key in ("refresh", "reproject_moments"):
            params.pop(key)
    return shipped


def measured(kind: str, steps: int) -> dict[str, int]:
    """By phase, the most bytes on this rank: between steps, while gradients arrive, in a step."""
    import deepspeed
    from transformers import LlamaForCausalLM

    settings = configuration(kind)
    before = alive()
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = LlamaForCausalLM(shape())
    checkpoint(model)
    engine = jobs.start(model, settings)
    found = {"between": 0, "backward": 0, "step": 0, "gradients": 0}
    for number in range(steps):
        tokens = torch.randint(4000, (1, LENGTH), generator=torch.Generator().manual_seed(number))

        def forward_and_backward(tokens: torch.Tensor = tokens) -> None:
            engine.backward(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)

        for phase, work in (("backward", forward_and_backward), ("step", engine.step)):
            here = alive() - before
            found["between"] = max(found["between"], here)
            found[phase] = max(found[phase], here + rise(work))
        windows = getattr(engine.optimizer, "_windows", {}).values()
        found["gradients"] = max(found["gradients"], sum(each.gradients.nbytes for each in windows))
    return found


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [("lowrank, bf16 masters, 8 bits", 1), ("lowrank, fp32", 2), ("full, bf16", 1), ("APOLLO, fp32", 2)],
)
def test_the_account_of_a_device_holds(pool, tmp_path, kind, ranks):
    shape().save_pretrained(tmp_path)
    settings = configuration(kind)
    options = {**dict.fromkeys(_JOB_OPTIONS), "world_size": ranks, "model_config": tmp_path}
    job = job_of(options, settings_of(settings))[0]
    needs = footprint(settings, job, segment=SEGMENT["cpu"])
    decoder = Decoder.of(shape())
    assert decoder is not None
    width = 4 if "fp32" in kind else 2
    own = sum(activations(decoder, LENGTH, width, checkpointing=True).values())
    # gloo has no reduce-scatter, for which torch copies what it is given twice; and what is gathered it copies once.
    # Weights are gathered as far as they are needed.
    copies = (2 + ranks // 2) * width * 4000 * 192
    gathered = needs.device.pop("gathered_weights", 0)
    always = sum(needs.device.values())
    for seen in pool.run(ranks, measured, kind, 8):
        assert 0.9 * always < seen["between"] < 1.005 * always
        assert seen["backward"] < 1.02 * (needs.peak(own) + copies) + gathered
        assert seen["backward"] > 0.9 * (always + own)
        assert 0.9 * (always + needs.step) < seen["step"] < 1.02 * (always + needs.step) + gathered


# ---------------------------------------------------------------------- the card that the configuration is for


def account(*more: str) -> dict[str, Any]:
    model = ["--model-config", str(ROOT / "configs" / "models" / "llama_7b.json")]
    config = ["--config", str(ROOT / "configs" / "zero3_galore_7b_24gb.json")]
    result = CliRunner().invoke(main, ["estimate", *config, *model, "--json", *more])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output)["device"]
    return found


def test_seven_billion_parameters_fit_one_card_of_24_gigabytes():
    tokens = ["--sequence-length", "256", "--activation-checkpointing"]
    found = account(*tokens)
    numel = 6_738_415_616
    others = numel - 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    low = 32 * (4 * 4096 + 2 * 11008 + 4096) * 1024
    device = found["device"]
    assert device["weights"] == 2 * numel
    assert device["master_weights"] == 0
    together = 4096 * 11008 - 1024 * 4096  # 224 matrices, 500 steps: one, the largest
    assert device["gradients"] == 2 * (others + low + together)
    assert device["reduction_bucket"] == 2 * 20_000_000
    assert "gathered_weights" not in device
    assert "start" not in found["phases"]
    assert found["peak"] == sum(device.values()) + max(sum(kinds.values()) for kinds in found["phases"].values())
    assert 22.0e9 < found["peak"] < 22.3e9


def test_what_the_account_needs_is_asked_for():
    def refused(*arguments: str) -> str:
        result = CliRunner().invoke(main, ["estimate", *arguments])
        assert result.exit_code == 2
        return result.output

    assert "--sequence-length goes with --config and --model-config" in refused(
        "--params", "7B", "--sequence-length", "9"
    )
    config = (
        "--config",
        str(ROOT / "configs" / "zero3_galore.json"),
        "--model-config",
        str(ROOT / "configs/models/tiny.json"),
    )
    told = refused(*config, "--activation-checkpointing")
    assert "--activation-checkpointing goes with --sequence-length" in told
    assert Decoder.of(object()) is None


def changed(tmp_path: Path, **zero: Any) -> tuple[str, ...]:
    """Options for the configuration for 7B with other sizes of DeepSpeed's buffers."""
    config = json.loads((ROOT / "configs" / "zero3_galore_7b_24gb.json").read_text())
    config["zero_optimization"].update(zero)
    config["train_micro_batch_size_per_gpu"] = "auto"
    (tmp_path / "ds.json").write_text(json.dumps(config))
    return ("estimate", "--config", str(tmp_path / "ds.json"))


def test_sizes_may_be_auto_and_what_is_no_size_is_named(tmp_path):
    model = ("--model-config", str(ROOT / "configs" / "models" / "llama_7b.json"), "--world-size", "2", "--json")
    automatic = {"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
    asked = [*changed(tmp_path, **automatic), *model, "--sequence-length", "8"]
    found = json.loads(CliRunner().invoke(main, asked).output)
    # As HfTrainerDeepSpeedConfig.trainer_config_finalize of transformers 5.24 fills them.
    assert found["device"]["device"]["reduction_bucket"] == 2 * 4096**2
    assert found["device"]["device"]["gathered_weights"] == 2 * (200_000_000 + int(0.9 * 4096**2))
    assert any("one sequence a micro-batch" in each for each in found["assumptions"])
    for key, value in (("sub_group_size", "auto"), ("reduce_bucket_size", "many"), ("stage3_max_live_parameters", -1)):
        result = CliRunner().invoke(main, [*changed(tmp_path, **{key: value}), *model])
        assert result.exit_code == 2
        assert f"zero_optimization.{key} is {value!r}: it must be a number of elements" in result.output


def test_a_model_that_is_no_decoder_is_named(tmp_path):
    from transformers import BloomConfig

    from ds_galore.cli.described import decoder_of

    BloomConfig(hidden_size=32, n_layer=1, n_head=2, vocab_size=100).save_pretrained(tmp_path)
    with pytest.raises(DataError, match="its activations are not known"):
        decoder_of(tmp_path)
