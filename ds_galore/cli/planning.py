"""The command that tells what a job needs before it is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ds_galore.cli.output import json_option, quiet_option, show_table, size_text
from ds_galore.errors import ConfigError

__all__ = ["estimate"]

PRECISIONS = click.Choice(["fp32", "bf16", "fp16"])


def _count(context: Any, parameter: Any, value: str | None) -> int | None:
    from ds_galore.tools.estimate import parse_count

    try:
        return None if value is None else parse_count(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


class _OneOf(click.Choice[str]):
    """A hyperparameter's words, which are looked up when they are needed: every command would wait for pydantic."""

    def __init__(self, key: str) -> None:
        self._key, self.case_sensitive = key, True

    @property
    def choices(self) -> tuple[str, ...]:  # type: ignore[override]
        """The words."""
        from ds_galore.parameters import choices

        return tuple(choices(self._key))


@click.command()
@click.option("--config", "path", type=click.Path(path_type=Path), help="DeepSpeed configuration to take all from.")
@click.option(
    "--model-config", type=click.Path(path_type=Path), help="Hugging Face config.json, or a directory with one."
)
@click.option("--params", callback=_count, metavar="NUMBER", help="Number of parameters, such as 7e9 or 350M.")
@click.option(
    "--optimizer", metavar="NAME", help="adamw, sgd, lion, adamw_8bit, galore_adamw_8bit, apollo_adamw, ... [adamw]"
)
@click.option("--rank", type=click.IntRange(min=1), help="Of the projection. [the configuration's, or 128]")
@click.option(
    "--proj-type",
    type=_OneOf("proj_type"),
    help="Side of the projection. [the configuration's, or right; std with --params alone]",
)
@click.option(
    "--refresh",
    type=_OneOf("refresh"),
    help="How a basis is found; random keeps no projectors. [subspace]",
)
@click.option("--moment-dtype", type=_OneOf("moment_dtype"), help="Of moments. [the states' precision]")
@click.option(
    "--unprojected-moment-dtype",
    type=_OneOf("moment_dtype"),
    help="Of moments of embeddings, head and norms. [as --moment-dtype]",
)
@click.option(
    "--projector-dtype",
    type=_OneOf("projector_dtype"),
    help="Of projectors. [fp32; int8 of galore_adamw_8bit]",
)
@click.option(
    "--projector-storage",
    type=_OneOf("projector_storage"),
    help="Right projectors on all ranks, or in parts. [auto]",
)
@click.option(
    "--beta1", type=click.FloatRange(min=0, max=1, max_open=True), help="Gives galore_adafactor a first moment."
)
@click.option("--precision", type=PRECISIONS, help="Of weights and gradients. [the configuration's, or bf16]")
@click.option(
    "--state-precision",
    type=PRECISIONS,
    help="Of master weights, and of moments without --moment-dtype. [the configuration's, or fp32]",
)
@click.option("--zero-stage", type=click.IntRange(0, 3), help="[the configuration's, or 0]")
@click.option("--world-size", type=click.IntRange(min=1), default=1, show_default=True, help="Number of ranks.")
@click.option("--steps", type=click.IntRange(min=1), help="Of the run, for its storage.")
@click.option("--save-every", type=click.IntRange(min=1), help="Steps between two checkpoints.")
@click.option("--keep-last", type=click.IntRange(min=1), help="Checkpoints that stay. [the configuration's, or all]")
@click.option(
    "--full-every", type=click.IntRange(min=1), help="Which checkpoints are full. [the configuration's, or 10]"
)
@click.option(
    "--sequence-length",
    type=click.IntRange(min=1),
    help="Tokens of a sequence, for activations in the account of a device; with --config and --model-config.",
)
@click.option(
    "--activation-checkpointing/--no-activation-checkpointing",
    default=None,
    help="Whether layers are computed anew in the backward pass. [no]",
)
@click.option("--paper", is_flag=True, help="Show the GaLore paper's table 2 beside these figures, and nothing else.")
@click.option(
    "--table",
    type=click.Choice(["8bit", "crossover"]),
    help="Show a table of a Llama 7B at rank 1024, and nothing else: low-rank optimizers in 8 bits beside AdamW, or"
    " from how many ranks on projectors are worth sharding.",
)
@json_option
@quiet_option
def estimate(paper: bool, table: str | None, as_json: bool, quiet: bool, **options: Any) -> None:
    """Estimate memory, checkpoints, traffic and storage of a job, beside plain AdamW."""
    if paper and table is not None:
        raise ConfigError(f"--paper and --table {table} are two tables: give one of them")
    if paper or table is not None:
        _show_ready("paper" if table is None else table, as_json, quiet)
        return
    found = _found(options)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    elif not quiet:
        _show(found)


