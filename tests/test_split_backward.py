"""Split backward: B then W give the bits of one ordinary backward, whatever the module."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zerobubble.model.batch import Batch
from zerobubble.model.config import ModelConfig
from zerobubble.model.stage import build_stage
from zerobubble.runtime.stage import Stage

ROWS, WIDTH = 6, 16


class OneInput(nn.Module):
    """Calls `body(hidden)`: a stage's module from an ordinary one."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, hidden: Tensor, _batch: Any) -> Tensor:
        output: Tensor = self.body(hidden)
        return output


class FromIds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH, padding_idx=0)
        self.positions = nn.Embedding(5, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, _hidden: None, batch: Tensor) -> Tensor:
        output: Tensor = self.linear(self.table(batch) + self.positions(torch.arange(5)))
        return output


class Twice(nn.Module):
    """One Linear called three times, and its weight used plainly besides."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(torch.tanh(self.linear(torch.tanh(self.linear(x)))))
        return y + F.linear(x, self.linear.weight)


class LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, -2).T @ x.flatten(0, -2)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = LinearFunction.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return output


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return output


class Convolving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.norm(self.convolution(x.transpose(1, 2))).transpose(1, 2)
        return output


class Picture(nn.Module):
    """Rows as channels of a small picture; strides, groups, dilation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(5, 8, 3, padding=1, bias=False)
        self.second = nn.Conv2d(8, 5, 3, padding=2, dilation=2)
        self.third = nn.Conv2d(5, 5, 1, groups=5)

    def forward(self, x: Tensor) -> Tensor:
        picture = x.unflatten(-1, (4, 4))
        output: Tensor = self.third(torch.relu(self.second(self.first(picture)))).flatten(-2)
        return output


class View(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x).transpose(0, 1).view(5, ROWS, WIDTH).transpose(0, 1)
        return output


def frozen() -> nn.Module:
    body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    for parameter in body[0].parameters():
        parameter.requires_grad_(False)
    return body


def normed() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "linear without bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "feed-forward": lambda: nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 40), nn.GELU(), nn.Linear(40, WIDTH)
    ),
    "called twice": Twice,
    "custom function": Custom,
    "attention": Attending,
    "convolution": Convolving,
    "picture": Picture,
    "view": View,
    "frozen": frozen,
    "weight norm": normed,
    "recurrent": lambda: _FirstOutput(nn.GRU(WIDTH, WIDTH, batch_first=True)),
    "no parameters": nn.Tanh,
}


class _FirstOutput(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.body(x)[0]
        return output


def _accumulators(module: nn.Module) -> dict[str, Tensor]:
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros(parameter.shape)  # type: ignore[attr-defined]
    return {n: p.main_grad for n, p in module.named_parameters()}  # type: ignore[misc]


def _reference(module: nn.Module, inputs: list[Tensor], gradients: list[Tensor]) -> Any:
    sums = _accumulators(module)
    input_gradients = []
    for x, gradient in zip(inputs, gradients, strict=True):
        leaf = x.clone().requires_grad_()
        module(leaf, None).backward(gradient)
        input_gradients.append(leaf.grad)
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                sums[name] += parameter.grad.float()
                parameter.grad = None
    return sums, input_gradients


@pytest.mark.parametrize("split", [True, False], ids=["B and W", "BW"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODULES)
def test_gradients_are_bitwise_those_of_one_backward(
    name: str, dtype: torch.dtype, split: bool
) -> None:
    torch.manual_seed(0)
    module = OneInput(MODULES[name]()).to(dtype)
    inputs = [torch.randn(ROWS, 5, WIDTH, dtype=dtype) for _ in range(3)]
    gradients = [torch.randn(ROWS, 5, WIDTH, dtype=dtype) for _ in range(3)]
    expected, expected_inputs = _reference(copy.deepcopy(module), inputs, gradients)
    sums = _accumulators(module)
    stage = Stage(1, module, last=False)
    for i, x in enumerate(inputs):
        stage.forward(i, x, None)
    assert stage.live == 3
    for i, gradient in enumerate(gradients):
        backward = stage.backward_input if split else stage.backward
        found = backward(i, gradient)
        assert found is not None
        assert torch.equal(found, expected_inputs[i])
    if split:
        assert stage.live == 3
        for i in range(3):
            stage.backward_weight(i)
    assert stage.live == 0
    for parameter, value in expected.items():
        assert torch.equal(sums[parameter], value), parameter


def test_the_first_stage_defers_its_embedding_and_linears() -> None:
    torch.manual_seed(0)
    module = FromIds()
    ids = torch.randint(0, 11, (ROWS, 5))
    gradient = torch.randn(ROWS, 5, WIDTH)
    reference = copy.deepcopy(module)
    reference(None, ids).backward(gradient)
    sums = _accumulators(module)
    stage = Stage(0, module, last=False)
    assert stage.report.parameters - stage.report.deferred == WIDTH  # the bias
    stage.forward(0, None, ids)
    assert stage.backward_input(0, gradient) is None
    assert not sums["table.weight"].any()
    assert not sums["linear.weight"].any()
    stage.backward_weight(0)
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(sums[name], parameter.grad), name


def test_without_accumulators_gradients_go_to_grad() -> None:
    stage = Stage(1, OneInput(nn.Linear(WIDTH, WIDTH)), last=False)
    for i in range(2):
        stage.forward(i, torch.ones(1, WIDTH), None)
        stage.backward_input(i, torch.ones(1, WIDTH))
        stage.backward_weight(i)
    weight = stage.module.body.weight
    assert isinstance(weight, nn.Parameter)
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((WIDTH, WIDTH), 2.0))


def test_the_state_dict_and_the_type_stay_usable() -> None:
    body = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    before = {n: t.clone() for n, t in body.state_dict().items()}
    Stage(0, OneInput(body), last=False)
    assert isinstance(body[0], nn.Linear)
    body.load_state_dict(before)
    with torch.no_grad():
        assert body(torch.ones(1, WIDTH)).shape == (1, WIDTH)


def _tensors() -> int:
    kinds = (type(o) for o in gc.get_objects())
    return sum(issubclass(kind, Tensor) and kind is not nn.Parameter for kind in kinds)


def test_activations_are_freed_by_w_without_the_collector() -> None:
    config = ModelConfig(
        layers=3,
        hidden=WIDTH,
        heads=2,
        vocab=11,
        seq_length=5,
        max_positions=5,
        query_groups=2,
        head_size=8,
        ffn_hidden=32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    module = build_stage(config, (3,), 0, 1)
    _accumulators(module)
    stage = Stage(0, module, last=True)
    ids = torch.randint(0, 11, (ROWS, 6))
    batch = Batch(ids[:, :-1], ids[:, 1:], torch.ones(ROWS, 5))
    root = torch.tensor(1.0)
    gc.collect()
    gc.disable()
    try:
        counts = []
        for i in range(3):
            stage.forward(i, None, batch)
            stage.backward_input(i, root)
            stage.backward_weight(i)
            counts.append(_tensors())
        for i in range(3):
            stage.forward(i, None, batch)
            stage.backward(i, root)
            counts.append(_tensors())
        assert len(set(counts)) == 1, counts
    finally:
        gc.enable()
