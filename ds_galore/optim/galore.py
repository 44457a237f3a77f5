"""GaLoreAdamW: Adam with decoupled weight decay in low-rank subspaces of the gradients, on whatever a rank holds.

Imports torch, :mod:`ds_galore.zero` and its neighbours; never DeepSpeed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from ds_galore.config import GaLoreParameters, validate
from ds_galore.errors import BindingError, CheckpointMismatchError, ConfigError
from ds_galore.optim.matrices import LEFT, RIGHT, Matrix, Side, State
from ds_galore.optim.refresh import RefreshJob, refresh_bases
from ds_galore.optim.rules import adamw_direction, adamw_step_size, reproject
from ds_galore.optim.targets import Described, describe_model, describe_names, select_targets
from ds_galore.tools.memory import ParameterPlan
from ds_galore.zero.binding import FlatBinding, Placement, bind_whole, bind_zero3, full_shape
from ds_galore.zero.group import Guard, RankGroup
from ds_galore.zero.layout import MatrixLayout, matrix_shape

__all__ = ["GaLoreAdamW"]

logger = logging.getLogger(__name__)

#: Elements of the bases that are whole in memory at the same time: bounds what sharded projectors need while a
#: sub-group steps (256 MiB in float32), and thereby how many collectives it takes.
BATCH_ELEMENTS = 2**26

#: Hyperparameters that a parameter group may set for itself.
GROUP_KEYS = ("lr", "betas", "eps", "weight_decay", "correct_bias", "rank", "update_proj_gap", "scale", "proj_type")
#: Keys that others put into parameter groups, left as they are.
FOREIGN_KEYS = frozenset({"params", "param_names", "name", "initial_lr", "configured_lr", "moe"})
#: Hyperparameters that decide what the state looks like: a checkpoint with another value cannot be continued.
STRUCTURAL_KEYS = ("rank", "proj_type")


@dataclass(frozen=True)
class _Decision:
    """What was decided about a parameter when the optimizer was built."""

    name: str
    shape: tuple[int, ...]
    side: Side | None  # None: plain AdamW
    rank: int
    index: int  # among all projected matrices


@dataclass(frozen=True)
class _Plain:
    """A parameter, or this rank's part of it, that is trained with plain AdamW."""

    name: str
    offset: int
    numel: int

    def narrow(self, flat: Tensor) -> Tensor:
        return flat.view(-1).narrow(0, self.offset, self.numel)


@dataclass(frozen=True)
class _Batch:
    """Matrices of one side that step together."""

    side: Side
    matrices: tuple[Matrix, ...]


@dataclass(frozen=True)
class _FlatPlan:
    """How one tensor that ``step()`` is given is updated."""

    group: RankGroup
    batches: tuple[_Batch, ...]
    plain: tuple[_Plain, ...]
    nested: bool  # whether the tensor's state is a dict of the states of several parameters


