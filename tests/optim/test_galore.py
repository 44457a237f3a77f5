"""GaLoreAdamW on ordinary models: what is projected, what bad gradients do, what is refused, what is saved."""

from __future__ import annotations

import copy
import io
import logging

import pytest
import torch
from torch import nn

from ds_galore import CheckpointMismatchError, ConfigError, GaLoreAdamW
from tests import jobs


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Embedding(11, 12), nn.Linear(12, 20), nn.LayerNorm(20), nn.Linear(20, 16)]
    return nn.Sequential(*layers)


def named(optimizer: GaLoreAdamW) -> dict[str, tuple[str, int]]:
    return {plan.name: (plan.side, plan.rank) for plan in optimizer.parameter_plans()}


def set_gradients(network: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def galore(network: nn.Module, **settings: object) -> GaLoreAdamW:
    return GaLoreAdamW(network.parameters(), model=network, **{"lr": 0.01, "rank": 4, "update_proj_gap": 5, **settings})


# ---------------------------------------------------------------------- what is projected


def test_linear_layers_are_projected_and_nothing_else_by_default():
    projected = {name for name, (side, _) in named(galore(model())).items() if side}
    assert projected == {"1.weight", "3.weight"}


def test_the_head_is_not_a_linear_layer_unless_it_is_named():
    llama = jobs.tiny_llama()
    assert named(galore(llama, rank=4))["lm_head.weight"] == ("", 0)
    explicit = named(galore(llama, rank=4, target_modules=["lm_head", "q_proj"]))
    assert explicit["lm_head.weight"] == ("right", 4)
    assert {name for name, (side, _) in explicit.items() if side} == {
        "lm_head.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.self_attn.q_proj.weight",
    }


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["attn", "mlp"], 14),
        (["q_proj"], 2),
        (r".*\.layers\.0\..*proj", 7),
        ([r"model\.layers\.\d+\.mlp\.up_proj"], 2),
        ("all-linear", 14),
        ("all_linear", 14),
    ],
)
def test_target_modules_mean_what_they_mean_to_the_trainer(patterns, expected):
    projected = [name for name, (side, _) in named(galore(jobs.tiny_llama(), target_modules=patterns)).items() if side]
    assert len(projected) == expected


def test_the_same_modules_are_chosen_as_by_transformers():
    from transformers.trainer_utils import check_target_module_exists

    llama = jobs.tiny_llama()
    for patterns in (["attn", "mlp"], ["gate", r"model\.layers\.1\.self_attn\.[qk]_proj"], r".*down_proj"):
        theirs = {
            f"{name}.weight"
            for name, module in llama.named_modules()
            if isinstance(module, nn.Linear) and check_target_module_exists(patterns, name)
        }
        ours = {name for name, (side, _) in named(galore(llama, target_modules=patterns)).items() if side}
        assert ours == theirs, patterns


def test_patterns_that_match_nothing_list_what_exists():
    with pytest.raises(ConfigError, match=r"no match for \['attention'\].*model\.layers\.\*\.self_attn\.q_proj"):
        galore(jobs.tiny_llama(), target_modules=["attention"])
    with pytest.raises(ConfigError, match=r"'\(' is not a regular expression"):
        galore(jobs.tiny_llama(), target_modules="(")


def test_a_pattern_that_also_matches_an_embedding_says_so_and_leaves_it(caplog):
    with caplog.at_level(logging.WARNING):
        optimizer = galore(model(), target_modules=["0", "1"])
    assert named(optimizer)["0.weight"] == ("", 0)
    assert "target_modules match 0, which cannot be projected" in caplog.text


def test_a_rank_that_is_not_below_the_smaller_side_means_plain_adamw_said_once_with_the_name(caplog):
    with caplog.at_level(logging.WARNING):
        optimizer = galore(model(), rank=12)
    assert named(optimizer)["1.weight"] == ("", 0)
    assert named(optimizer)["3.weight"] == ("right", 12)
    assert caplog.text.count("1.weight (20 x 12)") == 1


def test_plain_parameters_follow_torchs_adamw():
    ours, theirs = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
    matrix = nn.Parameter(torch.randn(6, 6))
    optimizer = GaLoreAdamW([{"params": [ours]}, {"params": [matrix], "rank": 2}], lr=0.1, eps=1e-30)
    reference = torch.optim.AdamW([theirs], lr=0.1, eps=1e-30, weight_decay=0.0)
    for step in range(5):
        grad = torch.randn(5, generator=torch.Generator().manual_seed(step))
        ours.grad, theirs.grad, matrix.grad = grad.clone(), grad.clone(), torch.randn(6, 6)
        optimizer.step()
        reference.step()
    torch.testing.assert_close(ours, theirs)  # eps apart, which the two add at different places


