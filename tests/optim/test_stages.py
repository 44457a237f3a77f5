"""GaLoreAdamW on every ZeRO stage and in every precision: the same losses, whatever holds the weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ds_galore.conflicts import check_config
from ds_galore.errors import BindingError, ConfigError
from ds_galore.zero.binding import flat_parts
from ds_galore.zero.layout import group_ranges
from tests import jobs
from tests.optim.test_engine import compare
from tests.optim.test_trouble import Small

BATCH, STEPS = 12, 30
CPU = {"device": "cpu"}
BF16 = {"bf16": {"enabled": True}}
BF16_MASTERS = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
RIGHT = {"weight_decay": 0.1}
STD = {"weight_decay": 0.1, "proj_type": "std", "projector_storage": "sharded", "stagger_refresh": False}


def odd_llama(*, freeze: bool = False) -> nn.Module:
    """The tiny Llama after a parameter of three elements, so that nothing is aligned."""
    model = jobs.tiny_llama()
    model.register_parameter("first", nn.Parameter(torch.ones(3)))
    model.register_forward_hook(lambda module, _, out: setattr(out, "loss", out.loss * module.first.mean()) or out)
    if freeze:
        for parameter in model.model.layers[0].self_attn.parameters():
            parameter.requires_grad_(False)
    return model


def start(
    params: dict[str, Any], zero: dict[str, Any], *, groups: bool = False, freeze: bool = False, **extra: Any
) -> Any:
    """An engine; with ``groups``, matrices and the rest are groups of their own."""
    import torch.distributed as dist

    accumulation = extra.pop("accumulation", 1)
    model = odd_llama(freeze=freeze)
    settings = jobs.config(
        jobs.galore(**params),
        micro=BATCH // dist.get_world_size() // accumulation,
        accumulation=accumulation,
        gradient_clipping=1.0,
        zero=zero,
        **extra,
    )
    if not groups:
        return jobs.start(model, settings)
    named = list(model.named_parameters())
    matrices, rest = [p for n, p in named if "proj" in n], [p for n, p in named if "proj" not in n]
    return jobs.start(model, settings, model_parameters=[{"params": rest, "lr": 5e-3}, {"params": matrices}])


Case = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]


def losses_of(cases: list[Case], steps: int = STEPS) -> list[tuple[str, list[float]]]:
    """By case, which of DeepSpeed's optimizers it came to, and its losses."""
    found = []
    for params, zero, extra in cases:
        engine = start(params, zero, **extra)
        losses = jobs.train(engine, jobs.batches(steps, BATCH))
        holder = engine.optimizer
        if zero.get("round_robin_gradients"):
            assert any(list(each) != sorted(each.values()) for each in holder.round_robin_bit16_indices)
        if zero.get("parameter_alignment"):
            assert any(any(each) for each in holder.round_robin_bit16_padding)
        if zero.get("zero_hpz_partition_size"):
            tokens = jobs.batches(1, 1)[0].to(engine.device)
            engine(input_ids=tokens, labels=tokens)  # a step drops the secondary partitions
            assert any(p.ds_secondary_tensor is not None for p in engine.module.parameters())
        found.append((type(holder).__name__, losses))
    return found


# ---------------------------------------------------------------------- the same losses everywhere

