"""The scripts for Accelerate and the Trainer: as a user starts them, killed and resumed, beside launch/train.py."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from ds_galore.checkpoint.manifest import Manifest
from ds_galore.checkpoint.reader import CheckpointReader
from tests.launch.test_resume import losses, until
from tests.launch.test_train import ROOT, attempt, small_config, small_model

STEPS, EVERY = 30, 5
BIN = Path(sys.executable).parent
ENVIRONMENT = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
SECTION = {"checkpoint": {"mode": "differential", "full_every": 3}}


def prepared(directory: Path, **changes: Any) -> list[str]:
    """Arguments of a run on little text, without its output."""
    config = small_config(directory / "config.json", ds_galore=SECTION, **changes)
    (directory / "text.txt").write_text("some text and more of it, " * 900)
    settings = yaml.safe_load((ROOT / "configs" / "accelerate_zero3_galore.yaml").read_text())
    assert settings["deepspeed_config"]["deepspeed_config_file"] == "configs/zero3_galore.json"
    settings["deepspeed_config"]["deepspeed_config_file"] = str(config)
    (directory / "accelerate.yaml").write_text(yaml.safe_dump(settings))
    model = str(small_model(directory / "model.json"))
    return ["--model", model, "--seq-len", "32", "--data", str(directory / "text.txt"), "--steps", str(STEPS)]


@pytest.fixture(scope="module")
def reference(pool, tmp_path_factory) -> tuple[Path, list[str], dict[int, float]]:
    """The directory, the arguments, and the losses of launch/train.py."""
    directory = tmp_path_factory.mktemp("reference")
    given = prepared(directory)
    own = ["--config", str(directory / "config.json"), "--output", str(directory / "train"), "--eval-every", "0"]
    status, output = pool.run(2, attempt, [*given, *own])[0]
    assert status == 0, output
    pool.close()
    return directory, given, dict(losses(directory / "train"))


def accelerate(directory: Path, *arguments: str) -> list[str]:
    """``accelerate launch --config_file ... launch/train_accelerate.py``, as the README has it."""
    launcher = [str(BIN / "accelerate"), "launch", "--config_file", str(directory / "accelerate.yaml")]
    return [*launcher, "--main_process_port", "29641", "launch/train_accelerate.py", *arguments]


def trainer(directory: Path, *arguments: str) -> list[str]:
    """``deepspeed --num_accelerators 2 launch/train_trainer.py --config ...``."""
    launcher = [str(BIN / "deepspeed"), "--num_accelerators", "2", "--master_port", "29643"]
    return [*launcher, "launch/train_trainer.py", "--config", str(directory / "config.json"), *arguments]


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run(command: list[str]) -> tuple[int, str]:
    job = start(command)
    output, _ = job.communicate(timeout=400)
    return job.returncode, output


def kill(job: subprocess.Popen[str]) -> None:
    """Kill the launcher and all that it has started."""
    for process in [*psutil.Process(job.pid).children(recursive=True), psutil.Process(job.pid)]:
        process.send_signal(signal.SIGKILL)
    job.communicate()


SCRIPTS = {
    "accelerate": (accelerate, ["--total-limit", "2"], "checkpoints/checkpoint_*"),
    "trainer": (trainer, ["--save-total-limit", "2"], "checkpoint-*"),
}


@pytest.mark.timed  # beside other tests it took over the 240 s that a job which hangs is given, and 50 s alone
@pytest.mark.parametrize("name", SCRIPTS)
def test_it_is_killed_goes_on_exactly_and_has_the_losses_of_our_own_script(reference, name):
    directory, given, expected = reference
    command, limit, pattern = SCRIPTS[name]
    output = directory / name
    given = [*given, *limit, "--save-every", str(EVERY), "--output", str(output)]
    job = start(command(directory, *given))
    until(output, 13, job)
    kill(job)
    status, told = run(command(directory, *given, "--resume", "auto"))
    assert status == 0, told
    assert "checkpoint" in told
    assert "starting anew" not in told
    seen = losses(output)
    first_again = next(step for (before, _), (step, _) in itertools.pairwise(seen) if step <= before)
    assert first_again in (6, 11)  # after the last checkpoint that was complete
    assert sorted({step for step, _ in seen}) == list(range(1, STEPS + 1))
    assert max(abs(loss - expected[step]) for step, loss in seen) < 2e-6
    assert expected[STEPS] < expected[1] - 0.5
    # Six saves or more, of which two stay, and each of these is whole.
    left = sorted(output.glob(pattern))
    assert len(left) == 2, left
    for each in left:
        inner = next(each.glob("*/manifest.json")).parent
        assert CheckpointReader(inner).verify() == []


def test_without_an_optimizer_in_the_configuration_accelerates_script_makes_its_own(reference, tmp_path):
    directory, _, expected = reference
    given = prepared(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    parameters = config.pop("optimizer")["params"]
    del config["scheduler"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    own = ["--output", str(tmp_path / "run"), "--rank", str(parameters["rank"]), "--lr", "0.001"]
    status, told = run(accelerate(tmp_path, *given, *own))
    assert status == 0, told
    found = dict(losses(tmp_path / "run"))
    assert found[1] == pytest.approx(expected[1], abs=2e-6)
    assert found[STEPS] < found[1] - 0.1


# ---------------------------------------------------------------------- the Trainer's names, on the pool


def attempt_trainer(arguments: list[str]) -> tuple[int, str]:
    """The script's status and its error on this rank."""
    import torch.distributed as dist

    sys.path.insert(0, str(ROOT / "launch"))
    import train_trainer
    from accelerate.state import AcceleratorState, GradientState, PartialState

    import ds_galore
    from ds_galore.errors import DsGaloreError

    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()))
    for each in (AcceleratorState, PartialState, GradientState):
        each._reset_state()
    ds_galore.enable()
    try:
        train_trainer.train(train_trainer.parse_arguments(arguments))
    except DsGaloreError as error:
        return error.exit_code, str(error)
    return 0, ""


