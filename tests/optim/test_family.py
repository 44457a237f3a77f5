"""Every update rule against the public implementation of its paper, on the same gradients and projections."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import ds_galore
from ds_galore.optim import matrices
from ds_galore.optim.formats import Dynamic
from ds_galore.optim.walks import SEGMENT
from ds_galore.tools.memory import plan_memory
from tests import jobs

MODELS = Path(__file__).resolve().parent.parent.parent / "configs" / "models"
SHAPES = [(24, 16), (16, 24), (20, 20)]
GALORE = {"rank": 4, "update_proj_gap": 5, "scale": 0.25, "proj_type": "std"}
FAITHFUL = {"refresh": "svd", "stagger_refresh": False, "reproject_moments": False}


def gradients(steps: int) -> list[list[Tensor]]:
    """By step and matrix, a gradient with a few strong directions; the last two are an embedding's and a norm's."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for step in range(steps):
        own = []
        for rows, columns in SHAPES:
            left, right = torch.randn(rows, 6, generator=generator), torch.randn(6, columns, generator=generator)
            noise = torch.randn(rows, columns, generator=generator)
            own.append((1.0 + 0.1 * step) * (left @ right + 0.3 * noise))
        found.append([*own, torch.randn(40, 12, generator=generator), torch.randn(12, generator=generator)])
    return found


def weights() -> list[Parameter]:
    generator = torch.Generator().manual_seed(4)
    return [Parameter(torch.randn(*shape, generator=generator)) for shape in [*SHAPES, (40, 12), (12,)]]


def run(optimizer: torch.optim.Optimizer, parameters: list[Parameter], steps: int = 17) -> list[Tensor]:
    for grads in gradients(steps):
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad.clone()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def groups(parameters: list[Parameter], galore: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"params": parameters[:3], **galore}, {"params": parameters[3:]}]


def compare(found: list[Tensor], expected: list[Tensor], tolerance: float = 2e-5) -> None:
    moved = weights()
    for ours, theirs, before in zip(found, expected, moved, strict=True):
        change = (theirs - before.detach()).norm()
        assert change > 1e-3, "the reference did nothing"
        assert (ours - theirs).norm() / change < tolerance


@pytest.mark.parametrize("proj_type", ["std", "reverse_std", "right", "left"])
@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 1e-2, "weight_decay": 0.1},
        {"lr": 1e-2, "beta1": 0.9, "clip_threshold": 0.3, "scale_parameter": True},
        {"relative_step": True, "scale_parameter": True, "decay_rate": -0.7},
        {"relative_step": True, "warmup_init": True, "scale_parameter": True, "eps": (1e-20, 50.0)},
    ],
)
def test_adafactor_is_galore_torchs(proj_type, settings):
    from galore_torch import GaLoreAdafactor as Reference

    galore = {**GALORE, "proj_type": proj_type}
    theirs = weights()
    plain = {"scale_parameter": False, "relative_step": False, **settings}
    expected = run(Reference(groups(theirs, galore), **{"lr": None, **plain}), theirs)
    ours = weights()
    compare(run(ds_galore.GaLoreAdafactor(groups(ours, galore), **settings, **FAITHFUL), ours), expected)


@pytest.mark.parametrize(("scaling", "rank", "scale"), [("channel", 4, 1.0), ("channel", 4, 0.5), ("tensor", 1, 128.0)])
def test_apollo_is_apollo_torchs_with_the_same_projection(monkeypatch, scaling, rank, scale):
    """apollo-torch takes the square of the factor as ``scale``, and raises for other sides than ``std``."""
    from apollo_torch import APOLLOAdamW as Reference

    own = {"proj": "random", "scale_type": scaling, "scale": scale, "update_proj_gap": 200, "proj_type": "std"}
    theirs = weights()
    settings = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.99)}
    reference = Reference(groups(theirs, {**own, "rank": rank}), **settings)
    expected = run(reference, theirs)
    projections = [reference.state[parameter]["projector"].ortho_matrix for parameter in theirs[:3]]

    def projection(matrix: matrices.Matrix, rows: int, draw: int, like: Tensor) -> Tensor:
        assert draw == 0
        found = projections[matrix.number]
        return found if found.shape == (rows, rank) else found.t()

    monkeypatch.setattr(matrices, "random_basis", projection)
    ours = weights()
    galore = {"rank": rank, "update_proj_gap": 200, "proj_type": "std", "scale": math.sqrt(scale)}
    compare(run(ds_galore.APOLLOAdamW(groups(ours, galore), scaling=scaling, **settings), ours), expected)


@pytest.mark.parametrize("proj_type", ["std", "reverse_std", "right", "left"])
def test_fira_is_firas(proj_type):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import fira
    theirs = weights()
    own = {"rank": 4, "update_proj_gap": 5, "alpha": 1.0, "proj_type": proj_type}
    settings = {"lr": 1e-2, "weight_decay": 0.1}
    expected = run(fira.FiraAdamW(groups(theirs, own), no_deprecation_warning=True, **settings), theirs)
    ours = weights()
    galore = {"rank": 4, "update_proj_gap": 5, "scale": 1.0, "proj_type": proj_type}
    compare(run(ds_galore.FiraAdamW(groups(ours, galore), **settings, **FAITHFUL), ours), expected, 1e-4)


