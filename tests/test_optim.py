"""Learning rate, loss scale, norm and AdamW against closed forms and Megatron's behaviour."""

from __future__ import annotations

import io
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from zerobubble.optim.learning_rate import LearningRate
from zerobubble.optim.loss_scale import DynamicLossScale, StaticLossScale
from zerobubble.optim.norm import clip_coefficient, global_norm, square
from zerobubble.optim.optimizer import Optimizer


def test_warm_up_starts_at_zero_and_ends_at_the_highest() -> None:
    rate = LearningRate(1.5e-4, 1e-5, 51.2, 5120, "cosine")
    assert rate.at(0) == 0.0
    assert rate.at(16) == pytest.approx(1.5e-4 * 16 / 51.2)
    assert rate.at(5120) == pytest.approx(1e-5)
    assert rate.at(10**6) == 1e-5


def test_the_first_line_of_a_published_log() -> None:
    # lr 1.5e-4, warm-up 1% of 320000 iterations, global batch 64: Megatron prints 4.687E-08.
    rate = LearningRate(1.5e-4, 1e-5, 0.01 * 320000 * 64, 320000 * 64, "cosine")
    assert f"{rate.at(64):.3E}" == "4.687E-08"


@pytest.mark.parametrize(
    ("style", "samples", "expected"),
    [
        ("constant", 10**9, 1.0),
        ("linear", 60, 0.1 + 0.9 * 0.5),
        ("cosine", 60, 0.1 + 0.9 * 0.5),
        ("cosine", 40, 0.1 + 0.9 * (math.cos(math.pi / 4) + 1) / 2),
        ("inverse-square-root", 80, 0.5),
        ("inverse-square-root", 100, math.sqrt(0.2)),
        ("linear", 101, 0.1),
    ],
)
def test_decay(style: str, samples: int, expected: float) -> None:
    rate = LearningRate(1.0, 0.1, 20, 100, style)  # type: ignore[arg-type]
    assert rate.at(samples) == pytest.approx(expected)


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root"])
@pytest.mark.parametrize("warmup", [0, 16, 51.2])
def test_the_learning_rate_has_megatrons_bits(style: str, warmup: float) -> None:
    scheduler = pytest.importorskip("megatron.core.optimizer_param_scheduler")
    group: dict[str, float] = {}
    theirs = scheduler.OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),
        init_lr=0.0,
        max_lr=1.5e-4,
        min_lr=1e-5,
        lr_warmup_steps=warmup,
        lr_decay_steps=320,
        lr_decay_style=style,
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=320,
        wd_incr_style="constant",
    )
    rate = LearningRate(1.5e-4, 1e-5, warmup, 320, style)  # type: ignore[arg-type]
    for samples in range(0, 400, 8):
        assert rate.at(samples) == group["lr"]
        theirs.step(8)


def scales(scaler: DynamicLossScale, overflows: str) -> list[float]:
    found = []
    for letter in overflows:
        scaler.update(letter == "x")
        found.append(scaler.scale)
    return found


def test_dynamic_loss_scale_tolerates_then_halves_then_doubles() -> None:
    scaler = DynamicLossScale(initial=16.0, lowest=2.0, window=3, hysteresis=2)
    # The first overflow is tolerated; then every one halves, down to the lowest.
    assert scales(scaler, "xxxxx") == [16, 8, 4, 2, 2]
    # Growth needs a window of clean steps, and refills the tolerance.
    assert scales(scaler, "..x...") == [2, 2, 2, 2, 2, 4]
    assert scales(scaler, "xx") == [4, 2]


def test_dynamic_loss_scale_is_megatrons() -> None:
    grad_scaler = pytest.importorskip("megatron.core.optimizer.grad_scaler")
    generator = torch.Generator().manual_seed(0)
    overflows = "".join("x" if x < 0.2 else "." for x in torch.rand(300, generator=generator))
    theirs = grad_scaler.DynamicGradScaler.__new__(grad_scaler.DynamicGradScaler)
    theirs._scale = torch.tensor([2.0**10])
    theirs.min_scale = torch.tensor([1.0])
    theirs.growth_factor, theirs.backoff_factor = torch.tensor([2.0]), torch.tensor([0.5])
    theirs.growth_interval, theirs.hysteresis = 4, 2
    theirs._growth_tracker, theirs._hysteresis_tracker = 0, 2
    expected = []
    for letter in overflows:
        theirs.update(letter == "x")
        expected.append(theirs.scale.item())
    assert scales(DynamicLossScale(2.0**10, 1.0, 4, 2), overflows) == expected


def test_loss_scale_continues_from_a_checkpoint() -> None:
    first = DynamicLossScale(16.0, 1.0, 3, 2)
    scales(first, ".x..")
    second = DynamicLossScale()
    second.load_state_dict(first.state_dict())
    second._window, second._hysteresis = 3, 2
    assert scales(first, "x.x....") == scales(second, "x.x....")
    assert StaticLossScale(8.0).scale == 8.0


def test_a_dynamic_loss_scale_continues_from_a_constant_one_at_its_start() -> None:
    scaler = DynamicLossScale(16.0)
    scaler.load_state_dict(StaticLossScale(1.0).state_dict())
    assert scaler.scale == 16.0
    assert scales(scaler, "xx") == [16, 8]


def test_the_norm_is_that_of_all_gradients() -> None:
    assert global_norm([9.0, 16.0]) == 5.0
    assert clip_coefficient(5.0, 1.0) == pytest.approx(0.2)
    assert clip_coefficient(0.5, 1.0) == 1.0
    assert clip_coefficient(5.0, 0.0) == 1.0
    assert not math.isfinite(global_norm([1.0, math.inf]))
    assert not math.isfinite(global_norm([1.0, math.nan]))


