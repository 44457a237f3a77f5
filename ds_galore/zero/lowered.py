"""DeepSpeed's ZeRO-3 optimizer without full-size gradients of projected matrices.

DeepSpeed keeps a buffer for this rank's partition of every gradient, flattens a sub-group's part of it for the step,
and has the optimizer step on that. Here what is projected is lowered when its reduced partition arrives
(:mod:`ds_galore.optim.arrivals`), and the optimizer is handed the pieces. Everything else is DeepSpeed's own.

What is overridden, all seen in DeepSpeed 0.19.8: ``_create_fp32_partitions`` (so that weights are their own masters
where both have one dtype), ``initialize_optimizer_states`` (nothing to be made, nor a buffer to
make it with), ``_setup_for_real_optimizer`` (no room for projected matrices in the buffer), ``partition_grads``,
``has_overflow``, ``get_grad_norm_direct``, ``_prepare_fp32_grad_for_sub_group``, ``unscale_and_clip_grads``,
``_release_sub_group``, ``step``, and ``_get_fp32_grad_state_partition`` (which has nothing to give any more).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor

from ds_galore.errors import BindingError, ConfigError
from ds_galore.optim.arrivals import Arrivals
from ds_galore.optim.optimizer import LowRankOptimizer
from ds_galore.optim.walks import segment_size

__all__ = ["CHECKED", "LoweredStage3", "lowered_stage3"]

#: Versions of DeepSpeed with which this has been tried.
CHECKED = ("0.19.8",)


def lowered_stage3() -> type[DeepSpeedZeroOptimizer_Stage3]:
    """:class:`LoweredStage3`, where it fits.

    Raises
    ------
    ConfigError
        With a version of DeepSpeed in which it has not been tried.
    """
    found = str(deepspeed.__version__).partition("+")[0]
    if found not in CHECKED:
        raise ConfigError(
            "optimizer.params.gradients is 'lowrank': it overrides parts of DeepSpeed's ZeRO-3 optimizer, and was"
            f" checked with DeepSpeed {', '.join(CHECKED)}; this is {found}"
        )
    return LoweredStage3


class LoweredStage3(DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """In place of ``DeepSpeedZeroOptimizer_Stage3``, for an optimizer whose ``gradients`` are ``"lowrank"``."""

    optimizer: LowRankOptimizer
    device: Any
    grad_partitions_flat_buffer: Tensor

    # ------------------------------------------------------------------ construction

    def _setup_for_real_optimizer(self) -> None:
        self._lowered: dict[int, tuple[int, str]] = {}  # by ds_id: the sub-group, and the parameter's name
        self._windows: dict[int, Arrivals] = {}
        self._hidden: list[tuple[Any, Any]] = []
        try:
            super()._setup_for_real_optimizer()
        finally:
            for parameter, partition_numel in self._hidden:
                parameter.partition_numel = partition_numel

    def _create_fp32_partitions(self) -> None:
        """Let weights be their own masters where both have one dtype.

        DeepSpeed means to, and compares a tensor's device with the name of one, which are never equal.
        """
        name, self.device = self.device, torch.device(self.device)
        try:
            super()._create_fp32_partitions()
        finally:
            self.device = name

    def initialize_optimizer_states(self) -> None:
        """Make nothing: the states come with the first step. What follows in the caller makes room for gradients."""
        for index, parameters in enumerate(self.fp16_groups):
            for parameter in parameters:
                name = self.optimizer.projected_name(parameter)
                if name is not None:
                    self._lowered[parameter.ds_id] = index, name
                    self._hidden.append((parameter, parameter.partition_numel))
                    parameter.partition_numel = lambda: 0

    # ------------------------------------------------------------------ a window

    def _open(self) -> None:
        kept: Any = {"dtype": self.gradient_accumulation_dtype, "several": self.gradient_accumulation_steps > 1}
        self._windows = {
            index: self.optimizer.open_window(flat, self.sub_group_to_group_id[index], **kept)
            for index, flat in enumerate(self.fp32_partitioned_groups_flat)
        }

    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[Tensor]) -> Any:
        """Take reduced partitions, lowered where they are projected. Collective."""
        if not self._windows:
            self._open()
        first = self.micro_step_id == 0
        others: list[tuple[Any, Tensor]] = []
        for parameter, partition in zip(params_to_release, grad_partitions, strict=True):
            found = self._lowered.get(parameter.ds_id)
            if found is None:
                others.append((parameter, partition))
                continue
            index, name = found
            self._windows[index].take(name, partition, first=first)
            if not get_accelerator().is_synchronized_device() and parameter.grad is not None:
                parameter.grad.record_stream(get_accelerator().current_stream())
            parameter.grad = None
        return super().partition_grads([each for each, _ in others], [each for _, each in others])

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Go on from a state; what has been taken since the last step is forgotten."""
        self._windows.clear()
        super().load_state_dict(*args, **kwargs)

    # ------------------------------------------------------------------ the step

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """Whether any gradient of any rank is not finite: of what was lowered, the sums that its norm is made of.

        Of the others the extremes stand for all: DeepSpeed's search takes one and a half times their memory.
        """
        others = self.grad_partitions_flat_buffer
        try:
            with get_accelerator().stream(
                self.reduce_and_partition_stream
            ):  # where gradients arrive, and super() looks
                for window in self._windows.values():
                    self.inf_or_nan_tracker.logical_or_(~torch.isfinite(window.squares()))
                if others.numel():
                    self.grad_partitions_flat_buffer = torch.stack(torch.aminmax(others))  # NaN is both
            return bool(super().has_overflow(partition_gradients))
        finally:
            self.grad_partitions_flat_buffer = others

    def get_grad_norm_direct(self, gradients: Iterable[Tensor], params: list[Any], norm_type: float = 2) -> Tensor:
        """The norm of a sub-group's gradients over all ranks; what was lowered counts as one number more.

        The others are handed over in pieces, since DeepSpeed makes a copy of each in fp64.
        """
        index = next(index for index, group in enumerate(self.fp16_groups) if group is params)
        pieces = [(self._windows[index].squares().sqrt().view(1), params[0])]
        for gradient, parameter in zip(gradients, params, strict=True):
            pieces += [(piece, parameter) for piece in torch.split(gradient, segment_size(gradient.device))]
        norm: Tensor = super().get_grad_norm_direct(*(list(each) for each in zip(*pieces, strict=True)), norm_type)
        return norm

    def _prepare_fp32_grad_for_sub_group(self, sub_group_id: int) -> None:
        flat, window = self.fp32_partitioned_groups_flat[sub_group_id], self._windows[sub_group_id]
        window.fill()
        own = zip(self.fp16_groups[sub_group_id], self.averaged_gradients[sub_group_id], strict=True)
        for parameter, gradient in own:
            if parameter.ds_id not in self._lowered:
                window.gradients.pieces[self.optimizer.name_of(parameter)] = gradient
        self.averaged_gradients[sub_group_id] = None
        flat.grad = flat.new_zeros(1).expand_as(flat)  # of no size: it tells the optimizer that there is a gradient
        self.optimizer.arrive(flat, window)

    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: Tensor) -> None:
        """Divide by the loss scale, and by as much more as clipping wants."""
        divisor: Any = self.loss_scale
        if self.clip_grad > 0.0:
            excess = (total_norm / self.loss_scale + 1e-6) / self.clip_grad
            divisor = torch.clamp(excess, min=1.0) * self.loss_scale
        self._windows[sub_group_id].gradients.factor = 1.0 / divisor

    def _release_sub_group(self, sub_group_id: int, timer_names: Any) -> None:
        super()._release_sub_group(sub_group_id, timer_names)
        self._windows.pop(sub_group_id)

    def step(self, closure: Any = None) -> None:
        """Take the step that ends a window, whatever becomes of it."""
        try:
            super().step(closure)
        finally:
            self._windows.clear()

    def _get_fp32_grad_state_partition(self, param: Any, release_swap_buffers: bool) -> Any:
        if param.ds_id in self._lowered:
            raise BindingError(
                f"the gradient of {self._lowered[param.ds_id][1]} is not kept at full size (gradients is 'lowrank'):"
                " DeepSpeed's functions for full gradients do not work with it"
            )
        return super()._get_fp32_grad_state_partition(param, release_swap_buffers)
