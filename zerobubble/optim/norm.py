"""The global gradient norm, from one square per parameter in layer order."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor


def square(gradient: Tensor) -> float:
    """Sum of squares of one parameter's fp32 gradient, in fp32."""
    return torch.sum(gradient * gradient).item()


def global_norm(squares: Iterable[float]) -> float:
    """The norm over all parameters of the model.

    The squares are added in float64 in the order given: in layer order, whatever rank holds a
    parameter, so that every layout has the same bits.
    """
    total = 0.0
    for value in squares:
        total += value
    return math.sqrt(total) if total >= 0 else math.nan


def clip_coefficient(norm: float, clip_grad: float) -> float:
    """What to multiply gradients by so that their norm is at most `clip_grad` (0: 1)."""
    return min(1.0, clip_grad / (norm + 1e-6)) if clip_grad > 0 else 1.0
