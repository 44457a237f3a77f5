"""Validation loss of every update rule against AdamW on the same tokens, over several seeds.

    make quality        or        .venv/bin/python benchmarks/quality.py [--models tiny 60m] [--rules NAME ...]

Trains in fp32, one process a run, without DeepSpeed, on bytes of the standard library's sources (``--data`` for other
text). The seed decides the initial weights and the order of the samples, so that the runs of a seed differ in the rule
alone. Schedule and clipping are those of ``configs/zero3_galore.json``: linear warm-up over a tenth of the steps, then
a cosine down to a tenth; gradients clipped to a norm of 1.

Every finished run is a line of ``--results`` with all its settings, and is not repeated while these are the same: an
interrupted table is continued by the same command. The table is written to ``--table`` after each run. What the machine
has no time for is cut: see ``MODELS`` for the shapes, and the table's own first lines. ``--lrs`` runs each rule with
other learning rates instead of its own, to choose one.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import ROOT, bytes_of
from torch import Tensor, nn

sys.path.insert(0, str(ROOT / "launch"))

from text_data import SampleOrder, load_corpus

import ds_galore
from ds_galore.optim.targets import describe_model, select_targets

#: Which layers are projected: all linear ones but the head.
TARGETS = ["attn", "mlp"]


@dataclass(frozen=True)
class Model:
    """What is trained.

    Parameters
    ----------
    config
        Of ``configs/models``.
    overrides
        Keys of the configuration that are changed, to save time.
    rank, gap
        ``rank`` and ``update_proj_gap`` of the rules that project, where they set none of their own.
    batch, length
        Samples of a step, tokens of a sample.
    steps
        Optimizer steps, unless ``--steps`` says otherwise.
    variants
        Whether variants of a rule (with a comma in their names) are trained as well.
    """

    config: str
    overrides: dict[str, int]
    rank: int
    gap: int
    batch: int
    length: int
    steps: int
    variants: bool = True

    def settings(self) -> dict[str, Any]:
        """The configuration of the model."""
        shape: dict[str, Any] = json.loads((ROOT / "configs" / "models" / f"{self.config}.json").read_text())
        return {**{key: value for key, value in shape.items() if key != "architectures"}, **self.overrides}

    def describe(self, run: Mapping[str, Any]) -> str:
        """What is trained on what, in a line, given the settings of a run."""
        own, whole = run["model"], Model(self.config, {}, 0, 0, 0, 0, 0).settings()["num_hidden_layers"]
        layers = own["num_hidden_layers"]
        return (
            f"`{self.config}`: hidden {own['hidden_size']}, intermediate {own['intermediate_size']},"
            f" {layers}{f' of {whole}' * (layers != whole)} layers, vocabulary {own['vocab_size']} (bytes of"
            f" {', '.join(run['data']) or 'the standard library'}); {run['steps']} steps of {run['batch']} x"
            f" {run['length']} tokens; rank {self.rank}, update_proj_gap {self.gap}; fp32"
        )


MODELS = {
    "tiny": Model("tiny", {}, rank=64, gap=50, batch=4, length=64, steps=300),
    # Two of the eight layers, bytes for tokens, and the rules without their variants: what two cores can train in the
    # time.
    "60m": Model(
        "llama_60m",
        {"num_hidden_layers": 2, "vocab_size": 256},
        rank=128,
        gap=50,
        batch=4,
        length=64,
        steps=200,
        variants=False,
    ),
}


@dataclass(frozen=True)
class Rule:
    """An update rule in its shipped setting.

    Parameters
    ----------
    optimizer
        ``"ds_galore.NAME"``, ``"torch.AdamW"`` or ``"galore_torch.GaLoreAdamW"``.
    settings
        Its keyword arguments; for galore-torch, those of GaLore's group. A rank by energy gets the model's as ``max``.
    """

    optimizer: str
    settings: dict[str, Any] = field(default_factory=dict)

    def resolved(self, model: Model, lr: float | None) -> dict[str, Any]:
        """The settings for a model."""
        own = dict(self.settings)
        if self.optimizer != "torch.AdamW":
            own = {"rank": model.rank, "update_proj_gap": model.gap, **own}
            if isinstance(own["rank"], Mapping):
                own["rank"] = {**own["rank"], "max": own["rank"]["max"] or model.rank}
        return own if lr is None else {**own, "lr": lr}


GALORE = {"lr": 0.01, "scale": 0.25}

#: The first is what the others are compared with.
RULES = {
    # The best of 2.5e-4, 5e-4, 1e-3, 2e-3 for tiny on seed 0.
    "AdamW": Rule("torch.AdamW", {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-6, "weight_decay": 0.0}),
    "GaLoreAdamW": Rule("ds_galore.GaLoreAdamW", GALORE),
    "GaLoreAdamW, moments not re-projected": Rule("ds_galore.GaLoreAdamW", {**GALORE, "reproject_moments": False}),
    "GaLoreAdamW, svd refresh": Rule("ds_galore.GaLoreAdamW", {**GALORE, "refresh": "svd"}),
    "GaLoreAdamW, bf16 projectors": Rule("ds_galore.GaLoreAdamW", {**GALORE, "projector_dtype": "bf16"}),
    **{
        f"GaLoreAdamW, {dtype} projectors{', stochastic' * (rounding == 'stochastic')}": Rule(
            "ds_galore.GaLoreAdamW", {**GALORE, "projector_dtype": dtype, "projector_rounding": rounding}
        )
        for dtype, rounding in itertools.product(("int8", "int4"), ("nearest", "stochastic"))
    },
    "GaLoreAdamW8bit": Rule("ds_galore.GaLoreAdamW8bit", GALORE),
    "GaLoreAdamW, bf16 moments": Rule("ds_galore.GaLoreAdamW", {**GALORE, "moment_dtype": "bf16"}),
    "GaLoreAdamW, random bases": Rule("ds_galore.GaLoreAdamW", {**GALORE, "refresh": "random"}),
    "GaLoreAdamW, adaptive gap": Rule("ds_galore.GaLoreAdamW", {**GALORE, "adaptive_gap": True, "stable_overlap": 0.6}),
    "GaLoreAdamW, rank by energy 0.9": Rule("ds_galore.GaLoreAdamW", {**GALORE, "rank": {"energy": 0.9, "max": None}}),
    "GaLoreAdafactor": Rule("ds_galore.GaLoreAdafactor", GALORE),
    "APOLLOAdamW": Rule("ds_galore.APOLLOAdamW", {"lr": 0.01, "scale": 1.0, "scaling": "channel"}),
    "APOLLO-Mini": Rule("ds_galore.APOLLOAdamW", {"lr": 0.01, "scale": math.sqrt(128), "scaling": "tensor", "rank": 1}),
    "FiraAdamW": Rule("ds_galore.FiraAdamW", GALORE),
    "galore-torch GaLoreAdamW": Rule("galore_torch.GaLoreAdamW", {**GALORE, "proj_type": "std"}),
}
BASELINE = next(iter(RULES))
#: A variant that every model is trained with.
NOT_CARRIED = "GaLoreAdamW, moments not re-projected"

WARM_UP, LEAST_RATE, CLIP = 0.1, 0.1, 1.0
#: Tokens that the validation loss is the mean of, and how many samples are evaluated at once.
VALIDATION_TOKENS, VALIDATION_BATCH = 16384, 32
#: A run has diverged if a loss is not finite, if it ends above a uniform guess, or if the mean training loss of its
#: last tenth is so many times the least of any tenth.
RISE = 1.2
#: Of the lines of ``--results``; another number makes old lines count no more.
VERSION = 1


# ---------------------------------------------------------------------- one run


def build_optimizer(rule: Rule, settings: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a run."""
    own = {key: tuple(value) if key == "betas" else value for key, value in settings.items()}
    package, name = rule.optimizer.split(".")
    if package == "torch":
        return getattr(torch.optim, name)(model.parameters(), **own)
    if package == "galore_torch":
        import galore_torch

        chosen, _ = select_targets(describe_model(model), TARGETS)
        projected = [parameter for parameter in model.parameters() if parameter in chosen]
        others = [parameter for parameter in model.parameters() if parameter not in chosen]
        lr = own.pop("lr")
        groups: list[dict[str, Any]] = [{"params": others}, {"params": projected, **own}]
        return getattr(galore_torch, name)(groups, lr=lr, no_deprecation_warning=True)
    return getattr(ds_galore, name)(model.parameters(), model=model, target_modules=TARGETS, **own)