def test_sides_of_the_four_projection_types():
    for proj_type, tall, wide in [
        ("right", "right", "right"),
        ("left", "left", "left"),
        ("std", "right", "left"),
        ("reverse_std", "left", "right"),
    ]:
        parameters = [("tall", nn.Parameter(torch.randn(9, 5))), ("wide", nn.Parameter(torch.randn(5, 9)))]
        group = {"params": parameters, "rank": 2, "update_proj_gap": 4, "scale": 1.0, "proj_type": proj_type}
        sides = {name: side for name, (side, _) in named(GaLoreAdamW([group])).items()}
        assert sides == {"tall": tall, "wide": wide}, proj_type


def test_frozen_parameters_are_neither_projected_nor_counted():
    network = model()
    network[1].requires_grad_(False)
    assert set(named(galore(network))) == {"0.weight", "2.weight", "2.bias", "3.weight", "3.bias"}
    with pytest.raises(ConfigError, match="no match for"):
        galore(network, target_modules=["1"])


def test_convolutions_are_seen_as_matrices_of_their_first_dimension():
    weight = nn.Parameter(torch.randn(8, 3, 3, 2))
    optimizer = GaLoreAdamW([{"params": [weight], "rank": 4}], lr=0.1)
    before = weight.detach().clone()
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    assert optimizer.state[weight]["projector"].shape == (18, 4)
    assert torch.linalg.matrix_rank((weight - before).view(8, 18)) == 4


# ---------------------------------------------------------------------- refreshes


def basis_of(optimizer: GaLoreAdamW, parameter: nn.Parameter) -> torch.Tensor:
    return optimizer.state[parameter]["projector"].clone()


@pytest.mark.parametrize(("stagger", "expected"), [(False, [[0, 6], [0, 6]]), (True, [[0, 6], [0, 3, 9]])])
def test_matrices_refresh_together_or_on_different_steps_of_the_gap(stagger, expected):
    parameters = [nn.Parameter(torch.randn(9, 7)), nn.Parameter(torch.randn(9, 7))]
    optimizer = GaLoreAdamW([{"params": parameters, "rank": 3, "update_proj_gap": 6}], lr=0.0, stagger_refresh=stagger)
    changed: list[list[int]] = [[], []]
    last: list[torch.Tensor | None] = [None, None]
    for step in range(10):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        for index, parameter in enumerate(parameters):
            now = basis_of(optimizer, parameter)
            if last[index] is None or not torch.equal(now, last[index]):
                changed[index].append(step)
            last[index] = now
    assert changed == expected


def test_a_constant_gradient_keeps_its_moments_across_a_refresh_when_they_are_carried_over():
    """With one direction in the gradient the old and the new basis both hold it: nothing may be lost."""
    grad = torch.outer(torch.randn(12), torch.randn(8))
    weights = {}
    for reproject in (True, False):
        weight = nn.Parameter(torch.zeros(12, 8))
        optimizer = GaLoreAdamW(
            [{"params": [weight], "rank": 2, "update_proj_gap": 10}], lr=0.1, reproject_moments=reproject, seed=3
        )
        for step in range(20):
            if step == 10:  # turn the basis by hand, as another subspace would
                turn = torch.tensor([[0.6, -0.8], [0.8, 0.6]])
                state = optimizer.state[weight]
                state["projector"] = state["projector"] @ turn
                state["exp_avg"] = state["exp_avg"] @ turn
            weight.grad = grad.clone()
            optimizer.step()
        weights[reproject] = optimizer.state[weight]["exp_avg"] @ optimizer.state[weight]["projector"].t()
    expected = grad * (1 - 0.9**20)
    torch.testing.assert_close(weights[True], expected, rtol=1e-4, atol=1e-4)
    assert (weights[False] - expected).norm() > 0.05 * expected.norm()


