"""Transports carry the same bits, notice a peer that is gone, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import run_ranks
from tests.test_same_bits import Case, differences, reference
from zerobubble.pipeline import Pipeline
from zerobubble.runtime.emulate import EmulatedStage
from zerobubble.runtime.executor import StepError
from zerobubble.runtime.transport.choose import TransportName
from zerobubble.schedule import families
from zerobubble.schedule.families.forward_only import forward_only
from zerobubble.schedule.lower import lower, ring_slots
from zerobubble.schedule.ops import Kind

# Three layers on eight stages of V: most hand on what they were given.
CASES = [
    Case(3, torch.float32, 0.1),
    Case(8, torch.bfloat16, 0.0, llama=True),
    Case(5, torch.float32, 0.0, layers=3),
]
TRANSPORTS: tuple[TransportName, ...] = ("gloo", "shared-memory")


def _bits(rank: int, transport: TransportName, folder: str) -> list[str]:
    wrong = []
    for number, case in enumerate(CASES):
        expected = torch.load(Path(folder) / f"{number}.pt", weights_only=True)
        for name in ("1f1b", "interleaved", "zb-v"):
            found = differences(rank, 4, name, case, expected, transport)
            wrong += [f"{name}, {case}: {what}" for what in found]
    return wrong


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_same_bits_over_every_transport(transport: TransportName, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for number, case in enumerate(CASES):
        torch.save(reference(case), tmp_path / f"{number}.pt")
    torch.set_num_threads(threads)
    assert run_ranks(_bits, 4, transport, str(tmp_path)) == [[], [], [], []]


def test_rings_are_as_long_as_the_schedule_asks() -> None:
    held = {}
    for name in ("1f1b", "gpipe"):
        slots = ring_slots(lower(families.build(name, 4, 16)))
        held[name] = {c.boundary: n for c, n in slots.items() if c.kind is Kind.F}
    assert held["1f1b"] == {0: 4, 1: 3, 2: 2}  # the 1F1B warm-up of the sender
    assert held["gpipe"] == {0: 16, 1: 16, 2: 16}
    long = ring_slots(lower(families.build("1f1b", 4, 64)))
    assert {c.boundary: n for c, n in long.items() if c.kind is Kind.F} == held["1f1b"]
    evaluation = ring_slots(lower(forward_only(families.build("zb-v", 4, 1).placement, 8)))
    assert all(n <= 8 for n in evaluation.values())


def _pipeline(rank: int, transport: TransportName, timeout_s: float) -> Pipeline:
    schedule = families.build("1f1b", 2, 4)
    modules = {rank: EmulatedStage((8, 8), 1, 1, 1, last=rank == 1)}
    return Pipeline(modules, schedule, transport=transport, timeout=timedelta(seconds=timeout_s))


class AddOne(nn.Module):
    def __init__(self, shape: tuple[int, int], *, last: bool) -> None:
        super().__init__()
        self.shape, self.last = shape, last
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, hidden: torch.Tensor | None, _batch: None) -> torch.Tensor:
        hidden = (torch.zeros(self.shape) if hidden is None else hidden) + self.weight
        return hidden.mean() if self.last else hidden


def _sizes(rank: int, transport: TransportName) -> None:
    # Steps of changing shapes, and evaluations between them: rings grow, tensors stay right.
    schedule = families.build("1f1b", 2, 4)
    for width in (8, 64, 16):
        modules = {rank: AddOne((8, width), last=rank == 1)}
        pipeline = Pipeline(modules, schedule, transport=transport)
        for rows in (8, 32, 4):
            if rank == 0:
                modules[0].shape = rows, width
            losses = pipeline.step([None] * 4, shape=(rows, width))
            losses += pipeline.evaluate([None] * 7, shape=(rows, width))
            assert [loss.item() for loss in losses] == [2.0] * len(losses)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_shapes_may_change_between_steps(transport: TransportName) -> None:
    run_ranks(_sizes, 2, transport)


def _wait_too_long(rank: int, transport: TransportName) -> str:
    pipeline = _pipeline(rank, transport, 1)
    if rank == 0:
        dist.barrier()
        return ""
    with pytest.raises(StepError) as error:
        pipeline.step([None] * 4, shape=(8, 8))
    dist.barrier()
    return str(error.value)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_wait_that_is_too_long_names_op_and_peer(transport: TransportName) -> None:
    message = run_ranks(_wait_too_long, 2, transport)[1]
    assert message.startswith("rank 1, F of microbatch 0 on stage 1, receiving from rank 0: ")


def _tell_and_step(rank: int, transport: TransportName, folder: str) -> Any:
    pipeline = _pipeline(rank, transport, 60)
    pipeline.step([None] * 4, shape=(8, 8))
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    since = time.monotonic()
    try:
        for _ in range(100):
            pipeline.step([None] * 4, shape=(8, 8))
    except StepError as error:
        Path(folder, "error").write_text(f"{time.monotonic() - since}\n{error}")


class Failing(AddOne):
    """Fails in F of microbatch 3, like a fault of the user's own module."""

    calls = 0

    def forward(self, hidden: torch.Tensor | None, _batch: None) -> torch.Tensor:
        self.calls += 1
        if self.calls == 4:
            raise ValueError("a fault\nof two lines")
        return super().forward(hidden, _batch)


def _fail(rank: int) -> tuple[str, bool]:
    schedule = families.build("1f1b", 4, 8)
    kind = Failing if rank == 2 else AddOne
    module = kind((4, 4), last=rank == 3)
    pipeline = Pipeline({rank: module}, schedule, timeout=timedelta(seconds=2))
    with pytest.raises(StepError) as error:
        pipeline.step([None] * 8, shape=(4, 4))
    dist.barrier()
    return str(error.value), error.value.computing


def test_a_fault_in_an_op_is_named_in_one_line() -> None:
    found = run_ranks(_fail, 4)
    assert found[2] == (
        "rank 2, F of microbatch 3 on stage 2: ValueError: a fault",
        True,
    )
    for rank in (0, 1, 3):  # they were left waiting, and say for whom
        message, computing = found[rank]
        assert message.startswith(f"rank {rank}, ")
        assert "receiving from rank" in message
        assert not computing


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_killed_peer_is_noticed_and_nothing_is_left(
    transport: TransportName, tmp_path: Path
) -> None:
    before = set(Path("/dev/shm").iterdir())
    with pytest.raises(AssertionError, match=r"rank 0 failed|no answer from ranks"):
        run_ranks(_tell_and_step, 2, transport, str(tmp_path), timeout=12)
    seconds, message = (tmp_path / "error").read_text().splitlines()[:2]
    assert float(seconds) < 5
    assert message.startswith("rank 0, ")
    assert "rank 1" in message
    left = set(Path("/dev/shm").iterdir()) - before
    assert not [path for path in left if "zerobubble" in path.name]
