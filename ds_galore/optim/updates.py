"""The update rules of the family, each as one walk through a step that names what the ranks have to do together.

A rule is written as if for a single process. Where it needs what only all ranks know, it yields its share of it and
gets the whole back; :mod:`.drive` moves the walks of many parameters forward together, so that their messages travel
together. Three things can be asked for:

``sum``
    the sum over the group of a vector ``(k,)``;
``spread``
    rows of moments ``(rows, k)``, as the side needs them to be applied: nothing on the right, gathered on the left;
``cut``
    touched rows ``(rows, k)`` of a plain parameter as a matrix, with those that are cut between ranks summed;
``cut_max``
    the same of its blocks of 256 elements, with the largest taken.

Imports torch and its neighbours; the maths is in :mod:`.rules`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ds_galore.optim.formats import BLOCK, Dynamic, Floating, RowFormat
from ds_galore.optim.matrices import RIGHT, Matrix, Side, State
from ds_galore.optim.noise import key_of
from ds_galore.optim.rules import (
    adafactor_decay,
    adafactor_rate,
    adamw_direction,
    adamw_step_size,
    channel_scaling,
    growth_limiter,
    reproject,
)
from ds_galore.zero.layout import MatrixLayout

__all__ = ["RULES", "Plain", "PlainStep", "ProjectedStep", "Request", "Rule", "Slot", "Update"]

Walk = Generator[Tensor, Tensor, "Update"]


@dataclass(frozen=True)
class Slot:
    """A tensor that a rule keeps for a parameter, or two where its format needs a scale.

    Parameters
    ----------
    key
        In the parameter's state.
    extent
        ``"element"``: a number for each element of the (low-rank) gradient; ``"row"``: one for each of its rows;
        ``"column"``: one for each of its columns, on every rank.
    format
        What it is kept as.
    """

    key: str
    extent: str
    format: RowFormat


@dataclass(frozen=True)
class Request:
    """What a walk will ask for: ``"sum"``, ``"spread"``, ``"cut"`` or ``"cut_max"``, and the shape of its share."""

    kind: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Plain:
    """A parameter that is not projected, or this rank's part of it.

    Parameters
    ----------
    name
        Of the parameter.
    shape
        Of the whole parameter.
    offset
        Where in the flat tensor this rank's part begins.
    ranges
        By rank, the range of the parameter's elements that it holds.
    rank
        This rank's number within the group.
    number
        Of the parameter in the optimizer.
    moment_dtype
        ``"fp32"``, ``"bf16"`` or ``"8bit"``.
    matrix
        Where it has two dimensions or more, its layout as a matrix.
    blocks
        Its layout as a matrix of rows of 256 elements, the last padded.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    ranges: tuple[tuple[int, int], ...]
    rank: int
    number: int
    moment_dtype: str
    matrix: MatrixLayout | None
    blocks: MatrixLayout | None

    @property
    def start(self) -> int:
        """The first of the parameter's elements that this rank holds."""
        return self.ranges[self.rank][0]

    @property
    def numel(self) -> int:
        """How many elements this rank holds."""
        return self.ranges[self.rank][1] - self.start

    def layouts(self) -> dict[str, MatrixLayout]:
        """By kind of request, of the rows that it is about."""
        found = {"cut": self.matrix, "cut_max": self.blocks}
        return {kind: layout for kind, layout in found.items() if layout is not None}

    def narrow(self, flat: Tensor) -> Tensor:
        """Its elements in a flat tensor: a view ``(numel,)``."""
        return flat.view(-1).narrow(0, self.offset, self.numel)


@dataclass
class Update:
    """What is to be done to this rank's elements of a weight ``W``, of which ``G`` is the gradient.

    Projected: ``W <- beta W + alpha D Q^T + gamma diag(channel) G``; plain: ``W <- beta W + alpha D``.

    Parameters
    ----------
    direction
        ``D``: rows as the side applies them, or the elements of a plain parameter; None is zero.
    alpha, beta, gamma
        Factors.
    channel
        Of the rows (columns, from the left), or None for a ``gamma`` that is the same for all.
    """

    direction: Tensor | None
    alpha: float
    beta: float
    channel: Tensor | None = None
    gamma: float = 0.0


