"""Refreshing the bases of some matrices of one side, over whatever ranks hold them.

``subspace`` is a block power iteration on ``G^T G`` through the two products of :mod:`ds_galore.zero.layout`, so that
no rank ever sees a whole gradient; from the right, a pass is ::

    Y = G X          the touched rows, cut rows summed between neighbours
    Z = G^T Y        n x k, summed over the group
    X = orth(Z)      by the matrix's owner, and sent to all

and from the left the same until ``Y``, whose range it takes. It starts from the basis in use, or from a random block.
``svd`` gathers the gradient on the owner. ``start`` takes a random basis and looks at no gradient. The work of owners
is dealt out by what it costs, and they work at the same time.

All functions are collective: the same matrices in the same order on all ranks of the group, whatever the local slices
hold. Local work that fails is kept by the guard, and the rank goes on with zeros until the next vote. Whether a
gradient tells anything (it may be zero) is decided by the owner and sent with the basis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ds_galore.optim.matrices import LEFT, RIGHT, Matrix, Side
from ds_galore.optim.subspace import leading_basis, random_start, singular_basis
from ds_galore.zero.group import Guard, RankGroup

__all__ = ["RefreshJob", "owner_cost", "refresh_bases"]


@dataclass(frozen=True)
class RefreshJob:
    """One matrix whose basis is to be found.

    Parameters
    ----------
    matrix
        Which one, with the rank that is wanted.
    grad
        This rank's elements of the gradient, ``(numel,)``, float32 or float64, finite on all ranks.
    basis
        The one in use as :meth:`.Side.load` gives it, perhaps of a smaller rank, or None before the first.
    """

    matrix: Matrix
    grad: Tensor
    basis: Tensor | None


def refresh_bases(
    side: Side, jobs: Sequence[RefreshJob], group: RankGroup, guard: Guard, *, method: str, passes: int, seed: int
) -> list[Tensor | None]:
    """Find new bases.

    Parameters
    ----------
    side, jobs
        The matrices, all of this side.
    method
        ``"subspace"``, ``"svd"`` or ``"start"``.
    passes
        Number of power-iteration passes.
    seed
        Of the random starts.

    Returns
    -------
    list
        For each job the whole basis ``(basis_rows, rank)`` with orthonormal columns, the same on all ranks; None where
        the gradient is zero (or the owner failed, which the next vote tells).
    """
    if not jobs:
        return []
    owners = _deal_out(side, jobs, method, group.world_size)
    if method == "svd":
        return _by_svd(side, jobs, owners, group, guard)
    if method == "start":
        return _at_random(side, jobs, owners, group, guard, seed)
    # A block's passes alternate between all its matrices, so that their messages travel together.
    found: dict[int, Tensor | None] = {}
    for warm in (True, False):
        # From a basis at right angles to the whole gradient nothing is found, were it the very first time that some
        # features are there: such a matrix starts again at random. (That of a gradient of zero too: it costs little.)
        numbers = [n for n, job in enumerate(jobs) if found.get(n) is None and not (warm and job.basis is None)]
        batch = [jobs[number] if warm else replace(jobs[number], basis=None) for number in numbers]
        if batch:
            bases = _by_iteration(side, batch, owners, group, guard, passes=passes, seed=seed)
            found.update(zip(numbers, bases, strict=True))
    return [found[number] for number in range(len(jobs))]


Owners = Mapping[int, int]
"""By a matrix's index, the rank that works on it."""


def _deal_out(side: Side, jobs: Sequence[RefreshJob], method: str, world_size: int) -> Owners:
    """Give each matrix to the rank that has the least to do so far, the most costly ones first."""
    costs = {job.matrix.index: owner_cost(side, job.matrix, method) for job in jobs}
    load = [0] * world_size
    owners = {}
    for index in sorted(costs, key=lambda index: (-costs[index], index)):
        owners[index] = min(range(world_size), key=lambda rank: (load[rank], rank))
        load[owners[index]] += costs[index]
    return owners


