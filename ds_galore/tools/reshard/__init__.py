"""A checkpoint for another number of ranks, ours or DeepSpeed's own on either side, without torch or DeepSpeed.

What belongs to parameters is cut anew, as :mod:`.layout` computes; what belongs to a rank is the rank's,
or the first rank's where there was none; all else agrees on all ranks. Tensors are decoded one by one into a scratch
file inside the directory that is being made, and read from there in ranges, so that memory is bounded by the largest
tensor and the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ds_galore.checkpoint.errors import DamageError
from ds_galore.checkpoint.manifest import MANIFEST
from ds_galore.checkpoint.scratch import Scratch
from ds_galore.errors import ConfigError, DsGaloreError
from ds_galore.tools.output import keep_apart, new_directory
from ds_galore.tools.reshard.checkpoint import Checkpoint
from ds_galore.tools.reshard.cutting import Resharder, check_sizes
from ds_galore.tools.reshard.reading import read_native, read_ours
from ds_galore.tools.reshard.writing import Holdings, Meter, decode, write_native, write_ours
from ds_galore.tools.source import resolve
from ds_galore.tools.states import freeze

__all__ = ["FORMATS", "ReshardReport", "reshard_checkpoint"]

FORMATS = ("ds_galore", "deepspeed")


@dataclass
class ReshardReport:
    """What was written: directories, the tag and step, numbers of ranks, and bytes of all files."""

    source: str
    out: str
    tag: str
    step: int | None
    format: str
    from_world_size: int
    world_size: int
    bytes: int = 0


def reshard_checkpoint(
    path: str | Path,
    out: str | Path,
    *,
    world_size: int,
    tag: str | None = None,
    format: str = "ds_galore",
    sub_group_size: int | None = None,
    overwrite: bool = False,
    workers: int = 2,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ReshardReport:
    """Write a checkpoint of ours, or of DeepSpeed's own under ZeRO, as ``world_size`` ranks would have saved it.

    Parameters
    ----------
    path, tag
        As for :func:`ds_galore.tools.merge.load_state_dict`.
    out
        A save directory to make, with the checkpoint under its tag, and ``latest``; it appears complete or not at all.
    world_size
        Number of data-parallel ranks.
    format
        ``"ds_galore"``, or ``"deepspeed"``: files that DeepSpeed loads without this package.
    sub_group_size
        ``zero_optimization.sub_group_size`` of the configuration that will load it, for DeepSpeed's stage 3; by
        default what the checkpoint was saved with.
    overwrite
        Whether a directory that is not empty may be replaced.
    workers
        Threads; each has one tensor in memory.
    progress
        Called with bytes done and bytes in all.

    Raises
    ------
    ConfigError
        For an impossible option, and for a state that DeepSpeed alone cannot load (a low-rank one).
    DataError, NotCommittedError, FormatError, DamageError
        If the source cannot be read, holds what cannot be cut anew, or ``out`` cannot be made. Nothing is left then.
    """
    if format not in FORMATS:
        raise ConfigError(f"format is {format!r}: it must be {' or '.join(FORMATS)}")
    for name, value in (("world_size", world_size), ("workers", workers), ("sub_group_size", sub_group_size or 1)):
        if value < 1:
            raise ConfigError(f"{name} is {value}: it must be positive")
    source_directory = resolve(Path(path), tag)
    target = Path(out)
    keep_apart(target, source_directory, "the checkpoint")
    name = source_directory.resolve().name
    try:
        source = _read(source_directory, format)
        resharder = Resharder(source, world_size, sub_group_size)
        if format == "deepspeed" and resharder.low_rank:
            raise ConfigError(
                f"{source_directory}: holds low-rank states, which DeepSpeed loads with this package only; use the"
                " format ds_galore, or merge it to have the weights"
            )
        needed: set[str] = set()
        holdings = Holdings(world_size)
        for rank in range(world_size):  # one at a time: thousands of them would not fit into memory
            files = resharder.files(rank)
            needed |= check_sizes(source, files, world_size)
            if format == "ds_galore":
                holdings.add(rank, {name: freeze(state, name)[1] for name, state in files.items()})
    except DsGaloreError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise DamageError(
            f"{source_directory}: its states are not those of a checkpoint: {type(error).__name__}: {error}"
        ) from error
    report = ReshardReport(str(source_directory), str(target), name, source.step, format, source.ranks, world_size)
    with new_directory(target, overwrite=overwrite) as directory:
        scratch = Scratch(directory / ".scratch")
        try:
            total = sum(source.tensors[name].info.nbytes for name in needed)
            meter = Meter(total * (2 if source.decode else 1), progress)
            if source.decode:
                decode(source, needed, scratch, workers, meter)
            if format == "ds_galore":
                write_ours(source, resharder.files, holdings.by_rank(), directory, name, scratch, workers, meter)
            else:
                write_native(source, resharder.files, world_size, directory, name, workers, meter)
        finally:
            scratch.close()
        report.bytes = sum(each.stat().st_size for each in directory.rglob("*") if each.is_file())
    return report


def _read(directory: Path, form: str) -> Checkpoint:
    if (directory / MANIFEST).exists():
        return read_ours(directory)
    return read_native(directory, ours=form == "ds_galore")
