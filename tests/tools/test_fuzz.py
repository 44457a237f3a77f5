"""Readers on mutated manifests, tables, states, data and pickles: only documented errors, no surprise of any kind.

Mutations are signed again where a digest would otherwise end the matter, so that they reach the code behind it. While a
mutant is read, an audit hook watches that no file outside is opened and nothing is executed, and the most memory that
the process has had may not grow by much. ``make fuzz`` runs many more, at random.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import resource
import shutil
import struct
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds_galore.checkpoint.files import FileRecord
from ds_galore.checkpoint.manifest import MANIFEST
from ds_galore.errors import DsGaloreError
from ds_galore.tools.inspect import difference, inspect_checkpoint, list_checkpoints
from ds_galore.tools.merge import merge_checkpoint
from ds_galore.tools.reshard import reshard_checkpoint
from ds_galore.tools.source import open_source, resolve
from ds_galore.tools.verify import rollback, verify_checkpoint
from tests import jobs
from tests.tools.test_merge import both

EXAMPLES = int(os.environ.get("DS_GALORE_FUZZ", "0"))
FUZZ = settings(
    max_examples=EXAMPLES or 10,
    derandomize=not EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
#: Bytes that reading a checkpoint of 0.3 MB may touch at most, whatever it claims.
ALLOCATION = 200_000_000

# ---------------------------------------------------------------------- what is watched

_watched: list[tuple[str, str]] | None = None
_EXECUTES = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "exec", "ctypes.dlopen")


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _watched is None:
        return
    if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
        if os.sep not in os.fsdecode(arguments[0]):
            return  # shutil.rmtree opens names relative to a directory's descriptor, which the event does not tell
        _watched.append((event, os.path.realpath(os.fsdecode(arguments[0]))))
    elif event == "exec" and str(getattr(arguments[0], "co_filename", "")).startswith(_OWN):
        return  # an installed module is imported
    elif event in _EXECUTES:
        _watched.append((event, repr(arguments)[:200]))


sys.addaudithook(_hook)
_OWN = tuple({os.path.realpath(path) for path in (*sysconfig.get_paths().values(), sys.prefix, "/proc", "/sys")})


@contextmanager
def watched(directory: Path) -> Iterator[None]:
    """Fails if files outside are opened, anything is executed, or much memory is taken."""
    global _watched
    allowed = (os.path.realpath(directory) + os.sep, *_OWN)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _watched = []
    try:
        yield
    finally:
        events, _watched = _watched, None
        grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    executed = [event for event in events if event[0] != "open"]
    assert not executed
    outside = [path for _, path in events if not path.startswith(allowed) and path != os.path.realpath(directory)]
    assert not outside, outside
    assert grown < ALLOCATION, f"{grown:,} bytes"


def read_everything(directory: Path, out: Path) -> None:
    """All readers on the newest checkpoint; each may refuse."""
    tag = directory / "b"
    readers: list[Callable[[], Any]] = [
        lambda: _all_tensors(tag),
        lambda: verify_checkpoint(tag),
        lambda: verify_checkpoint(tag, quick=True),
        lambda: inspect_checkpoint(tag),
        lambda: list_checkpoints(directory),
        lambda: difference(directory / "a", tag) if (directory / "a").is_dir() else None,
        lambda: resolve(directory),
        lambda: merge_checkpoint(tag, out / "merged", optimizer=True),
        lambda: reshard_checkpoint(tag, out / "ours", world_size=3),
        lambda: reshard_checkpoint(tag, out / "native", world_size=1, format="deepspeed"),
        lambda: rollback(directory, "b"),
    ]
    for reader in readers:
        try:
            reader()
        except DsGaloreError:
            continue
    left = [path.name for path in out.iterdir() if path.name.startswith(".")]
    assert not left, left


def _all_tensors(tag: Path) -> None:
    source = open_source(tag)
    for name in source.weights:
        source.weight(name)
    for name in source.optimizer:
        source.state(name)


@pytest.fixture(scope="module")
def originals(pool, tmp_path_factory):
    """A full and a differential checkpoint of ours, and one of DeepSpeed's: with GaLore, and with AdamW."""
    directory = tmp_path_factory.mktemp("originals")
    pool.run(2, both, str(directory / "galore"), jobs.galore(update_proj_gap=5), {"special": True})
    plain = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    pool.run(2, both, str(directory / "adamw"), plain, {"zero": {"stage": 2}})
    for kind in ("galore", "adamw"):  # whatever is imported late is imported now
        for form in ("ours", "native"):
            with tempfile.TemporaryDirectory() as out:
                read_everything(directory / kind / form, Path(out))
    return directory


