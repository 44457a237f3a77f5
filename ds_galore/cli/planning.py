"""The command that tells what a job needs before it is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ds_galore.cli.output import json_option, quiet_option, show_table, size_text
from ds_galore.errors import ConfigError, DataError

__all__ = ["estimate"]

PRECISIONS = click.Choice(["fp32", "bf16", "fp16"])


def _count(context: Any, parameter: Any, value: str | None) -> int | None:
    from ds_galore.tools.estimate import parse_count

    try:
        return None if value is None else parse_count(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command()
@click.option("--config", "path", type=click.Path(path_type=Path), help="DeepSpeed configuration to take all from.")
@click.option(
    "--model-config", type=click.Path(path_type=Path), help="Hugging Face config.json, or a directory with one."
)
@click.option("--params", callback=_count, metavar="NUMBER", help="Number of parameters, such as 7e9 or 350M.")
@click.option("--optimizer", metavar="NAME", help="adamw, sgd, lion, galore_adamw, adamw_8bit, ... [adamw]")
@click.option("--rank", type=click.IntRange(min=1), help="Of GaLore's projection. [128]")
@click.option("--precision", type=PRECISIONS, help="Of weights and gradients. [the configuration's, or bf16]")
@click.option("--state-precision", type=PRECISIONS, help="Of master weights and moments. [fp32]")
@click.option("--zero-stage", type=click.IntRange(0, 3), help="[the configuration's, or 0]")
@click.option("--world-size", type=click.IntRange(min=1), default=1, show_default=True, help="Number of ranks.")
@click.option("--steps", type=click.IntRange(min=1), help="Of the run, for its storage.")
@click.option("--save-every", type=click.IntRange(min=1), help="Steps between two checkpoints.")
@click.option("--keep-last", type=click.IntRange(min=1), help="Checkpoints that stay. [the configuration's, or all]")
@click.option(
    "--full-every", type=click.IntRange(min=1), help="Which checkpoints are full. [the configuration's, or 10]"
)
@click.option("--paper", is_flag=True, help="Show the GaLore paper's table 2 beside these figures, and nothing else.")
@json_option
@quiet_option
def estimate(paper: bool, as_json: bool, quiet: bool, **options: Any) -> None:
    """Estimate memory, checkpoints, traffic and storage of a job, beside plain AdamW."""
    if paper:
        _show_paper(as_json, quiet)
        return
    found = _found(options)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    elif not quiet:
        _show(found)


def _found(options: dict[str, Any]) -> dict[str, Any]:
    """The estimate, that of plain AdamW, and the paper's figures where they are for this model."""
    from dataclasses import asdict, replace

    from ds_galore.tools.estimate import OPTIMIZERS, PAPER, paper_row, paper_table
    from ds_galore.tools.estimate import estimate as estimated
    from ds_galore.tools.memory import ParameterPlan

    job, schedule = _job(options)
    found = asdict(estimated(job, schedule))
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


def _job(options: dict[str, Any]) -> tuple[Any, Any]:
    """What the options and the configuration describe."""
    from ds_galore.tools.estimate import Job, Schedule, assumed, optimizer_named

    settings = _settings(options["path"])
    optimizer = optimizer_named(options["optimizer"] or settings["optimizer"] or "adamw")
    _refuse_idle(options, optimizer.low_rank)
    assumptions = list(settings["assumptions"])
    rank = options["rank"] or settings["params"].get("rank")
    if optimizer.low_rank and rank is None:
        rank = DEFAULT_RANK
        assumptions.append(f"rank {rank}; --rank gives another")
    if options["precision"] is None and settings["precision"] is None:
        assumptions.append("bf16 weights and gradients; --precision gives others")
    stage = settings["stage"] if options["zero_stage"] is None else options["zero_stage"]
    if not isinstance(stage, int):
        raise ConfigError(f"zero_optimization.stage is {stage!r}: give --zero-stage")
    shared = {
        "optimizer": optimizer,
        "precision": options["precision"] or settings["precision"] or "bf16",
        "state_precision": options["state_precision"] or "fp32",
        "stage": stage,
        "world_size": options["world_size"],
        "state_dtype": settings["state_dtype"],
    }
    if (options["params"] is None) == (options["model_config"] is None):
        raise ConfigError("give the model by --params NUMBER or by --model-config PATH, and not by both")
    own: dict[str, Any] = {}
    if options["params"] is not None:
        plans, scale, more = assumed(options["params"], optimizer, rank)
        if scale != 1.0:
            own = {"scale": scale, "parameters": options["params"]}
        if settings["params"].get("projector_dtype") == "bf16":
            own["projector_bytes"] = 2
        storage = settings["params"].get("projector_storage", "auto")
        if storage != "auto":
            own["sharded"] = storage == "sharded" and stage > 0 and options["world_size"] > 1
        assumptions += more
    else:
        plans, own = _plans(options["model_config"], optimizer.low_rank, settings["params"], rank)
        shards = own.pop("shards", None)
        if shards is not None and stage:
            own["sharded"] = shards(options["world_size"])
    job = Job(plans, **shared, **own, assumptions=tuple(assumptions))
    if options["steps"] is None:
        return job, None
    every = {"full": 1}.get(settings["mode"], options["full_every"] or settings["full_every"])
    return job, Schedule(
        options["steps"],
        options["save_every"],
        options["keep_last"] or settings["keep_last"],
        every,
        settings["keep_every"],
        incremental=settings["mode"] == "incremental",
    )