@dataclass
class _Step:
    """What both kinds of parameters give a rule to work with."""

    state: State
    group: Mapping[str, Any]
    slots: Mapping[str, Slot]
    weight: Tensor
    grad: Callable[[], Tensor]
    seed: int

    def noise(self, number: int, key: str) -> int:
        """The key of the noise with which a tensor is rounded in this step."""
        return key_of(self.seed, number, self.state["step"], sum(key.encode()))


@dataclass
class ProjectedStep(_Step):
    """A projected matrix in a step.

    Parameters
    ----------
    state, group, slots
        Its state, its parameter group, and what the rule keeps.
    weight
        This rank's elements, ``(numel,)``.
    grad
        Gives this rank's elements of the gradient in the dtype that is computed in.
    seed
        Of stochastic rounding.
    side, matrix
        What it is.
    low_rank
        ``R``, whole on the rows of the moments, ``(rows, r)``; may be overwritten.
    """

    side: Side
    matrix: Matrix
    low_rank: Tensor

    @property
    def counted(self) -> slice:
        """The rows of the moments that this rank counts for the group: each once."""
        return self.side.counted(self.matrix)

    def read(self, key: str) -> Tensor:
        """A slot's numbers in the dtype that is computed in; where it is stored as such, the state's own tensor."""
        slot = self.slots[key]
        parts = {suffix: self.state[key + suffix] for suffix in slot.format.parts(1)}
        columns = 1 if slot.extent == "row" else self.matrix.rank
        return slot.format.decode(parts, columns, self.low_rank.dtype)

    def write(self, key: str, block: Tensor) -> None:
        """Keep a slot's numbers; those of :meth:`read`, changed in place, need no copy."""
        slot = self.slots[key]
        if block is self.state[key]:
            return
        first = self.side.moment_rows(self.matrix)[0] if slot.extent != "column" else 0
        for suffix, part in slot.format.encode(block, self.noise(self.matrix.number, key), first).items():
            self.state[key + suffix] = part

    def gradient_squares(self) -> Tensor:
        """This rank's share of the squared norms of ``G``'s rows (right), or columns (left)."""
        local, grad = self.matrix.layout.local, self.grad()
        return local.row_squares(grad) if self.side is RIGHT else local.column_squares(grad)


@dataclass
class PlainStep(_Step):
    """A parameter that is not projected, in a step; the names are those of :class:`ProjectedStep`."""

    plain: Plain

    def read(self, key: str) -> Tensor:
        """A slot's numbers ``(numel,)``, or rows or columns ``(rows, 1)``, ``(1, n)``, in the compute dtype."""
        slot, dtype = self.slots[key], self.grad().dtype
        stored: Tensor = self.state[key]
        if not isinstance(slot.format, Dynamic):
            return slot.format.decode({"": stored}, stored.shape[-1] if stored.dim() else 1, dtype)
        if not self.plain.numel:
            return stored.to(dtype)
        codes = self._in_blocks(stored.view(-1))
        numbers = slot.format.restore(codes.view(-1), self.state[f"{key}_absmax"].view(-1), BLOCK)
        return self._from_blocks(numbers).view(stored.shape).to(dtype)

    def write(self, key: str, block: Tensor) -> None:
        """Keep a slot's numbers, where they are not 8-bit."""
        if block is self.state[key]:
            return
        format_, noise = self.slots[key].format, self.noise(self.plain.number, key)
        rounded = format_.encode(block.view(-1, 1), noise, self.plain.start)[""]
        self.state[key] = rounded.view(self.state[key].shape)

    def in_blocks(self, numbers: Tensor) -> Tensor:
        """``(blocks, 256)`` of the elements ``(numel,)``, with zeros for those of other ranks."""
        return self._in_blocks(numbers.reshape(-1))

    def write_blocks(self, key: str, blocks: Tensor, largest: Tensor) -> None:
        """Keep numbers in blocks ``(blocks, 256)`` of which ``largest``, ``(blocks,)``, is the absmax on all ranks."""
        format_ = self.slots[key].format
        assert isinstance(format_, Dynamic)
        if not self.plain.numel:
            return
        # A block that another rank holds a part of has room: there the largest number is put, for the quantiser to see.
        first, last = self._gaps()
        if first:
            blocks[0, 0] = largest[0]
        if last:
            blocks[-1, -1] = largest[-1]
        codes, absmax = format_.quantise(blocks.view(-1), BLOCK)
        self.state[key] = self._from_blocks(codes).clone().view(self.state[key].shape)
        self.state[f"{key}_absmax"] = absmax.view(-1, 1)

    def _gaps(self) -> tuple[int, int]:
        """Elements of the first and the last block that this rank does not hold."""
        first = self.plain.start % BLOCK
        return first, -(first + self.plain.numel) % BLOCK

    def _in_blocks(self, numbers: Tensor) -> Tensor:
        return torch.nn.functional.pad(numbers, self._gaps()).view(-1, BLOCK)

    def _from_blocks(self, blocks: Tensor) -> Tensor:
        first, _ = self._gaps()
        return blocks.reshape(-1)[first : first + self.plain.numel]


