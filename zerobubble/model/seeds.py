"""Seeds that depend on what is drawn and on nothing else: not on rank, stage or schedule."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zerobubble.errors import UserError


def mix(*parts: int | str) -> int:
    """A seed from its parts, well spread in its low 32 bits too (all that CPUs use)."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def seeded_dropout(active: bool, dropout_seed: int | None, layer: int) -> Iterator[None]:
    """Dropout within draws from (dropout_seed, layer); the random state is left as it was."""
    if not active:
        yield
        return
    if dropout_seed is None:
        raise UserError("dropout in training needs a batch with a dropout_seed")
    with torch.random.fork_rng():
        torch.manual_seed(mix("dropout", dropout_seed, layer))
        yield
