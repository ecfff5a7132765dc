"""The model: what it computes, and that no cut, layout or order of microbatches changes it."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from zerobubble.errors import UserError
from zerobubble.model.batch import Batch
from zerobubble.model.config import ModelConfig
from zerobubble.model.layers import Attention, FeedForward, Rotary
from zerobubble.model.layout import head_flops, layer_flops, layers_per_stage
from zerobubble.model.stage import build_stage
from zerobubble.schedule import placement

GPT = ModelConfig(
    layers=6,
    hidden=32,
    heads=4,
    vocab=64,
    seq_length=16,
    max_positions=16,
    query_groups=4,
    head_size=8,
    ffn_hidden=128,
    hidden_dropout=0.1,
    attention_dropout=0.1,
)
LLAMA = dataclasses.replace(
    GPT,
    query_groups=2,
    ffn_hidden=64,
    normalization="RMSNorm",
    position_embedding="rope",
    swiglu=True,
    linear_bias=False,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)


def batch(dropout_seed: int | None = 5, rows: int = 2) -> Batch:
    ids = torch.randint(0, 64, (rows, 17), generator=torch.Generator().manual_seed(3))
    return Batch(ids[:, :-1], ids[:, 1:], torch.ones(rows, 16), dropout_seed)


@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", [(6,), (3, 3), (1, 2, 2, 1), (0, 6, 0)])
def test_a_cut_model_is_the_uncut_one(
    config: ModelConfig, dtype: torch.dtype, layout: tuple[int, ...]
) -> None:
    whole = build_stage(config, (6,), 0, 1, dtype)
    stages = [build_stage(config, layout, s, 1, dtype) for s in range(len(layout))]
    names = [n for stage in stages for n, _ in stage.named_parameters()]
    assert names == [n for n, _ in whole.named_parameters()]
    parameters = [p for stage in stages for p in stage.parameters()]
    assert all(torch.equal(p, q) for p, q in zip(parameters, whole.parameters(), strict=True))
    hidden = None
    for stage in stages:
        hidden = stage(hidden, batch())
    loss = whole(None, batch())
    assert hidden is not None
    assert torch.equal(hidden, loss)
    assert abs(loss.item() - math.log(64)) < 0.5


def test_initialisation_has_the_asked_spread() -> None:
    wide = dataclasses.replace(GPT, hidden=128, head_size=32, ffn_hidden=512)
    block = build_stage(wide, (6,), 0, 1).layers["3"]
    assert block.attention.query.weight.std().item() == pytest.approx(0.02, rel=0.05)
    output = block.feed_forward.down.weight.std().item()
    assert output == pytest.approx(0.02 / math.sqrt(12), rel=0.05)
    assert torch.equal(block.attention_norm.weight, torch.ones(128))
    assert not block.attention.query.bias.any()


def test_dropout_depends_on_seed_and_layer_only() -> None:
    whole = build_stage(GPT, (6,), 0, 1)
    state = torch.get_rng_state()
    first, other, again = (whole(None, batch(seed)) for seed in (1, 2, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)
    x = torch.randn(1, 16, 32)
    same_weights = {str(i): build_stage(GPT, (6,), 0, 1).layers["2"] for i in (2, 3)}
    same_weights["3"].index = 3
    outputs = [block(x, None, 1) for block in same_weights.values()]
    assert not torch.equal(*outputs)


def test_dropout_without_a_seed_is_refused_in_training_only() -> None:
    whole = build_stage(GPT, (6,), 0, 1)
    with pytest.raises(UserError, match="dropout_seed"):
        whole(None, batch(None))
    whole.eval()
    assert torch.equal(whole(None, batch(None)), whole(None, batch(9)))


def test_the_loss_is_the_masked_mean() -> None:
    whole = build_stage(LLAMA, (6,), 0, 1)
    one = batch()
    mask = torch.zeros(2, 16)
    mask[0, 3], mask[1, 7] = 1, 1
    masked = whole(None, dataclasses.replace(one, loss_mask=mask))
    singles = [
        whole(None, dataclasses.replace(one, loss_mask=mask * row))
        for row in (torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [1.0]]))
    ]
    assert masked.item() == pytest.approx((singles[0] + singles[1]).item() / 2, rel=1e-6)
    nothing = whole(None, dataclasses.replace(one, loss_mask=torch.zeros(2, 16)))
    assert nothing.item() == 0.0


def test_rotary_scores_depend_on_distance_only() -> None:
    rotary = Rotary(8, 16, 10000.0)
    query, key = torch.randn(8), torch.randn(8)
    queries = rotary(query.expand(1, 1, 16, 8))[0, 0]
    keys = rotary(key.expand(1, 1, 16, 8))[0, 0]
    scores = queries @ keys.T
    for distance in range(5):
        diagonal = scores.diagonal(-distance)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), atol=1e-4)
    assert torch.equal(queries[0], query)


def test_grouped_queries_equal_full_attention_with_repeated_keys() -> None:
    grouped = Attention(LLAMA)
    full = Attention(dataclasses.replace(LLAMA, query_groups=4))
    with torch.no_grad():
        for name in ("query", "output"):
            getattr(full, name).weight.copy_(getattr(grouped, name).weight)
        for name in ("key", "value"):
            rows = getattr(grouped, name).weight.view(2, 8, 32).repeat_interleave(2, dim=0)
            getattr(full, name).weight.copy_(rows.reshape(32, 32))
    x = torch.randn(2, 16, 32)
    assert torch.allclose(grouped(x, None), full(x, None), atol=1e-6)


def test_attention_is_causal() -> None:
    attention = Attention(LLAMA)
    x = torch.randn(1, 16, 32)
    later = x.clone()
    later[:, 9:] += 1
    assert torch.allclose(attention(x, None)[:, :9], attention(later, None)[:, :9], atol=1e-6)


def test_feed_forward_formulas() -> None:
    x = torch.randn(3, 5, 32)
    swiglu = FeedForward(LLAMA)
    assert swiglu.gate is not None
    inner = x @ swiglu.gate.weight.T
    expected = (inner * torch.sigmoid(inner) * (x @ swiglu.up.weight.T)) @ swiglu.down.weight.T
    assert torch.allclose(swiglu(x), expected, atol=1e-6)
    gelu = FeedForward(GPT)
    z = F.linear(x, gelu.up.weight, gelu.up.bias)
    tanh = 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    expected = F.linear(tanh, gelu.down.weight, gelu.down.bias)
    assert torch.allclose(gelu(x), expected, atol=1e-6)


def with_layers(layers: int, vocab: int = 64) -> ModelConfig:
    return dataclasses.replace(GPT, layers=layers, vocab=vocab)


def test_layers_must_divide_unless_padding_is_allowed() -> None:
    with pytest.raises(UserError) as error:
        layers_per_stage(with_layers(30), placement.v(4))
    assert str(error.value) == (
        "30 layers do not divide over 4 ranks x 2 stages; add --allow-padding-num-layers or use 32"
    )
    assert layers_per_stage(with_layers(24), placement.v(4)) == (3,) * 8


@pytest.mark.parametrize(
    ("layers", "placed", "expected"),
    [
        (30, placement.linear(4), (7, 8, 8, 7)),
        (14, placement.v(4), (1, 2, 2, 2, 2, 2, 2, 1)),
        (24, placement.linear(4), (6, 6, 6, 6)),
        (3, placement.linear(4), (1, 1, 1, 0)),
    ],
)
def test_padding_spreads_the_layers(
    layers: int, placed: placement.Placement, expected: tuple[int, ...]
) -> None:
    assert layers_per_stage(with_layers(layers, vocab=1), placed, allow_padding=True) == expected


@given(st.integers(1, 80), st.integers(1, 8), st.integers(1, 3), st.integers(1, 60000))
@settings(max_examples=200, deadline=None)
def test_padding_keeps_every_layer_and_balances(
    layers: int, ranks: int, chunks: int, vocab: int
) -> None:
    config = with_layers(layers, vocab)
    placed = placement.looped(ranks, chunks)
    spread = layers_per_stage(config, placed, allow_padding=True)
    assert sum(spread) == layers
    assert min(spread) >= 0
    if layers % placed.stages == 0:
        return
    middle = spread[1:-1]
    if middle:
        assert max(middle) - min(middle) <= 1
        assert max(spread[0], spread[-1]) <= max(middle)
    loads = [n * layer_flops(config) for n in spread]
    loads[-1] += head_flops(config)
    for stage, count in enumerate(spread):  # moving one layer anywhere does not help
        if count and loads[stage] == max(loads):
            assert min(loads) + layer_flops(config) >= loads[stage]


def test_flops_are_two_per_weight_and_token_plus_scores() -> None:
    stage = build_stage(LLAMA, (6,), 0, 1)
    block = sum(p.numel() for p in stage.layers["0"].parameters() if p.dim() > 1)
    assert layer_flops(LLAMA) == 2 * block + 4 * 16 * 32
    assert stage.head is not None
    assert head_flops(LLAMA) == 2 * stage.head.weight.numel()