class Rule(ABC):
    """An update rule.

    Parameters
    ----------
    parameters
        The optimizer's hyperparameters.
    """

    #: Whether a projected matrix is updated from its low-rank gradient alone.
    low_rank_only: ClassVar[bool] = True

    def __init__(self, parameters: Any) -> None:
        self.parameters = parameters

    @abstractmethod
    def slots(self, element: RowFormat, element_square: RowFormat, compute: torch.dtype) -> list[Slot]:
        """What is kept for a projected matrix, given the formats of signed and of unsigned moments."""

    @abstractmethod
    def plain_slots(self, plain: Plain, element: RowFormat, square: RowFormat, compute: torch.dtype) -> list[Slot]:
        """What is kept for a parameter that is not projected."""

    def numbers(self) -> dict[str, float]:
        """What else is kept for a projected matrix: numbers, and what they are at first."""
        return {}

    @abstractmethod
    def requests(self, side: Side, matrix: Matrix, rows: int) -> list[Request]:
        """What :meth:`projected` asks for, of ``rows`` rows of moments; of the same kinds for all matrices."""

    @abstractmethod
    def projected(self, step: ProjectedStep) -> Walk:
        """Update the state of a projected matrix, and tell what is to be done to the weights."""

    def plain_requests(self, plain: Plain) -> list[Request]:
        """What :meth:`plain` asks for; of the same kinds for all parameters."""
        return []

    @abstractmethod
    def plain(self, step: PlainStep) -> Walk:
        """The same for a parameter that is not projected."""

    def _keep_requests(self, plain: Plain, count: int) -> list[Request]:
        """What :meth:`_keep` asks for, of so many moments: nothing unless some parameters' are 8-bit."""
        parameters = self.parameters
        if (parameters.unprojected_moment_dtype or parameters.moment_dtype) != "8bit":
            return []
        return [Request("cut_max", (plain.blocks.local.num_rows if plain.blocks is not None else 0, count))]

    def _keep(self, step: PlainStep, moments: Mapping[str, Tensor]) -> Generator[Tensor, Tensor, None]:
        """Keep moments of a plain parameter, by key."""
        requests = self._keep_requests(step.plain, len(moments))
        if step.plain.moment_dtype != "8bit":
            for request in requests:
                yield step.grad().new_zeros(request.shape)
            for key, moment in moments.items():
                step.write(key, moment)
            return
        blocks = {key: step.in_blocks(moment) for key, moment in moments.items()}
        largest = yield torch.stack([each.abs().amax(dim=1) for each in blocks.values()], dim=1)
        for number, (key, each) in enumerate(blocks.items()):
            step.write_blocks(key, each, largest[:, number])

    @abstractmethod
    def carry(self, step: ProjectedStep, transition: Tensor) -> None:
        """Carry a matrix's state into a new basis; ``transition`` is ``Q_old^T Q_new``, ``(old rank, new rank)``."""