def test_squares_add_up_to_the_norm_of_one_long_vector() -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(n, generator=generator) for n in (1, 7, 1000, 4096)]
    expected = torch.cat(gradients).double().norm().item()
    assert global_norm(map(square, gradients)) == pytest.approx(expected, rel=1e-6)
    # In float64: a small square is not lost beside a large one, as it is in fp32.
    assert global_norm([2.0**30, 1.0]) == math.sqrt(2.0**30 + 1)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_one_value_that_is_not_finite_shows_in_the_norm(value: float) -> None:
    gradient = torch.ones(5)
    gradient[3] = value
    assert not math.isfinite(global_norm([1.0, square(gradient), 2.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_step_is_adamw_and_only_matrices_decay(dtype: torch.dtype) -> None:
    linear = nn.Linear(3, 2).to(dtype)
    before = {n: p.detach().float().clone() for n, p in linear.named_parameters()}
    optimizer = Optimizer(
        dict(linear.named_parameters()), weight_decay=0.1, betas=(0.9, 0.99), eps=1e-8
    )
    for parameter in linear.parameters():
        parameter.main_grad.fill_(4.0)  # type: ignore[union-attr, operator]
    optimizer.unscale(0.5)
    assert optimizer.squares() == [24.0, 8.0]
    optimizer.step(0.01, 0.25)
    # After bias correction the first step of Adam is the gradient's sign.
    expected = {
        "weight": before["weight"] * (1 - 0.01 * 0.1) - 0.01,
        "bias": before["bias"] - 0.01,
    }
    for name, master in optimizer.masters.items():
        assert torch.allclose(master, expected[name], atol=1e-6), name
        assert torch.equal(dict(linear.named_parameters())[name], master.to(dtype))
    optimizer.zero_grad()
    assert optimizer.squares() == [0.0, 0.0]


def test_state_continues_bitwise() -> None:
    def make() -> tuple[nn.Linear, Optimizer]:
        torch.manual_seed(0)
        linear = nn.Linear(3, 2)
        names = dict(linear.named_parameters())
        return linear, Optimizer(names, weight_decay=0.1, betas=(0.9, 0.99), eps=1e-8)

    def step(linear: nn.Linear, optimizer: Optimizer, value: float) -> None:
        for parameter in linear.parameters():
            parameter.main_grad.fill_(value)  # type: ignore[union-attr, operator]
        optimizer.step(0.01, 1.0)

    one, first = make()
    step(one, first, 1.0)
    other, second = make()
    second.load_state_dict({n: dict(s) for n, s in first.state_dict().items()})
    for value in (2.0, -3.0):
        step(one, first, value)
        step(other, second, value)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def test_loading_a_state_before_any_step_forgets_the_moments() -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    optimizer = Optimizer({"w": parameter}, weight_decay=0.0, betas=(0.9, 0.99), eps=0.0)
    start = {n: {k: v.clone() for k, v in s.items()} for n, s in optimizer.state_dict().items()}
    parameter.main_grad.fill_(3.0)  # type: ignore[attr-defined]
    optimizer.step(0.01, 1.0)
    optimizer.load_state_dict(start)
    assert torch.equal(parameter, torch.ones(2, 2))
    parameter.main_grad.fill_(-1.0)  # type: ignore[attr-defined]
    optimizer.step(0.01, 1.0)
    assert torch.allclose(parameter, torch.full((2, 2), 1.01))  # a first step again: the sign


def test_a_scale_of_one_and_no_clipping_leave_the_bits_alone() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = Optimizer({"w": parameter}, weight_decay=0.0, betas=(0.9, 0.99), eps=1e-8)
    gradient = torch.tensor([1e-45, -0.0, 3.4e38])
    parameter.main_grad.copy_(gradient)  # type: ignore[attr-defined]
    optimizer.unscale(1.0)
    optimizer.step(0.0, 1.0)
    bits = parameter.main_grad.view(torch.int32)  # type: ignore[attr-defined]
    assert torch.equal(bits, gradient.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_is_plain_tensors_by_name_and_keeps_the_masters_bits(
    dtype: torch.dtype,
) -> None:
    def make() -> tuple[nn.Linear, Optimizer]:
        torch.manual_seed(0)
        linear = nn.Linear(3, 2).to(dtype)
        names = dict(linear.named_parameters())
        return linear, Optimizer(names, weight_decay=0.1, betas=(0.9, 0.99), eps=1e-8)

    def step(linear: nn.Linear, optimizer: Optimizer) -> None:
        for parameter in linear.parameters():
            parameter.main_grad.fill_(1.0)  # type: ignore[union-attr, operator]
        optimizer.step(1e-4, 1.0)

    one, first = make()
    step(one, first)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert set(state) == {"weight", "bias"}
    other, second = make()
    second.load_state_dict(state)
    step(one, first)
    step(other, second)
    for name, parameter in one.named_parameters():
        assert torch.equal(first.masters[name], second.masters[name])
        assert torch.equal(parameter, dict(other.named_parameters())[name])


def test_frozen_parameters_are_left_alone() -> None:
    frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    optimizer = Optimizer({"w": frozen}, weight_decay=0.1, betas=(0.9, 0.99), eps=1e-8)
    optimizer.step(0.1, 1.0)
    assert torch.equal(frozen, torch.ones(2, 2))
    assert not hasattr(frozen, "main_grad")
    assert (optimizer.squares(), optimizer.state_dict()) == ([], {})