ZERO12, ZERO3, ALONE = "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "GaLoreAdamW"


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (
            1,
            [
                (ZERO12, STD, {"stage": 1}, {}),
                (ZERO12, RIGHT, {"stage": 2, "offload_optimizer": CPU}, {"groups": True}),
                (ZERO3, STD, {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}, {}),
            ],
        ),
        (
            2,
            [
                (ALONE, STD, {"stage": 0}, {}),
                (ZERO12, RIGHT, {"stage": 1, "overlap_comm": True, "contiguous_gradients": False}, {}),
                (ZERO12, STD, {"stage": 1, "offload_optimizer": CPU}, {"groups": True}),
                (ZERO12, STD, {"stage": 2, "overlap_comm": True}, {"accumulation": 2}),
                (ZERO12, RIGHT, {"stage": 2, "overlap_comm": False, "contiguous_gradients": False}, {"groups": True}),
                (ZERO12, RIGHT, {"stage": 2, "round_robin_gradients": True, "parameter_alignment": True}, {}),
                (ZERO3, STD, {"stage": 3, "sub_group_size": 3000, "offload_optimizer": CPU}, {}),
                (ZERO3, RIGHT, {"stage": 3, "offload_param": CPU, "overlap_comm": False}, {}),
            ],
        ),
        (
            3,
            [
                (ALONE, RIGHT, {"stage": 0}, {}),
                (ZERO12, STD, {"stage": 1, "parameter_alignment": True}, {}),
                (ZERO12, STD, {"stage": 2, "round_robin_gradients": True}, {"groups": True}),
                (ZERO12, RIGHT, {"stage": 2, "offload_optimizer": CPU}, {"accumulation": 2}),
                (ZERO3, STD, {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}, {"groups": True}),
            ],
        ),
    ],
)
def test_the_stages_give_the_losses_of_one_process(pool, ranks, cases):
    kinds = {(str(params), extra.get("groups", False)): (params, extra) for _, params, _, extra in cases}
    alone = [(params, {"stage": 0}, {"groups": extra.get("groups", False)}) for params, extra in kinds.values()]
    expected = dict(zip(kinds, pool.run(1, losses_of, alone)[0], strict=True))
    for found in pool.run(ranks, losses_of, [case[1:] for case in cases]):
        for (kind, params, zero, extra), (name, losses) in zip(cases, found, strict=True):
            assert name == kind
            _, wanted = expected[str(params), extra.get("groups", False)]
            assert wanted[-1] < 0.6 * wanted[0], "the check would not notice anything"
            assert max(abs(a - b) for a, b in zip(losses, wanted, strict=True)) < 1e-4, (zero, extra)


def test_hpz_gives_the_losses_of_one_process(pool):
    ((_, expected),) = pool.run(1, losses_of, [(RIGHT, {"stage": 0}, {})], 6)[0]
    at_once = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}  # else a small model is never released
    zero = {"stage": 3, "zero_hpz_partition_size": 2, **at_once}
    found = pool.run(4, losses_of, [(RIGHT, zero, {})], 6)
    for ((_, losses),) in found:
        assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-4
    assert expected[-1] < 0.9 * expected[0]


def small(stage: int) -> tuple[list[torch.Tensor], list[bool]]:
    """The weights after some steps; and by group, whether this rank holds nothing but padding."""
    model = Small()
    settings = jobs.config(jobs.galore(rank=1, update_proj_gap=3, lr=0.05), micro=1, zero={"stage": stage})
    rest = [p for p in model.parameters() if p is not model.first.bias]
    engine = jobs.start(model, settings, model_parameters=[{"params": [model.first.bias]}, {"params": rest}])
    for step in range(8):
        engine.backward(engine(torch.randn(4, 3, generator=torch.Generator().manual_seed(step))))
        engine.step()
    empty = [all(part.numel == 0 for part in flat.parts) for flat in flat_parts(engine)]
    return [p.detach().clone() for p in model.parameters()], empty


def test_ranks_that_hold_only_padding_of_a_group_take_part(pool):
    expected, _ = pool.run(1, small, 0)[0]
    ranks = pool.run(4, small, 2, timeout=60)
    assert [empty[0] for _, empty in ranks] == [False, True, True, True]
    for found, _ in ranks:
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_ranges_of_a_group_are_cut_at_equal_parts():
    assert group_ranges(0, 3, 4, 2) == [(0, 3), (3, 3)]
    assert group_ranges(3, 10, 4, 4) == [(0, 1), (1, 5), (5, 9), (9, 10)]
    assert group_ranges(9, 2, 4, 4) == [(0, 0), (0, 0), (0, 2), (2, 2)]


# ---------------------------------------------------------------------- 16 bits