class AdamW(Rule):
    """GaLore: AdamW on the low-rank gradient (arXiv 2403.03507, algorithm 2)."""

    def slots(self, element: RowFormat, element_square: RowFormat, compute: torch.dtype) -> list[Slot]:
        return [Slot("exp_avg", "element", element), Slot("exp_avg_sq", "element", element_square)]

    def plain_slots(self, plain: Plain, element: RowFormat, square: RowFormat, compute: torch.dtype) -> list[Slot]:
        return self.slots(element, square, compute)

    def requests(self, side: Side, matrix: Matrix, rows: int) -> list[Request]:
        return [Request("spread", (rows, matrix.rank))]

    def projected(self, step: ProjectedStep) -> Walk:
        direction = yield self._direction(step)
        size, beta = self._factors(step)
        return Update(direction, -size * step.group["scale"] * beta, beta)

    def _direction(self, step: ProjectedStep) -> Tensor:
        step.state["step"] += 1
        exp_avg, exp_avg_sq = step.read("exp_avg"), step.read("exp_avg_sq")
        group = step.group
        direction = adamw_direction(step.low_rank, exp_avg, exp_avg_sq, betas=group["betas"], eps=group["eps"])
        step.write("exp_avg", exp_avg)
        step.write("exp_avg_sq", exp_avg_sq)
        return direction

    @staticmethod
    def _factors(step: _Step) -> tuple[float, float]:
        """The size of the step, and the factor on the weights afterwards, in galore-torch's order."""
        group = step.group
        size = adamw_step_size(
            group["lr"], step.state["step"], betas=group["betas"], correct_bias=group["correct_bias"]
        )
        return size, 1.0 - group["lr"] * group["weight_decay"]

    def plain_requests(self, plain: Plain) -> list[Request]:
        return self._keep_requests(plain, 2)

    def plain(self, step: PlainStep) -> Walk:
        step.state["step"] += 1
        exp_avg, exp_avg_sq = step.read("exp_avg"), step.read("exp_avg_sq")
        grad = step.grad().clone().view(exp_avg.shape)
        group = step.group
        direction = adamw_direction(grad, exp_avg, exp_avg_sq, betas=group["betas"], eps=group["eps"])
        yield from self._keep(step, {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq})
        size, beta = self._factors(step)
        return Update(direction.view(-1), -size * beta, beta)

    def carry(self, step: ProjectedStep, transition: Tensor) -> None:
        moments = reproject(
            step.read("exp_avg"),
            step.read("exp_avg_sq"),
            transition,
            step=step.state["step"],
            betas=step.group["betas"],
            product=lambda moment, square: step.side.moment_product(step.matrix, moment, square),
        )
        for key, moment in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
            step.write(key, moment)


class APOLLO(AdamW):
    """APOLLO: the full gradient, scaled as AdamW scales the low-rank one (arXiv 2412.05270, algorithm 1)."""

    low_rank_only = False

    def numbers(self) -> dict[str, float]:
        return {"update_norm": 0.0}

    def requests(self, side: Side, matrix: Matrix, rows: int) -> list[Request]:
        if self.parameters.scaling == "tensor":
            return [Request("sum", (3,))]
        return [Request("spread", (rows, 1)), Request("sum", (1,))]

    def projected(self, step: ProjectedStep) -> Walk:
        low_rank = step.low_rank.clone()
        direction = self._direction(step)
        if self.parameters.scaling == "tensor":
            counted = step.counted
            squares = [direction[counted].square().sum(), low_rank[counted].square().sum(), _square(step.grad())]
            sums = yield torch.stack(squares)
            factor = channel_scaling(sums[0], sums[1])
            channel = None
            norm, constant = torch.stack([factor * sums[2].sqrt(), factor]).tolist()
        else:
            channel = yield channel_scaling(_squares(direction), _squares(low_rank)).unsqueeze(1)
            channel = channel.view(-1)
            total = yield (channel.square() @ step.gradient_squares()).view(1)
            norm, constant = float(total.sqrt()), 1.0
        limiter = growth_limiter(norm, step.state["update_norm"], self.parameters.norm_growth_limit)
        step.state["update_norm"] = norm * limiter
        size, beta = self._factors(step)
        return Update(None, 0.0, beta, channel, -size * step.group["scale"] * beta * limiter * constant)


