"""The text beside a configuration that ``ds-galore init`` writes: JSON has no comments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ds_galore import __version__
from ds_galore.cli.output import size_text
from ds_galore.cli.proposing import CHOICES, Machines, Proposal, Run
from ds_galore.wording import uses

__all__ = ["sidecar"]

_KINDS = {
    "weights": "weights",
    "gradients": "gradients",
    "master_weights": "master weights",
    "moments": "moments",
    "projectors": "projectors",
    "reduction_bucket": "DeepSpeed's buffer of gradients on their way",
    "gathered_weights": "weights gathered at once",
}


def sidecar(proposal: Proposal, run: Run, machines: Machines, path: Path, command: str) -> str:
    """What a configuration is for, what it takes, and why it is as it is, as Markdown.

    Parameters
    ----------
    proposal, run, machines
        What is proposed, for what, on what.
    path
        The configuration's own.
    command
        That makes the same again.
    """
    sections = (
        ("", _head(proposal, run, machines, path, command)),
        ("Memory", _memory(proposal, machines)),
        ("What was tried, in this order", _tried(proposal)),
        ("Keys", _keys(proposal, run)),
        ("Checkpoints", _checkpoints(proposal)),
        ("What it uses", (f"- {each}" for each in uses(proposal.config))),
        ("Not counted, and assumed", _assumed(proposal, machines)),
    )
    return "\n".join(f"## {title}\n\n{_joined(lines)}" if title else _joined(lines) for title, lines in sections)


def _joined(lines: Iterable[str]) -> str:
    return "\n".join(lines) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _head(proposal: Proposal, run: Run, machines: Machines, path: Path, command: str) -> Iterator[str]:
    key, value = next(iter(run.model.items()))
    model = f"--{key.replace('_', '-')} {value}"
    yield f"# {path.name}"
    yield ""
    yield (
        f"Made by ds-galore {__version__} for {proposal.estimate.parameters:,} parameters on {machines.gpus}"
        f" GPU{'s' * (machines.gpus > 1)} of {size_text(machines.gpu_memory)} ({machines.gpu_memory / 2**30:.1f} GiB)."
        " It has not been run. Made again by"
    )
    yield ""
    yield from ("```sh", command, "```", "")
    yield "and looked at with"
    yield ""
    yield from (
        "```sh",
        f"ds-galore config check {path.name}",
        f"ds-galore estimate --config {path.name} {model} --world-size {machines.gpus}",
        "```",
    )


def _memory(proposal: Proposal, machines: Machines) -> Iterator[str]:
    needs = proposal.footprint
    kinds = [kind for kind in _KINDS if kind in needs.device or kind in needs.host]
    rows = [
        [_KINDS[kind], *(size_text(where[kind]) if kind in where else "-" for where in (needs.device, needs.host))]
        for kind in kinds
    ]
    rows.append(["a copy for checkpoints", "-", size_text(needs.snapshot)])
    rows.append(["left for activations, or a step's own needs", size_text(max(machines.room, needs.step)), "-"])
    total = needs.on_device(machines.room)
    rows.append([f"in all, of {size_text(machines.gpu_memory)}", size_text(total), size_text(needs.on_host)])
    yield "Bytes of a rank, in powers of 1000; the fullest rank's."
    yield ""
    yield from _table(["", "GPU", "host"], rows)
    if needs.step:
        yield ""
        yield (
            f"A step needs {size_text(needs.step)} for a moment (gradients in the masters' precision, whole"
            " projectors), when activations are gone."
        )


def _tried(proposal: Proposal) -> Iterator[str]:
    refused = {(each.name, each.stage): each.reason for each in proposal.refused}
    stage = proposal.estimate.zero_stage
    rows = [[name, str(number), reason] for (name, number), reason in refused.items()]
    rows.append([proposal.choice.name, str(stage), "**fits, and is taken**"])
    yield from _table(["", "ZeRO", ""], rows)
    yield ""
    yield "The order is from what costs nothing to what costs precision, and then time:"
    yield ""
    for each in CHOICES:
        yield f"- {each.name}: {each.why}."
    yield ""
    yield (
        "Of each, ZeRO 2 comes before 3: it sends a third less, and every rank has whole weights; 1 would send no less"
        " than 2 and keep more. Not tried: other rules (APOLLO keeps no projectors; its loss was behind GaLore's where"
        " we compared, docs/performance.md), smaller ranks (--rank), bf16 moments. With --keep-masters, host memory"
        " is tried before fp32 masters are given up."
    )


def _keys(proposal: Proposal, run: Run) -> Iterator[str]:
    config = proposal.config
    params, zero = config["optimizer"]["params"], config["zero_optimization"]
    rows = [
        ["`train_micro_batch_size_per_gpu`", str(run.micro_batch), "raise it while memory lasts"],
        ["`optimizer.type`", config["optimizer"]["type"], proposal.choice.why],
        [
            "`lr`, `scale`, `update_proj_gap`",
            f"{params['lr']}, {params['scale']}, {params['update_proj_gap']}",
            "of GaLore's own scripts for pretraining models of this size; fine-tuning wants a smaller `lr`",
        ],
        [
            "`rank`",
            str(params["rank"]),
            "as asked for"
            if run.rank is not None
            else "a quarter of the shorter side that most projected matrices have",
        ],
        ["`proj_type`", "right", "moments stay where their rows are, and nothing is sent for them"],
        ["`target_modules`", "all-linear", "all linear layers but the head"],
        ["`zero_optimization.stage`", str(zero["stage"]), "see above"],
    ]
    why = "one of three sets, the most generous that fits: larger ones are faster and take memory"
    for key in ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_max_live_parameters", "sub_group_size"):
        if key in zero:
            rows.append([f"`{key}`", f"{zero[key]:,}", why])
            why = "of the same set"
    if "scheduler" in config:
        rows.append(
            ["`scheduler`", "WarmupCosineLR", f"a tenth of {run.steps} steps is warm-up; down to a tenth of `lr`"]
        )
    else:
        rows.append(["`scheduler`", "none", "--steps was not given; the rate is constant"])
    yield from _table(["key", "value", "why"], rows)


def _checkpoints(proposal: Proposal) -> Iterator[str]:
    settings, storage = proposal.config["ds_galore"]["checkpoint"], proposal.storage
    disk = f", of {size_text(storage['disk'])}" if storage["disk"] is not None else ""
    fulls = f", every {settings['full_every']}th full" if "full_every" in settings else ""
    difference = f", a difference up to {size_text(storage['difference'])}" if fulls else ""
    yield (
        f"`{settings['mode']}`{fulls}. A full one takes up to"
        f" {size_text(storage['full'])}{difference}; {storage['kept']} that"
        f" stay, their base and the one being written take up to {size_text(storage['at_most'])}{disk}."
    )
    yield ""
    yield (
        "accelerate and the Trainer make a save directory for each checkpoint: take `keep_last` out there, and set"
        " `total_limit` or `save_total_limit`."
    )


def _assumed(proposal: Proposal, machines: Machines) -> Iterator[str]:
    yield (
        f"- Activations are not counted: {size_text(machines.room)} of a GPU are left for them, for what CUDA takes"
        " itself, and for fragmentation (--activations). They grow with batch and length; gradient checkpointing makes"
        " them smaller."
    )
    for each in (*proposal.notes, *proposal.estimate.assumptions):
        yield f"- {each[:1].upper()}{each[1:]}."
