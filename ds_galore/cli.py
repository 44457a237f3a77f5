"""The ``ds-galore`` command: what can be asked and done without starting a job.

Starts without torch; a command imports what it needs. Exit status: 0 fine, 1 damage or a difference found, 2 a user's
mistake or an interruption.
"""

from __future__ import annotations

import contextlib
import errno
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from ds_galore import __version__
from ds_galore.errors import DataError, DsGaloreError

__all__ = ["main"]


class _Group(click.Group):
    """Turns a mistake or damage into one line and its exit status; ``--debug`` shows where it arose."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except DsGaloreError as error:
            if "--debug" in sys.argv:
                raise
            click.echo(f"ds-galore: error: {error}", err=True)
            sys.exit(_status(error))
        except OSError as error:
            if "--debug" in sys.argv:
                raise
            where = f"{error.filename}: " if error.filename else ""
            click.echo(f"ds-galore: error: {where}{error.strerror or error}{_advice(error)}", err=True)
            sys.exit(2)


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
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def main(debug: bool) -> None:
    """GaLore's low-rank optimizer states under DeepSpeed's ZeRO."""


@main.group()
def config() -> None:
    """Look at configurations."""


@config.command("check")
@click.argument("path", type=click.Path(path_type=Path))
def check(path: Path) -> None:
    """Refuse the configuration at PATH if ds_galore would, and say why (exit status 2)."""
    from ds_galore.config import DEEPSPEED_OPTIMIZERS, check_config, load_config

    check_config(load_config(path), DEEPSPEED_OPTIMIZERS)
    click.echo(f"{path}: fine")


@main.command()
@click.option("--config", "path", type=click.Path(path_type=Path), required=True, help="DeepSpeed configuration.")
@click.option(
    "--model-config",
    type=click.Path(path_type=Path),
    required=True,
    help="Hugging Face config.json, or a directory with one.",
)
@click.option("--world-size", type=click.IntRange(min=1), default=1, show_default=True, help="Number of ranks.")
@click.option("--precision", type=click.Choice(["fp32", "bf16"]), default="bf16", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; sizes are in bytes.")
def estimate(path: Path, model_config: Path, world_size: int, precision: str, as_json: bool) -> None:
    """Estimate a rank's memory for model states, beside plain AdamW."""
    from ds_galore.config import check_config, load_config

    settings = load_config(path)
    check_config(settings)
    plans = _plans(settings, model_config, world_size, precision)
    if as_json:
        click.echo(json.dumps(plans, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    kinds = list(next(iter(plans.values())))
    table = Table(title=f"bytes of model states on the fullest of {world_size} rank(s), {precision}")
    for column in ("", *kinds):
        table.add_column(column.replace("_", " "), justify="right" if column else "left")
    for label, sizes in plans.items():
        table.add_row(label, *(f"{sizes[kind]:,}" for kind in kinds))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


# ---------------------------------------------------------------------- checkpoints


def _source_options(command: Any) -> Any:
    """PATH and --tag, of every command that reads one checkpoint."""
    command = click.option("--tag", help="Which checkpoint of a save directory; the latest by default.")(command)
    return click.argument("path", type=click.Path(path_type=Path))(command)


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON; sizes are in bytes.")
quiet_option = click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")


def parse_size(value: str) -> int:
    """The number of bytes in a text such as 5GB or 512MiB.

    Raises
    ------
    ValueError
        If it is no such text, or not positive.
    """
    units = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
    units |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
    found = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", value)
    try:
        if found is None:
            raise ValueError
        size = int(float(found[1]) * units[found[2].lower()])
    except (KeyError, ValueError):
        raise ValueError(f"{value!r} is no size such as 5GB or 512MiB") from None
    if size < 1:
        raise ValueError(f"{value!r} is not a positive size")
    return size


def _bytes(context: Any, parameter: Any, value: str) -> int:
    try:
        return parse_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _size(number: float) -> str:
    """Bytes for people, in powers of 1000 as disks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.2f} TB"


def _table(title: str, columns: list[str], rows: list[list[str]], left: int = 1) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


@main.command()
@_source_options
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), default="fp32", show_default=True)
@click.option("--max-shard-size", callback=_bytes, default="5GB", show_default=True, help="Of a file of weights.")
@click.option(
    "--model-config", type=click.Path(path_type=Path), help="Directory whose config.json and tokenizer files go along."
)
@click.option("--exclude-frozen", is_flag=True, help="Leave out frozen parameters.")
@click.option("--optimizer", is_flag=True, help="Write moments and projectors too, to optimizer.safetensors.")
@click.option("--format", "form", type=click.Choice(["safetensors", "torch"]), default="safetensors", show_default=True)
@click.option("--prune", type=float, default=0.0, metavar="FRACTION", help="LOSSY: zero the smallest of each matrix.")
@click.option("--quantize", type=click.Choice(["int8"]), help="LOSSY: matrices as int8 with a scale a row.")
@click.option("--workers", type=click.IntRange(min=1), default=2, show_default=True, help="Threads.")
@click.option("--overwrite", is_flag=True, help="Replace OUT if it is not empty.")
@json_option
@quiet_option
def merge(path: Path, out: Path, tag: str | None, form: str, as_json: bool, quiet: bool, **options: Any) -> None:
    """Merge the checkpoint at PATH into a Hugging Face directory OUT.

    PATH is a checkpoint's directory, or a save directory with a file 'latest'; ours or DeepSpeed's own (ZeRO 1, 2, 3).
    """
    from dataclasses import asdict

    from ds_galore.tools.merge import merge_checkpoint

    with _progress("merging", shown=not (quiet or as_json)) as progress:
        report = merge_checkpoint(path, out, tag=tag, format=form, progress=progress, **options)
    if as_json:
        click.echo(json.dumps(asdict(report)))
    elif not quiet:
        step = "" if report.step is None else f" (step {report.step})"
        click.echo(
            f"{report.source}{step}: {report.tensors} tensors, {report.parameters:,} elements, {_size(report.bytes)}"
            f" written to {report.out}"
        )
        if report.pruned:
            click.echo(f"LOSSY: {sum(report.pruned.values()):,} elements of {len(report.pruned)} matrices set to zero")
        if options["quantize"]:
            click.echo("LOSSY: matrices quantised to int8; ds_galore.tools.merge.dequantize gives them back")


@main.command()
@_source_options
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--world-size", type=click.IntRange(min=1), required=True, help="Number of data-parallel ranks.")
@click.option("--format", "form", type=click.Choice(["ds_galore", "deepspeed"]), default="ds_galore", show_default=True)
@click.option(
    "--sub-group-size",
    type=click.IntRange(min=1),
    help="zero_optimization.sub_group_size of who will load it (ZeRO 3).",
)
@click.option("--workers", type=click.IntRange(min=1), default=2, show_default=True, help="Threads.")
@click.option("--overwrite", is_flag=True, help="Replace OUT if it is not empty.")
@json_option
@quiet_option
def reshard(path: Path, out: Path, tag: str | None, form: str, as_json: bool, quiet: bool, **options: Any) -> None:
    """Write the checkpoint at PATH into a save directory OUT as another number of ranks would have saved it.

    With --format deepspeed, DeepSpeed loads it without this package. PATH as for merge.
    """
    from dataclasses import asdict

    from ds_galore.tools.reshard import reshard_checkpoint

    with _progress("resharding", shown=not (quiet or as_json)) as progress:
        report = reshard_checkpoint(path, out, tag=tag, format=form, progress=progress, **options)
    if as_json:
        click.echo(json.dumps(asdict(report)))
    elif not quiet:
        step = "" if report.step is None else f" (step {report.step})"
        click.echo(
            f"{report.source}{step}: the state of {report.from_world_size} ranks for {report.world_size},"
            f" {_size(report.bytes)} written to {report.out}/{report.tag}"
        )


@contextlib.contextmanager
def _progress(label: str, *, shown: bool) -> Iterator[Any]:
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


def _sample(context: Any, parameter: Any, value: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", value)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise click.BadParameter(f"{value!r} is no sample such as 1/10")
    return int(found[1]), int(found[2])


@main.command()
@_source_options
@click.option("--quick", is_flag=True, help="Check structure and sizes only.")
@click.option("--sample", callback=_sample, default="1/1", metavar="N/T", help="Check the N-th of T parts of the data.")
@json_option
@quiet_option
def verify(path: Path, tag: str | None, quick: bool, sample: tuple[int, int], as_json: bool, quiet: bool) -> None:
    """Check the checkpoint at PATH: lengths, digests, and that every tensor decodes to what was written.

    Exit status 1 if something is wrong; then the newest intact checkpoint beside it is named.
    """
    from dataclasses import asdict

    from ds_galore.tools.source import resolve
    from ds_galore.tools.verify import verify_checkpoint

    found = verify_checkpoint(resolve(path, tag), quick=quick, sample=sample)
    if as_json:
        click.echo(json.dumps(asdict(found)))
    elif not quiet:
        for problem in found.problems:
            click.echo(problem)
        if found.problems:
            other = found.newest_intact
            click.echo(
                f"{found.directory}: damaged; "
                + (f"the newest intact checkpoint is {other}" if other else "no intact checkpoint is beside it")
            )
        else:
            click.echo(f"{found.directory}: fine; {found.checked} of {found.ranges} ranges decoded")
    sys.exit(1 if found.problems else 0)


@main.command()
@_source_options
@click.option("--tensors", is_flag=True, help="List every tensor.")
@json_option
def inspect(path: Path, tag: str | None, tensors: bool, as_json: bool) -> None:
    """Show what the checkpoint at PATH is made of: tensors, shapes, codecs, ratios, who holds what."""
    from ds_galore.tools.inspect import inspect_checkpoint
    from ds_galore.tools.source import resolve

    found = inspect_checkpoint(resolve(path, tag))
    if as_json:
        click.echo(json.dumps(found))
        return
    base = f", differs from {found['base']}" if found["base"] else ""
    click.echo(
        f"{found['directory']}: {found['format']}, {found['kind']}{base}, step {found['step']},"
        f" {found['world_size']} ranks, ZeRO {found['zero_stage']}; {_size(found['own_bytes'])} of its own,"
        f" {_size(found['base_bytes'])} shared with its base"
    )
    rows = [
        [kind, str(each["tensors"]), _size(each["bytes"]), _size(each["stored"]), _ratio(each)]
        for kind, each in sorted(found["totals"].items())
    ]
    _table("by kind", ["kind", "tensors", "elements", "stored here", "ratio"], rows)
    if tensors:
        rows = []
        for name, each in found["tensors"].items():
            codecs = ", ".join(sorted({shard["codec"] for shard in each["shards"]}))
            ranks = ", ".join(f"{s['rank']}: [{s['start']}, {s['stop']})" for s in each["shards"])
            rows.append([name, f"{each['dtype']} {each['shape']}", codecs, ranks, _ratio(each)])
        _table("tensors", ["name", "type", "codecs", "rank: range", "ratio"], rows, left=4)


def _ratio(each: dict[str, Any]) -> str:
    return f"{each['bytes'] / each['stored']:.2f}x" if each["stored"] else "-"


@main.command("list")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--verify", "check_all", is_flag=True, help="Read and decode everything, instead of structure and sizes.")
@json_option
def list_(directory: Path, check_all: bool, as_json: bool) -> None:
    """List the checkpoints of a run: step, kind, base, bytes on the disk and shared, whether they are intact."""
    from ds_galore.tools.inspect import list_checkpoints

    rows = list_checkpoints(directory, verify=check_all)
    if as_json:
        click.echo(json.dumps(rows))
        return
    _table(
        str(directory),
        ["tag", "step", "kind", "base", "ranks", "written", "bytes", "shared", "state"],
        [
            [
                f"{row['tag']}{' (latest)' if row['latest'] else ''}",
                *(str(row[key]) if row[key] is not None else "-" for key in ("step", "kind", "base", "ranks")),
                (row["created"] or "-").removesuffix("+00:00"),
                _size(row["bytes"]),
                _size(row["shared"]),
                row["state"],
            ]
            for row in rows
        ],
    )


@main.command()
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@json_option
def diff(first: Path, second: Path, as_json: bool) -> None:
    """Show which tensors of two checkpoints differ, and by how much. Exit status 1 if any does."""
    from ds_galore.tools.inspect import difference
    from ds_galore.tools.source import resolve

    found = difference(resolve(first), resolve(second))
    differs = bool(found["changed"] or found["only_first"] or found["only_second"])
    if as_json:
        click.echo(json.dumps(found))
    else:
        for key, where in (("only_first", found["first"]), ("only_second", found["second"])):
            for name in found[key]:
                click.echo(f"only in {where}: {name}")
        rows = []
        for name, each in found["changed"].items():
            if "first" in each:
                rows.append([name, f"{each['first']} and {each['second']}", "", ""])
                continue
            largest, relative = each.get("largest"), each.get("relative")
            rows.append(
                [
                    name,
                    f"{each['elements']:,} of {each['of']:,}",
                    "-" if largest is None else f"{largest:.3g}",
                    "-" if relative is None else f"{relative:.3g}",
                ]
            )
        if rows:
            _table("changed", ["tensor", "elements", "largest", "relative"], rows)
        click.echo(f"{found['equal']} tensors are equal, {len(found['changed'])} changed")
    sys.exit(1 if differs else 0)


@main.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--to", "tag", required=True, help="The checkpoint that 'latest' is to name.")
@json_option
@quiet_option
def rollback(directory: Path, tag: str, as_json: bool, quiet: bool) -> None:
    """Let 'latest' in DIRECTORY name the checkpoint TAG, once everything in it has been verified."""
    from ds_galore.tools.verify import rollback as go_back

    newer = go_back(directory, tag)
    if as_json:
        click.echo(json.dumps({"latest": tag, "newer": newer}))
    elif not quiet:
        left = f"; newer ones are left: {', '.join(newer)}" if newer else ""
        click.echo(f"{directory / 'latest'} names {tag}{left}")


def _plans(settings: dict[str, Any], model_config: Path, world_size: int, precision: str) -> dict[str, dict[str, int]]:
    """By optimizer, the bytes of each kind on the fullest rank."""
    from dataclasses import asdict

    from ds_galore.config import GALORE_OPTIMIZERS, section
    from ds_galore.tools.memory import ParameterPlan, plan_memory

    model = _empty_model(model_config)
    adamw = [ParameterPlan(name, parameter.numel()) for name, parameter in model.named_parameters()]
    options: dict[str, Any] = {
        "world_size": world_size,
        "weight_bytes": 4 if precision == "fp32" else 2,
        "partitioned": section(settings, "zero_optimization").get("stage", 0) == 3,
    }
    cases: dict[str, tuple[list[ParameterPlan], dict[str, Any]]] = {"plain AdamW": (adamw, {})}
    kind = section(settings, "optimizer").get("type")
    if kind in GALORE_OPTIMIZERS:
        from ds_galore.optim.galore import GaLoreAdamW

        chosen = {k: v for k, v in section(settings, "optimizer", "params").items() if v != "auto"}
        optimizer = GaLoreAdamW(model.parameters(), model=model, **chosen)
        own: dict[str, Any] = {
            "sharded": optimizer.shards_projectors(world_size),
            "projector_bytes": optimizer.projector_bytes,
        }
        cases = {kind: (optimizer.parameter_plans(), own), **cases}
    result = {}
    for label, (plans, own) in cases.items():
        ranks = [plan_memory(plans, rank=rank, **options, **own) for rank in _telling_ranks(world_size)]
        fullest = max(ranks, key=lambda plan: plan.total)
        result[label] = {**asdict(fullest), "total": fullest.total}
    return result


def _telling_ranks(world_size: int) -> range:
    """Ranks differ by a row of a matrix at most; the first ones show it."""
    return range(min(world_size, 8))


def _empty_model(path: Path) -> Any:
    """The model without its weights."""
    if not path.exists():
        raise DataError(f"--model-config {path}: no such file or directory")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        loaded = AutoConfig.from_pretrained(str(path), local_files_only=True)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(loaded)
    except Exception as error:  # noqa: BLE001 - transformers raises many kinds for files it cannot use
        raise DataError(f"--model-config {path}: cannot be loaded: {str(error).splitlines()[0]}") from None


if __name__ == "__main__":
    main()
