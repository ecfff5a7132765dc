"""Every schedule gives the bits of plain accumulation in one process."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.reference import Reference
from zerobubble.model.batch import Batch
from zerobubble.model.config import ModelConfig
from zerobubble.model.layout import layers_per_stage
from zerobubble.model.stage import build_stage
from zerobubble.optim.loss_scale import StaticLossScale
from zerobubble.optim.optimizer import Optimizer
from zerobubble.pipeline import Pipeline
from zerobubble.runtime.transport.choose import TransportName
from zerobubble.schedule import families
from zerobubble.training.step import Trainer

FAMILIES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
# Run with the last case alone: what they add is an order.
MORE_FAMILIES = tuple(n for n in families.names() if n not in (*FAMILIES, "seq1f1b"))
SEED, STEPS, LEARNING_RATE, CLIP = 7, 3, 1e-3, 0.5


@dataclass(frozen=True)
class Case:
    microbatches: int
    dtype: torch.dtype
    dropout: float
    llama: bool = False
    layers: int = 8

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(
            layers=self.layers,
            hidden=16,
            heads=4,
            vocab=32,
            seq_length=8,
            max_positions=8,
            query_groups=2 if self.llama else 4,
            head_size=4,
            ffn_hidden=24,
            normalization="RMSNorm" if self.llama else "LayerNorm",
            position_embedding="rope" if self.llama else "learned_absolute",
            swiglu=self.llama,
            linear_bias=not self.llama,
            hidden_dropout=self.dropout,
            attention_dropout=self.dropout,
        )

    def batches(self, step: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(100 + step)
        ids = torch.randint(0, 32, (self.microbatches, 2, 9), generator=generator)
        mask = (torch.rand(self.microbatches, 2, 8, generator=generator) < 0.9).float()
        return [
            Batch(ids[i, :, :-1], ids[i, :, 1:], mask[i], dropout_seed=1000 * step + i)
            for i in range(self.microbatches)
        ]


CASES = [
    Case(m, dtype, dropout, llama)
    for m, dtype, dropout, llama in itertools.product(
        (1, 2, 3, 8), (torch.float32, torch.bfloat16), (0.0, 0.1), (False,)
    )
] + [Case(3, torch.float32, 0.0, llama=True), Case(8, torch.bfloat16, 0.1, llama=True)]


class Recording(Optimizer):
    """Keeps the gradients that it is asked the squares of: complete, not yet clipped."""

    seen: list[dict[str, torch.Tensor]]

    def squares(self) -> list[float]:
        gradients = {n: p.main_grad.clone() for n, p in self.parameters.items()}
        self.seen = [*getattr(self, "seen", []), gradients]
        return super().squares()


def reference(case: Case) -> dict[str, Any]:
    reference = Reference(case.config, SEED, case.dtype, clip=CLIP)
    steps = [reference.step(case.batches(step), LEARNING_RATE) for step in range(STEPS)]
    return {
        "gradients": [step.gradients for step in steps],
        "losses": [[loss.item() for loss in step.losses] for step in steps],
        "norms": [step.grad_norm for step in steps],
        "weights": reference.weights(),
    }


def differences(
    rank: int,
    ranks: int,
    name: str,
    case: Case,
    expected: dict[str, Any],
    transport: TransportName = "auto",
) -> list[str]:
    """What of a run of the case is not bitwise what the reference expects."""
    schedule = families.build(
        name, ranks, case.microbatches, chunks=2 if name == "interleaved" else None
    )
    layout = layers_per_stage(case.config, schedule.placement, allow_padding=True)
    modules = {
        s: build_stage(case.config, layout, s, SEED, case.dtype).train()
        for s in schedule.placement.stages_of(rank)
    }
    parameters = {n: p for s in sorted(modules) for n, p in modules[s].named_parameters()}
    optimizer = Recording(parameters, weight_decay=0.01, betas=(0.9, 0.999), eps=1e-8)
    pipeline = Pipeline(modules, schedule, transport=transport)
    trainer = Trainer(
        pipeline, optimizer, StaticLossScale(1.0), width=16, dtype=case.dtype, clip_grad=CLIP
    )
    steps = [trainer.step(case.batches(step), LEARNING_RATE) for step in range(STEPS)]
    wrong = [
        f"gradient of {n} in step {number}"
        for number, gradients in enumerate(expected["gradients"])
        for n in parameters
        if not torch.equal(optimizer.seen[number][n], gradients[n])
    ]
    if [list(step.losses) for step in steps] != expected["losses"]:
        wrong.append("losses")
    if [step.grad_norm for step in steps] != expected["norms"]:
        wrong.append("norms")
    wrong += [
        f"weight {n}"
        for n, master in optimizer.masters.items()
        if not torch.equal(master, expected["weights"][n])
    ]
    wrong += [
        f"rounded weight {n}"
        for n, p in parameters.items()
        if not torch.equal(p, expected["weights"][n].to(case.dtype))
    ]
    if any(stage.live for stage in pipeline.stages.values()):
        wrong.append("activations left after the step")
    return wrong


def _run(rank: int, ranks: int, folder: str) -> list[str]:
    wrong = []
    for number, case in enumerate(CASES):
        expected = torch.load(Path(folder) / f"{number}.pt", weights_only=True)
        for name in FAMILIES + MORE_FAMILIES * (number == len(CASES) - 1):
            found = differences(rank, ranks, name, case, expected)
            wrong += [f"{name}, {case}: {what}" for what in found]
    return wrong


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("references")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for number, case in enumerate(CASES):
        torch.save(reference(case), folder / f"{number}.pt")
    torch.set_num_threads(threads)
    return str(folder)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_family_gives_the_bits_of_one_process(ranks: int, references: str) -> None:
    for rank, wrong in enumerate(run_ranks(_run, ranks, ranks, references, timeout=600)):
        assert wrong == [], f"rank {rank}"
