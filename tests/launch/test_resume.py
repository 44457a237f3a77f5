"""launch/train.py goes on exactly: after SIGKILL, after a signal, on another number of ranks, from what is intact."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from ds_galore.checkpoint.store import CheckpointStore
from tests.launch.test_train import ROOT, attempt, metrics, small_config, small_model

SECTION = {"checkpoint": {"mode": "differential", "full_every": 3}}


def arguments(tmp_path: Path, name: str, *, dropout: float = 0.0, micro: int = 2, **config: Any) -> list[str]:
    """Of a run on little text, its output in ``name``."""
    changes = {"ds_galore": SECTION, "train_micro_batch_size_per_gpu": micro, **config}
    path = small_config(tmp_path / f"config-{name}.json", **changes)
    model = small_model(tmp_path / "model.json")
    model.write_text(json.dumps({**json.loads(model.read_text()), "attention_dropout": dropout}))
    (tmp_path / "text.txt").write_text("some text and more of it, " * 900)
    given = ["--config", str(path), "--model", str(model), "--seq-len", "32", "--data", str(tmp_path / "text.txt")]
    return [*given, "--output", str(tmp_path / name), "--eval-every", "0"]


def losses(directory: Path) -> list[tuple[int, float]]:
    return [(each["step"], each["loss"]) for each in metrics(directory) if "loss" in each]


def start(given: list[str]) -> subprocess.Popen[str]:
    bin_directory = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{bin_directory}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    command = [str(bin_directory / "deepspeed"), "--num_accelerators", "2", "--master_port", "29633", "launch/train.py"]
    return subprocess.Popen(
        [*command, *given], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ranks_of(job: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes that train."""
    found = psutil.Process(job.pid).children(recursive=True)
    return [each for each in found if "--local_rank" in " ".join(each.cmdline())]


def until(directory: Path, step: int, job: subprocess.Popen[str] | Future[Any]) -> None:
    """Return when a run, a job or one in the pool, has taken a step."""
    deadline = time.monotonic() + 240
    ended: Callable[[], Any] = job.done if isinstance(job, Future) else lambda: job.poll() is not None
    while time.monotonic() < deadline and not ended():
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            if any(number >= step for number, _ in losses(directory)):
                return
        time.sleep(0.02)
    told = "" if not ended() else job.result() if isinstance(job, Future) else job.communicate()[0]
    raise AssertionError(f"ended or hangs before step {step}: {told}")


def test_a_job_killed_as_a_whole_goes_on_exactly_and_so_does_one_that_was_asked_to_end(pool, tmp_path):
    given = [*arguments(tmp_path, "run", dropout=0.2), "--steps", "32", "--save-every", "4", "--resume", "auto"]
    other = [str(tmp_path / "whole") if each == str(tmp_path / "run") else each for each in given]
    whole = pool.run(2, attempt, other)
    assert [status for status, _ in whole] == [0, 0], whole[0][1]
    assert "holds no intact checkpoint; starting anew" in whole[0][1]
    expected = dict(losses(tmp_path / "whole"))
    pool.close()

    job = start(given)
    until(tmp_path / "run", 6, job)
    for process in [*ranks_of(job), psutil.Process(job.pid)]:
        process.send_signal(signal.SIGKILL)
    job.communicate()
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    first = store.newest_intact()
    assert first in {"step-4", "step-8", "step-12"}

    job = start(given)
    until(tmp_path / "run", 13, job)
    ranks_of(job)[1].send_signal(signal.SIGUSR1)
    output, _ = job.communicate(timeout=120)
    assert job.returncode == 75, output
    assert f"resumed from {tmp_path / 'run' / 'checkpoints' / first} after step {first.removeprefix('step-')}" in output
    found = re.search(r"interrupted after step (\d+); --resume auto goes on from", output)
    assert found is not None, output
    assert store.newest_intact() == f"step-{found[1]}"

    with ThreadPoolExecutor(1) as executor:  # in the pool: of the launcher no more is asked
        running = executor.submit(pool.run, 2, attempt, given)
        until(tmp_path / "run", 20, running)
        for pid in pool.pids[:2]:
            os.kill(pid, signal.SIGTERM)
        outcomes = running.result()
    assert [status for status, _ in outcomes] == [75, 75], outcomes[0][1]
    assert f"after step {found[1]}" in outcomes[0][1]

    outcomes = pool.run(2, attempt, given)
    assert [status for status, _ in outcomes] == [0, 0], outcomes[0][1]
    seen = losses(tmp_path / "run")
    assert {step for step, _ in seen} == set(range(1, 33))
    assert [each for each in seen if expected[each[0]] != each[1]] == []
    assert store.open(str(store.newest_intact())).manifest.metadata["step"] == 32


