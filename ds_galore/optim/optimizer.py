"""The optimizer that all of the family are: an update rule on low-rank gradients, on whatever a rank holds.

Imports torch, :mod:`ds_galore.zero` and its neighbours; never DeepSpeed.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from ds_galore.config import validate
from ds_galore.errors import BindingError, ConfigError, DsGaloreError
from ds_galore.optim.arrivals import Arrivals
from ds_galore.optim.formats import require_bitsandbytes
from ds_galore.optim.gradients import ArrivedGradients, FlatGradients, Gradients
from ds_galore.optim.loading import check_groups, check_state, settle_group, settle_state, to_device
from ds_galore.optim.matrices import State
from ds_galore.optim.plan import FlatPlan, compute_dtype, decide, plain_value, read_groups
from ds_galore.optim.states import StateTensor, effective, plain_tensors, projected_tensors
from ds_galore.optim.step import FlatStep
from ds_galore.optim.walks import Rule
from ds_galore.optim.watching import Watch
from ds_galore.parameters import LowRankParameters
from ds_galore.tools.memory import Kept, ParameterPlan
from ds_galore.tools.optimizers import configured, optimizer_named
from ds_galore.zero.binding import bind, bind_whole, is_linked

__all__ = ["LowRankOptimizer"]

logger = logging.getLogger(__name__)


class _StatesByName(dict[str, Any]):
    """The states of the parameters in a flat tensor, by name.

    DeepSpeed looks for ``exp_avg`` here, of the flat tensor's shape, when a user asks for the full optimizer state of a
    parameter (``safe_get_full_optimizer_state`` and its kin): a clear refusal, on all ranks alike.
    """

    def __missing__(self, key: str) -> Any:
        raise BindingError(
            f"{key!r} of a whole parameter does not exist: the optimizer keeps low-rank states, by parameter name, in"
            " optimizer.state; DeepSpeed's functions for full optimizer states do not work with it"
        )


class LowRankOptimizer(Optimizer):
    """An optimizer that keeps states of chosen matrices in a low-rank subspace of their gradients.

    It works on an ordinary model, and, given to DeepSpeed, on the flat partitions of ZeRO, where it keeps projected
    states partitioned as the weights are. Subclasses name the model of their hyperparameters and their update rule.

    What a step sends beyond DeepSpeed's own traffic, for each tensor that ``step()`` is given (under ZeRO-3 a
    sub-group, under ZeRO-1 and 2 a parameter group), with ``W`` ranks:

    1. *sharded right projectors*: all-gather, ``n r`` numbers a matrix;
    2. *vote*: all-reduce, one byte a parameter: whose gradient is not finite, and whether a rank failed;
    3. *refresh*, of the matrices that are due: see :mod:`.refresh`;
    4. *cut rows* (right): between neighbours, at most ``3 r`` numbers a matrix and rank each way; or
       reduce-scatter and all-gather of ``n r`` numbers (left);
    5. what the rule asks for (:mod:`.updates`): nothing for AdamW on the right, a number or ``r`` a matrix for others;
    6. *vote*: all-reduce of one byte: whether a rank failed since.

    Parameters
    ----------
    params
        Parameters, ``(name, parameter)`` pairs, or groups of either.
    model
        The model that ``params`` belong to: gives their names, and tells layers apart for ``target_modules``.
    values
        Hyperparameters: the fields of ``parameters_model``.

    Raises
    ------
    ConfigError
        For impossible hyperparameters, unknown group keys, ``target_modules`` that match nothing, or 8-bit moments
        where bitsandbytes cannot be imported.

    Notes
    -----
    Parameters of more than two dimensions are seen as ``(first, rest)``. A parameter whose gradient is not finite on
    some rank is left alone in that step, with its state; one whose gradient is zero keeps its basis. State is tensors
    and numbers, with the same keys on all ranks.
    """

    parameters_model: ClassVar[type[LowRankParameters]]
    rule_type: ClassVar[type[Rule]]

    def __init__(self, params: Iterable[Any], *, model: nn.Module | None = None, **values: Any) -> None:
        name, kind = type(self).__name__, self.parameters_model
        self._parameters = validate(kind, values, where=name)
        if "8bit" in (self._parameters.moment_dtype, self._parameters.unprojected_moment_dtype):
            require_bitsandbytes()
        groups, described = read_groups(params, model, self._parameters)
        own_rank = [group.get("rank") is not None for group in groups]
        for group in groups:  # kept with the groups so that a checkpoint tells
            group["settings"] = {key: getattr(self._parameters, key) for key in kind.SETTINGS}
            group["settings"]["rule"] = self.rule_type.__name__
        super().__init__(groups, {key: plain_value(getattr(self._parameters, key)) for key in kind.GROUP_KEYS})
        self._rule = self.rule_type(self._parameters)
        kept = configured(optimizer_named(name), self._parameters.model_dump()).kept()
        self._decisions = decide(self.param_groups, own_rank, described, self._parameters, self._rule, kept)
        self._plans: dict[Tensor, FlatPlan] = {}
        self._holder: Callable[[], object] = lambda: None
        self._said: set[str] = set()
        self._failed = False
        self._arrived: dict[Tensor, Arrivals] = {}
        #: Where it is set, on all ranks alike, told of refreshes.
        self.watch: Watch | None = None
        if self._decisions.ignored:
            _warn("target_modules match %s, which cannot be projected: ignored", ", ".join(self._decisions.ignored))
        if self._decisions.too_small:
            _warn(
                "not projected, since the rank is not below their smaller side: %s",
                ", ".join(self._decisions.too_small),
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while the optimizer is built; later ones are refused, since sides and phases are settled then.

        Raises
        ------
        ConfigError
            If the optimizer has been built.
        """
        if hasattr(self, "_decisions"):
            raise ConfigError("add_param_group: a low-rank optimizer takes all its parameters when it is built")
        super().add_param_group(param_group)
        self.param_groups[-1]["configured_lr"] = self.param_groups[-1]["lr"]

    def attach(self, holder: object) -> None:
        """Be told by which of DeepSpeed's optimizers this one is wrapped, ``engine.optimizer``; kept weakly."""
        self._holder = weakref.ref(holder)

    # ------------------------------------------------------------------ what it does, for tables and tests

    def parameter_plans(self) -> list[ParameterPlan]:
        """Every trained parameter, in order, and how it is projected: what :func:`.plan_memory` needs."""
        return self._decisions.parameter_plans()

    @property
    def kept(self) -> Kept:
        """What it keeps of each parameter, and in which formats: what :func:`.plan_memory` needs."""
        return self._decisions.kept

    def plan_of(self, tensor: Tensor, group: int | None = None) -> FlatPlan | None:
        """What a tensor that ``step()`` is given consists of.

        Parameters
        ----------
        tensor
            The tensor.
        group
            Index of the parameter group that it belongs to; None gives None before the tensor's first step.
        """
        return self._plans.get(tensor) if group is None else self._plan(tensor, self.param_groups[group])

    @property
    def updates_are_low_rank(self) -> bool:
        """Whether updates of projected matrices lie in the span of projectors that the state holds."""
        return self._rule.low_rank_only and self._parameters.refresh != "random"

    @property
    def projector_is_packed(self) -> bool:
        """Whether a byte of a projector holds two numbers."""
        return self._parameters.projector_dtype == "int4"

    def shards_projectors(self, world_size: int) -> bool:
        """Whether right projectors are kept in parts when ``world_size`` ranks share a parameter."""
        return self._decisions.shards_projectors(world_size)

    def state_tensors(
        self, tensor: Tensor, group: int, state: State | None = None
    ) -> dict[str, dict[str, StateTensor]]:
        """By parameter and key, the tensors of a tensor's state on this rank, with the ranks that its matrices have.

        Parameters
        ----------
        tensor
            One that ``step()`` is given.
        group
            Index of its parameter group.
        state
            Its state where that is not the present one: what tells ranks that are chosen by energy.
        """
        present = self.state.get(tensor, {}) if state is None else state
        return self._layout(self._plan(tensor, self.param_groups[group]), tensor, present)

    @staticmethod
    def _layout(plan: FlatPlan, tensor: Tensor, state: State) -> dict[str, dict[str, StateTensor]]:
        found: dict[str, dict[str, StateTensor]] = {}
        for plain, slots in zip(plan.plain, plan.plain_slots, strict=True):
            shape = (plain.numel,) if plan.nested else tuple(tensor.shape)
            found[plain.name] = {each.key: each for each in plain_tensors(plain, slots, shape)}
        for batch in plan.batches:
            for planned in batch.matrices:
                own = state.get(planned.name, {}) if plan.nested else state
                matrix = effective(planned, own)
                found[planned.name] = {each.key: each for each in projected_tensors(batch.side, matrix, plan.slots)}
        return found

    def state_bytes(self) -> dict[str, int]:
        """Bytes of this rank's ``moments`` and ``projectors`` that exist now: none before the first step."""
        found = {"moments": 0, "projectors": 0}

        def walk(state: Mapping[str, Any]) -> None:
            for key, value in state.items():
                if isinstance(value, dict):
                    walk(value)
                elif isinstance(value, Tensor):
                    found["projectors" if key.startswith("projector") else "moments"] += (
                        value.numel() * value.element_size()
                    )

        for state in self.state.values():
            walk(state)
        return found

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
            If another rank failed; all ranks that share a partitioned tensor raise in the same step.
        BindingError
            If DeepSpeed hands over something that is not understood.
        DsGaloreError
            If an earlier step failed: what it left behind may differ between ranks, until a state is loaded.
        """
        if self._failed:
            raise DsGaloreError("an earlier step failed, and its state may be updated in part: load a checkpoint first")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._is_rehearsal():
            return loss
        self._failed = True
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is None:
                    continue
                if tensor.grad.is_sparse:
                    raise ConfigError(
                        f"{type(self).__name__} does not support sparse gradients; use Embedding(sparse=False)"
                    )
                plan = self._plan(tensor, group)
                if plan.nested and not isinstance(self.state[tensor], _StatesByName):
                    self.state[tensor] = _StatesByName(self.state[tensor])
                window = self._arrived.pop(tensor, None)
                gradients = FlatGradients(tensor.grad.contiguous()) if window is None else window.gradients
                step = self._flat_step(tensor, gradients, group, plan)
                if window is not None:
                    step.guard.error = window.guard.error
                step.run()
        self._failed = False
        return loss

    def _flat_step(self, tensor: Tensor, gradients: Gradients, group: Mapping[str, Any], plan: FlatPlan) -> FlatStep:
        state: State = self.state[tensor]
        own = self._parameters, self._rule, self._say_skipped, self.watch
        return FlatStep(tensor, gradients, group, plan, state, *own)

    # ------------------------------------------------------------------ gradients that are lowered when they arrive

    @property
    def lowers_gradients(self) -> bool:
        """Whether gradients of projected matrices are to be kept as low-rank gradients until the step."""
        return self._parameters.gradients == "lowrank"

    def name_of(self, parameter: Tensor) -> str:
        """The name under which a parameter's state is kept."""
        return self._decisions.by_parameter[parameter].name

    def projected_name(self, parameter: Tensor) -> str | None:
        """The same of a parameter that is projected; None for any other."""
        decision = self._decisions.by_parameter.get(parameter)
        return None if decision is None or decision.side is None else decision.name

    @torch.no_grad()
    def open_window(self, tensor: Tensor, group: int, *, dtype: torch.dtype, several: bool) -> Arrivals:
        """Begin to take the gradients of the next step of a tensor, with its first bases at random. Collective.

        Parameters
        ----------
        tensor
            One that ``step()`` will be given.
        group
            Index of its parameter group.
        dtype
            What gradients are kept in until the step.
        several
            Whether more than one micro-batch is accumulated.
        """
        plan = self._plan(tensor, self.param_groups[group])
        if not isinstance(self.state[tensor], _StatesByName):
            self.state[tensor] = _StatesByName(self.state[tensor])
        step = self._flat_step(tensor, ArrivedGradients(compute_dtype(tensor)), self.param_groups[group], plan)
        step.start()
        settings: Any = {"dtype": dtype, "several": several, "seed": self._parameters.seed}
        return Arrivals(plan, self.state[tensor], step.like, **settings)

    def arrive(self, tensor: Tensor, window: Arrivals) -> None:
        """Hand over what a window has taken, for the next ``step()`` of a tensor."""
        self._arrived[tensor] = window

    def _is_rehearsal(self) -> bool:
        """Whether this is the step that DeepSpeed's FP16_UnfusedOptimizer takes while it is built.

        It is meant to create state: all gradients are zero, and nobody knows yet what the tensors are. State is created
        in the first true step; decay and counters must not see this one.
        """
        if self._holder() is not None or self._plans:
            return False
        own = self._decisions.by_parameter
        tensors = [tensor for group in self.param_groups for tensor in group["params"] if tensor.grad is not None]
        if not tensors or any(tensor in own for tensor in tensors) or is_linked(own):
            return False
        return not any(bool(tensor.grad.any()) for tensor in tensors if tensor.grad is not None)

    def _plan(self, tensor: Tensor, group: Mapping[str, Any]) -> FlatPlan:
        plan = self._plans.get(tensor)
        if plan is None:
            own = self._decisions.by_parameter
            binding = bind_whole(cast(Parameter, tensor)) if tensor in own else bind(tensor, own, self._holder())
            plan = self._plans[tensor] = self._decisions.plan(
                binding, gap=group["update_proj_gap"], dtype=compute_dtype(tensor), nested=not binding.whole
            )
        return plan

    def _say_skipped(self, name: str) -> None:
        if name not in self._said:
            self._said.add(name)
            _warn("%s: the gradient is not finite; left alone in this step (said once per parameter)", name)

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The state as plain dicts of tensors and numbers: it loads with ``torch.load(weights_only=True)``."""
        packed = super().state_dict()
        packed["state"] = {key: dict(state) for key, state in packed["state"].items()}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state dict; the next update is the very one that would have followed.

        Tensors keep the dtypes in which they were saved. Hyperparameters come from this optimizer's configuration
        where that differs from the configuration that the state was saved with, and each difference is logged; the
        learning rate is otherwise the saved one, since schedulers move it.

        Raises
        ------
        CheckpointMismatchError
            If the state has another structure: another update rule, other groups or parameters, rank, sides, formats,
            or projector storage. The optimizer is then unchanged.
        """
        saved_groups = state_dict["param_groups"]
        kind = self.parameters_model
        check_groups(self.param_groups, saved_groups, kind)
        identifiers = [identifier for group in saved_groups for identifier in group["params"]]
        tensors = [(tensor, group) for group in self.param_groups for tensor in group["params"]]
        loaded: dict[Tensor, State] = {}
        for identifier, (tensor, group) in zip(identifiers, tensors, strict=True):
            saved_state = state_dict["state"].get(identifier)
            if saved_state:
                plan = self._plan(tensor, group)
                check_state(plan, self._layout(plan, tensor, saved_state), saved_state, self._rule.numbers())
                loaded[tensor] = to_device(saved_state, tensor.device)  # a plain dict, until the next step
                settle_state(plan, loaded[tensor], adaptive_gap=self._parameters.adaptive_gap)
        ours = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        super().load_state_dict({**state_dict, "state": {}})  # torch's would cast the state to the weights' dtype
        for number, group in enumerate(self.param_groups):
            for difference in settle_group(group, ours[number], saved_groups[number], kind):
                _warn("param_groups[%d].%s", number, difference)
        self.state.clear()
        self.state.update(loaded)
        self._failed = False


def _warn(message: str, *values: object) -> None:
    """Log a warning once for the job, not once per rank."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning(message, *values)