class Fira(AdamW):
    """Fira: GaLore's update, and the rest of the gradient scaled as AdamW scales it (arXiv 2410.01623, algorithm 1).

    ``scale`` is a factor on both, so that they stay in proportion.
    """

    low_rank_only = False

    def numbers(self) -> dict[str, float]:
        return {"residual_norm": 0.0}

    def requests(self, side: Side, matrix: Matrix, rows: int) -> list[Request]:
        return [Request("spread", (rows, 1)), Request("sum", (1,)), Request("spread", (rows, matrix.rank))]

    def projected(self, step: ProjectedStep) -> Walk:
        low_rank = step.low_rank.clone()
        direction = self._direction(step)
        squares = _squares(low_rank)
        own = channel_scaling(_squares(direction), squares).unsqueeze(1)
        channel = yield own
        channel = channel.view(-1)
        # With orthonormal columns |G - R Q^T|^2 = |G|^2 - |R|^2, row by row. Of a rounded basis it is nearly so.
        inside = own.view(-1)[step.counted].square() @ squares[step.counted]
        total = yield (channel.square() @ step.gradient_squares() - inside).view(1)
        norm = math.sqrt(max(float(total), 0.0))
        limiter = growth_limiter(norm, step.state["residual_norm"], self.parameters.norm_growth_limit)
        step.state["residual_norm"] = norm * limiter
        size, beta = self._factors(step)
        factor = -size * step.group["scale"] * beta
        combined = yield direction.addcmul_(low_rank, own, value=-limiter)
        return Update(combined, factor, beta, channel, factor * limiter)


