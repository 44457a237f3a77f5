"""The ``ds-galore`` command: what can be asked without starting a job.

Starts without torch; a command imports what it needs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from ds_galore import __version__
from ds_galore.config import DEEPSPEED_OPTIMIZERS, GALORE_OPTIMIZERS, check_config, load_config, section
from ds_galore.errors import DataError, DsGaloreError

__all__ = ["main"]


class _Group(click.Group):
    """Turns a user's mistake into one line and its exit status; ``--debug`` shows where it arose."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except DsGaloreError as error:
            if "--debug" in sys.argv:
                raise
            click.echo(f"ds-galore: error: {error}", err=True)
            sys.exit(error.exit_code)


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


def _plans(settings: dict[str, Any], model_config: Path, world_size: int, precision: str) -> dict[str, dict[str, int]]:
    """By optimizer, the bytes of each kind on the fullest rank."""
    from dataclasses import asdict

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