def _found(options: dict[str, Any]) -> dict[str, Any]:
    """The estimate, that of plain AdamW, and the paper's figures where they are for this model."""
    from dataclasses import asdict, replace

    from ds_galore.cli.described import job_of, settings_from
    from ds_galore.tools.estimate import estimate as estimated
    from ds_galore.tools.memory import ParameterPlan
    from ds_galore.tools.optimizers import OPTIMIZERS
    from ds_galore.tools.tables import PAPER, paper_row, paper_table

    job, schedule = job_of(options, settings_from(options["path"]))
    found = asdict(estimated(job, schedule))
    found["device"] = _device(options, job, found["assumptions"])
    plain = [ParameterPlan(plan.name, plan.numel) for plan in job.plans]
    adamw = replace(job, optimizer=OPTIMIZERS["adamw"], plans=plain, scale=1.0, parameters=None)
    if job.parameters is not None:
        adamw = replace(adamw, plans=[ParameterPlan("all", job.parameters)])
    beside = estimated(adamw)
    found["plain_adamw"] = {"memory_per_rank": beside.memory_per_rank, "total_bytes": beside.total_bytes}
    name = paper_row(job.numel, (plan.numel for plan in job.plans)) if job.parameters is None else None
    rows = [row for row in paper_table() if row["model"] == name] if name else []
    found["paper"] = rows
    if name:
        found["assumptions"].append(
            f"the paper's table 2 has bf16 everything and rank {PAPER[name][0]}; docs/estimate.md has the arithmetic"
        )
    return found


def _device(options: dict[str, Any], job: Any, assumptions: list[str]) -> dict[str, Any] | None:
    """The account of a rank's device, by DeepSpeed's buffers in a configuration; None without one."""
    for name in ("sequence_length", "activation_checkpointing"):
        if options[name] is not None and (options["path"] is None or options["model_config"] is None):
            raise ConfigError(f"--{name.replace('_', '-')} goes with --config and --model-config")
    if options["activation_checkpointing"] is not None and options["sequence_length"] is None:
        raise ConfigError("--activation-checkpointing goes with --sequence-length")
    if options["path"] is None:
        return None
    from ds_galore.config import load_config
    from ds_galore.tools.footprint import footprint

    config = load_config(options["path"])
    needs = footprint(config, job)
    activations = _activations(options, config, job, assumptions)
    phases = {**needs.phases, "backward": {**activations, **needs.phases["backward"]}}
    return {
        "device": needs.device,
        "host": needs.host,
        "phases": phases,
        "activations_counted": bool(activations),
        "peak": needs.peak(sum(activations.values())),
    }


def _activations(options: dict[str, Any], config: Any, job: Any, assumptions: list[str]) -> dict[str, int]:
    if options["sequence_length"] is None:
        return {}
    from ds_galore.cli.described import decoder_of
    from ds_galore.tools.activations import activations
    from ds_galore.tools.estimate import BYTES

    micro = config.get("train_micro_batch_size_per_gpu")
    if not isinstance(micro, int):
        micro = 1
        assumptions.append("one sequence a micro-batch: train_micro_batch_size_per_gpu does not say how many")
    tokens = options["sequence_length"] * micro
    anew = bool(options["activation_checkpointing"])
    return activations(decoder_of(options["model_config"]), tokens, BYTES[job.precision], checkpointing=anew)


# ---------------------------------------------------------------------- for people


def _range(pair: list[int]) -> str:
    return size_text(pair[0]) if pair[0] == pair[1] else f"{size_text(pair[0])} to {size_text(pair[1])}"


def _show(found: dict[str, Any]) -> None:
    ranks, adamw = found["world_size"], found["plain_adamw"]
    kinds = list(found["memory_per_rank"])
    click.echo(
        f"{found['parameters']:,} parameters, {found['optimizer']}, {found['precision']}, ZeRO {found['zero_stage']},"
        f" {ranks} rank{'s' * (ranks > 1)}; states: {_formats_text(found['formats'])}"
    )
    rows = [
        [label, *(size_text(sizes[kind]) for kind in kinds)]
        for label, sizes in (
            (f"{found['optimizer']}, a rank", found["memory_per_rank"]),
            (f"{found['optimizer']}, all ranks", found["memory_total"]),
            ("plain AdamW, a rank", adamw["memory_per_rank"]),
        )
    ]
    show_table("memory of model states", ["", *(kind.replace("_", " ") for kind in kinds)], rows)
    if found["device"] is not None:
        _show_device(found["device"])
    checkpoint = found["checkpoint"]
    parts = ["weights", "master_weights", "moments", "projectors", "metadata", "total"]
    show_table(
        "a checkpoint before compression",
        [part.replace("_", " ") for part in parts],
        [[size_text(checkpoint[part]) for part in parts]],
        left=0,
    )
    click.echo(f"ours, full: {_range(checkpoint['full_compressed'])} (from {size_text(checkpoint['full'])})")
    click.echo(f"ours, a difference: {_range(checkpoint['differential_compressed'])}")
    traffic = found["traffic_per_step"]
    click.echo(
        f"traffic a step, sent by a rank: {size_text(traffic['total'])} (gradients {size_text(traffic['gradients'])},"
        f" weights {size_text(traffic['weights'])}, low rank {size_text(traffic['low_rank'])})"
    )
    storage = found["storage"]
    if storage:
        click.echo(
            f"storage of {storage['kept']} of {storage['saves']} checkpoints ({storage['full_on_disk']} full):"
            f" {_range(storage['ours'])}, DeepSpeed's own {size_text(storage['deepspeed'])}; written in all:"
            f" {_range(storage['ours_written'])}, DeepSpeed's own {size_text(storage['deepspeed_written'])}"
        )
    if found["paper"]:
        _paper_rows(found["paper"])
    for each in found["assumptions"]:
        click.echo(f"assumes: {each}")