def trained(optimizer: type, steps: int, **settings: Any) -> tuple[float, torch.optim.Optimizer]:
    """The mean loss of the last tenth of a run on one process, of a model whose embeddings are quantised."""
    model = jobs.tiny_llama(hidden=64)
    made = optimizer(model.parameters(), model=model, lr=1e-2, rank=16, update_proj_gap=40, **settings)
    losses = []
    for tokens in jobs.batches(steps, 8):
        loss = model(input_ids=tokens, labels=tokens).loss
        made.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        made.step()
        losses.append(float(loss.detach()))
    assert losses[0] > 4.0
    return sum(losses[-steps // 10 :]) / (steps // 10), made


def test_8_bit_states_end_within_a_percent_of_fp32_states_after_300_steps():
    expected, _ = trained(ds_galore.GaLoreAdamW, 300)
    found, optimizer = trained(ds_galore.GaLoreAdamW8bit, 300, projector_dtype="int8")
    assert expected < 2.0
    assert abs(found / expected - 1.0) < 0.01
    moments = [
        each for state in optimizer.state.values() for key, each in state.items() if key in ("exp_avg", "exp_avg_sq")
    ]
    assert sum(each.numel() for each in moments if each.dtype == torch.uint8) > 0.98 * sum(
        each.numel() for each in moments
    )


@pytest.mark.parametrize("kind", ["GaLoreAdamW", "GaLoreAdafactor", "APOLLOAdamW"])
def test_16_bit_weights_are_rounded_alike_whatever_is_worked_on_at_once(monkeypatch, kind):
    found = []
    for segment in (2**18, 256):
        monkeypatch.setitem(SEGMENT, "cpu", segment)
        parameters = [Parameter(each.detach().bfloat16()) for each in weights()]
        optimizer = getattr(ds_galore, kind)(
            groups(parameters, GALORE), lr=1e-2, moment_dtype="bf16", stochastic_rounding=True, **EXTRA.get(kind, {})
        )
        before = [parameter.detach().clone() for parameter in parameters]
        for grads in gradients(3):
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad.bfloat16()
            optimizer.step()
        assert not any(torch.equal(a, b) for a, b in zip(parameters, before, strict=True))
        found.append(parameters)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


#: What is needed for bf16 moments to be there.
EXTRA = {"GaLoreAdafactor": {"beta1": 0.9}}


def test_a_step_with_8_bit_states_errs_by_the_quantisation_alone():
    """The first update is that of fp32 states, bit for bit; the moments it leaves are theirs, rounded."""
    generator = torch.Generator().manual_seed(1)
    start, grad = torch.randn(96, 80, generator=generator), torch.randn(96, 80, generator=generator)
    found = []
    for kind in (ds_galore.GaLoreAdamW, ds_galore.GaLoreAdamW8bit):
        weight = Parameter(start.clone())
        group = {"params": [weight], "rank": 72, "update_proj_gap": 10, "scale": 1.0}
        optimizer = kind([group], lr=1e-2, projector_dtype="fp32")
        weight.grad = grad.clone()
        optimizer.step()
        found.append((weight.detach(), optimizer.state[weight]))
    (exact, wide), (quantised, narrow) = found
    assert torch.equal(exact, quantised)
    assert narrow["exp_avg"].dtype == torch.uint8
    for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        parts = {"": narrow[key], "_absmax": narrow[f"{key}_absmax"]}
        decoded = Dynamic(signed).decode(parts, 72, torch.float32)
        bound = wide[key].abs().amax(dim=1, keepdim=True) / 127
        assert ((decoded - wide[key]).abs() <= bound).all()
        assert not torch.equal(decoded, wide[key])


@pytest.mark.parametrize(("projectors", "saved"), [("int8", 0.64), ("int4", 0.66)])
def test_the_states_of_a_60m_llama_are_those_that_are_planned(projectors, saved):
    """Existing tensors of the paper's smallest model, rank 128; embeddings and head are over half of it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODELS / "llama_60m.json"))
    settings = {"rank": 128, "projector_dtype": projectors, "first_basis": "random"}
    optimizer = ds_galore.GaLoreAdamW8bit(model.parameters(), model=model, **settings)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    found = optimizer.state_bytes()
    plan = plan_memory(optimizer.parameter_plans(), world_size=1, kept=optimizer.kept, stage=0)
    assert (found["moments"], found["projectors"]) == (plan.moments, plan.projectors)
    bf16_adamw = 2 * 2 * sum(parameter.numel() for parameter in model.parameters())
    assert 1 - sum(found.values()) / bf16_adamw == pytest.approx(saved, abs=0.02)
