"""The ``ds-galore`` command: what can be asked and done without starting a job.

Starts without torch; a command imports what it needs. Exit status: 0 fine, 1 damage or a difference found, 2 a user's
mistake, 130 an interruption. Messages about what went wrong are one line.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

import click

from ds_galore import __version__
from ds_galore.cli.checkpoints import COMMANDS as CHECKPOINTS
from ds_galore.cli.planning import estimate
from ds_galore.cli.reporting import report
from ds_galore.cli.starting import COMMANDS as STARTING
from ds_galore.errors import DsGaloreError

__all__ = ["main"]


class _Group(click.Group):
    """Turns a mistake or damage into one line and its exit status; ``--debug``, anywhere, shows where it arose."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        debug = "--debug" in given
        given = [each for each in given if each != "--debug"]
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # for names that the terminal's encoding does not have
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _interrupt)
        try:
            status = super().main(given, *rest, **{"prog_name": "ds-galore", **extra, "standalone_mode": False})
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            status = 2
        except (DsGaloreError, OSError, click.ClickException, click.Abort, KeyboardInterrupt) as error:
            if debug:
                raise
            message, status = _told(error)
            click.echo(f"ds-galore: {message}", err=True)
        sys.exit(status if isinstance(status, int) else 0)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise _InterruptedError from None
        except BrokenPipeError:  # whoever reads has had enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141


class _InterruptedError(DsGaloreError):
    """The user, or the system, wants the program to end."""


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _told(error: BaseException) -> tuple[str, int]:
    """One line about what went wrong, and the exit status."""
    if isinstance(error, _InterruptedError):
        return "interrupted; nothing was left half done", 130
    if isinstance(error, DsGaloreError):
        status = _status(error)
        return f"error: {error}{_DAMAGED if status == 1 else ''}", status
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"error: {where}{error.strerror or error}{_advice(error)}", 2
    if isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx is not None else "ds-galore"
        return f"error: {_line(error.format_message()).rstrip('.')}; see '{command} --help'", 2
    if isinstance(error, click.ClickException):
        return f"error: {_line(error.format_message())}", 2
    return "interrupted; nothing was left half done", 130


_DAMAGED = "; 'ds-galore list --verify' on the save directory tells which checkpoints are intact"


def _line(text: str) -> str:
    return " ".join(text.split())


def _status(error: DsGaloreError) -> int:
    """1 for what is wrong with a checkpoint, 2 for what a user can do otherwise."""
    from ds_galore.checkpoint.codecs.base import CodecError
    from ds_galore.checkpoint.errors import DamageError, FormatError, NotCommittedError

    return 1 if isinstance(error, DamageError | FormatError | NotCommittedError | CodecError) else 2


def _advice(error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return "; nothing was left behind: make room, or write to another file system"
    return ""


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ds-galore")
@click.option("--debug", is_flag=True, help="Show tracebacks; may stand anywhere.")
def main(debug: bool) -> None:
    """GaLore's low-rank optimizer states under DeepSpeed's ZeRO.

    Exit status: 0 fine, 1 damage or a difference found, 2 a mistake, 130 an interruption.
    """


for _command in (*STARTING, estimate, report, *CHECKPOINTS):
    main.add_command(_command)

if __name__ == "__main__":
    main()