def learning_rate(step: int, steps: int) -> float:
    """The factor on the learning rate at a step, counted from 0; as DeepSpeed's WarmupCosineLR, but never zero."""
    warm_up = max(2, int(steps * WARM_UP))
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return LEAST_RATE + (1.0 - LEAST_RATE) * 0.5 * (1.0 + math.cos(math.pi * done))


@torch.no_grad()
def validate(model: nn.Module, windows: Tensor) -> float:
    """The mean loss of a token."""
    losses = [
        float(model(input_ids=part.long(), labels=part.long()).loss) * len(part)
        for part in torch.split(windows, VALIDATION_BATCH)
    ]
    return sum(losses) / len(windows)


def has_diverged(losses: list[float], validation: float, vocabulary: int) -> bool:
    """Whether a run's losses are those of one that diverged."""
    if not all(map(math.isfinite, [*losses, validation])) or validation > math.log(vocabulary):
        return True
    size = max(1, len(losses) // 10)
    tenths = [statistics.fmean(losses[begin : begin + size]) for begin in range(0, len(losses), size)]
    return statistics.fmean(losses[-size:]) > RISE * min(tenths)


def train(run: dict[str, Any], threads: int) -> dict[str, Any]:
    """Train once and return the run with its results."""
    from transformers import LlamaConfig, LlamaForCausalLM

    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(threads)
    settings, steps = run["settings"], run["settings"]["steps"]
    corpus = load_corpus(settings["data"], tokenizer=None, length=settings["length"])
    torch.manual_seed(settings["seed"])
    config = LlamaConfig(**settings["model"])
    model = LlamaForCausalLM(config)
    optimizer = build_optimizer(RULES[run["rule"]], settings["optimizer_settings"], model)
    order = SampleOrder(len(corpus.train), seed=settings["seed"])
    base, losses, seconds = settings["optimizer_settings"]["lr"], [], []
    began, worked = time.perf_counter(), time.process_time()
    for step in range(steps):
        tokens = corpus.train[order.take(settings["batch"])].long()
        for group in optimizer.param_groups:
            group["lr"] = base * learning_rate(step, steps)
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        begin = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            break
    validation = validate(model, corpus.validation[: VALIDATION_TOKENS // settings["length"]])
    return {
        **run,
        "validation_loss": validation if math.isfinite(validation) else None,
        "diverged": has_diverged(losses, validation, config.vocab_size),
        "losses": [round(each, 4) if math.isfinite(each) else None for each in losses],
        "state_bytes": sum(bytes_of(state) for state in optimizer.state.values()),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "optimizer_step_seconds": statistics.median(seconds),
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - worked,
        "threads": threads,
        "version": ds_galore.__version__,
    }


# ---------------------------------------------------------------------- all of them


def plan(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The runs of a table, seed by seed, so that an unfinished one has something of every rule."""
    runs = []
    for seed, name, lr, (label, rule) in itertools.product(
        arguments.seeds, arguments.models, arguments.lrs or [None], RULES.items()
    ):
        if label not in arguments.rules:
            continue
        model = MODELS[name]
        if "," in label and not model.variants and label != NOT_CARRIED:
            continue
        settings = {
            "version": VERSION,
            "model": model.settings(),
            "data": arguments.data,
            "batch": arguments.batch or model.batch,
            "length": arguments.length or model.length,
            "steps": arguments.steps or model.steps,
            "schedule": [WARM_UP, LEAST_RATE],
            "clip": CLIP,
            "validation_tokens": VALIDATION_TOKENS,
            "seed": seed,
            "optimizer": rule.optimizer,
            "optimizer_settings": rule.resolved(model, lr),
        }
        runs.append(
            {
                "key": hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16],
                "name": name,
                "rule": label,
                "label": label if lr is None else f"{label}, lr {lr:g}",
                "settings": settings,
            }
        )
    return runs


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Finished runs by their key; a line that an interruption cut off is left out."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[record["key"]] = record
    return found


def outcomes(runs: list[dict[str, Any]], jobs: int, threads: int) -> Iterator[tuple[dict[str, Any], Any]]:
    """Each run with its record, or with the exception that it ended in, as they finish."""
    if jobs == 1:
        for run in runs:
            try:
                yield run, train(run, threads)
            except Exception as error:  # noqa: BLE001 - a rule that fails must not end the others
                yield run, error
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures: dict[Future[dict[str, Any]], dict[str, Any]] = {pool.submit(train, run, threads): run for run in runs}
        try:
            for future in as_completed(futures):
                error = future.exception()
                yield futures[future], future.result() if error is None else error
        except BaseException:  # the user's interruption
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def run_all(runs: list[dict[str, Any]], arguments: argparse.Namespace) -> dict[str, str]:
    """Train what is missing; by rule, why one could not be trained."""
    done = read_results(arguments.results)
    missing = [run for run in runs if run["key"] not in done]
    threads = arguments.threads or max(1, (os.cpu_count() or 1) // arguments.jobs)
    print(
        f"{len(runs)} runs, {len(runs) - len(missing)} of them finished before; {arguments.jobs} at a time, {threads}"
        " threads each",
        file=sys.stderr,
    )
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    failures: dict[str, str] = {}
    began = time.perf_counter()
    for number, (run, outcome) in enumerate(outcomes(missing, arguments.jobs, threads), start=1):
        title = f"{run['name']}, seed {run['settings']['seed']}, {run['label']}"
        if isinstance(outcome, BaseException):
            failures[run["label"]] = f"{type(outcome).__name__}: {str(outcome).splitlines()[0] if str(outcome) else ''}"
            print(f"{title}: {failures[run['label']]}", file=sys.stderr)
            if arguments.debug:
                traceback.print_exception(outcome)
            continue
        with arguments.results.open("a") as stream:
            stream.write(json.dumps(outcome) + "\n")
        write_table(runs, failures, arguments)
        left = (time.perf_counter() - began) / number * (len(missing) - number) / 60
        loss = outcome["validation_loss"]
        print(
            f"[{number}/{len(missing)}, {left:.0f} min left] {title}: {loss if loss is None else round(loss, 4)}"
            f"{', diverged' * outcome['diverged']} in {outcome['seconds']:.0f} s",
            file=sys.stderr,
        )
    return failures


def write_table(runs: list[dict[str, Any]], failures: Mapping[str, str], arguments: argparse.Namespace) -> str:
    """The tables in Markdown, also written to ``--table``."""
    done = read_results(arguments.results)
    parts = []
    for name in arguments.models:
        own = [run for run in runs if run["name"] == name]
        records = [done[run["key"]] for run in own if run["key"] in done]
        if records:
            parts.append(_table(MODELS[name], own, {record["key"]: record for record in records}))
    if failures:
        parts.append("\n".join(["Not trained:", "", *(f"- {label}: {why}" for label, why in failures.items())]))
    text = "\n\n".join(parts) + "\n"
    arguments.table.parent.mkdir(parents=True, exist_ok=True)
    arguments.table.write_text(text)
    return text


def _table(model: Model, runs: list[dict[str, Any]], done: Mapping[str, dict[str, Any]]) -> str:
    settings = runs[0]["settings"]
    by_label: dict[str, dict[int, dict[str, Any]]] = {}
    for run in runs:
        if run["key"] in done:
            by_label.setdefault(run["label"], {})[run["settings"]["seed"]] = done[run["key"]]
    seeds = sorted({run["settings"]["seed"] for run in runs})
    lines = [
        f"{model.describe(settings)}; seeds {', '.join(map(str, seeds))}.",
        "",
        f"| rule | lr | validation loss | least .. greatest | to {BASELINE} | diverged | state MB | step ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    baseline = by_label.get(BASELINE, {})
    for label, records in by_label.items():
        losses = {seed: each["validation_loss"] for seed, each in records.items()}
        finite = [loss for loss in losses.values() if loss is not None]
        pairs = [
            100.0 * (loss / baseline[seed]["validation_loss"] - 1.0)
            for seed, loss in losses.items()
            if loss is not None and seed in baseline and baseline[seed]["validation_loss"] is not None
        ]
        diverged = sum(each["diverged"] for each in records.values())
        one = next(iter(records.values()))
        cells = [
            label + ("" if len(records) == len(seeds) else f" ({len(records)} of {len(seeds)} seeds)"),
            f"{one['settings']['optimizer_settings']['lr']:g}",
            f"{statistics.fmean(finite):.4f}" if finite else "not finite",
            f"{min(finite):.4f} .. {max(finite):.4f}" if finite else "",
            f"{statistics.fmean(pairs):+.2f}% ({min(pairs):+.2f} .. {max(pairs):+.2f})" if pairs else "",
            f"{diverged} of {len(records)}" if diverged else "none",
            f"{one['state_bytes'] / 1e6:.1f}",
            f"{1e3 * statistics.median(each['optimizer_step_seconds'] for each in records.values()):.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=list(MODELS))
    add("--rules", nargs="+", choices=RULES, default=list(RULES), metavar="NAME", help=f"of {', '.join(RULES)}")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--steps", type=int, help="optimizer steps; without it, the model's own number")
    add("--batch", type=int, help="samples a step; without it, the model's own number")
    add("--length", type=int, help="tokens a sample; without it, the model's own number")
    add("--lrs", nargs="+", type=float, help="learning rates instead of each rule's own")
    add("--data", nargs="*", default=[], metavar="PATH", help="as launch/train.py takes it")
    add("--jobs", type=int, default=1, help="runs at the same time")
    add("--threads", type=int, help="torch's threads in a run; without it, the cores are divided among the jobs")
    add("--results", type=Path, default=ROOT / "runs" / "quality.jsonl", help="finished runs, read and appended to")
    add("--table", type=Path, default=ROOT / "runs" / "quality.md", help="the table")
    add("--debug", action="store_true", help="show tracebacks")
    return parser.parse_args(argv)


def main() -> int:
    """Train what is missing and print the table; 1 if a rule could not be trained."""
    arguments = parse_arguments()
    runs = plan(arguments)
    failures = run_all(runs, arguments)
    print(write_table(runs, failures, arguments))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