def owner_cost(side: Side, matrix: Matrix, method: str) -> int:
    """Multiplications, roughly, that a refresh costs the owner alone."""
    rows, columns = matrix.layout.shape
    if method == "svd":
        return 4 * rows * columns * min(rows, columns)
    return side.basis_rows(matrix) * matrix.rank**2 + 4 * matrix.rank**3


def _by_svd(
    side: Side, jobs: Sequence[RefreshJob], owners: Owners, group: RankGroup, guard: Guard
) -> list[Tensor | None]:
    wholes = [group.gather_flat(job.grad, job.matrix.layout.ranges, owners[job.matrix.index]) for job in jobs]

    def work(job: RefreshJob, whole: Tensor | None) -> Callable[[], Tensor | None]:
        def solve() -> Tensor | None:
            assert whole is not None
            return singular_basis(whole.view(job.matrix.layout.shape), job.matrix.rank, left=side is LEFT)

        return solve

    return _by_owners(
        jobs,
        [(side.basis_rows(job.matrix), job.matrix.rank) for job in jobs],
        [work(job, whole) for job, whole in zip(jobs, wholes, strict=True)],
        owners,
        group,
        guard,
    )


def _at_random(
    side: Side, jobs: Sequence[RefreshJob], owners: Owners, group: RankGroup, guard: Guard, seed: int
) -> list[Tensor | None]:
    def work(job: RefreshJob, rows: int) -> Callable[[], Tensor | None]:
        def draw() -> Tensor:
            start = random_start(rows, job.matrix.rank, seed=seed, index=job.matrix.index, like=job.grad)
            orthonormal: Tensor = torch.linalg.qr(start)[0]
            return orthonormal[:, : job.matrix.rank]

        return draw

    rows = [side.basis_rows(job.matrix) for job in jobs]
    return _by_owners(
        jobs,
        [(count, job.matrix.rank) for job, count in zip(jobs, rows, strict=True)],
        [work(job, count) for job, count in zip(jobs, rows, strict=True)],
        owners,
        group,
        guard,
    )


def _by_iteration(
    side: Side,
    jobs: Sequence[RefreshJob],
    owners: Owners,
    group: RankGroup,
    guard: Guard,
    *,
    passes: int,
    seed: int,
) -> list[Tensor | None]:
    matrices = [job.matrix for job in jobs]
    columns = [matrix.layout.shape[1] for matrix in matrices]
    blocks: list[Tensor]
    if jobs[0].basis is None:
        blocks = [
            random_start(count, matrix.rank, seed=seed, index=matrix.index, like=job.grad)
            for job, matrix, count in zip(jobs, matrices, columns, strict=True)
        ]
    else:
        blocks = [job.basis for job in jobs if job.basis is not None]
        if side is LEFT:
            blocks = _sketches(jobs, blocks, group, guard)
            blocks = _orthonormal(jobs, blocks, owners, group, guard)
        blocks = [_widened(job, block, seed) for job, block in zip(jobs, blocks, strict=True)]
    for remaining in reversed(range(passes)):
        rows = _projections(jobs, blocks, group, guard)
        if side is LEFT and remaining == 0:
            return _left_bases(jobs, rows, owners, group, guard)
        blocks = _sketches(jobs, rows, group, guard)
        if remaining:
            blocks = _orthonormal(jobs, blocks, owners, group, guard)
    return _leading(jobs, blocks, owners, group, guard)


def _widened(job: RefreshJob, block: Tensor, seed: int) -> Tensor:
    """A block with random columns where a larger rank is wanted than that of the basis in use."""
    rows, columns = block.shape
    if columns >= job.matrix.rank:
        return block
    start = random_start(rows, job.matrix.rank, seed=seed, index=job.matrix.index, like=block)
    return torch.cat([block, start[:, columns:] / math.sqrt(rows)], dim=1)


def _projections(jobs: Sequence[RefreshJob], blocks: Sequence[Tensor], group: RankGroup, guard: Guard) -> list[Tensor]:
    """``G X``, the touched rows, whole."""
    shares = guard.run(
        lambda: [job.matrix.layout.local.project(job.grad, block) for job, block in zip(jobs, blocks, strict=True)],
        lambda: [
            job.grad.new_zeros((job.matrix.layout.local.num_rows, block.shape[1]))
            for job, block in zip(jobs, blocks, strict=True)
        ],
    )
    return RIGHT.combine([job.matrix for job in jobs], shares, group, guard)


