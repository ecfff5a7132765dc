"""Layouts: every layer once, spread as FLOPs ask; checked against trying everything."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.test_model import GPT, LLAMA
from zerobubble.errors import UserError
from zerobubble.model.config import ModelConfig
from zerobubble.model.layout import head_flops, layer_flops, layers_per_stage
from zerobubble.model.stage import build_stage
from zerobubble.schedule import placement
from zerobubble.schedule.placement import Placement


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
    ("layers", "placed", "vocab", "expected"),
    [
        (30, placement.linear(4), 1, (7, 8, 8, 7)),
        (14, placement.v(4), 1, (1, 2, 2, 2, 2, 2, 2, 1)),
        (24, placement.linear(4), 1, (6, 6, 6, 6)),
        (3, placement.linear(4), 1, (1, 1, 1, 0)),
        (5, placement.v(4), 1, (0, 1, 1, 1, 1, 1, 0, 0)),
        # A head of many layers' work: V puts embedding and head on one rank, linear does not.
        (14, placement.v(4), 50000, (0, 3, 3, 2, 2, 2, 2, 0)),
        (14, placement.linear(4), 50000, (4, 5, 5, 0)),
    ],
)
def test_padding_spreads_the_layers(
    layers: int, placed: Placement, vocab: int, expected: tuple[int, ...]
) -> None:
    config = with_layers(layers, vocab)
    assert layers_per_stage(config, placed, allow_padding=True) == expected


@given(st.integers(1, 80), st.integers(1, 8), st.integers(1, 3), st.integers(1, 60000))
@settings(max_examples=200, deadline=None)
def test_padding_keeps_every_layer(layers: int, ranks: int, chunks: int, vocab: int) -> None:
    config = with_layers(layers, vocab)
    for placed in (placement.looped(ranks, chunks), placement.v(ranks)):
        spread = layers_per_stage(config, placed, allow_padding=True)
        assert len(spread) == placed.stages
        assert sum(spread) == layers
        assert min(spread) >= 0
        between = spread[1:-1]
        if between:
            assert max(between) - min(between) <= 1
            assert max(spread[0], spread[-1]) <= min(between)


def loads(config: ModelConfig, placed: Placement, spread: tuple[int, ...]) -> tuple[int, int]:
    """FLOPs of the largest stage and of the largest rank."""
    stages = [n * layer_flops(config) for n in spread]
    stages[-1] += head_flops(config)
    ranks = [sum(stages[s] for s in placed.stages_of(r)) for r in range(placed.ranks)]
    return max(stages), max(ranks)


@given(
    st.integers(1, 9),
    st.sampled_from([placement.linear(4), placement.v(2), placement.looped(2, 2), placement.v(3)]),
    st.sampled_from([1, 100, 300, 900, 2500]),
)
@settings(max_examples=60, deadline=None)
def test_no_other_spread_is_better(layers: int, placed: Placement, vocab: int) -> None:
    config = with_layers(layers, vocab)
    best = min(
        loads(config, placed, spread)
        for spread in itertools.product(range(layers + 1), repeat=placed.stages)
        if sum(spread) == layers
        and max(spread[1:-1]) - min(spread[1:-1]) <= 1
        and max(spread[0], spread[-1]) <= min(spread[1:-1])
    )
    spread = layers_per_stage(config, placed, allow_padding=True)
    assert loads(config, placed, spread) == best


def test_flops_are_two_per_weight_and_token_plus_scores() -> None:
    stage = build_stage(LLAMA, (6,), 0, 1)
    block = sum(p.numel() for p in stage.layers["0"].parameters() if p.dim() > 1)
    assert layer_flops(LLAMA) == 2 * block + 4 * 16 * 32
    assert stage.head is not None
    assert head_flops(LLAMA) == 2 * stage.head.weight.numel()


def test_layouts_need_no_torch() -> None:
    code = "import sys, zerobubble.model.layout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