def test_bf16_trains_as_fp32_does(pool):
    cases = [
        ("FP16_UnfusedOptimizer", RIGHT, {"stage": 0}, {**BF16, "freeze": True}),
        (ZERO12, RIGHT, {"stage": 1}, {**BF16, "freeze": True}),
        ("BF16_Optimizer", RIGHT, {"stage": 1}, {**BF16, **FP32_SUMS, "groups": True, "freeze": True}),
        (ZERO12, RIGHT, {"stage": 1, "offload_optimizer": CPU}, {**BF16, **FP32_SUMS, "freeze": True}),
        ("BF16_Optimizer", STD, {"stage": 1}, {**BF16, **FP32_SUMS, "accumulation": 2}),
        (ZERO12, STD, {"stage": 2, "round_robin_gradients": True, "parameter_alignment": True}, BF16),
        (ZERO12, STD, {"stage": 1}, BF16_MASTERS),
        (ZERO12, STD, {"stage": 2}, BF16_MASTERS),
        (ZERO3, STD, {"stage": 3}, BF16_MASTERS),
    ]
    wanted_of = {}
    for _, params, _, extra in cases:
        plain = {key: value for key, value in extra.items() if key in ("freeze", "groups")}
        wanted_of[str((params, sorted(plain)))] = (params, {"stage": 0}, plain)
    expected = dict(zip(wanted_of, pool.run(1, losses_of, list(wanted_of.values()), 20)[0], strict=True))
    for found in pool.run(2, losses_of, [case[1:] for case in cases], 20):
        for (kind, params, zero, extra), (name, losses) in zip(cases, found, strict=True):
            assert name == kind
            _, wanted = expected[str((params, sorted(key for key in extra if key in ("freeze", "groups"))))]
            assert losses[-1] < 0.6 * losses[0], (zero, extra)
            tolerance = 0.1 if extra["bf16"] == BF16_MASTERS["bf16"] else 0.01
            assert max(abs(a - b) for a, b in zip(losses, wanted, strict=True)) < tolerance, (zero, extra)


def flats(engine: Any) -> list[torch.Tensor]:
    if engine.zero_optimization():
        return [flat.tensor for flat in flat_parts(engine)]
    return [copied for group in engine.optimizer.fp32_groups for copied in group]


def snapshot(engine: Any) -> dict[str, Any]:
    state = engine.basic_optimizer.state
    return {
        "weights": [flat.detach().clone() for flat in flats(engine)],
        "module": [parameter.detach().clone() for parameter in engine.module.parameters()],
        "state": [copy.deepcopy(dict(state[flat])) for flat in flats(engine) if flat in state],
    }


