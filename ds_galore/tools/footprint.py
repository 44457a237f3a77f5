"""Where a configuration keeps what a rank needs: on its device, in host memory, and for the moment of a step.

The planner's figures (:mod:`.estimate`) are of tensors that live for the whole run. Here they are put where the
configuration's offload says, and DeepSpeed's own buffers come on top, by the sizes in ``zero_optimization``, as the
sources of DeepSpeed 0.19.8 have them. Activations are nobody's to count. Imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_galore.config import section
from ds_galore.tools.estimate import BYTES, Job, estimate

__all__ = ["Footprint", "footprint"]

STATES = ("master_weights", "moments", "projectors")
#: Sharded projectors are whole again, so many numbers at a time, while a step uses them (optim/plan.py).
GATHERED = 4 * 2**26


@dataclass(frozen=True)
class Footprint:
    """Bytes of a rank.

    Parameters
    ----------
    device, host
        By kind, what stays there for the whole run.
    step
        What a step needs on the device for a moment, when no activations are there.
    snapshot
        Host memory for the copy that a background checkpoint is written from.
    """

    device: dict[str, int]
    host: dict[str, int]
    step: int
    snapshot: int

    def on_device(self, room: int) -> int:
        """Bytes on the device with ``room`` bytes for activations, whose place a step's own needs take."""
        return sum(self.device.values()) + max(room, self.step)

    @property
    def on_host(self) -> int:
        """Bytes in host memory, the copy for checkpoints included."""
        return sum(self.host.values()) + self.snapshot


def footprint(config: Mapping[str, Any], job: Job) -> Footprint:
    """What a rank of a job needs, and where.

    Parameters
    ----------
    config
        The DeepSpeed configuration.
    job
        The same for the planner.
    """
    memory, zero, stage = estimate(job).memory_per_rank, section(config, "zero_optimization"), job.stage
    width, ranks = BYTES[job.precision], job.world_size if job.stage else 1
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
    device["buffers"] = _buffers(job, zero, width, offloaded=offloaded)
    step = 0 if offloaded else _step(job, zero, width, part)
    snapshot = sum(memory[kind] for kind in STATES) + (memory["weights"] if not memory["master_weights"] else 0)
    return Footprint(device, host, step, snapshot)


def _buffers(job: Job, zero: Mapping[str, Any], width: int, *, offloaded: bool) -> int:
    """DeepSpeed's buffers of gradients on their way, and at stage 3 the weights that are gathered at once."""
    if not job.stage:
        return 0
    largest = round(max(plan.numel for plan in job.plans) * job.scale)
    bucket = int(zero.get("reduce_bucket_size", 500_000_000)) * width  # allocated whole, whatever the model's size
    if job.stage < 3:
        return bucket * (2 if zero.get("overlap_comm") else 1) + (largest * width if offloaded else 0)
    live = int(zero.get("stage3_max_live_parameters", 1_000_000_000))
    gathered = max(live, largest) + int(zero.get("stage3_prefetch_bucket_size", 50_000_000))
    return bucket + min(gathered, job.numel) * width


def _step(job: Job, zero: Mapping[str, Any], width: int, part: int) -> int:
    """The flat copy of gradients and its conversion to the masters' precision, and whole projectors."""
    gathered = GATHERED if job.shards else 0
    if not job.stage:
        return gathered
    elements = min(int(zero.get("sub_group_size", 1_000_000_000)), part) if job.stage == 3 else part
    masters = BYTES[job.master_precision or job.state_precision]
    return gathered + elements * (width + (masters if masters != width else 0))
