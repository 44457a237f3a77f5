"""What a checkpoint is made of, what a run has saved, and how two checkpoints differ.

Imports NumPy and its neighbours; neither torch nor DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ds_galore.checkpoint.errors import DamageError, FormatError, NotCommittedError
from ds_galore.checkpoint.files import DTYPES
from ds_galore.checkpoint.manifest import MANIFEST
from ds_galore.checkpoint.reader import CheckpointReader
from ds_galore.checkpoint.store import CheckpointStore
from ds_galore.errors import DataError
from ds_galore.tools.native import TorchSource
from ds_galore.tools.source import Source, as_array, looks_like_one, open_source
from ds_galore.tools.verify import native_problems

__all__ = ["difference", "inspect_checkpoint", "list_checkpoints"]


# ---------------------------------------------------------------------- inspect


@dataclass(frozen=True)
class Shard:
    """A range of a tensor: who holds it, and as what."""

    rank: int
    start: int
    stop: int
    codec: str
    bytes: int


def inspect_checkpoint(directory: Path) -> dict[str, Any]:
    """Everything about a checkpoint but the data.

    Returns
    -------
    dict
        ``tensors``: by name ``dtype``, ``shape``, ``bytes`` of its elements, ``stored`` bytes and ``shards``; and
        ``format``, ``step``, ``world_size``, ``kind``, ``base``, ``totals`` by kind of tensor.
    """
    if not (directory / MANIFEST).exists():
        return _native(open_source(directory))
    reader = CheckpointReader(directory)
    tensors: dict[str, Any] = {}
    for name, tensor in sorted(reader.tensors.items()):
        shards = []
        for start, stop, rank, index in tensor.shards:
            file = reader.file(rank)
            shards.append(Shard(rank, start, stop, file.entries[index].codec, file.stored(index)))
        numel = int(np.prod(tensor.shape, dtype=np.int64))
        tensors[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "bytes": numel * DTYPES[tensor.dtype],
            "stored": sum(shard.bytes for shard in shards),
            "shards": [asdict(shard) for shard in shards],
        }
    manifest = reader.manifest
    newest = sum(rank[-1].bytes for rank in manifest.files)
    older = sum(record.bytes for rank in manifest.files for record in rank[:-1])
    return {
        "directory": str(directory),
        "format": "ds_galore",
        "step": manifest.metadata.get("step"),
        "created": manifest.created,
        "world_size": manifest.world_size,
        "zero_stage": manifest.metadata.get("zero_stage"),
        "optimizer": manifest.metadata.get("optimizer"),
        "kind": manifest.kind,
        "base": manifest.base,
        "files": [[asdict(record) for record in rank] for rank in manifest.files],
        "own_bytes": newest + sum(record.bytes for record in manifest.states.values()),
        "base_bytes": older,
        "totals": _totals(tensors),
        "tensors": tensors,
    }


def _native(source: Source) -> dict[str, Any]:
    assert isinstance(source, TorchSource)
    tensors = {}
    for name, info in [*source.weights.items(), *source.optimizer.items()]:
        tensors[name] = {
            "dtype": info.dtype,
            "shape": list(info.shape),
            "bytes": info.nbytes,
            "stored": info.nbytes,
            "shards": [],
        }
    size = sum(path.stat().st_size for path in source.directory.rglob("*.pt"))
    return {
        "directory": str(source.directory),
        "format": "deepspeed" if source.stage is not None else "deepspeed universal",
        "step": source.step,
        "world_size": source.world_size,
        "zero_stage": source.stage,
        "kind": "full",
        "base": None,
        "own_bytes": size,
        "base_bytes": 0,
        "totals": _totals(tensors),
        "tensors": tensors,
    }


def _totals(tensors: dict[str, Any]) -> dict[str, dict[str, int]]:
    """By the last part of tensors' names."""
    totals: dict[str, dict[str, int]] = {}
    for name, each in tensors.items():
        kind = "other" if "_states.pt" in name else name.rpartition("/")[2] if "/" in name else "weights"
        total = totals.setdefault(kind, {"tensors": 0, "bytes": 0, "stored": 0})
        total["tensors"] += 1
        total["bytes"] += each["bytes"]
        total["stored"] += each["stored"]
    return totals


# ---------------------------------------------------------------------- list


