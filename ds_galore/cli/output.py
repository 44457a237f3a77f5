"""What commands print, and the options by which they all print less or other things."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import click

__all__ = ["json_option", "progress_bar", "quiet_option", "show_table", "size_text"]

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON; sizes are in bytes.")
quiet_option = click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")


def size_text(number: float) -> str:
    """Bytes for people, in powers of 1000 as disks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.2f} TB"


def show_table(title: str, columns: list[str], rows: list[list[str]], left: int = 1) -> None:
    """Print a table whose first ``left`` columns are text and the others numbers."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    # A terminal may wrap lines; columns that are too narrow to be read help nobody.
    Console(width=max(Console().width, 110) if sys.stdout.isatty() else 140).print(table)


@contextlib.contextmanager
def progress_bar(label: str, *, shown: bool) -> Iterator[Any]:
    """A progress bar on a terminal."""
    if not shown or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
