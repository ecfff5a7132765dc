"""Split backward by deferral: B computes input gradients and puts weight gradients off to W.

No graph is cut. Known modules are swapped for subclasses whose backward returns the input's
gradient and leaves a closure that computes the weight's; W runs the closures. Every other
parameter gets its gradient at B. An unknown module is therefore split less, never wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Deferral:
    """The weight gradients that one stage owes, microbatch by microbatch.

    Between `begin` and `end` a backward (B) puts gradients off; outside, in a joint backward
    (BW), every gradient is computed on the spot.
    """

    def __init__(self) -> None:
        self._collecting: list[tuple[nn.Parameter, Callable[[], Tensor]]] | None = None
        self._owed: dict[int, list[tuple[nn.Parameter, Callable[[], Tensor]]]] = {}
        self._at_backward_input: dict[int, dict[nn.Parameter, Tensor]] = {}

    def defer(self, parameter: nn.Parameter, compute: Callable[[], Tensor]) -> Tensor | None:
        """This use's gradient of `parameter`, for a Function's backward to return: None where
        `compute` is put off to W, its value where a joint backward runs."""
        if self._collecting is None:
            return compute()
        self._collecting.append((parameter, compute))
        return None

    def begin(self) -> None:
        """B starts."""
        self._collecting = []

    def end(self, microbatch: int, gradients: list[tuple[nn.Parameter, Tensor]]) -> None:
        """B of `microbatch` is done and gave `gradients`; what W adds to waits for it."""
        assert self._collecting is not None
        owed, self._collecting = self._collecting, None
        parameters = {parameter for parameter, _ in owed}
        held = {}
        for parameter, gradient in gradients:
            if parameter in parameters:
                held[parameter] = gradient
            else:
                accumulate(parameter, gradient)
        self._owed[microbatch] = owed
        self._at_backward_input[microbatch] = held

    def run(self, microbatch: int) -> None:
        """W of `microbatch`: all its uses of a weight are summed, then added once."""
        owed = self._owed.pop(microbatch)
        total = self._at_backward_input.pop(microbatch)
        owed.reverse()
        uses = _uses(owed)
        while owed:  # popped one by one: what a closure holds is freed once it has run
            parameter, compute = owed.pop()
            gradient = compute()
            del compute
            earlier = total.pop(parameter, None)
            if earlier is not None:
                gradient = earlier + gradient
            uses[parameter] -= 1
            if uses[parameter]:
                total[parameter] = gradient
            else:
                accumulate(parameter, gradient)

    @property
    def pending(self) -> int:
        """Microbatches whose W has not run."""
        return len(self._owed)


def _uses(owed: list[tuple[nn.Parameter, Callable[[], Tensor]]]) -> dict[nn.Parameter, int]:
    uses: dict[nn.Parameter, int] = {}
    for parameter, _ in owed:
        uses[parameter] = uses.get(parameter, 0) + 1
    return uses


def accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Add one microbatch's gradient to `parameter.main_grad` (fp32), or to `.grad`."""
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is not None:
        main_grad.add_(gradient)
    elif parameter.grad is None:
        parameter.grad = gradient.clone()
    else:
        parameter.grad.add_(gradient)


