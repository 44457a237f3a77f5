"""From a run's directory to a :class:`Run`: logs of ours, of the Trainer and of DeepSpeed's monitor, and checkpoints.

Logs end wherever their job was killed, and may have been edited: what cannot be read is counted, and left out.
Imports neither torch nor DeepSpeed, and no plotting.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds_galore.checkpoint.errors import DamageError, FormatError, NotCommittedError
from ds_galore.checkpoint.manifest import Manifest
from ds_galore.errors import DataError
from ds_galore.tools.inspect import list_checkpoints
from ds_galore.tools.report.curves import as_number, as_step
from ds_galore.tools.report.log import read_log, take_objects
from ds_galore.tools.report.runs import Run, Save
from ds_galore.tools.report.words import count

__all__ = ["read_run", "read_runs"]

LOG, METRICS, TRAINER = "ds_galore.jsonl", "metrics.jsonl", "trainer_state.json"
#: What DeepSpeed's CSV monitor calls what we show.
MONITORED = {"Train_Samples_train_loss.csv": "loss", "Train_Samples_lr.csv": "lr"}
#: What the Trainer calls what we show.
LOGGED = {
    "loss": "loss",
    "eval_loss": "validation_loss",
    "learning_rate": "lr",
    "grad_norm": "grad_norm",
    "train_tokens_per_second": "tokens_per_s",
}
#: Bytes: a Trainer's log of a million lines is shorter.
MAX_STATE = 2**30


def read_runs(directories: list[Path]) -> list[Run]:
    """Several runs, each with a name of its own.

    Raises
    ------
    DataError
        As :func:`read_run` does, and if a directory is given twice.
    """
    resolved = [directory.resolve() for directory in directories]
    for index, directory in enumerate(resolved):
        if directory in resolved[:index]:
            raise DataError(f"{directories[index]}: is given twice")
    return [read_run(each, name) for each, name in zip(directories, _names(resolved), strict=True)]


def _names(directories: list[Path]) -> list[str]:
    """The shortest ends of paths that tell them apart."""
    parts = 1
    longest = max(len(each.parts) for each in directories)
    while True:
        names = ["/".join(each.parts[-parts:]) for each in directories]
        if len(set(names)) == len(names) or parts >= longest:
            return names
        parts += 1


def read_run(directory: Path, name: str | None = None) -> Run:
    """All that can be found of a run.

    Parameters
    ----------
    directory
        Of the run: ``launch/train.py``'s ``--output``, the Trainer's ``output_dir``, accelerate's project directory, a
        directory that checkpoints were saved to, or one of DeepSpeed's CSV monitor.
    name
        For the page; the directory's own by default.

    Raises
    ------
    DataError
        If there is no such directory, or nothing in it to report on.
    """
    if not directory.is_dir():
        raise DataError(f"{directory}: is {'a file' if directory.exists() else 'no such directory'}; give a run's")
    run = Run(name if name is not None else directory.resolve().name, directory)
    read_log(run, directory / LOG)
    _read_metrics(run, directory / METRICS)
    _read_trainer(run)
    _read_monitor(run)
    _read_checkpoints(run)
    run.saves.sort(key=lambda save: (save.step, save.tag))
    if run.empty:
        damaged = [f"{file}: {count(number, 'damaged line')}" for file, number in run.damaged.items()]
        found = "; ".join([*damaged, *run.problems])
        raise DataError(
            f"{directory}: holds nothing to report on: looked for {LOG}, {METRICS}, {TRAINER} of the Trainer,"
            f" {next(iter(MONITORED))} of DeepSpeed's monitor, and checkpoints" + (f" ({found})" if found else "")
        )
    return run


# ---------------------------------------------------------------------- curves


def _read_metrics(run: Run, path: Path) -> None:
    """What ``launch/train.py`` writes."""
    last = -1

    def take(line: dict[str, Any]) -> bool:
        nonlocal last
        step = as_step(line.get("step"))
        if step is None:
            return False
        if step < last:  # a resume: what came after is no longer part of the run
            for curve in run.curves.values():
                curve.cut(step + 1)
        last = step
        for name, curve in run.curves.items():
            number = as_number(line.get(name))
            if number is not None:
                curve.add(step, number)
        return True

    take_objects(run, path, take)


def _read_trainer(run: Run) -> None:
    """The Trainer's newest readable log, for the curves that are not known yet."""
    places = [run.directory / TRAINER]
    numbered = [(int(found[1]), path) for path, found in _matching(run.directory, r"checkpoint-(\d{1,15})")]
    places += [path / TRAINER for _, path in sorted(numbered, reverse=True)]
    best: tuple[int, Path, list[Any]] | None = None
    for path in places:
        found = _trainer_state(run, path)
        if found is not None and (best is None or found[0] > best[0]):
            best = (found[0], path, found[1])
        if best is not None and path != places[0]:
            break  # older ones know less
    if best is None:
        return
    _, path, log = best
    run.sources.append(str(path.relative_to(run.directory)))
    wanted = {key: name for key, name in LOGGED.items() if not len(run.curves[name])}
    damaged = 0
    for line in log:
        step = as_step(line.get("step")) if isinstance(line, dict) else None
        if step is None:
            damaged += 1
            continue
        for key, name in wanted.items():
            number = as_number(line.get(key))
            if number is not None:
                run.curves[name].add(step, number)
    if damaged:
        run.damaged[str(path.relative_to(run.directory))] = damaged


