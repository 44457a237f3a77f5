"""Update rules as walks through a step: what a rule is given, what it may ask the ranks for, where it arrives.

A rule is written as if for a single process. Where it needs what only all ranks know, it yields its share of it and
gets the whole back; :mod:`.drive` moves the walks of many parameters forward together, so that their messages travel
together. Four things can be asked for:

``sum``
    the sum over the group of a vector ``(k,)``;
``spread``
    rows of moments ``(rows, k)``, as the side needs them to be applied: nothing on the right, gathered on the left;
``cut``
    touched rows ``(rows, k)`` of a plain parameter as a matrix, with those that are cut between ranks summed;
``cut_max``
    the same of its blocks of 256 elements, with the largest taken.

The rules themselves are in :mod:`.updates`. Imports torch and its neighbours.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ds_galore.optim.formats import Dynamic, RowFormat
from ds_galore.optim.matrices import RIGHT, Matrix, Side, State
from ds_galore.optim.noise import key_of
from ds_galore.tools.formats import BLOCK
from ds_galore.zero.layout import MatrixLayout

__all__ = [
    "SEGMENT",
    "Plain",
    "PlainStep",
    "ProjectedStep",
    "Request",
    "Rule",
    "Segment",
    "Slot",
    "Update",
    "Walk",
    "segment_size",
    "slots_by_key",
]

Walk = Generator[Tensor, Tensor, "Update"]
#: A run of this rank's elements of a parameter; both ends are given.
Segment = slice
#: Elements of a segment: on a CPU what stays in a cache, on an accelerator few kernels and 200 MB of temporary copies.
SEGMENT = {"cpu": 2**18, "accelerator": 2**23}


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

    def segments(self, device: torch.device) -> list[Segment]:
        """Its elements in runs that are worked on one after the other, so that what is needed for it stays small."""
        size = segment_size(device)
        cuts = range(self.start - self.start % BLOCK + size, self.start + self.numel, size)
        ends = [0, *(cut - self.start for cut in cuts), self.numel]
        return [slice(first, stop) for first, stop in itertools.pairwise(ends) if first < stop]


@dataclass
class Update:
    """What is to be done to this rank's elements of a weight ``W``, of which ``G`` is the gradient.

    Projected: ``W <- beta W + alpha D Q^T + gamma diag(channel) G``; plain: ``W <- beta W + alpha D``.

    Parameters
    ----------
    direction
        ``D``: rows as the side applies them; None is zero.
    alpha, beta, gamma
        Factors.
    channel
        Of the rows (columns, from the left), or None for a ``gamma`` that is the same for all.
    pieces
        Of a plain parameter in place of ``direction``: gives ``D`` of a segment, and is called once for each.
    """

    direction: Tensor | None
    alpha: float
    beta: float
    channel: Tensor | None = None
    gamma: float = 0.0
    pieces: Callable[[Segment], Tensor] | None = None


@dataclass
class AnyStep:
    """What both kinds of parameters give a rule to work with."""

    state: State
    group: Mapping[str, Any]
    slots: Mapping[str, Slot]
    weight: Callable[[], Tensor]
    seed: int

    def noise(self, number: int, key: str) -> int:
        """The key of the noise with which a tensor is rounded in this step."""
        return key_of(self.seed, number, self.state["step"], sum(key.encode()))


@dataclass
class ProjectedStep(AnyStep):
    """A projected matrix in a step.

    Parameters
    ----------
    state, group, slots
        Its state, its parameter group, and what the rule keeps.
    weight
        Gives this rank's elements, ``(numel,)``.
    seed
        Of stochastic rounding.
    grad
        Gives this rank's elements of the gradient in the dtype that is computed in.
    side, matrix
        What it is.
    low_rank
        ``R``, whole on the rows of the moments, ``(rows, r)``; may be overwritten.
    """

    grad: Callable[[], Tensor]
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
class PlainStep(AnyStep):
    """A parameter that is not projected, in a step; the names are those of :class:`ProjectedStep`.

    Parameters
    ----------
    plain
        What it is.
    part
        Gives a segment of the gradient in the dtype that is computed in.
    like
        A tensor of the dtype and on the device that is computed in.
    """

    plain: Plain
    part: Callable[[Segment], Tensor]
    like: Tensor

    @property
    def whole(self) -> Segment:
        """All elements that this rank holds."""
        return slice(0, self.plain.numel)

    def grad(self) -> Tensor:
        """All of :attr:`part`."""
        return self.part(self.whole)

    def read(self, key: str, segment: Segment | None = None) -> Tensor:
        """A slot's numbers in the dtype that is computed in; where it is stored as such, the state's own tensor.

        Parameters
        ----------
        segment
            Of a slot with a number an element, which to read, ``(stop - first,)``; all where not given, in the shape
            of the state. Other slots are read whole, as rows or columns ``(rows, 1)``, ``(1, n)``.
        """
        slot = self.slots[key]
        stored: Tensor = self.state[key]
        if segment is not None:
            stored = stored.view(-1)[segment]
        if not isinstance(slot.format, Dynamic):
            return slot.format.decode({"": stored}, stored.shape[-1] if stored.dim() else 1, self.like.dtype)
        if not stored.numel():
            return stored.to(self.like.dtype)
        first, last, rows = self._blocks(self.whole if segment is None else segment)
        codes = torch.nn.functional.pad(stored.view(-1), (first, last))
        numbers = slot.format.restore(codes, self.state[f"{key}_absmax"][rows].view(-1), BLOCK)
        return numbers[first : first + stored.numel()].view(stored.shape).to(self.like.dtype)

    def write(self, key: str, numbers: Tensor, segment: Segment | None = None, largest: Tensor | None = None) -> None:
        """Keep a slot's numbers; those of :meth:`read`, changed in place, need no copy.

        Parameters
        ----------
        numbers, segment
            As :meth:`read` gives them.
        largest
            Of 8-bit moments, the largest magnitudes of this rank's blocks on all ranks, ``(blocks,)``; only those of
            the first and the last are looked at, of which other ranks may hold parts.
        """
        format_, stored = self.slots[key].format, self.state[key]
        if segment is not None:
            stored = stored.view(-1)[segment]
        if not stored.numel() or stored.data_ptr() == numbers.data_ptr():
            return
        if not isinstance(format_, Dynamic):
            start = self.plain.start + (segment.start if segment is not None else 0)
            noise = self.noise(self.plain.number, key)
            stored.copy_(format_.encode(numbers.reshape(-1, 1), noise, start)[""].view(stored.shape))
            return
        assert largest is not None
        first, last, rows = self._blocks(self.whole if segment is None else segment)
        padded = torch.nn.functional.pad(numbers.reshape(-1), (first, last))
        # A block that another rank holds a part of has room: there the largest number is put, for the quantiser to see.
        if first:
            padded[0] = largest[0]
        if last:
            padded[-1] = largest[-1]
        codes, absmax = format_.quantise(padded, BLOCK)
        stored.copy_(codes[first : first + stored.numel()].view(stored.shape))
        self.state[f"{key}_absmax"][rows].copy_(absmax.view(-1, 1))

    def _blocks(self, segment: Segment) -> tuple[int, int, slice]:
        """Of the blocks of a segment: elements of the first and the last that are not in it, and their rows."""
        begin, end = (self.plain.start + each for each in (segment.start, segment.stop))
        first_block = self.plain.start // BLOCK
        return begin % BLOCK, -end % BLOCK, slice(begin // BLOCK - first_block, -(-end // BLOCK) - first_block)

    def outer_blocks(self) -> dict[int, Segment]:
        """By row, what this rank holds of its first and its last block."""
        start, numel = self.plain.start, self.plain.numel
        if not numel:
            return {}
        first, last = start // BLOCK, (start + numel - 1) // BLOCK
        return {
            block - first: slice(max(block * BLOCK - start, 0), min((block + 1) * BLOCK - start, numel))
            for block in (first, last)
        }


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
        """What :meth:`_largest` asks for, of so many moments: nothing unless some parameters' are 8-bit."""
        parameters = self.parameters
        if (parameters.unprojected_moment_dtype or parameters.moment_dtype) != "8bit":
            return []
        return [Request("cut_max", (plain.blocks.local.num_rows if plain.blocks is not None else 0, count))]

    def _largest(
        self, step: PlainStep, count: int, moments: Callable[[Segment], Sequence[Tensor]]
    ) -> Generator[Tensor, Tensor, list[Tensor | None]]:
        """What :meth:`PlainStep.write` has to know of each of ``count`` moments, given what a segment's become."""
        requests = self._keep_requests(step.plain, count)
        if step.plain.moment_dtype != "8bit":
            for request in requests:
                yield step.like.new_zeros(request.shape)
            return [None] * count
        largest = step.like.new_zeros(requests[0].shape)
        for row, segment in step.outer_blocks().items():
            largest[row] = torch.stack([each.abs().amax() for each in moments(segment)])
        largest = yield largest
        return [largest[:, number] for number in range(count)]

    @abstractmethod
    def carry(self, step: ProjectedStep, transition: Tensor) -> None:
        """Carry a matrix's state into a new basis; ``transition`` is ``Q_old^T Q_new``, ``(old rank, new rank)``."""


def segment_size(device: torch.device) -> int:
    """Elements that are worked on at once, a multiple of 256."""
    return SEGMENT["cpu" if device.type == "cpu" else "accelerator"]


def slots_by_key(slots: Sequence[Slot]) -> dict[str, Slot]:
    """Slots by their key."""
    return {slot.key: slot for slot in slots}
