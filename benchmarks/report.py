"""docs/benchmarks.md from what the benchmarks left in runs/bench: tables, targets, and how to repeat each.

    .venv/bin/python benchmarks/report.py

A target that is missed is told with its figure. What has not been measured is left out, and said so.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from common import RESULTS, ROOT

PAGE = ROOT / "docs" / "benchmarks.md"


def main() -> int:
    """Write the page."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    if not found:
        print(f"nothing in {RESULTS}: run a benchmark first", file=sys.stderr)
        return 1
    PAGE.write_text("\n".join(_page(found)) + "\n")
    print(f"{PAGE}: of {', '.join(found)}")
    return 0


def _page(found: dict[str, Any]) -> Iterator[str]:
    yield from ("---", "orphan: true", "---", "")  # until the page is published with the others
    yield "# Benchmarks beside others"
    yield ""
    yield "Made by `make bench` (`benchmarks/report.py`) out of what the benchmarks measured; ratios are medians of the"
    yield "ratios within a round, in which all take turns on the same work. Of a missed target the figure is told."
    yield "[performance.md](performance.md) has more about each, and what was changed for it."
    yield ""
    sections: list[tuple[str, Callable[[Any], Iterator[str]]]] = [
        ("step", _step),
        ("refresh", _refresh),
        ("zero-60m-", _zero),
        ("zero-1b-", _zero),
    ]
    for prefix, section in sections:
        chosen = {name: each for name, each in found.items() if name.startswith(prefix)}
        if chosen:
            yield from section(chosen)
    yield "## On what"
    yield ""
    rows = []
    for name, each in found.items():
        versions = ", ".join(f"{package} {version}" for package, version in each["versions"].items())
        rows.append([name, f"`{each['command']}`", each["day"], f"{each['cores']} cores, {each['cpu']}; {versions}"])
    yield from _table(["results", "command", "day", "machine and versions"], rows)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(titles)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def _milliseconds(row: dict[str, float]) -> str:
    return f"{1e3 * row['seconds']:.1f} ({1e3 * row['least']:.1f}, {1e3 * row['greatest']:.1f})"


def _judged(value: float, limit: float, *, least: bool = False) -> str:
    met = value >= limit if least else value <= limit
    return f"{value:.3g}, {'met' if met else f'**missed** ({limit:g})'}"


def _step(found: dict[str, Any]) -> Iterator[str]:
    yield "## An optimizer's step in one process"
    yield ""
    yield "fp32; milliseconds, medians with the least and the greatest. The floor is the bare arithmetic of a step of"
    yield "GaLore in plain torch."
    yield ""
    shapes = found["step"]["found"]["shapes"]
    for name, each in shapes.items():
        yield f"Shapes of {name}:"
        yield ""
        rows = [
            [kind, _milliseconds(row), f"{row['of_floor']:.2f}", f"{row['of_peer']:.2f}"]
            for kind, row in each["steps"].items()
        ]
        yield from _table(["", "ms between refreshes", "of the floor", "of galore-torch"], rows)
        ours, refresh = each["steps"]["GaLoreAdamW"], each["refresh"]
        amortised = ours["of_floor"] * (1 + refresh["refresh_share"])
        yield (
            f"With its refreshes, spread over the gap, GaLoreAdamW takes {_judged(amortised, 1.3)} of the floor, and"
            f" {_judged(ours['of_peer'], 1.0)} of galore-torch's step without its SVDs, which add"
            f" {100 * refresh['peer_refresh_share']:.0f}% to that (ours {100 * refresh['refresh_share']:.1f}%)."
        )
        shares = "; ".join(
            f"{samples} x 256 tokens: {100 * share['GaLoreAdamW']:.1f}% (AdamW's {100 * share['torch AdamW']:.1f}%)"
            for samples, share in each["share"].items()
        )
        yield f"Share of a training step: {shares}."
        yield ""


