"""Stage: one slice of the model on this rank, with what its microbatches have in flight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zerobubble.runtime.split_backward import accumulate, split


class Stage:
    """Runs the ops of one stage.

    `module(hidden, batch)` takes the earlier stage's output (None on the first stage) and the
    microbatch's batch, and returns the next stage's input, or the scalar loss on the last.
    The module's known submodules are made to defer, in place.
    """

    def __init__(self, index: int, module: nn.Module, *, last: bool) -> None:
        self.index = index
        self.module = module
        self.last = last
        self.deferral, self.report = split(module)
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._graphs: dict[int, tuple[Tensor | None, GradientEdge | None]] = {}

    @property
    def live(self) -> int:
        """Microbatches whose activations are held: F has run, W (or BW) has not."""
        return len(self._graphs) + self.deferral.pending

    def forward(self, microbatch: int, hidden: Tensor | None, batch: Any) -> Tensor:
        """F: the stage's output, cut off from its graph, which is kept for B.

        `hidden` belongs to the stage from here on: it becomes the leaf of that graph.
        """
        if hidden is not None and hidden.is_floating_point():
            hidden.requires_grad_()
        output = self.module(hidden, batch)
        # The edge alone keeps the graph and lets the output's memory go once it is sent.
        edge = get_gradient_edge(output) if output.requires_grad else None
        self._graphs[microbatch] = (hidden, edge)
        detached: Tensor = output.detach()
        return detached

    def evaluate(self, hidden: Tensor | None, batch: Any) -> Tensor:
        """F without a graph, in evaluation mode as the caller set it."""
        with torch.no_grad():
            output: Tensor = self.module(hidden, batch)
        return output

    def backward_input(self, microbatch: int, gradient: Tensor) -> Tensor | None:
        """B: the gradient of the stage's input (None on the first stage)."""
        self.deferral.begin()
        grad_hidden, gradients = self._backward(microbatch, gradient)
        self.deferral.end(microbatch, gradients)
        return grad_hidden

    def backward_weight(self, microbatch: int) -> None:
        """W: adds this microbatch's deferred weight gradients. Ascending microbatches only."""
        self.deferral.run(microbatch)

    def backward(self, microbatch: int, gradient: Tensor) -> Tensor | None:
        """BW: both at once."""
        grad_hidden, gradients = self._backward(microbatch, gradient)
        for parameter, value in gradients:
            accumulate(parameter, value)
        return grad_hidden

    def _backward(
        self, microbatch: int, gradient: Tensor
    ) -> tuple[Tensor | None, list[tuple[nn.Parameter, Tensor]]]:
        hidden, edge = self._graphs.pop(microbatch)
        if edge is None:
            return None, []
        # The parameters are named as inputs so that every deferring node runs, also in the
        # first stage, whose input needs no gradient; theirs comes back as None.
        inputs: list[Tensor] = list(self._parameters)
        if hidden is not None and hidden.requires_grad:
            inputs.append(hidden)
        # The engine itself: torch.autograd.grad spends ten times as long around it.
        values = Variable._execution_engine.run_backward(
            (edge,),
            (gradient,),
            False,  # keep_graph
            False,  # create_graph
            tuple(inputs),
            allow_unreachable=True,
            accumulate_grad=False,
        )
        grad_hidden = values[-1] if len(inputs) > len(self._parameters) else None
        if grad_hidden is None and hidden is not None and hidden.requires_grad:
            grad_hidden = torch.zeros_like(hidden)
        gradients = [
            (parameter, value)
            for parameter, value in zip(self._parameters, values, strict=False)
            if value is not None
        ]
        return grad_hidden, gradients
