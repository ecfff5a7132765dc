"""Training, validation and test data from what the command line names."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
from torch.utils.data import Dataset

from zerobubble.data.corpus import MockSequences, Sample, TokenWindows, standard_library
from zerobubble.data.indexed import Indexed, check_indexed
from zerobubble.data.tokenizer import Tokenizer
from zerobubble.errors import UserError

NAMES = ("training", "validation", "test")


@dataclass(frozen=True)
class Datasets:
    """Each gives `samples` as dicts: see `corpus.Sample`. None: its share of the data is empty."""

    train: Dataset[Sample]
    valid: Dataset[Sample] | None
    test: Dataset[Sample] | None


def build_datasets(
    path: Sequence[str] | None,
    *,
    mock: bool,
    tokenizer: Tokenizer,
    vocab_size: int,
    seq_length: int,
    seed: int,
    split: str,
    samples: tuple[int, int, int],
) -> Datasets:
    """Data sets with that many training, validation and test samples.

    path: prefixes of .bin/.idx files, or weight, prefix, weight, prefix ..., read through
    megatron-core, so that the order of samples is Megatron's for the same seed and split. None:
    the built-in corpus, or made-up sequences where `mock`. Every process builds the same; where
    several do, the first must have returned before the others start (indices are cached in a
    folder beside the data).

    Raises UserError for data that is missing, broken, too small, or of another vocabulary.
    """
    shares = parse_split(split)
    if mock:
        made = [MockSequences(vocab_size, seq_length, n, seed + i) for i, n in enumerate(samples)]
        return _datasets([m if n else None for m, n in zip(made, samples, strict=True)], split)
    if path is None:
        tokens = standard_library(tokenizer)
        edges = [round(edge * len(tokens)) for edge in _edges(shares)]
        parts = [tokens[a:b] for a, b in pairwise(edges)]
        return _datasets(
            [
                TokenWindows(part, seq_length, n, seed + i)
                if n and _enough(len(part), seq_length, NAMES[i], "the built-in corpus", split)
                else None
                for i, (part, n) in enumerate(zip(parts, samples, strict=True))
            ],
            split,
        )
    prefixes, weights = parse_blend(path)
    checked = [check_indexed(prefix) for prefix in prefixes]
    for indexed in checked:
        largest = indexed.largest_token()
        if largest >= vocab_size:
            raise UserError(
                f"{indexed.prefix} holds token {largest}, but the vocabulary has {vocab_size}; "
                "use the tokenizer that wrote it"
            )
    keep = [
        bool(n) and _has_documents(checked, shares, i, seq_length, split)
        for i, n in enumerate(samples)
    ]
    return _datasets(
        _megatron(prefixes, weights, tokenizer, seq_length, seed, split, samples, keep), split
    )


def parse_split(split: str) -> tuple[float, float, float]:
    """`969,30,1` as shares that add up to 1. Raises UserError for anything else."""
    try:
        values = [float(part) for part in split.split(",")]
    except ValueError:
        values = []
    if not 1 <= len(values) <= 3 or min(values) < 0 or not 0 < sum(values) < float("inf"):
        raise UserError(f"--split {split} is not training,validation,test, such as 969,30,1")
    values += [0.0] * (3 - len(values))
    total = sum(values)
    return values[0] / total, values[1] / total, values[2] / total


def parse_blend(path: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """One prefix, several, or weights and prefixes in turn. Raises UserError for a mixture."""
    numbers = [_number(word) for word in path]
    if all(number is None for number in numbers):
        return list(path), None
    weights = [number for number in numbers[::2] if number is not None]
    if len(path) % 2 or len(weights) < len(path) // 2:
        raise UserError(
            f"--data-path has {len(path)} words; give prefixes, or weight prefix weight prefix ..."
        )
    for weight in weights:
        if not 0 < weight < float("inf"):
            raise UserError(f"--data-path has the weight {weight:g}; weights must be above 0")
    return list(path[1::2]), weights


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _datasets(found: Sequence[Dataset[Sample] | None], split: str) -> Datasets:
    if found[0] is None:
        raise UserError(f"--split {split} leaves nothing to train on")
    return Datasets(found[0], found[1], found[2])


def _edges(shares: tuple[float, float, float]) -> tuple[float, float, float, float]:
    return 0.0, shares[0], shares[0] + shares[1], 1.0


def _enough(tokens: int, seq_length: int, name: str, where: str, split: str) -> bool:
    if 0 < tokens <= seq_length:
        raise UserError(
            f"--split {split} gives {name} {tokens} tokens of {where}, fewer than one sample of "
            f"--seq-length {seq_length} + 1; use more data or another split"
        )
    return tokens > 0


def _has_documents(
    checked: list[Indexed],
    shares: tuple[float, float, float],
    index: int,
    seq_length: int,
    split: str,
) -> bool:
    """Whether split `index` has tokens in every file, cut as megatron-core cuts it."""
    edges = _edges(shares)
    found = []
    for indexed in checked:
        count = float(len(indexed.lengths))
        first, last = round(edges[index] * count), round(edges[index + 1] * count)
        tokens = int(indexed.lengths[first:last].sum(dtype=np.int64))
        found.append(_enough(tokens, seq_length, NAMES[index], indexed.prefix, split))
    return all(found)


def _megatron(
    prefixes: list[str],
    weights: list[float] | None,
    tokenizer: Tokenizer,
    seq_length: int,
    seed: int,
    split: str,
    samples: tuple[int, int, int],
    keep: list[bool],
) -> list[Any]:
    with _quiet_and_alone():
        from megatron.core.datasets.blended_megatron_dataset_builder import (
            BlendedMegatronDatasetBuilder,
        )
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

        config = GPTDatasetConfig(
            random_seed=seed,
            sequence_length=seq_length,
            blend=(prefixes, weights),
            split=split,
            path_to_cache=_cache(prefixes[0]),
            tokenizer=tokenizer,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        # Without documents megatron-core would look for epochs without end.
        config.split_matrix = [
            part if kept else None for part, kept in zip(config.split_matrix, keep, strict=True)
        ]
        built: list[Any] = BlendedMegatronDatasetBuilder(
            GPTDataset, list(samples), lambda: True, config
        ).build()
    return built


def _cache(prefix: str) -> str | None:
    """None: megatron-core's own folder beside the data; "": no cache, where none can be made."""
    folder = os.path.join(prefix, "cache", "GPTDataset_indices")
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError:
        return ""
    return None if os.access(folder, os.W_OK) else ""


@contextmanager
def _quiet_and_alone() -> Iterator[None]:
    """megatron-core warns of missing GPU libraries, and holds barriers that an error on one rank
    would leave the others in; whoever calls us keeps the ranks in step."""
    with warnings.catch_warnings(), patch("torch.distributed.is_initialized", lambda: False):
        warnings.simplefilter("ignore")
        logging.getLogger("megatron.core").setLevel(logging.ERROR)
        yield
