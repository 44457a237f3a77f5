"""Memory, checkpoints, traffic and storage of a training job, before it is started: arithmetic on shapes.

Sizes are bytes. A copy of the parameters is ``parameters x bytes of an element``; how many there are depends on the
optimizer, the precision and the ZeRO stage (:func:`copies`). Communication is counted as in Rajbhandari et al., *ZeRO*
(2020), section 7. Imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ds_galore.errors import ConfigError
from ds_galore.tools.memory import MemoryPlan, ParameterPlan, plan_memory

__all__ = [
    "FAMILY",
    "OPTIMIZERS",
    "PAPER",
    "Estimate",
    "Job",
    "Llama",
    "Schedule",
    "estimate",
    "optimizer_named",
    "paper_table",
    "parse_count",
]

MAX_PARAMETERS = 1e18
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
#: An 8-bit state has a float32 scale for each block of so many elements (bitsandbytes' blockwise quantisation).
BLOCK = 256
#: The JSON and safetensors headers that stand for a tensor in a checkpoint of ours, roughly: bytes a tensor and state.
METADATA = 400

#: Measured: docs/performance.md, checkpoints of a 25.6M-parameter Llama in fp32, uncompressed bytes over written ones.
MEASURED = "measured on a 25.6M-parameter Llama in fp32 (docs/performance.md)"
FULL = (1.19, 1.20)
LOW_RANK_DIFFERENCE = (2.2, 2.45)
PLAIN_DIFFERENCE = (1.20, 1.27)


@dataclass(frozen=True)
class Optimizer:
    """What an optimizer keeps.

    Parameters
    ----------
    name
        Of :data:`OPTIMIZERS`.
    moments
        Numbers for each element; of a factored one, first moments only.
    factored
        Whether the second moment of a matrix is kept as a row and a column (Adafactor). Not under ZeRO 1 to 3, which
        hand an optimizer flat vectors.
    eight_bit
        Whether moments take a byte.
    low_rank
        Whether matrices are projected (GaLore).
    """

    name: str
    moments: int
    factored: bool = False
    eight_bit: bool = False
    low_rank: bool = False


def _optimizers() -> dict[str, Optimizer]:
    plain = {"sgd": 0, "sgd_momentum": 1, "adam": 2, "adamw": 2, "lion": 1, "adafactor": 0}
    found = {}
    for low_rank in (False, True):
        for name, moments in plain.items():
            full = f"galore_{name}" if low_rank else name
            found[full] = Optimizer(full, moments, name == "adafactor", low_rank=low_rank)
            if moments:
                found[f"{full}_8bit"] = Optimizer(f"{full}_8bit", moments, eight_bit=True, low_rank=low_rank)
    return found


OPTIMIZERS = _optimizers()
#: Names that DeepSpeed, torch and this package have for some of them.
_ALIASES = {"galoreadamw": "galore_adamw", "fusedadam": "adamw", "deepspeedcpuadam": "adamw", "fusedlion": "lion"}


def optimizer_named(name: str) -> Optimizer:
    """An optimizer by its name, whatever its case and dashes.

    Raises
    ------
    ConfigError
        If none has it.
    """
    plain = re.sub(r"_?8_?bit$", "_8bit", name.lower().replace("-", "_"))
    found = OPTIMIZERS.get(_ALIASES.get(plain, plain))
    if found is None:
        from ds_galore.config import nearest

        raise ConfigError(f"optimizer is {name!r}: no such optimizer{nearest(plain, OPTIMIZERS)}")
    return found


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


# ---------------------------------------------------------------------- Llamas


@dataclass(frozen=True)
class Llama:
    """The shapes of a Llama with untied embeddings, and full attention.

    Parameters
    ----------
    hidden, intermediate, layers, vocabulary
        As in its ``config.json``.
    """

    hidden: int
    intermediate: int
    layers: int
    vocabulary: int = 32000

    def plans(self, rank: int | None) -> list[ParameterPlan]:
        """Its parameters; matrices of attention and MLP projected to ``rank`` where it is given, as ``std`` does."""
        square, wide = (self.hidden, self.hidden), (self.intermediate, self.hidden)
        layer = [square] * 4 + [wide] * 2 + [(self.hidden, self.intermediate)]
        found = [ParameterPlan("embeddings and head", self.vocabulary * self.hidden)] * 2
        for _ in range(self.layers):
            found += [_projected("matrix", rows, columns, rank) for rows, columns in layer]
            found += [ParameterPlan("norm", self.hidden)] * 2
        return [*found, ParameterPlan("norm", self.hidden)]

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(plan.numel for plan in self.plans(None))


def _projected(name: str, rows: int, columns: int, rank: int | None) -> ParameterPlan:
    if rank is None or rank >= min(rows, columns):
        return ParameterPlan(name, rows * columns, columns)
    return ParameterPlan(name, rows * columns, columns, rank, "right" if rows >= columns else "left")


#: The GaLore paper's models (its table 5, and galore's configs for 1B and 7B).
FAMILY = {
    "60M": Llama(512, 1376, 8),
    "130M": Llama(768, 2048, 12),
    "350M": Llama(1024, 2736, 24),
    "1B": Llama(2048, 5461, 24),
    "7B": Llama(4096, 11008, 32),
}
#: The GaLore paper's table 2: rank, and G of bf16 weights and optimizer states with full-rank AdamW and with GaLore.
PAPER = {"60M": (128, 0.36, 0.24), "130M": (256, 0.76, 0.52), "350M": (256, 2.06, 1.22), "1B": (512, 7.80, 4.38)}


def paper_table() -> list[dict[str, Any]]:
    """The GaLore paper's table 2 beside the same by shapes, in bytes: everything bf16, one rank, no gradients."""
    rows = []
    for name, (rank, full, galore) in PAPER.items():
        plans, low = FAMILY[name].plans(None), FAMILY[name].plans(rank)
        sizes = [_weights_and_states(each) for each in (plans, low)]
        for label, size, paper in (("full-rank", sizes[0], full), ("GaLore", sizes[1], galore)):
            rows.append(
                {
                    "model": name,
                    "method": label,
                    "rank": rank if label == "GaLore" else None,
                    "bytes": size,
                    "gib": size / 2**30,
                    "paper_g": paper,
                    "difference": size / 2**30 / paper - 1,
                }
            )
    return rows


