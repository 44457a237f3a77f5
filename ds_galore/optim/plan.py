"""What is decided when an optimizer is built, and the plan by which it updates each tensor it is given.

Imports torch, :mod:`ds_galore.zero` and its neighbours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from ds_galore.config import validate
from ds_galore.errors import BindingError, ConfigError
from ds_galore.optim.formats import RowFormat, moment_format, projector_format
from ds_galore.optim.matrices import LEFT, RIGHT, Matrix, Side
from ds_galore.optim.states import block_layout
from ds_galore.optim.targets import Described, describe_model, describe_names, select_targets
from ds_galore.optim.walks import Plain, Rule, Slot
from ds_galore.parameters import LowRankParameters
from ds_galore.tools.memory import SMALLEST_QUANTISED, Kept, ParameterPlan, shards_projectors
from ds_galore.zero.binding import FlatBinding, Placement, full_shape
from ds_galore.zero.group import RankGroup
from ds_galore.zero.layout import MatrixLayout, matrix_shape

__all__ = [
    "Batch",
    "Decision",
    "Decisions",
    "FlatPlan",
    "compute_dtype",
    "decide",
    "largest_rank",
    "plain_value",
    "read_groups",
]

#: Keys that others put into parameter groups, left as they are.
FOREIGN_KEYS = frozenset({"params", "param_names", "name", "initial_lr", "configured_lr", "settings", "moe"})
#: Elements of the bases that are whole in memory at the same time: bounds what sharded projectors need while a
#: sub-group steps (256 MiB in float32), and thereby how many collectives it takes.
BATCH_ELEMENTS = 2**26


@dataclass(frozen=True)
class Decision:
    """What was decided about a parameter.

    Parameters
    ----------
    name
        Of the parameter.
    shape
        Of the whole parameter.
    side
        From which it is projected; None for plain AdamW.
    rank
        Of the projection, the largest where it is chosen by energy.
    energy
        The share of energy to be captured, or None.
    index
        Its number among all projected matrices of the optimizer.
    number
        Its number among all parameters.
    """

    name: str
    shape: tuple[int, ...]
    side: Side | None
    rank: int
    energy: float | None
    index: int
    number: int


@dataclass(frozen=True)
class Batch:
    """Matrices of one side that step together."""

    side: Side
    matrices: tuple[Matrix, ...]


@dataclass(frozen=True)
class FlatPlan:
    """How one tensor that ``step()`` is given is updated.

    Parameters
    ----------
    group
        The ranks that hold it together.
    batches, plain
        What it consists of.
    nested
        Whether its state is a dict of the states of several parameters.
    slots
        What is kept for a projected matrix.
    plain_slots
        What is kept for each of ``plain``.
    """

    group: RankGroup
    batches: tuple[Batch, ...]
    plain: tuple[Plain, ...]
    nested: bool
    slots: list[Slot]
    plain_slots: list[list[Slot]]


def plain_value(value: Any) -> Any:
    """A hyperparameter as a checkpoint holds it: a section as a dict."""
    return value.model_dump() if isinstance(value, BaseModel) else value


def largest_rank(rank: Any) -> int:
    """The rank that is planned for; 0 for none."""
    return int(rank["max"] if isinstance(rank, Mapping) else rank or 0)


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """What moments are kept in, and the products computed in."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def read_groups(
    params: Iterable[Any], model: nn.Module | None, parameters: LowRankParameters
) -> tuple[list[dict[str, Any]], dict[Tensor, Described]]:
    """The parameter groups without names, checked with the optimizer's hyperparameters; what is known of them.

    Raises
    ------
    ConfigError
        If there are no parameters, or a group's keys or values are impossible.
    """
    kind = type(parameters)
    optimizers = {key: getattr(parameters, key) for key in kind.model_fields}
    described = describe_model(model) if model is not None else {}
    items = list(params)
    if not items:
        raise ConfigError("params: the optimizer was given no parameters")
    groups = [dict(item) for item in items] if isinstance(items[0], dict) else [{"params": items}]
    for number, group in enumerate(groups):
        members = group["params"]
        members = [members] if isinstance(members, Tensor) else list(members)
        if members and isinstance(members[0], tuple):
            named = describe_names(members)
            described = {**named, **described}
            members = list(named)
        group["params"] = members
        own = {key: value for key, value in group.items() if key not in FOREIGN_KEYS}
        checked = validate(kind, {**optimizers, **own}, where=f"param_groups[{number}]")
        group.update({key: plain_value(getattr(checked, key)) for key in own})
        unknown = sorted(set(own) - set(kind.GROUP_KEYS))
        if unknown:
            raise ConfigError(f"param_groups[{number}].{unknown[0]}: can be set for the whole optimizer only")
    return groups, described


