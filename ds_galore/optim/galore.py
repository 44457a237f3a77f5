"""GaLoreAdamW: Adam with decoupled weight decay in low-rank subspaces of the gradients, on whatever a rank holds.

Imports torch, :mod:`ds_galore.zero` and its neighbours; never DeepSpeed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from ds_galore.config import GaLoreParameters, validate
from ds_galore.errors import BindingError, ConfigError, DsGaloreError
from ds_galore.optim.loading import check_groups, check_state, settle_group, to_device
from ds_galore.optim.matrices import State
from ds_galore.optim.plan import GROUP_KEYS, SETTINGS, FlatPlan, compute_dtype, decide, read_groups
from ds_galore.optim.step import FlatStep
from ds_galore.tools.memory import Kept, ParameterPlan
from ds_galore.tools.optimizers import OPTIMIZERS, configured
from ds_galore.zero.binding import bind_whole, bind_zero3
from ds_galore.zero.layout import matrix_shape

__all__ = ["GaLoreAdamW"]

logger = logging.getLogger(__name__)


class _StatesByName(dict[str, Any]):
    """The states of the parameters in a flat tensor, by name.

    DeepSpeed looks for ``exp_avg`` here, of the flat tensor's shape, when a user asks for the full optimizer state of a
    parameter (``safe_get_full_optimizer_state`` and its kin): a clear refusal, on all ranks alike.
    """

    def __missing__(self, key: str) -> Any:
        raise BindingError(
            f"{key!r} of a whole parameter does not exist: GaLoreAdamW keeps low-rank states, by parameter name, in"
            " optimizer.state; DeepSpeed's functions for full optimizer states do not work with it"
        )


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
        Of the projection, for parameters outside groups that set their own. A matrix with a side no longer than
        ``rank`` is trained with plain AdamW, and a warning names it.
    update_proj_gap
        Steps between two refreshes of a matrix's basis.
    scale
        Factor on the low-rank update (the paper's alpha).
    proj_type
        ``"right"``, ``"left"``, ``"std"`` (right where rows >= columns, else left) or ``"reverse_std"``.
    refresh
        ``"subspace"``: ``power_iterations`` passes of block power iteration from the basis in use, at first from a
        random block. ``"svd"``: the SVD of the gradient, gathered on one rank.
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
        groups, described = read_groups(params, model)
        own_rank = [group.get("rank") is not None for group in groups]
        for group in groups:  # kept with the groups so that a checkpoint tells
            group["settings"] = {key: getattr(self._parameters, key) for key in SETTINGS}
        super().__init__(groups, {key: getattr(self._parameters, key) for key in GROUP_KEYS})
        self._decisions = decide(self.param_groups, own_rank, described, self._parameters)
        self._plans: dict[Tensor, FlatPlan] = {}
        self._said: set[str] = set()
        self._failed = False
        if self._decisions.ignored:
            _warn("target_modules match %s, which cannot be projected: ignored", ", ".join(self._decisions.ignored))
        if self._decisions.too_small:
            _warn(
                "trained with plain AdamW, since the rank is not below their smaller side: %s",
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
            raise ConfigError("add_param_group: GaLoreAdamW takes all its parameters when it is built")
        super().add_param_group(param_group)
        self.param_groups[-1]["configured_lr"] = self.param_groups[-1]["lr"]

    # ------------------------------------------------------------------ what it does, for tables and tests

    def parameter_plans(self) -> list[ParameterPlan]:
        """Every trained parameter, in order, and how it is projected: what :func:`.plan_memory` needs."""
        plans = []
        for parameter, each in self._decisions.by_parameter.items():
            if not parameter.requires_grad:
                continue
            if each.side is None:
                columns = each.shape[1] if len(each.shape) == 2 else 0
                plans.append(ParameterPlan(each.name, math.prod(each.shape), columns))
            else:
                rows, columns = matrix_shape(each.shape)
                plans.append(ParameterPlan(each.name, rows * columns, columns, each.rank, each.side.name))
        return plans

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
    def kept(self) -> Kept:
        """What it keeps of each parameter, and in which formats: what :func:`.plan_memory` needs."""
        return configured(OPTIMIZERS["galore_adamw"], self._parameters.model_dump()).kept()

    def shards_projectors(self, world_size: int) -> bool:
        """Whether right projectors are kept in parts when ``world_size`` ranks share a parameter."""
        return self._decisions.shards_projectors(world_size)

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
        self._failed = True
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is None:
                    continue
                if tensor.grad.is_sparse:
                    raise ConfigError("GaLoreAdamW does not support sparse gradients; use Embedding(sparse=False)")
                plan = self._plan(tensor, group)
                if plan.nested and not isinstance(self.state[tensor], _StatesByName):
                    self.state[tensor] = _StatesByName(self.state[tensor])
                state: State = self.state[tensor]
                FlatStep(tensor, tensor.grad, group, plan, state, self._parameters, self._say_skipped).run()
        self._failed = False
        return loss

    def _plan(self, tensor: Tensor, group: Mapping[str, Any]) -> FlatPlan:
        plan = self._plans.get(tensor)
        if plan is None:
            own = self._decisions.by_parameter
            nested = tensor not in own
            if nested:
                binding = bind_zero3(tensor, cast("Iterable[Parameter]", own))
            else:
                binding = bind_whole(cast(Parameter, tensor))
            plan = self._plans[tensor] = self._decisions.plan(
                binding, gap=group["update_proj_gap"], dtype=compute_dtype(tensor), nested=nested
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
            If the state has another structure: other groups or parameters, rank, sides, or projector storage. The
            optimizer is then unchanged.
        """
        saved_groups = state_dict["param_groups"]
        check_groups(self.param_groups, saved_groups)
        identifiers = [identifier for group in saved_groups for identifier in group["params"]]
        tensors = [(tensor, group) for group in self.param_groups for tensor in group["params"]]
        loaded: dict[Tensor, State] = {}
        for identifier, (tensor, group) in zip(identifiers, tensors, strict=True):
            saved_state = state_dict["state"].get(identifier)
            if saved_state:
                check_state(self._plan(tensor, group), tensor, saved_state)
                loaded[tensor] = to_device(saved_state, tensor.device)  # a plain dict, until the next step
        ours = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        super().load_state_dict({**state_dict, "state": {}})  # torch's would cast the state to the weights' dtype
        for number, group in enumerate(self.param_groups):
            for difference in settle_group(group, ours[number], saved_groups[number]):
                _warn("param_groups[%d].%s", number, difference)
        self.state.clear()
        self.state.update(loaded)
        self._failed = False


def _warn(message: str, *values: object) -> None:
    """Log a warning once for the job, not once per rank."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning(message, *values)
