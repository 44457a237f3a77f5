"""Checkpoints of earlier versions of the format.

``version1.tar.xz`` was written by commit 3f25a73 ("Performance: what merging a difference costs as models grow"), two
ranks under ZeRO-3 with GaLoreAdamW: step 6 of a run, a difference to step 4; ``weights.npz`` has the master weights
that the engine had then.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

import ds_galore
from ds_galore.checkpoint.digests import PREFIX
from ds_galore.checkpoint.store import CheckpointStore
from tests import jobs
from tests.checkpoint.engines import BATCH, make

ARCHIVE = Path(__file__).with_name("version1.tar.xz")
GALORE = jobs.galore(rank=4, update_proj_gap=5)
TAG = "global_step6"


@pytest.fixture
def old(tmp_path):
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "version1"


def weights(directory: Path) -> dict[str, np.ndarray]:
    with np.load(directory / "weights.npz") as found:
        return dict(found)


def digests(directory: Path) -> list[str]:
    manifest = json.loads((directory / "manifest.json").read_text())
    return [each["digest"] for rank in manifest["files"] for each in rank]


def test_it_is_version_1_with_blake2b_and_verifies_and_merges(old):
    store = CheckpointStore(old)
    assert json.loads((old / TAG / "manifest.json").read_text())["version"] == 1
    assert not any(digest.startswith(PREFIX) for digest in digests(old / TAG))
    assert store.open(TAG).verify() == []
    merged = ds_galore.load_state_dict(old)
    expected = weights(old)
    assert merged.keys() >= expected.keys()
    for name, array in expected.items():
        assert np.array_equal(np.asarray(merged[name]), array), name


def test_damage_to_it_is_found(old):
    file = CheckpointStore(old).open(TAG).file(1)
    index, part = next((n, part) for n, entry in enumerate(file.entries) for part in entry.parts if part.endswith("r"))
    begin, _, _ = file._parts[f"{index}/{part}"]
    file.path.chmod(0o644)
    with file.path.open("r+b") as opened:  # of a plane that is not compressed: digests alone tell
        opened.seek(begin)
        byte = opened.read(1)[0]
        opened.seek(begin)
        opened.write(bytes([byte ^ 1]))
    whole, decoded = CheckpointStore(old).open(TAG).verify()
    assert "its digest differs" in whole
    assert file.entries[index].name in decoded
    assert "the decoded data are not those that were written" in decoded


def go_on(directory: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    engine = make(GALORE, "differential", hidden=16)
    path, _ = engine.load_checkpoint(directory)
    assert path is not None
    loaded = jobs.whole_weights(engine)
    jobs.train(engine, jobs.batches(2, BATCH, seed=3))
    engine.save_checkpoint(directory)
    engine.checkpoint_engine.wait()
    trained = jobs.whole_weights(engine)
    again = make(GALORE, "differential", hidden=16)
    again.load_checkpoint(directory)
    assert all(torch.equal(each, trained[name]) for name, each in jobs.whole_weights(again).items())
    return loaded, trained


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_goes_on_from_it_and_saves_what_this_version_writes(pool, old, world_size):
    loaded, trained = pool.run(world_size, go_on, str(old))[0]
    for name, array in weights(old).items():
        assert np.array_equal(loaded[name].numpy(), array), name
    store = CheckpointStore(old)
    assert store.latest() == "global_step8"
    assert json.loads((old / "global_step8" / "manifest.json").read_text())["version"] == 2
    assert digests(old / "global_step8")[-1].startswith(PREFIX)
    assert store.open("global_step8").verify() == []
    shutil.rmtree(old / TAG)
    merged = ds_galore.load_state_dict(old)
    assert all(np.array_equal(np.asarray(merged[name]), each.numpy()) for name, each in trained.items())


def save_again(directory: str) -> None:
    engine = make(GALORE, "differential", hidden=16)
    engine.load_checkpoint(directory)
    engine.save_checkpoint(directory, tag="again")
    engine.checkpoint_engine.wait()


def test_what_has_not_changed_since_it_is_not_written_again(pool, old):
    pool.run(2, save_again, str(old))
    before, after = (CheckpointStore(old).open(tag) for tag in (TAG, "again"))
    assert after.manifest.kind == "differential"
    assert [digest.startswith(PREFIX) for digest in digests(old / "again")] == [False, True, False, True]
    assert after.verify() == []
    for rank in range(2):
        held, now = before.held_by(rank), after.held_by(rank)
        same = {key for key, entry in held.items() if entry.codec == "same"}
        assert same
        assert {key for key, entry in now.items() if entry.codec == "same"} == same
        assert all(entry.digest.startswith(PREFIX) for entry in now.values())
