"""Where a step finds the gradients of a flat tensor: in one tensor like it, or lowered when they arrived.

Imports torch and its neighbours.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ds_galore.optim.matrices import Matrix
from ds_galore.optim.walks import Plain, Segment

__all__ = ["ArrivedGradients", "FlatGradients", "Gradients"]


class Gradients(Protocol):
    """This rank's elements of the gradients, in any floating dtype."""

    def plain(self, plain: Plain, segment: Segment) -> Tensor:
        """Of a segment of a parameter that is not projected, ``(stop - first,)``."""

    def whole(self, matrix: Matrix) -> Tensor:
        """Of a matrix, ``(numel,)``."""

    def share(self, matrix: Matrix) -> Tensor | None:
        """This rank's share of a matrix's low-rank gradient, ``share_shape``; None where :meth:`whole` is there."""


class FlatGradients:
    """All in one tensor.

    Parameters
    ----------
    flat
        Laid out as the flat tensor of weights is.
    """

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat

    def plain(self, plain: Plain, segment: Segment) -> Tensor:
        """Of a parameter that is not projected: a view."""
        return plain.narrow(self._flat)[segment]

    def whole(self, matrix: Matrix) -> Tensor:
        """Of a matrix: a view."""
        return matrix.narrow(self._flat)

    def share(self, matrix: Matrix) -> Tensor | None:
        """None: nothing is lowered."""
        return None


class ArrivedGradients:
    """Each for itself, as it was taken when DeepSpeed had reduced it, times a factor.

    Parameters
    ----------
    dtype
        What is computed in, and given.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        #: By name, the elements of what is not projected, and of matrices whose basis is refreshed in the coming step.
        self.pieces: dict[str, Tensor] = {}
        #: By name, this rank's share of the low-rank gradients of all other matrices.
        self.shares: dict[str, Tensor] = {}
        #: What all of them are to be multiplied by: clipping, and the loss scale.
        self.factor: Tensor | float = 1.0

    def plain(self, plain: Plain, segment: Segment) -> Tensor:
        """Of a parameter that is not projected: a copy."""
        return self._scaled(self.pieces[plain.name][: plain.numel][segment])

    def whole(self, matrix: Matrix) -> Tensor:
        """Of a matrix that is due: a copy."""
        return self._scaled(self.pieces[matrix.name][: matrix.layout.local.numel])

    def share(self, matrix: Matrix) -> Tensor | None:
        """Of a matrix that is not due: a copy."""
        found = self.shares.get(matrix.name)
        return None if found is None else self._scaled(found)

    def _scaled(self, kept: Tensor) -> Tensor:
        return kept.to(self._dtype, copy=True).mul_(self.factor)

    @property
    def nbytes(self) -> int:
        """Of what is kept of projected matrices, and of what was handed over of others."""
        return sum(each.nbytes for kept in (self.pieces, self.shares) for each in kept.values())