def _sketches(jobs: Sequence[RefreshJob], rows: Sequence[Tensor], group: RankGroup, guard: Guard) -> list[Tensor]:
    """``G^T Y``, ``(n, k)``, whole on all ranks."""
    shapes = [(job.matrix.layout.shape[1], block.shape[1]) for job, block in zip(jobs, rows, strict=True)]
    shares = guard.run(
        lambda: [job.matrix.layout.local.sketch(job.grad, block) for job, block in zip(jobs, rows, strict=True)],
        lambda: [job.grad.new_zeros(shape) for job, shape in zip(jobs, shapes, strict=True)],
    )
    if group.world_size == 1:
        return shares
    sizes = [rows * columns for rows, columns in shapes]
    packed = guard.run(
        lambda: torch.cat([share.reshape(-1) for share in shares]), lambda: shares[0].new_zeros(sum(sizes))
    )
    parts = torch.split(group.all_reduce(packed), sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _orthonormal(
    jobs: Sequence[RefreshJob], blocks: Sequence[Tensor], owners: Owners, group: RankGroup, guard: Guard
) -> list[Tensor]:
    """Orthonormal columns with the blocks' ranges; a block that is zero stays so."""
    found = _leading(jobs, blocks, owners, group, guard, full=True)
    return [torch.zeros_like(block) if each is None else each for each, block in zip(found, blocks, strict=True)]


def _leading(
    jobs: Sequence[RefreshJob],
    blocks: Sequence[Tensor],
    owners: Owners,
    group: RankGroup,
    guard: Guard,
    *,
    full: bool = False,
) -> list[Tensor | None]:
    ranks = [block.shape[1] if full else job.matrix.rank for job, block in zip(jobs, blocks, strict=True)]

    def work(block: Tensor, rank: int) -> Callable[[], Tensor | None]:
        return lambda: leading_basis(block, rank)

    return _by_owners(
        jobs,
        [(block.shape[0], rank) for block, rank in zip(blocks, ranks, strict=True)],
        [work(block, rank) for block, rank in zip(blocks, ranks, strict=True)],
        owners,
        group,
        guard,
    )


def _left_bases(
    jobs: Sequence[RefreshJob], rows: Sequence[Tensor], owners: Owners, group: RankGroup, guard: Guard
) -> list[Tensor | None]:
    """Bases of the ranges of ``Y``, of which every rank holds the touched rows."""
    wholes = []
    for job, block in zip(jobs, rows, strict=True):
        layout = job.matrix.layout
        whole = block.new_zeros((layout.shape[0], block.shape[1]))
        counted = layout.counted_rows()
        if counted:
            begin, end = counted[0], counted[-1] + 1
            with guard:
                whole[layout.local.first_row + begin : layout.local.first_row + end] = block[begin:end]
        wholes.append(group.reduce(whole, owners[job.matrix.index]))
    return _leading(jobs, wholes, owners, group, guard)


def _by_owners(
    jobs: Sequence[RefreshJob],
    shapes: Sequence[tuple[int, int]],
    work: Sequence[Callable[[], Tensor | None]],
    owners: Owners,
    group: RankGroup,
    guard: Guard,
) -> list[Tensor | None]:
    """Let each matrix's owner run its work, all at the same time, and send the results to all ranks.

    The first number of a message tells whether there is a result.
    """
    messages = []
    for job, (rows, columns), solve in zip(jobs, shapes, work, strict=True):
        message = job.grad.new_zeros(1 + rows * columns)
        if group.rank == owners[job.matrix.index] and guard.ok:
            with guard:
                result = solve()
                if result is not None:
                    message[1:] = result.reshape(-1)
                    message[0] = 1.0
        messages.append(message)
    results: list[Tensor | None] = []
    for job, (rows, columns), message in zip(jobs, shapes, messages, strict=True):
        received = group.broadcast(message, owners[job.matrix.index])
        results.append(received[1:].view(rows, columns) if received[0] else None)
    return results