def _matching(directory: Path, pattern: str) -> Iterator[tuple[Path, re.Match[str]]]:
    for path in directory.iterdir():
        found = re.fullmatch(pattern, path.name)
        if found is not None and path.is_dir():
            yield path, found


def _trainer_state(run: Run, path: Path) -> tuple[int, list[Any]] | None:
    """Its step and its log."""
    try:
        if path.stat().st_size > MAX_STATE:
            raise ValueError("is too large")
        state = json.loads(path.read_bytes())
        log = state["log_history"]
        if not isinstance(log, list):
            raise ValueError("log_history is no list")
        return as_step(state.get("global_step")) or 0, log
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        why = error.strerror or str(error)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        why = "is damaged, or no log of the Trainer"
    run.problems.append(f"{path.relative_to(run.directory)}: {why}")
    return None


def _read_monitor(run: Run) -> None:
    """What DeepSpeed's CSV monitor writes, for the curves that are not known yet."""
    batch, known = _global_batch(run), any(len(curve) for curve in run.curves.values())
    if batch is None and known:
        return  # it counts samples, and the other curves count steps
    for file, name in MONITORED.items():
        found = [path for depth in ("", "*/", "*/*/") for path in run.directory.glob(depth + file)]
        if found and not len(run.curves[name]):
            run.unit = "sample" if batch is None else "step"
            _read_csv(run, max(found, key=lambda path: path.stat().st_mtime), name, batch or 1)


def _read_csv(run: Run, path: Path, name: str, batch: int) -> None:
    label, damaged = str(path.relative_to(run.directory)), 0
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            for row in csv.reader(line.replace("\0", "") for line in file):
                if row[:1] == ["step"] or not row:  # the header, which each resume writes again
                    continue
                try:
                    run.curves[name].add(int(row[0]) // batch, float(row[1]))
                except (ValueError, IndexError):
                    damaged += 1
    except (OSError, csv.Error) as error:
        run.problems.append(f"{label}: cannot be read: {error}")
    run.sources.append(label)
    if damaged:
        run.damaged[label] = damaged


def _global_batch(run: Run) -> int | None:
    """Samples of a step, by the configuration."""
    config = run.config or {}
    whole = as_step(config.get("train_batch_size"))
    if whole:
        return whole
    micro, steps = (
        as_step(config.get(key)) for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    world = run.starts[-1].world_size if run.starts else None
    return micro * (steps or 1) * world if micro and world else None


# ---------------------------------------------------------------------- checkpoints


def _read_checkpoints(run: Run) -> None:
    """What lies on the disk, beside what the log says of it."""
    rows = _listed(run, run.directory)
    deeper = run.directory / "checkpoints"
    if deeper.is_dir() and not any(deeper in path.parents for path in rows):
        rows |= _listed(run, deeper)  # accelerate's lie a level below
    if rows:
        run.sources.append(count(len(rows), "checkpoint"))
    for path, row in rows.items():
        _add_checkpoint(run, path, row)


def _listed(run: Run, place: Path) -> dict[Path, dict[str, Any]]:
    try:
        return {place / row["tag"]: row for row in list_checkpoints(place)}
    except DataError:  # there are none
        return {}
    except OSError as error:
        run.problems.append(f"{error.filename or place}: cannot be read: {error.strerror}")
        return {}


def _add_checkpoint(run: Run, path: Path, row: Mapping[str, Any]) -> None:
    where, step = str(path.relative_to(run.directory)), as_step(row["step"])
    if row["state"] == "unfinished":
        run.problems.append(f"{where}: a checkpoint that was never finished")
    elif row["state"] != "intact":
        run.problems.append(f"{where}: a damaged checkpoint: {row['state']}")
    elif step is None:
        run.problems.append(f"{where}: a checkpoint that does not say of which step it is")
    else:
        logged = [
            index
            for index, save in enumerate(run.saves)
            if save.step == step and save.kind != "failed" and not save.on_disk
        ]
        if logged:
            run.saves[logged[0]] = replace(run.saves[logged[0]], on_disk=True)
        else:
            run.saves.append(Save(step, path.name, row["kind"], bytes=_written(path, row), on_disk=True))


def _written(path: Path, row: Mapping[str, Any]) -> float:
    """Bytes that saving it wrote: without the files of its base, which are links."""
    try:
        manifest = Manifest.read(path)
    except (NotCommittedError, DamageError, FormatError):
        return float(row["bytes"])
    own = sum(rank[-1].bytes for rank in manifest.files if rank)
    return float(own + sum(record.bytes for record in manifest.states.values()))
