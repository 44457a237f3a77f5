"""Adapters and frozen backbones: what is not trained is written once, and later checkpoints link it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ds_galore.checkpoint.manifest import Manifest
from ds_galore.checkpoint.store import CheckpointStore
from tests import jobs
from tests.checkpoint.engines import ADAMW, BATCH, assert_same, logical, save

ADAPTERS = "lora_"


def make(optimizer: dict[str, Any], stage: int, mode: str, full_every: int) -> Any:
    """An engine on a Llama of which PEFT's adapters are trained."""
    import torch.distributed as dist
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(
        jobs.tiny_llama(hidden=128), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_alpha=8)
    )
    ours = {"checkpoint": {"mode": mode, "full_every": full_every}}
    zero = {} if stage == 3 else {"zero": {"stage": stage}}
    settings = jobs.config(optimizer, micro=BATCH // dist.get_world_size(), ds_galore=ours, **zero)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert 0 < len(trained) == sum(ADAPTERS in name for name, _ in model.named_parameters())
    return jobs.start(model, settings, model_parameters=trained)


def run(directory: str, optimizer: dict[str, Any], stage: int, mode: str, full_every: int) -> list[int]:
    """Save four times, forget the first; then go on from the third. The sizes of adapters and backbone."""
    engine = make(optimizer, stage, mode, full_every)
    data = jobs.batches(6, BATCH)
    states = {}
    for step in range(1, 5):
        jobs.train(engine, data[step - 1 : step])
        save(engine, directory, f"step-{step}")
        states[step] = logical(engine)
    losses = jobs.train(engine, data[4:])
    fresh = make(optimizer, stage, mode, full_every)
    fresh.load_checkpoint(directory, tag="step-4")
    assert_same(states[4], logical(fresh))
    assert jobs.train(fresh, data[4:]) == losses
    save(fresh, directory, "step-6")
    shape = {name: getattr(p, "ds_numel", p.numel()) for name, p in engine.module.named_parameters()}
    return [sum(n for name, n in shape.items() if (ADAPTERS in name) == wanted) for wanted in (True, False)]


def new_bytes(directory: Path, tag: str, *before: str) -> int:
    """Bytes of the data files of a checkpoint that are no links to those of earlier ones."""
    seen = {each.stat().st_ino for other in before for each in (directory / other).glob("rank-*")}
    return sum(each.stat().st_size for each in (directory / tag).glob("rank-*") if each.stat().st_ino not in seen)


GALORE = jobs.galore(rank=2, update_proj_gap=3, target_modules=["lora_"])


@pytest.mark.parametrize(
    ("optimizer", "stage", "mode", "full_every"),
    [
        (ADAMW, 3, "differential", 2),
        (GALORE, 3, "full", 1),
        (ADAMW, 2, "differential", 3),
        (ADAMW, 1, "incremental", 2),
    ],
)
def test_the_backbone_is_written_once(pool, tmp_path, optimizer, stage, mode, full_every):
    adapters, backbone = pool.run(2, run, str(tmp_path), optimizer, stage, mode, full_every)[0]
    assert backbone > 40 * adapters
    store = CheckpointStore(tmp_path)
    tags = ["step-1", "step-2", "step-3", "step-4", "step-6"]
    assert store.tags() == tags
    kinds = [Manifest.read(store.path(tag)).kind for tag in tags]
    assert kinds.count("full") >= 2
    assert new_bytes(tmp_path, "step-1") > 3 * backbone  # fp32, compressed
    for number, tag in enumerate(tags[1:], start=1):
        # Masters and two moments in fp32, and what describes them and the backbone's tensors.
        assert new_bytes(tmp_path, tag, *tags[:number]) < 12 * adapters + 60_000, (tag, kinds)
        frozen = {each.name: each.stat().st_ino for each in store.path(tag).glob("*.frozen*")}
        first = {each.name: each.stat().st_ino for each in store.path("step-1").glob("*.frozen*")}
        assert frozen == first
        assert len(frozen) == (2 if stage == 3 else 1)
    whole = {name: store.open("step-1").bits(name) for name in store.open("step-1").tensors if ADAPTERS not in name}
    for tag in tags[:-1]:
        shutil.rmtree(store.path(tag))
    last = store.open("step-6")
    assert last.verify() == []
    weights = [name for name in whole if name.endswith("/weight")]
    assert weights
    for name in weights:
        assert np.array_equal(last.bits(name), whole[name]), name


def changed(directory: str) -> None:
    """A frozen weight changes between two full checkpoints, as when an adapter is merged."""
    engine = make(ADAMW, 2, "full", 1)
    jobs.train(engine, jobs.batches(1, BATCH))
    save(engine, directory, "before")
    name, parameter = next((n, p) for n, p in engine.module.named_parameters() if not p.requires_grad)
    with torch.no_grad():
        parameter.add_(1.0)
    save(engine, directory, "after")
    save(engine, directory, "again")
    fresh = make(ADAMW, 2, "full", 1)
    fresh.load_checkpoint(directory, tag="again")
    assert torch.equal(dict(fresh.module.named_parameters())[name], parameter)


def test_a_frozen_weight_that_changed_is_written_again(pool, tmp_path):
    pool.run(2, changed, str(tmp_path))
    store = CheckpointStore(tmp_path)
    assert [store.open(tag).verify() for tag in store.tags()] == [[], [], []]
    inodes = [next(store.path(tag).glob("*.frozen*")).stat().st_ino for tag in ("before", "after", "again")]
    assert inodes[0] != inodes[1] == inodes[2]
    assert len(list(store.path("after").glob("rank-*"))) == len(list(store.path("before").glob("rank-*")))


def rotten(directory: str) -> None:
    """A byte of the file of frozen weights changes on the disk, under every name that it has."""
    import torch.distributed as dist

    engine = make(ADAMW, 3, "full", 1)
    jobs.train(engine, jobs.batches(1, BATCH))
    save(engine, directory, "before")
    if dist.get_rank() == 0:
        path = next(Path(directory, "before").glob("rank-00000-*.frozen*"))
        path.chmod(0o644)
        with path.open("r+b") as file:
            file.seek(-50, 2)
            byte = file.read(1)[0]
            file.seek(-50, 2)
            file.write(bytes([byte ^ 1]))
    dist.barrier()
    save(engine, directory, "after")


def test_a_full_checkpoint_does_not_build_on_a_file_that_has_rotted(pool, tmp_path):
    pool.run(2, rotten, str(tmp_path))
    store = CheckpointStore(tmp_path)
    assert store.open("before").verify()
    assert store.open("after").verify() == []
    inodes = [
        [next(store.path(tag).glob(f"rank-0000{rank}-*.frozen*")).stat().st_ino for rank in (0, 1)]
        for tag in store.tags()
    ]
    assert inodes[0][0] != inodes[1][0]
    assert inodes[0][1] == inodes[1][1]


def moved(directory: str) -> dict[str, Any]:
    engine = make(ADAMW, 3, "differential", 2)
    engine.load_checkpoint(directory, tag="two")
    return jobs.whole_weights(engine)


def two(directory: str) -> dict[str, Any]:
    engine = make(ADAMW, 3, "differential", 2)
    for tag in ("one", "two"):
        jobs.train(engine, jobs.batches(1, BATCH))
        save(engine, directory, tag)
    return jobs.whole_weights(engine)


def test_it_loads_on_other_numbers_of_ranks_and_merges(pool, tmp_path):
    from ds_galore import load_state_dict

    expected = pool.run(2, two, str(tmp_path))[0]
    for ranks in (1, 3):
        found = pool.run(ranks, moved, str(tmp_path))[0]
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)
    weights = load_state_dict(tmp_path, tag="two")
    base = [name for name in weights if "base_layer" in name or "mlp" in name]
    assert len(base) == 10
    trained = [name for name in weights if ADAPTERS in name]
    assert set(trained) == set(expected)
