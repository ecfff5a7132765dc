"""Data without files: the Python standard library's source, and made-up sequences."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from zerobubble.data.tokenizer import ByteTokenizer, Tokenizer
from zerobubble.errors import UserError

Sample = dict[str, Tensor]
"""tokens, labels: (s,) int64; loss_mask: (s,) float32."""

_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class TokenWindows(Dataset[Sample]):
    """Windows of s + 1 tokens over one long row, shuffled anew in every epoch.

    `samples` of them: as many epochs as that takes. The order depends on the seed alone.
    """

    def __init__(self, tokens: np.ndarray, seq_length: int, samples: int, seed: int) -> None:
        self._tokens, self._length, self._samples = tokens, seq_length, samples
        self._windows = (len(tokens) - 1) // seq_length
        self._seed = seed
        self._order: tuple[int, np.ndarray] = -1, np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self._samples:
            raise IndexError(index)
        epoch, place = divmod(index, self._windows)
        if self._order[0] != epoch:  # one epoch's order at a time, when it is reached
            random = np.random.RandomState((self._seed + epoch) % 2**32)
            self._order = epoch, random.permutation(self._windows)
        start = int(self._order[1][place]) * self._length
        window = self._tokens[start : start + self._length + 1].astype(np.int64)
        return _sample(torch.from_numpy(window))


class MockSequences(Dataset[Sample]):
    """Made-up sequences: each counts up from a start by a step of its own, a pattern to learn.

    Sample i of a seed is the same in every process.
    """

    def __init__(self, vocab_size: int, seq_length: int, samples: int, seed: int) -> None:
        self._vocab, self._length, self._samples, self._seed = (
            vocab_size,
            seq_length,
            samples,
            seed,
        )

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self._samples:
            raise IndexError(index)
        random = np.random.RandomState((self._seed * 1_000_003 + index) % 2**32)
        start, step = random.randint(0, self._vocab), random.randint(1, 4)
        row = (start + step * np.arange(self._length + 1, dtype=np.int64)) % self._vocab
        return _sample(torch.from_numpy(row))


def standard_library(tokenizer: Tokenizer, most_bytes: int = 8_000_000) -> np.ndarray:
    """The ids of the standard library's source, file by file in sorted order.

    Tests and installed packages are left out, and what comes after `most_bytes`. Every file
    ends with the end of document. Raises UserError where this Python has no source files.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    parts, total = [], 0
    for path in sorted(root.rglob("*.py")):
        if _SKIPPED.intersection(path.relative_to(root).parts):
            continue
        text = path.read_text(encoding="utf-8", errors="replace").replace("\0", "")
        if isinstance(tokenizer, ByteTokenizer):
            parts.append(np.frombuffer(text.encode() + b"\0", dtype=np.uint8))
        else:
            parts.append(np.array([*tokenizer.tokenize(text), tokenizer.eod], dtype=np.int32))
        total += len(text)
        if total >= most_bytes:
            break
    if not parts:
        raise UserError(f"no Python source in {root}; give --data-path or --mock-data")
    return np.concatenate(parts)


def _sample(window: Tensor) -> Sample:
    return {
        "tokens": window[:-1],
        "labels": window[1:],
        "loss_mask": torch.ones(len(window) - 1),
    }