# ---------------------------------------------------------------------- bad gradients


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("step", [0, 3, 5])
@pytest.mark.parametrize("refresh", ["subspace", "svd"])
def test_a_gradient_that_is_not_finite_changes_neither_state_nor_weight(poison, step, refresh, caplog):
    network = model()
    optimizer = galore(network, refresh=refresh, stagger_refresh=False)
    for number in range(step):
        set_gradients(network, number)
        optimizer.step()
    set_gradients(network, 99)
    for parameter in network.parameters():
        parameter.grad.view(-1)[-1] = poison
    before = copy.deepcopy([dict(optimizer.state[p]) for p in network.parameters()])
    weights = [p.detach().clone() for p in network.parameters()]
    with caplog.at_level(logging.WARNING):
        optimizer.step()
    assert "1.weight: the gradient is not finite" in caplog.text
    for parameter, state, weight in zip(network.parameters(), before, weights, strict=True):
        assert torch.equal(parameter, weight)
        for key, value in state.items():
            now = optimizer.state[parameter][key]
            assert torch.equal(now, value) if isinstance(value, torch.Tensor) else now == value
    set_gradients(network, 100)
    optimizer.step()
    assert all(torch.isfinite(p).all() for p in network.parameters())
    assert all(not torch.equal(p, w) for p, w in zip(network.parameters(), weights, strict=True))


@pytest.mark.parametrize("refresh", ["subspace", "svd"])
@pytest.mark.parametrize("proj_type", ["right", "left"])
def test_zero_gradients_never_make_a_basis_and_never_lose_one(refresh, proj_type):
    weight = nn.Parameter(torch.randn(8, 6))
    optimizer = GaLoreAdamW(
        [{"params": [weight], "rank": 2, "update_proj_gap": 2, "proj_type": proj_type}], lr=0.1, refresh=refresh
    )
    before = weight.detach().clone()
    for _ in range(3):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    assert optimizer.state[weight]["has_basis"] == 0
    assert torch.equal(weight, before)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    basis = basis_of(optimizer, weight)
    torch.testing.assert_close(basis.t() @ basis, torch.eye(2))
    for _ in range(4):  # over two refreshes
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    assert torch.equal(basis_of(optimizer, weight), basis)
    assert torch.isfinite(weight).all()


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e20])
def test_tiny_and_huge_gradients_still_give_an_orthonormal_basis(size):
    weight = nn.Parameter(torch.randn(8, 6))
    optimizer = GaLoreAdamW([{"params": [weight], "rank": 2}], lr=0.1, power_iterations=1)
    weight.grad = torch.randn_like(weight) * size
    optimizer.step()
    basis = basis_of(optimizer, weight)
    if optimizer.state[weight]["has_basis"]:
        torch.testing.assert_close(basis.t() @ basis, torch.eye(2))
    assert torch.isfinite(weight).all()


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, r"GaLoreAdamW\.rank is 0: input should be greater than or equal to 1"),
        ({"rank": 2.5}, r"GaLoreAdamW\.rank is 2\.5: input should be a valid integer"),
        ({"update_proj_gap": -3}, r"update_proj_gap is -3: input should be greater than or equal to 1"),
        ({"scale": 0.0}, r"scale is 0\.0: input should be greater than 0"),
        ({"proj_type": "full"}, r"proj_type is 'full': input should be 'right', 'left', 'std' or 'reverse_std'"),
        ({"refresh": "qr"}, r"refresh is 'qr': input should be 'subspace', 'svd' or 'random'"),
        ({"betas": (0.9, 1.0)}, r"betas\.1 is 1\.0: input should be less than 1"),
        ({"lr": float("nan")}, r"lr is nan"),
        ({"update_proj_gab": 3}, r"update_proj_gab: unknown key; did you mean 'update_proj_gap'\?"),
        ({"target_modules": 3}, r"target_modules"),
    ],
)
def test_impossible_hyperparameters_are_named_with_what_is_allowed(settings, message):
    with pytest.raises(ConfigError, match=message):
        galore(model(), **settings)


def test_impossible_groups_are_refused():
    matrix, vector = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
    with pytest.raises(ConfigError, match=r"param_groups\[0\]\.rnak: unknown key; did you mean 'rank'"):
        GaLoreAdamW([{"params": [matrix], "rnak": 2}])
    with pytest.raises(ConfigError, match=r"param_groups\[1\].rank is 2, but .* has shape \(4,\) and is no matrix"):
        GaLoreAdamW([{"params": [matrix], "rank": 2}, {"params": [vector], "rank": 2}])
    with pytest.raises(ConfigError, match=r"refresh: can be set for the whole optimizer only"):
        GaLoreAdamW([{"params": [matrix], "rank": 2, "refresh": "svd"}])
    with pytest.raises(ConfigError, match="no parameters"):
        GaLoreAdamW([], rank=2)
    with pytest.raises(ConfigError, match="no parameter is projected"):
        GaLoreAdamW([matrix])
    with pytest.raises(ConfigError, match=r"which matrices of param_groups\[0\] it is for cannot be told"):
        GaLoreAdamW([matrix], rank=2)
    with pytest.raises(ConfigError, match="'all-linear' needs to know the model's layers"):
        GaLoreAdamW([("a", matrix)], rank=2)
    optimizer = GaLoreAdamW([("a", matrix)], rank=2, target_modules=["a"])
    with pytest.raises(ConfigError, match="takes all its parameters when it is built"):
        optimizer.add_param_group({"params": [vector]})