class Decisions:
    """What was decided about every parameter, and the plans that follow from it.

    Parameters
    ----------
    by_parameter
        In the order of the parameter groups.
    parameters
        The optimizer's hyperparameters.
    rule
        Its update rule.
    kept
        What it keeps of each parameter.
    too_small
        Matrices that were to be projected and have a side no longer than the rank, for a message.
    ignored
        Modules that ``target_modules`` match and that cannot be projected, for a message.
    """

    def __init__(
        self,
        by_parameter: Mapping[Tensor, Decision],
        parameters: LowRankParameters,
        rule: Rule,
        kept: Kept,
        too_small: Sequence[str],
        ignored: Sequence[str],
    ) -> None:
        self.by_parameter = dict(by_parameter)
        self.rule, self.kept = rule, kept
        self.too_small, self.ignored = list(too_small), list(ignored)
        self._parameters = parameters
        self._turns = _turns(list(self.by_parameter.values()), parameters)

    def shards_projectors(self, world_size: int) -> bool:
        """Whether right projectors are kept in parts when ``world_size`` ranks share a parameter.

        ``"auto"`` shards them where whole ones would take more memory on a rank than its moments do.
        """
        storage = self._parameters.projector_storage
        if storage != "auto":
            return storage == "sharded" and world_size > 1
        return shards_projectors(self.parameter_plans(), self.kept, world_size)

    def parameter_plans(self) -> list[ParameterPlan]:
        """Every trained parameter, in order, and how it is projected."""
        plans = []
        for parameter, each in self.by_parameter.items():
            if not parameter.requires_grad:
                continue
            rows, columns = matrix_shape(each.shape) if len(each.shape) >= 2 else (math.prod(each.shape), 0)
            numel = rows * max(columns, 1)
            side = each.side.name if each.side is not None else ""
            plans.append(ParameterPlan(each.name, numel, columns, each.rank if side else 0, side))
        return plans

    def plan(self, binding: FlatBinding, *, gap: int, dtype: torch.dtype, nested: bool) -> FlatPlan:
        """The plan for a tensor.

        Parameters
        ----------
        binding
            What the tensor consists of.
        gap
            ``update_proj_gap`` of its parameter group.
        dtype
            What is computed in.
        nested
            As in :class:`FlatPlan`.

        Raises
        ------
        BindingError
            If a parameter of the binding was not given to the optimizer.
        """
        plain: list[Plain] = []
        sides: dict[Side, list[Matrix]] = {RIGHT: [], LEFT: []}
        for placement, name in zip(binding.placements, binding.names, strict=True):
            decision = self.by_parameter.get(placement.parameter)
            if decision is None:
                raise BindingError(f"DeepSpeed partitions parameter {name or '?'}, which the optimizer was not given")
            if not math.prod(decision.shape):
                continue  # no elements, no state
            if decision.side is None:
                plain.append(self._plain(decision, placement, binding.group))
            else:
                sides[decision.side].append(self._matrix(decision, placement, binding.group, gap, dtype))
        batches = [batch for side, matrices in sides.items() for batch in _in_batches(side, matrices)]
        formats = self._formats(self._parameters.moment_dtype, dtype)
        return FlatPlan(
            binding.group,
            tuple(batches),
            tuple(plain),
            nested,
            slots=self.rule.slots(*formats, dtype),
            plain_slots=[
                self.rule.plain_slots(each, *self._formats(each.moment_dtype, dtype), dtype) for each in plain
            ],
        )

    @staticmethod
    def _formats(name: str, compute: torch.dtype) -> tuple[RowFormat, RowFormat]:
        """What signed and unsigned moments are kept as."""
        signed, unsigned = (moment_format(name, signed=signed, compute=compute) for signed in (True, False))
        return signed, unsigned

    def _plain(self, decision: Decision, placement: Placement, group: RankGroup) -> Plain:
        parameters, shape = self._parameters, decision.shape
        wanted = parameters.unprojected_moment_dtype or parameters.moment_dtype
        small = math.prod(shape) < SMALLEST_QUANTISED
        kept = "fp32" if wanted == "8bit" and small else wanted
        return Plain(
            name=decision.name,
            shape=shape,
            offset=placement.offset,
            ranges=placement.ranges,
            rank=group.rank,
            number=decision.number,
            moment_dtype=kept,
            matrix=MatrixLayout(matrix_shape(shape), placement.ranges, group.rank) if len(shape) >= 2 else None,
            blocks=block_layout(shape, placement.ranges, group.rank) if kept == "8bit" else None,
        )

    def _matrix(
        self, decision: Decision, placement: Placement, group: RankGroup, gap: int, dtype: torch.dtype
    ) -> Matrix:
        parameters = self._parameters
        gap = max(gap, -(-len(self._turns) // parameters.refresh_budget) if parameters.refresh_budget else 0)
        kept = None
        if parameters.refresh != "random":
            stochastic = parameters.projector_rounding == "stochastic"
            kept = projector_format(parameters.projector_dtype, stochastic=stochastic, compute=dtype)
        return Matrix(
            name=decision.name,
            layout=MatrixLayout(matrix_shape(decision.shape), placement.ranges, group.rank),
            offset=placement.offset,
            rank=decision.rank,
            energy=decision.energy,
            index=decision.index,
            number=decision.number,
            phase=math.floor(self._turns[decision.index] * gap) if parameters.stagger_refresh else 0,
            gap=gap,
            sharded=decision.side is RIGHT and kept is not None and self.shards_projectors(group.world_size),
            projector=kept,
            seed=parameters.seed,
            unit_columns=self.rule.low_rank_only,
        )


def _turns(decisions: Sequence[Decision], parameters: LowRankParameters) -> list[Fraction]:
    """When in the gap each projected matrix has its turn, as a share of the gap.

    The cost of a refresh decides how long it is until the next one's turn; with a budget all count the same.
    """
    costs = []
    for each in decisions:
        if each.side is not None:
            rows, columns = matrix_shape(each.shape)
            costs.append(1 if parameters.refresh_budget else rows * columns * min(each.rank, 64))
    total = sum(costs)
    return [Fraction(before, total) for before in itertools.accumulate(costs, initial=0)][:-1]


def _in_batches(side: Side, matrices: Sequence[Matrix]) -> list[Batch]:
    batches: list[Batch] = []
    pending: list[Matrix] = []
    size = 0
    for matrix in matrices:
        elements = side.basis_rows(matrix) * matrix.rank
        if pending and size + elements > BATCH_ELEMENTS:
            batches.append(Batch(side, tuple(pending)))
            pending, size = [], 0
        pending.append(matrix)
        size += elements
    return [*batches, Batch(side, tuple(pending))] if pending else batches


def decide(
    groups: Sequence[Mapping[str, Any]],
    own_rank: Sequence[bool],
    described: Mapping[Tensor, Described],
    parameters: LowRankParameters,
    rule: Rule,
    kept: Kept,
) -> Decisions:
    """Decide about every parameter.

    Parameters
    ----------
    groups
        The parameter groups with all hyperparameters filled in.
    own_rank
        Which groups set their own rank: all their matrices are projected. In the others ``target_modules`` chooses.
    described
        What is known of the parameters.
    parameters
        The optimizer's hyperparameters.
    rule
        Its update rule.
    kept
        What it keeps of each parameter.

    Raises
    ------
    ConfigError
        If nothing is projected, if it cannot be told what is to be, or if a group with a rank holds something that is
        no matrix.
    """
    targets, ignored = _targets(groups, own_rank, described, parameters)
    decisions: dict[Tensor, Decision] = {}
    too_small: list[str] = []
    index = 0
    for number, (group, own) in enumerate(zip(groups, own_rank, strict=True)):
        for position, parameter in enumerate(group["params"]):
            known = described.get(parameter)
            name = known.name if known is not None else f"param_groups[{number}].params[{position}]"
            shape, rank = full_shape(parameter), largest_rank(group["rank"])
            energy = group["rank"]["energy"] if isinstance(group["rank"], Mapping) else None
            side = None
            if own and len(shape) < 2:
                raise ConfigError(
                    f"param_groups[{number}].rank is {rank}, but {name} has shape {shape} and is no matrix"
                )
            if parameter.requires_grad and (own or parameter in targets):
                rows, columns = matrix_shape(shape)
                if rank >= min(rows, columns):
                    too_small.append(f"{name} ({rows} x {columns})")
                else:
                    side = _choose_side(group["proj_type"], rows, columns)
            decisions[parameter] = Decision(name, shape, side, rank, energy, index, len(decisions))
            index += side is not None
    if not index:
        raise ConfigError(
            "rank: no parameter is projected; set a rank below the smaller side of the matrices, for the optimizer"
            " (with model=... or named parameters) or for the groups to be projected"
        )
    gaps = {group["update_proj_gap"] for group in groups if any(decisions[p].side for p in group["params"])}
    if parameters.refresh_budget and len({max(gap, -(-index // parameters.refresh_budget)) for gap in gaps}) > 1:
        raise ConfigError(
            f"refresh_budget is {parameters.refresh_budget}, and the parameter groups' update_proj_gap"
            f" {', '.join(map(str, sorted(gaps)))}: with a budget all matrices need one gap"
        )
    return Decisions(decisions, parameters, rule, kept, too_small, ignored)


def _targets(
    groups: Sequence[Mapping[str, Any]],
    own_rank: Sequence[bool],
    described: Mapping[Tensor, Described],
    parameters: LowRankParameters,
) -> tuple[set[Tensor], list[str]]:
    candidates: dict[Tensor, Described] = {}
    for number, (group, own) in enumerate(zip(groups, own_rank, strict=True)):
        if own or group["rank"] is None:
            continue
        unnamed = [p for p in group["params"] if p not in described and p.requires_grad and len(full_shape(p)) >= 2]
        if unnamed:
            raise ConfigError(
                f"rank is {group['rank']}, but which matrices of param_groups[{number}] it is for cannot be told: pass"
                " model=... or (name, parameter) pairs, or set 'rank' in the groups to be projected"
            )
        candidates.update((p, described[p]) for p in group["params"] if p in described and p.requires_grad)
    return select_targets(candidates, parameters.target_modules) if candidates else (set(), [])


def _choose_side(proj_type: str, rows: int, columns: int) -> Side:
    if proj_type in ("right", "left"):
        return RIGHT if proj_type == "right" else LEFT
    return RIGHT if (rows >= columns) == (proj_type == "std") else LEFT
