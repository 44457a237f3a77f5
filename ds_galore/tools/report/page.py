"""The page: figures, numbers and words of some runs in one HTML file that needs nothing beside it.

Imports Jinja and, for the library that the file carries along, plotly; both come with the extra ``report``.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import importlib.util
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from ds_galore import __version__
from ds_galore.checkpoint.files import replace_file
from ds_galore.errors import DataError
from ds_galore.tools.report.curves import MAX_POINTS
from ds_galore.tools.report.figures import Figure, loss_figures, memory_figures, speed_figures, template
from ds_galore.tools.report.runs import Run, Save, summary
from ds_galore.tools.report.saves import saves_figure
from ds_galore.tools.report.subspaces import heat_figures, mean_figures
from ds_galore.tools.report.theme import RUN_COLOURS, THEMES
from ds_galore.tools.report.words import NOTHING, count, number, signed_percent, size, steps

__all__ = ["require_libraries", "write_page"]

INSTALL = "pip install 'ds_galore[report]'"
#: Warnings, rows of checkpoints and keys of configurations of a run on the page.
MAX_NOTES, MAX_ROWS, MAX_KEYS = 50, 200, 200


def require_libraries() -> None:
    """See that what draws is installed.

    Raises
    ------
    DataError
        If it is not, with the command that installs it.
    """
    missing = [name for name in ("plotly", "jinja2") if importlib.util.find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise DataError(f"a report needs {' and '.join(missing)}, which {verb} not installed: {INSTALL}")


def write_page(runs: Sequence[Run], output: Path) -> int:
    """Write the page, whole or not at all; its size in bytes.

    Raises
    ------
    DataError
        If there is no place for it, or a library is missing.
    """
    require_libraries()
    if output.is_dir():
        raise DataError(f"{output}: is a directory; give the name of a file, such as {output / 'report.html'}")
    if not output.absolute().parent.is_dir():
        raise DataError(f"{output.absolute().parent}: no such directory, and {output.name} is to be made in it")
    text = render(runs).encode("utf-8", "replace")  # names of files need not be text
    return replace_file(output, [text]).bytes


def render(runs: Sequence[Run]) -> str:
    """The page."""
    import jinja2

    here = files(__package__)
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = number
    plotly, script = _packed_plotly(), (here / "page.js").read_text("utf-8").strip()
    figures, sections = _sections(runs)
    data = {
        "figures": {each.key: _drawn(each) for each in figures},
        "template": template(),
        "themes": THEMES,
    }
    return environment.from_string((here / "page.html").read_text("utf-8")).render(
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        runs=_described(runs),
        sections=sections,
        differing=_differing(runs),
        max_points=MAX_POINTS,
        thinned=[figure.title for figure in figures if figure.thinned],
        written=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        version=__version__,
        data=_embedded(data),
        style=(here / "page.css").read_text("utf-8"),
        themes=THEMES,
        script=script,
        plotly=plotly.text,
        digests=" ".join(f"'sha256-{digest}'" for digest in (_digest(script), plotly.digest)),
    )


class _Packed(NamedTuple):
    """A script, compressed, as text; and its digest."""

    text: str
    digest: str


@functools.cache
def _packed_plotly() -> _Packed:
    from plotly.offline import get_plotlyjs

    script = get_plotlyjs()
    return _Packed(base64.b64encode(gzip.compress(script.encode(), 9, mtime=0)).decode(), _digest(script))


def _digest(text: str) -> str:
    """For the page's content security policy: no other script runs in it."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _embedded(value: object) -> str:
    """JSON that ends no element of HTML."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _drawn(figure: Figure) -> dict[str, Any]:
    return {key: value for key, value in asdict(figure).items() if key in ("data", "layout", "height", "rows")}


# ---------------------------------------------------------------------- sections


def _sections(runs: Sequence[Run]) -> tuple[list[Figure], list[dict[str, Any]]]:
    """All figures, and where they stand: each section has figures of all runs, and some of each run alone."""
    speed = speed_figures(runs)
    in_use = [figure for figure in speed if figure.key == "curve-memory_bytes"]
    speed = [figure for figure in speed if figure not in in_use]
    saves = [[figure] if (figure := saves_figure(index, run)) is not None else [] for index, run in enumerate(runs)]
    heat = [heat_figures(index, run) for index, run in enumerate(runs)]
    sections = [
        _section("loss", "Loss", loss_figures(runs), _without(runs, "loss", "validation_loss")),
        _section("speed", "Speed and steps", speed, _without(runs, "tokens_per_s", "lr", "grad_norm")),
        _section("memory", "Memory", [*memory_figures(runs), *in_use], _without(runs, "memory", "memory_bytes")),
        _section("checkpoints", "Checkpoints", [], _without(runs, "saves"), saves),
        _section("subspaces", "Subspaces", mean_figures(runs), _without(runs, "refreshes"), heat),
    ]
    figures = [figure for section in sections for figure in section["figures"]]
    figures += [figure for each in (*saves, *heat) for figure in each]
    return figures, sections


def _section(
    key: str, title: str, figures: Sequence[Figure], missing: Sequence[str], of_runs: Sequence[Sequence[Figure]] = ()
) -> dict[str, Any]:
    return {"key": key, "title": title, "figures": figures, "missing": missing, "of_runs": of_runs}


#: What may not be there: how it is called, and which files would have it.
SOUGHT = {
    "loss": ("training loss", "metrics.jsonl, trainer_state.json, Train_Samples_train_loss.csv"),
    "validation_loss": ("validation loss", "metrics.jsonl, trainer_state.json"),
    "tokens_per_s": ("tokens per second", "metrics.jsonl, trainer_state.json"),
    "lr": ("learning rate", "metrics.jsonl, trainer_state.json, Train_Samples_lr.csv"),
    "grad_norm": ("norm of the gradient", "metrics.jsonl, trainer_state.json"),
    "memory": ("memory by kind", "events 'start' of ds_galore.jsonl"),
    "memory_bytes": ("memory in use", "metrics.jsonl"),
    "saves": ("checkpoints", "events 'save' of ds_galore.jsonl, directories with manifest.json"),
    "refreshes": ("refreshes of bases", "events 'refresh' of ds_galore.jsonl"),
}


def _without(runs: Sequence[Run], *names: str) -> list[str]:
    """A line for each part that some runs, or all, do not have."""
    lines = []
    for name in names:
        lacking = [run.name for run in runs if not _has(run, name)]
        if lacking:
            what, where = SOUGHT[name]
            which = f" for {', '.join(lacking)}" if len(lacking) < len(runs) else ""
            lines.append(f"No {what} found{which} (looked in {where}).")
    return lines


def _has(run: Run, name: str) -> bool:
    if name in run.curves:
        return bool(len(run.curves[name].finite()))
    return bool(getattr(run, name))


# ---------------------------------------------------------------------- runs


def _described(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Runs in words, without numbers that none of them has."""
    shown = [_shown(index, run, len(runs)) for index, run in enumerate(runs)]
    known = [any(value != NOTHING for _, value, _ in row) for row in zip(*(run["stats"] for run in shown), strict=True)]
    for run in shown:
        run["stats"] = [stat for stat, kept in zip(run["stats"], known, strict=True) if kept]
    return shown


