"""The learning rate as a function of samples, as Megatron-LM schedules it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

DecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root"]


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up from 0, then decay from `highest` to `lowest`. All lengths in samples.

    Samples count only where an iteration updated the weights, so with a warm-up the first
    iteration runs at 0, as in Megatron-LM (OptimizerParamScheduler).
    """

    highest: float
    lowest: float
    warmup_samples: float
    decay_samples: int
    style: DecayStyle

    def at(self, samples: int) -> float:
        """The learning rate after `samples`."""
        if self.warmup_samples > 0 and samples <= self.warmup_samples:
            return self.highest * samples / self.warmup_samples
        if self.style == "constant":
            return self.highest
        if samples > self.decay_samples:
            return self.lowest
        if self.style == "inverse-square-root":
            # In this order the bits are Megatron-LM's.
            rate: float = self.highest * max(self.warmup_samples, 1) ** 0.5 / max(samples, 1) ** 0.5
            return max(self.lowest, rate)
        progress = (samples - self.warmup_samples) / (self.decay_samples - self.warmup_samples)
        left = 1 - progress if self.style == "linear" else (math.cos(math.pi * progress) + 1) / 2
        return self.lowest + left * (self.highest - self.lowest)
