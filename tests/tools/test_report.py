"""What ds-galore report reads of runs' directories, what it makes of that, and how it fails."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from ds_galore.checkpoint.store import CheckpointStore
from ds_galore.errors import DataError
from ds_galore.tools.report.curves import MAX_POINTS, Curve
from ds_galore.tools.report.figures import Figure, literal, loss_figures, memory_figures, speed_figures, template
from ds_galore.tools.report.grids import MAX_COLUMNS, make_grid
from ds_galore.tools.report.page import render, write_page
from ds_galore.tools.report.reading import read_run, read_runs
from ds_galore.tools.report.runs import Note, Refresh, Run, Save, summary
from ds_galore.tools.report.saves import saves_figure
from ds_galore.tools.report.subspaces import heat_figures, mean_figures
from ds_galore.tools.report.theme import THEMES
from tests.checkpoint.runs import save as save_checkpoint
from tests.tools.run_directories import failed, matrices, metric, refresh, saved, start, warning, whole_run, write_lines

ROOT = Path(__file__).resolve().parent.parent.parent
EVIL = "<script>alert('x')</script>"


def points(run: Run, name: str) -> dict[int, float]:
    return dict(run.curves[name])


# ---------------------------------------------------------------------- our log and launch/train.py's


def test_a_whole_run_is_read(tmp_path):
    found = summary(read_run(whole_run(tmp_path / "run")))
    assert (found["name"], found["step"], found["unit"]) == ("run", 120, "step")
    assert found["sources"] == ["ds_galore.jsonl", "metrics.jsonl"]
    assert found["last_loss"] == pytest.approx(metric(120)["loss"], rel=1e-5)
    assert (found["best_validation_step"], found["last_validation_loss"]) == (120, pytest.approx(2.1549, rel=1e-4))
    assert found["tokens_per_s"] == 1060.5
    assert found["peak_memory_bytes"] == 10**9
    assert (found["optimizer"], found["world_size"], found["zero_stage"]) == ("GaLoreAdamW", 2, 3)
    assert (found["refreshes"], found["matrices"], found["refresh_seconds"]) == (6, 16, 0.4)
    assert found["captured_energy"] == pytest.approx(0.6 + 0.3 * 7.5 / 16)
    assert found["basis_overlap"] == pytest.approx(101 / 120, rel=1e-5)
    assert found["checkpoints"] == {"full": 1, "differential": 2, "incremental": 1}
    assert (found["failed_saves"], found["checkpoints_on_disk"], found["warnings"]) == (1, 0, 1)
    assert (found["written_bytes"], found["logical_bytes"], found["stall_seconds"]) == (5500, 12000, 2.0)
    assert found["ratio"] == pytest.approx(12000 / 5500, rel=1e-3)
    assert (found["damaged_lines"], found["problems"], found["not_finite_losses"]) == ({}, [], 0)


def test_of_steps_that_a_resumed_run_took_twice_the_later_ones_count(tmp_path):
    lines: list[dict[str, Any]] = [metric(step, loss=1.0) for step in range(1, 9)]
    lines += [{"step": 4, "validation_loss": 1.0}, *(metric(step, loss=2.0) for step in (5, 6))]
    write_lines(tmp_path / "metrics.jsonl", lines)
    name = "layers.0.q.weight"
    events = [start(), refresh(2, {name: (0.1, None)}), refresh(4, {name: (0.2, 0.5)}), refresh(7, {name: (0.3, 0.5)})]
    events += [saved(4, bytes=10), failed(6), warning(6, "w"), start(4, world_size=4)]
    events += [refresh(6, {name: (0.9, 0.8)}), saved(6, bytes=30), warning(6, "w")]
    write_lines(tmp_path / "ds_galore.jsonl", events)
    run = read_run(tmp_path)
    assert points(run, "loss") == {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0, 5: 2.0, 6: 2.0}
    assert points(run, "validation_loss") == {4: 1.0}
    assert {step: each.energy for step, each in run.refreshes[name].items()} == {2: 0.1, 4: 0.2, 6: 0.9}
    assert sorted(run.refresh_seconds) == [2, 4, 6]
    assert [(each.step, each.kind, each.bytes) for each in run.saves] == [
        (4, "differential", 10),
        (6, "differential", 30),
    ]
    assert run.resumes == [4]
    assert (len(run.notes), summary(run)["world_size"]) == (1, 4)


DAMAGED = [
    '{"step": 3, "lo',
    "[1, 2]",
    '"text"',
    '{"step": "3", "loss": 1}',
    '{"step": -1}',
    '{"loss": 1}',
    "\\x00",
    "9" * 5000,
]


def test_damaged_lines_are_counted_and_left_out(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [metric(1), *DAMAGED[:4], metric(2), *DAMAGED[4:], "", metric(3)])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "loss": 1.0, "name": "\xff\xfe"}\n' + b"[" * 100_000 + b'\n{"step": 5, "loss"')
    events: list[dict[str, Any] | str] = [
        start(),
        {"event": "start"},
        {"event": "refresh", "step": 1, "matrices": [1]},
        {"event": "refresh"},
    ]
    events += [{"event": "refresh", "step": 2, "matrices": {"a": 1}}, {"event": "save", "step": 2}]
    events += [{**saved(3), "kind": "other"}, {"event": "warning", "step": 1}, {"event": "later", "step": 9}, {"x": 1}]
    write_lines(tmp_path / "ds_galore.jsonl", [*events, warning(1, "fine")])
    run = read_run(tmp_path)
    assert points(run, "loss").keys() == {1, 2, 3}
    assert run.damaged == {"metrics.jsonl": len(DAMAGED) + 3, "ds_galore.jsonl": 7}
    assert [note.message for note in run.notes] == ["fine"]
    assert "metrics.jsonl: 11 damaged lines left out." in render([run])


def test_numbers_that_are_not_finite_end_up_as_gaps_and_as_a_warning(tmp_path):
    texts = [
        '{"step": 2, "loss": NaN, "grad_norm": null}',
        '{"step": 3, "loss": Infinity}',
        '{"step": 4, "loss": 1e999}',
    ]
    texts.append('{"step": 5, "loss": 1' + "0" * 400 + "}")
    write_lines(
        tmp_path / "metrics.jsonl", [metric(1, loss=4.0), *texts, metric(6, loss=3.0), '{"step": 7, "loss": NaN}']
    )
    broken = (
        '{"event": "refresh", "step": 1, "seconds": NaN, "matrices": {"a.0.b": {"energy": NaN, "overlap": Infinity}}}'
    )
    worse = '{"event": "save", "step": 3, "tag": "t", "kind": "full", "bytes": NaN, "stall": -Infinity, "ratio": null}'
    write_lines(tmp_path / "ds_galore.jsonl", [start(memory={"AdamW": {"weights": math.nan}}), broken, worse])
    run = read_run(tmp_path)
    found = summary(run)
    json.dumps(found, allow_nan=False)
    assert (found["last_loss"], found["lowest_loss"]) == (None, 3.0)
    assert (found["not_finite_losses"], found["first_not_finite_loss"]) == (5, 2)
    (figure,) = loss_figures([run])
    assert figure.data[-1]["y"] == [4.0, None, None, None, None, 3.0, None]
    assert "not finite at 5 steps from 2 to 7" in render([run])


# ---------------------------------------------------------------------- other logs


def test_the_trainers_newest_readable_state_is_read(tmp_path):
    log = [
        {"step": 10, "loss": 3.0, "learning_rate": 0.1, "grad_norm": 2.0, "epoch": 0.5},
        {"step": 10, "eval_loss": 3.5, "eval_runtime": 1.0},
        {"step": 20, "loss": 2.0, "learning_rate": 0.05, "grad_norm": math.nan},
        {"step": 20, "train_loss": 2.5, "train_runtime": 9.0},
        "no entry",
    ]
    for number in (9, 20, 100):
        state = {"global_step": number, "log_history": log[: 2 if number == 9 else None]}
        write_lines(tmp_path / f"checkpoint-{number}" / "trainer_state.json", [state])
    (tmp_path / "checkpoint-100" / "trainer_state.json").write_text('{"log_history": [')
    (tmp_path / "checkpoint-best").mkdir()
    run = read_run(tmp_path)
    assert points(run, "loss") == {10: 3.0, 20: 2.0}
    assert points(run, "validation_loss") == {10: 3.5}
    assert points(run, "lr") == {10: 0.1, 20: 0.05}
    assert run.curves["grad_norm"].broken() == [20]
    assert run.sources == ["checkpoint-20/trainer_state.json"]
    assert run.damaged == {"checkpoint-20/trainer_state.json": 1}
    assert run.problems == ["checkpoint-100/trainer_state.json: is damaged, or no log of the Trainer"]
    write_lines(tmp_path / "trainer_state.json", [{"global_step": 25, "log_history": [{"step": 25, "loss": 1.0}]}])
    assert points(read_run(tmp_path), "loss") == {25: 1.0}


def test_deepspeeds_monitor_counts_samples_and_the_configuration_makes_steps_of_them(tmp_path):
    job = tmp_path / "run" / "monitor" / "job"
    write_lines(
        job / "Train_Samples_train_loss.csv",
        ["step,train_loss", "8,3.0", "16,nan", "step,train_loss", "16,2.0", "24,x", "3"],
    )
    write_lines(job / "Train_Samples_lr.csv", ["step,lr", "8,0.1"])
    alone = read_run(job)
    assert (alone.unit, points(alone, "loss"), points(alone, "lr")) == ("sample", {8: 3.0, 16: 2.0}, {8: 0.1})
    assert alone.damaged == {"Train_Samples_train_loss.csv": 2}
    assert loss_figures([alone])[0].layout["xaxis"]["title"]["text"] == "sample"
    write_lines(tmp_path / "run" / "ds_galore.jsonl", [start()])
    run = read_run(tmp_path / "run")
    assert (run.unit, points(run, "loss")) == ("step", {1: 3.0, 2: 2.0})
    write_lines(tmp_path / "run" / "ds_galore.jsonl", [start(config={"train_micro_batch_size_per_gpu": 4})])
    assert points(read_run(tmp_path / "run"), "loss") == {1: 3.0, 2: 2.0}, "4 samples on each of 2 ranks"
    write_lines(tmp_path / "run" / "metrics.jsonl", [metric(5, loss=1.5)])
    assert points(read_run(tmp_path / "run"), "loss") == {5: 1.5}, "what is more exact comes first"


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(
    "layout",
    ["checkpoints", "", "checkpoint-{step}", "checkpoints/checkpoint_{step}"],
    ids=["train", "plain", "trainer", "accelerate"],
)
def test_checkpoints_on_the_disk_are_found_where_each_library_puts_them(tmp_path, layout):
    directory = tmp_path / "run"
    for step in (1, 3):
        tag = f"global_step{step}" if "{step}" in layout else f"step-{step}"
        save_checkpoint(CheckpointStore(directory / layout.format(step=step)), step, tag=tag)
    run = read_run(directory)
    assert [(save.step, save.kind, save.on_disk) for save in run.saves] == [(1, "full", True), (3, "full", True)]
    assert all(save.bytes and save.bytes > 1000 for save in run.saves)
    assert run.sources == ["2 checkpoints"]
    assert not run.problems


def test_the_log_and_the_disk_tell_of_the_same_checkpoints(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    save_checkpoint(store, 1)
    save_checkpoint(store, 3, base="step-1")
    save_checkpoint(store, 5, base="step-1")
    save_checkpoint(store, 6)
    (store.path("step-6") / "manifest.json").unlink()
    save_checkpoint(store, 7)
    next(store.path("step-7").glob("rank-*")).unlink()
    write_lines(tmp_path / "ds_galore.jsonl", [start(), saved(1, "full"), saved(2), failed(5), saved(7, "full")])
    run = read_run(tmp_path)
    assert [(save.step, save.kind, save.on_disk) for save in run.saves] == [
        (1, "full", True),
        (2, "differential", False),
        (3, "differential", True),
        (5, "failed", False),
        (5, "differential", True),
        (7, "full", False),
    ]
    assert run.saves[0].bytes == 1000, "as logged"
    own = run.saves[2].bytes
    assert own is not None
    assert 0 < own < sum(path.stat().st_size for path in store.path("step-3").glob("rank-*")), "without its base"
    assert sorted(problem.split(":")[0] for problem in run.problems) == ["checkpoints/step-6", "checkpoints/step-7"]
    assert "never finished" in run.problems[0] + run.problems[1]


# ---------------------------------------------------------------------- curves and grids


def test_a_long_curve_is_thinned_without_losing_its_spikes_or_gaps():
    curve = Curve()
    for step in range(1, 100_001):
        curve.add(step, math.nan if step == 777 else 50.0 if step == 43_210 else 2 + math.sin(step))
    thin = curve.thinned()
    assert len(thin) <= MAX_POINTS + 1
    assert (thin.steps[0], thin.steps[-1]) == (1, 100_000)
    assert dict(thin)[43_210] == 50.0
    assert thin.broken() == [777]
    assert thin.steps == sorted(set(thin.steps))
    assert max(b - a for a, b in zip(thin.steps, thin.steps[1:], strict=False)) < 250
    assert curve.thinned(10**6) is curve
    smooth = curve.smoothed()
    assert smooth.broken() == [777]
    assert all(abs(value - 2) < 0.7 for step, value in smooth if step > 200 and math.isfinite(value))


def test_a_grid_shows_the_basis_in_use_in_order_of_kinds_and_layers():
    names = ["h.10.attn.q.weight", "h.2.attn.q.weight", "h.2.mlp.up.weight", "other.weight"]
    refreshes = {
        names[0]: {1: Refresh(0.1, None, 4), 11: Refresh(0.2, 0.5, 4)},
        names[1]: {1: Refresh(0.3, None, 4)},
        names[2]: {6: Refresh(0.4, None, 4)},
        names[3]: {6: Refresh(0.5, None, 4), 11: Refresh(None, None, 4)},
    }
    grid = make_grid(refreshes, "energy", 20)
    assert grid is not None
    assert [row.label for row in grid.rows] == ["q 2", "q 10", "up 2", "other"]
    assert [(group.label, group.begin, group.end) for group in grid.groups] == [
        ("q", 0, 2),
        ("up", 2, 3),
        ("other", 3, 4),
    ]
    assert (grid.edges, grid.merged) == ([1, 6, 11, 20], False)
    assert grid.cells == [[0.3, 0.3, 0.3], [0.1, 0.1, 0.2], [None, 0.4, 0.4], [None, 0.5, None]]
    overlap = make_grid(refreshes, "overlap", 20)
    assert overlap is not None
    assert [row.name for row in overlap.rows] == [names[0]]
    assert make_grid({"a": {1: Refresh(None, None, 1)}}, "energy", 9) is None


def test_many_refreshes_share_columns():
    steps = range(1, 100_001, 50)
    refreshes = {name: {step: Refresh(step / 100_000, None, 1) for step in steps} for name in matrices(2)}
    grid = make_grid(refreshes, "energy", 100_000)
    assert grid is not None
    assert (len(grid.cells[0]), grid.merged) == (MAX_COLUMNS, True)
    assert grid.cells[0][-1] == pytest.approx(0.999, abs=1e-3)
    assert grid.cells[0] == sorted(v for v in grid.cells[0] if v is not None)


# ---------------------------------------------------------------------- figures


def coloured(value: object, key: str = "") -> object:
    """A figure with the light scheme's colours in, as the page's script puts them in."""
    if isinstance(value, dict):
        return {name: coloured(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [coloured(each, key) for each in value]
    if isinstance(value, str) and value.startswith("@") and key.endswith("color"):
        return THEMES["light"][value[1:].split("/")[0]]
    return value


def figures_of(runs: list[Run]) -> list[Figure]:
    own = [figure for index, run in enumerate(runs) for figure in (saves_figure(index, run), *heat_figures(index, run))]
    return [
        *(*loss_figures(runs), *speed_figures(runs), *memory_figures(runs), *mean_figures(runs)),
        *(figure for figure in own if figure is not None),
    ]


@pytest.mark.parametrize("count", [1, 2, 10])
def test_figures_are_valid_in_plotlys_own_schema(tmp_path, count):
    runs = read_runs([whole_run(tmp_path / f"run{index}", layers=1 + 10 * index) for index in range(count)])
    figures = figures_of(runs)
    assert len(figures) == 2 + 4 + 1 + 2 + 3 * count
    assert len({figure.key for figure in figures}) == len(figures)
    for figure in figures:
        drawn = coloured({"data": figure.data, "layout": {**figure.layout, "template": template()}})
        assert "@" not in json.dumps(drawn, allow_nan=False)
        go.Figure(drawn)  # which refuses names and values that plotly does not have
    for theme in THEMES.values():
        assert theme.keys() == THEMES["light"].keys()


def test_memory_is_shown_by_kind_beside_adamws(tmp_path):
    (figure,) = memory_figures([read_run(whole_run(tmp_path))])
    assert {trace["name"]: trace["x"] for trace in figure.data}["moments"] == [0.9, 4.0]
    assert [label["text"] for label in figure.layout["annotations"]] == [
        "GaLoreAdamW <b>9.2 kB</b> (\N{MINUS SIGN}23%)",
        "AdamW <b>12 kB</b>",
    ]


def test_markup_in_names_is_text_for_plotly_too():
    assert literal("<b>x</b> & <a href='javascript:1'>") == "&lt;b&gt;x&lt;/b&gt; &amp; &lt;a href='javascript:1'&gt;"
    assert literal("abcdefghij", 5) == "ab…ij"


# ---------------------------------------------------------------------- the page


def test_what_users_wrote_is_escaped_wherever_it_stands(tmp_path):
    directory = tmp_path / EVIL.replace("/", "")
    whole_run(directory, message=EVIL)
    events: list[dict[str, Any] | str] = [
        start(config={EVIL: {"a": EVIL}, "lone": "\ud800"}, version=EVIL, optimizer=EVIL)
    ]
    events += [start(config={EVIL: {"a": 2}}, memory={EVIL: {"weights": 5}, "AdamW": {"weights": 9}})]
    events += [warning(1, EVIL), failed(3, EVIL), {**saved(5), "tag": EVIL}, refresh(1, {f"{EVIL}.0.q": (0.5, 0.5)})]
    write_lines(directory / "ds_galore.jsonl", events)
    other = whole_run(tmp_path / 'b"onmouseover="alert(1)')
    write_page(read_runs([directory, other]), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert len(re.findall(r"<script", text)) == 3, "the data, plotly, and ours"
    assert text.count("&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;") >= 6
    assert 'onmouseover="' not in text.replace("onmouseover=&#34;", "")
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert "&lt;script&gt;" in json.dumps(json.loads(data[1])), "plotly reads markup: it is text there as well"
    assert "<script" not in json.dumps(json.loads(data[1]))


def test_the_page_refers_to_nothing_outside_itself(tmp_path):
    text = render([read_run(whole_run(tmp_path))])
    assert not re.findall(r"""(?:src|href)\s*=\s*["']?(?!#|data:)[^"'>\s]+""", text)
    assert "@import" not in text
    assert "url(" not in text
    assert re.search(r"Content-Security-Policy\" content=\"default-src 'none'; script-src 'sha256-", text)


def test_missing_parts_are_named(tmp_path):
    write_lines(tmp_path / "a" / "metrics.jsonl", [metric(1), metric(2)])
    whole_run(tmp_path / "b")
    text = render([read_run(tmp_path / "a")])
    for what in ("validation loss", "memory by kind", "checkpoints", "refreshes of bases"):
        assert f"No {what} found (looked in " in text
    assert "No configuration found" in text
    assert "No training loss" not in text
    assert re.findall("<dt>(.*?)</dt>", text) == ["last step", "training loss", "tokens/s", "peak memory"]
    both = render(read_runs([tmp_path / "a", tmp_path / "b"]))
    assert "No refreshes of bases found for a (looked in" in both


def test_configurations_are_compared(tmp_path):
    for name, rank in (("a", 64), ("b", 128)):
        config = {"optimizer": {"params": {"rank": rank, "lr": 0.01}}, "zero_optimization": {"stage": 3}}
        write_lines(tmp_path / name / "ds_galore.jsonl", [start(config=config)])
    write_lines(tmp_path / "c" / "metrics.jsonl", [metric(1)])
    text = render(read_runs([tmp_path / "a", tmp_path / "b", tmp_path / "c"]))
    table = text[text.index("What differs") : text.index("</table>", text.index("What differs"))]
    assert "optimizer.params.rank" in table
    assert "<code>64</code>" in table
    assert "optimizer.params.lr" not in table


def test_a_long_run_makes_a_small_file(tmp_path):
    steps = 100_000
    run = Run("long", tmp_path)
    for curve in run.curves.values():
        curve.steps, curve.values = list(range(steps)), [2 + math.sin(step * step) for step in range(steps)]
    every = {step: Refresh(0.512345, 0.254321, 64) for step in range(0, steps, 1000)}
    run.refreshes = dict.fromkeys(matrices(56), every)
    run.saves = [Save(step, f"step-{step}", "differential", 1e9, 3e9, 3.0, 0.5, 4.0) for step in range(50, steps, 50)]
    run.notes = [Note(step, f"slow at {step}") for step in range(1000)]
    text = render([run])
    assert len(text) < 4e6
    assert "Thinned here: Training loss" in text
    assert "950 more are left out here" in text


# ---------------------------------------------------------------------- the command


def command(*arguments: str | Path, block: str = "torch,deepspeed") -> subprocess.CompletedProcess[str]:
    blocked = "".join(f"sys.modules[{name!r}] = None; " for name in block.split(","))
    code = f"import sys; {blocked}from ds_galore.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, "report", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_command_writes_the_page_and_tells_what_was_found(tmp_path):
    run, output = whole_run(tmp_path / "run"), tmp_path / "report.html"
    output.write_text("old")
    done = command(run, "--output", output, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert (found["output"], found["bytes"]) == (str(output), output.stat().st_size)
    assert found["runs"][0]["checkpoints"] == {"full": 1, "differential": 2, "incremental": 1}
    assert output.read_text().startswith("<!DOCTYPE html>")
    done = command(run, "--output", output)
    assert done.stdout.splitlines()[0] == (
        f"{run}: step 120, loss 2.0840, best validation loss 2.1549, 6 steps with refreshes, 4 checkpoints,"
        " 1 failed save, 1 warning"
    )
    done = command(run, "--output", output, "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_mistakes_are_one_line_and_leave_the_old_page(tmp_path):
    run, output = whole_run(tmp_path / "run"), tmp_path / "report.html"
    output.write_text("old")
    (tmp_path / "empty").mkdir()
    write_lines(tmp_path / "damaged" / "metrics.jsonl", ["{", "{"])
    looked = (
        "holds nothing to report on: looked for ds_galore.jsonl, metrics.jsonl, trainer_state.json of the Trainer,"
        " Train_Samples_train_loss.csv of DeepSpeed's monitor, and checkpoints"
    )
    cases = {
        "empty": f"{looked}\n",
        "damaged": f"{looked} (metrics.jsonl: 2 damaged lines)\n",
        "nowhere": "is no such directory; give a run's\n",
        "report.html": "is a file; give a run's\n",
    }
    for name, message in cases.items():
        with pytest.raises(DataError) as caught:
            read_runs([run, tmp_path / name])
        assert str(caught.value) + "\n" == f"{tmp_path / name}: {message}"
    done = command(run, tmp_path / "empty", "--output", output)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"ds-galore: error: {tmp_path / 'empty'}: {cases['empty']}"
    assert output.read_text() == "old"
    with pytest.raises(DataError, match="is given twice"):
        read_runs([run, run / ".." / "run"])
    with pytest.raises(DataError, match="is a directory; give the name of a file"):
        write_page([read_run(run)], tmp_path)
    with pytest.raises(DataError, match=r"no such directory, and x\.html is to be made in it"):
        write_page([read_run(run)], tmp_path / "no" / "x.html")


def test_runs_of_one_name_are_told_apart(tmp_path):
    runs = read_runs([whole_run(tmp_path / "a" / "run"), whole_run(tmp_path / "b" / "run")])
    assert [run.name for run in runs] == ["a/run", "b/run"]


def test_without_its_libraries_the_command_that_installs_them_is_named(tmp_path):
    run, output = whole_run(tmp_path / "run"), tmp_path / "report.html"
    install = "pip install 'ds_galore[report]'"
    done = command(run, "--output", output, block="plotly")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"ds-galore: error: a report needs plotly, which is not installed: {install}\n"
    done = command(run, "--output", output, block="plotly,jinja2")
    assert done.stderr == f"ds-galore: error: a report needs plotly and jinja2, which are not installed: {install}\n"
    assert not output.exists()
