"""Commands for before a job is started: a configuration is made, or explained."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ds_galore.cli.checkpoints import parse_size
from ds_galore.cli.output import json_option, quiet_option, size_text
from ds_galore.errors import ConfigError

if TYPE_CHECKING:
    from ds_galore.cli.proposing import Machines, Proposal

__all__ = ["COMMANDS"]


# ---------------------------------------------------------------------- config check


@click.group()
def config() -> None:
    """Look at configurations."""


@config.command("check")
@click.argument("path", type=click.Path(path_type=Path))
@json_option
@quiet_option
def check(path: Path, as_json: bool, quiet: bool) -> None:
    """Explain the configuration at PATH, or say why it is refused.

    What it uses, what is ignored, and what else is to be known; exit status 2 where something conflicts. DeepSpeed need
    not be installed: what it refuses beyond its keys shows when a job starts.
    """
    from dataclasses import asdict

    from ds_galore.config import load_config
    from ds_galore.explain import explain

    found = explain(load_config(path))
    if as_json:
        click.echo(json.dumps({"path": str(path), "fine": found.fine, **asdict(found)}))
        if not found.fine:
            raise click.exceptions.Exit(2)
        return
    if not found.fine:
        raise ConfigError("\n".join(f"{path}: {each}" for each in found.conflicts))
    if quiet:
        return
    click.echo(f"{path}: fine")
    for title, lines in (("uses", found.uses), ("ignored", found.ignored), ("to be known", found.warnings)):
        _tell(title, lines)


def _tell(title: str, lines: Iterable[str]) -> None:
    """A list with its title, if there is anything in it."""
    told = "\n".join(f"  {each}" for each in lines)
    if told:
        click.echo(f"{title}\n{told}")


# ---------------------------------------------------------------------- init


def _size(context: Any, parameter: Any, value: str | None) -> int | None:
    try:
        return None if value is None else parse_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _share(context: Any, parameter: Any, value: str) -> str:
    """A size, or a share such as 30%; checked here, and worked out when the memory is known."""
    try:
        _room(value, 1)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return value


def _room(text: str, memory: int) -> int:
    if not text.strip().endswith("%"):
        return parse_size(text)
    share = float(text.strip()[:-1]) / 100
    if not 0 <= share < 1:
        raise ValueError(f"{text!r} is no share from 0% to below 100%")
    return round(share * memory)


def _model(text: str) -> dict[str, Any]:
    """The planner's options for a model: a path, one of the shipped sizes, or a number of parameters."""
    from ds_galore.tools.estimate import parse_count
    from ds_galore.tools.llamas import FAMILY

    size = FAMILY.get(text.upper().removeprefix("LLAMA_"))
    if Path(text).exists():
        return {"model_config": Path(text)}
    if size is not None:
        return {"params": size.parameters}
    try:
        return {"params": parse_count(text)}
    except ValueError:
        sizes = ", ".join(f"llama_{name.lower()}" for name in FAMILY)
        raise ConfigError(f"model {text!r}: no such file or directory, and none of {sizes}, 7e9, 350M") from None


