"""The update rules of the family: each is a walk through a step, on what :mod:`.walks` gives it.

Imports torch and its neighbours; the maths is in :mod:`.rules`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ds_galore.optim.formats import Floating, RowFormat
from ds_galore.optim.matrices import Matrix, Side
from ds_galore.optim.rules import (
    adafactor_decay,
    adafactor_rate,
    adamw_direction,
    adamw_step_size,
    channel_scaling,
    growth_limiter,
    reproject,
)
from ds_galore.optim.walks import AnyStep, Plain, PlainStep, ProjectedStep, Request, Rule, Segment, Slot, Update, Walk

__all__ = ["APOLLO", "Adafactor", "AdamW", "Fira"]


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
    def _factors(step: AnyStep) -> tuple[float, float]:
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
        group, keys = step.group, ("exp_avg", "exp_avg_sq")

        def advanced(segment: Segment) -> tuple[list[Tensor], Tensor]:
            moments, grad = [step.read(key, segment) for key in keys], step.part(segment).clone()
            return moments, adamw_direction(grad, *moments, betas=group["betas"], eps=group["eps"])

        largest = yield from self._largest(step, len(keys), lambda segment: advanced(segment)[0])

        def direction(segment: Segment) -> Tensor:
            moments, found = advanced(segment)
            for key, moment, most in zip(keys, moments, largest, strict=True):
                step.write(key, moment, segment, most)
            return found

        size, beta = self._factors(step)
        return Update(None, -size * beta, beta, pieces=direction)

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
        sums = yield torch.cat([squares[counted].sum(dim=0), row[counted].sum().view(1), self._weight_squares(step)])
        column.mul_(decay).add_((sums[:-2] / rows).add_(group["eps"][0]), alpha=1.0 - decay)
        step.write("exp_avg_sq_row", row)
        step.write("exp_avg_sq_col", column)
        update = low_rank
        update[:own].mul_((row[:own] / (sums[-2] / rows)).rsqrt_()).mul_(column.rsqrt())
        total = yield _square(update[counted]).view(1)
        rate = self._rate(step, sums[-1], math.prod(step.matrix.layout.shape))
        update.mul_(self._clipped(total, rows * step.matrix.rank, group).reciprocal_().mul_(rate))
        if self.parameters.beta1 is not None:
            exp_avg = step.read("exp_avg")
            exp_avg.lerp_(update, 1.0 - self.parameters.beta1)
            step.write("exp_avg", exp_avg)
            update = exp_avg
        direction = yield update
        return Update(direction, -group["scale"], 1.0 - rate * group["weight_decay"])

    @staticmethod
    def _weight_squares(step: AnyStep) -> Tensor:
        """This rank's share of the weights' squared norm, ``(1,)``, where the rule asks for it."""
        if not step.group["scale_parameter"]:
            weight = step.weight()
            return weight.new_zeros(1, dtype=torch.promote_types(weight.dtype, torch.float32))
        return _square(step.weight()).view(1)

    @staticmethod
    def _clipped(total: Tensor, numel: int, group: Mapping[str, Any]) -> Tensor:
        """What an update of a squared norm is divided by, ``(1,)``: its root mean square, where that is too large."""
        return (total / numel).sqrt_().div_(group["clip_threshold"]).clamp_(min=1.0)

    @staticmethod
    def _rate(step: AnyStep, weight_squares: Tensor, numel: int) -> float:
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
        weight_squares = self._weight_squares(step)
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
        rate = self._rate(step, sums[-1], numel)
        update.mul_(self._clipped(total, numel, group).reciprocal_().mul_(rate))
        if self.parameters.beta1 is not None:
            exp_avg = step.read("exp_avg")
            flat = exp_avg.view(-1).lerp_(update, 1.0 - self.parameters.beta1)
            [largest] = yield from self._largest(step, 1, lambda segment: [flat[segment]])
            step.write("exp_avg", exp_avg, largest=largest)
            update = flat
        beta = 1.0 - rate * group["weight_decay"]
        return Update(None, -1.0, beta, pieces=lambda segment: update[segment])

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