def _shown(index: int, run: Run, among: int) -> dict[str, Any]:
    """A run in words."""
    found = summary(run)
    saves = sorted(run.saves, key=lambda save: save.step, reverse=True)
    config = run.config
    return {
        "index": index,
        "colour": f"run{index % RUN_COLOURS}",
        "name": run.name,
        "directory": str(run.directory),
        "sources": ", ".join(run.sources),
        "open": among <= 3,
        "job": _job(found),
        "stats": _stats(run, found),
        "notes": _notes(run, found),
        "saves": [_row(save) for save in saves[:MAX_ROWS]],
        "saves_left": max(len(saves) - MAX_ROWS, 0),
        "starts": [
            f"{'from step ' + format(start.step, ',') if start.step else 'start'}"
            f" on {count(start.world_size, 'rank') if start.world_size else 'an unknown number of ranks'}"
            f"{f', ds_galore {start.version}' if start.version else ''}"
            for start in run.starts[-MAX_ROWS:]
        ],
        "config": None if config is None else json.dumps(config, indent=2, ensure_ascii=False),
    }


def _stats(run: Run, found: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """What is told of a run at the top: a label, a value, and a word on it."""
    plans = run.memory
    ours = next((sizes for name, sizes in plans.items() if name != "AdamW"), plans.get("AdamW", {}))
    adamw, total = sum(plans.get("AdamW", {}).values()), sum(ours.values())
    kinds = [f"{many} {kind}" for kind, many in found["checkpoints"].items()]
    failed = found["failed_saves"]
    saves = sum(found["checkpoints"].values())
    stalls = [save.stall for save in run.saves if save.stall is not None]
    beside = f"DeepSpeed's own: {size(found['logical_bytes'])}" if found["logical_bytes"] else ""
    change = f"{signed_percent(total / adamw - 1)} to AdamW" if adamw and total not in (0, adamw) else ""
    matrices = count(found["matrices"], "matrix", "matrices") if found["matrices"] else ""
    refreshed = f"{count(found['refreshes'], 'step')} with a refresh" if found["refreshes"] else ""
    best = found["best_validation_loss"]
    return [
        (f"last {run.unit}", number(_last(run)), count(len(found["resumes"]), "resume") if found["resumes"] else ""),
        ("training loss", *_loss(found)),
        ("validation loss", number(best, 4), "" if best is None else f"best, at {found['best_validation_step']:,}"),
        ("tokens/s", number(found["tokens_per_s"], 3), "median" if found["tokens_per_s"] else ""),
        ("model states", size(total) if total else NOTHING, change),
        ("peak memory", size(found["peak_memory_bytes"]), "in use" if found["peak_memory_bytes"] else ""),
        ("checkpoints", number(saves or None), ", ".join([*kinds, *([f"{failed} failed"] if failed else [])])),
        ("written", size(found["written_bytes"]), beside),
        ("ratio", f"{found['ratio']:.3g}\N{MULTIPLICATION SIGN}" if found["ratio"] else NOTHING, ""),
        ("stall a save", f"{sum(stalls) / len(stalls):.3g} s" if stalls else NOTHING, ""),
        ("captured energy", number(found["captured_energy"], 3), matrices),
        ("basis overlap", number(found["basis_overlap"], 3), refreshed),
    ]


def _last(run: Run) -> int | None:
    if run.unit != "step":
        return max((curve.steps[-1] for curve in run.curves.values() if len(curve)), default=None)
    return run.last_step


def _job(found: Mapping[str, Any]) -> str:
    """What ran."""
    stage = None if found["zero_stage"] is None else f"ZeRO {found['zero_stage']}"
    ranks = count(found["world_size"], "rank") if found["world_size"] else None
    version = f"ds_galore {found['version']}" if found["version"] else None
    return " · ".join(filter(None, (found["optimizer"], stage, ranks, version)))


def _loss(found: Mapping[str, Any]) -> tuple[str, str]:
    """The last training loss, and a word on it."""
    broken = found["not_finite_losses"]
    if broken and found["last_loss"] is None:
        return "not finite", f"first at {found['unit']} {found['first_not_finite_loss']:,}"
    word = "last" if found["last_loss"] is not None else ""
    return number(found["last_loss"], 4), f"last; not finite {count(broken, 'time')}" if broken else word


def _notes(run: Run, found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a user should see: how grave it is, and a line."""
    lines = []
    if found["not_finite_losses"]:
        where = steps(run.curves["loss"].broken(), run.unit)
        lines.append(("bad", f"The training loss is not finite at {where}."))
    failed: dict[str, list[int]] = {}
    for save in run.saves:
        if save.kind == "failed":
            failed.setdefault(f"A save failed: {save.message or save.tag}", []).append(save.step)
    lines += [("bad", f"{message} ({steps(where)})") for message, where in failed.items()]
    messages: dict[str, list[int]] = {}
    for note in run.notes:
        messages.setdefault(note.message, []).extend([] if note.step is None else [note.step])
    lines += [("warn", f"{text} ({steps(where)})" if where else text) for text, where in messages.items()]
    lines += [
        ("warn", f"{name}: {count(lines_of, 'damaged line')} left out.")
        for name, lines_of in found["damaged_lines"].items()
    ]
    lines += [("warn", problem) for problem in found["problems"]]
    if len(lines) > MAX_NOTES:
        lines[MAX_NOTES:] = [("warn", f"{len(lines) - MAX_NOTES} more are left out here.")]
    return lines


def _row(save: Save) -> dict[str, str]:
    """A checkpoint in the table."""
    return {
        "step": f"{save.step:,}",
        "tag": save.tag,
        "kind": save.kind,
        "written": size(save.bytes),
        "logical": size(save.logical_bytes),
        "ratio": NOTHING if save.ratio is None else f"{save.ratio:.2f}",
        "stall": NOTHING if save.stall is None else f"{save.stall:.3g} s",
        "seconds": NOTHING if save.seconds is None else f"{save.seconds:.3g} s",
        "on_disk": "yes" if save.on_disk else "no",
        "message": save.message,
    }


def _differing(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Keys of the configurations that are not the same in all runs, with each one's value."""
    known = [dict(_flat(run.config)) if run.config is not None else None for run in runs]
    if sum(each is not None for each in known) < 2:
        return []
    keys = dict.fromkeys(key for each in known if each is not None for key in each)
    rows = []
    for key in keys:
        values = [NOTHING if each is None else each.get(key, NOTHING) for each in known]
        if len({value for value, each in zip(values, known, strict=True) if each is not None}) > 1:
            rows.append((key, values))
    return rows[:MAX_KEYS]


def _flat(value: Any, prefix: str = "") -> Iterable[tuple[str, str]]:
    """Keys with dots, and values as JSON."""
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from _flat(each, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, json.dumps(value, ensure_ascii=False)
