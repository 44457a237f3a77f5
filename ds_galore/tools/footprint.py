"""Where a configuration keeps what a rank needs: on its device, in host memory, and for the moment of a step.

The planner's figures (:mod:`.estimate`) are of tensors that live for the whole run. Here they are put where the
configuration's offload says, and DeepSpeed's own buffers come on top, by the sizes in ``zero_optimization``, as the
sources of DeepSpeed 0.19.8 have them. What is there for a moment is told by phase: phases follow each other, so that
the largest counts. Activations are those of :mod:`.activations`, where a model's shape is known. Imports neither torch
nor DeepSpeed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds_galore.config import section
from ds_galore.errors import ConfigError
from ds_galore.tools.estimate import BYTES, Job, estimate
from ds_galore.tools.memory import ParameterPlan

__all__ = ["SEGMENT", "Footprint", "footprint"]

STATES = ("master_weights", "moments", "projectors")
#: Sharded or quantised projectors are whole numbers again, so many at a time, while a step uses them (optim/plan.py).
GATHERED = 2**26
#: Elements of what is not projected, and of weights that are rounded, that are worked on at once (optim/walks.py).
SEGMENT = 2**23
#: Bytes an element of a segment: two copies of its gradient in fp32; then its moments, where they are quantised,
#: or its weight, where that is rounded.
GRADIENT, QUANTISED, ROUNDED = 8, 14, 12
#: Blocks of ``max(m, n) x r`` numbers that each matrix that is refreshed has, and that one at a time is worked on with.
BASES, WORK = 2, 4


@dataclass(frozen=True)
class Footprint:
    """Bytes of a rank.

    Parameters
    ----------
    device, host
        By kind, what stays there for the whole run.
    phases
        By phase of a training step, and by kind, what is on the device for a moment: ``"backward"``, where gradients
        arrive and activations are not counted, and those when there are none: the start, and the optimizer's step.
    snapshot
        Host memory for the copy that a background checkpoint is written from.
    """

    device: dict[str, int]
    host: dict[str, int]
    phases: dict[str, dict[str, int]]
    snapshot: int

    @property
    def step(self) -> int:
        """What the optimizer's step needs on the device for a moment."""
        return max((sum(kinds.values()) for name, kinds in self.phases.items() if name != "backward"), default=0)

    def on_device(self, room: int) -> int:
        """Bytes on the device with ``room`` bytes for activations, whose place a step's own needs take."""
        return sum(self.device.values()) + max(room, self.step)

    def peak(self, activations: int) -> int:
        """Bytes on the device in the phase that needs most, with so many of activations when gradients arrive."""
        backward = activations + sum(self.phases["backward"].values())
        return sum(self.device.values()) + max(backward, self.step)

    @property
    def on_host(self) -> int:
        """Bytes in host memory, the copy for checkpoints included."""
        return sum(self.host.values()) + self.snapshot