class _LinearFunction(torch.autograd.Function):
    """y = x W^T + b with the kernels and shapes of autograd's own backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None, deferral: Deferral
    ) -> Tensor:
        # The Parameter itself: under checkpointing a saved tensor comes back as an alias.
        ctx.parameter = weight
        ctx.deferral = deferral
        ctx.save_for_backward(x)
        return F.linear(x, _cast(weight, x), None if bias is None else _cast(bias, x))

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        # Cut off from its graph: what W holds must not keep the graph alive with it.
        x = ctx.saved_tensors[0].detach()
        parameter: nn.Parameter = ctx.parameter
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = rows.mm(_cast(parameter, rows)).view(x.shape)
        if ctx.needs_input_grad[1]:

            def compute() -> Tensor:
                return rows.t().mm(x.reshape(-1, x.shape[-1])).to(parameter.dtype)

            grad_weight = ctx.deferral.defer(parameter, compute)
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0)
        return grad_x, grad_weight, grad_bias, None


class _EmbeddingFunction(torch.autograd.Function):
    """Rows of the weight; the weight's gradient is the whole backward, so all of it is W."""

    @staticmethod
    def forward(
        ctx: Any, weight: nn.Parameter, indices: Tensor, padding_idx: int, deferral: Deferral
    ) -> Tensor:
        ctx.parameter = weight
        ctx.padding_idx = padding_idx
        ctx.deferral = deferral
        ctx.save_for_backward(indices)
        return F.embedding(indices, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        (indices,) = ctx.saved_tensors
        parameter: nn.Parameter = ctx.parameter
        padding_idx: int = ctx.padding_idx

        def compute() -> Tensor:
            gradient: Tensor = torch.ops.aten.embedding_dense_backward(
                grad, indices, parameter.shape[0], padding_idx, False
            )
            return gradient

        return ctx.deferral.defer(parameter, compute), None, None, None


class _Conv1DFunction(torch.autograd.Function):
    """y = x W + b, as transformers' Conv1D (GPT-2) computes it: its weight is (in, out)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, bias: nn.Parameter, deferral: Deferral
    ) -> Tensor:
        ctx.parameter = weight
        ctx.deferral = deferral
        ctx.save_for_backward(x)
        rows = torch.addmm(bias, x.view(-1, x.size(-1)), weight)
        # A fresh tensor, not a view: see _LinearFunction.
        output: Tensor = torch.ops.aten._unsafe_view(rows, (*x.shape[:-1], weight.shape[1]))
        return output

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x = ctx.saved_tensors[0].detach()
        parameter: nn.Parameter = ctx.parameter
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = rows.mm(parameter.t()).view(x.shape)
        if ctx.needs_input_grad[1]:

            def compute() -> Tensor:
                gradient: Tensor = x.reshape(-1, x.shape[-1]).t().mm(rows)
                return gradient

            grad_weight = ctx.deferral.defer(parameter, compute)
        return grad_x, grad_weight, rows.sum(0) if ctx.needs_input_grad[2] else None, None


class _ConvolutionFunction(torch.autograd.Function):
    """A convolution whose backward is torch's own, once for the input and once for the weight."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        bias: Tensor | None,
        settings: tuple[Any, ...],
        deferral: Deferral,
    ) -> Tensor:
        ctx.parameter = weight
        ctx.settings = settings
        ctx.deferral = deferral
        ctx.save_for_backward(x)
        output: Tensor = torch.ops.aten.convolution(x, weight, bias, *settings)
        return output

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x = ctx.saved_tensors[0].detach()
        parameter: nn.Parameter = ctx.parameter
        settings: tuple[Any, ...] = ctx.settings

        def gradients(mask: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
            found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
                grad, x, parameter, [parameter.shape[0]], *settings, mask
            )
            return found

        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x, _, grad_bias = gradients([needs_x, False, needs_bias])
        grad_weight = None
        if needs_weight:
            grad_weight = ctx.deferral.defer(parameter, lambda: gradients([False, True, False])[1])
        # What the mask leaves out may come back all the same.
        return (
            grad_x if needs_x else None,
            grad_weight,
            grad_bias if needs_bias else None,
            None,
            None,
        )


def _apply(function: Any, *arguments: Any) -> Any:
    return function.apply(*arguments)  # torch leaves `apply` untyped


