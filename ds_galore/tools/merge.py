"""One set of weights from the partitions of a checkpoint, in Hugging Face's layout.

Imports neither torch nor DeepSpeed. Tensors are read, converted and written one by one, so that
memory is bounded by the largest and the number of workers, not by the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_galore.checkpoint.codecs.base import Bits
from ds_galore.errors import ConfigError, DataError
from ds_galore.tools.output import (
    FLOATS,
    SafetensorsFile,
    cast,
    copy_files,
    in_threads,
    keep_apart,
    new_directory,
    plan_shards,
)
from ds_galore.tools.source import Info, Source, as_array, open_source, resolve
from ds_galore.tools.states import TORCH_NAMES, Leaf
from ds_galore.tools.torchwriter import write_torch_file

__all__ = ["LazyStateDict", "MergeReport", "dequantize", "load_state_dict", "merge_checkpoint"]

NAMES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
#: What goes along with weights in a Hugging Face directory.
MODEL_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "added_tokens.json", "chat_template.jinja"),
    *("spiece.model", "preprocessor_config.json", "processor_config.json"),
)
SCALE = ".scale"  # the suffix of the name of a quantised matrix's scales


@dataclass
class MergeReport:
    """What a merge wrote.

    Parameters
    ----------
    source, out
        Directories.
    step
        After which the checkpoint was saved, if that is known.
    tensors, parameters, bytes
        Numbers of weights and buffers, of their elements, and of bytes written.
    files
        Written, by name.
    pruned
        By matrix, how many elements were set to zero.
    """

    source: str
    out: str
    step: int | None
    tensors: int = 0
    parameters: int = 0
    bytes: int = 0
    files: list[str] = field(default_factory=list)
    pruned: dict[str, int] = field(default_factory=dict)


class LazyStateDict(Mapping[str, "npt.NDArray[Any]"]):
    """The weights of a checkpoint by name; each is read when it is asked for.

    Values are NumPy arrays of the model's shapes: masters in float32, buffers and frozen parameters in their own dtypes
    (bfloat16 by ml_dtypes). Tied names give the same array. ``torch.from_numpy`` takes them, bfloat16 ones as
    ``torch.from_numpy(array.view("int16")).view(torch.bfloat16)``.
    """

    def __init__(self, source: Source) -> None:
        self.source = source

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        where = self.source.aliases.get(name, name)
        info = self.source.weights[where]
        return as_array(self.source.weight(where), info)

    def __iter__(self) -> Iterator[str]:
        yield from self.source.weights
        yield from self.source.aliases

    def __len__(self) -> int:
        return len(self.source.weights) + len(self.source.aliases)


def load_state_dict(path: str | Path, tag: str | None = None) -> LazyStateDict:
    """The weights of a checkpoint of ds_galore, or of DeepSpeed's own under ZeRO, without torch.

    Parameters
    ----------
    path
        A checkpoint's directory, or a save directory with a file ``latest``.
    tag
        Which checkpoint of a save directory.

    Raises
    ------
    DataError, NotCommittedError, FormatError, DamageError
        If there is none, or it cannot be read; damage to a tensor is told when it is read.
    """
    return LazyStateDict(open_source(resolve(Path(path), tag)))


def dequantize(values: npt.NDArray[np.int8], scale: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The matrix that ``--quantize int8`` stored: ``(rows, columns)`` int8 and ``(rows,)`` float32 to float32."""
    result: npt.NDArray[np.float32] = values.astype(np.float32) * scale[:, None]
    return result