def list_checkpoints(directory: Path, *, verify: bool = False) -> list[dict[str, Any]]:
    """The checkpoints in a save directory, the oldest first.

    Parameters
    ----------
    directory
        With tags in it, or, as the Trainer and accelerate make them, with save directories in it.
    verify
        Whether to read and decode everything; else only structure and sizes are checked.

    Returns
    -------
    list of dict
        ``tag``, ``step``, ``created``, ``kind``, ``base``, ``ranks``, ``bytes`` on the disk, ``shared`` of them with
        other checkpoints in the list, ``latest``, and ``state``: ``"intact"``, ``"unfinished"``, or what is wrong.

    Raises
    ------
    DataError
        If the directory does not exist or holds no checkpoint.
    """
    if not directory.is_dir():
        raise DataError(f"{directory}: is {'a file' if directory.exists() else 'no such directory'}")
    places = list(_places(directory))
    if not places:
        raise DataError(f"{directory}: holds no checkpoints")
    links: dict[int, int] = {}
    sizes: dict[Path, dict[int, int]] = {}
    for place in places:
        inodes = {}
        for path in place.iterdir():
            if path.is_file():
                found = path.stat()
                inodes[found.st_ino] = found.st_size
        sizes[place] = inodes
        for inode in inodes:
            links[inode] = links.get(inode, 0) + 1
    rows = []
    for place in places:
        row: dict[str, Any] = {
            "tag": str(place.relative_to(directory)),
            "step": None,
            "created": None,
            "kind": "native",
            "base": None,
            "ranks": None,
            "bytes": sum(sizes[place].values()),
            "shared": sum(size for inode, size in sizes[place].items() if links[inode] > 1),
            "latest": CheckpointStore(place.parent).latest() == place.name,
            "state": "intact",
        }
        row.update(_state_of(place, verify))
        rows.append(row)
    return sorted(rows, key=lambda row: (row["step"] is None, row["step"] or 0, row["created"] or "", row["tag"]))


def _places(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.iterdir()):
        if not path.is_dir() or path.name.startswith("."):
            continue
        if looks_like_one(path):
            yield path
            continue
        yield from (each for each in sorted(path.iterdir()) if each.is_dir() and looks_like_one(each))


def _state_of(place: Path, verify: bool) -> dict[str, Any]:
    try:
        if not (place / MANIFEST).exists():
            source = open_source(place)
            assert isinstance(source, TorchSource)
            problems = native_problems(place) if verify else []
            kind = "native" if source.stage is not None else "universal"
            state = problems[0] if problems else "intact"
            return {"step": source.step, "ranks": source.world_size, "kind": kind, "state": state}
        reader = CheckpointReader(place)
        manifest = reader.manifest
        problems = reader.verify(quick=not verify)
        return {
            "step": manifest.metadata.get("step"),
            "created": manifest.created,
            "kind": manifest.kind,
            "base": manifest.base,
            "ranks": manifest.world_size,
            "state": problems[0] if problems else "intact",
        }
    except NotCommittedError:
        return {"state": "unfinished", "kind": None}
    except DataError:
        return {"state": "unfinished", "kind": None}
    except (DamageError, FormatError) as error:
        return {"state": str(error), "kind": None}


# ---------------------------------------------------------------------- diff


def difference(first: Path, second: Path) -> dict[str, Any]:
    """Which tensors of two checkpoints differ, and by how much.

    Returns
    -------
    dict
        ``only_first`` and ``only_second``: names; ``equal``: how many tensors are equal bit for bit; ``changed``: by
        name ``elements`` that differ, ``largest`` absolute difference and its ``relative`` size, the norm of the
        difference over that of the first; for integers and where shapes differ, what can be said.
    """
    a, b = open_source(first), open_source(second)
    tensors: list[dict[str, tuple[Any, Any]]] = []
    for source in (a, b):
        found = {f"{name}": (info, source.weight) for name, info in source.weights.items()}
        found.update({name: (info, source.state) for name, info in source.optimizer.items()})
        tensors.append(found)
    left, right = tensors
    changed: dict[str, Any] = {}
    equal = 0
    for name in (each for each in left if each in right):
        (info, read), (other, read_other) = left[name], right[name]
        if (info.dtype, info.shape) != (other.dtype, other.shape):
            changed[name] = {
                "first": f"{info.dtype} {list(info.shape)}",
                "second": f"{other.dtype} {list(other.shape)}",
            }
            continue
        x, y = read(name), read_other(name)
        if np.array_equal(x, y):
            equal += 1
            continue
        each: dict[str, Any] = {"elements": int(np.count_nonzero(x != y)), "of": info.numel}
        if info.dtype in ("F64", "F32", "F16", "BF16"):
            with np.errstate(all="ignore"):
                old, new = (as_array(bits, info).astype(np.float64) for bits in (x, y))
                each["largest"] = float(np.abs(new - old).max())
                norm = float(np.linalg.norm(old))
                each["relative"] = float(np.linalg.norm(new - old)) / norm if norm else None
        changed[name] = each
    return {
        "first": str(first),
        "second": str(second),
        "steps": [a.step, b.step],
        "only_first": [name for name in left if name not in right],
        "only_second": [name for name in right if name not in left],
        "equal": equal,
        "changed": changed,
    }
