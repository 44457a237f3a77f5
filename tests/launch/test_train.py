"""launch/train.py: through DeepSpeed's launcher as a user starts it, and its mistakes on two ranks of the pool."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent.parent
GALORE = ROOT / "configs" / "zero3_galore.json"


def launch(*arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """``deepspeed --num_accelerators 2 launch/train.py ...``."""
    bin_directory = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{bin_directory}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    command = [bin_directory / "deepspeed", "--num_accelerators", "2", "--master_port", "29631", "launch/train.py"]
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


def small_config(path: Path, **changes: Any) -> Path:
    """The shipped configuration with small batches and ranks."""
    config = json.loads(GALORE.read_text())
    config["train_micro_batch_size_per_gpu"] = 2
    config["optimizer"]["params"].update(rank=8, update_proj_gap=4)
    config.update(changes)
    path.write_text(json.dumps(config))
    return path


def small_model(path: Path) -> Path:
    """A model configuration of a few thousand parameters."""
    config = json.loads((ROOT / "configs" / "models" / "tiny.json").read_text())
    config.update(
        hidden_size=32, intermediate_size=80, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2
    )
    path.write_text(json.dumps(config))
    return path


def metrics(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_a_run_trains_validates_saves_and_is_resumed_exactly(pool, tmp_path):
    config, model = small_config(tmp_path / "config.json"), small_model(tmp_path / "model.json")
    common = ["--config", str(config), "--model", str(model), "--seq-len", "32", "--steps", "8", "--eval-every", "4"]
    output = tmp_path / "run"
    first = launch(*common, "--output", str(output), "--save-every", "5")
    assert first.returncode == 0, first.stderr
    lines = re.findall(r"^step (\d+) validation loss (\d+\.\d+) perplexity (\d+\.\d+)$", first.stdout, re.MULTILINE)
    assert [int(step) for step, _, _ in lines] == [4, 8]
    assert float(lines[-1][1]) < 5.6
    assert "plain AdamW" in first.stderr
    assert "projectors" in first.stderr
    written = metrics(output)
    losses = {each["step"]: each["loss"] for each in written if "loss" in each}
    assert sorted(losses) == list(range(1, 9))
    assert all(each["tokens_per_s"] > 0 and each["grad_norm"] > 0 for each in written if "loss" in each)
    assert losses[8] < losses[1]

    status, errors = pool.run(2, attempt, [*common, "--output", str(output), "--resume"])[0]
    assert status == 0, errors
    assert "after step 5" in errors
    again = {each["step"]: each["loss"] for each in metrics(output)[len(written) :] if "loss" in each}
    assert again == {step: losses[step] for step in (6, 7, 8)}
    assert [e for e in metrics(output) if "validation_loss" in e][-1] == [e for e in written if "validation_loss" in e][
        -1
    ]


def test_a_mistake_ends_the_whole_job_with_its_status_and_no_traceback(tmp_path):
    config = small_config(tmp_path / "config.json", optimizer={"type": "GaLoreAdamW", "params": {"rank": 0}})
    done = launch("--config", str(config), timeout=120)
    assert done.returncode == 2
    assert (
        done.stderr.count("train.py: error: optimizer.params.rank is 0: input should be greater than or equal to 1")
        == 1
    )
    assert "Traceback" not in done.stderr + done.stdout


# ---------------------------------------------------------------------- mistakes, on the pool


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.json")), ids=lambda path: path.stem)
def test_every_shipped_configuration_trains(pool, tmp_path, path):
    config = json.loads(path.read_text())
    config["train_micro_batch_size_per_gpu"] = 2
    if "rank" in config["optimizer"]["params"]:
        config["optimizer"]["params"].update(rank=8, update_proj_gap=4)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "text.txt").write_text("some text and more of it, " * 900)
    given = ["--config", str(tmp_path / "config.json"), "--model", str(small_model(tmp_path / "model.json"))]
    given += ["--data", str(tmp_path / "text.txt"), "--seq-len", "32", "--eval-every", "0", "--steps", "12"]
    outcomes = pool.run(2, attempt, [*given, "--output", str(tmp_path / "run")])
    assert [status for status, _ in outcomes] == [0, 0], outcomes[0][1]
    losses = [each["loss"] for each in metrics(tmp_path / "run") if "loss" in each]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.1


def attempt(arguments: list[str], per_rank: list[list[str]] | None = None) -> tuple[int, str]:
    """Exit status and standard error of one rank."""
    import torch.distributed as dist

    import ds_galore

    sys.path.insert(0, str(ROOT / "launch"))
    import train

    from ds_galore.zero.group import RankGroup

    ds_galore.enable()
    group = RankGroup(dist.group.WORLD)
    own = per_rank[group.rank] if per_rank else []
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            status = train.run(train.parse_arguments([*arguments, *own]), group)
        except SystemExit as stop:
            status = int(stop.code or 0)
    return status, errors.getvalue()


ZERO = {"stage": 3, "reduce_bucket_size": 100_000}
MODULES = "lm_head, model.embed_tokens, model.layers.*.mlp.down_proj"


def optimizer(kind: str = "GaLoreAdamW", **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": params}}


def zero(**values: Any) -> dict[str, Any]:
    return {"zero_optimization": {**ZERO, **values}}


WRONG = [
    (optimizer(rnak=8), "optimizer.params.rnak: unknown key; did you mean 'rank'?"),
    (optimizer(lr=0.1), "optimizer.params.rank is missing"),
    (optimizer(rank=8, update_proj_gap=-1), "optimizer.params.update_proj_gap is -1: input should be greater than"),
    (optimizer(rank="8"), "optimizer.params.rank is '8': input should be a valid integer"),
    (optimizer("GaloreAdamw"), "optimizer.type is 'GaloreAdamw': no such optimizer; did you mean 'GaLoreAdamW'?"),
    (optimizer("GaLoreAdam"), "optimizer.type is 'GaLoreAdam': no such optimizer; did you mean 'GaLoreAdamW'?"),
    (
        optimizer(rank=8, target_modules=["atention"]),
        f"target_modules: no match for ['atention'] in the model; modules with matrices are {MODULES}",
    ),
    (
        zero(offload_optimizer={"device": "nvme"}),
        "zero_optimization.offload_optimizer.device is 'nvme': GaLoreAdamW does not support NVMe; use cpu or none",
    ),
    (zero(offload_optimizer={"device": "cpu", "ratio": 0.5}), "zero_optimization.offload_optimizer.ratio is 0.5"),
    (zero(sub_group_sise=5), "zero_optimization.sub_group_sise: unknown key; did you mean 'sub_group_size'?"),
    ({"optimizer": {"typ": "GaLoreAdamW"}}, "optimizer.typ: unknown key; did you mean 'type'?"),
    ({"optimizer": {"params": {}}}, "optimizer.type is None: it must be a name"),
    ({"optimizer": {}}, "optimizer is missing from"),
    ({"optim": {}, "optimizer": {}}, "optimizer is missing from"),
    ({"optimiser": {}}, "optimiser: DeepSpeed does not know this key and would ignore it; did you mean 'optimizer'?"),
    ({"scheduler": {"type": "WarmupCosin"}}, "scheduler.type is 'WarmupCosin': no such scheduler; did you mean 'Warm"),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}}},
        "scheduler.params.warmup_steps: WarmupLR has no such parameter; did you mean 'warmup_num_steps'?",
    ),
    ({"train_batch_size": 7}, "{path}: DeepSpeed refuses it: Check batch related parameters"),
    (zero(stage=4), "zero_optimization.stage is 4"),
    (zero(elastic_checkpoint=True), "zero_optimization.elastic_checkpoint is True"),
    ({"zero_allow_untested_optimizer": False}, "zero_allow_untested_optimizer is False: DeepSpeed wants true here"),
    (
        {"gradient_cliping": 1.0},
        "gradient_cliping: DeepSpeed does not know this key and would ignore it; did you mean 'gradient_clipping'?",
    ),
    ({"ds_galore": {"checkpoints": {}}}, "ds_galore.checkpoints: unknown key"),
    ({"ds_galore": []}, "ds_galore is []: it must be an object"),
    ({"steps_per_print": "auto"}, "steps_per_print is 'auto', which stands for nothing here"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_a_wrong_configuration_is_refused_on_all_ranks(pool, tmp_path, changes, message):
    config = small_config(tmp_path / "config.json", **changes)
    (tmp_path / "text.txt").write_text("some text " * 200)
    arguments = ["--config", str(config), "--model", str(small_model(tmp_path / "model.json"))]
    outcomes = pool.run(2, attempt, [*arguments, "--data", str(tmp_path / "text.txt"), "--seq-len", "32"], timeout=60)
    assert [status for status, _ in outcomes] == [2, 2]
    assert f"train.py: error: {message.replace('{path}', str(config))}" in outcomes[0][1]
    assert "train.py: error" not in outcomes[1][1], "said twice"
    assert not any("Traceback" in text for _, text in outcomes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such configuration file"),
        ('{"optimizer": {', "not valid JSON: Expecting property name enclosed in double quotes at line 1, column 16"),
        ('{"bf16": {}, "bf16": {}}', "key 'bf16' appears twice"),
        ("[]", "a configuration is a JSON object, found list"),
    ],
)
def test_a_broken_or_missing_configuration_file_is_refused(pool, tmp_path, text, message):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    outcomes = pool.run(2, attempt, ["--config", str(path)], timeout=60)
    assert [status for status, _ in outcomes] == [2, 2]
    assert f"train.py: error: {path}: {message}" in outcomes[0][1]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--data", "nowhere"], 3, "--data nowhere: no such file or directory"),
        (["--data", "empty"], 3, "none of them is UTF-8 text"),
        (["--data", "short.txt"], 3, "tokens are too few"),
        (["--data", "binary"], 3, "is not UTF-8 text"),
        (["--model", "llama_61m"], 3, "--model llama_61m: neither a known size (llama_130m, llama_1b"),
        (["--model", "empty"], 3, "has no config.json"),
        (["--tokenizer", "nowhere"], 3, "--tokenizer nowhere: no such directory"),
        (["--tokenizer", "empty"], 3, "--tokenizer empty: cannot be loaded"),
        (["--resume", "step-7"], 3, "--resume step-7: no such checkpoint"),
        (["--output", "short.txt"], 3, "--output short.txt: cannot be written to: File exists"),
        (["--resume"], 3, "holds no checkpoint (no file 'latest')"),
    ],
)
def test_missing_data_models_tokenizers_and_checkpoints_are_named(pool, tmp_path, arguments, status, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x01")
    (tmp_path / "text.txt").write_text("some text " * 200)
    for name in ("nowhere", "empty", "short.txt", "binary"):
        arguments = [str(tmp_path / name) if each == name else each for each in arguments]
        message = message.replace(f" {name}:", f" {tmp_path / name}:")
    common = ["--config", str(small_config(tmp_path / "config.json")), "--seq-len", "32"]
    if "--output" not in arguments:
        common += ["--output", str(tmp_path / "out")]
    if "--data" not in arguments:
        common += ["--data", str(tmp_path / "text.txt")]
    if "--model" not in arguments:
        common += ["--model", str(small_model(tmp_path / "model.json"))]
    outcomes = pool.run(2, attempt, [*common, *arguments], timeout=60)
    assert [found for found, _ in outcomes] == [status, status]
    assert message in outcomes[0][1]
    assert "Traceback" not in outcomes[0][1]


def test_a_model_whose_weights_are_broken_is_refused(pool, tmp_path):
    from tests import jobs

    jobs.tiny_llama().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"nonsense")
    (tmp_path / "text.txt").write_text("".join(map(chr, range(32, 64))) * 200)
    words = ["--config", str(small_config(tmp_path / "config.json")), "--model", str(tmp_path / "model")]
    words += ["--data", str(tmp_path / "text.txt"), "--seq-len", "32", "--tokenizer", str(save_tokenizer(tmp_path))]
    for status, told in pool.run(2, attempt, [*words, "--output", str(tmp_path / "out")], timeout=60):
        assert status == 3
        assert f"--model {tmp_path / 'model'}: cannot be built: " in told


def save_tokenizer(directory: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(["[UNK]", "some", "text", "and", "more"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(directory / "tokenizer")
    return directory / "tokenizer"


def test_a_file_that_only_one_rank_misses_ends_both(pool, tmp_path):
    config = small_config(tmp_path / "config.json")
    (tmp_path / "text.txt").write_text("some text " * 200)
    per_rank = [["--data", str(tmp_path / "text.txt")], ["--data", str(tmp_path / "lost.txt")]]
    outcomes = pool.run(2, attempt, ["--config", str(config), "--seq-len", "32"], per_rank, timeout=60)
    assert [status for status, _ in outcomes] == [3, 3]
    assert "train.py: error" not in outcomes[0][1]
    assert "lost.txt: no such file or directory" in outcomes[1][1]


def test_a_hugging_face_directory_is_fine_tuned_and_a_tokenizer_used(pool, tmp_path):
    from tests import jobs

    jobs.tiny_llama().save_pretrained(tmp_path / "model")
    (tmp_path / "texts").mkdir()
    for number in range(25):
        (tmp_path / "texts" / f"{number}.txt").write_text("some text and more " * 40)
    arguments = ["--config", str(small_config(tmp_path / "config.json")), "--model", str(tmp_path / "model")]
    arguments += ["--tokenizer", str(save_tokenizer(tmp_path)), "--data", str(tmp_path / "texts"), "--seq-len", "32"]
    arguments += ["--steps", "12", "--output", str(tmp_path / "out")]
    outcomes = pool.run(2, attempt, arguments)
    assert [status for status, _ in outcomes] == [0, 0], outcomes[0][1]
    losses = [each["loss"] for each in metrics(tmp_path / "out") if "loss" in each]
    assert losses[-1] < 0.7 * losses[0]


def test_a_run_with_our_checkpoints_is_resumed_exactly(pool, tmp_path):
    section = {"checkpoint": {"mode": "differential", "full_every": 3, "keep_last": 2}}
    config = small_config(tmp_path / "config.json", ds_galore=section)
    (tmp_path / "text.txt").write_text("some text and more of it, " * 400)
    arguments = ["--config", str(config), "--model", str(small_model(tmp_path / "model.json")), "--seq-len", "32"]
    arguments += ["--data", str(tmp_path / "text.txt"), "--output", str(tmp_path / "out")]
    first = pool.run(2, attempt, [*arguments, "--steps", "10", "--save-every", "2"])
    assert [status for status, _ in first] == [0, 0], first[0][1]
    kept = sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir() if path.is_dir())
    assert kept == ["step-10", "step-8"]
    losses = [each["loss"] for each in metrics(tmp_path / "out") if "loss" in each]
    second = pool.run(2, attempt, [*arguments, "--steps", "10", "--resume", "step-8"])
    assert [status for status, _ in second] == [0, 0], second[0][1]
    again = [each["loss"] for each in metrics(tmp_path / "out") if "loss" in each][10:]
    assert again == losses[8:]


# ---------------------------------------------------------------------- data


def order(count: int, *, seed: int = 0, consumed: int = 0) -> Any:
    sys.path.insert(0, str(ROOT / "launch"))
    from text_data import SampleOrder

    return SampleOrder(count, seed=seed, consumed=consumed)


def test_every_window_is_visited_once_an_epoch_and_the_order_continues_from_what_was_consumed():
    whole = order(10).take(25)
    assert sorted(whole[:10].tolist()) == sorted(whole[10:20].tolist()) == list(range(10))
    assert not torch.equal(whole[:10], whole[10:20])
    parts = order(10)
    assert torch.equal(torch.cat([parts.take(n) for n in (3, 4, 5, 13)]), whole)
    assert torch.equal(order(10, consumed=12).take(13), whole[12:])
    assert not torch.equal(order(10, seed=1).take(10), whole[:10])


def test_training_and_validation_texts_are_different_documents(tmp_path):
    sys.path.insert(0, str(ROOT / "launch"))
    from text_data import load_corpus

    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text(chr(ord("a") + number // 2) * 64)
    corpus = load_corpus([str(tmp_path)], tokenizer=None, length=16)
    assert corpus.vocabulary == 256
    held = {chr(token) for token in corpus.validation.unique().tolist() if token}
    assert held == {"f", "p"}  # documents 10 and 30; their twins 11 and 31 are trained on
    assert corpus.train.shape[1] == corpus.validation.shape[1] == 16
