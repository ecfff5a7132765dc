"""AdamW on fp32 master weights, for parameters in fp32, bf16 or fp16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zerobubble.optim.norm import square


class Optimizer:
    """Owns the accumulators and masters of named parameters, in the order given.

    Gives every parameter an fp32 `main_grad` of its shape, to which the runtime adds one
    contribution per microbatch. A master is the fp32 copy that AdamW updates; an fp32
    parameter is its own. As in Megatron-LM, biases and other one-dimensional parameters do
    not decay. Parameters that need no gradient are left alone.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        self.parameters = {n: p for n, p in parameters.items() if p.requires_grad}
        self.masters: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
            own = parameter.dtype == torch.float32
            self.masters[name] = parameter if own else parameter.detach().float()
        decayed = [m for m in self.masters.values() if m.dim() > 1]
        plain = [m for m in self.masters.values() if m.dim() <= 1]
        groups = [
            {"params": decayed, "weight_decay": weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self._adam: torch.optim.Optimizer | None = None
        if self.parameters:
            self._adam = torch.optim.AdamW(
                [group for group in groups if group["params"]], lr=0.0, betas=betas, eps=eps
            )

    def zero_grad(self) -> None:
        """Forget the accumulated gradients."""
        for gradient in self._gradients():
            gradient.zero_()

    def unscale(self, inverse_scale: float) -> None:
        """Multiply the accumulated gradients by 1 / loss scale."""
        if inverse_scale != 1.0:
            for gradient in self._gradients():
                gradient.mul_(inverse_scale)

    def squares(self) -> list[float]:
        """The square of every parameter's accumulated gradient, in the parameters' order."""
        return [square(gradient) for gradient in self._gradients()]

    def step(self, learning_rate: float, clip_coefficient: float) -> None:
        """Update masters and parameters; gradients are scaled in place where clipped."""
        if self._adam is None:
            return
        for master, gradient in zip(self.masters.values(), self._gradients(), strict=True):
            master.grad = gradient.mul_(clip_coefficient) if clip_coefficient < 1 else gradient
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        self._adam.step()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                master = self.masters[name]
                master.grad = None
                if master is not parameter:
                    parameter.copy_(master)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Master weight, moments and step count, by parameter name."""
        assert self._adam is not None or not self.parameters
        return {
            name: {
                "master": master.detach(),
                **(dict(self._adam.state[master]) if self._adam is not None else {}),
            }
            for name, master in self.masters.items()
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Continue from `state_dict`, of this or any other cut of the model.

        Masters and moments only: low-precision parameters are the caller's to load.
        """
        for name, master in self.masters.items():
            values = dict(state[name])
            with torch.no_grad():
                master.copy_(values.pop("master"))
            assert self._adam is not None
            self._adam.state.pop(master, None)  # moments of steps that the state has not seen
            if values:
                self._adam.state[master] = {
                    key: value.clone() if isinstance(value, Tensor) else value
                    for key, value in values.items()
                }

    def _gradients(self) -> list[Tensor]:
        return [p.main_grad for p in self.parameters.values()]  # type: ignore[attr-defined]
