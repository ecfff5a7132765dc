"""When ops start in a run whose ops sleep: the warm-up is not late, no op lags its inputs."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.ranks import run_ranks
from zerobubble.pipeline import Pipeline
from zerobubble.runtime.emulate import EmulatedStage
from zerobubble.schedule import families
from zerobubble.schedule.ops import Kind, Op
from zerobubble.schedule.timeline import Timeline

SLEEP_MS = 20.0
RANKS, MICROBATCHES, STEPS = 4, 8, 5


def _run(rank: int, name: str) -> list[Timeline | None]:
    schedule = families.build(name, RANKS, MICROBATCHES)
    placement = schedule.placement
    shape = (128, 128)
    modules = {
        s: EmulatedStage(shape, SLEEP_MS, SLEEP_MS, SLEEP_MS, last=s == placement.stages - 1)
        for s in placement.stages_of(rank)
    }
    pipeline = Pipeline(modules, schedule)
    timelines = []
    for _ in range(STEPS):
        dist.barrier()
        pipeline.step([None] * MICROBATCHES, shape=shape)
        timelines.append(pipeline.timeline())
    return timelines


def _lags(timeline: Timeline) -> dict[Op, float]:
    """How long after its input and its rank were ready each op started, in ms."""
    times = timeline.times()
    last = timeline.placement.stages - 1
    lags = {}
    for row in timeline.rows:
        free = 0.0
        for timed in row:
            op = timed.op
            ready = free
            if op.kind is Kind.F and op.stage > 0:
                ready = max(ready, times[Op(Kind.F, op.stage - 1, op.microbatch)].end)
            if op.kind.is_backward and op.stage < last:
                ready = max(ready, times[Op(op.kind, op.stage + 1, op.microbatch)].end)
            lags[op] = timed.start - ready
            free = timed.end
    return lags


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_ops_start_when_their_inputs_are_there(name: str) -> None:
    timelines = [t for t in run_ranks(_run, RANKS, name)[0] if t is not None]
    assert len(timelines) == STEPS
    late: dict[Op, int] = {}
    for timeline in timelines:
        times = timeline.times()
        first_on_rank_1 = times[Op(Kind.F, 1, 0)]
        second_on_rank_0 = times[Op(Kind.F, 0, 1)]
        assert first_on_rank_1.start < second_on_rank_0.end - 10
        for op, lag in _lags(timeline).items():
            if lag > 8:
                late[op] = late.get(op, 0) + 1
    assert {op: n for op, n in late.items() if n > 1} == {}