def _weights_and_states(plans: Sequence[ParameterPlan]) -> int:
    plan = plan_memory(plans, world_size=1, weight_bytes=2, projector_bytes=2, stage=0, moment_bytes=2)
    return plan.weights + plan.moments + plan.projectors


# ---------------------------------------------------------------------- jobs


@dataclass(frozen=True)
class Schedule:
    """How often a run saves, and what it keeps.

    Parameters
    ----------
    steps, save_every
        Steps of the run, and between two saves.
    keep_last
        How many of the newest stay; all without.
    full_every
        Every which checkpoint is full.
    keep_every
        Checkpoints after multiples of so many steps stay too.
    incremental
        Whether a difference is to the checkpoint before, and not to the last full one.
    """

    steps: int
    save_every: int
    keep_last: int | None = None
    full_every: int = 10
    keep_every: int | None = None
    incremental: bool = False


@dataclass(frozen=True)
class Job:
    """What is to be trained, and how.

    Parameters
    ----------
    plans
        The parameters.
    optimizer
        Of :data:`OPTIMIZERS`.
    precision, state_precision
        ``"fp32"``, ``"bf16"`` or ``"fp16"``: of weights and gradients; of masters and moments.
    stage, world_size
        Of ZeRO, and number of ranks.
    projector_bytes
        Of an element of a projector.
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
    projector_bytes: int = 4
    sharded: bool | None = None
    scale: float = 1.0
    parameters: int | None = None
    state_dtype: str = "exact"
    assumptions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value in (("precision", self.precision), ("state_precision", self.state_precision)):
            if value not in BYTES:
                raise ConfigError(f"{name} is {value!r}: it must be {', '.join(BYTES)}")
        if self.stage not in (0, 1, 2, 3):
            raise ConfigError(f"zero_stage is {self.stage}: it must be 0, 1, 2 or 3")

    @property
    def numel(self) -> int:
        """Number of parameters."""
        return self.parameters if self.parameters is not None else sum(plan.numel for plan in self.plans)


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
    storage: dict[str, Any] | None = None
    assumptions: list[str] = field(default_factory=list)


def _moment_bytes(job: Job) -> float:
    return 1 + 4 / BLOCK if job.optimizer.eight_bit else BYTES[job.state_precision]


def _separate_master(job: Job) -> int:
    """Bytes of an element of a master copy beside the weights; DeepSpeed keeps one at every stage from 1 on."""
    wider = BYTES[job.state_precision] > BYTES[job.precision]
    return max(BYTES[job.state_precision], BYTES[job.precision]) if job.stage or wider else 0


def _memory(job: Job, rank: int) -> MemoryPlan:
    sharded = job.sharded if job.sharded is not None else _shards(job)
    plan = plan_memory(
        job.plans,
        world_size=job.world_size,
        rank=rank,
        weight_bytes=BYTES[job.precision],
        master_bytes=_separate_master(job),
        projector_bytes=job.projector_bytes,
        sharded=sharded,
        stage=job.stage,
        moments=job.optimizer.moments,
        moment_bytes=_moment_bytes(job),
        factored=job.optimizer.factored,
    )
    if job.parameters is None:
        return plan
    true = plan_memory(
        [ParameterPlan("all", job.parameters)],
        world_size=job.world_size,
        rank=rank,
        weight_bytes=BYTES[job.precision],
        master_bytes=_separate_master(job),
        stage=job.stage,
        moments=0,
    )
    moments, projectors = round(plan.moments * job.scale), round(plan.projectors * job.scale)
    return MemoryPlan(true.weights, true.master_weights, true.gradients, moments, projectors)


def _shards(job: Job) -> bool:
    """The rule of ``projector_storage: auto``."""
    right = [plan for plan in job.plans if plan.side == "right"]
    projectors = sum(plan.columns * plan.rank for plan in right) * job.projector_bytes
    moments = sum(2 * 4 * plan.numel // plan.columns * plan.rank for plan in right)
    return job.stage > 0 and job.world_size > 1 and projectors * job.world_size > moments


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
    if job.optimizer.factored and job.stage:
        assumptions.append("ZeRO hands Adafactor flat vectors, whose second moments cannot be factored")
    if job.optimizer.low_rank and job.optimizer.name != "galore_adamw":
        assumptions.append(f"{job.optimizer.name} is not in this package: its states are those of galore-torch")
    if job.optimizer.low_rank and job.stage in (1, 2):
        assumptions.append("GaLoreAdamW does not run under ZeRO 1 and 2 yet; its states are taken as spread evenly")
    if job.optimizer.eight_bit:
        assumptions.append(f"8-bit moments: a byte an element and a float32 scale every {BLOCK} (bitsandbytes)")
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
        storage=_storage(schedule, checkpoint) if schedule is not None else None,
        assumptions=assumptions,
    )


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
    whole = _memory(Job(**{**vars(job), "world_size": 1, "sharded": False}), 0)
    parts = {name: width * job.numel for name, width in copies(job).items()}
    parts["moments"], parts["projectors"] = whole.moments, whole.projectors
    states = 1 + job.optimizer.moments + (1 if job.optimizer.low_rank else 0)
    parts["metadata"] = METADATA * states * len(job.plans)
    total = sum(parts.values())
    # Ours stores weights that are their masters, rounded, once.
    spared = parts["weights"] if parts["weights"] and parts["master_weights"] else 0
    full = total - spared
    if job.state_dtype != "exact" and job.state_precision == "fp32":
        width = 2 if job.state_dtype == "bf16" else 1 + 4 / BLOCK
        full -= round(parts["moments"] * (1 - width / 4))
    low = job.optimizer.low_rank
    difference = LOW_RANK_DIFFERENCE if low else PLAIN_DIFFERENCE
    known = job.state_precision == "fp32" and not job.optimizer.eight_bit and job.state_dtype == "exact"
    if known:
        basis = MEASURED
        ranges = [[round(full / ratio) for ratio in sorted(pair, reverse=True)] for pair in (FULL, difference)]
    else:
        basis = "not measured with such states: from nothing gained to what fp32 states gained"
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
        sharded = job.sharded if job.sharded is not None else _shards(job)
        for plan in job.plans:
            if plan.side == "left":  # low-rank gradients are reduced and scattered, directions gathered
                low_rank += 2 * 4 * plan.columns * plan.rank
            elif plan.side == "right" and sharded:
                low_rank += job.projector_bytes * plan.columns * plan.rank
    found["low_rank"] = round(low_rank * share * job.scale)
    return {**found, "total": sum(found.values())}


def _storage(schedule: Schedule, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Bytes that a run's checkpoints take in the end, and that are written to get there."""
    for name, value in (
        ("steps", schedule.steps),
        ("save_every", schedule.save_every),
        ("full_every", schedule.full_every),
    ):
        if value < 1:
            raise ConfigError(f"{name} is {value}: it must be positive")
    if schedule.keep_last is not None and schedule.keep_last < 1:
        raise ConfigError(f"keep_last is {schedule.keep_last}: at least one checkpoint has to stay")
    saves = schedule.steps // schedule.save_every
    if not saves:
        raise ConfigError(
            f"save_every is {schedule.save_every}, and the run has {schedule.steps} steps: nothing is saved"
        )
    last = saves if schedule.keep_last is None else min(schedule.keep_last, saves)
    every = schedule.keep_every
    stays = [
        index
        for index in range(saves)
        if index >= saves - last or (every is not None and (index + 1) * schedule.save_every % every == 0)
    ]
    kept = len(stays)
    fulls = math.ceil(saves / schedule.full_every)
    files = set()  # that those checkpoints consist of, by the index of the save that wrote them
    for index in stays:
        base = index // schedule.full_every * schedule.full_every
        files |= set(range(base, index + 1)) if schedule.incremental else {base, index}
    bases = sum(1 for index in files if index % schedule.full_every == 0)
    differences = len(files) - bases
    full, diff = checkpoint["full_compressed"], checkpoint["differential_compressed"]
    return {
        "saves": saves,
        "kept": kept,
        "full_on_disk": bases,
        "differential_on_disk": differences,
        "deepspeed": kept * checkpoint["total"],
        "ours": [bases * a + differences * b for a, b in zip(full, diff, strict=True)],
        "deepspeed_written": saves * checkpoint["total"],
        "ours_written": [fulls * a + (saves - fulls) * b for a, b in zip(full, diff, strict=True)],
    }