@contextmanager
def a_copy(original: Path) -> Iterator[tuple[Path, Path]]:
    """A copy of a save directory that may be spoilt, and a directory to write to beside it."""
    with tempfile.TemporaryDirectory() as work:
        shutil.copytree(original, Path(work) / "run")
        (Path(work) / "out").mkdir()
        yield Path(work) / "run", Path(work) / "out"


# ---------------------------------------------------------------------- mutations of JSON

VALUES = st.sampled_from(
    [
        *(None, True, False, 0, 1, -1, 2, 3, 7, 255, 2**20, 2**31, 2**40, 2**53, 2**63, 2**64, -(2**63), 0.5, 1e308),
        *("", "a", "..", "../../etc/passwd", "/etc/passwd", "a/b", "\0", "latest", "F32", "U8", "planes", "lowrank"),
        *("same", "int8", "store", "full", "differential", "tensor", "torch.float32", "float32", "uint8", "é"),
        *([], {}, [[]], [0], [-1, 5], [2**40, 2**40], {"$": []}, {"$": ["tensor", "x"]}, {"$": ["eval", "1"]}),
        *({"$": ["object", "os.system", {}]}, {"$": ["enum", "builtins.eval", "1"]}, {"a": 1}),
    ]
)
MUTATIONS = st.lists(
    st.tuples(st.integers(0, 10**6), st.sampled_from(["set", "set", "set", "delete", "copy"]), VALUES),
    min_size=1,
    max_size=3,
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield value, key
            yield from places(each)
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield value, index
            yield from places(each)


def mutate(value: Any, mutations: list[tuple[int, str, Any]]) -> Any:
    """A copy of a JSON value with some places changed."""
    value = copy.deepcopy(value)
    for number, how, new in mutations:
        found = list(places(value))
        if not found:
            break
        container, key = found[number % len(found)]
        if how == "delete":
            del container[key]
        elif how == "copy":
            other, other_key = found[(number * 7 + 3) % len(found)]
            container[key] = copy.deepcopy(other[other_key])
        else:
            container[key] = copy.deepcopy(new)
    return value


def write_manifest(directory: Path, values: dict[str, Any]) -> None:
    """Write and sign."""
    values = {key: each for key, each in values.items() if key != "digest"}
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    values["digest"] = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    (directory / MANIFEST).write_text(json.dumps(values))


def replace(directory: Path, name: str, data: bytes, header: bytes | None = None) -> None:
    """Put other bytes in a file's place, and into the manifest's records of it."""
    path = directory / name
    path.unlink()
    path.write_bytes(data)
    values = json.loads((directory / MANIFEST).read_text())
    record = FileRecord.of(name, data)
    for each in [*(r for rank in values["files"] for r in rank), *values["states"].values()]:
        if each["name"] == name:
            each["bytes"], each["digest"] = record.bytes, record.digest
            if header is not None:
                each["header"] = hashlib.blake2b(header, digest_size=16).hexdigest()
    write_manifest(directory, values)


def data_files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("rank-*.safetensors"))


KINDS = st.sampled_from(["galore", "adamw"])


@FUZZ
@given(kind=KINDS, mutations=MUTATIONS)
def test_manifests(originals, kind, mutations):
    with a_copy(originals / kind / "ours") as (directory, out), watched(out.parent):
        values = json.loads((directory / "b" / MANIFEST).read_text())
        mutated = mutate(values, mutations)
        write_manifest(directory / "b", mutated)
        read_everything(directory, out)


