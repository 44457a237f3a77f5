"""Number for number against galore-torch, untouched, on the same gradients: standalone and on ZeRO-3's slices."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_galore import GaLoreAdamW
from tests import jobs

STEPS, RANK, GAP, CLIP = 30, 3, 7, 1.0
HYPER = {"lr": 0.02, "betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.1}
#: Tall, wide, square; rows longer than a partition; partitions that cut rows; one that leaves ranks without data.
SHAPES = {"tall": (40, 24), "wide": (24, 40), "square": (17, 17), "rows": (4, 77), "columns": (77, 4)}
PLAIN = {"bias": (13,), "single": (1,)}
FAITHFUL = {"refresh": "svd", "stagger_refresh": False, "reproject_moments": False}


def initial(name: str) -> Tensor:
    shape = SHAPES.get(name) or PLAIN[name]
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))


def gradients(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return {
        name: torch.randn(shape, generator=generator) * 10.0 ** (step % 3 - 1)
        for name, shape in {**SHAPES, **PLAIN}.items()
    }


def reference(proj_type: str) -> dict[str, Tensor]:
    """What galore-torch makes of the weights, with torch's own clipping."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from galore_torch import GaLoreAdamW as Reference

        weights = {name: nn.Parameter(initial(name)) for name in {**SHAPES, **PLAIN}}
        galore = {"rank": RANK, "update_proj_gap": GAP, "scale": 0.25, "proj_type": proj_type}
        groups = [{"params": [weights[n] for n in PLAIN]}, {"params": [weights[n] for n in SHAPES], **galore}]
        optimizer = Reference(groups, **HYPER)
    for step in range(STEPS):
        for name, grad in gradients(step).items():
            weights[name].grad = grad
        torch.nn.utils.clip_grad_norm_(list(weights.values()), CLIP)
        optimizer.step()
    return {name: weight.detach() for name, weight in weights.items()}


def assert_equal_weights(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        error = (found[name] - weight).norm() / weight.norm()
        assert error < 1e-5, f"{name}: relative error {error:.2e}"
        assert (weight - initial(name)).norm() / initial(name).norm() > 1e-2, "the check would not notice anything"


@pytest.mark.parametrize("proj_type", ["right", "left", "std", "reverse_std"])
def test_standalone_weights_are_galore_torchs(proj_type):
    weights = {name: nn.Parameter(initial(name)) for name in {**SHAPES, **PLAIN}}
    galore = {"rank": RANK, "update_proj_gap": GAP, "scale": 0.25, "proj_type": proj_type}
    groups = [{"params": [weights[n] for n in PLAIN]}, {"params": [weights[n] for n in SHAPES], **galore}]
    optimizer = GaLoreAdamW(groups, **HYPER, **FAITHFUL)
    for step in range(STEPS):
        for name, grad in gradients(step).items():
            weights[name].grad = grad
        torch.nn.utils.clip_grad_norm_(list(weights.values()), CLIP)
        optimizer.step()
    assert_equal_weights({name: weight.detach() for name, weight in weights.items()}, reference(proj_type))


class Matrix(nn.Linear):
    """A weight whose gradient is whatever the test says: the loss is its inner product with that."""

    def forward(self, grad: Tensor) -> Tensor:
        return (self.weight * grad).sum()


class Vector(nn.Module):
    """The same for a parameter that is no matrix."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(value)

    def forward(self, grad: Tensor) -> Tensor:
        return (self.weight * grad).sum()


class Weights(nn.Module):
    """All of them."""

    def __init__(self) -> None:
        super().__init__()
        for name, (rows, columns) in SHAPES.items():
            layer = Matrix(columns, rows, bias=False)
            layer.weight.data.copy_(initial(name))
            self.add_module(name, layer)
        for name in PLAIN:
            self.add_module(name, Vector(initial(name)))

    def forward(self, grads: dict[str, Tensor]) -> Tensor:
        return torch.stack([self.get_submodule(name)(grad) for name, grad in grads.items()]).sum()


def on_slices(settings: dict[str, Any], zero: dict[str, Any]) -> dict[str, Tensor]:
    optimizer = {"type": "GaLoreAdamW", "params": {**HYPER, "betas": list(HYPER["betas"]), **settings}}
    engine = jobs.start(Weights(), jobs.config(optimizer, micro=1, gradient_clipping=CLIP, zero=zero))
    for step in range(STEPS):
        engine.backward(engine(gradients(step)))
        engine.step()
    return {name.removesuffix(".weight"): weight for name, weight in jobs.whole_weights(engine).items()}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("proj_type", ["right", "left", "std", "reverse_std"])
def test_weights_on_zero3_slices_are_galore_torchs(pool, proj_type, world_size):
    settings = {"rank": RANK, "update_proj_gap": GAP, "scale": 0.25, "proj_type": proj_type, **FAITHFUL}
    expected = reference(proj_type)
    for found in pool.run(world_size, on_slices, settings, {}):
        assert_equal_weights(found, expected)


@pytest.mark.parametrize("settings", [{"projector_storage": "sharded"}, {"projector_storage": "replicated"}])
def test_storage_of_projectors_and_sub_groups_change_nothing(pool, settings):
    common = {"rank": RANK, "update_proj_gap": GAP, "scale": 0.25, **FAITHFUL}
    expected = reference("right")
    for found in pool.run(4, on_slices, {**common, **settings}, {"sub_group_size": 100}):
        assert_equal_weights(found, expected)


def test_a_subspace_refresh_ends_where_standalone_ends_on_any_number_of_ranks(pool):
    settings = {"rank": RANK, "update_proj_gap": GAP, "scale": 0.25, "proj_type": "std", "power_iterations": 2}
    model = Weights()
    optimizer = GaLoreAdamW(model.parameters(), **HYPER, **settings, model=model)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(gradients(step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    expected = {name.removesuffix(".weight"): weight.detach() for name, weight in model.named_parameters()}
    for world_size in (1, 3):
        for found in pool.run(world_size, on_slices, settings, {}):
            for name, weight in expected.items():
                # Random gradients have no gap in their spectrum: a rounding turns the basis a little.
                assert (found[name] - weight).norm() / weight.norm() < 1e-3, name
