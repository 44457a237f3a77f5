"""GaLoreAdamW through deepspeed.initialize on a small Llama: losses, precisions, layouts, traffic, memory, resuming."""

from __future__ import annotations

import math
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_galore.tools.memory import plan_memory
from tests import jobs
from tests.checkpoint.engines import blanked, masters

GLOBAL_BATCH = 12
FAITHFUL = {"refresh": "svd", "stagger_refresh": False, "reproject_moments": False}
CLIP = 1.0


def run(optimizer: dict[str, Any], steps: int, *, accumulation: int = 1, **extra: Any) -> list[float]:
    """The losses of a run over the shared batches."""
    import torch.distributed as dist

    model = jobs.tiny_llama(tied=extra.pop("tied", False))
    micro = GLOBAL_BATCH // dist.get_world_size() // accumulation
    settings = jobs.config(optimizer, micro=micro, accumulation=accumulation, gradient_clipping=CLIP, **extra)
    return jobs.train(jobs.start(model, settings), jobs.batches(steps, GLOBAL_BATCH))


# ---------------------------------------------------------------------- losses against galore-torch


def reference_losses(steps: int) -> list[float]:
    """galore-torch on one process with the whole batch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from galore_torch import GaLoreAdamW as Reference

        torch.manual_seed(0)
        model = jobs.tiny_llama()
        linear = [m.weight for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]
        chosen = {id(weight) for weight in linear}
        rest = [p for p in model.parameters() if id(p) not in chosen]
        galore = {"rank": 8, "update_proj_gap": 10, "scale": 0.25, "proj_type": "right"}
        optimizer = Reference([{"params": rest}, {"params": linear, **galore}], lr=1e-2)
    losses = []
    for tokens in jobs.batches(steps, GLOBAL_BATCH):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 1), (1, 4), (3, 4)])
def test_losses_are_galore_torchs_also_with_accumulation(pool, world_size, accumulation):
    expected = pool.run(1, reference_losses, 50)[0]
    found = pool.run(world_size, run, jobs.galore(**FAITHFUL), 50, accumulation=accumulation)
    assert all(each == found[0] for each in found)
    assert max(abs(a - b) for a, b in zip(found[0], expected, strict=True)) < 1e-3
    assert expected[-1] < 0.5 * expected[0], "the check would not notice anything"


# ---------------------------------------------------------------------- what DeepSpeed can do to a layout


def with_groups(zero: dict[str, Any], *, init: bool, freeze: bool) -> tuple[list[float], dict[str, Any]]:
    """Train with two parameter groups, the second without decay, and perhaps a frozen layer or ``zero.Init``."""
    import deepspeed
    import torch.distributed as dist

    settings = jobs.config(
        jobs.galore(weight_decay=0.1), micro=GLOBAL_BATCH // dist.get_world_size(), gradient_clipping=CLIP, zero=zero
    )
    if init:
        with deepspeed.zero.Init(config_dict_or_path=settings):
            model = jobs.tiny_llama()
        whole = dict(jobs.tiny_llama().named_parameters())
        for name, parameter in model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                if dist.get_rank() == 0:
                    parameter.data.copy_(whole[name].data)
    else:
        model = jobs.tiny_llama()
    if freeze:
        for parameter in model.model.layers[0].parameters():
            parameter.requires_grad_(False)
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    matrices = [p for n, p in trained if "proj" in n]
    others = [p for n, p in trained if "proj" not in n]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0, "lr": 5e-3}]
    engine = jobs.start(model, settings, model_parameters=groups)
    losses = jobs.train(engine, jobs.batches(12, GLOBAL_BATCH))
    names = [name for state in engine.basic_optimizer.state.values() for name in state]
    assert sorted(names) == sorted(n for n, _ in trained)
    return losses, {"sub_groups": len(engine.optimizer.fp16_groups)}


@pytest.mark.parametrize("freeze", [False, True])
def test_groups_frozen_layers_sub_groups_and_zero_init_do_not_change_the_losses(pool, freeze):
    (expected, _), *_ = pool.run(1, with_groups, {}, init=False, freeze=freeze)
    for world_size, zero, init in [(2, {"sub_group_size": 2000}, True), (4, {"sub_group_size": 500}, False)]:
        (found, facts), *_ = pool.run(world_size, with_groups, zero, init=init, freeze=freeze)
        assert facts["sub_groups"] > 3
        assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-3


def test_tied_embeddings_are_trained_once(pool):
    expected = pool.run(1, run, jobs.galore(), 12, tied=True)[0]
    found = pool.run(3, run, jobs.galore(), 12, tied=True)[0]
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-3


def test_a_cpu_offloaded_optimizer_gives_the_same_losses(pool):
    expected = pool.run(2, run, jobs.galore(), 12)[0]
    found = pool.run(2, run, jobs.galore(), 12, zero={"offload_optimizer": {"device": "cpu"}})[0]
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-3


# ---------------------------------------------------------------------- precisions


def overflowing(optimizer: dict[str, Any], accumulation: int = 1) -> None:
    """An overflowed fp16 step leaves everything as it was; the next one trains."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    engine = jobs.start(jobs.tiny_llama(), jobs.config(optimizer, micro=2, accumulation=accumulation, fp16=fp16))
    data = jobs.batches(6, 4 * accumulation)
    jobs.train(engine, data[:2])
    before = snapshot(engine)
    engine.optimizer.loss_scaler.cur_scale = 2.0**40
    jobs.train(engine, data[2:3])
    assert engine.skipped_steps == 1
    compare(before, snapshot(engine))
    engine.optimizer.loss_scaler.cur_scale = 2.0**8
    jobs.train(engine, data[3:4])
    assert engine.skipped_steps == 1
    after = snapshot(engine)
    assert any(not torch.equal(a, b) for a, b in zip(before["weights"], after["weights"], strict=True))