def _quantize(matrix: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Rows in 127 steps each way from zero to their largest magnitude."""
    scale = (np.abs(matrix).max(axis=1, initial=0.0) / 127.0).astype(np.float32)
    safe = np.where(scale > 0, scale, np.float32(1))
    return np.rint(matrix / safe[:, None]).clip(-127, 127).astype(np.int8), scale


def _prune(matrix: npt.NDArray[np.float32], fraction: float) -> int:
    """Set the smallest magnitudes of a matrix to zero, in place; how many."""
    count = int(matrix.size * fraction)
    if count:
        flat = matrix.reshape(-1)
        smallest = np.argpartition(np.abs(flat), count - 1)[:count]
        flat[smallest] = 0
    return count


class _Conversion:
    """What becomes of a tensor on its way."""

    def __init__(self, dtype: str, prune: float, quantize: bool) -> None:
        self.dtype, self.prune, self.quantize = dtype, prune, quantize

    def is_matrix(self, info: Info) -> bool:
        return info.dtype in FLOATS and len(info.shape) == 2

    def planned(self, name: str, info: Info) -> dict[str, Info]:
        """What is written for a tensor."""
        if self.quantize and self.is_matrix(info):
            return {name: Info("I8", info.shape), f"{name}{SCALE}": Info("F32", info.shape[:1])}
        return {name: Info(self.dtype if info.dtype in FLOATS else info.dtype, info.shape)}

    def run(self, name: str, bits: Bits, info: Info) -> tuple[dict[str, Bits], int]:
        """The patterns of what is written, and how many elements were pruned."""
        pruned = 0
        dtype = info.dtype
        if (self.prune or self.quantize) and self.is_matrix(info):
            matrix = as_array(cast(bits, dtype, "F32"), Info("F32", info.shape))
            if not matrix.flags.writeable or dtype == "F32":
                matrix = matrix.copy()
            pruned = _prune(matrix, self.prune)
            if self.quantize:
                values, scale = _quantize(matrix)
                return {
                    name: values.reshape(-1).view(np.uint8),
                    f"{name}{SCALE}": scale.view(np.uint32),
                }, pruned
            bits, dtype = matrix.reshape(-1).view(np.uint32), "F32"
        return {name: cast(bits, dtype, self.dtype)}, pruned


def merge_checkpoint(
    path: str | Path,
    out: str | Path,
    *,
    tag: str | None = None,
    dtype: str = "fp32",
    max_shard_size: int = 5_000_000_000,
    model_config: str | Path | None = None,
    optimizer: bool = False,
    format: str = "safetensors",
    prune: float = 0.0,
    quantize: str | None = None,
    exclude_frozen: bool = False,
    overwrite: bool = False,
    workers: int = 2,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> MergeReport:
    """Merge the partitions of a checkpoint into a directory that ``from_pretrained`` takes.

    Parameters
    ----------
    path, tag
        As for :func:`load_state_dict`.
    out
        The directory to make; it appears complete or not at all.
    dtype
        ``"fp32"``, ``"bf16"`` or ``"fp16"``, of floating-point tensors; integers stay as they are.
    max_shard_size
        Bytes of tensors a file, unless one alone is larger.
    model_config
        Directory whose ``config.json`` and tokenizer files go along.
    optimizer
        Whether the optimizer's tensors are written too, as they are, to ``optimizer.safetensors``.
    format
        ``"safetensors"``, or ``"torch"`` for ``pytorch_model.bin``.
    prune
        Fraction of each matrix, the smallest magnitudes, that is set to zero: loses information.
    quantize
        ``"int8"``: matrices as int8 with a scale a row; see :func:`dequantize`. Loses information.
    exclude_frozen
        Whether frozen parameters are left out.
    overwrite
        Whether a directory that is not empty may be replaced.
    workers
        Threads; each has one tensor in memory.
    progress
        Called with bytes read and bytes in all.

    Raises
    ------
    ConfigError
        For an impossible option.
    DataError, NotCommittedError, FormatError, DamageError
        As :func:`load_state_dict`, and for an ``out`` that cannot be made. Nothing is left behind then.
    """
    _check_options(dtype, format, prune, quantize, max_shard_size, workers)
    source = open_source(resolve(Path(path), tag))
    if exclude_frozen:
        source.weights = {name: info for name, info in source.weights.items() if name not in source.frozen}
    target = Path(out)
    config = Path(model_config) if model_config is not None else None
    if config is not None and config.name == "config.json":
        config = config.parent
    if config is not None and not (config / "config.json").is_file():
        raise DataError(
            f"--model-config {config}: {'holds no config.json' if config.is_dir() else 'no such directory'}"
        )
    keep_apart(target, source.directory, "the checkpoint")
    if config is not None and target.resolve() in (config.resolve(), *config.resolve().parents):
        raise DataError(f"{target}: is, or holds, --model-config that is read; give another directory")
    conversion = _Conversion(NAMES[dtype], prune, quantize is not None)
    report = MergeReport(str(source.directory), str(target), source.step)
    report.tensors = len(source.weights)
    report.parameters = sum(info.numel for info in source.weights.values())
    metadata = {"format": "pt"}
    lossy = [f"pruned {prune:g} of each matrix"] * bool(prune) + ["int8 with a scale a row"] * bool(quantize)
    if lossy:
        metadata["lossy"] = ", ".join(lossy)
    with new_directory(target, overwrite=overwrite) as directory:
        if format == "torch":
            _write_torch(source, conversion, directory, max_shard_size, report, progress)
        else:
            _write_safetensors(source, conversion, directory, max_shard_size, metadata, workers, report, progress)
        if optimizer:
            _write_optimizer(source, directory, workers, report)
        if config is not None:
            report.files += copy_files(config, directory, MODEL_FILES)
        report.bytes = sum(each.stat().st_size for each in directory.iterdir())
    return report


def _check_options(
    dtype: str, form: str, prune: float, quantize: str | None, max_shard_size: int, workers: int
) -> None:
    for name, value, allowed in (
        ("dtype", dtype, tuple(NAMES)),
        ("format", form, ("safetensors", "torch")),
        ("quantize", quantize, (None, "int8")),
    ):
        if value not in allowed:
            raise ConfigError(f"{name} is {value!r}: it must be {' or '.join(str(each) for each in allowed)}")
    if not 0 <= prune < 1:
        raise ConfigError(f"prune is {prune}: it must be at least 0 and less than 1")
    if max_shard_size < 1 or workers < 1:
        raise ConfigError(f"max_shard_size is {max_shard_size} and workers is {workers}: both must be positive")
    if quantize and form == "torch":
        raise ConfigError("quantize goes with format safetensors only")


def _shard_names(stem: str, suffix: str, count: int) -> list[str]:
    if count == 1:
        return [f"{stem}{suffix}"]
    return [f"{stem}-{number:05}-of-{count:05}{suffix}" for number in range(1, count + 1)]


def _write_index(directory: Path, name: str, places: Mapping[str, str], total: int) -> None:
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(places)}, indent=2, sort_keys=True)
    (directory / name).write_text(text + "\n", encoding="utf-8")


def _write_safetensors(
    source: Source,
    conversion: _Conversion,
    directory: Path,
    limit: int,
    metadata: Mapping[str, str],
    workers: int,
    report: MergeReport,
    progress: Callable[[int, int], None],
) -> None:
    planned: dict[str, Info] = {}
    for name, info in source.weights.items():
        planned.update(conversion.planned(name, info))
    shards = plan_shards(planned, limit)
    names = _shard_names("model", ".safetensors", len(shards))
    places = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    files: dict[str, SafetensorsFile] = {}
    try:
        for file, shard in zip(names, shards, strict=True):
            files[file] = SafetensorsFile(directory / file, {name: planned[name] for name in shard}, metadata)

        def convert(name: str) -> None:
            info = source.weights[name]
            made, pruned = conversion.run(name, source.weight(name), info)
            for each, bits in made.items():
                files[places[each]].write(each, bits)
            if pruned:
                report.pruned[name] = pruned

        in_threads(convert, source.weights, workers, progress)
    finally:
        for each in files.values():
            each.close()
    report.files += names
    if len(names) > 1:
        total = sum(info.nbytes for info in planned.values())
        _write_index(directory, "model.safetensors.index.json", places, total)
        report.files.append("model.safetensors.index.json")


def _write_optimizer(source: Source, directory: Path, workers: int, report: MergeReport) -> None:
    file = SafetensorsFile(directory / "optimizer.safetensors", source.optimizer, {"format": "pt"})
    try:
        in_threads(lambda name: file.write(name, source.state(name)), source.optimizer, workers)
    finally:
        file.close()
    report.files.append("optimizer.safetensors")


def _leaf(name: str, info: Info) -> Leaf:
    pieces = ((name, 0, 0, info.numel),)
    return Leaf("tensor", TORCH_NAMES.get(info.dtype, info.dtype), info.shape, pieces, own=True)


def _write_torch(
    source: Source,
    conversion: _Conversion,
    directory: Path,
    limit: int,
    report: MergeReport,
    progress: Callable[[int, int], None],
) -> None:
    """``pytorch_model.bin``, a tensor in memory at a time; tied names share theirs."""
    planned = {name: conversion.planned(name, info)[name] for name, info in source.weights.items()}
    shards = plan_shards(planned, limit)
    names = _shard_names("pytorch_model", ".bin", len(shards))
    places, done, total = {}, 0, sum(info.nbytes for info in source.weights.values())

    def read(leaf: Leaf) -> list[Bits]:
        nonlocal done
        name = leaf.pieces[0][0]
        made, pruned = conversion.run(name, source.weight(name), source.weights[name])
        if pruned:
            report.pruned[name] = pruned
        done += source.weights[name].nbytes
        progress(done, total)
        return [made[name]]

    for file, shard in zip(names, shards, strict=True):
        held = {name: _leaf(name, planned[name]) for name in shard}
        held.update({alias: held[name] for alias, name in source.aliases.items() if name in held})
        write_torch_file(directory / file, held, read)
        places.update(dict.fromkeys(held, file))
    report.files += names
    if len(names) > 1:
        _write_index(directory, "pytorch_model.bin.index.json", places, sum(i.nbytes for i in planned.values()))
        report.files.append("pytorch_model.bin.index.json")
