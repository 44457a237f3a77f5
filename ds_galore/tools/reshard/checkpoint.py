"""All ranks' states of a checkpoint, whoever wrote it, as plain Python: what a resharding starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_galore.errors import DataError
from ds_galore.tools.reshard.layout import Flat
from ds_galore.tools.states import Form, Piece, Tensor

__all__ = ["MODEL", "OPTIMIZER", "Checkpoint", "inner_state", "pieces_of", "shape_of", "state_numbers", "zero_section"]

MODEL, OPTIMIZER = "_model_states.pt", "_optim_states.pt"


@dataclass
class Checkpoint:
    """A checkpoint's states, whoever wrote them."""

    directory: Path
    stage: int
    ranks: int
    model: list[Any]  # by rank; one under ZeRO 0, 1 and 2
    optim: list[Any]  # by rank; none without ZeRO
    prefix: str  # of the names of the optimizer's files
    tensors: dict[str, Tensor]
    metadata: dict[str, Any] = field(default_factory=dict)
    decode: bool = False  # whether reading a range decodes more than that

    @property
    def step(self) -> int | None:
        """After which it was saved."""
        step = self.metadata.get("step")
        return step if isinstance(step, int) else None


def inner_state(source: Checkpoint, tree: Any) -> dict[str, Any]:
    """The state dict of the optimizer that DeepSpeed wraps."""
    inner = tree["optimizer_state_dict"]["optimizer_state_dict" if source.stage == 3 else "base_optimizer_state"]
    if not isinstance(inner, dict) or "param_groups" not in inner:
        raise DataError(f"{source.directory}: an elastic checkpoint cannot be resharded")
    found: dict[str, Any] = inner
    return found


def state_numbers(inner: Mapping[str, Any]) -> list[int]:
    """The numbers under which an optimizer's states are, in the order of DeepSpeed's flat tensors."""
    return [number for group in inner["param_groups"] for number in group["params"]]


def shape_of(form: Any) -> tuple[int, ...]:
    """A ``torch.Size``, or another sequence of numbers."""
    if isinstance(form, Form):
        return tuple(int(size) for size in form.value[1:])
    return tuple(int(size) for size in form)


def pieces_of(flat: Flat, kind: str) -> tuple[Piece, ...]:
    """What a flat tensor of ``kind``, such as ``exp_avg``, consists of."""
    return tuple((f"{part.name}/{kind}", part.start, part.offset, part.numel) for part in flat.parts if part.numel)


def zero_section(source: Checkpoint) -> Mapping[str, Any]:
    """``zero_optimization`` of the configuration with which it was saved."""
    config = source.optim[0].get("ds_config") if source.optim else None
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    return zero if isinstance(zero, dict) else {}
