"""Text as tokens, a held-out part, and an order of samples that does not depend on the number of ranks."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from ds_galore import DataError

#: Between two documents in byte tokens; text has no zero bytes.
SEPARATOR = 0
#: One document of so many is held out; of fewer documents, the last part of the text.
HELD_OUT = 20


@dataclass(frozen=True)
class Corpus:
    """Token windows ``(count, length)`` for training and validation."""

    train: Tensor
    validation: Tensor
    vocabulary: int
    source: str


def load_corpus(
    data: list[str], *, tokenizer: str | None, length: int, text_column: str = "text", trust: bool = False
) -> Corpus:
    """Read text, tokenise it and cut it into windows of ``length`` tokens.

    Parameters
    ----------
    data
        Text files, directories of text files, or one folder of ``datasets.save_to_disk``; empty for the sources of
        Python's standard library.
    tokenizer
        Directory of a Hugging Face tokenizer; None for bytes.
    length
        Tokens a window.
    text_column
        Of a ``datasets`` folder.

    Raises
    ------
    DataError
        If a path does not exist or holds no text, or if there is too little of it.
    """
    encode, vocabulary = _encoder(tokenizer)
    documents = [np.asarray(encode(text)) for text in _documents(data, text_column)]
    source = ", ".join(data) if data else "the standard library's sources"
    dtype = np.int32 if vocabulary > 2**15 else np.int16
    gap = np.array([SEPARATOR] if tokenizer is None else [], dtype=dtype)
    if len(documents) >= HELD_OUT:
        held = [document for index, document in enumerate(documents) if index % HELD_OUT == HELD_OUT // 2]
        kept = [document for index, document in enumerate(documents) if index % HELD_OUT != HELD_OUT // 2]
        parts = [_join(kept, gap, dtype), _join(held, gap, dtype)]
    else:
        tokens = _join(documents, gap, dtype)
        cut = len(tokens) - max(length, len(tokens) // HELD_OUT)
        parts = [tokens[: max(cut, 0)], tokens[max(cut, 0) :]]
    windows = [torch.from_numpy(part[: len(part) // length * length].reshape(-1, length)) for part in parts]
    if min(len(each) for each in windows) < 1:
        total = sum(len(part) for part in parts)
        raise DataError(
            f"{source}: {total} tokens are too few for a training and a validation window of {length} tokens"
        )
    return Corpus(windows[0], windows[1], vocabulary, source)


def _join(documents: list[np.ndarray[Any, Any]], gap: np.ndarray[Any, Any], dtype: Any) -> np.ndarray[Any, Any]:
    parts = [part for document in documents for part in (document.astype(dtype), gap)]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)


def _encoder(tokenizer: str | None) -> tuple[Any, int]:
    if tokenizer is None:
        return (lambda text: np.frombuffer(text.encode("utf-8"), dtype=np.uint8)), 256
    if not Path(tokenizer).is_dir():
        raise DataError(f"--tokenizer {tokenizer}: no such directory; give one with a Hugging Face tokenizer's files")
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    except Exception as error:  # noqa: BLE001 - transformers raises many kinds for files it cannot use
        raise DataError(f"--tokenizer {tokenizer}: cannot be loaded: {str(error).splitlines()[0]}") from None
    end = [loaded.eos_token_id] if loaded.eos_token_id is not None else []
    return (lambda text: loaded(text, add_special_tokens=False, verbose=False)["input_ids"] + end), len(loaded)


def _documents(data: list[str], text_column: str) -> Iterator[str]:
    if not data:
        yield from (_read(path) for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
        return
    for name in data:
        path = Path(name)
        if not path.exists():
            raise DataError(f"--data {name}: no such file or directory")
        if path.is_file():
            yield _read(path)
        elif (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            yield from _from_datasets(path, text_column)
        else:
            files = [each for each in sorted(path.rglob("*")) if each.is_file() and not each.name.startswith(".")]
            found = 0
            for each in files:
                text = _try_read(each)
                if text:
                    found += 1
                    yield text
            if not found:
                raise DataError(
                    f"--data {name}: the directory holds {len(files)} files, and none of them is UTF-8 text"
                )


def _read(path: Path) -> str:
    text = _try_read(path)
    if text is None:
        raise DataError(f"--data {path}: is not UTF-8 text")
    if not text:
        raise DataError(f"--data {path}: is empty")
    return text


def _try_read(path: Path) -> str | None:
    try:
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return None
    return None if "\0" in text else text


def _from_datasets(path: Path, text_column: str) -> Iterator[str]:
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"--data {path}: is a datasets folder, and datasets is not installed: pip install datasets"
        ) from None
    loaded = datasets.load_from_disk(str(path))
    if isinstance(loaded, datasets.DatasetDict):
        if "train" not in loaded:
            raise DataError(f"--data {path}: has no split 'train', only {', '.join(loaded)}")
        loaded = loaded["train"]
    if text_column not in loaded.column_names:
        raise DataError(
            f"--data {path}: has no column {text_column!r}; --text-column takes {', '.join(loaded.column_names)}"
        )
    for number, text in enumerate(loaded[text_column]):
        if not isinstance(text, str):
            raise DataError(f"--data {path}: row {number} of column {text_column!r} is {text!r} and no text")
        yield text


class SampleOrder:
    """The order in which windows are visited: a new permutation each epoch, the same for any number of ranks.

    Parameters
    ----------
    count
        Number of windows.
    seed
        Of the permutations.
    consumed
        How many samples have been visited before; what a checkpoint has to remember.
    """

    def __init__(self, count: int, *, seed: int, consumed: int = 0) -> None:
        self._count, self._seed = count, seed
        self.consumed = consumed
        self._epoch = -1
        self._permutation = torch.zeros(0, dtype=torch.long)

    def take(self, number: int) -> Tensor:
        """The indices of the next ``number`` samples of the whole job, ``(number,)``."""
        taken = []
        while number:
            epoch, position = divmod(self.consumed, self._count)
            if epoch != self._epoch:
                generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
                self._permutation, self._epoch = torch.randperm(self._count, generator=generator), epoch
            part = self._permutation[position : position + number]
            taken.append(part)
            self.consumed += len(part)
            number -= len(part)
        return torch.cat(taken)


class Windows(Dataset[dict[str, Tensor]]):
    """Token windows as samples of a causal language model, for a DataLoader.

    Parameters
    ----------
    tokens
        ``(count, length)``, integers.
    """

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self._tokens[index].long()
        return {"input_ids": window, "labels": window}


class InOrder(Sampler[int]):
    """:class:`SampleOrder` for a DataLoader: the samples of the whole job, which are dealt out to the ranks in batches.

    Parameters
    ----------
    count
        Number of windows.
    samples
        How many are taken in all.
    seed
        Of the permutations.
    """

    def __init__(self, count: int, samples: int, *, seed: int) -> None:
        self._count, self._samples, self._seed = count, samples, seed

    def __len__(self) -> int:
        return self._samples

    def __iter__(self) -> Iterator[int]:
        yield from SampleOrder(self._count, seed=self._seed).take(self._samples).tolist()
