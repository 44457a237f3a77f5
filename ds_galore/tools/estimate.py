"""Memory, checkpoints, traffic and storage of a training job, before it is started: arithmetic on shapes.

Sizes are bytes. A copy of the parameters is ``parameters x bytes of an element``; how many there are depends on the
optimizer, the precision and the ZeRO stage (:func:`copies`). Communication is counted as in Rajbhandari et al., *ZeRO*
(2020), section 7. Imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ds_galore.errors import ConfigError
from ds_galore.tools.formats import BLOCK, FP32, RowFormat
from ds_galore.tools.memory import Kept, MemoryPlan, ParameterPlan, plan_memory, shards_projectors
from ds_galore.tools.optimizers import Optimizer
from ds_galore.tools.storage import Schedule, storage

__all__ = ["Estimate", "Job", "copies", "estimate", "parse_count"]

MAX_PARAMETERS = 1e18
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
#: The JSON and safetensors headers that stand for a tensor in a checkpoint of ours, roughly: bytes a tensor and state.
METADATA = 400

#: Measured: docs/performance.md, checkpoints of a 25.6M-parameter Llama in fp32, uncompressed bytes over written ones.
MEASURED = "measured on a 25.6M-parameter Llama in fp32 (docs/performance.md)"
FULL = (1.19, 1.20)
LOW_RANK_DIFFERENCE = (2.2, 2.45)
PLAIN_DIFFERENCE = (1.20, 1.27)


def parse_count(text: str) -> int:
    """The number in a text such as ``7e9``, ``7B`` or ``350M``.

    Raises
    ------
    ValueError
        If it is none, or not positive.
    """
    units = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
    found = re.fullmatch(r"\s*([0-9_]*\.?[0-9]+(?:[eE]\+?[0-9]+)?)\s*([kKmMbBgGtT]?)\s*", text)
    value = float(found[1]) * units[found[2].lower()] if found else 0.0
    number = round(value) if value < MAX_PARAMETERS else 0
    if number < 1:
        raise ValueError(f"{text!r} is no number of parameters such as 7e9, 7B or 350M")
    return number


# ---------------------------------------------------------------------- jobs


@dataclass(frozen=True)
class Job:
    """What is to be trained, and how.

    Parameters
    ----------
    plans
        The parameters.
    optimizer
        Of :data:`.OPTIMIZERS`.
    precision, state_precision
        ``"fp32"``, ``"bf16"`` or ``"fp16"``: of weights and gradients; of masters, and of moments where the optimizer
        does not say what they are.
    stage, world_size
        Of ZeRO, and number of ranks.
    master_precision
        Of masters, where it is not ``state_precision``.
    sharded
        Whether right projectors are kept in parts; None is for the rule of ``projector_storage: auto``.
    scale
        What counts of moments and projectors are multiplied by, where ``plans`` are those of a similar model.
    parameters
        Their number, where it is not that of ``plans``.
    state_dtype
        ``ds_galore.checkpoint.state_dtype``: ``"exact"``, ``"bf16"`` or ``"int8"``.
    assumptions
        What the arithmetic rests on already.
    """

    plans: Sequence[ParameterPlan]
    optimizer: Optimizer
    precision: str = "bf16"
    state_precision: str = "fp32"
    stage: int = 0
    world_size: int = 1
    master_precision: str | None = None
    sharded: bool | None = None
    scale: float = 1.0
    parameters: int | None = None
    state_dtype: str = "exact"
    assumptions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("precision", "state_precision", "master_precision"):
            value = getattr(self, name)
            if value not in BYTES and (name, value) != ("master_precision", None):
                raise ConfigError(f"{name} is {value!r}: it must be {', '.join(BYTES)}")
        if self.stage not in (0, 1, 2, 3):
            raise ConfigError(f"zero_stage is {self.stage}: it must be 0, 1, 2 or 3")

    @property
    def numel(self) -> int:
        """Number of parameters."""
        return self.parameters if self.parameters is not None else sum(plan.numel for plan in self.plans)

    @property
    def kept(self) -> Kept:
        """What the optimizer keeps."""
        return self.optimizer.kept(self.state_precision)

    @property
    def shards(self) -> bool:
        """Whether right projectors are kept in parts."""
        if self.sharded is not None:
            return self.sharded
        return self.stage > 0 and shards_projectors(self.plans, self.kept, self.world_size)


@dataclass
class Estimate:
    """What a job needs; sizes in bytes."""

    parameters: int
    optimizer: str
    precision: str
    state_precision: str
    zero_stage: int
    world_size: int
    memory_per_rank: dict[str, int]
    memory_total: dict[str, int]
    checkpoint: dict[str, Any]
    total_bytes: int
    traffic_per_step: dict[str, int]
    formats: dict[str, str | None] = field(default_factory=dict)
    storage: dict[str, Any] | None = None
    assumptions: list[str] = field(default_factory=list)


def _separate_master(job: Job) -> int:
    """Bytes of an element of a master copy beside the weights; DeepSpeed keeps one at every stage from 1 on."""
    if job.master_precision is not None:
        return BYTES[job.master_precision] if job.stage or job.master_precision != job.precision else 0
    wider = BYTES[job.state_precision] > BYTES[job.precision]
    return max(BYTES[job.state_precision], BYTES[job.precision]) if job.stage or wider else 0


def _memory(job: Job, rank: int, kept: Kept | None = None) -> MemoryPlan:
    """The memory of a rank; ``kept`` stands for what the optimizer keeps."""
    masters = _separate_master(job)
    if kept is None and job.optimizer.lowered and masters == BYTES[job.precision]:
        masters = 0  # the weights themselves
    common: dict[str, Any] = {
        "world_size": job.world_size,
        "rank": rank,
        "weight_bytes": BYTES[job.precision],
        "master_bytes": masters,
        "stage": job.stage,
    }
    plan = plan_memory(job.plans, kept=job.kept if kept is None else kept, sharded=job.shards, **common)
    if job.parameters is None:
        return plan
    true = plan_memory([ParameterPlan("all", job.parameters)], **common)
    scaled = {key: round(getattr(plan, key) * job.scale) for key in ("moments", "projectors", "gradients")}
    if kept is not None or not job.optimizer.lowered:
        del scaled["gradients"]  # known from their number
    return replace(true, **scaled)


def _formats(job: Job) -> dict[str, str | None]:
    """What states are kept in; None for what there is not."""
    kept, low_rank = job.kept, job.optimizer.low_rank
    master = job.master_precision or job.state_precision
    return {
        "master_weights": (master if BYTES[master] >= BYTES[job.precision] else job.precision)
        if _separate_master(job)
        else None,
        "moments": (kept.projected if low_rank else kept.unprojected).name if kept.moments else None,
        "unprojected_moments": kept.unprojected.name if kept.moments and low_rank else None,
        "factored_moments": kept.factored.name if kept.factored is not None else None,
        "projectors": kept.projectors.name if kept.projectors is not None else None,
    }


def _as_dict(plan: MemoryPlan) -> dict[str, int]:
    return {**asdict(plan), "total": plan.total}


def estimate(job: Job, schedule: Schedule | None = None) -> Estimate:
    """What a job needs of memory, disks and network.

    Raises
    ------
    ConfigError
        For a schedule that saves nothing.
    """
    assumptions = list(job.assumptions)
    ranks = [_memory(job, rank) for rank in range(min(job.world_size, 8))]  # later ranks hold a row less, at most
    fullest = max(ranks, key=lambda plan: plan.total)
    checkpoint = _checkpoint(job, assumptions)
    more = job.world_size - len(ranks)
    total = {key: sum(_as_dict(plan)[key] for plan in ranks) + more * value for key, value in _as_dict(fullest).items()}
    if job.optimizer.factored and job.stage and job.kept.flat:
        assumptions.append("ZeRO hands Adafactor flat vectors, whose second moments cannot be factored")
    if job.optimizer.low_rank and not job.optimizer.ours:
        assumptions.append(f"{job.optimizer.name} is not in this package: its states are those of galore-torch")
    if job.optimizer.low_rank and job.stage in (1, 2):
        assumptions.append(
            "ZeRO 1 and 2 cut whole groups of parameters; states are taken as if each parameter were cut evenly"
        )
    assumptions += _of_formats(job)
    assumptions.append("memory is of model states: no activations, buffers of communication, fragmentation")
    return Estimate(
        parameters=job.numel,
        optimizer=job.optimizer.name,
        precision=job.precision,
        state_precision=job.state_precision,
        zero_stage=job.stage,
        world_size=job.world_size,
        memory_per_rank=_as_dict(fullest),
        memory_total=total,
        checkpoint=checkpoint,
        total_bytes=checkpoint["total"],
        traffic_per_step=_traffic(job),
        formats=_formats(job),
        storage=storage(schedule, checkpoint) if schedule is not None else None,
        assumptions=assumptions,
    )


def _of_formats(job: Job) -> list[str]:
    """What is to be known of the states' formats."""
    kept, found = job.kept, []
    if kept.moments and (kept.unprojected.scaled or (kept.projected.scaled and job.optimizer.low_rank)):
        found.append(
            f"8-bit moments: a byte an element and a float32 scale every {BLOCK} (bitsandbytes), of projected ones in"
            " each row anew; of parameters below 4096 elements fp32"
        )
    if job.optimizer.low_rank and not job.optimizer.keeps_projectors:
        found.append("projectors are drawn from a seed when they are used, and none is kept")
    return found


