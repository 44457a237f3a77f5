"""Renewing bases in the middle of a step: which way, to which rank, and what becomes of the moments.

Finding a basis is :mod:`.refresh`'s, when it is due :mod:`.schedule`'s. Collective, as :mod:`.step`. Imports torch and
its neighbours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_galore.optim.matrices import Matrix, State, random_basis
from ds_galore.optim.noise import key_of
from ds_galore.optim.plan import Batch
from ds_galore.optim.refresh import RefreshJob, refresh_bases
from ds_galore.optim.schedule import set_gap, starts_at_random
from ds_galore.optim.states import projected_tensors
from ds_galore.optim.watching import Refreshed, Watch

if TYPE_CHECKING:
    from ds_galore.optim.step import FlatStep

__all__ = ["Renewal"]


class Renewal:
    """Renewing the bases of some matrices of a batch, in the state and for the step at hand.

    Parameters
    ----------
    step
        The step in which it happens.
    batch
        The matrices as they were planned.
    matrices, states, bases
        With the ranks that they have, their states, and their bases; ``matrices`` and ``bases`` are changed.
    """

    def __init__(
        self, step: FlatStep, batch: Batch, matrices: list[Matrix], states: list[State], bases: list[Tensor]
    ) -> None:
        self._step, self._side, self._planned = step, batch.side, batch.matrices
        self._matrices, self._states, self._bases = matrices, states, bases
        self._group, self._guard, self._parameters = step.plan.group, step.guard, step.parameters
        self._overlaps: dict[int, float] = {}
        self._seconds = 0.0

    def run(self, numbers: Sequence[int]) -> list[int]:
        """Renew those bases of which something is known, and carry the moments over; which ones they were."""
        begin = time.perf_counter()
        found = self._drawn(numbers) if self._parameters.refresh == "random" else self._found(numbers)
        changed, carried, old, new = [], [], [], []
        for number, (rank, used, stored) in found.items():
            state, before = self._states[number], self._bases[number]
            matrix = self._matrices[number].at_rank(rank)
            with self._guard:
                state.update(stored)
                if not state["has_basis"] and rank != self._matrices[number].rank:
                    for each in projected_tensors(self._side, matrix, self._step.plan.slots):
                        if not each.key.startswith("projector"):
                            state.update(self._step.create([each]))
            if "rank" in state:
                state["rank"] = rank
            if state["has_basis"]:
                carried.append(number)
                old.append(before)
                new.append(used)
            state["has_basis"] = 1
            changed.append(number)
            self._bases[number] = used
        watched = self._step.watch is not None and self._parameters.refresh != "random"
        if carried and (self._parameters.reproject_moments or self._parameters.adaptive_gap or watched):
            self._carry(carried, old, new)
        for number, (rank, _, _) in found.items():
            self._matrices[number] = self._matrices[number].at_rank(rank)
        self._seconds = time.perf_counter() - begin
        return changed

    def report(self, watch: Watch, low_rank: Mapping[int, Tensor]) -> None:
        """Tell what the new bases are worth. Collective.

        Parameters
        ----------
        low_rank
            By the number of a renewed matrix, its low-rank gradient, whole on the rows of the moments.
        """
        energies: dict[int, float] = {}
        if self._parameters.refresh != "random":

            def squares() -> Tensor:
                found = []
                for number, rows in low_rank.items():
                    matrix = self._matrices[number]
                    found += [rows[self._side.counted(matrix)], self._step.gradient(matrix)]
                return torch.stack([torch.linalg.vector_norm(each).square() for each in found])

            packed = self._guard.run(squares, lambda: self._step.like.new_zeros(2 * len(low_rank)))
            sums = iter(self._group.all_reduce(packed).tolist())
            pairs = {number: (inside, whole) for number, inside, whole in zip(low_rank, sums, sums, strict=False)}
            energies = {number: min(inside / whole, 1.0) for number, (inside, whole) in pairs.items() if whole}
        for number in low_rank:
            matrix = self._matrices[number]
            watch.refreshed.append(
                Refreshed(matrix.name, matrix.rank, energies.get(number), self._overlaps.get(number))
            )
        watch.seconds += self._seconds

    def _drawn(self, numbers: Sequence[int]) -> dict[int, tuple[int, Tensor, dict[str, Any]]]:
        """The next random bases."""
        side, like, found = self._side, self._step.like, {}
        for number in numbers:
            matrix, state = self._matrices[number], self._states[number]
            stored = {"draw": state["draw"] + 1}

            def draw(matrix: Matrix = matrix, stored: dict[str, Any] = stored) -> Tensor:
                return side.touched(matrix, random_basis(matrix, side.basis_rows(matrix), stored["draw"], like))

            used = self._guard.run(draw, partial(like.new_zeros, tuple(self._bases[number].shape)))
            found[number] = matrix.rank, used, stored
        return found

    def _found(self, numbers: Sequence[int]) -> dict[int, tuple[int, Tensor, dict[str, Any]]]:
        """The bases that the gradients have, or random first ones."""
        states, parameters = self._states, self._parameters
        starting = [
            number
            for number in numbers
            if not states[number]["has_basis"] and starts_at_random(self._matrices[number], parameters)
        ]
        known = [number for number in numbers if number not in starting]
        bases = dict(zip(starting, self._search(starting, "start"), strict=True))
        bases |= dict(zip(known, self._search(known, parameters.refresh), strict=True))
        whole = {number: basis for number in numbers if (basis := bases[number]) is not None}
        ranks = {number: self._planned[number].rank for number in whole}
        # A random basis of any rank captures little: the largest, until gradients choose.
        ranks |= self._ranks({number: basis for number, basis in whole.items() if number in known})
        found = {}
        for number, basis in whole.items():
            matrix, state = self._planned[number].at_rank(ranks[number]), states[number]
            key = key_of(parameters.seed, matrix.number, state["step"], 1)
            basis = basis[:, : matrix.rank]
            settle = partial(self._side.settle, matrix, basis, self._group, key)
            # What is stored is what is used: rounded, and on the left the touched rows only.
            used, stored = self._guard.run(settle, partial(self._unsettled, matrix, basis))
            found[number] = matrix.rank, used, stored
        return found

    def _unsettled(self, matrix: Matrix, basis: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self._side.touched(matrix, basis), {}

    def _search(self, numbers: Sequence[int], method: str) -> list[Tensor | None]:
        if not numbers:
            return []
        step = self._step

        def jobs(gradient: Callable[[Matrix], Tensor]) -> list[RefreshJob]:
            return [
                RefreshJob(
                    self._planned[number],
                    gradient(self._planned[number]),
                    self._bases[number] if self._states[number]["has_basis"] else None,
                )
                for number in numbers
            ]

        return refresh_bases(
            self._side,
            self._guard.run(
                # Random starts look at no gradient, and there may be none yet.
                lambda: jobs(step.gradient if method != "start" else lambda matrix: step.like.new_zeros(0)),
                lambda: jobs(lambda matrix: step.like.new_zeros((matrix.layout.local.numel,))),
            ),
            self._group,
            self._guard,
            method=method,
            passes=self._parameters.power_iterations,
            seed=self._parameters.seed,
        )

    def _ranks(self, whole: Mapping[int, Tensor]) -> dict[int, int]:
        """By matrix, the smallest rank whose basis captures the share of energy that is wanted."""
        ranks = {number: self._planned[number].rank for number in whole}
        numbers = [number for number in whole if self._planned[number].energy is not None]
        if not numbers:
            return ranks
        side, step, matrices = self._side, self._step, [self._planned[number] for number in numbers]

        def shares() -> list[Tensor]:
            return [
                side.share(matrix, step.gradient(matrix), side.touched(matrix, whole[number]))
                for number, matrix in zip(numbers, matrices, strict=True)
            ]

        def no_shares() -> list[Tensor]:
            return [step.like.new_zeros(side.share_shape(matrix)) for matrix in matrices]

        low_rank = side.combine(matrices, self._guard.run(shares, no_shares), self._group, self._guard)

        def energies() -> Tensor:
            found = []
            for matrix, rows in zip(matrices, low_rank, strict=True):
                total = torch.linalg.vector_norm(step.gradient(matrix)).square().view(1)
                found += [rows[side.counted(matrix)].square().sum(dim=0), total]
            return torch.cat(found)

        sizes = [matrix.rank + 1 for matrix in matrices]
        packed = self._guard.run(energies, lambda: step.like.new_zeros(sum(sizes)))
        for number, part in zip(numbers, torch.split(self._group.all_reduce(packed), sizes), strict=True):
            wanted = (self._planned[number].energy or 1.0) * part[-1]
            enough = (part[:-1].cumsum(0) >= wanted).nonzero()
            ranks[number] = int(enough[0]) + 1 if enough.numel() else self._planned[number].rank
        return ranks

    def _carry(self, numbers: Sequence[int], old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        side, guard, parameters = self._side, self._guard, self._parameters
        matrices = [self._matrices[number] for number in numbers]
        transitions = side.transitions(matrices, old, new, self._group, guard)
        if parameters.adaptive_gap or self._step.watch is not None:
            overlaps = guard.run(
                lambda: [float(each.square().sum()) / min(each.shape) for each in transitions],
                lambda: [0.0] * len(numbers),
            )
            self._overlaps = dict(zip(numbers, overlaps, strict=True))
        if parameters.adaptive_gap:
            marks = [overlap < parameters.stable_overlap for overlap in overlaps]
            for number, unstable in zip(numbers, self._step.vote(marks), strict=True):
                set_gap(self._states[number], stable=not unstable, largest=parameters.max_gap_factor)
        if not parameters.reproject_moments:
            return
        with guard:
            for number, matrix, transition in zip(numbers, matrices, transitions, strict=True):
                step = self._step.projected(side, matrix, self._states[number], self._step.like)
                self._step.rule.carry(step, transition)
