"""Figures of all runs together: curves, and memory by kind.

A figure is in plotly's own schema, as plain dictionaries, so that making one needs no plotly. Colours are roles
(:mod:`.theme`). Texts are users' (names of runs, parameters and tags), and plotly reads markup in them: :func:`literal`
takes it out. Imports the standard library.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ds_galore.tools.report.curves import Curve, rounded
from ds_galore.tools.report.runs import KINDS_OF_MEMORY, Run
from ds_galore.tools.report.theme import RUN_COLOURS, run_colour
from ds_galore.tools.report.words import signed_percent, size, unit

__all__ = [
    "DASHES",
    "MAX_LINES",
    "NAME",
    "Figure",
    "Json",
    "literal",
    "loss_figures",
    "memory_figures",
    "speed_figures",
    "template",
    "vertical",
]

#: Vertical lines of a run in a figure.
MAX_LINES = 20
#: Characters of a run's name beside values, so that a phone has room for them.
NAME = 20
DASHES = ("solid", "dash", "dot", "dashdot")
Json = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """A figure and what stands around it.

    Parameters
    ----------
    key
        Its name on the page.
    title, about
        Above it.
    data, layout
        Plotly's.
    height
        Pixels.
    logarithmic
        Whether the y axis can be made so.
    rows
        Of a heat map: by name of a group, what makes plotly's y axis show it alone.
    thinned
        Whether something was left out.
    """

    key: str
    title: str
    about: str
    data: list[Json]
    layout: Json
    height: int = 320
    logarithmic: bool = False
    rows: dict[str, Json] = field(default_factory=dict)
    thinned: bool = False


def literal(text: str, most: int | None = None) -> str:
    """A user's text in plotly, as it is; the middle left out where it is longer than ``most`` characters."""
    if most is not None and len(text) > most:
        head = (most - 1) // 2
        text = f"{text[:head]}…{text[len(text) - (most - 1 - head) :]}"
    return html.escape(text, quote=False)


def template() -> Json:
    """What all figures have in common."""
    axis = {
        "gridcolor": "@grid",
        "linecolor": "@line",
        "zerolinecolor": "@line",
        "tickcolor": "@line",
        "tickfont": {"size": 11, "color": "@muted"},
        "title": {"font": {"size": 12, "color": "@muted"}, "standoff": 8},
        "automargin": True,
    }
    return {
        "layout": {
            "font": {"family": "system-ui, sans-serif", "size": 12, "color": "@text"},
            "paper_bgcolor": "@surface/0",
            "plot_bgcolor": "@surface/0",
            "margin": {"l": 8, "r": 12, "t": 12, "b": 8},
            "hoverlabel": {
                "bgcolor": "@surface",
                "bordercolor": "@line",
                "font": {"color": "@text", "size": 12},
                "namelength": 28,
            },
            "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 11}},
            "xaxis": {**axis, "showline": True, "nticks": 7, "hoverformat": ",d", "tickformat": "~s"},
            "yaxis": {**axis, "nticks": 7},
            "modebar": {"bgcolor": "@surface/0", "color": "@muted", "activecolor": "@text", "orientation": "h"},
        }
    }


# ---------------------------------------------------------------------- curves


def loss_figures(runs: Sequence[Run]) -> list[Figure]:
    """Training and validation loss."""
    return _present(
        _curves(runs, "loss", "Training loss", "Every step pale; means of its neighbourhood strong.", logarithmic=True),
        _curves(runs, "validation_loss", "Validation loss", "", smooth=False, logarithmic=True),
    )


def speed_figures(runs: Sequence[Run]) -> list[Figure]:
    """Throughput, learning rate, norm of the gradient, memory in use."""
    return _present(
        _curves(runs, "tokens_per_s", "Tokens per second", "Over all ranks.", from_zero=True),
        _curves(runs, "lr", "Learning rate", "", smooth=False, logarithmic=True),
        _curves(runs, "grad_norm", "Norm of the gradient", "Before clipping.", logarithmic=True),
        _curves(
            runs,
            "memory_bytes",
            "Memory in use",
            "GB at most until then, on the first rank: all of it, with activations and buffers.",
            smooth=False,
            from_zero=True,
            scale=1e-9,
        ),
    )


def _present(*figures: Figure | None) -> list[Figure]:
    return [figure for figure in figures if figure is not None]