def copies(job: Job) -> dict[str, int]:
    """Bytes of an element in DeepSpeed's checkpoint of the weights and of their masters.

    Stage 0 stores the weights, and a master where it is separate; stages 1 and 2 store both, always; stage 3 stores
    the masters alone.
    """
    return {
        "weights": BYTES[job.precision] if job.stage < 3 else 0,
        "master_weights": _separate_master(job),
    }


def _checkpoint(job: Job, assumptions: list[str]) -> dict[str, Any]:
    """Bytes of one checkpoint: DeepSpeed's own, and ours."""
    alone = replace(job, world_size=1, sharded=False)
    whole = _memory(alone, 0)
    parts = {name: width * job.numel for name, width in copies(job).items()}
    parts["moments"], parts["projectors"] = whole.moments, whole.projectors
    states = 1 + job.optimizer.moments + (1 if job.optimizer.keeps_projectors else 0)
    parts["metadata"] = METADATA * states * len(job.plans)
    total = sum(parts.values())
    # Ours stores weights that are their masters, rounded, once.
    spared = parts["weights"] if parts["weights"] and parts["master_weights"] else 0
    full = total - spared
    if job.state_dtype != "exact":
        width = 2 if job.state_dtype == "bf16" else 1 + 4 / BLOCK
        full -= round(_memory(alone, 0, _in_fp32(job.kept)).moments * (1 - width / 4))
    predicted = job.optimizer.low_rank_update and job.optimizer.keeps_projectors  # from the basis in the checkpoint
    difference = LOW_RANK_DIFFERENCE if predicted else PLAIN_DIFFERENCE
    formats = {name for name in _formats(job).values() if name is not None}
    known = formats <= {"fp32"} and job.state_dtype == "exact"
    known = known and (predicted or not job.optimizer.low_rank)
    if known:
        basis = MEASURED
        ranges = [[round(full / ratio) for ratio in sorted(pair, reverse=True)] for pair in (FULL, difference)]
    else:
        basis = "not measured with such states or updates: from nothing gained to what fp32 states gained"
        ranges = [[round(full / max(pair)), full] for pair in (FULL, difference)]
    assumptions.append(f"compressed sizes: {basis}; a difference is to a base some tens of steps before")
    return {
        **parts,
        "total": total,
        "full": full,
        "full_compressed": ranges[0],
        "differential_compressed": ranges[1],
        "basis": basis,
    }