def _show_device(account: dict[str, Any]) -> None:
    """The account of a rank's device, line by line."""
    rows = [["always", kind, size] for kind, size in account["device"].items()]
    for phase, kinds in account["phases"].items():
        rows += [[phase, kind, size] for kind, size in kinds.items()]
        rows.append([phase, "all of it, for a moment", sum(kinds.values())])
    title = "on the device of a rank, by DeepSpeed's buffers; of the phases the largest counts"
    shown = [[name.replace("_", " "), kind.replace("_", " "), size_text(size)] for name, kind, size in rows if size]
    show_table(title, ["when", "what", "size"], shown, left=2)
    without = "" if account["activations_counted"] else ", activations not counted (--sequence-length)"
    click.echo(f"at most on the device: {size_text(account['peak'])}{without}")
    if account["host"]:
        kinds = ", ".join(f"{kind.replace('_', ' ')} {size_text(size)}" for kind, size in account["host"].items())
        click.echo(f"in host memory a rank: {kinds}")


def _paper_rows(rows: list[dict[str, Any]]) -> None:
    show_table(
        "bf16 weights and optimizer states, beside the GaLore paper's table 2",
        ["model", "method", "rank", "by shapes", "paper", "difference"],
        [
            [
                row["model"],
                row["method"],
                str(row["rank"] or "-"),
                f"{row['gib']:.2f} GiB",
                f"{row['paper_g']:.2f} G",
                f"{row['difference']:+.1%}",
            ]
            for row in rows
        ],
        left=2,
    )


def _formats_text(formats: dict[str, str | None]) -> str:
    named = {key.replace("_", " "): name for key, name in formats.items() if name is not None}
    if named.get("unprojected moments") == named.get("moments"):
        named.pop("unprojected moments", None)
    return ", ".join(f"{key} {name}" for key, name in named.items()) or "none"


def _eight_bit_rows(rows: list[dict[str, Any]]) -> None:
    sizes = list(rows[0]["bytes"])
    show_table(
        "optimizer states of a Llama 7B, bytes on a rank under ZeRO-3, projected from the right, projectors sharded",
        [
            *("optimizer", "rank", "moments", "unprojected", "projectors"),
            *(f"{size} rank{'s' * (size != '1')}" for size in sizes),
            *("below bf16 AdamW", "of 8-bit AdamW"),
        ],
        [
            [
                row["optimizer"],
                str(row["rank"] or "-"),
                *(row[key] or "none" for key in ("moments", "unprojected_moments")),
                row["projectors"] or "-",
                *(size_text(row["bytes"][size]) for size in sizes),
                f"{row['below_bf16_adamw']:.1%}",
                f"{row['of_adamw_8bit'][sizes[-1]]:.2f}",
            ]
            for row in rows
        ],
        left=5,
    )


def _crossover_rows(rows: list[dict[str, Any]]) -> None:
    keys = ("sharded_from", "replicated_loses_from", "sharded_loses_from")
    show_table(
        "Llama 7B, rank 1024, from the right: numbers of ranks from which on",
        ["optimizer", "moments", "projectors", "beside", "auto shards", "replicated loses", "sharded loses"],
        [
            [
                *(row[key] for key in ("optimizer", "moments", "projectors", "beside")),
                *(str(row[key] or "never") for key in keys),
            ]
            for row in rows
        ],
        left=4,
    )


def _show_ready(name: str, as_json: bool, quiet: bool) -> None:
    """Show a table that needs no job."""
    from ds_galore.tools import tables

    make, show = {
        "paper": (tables.paper_table, _paper_rows),
        "8bit": (tables.eight_bit_table, _eight_bit_rows),
        "crossover": (tables.crossover_table, _crossover_rows),
    }[name]
    rows = make()
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    elif not quiet:
        show(rows)
        if name == "paper":
            click.echo("docs/estimate.md has the arithmetic where they differ by more than 5%")
