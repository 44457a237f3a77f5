"""Reading a checkpoint: logical tensors, whatever number of ranks wrote them.

Imports NumPy and its neighbours; neither torch nor DeepSpeed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_galore.checkpoint.codecs import Reference, decode
from ds_galore.checkpoint.codecs.base import Bits, CodecError, room
from ds_galore.checkpoint.digests import file_digest, matches
from ds_galore.checkpoint.errors import DamageError, FormatError
from ds_galore.checkpoint.files import DTYPES, FORMAT, READABLE, DataFile, Entry, FileRecord, reads
from ds_galore.checkpoint.manifest import Manifest

__all__ = ["CheckpointReader", "LogicalTensor"]

#: Where a file is missing of a checkpoint that nodes saved to storage of their own.
NODE_LOCAL_HINT = " (each node saved its own files: copy the nodes' directories together)"
#: Columns of an int8 or int4 projector that share a scale.
SCALE_BLOCK = 256


@dataclass(frozen=True)
class LogicalTensor:
    """A tensor of a checkpoint.

    Parameters
    ----------
    name, dtype, shape
        As in docs/format.md.
    shards
        By (rank, start), where its ranges are: ``(start, stop, rank, index)``, ascending, covering it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    shards: tuple[tuple[int, int, int, int], ...]