class GaLoreAdamW(Optimizer):
    """AdamW whose moments of chosen matrices live in a low-rank subspace of their gradients.

    The algorithm is GaLore (Zhao et al., arXiv 2403.03507), and with ``refresh="svd"``, ``stagger_refresh=False`` and
    ``reproject_moments=False`` every number is galore-torch's. It works on an ordinary model, and, given to DeepSpeed,
    on the flat partitions of ZeRO stage 3, where it keeps projected states partitioned as the weights are.

    What a step sends beyond DeepSpeed's own traffic, for each tensor that ``step()`` is given (under ZeRO-3 a
    sub-group), with ``W`` ranks:

    1. *sharded right projectors*: all-gather, ``n r`` numbers a matrix;
    2. *vote*: all-reduce, one byte a parameter: whose gradient is not finite, and whether a rank failed;
    3. *refresh*, of the matrices that are due: see :mod:`.refresh`;
    4. *cut rows* (right): between neighbours, at most ``3 r`` numbers a matrix and rank each way; or
       reduce-scatter and all-gather of ``n r`` numbers (left);
    5. *vote*: all-reduce of one byte: whether a rank failed since.

    Parameters
    ----------
    params
        Parameters, ``(name, parameter)`` pairs, or groups of either. A group may set ``lr``, ``betas``, ``eps``,
        ``weight_decay``, ``correct_bias``, ``rank``, ``update_proj_gap``, ``scale`` and ``proj_type`` for itself.
        As in galore-torch, all matrices of a group that sets ``rank`` are projected.
    lr, betas, eps, weight_decay, correct_bias
        As in transformers' former AdamW, which galore-torch uses.
    rank
        Of the projection, for parameters outside groups that set their own. A matrix with no side longer than
        ``rank`` is trained with plain AdamW, and a warning names it.
    update_proj_gap
        Steps between two refreshes of a matrix's basis.
    scale
        Factor on the low-rank update (the paper's alpha).
    proj_type
        ``"right"``, ``"left"``, ``"std"`` (right where rows >= columns, else left) or ``"reverse_std"``.
    refresh
        ``"subspace"``: ``power_iterations`` passes of block power iteration from the basis in use, one more from a
        random start. ``"svd"``: the SVD of the gradient, gathered on one rank.
    stagger_refresh
        Matrix ``i`` of ``K`` refreshes on step ``i gap // K`` of the gap, instead of all on the first.
    reproject_moments
        Carry the moments into the new basis at a refresh (:func:`.reproject`); galore-torch does not.
    target_modules
        Which modules ``rank`` is for: see :mod:`.targets`.
    projector_storage
        ``"replicated"``, ``"sharded"``, or ``"auto"``: sharded where replicated right projectors would take more
        memory than the moments. Left projectors are always partitioned as the weights are.
    projector_dtype
        ``"fp32"`` or ``"bf16"``.
    seed
        Of random starts.
    model
        The model that ``params`` belong to: gives their names, and tells layers apart for ``target_modules``.

    Raises
    ------
    ConfigError
        For impossible hyperparameters, unknown group keys, or ``target_modules`` that match nothing.

    Notes
    -----
    Parameters of more than two dimensions are seen as ``(first, rest)``. A parameter whose gradient is not finite on
    some rank is left alone in that step, with its state; one whose gradient is zero keeps its basis. State is tensors
    and numbers, with the same keys on all ranks.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
        *,
        model: nn.Module | None = None,
        **galore: Any,
    ) -> None:
        plain = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "correct_bias": correct_bias}
        self._parameters = validate(GaLoreParameters, {**plain, **galore}, where="GaLoreAdamW")
        groups, described = _read_groups(params, model)
        for number, group in enumerate(groups):
            own = {key: value for key, value in group.items() if key not in FOREIGN_KEYS}
            checked = validate(GaLoreParameters, own, where=f"param_groups[{number}]")
            group.update({key: getattr(checked, key) for key in own})
            unknown = sorted(set(own) - set(GROUP_KEYS))
            if unknown:
                raise ConfigError(f"param_groups[{number}].{unknown[0]}: can be set for the whole optimizer only")
        own_rank = [group.get("rank") is not None for group in groups]
        defaults = {key: getattr(self._parameters, key) for key in GROUP_KEYS}
        super().__init__(groups, defaults)
        self._decisions = self._decide(own_rank, described)
        self._plans: dict[Tensor, _FlatPlan] = {}
        self._said: set[str] = set()

    # ------------------------------------------------------------------ what is projected, and how

    def _decide(self, own_rank: Sequence[bool], described: Mapping[Tensor, Described]) -> dict[Tensor, _Decision]:
        targets: set[Tensor] = set()
        for number, (group, own) in enumerate(zip(self.param_groups, own_rank, strict=True)):
            unnamed = [each for each in group["params"] if each not in described and len(full_shape(each)) >= 2]
            if unnamed and not own and group["rank"] is not None:
                raise ConfigError(
                    f"rank is {group['rank']}, but which matrices of param_groups[{number}] it is for cannot be told: pass"
                    " model=... or (name, parameter) pairs, or set 'rank' in the groups to be projected"
                )
        candidates = {
            parameter: described[parameter]
            for group, own in zip(self.param_groups, own_rank, strict=True)
            if not own and group["rank"] is not None
            for parameter in group["params"]
            if parameter in described
        }
        if candidates:
            targets, ignored = select_targets(candidates, self._parameters.target_modules)
            if ignored:
                _warn("target_modules match %s, which cannot be projected: ignored", ", ".join(ignored))
        decisions: dict[Tensor, _Decision] = {}
        index, small = 0, []
        for number, (group, own) in enumerate(zip(self.param_groups, own_rank, strict=True)):
            for position, parameter in enumerate(group["params"]):
                known = described.get(parameter)
                name = known.name if known is not None else f"param_groups[{number}].params[{position}]"
                shape = full_shape(parameter)
                side, rank = None, group["rank"] or 0
                if parameter in targets or (own and len(shape) >= 2):
                    rows, columns = matrix_shape(shape)
                    if rank >= min(rows, columns):
                        small.append(f"{name} ({rows} x {columns})")
                    else:
                        side = _choose_side(group["proj_type"], rows, columns)
                elif own and not len(shape) >= 2:
                    raise ConfigError(f"param_groups[{number}].rank is {rank}, but {name} has shape {shape} and is no matrix")
                decisions[parameter] = _Decision(name, shape, side, rank, index)
                index += side is not None
        if small:
            _warn("trained with plain AdamW, since the rank is not below their smaller side: %s", ", ".join(small))
        if not index:
            raise ConfigError(
                "rank: no parameter is projected; set a rank below the smaller side of the matrices, for the optimizer"
                " (with model=... or named parameters) or for the groups to be projected"
            )
        self._num_projected = index
        return decisions

    def parameter_plans(self) -> list[ParameterPlan]:
        """Every trained parameter, in order, and how it is projected: what :func:`.plan_memory` needs."""
        plans = []
        for each in self._decisions.values():
            if each.side is None:
                plans.append(ParameterPlan(each.name, math.prod(each.shape)))
            else:
                rows, columns = matrix_shape(each.shape)
                plans.append(ParameterPlan(each.name, rows * columns, columns, each.rank, each.side.name))
        return plans

    @property
    def projector_bytes(self) -> int:
        """Bytes of one number of a projector."""
        return 2 if self._parameters.projector_dtype == "bf16" else 4

    def state_bytes(self) -> dict[str, int]:
        """Bytes of this rank's ``moments`` and ``projectors`` that exist now: none before the first step."""
        found = {"moments": 0, "projectors": 0}

        def walk(state: Mapping[str, Any]) -> None:
            for key, value in state.items():
                if isinstance(value, dict):
                    walk(value)
                elif isinstance(value, Tensor):
                    found["projectors" if key == "projector" else "moments"] += value.numel() * value.element_size()

        for state in self.state.values():
            walk(state)
        return found

    def _plan(self, tensor: Tensor, group: Mapping[str, Any]) -> _FlatPlan:
        plan = self._plans.get(tensor)
        if plan is None:
            binding = self._bind(tensor)
            nested = tensor not in self._decisions
            plan = self._plans[tensor] = self._make_plan(binding, group, _compute_dtype(tensor), nested=nested)
        return plan

    def _bind(self, tensor: Tensor) -> FlatBinding:
        if tensor in self._decisions:
            return bind_whole(cast(Parameter, tensor))
        return bind_zero3(tensor, cast("Iterable[Parameter]", self._decisions))

    def _make_plan(
        self, binding: FlatBinding, group: Mapping[str, Any], dtype: torch.dtype, *, nested: bool
    ) -> _FlatPlan:
        ranks = binding.group
        plain, sides = [], cast("dict[Side, list[Matrix]]", {RIGHT: [], LEFT: []})
        for placement, name in zip(binding.placements, binding.names, strict=True):
            decision = self._decisions.get(placement.parameter)
            if decision is None:
                raise BindingError(f"DeepSpeed partitions parameter {name or '?'}, which the optimizer was not given")
            if decision.side is None:
                start, stop = placement.ranges[ranks.rank]
                plain.append(_Plain(decision.name, placement.offset, stop - start))
            else:
                sides[decision.side].append(self._matrix(decision, placement, ranks, group, dtype))
        batches = []
        for side, matrices in sides.items():
            pending: list[Matrix] = []
            size = 0
            for matrix in matrices:
                elements = side.basis_rows(matrix) * matrix.rank
                if pending and size + elements > BATCH_ELEMENTS:
                    batches.append(_Batch(side, tuple(pending)))
                    pending, size = [], 0
                pending.append(matrix)
                size += elements
            if pending:
                batches.append(_Batch(side, tuple(pending)))
        return _FlatPlan(ranks, tuple(batches), tuple(plain), nested)

    def _matrix(
        self,
        decision: _Decision,
        placement: Placement,
        ranks: RankGroup,
        group: Mapping[str, Any],
        dtype: torch.dtype,
    ) -> Matrix:
        layout = MatrixLayout(matrix_shape(decision.shape), placement.ranges, ranks.rank)
        gap = group["update_proj_gap"]
        return Matrix(
            name=decision.name,
            layout=layout,
            offset=placement.offset,
            rank=decision.rank,
            index=decision.index,
            phase=decision.index * gap // self._num_projected if self._parameters.stagger_refresh else 0,
            sharded=decision.side is RIGHT and self.shards_projectors(ranks.world_size),
            projector_dtype=torch.bfloat16 if self._parameters.projector_dtype == "bf16" else dtype,
        )

    def shards_projectors(self, world_size: int) -> bool:
        """Whether right projectors are kept in parts when ``world_size`` ranks share a parameter."""
        storage = self._parameters.projector_storage
        if storage != "auto" or world_size == 1:
            return storage == "sharded" and world_size > 1
        projectors = moments = 0
        for each in self._decisions.values():
            if each.side is RIGHT:
                rows, columns = matrix_shape(each.shape)
                projectors += columns * each.rank * self.projector_bytes
                moments += 2 * 4 * rows * each.rank
        return projectors * world_size > moments

    # ------------------------------------------------------------------ the step

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

        Raises
        ------
        PeerError
            If another rank failed; all ranks raise in the same step.
        BindingError
            If DeepSpeed hands over something that is not understood.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is None:
                    continue
                if tensor.grad.is_sparse:
                    raise ConfigError("GaLoreAdamW does not support sparse gradients; use an Embedding with sparse=False")
                self._step_tensor(tensor, group, self._plan(tensor, group))
        return loss

    def _step_tensor(self, tensor: Tensor, group: dict[str, Any], plan: _FlatPlan) -> None:
        guard = Guard()
        if plan.plain:
            self._step_plain(tensor, group, plan, guard)
        for batch in plan.batches:
            self._step_batch(tensor, group, plan, batch, guard)
        plan.group.vote(torch.zeros(0, dtype=torch.uint8, device=tensor.device), guard.error)

    def _state(self, tensor: Tensor, plan: _FlatPlan, name: str) -> State:
        state: State = self.state[tensor]
        return state.setdefault(name, {}) if plan.nested else state

    def _step_plain(self, tensor: Tensor, group: dict[str, Any], plan: _FlatPlan, guard: Guard) -> None:
        flags = torch.zeros(len(plan.plain), dtype=torch.uint8, device=tensor.device)
        with guard:
            for number, each in enumerate(plan.plain):
                flags[number] = ~_is_finite(each.narrow(tensor.grad))
        agreed = plan.group.vote(flags, guard.error).tolist()
        with guard:
            for each, bad in zip(plan.plain, agreed, strict=True):
                state = self._state(tensor, plan, each.name)
                if not state:
                    shape = (each.numel,) if plan.nested else tensor.shape
                    state.update(step=0, exp_avg=_moment(tensor, shape), exp_avg_sq=_moment(tensor, shape))
                if bad:
                    self._say_skipped(each.name)
                    continue
                state["step"] += 1
                grad = each.narrow(tensor.grad).to(state["exp_avg"].dtype, copy=True).view(state["exp_avg"].shape)
                direction = adamw_direction(
                    grad, state["exp_avg"], state["exp_avg_sq"], betas=group["betas"], eps=group["eps"]
                )
                alpha, beta = _factors(group, state["step"], scale=1.0)
                weight = each.narrow(tensor)
                if weight.dtype == direction.dtype:
                    weight.add_(direction.view(-1), alpha=-alpha).mul_(beta)
                else:
                    weight.copy_(weight.to(direction.dtype).add_(direction.view(-1), alpha=-alpha).mul_(beta))

    def _step_batch(
        self, tensor: Tensor, group: dict[str, Any], plan: _FlatPlan, batch: _Batch, guard: Guard
    ) -> None:
        side, ranks = batch.side, plan.group
        states = [self._state(tensor, plan, matrix.name) for matrix in batch.matrices]
        compute = _compute_dtype(tensor)
        if not all(states):  # the same on all ranks
            with guard:
                for matrix, state in zip(batch.matrices, states, strict=True):
                    if not state:
                        _create(state, side, matrix, tensor, compute)
            ranks.vote(torch.zeros(0, dtype=torch.uint8, device=tensor.device), guard.error)
        bases = side.load(batch.matrices, states, ranks, compute)
        due = [
            not state["has_basis"] or (state["step"] > 0 and (state["step"] - matrix.phase) % group["update_proj_gap"] == 0)
            for matrix, state in zip(batch.matrices, states, strict=True)
        ]

        # 1. Every rank's share of the low-rank gradients that need no new basis, and what is wrong with its gradients.
        shares: list[Tensor | None] = [None] * len(states)
        flags = torch.zeros(len(states), dtype=torch.uint8, device=tensor.device)
        with guard:
            for number, matrix in enumerate(batch.matrices):
                grad = matrix.narrow(tensor.grad).to(compute)
                if due[number]:
                    flags[number] = ~_is_finite(grad)
                else:
                    share = shares[number] = side.share(matrix, grad, bases[number])
                    flags[number] = ~_is_finite(share)  # as telling as the gradient, and smaller
        agreed = ranks.vote(flags, guard.error).tolist()
        for matrix, bad in zip(batch.matrices, agreed, strict=True):
            if bad:
                self._say_skipped(matrix.name)
        active = [number for number, bad in enumerate(agreed) if not bad]

        # 2. New bases.
        fresh = [number for number in active if due[number]]
        renewed = self._refresh(tensor, group, plan, batch, fresh, states, bases, guard) if fresh else set()
        # A matrix whose first gradients are zero has no basis yet, and nothing to be updated by.
        active = [number for number in active if states[number]["has_basis"]]
        if not active:
            return

        # 3. Whole low-rank gradients.
        matrices = [batch.matrices[number] for number in active]

        def late_shares() -> list[Tensor]:
            result = []
            for number, matrix in zip(active, matrices, strict=True):
                share = shares[number]
                if share is None or number in renewed:
                    share = side.share(matrix, matrix.narrow(tensor.grad).to(compute), bases[number])
                result.append(share)
            return result

        def no_shares() -> list[Tensor]:
            return [tensor.new_zeros(side.share_shape(matrix), dtype=compute) for matrix in matrices]

        low_rank = side.combine(matrices, guard.run(late_shares, no_shares), ranks)

        # 4. Moments and directions.
        def directions() -> list[Tensor]:
            result = []
            for number, grad in zip(active, low_rank, strict=True):
                state = states[number]
                state["step"] += 1
                result.append(
                    adamw_direction(grad, state["exp_avg"], state["exp_avg_sq"], betas=group["betas"], eps=group["eps"])
                )
            return result

        spread = side.spread(matrices, guard.run(directions, lambda: list(low_rank)), ranks)

        # 5. Weights.
        with guard:
            for number, matrix, direction in zip(active, matrices, spread, strict=True):
                alpha, beta = _factors(group, states[number]["step"], scale=group["scale"])
                weight = matrix.narrow(tensor)
                if weight.dtype == compute:
                    side.apply(matrix, weight, direction, bases[number], -alpha * beta, beta)
                else:
                    whole = weight.to(compute)
                    side.apply(matrix, whole, direction, bases[number], -alpha * beta, beta)
                    weight.copy_(whole)

    def _refresh(
        self,
        tensor: Tensor,
        group: dict[str, Any],
        plan: _FlatPlan,
        batch: _Batch,
        numbers: Sequence[int],
        states: Sequence[State],
        bases: list[Tensor],
        guard: Guard,
    ) -> set[int]:
        """Renew the bases of ``numbers`` in ``bases`` and in the state; returns those that were renewed."""
        side, ranks = batch.side, plan.group
        compute = bases[0].dtype
        jobs = guard.run(
            lambda: [
                RefreshJob(
                    batch.matrices[number],
                    batch.matrices[number].narrow(tensor.grad).to(compute),
                    bases[number] if states[number]["has_basis"] else None,
                )
                for number in numbers
            ],
            lambda: [
                RefreshJob(
                    batch.matrices[number],
                    tensor.new_zeros(batch.matrices[number].layout.local.numel, dtype=compute),
                    bases[number] if states[number]["has_basis"] else None,
                )
                for number in numbers
            ],
        )
        found = refresh_bases(
            side,
            jobs,
            ranks,
            guard,
            method=self._parameters.refresh,
            passes=self._parameters.power_iterations,
            seed=self._parameters.seed,
        )
        renewed = [(number, basis) for number, basis in zip(numbers, found, strict=True) if basis is not None]
        if not renewed:
            return set()
        matrices = [batch.matrices[number] for number, _ in renewed]
        old = [bases[number] for number, _ in renewed]
        had = [bool(states[number]["has_basis"]) for number, _ in renewed]
        for number, basis in renewed:
            states[number]["projector"] = side.store(batch.matrices[number], basis, ranks)
            states[number]["has_basis"] = 1
        # What was stored is what is used: rounded, and on the left the touched rows only.
        new = [_stored_basis(side, matrix, basis, compute) for matrix, (_, basis) in zip(matrices, renewed, strict=True)]
        for (number, _), basis in zip(renewed, new, strict=True):
            bases[number] = basis
        carried = [position for position, before in enumerate(had) if before]
        if carried and self._parameters.reproject_moments:
            transitions = side.transitions(
                [matrices[p] for p in carried], [old[p] for p in carried], [new[p] for p in carried], ranks, guard
            )
            with guard:
                for position, transition in zip(carried, transitions, strict=True):
                    matrix, state = matrices[position], states[renewed[position][0]]
                    reproject(
                        state["exp_avg"],
                        state["exp_avg_sq"],
                        transition,
                        step=state["step"],
                        betas=group["betas"],
                        product=_product(side, matrix),
                    )
        return {number for number, _ in renewed}

    def _say_skipped(self, name: str) -> None:
        if name not in self._said:
            self._said.add(name)
            _warn("%s: the gradient is not finite; left alone in this step (said once per parameter)", name)

    # ------------------------------------------------------------------ checkpoints

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state dict; the next update is the very one that would have followed.

        Tensors keep the dtypes in which they were saved. Hyperparameters come from this optimizer's configuration
        where that differs from the configuration that the state was saved with, and each difference is logged; the
        learning rate is otherwise the saved one, since schedulers move it.

        Raises
        ------
        CheckpointMismatchError
            If the state has another structure: other groups or parameters, rank, sides, or projector storage.
        """
        saved_groups = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in self.param_groups]
        saved_sizes = [len(group["params"]) for group in saved_groups]
        if sizes != saved_sizes:
            raise CheckpointMismatchError(
                f"the checkpoint's parameter groups hold {saved_sizes} tensors, this optimizer's {sizes}"
            )
        for number, (group, saved) in enumerate(zip(self.param_groups, saved_groups, strict=True)):
            for key in STRUCTURAL_KEYS:
                if saved.get(key) != group[key]:
                    raise CheckpointMismatchError(
                        f"param_groups[{number}].{key}: the checkpoint has {saved.get(key)!r}, the configuration {group[key]!r};"
                        f" set it to {saved.get(key)!r} to continue that run"
                    )
        identifiers = [identifier for group in saved_groups for identifier in group["params"]]
        tensors = [(tensor, group) for group in self.param_groups for tensor in group["params"]]
        loaded: dict[Tensor, State] = {}
        for identifier, (tensor, group) in zip(identifiers, tensors, strict=True):
            saved_state = state_dict["state"].get(identifier)
            if saved_state:
                self._check_state(tensor, group, saved_state)
                loaded[tensor] = _to_device(saved_state, tensor.device)
        configured = [
            {key: value for key, value in group.items() if key != "params"} for group in self.param_groups
        ]
        super().load_state_dict({**state_dict, "state": {}})
        for number, (group, ours, saved) in enumerate(zip(self.param_groups, configured, saved_groups, strict=True)):
            self._settle(number, group, ours, saved)
        self.state.clear()
        self.state.update(loaded)

    def _settle(self, number: int, group: dict[str, Any], ours: dict[str, Any], saved: dict[str, Any]) -> None:
        """Let the configuration win where it differs from the one that a group was saved with."""
        for key in GROUP_KEYS:
            found, wanted = saved.get(key), ours[key]
            if key == "lr":
                base, wanted_base = saved.get("configured_lr"), ours.get("configured_lr")
                if base == wanted_base:
                    continue
                found, wanted = base, wanted_base
                group["configured_lr"] = wanted_base
                group["lr"] = ours["lr"]
            elif key == "betas":
                found, wanted = tuple(found or ()), tuple(wanted)
                group[key] = wanted
            else:
                group[key] = wanted
            if found != wanted:
                _warn(
                    "param_groups[%d].%s: the checkpoint has %r, the configuration %r; continuing with the configuration's",
                    number,
                    key,
                    found,
                    wanted,
                )

    def _check_state(self, tensor: Tensor, group: Mapping[str, Any], saved: State) -> None:
        plan = self._plan(tensor, group)
        expected: dict[str, dict[str, tuple[int, ...]]] = {}
        for each in plan.plain:
            shape = (each.numel,) if plan.nested else tuple(tensor.shape)
            expected[each.name] = {"exp_avg": shape, "exp_avg_sq": shape}
        for batch in plan.batches:
            for matrix in batch.matrices:
                moments = batch.side.moment_shape(matrix)
                projector = batch.side.projector_shape(matrix)
                expected[matrix.name] = {"exp_avg": moments, "exp_avg_sq": moments, "projector": projector}
        states = saved if plan.nested else {next(iter(expected)): saved}
        if states.keys() != expected.keys():
            odd = sorted(states.keys() ^ expected.keys())[0]
            raise CheckpointMismatchError(
                f"{odd}: is {'in the checkpoint' if odd in states else 'missing from the checkpoint'} and"
                f" {'trained' if odd in expected else 'not trained'} by this optimizer; the model differs from the saved one"
            )
        for name, shapes in expected.items():
            for key, shape in shapes.items():
                value = states[name].get(key)
                found = tuple(value.shape) if isinstance(value, Tensor) else None
                if found != shape:
                    raise CheckpointMismatchError(
                        f"{name}: the checkpoint's {key} has shape {found}, expected {shape}; the checkpoint was written"
                        " with other target_modules, another projector_storage or another number of ranks"
                    )
            if "projector" not in shapes and "projector" in states[name]:
                raise CheckpointMismatchError(f"{name}: projected in the checkpoint, not in the configuration")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while the optimizer is built; later ones are refused, since sides and phases are settled then.

        Raises
        ------
        ConfigError
            If the optimizer has been built.
        """
        if hasattr(self, "_decisions"):
            raise ConfigError("add_param_group: GaLoreAdamW takes all its parameters when it is built")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group["configured_lr"] = group["lr"]