def rehearsed(precision: dict[str, Any]) -> None:
    """DeepSpeed's step at construction leaves no trace; the first true one is the first."""
    plain = odd_llama()
    engine = start(RIGHT, {"stage": 0}, **precision)
    assert not engine.basic_optimizer.state
    assert not engine.basic_optimizer._plans
    for copied, parameter, before in zip(flats(engine), engine.module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(copied, before.to(parameter.dtype).float())
    before = snapshot(engine)
    jobs.train(engine, jobs.batches(1, BATCH))
    after = snapshot(engine)
    assert not any(torch.equal(a, b) for a, b in zip(before["weights"], after["weights"], strict=True))
    assert all(state["step"] == 1 for state in after["state"])


def overflowing(zero: dict[str, Any], scaling: dict[str, Any]) -> None:
    """An overflowed fp16 step leaves everything as it was; the next one trains."""
    import torch.distributed as dist

    engine = start(RIGHT, zero, fp16={"enabled": True, **scaling})
    data = jobs.batches(12, BATCH)
    losses = jobs.train(engine, data[:2])
    assert engine.skipped_steps == 0
    before = snapshot(engine)
    part = data[2].chunk(dist.get_world_size())[dist.get_rank()]
    engine.backward(engine(input_ids=part, labels=part).loss.float() * 2.0**40)
    engine.step()
    assert engine.skipped_steps == 1
    compare(before, snapshot(engine))
    losses += jobs.train(engine, data[3:])
    assert engine.skipped_steps == 1
    assert losses[-1] < 0.8 * losses[0]


def fp16_cases() -> None:
    from deepspeed.accelerator import get_accelerator

    static, dynamic = {"loss_scale": 1}, {"initial_scale_power": 8, "hysteresis": 1}
    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    try:
        rehearsed(BF16)
        rehearsed({"fp16": {"enabled": True, **static}})
        overflowing({"stage": 0}, static)
        for zero in ({"stage": 1}, {"stage": 2}, {"stage": 2, "offload_optimizer": CPU}):
            overflowing(zero, dynamic)
    finally:
        del accelerator.is_fp16_supported


def test_the_step_at_construction_and_an_overflowed_fp16_step_change_nothing(pool):
    pool.run(2, fp16_cases)


# ---------------------------------------------------------------------- resuming


def resumed(directory: str, cases: list[Case]) -> None:
    """A run that is saved and loaded into a new engine goes on bit for bit as the run that was not."""
    data = jobs.batches(9, BATCH)
    for number, (params, zero, extra) in enumerate(cases):
        params = {"update_proj_gap": 3, **params}
        whole = start(params, zero, **extra)
        jobs.train(whole, data[:5])
        whole.save_checkpoint(directory, tag=str(number))
        getattr(whole.checkpoint_engine, "wait", lambda: None)()
        rest = jobs.train(whole, data[5:])
        again = start(params, zero, **extra)
        again.load_checkpoint(directory, tag=str(number))
        assert jobs.train(again, data[5:]) == rest, (zero, extra)
        compare(snapshot(whole), snapshot(again))


OURS = {"ds_galore": {"checkpoint": {"mode": "differential"}}}


def test_a_resumed_run_goes_on_bit_for_bit_at_every_stage(pool, tmp_path):
    cases = [
        (STD, {"stage": 0}, {**BF16, **OURS}),
        (STD, {"stage": 1}, {**BF16, **FP32_SUMS, "groups": True}),
        (RIGHT, {"stage": 2, "offload_optimizer": CPU}, {"groups": True}),
        (STD, {"stage": 2, "round_robin_gradients": True}, {**OURS, "groups": True}),
        (RIGHT, {"stage": 1}, {**BF16_MASTERS, **OURS}),
    ]
    pool.run(2, resumed, str(tmp_path), cases)


# ---------------------------------------------------------------------- what is refused


def full_states() -> None:
    """DeepSpeed's functions for the full state of a parameter."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state, safe_set_full_optimizer_state

    for extra in ({}, {**BF16, **FP32_SUMS}):
        engine = start(RIGHT, {"stage": 1}, **extra)
        jobs.train(engine, jobs.batches(1, BATCH))
        for _ in range(2):
            for parameter in (engine.module.first, engine.module.lm_head.weight):  # each on one of two ranks alone
                assert safe_get_full_fp32_param(parameter).shape == parameter.shape
                with pytest.raises(BindingError, match="'exp_avg' of a whole parameter does not exist"):
                    safe_get_full_optimizer_state(parameter, "exp_avg")
                with pytest.raises(BindingError, match="'exp_avg' of a whole parameter does not exist"):
                    safe_set_full_optimizer_state(parameter, torch.zeros_like(parameter), "exp_avg")
            engine.optimizer._link_all_hp_params()  # as after a load


def test_full_optimizer_states_are_refused_on_all_ranks_without_a_hang(pool):
    pool.run(2, full_states, timeout=60)


def unattached(zero: dict[str, Any], extra: dict[str, Any]) -> str:
    """What the first step says if nobody told the optimizer by what it is wrapped."""
    engine = start(RIGHT, zero, **extra)
    engine.basic_optimizer._holder = lambda: None
    try:
        jobs.train(engine, jobs.batches(1, BATCH))
    except BindingError as error:
        return str(error)
    return "nothing happened"


def unattached_padding() -> str:
    """The same where a rank holds only padding: its gradient is zero, as in DeepSpeed's step at construction."""
    model = Small()
    settings = jobs.config(jobs.galore(rank=1), micro=1, zero={"stage": 2})
    engine = jobs.start(model, settings, model_parameters=[model.first.weight])
    engine.basic_optimizer._holder = lambda: None
    engine.backward(engine(torch.ones(4, 3)))
    try:
        engine.step()
    except BindingError as error:
        return str(error)
    return "nothing happened"


def test_without_enable_a_step_says_so_on_all_ranks(pool):
    for found in pool.run(4, unattached_padding, timeout=60):
        assert "call ds_galore.enable() before deepspeed.initialize" in found
    for zero, extra in [({"stage": 2}, {}), ({"stage": 0}, BF16)]:
        for found in pool.run(2, unattached, zero, extra, timeout=60):
            assert "call ds_galore.enable() before deepspeed.initialize" in found
    assert pool.run(2, unattached, {"stage": 3}, {}) == ["nothing happened"] * 2


def built_by_a_function(zero: dict[str, Any]) -> str:
    """What an engine says whose optimizer the user's function builds."""
    from ds_galore import GaLoreAdamW

    settings = jobs.config({}, micro=2, zero=zero)
    del settings["optimizer"]
    model = jobs.tiny_llama()
    try:
        engine = jobs.start(
            model,
            settings,
            optimizer=lambda parameters: GaLoreAdamW(parameters, lr=1e-2, rank=8, model=model),
            model_parameters=list(model.parameters()),
        )
    except ConfigError as error:
        return str(error)
    losses = jobs.train(engine, jobs.batches(12, 4))
    return "learnt" if losses[-1] < losses[0] else "did not learn"


def test_an_optimizer_that_a_function_builds_is_checked_and_attached(pool):
    assert pool.run(2, built_by_a_function, {"stage": 2}) == ["learnt"] * 2
    for found in pool.run(2, built_by_a_function, {"stage": 2, "elastic_checkpoint": True}):
        assert found.startswith("zero_optimization.elastic_checkpoint is True")


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("zero", "extra", "message"),
    [
        ({"offload_optimizer": CPU}, BF16_MASTERS, r"bf16\.bf16_master_weights_and_grads is True: with a CPU-off"),
        ({"offload_optimizer": {"device": "cpu", "ratio": 0.5}}, {}, r"offload_optimizer\.ratio is 0\.5"),
        ({"offload_optimizer": {"device": "cpu", "super_offload": True}}, {}, r"super_offload is True"),
        ({"offload_optimizer": {"device": "nvme"}}, {}, r"offload_optimizer\.device is 'nvme'"),
        ({"zenflow": {"topk_ratio": 0.1}}, {}, r"zero_optimization\.zenflow is"),
        ({"elastic_checkpoint": True}, {}, r"zero_optimization\.elastic_checkpoint is True"),
        ({}, {"checkpoint": {"load_universal": True}}, r"checkpoint\.load_universal is True"),
        ({}, {"torch_autocast": {"enabled": True, "dtype": "float16"}}, r"torch_autocast\.dtype is 'float16'"),
        ({}, {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, r"fp16_master_weights_and_grads is"),
        (
            {},
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
            r"bf16\.bf16_optimizer_states is False: beside",
        ),
    ],
)
def test_what_no_stage_supports_is_refused_by_name(stage, zero, extra, message):
    with pytest.raises(ConfigError, match=message):
        check_config(jobs.config(jobs.galore(), micro=1, zero={**zero, "stage": stage}, **extra))


@pytest.mark.parametrize(
    ("stage", "extra", "message"),
    [
        (0, BF16_MASTERS, r"bf16\.bf16_master_weights_and_grads is True: without ZeRO DeepSpeed ignores it"),
        (1, {**BF16_MASTERS, **FP32_SUMS}, r"bf16\.bf16_master_weights_and_grads is True: with fp32 accumulation"),
        (0, {"fp16": {"enabled": True}}, r"fp16\.loss_scale is 0: without ZeRO DeepSpeed divides gradients by it"),
        (4, {}, r"zero_optimization\.stage is 4: GaLoreAdamW supports the stages 0, 1, 2 and 3"),
    ],
)
def test_what_a_stage_would_ignore_is_refused_by_name(stage, extra, message):
    with pytest.raises(ConfigError, match=message):
        check_config(jobs.config(jobs.galore(), micro=1, zero={"stage": stage}, **extra))