@pytest.fixture(scope="module")
def finished(pool, tmp_path_factory) -> tuple[Path, list[str]]:
    """What the Trainer's script left, with two checkpoints; and its arguments without the output."""
    directory = tmp_path_factory.mktemp("finished")
    given = [*prepared(directory), "--config", str(directory / "config.json"), "--steps", "10", "--save-every", "5"]
    assert pool.run(2, attempt_trainer, [*given, "--output", str(directory / "run")])[0] == (0, "")
    pool.close()
    assert sorted(each.name for each in (directory / "run").glob("checkpoint-*")) == ["checkpoint-10", "checkpoint-5"]
    return directory / "run", given


def test_the_trainer_refuses_a_damaged_newest_checkpoint_and_names_the_newest_good_one(pool, finished, tmp_path):
    original, given = finished
    # Without the copy that is kept of the last durable one, which would be named.
    shutil.copytree(original, tmp_path / "run", ignore=shutil.ignore_patterns(".ds_galore-last-durable"))
    newest = tmp_path / "run" / "checkpoint-10"
    victim = next(newest.glob("global_step10/rank-00001-*.safetensors"))
    data = bytearray(victim.read_bytes())
    data[-50] ^= 1
    victim.unlink()
    victim.write_bytes(data)
    outcomes = pool.run(2, attempt_trainer, [*given, "--output", str(tmp_path / "run"), "--resume"])
    pool.close()
    assert all(status != 0 for status, _ in outcomes)
    good = tmp_path / "run" / "checkpoint-5" / "global_step5"
    assert any(f"the newest intact checkpoint is {good}" in told for _, told in outcomes), outcomes


