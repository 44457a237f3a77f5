"""Colours of the page and of what is drawn on it, for light and dark. Imports the standard library.

A figure names a colour as ``@role`` or ``@role/percent`` (of opacity); the page puts in what suits the scheme in use.
"""

from __future__ import annotations

__all__ = ["RUN_COLOURS", "THEMES", "run_colour"]

_LIGHT_RUNS = ("#2563d9", "#d95f02", "#0f8a6d", "#b3308f", "#7652e0", "#9a7400", "#0b82a8", "#c5304a")
_DARK_RUNS = ("#6ea8ff", "#ff9f52", "#3fd0ae", "#f284da", "#ad98ff", "#e3bb45", "#52c7ec", "#ff8296")
RUN_COLOURS = len(_LIGHT_RUNS)

THEMES: dict[str, dict[str, str]] = {
    "light": {
        "page": "#f5f6f9",
        "surface": "#ffffff",
        "text": "#1b2230",
        "muted": "#5d6778",
        "line": "#dfe3ea",
        "grid": "#e8ebf0",
        "bad": "#c3273f",
        "warn": "#8f5b00",
        "weights": "#9cc0f5",
        "master_weights": "#4c86e0",
        "gradients": "#a3adbb",
        "moments": "#e07b1a",
        "projectors": "#0f8a6d",
        "full": "#2563d9",
        "differential": "#0f8a6d",
        "incremental": "#7652e0",
        "native": "#5d6778",
        **{f"run{number}": colour for number, colour in enumerate(_LIGHT_RUNS)},
    },
    "dark": {
        "page": "#0f131a",
        "surface": "#181d27",
        "text": "#e6eaf1",
        "muted": "#9aa5b6",
        "line": "#2b3240",
        "grid": "#272e3b",
        "bad": "#ff7a8c",
        "warn": "#f0b54a",
        "weights": "#35598f",
        "master_weights": "#6ea8ff",
        "gradients": "#6d788a",
        "moments": "#ff9f52",
        "projectors": "#3fd0ae",
        "full": "#6ea8ff",
        "differential": "#3fd0ae",
        "incremental": "#ad98ff",
        "native": "#9aa5b6",
        **{f"run{number}": colour for number, colour in enumerate(_DARK_RUNS)},
    },
}


def run_colour(index: int, percent: int = 100) -> str:
    """The role of the ``index``-th run's colour."""
    role = f"@run{index % RUN_COLOURS}"
    return role if percent == 100 else f"{role}/{percent}"
