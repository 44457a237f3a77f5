"""The command that shows how runs went."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ds_galore.cli.output import json_option, quiet_option

__all__ = ["report"]


@click.command()
@click.argument(
    "directories", metavar="RUN_DIR...", nargs=-1, required=True, type=click.Path(path_type=Path, file_okay=True)
)
@click.option(
    "--output", type=click.Path(path_type=Path), default="report.html", show_default=True, help="File to write."
)
@json_option
@quiet_option
def report(directories: tuple[Path, ...], output: Path, as_json: bool, quiet: bool) -> None:
    """Write one HTML file about the runs in RUN_DIRs: losses, speed, memory, checkpoints, subspaces, configuration.

    RUN_DIR is what launch/train.py has as --output, the Trainer's output_dir, accelerate's project directory, or a
    directory of DeepSpeed's CSV monitor. The file opens without a network.
    """
    from ds_galore.tools.report.page import require_libraries, write_page
    from ds_galore.tools.report.reading import read_runs
    from ds_galore.tools.report.runs import summary

    require_libraries()  # before what may take long
    runs = read_runs(list(directories))
    size = write_page(runs, output)
    found = [summary(run) for run in runs]
    if as_json:
        click.echo(json.dumps({"output": str(output), "bytes": size, "runs": found}, indent=2, allow_nan=False))
    elif not quiet:
        for each in found:
            click.echo(_line(each))
        click.echo(f"{output}: written, {size / 1e6:.1f} MB")


def _line(found: dict[str, Any]) -> str:
    """A run in a line."""
    from ds_galore.tools.report.words import count

    parts = [f"{found['unit']} {found['step']:,}" if found["step"] is not None else None]
    for key, word in (("last_loss", "loss"), ("best_validation_loss", "best validation loss")):
        parts.append(None if found[key] is None else f"{word} {found[key]:.4f}")
    several = [
        (found["refreshes"], "step with refreshes", "steps with refreshes"),
        (sum(found["checkpoints"].values()), "checkpoint", "checkpoints"),
        (found["failed_saves"], "failed save", "failed saves"),
        (found["warnings"], "warning", "warnings"),
        (sum(found["damaged_lines"].values()), "damaged line left out", "damaged lines left out"),
    ]
    parts += [count(number, one, many) for number, one, many in several if number]
    return f"{found['directory']}: {', '.join(part for part in parts if part)}"
