"""Nodes with storage of their own: ranks on two nodes, each of which saves to a directory of its own."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ds_galore.checkpoint.errors import DamageError
from ds_galore.checkpoint.manifest import MANIFEST
from ds_galore.checkpoint.reader import CheckpointReader
from ds_galore.checkpoint.store import CheckpointStore
from ds_galore.errors import DataError
from ds_galore.zero.group import RankGroup
from tests import jobs
from tests.checkpoint.engines import ADAMW, BATCH, assert_same, contents, logical, make, save

GALORE = jobs.galore(update_proj_gap=3)
ROOT = Path(__file__).parents[2]
#: By rank, its node and its number there.
THREE = [(0, 0), (0, 1), (1, 0)]
FOUR = [(0, 0), (1, 0), (1, 1), (2, 0)]
STEPS = 14


def on_nodes(places: list[tuple[int, int]], root: str, optimizer: Any = GALORE, **settings: Any) -> tuple[Any, Path]:
    """The engine of a rank that its launcher told where it is, and the directory of its node."""
    node, number = places[dist.get_rank()]
    before = os.environ["LOCAL_RANK"]
    os.environ["LOCAL_RANK"] = str(number)
    try:
        return make(optimizer, node_local=True, **settings), Path(root) / f"disk-{node}"
    finally:
        os.environ["LOCAL_RANK"] = before


def write(root: str, optimizer: Any, extra: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """Save after 4, 6 and 8 steps, on two nodes and into one directory; later losses, and the state."""
    engine, disk = on_nodes(THREE, root, optimizer, **extra)
    together = make(optimizer, **extra)
    data = jobs.batches(STEPS, BATCH)
    at = 0
    for until in (4, 6, 8):
        for each in (engine, together):
            jobs.train(each, data[at:until])
        save(engine, disk, f"step-{until}", consumed=until)
        save(together, Path(root) / "shared", f"step-{until}", consumed=until)
        at = until
    state = logical(engine)
    return jobs.train(engine, data[8:]), state


def go_on(
    root: str, places: list[tuple[int, int]], optimizer: Any, extra: dict[str, Any], tag: str | None = None
) -> tuple[list[float], dict[str, Any], str]:
    """Load the latest, save once more, and train on."""
    engine, disk = on_nodes(places, root, optimizer, **extra)
    path, client = engine.load_checkpoint(str(disk), tag=tag)
    assert client["consumed"] == engine.global_steps
    state = logical(engine)
    save(engine, disk, "next", consumed=engine.global_steps)
    return jobs.train(engine, jobs.batches(STEPS, BATCH)[engine.global_steps :]), state, path


def merged(root: Path, tag: str, into: str = "merged") -> Path:
    """The nodes' directories of a checkpoint, copied together."""
    target = root / into / tag
    for disk in root.glob("disk-*"):
        if (disk / tag).exists():
            shutil.copytree(disk / tag, target, dirs_exist_ok=True)
    return target


