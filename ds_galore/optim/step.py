"""One step of an update rule on the plain and the projected parameters of a flat tensor, on all ranks that hold it.

Every function here is collective. Local work runs under a guard, so that a rank that fails stays in step with the
others until the next vote, where all raise. Imports torch, :mod:`ds_galore.zero` and its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_galore.optim.drive import Traveller, drive
from ds_galore.optim.gradients import Gradients
from ds_galore.optim.matrices import RIGHT, Matrix, Side, State
from ds_galore.optim.noise import key_of, round_to_bf16
from ds_galore.optim.plan import Batch, FlatPlan, compute_dtype
from ds_galore.optim.renewal import Renewal
from ds_galore.optim.schedule import is_due, is_turn, pass_turn, starts_at_random
from ds_galore.optim.states import StateTensor, effective, plain_tensors, projected_tensors
from ds_galore.optim.walks import (
    Plain,
    PlainStep,
    ProjectedStep,
    Rule,
    Segment,
    Slot,
    Update,
    segment_size,
    slots_by_key,
)
from ds_galore.optim.watching import Watch
from ds_galore.parameters import LowRankParameters
from ds_galore.zero.group import Guard

__all__ = ["FlatStep"]


class FlatStep:
    """The step of one tensor.

    Parameters
    ----------
    tensor
        The tensor.
    gradients
        Where its gradients are.
    group
        Its parameter group.
    plan
        What it consists of.
    state
        The optimizer's state of the tensor.
    parameters
        The optimizer's hyperparameters.
    rule
        Its update rule.
    skipped
        Told the name of each parameter whose gradient is not finite.
    watch
        Told of refreshes, where somebody watches: on all ranks or on none.
    """

    def __init__(
        self,
        tensor: Tensor,
        gradients: Gradients,
        group: Mapping[str, Any],
        plan: FlatPlan,
        state: State,
        parameters: LowRankParameters,
        rule: Rule,
        skipped: Callable[[str], None],
        watch: Watch | None = None,
    ) -> None:
        # A contiguous copy of a model's own tensor that is not, such as a convolution's in channels_last.
        self._given, self._tensor, self._gradients = tensor, tensor.contiguous(), gradients
        self._group, self.plan = group, plan
        self._state, self.parameters, self.rule, self._skipped = state, parameters, rule, skipped
        self.watch = watch
        self._compute = compute_dtype(tensor)
        self.like = torch.empty(0, dtype=self._compute, device=tensor.device)
        self._slots = slots_by_key(plan.slots)
        self.guard = Guard()

    def run(self) -> None:
        """Update the tensor and its state.

        Raises
        ------
        Exception
            What this rank ran into.
        PeerError
            If another rank did.
        """
        if self.plan.plain:
            self._step_plain()
        for batch in self.plan.batches:
            self._step_batch(batch)
        if self._tensor is not self._given:
            with self.guard:
                self._given.copy_(self._tensor)
        self.vote()

    def vote(self, marks: Sequence[bool | Tensor] = ()) -> list[bool]:
        """Marks that any rank set, of as many as there are on all ranks; raises on all where one has failed."""
        return self.plan.group.agree(marks, self.guard.error, self._tensor.device)

    def _state_of(self, name: str) -> State:
        state: State = self._state.setdefault(name, {}) if self.plan.nested else self._state
        return state

    def create(self, tensors: Sequence[StateTensor]) -> dict[str, Tensor]:
        """By key, zeros for a state."""
        return {each.key: torch.zeros(each.shape, dtype=each.dtype, device=self._tensor.device) for each in tensors}

    def _store(self, weight: Tensor, wide: Tensor, number: int, first: int, step: int) -> None:
        """Put updated weights back, where they are kept in fewer bits than are computed with."""
        if wide is weight:
            return
        if not (self.parameters.stochastic_rounding and weight.dtype == torch.bfloat16):
            weight.copy_(wide)
            return
        key, size = key_of(self.parameters.seed, number, step, 0), segment_size(weight.device)
        for begin in range(0, weight.numel(), size):
            part = wide[begin : begin + size]
            weight[begin : begin + size].copy_(round_to_bf16(part, key, first + begin))

    # ------------------------------------------------------------------ parameters that are not projected

    def _step_plain(self) -> None:
        plan, guard = self.plan, self.guard
        refused = self.vote(
            guard.run(
                lambda: [self._is_refused(each) for each in plan.plain],
                lambda: [False] * len(plan.plain),
            )
        )
        active: list[tuple[Plain, list[Slot]]] = []
        for each, slots, bad in zip(plan.plain, plan.plain_slots, refused, strict=True):
            if bad:
                self._skipped(each.name)
            else:
                active.append((each, slots))
        travellers = [
            Traveller(
                partial(self._walk_plain, each, slots),
                self.rule.plain_requests(each),
                layouts=each.layouts(),
            )
            for each, slots in active
        ]
        with guard:
            for each, slots in zip(plan.plain, plan.plain_slots, strict=True):
                state = self._state_of(each.name)
                if not state:
                    shape = (each.numel,) if plan.nested else tuple(self._tensor.shape)
                    state.update(step=0, **self.create(list(plain_tensors(each, slots, shape))))
        updates = drive(travellers, None, plan.group, guard, self.like)
        with guard:
            for (each, _), update in zip(active, updates, strict=True):
                self._apply_plain(each, update)

    def _is_refused(self, plain: Plain) -> bool | Tensor:
        """Whether an element of a gradient is not finite."""
        found = [_is_not_finite(self._gradients.plain(plain, each)) for each in plain.segments(self._tensor.device)]
        if all(isinstance(each, bool) for each in found):
            return any(found)
        return torch.stack([torch.as_tensor(each, device=self._tensor.device) for each in found]).any()

    def _apply_plain(self, plain: Plain, update: Update) -> None:
        weights, step = plain.narrow(self._tensor), self._state_of(plain.name)["step"]
        for segment in plain.segments(self._tensor.device):
            weight = weights[segment]
            wide = weight.to(self._compute)
            if update.beta != 1.0:
                wide.mul_(update.beta)
            if update.pieces is not None:
                wide.add_(update.pieces(segment), alpha=update.alpha)
            self._store(weight, wide, plain.number, plain.start + segment.start, step)

    def _walk_plain(self, plain: Plain, slots: list[Slot]) -> Any:
        def part(segment: Segment) -> Tensor:
            return self._gradients.plain(plain, segment).to(self._compute)

        step = PlainStep(
            state=self._state_of(plain.name),
            group=self._group,
            slots=slots_by_key(slots),
            weight=partial(plain.narrow, self._tensor),
            seed=self.parameters.seed,
            plain=plain,
            part=part,
            like=self.like,
        )
        return self.rule.plain(step)

    # ------------------------------------------------------------------ projected matrices

    def gradient(self, matrix: Matrix) -> Tensor:
        """This rank's elements of a matrix's gradient, in the dtype that is computed in."""
        return self._gradients.whole(matrix).to(self._compute)

    def _states(self, batch: Batch) -> list[State]:
        """The states of a batch's matrices, made where they are not there yet. Collective."""
        states = [self._state_of(matrix.name) for matrix in batch.matrices]
        if not all(states):  # the same on all ranks
            with self.guard:
                for matrix, state in zip(batch.matrices, states, strict=True):
                    if not state:
                        self._begin(state, batch.side, matrix)
            self.vote()
        return states

    def start(self) -> None:
        """Give matrices that start at random their first bases, before there is a gradient. Raises as :meth:`run`."""
        for batch in self.plan.batches:
            states = self._states(batch)
            matrices = [effective(matrix, state) for matrix, state in zip(batch.matrices, states, strict=True)]
            starting = [
                number
                for number, (matrix, state) in enumerate(zip(matrices, states, strict=True))
                if not state["has_basis"] and starts_at_random(matrix, self.parameters)
            ]
            if starting:
                bases = batch.side.load(matrices, states, self.plan.group, self.guard, self.like)
                Renewal(self, batch, matrices, states, bases).run(starting)
        self.vote()

    def _step_batch(self, batch: Batch) -> None:
        side, group, guard = batch.side, self.plan.group, self.guard
        states = self._states(batch)
        matrices = [effective(matrix, state) for matrix, state in zip(batch.matrices, states, strict=True)]
        bases = side.load(matrices, states, group, guard, self.like)
        due = [is_due(matrix, state) for matrix, state in zip(matrices, states, strict=True)]
        turns = [is_turn(matrix, state) for matrix, state in zip(matrices, states, strict=True)]

        # This rank's shares of the low-rank gradients whose basis stays, and what is wrong with its gradients.
        shares: dict[int, Tensor] = {}
        marks: list[bool | Tensor] = []
        with guard:
            for number, matrix in enumerate(matrices):
                arrived = self._gradients.share(matrix)
                telling = self.gradient(matrix) if arrived is None else arrived
                if arrived is not None:
                    shares[number] = arrived
                elif not due[number]:
                    telling = shares[number] = side.share(matrix, telling, bases[number])  # as telling, and smaller
                marks.append(_is_not_finite(telling))
        refused = self.vote(marks if guard.ok else [False] * len(states))
        for matrix, bad in zip(matrices, refused, strict=True):
            if bad:
                self._skipped(matrix.name)
        active = [number for number, bad in enumerate(refused) if not bad]
        for number in active:
            if turns[number] and not due[number]:
                pass_turn(states[number])

        refreshing = [number for number in active if due[number]]
        renewal = Renewal(self, batch, matrices, states, bases)
        renewed = renewal.run(refreshing) if refreshing else []
        for number in renewed:
            shares.pop(number, None)
        # A matrix whose first gradients are zero has no basis yet, and nothing to be updated by.
        active = [number for number in active if states[number]["has_basis"]]
        if not active:
            return
        chosen = [matrices[number] for number in active]

        def missing_shares() -> list[Tensor]:
            for number, matrix in zip(active, chosen, strict=True):
                if number not in shares:
                    shares[number] = side.share(matrix, self.gradient(matrix), bases[number])
            return [shares[number] for number in active]

        def no_shares() -> list[Tensor]:
            return [self.like.new_zeros(side.share_shape(matrix)) for matrix in chosen]

        low_rank = side.combine(chosen, guard.run(missing_shares, no_shares), group, guard)
        if self.watch is not None and renewed:
            renewal.report(self.watch, {number: low_rank[active.index(number)] for number in renewed})
        travellers = [
            Traveller(
                partial(self.rule.projected, self.projected(side, matrix, states[number], grad)),
                self.rule.requests(side, matrix, side.moment_shape(matrix)[0]),
                matrix,
            )
            for number, matrix, grad in zip(active, chosen, low_rank, strict=True)
        ]
        updates = drive(travellers, side, group, guard, self.like)
        with guard:
            for number, matrix, update in zip(active, chosen, updates, strict=True):
                self._apply(side, matrix, update, bases[number], states[number]["step"])

    def projected(self, side: Side, matrix: Matrix, state: State, low_rank: Tensor) -> ProjectedStep:
        """What the rule works with."""
        return ProjectedStep(
            state=state,
            group=self._group,
            slots=self._slots,
            weight=partial(matrix.narrow, self._tensor),
            grad=partial(self.gradient, matrix),
            seed=self.parameters.seed,
            side=side,
            matrix=matrix,
            low_rank=low_rank,
        )

    def _apply(self, side: Side, matrix: Matrix, update: Update, basis: Tensor, step: int) -> None:
        weight = matrix.narrow(self._tensor)
        wide = weight.to(self._compute)  # itself, unless the weights are kept in 16 bits
        if update.direction is not None:
            side.apply(matrix, wide, update.direction, basis, update.alpha, update.beta)
        elif update.beta != 1.0:
            wide.mul_(update.beta)
        if update.gamma:
            grad, local = self.gradient(matrix), matrix.layout.local
            if update.channel is None:
                wide.add_(grad, alpha=update.gamma)
            elif side is RIGHT:
                local.add_scaled(wide, grad, rows=update.channel, alpha=update.gamma)
            else:
                local.add_scaled(wide, grad, columns=update.channel, alpha=update.gamma)
        self._store(weight, wide, matrix.number, matrix.layout.local.start, step)

    def _begin(self, state: State, side: Side, matrix: Matrix) -> None:
        drawn = matrix.projector is None
        state.update(step=0, has_basis=int(drawn), **self.rule.numbers())
        if drawn:
            state["draw"] = 0
        if matrix.energy is not None:
            state["rank"] = matrix.rank
        if self.parameters.adaptive_gap:
            state.update(gap_factor=1, turns_left=1)
        state.update(self.create(list(projected_tensors(side, matrix, self.plan.slots))))


def _is_not_finite(tensor: Tensor) -> bool | Tensor:
    """Whether an element is not finite, in one pass without a temporary; on an accelerator without waiting for it."""
    if tensor.numel() == 0:
        return False if tensor.device.type == "cpu" else torch.zeros((), dtype=torch.bool, device=tensor.device)
    # The sum is the fastest to tell that all is well; of finite numbers it may be infinite, which the extremes tell.
    if tensor.device.type == "cpu" and math.isfinite(tensor.sum().item()):
        return False
    low, high = torch.aminmax(tensor)  # NaN shows in both; five to ten times faster on a CPU than the maximum norm
    if tensor.device.type == "cpu":
        return not (math.isfinite(low.item()) and math.isfinite(high.item()))
    return ~(torch.isfinite(low) & torch.isfinite(high))
