"""Figures of subspaces: what they capture and how they turn, over all matrices and one by one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ds_galore.tools.report.curves import rounded
from ds_galore.tools.report.figures import DASHES, NAME, Figure, Json, literal
from ds_galore.tools.report.grids import Grid, make_grid
from ds_galore.tools.report.runs import Run
from ds_galore.tools.report.theme import RUN_COLOURS, run_colour

__all__ = ["heat_figures", "mean_figures"]

#: Rows of a heat map that are all named.
NAMED_ROWS = 36
#: Runs up to which bands around means can be told apart.
MAX_BANDS = 3
KEYS = (
    ("energy", "Captured energy", "Share of the gradient's squared norm that lies in the basis."),
    ("overlap", "Basis overlap", "How much of the old basis lies in the new one: 1 is no change."),
)


def mean_figures(runs: Sequence[Run]) -> list[Figure]:
    """Means over all matrices, of every run."""
    found = [_means(runs, key, f"{title}, all matrices") for key, title, _ in KEYS]
    return [figure for figure in found if figure is not None]


def heat_figures(index: int, run: Run) -> list[Figure]:
    """Every matrix of a run."""
    grids = [(key, title, about, make_grid(run.refreshes, key, run.last_step)) for key, title, about in KEYS]
    return [_heat(f"{key}-{index}", title, about, grid) for key, title, about, grid in grids if grid is not None]


def _means(runs: Sequence[Run], key: str, title: str) -> Figure | None:
    data: list[Json] = []
    for index, run in enumerate(runs):
        grid = make_grid(run.refreshes, key, run.last_step)
        if grid is None:
            continue
        columns = [(step, values) for step, values in grid.columns() if values]
        steps = [step for step, _ in columns]
        common = {"type": "scatter", "x": steps, "meta": {"run": index}, "name": literal(run.name, NAME)}
        if len(runs) <= MAX_BANDS:
            edge = {
                **common,
                "mode": "lines",
                "line": {"width": 0, "color": run_colour(index, 20)},
                "hoverinfo": "skip",
            }
            data.append({**edge, "y": [rounded(min(values), 4) for _, values in columns]})
            fill = {"fill": "tonexty", "fillcolor": run_colour(index, 14)}
            data.append({**edge, **fill, "y": [rounded(max(values), 4) for _, values in columns]})
        data.append(
            {
                **common,
                "mode": "lines+markers" if len(steps) <= 40 else "lines",
                "line": {"color": run_colour(index), "width": 2, "dash": DASHES[index // RUN_COLOURS % 4]},
                "marker": {"size": 6, "color": run_colour(index)},
                "y": [rounded(sum(values) / len(values), 4) for _, values in columns],
                "hovertemplate": "%{y:.3f}<extra>%{fullData.name}</extra>",
            }
        )
    if not data:
        return None
    layout = {
        "xaxis": {"title": {"text": "step"}},
        "hovermode": "x unified",
        "showlegend": False,
    }
    band = "; the band is from the lowest matrix to the highest." if len(runs) <= MAX_BANDS else "."
    return Figure(f"mean-{key}", title, f"The mean of the bases in use{band}", data, layout, 260)


def _heat(key: str, title: str, about: str, grid: Grid) -> Figure:
    """A heat map: a row a matrix, a column a stretch of steps."""
    low, high = (math.floor(grid.bounds[0] * 20) / 20, math.ceil(grid.bounds[1] * 20) / 20)
    names = [literal(row.name) for row in grid.rows]
    data = [
        {
            "type": "heatmap",
            "x": grid.edges,
            "y": names,
            "z": [[rounded(value, 3) for value in row] for row in grid.cells],
            "zmin": low,
            "zmax": high if high > low else low + 0.05,
            "colorscale": "Viridis",
            "hoverongaps": False,
            "hovertemplate": "%{y}<br>about step %{x}: <b>%{z}</b><extra></extra>",
            "colorbar": {
                "orientation": "h",
                "x": 0,
                "xanchor": "left",
                "y": 1,
                "yanchor": "bottom",
                "xpad": 0,
                "ypad": 8,
                "len": 0.6,
                "thickness": 8,
                "outlinewidth": 0,
                "nticks": 6,
                "tickfont": {"size": 10, "color": "@muted"},
            },
        }
    ]
    count = len(grid.rows)
    every = _all_rows(grid, names)
    rows = {f"all {count} matrices": every}
    if len(grid.groups) > 1:
        rows |= {
            group.label: _some_rows(
                [(names[at], grid.rows[at].layer) for at in range(group.begin, group.end)], group.begin
            )
            for group in grid.groups
            if group.end - group.begin > 1
        }
    bounds = [group.begin - 0.5 for group in grid.groups[1:]]
    lines = {"color": "@surface", "width": 1.5}
    layout = {
        "xaxis": {"title": {"text": "step"}, "showgrid": False},
        "yaxis": {"type": "category", "showgrid": False, **every, "tickfont": {"size": 10, "color": "@muted"}},
        "shapes": [
            {"type": "line", "xref": "paper", "yref": "y", "x0": 0, "x1": 1, "y0": at, "y1": at, "line": lines}
            for at in bounds
            if count > NAMED_ROWS
        ],
    }
    if count > NAMED_ROWS:
        about += " Of each kind, the first layer is at the top."
    height = 110 + max(60, min(640, 17 * count))
    return Figure(key, title, about, data, layout, height, rows=rows if len(rows) > 2 else {}, thinned=grid.merged)


def _all_rows(grid: Grid, names: Sequence[str]) -> Json:
    """Ticks of every row, or of the middle of every group where rows are many."""
    if len(names) <= NAMED_ROWS:
        return _some_rows([(name, row.label) for name, row in zip(names, grid.rows, strict=True)], 0)
    middles = ((grid.groups[at].begin + grid.groups[at].end) // 2 for at in range(len(grid.groups)))
    ticks = list(zip(middles, (group.label for group in grid.groups), strict=True))
    return {**_ticks(_every([(names[at], label) for at, label in ticks])), "range": [len(names) - 0.5, -0.5]}


def _some_rows(rows: Sequence[tuple[str, str]], begin: int) -> Json:
    return {**_ticks(_every(rows)), "range": [begin + len(rows) - 0.5, begin - 0.5]}


def _every(rows: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
    """As many as can be read."""
    return rows[:: math.ceil(len(rows) / NAMED_ROWS)]


def _ticks(rows: Iterable[tuple[str, str]]) -> Json:
    pairs = list(rows)
    return {"tickvals": [name for name, _ in pairs], "ticktext": [literal(label, 18) for _, label in pairs]}