@FUZZ
@given(kind=KINDS, which=st.integers(0, 9), outer=st.booleans(), mutations=MUTATIONS)
def test_tables_of_data_files(originals, kind, which, outer, mutations):
    with a_copy(originals / kind / "ours") as (directory, out), watched(out.parent):
        names = data_files(directory / "b")
        name = names[which % len(names)]
        data = (directory / "b" / name).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        if outer:
            header = mutate(header, mutations)
        else:
            header["__metadata__"]["shards"] = json.dumps(
                mutate(json.loads(header["__metadata__"]["shards"]), mutations)
            )
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        head = struct.pack("<Q", len(text)) + text
        replace(directory / "b", name, head + data[8 + length :], head)
        read_everything(directory, out)


@FUZZ
@given(kind=KINDS, which=st.integers(0, 9), mutations=MUTATIONS)
def test_state_files(originals, kind, which, mutations):
    with a_copy(originals / kind / "ours") as (directory, out), watched(out.parent):
        names = sorted(path.name for path in (directory / "b").glob("*_states*.json"))
        name = names[which % len(names)]
        values = json.loads((directory / "b" / name).read_text())
        replace(directory / "b", name, json.dumps(mutate(values, mutations)).encode())
        read_everything(directory, out)


# ---------------------------------------------------------------------- mutations of bytes

BYTES = st.lists(
    st.tuples(st.floats(0, 1), st.sampled_from(["flip", "set", "cut", "drop", "double"]), st.integers(0, 255)),
    min_size=1,
    max_size=4,
)


def spoil(data: bytes, mutations: list[tuple[float, str, int]]) -> bytes:
    """Bytes with some changed, left out or doubled."""
    for where, how, value in mutations:
        if not data:
            break
        place = min(int(where * len(data)), len(data) - 1)
        if how == "flip":
            data = data[:place] + bytes([data[place] ^ (1 << value % 8)]) + data[place + 1 :]
        elif how == "set":
            data = data[:place] + bytes([value]) + data[place + 1 :]
        elif how == "cut":
            data = data[:place]
        elif how == "drop":
            data = data[:place] + data[place + 1 + value :]
        else:
            data = data[: place + value] + data[place:]
    return data


@FUZZ
@given(kind=KINDS, which=st.integers(0, 99), signed=st.booleans(), mutations=BYTES)
def test_bytes_of_any_file(originals, kind, which, signed, mutations):
    with a_copy(originals / kind / "ours") as (directory, out), watched(out.parent):
        files = sorted(path for path in directory.rglob("*") if path.is_file())
        path = files[which % len(files)]
        data = spoil(path.read_bytes(), mutations)
        if signed and path.parent.name == "b" and path.name.startswith("rank-"):
            (length,) = struct.unpack("<Q", data[:8].ljust(8, b"\0"))
            replace(directory / "b", path.name, data, data[: 8 + min(length, 10**6)])
        else:
            path.unlink()
            path.write_bytes(data)
        read_everything(directory, out)


@FUZZ
@given(kind=KINDS, which=st.integers(0, 9), mutations=BYTES, early=st.booleans())
def test_pickles_of_native_files(originals, kind, which, mutations, early):
    """The pickle is changed inside an archive that is otherwise right."""
    with a_copy(originals / kind / "native") as (directory, out), watched(out.parent):
        files = sorted((directory / "b").glob("*_states.pt"))
        path = files[which % len(files)]
        with zipfile.ZipFile(path) as archive:
            members = {each: archive.read(each) for each in archive.namelist()}
        name = next(each for each in members if each.endswith("data.pkl"))
        if early:
            mutations = [(where / 8, how, value) for where, how, value in mutations]
        members[name] = spoil(members[name], mutations)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            for each, data in members.items():
                archive.writestr(each, data)
        read_everything(directory, out)


@FUZZ
@given(kind=KINDS, which=st.integers(0, 9), mutations=BYTES)
def test_bytes_of_native_files(originals, kind, which, mutations):
    with a_copy(originals / kind / "native") as (directory, out), watched(out.parent):
        files = sorted((directory / "b").glob("*_states.pt"))
        path = files[which % len(files)]
        path.write_bytes(spoil(path.read_bytes(), mutations))
        read_everything(directory, out)
