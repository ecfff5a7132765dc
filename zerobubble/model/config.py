"""ModelConfig: the shape of a GPT or Llama, and nothing about how it is cut or trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