# ---------------------------------------------------------------------- saving and loading


def trained(steps: int, **settings: object) -> tuple[nn.Module, GaLoreAdamW]:
    network = model()
    optimizer = galore(network, **settings)
    for step in range(steps):
        set_gradients(network, step)
        optimizer.step()
    return network, optimizer


@pytest.mark.parametrize("settings", [{}, {"projector_dtype": "bf16"}, {"proj_type": "left", "refresh": "svd"}])
def test_a_loaded_optimizer_makes_the_very_same_next_updates(settings):
    network, optimizer = trained(7, **settings)
    buffer = io.BytesIO()
    torch.save({"model": network.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    again = model()
    again.load_state_dict(saved["model"])
    other = galore(again, **settings)
    other.load_state_dict(saved["optimizer"])
    for step in range(7, 14):  # over two refreshes
        for each, each_optimizer in ((network, optimizer), (again, other)):
            set_gradients(each, step)
            each_optimizer.step()
    for a, b in zip(network.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_another_structure_is_refused_and_leaves_the_optimizer_as_it_was():
    _, optimizer = trained(2)
    saved = optimizer.state_dict()
    with pytest.raises(CheckpointMismatchError, match=r"rank: the checkpoint has 4, the configuration 5"):
        galore(model(), rank=5).load_state_dict(saved)
    with pytest.raises(CheckpointMismatchError, match=r"proj_type: the checkpoint has 'right'"):
        galore(model(), proj_type="std").load_state_dict(saved)
    other = galore(model(), target_modules=["1"])
    with pytest.raises(CheckpointMismatchError, match=r"3\.weight: projected in the checkpoint, not in the config"):
        other.load_state_dict(saved)
    assert not other.state
    with pytest.raises(CheckpointMismatchError, match="parameter groups hold"):
        GaLoreAdamW([{"params": [nn.Parameter(torch.randn(6, 6))], "rank": 4}]).load_state_dict(saved)


def test_changed_hyperparameters_are_applied_openly(caplog):
    _, optimizer = trained(2)
    optimizer.param_groups[0]["lr"] = 0.003  # as a scheduler would
    saved = optimizer.state_dict()
    other = galore(model(), weight_decay=0.1, scale=0.5)
    with caplog.at_level(logging.WARNING):
        other.load_state_dict(saved)
    group = other.param_groups[0]
    assert (group["weight_decay"], group["scale"], group["lr"]) == (0.1, 0.5, 0.003)
    assert "weight_decay: the checkpoint has 0.0, the configuration 0.1; continuing with the latter" in caplog.text
    assert "scale: the checkpoint has 0.25, the configuration 0.5" in caplog.text
    assert "lr" not in caplog.text.replace("param_groups", "")
    caplog.clear()
    faster = galore(model(), lr=0.02)
    with caplog.at_level(logging.WARNING):
        faster.load_state_dict(saved)
    assert faster.param_groups[0]["lr"] == pytest.approx(0.006)  # the scheduler's factor of 0.3 stays
    assert "lr: the checkpoint has 0.01, the configuration 0.02" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        galore(model(), refresh="svd", seed=3).load_state_dict(saved)
    assert "refresh: the checkpoint has 'subspace', the configuration 'svd'; continuing with the latter" in caplog.text
    assert "seed: the checkpoint has 0, the configuration 3" in caplog.text
    with pytest.raises(CheckpointMismatchError, match="projector_dtype: the checkpoint has 'fp32'"):
        galore(model(), projector_dtype="bf16").load_state_dict(saved)


def test_bf16_parameters_are_trained_with_float32_moments():
    weight = nn.Parameter(torch.randn(16, 12).bfloat16())
    optimizer = GaLoreAdamW([{"params": [weight], "rank": 4}], lr=0.1)
    before = weight.detach().clone()
    weight.grad = torch.randn(16, 12).bfloat16()
    optimizer.step()
    assert optimizer.state[weight]["exp_avg"].dtype == torch.float32
    assert weight.dtype == torch.bfloat16
    assert not torch.equal(weight, before)


def test_a_closure_is_evaluated_with_gradients():
    weight = nn.Parameter(torch.randn(6, 6))
    optimizer = GaLoreAdamW([{"params": [weight], "rank": 2}], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss.detach()

    first = float(optimizer.step(closure))
    assert float(optimizer.step(closure)) < first
