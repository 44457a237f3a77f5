"""Lowering the gradient of a projected matrix when it arrives, micro-batch by micro-batch, until the step.

A *window* is what one step's gradients are accumulated over. When it opens, the state tells which matrices refresh in
the step that ends it: of these whole slices are kept, and of all others the share of the low-rank gradient. Imports
torch and its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ds_galore.errors import ConfigError
from ds_galore.optim.gradients import ArrivedGradients
from ds_galore.optim.matrices import Matrix, Side, State
from ds_galore.optim.noise import key_of, signs
from ds_galore.optim.plan import FlatPlan
from ds_galore.optim.schedule import is_due
from ds_galore.optim.states import effective
from ds_galore.zero.group import Guard

__all__ = ["SKETCH", "Arrivals", "sketch_of"]

#: Numbers that stand for a slice whose norm over several micro-batches is wanted.
SKETCH = 128


def sketch_of(flat: Tensor, key: int) -> Tensor:
    """``(SKETCH,)`` signed sums of a vector's elements, float32, linear in it.

    Each element goes into one sum with a random sign, so the squared norm of the sums is the vector's in the mean, with
    a relative standard deviation of at most ``sqrt(2 / SKETCH)``, one eighth (Charikar, Chen and Farach-Colton,
    *Finding frequent items in data streams*, 2002; Weinberger et al., arXiv 0902.2206).

    Parameters
    ----------
    flat
        ``(numel,)``, of any floating dtype.
    key
        Of the signs.
    """
    rows = -(-flat.numel() // SKETCH)
    signed = torch.zeros(rows * SKETCH, dtype=torch.float32, device=flat.device)
    torch.mul(flat, signs(key, 0, flat.numel(), flat.device), out=signed[: flat.numel()])
    return signed.view(rows, SKETCH).sum(dim=0)


class Arrivals:
    """The gradients of one flat tensor in one window.

    Parameters
    ----------
    plan
        What the tensor consists of.
    state
        The optimizer's, by parameter name.
    like
        Of the device and the dtype that is computed in.
    dtype
        What gradients are kept and accumulated in until the step.
    several
        Whether more than one micro-batch is accumulated: then norms are estimated.
    seed
        Of the signs of sketches.
    """

    def __init__(
        self,
        plan: FlatPlan,
        state: Mapping[str, State],
        like: Tensor,
        *,
        dtype: torch.dtype,
        several: bool,
        seed: int,
    ) -> None:
        self._plan, self._state, self._like = plan, state, like
        self._dtype, self._several, self._seed = dtype, several, seed
        self.guard = Guard()
        self.gradients = ArrivedGradients(like.dtype)
        self._matrices: dict[str, tuple[Side, Matrix]] = {}
        self._sketches: dict[str, Tensor] = {}  # of what is lowered: as long as it, exactly or in the mean
        for batch in plan.batches:
            for planned in batch.matrices:
                matrix = effective(planned, state[planned.name])
                self._matrices[planned.name] = batch.side, matrix

    def is_lowered(self, name: str) -> bool:
        """Whether of a parameter the share of its low-rank gradient is kept: of matrices that are not due."""
        found = self._matrices.get(name)
        return found is not None and not is_due(found[1], self._state[name])

    def take(self, name: str, part: Tensor, *, first: bool) -> None:
        """Take what has arrived of a parameter. Collective where projectors are sharded; fails at the step.

        Parameters
        ----------
        name
            Of a matrix.
        part
            This rank's elements, ``(numel,)`` or padded; may be empty.
        first
            Whether it replaces what arrived before, or is added.
        """
        side, matrix = self._matrices[name]
        part = part.view(-1)[: matrix.layout.local.numel]
        if not self.is_lowered(name):
            with self.guard:
                self._keep(name, part, first=first)
            return
        [basis] = side.load([matrix], [self._state[name]], self._plan.group, self.guard, self._like)
        with self.guard:
            wide = part.to(self._like.dtype)
            share = side.share(matrix, wide, basis)
            if self._several:
                sketch = sketch_of(part, key_of(self._seed, matrix.number))
            else:
                sketch = torch.linalg.vector_norm(wide, dtype=torch.float32).view(1)
            if first or name not in self.gradients.shares:
                self.gradients.shares[name], self._sketches[name] = share.to(self._dtype), sketch
            elif self._several:
                self.gradients.shares[name].add_(share)
                self._sketches[name].add_(sketch)
            else:
                raise ConfigError(
                    "gradient_accumulation_steps is 1, and more than one micro-batch has arrived: with"
                    " optimizer.params.gradients 'lowrank' set it to their number, of which clipping has to know"
                )

    def _keep(self, name: str, part: Tensor, *, first: bool) -> None:
        if first or name not in self.gradients.pieces:
            self.gradients.pieces[name] = part.to(self._dtype, copy=True)
        else:
            self.gradients.pieces[name].add_(part)

    def squares(self) -> Tensor:
        """The sum of squares of what was taken on this rank, a scalar; estimated over several micro-batches."""
        found = [self._like.new_zeros((), dtype=torch.float32)]
        for name in self._matrices:
            told = self.gradients.pieces.get(name, self._sketches.get(name))
            if told is not None:
                found.append(torch.linalg.vector_norm(told, dtype=torch.float32).square())
        return torch.stack(found).sum()

    def fill(self) -> None:
        """Give matrices of which nothing arrived, in layers that were not used, gradients of zero."""
        for name, (side, matrix) in self._matrices.items():
            if name not in self.gradients.pieces and name not in self.gradients.shares:
                if self.is_lowered(name):
                    kept, shape = self.gradients.shares, side.share_shape(matrix)
                    kept[name] = self._like.new_zeros(shape, dtype=self._dtype)
                else:
                    kept, numel = self.gradients.pieces, matrix.layout.local.numel
                    kept[name] = self._like.new_zeros(numel, dtype=self._dtype)