def _read_groups(params: Iterable[Any], model: nn.Module | None) -> tuple[list[dict[str, Any]], dict[Tensor, Described]]:
    """The parameter groups, without names, and what is known of the parameters."""
    described = describe_model(model) if model is not None else {}
    items = list(params)
    if not items:
        raise ConfigError("params: GaLoreAdamW was given no parameters")
    groups = [dict(item) for item in items] if isinstance(items[0], dict) else [{"params": items}]
    for group in groups:
        members = group["params"]
        members = [members] if isinstance(members, Tensor) else list(members)
        if members and isinstance(members[0], tuple):
            named = describe_names(members)
            described = {**named, **described}
            members = list(named)
        group["params"] = members
    return groups, described


def _warn(message: str, *values: object) -> None:
    """Log a warning once for the job, not once per rank."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning(message, *values)


def _choose_side(proj_type: str, rows: int, columns: int) -> Side:
    if proj_type in ("right", "left"):
        return RIGHT if proj_type == "right" else LEFT
    return RIGHT if (rows >= columns) == (proj_type == "std") else LEFT


def _create(state: State, side: Side, matrix: Matrix, tensor: Tensor, dtype: torch.dtype) -> None:
    shape = side.moment_shape(matrix)
    state.update(
        step=0,
        exp_avg=tensor.new_zeros(shape, dtype=dtype, requires_grad=False),
        exp_avg_sq=tensor.new_zeros(shape, dtype=dtype, requires_grad=False),
        projector=tensor.new_zeros(side.projector_shape(matrix), dtype=matrix.projector_dtype, requires_grad=False),
        has_basis=0,
    )


def _moment(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.zeros(tuple(shape), dtype=_compute_dtype(tensor), device=tensor.device)


def _compute_dtype(tensor: Tensor) -> torch.dtype:
    """What moments are kept in, and the products computed in."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _stored_basis(side: Side, matrix: Matrix, basis: Tensor, dtype: torch.dtype) -> Tensor:
    rounded = basis.to(matrix.projector_dtype).to(dtype)
    if side is RIGHT:
        return rounded
    local = matrix.layout.local
    return rounded[local.first_row : local.end_row]


def _product(side: Side, matrix: Matrix) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda moment, square: side.moment_product(matrix, moment, square)


def _is_finite(tensor: Tensor) -> Tensor:
    """Whether all elements are finite, as a boolean scalar, in one pass without a temporary of the tensor's size."""
    if tensor.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    return torch.isfinite(torch.linalg.vector_norm(tensor, ord=float("inf")))


def _factors(group: Mapping[str, Any], step: int, *, scale: float) -> tuple[float, float]:
    """The factor on the direction, and the one on the weights afterwards, as galore-torch applies them."""
    size = adamw_step_size(group["lr"], step, betas=group["betas"], correct_bias=group["correct_bias"])
    return size * scale, 1.0 - group["lr"] * group["weight_decay"]


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, dict):
        return {key: _to_device(each, device) for key, each in value.items()}
    return value