def footprint(config: Mapping[str, Any], job: Job, *, segment: int = SEGMENT) -> Footprint:
    """What a rank of a job needs, and where.

    Parameters
    ----------
    config
        The DeepSpeed configuration.
    job
        The same for the planner.
    segment
        Elements that are worked on at once; on a CPU they are fewer.

    Raises
    ------
    ConfigError
        If one of DeepSpeed's sizes is none.
    """
    memory, zero, stage = estimate(job).memory_per_rank, section(config, "zero_optimization"), job.stage
    ranks = job.world_size if job.stage else 1
    offloaded = stage > 0 and section(zero, "offload_optimizer").get("device") == "cpu"
    streamed = stage == 3 and section(zero, "offload_param").get("device") == "cpu"
    part = -(-job.numel // ranks)
    device = {kind: memory[kind] for kind in ("weights", "gradients", *STATES)}
    host: dict[str, int] = {}
    if offloaded:  # gradients arrive in the weights' precision, and the optimizer is given them in fp32
        host = {kind: device.pop(kind) for kind in STATES}
        host["gradients"] = device.pop("gradients") + 4 * part
    if streamed:
        host["weights"] = device.pop("weights")
    device |= _buffers(job, zero, offloaded=offloaded, streamed=streamed)
    phases = {"backward": _backward(job, zero)}
    if not offloaded:
        phases |= _step(config, job, memory, part, segment)
    snapshot = sum(memory[kind] for kind in STATES) + (memory["weights"] if not memory["master_weights"] else 0)
    return Footprint(device, host, phases, snapshot)


#: DeepSpeed's defaults, in elements; and of those that may be "auto" what the Trainer and accelerate put there, in
#: squares of the model's width.
_SIZES = {
    "reduce_bucket_size": (500_000_000, 1.0),
    "stage3_prefetch_bucket_size": (50_000_000, 0.9),
    "stage3_max_live_parameters": (1_000_000_000, None),
    "sub_group_size": (1_000_000_000, None),
}


def _size(job: Job, zero: Mapping[str, Any], key: str) -> int:
    """One of DeepSpeed's sizes, in elements.

    Raises
    ------
    ConfigError
        If it is none.
    """
    default, squares = _SIZES[key]
    value = zero.get(key, default)
    widths = Counter(plan.columns for plan in job.plans if plan.columns)
    if value == "auto" and squares is not None:
        return int(squares * widths.most_common(1)[0][0] ** 2) if widths else default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        allowed = "a number of elements" + (', or "auto"' if squares is not None else "")
        raise ConfigError(f"zero_optimization.{key} is {value!r}: it must be {allowed}")
    return int(value)


def _buffers(job: Job, zero: Mapping[str, Any], *, offloaded: bool, streamed: bool) -> dict[str, int]:
    """DeepSpeed's buffers of gradients on their way, and at stage 3 the weights that are gathered at once."""
    if not job.stage:
        return {}
    width = BYTES[job.precision]
    largest = round(max(plan.numel for plan in job.plans) * job.scale)
    bucket = _size(job, zero, "reduce_bucket_size") * width  # allocated whole, whatever the model's size
    if job.stage < 3:
        buffers = bucket * (2 if zero.get("overlap_comm") else 1) + (largest * width if offloaded else 0)
        return {"reduction_bucket": buffers}
    found = {"reduction_bucket": bucket}
    if job.world_size > 1 or streamed:  # else weights are used where they are
        live = _size(job, zero, "stage3_max_live_parameters")
        gathered = max(live, largest) + _size(job, zero, "stage3_prefetch_bucket_size")
        found["gathered_weights"] = min(gathered, job.numel) * width
    return found


def _backward(job: Job, zero: Mapping[str, Any]) -> dict[str, int]:
    """Gradients between their computation and their place.

    One that is larger than the bucket waits for the next one; smaller ones are copied together to be sent. Where they
    are lowered, one is in fp32 meanwhile.
    """
    if not job.stage:
        return {}
    width, ranks = BYTES[job.precision], job.world_size
    bucket = _size(job, zero, "reduce_bucket_size")
    largest, matrix = (round(each * job.scale) for each in (_largest(job.plans), _largest(_projected(job))))
    found = {"gradients_on_their_way": (max(largest, 2 * matrix) + min(bucket, job.numel)) * width}
    if job.optimizer.lowered:
        found["one_in_fp32"] = 4 * -(-matrix // ranks)
    return found


def _projected(job: Job) -> list[ParameterPlan]:
    return [plan for plan in job.plans if plan.side]


def _largest(plans: Sequence[ParameterPlan]) -> int:
    return max((plan.numel for plan in plans), default=0)


def _step(
    config: Mapping[str, Any], job: Job, memory: Mapping[str, int], part: int, segment: int
) -> dict[str, dict[str, int]]:
    """The phases without activations: the start, and of a step the search for overflows, the norm, the update."""
    found: dict[str, dict[str, int]] = {}
    ranks, width = (job.world_size, BYTES[job.precision]) if job.stage else (1, BYTES[job.precision])
    masters = BYTES[job.master_precision or job.state_precision]
    if job.stage == 3 and job.precision == "fp16" and not job.optimizer.lowered:
        found["overflow_check"] = {
            "magnitudes": memory["gradients"],
            "comparisons": memory["gradients"] // width,
        }
    if job.stage:
        numbers = segment if job.optimizer.lowered else round(_largest(job.plans) * job.scale)
        found["norm"] = {"a_gradient_in_fp64": 8 * -(-numbers // ranks)}
    update: dict[str, int] = {}
    size: float = part
    if job.stage == 3:
        size = _size(job, section(config, "zero_optimization"), "sub_group_size") / job.scale
    groups = list(_sub_groups(job, size, ranks))
    if job.stage and not job.optimizer.lowered:
        most = round(max(sum(-(-plan.numel // ranks) for plan in group) for group in groups) * job.scale)
        update["flat_gradients"] = min(most, part) * (width + (masters if masters != width else 0))
        if job.stage == 3:  # of the largest sub-group, when there are no states yet
            beyond = min(most, part) * masters - memory["moments"] - memory["projectors"]
            found["start"] = {"gradient_buffer_beyond_states": max(beyond, 0)}
    if job.optimizer.ours:
        update |= _own(job, groups, ranks, segment)
    found["update"] = update
    return found


def _own(job: Job, groups: Sequence[Sequence[ParameterPlan]], ranks: int, segment: int) -> dict[str, int]:
    """What this package's own update needs, of the batch of matrices that needs most.

    Matrices that follow each other refresh together, as many as there are on a mean step.
    """
    kept, wide = job.kept, BYTES[job.master_precision or job.state_precision] == 4
    converted = job.shards or kept.projectors is None or kept.projectors.name != "fp32"
    together = -(-len(_projected(job)) // job.optimizer.gap)

    def part(plan: ParameterPlan) -> int:
        return -(-plan.numel // ranks)

    def one(plan: ParameterPlan) -> int:
        """Of a matrix that is updated: its moments, or its weights."""
        moments = 0 if kept.projected.name == "fp32" else 3 * 4 * _rows(plan, ranks) * plan.rank
        return max(moments, 0 if wide else 4 * part(plan) + ROUNDED * min(segment, part(plan)))

    def refreshes(batch: Sequence[ParameterPlan]) -> int:
        copied = not wide or job.optimizer.lowered
        blocks = [4 * max(plan.columns, plan.numel // plan.columns) * plan.rank for plan in batch]
        owns = [(4 * part(plan) if copied else 0) + BASES * block for plan, block in zip(batch, blocks, strict=True)]
        return sum(sorted(owns)[-together:]) + WORK * max(blocks)

    each = GRADIENT + max(0 if kept.unprojected.name == "fp32" else QUANTISED, 0 if wide else ROUNDED)
    most = {"a_segment": each * min(segment, max(map(part, job.plans)))}
    for batch in (batch for group in groups for batch in _batches(group)):
        found = {"low_rank_gradients": 4 * sum(_rows(plan, ranks) * plan.rank for plan in batch)}
        if converted:
            found["whole_projectors"] = 4 * sum(map(_basis, batch))
        largest = {"one_matrix_in_fp32": max(map(one, batch)), "refreshes": refreshes(batch)}
        kind = max(largest, key=lambda name: largest[name])
        found[kind] = largest[kind]
        most = max(most, found, key=lambda kinds: sum(kinds.values()))
    return {kind: round(number * job.scale) for kind, number in most.items()}


def _batches(group: Sequence[ParameterPlan]) -> Iterator[list[ParameterPlan]]:
    """The matrices of a sub-group that step together: from one side, with bases of at most so many numbers."""
    for side in ("right", "left"):
        pending: list[ParameterPlan] = []
        for plan in group:
            if plan.side != side:
                continue
            if pending and sum(map(_basis, pending)) + _basis(plan) > GATHERED:
                yield pending
                pending = []
            pending.append(plan)
        if pending:
            yield pending


def _sub_groups(job: Job, size: float, ranks: int) -> Iterator[list[ParameterPlan]]:
    """The parameters that DeepSpeed steps together."""
    pending: list[ParameterPlan] = []
    numel = 0
    for plan in job.plans:
        pending.append(plan)
        numel += -(-plan.numel // ranks)
        if numel >= size:
            yield pending
            pending, numel = [], 0
    if pending:
        yield pending


def _basis(plan: ParameterPlan) -> int:
    """Numbers of a basis."""
    return (plan.columns if plan.side == "right" else plan.numel // plan.columns) * plan.rank


def _rows(plan: ParameterPlan, ranks: int) -> int:
    """Rows of a low-rank gradient on a rank, as it is before ranks have shared what they know."""
    return -(-plan.numel // plan.columns // ranks) + 1 if plan.side == "right" else plan.columns