def rot(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.unlink()
    path.write_bytes(data)


def data_files(directory: Path) -> set[int]:
    """The ranks whose files are there."""
    return {int(path.name[5:10]) for path in directory.glob("rank-*.safetensors")}


@pytest.mark.parametrize(
    ("optimizer", "extra"),
    [(GALORE, {}), (ADAMW, {"zero": {"stage": 2}, "bf16": {"enabled": True}}), (ADAMW, {"zero": {"stage": 0}})],
)
def test_each_node_saves_its_own_and_a_load_brings_the_rest(pool, tmp_path, optimizer, extra):
    losses, _ = zip(*(written := pool.run(3, write, str(tmp_path), optimizer, extra)), strict=True)
    for tag, kind in (("step-4", "full"), ("step-6", "differential"), ("step-8", "differential")):
        assert data_files(tmp_path / "disk-0" / tag) == {0, 1}
        assert data_files(tmp_path / "disk-1" / tag) == {2}
        assert not [*tmp_path.glob(f"disk-*/{tag}/.*")]
        texts = {(tmp_path / disk / tag / MANIFEST).read_bytes() for disk in ("disk-0", "disk-1")}
        assert len(texts) == 1
        reader = CheckpointReader(merged(tmp_path, tag))
        assert (reader.manifest.kind, reader.verify()) == (kind, [])
        assert contents(reader.directory) == contents(tmp_path / "shared" / tag)
    with pytest.raises(DamageError, match="each node saved its own files: copy the nodes' directories together"):
        CheckpointReader(tmp_path / "disk-1" / "step-8")

    # The second node died when it had written its part, and before it could put the manifest there.
    (tmp_path / "disk-1" / "step-8" / MANIFEST).unlink()
    (tmp_path / "disk-1" / "latest").write_text("step-6")
    found = pool.run(3, go_on, str(tmp_path), THREE, optimizer, extra)
    for (after, state, path), (_, wanted) in zip(found, written, strict=True):
        assert Path(path).parent.name == "step-8"
        assert after == losses[0]
        assert_same(state, wanted)
    for disk in ("disk-0", "disk-1"):
        store = CheckpointStore(tmp_path / disk)
        assert (store.latest(), store.open("step-8").verify()) == ("next", [])
    assert data_files(tmp_path / "disk-1" / "next") == {2}
    reader = CheckpointReader(merged(tmp_path, "next"))
    assert (reader.manifest.kind, reader.manifest.base, reader.verify()) == ("differential", "step-4", [])

    # A file has rotted where it was written, and is whole on the node that it was brought to.
    rot(next((tmp_path / "disk-0" / "step-8").glob("rank-00001-*.safetensors")))
    for after, _, _ in pool.run(3, go_on, str(tmp_path), THREE, optimizer, extra, "step-8"):
        assert after == losses[0]

    # One rank more, and on three nodes, of which one is new and empty.
    for after, _, _ in pool.run(4, go_on, str(tmp_path), FOUR, optimizer, extra, "next"):
        assert max(abs(a - b) for a, b in zip(after, losses[0], strict=True)) < (2e-3 if "bf16" in extra else 1e-5)
    assert data_files(tmp_path / "disk-2" / "step-8") == set()
    # Each node had all files of "next", which has been saved again.
    assert CheckpointReader(merged(tmp_path, "next", "again")).verify() == []


def test_nodes_that_see_one_directory_after_all_do_each_other_no_harm(pool, tmp_path):
    same = [(0, 0), (0, 1), (0, 0)]
    tags = pool.run(3, many, str(tmp_path), same)[0]
    store = CheckpointStore(tmp_path / "disk-0")
    assert store.tags() == tags
    assert [store.open(tag).verify() for tag in tags] == [[]] * len(tags)
    assert pool.run(3, load, str(tmp_path), {}, same) == [f"loaded {tags[-1]}"] * 3


def many(root: str, places: list[tuple[int, int]]) -> list[str]:
    """Save five times, once to a tag that is there; which tags are left."""
    engine, disk = on_nodes(places, root, checkpoint={"keep_last": 2})
    for tag in ("a", "b", "b", "c", "d"):
        jobs.train(engine, jobs.batches(1, BATCH))
        save(engine, disk, tag)
    dist.barrier()
    return CheckpointStore(disk).tags()


def load(root: str, checkpoint: dict[str, Any], places: list[tuple[int, int]] = THREE) -> str:
    engine, disk = on_nodes(places, root, checkpoint=checkpoint)
    try:
        path, _ = engine.load_checkpoint(str(disk))
    except Exception as error:  # noqa: BLE001 - what matters is that all ranks come here
        return f"{type(error).__name__}: {error}"
    jobs.train(engine, jobs.batches(1, BATCH))
    return f"loaded {Path(path).parent.name}"


def newest(root: str) -> str | None:
    """What `--resume auto` of launch/train.py takes."""
    sys.path.insert(0, str(ROOT / "launch"))
    from resuming import find_checkpoint

    engine, disk = on_nodes(THREE, root)
    found: str | None = find_checkpoint(RankGroup(dist.group.WORLD), disk, "auto", engine.checkpoint_engine.nodes)
    return found


def prepare(root: str) -> None:
    engine, disk = on_nodes(THREE, root)
    for tag in ("a", "b"):
        jobs.train(engine, jobs.batches(2, BATCH))
        save(engine, disk, tag)


@pytest.mark.parametrize("damage", ["gone", "rotten", "manifest"])
def test_what_is_on_no_node_as_it_was_written_is_told_on_all_ranks(pool, tmp_path, damage):
    pool.run(3, prepare, str(tmp_path))
    directory = tmp_path / "disk-1" / "b"
    path = next(directory.glob("*.diff.safetensors")) if damage != "manifest" else directory / MANIFEST
    if damage == "gone":
        path.unlink()
    else:
        rot(path)
    told = pool.run(3, load, str(tmp_path), {})
    assert all(path.name in each for each in told), told
    assert any(each.startswith("DamageError") for each in told)
    assert all(f"disk-{node}/a" in text for text, (node, _) in zip(told, THREE, strict=True) if "PeerError" not in text)
    assert pool.run(3, newest, str(tmp_path)) == ["a"] * 3
    assert pool.run(3, load, str(tmp_path), {"on_damage": "previous"}) == ["loaded a"] * 3


def test_the_other_scripts_do_not_start_anew_where_they_cannot_search(pool, tmp_path, monkeypatch):
    pool.run(3, prepare, str(tmp_path))
    shutil.copytree(tmp_path / "disk-0", tmp_path / "run" / "checkpoint_0")
    monkeypatch.syspath_prepend(str(ROOT / "launch"))
    from resuming import _newest_complete

    with pytest.raises(DataError, match=r"checkpoint_0: was saved with checkpoint\.use_node_local_storage"):
        _newest_complete(tmp_path / "run", [])


def failing(root: str, point: str, rank: int) -> tuple[str, list[str], list[str]]:
    """A save that fails on one rank; then all is well again, and old checkpoints are removed everywhere."""
    engine, disk = on_nodes(THREE, root, checkpoint={"keep_last": 2})
    jobs.train(engine, jobs.batches(1, BATCH))
    save(engine, disk, "good")

    def hook(passed: str) -> None:
        if passed == point and dist.get_rank() == rank:
            raise OSError(28, "No space left on device")

    engine.checkpoint_engine.hook = hook
    told = "nothing"
    try:
        save(engine, disk, "bad")
    except Exception as error:  # noqa: BLE001 - reported
        told = f"{type(error).__name__}: {error}"
    store = CheckpointStore(disk)
    before = store.tags()
    dist.barrier()
    engine.checkpoint_engine.hook = lambda point: None
    for tag in ("bad", "third", "fourth", "fifth"):
        save(engine, disk, tag)
    dist.barrier()
    assert store.latest() == "fifth"
    return told, before, store.tags()


@pytest.mark.parametrize(
    ("point", "rank", "committed"),
    [("writing", 1, []), ("writing", 2, []), ("committing", 0, []), ("committing", 2, [0])],
)
def test_a_rank_or_a_node_that_fails_is_told_on_all_and_the_next_save_succeeds(pool, tmp_path, point, rank, committed):
    found = pool.run(3, failing, str(tmp_path), point, rank)
    for (told, before, after), (node, _) in zip(found, THREE, strict=True):
        assert "No space left on device" in told
        assert before == (["good", "bad"] if node in committed else ["good"])
        assert after == found[0][2]
        assert {"fourth", "fifth"} <= set(after)
        assert len(after) <= 3  # two, and the one from which the next will differ


def scattered(places: list[tuple[int, int]]) -> str:
    try:
        on_nodes(places, "")
    except Exception as error:  # noqa: BLE001 - reported
        return f"{type(error).__name__}: {error}"
    return "made"


@pytest.mark.parametrize("places", [[(0, 0), (1, 0), (0, 2)], [(0, -1), (0, -1), (0, -1)]])
def test_the_ranks_of_a_node_follow_each_other(pool, places):
    wanted = "ConfigError: checkpoint.use_node_local_storage: the ranks of a node have to follow each other"
    numbers = str([number for _, number in places])
    assert all(each.startswith(wanted) and numbers in each for each in pool.run(3, scattered, places))