def _refresh(found: dict[str, Any]) -> Iterator[str]:
    each = found["refresh"]["found"]
    rows, columns = each["gradient"]
    yield "## A basis refresh"
    yield ""
    yield f"Of a gradient of {rows} x {columns}, rank {each['rank']}; energy is that of the SVD's."
    yield ""
    table = [
        [
            kind,
            f"{row['seconds']:.2f} ({row['least']:.2f}, {row['greatest']:.2f})",
            f"{row['speedup']:.1f}x",
            f"{row['of_svd']:.4f}",
        ]
        for kind, row in each["rows"].items()
    ]
    yield from _table(["", "seconds", "over `torch.linalg.svd`", "energy"], table)
    ours = [row for kind, row in each["rows"].items() if kind.startswith("ours")]
    slowest, worst = min(row["speedup"] for row in ours), min(row["of_svd"] for row in ours)
    yield (
        f"At least 10x at 0.98 of the energy: {_judged(slowest, 10, least=True)}; {_judged(worst, 0.98, least=True)}."
        f" The basis in use has {each['old_basis']:.4f} of the SVD's energy before it is refreshed. First bases of"
        f" 'tiny' at rank 64: {each['tiny']['least']:.4f} at least, {each['tiny']['mean']:.4f} in the mean."
    )
    yield ""


def _zero(found: dict[str, Any]) -> Iterator[str]:
    runs = sorted((each["found"] for each in found.values()), key=lambda each: each["world_size"])
    first = runs[0]
    kinds = list(first["seconds"])
    yield f"## Under ZeRO-3: {first['layers']} layers of {first['shape']}, rank {first['rank']}"
    yield ""
    yield '`engine.step()` in milliseconds; "amortised" has the refreshes of a gap of 200 steps in it.'
    yield ""
    rows = [
        [kind, *(f"{_milliseconds(run['seconds'][kind])}, {run['seconds'][kind]['of_adamw']:.2f}x" for run in runs)]
        for kind in kinds
    ]
    yield from _table(["", *(f"{run['world_size']} ranks, of AdamW's" for run in runs)], rows)
    yield "Bytes that a rank sends in a step beyond AdamW's on the same job, as a share of what ZeRO-3 itself sends (a"
    yield "reduce-scatter and two gathers). The all-gather GaLore is a model: whole gradients of projected matrices"
    yield "gathered, updates scattered."
    yield ""
    table = []
    for kind in first["bytes"]:
        if kind != "AdamW":
            shares = [(run["bytes"][kind]["total"] - run["bytes"]["AdamW"]["total"]) / _own(run) for run in runs]
            table.append([kind, *(f"{100 * share:.3g}%" for share in shares)])
    table.append(["an all-gather GaLore", *(f"{100 * run['all_gather_galore'] / _own(run):.3g}%" for run in runs)])
    yield from _table(["", *(f"{run['world_size']} ranks" for run in runs)], table)
    replicated, sharded = (
        max((run["bytes"][kind]["total"] - run["bytes"]["AdamW"]["total"]) / _own(run) for run in runs)
        for kind in ("GaLoreAdamW, replicated", "GaLoreAdamW, sharded")
    )
    yield (
        f"At most 0.1% with replicated projectors: {_judged(100 * replicated, 0.1)}; at most 10% with sharded ones:"
        f" {_judged(100 * sharded, 10)}."
    )
    yield ""
    yield "Bytes of the optimizer's state on a rank:"
    yield ""
    memory = [[kind, *(f"{run['state_bytes'][kind]:,}" for run in runs)] for kind in first["state_bytes"]]
    yield from _table(["", *(f"{run['world_size']} ranks" for run in runs)], memory)


def _own(run: dict[str, Any]) -> float:
    """Bytes that ZeRO-3 sends of a rank in fp32."""
    world = int(run["world_size"])
    return 3 * 4 * int(run["parameters"]) * (world - 1) / world


if __name__ == "__main__":
    sys.exit(main())