@click.command()
@click.option(
    "--model-config", metavar="PATH|SIZE", help="config.json, a directory with one, or llama_60m to llama_7b."
)
@click.option("--params", metavar="NUMBER", help="Number of parameters instead, such as 7e9 or 350M.")
@click.option("--gpus", type=click.IntRange(min=1), help="Of all machines.")
@click.option("--gpu-memory", callback=_size, metavar="SIZE", help="Of a GPU, such as 80GiB; nvidia-smi tells MiB.")
@click.option("--gpus-per-machine", type=click.IntRange(min=1), help="[all up to 8, else 8]")
@click.option("--host-memory", callback=_size, metavar="SIZE", help="Of a machine; without it nothing is offloaded.")
@click.option("--disk", callback=_size, metavar="SIZE", help="Free for checkpoints.")
@click.option("--steps", type=click.IntRange(min=1), help="Of the run; without it the rate has no schedule.")
@click.option("--save-every", type=click.IntRange(min=1), help="Steps between two checkpoints.")
@click.option(
    "--activations",
    callback=_share,
    metavar="SIZE|SHARE",
    default="30%",
    show_default=True,
    help="Memory of a GPU that is left for activations and all else that is not counted.",
)
@click.option(
    "--precision", type=click.Choice(["bf16", "fp16", "fp32"]), default="bf16", show_default=True, help="Of weights."
)
@click.option("--keep-masters", is_flag=True, help="Offload, rather than go without fp32 masters.")
@click.option("--rank", type=click.IntRange(min=1), help="Of the projection. [a quarter of the hidden size]")
@click.option(
    "--micro-batch", type=click.IntRange(min=1), default=1, show_default=True, help="Samples of a GPU at once."
)
@click.option("--accumulation", type=click.IntRange(min=1), default=1, show_default=True, help="Micro-batches a step.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), default="ds_config.json", show_default=True)
@click.option("--force", is_flag=True, help="Replace OUTPUT and the text beside it.")
@click.option("--yes", "-y", is_flag=True, help="Ask nothing.")
@json_option
@quiet_option
def init(output: Path, force: bool, yes: bool, as_json: bool, quiet: bool, **options: Any) -> None:
    """Write a DeepSpeed configuration for a model and the machines that there are.

    The first of a list of ways to save memory that fits is taken: fp32 moments, 8-bit ones, bf16 without fp32 masters,
    offload to host memory; each under ZeRO 2, then 3. What it takes and why it was chosen is written beside it, to
    OUTPUT with .md for its end. Asks for what is not given where it runs on a terminal. Exit status 2 if nothing fits;
    then nothing is written.
    """
    from ds_galore.cli.proposing import Machines, Run, propose
    from ds_galore.cli.sidecar import sidecar

    beside = output.with_suffix(".md")
    _refuse_output(output, beside, force)
    asks = not yes and not as_json and sys.stdin.isatty() and sys.stderr.isatty()
    model = _answers(options, output, asks)
    if (options["save_every"] or 0) > (options["steps"] or sys.maxsize):
        raise ConfigError(f"--save-every {options['save_every']} is more than --steps {options['steps']}")
    try:
        room = _room(options["activations"], options["gpu_memory"])
    except ValueError as error:
        raise ConfigError(f"--activations: {error}") from None
    machines = Machines(
        options["gpus"],
        options["gpu_memory"],
        room,
        options["gpus_per_machine"] or min(options["gpus"], 8),
        options["host_memory"],
        options["disk"],
    )
    names = ("precision", "keep_masters", "rank", "micro_batch", "accumulation", "steps", "save_every")
    run = Run(model, **{name: options[name] for name in names})
    proposal = propose(run, machines)
    text = json.dumps(proposal.config, indent=2) + "\n"
    note = sidecar(proposal, run, machines, output, _command(options, output))
    if not quiet and not as_json:
        _show(proposal, machines)
    if asks and not click.confirm(f"Write {output} and {beside}?", default=True, err=True):
        raise click.Abort
    _write({output: text, beside: note})
    if as_json:
        click.echo(json.dumps(_as_json(proposal, machines, output, beside)))
    elif not quiet:
        click.echo(f"{output} and {beside} are written; 'ds-galore config check {output}' explains it")


def _refuse_output(output: Path, beside: Path, force: bool) -> None:
    """Before anything is asked."""
    if output == beside:
        raise ConfigError(f"--output {output}: .md is for the text beside it; give a name such as ds_config.json")
    if not output.parent.is_dir():
        raise ConfigError(f"--output {output}: {output.parent} is no directory")
    for path in (output, beside):
        if path.exists() and not force:
            raise ConfigError(f"--output {output}: {path} exists; --force replaces it")


def _answers(options: dict[str, Any], output: Path, asks: bool) -> dict[str, Any]:
    """The model, with all that is needed in ``options``: what was not given is asked for.

    Raises
    ------
    ConfigError
        Where nobody can be asked, naming the flag.
    """
    if options["params"] is not None and options["model_config"] is not None:
        raise ConfigError("give the model by --params NUMBER or by --model-config PATH, and not by both")
    given = options["params"] or options["model_config"]
    if given is None:
        given = _asked(
            "Model (path, llama_60m to llama_7b, or a number such as 7e9)", "--model-config or --params", asks
        )
        options["model_config"] = given
    model = _model(given)
    if options["params"] is not None and "params" not in model:
        raise ConfigError(f"--params {given}: it must be a number such as 7e9; --model-config takes a path")
    for key, question, kind in (
        ("gpus", "GPUs, of all machines", _positive),
        ("gpu_memory", "Memory of a GPU, such as 80GiB", _parsed_size),
    ):
        if options[key] is None:
            options[key] = _asked(question, f"--{key.replace('_', '-')}", asks, kind)
    if options["disk"] is None:
        free = size_text(shutil.disk_usage(output.parent).free).replace(" ", "")
        options["disk"] = _asked("Free disk for checkpoints", "--disk", asks, _parsed_size, default=free)
    if asks:
        for key, question, kind in (
            ("host_memory", "Host memory of a machine, for offload (empty: none)", _parsed_size),
            ("steps", "Steps of the run (empty: not known)", _positive),
            ("save_every", "Steps between checkpoints (empty: not known)", _positive),
        ):
            if options[key] is None:
                options[key] = click.prompt(
                    question, default="", show_default=False, value_proc=_or_none(kind), err=True
                )
    return model


def _asked(question: str, flag: str, asks: bool, kind: Callable[[str], Any] = str, default: str | None = None) -> Any:
    if not asks:
        raise ConfigError(f"{flag} is missing: give it; there is no terminal to ask on, or --yes or --json forbid it")
    return click.prompt(question, default=default, value_proc=kind, err=True)


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise click.UsageError(f"{text!r} is not a whole number above 0")
    return value


def _parsed_size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _or_none(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: kind(text) if text.strip() else None


def _command(options: dict[str, Any], output: Path) -> str:
    """The command that makes the same again, without questions."""
    words = ["ds-galore", "init"]
    defaults = {each.name: each.default for each in init.params}
    for key, value in options.items():
        if value is True:
            words.append(f"--{key.replace('_', '-')}")
        elif value is not None and value is not False and value != defaults[key]:
            shown = _size_word(value) if key in ("gpu_memory", "host_memory", "disk") else str(value)
            words += [f"--{key.replace('_', '-')}", shown]
    return shlex.join([*words, "--output", output.name])


def _size_word(size: int) -> str:
    """A size as :func:`.parse_size` reads it back."""
    for unit, factor in (("GiB", 2**30), ("GB", 10**9)):
        if size % factor == 0:
            return f"{size // factor}{unit}"
    return f"{size}B"


def _write(texts: dict[Path, str]) -> None:
    """Write all files, or leave none of the new ones behind."""
    from ds_galore.checkpoint.files import replace_file

    written: list[Path] = []
    try:
        for path, text in texts.items():
            existed = path.exists()
            replace_file(path, [text.encode()])
            written += [] if existed else [path]
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        raise


def _as_json(proposal: Proposal, machines: Machines, output: Path, beside: Path) -> dict[str, Any]:
    from dataclasses import asdict

    needs = proposal.footprint
    return {
        "output": str(output),
        "readme": str(beside),
        "choice": proposal.choice.name,
        "config": proposal.config,
        "memory": {
            "device": needs.device,
            "host": {**needs.host, "checkpoint_copy": needs.snapshot},
            "step": needs.step,
            "room": machines.room,
            "needed": needs.on_device(machines.room),
            "gpu_memory": machines.gpu_memory,
        },
        "refused": [{**asdict(each), "reason": each.reason} for each in proposal.refused],
        "checkpoints": proposal.storage,
        "notes": [*proposal.notes, *proposal.estimate.assumptions],
    }


def _show(proposal: Proposal, machines: Machines) -> None:
    for each in proposal.refused:
        click.echo(f"{each.name}, ZeRO {each.stage}: {each.reason}")
    needs = proposal.footprint
    kinds = ", ".join(f"{kind.replace('_', ' ')} {size_text(size)}" for kind, size in needs.device.items())
    click.echo(
        f"{proposal.choice.name}, ZeRO {proposal.estimate.zero_stage}: fits; of {size_text(machines.gpu_memory)} a GPU"
        f" {size_text(sum(needs.device.values()))} ({kinds}), and {size_text(max(machines.room, needs.step))} are left"
        " for activations, which are not counted"
    )
    if needs.host:
        kinds = ", ".join(f"{kind.replace('_', ' ')} {size_text(size)}" for kind, size in needs.host.items())
        click.echo(f"host memory a rank: {size_text(needs.on_host)} ({kinds}, copy {size_text(needs.snapshot)})")
    storage = proposal.storage
    click.echo(
        f"checkpoints: {storage['kept']} stay, with the one being written up to {size_text(storage['at_most'])};"
        f" a full one up to {size_text(storage['full'])}"
    )


COMMANDS = (init, config)
