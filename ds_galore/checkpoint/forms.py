"""The classes whose objects may stand in a state file. No other is ever built, or written to a pickle."""

from __future__ import annotations

__all__ = ["ENUMERATIONS", "OBJECTS"]

#: Classes whose objects are stored as some of their fields, by module and name.
OBJECTS: dict[str, tuple[str, ...]] = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": ("cur_scale", "dynamic", "dtype"),
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": (
        *("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window", "min_scale", "delayed_shift"),
        *("cur_hysteresis", "consecutive_hysteresis", "raise_error_at_min_scale", "dynamic", "dtype"),
    ),
    "deepspeed.utils.tensor_fragment.fragment_address": ("numel", "start"),
}
#: Enumerations whose members are stored by value.
ENUMERATIONS = frozenset({"deepspeed.runtime.zero.config.ZeroStageEnum"})
