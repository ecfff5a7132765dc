"""A model cut into stages: each a module with the embedding, some layers, or the head."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zerobubble.model.batch import Batch
from zerobubble.model.config import ModelConfig
from zerobubble.model.layers import Block, Embedding, Rotary, norm
from zerobubble.model.seeds import mix


@dataclass(frozen=True)
class Cut:
    """Which part of the model a stage is."""

    first_layer: int
    layers: int
    embedding: bool
    head: bool

    @staticmethod
    def of(layers_per_stage: tuple[int, ...], stage: int) -> Cut:
        """Stage `stage` of a layout: embedding on the first, head on the last."""
        return Cut(
            first_layer=sum(layers_per_stage[:stage]),
            layers=layers_per_stage[stage],
            embedding=stage == 0,
            head=stage == len(layers_per_stage) - 1,
        )


class StageModule(nn.Module):
    """`module(hidden, batch)`: (b, s, hidden) in and out, except at the ends of the model.

    Parameter names are those of the uncut model (`layers.7.attention.query.weight`), and the
    uncut model is the one stage of a layout of one.
    """

    def __init__(self, config: ModelConfig, cut: Cut) -> None:
        super().__init__()
        self.embedding = Embedding(config) if cut.embedding else None
        self.rotary = (
            Rotary(config.head_size, config.seq_length, config.rotary_base)
            if config.position_embedding == "rope" and cut.layers
            else None
        )
        indices = range(cut.first_layer, cut.first_layer + cut.layers)
        self.layers = nn.ModuleDict({str(i): Block(config, i) for i in indices})
        self.final_norm = norm(config) if cut.head else None
        self.head = nn.Linear(config.hidden, config.vocab, bias=False) if cut.head else None

    def forward(self, hidden: Tensor | None, batch: Batch) -> Tensor:
        """The next stage's input; on the last stage the batch's mean loss, a scalar in fp32.

        hidden: (b, s, hidden) from the stage before, None on the first stage.
        """
        if self.embedding is not None:
            hidden = self.embedding(batch.tokens, batch.dropout_seed)
        assert hidden is not None
        for block in self.layers.values():
            hidden = block(hidden, self.rotary, batch.dropout_seed)
        if self.head is None or self.final_norm is None:
            return hidden
        logits = self.head(self.final_norm(hidden)).float()
        losses = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
        mask = batch.loss_mask.flatten()
        return (losses * mask).sum() / mask.sum().clamp(min=1)


def build_stage(
    config: ModelConfig,
    layers_per_stage: tuple[int, ...],
    stage: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> StageModule:
    """Stage `stage` of the layout, initialised; nothing of any other stage is built.

    As Megatron: weights from N(0, init_std), those that write to the residual stream scaled
    by 1/sqrt(2 layers), biases 0, norms 1. Every block draws from the seed and its own index,
    in fp32 on the CPU, so a weight's bits depend on neither layout nor device, and on the
    precision only by rounding. Raises UserError if the config is not one of a model.
    """
    config.check()
    with torch.device("meta"):
        module = StageModule(config, Cut.of(layers_per_stage, stage))
    rotary = module.rotary
    module.rotary = None  # its tables are computed, not drawn
    module.to_empty(device="cpu")
    if rotary is not None:
        module.rotary = Rotary(config.head_size, config.seq_length, config.rotary_base)
    if module.embedding is not None:
        _initialise(module.embedding, config, mix("embedding", seed))
    for index, block in module.layers.items():
        _initialise(block, config, mix("layer", seed, index))
    if module.head is not None and module.final_norm is not None:
        _initialise(module.final_norm, config, 0)
        _initialise(module.head, config, mix("head", seed))
    return module.to(device=device, dtype=dtype)


@torch.no_grad()
def _initialise(module: nn.Module, config: ModelConfig, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            residual = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
            scale = 1 / math.sqrt(2 * config.layers) if residual else 1.0
            parameter.normal_(0.0, config.init_std * scale, generator=generator)
        elif "norm" in name or name == "weight":
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            parameter.zero_()