@pytest.mark.parametrize("missing", ["trainer_state.json", "rng_state_1.pth", "global_step10/manifest.json", "*"])
def test_an_unfinished_newest_checkpoint_is_refused_and_the_newest_complete_one_named(finished, tmp_path, missing):
    from transformers import trainer_utils

    import ds_galore
    from ds_galore import DataError

    ds_galore.enable()
    shutil.copytree(finished[0], tmp_path / "run")
    newest = tmp_path / "run" / "checkpoint-10"
    assert trainer_utils.get_last_checkpoint(str(tmp_path / "run")) == str(newest)
    if missing == "*":
        shutil.rmtree(newest)
        newest.mkdir()
    else:
        (newest / missing).unlink()
    (tmp_path / "run" / "checkpoint-3").mkdir()  # an older one that is not complete is none to go on from
    with pytest.raises(DataError) as caught:
        trainer_utils.get_last_checkpoint(str(tmp_path / "run"))
    name = {"*": "manifest.json"}.get(missing, Path(missing).name)
    expected = f"{newest}: is not finished: it holds no {name}; the newest complete checkpoint is"
    assert str(caught.value).startswith(f"{expected} {tmp_path / 'run' / 'checkpoint-5'}: pass it as resume")
    next((tmp_path / "run" / "checkpoint-5").glob("*/manifest.json")).write_text("{}")
    with pytest.raises(DataError, match=r"is not finished: .*there is no complete checkpoint beside it"):
        trainer_utils.get_last_checkpoint(str(tmp_path / "run"))
    for each in (tmp_path / "run").glob("checkpoint-*"):
        shutil.rmtree(each)
    assert trainer_utils.get_last_checkpoint(str(tmp_path / "run")) is None


# ---------------------------------------------------------------------- more of the Trainer, on the pool


def test_on_storage_of_a_nodes_own_other_nodes_files_are_not_missed(finished, tmp_path):
    from transformers import trainer_utils

    import ds_galore

    ds_galore.enable()
    shutil.copytree(finished[0], tmp_path / "run")
    newest = tmp_path / "run" / "checkpoint-10"
    (newest / "rng_state_1.pth").unlink()
    with pytest.raises(ds_galore.DataError, match=r"it holds no rng_state_1\.pth"):
        trainer_utils.get_last_checkpoint(str(tmp_path / "run"))
    manifest = Manifest.read(newest / "global_step10")
    replace(manifest, metadata={**manifest.metadata, "node_local": True}).write(newest / "global_step10")
    assert trainer_utils.get_last_checkpoint(str(tmp_path / "run")) == str(newest)


def test_the_trainer_goes_back_to_its_best_checkpoint_at_the_end(pool, tmp_path):
    given = [*prepared(tmp_path), "--config", str(tmp_path / "config.json"), "--steps", "10", "--save-every", "5"]
    given += ["--eval-every", "5", "--load-best-model-at-end"]
    output = ["--output", str(tmp_path / "run")]
    assert pool.run(2, attempt_trainer, [*given, *output])[0] == (0, "")
    pool.close()
    state = json.loads((tmp_path / "run" / "checkpoint-10" / "trainer_state.json").read_text())
    found = {each["step"]: each["eval_loss"] for each in state["log_history"] if "eval_loss" in each}
    assert state["best_global_step"] == min(found, key=lambda step: found[step])
    assert sorted(found) == [5, 10]
    for each in (tmp_path / "run").glob("checkpoint-*"):
        assert CheckpointReader(next(each.glob("*/manifest.json")).parent).verify() == []


def test_the_trainer_saves_weights_that_from_pretrained_takes(pool, tmp_path):
    from transformers import AutoModelForCausalLM

    gathered = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    given = [*prepared(tmp_path, zero_optimization=gathered), "--config", str(tmp_path / "config.json")]
    given += ["--steps", "4", "--save-every", "4", "--output", str(tmp_path / "run"), "--save-only-model"]
    assert pool.run(2, attempt_trainer, given)[0] == (0, "")
    pool.close()
    saved = tmp_path / "run" / "checkpoint-4"
    assert not list(saved.glob("global_step*"))
    model = AutoModelForCausalLM.from_pretrained(str(saved))
    assert model.config.hidden_size == 32
    assert sum(parameter.numel() for parameter in model.parameters()) > 20_000