def snapshot(engine: Any) -> dict[str, Any]:
    """Master weights by sub-group, and states; what is in padding, which DeepSpeed leaves as it finds it, is zero."""
    import copy

    state = [copy.deepcopy(dict(each)) for each in engine.basic_optimizer.state.values()]
    return {"weights": [blanked(flat, flat.tensor) for flat in masters(engine)], "state": state}


def compare(a: Any, b: Any) -> None:
    """Bit for bit."""
    if isinstance(a, Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            compare(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            compare(x, y)
    else:
        assert a == b


def test_an_overflowed_fp16_step_changes_nothing(pool):
    pool.run(2, overflowing, jobs.galore())
    pool.close()  # the workers' accelerator says that it supports fp16 now


@pytest.mark.parametrize("extra", [{}, {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}])
def test_bf16_trains(pool, extra):
    losses = pool.run(2, run, jobs.galore(), 30, bf16={"enabled": True, **extra})[0]
    assert losses[-1] < 0.6 * losses[0]


# ---------------------------------------------------------------------- traffic


def messages(optimizer: dict[str, Any]) -> tuple[Counter[tuple[str, str]], int, int]:
    """What torch's profiler sees gloo send in one step between refreshes: (operation, shape) -> times."""
    from torch.profiler import ProfilerActivity, profile

    engine = jobs.start(jobs.tiny_llama(), jobs.config(optimizer, micro=2))
    import torch.distributed as dist

    data = jobs.batches(4, 2 * dist.get_world_size())
    jobs.train(engine, data[:3])
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        jobs.train(engine, data[3:])
    seen: Counter[tuple[str, str]] = Counter()
    for event in profiler.events():
        if event.name.startswith("gloo:"):
            seen[event.name, str(event.input_shapes)] += 1
    plans = getattr(engine.basic_optimizer, "parameter_plans", list)()
    projected = [plan for plan in plans if plan.side]
    return seen, len(projected), sum(plan.columns * plan.rank for plan in projected)


def numbers(shape: str) -> int:
    import ast

    return sum(math.prod(each) for each in ast.literal_eval(shape))


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("storage", ["replicated", "sharded"])
def test_traffic_between_refreshes_is_cut_rows_and_votes(pool, world_size, storage):
    rank = 8
    steady = {"update_proj_gap": 1000, "stagger_refresh": False, "rank": rank, "projector_storage": storage}
    baselines = pool.run(world_size, messages, {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}})
    ours = pool.run(world_size, messages, jobs.galore(**steady))
    for (seen, matrices, basis_numbers), (baseline, _, _) in zip(ours, baselines, strict=True):
        assert not baseline - seen, "DeepSpeed sends less than it did without us"
        extra = seen - baseline
        assert matrices == 14
        kinds = {operation for operation, _ in extra}
        assert kinds <= {"gloo:send", "gloo:recv", "gloo:all_reduce", "gloo:all_gather"}
        for direction in ("gloo:send", "gloo:recv"):
            sent = sum(times * numbers(shape) for (operation, shape), times in extra.items() if operation == direction)
            assert sent <= 3 * rank * matrices  # and the votes below take less than another r
        votes = sum(
            times * numbers(shape) for (operation, shape), times in extra.items() if operation == "gloo:all_reduce"
        )
        trained = matrices + 7  # embedding, head, five norms
        # Bytes, not numbers of four bytes: one a parameter and one a vote, of which there are three a sub-group.
        assert votes <= trained + 3
        gathered = sum(
            times * numbers(shape) for (operation, shape), times in extra.items() if operation == "gloo:all_gather"
        )
        if storage == "replicated":
            assert gathered == 0
        else:  # what one rank contributes: its part of every basis, padded to equal parts
            assert basis_numbers / world_size <= gathered <= basis_numbers / world_size + matrices * rank


# ---------------------------------------------------------------------- memory


def memory(settings: dict[str, Any], extra: dict[str, Any]) -> dict[str, int]:
    """Bytes of the tensors that exist on this rank after a step, and of what was planned."""
    import torch.distributed as dist

    world_size = dist.get_world_size()
    engine = jobs.start(jobs.tiny_llama(hidden=64), jobs.config(jobs.galore(**settings), micro=1, **extra))
    jobs.train(engine, jobs.batches(2, world_size))
    zero, optimizer = engine.optimizer, engine.basic_optimizer
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "launch"))
    from ds_galore.monitoring.accounting import element_sizes

    def size(tensors: Any) -> int:
        return sum(each.numel() * each.element_size() for each in tensors)

    pairs = zip(zero.fp16_partitioned_groups_flat, zero.fp32_partitioned_groups_flat, strict=True)
    shared = all(weights.data_ptr() == masters.data_ptr() for weights, masters in pairs)
    offloaded = [flat.grad for flat in zero.fp32_partitioned_groups_flat if flat.grad is not None]
    found = {
        "weights": size(zero.fp16_partitioned_groups_flat),
        "master_weights": 0 if shared else size(zero.fp32_partitioned_groups_flat),
        "gradients": size([zero.grad_partitions_flat_buffer, *offloaded]),
        **optimizer.state_bytes(),
    }
    plan = plan_memory(
        optimizer.parameter_plans(),
        world_size=world_size,
        rank=dist.get_rank(),
        **element_sizes(engine),
        kept=optimizer.kept,
        sharded=optimizer.shards_projectors(world_size),
    )
    for kind, value in found.items():
        planned = getattr(plan, kind)
        assert abs(planned - value) <= 0.01 * value, f"{kind}: planned {planned}, found {value}"
    return found