#: For moments that are not to be counted.
_NOTHING = RowFormat("nothing", 0)


def _in_fp32(kept: Kept) -> Kept:
    """Those of the moments that are fp32: ``state_dtype`` is about them alone."""
    return replace(
        kept,
        projected=kept.projected if kept.projected is FP32 else _NOTHING,
        unprojected=kept.unprojected if kept.unprojected is FP32 else _NOTHING,
        factored=None if kept.factored is not FP32 else kept.factored,
    )


def _traffic(job: Job) -> dict[str, int]:
    """Bytes that a rank sends in a step, and as many that it receives."""
    share = (job.world_size - 1) / job.world_size
    weights, gradients = (job.numel * BYTES[job.precision] * share for _ in range(2))
    passes = {0: 0, 1: 1, 2: 1, 3: 2}[job.stage]  # stage 3 gathers weights forward and backward
    found = {
        "gradients": round(gradients * (1 if job.stage else 2)),  # reduce-scatter; all-reduce without ZeRO
        "weights": round(weights * passes),
    }
    low_rank = 0.0
    if job.optimizer.low_rank and job.stage and job.world_size > 1:
        shards, kept = job.shards, job.kept
        for plan in job.plans:
            if plan.side == "left":  # low-rank gradients are reduced and scattered, directions gathered
                low_rank += 2 * 4 * plan.columns * plan.rank
            elif plan.side == "right" and shards:
                low_rank += kept.projector(plan.columns, plan.rank)
    found["low_rank"] = round(low_rank * share * job.scale)
    return {**found, "total": sum(found.values())}
