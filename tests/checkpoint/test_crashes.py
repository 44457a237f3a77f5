"""Real DeepSpeed jobs of two ranks, killed while they save: what is left is a checkpoint that was acknowledged.

In the manner of RocksDB's ``db_crashtest.py``: a run is killed, what it left is checked against a run that was not, and
the next run goes on from there. The few here run in ``make test``; ``make crashtest`` makes two dozen.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ds_galore.checkpoint.store import CheckpointStore
from tests.checkpoint import crashing
from tests.checkpoint.engines import contents
from tests.checkpoint.test_family import CASES

ROOT = Path(__file__).resolve().parent.parent.parent
POINTS = (
    "writing",
    "encoded",
    "written",
    "telling",
    "committing",
    "committed",
    "latest",
    "swept",
    "removing",
    "renamed",
)


def start(
    directory: Path, store: Path, victim: int, point: str, count: int, case: str = ""
) -> list[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-m", "tests.checkpoint.crashing", str(directory)]
    return [
        subprocess.Popen(
            [*command, str(rank), "2", str(store), str(victim), point, str(count), case],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]


def crash(directory: Path, store: Path, generator: random.Random, *, named: bool) -> int:
    """Run until something is killed; the last step that every rank acknowledged, or -1."""
    victim = generator.choice([0, 1])
    point = generator.choice(POINTS if victim == 0 else POINTS[:4]) if named else "never"
    ranks = start(directory, store, victim, point, generator.randint(1, 5))
    if not named:
        assert ranks[0].stdout is not None
        while not ranks[0].stdout.readline().startswith(("begin", "ack")):
            pass
        time.sleep(generator.uniform(0.0, 3.0))
        for rank in ranks if generator.random() < 0.5 else [ranks[victim]]:
            rank.send_signal(signal.SIGKILL)
    while all(rank.poll() is None for rank in ranks):
        time.sleep(0.02)
    time.sleep(0.5 if generator.random() < 0.5 else 0.0)  # the other may notice, or be killed as well
    for rank in ranks:
        rank.kill()
    outputs = [rank.communicate()[0] for rank in ranks]
    acknowledged = [max((int(n) for n in re.findall(r"ack (\d+)", output)), default=-1) for output in outputs]
    return max(acknowledged)


def check(directory: Path, acknowledged: int, expected: dict[int, object]) -> None:
    """What a crash left: ``latest`` names the newest committed checkpoint or the one before, and it is whole."""
    store = CheckpointStore(directory)
    latest = store.latest()
    if acknowledged >= 1:
        assert latest is not None
    if latest is None:
        return
    step = int(latest.removeprefix("step-"))
    assert step >= acknowledged, f"{latest} is older than step {acknowledged}, which was acknowledged"
    assert contents(store.path(latest)) == expected[step]
    for tag in store.tags():
        assert store.open(tag).verify() == []
        assert contents(store.path(tag)) == expected[int(tag.removeprefix("step-"))]


def many(pool, tmp_path: Path, runs: int, *, named: bool, seed: int) -> None:
    pool.run(2, crashing.reference, str(tmp_path / "expected"))
    expected: dict[int, object] = {
        step: contents(tmp_path / "expected" / f"step-{step}") for step in range(1, crashing.STEPS + 1)
    }
    pool.close()  # its processes would compete with those that are to be killed
    generator = random.Random(seed)
    directory, crashes, seen = tmp_path / "run-0", 0, 0
    for run in range(runs):
        acknowledged = crash(directory, tmp_path / f"store-{run}", generator, named=named)
        crashes += 1
        seen += acknowledged >= 1
        check(directory, acknowledged, expected)
        if CheckpointStore(directory).latest() == f"step-{crashing.STEPS}":
            directory = tmp_path / f"run-{run + 1}"
    assert crashes == runs
    assert seen, "no run was killed after its first save: the test shows nothing"


def test_a_job_killed_at_named_points_leaves_an_acknowledged_checkpoint_and_goes_on_from_it(pool, tmp_path):
    many(pool, tmp_path, 2, named=True, seed=11)


@pytest.mark.crashtest
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("named", [False, True])
def test_jobs_killed_at_random(pool, tmp_path, named, seed):
    many(pool, tmp_path, 6, named=named, seed=seed)


def goes_on_exactly(pool, tmp_path: Path, case: str, point: str) -> None:
    """A job that is killed at a point, and started again, ends where one ends that was not killed."""
    pool.run(2, crashing.reference, str(tmp_path / "expected"), case)
    pool.close()
    killed = start(tmp_path / "run", tmp_path / "store-0", 0, point, 5, case)
    killed[0].wait(timeout=180)
    assert killed[0].returncode == -signal.SIGKILL
    killed[1].kill()
    for rank in killed:
        rank.communicate()
    store = CheckpointStore(tmp_path / "run")
    first = store.latest()
    assert first is not None
    assert first != f"step-{crashing.STEPS}"
    assert contents(store.path(first)) == contents(tmp_path / "expected" / first)
    ranks = start(tmp_path / "run", tmp_path / "store-1", 0, "never", 1, case)
    outputs = [rank.communicate(timeout=180)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert all(f"begin {first.removeprefix('step-')}\n" in output for output in outputs)
    last = f"step-{crashing.STEPS}"
    assert store.latest() == last
    assert contents(store.path(last)) == contents(tmp_path / "expected" / last)


@pytest.mark.crashtest
@pytest.mark.parametrize("case", list(CASES))
def test_a_killed_job_of_every_rule_and_stage_goes_on_exactly(pool, tmp_path, case):
    goes_on_exactly(pool, tmp_path, case, "encoded")
