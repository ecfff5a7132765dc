"""ModelConfig: the shape of a GPT or Llama, and nothing about how it is cut or trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zerobubble.errors import UserError


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and choices of a decoder-only language model, checked by `check`."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    """Rows of embedding and head, padding included."""
    seq_length: int
    max_positions: int
    query_groups: int
    """Key and value heads; equal to `heads` without grouped queries."""
    head_size: int
    """Channels of one head (Megatron's kv-channels)."""
    ffn_hidden: int
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    norm_epsilon: float = 1e-5
    position_embedding: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    rotary_base: float = 10000.0
    swiglu: bool = False
    linear_bias: bool = True
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    init_std: float = 0.02

    def check(self) -> None:
        """Raise UserError, in one line, if no model has this shape."""
        sizes = {
            "--num-layers": self.layers,
            "--hidden-size": self.hidden,
            "--num-attention-heads": self.heads,
            "--vocab-size": self.vocab,
            "--seq-length": self.seq_length,
            "--max-position-embeddings": self.max_positions,
            "--num-query-groups": self.query_groups,
            "--kv-channels": self.head_size,
            "--ffn-hidden-size": self.ffn_hidden,
            "--norm-epsilon": self.norm_epsilon,
            "--rotary-base": self.rotary_base,
        }
        for flag, size in sizes.items():
            if not size > 0:
                raise UserError(f"{flag} {size} is not positive; use a size that is")
        if self.heads % self.query_groups:
            raise UserError(
                f"--num-attention-heads {self.heads} is not divisible by "
                f"--num-query-groups {self.query_groups}; use a divisor of {self.heads}"
            )
        learned = self.position_embedding == "learned_absolute"
        if learned and self.seq_length > self.max_positions:
            raise UserError(
                f"--seq-length {self.seq_length} is more than --max-position-embeddings "
                f"{self.max_positions}; raise the latter or use rope"
            )
        if self.position_embedding == "rope" and self.head_size % 2:
            raise UserError(
                f"rotary positions rotate pairs, and --kv-channels {self.head_size} is odd; "
                f"use {self.head_size + 1}"
            )
        for flag, rate in (
            ("--hidden-dropout", self.hidden_dropout),
            ("--attention-dropout", self.attention_dropout),
        ):
            if not 0 <= rate < 1:
                raise UserError(f"{flag} {rate} is not a share; use 0 or more and less than 1")
        if not self.init_std >= 0:
            raise UserError(f"--init-method-std {self.init_std} is negative; use 0 or more")
