"""REF: the uncut model in one process, ordinary modules, one `loss.backward()` per microbatch.

It imports nothing of the runtime, the schedules, the optimizer or the deferring modules.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerobubble.model.batch import Batch
from zerobubble.model.config import ModelConfig
from zerobubble.model.stage import build_stage


@dataclass(frozen=True)
class Step:
    """What one training step gave."""

    losses: list[Tensor]
    grad_norm: float
    gradients: dict[str, Tensor]
    """fp32, before clipping."""


def global_norm(gradients: Iterable[Tensor]) -> float:
    """Each fp32 gradient's sum of squares in fp32, added in layer order in float64, then the root.

    math.sqrt is correctly rounded; x ** 0.5 is not, about once in a thousand times.
    """
    total = 0.0
    for gradient in gradients:
        total += torch.sum(gradient * gradient).item()
    return math.sqrt(total)


class Reference:
    """Plain gradient accumulation, fp32 master weights, AdamW, one global norm."""

    def __init__(
        self,
        config: ModelConfig,
        seed: int,
        dtype: torch.dtype = torch.float32,
        *,
        clip: float = 1.0,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        self.model = build_stage(config, (config.layers,), 0, seed, dtype).train()
        self.clip = clip
        self.parameters = dict(self.model.named_parameters())
        self.masters = {n: p.detach().float().clone() for n, p in self.parameters.items()}
        decayed = [m for m in self.masters.values() if m.dim() > 1]
        plain = [m for m in self.masters.values() if m.dim() <= 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ],
            betas=betas,
            eps=eps,
        )

    def step(self, batches: Sequence[Batch], learning_rate: float, loss_scale: float = 1.0) -> Step:
        """Forward, backward, clip and update over the microbatches in ascending order."""
        gradients = {n: torch.zeros_like(m) for n, m in self.masters.items()}
        losses = []
        for batch in batches:
            loss = self.model(None, batch)
            losses.append(loss.detach())
            (loss * (loss_scale / len(batches))).backward()
            for name, parameter in self.parameters.items():
                if parameter.grad is not None:
                    gradients[name] += parameter.grad.float()
                    parameter.grad = None
        for gradient in gradients.values():
            gradient.mul_(1 / loss_scale)
        norm = global_norm(gradients.values())
        coefficient = min(1.0, self.clip / (norm + 1e-6)) if self.clip > 0 else 1.0
        for name, master in self.masters.items():
            master.grad = gradients[name] * coefficient if coefficient < 1 else gradients[name]
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self.masters[name])
        return Step(losses, norm, gradients)

    def evaluate(self, batches: Sequence[Batch]) -> list[Tensor]:
        """The losses of the batches in evaluation mode."""
        self.model.eval()
        with torch.no_grad():
            losses = [self.model(None, batch) for batch in batches]
        self.model.train()
        return losses

    def weights(self) -> dict[str, Tensor]:
        """fp32 master weights by name."""
        return {name: master.detach() for name, master in self.masters.items()}