class Adafactor(Rule):
    """Adafactor on the low-rank gradient, as galore-torch's GaLoreAdafactor (arXiv 1804.04235, algorithm 4).

    Second moments of a matrix are a row and a column, also where ranks hold it in parts.
    """

    def slots(self, element: RowFormat, element_square: RowFormat, compute: torch.dtype) -> list[Slot]:
        factors = [
            Slot("exp_avg_sq_row", "row", Floating(compute)),
            Slot("exp_avg_sq_col", "column", Floating(compute)),
        ]
        return factors if self.parameters.beta1 is None else [Slot("exp_avg", "element", element), *factors]

    def plain_slots(self, plain: Plain, element: RowFormat, square: RowFormat, compute: torch.dtype) -> list[Slot]:
        if plain.matrix is not None:
            return self.slots(element, square, compute)
        own = [Slot("exp_avg_sq", "element", Floating(compute))]
        return own if self.parameters.beta1 is None else [Slot("exp_avg", "element", element), *own]

    def requests(self, side: Side, matrix: Matrix, rows: int) -> list[Request]:
        return [Request("sum", (matrix.rank + 2,)), Request("sum", (1,)), Request("spread", (rows, matrix.rank))]

    def projected(self, step: ProjectedStep) -> Walk:
        state, group, low_rank, counted = step.state, step.group, step.low_rank, step.counted
        state["step"] += 1
        _, own, rows = step.side.moment_rows(step.matrix)  # what follows a rank's own rows is zero, and stays so
        decay = adafactor_decay(state["step"], group["decay_rate"])
        squares = low_rank.square()
        row, column = step.read("exp_avg_sq_row"), step.read("exp_avg_sq_col")
        row[:own].mul_(decay).add_(squares[:own].mean(dim=1, keepdim=True).add_(group["eps"][0]), alpha=1.0 - decay)
        sums = yield torch.cat([squares[counted].sum(dim=0), row[counted].sum().view(1), _square(step.weight).view(1)])
        column.mul_(decay).add_((sums[:-2] / rows).add_(group["eps"][0]), alpha=1.0 - decay)
        step.write("exp_avg_sq_row", row)
        step.write("exp_avg_sq_col", column)
        update = low_rank
        update[:own].mul_((row[:own] / (sums[-2] / rows)).rsqrt_()).mul_(column.rsqrt())
        total = yield _square(update[counted]).view(1)
        self._clip(update, total, rows * step.matrix.rank, group)
        rate = self._rate(step, sums[-1], math.prod(step.matrix.layout.shape))
        update.mul_(rate)
        if self.parameters.beta1 is not None:
            exp_avg = step.read("exp_avg")
            exp_avg.lerp_(update, 1.0 - self.parameters.beta1)
            step.write("exp_avg", exp_avg)
            update = exp_avg
        direction = yield update
        return Update(direction, -group["scale"], 1.0 - rate * group["weight_decay"])

    @staticmethod
    def _clip(update: Tensor, total: Tensor, numel: int, group: Mapping[str, Any]) -> None:
        update.div_((total / numel).sqrt_().div_(group["clip_threshold"]).clamp_(min=1.0))

    @staticmethod
    def _rate(step: _Step, weight_squares: Tensor, numel: int) -> float:
        group, scale = step.group, 1.0
        if group["scale_parameter"]:
            scale = max(group["eps"][1], math.sqrt(float(weight_squares) / numel))
        return adafactor_rate(
            group["lr"],
            step.state["step"],
            relative_step=group["relative_step"],
            warmup_init=group["warmup_init"],
            scale=scale,
        )

    def plain_requests(self, plain: Plain) -> list[Request]:
        matrix = plain.matrix
        rows, columns = (matrix.local.num_rows, matrix.shape[1]) if matrix is not None else (0, 0)
        requests = [Request("cut", (rows, 1)), Request("sum", (columns + 2,)), Request("sum", (1,))]
        return requests if self.parameters.beta1 is None else [*requests, *self._keep_requests(plain, 1)]

    def plain(self, step: PlainStep) -> Walk:
        state, group, matrix = step.state, step.group, step.plain.matrix
        state["step"] += 1
        decay = adafactor_decay(state["step"], group["decay_rate"])
        grad, numel = step.grad(), math.prod(step.plain.shape)
        weight_squares = _square(step.weight).view(1)
        if matrix is None:
            yield grad.new_zeros((0, 1))
            sums = yield torch.cat([grad.new_zeros(1), weight_squares])
            square = step.read("exp_avg_sq")
            square.view(-1).mul_(decay).add_(grad.square().add_(group["eps"][0]), alpha=1.0 - decay)
            step.write("exp_avg_sq", square)
            update = square.view(-1).rsqrt().mul_(grad)
        else:
            local, (rows, columns) = matrix.local, matrix.shape
            squares = yield local.row_squares(grad).unsqueeze(1)
            row, column = step.read("exp_avg_sq_row"), step.read("exp_avg_sq_col")
            row.mul_(decay).add_((squares / columns).add_(group["eps"][0]), alpha=1.0 - decay)
            counted = row[matrix.counted_rows()].sum().view(1)
            sums = yield torch.cat([local.column_squares(grad), counted, weight_squares])
            column.mul_(decay).add_((sums[:-2] / rows).add_(group["eps"][0]), alpha=1.0 - decay)
            step.write("exp_avg_sq_row", row)
            step.write("exp_avg_sq_col", column)
            update = grad.clone()
            local.multiply(update, rows=(row / (sums[-2] / rows)).rsqrt_().view(-1))
            local.multiply(update, columns=column.rsqrt().view(-1))
        total = yield _square(update).view(1)
        self._clip(update, total, numel, group)
        rate = self._rate(step, sums[-1], numel)
        update.mul_(rate)
        if self.parameters.beta1 is not None:
            exp_avg = step.read("exp_avg")
            exp_avg.view(-1).lerp_(update, 1.0 - self.parameters.beta1)
            yield from self._keep(step, {"exp_avg": exp_avg})
            update = exp_avg.reshape(-1)
        return Update(update, -1.0, 1.0 - rate * group["weight_decay"])

    def carry(self, step: ProjectedStep, transition: Tensor) -> None:
        column = step.read("exp_avg_sq_col") @ transition.square()
        step.write("exp_avg_sq_col", column.clamp_(min=step.group["eps"][0]))
        if self.parameters.beta1 is not None:
            step.write("exp_avg", step.side.moment_product(step.matrix, step.read("exp_avg"), transition))


def _square(tensor: Tensor) -> Tensor:
    """The squared norm, ``()``, in float32 at least."""
    dtype = torch.float32 if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.dtype
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=dtype)
    return norm.square()


def _squares(rows: Tensor) -> Tensor:
    """The squared norms of rows, ``(rows,)``."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms.square()


#: By the name of an optimizer, its rule.
RULES: Mapping[str, type[Rule]] = {
    "GaLoreAdamW": AdamW,
    "GaLoreAdamW8bit": AdamW,
    "GaLoreAdafactor": Adafactor,
    "APOLLOAdamW": APOLLO,
    "FiraAdamW": Fira,
}


def slots_by_key(slots: Sequence[Slot]) -> dict[str, Slot]:
    """Slots by their key."""
    return {slot.key: slot for slot in slots}
