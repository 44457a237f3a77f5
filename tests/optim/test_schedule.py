"""When bases are refreshed and with which ranks, on ordinary models; random bases; stochastically rounded weights."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from ds_galore import (
    APOLLOAdamW,
    CheckpointMismatchError,
    ConfigError,
    FiraAdamW,
    GaLoreAdafactor,
    GaLoreAdamW,
)
from ds_galore.optim import refresh
from ds_galore.optim.matrices import RIGHT
from ds_galore.optim.refresh import RefreshJob, owner_cost
from tests.optim.test_engine import compare

KINDS = [GaLoreAdamW, FiraAdamW, APOLLOAdamW, GaLoreAdafactor]


def matrices(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def low_rank(rows: int, columns: int, rank: int, seed: int) -> Tensor:
    """A gradient with ``rank`` equal singular values."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.linalg.qr(torch.randn(rows, rank, generator=generator))[0]
    return left @ torch.linalg.qr(torch.randn(columns, rank, generator=generator))[0].t()


def step(optimizer: torch.optim.Optimizer, *grads: Tensor) -> None:
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad.to(parameter.dtype)
    optimizer.step()


class Refreshes:
    """Counts, step by step, the matrices whose projectors are replaced."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.by_step: list[list[int]] = []

    def step(self, *grads: Tensor) -> None:
        parameters = [each for group in self._optimizer.param_groups for each in group["params"]]
        before = [self._optimizer.state[each].get("projector") for each in parameters]
        step(self._optimizer, *grads)
        after = [self._optimizer.state[each].get("projector") for each in parameters]
        self.by_step.append([n for n, (a, b) in enumerate(zip(before, after, strict=True)) if a is not b])


def noisy(parameters: list[Parameter], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(parameter.shape, generator=generator) for parameter in parameters]


# ---------------------------------------------------------------------- when


def cost(shape: tuple[int, ...]) -> int:
    return shape[0] * shape[1] * 4


@pytest.mark.parametrize("gap", [3, 7, 40])
def test_staggered_refreshes_are_spread_by_what_they_cost(gap):
    shapes = [(8, 8), (64, 48), (16, 8), (8, 40), (30, 30), (12, 12), (9, 100), (8, 8), (20, 24)]
    own = matrices(*shapes)
    watched = Refreshes(GaLoreAdamW([{"params": own, "rank": 4}], update_proj_gap=gap))
    for seed in range(3 * gap + 1):
        watched.step(*noisy(own, seed))
    assert watched.by_step[0] == list(range(len(shapes)))
    costs = [cost(shape) for shape in shapes]
    for begin in (1, gap + 1):
        turns = watched.by_step[begin : begin + gap]
        assert sorted(n for each in turns for n in each) == list(range(len(shapes)))
        # A step's share, and the matrix that reaches over its end.
        assert max(sum(costs[n] for n in each) for each in turns) < sum(costs) / gap + max(costs)
    assert watched.by_step[gap + 1 : 2 * gap + 1] == watched.by_step[1 : gap + 1]


@pytest.mark.parametrize(("count", "budget", "gap"), [(7, 1, 3), (7, 2, 3), (9, 3, 40), (5, 2, 1), (8, 3, 3)])
@pytest.mark.parametrize("first_basis", ["gradient", "random"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_a_budget_of_refreshes_is_never_exceeded(count, budget, gap, first_basis, adaptive):
    own = matrices(*[(6 + n, 12 - n) for n in range(count)])
    settings = {"refresh_budget": budget, "first_basis": first_basis, "adaptive_gap": adaptive, "stable_overlap": 0.4}
    optimizer = GaLoreAdamW([{"params": own, "rank": 2}], update_proj_gap=gap, **settings)
    watched, cycle = Refreshes(optimizer), max(gap, math.ceil(count / budget))
    for seed in range(3 * cycle + 1):
        watched.step(*noisy(own, seed))
    # A random first basis is no refresh: it costs no look at a gradient. The matrices of phase 0 have theirs at once.
    first = watched.by_step[0]
    assert first == list(range(count))
    if first_basis == "random":
        drawn = [n for n in range(count) if optimizer.plan_of(own[n]).batches[0].matrices[0].phase]
        assert count - len(drawn) <= budget
    assert max(map(len, watched.by_step[1:])) <= budget
    once = [n for each in watched.by_step[1 : cycle + 1] for n in each]
    assert sorted(once) == list(range(count)), "in each cycle each once"


def test_a_budget_over_groups_with_different_gaps_is_refused():
    own = matrices(*[(8, 8)] * 10)
    groups = [
        {"params": own[:5], "rank": 2, "update_proj_gap": 10},
        {"params": own[5:], "rank": 2, "update_proj_gap": 15},
    ]
    with pytest.raises(ConfigError, match=r"refresh_budget is 1, .* update_proj_gap 10, 15: .* one gap"):
        GaLoreAdamW(copy.copy(groups), refresh_budget=1)
    for group in groups:
        group["update_proj_gap"] -= 9  # both stretched to 10
    GaLoreAdamW(groups, refresh_budget=1)


@pytest.mark.parametrize("proj_type", ["right", "left"])
def test_an_adaptive_gap_doubles_while_the_subspace_stays_and_falls_back_when_it_changes(proj_type):
    (own,) = matrices((16, 12))
    settings = {"adaptive_gap": True, "max_gap_factor": 4, "proj_type": proj_type}
    watched = Refreshes(GaLoreAdamW([{"params": [own], "rank": 3}], update_proj_gap=2, **settings))
    base = low_rank(16, 12, 3, seed=0)
    rotation = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(2)))[0]
    left, values, right = torch.linalg.svd(base, full_matrices=False)

    def same_subspaces(number: int) -> Tensor:
        """Other signs, another order and other sizes of the singular vectors."""
        sizes = (values[:3] * torch.tensor([1.0, 0.3, 0.1])).roll(number)
        return (-1) ** number * left[:, :3] @ torch.diag(sizes) @ (right[:3] if number % 3 else rotation @ right[:3])

    for number in range(31):
        watched.step(same_subspaces(number))
    assert [n for n, each in enumerate(watched.by_step) if each] == [0, 2, 6, 14, 22, 30]
    for number in range(12):  # from step 31 on another subspace: seen at 38, and from then on again stable
        watched.step(low_rank(16, 12, 3, seed=5) * (-1) ** number)
    assert [n for n, each in enumerate(watched.by_step) if each][6:] == [38, 40]


def test_without_the_option_the_gap_stays():
    (own,) = matrices((16, 12))
    watched = Refreshes(GaLoreAdamW([{"params": [own], "rank": 3}], update_proj_gap=2))
    for _ in range(9):
        watched.step(low_rank(16, 12, 3, seed=0))
    assert [n for n, each in enumerate(watched.by_step) if each] == [0, 2, 4, 6, 8]


def test_a_step_that_was_skipped_does_not_use_up_a_turn():
    (own,) = matrices((16, 12))
    watched = Refreshes(GaLoreAdamW([{"params": [own], "rank": 3}], update_proj_gap=2))
    for number in range(6):
        watched.step(low_rank(16, 12, 3, seed=0) * (float("nan") if number in (2, 3) else 1.0))
    assert [n for n, each in enumerate(watched.by_step) if each] == [0, 4]


@pytest.mark.parametrize("proj_type", ["right", "left"])
@pytest.mark.parametrize("passes", [1, 2])
def test_a_gradient_at_right_angles_to_the_basis_is_found_at_the_next_refresh(proj_type, passes):
    """The features of the first steps' gradients are zero in the later ones', exactly."""
    own = Parameter(torch.zeros(12, 12))
    settings = {"update_proj_gap": 2, "power_iterations": passes, "proj_type": proj_type}
    optimizer = GaLoreAdamW([{"params": [own], "rank": 3}], **settings)
    for number in range(6):
        grad = torch.zeros(12, 12)
        block = slice(0, 6) if number < 2 else slice(6, 12)
        grad[block, block] = low_rank(6, 6, 3, seed=3)
        step(optimizer, grad)
    basis = optimizer.state[own]["projector"]
    assert basis[6:].norm() == pytest.approx(3**0.5, rel=1e-4)
    assert own[6:, 6:].abs().max() > 1e-4


# ---------------------------------------------------------------------- ranks by energy


@pytest.mark.parametrize("method", ["subspace", "svd"])
@pytest.mark.parametrize("proj_type", ["right", "left"])
def test_a_rank_by_energy_is_the_gradients_and_follows_it_with_the_state(method, proj_type):
    (own,) = matrices((20, 16))
    rank = {"energy": 0.99, "max": 8}
    optimizer = GaLoreAdamW([{"params": [own], "rank": rank}], update_proj_gap=3, refresh=method, proj_type=proj_type)
    state: dict[str, Any] = optimizer.state[own]
    sizes = []
    for number, wanted in enumerate([2, 2, 2, 6, 6, 6, 1, 1, 1, 8, 8, 8, 12, 12, 12, 3, 3]):
        step(optimizer, low_rank(20, 16, wanted, seed=wanted))
        own_rows, basis_rows = (20, 16) if proj_type == "right" else (16, 20)
        found = min(wanted, 8)
        assert state["rank"] == found, f"step {number}"
        assert state["exp_avg"].shape == state["exp_avg_sq"].shape == (own_rows, found)
        assert state["projector"].shape == (basis_rows, found)
        sizes.append(sum(optimizer.state_bytes().values()))
        assert sizes[-1] == 4 * found * (2 * own_rows + basis_rows)
        basis = state["projector"]
        torch.testing.assert_close(basis.t() @ basis, torch.eye(found), rtol=0, atol=1e-5)
    assert torch.isfinite(own).all()


@pytest.mark.parametrize("proj_type", ["right", "left"])
@pytest.mark.parametrize("energy", [0.3, 0.7, 0.9, 0.97])
def test_the_energy_captured_is_the_share_that_is_wanted_and_no_rank_less_would_do(energy, proj_type):
    (own,) = matrices((40, 30))
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        left, _, right = torch.linalg.svd(torch.randn(40, 30, generator=generator), full_matrices=False)
        squares = 0.7 ** torch.arange(30.0)
        grad = left @ torch.diag(squares.sqrt()) @ right
        settings = {"proj_type": proj_type, "power_iterations": 4}
        optimizer = GaLoreAdamW([{"params": [own], "rank": {"energy": energy, "max": 20}}], **settings)
        step(optimizer, grad)
        basis = optimizer.state[own]["projector"].double()
        projected = grad.double() @ basis if proj_type == "right" else grad.double().t() @ basis
        share = projected.square().sum() / grad.double().square().sum()
        assert share >= energy - 1e-5
        needed = int(((squares / squares.sum()).cumsum(0) < energy).sum()) + 1
        assert basis.shape[1] == optimizer.state[own]["rank"] == needed


def test_moments_follow_a_changing_rank_as_if_projected_by_hand():
    (own,) = matrices((20, 16))
    settings = {"update_proj_gap": 4, "betas": (0.8, 0.9)}
    optimizer = GaLoreAdamW([{"params": [own], "rank": {"energy": 0.99, "max": 8}}], **settings)
    state: dict[str, Any] = optimizer.state[own]
    inside = low_rank(20, 16, 5, seed=2)
    for _ in range(4):
        step(optimizer, inside)
    before = {key: value.clone() for key, value in state.items() if isinstance(value, Tensor)}
    assert before["exp_avg"].shape == (20, 5)
    # A part of the same subspace: of the mean nothing is lost but what lies outside.
    left, values, right = torch.linalg.svd(inside, full_matrices=False)
    part = left[:, :2] @ torch.diag(values[:2]) @ right[:2]
    step(optimizer, part)
    assert state["exp_avg"].shape == (20, 2)
    mean = before["exp_avg"] @ before["projector"].t() @ state["projector"]
    expected = 0.8 * mean + 0.2 * part @ state["projector"]
    torch.testing.assert_close(state["exp_avg"], expected, rtol=1e-4, atol=1e-6)
    assert (state["exp_avg_sq"] >= 0).all()
    assert state["step"] == 5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
def test_every_rule_and_format_goes_along_with_a_changing_rank(kind, moments):
    (own,) = matrices((20, 16))
    settings: dict[str, Any] = {"moment_dtype": moments, "projector_dtype": "int8", "update_proj_gap": 2}
    if kind is GaLoreAdafactor:
        settings["beta1"] = 0.9
    if kind is APOLLOAdamW:
        settings |= {"refresh": "subspace", "reproject_moments": True}
    optimizer = kind([{"params": [own], "rank": {"energy": 0.98, "max": 9}}], **settings)
    for wanted in (3, 3, 7, 7, 1, 1, 9, 9):
        before = own.detach().clone()
        step(optimizer, low_rank(20, 16, wanted, seed=wanted))
        assert optimizer.state[own]["rank"] == wanted
        assert torch.isfinite(own).all()
        assert not torch.equal(own, before)


# ---------------------------------------------------------------------- random bases


@pytest.mark.parametrize("kind", [GaLoreAdamW, APOLLOAdamW, GaLoreAdafactor])
def test_random_bases_are_not_stored_and_drawn_again_from_the_seed(kind):
    def run(seed: int, steps: int = 7) -> tuple[Tensor, dict[str, Any]]:
        own = matrices((16, 12), (12, 16))
        optimizer = kind([{"params": own, "rank": 3}], refresh="random", update_proj_gap=3, seed=seed)
        for number in range(steps):
            step(optimizer, *noisy(own, number))
        assert optimizer.state_bytes()["projectors"] == 0
        assert not any(key.startswith("projector") for state in optimizer.state.values() for key in state)
        return torch.cat([each.detach().view(-1) for each in own]), optimizer.state[own[0]]

    first, state = run(0)
    again, _ = run(0)
    other, _ = run(1)
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    assert state["draw"] == 2  # drawn anew on the steps 3 and 6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "settings",
    [
        {"refresh": "random"},
        {"moment_dtype": "bf16", "projector_dtype": "bf16", "projector_rounding": "stochastic"},
        {"moment_dtype": "8bit", "projector_dtype": "int4", "adaptive_gap": True, "stable_overlap": 0.1},
        {"stochastic_rounding": True, "first_basis": "random", "refresh_budget": 1, "projector_dtype": "int8"},
        {"rank": {"energy": 0.6, "max": 5}, "unprojected_moment_dtype": "8bit"},
    ],
)
def test_a_resumed_run_goes_on_bit_for_bit(kind, settings):
    if kind is FiraAdamW and settings.get("refresh") == "random":
        return
    own: dict[str, Any] = {"update_proj_gap": 3, **settings}
    if kind is GaLoreAdafactor:
        own["beta1"] = 0.9
    if kind is APOLLOAdamW and own.get("refresh") != "random":
        own |= {"refresh": "subspace", "reproject_moments": True}
    rank = own.pop("rank", 3)

    def build(parameters: list[Parameter]) -> torch.optim.Optimizer:
        return kind([{"params": parameters[:3], "rank": rank}, {"params": parameters[3:]}], lr=0.01, **own)

    first = matrices((16, 12), (12, 16), (9, 30), (70, 60), (5,), (), dtype=torch.bfloat16)
    optimizer = build(first)
    for number in range(8):
        step(optimizer, *noisy(first, number))
    saved = copy.deepcopy(optimizer.state_dict())
    second = [Parameter(each.detach().clone()) for each in first]
    again = build(second)
    again.load_state_dict(saved)
    for number in range(8, 16):
        step(optimizer, *noisy(first, number))
        step(again, *noisy(second, number))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
        compare(dict(optimizer.state[a]), dict(again.state[b]))


# ---------------------------------------------------------------------- loading what something else wrote


@pytest.mark.parametrize("theirs", KINDS)
@pytest.mark.parametrize("ours", KINDS)
def test_the_state_of_another_rule_is_refused_by_name(theirs, ours):
    (own,) = matrices((16, 12))
    optimizer = theirs([{"params": [own], "rank": 3}])
    step(optimizer, *noisy([own], 0))
    saved = optimizer.state_dict()
    again = ours([{"params": [own], "rank": 3}])
    if ours is theirs:
        again.load_state_dict(saved)
        return
    with pytest.raises(CheckpointMismatchError, match=f"update rule {theirs.rule_type.__name__}, this optimizer's is"):
        again.load_state_dict(saved)
    if (theirs, ours) != (FiraAdamW, GaLoreAdamW):  # the states say so too, but for the number that Fira has more
        for group in saved["param_groups"]:
            del group["settings"]["rule"]
        with pytest.raises(CheckpointMismatchError):
            again.load_state_dict(saved)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({"moment_dtype": "bf16"}, {}, "moment_dtype: the checkpoint has 'bf16', the configuration 'fp32'"),
        ({"moment_dtype": "8bit"}, {"moment_dtype": "bf16"}, "moment_dtype: the checkpoint has '8bit'"),
        ({"projector_dtype": "int4"}, {"projector_dtype": "int8"}, "projector_dtype: the checkpoint has 'int4'"),
        ({"refresh": "random"}, {}, "refresh: the checkpoint has 'random', the configuration 'subspace'"),
        ({"refresh": "random"}, {"refresh": "random", "seed": 3}, "seed: the checkpoint has 0, the configuration 3"),
        ({"rank": {"energy": 0.9, "max": 3}}, {}, "rank: the checkpoint has {'energy': 0.9, 'max': 3}"),
    ],
)
def test_a_state_in_another_format_is_refused_by_name(before, after, message):
    (own,) = matrices((16, 12))

    def build(settings: dict[str, Any]) -> GaLoreAdamW:
        return GaLoreAdamW([{"params": [own], "rank": settings.get("rank", 3)}], **{**settings, "rank": None})

    optimizer = build(before)
    step(optimizer, *noisy([own], 0))
    with pytest.raises(CheckpointMismatchError) as caught:
        build(after).load_state_dict(optimizer.state_dict())
    assert message in str(caught.value)


def test_an_adaptive_gap_can_be_turned_on_and_off_at_a_resume():
    (own,) = matrices((16, 12))
    saved: dict[str, Any] | None = None
    for adaptive, expected in ((False, [0, 2, 4, 6]), (True, [1, 5]), (False, [0, 2, 4, 6])):
        optimizer = GaLoreAdamW([{"params": [own], "rank": 3}], update_proj_gap=2, adaptive_gap=adaptive)
        if saved is not None:
            optimizer.load_state_dict(saved)
        watched = Refreshes(optimizer)
        for _ in range(7):
            watched.step(low_rank(16, 12, 3, seed=0))
        assert [n for n, each in enumerate(watched.by_step) if each] == expected
        saved = optimizer.state_dict()


# ---------------------------------------------------------------------- who works


@pytest.mark.parametrize("method", ["subspace", "svd", "start"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_owners_are_dealt_equal_work(method, world_size):
    shapes = [(64, 48), (16, 8), (8, 40), (30, 30), (12, 12), (9, 100), (64, 48), (20, 24), (64, 64), (11, 7), (33, 44)]
    own = matrices(*shapes)
    optimizer = GaLoreAdamW([{"params": own, "rank": 5}])
    for parameter in own:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    jobs = [RefreshJob(optimizer.plan_of(each).batches[0].matrices[0], each.detach().view(-1), None) for each in own]
    owners = refresh._deal_out(RIGHT, jobs, method, world_size)
    assert owners.keys() == {job.matrix.index for job in jobs}
    costs = {job.matrix.index: owner_cost(RIGHT, job.matrix, method) for job in jobs}
    load = [sum(costs[index] for index, rank in owners.items() if rank == each) for each in range(world_size)]
    best = max(sum(costs.values()) / world_size, max(costs.values()))
    assert max(load) <= 4 / 3 * best, "what giving the largest first to the least busy guarantees"
    assert refresh._deal_out(RIGHT, list(reversed(jobs)), method, world_size) == owners


# ---------------------------------------------------------------------- weights in 16 bits


@pytest.mark.parametrize("kind", KINDS)
def test_tiny_updates_move_bf16_weights_in_the_mean_if_rounded_stochastically(kind):
    steps, lr = 60, 2e-5

    def moved(stochastic: bool, dtype: torch.dtype) -> tuple[float, float]:
        own = [Parameter(torch.ones(48, 40, dtype=dtype)), Parameter(torch.ones(500, dtype=dtype))]
        settings = {"lr": lr, "scale": 1.0, "betas": (0.0, 0.9), "stochastic_rounding": stochastic}
        if kind is GaLoreAdafactor:
            del settings["betas"]
        optimizer = kind([{"params": own[:1], "rank": 4}, {"params": own[1:]}], refresh="svd", **settings)
        for number in range(steps):
            noise = 0.01 * torch.randn(48, 40, generator=torch.Generator().manual_seed(number))
            step(optimizer, torch.ones(48, 40) + noise, torch.ones(500))
        return tuple(float((each.detach().double() - 1.0).mean()) for each in own)  # type: ignore[return-value]

    exact, rounded, stuck = moved(False, torch.float32), moved(True, torch.bfloat16), moved(False, torch.bfloat16)
    for true, ours, nearest in zip(exact, rounded, stuck, strict=True):
        assert true < -1e-4
        assert nearest == 0.0
        assert ours == pytest.approx(true, rel=0.15)


# ---------------------------------------------------------------------- configurations, shapes and dtypes


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (GaLoreAdamW, {"rank": True}, "rank is True: input should be a valid integer"),
        (GaLoreAdamW, {"rank": "8"}, "rank is '8': input should be a valid integer"),
        (GaLoreAdamW, {"rank": 8.0}, "rank is 8.0: input should be a valid integer"),
        (GaLoreAdamW, {"rank": 0}, "rank is 0: input should be greater than or equal to 1"),
        (GaLoreAdamW, {"rank": {"energy": 2, "max": 4}}, "rank.energy is 2: input should be less than 1"),
        (GaLoreAdamW, {"rank": {"energy": 0.9}}, "rank.max is {'energy': 0.9}: field required"),
        (GaLoreAdamW, {"rank": {"energy": 0.9, "max": 0}}, "rank.max is 0: input should be greater"),
        (GaLoreAdamW, {"rank": {"energy": 0.9, "max": 4, "min": 1}}, "rank.min: unknown key"),
        (GaLoreAdamW, {"rank": {"energy": 0.9, "max": 4}, "reproject_moments": False}, "reproject_moments is False"),
        (GaLoreAdamW, {"rank": {"energy": 0.9, "max": 4}, "refresh": "random"}, "refresh is 'random'"),
        (GaLoreAdamW, {"adaptive_gap": True, "refresh": "random"}, "adaptive_gap is True, and refresh is 'random'"),
        (GaLoreAdamW, {"first_basis": "random", "stagger_refresh": False}, "first_basis is 'random', and stagger"),
        (GaLoreAdamW, {"refresh_budget": 1, "stagger_refresh": False}, "refresh_budget is set, and stagger_refresh"),
        (GaLoreAdamW, {"refresh_budget": 0}, "refresh_budget is 0"),
        (GaLoreAdamW, {"refresh": "random", "projector_dtype": "int8"}, "projector_dtype is 'int8', and refresh"),
        (APOLLOAdamW, {"projector_storage": "sharded"}, "projector_storage is 'sharded', and refresh 'random'"),
        (GaLoreAdamW, {"projector_rounding": "stochastic"}, "projector_rounding is 'stochastic', and projector_dtype"),
        (GaLoreAdamW, {"beta1": 0.9}, "beta1: unknown key"),
        (FiraAdamW, {"refresh": "random"}, "refresh is 'random': what Fira adds needs a basis of orthonormal columns"),
        (FiraAdamW, {"norm_growth_limit": 1.0}, "norm_growth_limit is 1.0: input should be greater than 1"),
        (APOLLOAdamW, {"scaling": "row"}, "scaling is 'row': input should be 'channel' or 'tensor'"),
        (GaLoreAdafactor, {"moment_dtype": "8bit"}, "moment_dtype is '8bit', and beta1 None"),
        (GaLoreAdafactor, {"unprojected_moment_dtype": "bf16"}, "unprojected_moment_dtype is 'bf16', and beta1 None"),
        (GaLoreAdafactor, {"warmup_init": True}, "warmup_init is True: it is for relative_step, which is False"),
    ],
)
def test_what_cannot_be_is_refused_naming_the_key(kind, values, message):
    with pytest.raises(ConfigError) as caught:
        kind([("layer.weight", matrices((16, 12))[0])], **{"rank": 4, "target_modules": ["layer"], **values})
    assert message in str(caught.value)


def test_groups_are_checked_together_with_the_optimizers_own_keys():
    by_energy = {"params": matrices((16, 12)), "rank": {"energy": 0.9, "max": 4}}
    for values in ({"reproject_moments": False}, {"refresh": "random"}):
        with pytest.raises(ConfigError, match=rf"param_groups\[0\]: {next(iter(values))} is"):
            GaLoreAdamW([dict(by_energy)], **values)
    APOLLOAdamW([dict(by_energy)], refresh="subspace", reproject_moments=True)
    GaLoreAdafactor([{"params": matrices((16, 12)), "rank": 2, "warmup_init": True}], relative_step=True)
    with pytest.raises(ConfigError, match=r"param_groups\[0\].beta1: can be set for the whole optimizer only"):
        GaLoreAdafactor([{"params": matrices((16, 12)), "rank": 2, "beta1": 0.9}])


def test_groups_of_fixed_ranks_of_ranks_by_energy_and_of_none_go_together():
    own = matrices((20, 16), (20, 16), (20, 16), (7,))
    groups = [
        {"params": own[:1], "rank": {"energy": 0.99, "max": 8}},
        {"params": own[1:2], "rank": 5, "proj_type": "left"},
        {"params": own[2:]},
    ]
    optimizer = GaLoreAdamW(groups)
    step(optimizer, *[low_rank(20, 16, 2, seed=1)] * 3, torch.ones(7))
    shapes = [tuple(optimizer.state[each]["exp_avg"].shape) for each in own]
    assert shapes == [(20, 2), (16, 5), (20, 16), (7,)]
    assert "rank" not in optimizer.state[own[1]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
def test_convolutions_scalars_empty_parameters_and_doubles(kind, moments):
    settings: dict[str, Any] = {"moment_dtype": moments, "lr": 0.01, "update_proj_gap": 2}
    if kind is GaLoreAdafactor:
        settings["beta1"] = 0.9

    def run(layout: torch.memory_format, dtype: torch.dtype) -> list[Tensor]:
        plain = matrices((10, 4, 3, 3), (8, 6, 5), (70, 64), (6, 700, 1, 1), (3,), (), (0, 5), (5, 0), dtype=dtype)
        own = [Parameter(each.detach().to(memory_format=layout)) if each.dim() == 4 else each for each in plain]
        optimizer = kind([{"params": own[:2], "rank": 3}, {"params": own[2:]}], **settings)
        for number in range(5):
            grads = noisy(own, number)
            step(optimizer, *(g.to(memory_format=layout) if g.dim() == 4 else g for g in grads))
        assert all(torch.isfinite(each).all() for each in own)
        assert all(not torch.equal(a, b) for a, b in zip(own[:6], matrices(*(a.shape for a in own[:6])), strict=True))
        return [each.detach().contiguous() for each in own]

    expected = run(torch.contiguous_format, torch.float32)
    for a, b in zip(run(torch.channels_last, torch.float32), expected, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(run(torch.contiguous_format, torch.float64), expected, strict=True):
        assert (a - b).abs().max() < 5e-3 if a.numel() else a.shape == b.shape