#: Of GaLore's projection, where nothing says another.
DEFAULT_RANK = 128


def _refuse_idle(options: dict[str, Any], low_rank: bool) -> None:
    """Refuse options that would change nothing."""
    if (options["steps"] is None) != (options["save_every"] is None):
        raise ConfigError("--steps and --save-every go together")
    for name in ("keep_last", "full_every"):
        if options[name] is not None and options["steps"] is None:
            raise ConfigError(f"--{name.replace('_', '-')} is about a run: give --steps and --save-every too")
    if options["rank"] is not None and not low_rank:
        raise ConfigError("--rank goes with an optimizer that projects, such as --optimizer galore_adamw")


def _settings(path: Path | None) -> dict[str, Any]:
    """What a configuration says of a job."""
    found: dict[str, Any] = {"optimizer": None, "params": {}, "precision": None, "stage": 0, "assumptions": []}
    found.update({"keep_last": None, "keep_every": None, "full_every": 10, "mode": "differential"})
    found["state_dtype"] = "exact"
    if path is None:
        return found
    from ds_galore.config import DEEPSPEED_OPTIMIZERS, check_config, load_config, section

    config = load_config(path)
    try:
        check_config(config, DEEPSPEED_OPTIMIZERS)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    params = {k: v for k, v in section(config, "optimizer", "params").items() if v != "auto"}
    kind = section(config, "optimizer").get("type")
    if kind is not None and kind.lower() == "sgd" and params.get("momentum"):
        kind = "sgd_momentum"
    checkpoint = section(config, "ds_galore", "checkpoint")
    enabled = {name: section(config, name).get("enabled", False) for name in ("bf16", "fp16")}
    chosen = [name for name, value in enabled.items() if value is True]
    if chosen:
        found["precision"] = chosen[0]
    elif "auto" not in enabled.values():
        found["precision"] = "fp32"
    found.update({key: checkpoint[key] for key in CHECKPOINT_KEYS if key in checkpoint})
    found["stage"] = section(config, "zero_optimization").get("stage", 0)
    found.update(optimizer=kind, params=params if kind == "GaLoreAdamW" else {})
    return found


CHECKPOINT_KEYS = ("keep_last", "keep_every", "full_every", "mode", "state_dtype")


def _plans(
    model_config: Path, low_rank: bool, params: dict[str, Any], rank: int | None
) -> tuple[list[Any], dict[str, Any]]:
    """The parameters of a model as its optimizer sees them, and what of its projectors depends on its settings."""
    from ds_galore.tools.memory import ParameterPlan

    model = _empty_model(model_config)
    if not low_rank:
        return [
            ParameterPlan(name, each.numel(), each.shape[-1] if each.dim() == 2 else 0)
            for name, each in model.named_parameters()
        ], {}
    from ds_galore.optim.galore import GaLoreAdamW

    chosen = {**params, "rank": rank}
    optimizer = GaLoreAdamW(model.parameters(), model=model, **chosen)
    return optimizer.parameter_plans(), {
        "projector_bytes": optimizer.projector_bytes,
        "shards": optimizer.shards_projectors,
    }


def _empty_model(path: Path) -> Any:
    """The model without its weights."""
    if not path.exists():
        raise DataError(f"--model-config {path}: no such file or directory")
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise DataError(
            f"--model-config {path}: needs {error.name}, which is not installed; --params takes a number"
        ) from None
    try:
        loaded = AutoConfig.from_pretrained(str(path), local_files_only=True)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(loaded)
    except Exception as error:  # noqa: BLE001 - transformers raises many kinds for files it cannot use
        raise DataError(f"--model-config {path}: cannot be loaded: {str(error).splitlines()[0]}") from None


# ---------------------------------------------------------------------- for people


def _range(pair: list[int]) -> str:
    return size_text(pair[0]) if pair[0] == pair[1] else f"{size_text(pair[0])} to {size_text(pair[1])}"


def _show(found: dict[str, Any]) -> None:
    ranks, adamw = found["world_size"], found["plain_adamw"]
    kinds = list(found["memory_per_rank"])
    click.echo(
        f"{found['parameters']:,} parameters, {found['optimizer']}, {found['precision']}, states"
        f" {found['state_precision']}, ZeRO {found['zero_stage']}, {ranks} rank{'s' * (ranks > 1)}"
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


def _show_paper(as_json: bool, quiet: bool) -> None:
    from ds_galore.tools.estimate import paper_table

    rows = paper_table()
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    elif not quiet:
        _paper_rows(rows)
        click.echo("docs/estimate.md has the arithmetic where they differ by more than 5%")
