"""The words for what a configuration uses. Imports pydantic alone, through its neighbours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ds_galore.config import GALORE_OPTIMIZERS, CheckpointConfig, section, validate
from ds_galore.parameters import OPTIMIZERS, EnergyRank, LowRankParameters, named

__all__ = ["listed", "uses"]

_RULES = {
    "GaLoreAdamW": "AdamW on low-rank gradients",
    "GaLoreAdamW8bit": "AdamW on low-rank gradients, with moments in 8 bits",
    "GaLoreAdafactor": "Adafactor on low-rank gradients",
    "APOLLOAdamW": "the full gradient, scaled as AdamW scales a low-rank image of it",
    "FiraAdamW": "AdamW on low-rank gradients, and the rest of the gradient scaled likewise",
}
_SIDES = {
    "right": "from the right",
    "left": "from the left, which sends low-rank gradients at every step",
    "std": "from the right where rows >= columns, else from the left, which sends low-rank gradients at every step",
    "reverse_std": "from the left where rows >= columns, which sends low-rank gradients at every step, else the right",
}
_REFRESHES = {
    "subspace": "by block power iteration from the basis in use",
    "svd": "by a full SVD of the gathered gradient",
    "random": "drawn at random from the seed",
}
_STAGES = {
    0: "no ZeRO: every rank holds everything",
    1: "ZeRO 1: master weights and optimizer states are partitioned over the ranks",
    2: "ZeRO 2: master weights, optimizer states and gradients are partitioned over the ranks",
    3: "ZeRO 3: weights, gradients, master weights and optimizer states are partitioned over the ranks",
}
_MONITORS = ("tensorboard", "wandb", "comet", "csv_monitor")


def listed(words: Sequence[str], last: str = "and") -> str:
    """Words as a sentence lists them."""
    return " ".join((", ".join(words[:-1]), last, words[-1])) if len(words) > 1 else "".join(words)


def uses(config: Mapping[str, Any]) -> Iterator[str]:
    """What a job with a configuration in which nothing conflicts does, a line for each part of it."""
    yield from _optimizer(config)
    yield _precision(config)
    yield from _zero(config)
    yield _batch(config)
    yield _schedule(config)
    yield _checkpoints(config)
    monitors = [name for name in _MONITORS if section(config, name).get("enabled") is True]
    log = section(config, "ds_galore", "monitor").get("log")
    if monitors or log is not None:
        yield f"monitors: {listed([*monitors, *([f'the file {log}'] if log is not None else [])])}"


def _optimizer(config: Mapping[str, Any]) -> Iterator[str]:
    optimizer = section(config, "optimizer")
    kind = optimizer.get("type")
    if kind is None:
        yield "optimizer: the one that the program passes"
        return
    params = {key: value for key, value in section(optimizer, "params").items() if value != "auto"}
    if kind not in GALORE_OPTIMIZERS:
        rate = f", learning rate {params['lr']}" if "lr" in params else ""
        yield f"optimizer: {kind}, DeepSpeed's or torch's own, on full gradients{rate}"
        return
    name, params = named(kind, params)
    values = validate(OPTIMIZERS[name], params, where="optimizer.params")
    called = kind if kind == name else f"{kind} ({name})"
    rate = "as relative_step says" if getattr(values, "relative_step", False) else str(values.lr)
    if section(optimizer, "params").get("lr") == "auto":
        rate = '"auto"'
    yield f"optimizer: {called}: {_RULES[name]}; learning rate {rate}, weight decay {values.weight_decay}"
    yield f"projected: {_projected(values)}"
    yield f"bases: {_bases(values)}"
    if values.gradients == "lowrank":
        yield (
            "gradients: of projected matrices low-rank ones alone, lowered when they arrive; whole on steps that renew"
            " their bases, which are drawn at random until then"
        )
    yield f"states: {_states(values, name)}"


def _projected(values: LowRankParameters) -> str:
    rank = values.rank
    if isinstance(rank, EnergyRank):
        how, most = f"at the rank that captures {rank.energy:.0%} of a gradient, at most {rank.max}", str(rank.max)
    elif rank is None:
        how, most = "at the rank of the program's parameter groups", "it"
    else:
        how, most = f"at rank {rank}", str(rank)
    return (
        f"matrices of {_targets(values.target_modules)} {how}, {_SIDES[values.proj_type]}, their updates times"
        f" {values.scale}; those with a side no longer than {most}, and all else, are trained unprojected"
    )


def _targets(targets: str | list[str] | None) -> str:
    if targets is None or (isinstance(targets, str) and targets.replace("_", "-") == "all-linear"):
        return "all linear layers but the head"
    if isinstance(targets, str):
        return f"modules whose whole names match {targets!r}"
    return f"modules whose names contain or match {listed([repr(each) for each in targets], 'or')}"


def _bases(values: LowRankParameters) -> str:
    parts = [f"new every {values.update_proj_gap} steps, {_REFRESHES[values.refresh]}"]
    if values.adaptive_gap:
        parts.append(f"up to {values.max_gap_factor} times as seldom while a basis overlaps by {values.stable_overlap}")
    parts.append("different matrices on different steps" if values.stagger_refresh else "all on the same step")
    if values.refresh_budget is not None:
        parts.append(f"{values.refresh_budget} at most on one")
    if values.first_basis == "random" and values.refresh != "random":
        parts.append("at random until a matrix's first turn")
    parts.append("moments are carried over" if values.reproject_moments else "moments are left as they are")
    return "; ".join(parts)


def _states(values: LowRankParameters, name: str) -> str:
    moments = f"moments {values.moment_dtype}"
    if name == "GaLoreAdafactor":
        beta1 = getattr(values, "beta1", None)
        moments = "factored second moments" + (f", first moments {values.moment_dtype}" if beta1 is not None else "")
    elif values.unprojected_moment_dtype not in (None, values.moment_dtype):
        moments += f" ({values.unprojected_moment_dtype} of what is not projected)"
    if values.refresh == "random":
        return f"{moments}, no projectors"
    where = {
        "auto": "whole on every rank or in parts, whichever takes less",
        "replicated": "whole on every rank",
        "sharded": "in parts on the ranks, gathered for the step",
    }[values.projector_storage]
    return f"{moments}, projectors {values.projector_dtype}, {where}"


def _precision(config: Mapping[str, Any]) -> str:
    enabled = {name: section(config, name).get("enabled", False) for name in ("bf16", "fp16")}
    chosen = [name for name, value in enabled.items() if value is True]
    stage = section(config, "zero_optimization").get("stage", 0)
    if not chosen:
        auto = [name for name, value in enabled.items() if value == "auto"]
        return f"precision: {' or '.join([*auto, 'fp32'])}" + (', as "auto" turns out' if auto else " all through")
    name = chosen[0]
    bf16 = section(config, "bf16")
    if name == "bf16" and bf16.get("bf16_master_weights_and_grads"):
        rounding = section(config, "optimizer", "params").get("stochastic_rounding")
        how = "rounded stochastically" if rounding else "rounded to the nearest"
        return f"precision: bf16 weights and gradients, no fp32 masters, updates {how}"
    masters = "fp32 master weights" if stage or name == "fp16" else "fp32 masters"
    return f"precision: {name} weights and gradients, {masters}"


def _zero(config: Mapping[str, Any]) -> Iterator[str]:
    zero = section(config, "zero_optimization")
    stage = zero.get("stage", 0)
    text = _STAGES.get(stage, f"ZeRO {stage}")
    if stage:
        text += f"; gradients are reduced in buckets of {_number(zero.get('reduce_bucket_size', 500_000_000))} elements"
    if stage == 3:
        text += f", and {_number(zero.get('sub_group_size', 1_000_000_000))} elements at a time are updated"
    yield text
    moved = []
    if stage and section(zero, "offload_optimizer").get("device") == "cpu":
        moved += ["master weights", "gradients", "optimizer states"]
    if stage == 3 and section(zero, "offload_param").get("device") == "cpu":
        moved.append("weights")
    yield f"offload: {listed(moved)} in host memory" if moved else "offload: none"


def _number(value: object) -> str:
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value)


def _batch(config: Mapping[str, Any]) -> str:
    micro, whole = config.get("train_micro_batch_size_per_gpu"), config.get("train_batch_size")
    steps = config.get("gradient_accumulation_steps", 1)
    parts = []
    if micro is not None:
        parts.append(f"{micro} sample{'s' * (micro != 1)} a rank at a time")
    if whole is not None:
        parts.append(f"{whole} samples a step of all ranks")
    parts.append("no accumulation" if steps == 1 else f"{steps} accumulated a step")
    clip = config.get("gradient_clipping", 0)
    parts.append(f"gradients clipped at norm {clip}" if clip else "no clipping")
    return f"batch: {', '.join(parts)}"


def _schedule(config: Mapping[str, Any]) -> str:
    scheduler = section(config, "scheduler")
    if not scheduler:
        return "schedule: none, unless the program has one"
    params = section(scheduler, "params")
    given = ", ".join(f"{key} {value}" for key, value in params.items())
    return f"schedule: {scheduler.get('type')}" + (f" ({given})" if given else "")


def _checkpoints(config: Mapping[str, Any]) -> str:
    if section(config, "ds_galore").get("checkpoint") is None:
        return "checkpoints: DeepSpeed's own, where the program saves (there is no ds_galore.checkpoint)"
    settings = validate(CheckpointConfig, section(config, "ds_galore", "checkpoint"), where="ds_galore.checkpoint")
    since = {"differential": "the last full one", "incremental": "the one before"}.get(settings.mode)
    if since is None or settings.full_every == 1:
        parts = ["every one full"]
    else:
        parts = [f"{settings.mode}: every {settings.full_every}th is full, the others hold what changed since {since}"]
    parts.append("written in the background" if settings.asynchronous else "written before save_checkpoint returns")
    stays = "all of them" if settings.keep_last is None else f"the newest {settings.keep_last}"
    if settings.keep_every is not None:
        stays += f" and those of every {settings.keep_every}th step"
    local = section(config, "checkpoint").get("use_node_local_storage")
    where = f"{'each node its own ranks, ' if local else ''}in the directory that the program saves to"
    parts.append(f"{where}, where {stays} stay")
    parts.append(f"{settings.compression.codec} {settings.compression.level}")
    if settings.state_dtype != "exact":
        parts.append(f"moments stored as {settings.state_dtype}, which loses digits")
    return f"checkpoints: ds_galore's, {'; '.join(parts)}"
