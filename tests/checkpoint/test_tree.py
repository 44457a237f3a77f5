"""Nested state as JSON and tensors: whatever DeepSpeed saves comes back, and nothing is ever executed."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_galore.checkpoint.errors import DamageError
from ds_galore.checkpoint.tree import flatten, restore
from ds_galore.errors import ConfigError
from tests import jobs


def through_json(state: Any) -> Any:
    value, tensors = flatten(state, root="state")
    return restore(json.loads(json.dumps(value, allow_nan=False)), tensors.__getitem__)


def same(a: Any, b: Any, path: str = "state") -> None:
    """Equal in value, type and order, bit for bit."""
    assert type(a) is type(b), f"{path}: {type(a)} and {type(b)}"
    if isinstance(a, Tensor | np.ndarray):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        if a.size if isinstance(a, np.ndarray) else a.numel():
            left, right = (torch.as_tensor(each).contiguous().reshape(-1).view(torch.uint8) for each in (a, b))
            assert torch.equal(left, right), path
    elif isinstance(a, dict):
        assert list(a) == list(b), path
        for key in a:
            same(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{path}[{index}]")
    elif isinstance(a, float):
        assert a == b or (a != a and b != b), path
    elif hasattr(a, "__dict__") and not isinstance(a, int | str | torch.device):
        same(vars(a), vars(b), path)
    else:
        assert a == b, path


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text()) | st.booleans()


@given(
    st.recursive(
        SCALARS,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(KEYS, inner, max_size=3)
            | st.dictionaries(st.text(), inner, max_size=3).map(OrderedDict)
            | st.sets(st.integers(), max_size=3)
        ),
        max_leaves=20,
    )
)
@settings(max_examples=300, deadline=None)
def test_any_nest_of_plain_values_comes_back(state):
    same(through_json(state), state)


def test_tensors_arrays_and_random_number_states_come_back():
    numpy_state = np.random.RandomState(3).get_state()
    state = {
        "a": torch.arange(3),
        "bf16": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "array": np.arange(4, dtype=np.uint8),
        "flags": np.array([True, False]),
        "scalar": np.float32(1.25),
        "rng": {"python": random.Random(1).getstate(), "torch": torch.get_rng_state(), "numpy": tuple(numpy_state[1:])},
        "$": [1, torch.Size([2, 3]), torch.float16, torch.device("cpu"), bytearray(b"x"), frozenset({1, 2})],
        ("tuple", 1): {1: "one"},
        "a/b": torch.ones(1),
        "nested": {"a/b": 1},
    }
    same(through_json(state), state)
    collision = {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}}
    same(through_json(collision), collision)


class Strange:
    """Something that a user might put into a client state."""


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            Strange(),
            r"state/outer\[1\]/inner: an object of class tests\.checkpoint\.test_tree\.Strange cannot be saved",
        ),
        (np.array([None]), r"state/outer\[1\]/inner: arrays of object cannot be saved"),
        (lambda: 1, "an object of class builtins.function cannot be saved"),
        (Path("x"), "PosixPath cannot be saved"),
        (1j, "builtins.complex cannot be saved"),
    ],
)
def test_what_cannot_be_saved_is_refused_with_its_path(value, message):
    with pytest.raises(ConfigError, match=message):
        flatten({"outer": [0, {"inner": value}]}, root="state")


@pytest.mark.parametrize(
    "form",
    [
        ["object", "os.system", {}],
        ["object", "builtins.eval", {}],
        ["object", "deepspeed.runtime.fp16.loss_scaler.LossScaler", {"__class__": 1}],
        ["enum", "enum.Enum", 1],
        ["enum", "deepspeed.runtime.zero.config.ZeroStageEnum", 99],
        ["nothing"],
        [],
        3,
        ["tensor"],
        ["tensor", "absent"],
        ["dict", [1]],
        ["dict", [[1], 2]],
        ["bytes", "!"],
        ["dtype", "float33"],
        ["device", "nowhere"],
        ["size", "a"],
        ["scalar", "object", 1],
    ],
)
def test_forms_that_are_never_written_are_refused_and_build_nothing(form):
    with pytest.raises(DamageError, match="impossible form"):
        restore({"outer": [{"$": form}]}, {}.__getitem__)


def native_files(directory: str, optimizer: dict[str, Any], stage: int, extra: dict[str, Any]) -> list[str]:
    """Save a checkpoint with DeepSpeed's own engine, take every file through JSON, and compare."""
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    if "fp16" in extra:
        get_accelerator().is_fp16_supported = lambda: True
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}
    settings = jobs.config(optimizer, micro=2, scheduler=schedule, zero={"stage": stage}, **extra)
    engine = jobs.start(jobs.tiny_llama(), settings)
    jobs.train(engine, jobs.batches(2, 2 * dist.get_world_size()))
    engine.save_checkpoint(directory, tag="native", client_state={"python": random.Random(1).getstate(), 3: {1.5}})
    dist.barrier()
    files = sorted(Path(directory, "native").glob("*.pt"))
    for path in files:
        state = torch.load(path, map_location="cpu", weights_only=False)  # DeepSpeed's own, written just now
        same(through_json(state), state, path.name)
    return [path.name for path in files]


@pytest.mark.parametrize(
    ("kind", "stage", "extra"),
    [
        ("AdamW", 1, {}),
        ("AdamW", 2, {"bf16": {"enabled": True}}),
        ("AdamW", 3, {"fp16": {"enabled": True, "initial_scale_power": 4}}),
        ("GaLoreAdamW", 3, {}),
    ],
)
def test_everything_that_deepspeed_saves_comes_back(pool, tmp_path, kind, stage, extra):
    adamw = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    optimizer = jobs.galore() if kind == "GaLoreAdamW" else adamw
    files = pool.run(2, native_files, str(tmp_path), optimizer, stage, extra)[0]
    assert len(files) >= 3
    if "fp16" in extra:
        pool.close()  # the workers' accelerator says that it supports fp16 now
