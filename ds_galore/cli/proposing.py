"""Which configuration to start from on given machines: the first of a list of choices that fits.

The choices stand in the order in which they are tried: from what costs nothing to what costs precision or time. The
figures are the planner's, of the very configuration that is proposed. Imports torch only for a model's own shapes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ds_galore.cli.described import job_of, settings_of
from ds_galore.cli.output import size_text
from ds_galore.errors import ConfigError
from ds_galore.tools.estimate import Estimate, Job, estimate
from ds_galore.tools.footprint import Footprint, footprint
from ds_galore.tools.storage import Schedule, peak_storage

__all__ = ["Choice", "Machines", "Proposal", "Refused", "Run", "propose"]

#: Of host memory and of the disk, what is planned with.
SHARE = 0.9
#: The most checkpoints that stay, where the disk has room for more.
MOST_KEPT = 5
#: From so many parameters on GaLore's own scripts halve the rate and refresh less often (scripts/benchmark_c4).
LARGE = 3_000_000_000
MOST_GPUS = 4096


@dataclass(frozen=True)
class Machines:
    """What there is to train on; sizes in bytes.

    Parameters
    ----------
    gpus, gpus_per_machine
        In all, and of one machine.
    gpu_memory, room
        Of a GPU, and how much of it is left for activations and all else that is not counted.
    host_memory
        Of a machine; None where it is not known, so that nothing can be offloaded to it.
    disk
        Free, for checkpoints; None where it is not known.
    """

    gpus: int
    gpu_memory: int
    room: int
    gpus_per_machine: int
    host_memory: int | None = None
    disk: int | None = None


@dataclass(frozen=True)
class Run:
    """What is to be trained; ``steps`` and ``save_every`` are None where they are not known yet.

    With ``keep_masters``, fp32 masters are not given up before host memory is tried.
    """

    model: Mapping[str, Any]
    precision: str = "bf16"
    rank: int | None = None
    micro_batch: int = 1
    accumulation: int = 1
    keep_masters: bool = False
    steps: int | None = None
    save_every: int | None = None


@dataclass(frozen=True)
class Choice:
    """A way to save memory, with what it costs."""

    name: str
    optimizer: str
    why: str
    params: Mapping[str, Any] = field(default_factory=dict)
    bf16: Mapping[str, Any] = field(default_factory=dict)
    offload: tuple[str, ...] = ()
    stages: tuple[int, ...] = (2, 3)


CHOICES = (
    Choice(
        "GaLoreAdamW, fp32 moments",
        "GaLoreAdamW",
        "nothing is given up: fp32 masters, moments and projectors",
    ),
    Choice(
        "GaLoreAdamW8bit, fp32 masters",
        "GaLoreAdamW8bit",
        "moments and projectors in 8 bits: their loss was within the spread of seeds where it was measured, and a step"
        " takes longer; needs bitsandbytes",
    ),
    Choice(
        "GaLoreAdamW8bit, bf16 without fp32 masters",
        "GaLoreAdamW8bit",
        "weights have 8 bits of mantissa and no more; updates are rounded to them stochastically, so that small ones"
        " count in the mean",
        params={"stochastic_rounding": True},
        bf16={"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
    ),
    Choice(
        "GaLoreAdamW, optimizer offloaded",
        "GaLoreAdamW",
        "masters, moments and gradients in host memory: every digit is kept, but the step is computed by CPUs",
        offload=("offload_optimizer",),
    ),
    Choice(
        "GaLoreAdamW8bit, optimizer offloaded",
        "GaLoreAdamW8bit",
        "the same with 8-bit moments, for less host memory",
        offload=("offload_optimizer",),
    ),
    Choice(
        "GaLoreAdamW, optimizer and weights offloaded",
        "GaLoreAdamW",
        "weights come from host memory too, layer by layer: the slowest",
        offload=("offload_optimizer", "offload_param"),
        stages=(3,),
    ),
    Choice(
        "GaLoreAdamW8bit, optimizer and weights offloaded",
        "GaLoreAdamW8bit",
        "the same with 8-bit moments, for less host memory",
        offload=("offload_optimizer", "offload_param"),
        stages=(3,),
    ),
)
#: Sizes of DeepSpeed's buffers in elements, from generous to tight: reduction, prefetch, gathered weights, sub-groups.
BUFFERS = (
    (200_000_000, 50_000_000, 1_000_000_000, 1_000_000_000),
    (50_000_000, 50_000_000, 300_000_000, 300_000_000),
    (20_000_000, 20_000_000, 100_000_000, 100_000_000),
)


@dataclass(frozen=True)
class Refused:
    """A choice that does not fit, and by how many bytes a GPU or a machine."""

    name: str
    offloads: bool
    stage: int
    needs: int
    missing: int
    where: str

    @property
    def reason(self) -> str:
        """The same in words."""
        if self.where == "unknown host":
            return f"host memory is not known; needs {size_text(self.needs)} a machine (--host-memory)"
        place = {"gpu": "a GPU", "host": "of host memory a machine"}[self.where]
        return f"needs {size_text(self.needs)} {place}, {size_text(self.missing)} too much"


@dataclass(frozen=True)
class Proposal:
    """The configuration that is proposed, and how it was come to."""

    config: dict[str, Any]
    choice: Choice
    footprint: Footprint
    estimate: Estimate
    refused: list[Refused]
    notes: list[str]
    storage: dict[str, Any]


def propose(run: Run, machines: Machines) -> Proposal:
    """The first choice that fits, with the most generous buffers that do.

    Raises
    ------
    ConfigError
        If none does, with how much is missing and what would help.
    DataError
        For a model that cannot be read.
    """
    model = _Model(run)
    refused: list[Refused] = []
    for choice, stage in _tried(run):
        found = _fitting(model, machines, choice, stage)
        if isinstance(found, Refused):
            refused.append(found)
            continue
        config, job, needs = found
        notes: list[str] = []
        known = estimate(job)
        storage = _checkpoints(config, known, needs, run, machines, notes)
        return Proposal(config, choice, needs, known, refused, [*notes, *model.notes(job)], storage)
    raise ConfigError(_nothing_fits(model, machines, refused))


def _tried(run: Run) -> Iterator[tuple[Choice, int]]:
    for choice in CHOICES:
        if not choice.bf16 or (run.precision == "bf16" and not run.keep_masters):
            for stage in choice.stages:
                yield choice, stage


def _fitting(
    model: _Model, machines: Machines, choice: Choice, stage: int
) -> tuple[dict[str, Any], Job, Footprint] | Refused:
    for sizes in BUFFERS:
        config = model.config(choice, stage, sizes, machines.gpus)
        job = model.job(config, machines.gpus)
        needs = footprint(config, job)
        on_device = needs.on_device(machines.room)
        if on_device <= machines.gpu_memory:
            break
    else:
        return Refused(choice.name, bool(choice.offload), stage, on_device, on_device - machines.gpu_memory, "gpu")
    if choice.offload:
        on_host = round(needs.on_host * machines.gpus_per_machine / SHARE)
        if machines.host_memory is None:
            return Refused(choice.name, True, stage, on_host, 0, "unknown host")
        if on_host > machines.host_memory:
            return Refused(choice.name, True, stage, on_host, on_host - machines.host_memory, "host")
    return config, job, needs


def _nothing_fits(model: _Model, machines: Machines, refused: Sequence[Refused]) -> str:
    """One line about how much is missing, and what would help."""
    on_gpus = sorted((each for each in refused if each.where == "gpu"), key=lambda each: each.needs)
    smallest, plain = on_gpus[0], next(each for each in on_gpus if not each.offloads)  # those without fail on GPUs
    parts = [
        f"nothing fits {machines.gpus} GPU{'s' * (machines.gpus > 1)} of {size_text(machines.gpu_memory)}"
        f" with {size_text(machines.room)} left for activations",
        f"the smallest without offload ({plain.name}, ZeRO {plain.stage}) needs {size_text(plain.needs)} a GPU,"
        f" {size_text(plain.missing)} more than there is",
    ]
    more = _enough_gpus(model, machines)
    helps = []
    if more is not None:
        helps.append(f"{more} such GPUs")
    host = [each for each in refused if each.where in ("host", "unknown host")]
    if host:
        least = min(host, key=lambda each: each.needs)
        gigabytes = math.ceil(least.needs / 1e8) / 10
        helps.append(f"--host-memory {gigabytes:g}GB a machine or more, to offload to it")
    elif smallest is not plain:
        parts.append(
            f"with all of it offloaded a GPU still needs {size_text(smallest.needs)}, {size_text(smallest.missing)}"
            " more than it has"
        )
    if machines.room > machines.gpu_memory // 10:
        helps.append("less room for --activations (smaller batches, gradient checkpointing)")
    return "; ".join([*parts, f"what would help: {' or '.join(helps)}"]) if helps else "; ".join(parts)


def _enough_gpus(model: _Model, machines: Machines) -> int | None:
    """A number of GPUs on which something fits without offload."""
    gpus = machines.gpus
    while gpus < MOST_GPUS:
        gpus *= 2
        more = Machines(gpus, machines.gpu_memory, machines.room, machines.gpus_per_machine)
        for choice, stage in _tried(model.run):
            if not choice.offload and not isinstance(_fitting(model, more, choice, stage), Refused):
                return gpus
    return None


# ---------------------------------------------------------------------- configurations


class _Model:
    """The model, its rank, and the configurations that are tried on it."""

    def __init__(self, run: Run) -> None:
        self.run, self.numel = run, 1
        self.rank = 1 if run.rank is None else run.rank  # at rank 1 every matrix is projected that can be
        job = self.job(self.config(CHOICES[0], 3, BUFFERS[0], 1), 1)
        self.numel = job.numel
        if run.rank is None:
            self.rank = _rank(job)

    def job(self, config: Mapping[str, Any], gpus: int) -> Job:
        """The planner's job for a configuration."""
        options = dict.fromkeys(_JOB_OPTIONS)
        options.update(world_size=gpus, **self.run.model)
        job: Job = job_of(options, settings_of(config))[0]
        return job

    def notes(self, job: Job) -> list[str]:
        """What there is to be said of the rank."""
        matrices = [plan for plan in job.plans if plan.columns]
        projected = sum(1 for plan in matrices if plan.side)
        return [f"at rank {self.rank} {projected} of {len(matrices)} matrices are projected"]

    def config(self, choice: Choice, stage: int, sizes: Sequence[int], gpus: int) -> dict[str, Any]:
        """A configuration without its checkpoints."""
        run, large = self.run, self.numel >= LARGE
        zero: dict[str, Any] = {
            "stage": stage,
            "overlap_comm": gpus > 1,
            "contiguous_gradients": True,
            "reduce_bucket_size": min(sizes[0], _millions(self.numel)),
        }
        if stage == 3:
            zero |= {
                "stage3_prefetch_bucket_size": sizes[1],
                "stage3_max_live_parameters": sizes[2],
                "stage3_max_reuse_distance": sizes[2],
                "sub_group_size": sizes[3],
            }
        zero |= {key: {"device": "cpu", "pin_memory": True} for key in choice.offload}
        found: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": run.micro_batch,
            "gradient_accumulation_steps": run.accumulation,
            "gradient_clipping": 1.0,
            "optimizer": {
                "type": choice.optimizer,
                "params": {
                    "lr": 0.005 if large else 0.01,
                    "rank": self.rank,
                    "scale": 0.25,
                    "update_proj_gap": 500 if large else 200,
                    "proj_type": "right",
                    "target_modules": "all-linear",
                    **choice.params,
                },
            },
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
        }
        if run.precision != "fp32":
            found[run.precision] = {"enabled": True, **choice.bf16}
        if run.steps is not None:
            found["scheduler"] = {
                "type": "WarmupCosineLR",
                "params": {
                    "total_num_steps": run.steps,
                    "warmup_num_steps": max(2, run.steps // 10),
                    "warmup_type": "linear",
                    "cos_min_ratio": 0.1,
                },
            }
        return found


#: Options of ``ds-galore estimate``, all of which the configuration answers.
_JOB_OPTIONS = (
    *("params", "model_config", "optimizer", "rank", "proj_type", "refresh", "moment_dtype", "beta1"),
    *("unprojected_moment_dtype", "projector_dtype", "projector_storage", "precision", "state_precision"),
    *("zero_stage", "steps", "save_every", "keep_last", "full_every"),
)


def _millions(number: int) -> int:
    """The number, up to the next million: DeepSpeed allocates its bucket whole, also where the model is smaller."""
    return -(-number // 1_000_000) * 1_000_000


def _rank(job: Job) -> int:
    """A quarter of the shorter side that most projected matrices have, as in most of the GaLore paper's runs."""
    sides = Counter(min(plan.columns, plan.numel // plan.columns) for plan in job.plans if plan.side)
    side = sides.most_common(1)[0][0]
    rank = max(1, side // 4)
    return rank - rank % 8 if rank >= 16 else rank


# ---------------------------------------------------------------------- checkpoints


def _checkpoints(
    config: dict[str, Any], known: Estimate, needs: Footprint, run: Run, machines: Machines, notes: list[str]
) -> dict[str, Any]:
    """Add the section for checkpoints, and say what they take on the disk."""
    settings: dict[str, Any] = {"mode": "differential", "full_every": 10}
    gap = config["optimizer"]["params"]["update_proj_gap"]
    full = known.checkpoint["full_compressed"][1]
    difference = known.checkpoint["differential_compressed"][1]
    if run.save_every is not None and run.save_every <= gap:
        settings["full_every"] = min(10, max(2, gap // run.save_every + 1))
        notes.append(
            f"differences are small while a basis lives, {gap} steps: so the base is new every"
            f" {settings['full_every']} checkpoints"
        )
    elif run.save_every is not None:
        settings = {"mode": "incremental", "full_every": 5}
        difference = full
        notes.append(
            f"saves are further apart ({run.save_every} steps) than refreshes ({gap}): a difference to the checkpoint"
            " before is the smaller one then; no gain is planned with"
        )
    base = _base_memory(needs, machines, notes)
    if base is not None:
        settings["base_memory_gb"] = base
    keep = _kept(settings, full, difference, machines, notes)
    settings["keep_last"] = keep
    config["ds_galore"] = {"checkpoint": settings}
    return {
        "full": full,
        "difference": difference,
        "kept": keep,
        "at_most": peak_storage(_schedule(settings, keep), full, difference),
        "disk": machines.disk,
    }


def _base_memory(needs: Footprint, machines: Machines, notes: list[str]) -> float | None:
    """Host memory for what differences are made against, in GB a rank; None for the default."""
    if machines.host_memory is None:
        notes.append(
            f"a checkpoint is written from a copy in host memory, {size_text(needs.snapshot)} a rank, and up to 4 GB"
            " (base_memory_gb) more for what the next one differs from; --host-memory was not given, so this was not"
            " checked"
        )
        return None
    left = SHARE * machines.host_memory / machines.gpus_per_machine - needs.on_host
    if left < 0:
        notes.append(
            f"the copy that a checkpoint is written from takes {size_text(needs.on_host)} a rank, which is"
            f" {size_text(-left)} more than host memory has: take less than all GPUs of a machine, or leave ds_galore's"
            " checkpoints out"
        )
    return math.floor(max(0.0, min(left, needs.snapshot)) / 1e8) / 10


def _schedule(settings: Mapping[str, Any], keep: int) -> Schedule:
    return Schedule(1, 1, keep, settings.get("full_every", 1), incremental=settings["mode"] == "incremental")


def _kept(settings: dict[str, Any], full: int, difference: int, machines: Machines, notes: list[str]) -> int:
    """As many as the disk has room for beside the one that is being written."""
    if machines.disk is None:
        notes.append("--disk was not given: keep_last 3 is a guess")
        return 3
    room = SHARE * machines.disk
    for keep in range(MOST_KEPT, 0, -1):
        if peak_storage(_schedule(settings, keep), full, difference) <= room:
            if keep == 1:
                notes.append("the disk has room for one checkpoint beside the one being written: no older one stays")
            return keep
    if 2 * full <= room:
        notes.append("the disk has no room for a difference and its base beside the next full checkpoint: all are full")
        for key in ("full_every", "base_memory_gb"):
            settings.pop(key, None)
        settings["mode"] = "full"
        return 1
    least = math.ceil(2 * full / SHARE)
    raise ConfigError(
        f"--disk {size_text(machines.disk)} is too small: a checkpoint and the next one take up to"
        f" {size_text(least)}, {size_text(least - machines.disk)} more than there is; what would help: a larger disk,"
        " or a smaller --rank"
    )
