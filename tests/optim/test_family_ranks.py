"""Every optimizer, format and side of the family on one to four ranks: the same losses, states and failures."""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_galore.errors import DsGaloreError, PeerError
from ds_galore.optim.walks import SEGMENT
from tests import jobs
from tests.optim.test_engine import compare, snapshot

BATCH, TOKENS = 12, 67
#: The last step has the first one's batch.
STEPS = 13


class Mixed(nn.Module):
    """Matrices that three and four ranks cut inside rows, or hold nothing of, and an embedding to be quantised.

    The embedding has 4154 elements, which the ranks cut inside blocks of 256; of ``wide`` a row is longer than a part;
    ``side`` and ``small`` are matrices too small to be quantised, and of ``small`` some ranks hold nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(TOKENS, 62)
        self.first = nn.Linear(62, 19)
        self.second = nn.Linear(19, 45)
        self.wide = nn.Linear(45, 3, bias=False)
        self.side = nn.Linear(45, 7)
        self.small = nn.Linear(3, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(self.embed(tokens)))))
        own = self.small(torch.tanh(self.wide(hidden))).squeeze(1) - (tokens % 3 - 1).to(hidden.dtype)
        return nn.functional.cross_entropy(self.side(hidden), tokens % 7) + own.square().mean()


def optimizer(kind: str, **params: Any) -> dict[str, Any]:
    common = {"lr": 0.02, "rank": 2, "scale": 1.0, "update_proj_gap": 4, "weight_decay": 0.05}
    return {"type": kind, "params": {**common, "target_modules": ["first", "second", "wide"], **params}}


def start(settings: dict[str, Any], **extra: Any) -> Any:
    import torch.distributed as dist

    return jobs.start(Mixed(), jobs.config(settings, micro=BATCH // dist.get_world_size(), **extra))


def train(engine: Any, steps: int) -> list[float]:
    """By step, the mean loss over the ranks."""
    import torch.distributed as dist

    rank, micro = dist.get_rank(), BATCH // dist.get_world_size()
    losses = []
    for step in range(steps):
        tokens = torch.randint(TOKENS, (BATCH,), generator=torch.Generator().manual_seed(step % 3))
        loss = engine(tokens[rank * micro : (rank + 1) * micro])
        engine.backward(loss)
        engine.step()
        total = loss.detach().float().clone()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
    return losses


def whole_state(engine: Any) -> dict[str, Any]:
    """The logical tensors of the state, from all ranks, and the numbers; what several ranks have is the same bits."""
    import torch.distributed as dist

    parts: list[Any] = []
    numbers: dict[str, Any] = {}
    low_rank = engine.basic_optimizer
    for tensor, states in low_rank.state.items():
        described = low_rank.state_tensors(tensor, 0)
        assert described.keys() == states.keys()
        for name, state in states.items():
            tensors = {key for key, value in state.items() if isinstance(value, Tensor)}
            assert tensors == described[name].keys()
            for key, each in described[name].items():
                assert (tuple(state[key].shape), state[key].dtype) == (each.shape, each.dtype)
                part = state[key].reshape(-1)[: each.numel].clone()
                parts.append((f"{name}/{key}", each.logical, each.start, part))
            numbers.update({f"{name}/{key}": state[key] for key in state.keys() - tensors})
    assert numbers
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (parts, numbers))
    found: dict[str, Any] = {}
    seen: dict[str, Tensor] = {}
    for theirs, their_numbers in everyone:
        assert their_numbers == numbers
        for key, logical, begin, part in theirs:
            whole = found.setdefault(key, torch.zeros(math.prod(logical), dtype=part.dtype))
            had = seen.setdefault(key, torch.zeros(math.prod(logical), dtype=torch.bool))
            where = slice(begin, begin + part.numel())
            assert torch.equal(whole[where][had[where]], part[had[where]]), f"{key} differs between ranks"
            whole[where], had[where] = part, True
    assert all(had.all() for had in seen.values())
    return {**found, **numbers}


def resume(engine: Any, settings: dict[str, Any], **extra: Any) -> Any:
    """A new engine with the weights and the state of another one."""
    again = start(settings, **extra)
    for name in ("fp32_partitioned_groups_flat", "fp16_partitioned_groups_flat"):
        for ours, theirs in zip(getattr(again.optimizer, name), getattr(engine.optimizer, name), strict=True):
            ours.data.copy_(theirs.data)
    for engine_ in (engine, again):
        engine_.optimizer._clear_fp32_optimizer_param_groups()
        engine_.optimizer._set_fp32_optimizer_param_groups()
    again.basic_optimizer.load_state_dict(copy.deepcopy(engine.basic_optimizer.state_dict()))
    return again


LEFT, STD = {"proj_type": "left"}, {"proj_type": "std"}
REPLICATED, SHARDED = {"projector_storage": "replicated"}, {"projector_storage": "sharded"}
BITS = {"moment_dtype": "8bit"}
CASES: dict[str, dict[str, Any]] = {
    "galore": optimizer("GaLoreAdamW"),
    "galore left svd": optimizer("GaLoreAdamW", refresh="svd", adaptive_gap=True, stable_overlap=0.2, **LEFT),
    "galore bf16": optimizer("GaLoreAdamW", moment_dtype="bf16", projector_dtype="bf16", **STD, **SHARDED),
    "galore 8bit": optimizer("GaLoreAdamW8bit", projector_dtype="int8", **SHARDED),
    "galore 8bit left": optimizer("GaLoreAdamW8bit", projector_dtype="int4", **LEFT),
    "galore 8bit std": optimizer("GaLoreAdamW8bit", projector_dtype="int4", **STD, **REPLICATED),
    "galore 8bit plain": optimizer(
        "GaLoreAdamW", unprojected_moment_dtype="8bit", projector_dtype="int8", **REPLICATED
    ),
    "galore int4": optimizer("GaLoreAdamW", projector_dtype="int4", projector_rounding="stochastic", rank=2, **SHARDED),
    "galore random": optimizer("GaLoreAdamW", refresh="random", **STD, moment_dtype="bf16"),
    "galore energy": optimizer("GaLoreAdamW", rank={"energy": 0.8, "max": 2}, first_basis="random", **STD, **BITS),
    "galore budget": optimizer("GaLoreAdamW", refresh_budget=1, first_basis="random", update_proj_gap=2, **SHARDED),
    "adafactor": optimizer("GaLoreAdafactor", **STD),
    "adafactor momentum": optimizer("GaLoreAdafactor", beta1=0.9, scale_parameter=True, lr=0.1),
    "adafactor 8bit": optimizer("GaLoreAdafactor", beta1=0.9, clip_threshold=0.5, **BITS, **STD),
    "apollo": optimizer("APOLLOAdamW", **STD),
    "apollo 8bit": optimizer("APOLLOAdamW", **BITS),
    "apollo mini": optimizer("APOLLOAdamW", scaling="tensor", rank=1, scale=4.0, **LEFT),
    "apollo subspace": optimizer("APOLLOAdamW", refresh="subspace", reproject_moments=True, projector_dtype="bf16"),
    "fira": optimizer("FiraAdamW", **STD),
    "fira 8bit": optimizer("FiraAdamW", projector_dtype="int8", **BITS, **SHARDED),
    "fira left": optimizer("FiraAdamW", moment_dtype="bf16", norm_growth_limit=1.5, **LEFT),
}


def run(names: list[str]) -> dict[str, list[float]]:
    """By case, the losses."""
    found = {}
    for name in names:
        engine = start(CASES[name])
        found[name] = train(engine, STEPS)
        whole_state(engine)  # what ranks share is the same bits
    return found


def test_losses_do_not_depend_on_the_number_of_ranks(pool):
    names = list(CASES)[::2]  # of all, the check with given gradients is the sharper one
    expected = pool.run(1, run, names, timeout=400)[0]
    for name, losses in expected.items():
        assert losses[-1] < 0.9 * losses[0], f"{name}: the check would not notice anything"
    for world_size in (2, 3, 4):
        everyone = pool.run(world_size, run, names[world_size - 2 :: 3], timeout=400)
        assert all(each == everyone[0] for each in everyone)
        for name, losses in everyone[0].items():
            worst = max(abs(a - b) for a, b in zip(losses, expected[name], strict=True))
            assert worst < 1e-3, f"{name} on {world_size} ranks"


# ---------------------------------------------------------------------- the same gradients


def with_gradients(engine: Any, gradient: Callable[[str, tuple[int, ...], int], Tensor], steps: range) -> None:
    """Step with gradients that are given, whole, by name, shape and step: each rank takes its part."""
    low_rank = engine.basic_optimizer
    engine.optimizer._clear_fp32_optimizer_param_groups()
    engine.optimizer._set_fp32_optimizer_param_groups()
    for number in steps:
        for index, group in enumerate(low_rank.param_groups):
            for tensor in group["params"]:
                plan = low_rank.plan_of(tensor, index)
                tensor.grad = torch.zeros_like(tensor)
                for plain in plan.plain:
                    whole = gradient(plain.name, plain.shape, number).reshape(-1)
                    plain.narrow(tensor.grad).copy_(whole[plain.start : plain.start + plain.numel])
                for matrix in (each for batch in plan.batches for each in batch.matrices):
                    local = matrix.layout.local
                    whole = gradient(matrix.name, matrix.layout.shape, number).reshape(-1)
                    matrix.narrow(tensor.grad).copy_(whole[local.start : local.stop])
        low_rank.step()


def noise(name: str, shape: tuple[int, ...], step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + sum(name.encode()))
    sizes = 10.0 ** (4 * torch.rand(shape, generator=generator) - 2)
    return sizes * torch.randn(shape, generator=generator)


PLAIN_EXACT = [
    optimizer("GaLoreAdamW8bit"),
    optimizer("GaLoreAdamW", unprojected_moment_dtype="bf16", moment_dtype="8bit", **STD),
    optimizer("FiraAdamW", unprojected_moment_dtype="8bit"),
    optimizer("APOLLOAdamW", unprojected_moment_dtype="8bit", **LEFT),
]


def exact_states(segment: int) -> list[tuple[dict[str, Any], dict[str, Tensor]]]:
    """States and weights of what is not projected, with gradients that do not depend on the number of ranks."""
    found = []
    for settings in PLAIN_EXACT:
        engine = start(settings)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(SEGMENT, "cpu", segment)
            with_gradients(engine, noise, range(4))
        state = {key: value for key, value in whole_state(engine).items() if key.split(".")[0] in UNPROJECTED}
        found.append(
            (state, {key: value for key, value in weights(engine).items() if key.split(".")[0] in UNPROJECTED})
        )
    return found


UNPROJECTED = ("embed", "side", "small")


def weights(engine: Any) -> dict[str, Tensor]:
    """The whole weights, from the flat tensors of all ranks."""
    import torch.distributed as dist

    parts: list[tuple[str, tuple[int, ...], int, Tensor]] = []
    low_rank = engine.basic_optimizer
    for flat, plan in low_rank._plans.items():
        own = [(each.name, each.shape, each.start, each.narrow(flat)) for each in plan.plain]
        own += [
            (each.name, each.layout.shape, each.layout.local.start, each.narrow(flat))
            for batch in plan.batches
            for each in batch.matrices
        ]
        parts += [(*each, part.detach().clone()) for *each, part in own]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, parts)
    found: dict[str, Tensor] = {}
    for name, shape, begin, part in (each for one in everyone for each in one):
        whole = found.setdefault(name, torch.full((math.prod(shape),), float("nan")))
        whole[begin : begin + part.numel()] = part
    assert not any(torch.isnan(whole).any() for whole in found.values())
    return found


def test_quantised_states_of_embeddings_are_the_same_bits_on_any_number_of_ranks(pool):
    expected = pool.run(1, exact_states, 2**20)[0]
    assert {key for key in expected[0][0] if key.endswith("_absmax")} == {
        "embed.weight/exp_avg_absmax",
        "embed.weight/exp_avg_sq_absmax",
    }
    for world_size in (1, 2, 3, 4):
        for found in pool.run(world_size, exact_states, 256 * world_size):
            compare([list(each) for each in found], [list(each) for each in expected])


def given(names: list[str], *, resumed: bool = False) -> dict[str, dict[str, Any]]:
    """By case, the states and the weights after some steps with given gradients.

    With ``resumed``, a run that goes on from a state dict comes to the same, bit for bit.
    """
    found = {}
    for name in names:
        engine = start(CASES[name])
        with_gradients(engine, noise, range(5))
        again = resume(engine, CASES[name]) if resumed else None
        with_gradients(engine, noise, range(5, 9))
        if again is not None:
            with_gradients(again, noise, range(5, 9))
            compare(snapshot(engine), snapshot(again))
        found[name] = {**whole_state(engine), **weights(engine)}
    return found


def test_of_the_same_gradients_the_same_states_and_weights_on_any_number_of_ranks(pool):
    """Up to the order of sums: what quantisers make of it is that a number in many is rounded to the other side."""
    expected = pool.run(1, given, list(CASES), timeout=400)[0]
    tolerances = {torch.float32: 1e-4, torch.bfloat16: 1e-3, torch.uint8: 2e-2, torch.int8: 2e-2}
    names = list(CASES)
    for world_size, chosen in ((2, names[::4]), (3, names), (4, names[2::4])):
        for name, found in pool.run(world_size, given, chosen, resumed=world_size == 3, timeout=400)[0].items():
            assert found.keys() == expected[name].keys()
            for key, value in found.items():
                other = expected[name][key]
                if not isinstance(value, Tensor):
                    assert value == pytest.approx(other, rel=1e-4), f"{name} on {world_size} ranks: {key}"
                    continue
                assert (value.dtype, value.shape) == (other.dtype, other.shape)
                error = (value.double() - other.double()).norm() / other.double().norm().clamp(min=1e-30)
                assert error < tolerances[value.dtype], f"{name} on {world_size} ranks: {key}"


# ---------------------------------------------------------------------- bad and empty gradients

QUIET = [
    "galore",
    "galore bf16",
    "galore 8bit left",
    "galore random",
    "adafactor 8bit",
    "apollo",
    "apollo mini",
    "fira",
]
VICTIMS = ("second.weight", "embed.weight", "side.bias")


def skipping(names: list[str]) -> None:
    """One rank's gradient of three parameters is not finite; then those of all are zero."""

    def poisoned(name: str, shape: tuple[int, ...], step: int) -> Tensor:
        found = noise(name, shape, step).reshape(-1)
        if name in VICTIMS:
            found[-1] = (float("nan"), float("inf"), -float("inf"))[VICTIMS.index(name)]  # what the last holder has
        return found

    for name in names:
        for before in (0, 3):
            engine = start(CASES[name])
            with_gradients(engine, noise, range(before))
            state, own = (whole_state(engine), weights(engine)) if before else ({}, {})
            with_gradients(engine, poisoned, range(before, before + 1))
            after, moved = whole_state(engine), weights(engine)
            for key, value in after.items():
                if key.split("/")[0] in VICTIMS and before:
                    compare(value, state[key])
                elif key.split("/")[0] in VICTIMS and isinstance(value, Tensor):
                    assert not value.any()
                elif key.endswith("/step"):
                    assert value == before + (key.split("/")[0] not in VICTIMS), f"{name} {before}: {key} is {value}"
            for key, value in moved.items():
                assert torch.isfinite(value).all()
                assert not before or torch.equal(value, own[key]) == (key in VICTIMS), f"{name}: {key}"
            with_gradients(engine, lambda name, shape, step: torch.zeros(shape), range(5))
            ended = whole_state(engine)
            for key, value in ended.items():
                assert not isinstance(value, Tensor) or torch.isfinite(value.float()).all(), f"{name}: {key}"
                if key.split("/")[1].startswith("projector"):
                    compare(value, after[key])  # nothing is known of a better one
            with_gradients(engine, noise, range(2))
            assert all(torch.isfinite(value).all() for value in weights(engine).values())


