"""What a run tells about itself: refreshes, saves, trouble; through DeepSpeed's CSV monitor and in the run log."""

from __future__ import annotations

import csv
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests import jobs

BATCH = 6


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def table(path: Path) -> list[list[str]]:
    return list(csv.reader(path.read_text().splitlines()))


def of(found: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in found if each["event"] == kind]


def settings(directory: Path, optimizer: dict[str, Any], **extra: Any) -> dict[str, Any]:
    ours = {"checkpoint": {"mode": "differential", "full_every": 3}, "monitor": {"log": str(directory / "run.jsonl")}}
    monitors = {
        "csv_monitor": {"enabled": True, "output_path": str(directory), "job_name": "csv"},
        "tensorboard": {"enabled": True, "output_path": str(directory), "job_name": "board"},
    }
    return jobs.config(optimizer, micro=3, **{"ds_galore": ours, **monitors, **extra})


def energy_and_overlap(gradient: torch.Tensor, old: torch.Tensor | None, new: torch.Tensor) -> tuple[float, float]:
    energy = float((gradient.double() @ new.double()).square().sum() / gradient.double().square().sum())
    overlap = 0.0 if old is None else float((old.double().T @ new.double()).square().sum() / new.shape[1])
    return energy, overlap


def watched(directory: str, optimizer: dict[str, Any], stage: int) -> list[dict[str, tuple[float, float]]]:
    """Train four steps, save twice, and compute for a matrix what each refresh should have told."""
    import torch.distributed as dist
    from deepspeed.utils import safe_get_full_grad

    extra = {} if stage == 3 else {"zero": {"stage": stage}}
    engine = jobs.start(jobs.tiny_llama(), settings(Path(directory), optimizer, **extra))
    name, weight = next((n, p) for n, p in engine.module.named_parameters() if "down_proj" in n)
    found, old = [], None
    for step, tokens in enumerate(jobs.batches(4, BATCH), start=1):
        rank = dist.get_rank()
        part = tokens[rank * 3 : rank * 3 + 3]
        engine.backward(engine(input_ids=part, labels=part).loss)
        gradient = safe_get_full_grad(weight).clone()
        engine.step()
        state = next(each[name] for each in engine.basic_optimizer.state.values() if name in each)
        if step % 2:
            new = state["projector"].clone()
            energy, overlap = energy_and_overlap(gradient, old, new)
            found.append({name: (energy, overlap)})
            old = new
        else:
            engine.save_checkpoint(directory, tag=f"step-{step}")
    engine.checkpoint_engine.wait()
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_refreshes_and_saves_are_told_as_they_are(pool, tmp_path, stage):
    optimizer = jobs.galore(update_proj_gap=2, stagger_refresh=False, projector_storage="replicated")
    expected = pool.run(2, watched, str(tmp_path), optimizer, stage)[0]
    found = events(tmp_path / "run.jsonl")
    start = of(found, "start")
    assert [(each["step"], each["world_size"], each["zero_stage"]) for each in start] == [(0, 2, stage)]
    assert start[0]["config"]["optimizer"] == optimizer
    assert (start[0]["memory"] is None) == (stage == 2)
    if stage == 3:
        assert start[0]["memory"]["GaLoreAdamW"]["moments"] < start[0]["memory"]["AdamW"]["moments"]
    refreshes = of(found, "refresh")
    assert [each["step"] for each in refreshes] == [1, 3]
    assert all(len(each["matrices"]) == 14 and each["seconds"] > 0 for each in refreshes)
    for number, (told, known) in enumerate(zip(refreshes, expected, strict=True)):
        for name, (energy, overlap) in known.items():
            assert told["matrices"][name]["energy"] == pytest.approx(energy, abs=2e-3)
            assert told["matrices"][name]["rank"] == 8
            if number:
                assert told["matrices"][name]["overlap"] == pytest.approx(overlap, abs=1e-4)
                assert 0.0 < overlap < 1.0
            else:
                assert told["matrices"][name]["overlap"] is None
    saves = of(found, "save")
    assert [(each["step"], each["tag"], each["kind"]) for each in saves] == [
        (2, "step-2", "full"),
        (4, "step-4", "differential"),
    ]
    for each in saves:
        manifest = json.loads((tmp_path / each["tag"] / "manifest.json").read_text())
        records = [files[-1] for files in manifest["files"]] + list(manifest["states"].values())
        assert each["bytes"] == sum(record["bytes"] for record in records)
        assert each["ratio"] == pytest.approx(each["logical_bytes"] / each["bytes"], abs=1e-4)
        assert each["stall"] > 0.0
        assert 0.0 < each["seconds"] < 60.0
    assert saves[0]["logical_bytes"] == saves[1]["logical_bytes"]
    assert saves[0]["bytes"] > saves[1]["bytes"]
    assert not of(found, "warning")
    assert not of(found, "save_failed")
    columns = {path.name: table(path) for path in (tmp_path / "csv").glob("*.csv")}
    energies = columns["Train_GaLore_captured_energy.csv"]
    assert energies[0] == ["step", "captured_energy"]
    assert [int(row[0]) for row in energies[1:]] == [6, 18]  # samples, as DeepSpeed counts its own
    for row, told in zip(energies[1:], refreshes, strict=True):
        mean = sum(each["energy"] for each in told["matrices"].values()) / 14
        assert float(row[1]) == pytest.approx(mean, abs=1e-4)
    assert len(columns["Train_GaLore_basis_overlap.csv"]) == 2  # a first basis has none
    assert [float(row[1]) for row in columns["Train_Checkpoint_bytes.csv"][1:]] == [each["bytes"] for each in saves]
    assert "Train_Samples_lr.csv" in columns
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    told = [(event.step, event.value) for event in board.Scalars("Train/GaLore/captured_energy")]
    assert told == [(int(row[0]), pytest.approx(float(row[1]))) for row in energies[1:]]
    assert [event.value for event in board.Scalars("Train/Checkpoint/bytes")] == [each["bytes"] for each in saves]