def _cast(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor if tensor.dtype == like.dtype else tensor.to(like.dtype)


class DeferringLinear(nn.Linear):
    """An nn.Linear whose weight gradient can be put off. Bits and state dict are the same."""

    deferral: Deferral

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        if not (torch.is_grad_enabled() and self.weight.requires_grad):
            return super().forward(input)
        device = input.device.type
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        output: Tensor = _apply(_LinearFunction, input, self.weight, self.bias, self.deferral)
        return output


class DeferringEmbedding(nn.Embedding):
    """An nn.Embedding whose weight gradient can be put off."""

    deferral: Deferral

    def forward(self, input: Tensor) -> Tensor:
        """(...) indices -> (..., embedding_dim)."""
        if not (torch.is_grad_enabled() and self.weight.requires_grad):
            return super().forward(input)
        padding_idx = -1 if self.padding_idx is None else self.padding_idx
        output: Tensor = _apply(_EmbeddingFunction, self.weight, input, padding_idx, self.deferral)
        return output


class _DeferringConvolution(nn.modules.conv._ConvNd):
    """A convolution whose weight gradient can be put off."""

    deferral: Deferral

    def forward(self, input: Tensor) -> Tensor:
        """As the class it stands for."""
        if not (torch.is_grad_enabled() and self.weight.requires_grad) or (
            torch.is_autocast_enabled(input.device.type)
        ):
            return super().forward(input)  # type: ignore[no-any-return]
        settings = (
            *(list(self.stride), list(self.padding), list(self.dilation)),
            *(False, [0] * len(self.stride), self.groups),
        )
        output: Tensor = _apply(
            _ConvolutionFunction, input, self.weight, self.bias, settings, self.deferral
        )
        return output


class DeferringConv1d(_DeferringConvolution, nn.Conv1d):
    """An nn.Conv1d whose weight gradient can be put off."""


class DeferringConv2d(_DeferringConvolution, nn.Conv2d):
    """An nn.Conv2d whose weight gradient can be put off."""


class DeferringConv3d(_DeferringConvolution, nn.Conv3d):
    """An nn.Conv3d whose weight gradient can be put off."""


_CONVOLUTIONS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: DeferringConv1d,
    nn.Conv2d: DeferringConv2d,
    nn.Conv3d: DeferringConv3d,
}


@dataclass(frozen=True)
class SplitReport:
    """How much of a stage's parameters W computes."""

    deferred: int
    """Elements of parameters whose gradient is put off to W."""
    parameters: int
    """Elements of all parameters that need a gradient."""


def split(module: nn.Module) -> tuple[Deferral, SplitReport]:
    """Make every known module within `module` defer, in place.

    Only plain modules are swapped: one whose weight is computed (a parametrization) or whose
    class was derived from stays as it is and has its gradients at B. A module that defers by
    itself says so by a class attribute `defers = True`, is given the stage's `deferral`, and
    returns what its `defer` gives for a parameter in backward.
    """
    deferral = Deferral()
    deferred: set[nn.Parameter] = set()
    for child in module.modules():
        if getattr(type(child), "defers", False):
            child.deferral = deferral  # type: ignore[assignment]
            deferred.update(p for p in child.parameters(recurse=False) if p.requires_grad)
            continue
        weight = child._parameters.get("weight")
        if weight is None:
            continue
        if type(child) is nn.Linear:
            child.__class__ = DeferringLinear
        elif type(child) is nn.Embedding and _plain(child):
            child.__class__ = DeferringEmbedding
        elif type(child) in _CONVOLUTIONS and _zero_padded(child):
            child.__class__ = _CONVOLUTIONS[type(child)]
        elif _is_transformers_conv1d(child):
            child.forward = partial(_conv1d_forward, child)
        else:
            continue
        child.deferral = deferral  # type: ignore[assignment]
        if weight.requires_grad:
            deferred.add(weight)
    return deferral, SplitReport(
        deferred=sum(parameter.numel() for parameter in deferred),
        parameters=sum(p.numel() for p in module.parameters() if p.requires_grad),
    )


def _is_transformers_conv1d(module: nn.Module) -> bool:
    """GPT-2's linear layer, told by its name: transformers need not be installed."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def _conv1d_forward(module: nn.Module, x: Tensor) -> Tensor:
    weight, bias = module.weight, module.bias
    assert isinstance(weight, Tensor)
    if not (torch.is_grad_enabled() and weight.requires_grad) or (
        torch.is_autocast_enabled(x.device.type)
    ):
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    output: Tensor = _apply(_Conv1DFunction, x, weight, bias, module.deferral)
    return output


def _zero_padded(convolution: nn.Module) -> bool:
    """Other paddings, and those given by name, are computed around the convolution."""
    return convolution.padding_mode == "zeros" and not isinstance(convolution.padding, str)


def _plain(embedding: nn.Embedding) -> bool:
    return not (embedding.sparse or embedding.scale_grad_by_freq or embedding.max_norm is not None)
