"""Hugging Face models defer without a change to their code, to the same bits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from zerobubble.runtime.stage import Stage


class Whole(nn.Module):
    """A causal language model as the only stage of a pipeline: ids in, loss out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, _hidden: None, batch: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        return loss


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=False,
    )
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize(("make", "share"), [(llama, 0.75), (gpt2, 0.9)])
def test_gradients_are_bitwise_those_of_one_backward(make: Any, share: float) -> None:
    torch.manual_seed(0)
    module = Whole(make()).train()
    reference = copy.deepcopy(module)
    batches = [torch.randint(0, 64, (2, 12)) for _ in range(3)]
    for batch in batches:
        reference(None, batch).backward()
    stage = Stage(0, module, last=True)
    assert stage.report.deferred / stage.report.parameters >= share
    for i, batch in enumerate(batches):
        stage.forward(i, None, batch)
    for i in range(3):
        stage.backward_input(i, torch.tensor(1.0))
    for i in range(3):
        stage.backward_weight(i)
    assert stage.live == 0
    expected = dict(reference.named_parameters())
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, expected[name].grad), name