def unwatched(directory: str) -> tuple[list[float], list[float]]:
    optimizer = jobs.galore(update_proj_gap=2, reproject_moments=False, proj_type="std")
    losses = []
    for extra in ({}, {"ds_galore": {"monitor": {"log": f"{directory}/run.jsonl"}}}):
        engine = jobs.start(jobs.tiny_llama(), jobs.config(optimizer, micro=2, **extra))
        assert (engine.basic_optimizer.watch is None) == (not extra)
        losses.append(jobs.train(engine, jobs.batches(6, 6)))
    return losses[0], losses[1]


def test_watching_changes_no_loss(pool, tmp_path):
    for plain, watched_ in pool.run(3, unwatched, str(tmp_path)):
        assert plain == watched_
    assert next(each["step"] for each in of(events(tmp_path / "run.jsonl"), "refresh")) == 1


def failing(directory: str) -> str:
    import torch.distributed as dist

    engine = jobs.start(jobs.tiny_llama(), settings(Path(directory), jobs.galore()))
    jobs.train(engine, jobs.batches(1, BATCH))

    def hook(point: str) -> None:
        if point == "writing" and dist.get_rank() == 1:
            raise OSError(28, "No space left on device")

    engine.checkpoint_engine.hook = hook
    engine.save_checkpoint(directory, tag="bad")
    try:
        engine.checkpoint_engine.wait()
    except Exception as error:  # noqa: BLE001 - both ranks' own
        told = f"{type(error).__name__}: {error}"
    jobs.train(engine, jobs.batches(1, BATCH))
    return told


def test_a_save_that_fails_is_told(pool, tmp_path):
    outcomes = pool.run(2, failing, str(tmp_path))
    assert all("No space left" in each for each in outcomes)
    failed = of(events(tmp_path / "run.jsonl"), "save_failed")
    assert [(each["step"], each["tag"]) for each in failed] == [(1, "bad")]
    assert "No space left on device" in failed[0]["message"]
    rows = table(tmp_path / "csv" / "Train_Checkpoint_failed.csv")
    assert [float(row[1]) for row in rows[1:]] == [1.0]


