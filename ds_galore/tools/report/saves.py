"""The figure of a run's checkpoints: how large, how much smaller than DeepSpeed's own, for how long nothing trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ds_galore.tools.report.curves import rounded
from ds_galore.tools.report.figures import MAX_LINES, Figure, Json, literal, vertical
from ds_galore.tools.report.runs import Run, Save
from ds_galore.tools.report.theme import run_colour
from ds_galore.tools.report.words import size, unit

__all__ = ["saves_figure"]

#: Saves of a run on the page.
MAX_SAVES = 600
#: Saves whose marks are large.
FEW = 120


def saves_figure(index: int, run: Run) -> Figure | None:
    """Size, ratio and stall of checkpoints over steps."""
    saves = _fewer(run.saves)
    if not saves:
        return None
    divisor, name_of_unit = unit(max(max(save.bytes or 0, save.logical_bytes or 0) for save in saves))
    panels: list[tuple[str, Callable[[Save], float | None]]] = [
        (f"written, {name_of_unit}", lambda save: None if save.bytes is None else save.bytes / divisor),
        ("DeepSpeed's own size / written", lambda save: save.ratio),
        ("training stood still, s", lambda save: save.stall),
    ]
    panels = [(title, value) for title, value in panels if any(value(save) is not None for save in saves)]
    if not panels:  # failures alone
        panels = [("failed", lambda save: None)]
    data: list[Json] = []
    layout: Json = {"showlegend": True, "hovermode": "closest", "annotations": [], "shapes": []}
    for number, (title, value) in enumerate(panels):
        data += _panel(saves, value, number, divisor if number == 0 else None)
        layout[_axis("yaxis", number)] = _panel_axis(number, len(panels))
        layout["annotations"].append(_panel_title(title, number, len(panels)))
    layout["xaxis"] = {"title": {"text": "step"}, "anchor": f"y{len(panels) if len(panels) > 1 else ''}"}
    layout["shapes"] = [vertical(step, run_colour(index, 60), "dot") for step in run.resumes[-MAX_LINES:]]
    about = "Each mark is a checkpoint; a cross is a save that failed."
    height = 90 + (170 if len(panels) == 1 else 125 * len(panels))
    return Figure(
        f"saves-{index}",
        "Size, ratio and stall of each",
        about,
        data,
        layout,
        height,
        thinned=len(saves) < len(run.saves),
    )


SYMBOLS = {"full": "square", "differential": "circle", "incremental": "diamond", "failed": "x"}


def _panel(
    saves: Sequence[Save], value: Callable[[Save], float | None], number: int, divisor: float | None
) -> list[Json]:
    """Stems, DeepSpeed's size beside ours, and a mark for each kind."""
    axis = "y" if number == 0 else f"y{number + 1}"
    common = {"type": "scatter", "yaxis": axis, "xaxis": "x"}
    stems: tuple[list[int | None], list[float | None]] = ([], [])
    for save in saves:
        height = value(save)
        if height is not None:
            stems[0].extend((save.step, save.step, None))
            stems[1].extend((0, rounded(height), None))
    data: list[Json] = [
        {
            **common,
            "mode": "lines",
            "x": stems[0],
            "y": stems[1],
            "line": {"color": "@muted/35", "width": 1},
            "hoverinfo": "skip",
            "showlegend": False,
        }
    ]
    beside = [save for save in saves if divisor is not None and save.logical_bytes is not None]
    if beside and divisor is not None:
        data.append(
            {
                **common,
                "mode": "markers",
                "name": "DeepSpeed's own",
                "x": [save.step for save in beside],
                "y": [rounded((save.logical_bytes or 0) / divisor) for save in beside],
                "marker": {"symbol": "line-ew-open", "size": 9, "color": "@muted", "line": {"width": 1.5}},
                "hoverinfo": "skip",
            }
        )
    for kind in dict.fromkeys(save.kind for save in saves):
        points = [save for save in saves if save.kind == kind and (value(save) is not None or kind == "failed")]
        if kind == "failed" and number > 0:
            continue
        data.append(
            {
                **common,
                "mode": "markers",
                "name": kind,
                "legendgroup": kind,
                "showlegend": number == 0,
                "x": [save.step for save in points],
                "y": [rounded(value(save) or 0) for save in points],
                "text": [_told(save) for save in points],
                "hovertemplate": "%{text}<extra></extra>",
                "marker": {
                    "symbol": SYMBOLS.get(kind, "circle"),
                    "size": 8 if len(saves) <= FEW else 5,
                    "color": _colour_of(kind),
                },
                "cliponaxis": False,
            }
        )
    return [each for each in data if each["x"]]


def _colour_of(kind: str) -> str:
    return {"failed": "@bad", "universal": "@native"}.get(kind, f"@{kind}")


def _told(save: Save) -> str:
    """All about a save, for the pointer."""
    lines = [f"<b>{literal(save.tag, 40)}</b>, step {save.step:,}, {save.kind}"]
    if save.message:
        lines.append(literal(save.message, 90))
    if save.bytes is not None:
        beside = "" if save.logical_bytes is None else f"; DeepSpeed's own would be {size(save.logical_bytes)}"
        lines.append(f"{size(save.bytes)} written{beside}")
    if save.stall is not None:
        after = "" if save.seconds is None else f", durable after {save.seconds:.3g} s"
        lines.append(f"training stood still {save.stall:.3g} s{after}")
    return "<br>".join(lines)


def _axis(name: str, number: int) -> str:
    return name if number == 0 else f"{name}{number + 1}"


def _domain(number: int, panels: int) -> list[float]:
    share = 1 / panels
    return [1 - share * (number + 1) + (0.0 if number == panels - 1 else 0.02), 1 - share * number - 0.09]


def _panel_axis(number: int, panels: int) -> Json:
    return {"domain": _domain(number, panels), "rangemode": "tozero", "nticks": 4, "fixedrange": True}


def _panel_title(text: str, number: int, panels: int) -> Json:
    place = {"xref": "paper", "yref": "paper", "x": 0, "xanchor": "left", "yanchor": "bottom"}
    font = {"size": 11, "color": "@muted"}
    return {**place, "y": _domain(number, panels)[1], "text": text, "showarrow": False, "font": font}


def _fewer(saves: Sequence[Save]) -> list[Save]:
    """All full and failed ones, and of the others as many as fit, evenly."""
    if len(saves) <= MAX_SAVES:
        return list(saves)
    rest = [save for save in saves if save.kind not in ("full", "failed")]
    every = math.ceil(len(rest) / MAX_SAVES) if rest else 1
    kept = {id(save) for save in rest[::every]} | {id(save) for save in saves if save.kind in ("full", "failed")}
    chosen = [save for save in saves if id(save) in kept]
    return chosen if len(chosen) <= 2 * MAX_SAVES else chosen[:: math.ceil(len(chosen) / MAX_SAVES)]