def test_bad_gradients_skip_their_parameter_everywhere_and_zero_ones_keep_the_basis(pool):
    pool.run(3, skipping, QUIET, timeout=400)


# ---------------------------------------------------------------------- one rank fails

#: Where a rank works alone, a case in which it does, and after how many calls it fails.
PLACES = [
    ("ds_galore.optim.updates:adamw_direction", "galore", 4),
    ("ds_galore.optim.updates:adamw_direction", "galore 8bit left", 0),
    ("ds_galore.optim.updates:channel_scaling", "apollo", 3),
    ("ds_galore.optim.updates:channel_scaling", "fira left", 3),
    ("ds_galore.optim.updates:growth_limiter", "apollo mini", 3),
    ("ds_galore.optim.updates:growth_limiter", "fira 8bit", 3),
    ("ds_galore.optim.updates:adafactor_decay", "adafactor", 7),
    ("ds_galore.optim.updates:adafactor_rate", "adafactor 8bit", 7),
    ("ds_galore.optim.updates:reproject", "galore energy", 0),
    ("ds_galore.optim.updates:Adafactor.carry", "adafactor momentum", 0),
    ("ds_galore.optim.walks:PlainStep.write", "galore 8bit", 1),
    ("ds_galore.optim.walks:PlainStep.outer_blocks", "adafactor 8bit", 0),
    ("ds_galore.optim.walks:ProjectedStep.read", "fira", 5),
    ("ds_galore.optim.walks:ProjectedStep.gradient_squares", "apollo", 2),
    ("ds_galore.optim.formats:Dynamic.encode", "galore 8bit", 2),
    ("ds_galore.optim.formats:Dynamic.decode", "galore 8bit std", 2),
    ("ds_galore.optim.formats:Integers.encode", "galore int4", 1),
    ("ds_galore.optim.formats:Integers.decode", "galore 8bit left", 5),
    ("ds_galore.optim.formats:round_to_bf16", "galore bf16", 5),
    ("ds_galore.optim.matrices:random_basis", "galore random", 3),
    ("ds_galore.optim.matrices:pad_rows", "galore left svd", 4),
    ("ds_galore.optim.matrices:Side.settle", "fira left", 0),
    ("ds_galore.optim.refresh:leading_basis", "galore bf16", 1),
    ("ds_galore.optim.refresh:singular_basis", "galore left svd", 1),
    ("ds_galore.optim.step:FlatStep._begin", "galore energy", 1),
    ("ds_galore.optim.step:FlatStep._apply", "adafactor momentum", 2),
    ("ds_galore.optim.step:_is_not_finite", "apollo subspace", 9),
    ("ds_galore.zero.layout:FlatSlice.project", "fira", 4),
    ("ds_galore.zero.layout:FlatSlice.sketch", "galore left svd", 4),
    ("ds_galore.zero.layout:FlatSlice.add_scaled", "apollo", 2),
    ("ds_galore.zero.layout:FlatSlice.multiply", "adafactor", 5),
    ("ds_galore.zero.layout:FlatSlice.column_squares", "fira left", 2),
]