def troubled(directory: str) -> list[str]:
    """A loss that is not finite, saves that follow each other too closely, bases that capture less and less."""
    import threading

    from ds_galore.optim.watching import Refreshed

    messages: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Handler()
    logging.getLogger("ds_galore.monitoring.monitor").addHandler(handler)
    engine = jobs.start(jobs.tiny_llama(), settings(Path(directory), jobs.galore(update_proj_gap=100)))
    data = jobs.batches(4, BATCH)
    jobs.train(engine, data[:1])
    for energy in (0.9, 0.85, 0.5, 0.49):
        plans = engine.basic_optimizer.parameter_plans()
        engine.basic_optimizer.watch.refreshed += [Refreshed(plan.name, 8, energy, 0.5) for plan in plans if plan.rank]
        jobs.train(engine, data[1:2])
    slow = threading.Event()
    engine.checkpoint_engine.hook = lambda point: slow.wait(0.5) and None if point == "writing" else None
    for tag in ("one", "two"):
        engine.save_checkpoint(directory, tag=tag)
    part = data[2][:3]
    for _ in range(2):
        engine.backward(engine(input_ids=part, labels=part).loss * math.inf)
        engine.step()
    logging.getLogger("ds_galore.monitoring.monitor").removeHandler(handler)
    engine.checkpoint_engine.wait()
    return messages


def test_signs_of_trouble_are_warned_of_once_each(pool, tmp_path):
    messages = pool.run(2, troubled, str(tmp_path))[0]
    warnings = of(events(tmp_path / "run.jsonl"), "warning")
    assert [f"step {each['step']}: {each['message']}" for each in warnings] == messages
    texts = [each["message"] for each in warnings]
    assert len(texts) == 3, texts
    assert "capture" in texts[0]
    assert "larger rank" in texts[0]
    assert "training waited" in texts[1]
    assert "closer together than a save takes" in texts[1]
    assert texts[2] == "the loss on rank 0 is inf"


def broken(directory: str) -> list[float]:
    engine = jobs.start(jobs.tiny_llama(), settings(Path(directory), jobs.galore(update_proj_gap=2)))

    def write_events(events: list[Any]) -> None:
        if any("GaLore" in name for name, _, _ in events):
            raise OSError(28, "No space left on device")

    engine.monitor.write_events = write_events
    return jobs.train(engine, jobs.batches(4, BATCH))


def test_a_monitor_that_fails_on_the_first_rank_ends_nothing(pool, tmp_path):
    losses = pool.run(2, broken, str(tmp_path), timeout=60)
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4
    assert len(of(events(tmp_path / "run.jsonl"), "refresh")) == 4


def refused(path: str) -> str:
    from ds_galore import ConfigError

    extra = {"ds_galore": {"monitor": {"log": path}}}
    try:
        jobs.start(jobs.tiny_llama(), jobs.config(jobs.galore(), micro=2, **extra))
    except (ConfigError, RuntimeError) as error:
        return str(error)
    return "built"


def test_a_log_that_cannot_be_written_is_refused_on_all_ranks(pool, tmp_path):
    (tmp_path / "file").write_text("")
    told = pool.run(2, refused, str(tmp_path / "file" / "run.jsonl"), timeout=60)
    assert "ds_galore.monitor.log is" in told[0]
    assert "cannot be written to: " in told[0]
    assert "rank 0 failed" in told[1]


def test_the_log_goes_on_after_a_line_that_was_cut_off(tmp_path):
    from ds_galore.monitoring.log import RunLog

    path = tmp_path / "a" / "run.jsonl"
    log = RunLog(path)
    log.write("save", step=1, ratio=math.nan, where=tmp_path)
    log.close()
    with path.open("a") as file:
        file.write('{"event": "refr')
    log = RunLog(path)
    log.write("start", step=2)
    log.close()
    lines = path.read_text().splitlines()
    assert json.loads(lines[0])["ratio"] is None
    assert json.loads(lines[0])["where"] == str(tmp_path)
    assert lines[1] == '{"event": "refr'
    assert json.loads(lines[2])["event"] == "start"
