"""Emulated stages: ops that sleep a set time, through real autograd and the real executor.

They let more ranks than cores run a schedule, to see what a runtime adds to its plan.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from zerobubble.runtime.split_backward import Deferral


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: nn.Parameter, stage: EmulatedStage) -> Tensor:
        ctx.stage, ctx.parameter = stage, weight
        time.sleep(stage.forward_ms / 1e3)
        return hidden.view_as(hidden)  # the payload is carried, not touched

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        stage: EmulatedStage = ctx.stage

        def weight_gradient() -> Tensor:
            time.sleep(stage.backward_weight_ms / 1e3)
            return torch.ones_like(stage.weight)

        time.sleep(stage.backward_input_ms / 1e3)
        return gradient, stage.deferral.defer(ctx.parameter, weight_gradient), None


class EmulatedStage(nn.Module):
    """A stage whose F, B and W sleep the given times (ms).

    The first stage makes its own input of `shape`; the last returns the mean of its output.
    """

    defers = True
    deferral: Deferral

    def __init__(
        self,
        shape: tuple[int, ...],
        forward_ms: float,
        backward_input_ms: float,
        backward_weight_ms: float,
        *,
        last: bool,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.forward_ms = forward_ms
        self.backward_input_ms = backward_input_ms
        self.backward_weight_ms = backward_weight_ms
        self.last = last
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, hidden: Tensor | None, _batch: Any) -> Tensor:
        """(shape) -> (shape), or the scalar loss on the last stage."""
        if hidden is None:
            hidden = torch.zeros(self.shape)
        output: Tensor = _Sleep.apply(hidden, self.weight, self)  # type: ignore[no-untyped-call]
        return output.mean() if self.last else output
