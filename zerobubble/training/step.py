"""One training step over a pipeline, and one evaluation: the same numbers on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zerobubble.model.batch import Batch
from zerobubble.optim.loss_scale import LossScaler
from zerobubble.optim.norm import clip_coefficient, global_norm
from zerobubble.optim.optimizer import Optimizer
from zerobubble.pipeline import Pipeline
from zerobubble.runtime.executor import StepError


@dataclass(frozen=True)
class StepResult:
    """What a step gave, on every rank."""

    losses: tuple[float, ...]
    """One per microbatch, in order, unscaled."""
    grad_norm: float
    """Of the unscaled gradients, before clipping."""
    loss_scale: float
    """With which the step ran."""
    updated: bool
    """Whether the weights were updated: not where the norm is not finite."""


class Trainer:
    """Ties a pipeline to an optimizer: gradients in, one global norm, one update.

    Collective: every rank of the pipeline makes it and calls it alike. `width` is the size of
    the hidden dimension that stages hand over, `dtype` its type.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        optimizer: Optimizer,
        scaler: LossScaler,
        *,
        width: int,
        dtype: torch.dtype,
        clip_grad: float,
    ) -> None:
        self.pipeline = pipeline
        self.optimizer = optimizer
        self.scaler = scaler
        self._width, self._dtype, self._clip_grad = width, dtype, clip_grad
        counts = {
            index: sum(p.requires_grad for p in stage.module.parameters())
            for index, stage in pipeline.stages.items()
        }
        every: list[dict[int, int]] = [counts]
        if len(pipeline.ranks) > 1:
            every = [{} for _ in pipeline.ranks]
            dist.all_gather_object(every, counts)
        by_stage = {stage: n for held in every for stage, n in held.items()}
        first = {s: sum(by_stage[t] for t in range(s)) for s in by_stage}
        self._parameters = sum(by_stage.values())
        # Where this rank's squares belong among those of all stages in layer order.
        self._places = [first[stage] + i for stage in sorted(counts) for i in range(counts[stage])]

    def step(self, batches: Sequence[Batch], learning_rate: float) -> StepResult:
        """Forward and backward of every microbatch, then an update unless a gradient is not
        finite; the loss scale then follows."""
        scale = self.scaler.scale
        self.optimizer.zero_grad()
        losses = self.pipeline.step(
            batches,
            shape=self._shape(batches),
            dtype=self._dtype,
            loss_gradient=scale / len(batches),
        )
        self.optimizer.unscale(1 / scale)
        squares, all_losses = self._exchange(self.optimizer.squares(), losses, len(batches))
        norm = global_norm(squares)
        finite = math.isfinite(norm)
        if finite:
            self.optimizer.step(learning_rate, clip_coefficient(norm, self._clip_grad))
        self.scaler.update(not finite)
        return StepResult(tuple(all_losses), norm, scale, finite)

    def evaluate(self, batches: Sequence[Batch]) -> list[float]:
        """The loss of every batch, in order; no trace is left in training."""
        losses = self.pipeline.evaluate(batches, shape=self._shape(batches), dtype=self._dtype)
        return self._exchange([], losses, len(batches))[1]

    def _shape(self, batches: Sequence[Batch]) -> tuple[int, int, int]:
        rows, length = batches[0].tokens.shape
        return rows, length, self._width

    def _exchange(
        self, squares: Sequence[float], losses: Sequence[torch.Tensor], microbatches: int
    ) -> tuple[list[float], list[float]]:
        """All squares in layer order and all losses, on every rank. Raises StepError.

        Each entry is filled on one rank and zero on the others, so their sum is exact in any
        order.
        """
        vector = torch.zeros(self._parameters + microbatches, dtype=torch.float64)
        if squares:  # none in an evaluation
            for place, square in zip(self._places, squares, strict=True):
                vector[place] = square
        if losses:
            vector[self._parameters :] = torch.stack(list(losses)).double()
        if len(self.pipeline.ranks) > 1:
            try:
                dist.all_reduce(vector)
            except RuntimeError as error:
                where = "exchanging norms and losses"
                raise StepError(self.pipeline.rank, where, error, computing=False) from error
        values = vector.tolist()
        return values[: self._parameters], values[self._parameters :]