def _curves(
    runs: Sequence[Run],
    name: str,
    title: str,
    about: str,
    *,
    smooth: bool = True,
    logarithmic: bool = False,
    from_zero: bool = False,
    scale: float = 1.0,
) -> Figure | None:
    """One curve of every run that has it."""
    data: list[Json] = []
    shapes: list[Json] = []
    thinned = False
    for index, run in enumerate(runs):
        curve = run.curves[name]
        if not len(curve.finite()):
            continue
        thinned = thinned or len(curve.thinned()) < len(curve)
        smoothed = curve.smoothed() if smooth and len(curve) > 40 else None
        if smoothed is not None:
            pale = _line(run, index, curve, scale, width=1, percent=30)
            data.append({**pale, "hoverinfo": "skip", "hovertemplate": "", "mode": "lines"})
        data.append(_line(run, index, smoothed or curve, scale))
        if run.unit == "step":
            shapes += [vertical(step, run_colour(index, 60), "dot") for step in run.resumes[-MAX_LINES:]]
        shapes += [vertical(step, "@bad", "dash") for step in curve.broken()[:MAX_LINES]]
    if not data:
        return None
    units = {run.unit for run in runs if len(run.curves[name])}
    layout = {
        "xaxis": {"title": {"text": " or ".join(sorted(units))}},
        "yaxis": {"rangemode": "tozero"} if from_zero else {},
        "hovermode": "x unified",
        "showlegend": False,
        "shapes": shapes,
    }
    return Figure(f"curve-{name}", title, about, data, layout, 290, logarithmic, thinned=thinned)


def _line(run: Run, index: int, curve: Curve, scale: float, *, width: int = 2, percent: int = 100) -> Json:
    curve = curve.thinned()
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(curve) <= 40 else "lines",
        "name": literal(run.name, NAME),
        "meta": {"run": index},
        "x": curve.steps,
        "y": [rounded(value * scale) for value in curve.values],
        "line": {"color": run_colour(index, percent), "width": width, "dash": DASHES[index // RUN_COLOURS % 4]},
        "marker": {"size": 6, "color": run_colour(index, percent)},
        "hovertemplate": "%{y:.5~g}<extra>%{fullData.name}</extra>",
    }


def vertical(step: int, colour: str, dash: str) -> Json:
    """A line at a step, from top to bottom."""
    line = {"color": colour, "width": 1, "dash": dash}
    return {"type": "line", "xref": "x", "yref": "paper", "x0": step, "x1": step, "y0": 0, "y1": 1, "line": line}


# ---------------------------------------------------------------------- memory


def memory_figures(runs: Sequence[Run]) -> list[Figure]:
    """What the model's states take on the largest rank, by kind, beside AdamW's."""
    bars = _bars(runs)
    if not bars:
        return []
    divisor, name_of_unit = unit(max(sum(sizes.values()) for _, sizes in bars))
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": kind.replace("_", " "),
            "x": [rounded(sizes.get(kind, 0) / divisor) for _, sizes in bars],
            "y": list(range(len(bars))),
            "width": 0.42,
            "marker": {"color": f"@{kind}"},
            "hovertemplate": f"{kind.replace('_', ' ')}: %{{x:.3~f}} {name_of_unit}<extra></extra>",
        }
        for kind in KINDS_OF_MEMORY
        if any(sizes.get(kind) for _, sizes in bars)
    ]
    place = {"xref": "paper", "x": 0, "xanchor": "left", "yshift": 21, "showarrow": False, "font": {"size": 12}}
    layout = {
        "barmode": "stack",
        "legend": {"traceorder": "normal"},
        "xaxis": {"title": {"text": name_of_unit}, "tickformat": "~g"},
        "yaxis": {"visible": False, "range": [len(bars) - 0.6, -0.75], "fixedrange": True},
        "annotations": [{**place, "y": number, "text": label} for number, (label, _) in enumerate(bars)],
        "showlegend": True,
    }
    about = "Model states on the largest rank, as planned from shapes: without activations and buffers."
    return [Figure("memory", "Memory by kind", about, data, layout, max(240, 110 + 62 * len(bars)))]


def _bars(runs: Sequence[Run]) -> list[tuple[str, Mapping[str, int]]]:
    """Labels and sizes: what runs use, and what AdamW would instead, once where that is the same for several."""
    bars: list[tuple[str, Mapping[str, int]]] = []
    baselines: list[tuple[Run, Mapping[str, int]]] = []
    for run in runs:
        adamw = run.memory.get("AdamW", {})
        own = {name: sizes for name, sizes in run.memory.items() if name != "AdamW"} or run.memory
        for name, sizes in own.items():
            text = f"{literal(name, 24)} <b>{size(sum(sizes.values()))}</b>"
            if name != "AdamW" and adamw:
                text += f" ({signed_percent(sum(sizes.values()) / sum(adamw.values()) - 1)})"
            bars.append((text if len(runs) == 1 else f"{literal(run.name, 16)} · {text}", sizes))
        if "AdamW" not in own and adamw and all(adamw != each for _, each in baselines):
            baselines.append((run, adamw))
    for run, sizes in baselines:
        where = "" if len(baselines) == 1 else f" instead in {literal(run.name, 16)}"
        bars.append((f"AdamW{where} <b>{size(sum(sizes.values()))}</b>", sizes))
    return bars
