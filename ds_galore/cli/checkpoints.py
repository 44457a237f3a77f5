"""Commands on checkpoints: merge, reshard, verify, inspect, list, diff, rollback."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import click

from ds_galore.cli.output import json_option, progress_bar, quiet_option, show_table, size_text

__all__ = ["COMMANDS", "parse_size"]


def _source_options(command: Any) -> Any:
    """PATH and --tag, of every command that reads one checkpoint."""
    command = click.option("--tag", help="Which checkpoint of a save directory; the latest by default.")(command)
    return click.argument("path", type=click.Path(path_type=Path))(command)


def parse_size(value: str) -> int:
    """The number of bytes in a text such as 5GB or 512MiB.

    Raises
    ------
    ValueError
        If it is no such text, or not positive.
    """
    units = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
    units |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
    found = re.fullmatch(r"\s*([0-9.]+(?:[eE]\+?[0-9]+)?)\s*([A-Za-z]*)\s*", value)
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


@click.command()
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

    with progress_bar("merging", shown=not (quiet or as_json)) as progress:
        report = merge_checkpoint(path, out, tag=tag, format=form, progress=progress, **options)
    if as_json:
        click.echo(json.dumps(asdict(report)))
    elif not quiet:
        step = "" if report.step is None else f" (step {report.step})"
        click.echo(
            f"{report.source}{step}: {report.tensors} tensors, {report.parameters:,} elements,"
            f" {size_text(report.bytes)} written to {report.out}"
        )
        if report.pruned:
            click.echo(f"LOSSY: {sum(report.pruned.values()):,} elements of {len(report.pruned)} matrices set to zero")
        if options["quantize"]:
            click.echo("LOSSY: matrices quantised to int8; ds_galore.tools.merge.dequantize gives them back")


@click.command()
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

    with progress_bar("resharding", shown=not (quiet or as_json)) as progress:
        report = reshard_checkpoint(path, out, tag=tag, format=form, progress=progress, **options)
    if as_json:
        click.echo(json.dumps(asdict(report)))
    elif not quiet:
        step = "" if report.step is None else f" (step {report.step})"
        click.echo(
            f"{report.source}{step}: the state of {report.from_world_size} ranks for {report.world_size},"
            f" {size_text(report.bytes)} written to {report.out}/{report.tag}"
        )


def _sample(context: Any, parameter: Any, value: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", value)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise click.BadParameter(f"{value!r} is no sample such as 1/10")
    return int(found[1]), int(found[2])


@click.command()
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
    else:
        _tell_verified(found, quiet)
    sys.exit(1 if found.problems else 0)


@click.command()
@_source_options
@click.option("--tensors", is_flag=True, help="List every tensor.")
@json_option
@quiet_option
def inspect(path: Path, tag: str | None, tensors: bool, as_json: bool, quiet: bool) -> None:
    """Show what the checkpoint at PATH is made of: tensors, shapes, codecs, ratios, who holds what."""
    from ds_galore.tools.inspect import inspect_checkpoint
    from ds_galore.tools.source import resolve

    found = inspect_checkpoint(resolve(path, tag))
    if as_json:
        click.echo(json.dumps(found))
        return
    if quiet:
        return
    base = f", differs from {found['base']}" if found["base"] else ""
    click.echo(
        f"{found['directory']}: {found['format']}, {found['kind']}{base}, step {found['step']},"
        f" {found['world_size']} ranks, ZeRO {found['zero_stage']}; {size_text(found['own_bytes'])} of its own,"
        f" {size_text(found['base_bytes'])} shared with its base"
    )
    rows = [
        [kind, str(each["tensors"]), size_text(each["bytes"]), size_text(each["stored"]), _ratio(each)]
        for kind, each in sorted(found["totals"].items())
    ]
    show_table("by kind", ["kind", "tensors", "elements", "stored here", "ratio"], rows)
    if tensors:
        rows = []
        for name, each in found["tensors"].items():
            codecs = ", ".join(sorted({shard["codec"] for shard in each["shards"]}))
            ranks = ", ".join(f"{s['rank']}: [{s['start']}, {s['stop']})" for s in each["shards"])
            rows.append([name, f"{each['dtype']} {each['shape']}", codecs, ranks, _ratio(each)])
        show_table("tensors", ["name", "type", "codecs", "rank: range", "ratio"], rows, left=4)


def _ratio(each: dict[str, Any]) -> str:
    return f"{each['bytes'] / each['stored']:.2f}x" if each["stored"] else "-"


def _tell_verified(found: Any, quiet: bool) -> None:
    """What is wrong on stderr, what is not on stdout."""
    for problem in found.problems:
        click.echo(problem, err=True)
    if found.problems:
        other = found.newest_intact
        end = f"the newest intact checkpoint is {other}" if other else "no intact checkpoint is beside it"
        click.echo(f"{found.directory}: damaged; {end}", err=True)
    elif quiet:
        return
    elif found.quick:
        click.echo(f"{found.directory}: structure and sizes are fine; the data were not read")
    else:
        click.echo(f"{found.directory}: fine; {found.checked} of {found.ranges} ranges checked")


@click.command("list")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--verify", "check_all", is_flag=True, help="Read and decode everything, instead of structure and sizes.")
@json_option
@quiet_option
def list_(directory: Path, check_all: bool, as_json: bool, quiet: bool) -> None:
    """List the checkpoints of a run: step, kind, base, bytes on the disk and shared, whether they are intact.

    Exit status 1 if one is damaged; one that was never finished is not.
    """
    from ds_galore.tools.inspect import list_checkpoints

    rows = list_checkpoints(directory, verify=check_all)
    if as_json:
        click.echo(json.dumps(rows))
    elif not quiet:
        _show_list(directory, rows)
    for row in rows:
        if row["state"] not in FINE:
            click.echo(f"{row['tag']}: {row['state']}", err=True)
    if not quiet and not as_json and not any(row["latest"] for row in rows):
        click.echo(f"{directory}: no file 'latest' names one of them", err=True)
    sys.exit(1 if any(row["state"] not in FINE for row in rows) else 0)


#: States of a checkpoint that are no damage.
FINE = ("intact", "unfinished")


def _show_list(directory: Path, rows: list[dict[str, Any]]) -> None:
    show_table(
        str(directory),
        ["tag", "step", "kind", "base", "ranks", "written", "bytes", "shared", "state"],
        [
            [
                f"{row['tag']}{' (latest)' if row['latest'] else ''}",
                *(str(row[key]) if row[key] is not None else "-" for key in ("step", "kind", "base", "ranks")),
                (row["created"] or "-").removesuffix("+00:00"),
                size_text(row["bytes"]),
                size_text(row["shared"]),
                row["state"] if row["state"] in FINE else "damaged",
            ]
            for row in rows
        ],
    )


@click.command()
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@json_option
@quiet_option
def diff(first: Path, second: Path, as_json: bool, quiet: bool) -> None:
    """Show which tensors of two checkpoints differ, and by how much. Exit status 1 if any does."""
    from ds_galore.tools.inspect import difference
    from ds_galore.tools.source import resolve

    found = difference(resolve(first), resolve(second))
    differs = bool(found["changed"] or found["only_first"] or found["only_second"])
    if as_json:
        click.echo(json.dumps(found))
    elif not quiet:
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
            show_table("changed", ["tensor", "elements", "largest", "relative"], rows)
        click.echo(f"{found['equal']} tensors are equal, {len(found['changed'])} changed")
    sys.exit(1 if differs else 0)


@click.command()
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


COMMANDS = (merge, reshard, verify, inspect, list_, diff, rollback)