BF16 = {"enabled": True}


@pytest.mark.parametrize(
    "extra",
    [
        {"bf16": BF16},
        {"bf16": BF16, "data_types": {"grad_accum_dtype": "fp32"}},
        {"bf16": {**BF16, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
        {"bf16": BF16, "zero": {"offload_optimizer": {"device": "cpu"}}},
    ],
)
def test_the_memory_table_agrees_in_16_bits_too(pool, extra):
    pool.run(2, memory, {"rank": 16}, extra)


@pytest.mark.parametrize("extra", [{}])
@pytest.mark.parametrize(
    "settings", [{}, {"proj_type": "left"}, {"projector_storage": "replicated", "projector_dtype": "bf16"}]
)
def test_the_memory_table_agrees_with_the_tensors_that_exist(pool, settings, extra):
    pool.run(3, memory, {"rank": 16, **settings}, extra)


def test_optimizer_memory_falls_with_the_number_of_ranks_when_projectors_are_sharded(pool):
    settings = {"rank": 16, "projector_storage": "sharded"}
    found = {}
    for world_size in (1, 2, 4):
        ranks = pool.run(world_size, memory, settings, {})
        found[world_size] = max(each["moments"] + each["projectors"] for each in ranks)
    assert found[2] == pytest.approx(found[1] / 2, rel=0.02)
    assert found[4] == pytest.approx(found[1] / 4, rel=0.03)


# ---------------------------------------------------------------------- resuming


def resumed(directory: str, settings: dict[str, Any]) -> None:
    """A run that is saved and loaded into a new engine goes on bit for bit as the run that was not."""
    import torch.distributed as dist

    def engine() -> Any:
        schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 1e-2}}
        made = jobs.config(jobs.galore(**settings), micro=12 // dist.get_world_size(), scheduler=schedule)
        return jobs.start(jobs.tiny_llama(), made)

    data = jobs.batches(16, GLOBAL_BATCH)
    whole = engine()
    jobs.train(whole, data[:9])
    whole.save_checkpoint(directory, tag="nine")
    rest = jobs.train(whole, data[9:])
    again = engine()
    again.load_checkpoint(directory, tag="nine")
    assert jobs.train(again, data[9:]) == rest
    compare(snapshot(whole), snapshot(again))


@pytest.mark.parametrize(
    "settings",
    [
        {"update_proj_gap": 6},
        {"update_proj_gap": 6, "proj_type": "std", "projector_storage": "sharded", "projector_dtype": "bf16"},
        {"update_proj_gap": 6, **FAITHFUL},
    ],
)
def test_a_resumed_run_goes_on_bit_for_bit(pool, tmp_path, settings):
    pool.run(2, resumed, str(tmp_path), settings)


def full_state() -> None:
    """DeepSpeed's functions for the full state of a parameter."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    from ds_galore import BindingError

    model = jobs.tiny_llama()
    engine = jobs.start(model, jobs.config(jobs.galore(), micro=1))
    jobs.train(engine, jobs.batches(1, 2))
    parameter = model.model.layers[0].self_attn.q_proj.weight
    assert safe_get_full_fp32_param(parameter).shape == parameter.ds_shape
    with pytest.raises(BindingError, match="'exp_avg' of a whole parameter does not exist"):
        safe_get_full_optimizer_state(parameter, "exp_avg")


def test_full_optimizer_states_are_refused_on_all_ranks_without_a_hang(pool):
    pool.run(2, full_state, timeout=60)


def state_keys() -> Any:
    """The structure of the state on this rank: keys and kinds, no sizes."""
    import io

    import torch.distributed as dist

    model = jobs.tiny_llama()
    engine = jobs.start(model, jobs.config(jobs.galore(projector_storage="sharded"), micro=1))
    jobs.train(engine, jobs.batches(2, dist.get_world_size()))
    engine.optimizer._set_fp32_optimizer_param_groups()
    state = engine.basic_optimizer.state_dict()
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    compare(torch.load(buffer, weights_only=True)["state"], {**state["state"]})

    def kinds(value: Any) -> Any:
        return {key: kinds(each) for key, each in value.items()} if isinstance(value, dict) else type(value).__name__

    return kinds(state["state"])


def test_state_is_tensors_and_numbers_with_the_same_keys_on_all_ranks(pool):
    first, *others = pool.run(4, state_keys)
    assert all(each == first for each in others)
    leaves = {leaf for flat in first.values() for state in flat.values() for leaf in state.values()}
    assert leaves == {"Tensor", "int"}
