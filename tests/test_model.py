"""The model: what it computes, and that no cut, layout or order of microbatches changes it."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from zerobubble.errors import UserError
from zerobubble.model.batch import Batch
from zerobubble.model.config import ModelConfig
from zerobubble.model.layers import Attention, FeedForward, Rotary
from zerobubble.model.stage import build_stage

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
@pytest.mark.parametrize("layout", [(6,), (3, 3), (1, 2, 2, 1), (0, 6, 0), (3, 0, 3)])
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


def test_recomputation_draws_the_same_dropout() -> None:
    block = build_stage(GPT, (6,), 0, 1).layers["2"]
    x = torch.randn(2, 16, 32, requires_grad=True)
    gradients = []
    for again in (False, True):
        if again:  # its own care for random state is off: the block's has to do
            y = checkpoint(block, x, None, 1, use_reentrant=False, preserve_rng_state=False)
        else:
            y = block(x, None, 1)
        gradients.append(torch.autograd.grad(y.pow(2).sum(), [x, *block.parameters()]))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_an_error_under_dropout_leaves_the_random_state() -> None:
    state = torch.get_rng_state()
    block = build_stage(GPT, (6,), 0, 1).layers["2"]
    with pytest.raises(RuntimeError):
        block(torch.randn(1, 16, 31, generator=torch.Generator()), None, 1)
    assert torch.equal(torch.get_rng_state(), state)


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


def independent_loss(config: ModelConfig, weights: dict[str, Tensor], one: Batch) -> float:
    """The papers' formulas, head by head, in float64: none of torch.nn."""
    w = {name: weight.detach().double() for name, weight in weights.items()}

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", torch.zeros(()))

    def norm(x: Tensor, name: str) -> Tensor:
        if config.normalization == "LayerNorm":
            x = x - x.mean(-1, keepdim=True)
        scale = (x.pow(2).mean(-1, keepdim=True) + config.norm_epsilon).rsqrt()
        return x * scale * w[f"{name}.weight"] + w.get(f"{name}.bias", torch.zeros(()))

    def rotate(x: Tensor) -> Tensor:
        if config.position_embedding != "rope":
            return x
        half = config.head_size // 2
        turn = config.rotary_base ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.outer(torch.arange(config.seq_length, dtype=torch.float64), turn)
        z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
            torch.ones(()).double(), angle
        )
        return torch.cat((z.real, z.imag), dim=-1)

    def attention(x: Tensor, name: str) -> Tensor:
        query, key, value = (linear(x, f"{name}.{part}") for part in ("query", "key", "value"))
        size, mixed = config.head_size, []
        for head in range(config.heads):
            group = head // (config.heads // config.query_groups)
            q = rotate(query[..., head * size : (head + 1) * size])
            k = rotate(key[..., group * size : (group + 1) * size])
            scores = q @ k.transpose(-1, -2) / math.sqrt(size)
            later = torch.ones(scores.shape[-2:]).triu(1).bool()
            share = scores.masked_fill(later, -math.inf).exp()
            share = share / share.sum(-1, keepdim=True)
            mixed.append(share @ value[..., group * size : (group + 1) * size])
        return linear(torch.cat(mixed, dim=-1), f"{name}.output")

    def feed_forward(x: Tensor, name: str) -> Tensor:
        up = linear(x, f"{name}.up")
        if config.swiglu:
            gate = linear(x, f"{name}.gate")
            return linear(gate / (1 + (-gate).exp()) * up, f"{name}.down")
        tanh = torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3))
        return linear(0.5 * up * (1 + tanh), f"{name}.down")

    x = w["embedding.tokens.weight"][one.tokens]
    if config.position_embedding == "learned_absolute":
        x = x + w["embedding.positions.weight"][: config.seq_length]
    for i in range(config.layers):
        x = x + attention(norm(x, f"layers.{i}.attention_norm"), f"layers.{i}.attention")
        x = x + feed_forward(norm(x, f"layers.{i}.feed_forward_norm"), f"layers.{i}.feed_forward")
    logits = linear(norm(x, "final_norm"), "head")
    losses = logits.exp().sum(-1).log() - logits.gather(-1, one.labels[..., None])[..., 0]
    return ((losses * one.loss_mask).sum() / one.loss_mask.sum()).item()


@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
def test_the_model_is_what_the_papers_say(config: ModelConfig) -> None:
    whole = build_stage(config, (6,), 0, 1).eval()
    with torch.no_grad():  # away from where biases, norms and small logits hide mistakes
        generator = torch.Generator().manual_seed(2)
        for parameter in whole.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    loss = whole(None, batch()).item()
    assert abs(loss - math.log(64)) > 0.1
    expected = independent_loss(config, dict(whole.named_parameters()), batch())
    assert loss == pytest.approx(expected, rel=1e-5)


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


def impossible(**changes: object) -> str:
    with pytest.raises(UserError) as error:
        dataclasses.replace(LLAMA, **changes).check()  # type: ignore[arg-type]
    return str(error.value)


def test_an_impossible_shape_is_refused_in_one_line() -> None:
    GPT.check()
    LLAMA.check()
    for field, flag in (
        ("layers", "--num-layers"),
        ("hidden", "--hidden-size"),
        ("heads", "--num-attention-heads"),
        ("vocab", "--vocab-size"),
        ("seq_length", "--seq-length"),
        ("max_positions", "--max-position-embeddings"),
        ("query_groups", "--num-query-groups"),
        ("head_size", "--kv-channels"),
        ("ffn_hidden", "--ffn-hidden-size"),
        ("norm_epsilon", "--norm-epsilon"),
        ("rotary_base", "--rotary-base"),
    ):
        assert impossible(**{field: 0}) == f"{flag} 0 is not positive; use a size that is"
    assert impossible(query_groups=3) == (
        "--num-attention-heads 4 is not divisible by --num-query-groups 3; use a divisor of 4"
    )
    assert impossible(position_embedding="learned_absolute", seq_length=32) == (
        "--seq-length 32 is more than --max-position-embeddings 16; raise the latter or use rope"
    )
    assert impossible(head_size=7) == (
        "rotary positions rotate pairs, and --kv-channels 7 is odd; use 8"
    )
    assert impossible(hidden_dropout=1.0) == (
        "--hidden-dropout 1.0 is not a share; use 0 or more and less than 1"
    )
    assert impossible(attention_dropout=-0.1).startswith("--attention-dropout -0.1 is not a share")
    assert impossible(init_std=-1.0) == "--init-method-std -1.0 is negative; use 0 or more"
    with pytest.raises(UserError, match="--vocab-size 0"):
        build_stage(dataclasses.replace(GPT, vocab=0), (6,), 0, 1)