def test_on_other_numbers_of_ranks_the_same_samples_follow(pool, tmp_path):
    given = [*arguments(tmp_path, "run", micro=6), "--steps", "16", "--save-every", "8"]
    assert pool.run(2, attempt, given)[0][0] == 0
    expected = dict(losses(tmp_path / "run"))
    for ranks in (1, 3, 4):
        moved = arguments(tmp_path, "run", micro=12 // ranks)
        before = len(losses(tmp_path / "run"))
        outcomes = pool.run(ranks, attempt, [*moved, "--steps", "16", "--resume", "step-8"])
        assert [status for status, _ in outcomes] == [0] * ranks, outcomes[0][1]
        again = dict(losses(tmp_path / "run")[before:])
        assert sorted(again) == list(range(9, 17))
        assert max(abs(again[step] - expected[step]) for step in again) < 1e-4


def test_a_new_rank_draws_the_same_random_numbers_at_every_attempt(pool, tmp_path):
    given = [*arguments(tmp_path, "run", dropout=0.3, micro=6), "--steps", "4", "--save-every", "4"]
    assert pool.run(2, attempt, given)[0][0] == 0
    found = []
    for _ in range(2):
        before = len(losses(tmp_path / "run"))
        moved = arguments(tmp_path, "run", dropout=0.3, micro=4)
        assert pool.run(3, attempt, [*moved, "--steps", "8", "--resume", "step-4"])[0][0] == 0
        found.append(losses(tmp_path / "run")[before:])
    assert found[0] == found[1]
    assert [step for step, _ in found[0]] == [5, 6, 7, 8]


def test_auto_takes_the_newest_that_is_intact_and_a_loss_that_is_not_finite_names_where_to_go_back(pool, tmp_path):
    given = [*arguments(tmp_path, "run"), "--save-every", "2"]
    assert pool.run(2, attempt, [*given, "--steps", "8"])[0][0] == 0
    directory = tmp_path / "run" / "checkpoints"
    victim = next((directory / "step-8").glob("rank-00001-*.safetensors"))
    data = bytearray(victim.read_bytes())
    data[-50] ^= 1
    victim.unlink()
    victim.write_bytes(data)
    status, output = pool.run(2, attempt, [*given, "--steps", "7", "--resume", "auto"])[0]
    assert status == 0, output
    assert f"resumed from {directory / 'step-6'} after step 6" in output

    optimizer = json.loads((tmp_path / "config-run.json").read_text())["optimizer"]
    optimizer["params"]["lr"] = 1e17
    exploding = [*arguments(tmp_path, "run", optimizer=optimizer), "--save-every", "1", "--steps", "20"]
    outcomes = pool.run(2, attempt, [*exploding, "--resume", "step-6"])
    assert [status for status, _ in outcomes] == [10, 10], outcomes[0][1]
    told = re.search(
        r"step (\d+): the training loss is (nan|inf); go back with --resume (\S+), the newest", outcomes[0][1]
    )
    assert told is not None, outcomes[0][1]
    assert told[3] == f"step-{int(told[1]) - 2}"


@pytest.mark.parametrize("stage", [1, 2])
def test_the_trainer_trains_and_resumes_with_adamw_at_stages_1_and_2(pool, tmp_path, stage):
    adamw = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    given = arguments(tmp_path, "run", optimizer=adamw, zero_optimization={"stage": stage})
    assert pool.run(2, attempt, [*given, "--steps", "6", "--save-every", "3"])[0][0] == 0
    expected = losses(tmp_path / "run")
    outcomes = pool.run(2, attempt, [*given, "--steps", "6", "--resume", "step-3"])
    assert [status for status, _ in outcomes] == [0, 0], outcomes[0][1]
    assert losses(tmp_path / "run")[6:] == expected[3:]
