"""The plots of docs/benchmarks.md, drawn by matplotlib where it is installed (``pip install -e '.[bench]'``)."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Bars", "Lines"]


def _axes(width: float, height: float) -> tuple[Any, Any] | None:
    try:
        import matplotlib as mpl
    except ImportError:
        print("matplotlib is not installed: no plots", file=sys.stderr)
        return None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "ds_galore", "font.size": 9})  # the same data give the same file
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    # Lines that matplotlib ends in blanks would differ from what an editor saves.
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


@dataclass(frozen=True)
class Bars:
    """Groups of horizontal bars.

    Parameters
    ----------
    titles
        Of the groups.
    heights
        By kind, the length of its bar in each group.
    label
        Of the axis.
    mark
        Where a line shows a target.
    """

    titles: Sequence[str]
    heights: Mapping[str, Sequence[float]]
    label: str
    mark: float | None = None

    def draw(self, path: Path) -> bool:
        """Write the file; whether it could be."""
        made = _axes(7, 1 + 0.22 * len(self.titles) * len(self.heights))
        if made is None:
            return False
        figure, axes = made
        width = 0.8 / len(self.heights)
        for number, (kind, values) in enumerate(self.heights.items()):
            places = [place + number * width for place in range(len(self.titles))]
            bars = axes.barh(places, values, width, label=kind)
            axes.bar_label(bars, ["" if math.isnan(value) else f"{value:.3g}" for value in values], padding=2)
        axes.set_yticks([place + 0.4 - width / 2 for place in range(len(self.titles))], self.titles)
        axes.invert_yaxis()
        axes.set_xlabel(self.label)
        axes.margins(x=0.1)
        if self.mark is not None:
            axes.axvline(self.mark, color="black", linestyle=":", linewidth=1)
        axes.legend()
        _save(figure, path)
        return True


@dataclass(frozen=True)
class Lines:
    """Lines on logarithmic axes.

    Parameters
    ----------
    lines
        By kind, its x and its y.
    x, y
        Labels of the axes.
    """

    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    x: str
    y: str

    def draw(self, path: Path) -> bool:
        """Write the file; whether it could be."""
        made = _axes(7, 4)
        if made is None:
            return False
        figure, axes = made
        for kind, (across, up) in self.lines.items():
            axes.plot(across, up, marker="o", markersize=3, label=kind)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.set_minor_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel(self.x)
        axes.set_ylabel(self.y)
        axes.legend(fontsize=7)
        _save(figure, path)
        return True
