"""Gradients that are lowered when they arrive: as the ordinary path, with less memory, and failing on all ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_galore import ConfigError, check_deepspeed_config
from ds_galore.monitoring.accounting import memory_by_kind
from ds_galore.optim.arrivals import SKETCH, sketch_of
from ds_galore.tools.memory import plan_memory
from tests import jobs
from tests.optim.test_engine import overflowing

BATCH = 24
RANDOM = {"first_basis": "random", "update_proj_gap": 5}
BF16 = {"bf16": {"enabled": True}}
MASTERS = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}


def start(lowered: bool, optimizer: dict[str, Any], *, accumulation: int = 1, **extra: Any) -> Any:
    """An engine, by the ordinary path or by the other."""
    import deepspeed
    import torch.distributed as dist

    params = {**optimizer["params"], **({"gradients": "lowrank"} if lowered else {})}
    micro = BATCH // dist.get_world_size() // accumulation
    init, frozen = extra.pop("init", False), extra.pop("frozen", False)
    settings = jobs.config(
        {"type": optimizer["type"], "params": params},
        micro=micro,
        accumulation=accumulation,
        **{"gradient_clipping": 1.0, **extra},
    )
    if init:
        with deepspeed.zero.Init(config_dict_or_path=settings):
            model = jobs.tiny_llama()
    else:
        model = jobs.tiny_llama(tied=frozen)
    if frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.0.self_attn" not in name)
    engine = jobs.start(model, settings, model_parameters=[p for p in model.parameters() if p.requires_grad])
    assert type(engine.optimizer).__name__ == ("LoweredStage3" if lowered else "DeepSpeedZeroOptimizer_Stage3")
    return engine


def losses_of(lowered: bool, steps: int, optimizer: dict[str, Any], **extra: Any) -> tuple[list[float], float]:
    """By one path, the losses, and the norm of the last gradients."""
    engine = start(lowered, optimizer, **extra)
    losses = jobs.train(engine, jobs.batches(steps, BATCH))
    return losses, float(engine.get_global_grad_norm())


def both(steps: int, optimizer: dict[str, Any], **extra: Any) -> list[tuple[list[float], float]]:
    """The same by either path."""
    return [losses_of(lowered, steps, optimizer, **extra) for lowered in (False, True)]


@pytest.fixture(scope="module")
def ordinary(pool) -> tuple[list[float], float]:
    """The ordinary path on one rank, without accumulation; tests/optim/test_engine.py has it on others."""
    losses, norm = pool.run(1, losses_of, False, 50, jobs.galore(**RANDOM))[0]
    assert losses[-1] < 0.6 * losses[0]
    return losses, norm


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_losses_are_those_of_the_ordinary_path(pool, ordinary, ranks, accumulation):
    plain, norm = ordinary
    lowered, estimated = pool.run(ranks, losses_of, True, 50, jobs.galore(**RANDOM), accumulation=accumulation)[0]
    assert max(abs(a - b) for a, b in zip(plain, lowered, strict=True)) < (1e-5 if accumulation == 1 else 1e-3)
    assert estimated == pytest.approx(norm, rel=1e-5 if accumulation == 1 else 0.03)


@pytest.mark.parametrize(
    ("params", "extra"),
    [
        ({"projector_storage": "sharded", "projector_dtype": "int8"}, {"zero": {"sub_group_size": 3000}}),
        ({"projector_storage": "replicated"}, {"init": True, "zero": {"overlap_comm": True}}),
        ({"rank": {"energy": 0.9, "max": 8}}, {"accumulation": 2, "gradient_clipping": 0.0}),
        ({"refresh": "random"}, {"frozen": True}),
        ({"adaptive_gap": True, "stable_overlap": 0.2, "refresh_budget": 2}, {"zero": {"contiguous_gradients": False}}),
        ({"moment_dtype": "8bit"}, {"zero": {"reduce_bucket_size": 2000, "stage3_prefetch_bucket_size": 0}}),
        ({"stochastic_rounding": True}, MASTERS),
        ({}, {**BF16, "accumulation": 2, "gradient_clipping": 0.0}),
    ],
)
def test_formats_refreshes_and_layouts_give_the_same_losses(pool, params, extra):
    optimizer = jobs.galore(**{**RANDOM, **params})
    (plain, _), (lowered, _) = pool.run(2, both, 20, optimizer, **extra)[0]
    assert plain[-1] < 0.8 * plain[0]
    tolerance = 0.03 if "bf16" in extra else 1e-4
    assert max(abs(a - b) for a, b in zip(plain, lowered, strict=True)) < tolerance


def test_adafactor_and_hugging_faces_names_do_too(pool):
    adafactor = {"type": "GaLoreAdafactor", "params": {"lr": 1e-2, "rank": 8, **RANDOM}}
    (plain, _), (lowered, _) = pool.run(2, both, 20, adafactor)[0]
    assert max(abs(a - b) for a, b in zip(plain, lowered, strict=True)) < 1e-4
    named = pool.run(2, by_name, "galore_adafactor_layerwise", adafactor["params"])[0]
    assert max(abs(a - b) for a, b in zip(plain, named, strict=True)) < 1e-4


def by_name(kind: str, params: dict[str, Any]) -> list[float]:
    import torch.distributed as dist

    settings = jobs.config(
        {"type": kind, "params": params}, micro=BATCH // dist.get_world_size(), gradient_clipping=1.0
    )
    engine = jobs.start(jobs.tiny_llama(), settings)
    assert type(engine.optimizer).__name__ == "LoweredStage3"
    return jobs.train(engine, jobs.batches(20, BATCH))


# ---------------------------------------------------------------------- overflow, resuming, layers that are not used


@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_overflowed_fp16_step_changes_nothing(pool, accumulation):
    pool.run(2, overflowing, jobs.galore(**RANDOM, gradients="lowrank"), accumulation)
    pool.close()  # the workers' accelerator says that it supports fp16 now


def one_value(bad: float) -> int:
    """Steps that are skipped when one element of one matrix's gradient is not finite, on one rank."""
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    engine = start(True, jobs.galore(**RANDOM), fp16=fp16)
    data = jobs.batches(3, BATCH)
    jobs.train(engine, data[:2])
    if dist.get_rank() == 1:
        weight = next(p for n, p in engine.module.named_parameters() if "up_proj" in n)

        def spoil(gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient.clone()
            gradient.view(-1)[7] = bad
            return gradient

        weight.register_hook(spoil)
    jobs.train(engine, data[2:])
    return int(engine.skipped_steps)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_overflow_check_sees_every_value(pool, bad):
    assert pool.run(2, one_value, bad) == [1, 1]
    pool.close()


def resumed(directory: str, accumulation: int) -> None:
    """Go on from a checkpoint in the middle of training, also with part of a window taken before."""
    ours = {"ds_galore": {"checkpoint": {"mode": "full"}}}
    engine = start(True, jobs.galore(**RANDOM), accumulation=accumulation, **ours)
    data = jobs.batches(16, BATCH)
    jobs.train(engine, data[:7])
    engine.save_checkpoint(directory, tag="t")
    engine.checkpoint_engine.wait()
    losses = jobs.train(engine, data[7:])
    again = start(True, jobs.galore(**RANDOM), accumulation=accumulation, **ours)
    jobs.train(again, data[:2])
    again.load_checkpoint(directory)
    assert jobs.train(again, data[7:]) == losses


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_resumed_run_goes_on_bit_for_bit(pool, tmp_path, accumulation):
    pool.run(3, resumed, str(tmp_path), accumulation)


class Branches(nn.Module):
    """Of two matrices, each is used in every other step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 24) for _ in range(2))

    def forward(self, inputs: torch.Tensor, number: int) -> torch.Tensor:
        return self.layers[number](inputs).square().mean()


def unused() -> list[float]:
    optimizer = jobs.galore(rank=4, gradients="lowrank", scale=1.0, update_proj_gap=4)
    engine = jobs.start(Branches(), jobs.config(optimizer, micro=4))
    losses = []
    inputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    for step in range(24):
        loss = engine(inputs, step % 2)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def test_layers_that_a_step_does_not_use_are_no_obstacle(pool):
    losses = pool.run(2, unused)[0]
    assert losses[-2] < 0.8 * losses[0]
    assert losses[-1] < 0.8 * losses[1]


# ---------------------------------------------------------------------- the norm over several micro-batches


def test_a_sketch_is_linear_and_keeps_norms_in_the_mean():
    generator = torch.Generator().manual_seed(0)
    flat, other = (torch.randn(5000, generator=generator) for _ in range(2))
    torch.testing.assert_close(sketch_of(flat, 3) + sketch_of(other, 3), sketch_of(flat + other, 3))
    assert sketch_of(flat[:5], 3).shape == (SKETCH,)
    assert not sketch_of(flat[:0], 3).any()
    ratios = torch.tensor([float(sketch_of(flat, key).square().sum() / flat.square().sum()) for key in range(400)])
    assert abs(float(ratios.mean()) - 1) < 0.03
    assert float(ratios.std()) < 1.1 * math.sqrt(2 / SKETCH)
    assert not math.isfinite(float(sketch_of(flat.index_fill(0, torch.tensor([17]), math.inf), 3).square().sum()))


def norms(accumulation: int, steps: int) -> list[tuple[float, float]]:
    """By step, the norm of the gradients on the ordinary path, and as it is estimated of the very same gradients."""
    found = []
    plain, lowered = (start(each, jobs.galore(lr=1e-4, **RANDOM), accumulation=accumulation) for each in (False, True))
    for tokens in jobs.batches(steps, BATCH).split(1):
        pair = []
        for engine in (plain, lowered):
            jobs.train(engine, tokens)
            pair.append(float(engine.get_global_grad_norm()))
        found.append((pair[0], pair[1]))
    return found


def test_the_norm_over_several_micro_batches_is_estimated_within_a_few_percent(pool):
    pairs = pool.run(2, norms, 4, 30)[0]
    errors = torch.tensor([estimate / exact - 1 for exact, estimate in pairs])
    assert float(errors.abs().max()) < 0.06
    assert float(errors.square().mean().sqrt()) < 0.025


def unannounced() -> str:
    """Two micro-batches where the configuration has one."""
    engine = start(True, jobs.galore(**RANDOM))
    told = "nothing"
    try:
        for boundary in (False, True):
            engine.set_gradient_accumulation_boundary(boundary)
            tokens = jobs.batches(1, 12)[0]
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
    except Exception as error:  # noqa: BLE001 - reported
        told = f"{type(error).__name__}: {error}"
    return told


def test_more_micro_batches_than_are_configured_are_refused(pool):
    for told in pool.run(2, unannounced, timeout=60):
        assert told.startswith("ConfigError: gradient_accumulation_steps is 1, and more than one micro-batch")


# ---------------------------------------------------------------------- memory


def memory(lowered: bool, steps: int) -> tuple[int, int, int, float]:
    """Peak bytes of projected matrices' gradients; at full size; of those that refresh together; all, as planned."""
    import torch.distributed as dist

    engine = start(lowered, jobs.galore(**{**RANDOM, "rank": 4, "update_proj_gap": 7}))
    zero, optimizer = engine.optimizer, engine.basic_optimizer
    projected = sum(
        p.partition_numel() * 4 for group in zero.fp16_groups for p in group if optimizer.projected_name(p) is not None
    )
    others = sum(p.partition_numel() * 4 for group in zero.fp16_groups for p in group) - projected
    peak, together = 0, 0
    original = zero.partition_grads

    def watched(*args: Any) -> Any:
        nonlocal peak, together
        result = original(*args)
        windows = getattr(zero, "_windows", {})
        taken = sum(each.gradients.nbytes for each in windows.values())
        peak = max(peak, zero.grad_partitions_flat_buffer.nbytes + taken - others)
        whole = (piece for each in windows.values() for piece in each.gradients.pieces.values())
        together = max(together, sum(piece.nbytes for piece in whole))
        return result

    zero.partition_grads = watched
    jobs.train(engine, jobs.batches(steps, BATCH))
    plans = optimizer.parameter_plans()
    planned = plan_memory(plans, world_size=dist.get_world_size(), rank=dist.get_rank(), kept=optimizer.kept)
    return peak, projected, together, (peak + others) / planned.gradients


def test_only_low_rank_gradients_are_kept_on_every_step_the_first_included(pool):
    for peak, projected, together, of_plan in pool.run(2, memory, True, 16):
        assert 0 < together < projected / 3
        assert peak <= 1.15 * 4 / 32 * projected + together
        assert 0.8 < of_plan < 1.1
    for peak, projected, _, of_plan in pool.run(2, memory, False, 2):
        assert peak == projected
        assert of_plan == 1


def masters(lowered: bool, extra: dict[str, Any]) -> tuple[bool, dict[str, dict[str, int]]]:
    """Whether weights are their own masters after some steps, and the start-up table."""
    engine = start(lowered, jobs.galore(**RANDOM), **extra)
    before = [each.detach().clone() for each in engine.optimizer.fp16_partitioned_groups_flat]
    jobs.train(engine, jobs.batches(3, BATCH))
    zero, shared = engine.optimizer, set()
    for weights, own, old in zip(
        zero.fp16_partitioned_groups_flat, zero.fp32_partitioned_groups_flat, before, strict=True
    ):
        shared.add(weights.data_ptr() == own.data_ptr())
        assert not torch.equal(weights, old)
    [found] = shared
    table = memory_by_kind(engine, 2)
    assert table is not None
    return found, table


@pytest.mark.parametrize(("extra", "width"), [({}, 4), (MASTERS, 2), (BF16, 4)])
def test_weights_are_their_own_masters_where_both_have_one_dtype(pool, extra, width):
    for lowered in (True, False):
        for shared, table in pool.run(2, masters, lowered, extra):
            assert shared is (lowered and extra is not BF16)
            own, adamw = table["GaLoreAdamW"], table["AdamW"]
            assert (own["master_weights"] == 0) is shared
            assert adamw["master_weights"] == width * adamw["weights"] // (2 if extra else 4)


# ---------------------------------------------------------------------- what is refused, and failures


@pytest.mark.parametrize(
    ("params", "zero", "message"),
    [
        ({}, {"stage": 2}, r"zero_optimization\.stage is 2: optimizer\.params\.gradients 'lowrank' lowers what ZeRO 3"),
        ({}, {"stage": 3, "offload_optimizer": {"device": "cpu"}}, r"offload_optimizer\.device is 'cpu': .* whole"),
        ({"proj_type": "std"}, {"stage": 3}, r"gradients is 'lowrank', and proj_type 'std': .* from the right"),
        ({"stagger_refresh": False}, {"stage": 3}, r"gradients is 'lowrank', and stagger_refresh False"),
        ({"first_basis": "gradient"}, {"stage": 3}, r"gradients is 'lowrank', and first_basis 'gradient'"),
        ({"gradients": "half"}, {"stage": 3}, r"optimizer\.params\.gradients is 'half'"),
    ],
)
def test_with_what_it_cannot_work_is_refused_by_name(params, zero, message):
    optimizer = jobs.galore(**{"gradients": "lowrank", **params})
    config = {"optimizer": optimizer, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
    with pytest.raises(ConfigError, match=message):
        check_deepspeed_config(config)


@pytest.mark.parametrize("kind", ["APOLLOAdamW", "FiraAdamW"])
def test_rules_that_need_full_gradients_are_refused(kind):
    optimizer = {"type": kind, "params": {"lr": 0.01, "rank": 8, "gradients": "lowrank"}}
    with pytest.raises(ConfigError, match=r"gradients is 'lowrank': .* updates with full gradients"):
        check_deepspeed_config({"optimizer": optimizer, "zero_optimization": {"stage": 3}})


def another_version() -> str:
    import deepspeed

    before, deepspeed.__version__ = deepspeed.__version__, "0.20.0"
    try:
        start(True, jobs.galore(**RANDOM))
    except ConfigError as error:
        return str(error)
    finally:
        deepspeed.__version__ = before
    return "started"


def test_a_version_of_deepspeed_that_was_not_checked_is_refused(pool):
    for told in pool.run(2, another_version):
        assert "was checked with DeepSpeed 0.19.8; this is 0.20.0" in told


def full_gradients() -> list[str]:
    """What DeepSpeed's function for full gradients says of a projected matrix and of a norm."""
    from deepspeed.utils import safe_get_full_grad

    engine = start(True, jobs.galore(**RANDOM))
    tokens = jobs.batches(1, 12)[0]
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    told = []
    for part in ("up_proj", "norm"):
        weight = next(p for n, p in engine.module.named_parameters() if part in n)
        try:
            told.append(str(tuple(safe_get_full_grad(weight).shape)))
        except Exception as error:  # noqa: BLE001 - reported
            told.append(f"{type(error).__name__}: {error}")
    return told


def test_full_gradients_of_projected_matrices_are_refused_on_all_ranks(pool):
    for lowered, whole in pool.run(2, full_gradients, timeout=60):
        assert "BindingError: the gradient of model.layers.0.mlp.up_proj.weight is not kept at full size" in lowered
        assert whole == "(32,)"


def failing() -> str:
    """A product that fails on one rank while gradients arrive: all fail at the step, and in the same one."""
    import torch.distributed as dist

    from ds_galore.optim.matrices import RIGHT

    engine = start(True, jobs.galore(**RANDOM))
    data = jobs.batches(3, BATCH)
    jobs.train(engine, data[:1])

    def broken(*args: Any) -> Any:
        raise MemoryError("no memory for this")

    share = type(RIGHT).share
    if dist.get_rank() == 1:
        type(RIGHT).share = broken
    try:
        jobs.train(engine, data[1:2])
    except Exception as error:  # noqa: BLE001 - reported
        return f"{type(error).__name__}: {error}"
    finally:
        type(RIGHT).share = share
    return "nothing"


def test_a_rank_that_fails_while_gradients_arrive_fails_the_step_on_all(pool):
    told = pool.run(3, failing, timeout=90)
    assert told[1] == "MemoryError: no memory for this"
    assert all("rank 1 failed" in each and "no memory for this" in each for each in (told[0], told[2])), told


def test_the_directory_of_this_package_has_one_module_that_overrides_deepspeed():
    root = Path(__file__).parents[2] / "ds_galore"
    found = [path.name for path in root.rglob("*.py") if "(DeepSpeedZeroOptimizer_Stage3)" in path.read_text()]
    assert found == ["lowered.py"]
