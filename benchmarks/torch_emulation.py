"""Stages that sleep, as torch.distributed.pipelining splits them: F, B and W each once."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn


class _WeightSleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, op_ms: float) -> Tensor:
        ctx.op_ms = op_ms
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.op_ms / 1e3)
        return gradient, None


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, _weight: Tensor, op_ms: float) -> Tensor:
        ctx.op_ms, ctx.slept = op_ms, False
        time.sleep(op_ms / 1e3)
        return x + 1  # torch's split cannot take a stage that ends in a view

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        if not ctx.slept:  # torch's split comes through here a second time, for W
            ctx.slept = True
            time.sleep(ctx.op_ms / 1e3)
        return gradient, torch.ones(1), None


class SleepingStage(nn.Module):
    """F, B and W sleep `op_ms` each. The first stage's input is made to need a gradient, as
    torch's split gives that stage no W otherwise."""

    def __init__(self, op_ms: float, *, first: bool) -> None:
        super().__init__()
        self.op_ms, self.first = op_ms, first
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Any shape, and the same out."""
        if self.first and not x.requires_grad:
            x = x.detach().requires_grad_()
        output: Tensor = _Sleep.apply(x, _WeightSleep.apply(self.weight, self.op_ms), self.op_ms)
        return output