def names(directory: Path, output: str, config: dict[str, Any], *arguments: str) -> list[str]:
    given = prepared(directory)
    (directory / "config.json").write_text(json.dumps(config))
    own = ["--config", str(directory / "config.json"), "--output", str(directory / output)]
    return [*given, *own, "--steps", "8", *arguments]


@pytest.mark.parametrize(
    ("name", "own", "section"),
    [
        ("galore_adamw", "rank=8,update_proj_gap=3,scale=0.5", {"type": "GaLoreAdamW", "params": {"scale": 0.5}}),
        (
            "galore_adafactor_layerwise",
            "rank=8,update_proj_gap=3",
            {"type": "GaLoreAdafactor", "params": {"gradients": "lowrank", "proj_type": "right"}},
        ),
        (
            "apollo_adamw",
            "rank=8,update_proj_gap=3,scale_type=tensor,scale=4",
            {"type": "APOLLOAdamW", "params": {"scaling": "tensor", "scale": 4.0, "eps": 1e-8}},
        ),
    ],
)
def test_the_trainers_names_are_ours_under_deepspeed(pool, tmp_path, name, own, section):
    prepared(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["scheduler"]
    common = {"lr": 0.002, "rank": 8, "update_proj_gap": 3, "proj_type": "std", "target_modules": ["attn", "mlp"]}
    section = {**section, "params": {**common, **section["params"]}}
    chosen = ["--lr", "0.002"]
    given = names(tmp_path, "section", {**config, "optimizer": section}, *chosen)
    assert pool.run(2, attempt_trainer, given)[0] == (0, "")
    del config["optimizer"]
    chosen += ["--optim", name, "--optim-args", own, "--optim-target-modules", "attn", "mlp"]
    given = names(tmp_path, "name", config, *chosen)
    assert pool.run(2, attempt_trainer, given)[0] == (0, "")
    pool.close()  # accelerate leaves its state in the workers
    assert losses(tmp_path / "name") == losses(tmp_path / "section")
    assert losses(tmp_path / "name")[-1][1] < losses(tmp_path / "name")[0][1]


def test_conflicts_and_what_is_missing_are_refused_by_name(pool, tmp_path):
    prepared(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    target = ["--optim-target-modules", "attn"]
    given = names(tmp_path, "a", config, "--optim", "galore_adamw", *target)
    status, told = pool.run(2, attempt_trainer, given)[0]
    assert status == 2
    assert "optim is 'galore_adamw', and the DeepSpeed configuration has optimizer.type 'GaLoreAdamW'" in told
    del config["optimizer"]
    for extra, message in (
        (["--optim", "galore_adamw"], "optim_target_modules is None: optim 'galore_adamw' needs it"),
        (["--optim", "galore_adamw", *target, "--optim-args", "rnk=8"], "rnk: unknown key; did you mean 'rank'?"),
        (["--optim", "galore_adamw", *target, "--optim-args", "rank=none"], "rank is 'none': input should be"),
        (["--optim", "apollo_adamw_layerwise", *target], "optim is 'apollo_adamw_layerwise': it updates with full"),
    ):
        status, told = pool.run(2, attempt_trainer, names(tmp_path, "a", config, *extra))[0]
        assert (status, message in told) == (2, True), told
    pool.close()


def test_without_deepspeed_the_trainers_names_are_left_alone(tmp_path):
    from torch import nn
    from transformers import Trainer, TrainingArguments

    import ds_galore

    ds_galore.enable()
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    arguments = TrainingArguments(str(tmp_path), optim="galore_adamw", optim_target_modules=["0"], use_cpu=True)
    kind, _ = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    assert kind.__module__.startswith("galore_torch")


def test_an_offloaded_optimizer_of_ours_is_not_replaced_by_accelerates_adam():
    from accelerate import accelerator
    from torch import nn

    import ds_galore
    from ds_galore import ConfigError

    ds_galore.enable()
    model = nn.Linear(8, 8)
    ours = ds_galore.GaLoreAdamW(model.parameters(), model=model, rank=2)
    with pytest.raises(ConfigError, match="zero_force_ds_cpu_optimizer is true"):
        accelerator.map_pytorch_optim_to_deepspeed(ours)
