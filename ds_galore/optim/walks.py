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

__all__ = ["Plain", "PlainStep", "ProjectedStep", "Request", "Rule", "Slot", "Update", "Walk", "slots_by_key"]

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
class AnyStep:
    """What both kinds of parameters give a rule to work with."""

    state: State
    group: Mapping[str, Any]
    slots: Mapping[str, Slot]
    weight: Callable[[], Tensor]
    grad: Callable[[], Tensor]
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
class PlainStep(AnyStep):
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
        codes = self.in_blocks(stored)
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
        return torch.nn.functional.pad(numbers.reshape(-1), self._gaps()).view(-1, BLOCK)

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


def slots_by_key(slots: Sequence[Slot]) -> dict[str, Slot]:
    """Slots by their key."""
    return {slot.key: slot for slot in slots}
