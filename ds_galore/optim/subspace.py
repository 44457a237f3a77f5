"""Finding a basis of the subspace in which most of a gradient's energy lies: pure functions on whole matrices.

The distributed walk around them is in :mod:`.refresh`. Imports torch alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["OVERSAMPLING", "leading_basis", "random_start", "singular_basis"]

#: Extra columns of a random start, dropped when the basis is ordered (Halko et al., arXiv 0909.4061, section 4.3).
OVERSAMPLING = 16

#: Squared singular values, last to first, down to which the Gram matrix gives orthonormal columns: in float64 they then
#: err by some 1e-7.
_SAFE_RATIO = 1e-9


def random_start(rows: int, rank: int, *, seed: int, index: int, like: Tensor) -> Tensor:
    """A Gaussian ``(rows, k)`` with ``k = rank + OVERSAMPLING`` where that many columns are possible.

    Drawn on the CPU from ``seed`` and the matrix's ``index`` alone, so that it is the same on every rank and device;
    dtype and device are those of ``like``.
    """
    generator = torch.Generator().manual_seed((seed * 0x9E3779B1 + index) % 2**63)
    columns = min(rank + OVERSAMPLING, rows)
    return torch.randn((rows, columns), generator=generator, dtype=torch.float32).to(like)


def leading_basis(block: Tensor, rank: int) -> Tensor | None:
    """An orthonormal basis of the leading part of a block's range, ordered by energy.

    Parameters
    ----------
    block
        ``(n, k)`` with ``k >= rank``: what a power iteration made of its start.

    Returns
    -------
    Tensor or None
        ``(n, rank)`` with orthonormal columns, the most energetic first. None if ``block`` is zero or not finite:
        it tells nothing about a subspace then.

    Notes
    -----
    The columns are the block's left singular vectors ``B V / sigma``, by the eigenvectors of ``B^T B`` in float64. That
    loses orthogonality as the square of the block's condition; so where the last singular value is too small for it, or
    zero, Householder QR is used. It gives orthonormal columns even where the block's rank falls short, and the
    eigenvectors of ``R R^T`` order them.
    """
    largest = block.abs().max()
    if not torch.isfinite(largest) or largest == 0:
        return None
    # Scaled by a power of two, exactly: squares of tiny gradients must not underflow.
    scaled = torch.ldexp(block, -torch.frexp(largest).exponent)
    if scaled.device.type != "mps":  # it has no float64
        wide = scaled.double()
        squares, vectors = torch.linalg.eigh(wide.t() @ wide)
        if squares[-rank] > _SAFE_RATIO * squares[-1]:
            singular: Tensor = wide @ (vectors[:, -rank:].flip(1) * squares[-rank:].flip(0).rsqrt())
            return singular.to(block.dtype)
    orthonormal, triangle = torch.linalg.qr(scaled)
    _, vectors = torch.linalg.eigh(triangle @ triangle.t())
    leading: Tensor = orthonormal @ vectors[:, -rank:].flip(1)
    return leading


def singular_basis(matrix: Tensor, rank: int, *, left: bool) -> Tensor | None:
    """The leading singular vectors of a matrix by a full SVD, exactly as galore-torch takes them.

    Parameters
    ----------
    matrix
        ``(m, n)``, float32 or float64.
    left
        Left singular vectors ``(m, rank)``, or right ones ``(n, rank)``.

    Returns
    -------
    Tensor or None
        None if ``matrix`` is zero or not finite.
    """
    largest = matrix.abs().max()
    if not torch.isfinite(largest) or largest == 0:
        return None
    left_vectors, _, right_vectors = torch.linalg.svd(matrix, full_matrices=False)
    basis: Tensor = left_vectors[:, :rank] if left else right_vectors[:rank].t()
    return basis.contiguous()
