"""The checkpoint that the next one is written as a difference to: where its files are, and what of it is in memory.

Imports NumPy and its neighbours; neither torch nor DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_galore.checkpoint.codecs import CodecError, Reference
from ds_galore.checkpoint.codecs.base import Bits
from ds_galore.checkpoint.errors import DamageError, FormatError, NotCommittedError
from ds_galore.checkpoint.files import Entry
from ds_galore.checkpoint.reader import CheckpointReader

__all__ = ["Base", "OpenBase", "Source", "in_budget"]

Factors = Mapping[str, npt.NDArray[np.float32]]


@dataclass(frozen=True)
class Source:
    """A checkpoint's directory in which the base's files lie: the base's own, or of a later difference to it.

    Parameters
    ----------
    directory
        Of the checkpoint.
    drop
        How many of a rank's newest files in it are not the base's.
    """

    directory: Path
    drop: int = 0


@dataclass(frozen=True)
class Base:
    """What the next checkpoint may differ from.

    Parameters
    ----------
    tag
        Of the checkpoint.
    sources
        Where its files may be, in the order in which they are tried; its own directory first.
    saves
        How many checkpoints have been written since the last full one, that one included.
    arrays
        By name and start, bit patterns of this rank's ranges that are kept in memory.
    factors
        By parameter, its projector, whole, where it is kept in memory.
    ranks
        Whose files are in those directories, where the others' are on other nodes; None: all.
    """

    tag: str
    sources: tuple[Source, ...]
    saves: int
    arrays: Mapping[tuple[str, int], Bits] = field(default_factory=dict)
    factors: Factors = field(default_factory=dict)
    ranks: range | None = None
    readers: dict[Source, CheckpointReader] = field(default_factory=dict, compare=False)

    def open(self, rank: int, near: Path) -> OpenBase | None:
        """The base for one rank, or None where its files are gone, damaged, or on another file system than ``near``."""
        for source in self.sources:
            try:
                if source.directory.stat().st_dev != near.stat().st_dev:
                    continue
                reader = self.readers.get(source)
                if reader is None or not reader.is_there(rank):
                    reader = self.readers[source] = CheckpointReader(
                        source.directory, drop=source.drop, ranks=self.ranks
                    )
                return OpenBase(self, reader, rank, reader.held_by(rank))
            except (DamageError, FormatError, NotCommittedError, OSError):
                continue
        return None

    def after(self, *sources: Source) -> Base:
        """The same base, once another difference to it has been written, which holds its files too."""
        return replace(self, sources=(self.sources[0], *sources), saves=self.saves + 1)


@dataclass(frozen=True)
class OpenBase:
    """A base whose files have been found."""

    base: Base
    reader: CheckpointReader
    rank: int
    held: Mapping[tuple[str, int, int], Entry]

    def hold_open(self, factors: Factors) -> bool:
        """Open every file that may be read: this rank's, and, for projectors that are not in memory, the others'.

        Returns
        -------
        bool
            Whether they are all there and what was written, as far as their headers tell.
        """
        in_memory = factors.keys() <= self.base.factors.keys()
        try:
            self.reader.hold_open([self.rank] if in_memory else range(self.reader.manifest.world_size))
            return in_memory or bool(self.reader.tensors)
        except (DamageError, FormatError, CodecError):
            return False

    def holds(self, name: str, start: int, stop: int) -> Entry | None:
        """The entry of a range, if this rank's newest file of the base has that range."""
        return self.held.get((name, start, stop))

    def bits(self, entry: Entry, *, from_disk: bool) -> Bits | None:
        """The elements of an entry; None where they are not in memory and not to be read back."""
        kept = self.base.arrays.get((entry.name, entry.start))
        if kept is not None and kept.size == entry.numel:
            return kept
        return self.reader.range_of(self.rank, entry) if from_disk else None

    def reference(
        self, entry: Entry, shape: Sequence[int], factor: npt.NDArray[np.float32] | None, *, from_disk: bool
    ) -> Reference:
        """What a range may be predicted from.

        Parameters
        ----------
        entry
            Of the range.
        shape
            Of the logical tensor.
        factor
            The projector of the parameter whose weight this is, whole; None for any other tensor.
        from_disk
            Whether to read back what is not in memory.
        """
        old = self.bits(entry, from_disk=from_disk)
        if old is None or factor is None or len(shape) < 2:
            return Reference(old)
        parameter = entry.name.rpartition("/")[0]
        before: Any = self.base.factors.get(parameter)
        if before is None:
            name = f"{parameter}/projector"
            if name not in self.reader.tensors:
                return Reference(old)
            try:
                before = self.reader.matrix(name)
            except CodecError:
                return Reference(old)
        same = np.array_equal(factor, before)
        named = {"projector": factor} if same else {"projector": factor, "base/projector": before}
        return Reference(old, named, int(np.prod(tuple(shape)[1:])), entry.start)


def in_budget(
    arrays: Mapping[tuple[str, int], Bits], factors: Factors, first: str, budget: float
) -> tuple[dict[tuple[str, int], Bits], dict[str, npt.NDArray[np.float32]]]:
    """What fits into a number of bytes: tensors whose names end in ``first`` before others, and then projectors."""
    kept: dict[tuple[str, int], Bits] = {}
    for key, bits in sorted(arrays.items(), key=lambda item: not item[0][0].endswith(first)):
        if bits.nbytes <= budget:
            budget -= bits.nbytes
            kept[key] = bits
    kept_factors = {}
    for name, factor in factors.items():
        if factor.nbytes <= budget:
            budget -= factor.nbytes
            kept_factors[name] = factor
    return kept, kept_factors
