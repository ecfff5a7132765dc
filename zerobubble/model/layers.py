"""The blocks of a decoder-only transformer: one Block serves GPT and Llama.

Every product with a weight is a plain nn.Linear or nn.Embedding call, so that whoever runs a
stage can swap in modules that compute the same bits at another time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zerobubble.model.config import ModelConfig
from zerobubble.model.seeds import seeded_dropout


class Rotary(nn.Module):
    """Rotary position embedding, halves rotated against each other (Su et al. 2021; Llama).

    The tables are computed in fp32 and kept in the model's type, in which the rotation is done,
    as in Megatron-LM.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_size: int, positions: int, base: float) -> None:
        super().__init__()
        frequencies = base ** (-torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rotate queries or keys, (b, heads, s, head_size)."""
        length = x.shape[-2]
        cos, sin = self.cos[:length].to(x.dtype), self.sin[:length].to(x.dtype)
        left, right = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-right, left), dim=-1) * sin


class Attention(nn.Module):
    """Causal self-attention with grouped queries."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.groups, self.head_size = (
            config.heads,
            config.query_groups,
            config.head_size,
        )
        inner, shared = self.heads * self.head_size, self.groups * self.head_size
        self.query = nn.Linear(config.hidden, inner, bias=config.linear_bias)
        self.key = nn.Linear(config.hidden, shared, bias=config.linear_bias)
        self.value = nn.Linear(config.hidden, shared, bias=config.linear_bias)
        self.output = nn.Linear(inner, config.hidden, bias=config.linear_bias)
        self.dropout = config.attention_dropout

    def forward(self, x: Tensor, rotary: Rotary | None) -> Tensor:
        """(b, s, hidden) -> (b, s, hidden)."""
        query, key, value = (
            self._heads(x, self.query),
            self._heads(x, self.key),
            self._heads(x, self.value),
        )
        if rotary is not None:
            query, key = rotary(query), rotary(key)
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=self.groups != self.heads,
        )
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output

    def _heads(self, x: Tensor, projection: nn.Linear) -> Tensor:
        """(b, s, hidden) -> (b, heads, s, head_size)."""
        projected: Tensor = projection(x)
        return projected.view(*x.shape[:2], -1, self.head_size).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020), or GELU in its tanh form: what Megatron-LM's default, a GELU fused
    with the bias, computes. (Its --no-bias-gelu-fusion is the exact form, 5e-4 away at most.)
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = (
            nn.Linear(config.hidden, config.ffn_hidden, bias=config.linear_bias)
            if config.swiglu
            else None
        )
        self.up = nn.Linear(config.hidden, config.ffn_hidden, bias=config.linear_bias)
        self.down = nn.Linear(config.ffn_hidden, config.hidden, bias=config.linear_bias)

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, hidden) -> (b, s, hidden)."""
        if self.gate is None:
            inner = F.gelu(self.up(x), approximate="tanh")
        else:
            inner = F.silu(self.gate(x)) * self.up(x)
        output: Tensor = self.down(inner)
        return output


class Block(nn.Module):
    """One transformer layer: norm before, residual around, attention and feed-forward."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.attention_norm = norm(config)
        self.attention = Attention(config)
        self.feed_forward_norm = norm(config)
        self.feed_forward = FeedForward(config)
        self.dropout = config.hidden_dropout
        self._drops = config.hidden_dropout > 0 or config.attention_dropout > 0

    def forward(self, x: Tensor, rotary: Rotary | None, dropout_seed: int | None) -> Tensor:
        """(b, s, hidden) -> (b, s, hidden); dropout draws from (dropout_seed, layer index)."""
        with seeded_dropout(self.training and self._drops, dropout_seed, self.index, x.device):
            x = x + F.dropout(
                self.attention(self.attention_norm(x), rotary), self.dropout, self.training
            )
            return x + F.dropout(
                self.feed_forward(self.feed_forward_norm(x)), self.dropout, self.training
            )


class Embedding(nn.Module):
    """Token embedding plus learned positions, where there are any."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.hidden)
        self.positions = (
            nn.Embedding(config.max_positions, config.hidden)
            if config.position_embedding == "learned_absolute"
            else None
        )
        self.dropout = config.hidden_dropout

    def forward(self, tokens: Tensor, dropout_seed: int | None) -> Tensor:
        """(b, s) ids -> (b, s, hidden)."""
        x: Tensor = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        with seeded_dropout(self.training and self.dropout > 0, dropout_seed, -1, x.device):
            return F.dropout(x, self.dropout, self.training)


def norm(config: ModelConfig) -> nn.Module:
    """The model's normalisation over hidden."""
    if config.normalization == "RMSNorm":
        return nn.RMSNorm(config.hidden, eps=config.norm_epsilon)
    return nn.LayerNorm(config.hidden, eps=config.norm_epsilon)
