"""The store: exact, self-contained, safe against crashes and damage."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from ds_galore.checkpoint.errors import DamageError, FormatError, NotCommittedError
from ds_galore.checkpoint.manifest import MANIFEST, Manifest
from ds_galore.checkpoint.pieces import assemble
from ds_galore.checkpoint.reader import CheckpointReader
from ds_galore.checkpoint.store import CheckpointStore
from ds_galore.errors import ConfigError, DsGaloreError
from tests.checkpoint.runs import RANKS, check, save, shards

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run")


def test_full_differential_and_incremental_checkpoints_are_read_back_bit_for_bit(store):
    save(store, 1)
    save(store, 3, base="step-1")
    save(store, 5, base="step-3", kind="incremental")
    manifest = save(store, 8, base="step-5", kind="incremental")  # across a change of the basis
    assert [len(files) for files in manifest.files] == [4, 4]
    assert store.latest() == "step-8"
    assert store.tags() == ["step-1", "step-3", "step-5", "step-8"]
    for tag in store.tags():
        reader = store.open(tag)
        check(reader)
        assert reader.verify() == []


def test_differences_are_smaller_and_unchanged_tensors_cost_nothing(store):
    full = save(store, 1)
    diff = save(store, 3, base="step-1")
    entries = store.open("step-3")._file(0, 0).entries
    codecs = {entry.name: entry.codec for entry in entries}
    assert codecs["layer.weight/fp32"] == "lowrank"
    assert codecs["frozen.weight/fp32"] == codecs["layer.weight/projector"] == "same"
    assert all(diff.files[rank][-1].bytes < full.files[rank][-1].bytes for rank in range(RANKS))


def test_any_safetensors_reader_can_list_a_data_file(store):
    manifest = save(store, 1)
    with safe_open(store.path("step-1") / manifest.files[0][0].name, framework="numpy") as file:
        assert file.metadata()["format"] == "ds_galore.checkpoint"
        assert all(file.get_tensor(key).dtype == np.uint8 for key in file.keys())  # noqa: SIM118


@pytest.mark.parametrize("gone", ["step-1", "step-3", "step-5"])
def test_removing_any_checkpoint_breaks_no_other(store, gone):
    save(store, 1)
    save(store, 3, base="step-1")
    save(store, 5, base="step-1")
    inodes = {(store.path(tag) / "rank-00000-of-00002.full.safetensors").stat().st_ino for tag in store.tags()}
    assert len(inodes) == 1
    shutil.rmtree(store.path(gone))
    for tag in store.tags():
        check(store.open(tag))
        assert store.open(tag).verify() == []


def test_a_copy_of_one_directory_is_a_checkpoint(store, tmp_path):
    save(store, 1)
    save(store, 3, base="step-1")
    shutil.copytree(store.path("step-3"), tmp_path / "elsewhere" / "copy")
    shutil.rmtree(store.directory)
    check(CheckpointReader(tmp_path / "elsewhere" / "copy"))


def test_where_links_are_impossible_files_are_copied(store, monkeypatch):
    save(store, 1)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    save(store, 3, base="step-1")
    monkeypatch.undo()
    shutil.rmtree(store.path("step-1"))
    check(store.open("step-3"))


def test_a_tag_can_be_saved_again_also_when_it_is_its_own_base(store):
    save(store, 1, tag="best")
    save(store, 2, tag="other", base="best")
    save(store, 3, tag="best", base="best")
    check(store.open("best"))
    assert store.open("best").manifest.metadata["step"] == 3
    save(store, 5, tag="best")
    save(store, 6, tag="best")
    check(store.open("best"))
    check(store.open("other"))
    assert len(list(store.path("best").glob("*.safetensors"))) == RANKS, "files of earlier saves are gone"
    assert not any(path.stat().st_mode & 0o222 for path in store.path("best").glob("*.safetensors"))


def test_retention_removes_what_a_crash_left_unfinished_and_nothing_else(store):
    save(store, 1)
    store.write("step-2", 0, RANKS, shards(2, 0, None))
    (store.directory / "notes").mkdir()
    (store.directory / "native").mkdir()
    (store.directory / "native" / "mp_rank_00_model_states.pt").write_bytes(b"PK")
    save(store, 3)
    assert store.retain(keep_last=5) == []
    assert sorted(path.name for path in store.directory.iterdir()) == ["latest", "native", "notes", "step-1", "step-3"]


def test_an_unfinished_checkpoint_is_none(store):
    save(store, 1)
    store.write("step-2", 0, RANKS, shards(2, 0, None))
    with pytest.raises(NotCommittedError, match="holds no finished checkpoint"):
        store.open("step-2")
    assert store.tags() == ["step-1"]
    with pytest.raises(NotCommittedError):
        store.open("nothing")
    assert CheckpointStore(store.directory / "nowhere").tags() == []
    assert CheckpointStore(store.directory / "nowhere").newest_intact() is None


def test_a_missing_rank_is_not_committed(store):
    files = [store.write("step-1", rank, RANKS, shards(1, rank, None)) for rank in range(RANKS)]
    (store.path("step-1") / files[1][0].name).unlink()
    with pytest.raises(DamageError, match="the checkpoint is not committed"):
        store.commit("step-1", files)
    assert store.latest() is None


def test_ranks_that_do_not_cover_a_tensor_are_told(store):
    files = [store.write("step-1", 0, RANKS, shards(1, 0, None))]
    store.commit("step-1", files)
    with pytest.raises(DamageError, match=r"elements from \d+ on are missing of"):
        store.open("step-1").tensors  # noqa: B018


@pytest.mark.parametrize("tag", ["", ".", "..", "a/b", "/tmp/x", ".hidden", "latest", "a\0b"])
def test_tags_that_are_no_names_are_refused(store, tag):
    with pytest.raises(ConfigError, match="a tag is a plain directory name"):
        store.path(tag)


# ---------------------------------------------------------------------- thinning out


def test_retention_keeps_the_newest_and_what_it_is_told_to(store):
    for step in range(1, 7):
        save(store, step, base="step-1" if step in (2, 3) else None)
    store.set_latest("step-2")  # somebody rolled back
    removed = store.retain(keep_last=2, keep=lambda manifest: manifest.metadata["step"] == 3)
    assert removed == ["step-1", "step-4"]
    assert store.tags() == ["step-2", "step-3", "step-5", "step-6"]
    for tag in store.tags():
        check(store.open(tag))
    with pytest.raises(ConfigError, match="'latest' names this checkpoint"):
        store.remove("step-2")
    with pytest.raises(ConfigError, match="at least one"):
        store.retain(keep_last=0)


def test_what_another_node_removes_meanwhile_is_no_error(store):
    for step in range(1, 7):
        save(store, step)
    other = CheckpointStore(store.directory)
    seen: list[int] = []

    def keep(manifest: Manifest) -> bool:
        seen.append(manifest.metadata["step"])
        if len(seen) == 1:  # all of the other's work falls between the list of tags and the first decision
            other.retain(keep_last=2)
        return False

    assert store.retain(keep_last=2, keep=keep) == ["step-1"]
    assert seen == [1]
    assert store.tags() == ["step-5", "step-6"]


# ---------------------------------------------------------------------- crashes

POINTS = ["encoded", "linked", "written", "committing", "committed", "latest", "swept", "removing", "renamed"]


def crash(directory: Path, point: str, count: int) -> list[str]:
    """Run until it kills itself there; the tags that it acknowledged."""
    command = [sys.executable, "-m", "tests.checkpoint.runs", str(directory), "8", point, str(count)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (0, -9), done.stderr
    return [line.split()[1] for line in done.stdout.splitlines()]


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("count", [1, 4, 7, 12])
def test_a_killed_run_leaves_exactly_an_acknowledged_checkpoint(tmp_path, point, count):
    acknowledged = crash(tmp_path, point, count)
    store = CheckpointStore(tmp_path)
    newest, latest = store.newest_intact(), store.latest()
    last = acknowledged[-1] if acknowledged else None
    following = f"step-{len(acknowledged) + 1}"  # it may have been committed before the acknowledgement
    assert newest in (last, following) or (newest is None and last is None)
    assert latest in (last, following) or (latest is None and last is None)
    for tag in store.tags():
        check(store.open(tag))
        assert store.open(tag).verify() == [], "what is committed is whole"
    if latest is not None:
        check(store.open(latest))
    # The next run goes on in the same directory, saves the same tag again and cleans up.
    step = len(acknowledged) + 1
    save(store, step, base=None)
    store.retain(keep_last=1)
    check(store.open(f"step-{step}"))
    left = [path.name for path in tmp_path.rglob("*") if path.name.startswith((".writing", ".removed"))]
    assert not left


@pytest.mark.crashtest
@pytest.mark.parametrize("seed", range(200))
def test_a_run_killed_at_a_random_moment_leaves_an_acknowledged_checkpoint(tmp_path, seed):
    """The long part, by ``make crashtest``: SIGKILL from outside, at any moment."""
    generator = random.Random(seed)
    command = [sys.executable, "-m", "tests.checkpoint.runs", str(tmp_path), "40", "never", "1"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seen = [process.stdout.readline().split()[1] for _ in range(generator.randrange(1, 12))]
        time.sleep(generator.random() * 0.05)
        process.kill()
        seen += [line.split()[1] for line in process.stdout.read().splitlines() if line.startswith("ack step-")]
    store = CheckpointStore(tmp_path)
    following = f"step-{int(seen[-1].removeprefix('step-')) + 1}"
    assert store.newest_intact() in (seen[-1], following)
    assert store.latest() in (seen[-1], following)
    for tag in store.tags():
        check(store.open(tag))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", path], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {mounted.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", path], check=True)


def test_a_full_disk_fails_the_save_and_leaves_the_last_checkpoint(small_disk):
    store = CheckpointStore(small_disk)
    saved: list[str] = []

    def save_until_full() -> None:
        for step in range(1, 100):
            save(store, step)
            saved.append(f"step-{step}")

    with pytest.raises(OSError, match="No space left on device"):
        save_until_full()
    assert len(saved) > 2
    assert (store.latest(), store.newest_intact()) == (saved[-1], saved[-1])
    assert not list(store.directory.rglob(".writing-*"))
    store.retain(keep_last=1)  # which makes room again
    save(store, 50)
    check(store.open("step-50"))


def test_a_read_only_file_system_fails_the_save_and_leaves_the_last_checkpoint(small_disk):
    store = CheckpointStore(small_disk)
    save(store, 1)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(OSError, match="Read-only file system"):
        save(store, 2, base="step-1")
    with pytest.raises(OSError, match="Read-only file system"):
        save(store, 1)
    check(store.open("step-1"))
    assert store.newest_intact() == "step-1"


def test_a_short_write_is_noticed_before_the_commit(store):
    """A file that holds less than was written to it, as a broken disk would have it."""
    save(store, 1)
    files = [store.write("step-2", rank, RANKS, shards(2, rank, None)) for rank in range(RANKS)]
    path = store.path("step-2") / files[0][0].name
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.truncate(files[0][0].bytes - 1)
    with pytest.raises(DamageError, match="the checkpoint is not committed"):
        store.commit("step-2", files)
    assert store.latest() == "step-1"


# ---------------------------------------------------------------------- damage


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << (bit % 8)
    path.chmod(0o644)
    path.write_bytes(data)


def test_every_flipped_bit_is_told_or_harmless(store, tmp_path):
    """In any file, anywhere: verify() names it, and reading gives the right data or an error, never wrong data."""
    save(store, 1)
    save(store, 7, base="step-1")
    whole = store.path("step-7")
    generator = random.Random(5)
    files = sorted(path.name for path in whole.iterdir())
    harmless = 0
    for number in range(1000):
        broken = tmp_path / "broken" / str(number)
        shutil.copytree(whole, broken)
        victim = broken / generator.choice(files)
        flip(victim, generator.randrange(victim.stat().st_size * 8))
        try:
            reader = CheckpointReader(broken)
            problems = reader.verify()
            if victim.name != MANIFEST:
                assert problems, f"{victim}: not told"
            try:
                check(reader)
                harmless += 1
            except DsGaloreError:
                pass
        except DsGaloreError:
            pass
        shutil.rmtree(broken)
    assert harmless < 250  # flips in padding or in what is not read do no harm, but most are noticed at once


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 100, -1])
def test_a_truncated_data_file_is_told(store, keep):
    manifest = save(store, 1)
    path = store.path("step-1") / manifest.files[1][0].name
    data = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(data[:keep])
    with pytest.raises(DamageError, match="bytes, and had"):
        store.open("step-1")


def edit(directory: Path, changes: dict[str, object]) -> None:
    """Rewrite a manifest with a digest that fits."""
    from ds_galore.checkpoint.manifest import _digest

    path = directory / MANIFEST
    values = {**json.loads(path.read_text()), **changes}
    values.pop("digest")
    path.write_text(json.dumps({**values, "digest": _digest(values)}))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"version": 3}, FormatError, "has format version 3; this program reads versions 1 and 2"),
        ({"format": "zip"}, FormatError, "is no manifest of ds_galore"),
        ({"kind": "partial"}, DamageError, "impossible kind"),
        ({"world_size": 3}, DamageError, "number of ranks"),
        (
            {"files": [[{"name": "../../etc/passwd", "bytes": 1, "digest": "", "header": ""}]]},
            DamageError,
            "is no plain file name",
        ),
        (
            {"files": [[{"name": "/etc/passwd", "bytes": 1, "digest": "", "header": ""}]]},
            DamageError,
            "is no plain file name",
        ),
        ({"files": [[{"name": ".x", "bytes": 1, "digest": "", "header": ""}]]}, DamageError, "is no plain file name"),
        ({"files": [[{"name": "x", "bytes": -1, "digest": "", "header": ""}]]}, DamageError, "impossible size"),
        (
            {"files": [[{"name": "x", "bytes": 10**15, "digest": "", "header": ""}]], "world_size": 1},
            DamageError,
            "cannot be read",
        ),
        ({"files": 3}, DamageError, "is damaged"),
        ({"tag": 3}, DamageError, "wrong type"),
        ({"metadata": []}, DamageError, "wrong type"),
    ],
)
def test_manifests_that_lie_are_refused(store, changes, error, message):
    save(store, 1)
    edit(store.path("step-1"), changes)
    with pytest.raises(error, match=message):
        store.open("step-1")
    assert store.newest_intact() is None


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_manifests_that_are_none_are_refused(store, text):
    save(store, 1)
    (store.path("step-1") / MANIFEST).write_bytes(text)
    with pytest.raises((DamageError, FormatError)):
        Manifest.read(store.path("step-1"))


def test_the_newest_intact_checkpoint_is_found_behind_damaged_ones(store):
    for step in (1, 2, 3):
        save(store, step)
    path = next(store.path("step-3").glob("*.safetensors"))
    flip(path, path.stat().st_size * 8 - 5)
    (store.path("step-2") / MANIFEST).write_text("{}")
    assert store.newest_intact() == "step-1"
    assert store.open("step-3").verify(quick=True) == []
    problems = store.open("step-3").verify()
    assert any(path.name in problem for problem in problems)


def test_nothing_of_torch_or_deepspeed_is_needed():
    code = "import sys; sys.modules['torch'] = sys.modules['deepspeed'] = None; import ds_galore.checkpoint.store"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_elements_are_decoded_to_where_they_are_wanted_or_to_an_array_of_their_own(store):
    save(store, 1)
    reader = store.open("step-1")
    whole = reader.bits("layer.weight/fp32")
    for start, stop in ((0, whole.size), (5, whole.size - 7)):
        out = np.zeros(stop - start, np.uint32)
        assert reader.bits("layer.weight/fp32", start, stop, out) is out
        assert np.array_equal(out, whole[start:stop])
        for other in (np.zeros(stop - start, np.float32), np.zeros(stop - start + 1, np.uint32), out[::-1]):
            before = other.copy()
            assert np.array_equal(reader.bits("layer.weight/fp32", start, stop, other), whole[start:stop])
            assert np.array_equal(other, before)


@pytest.mark.parametrize("shape", [[-1], [2, -3], [-2, -2]])
def test_a_tensor_of_negative_size_is_damage(shape):
    with pytest.raises(DamageError, match=r"describes a tensor of shape \["):
        assemble({"dtype": "float32", "shape": shape, "pieces": []}, lambda *_: (np.zeros(0, np.uint32), "F32"))