class CheckpointReader:
    """A committed checkpoint.

    Parameters
    ----------
    directory
        Of the checkpoint.
    drop
        How many of each rank's newest files to leave out: 1 gives the base of a differential checkpoint, of which the
        checkpoint's directory holds all tensors.
    ranks
        Whose files have to be there, where the others' are on other nodes; all by default.

    Raises
    ------
    NotCommittedError, FormatError, DamageError
        If it is not there, not readable by this program, or not what was written; sizes of files are checked here,
        digests of decoded data when they are read, and digests of whole files by :meth:`verify`.
    """

    def __init__(self, directory: Path, *, drop: int = 0, ranks: Iterable[int] | None = None) -> None:
        self.directory = directory
        self.manifest = Manifest.read(directory)
        if drop:
            files = tuple(rank[: max(len(rank) - drop, 0)] for rank in self.manifest.files)
            if not all(files):
                raise DamageError(f"{directory}: is not the difference of {drop} files that it was")
            self.manifest = replace(self.manifest, files=files, states={})
        own = self.manifest.records() if ranks is None else (each for n in ranks for each in self.manifest.files[n])
        for record in own:
            try:
                found = (directory / record.name).stat().st_size
            except OSError as error:
                hint = NODE_LOCAL_HINT if self.manifest.metadata.get("node_local") else ""
                raise DamageError(f"{directory / record.name}: cannot be read: {error.strerror}{hint}") from None
            if found != record.bytes:
                raise DamageError(f"{directory / record.name}: has {found} bytes, and had {record.bytes} when written")
        self._files: dict[str, DataFile] = {}
        self._by_depth: dict[int, dict[str, LogicalTensor]] = {}
        self._numbers: dict[int, dict[tuple[str, int], int]] = {}
        self._held: dict[int, dict[tuple[str, int, int], Entry]] = {}
        self._places: dict[str, dict[tuple[str, int, int], int]] = {}

    def _file(self, rank: int, depth: int) -> DataFile:
        """A rank's file; ``depth`` counts back from the newest, 0."""
        records = self.manifest.files[rank]
        record = records[len(records) - 1 - depth]
        if record.name not in self._files:
            self._files[record.name] = DataFile(self.directory / record.name, record.header)
        return self._files[record.name]

    def file(self, rank: int) -> DataFile:
        """A rank's newest data file, which the shards of :attr:`tensors` refer to."""
        return self._file(rank, 0)

    @property
    def tensors(self) -> Mapping[str, LogicalTensor]:
        """The logical tensors by name.

        Raises
        ------
        DamageError
            If the ranks' tables contradict each other, or do not cover a tensor.
        """
        return self._tensors(0)

    def _tensors(self, depth: int) -> dict[str, LogicalTensor]:
        if depth not in self._by_depth:
            self._by_depth[depth] = self._collect(depth)
        return self._by_depth[depth]

    def _collect(self, depth: int) -> dict[str, LogicalTensor]:
        found: dict[str, list[tuple[int, int, int, int]]] = {}
        facts: dict[str, Entry] = {}
        for rank, records in enumerate(self.manifest.files):
            if len(records) <= depth:
                continue
            for index, entry in enumerate(self._file(rank, depth).entries):
                first = facts.setdefault(entry.name, entry)
                if (first.dtype, first.shape) != (entry.dtype, entry.shape):
                    raise DamageError(f"{self.directory}: the ranks disagree about dtype or shape of {entry.name}")
                found.setdefault(entry.name, []).append((entry.start, entry.stop, rank, index))
        tensors = {}
        for name, shards in found.items():
            position = 0
            for start, stop, _, _ in sorted(shards):
                if start > position:
                    break
                position = max(position, stop)
            numel = math.prod(facts[name].shape)
            if position != numel:
                raise DamageError(
                    f"{self.directory}: elements from {position} on are missing of {name}, which has {numel}"
                )
            tensors[name] = LogicalTensor(name, facts[name].dtype, facts[name].shape, tuple(sorted(shards)))
        return tensors

    def bits(self, name: str, start: int = 0, stop: int | None = None, out: Bits | None = None) -> Bits:
        """Elements ``[start, stop)`` of a logical tensor as bit patterns, decoded and checked.

        They are in ``out``, ``(stop - start,)`` contiguous unsigned words, where that is given and they have the
        tensor's element size; in an array of their own else.

        Raises
        ------
        KeyError
            If there is no such tensor.
        DamageError
            If its data are not what was written.
        """
        return self._bits(self.tensors[name], 0, start, stop, out=out)

    def _bits(
        self,
        tensor: LogicalTensor,
        depth: int,
        start: int,
        stop: int | None,
        *,
        check: bool = True,
        out: Bits | None = None,
    ) -> Bits:
        numel = math.prod(tensor.shape)
        stop = numel if stop is None else stop
        if not 0 <= start <= stop <= numel:
            raise ValueError(f"[{start}, {stop}) does not lie in {tensor.name} of {numel} elements")
        width = DTYPES[tensor.dtype]
        fits = out is not None and (out.dtype, out.shape) == (np.dtype(f"u{width}"), (stop - start,))
        if out is None or not (fits and out.flags.c_contiguous):
            try:
                out = room(stop - start, width)  # the shards cover it
            except CodecError as error:
                raise DamageError(f"{self.directory}: {tensor.name}: {error}") from None
        known = start
        for first, last, rank, index in tensor.shards:
            begin, end = max(first, start, known), min(last, stop)
            if begin >= end:
                continue
            target = out[begin - start : end - start]
            if (begin, end) == (first, last):
                self._shard(rank, depth, index, check=check, out=target)
            else:
                target[:] = self._shard(rank, depth, index, check=check)[begin - first : end - first]
            known = end
        return out

    def _shard(self, rank: int, depth: int, index: int, *, check: bool = True, out: Bits | None = None) -> Bits:
        """A shard's data, in ``out`` where that is given.

        Without ``check`` nobody has seen that they are what was written: for what others are decoded from, whose own
        digest then tells.
        """
        file = self._file(rank, depth)
        entry = file.entries[index]
        where = f"{file.path}: {entry.name} [{entry.start}, {entry.stop})"
        try:
            reference = self._reference(rank, depth, entry)
            try:
                encoded = file.encoded(index)
                bits = decode(encoded, entry.numel, entry.itemsize, reference, floating=entry.floating, out=out)
            except CodecError:
                self._reference(rank, depth, entry, check=True)
                raise
        except CodecError as error:
            raise DamageError(f"{where}: {error}") from None
        if check and not matches(bits, entry.digest):
            self._reference(rank, depth, entry, check=True)  # which names what it finds damaged there
            raise DamageError(f"{where}: the decoded data are not those that were written")
        return bits

    def _reference(self, rank: int, depth: int, entry: Entry, *, check: bool = False) -> Reference:
        """What a shard is decoded against: its range in the file before, and the projectors that it names."""
        needs = entry.codec in ("same", "lowrank") or (entry.codec == "planes" and entry.params.get("base") is True)
        if not needs:
            return Reference()
        if depth + 1 >= len(self.manifest.files[rank]):
            raise CodecError("a difference without a base")
        older = self._file(rank, depth + 1)
        if older.path.name not in self._places:
            self._places[older.path.name] = {
                (each.name, each.start, each.stop): number for number, each in enumerate(older.entries)
            }
        index = self._places[older.path.name].get((entry.name, entry.start, entry.stop))
        if index is None or (older.entries[index].dtype, older.entries[index].shape) != (entry.dtype, entry.shape):
            raise CodecError(f"the base {older.path.name} does not hold this range")
        base = self._shard(rank, depth + 1, index, check=check)
        names = entry.params.get("factors") if entry.codec == "lowrank" else None
        if not isinstance(names, list):
            return Reference(base)
        projector = f"{entry.name.rpartition('/')[0]}/projector"
        factors = {}
        for name in names:
            if name not in ("projector", "base/projector"):
                raise CodecError(f"unknown factor {name!r}")
            at = depth + (name == "base/projector")
            tensors = self._tensors(at)
            if projector not in tensors:
                raise CodecError(f"{projector} is not there")
            factors[name] = self._factor(projector, tensors, at, check=check)
        columns = math.prod(entry.shape[1:])
        return Reference(base, factors, columns, entry.start)

    def _factor(
        self, name: str, tensors: Mapping[str, LogicalTensor], depth: int, *, check: bool = True
    ) -> npt.NDArray[np.float32]:
        """A projector as numbers: see docs/format.md for int8 and int4."""
        tensor, scale = tensors[name], tensors.get(f"{name}_scale")
        if len(tensor.shape) != 2:
            raise CodecError(f"{tensor.name} has shape {tensor.shape}, and a factor is a matrix")
        rows, width = tensor.shape
        bits = self._bits(tensor, depth, 0, None, check=check).reshape(rows, width)
        if tensor.dtype in ("I8", "U8") and scale is not None and scale.dtype == "F32":
            whole = bits.view(np.int8)
            if tensor.dtype == "U8":
                halves = np.stack([bits & 15, bits >> 4], axis=2).reshape(rows, 2 * width)
                whole, width = (halves.view(np.int8) ^ 8) - np.int8(8), 2 * width
            if scale.shape != (rows, -(-width // SCALE_BLOCK)):
                raise CodecError(f"{scale.name} has shape {scale.shape}, which does not fit {tensor.name}")
            scales = self._bits(scale, depth, 0, None, check=check).view(np.float32).reshape(rows, -1)
            spread: npt.NDArray[np.float32] = np.repeat(scales, SCALE_BLOCK, axis=1)[:, :width]
            return whole.astype(np.float32) * spread
        if tensor.dtype == "BF16":
            bits = bits.astype(np.uint32) << 16
        elif tensor.dtype != "F32":
            raise CodecError(f"{tensor.name} is {tensor.dtype}, and a factor is F32, BF16, or I8 or U8 with a scale")
        return bits.astype(np.uint32, copy=False).view(np.float32)

    def state(self, name: str) -> Any:
        """The content of the state file with DeepSpeed's name ``name``: ``state`` and ``tensors``, and its format.

        Raises
        ------
        FormatError, DamageError
            If it is of another version, is missing, or is not what was written.
        """
        record = self.manifest.states.get(name)
        if record is None:
            raise DamageError(f"{self.directory}: its manifest does not name {name}")
        path = self.directory / record.name
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DamageError(f"{path}: cannot be read: {error.strerror}") from None
        if (len(data), FileRecord.of(record.name, data, record.digest).digest) != (record.bytes, record.digest):
            raise DamageError(f"{path}: is not what was written")
        try:
            values = json.loads(data)
            found = (values["format"], values["version"])
            if not isinstance(values["tensors"], dict):
                raise TypeError("its tensors are not described")
            values["state"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise DamageError(f"{path}: is no state file: {error}") from None
        if found not in [(FORMAT, version) for version in READABLE]:
            raise FormatError(f"{path}: is of another format or version: {found}; {reads()}")
        return values

    def held_by(self, rank: int) -> Mapping[tuple[str, int, int], Entry]:
        """What a rank's newest file holds, by name and range; nothing of a rank that did not write."""
        if rank >= self.manifest.world_size:
            return {}
        if rank not in self._held:
            entries = self._file(rank, 0).entries
            self._held[rank] = {(entry.name, entry.start, entry.stop): entry for entry in entries}
        return self._held[rank]

    def hold_open(self, ranks: Iterable[int]) -> None:
        """Open all files of some ranks, so that what they hold can be read also when their names are gone.

        Raises
        ------
        FormatError, DamageError
            If one is not what was written.
        """
        for rank in ranks:
            for depth in range(len(self.manifest.files[rank])):
                self._file(rank, depth)

    def range_of(self, rank: int, entry: Entry) -> Bits:
        """What a rank's newest file holds under an entry of :meth:`held_by`; no other rank's file is read.

        Raises
        ------
        DamageError
            If it is not what was written.
        """
        if rank not in self._numbers:
            entries = self._file(rank, 0).entries
            self._numbers[rank] = {(each.name, each.start): number for number, each in enumerate(entries)}
        return self._shard(rank, 0, self._numbers[rank][entry.name, entry.start])

    def is_there(self, rank: int) -> bool:
        """Whether the files of a rank still are, with their sizes."""
        try:
            return all(
                (self.directory / record.name).stat().st_size == record.bytes for record in self.manifest.files[rank]
            )
        except (OSError, IndexError):
            return False

    def matrix(self, name: str) -> npt.NDArray[np.float32]:
        """A logical matrix, stored in float32 or bfloat16, in float32.

        Raises
        ------
        KeyError
            If there is no such tensor.
        CodecError, DamageError
            If it is no such matrix, or its data are not what was written.
        """
        return self._factor(name, self.tensors, 0)

    def verify(self, *, quick: bool = False, sample: tuple[int, int] = (1, 1)) -> list[str]:
        """What is wrong with it: empty if every file has its digest and every tensor decodes to what was written.

        Parameters
        ----------
        quick
            Check the structure only: files, sizes, tables.
        sample
            ``(n, t)``: of the files and of the ranges of tensors, the n-th of t parts.
        """
        problems = []
        part, parts = sample
        if not quick:
            for record in list(self.manifest.records())[part - 1 :: parts]:
                try:
                    if file_digest(self.directory / record.name, record.digest) != record.digest:
                        problems.append(f"{self.directory / record.name}: is not what was written (its digest differs)")
                except OSError as error:
                    problems.append(f"{self.directory / record.name}: cannot be read: {error.strerror}")
        try:
            tensors = self.tensors
        except (DamageError, CodecError) as error:
            return [*problems, str(error)]
        if quick:
            return problems
        shards = [(rank, index) for tensor in tensors.values() for _, _, rank, index in tensor.shards]
        for rank, index in shards[part - 1 :: parts]:
            try:
                self._shard(rank, 0, index)
            except DamageError as error:
                problems.append(str(error))
        return problems