def broken(places: list[tuple[str, str, int]]) -> list[tuple[str, int]]:
    """How this rank learnt of each failure, of one rank after the other, and in which step."""
    import torch.distributed as dist

    found = []
    for number, (place, case, after) in enumerate(places):
        module, path = place.split(":")
        owner: Any = importlib.import_module(module)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        original, calls = getattr(owner, name), 0

        def failing(*args: Any, original: Any = original, after: int = after, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > after:
                raise MemoryError("the rank ran out of memory")
            return original(*args, **kwargs)

        engine = start(CASES[case])
        if dist.get_rank() == number % 3:
            setattr(owner, name, failing)
        try:
            for step in range(7):
                with_gradients(engine, noise, range(step, step + 1))
        except (MemoryError, PeerError) as error:
            found.append((f"{type(error).__name__}: {error}", step))
            with pytest.raises(DsGaloreError, match="an earlier step failed"):
                engine.basic_optimizer.step()
        else:
            found.append(("nothing", -1))
        finally:
            setattr(owner, name, original)
    return found


def test_an_exception_on_one_rank_ends_all_ranks_in_the_same_step(pool):
    outcomes = pool.run(3, broken, PLACES, timeout=400)
    for number, (place, case, _) in enumerate(PLACES):
        victim = number % 3
        told, steps = zip(*(each[number] for each in outcomes), strict=True)
        assert len(set(steps)) == 1, f"{place} in {case}: {told}"
        peers = f"PeerError: rank {victim} failed, and no rank can go on: MemoryError: the rank ran out of memory"
        own = "MemoryError: the rank ran out of memory"
        if told[victim] == "nothing":  # only the owner of a basis works on it
            assert "basis" in place, f"{place} in {case} is never called"
            continue
        assert told == tuple(own if rank == victim else peers for rank in range(3)), f"{place} in {case}"
