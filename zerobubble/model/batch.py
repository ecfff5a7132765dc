"""Batch: what one microbatch feeds to a model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One microbatch of b sequences of s tokens.

    tokens, labels: (b, s) int64; loss_mask: (b, s) float32, 1 where the loss counts.
    dropout_seed: seeds every dropout of this microbatch (None: no dropout is seeded, as in
    evaluation); a layer mixes its own index in, so the bits depend on no schedule.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    dropout_seed: int | None = None
