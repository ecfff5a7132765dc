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
def seeded_dropout(
    active: bool, dropout_seed: int | None, layer: int, device: torch.device
) -> Iterator[None]:
    """Dropout within draws from (dropout_seed, layer); the random state is left as it was.

    Entered again with the same two, as recomputation does, it draws the same masks. Where not
    `active` it costs nothing. Raises UserError if active without a seed.
    """
    if not active:
        yield
        return
    if dropout_seed is None:
        raise UserError("dropout in training needs a batch with a dropout_seed")
    seed = mix("dropout", dropout_seed, layer)
    if device.type != "cpu":
        with torch.random.fork_rng([device], device_type=device.type):
            torch.manual_seed(seed)
            yield
        return
    # 2 us instead of 140: torch.manual_seed and fork_rng go through every kind of device.
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