def assumed(parameters: int, optimizer: Optimizer, rank: int | None) -> tuple[list[ParameterPlan], float, list[str]]:
    """Plans for a number of parameters alone, the scale of their counts, and what is assumed."""
    if not optimizer.low_rank and not optimizer.factored:
        return [ParameterPlan("all", parameters)], 1.0, []
    name = min(FAMILY, key=lambda each: abs(math.log(FAMILY[each].parameters / parameters)))
    found = FAMILY[name].plans(rank if optimizer.low_rank else None)
    if optimizer.low_rank and not any(plan.side for plan in found):
        raise ConfigError(f"rank is {rank}: no matrix of a Llama {name} is larger; set a smaller one")
    scale = parameters / FAMILY[name].parameters
    text = f"shapes are those of a Llama {name} ({FAMILY[name].parameters:,} parameters), counts scaled by {scale:.3g}"
    how = ", matrices of attention and MLP projected as std does" if optimizer.low_rank else ""
    return found, scale, [f"{text}{how}; --model-config gives the model's own"]


def paper_row(parameters: int, shapes: Iterable[int]) -> str | None:
    """The name in the paper's table of a model with these numbers of elements, if it is one of its models."""
    numels = sorted(shapes)
    for name in PAPER:
        if FAMILY[name].parameters == parameters and sorted(p.numel for p in FAMILY[name].plans(None)) == numels:
            return name
    return None
