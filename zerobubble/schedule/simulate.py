"""Simulation: a schedule and costs give the timeline of an ideal run.

Every rank runs its ops in order, each as early as it can. A tensor that crosses ranks is there
the boundary's latency after the op that made it ended, whenever its receive was posted.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from operator import itemgetter
from typing import Literal

from zerobubble.errors import UserError
from zerobubble.schedule.costs import Costs
from zerobubble.schedule.errors import (
    DeadlockError,
    MispairingError,
    RowCountError,
    UnknownStageError,
)
from zerobubble.schedule.lower import Channel, Compute, Program, Send, Wait, lower
from zerobubble.schedule.ops import Kind, Op
from zerobubble.schedule.schedule import Schedule
from zerobubble.schedule.timeline import TimedOp, Timeline

Receives = Literal["free", "block"]

# The result of an op as others need it: an output or a gradient, of a stage, microbatch, slice.
_Result = tuple[bool, int, int, int]


def simulate(
    schedule: Schedule,
    costs: Costs,
    receives: Receives = "free",
    *,
    unit: str = "ms",
    programs: Sequence[Program] | None = None,
) -> Timeline:
    """The timeline of `schedule` under `costs`, in the costs' unit (named by `unit`).

    `receives="free"`: only the op that needs a tensor waits for it. `"block"`: the lowered
    programs are run (`programs`, where they are at hand), and a rank stops at each receive
    until the tensor is there. Peak memory is filled in: see `peak_memory`. Costs are those of
    one op, so of one slice where the schedule has several.

    Raises DeadlockError, naming rank and op, when an op waits for what never comes, and
    MispairingError (with "block") when a receive meets another tensor.
    """
    if costs.stages != schedule.placement.stages:
        raise UserError(
            f"the costs have {costs.stages} stages, schedule {schedule.name!r} has "
            f"{schedule.placement.stages}; give one row of costs per stage"
        )
    if len(schedule.orders) != schedule.ranks:
        raise RowCountError(f"{len(schedule.orders)} rows for {schedule.ranks} ranks")
    for rank, order in enumerate(schedule.orders):
        for position, op in enumerate(order):
            if not 0 <= op.stage < costs.stages:
                raise UnknownStageError.at(rank, position, op, f"there are {costs.stages} stages")
    if receives == "free":
        rows = _free(schedule, costs)
    else:
        rows = _block(schedule, costs, programs or lower(schedule))
    return Timeline(
        name=schedule.name,
        placement=schedule.placement,
        microbatches=schedule.microbatches,
        rows=tuple(tuple(row) for row in rows),
        peak_memory=peak_memory(schedule, costs),
        unit=unit,
    )


def peak_memory(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """Per rank the most memory held at once, fixed memory included, in the costs' unit.

    F adds its stage's activation when it starts; B releases its share when it ends, W the
    rest, BW all. A rank's ops do not overlap, so its order alone decides.
    """
    peaks = []
    for rank, order in enumerate(schedule.orders):
        live = peak = sum(costs.fixed_memory[s] for s in schedule.placement.stages_of(rank))
        for op in order:
            activation = costs.activation[op.stage]
            share = costs.released_by_backward_input[op.stage]
            if op.kind is Kind.F:
                live += activation
                peak = max(peak, live)
            elif op.kind is Kind.B:
                live -= activation * share
            elif op.kind is Kind.W:
                live -= activation * (1 - share)
            else:
                live -= activation
        peaks.append(peak)
    return tuple(peaks)


def _needs(op: Op, stages: int) -> list[tuple[_Result, int | None]]:
    """What `op` depends on, each with the boundary that it crosses (None: its own stage)."""
    where = (op.stage, op.microbatch, op.slice)
    if op.kind is Kind.W:
        return [((False, *where), None)]
    if op.kind is Kind.F:
        boundary = op.stage - 1
        return [((True, boundary, op.microbatch, op.slice), boundary)] if op.stage else []
    own: list[tuple[_Result, int | None]] = [((True, *where), None)]
    if op.stage < stages - 1:
        own.append(((False, op.stage + 1, op.microbatch, op.slice), op.stage))
    return own


def _made(op: Op) -> _Result:
    return (op.kind is Kind.F, op.stage, op.microbatch, op.slice)


def _latency(schedule: Schedule, costs: Costs) -> list[float]:
    """Per boundary, what a transfer takes; a hand-over inside one rank takes nothing."""
    crosses = schedule.placement.crosses
    return [costs.link_latency[s] if crosses(s) else 0.0 for s in range(costs.stages - 1)]


def _free(schedule: Schedule, costs: Costs) -> list[list[TimedOp]]:
    latency = _latency(schedule, costs)
    ended: dict[_Result, float] = {}
    rows: list[list[TimedOp]] = [[] for _ in schedule.orders]
    clock = [0.0] * len(rows)
    waiting: dict[_Result, list[int]] = defaultdict(list)
    runnable = list(range(len(rows)))
    while runnable:
        rank = runnable.pop()
        order, row, now = schedule.orders[rank], rows[rank], clock[rank]
        while len(row) < len(order):
            op = order[len(row)]
            start = now
            blocked = None
            for result, boundary in _needs(op, costs.stages):
                end = ended.get(result)
                if end is None:
                    blocked = result
                    break
                start = max(start, end if boundary is None else end + latency[boundary])
            if blocked is not None:
                waiting[blocked].append(rank)
                break
            now = start + costs.time(op.kind, op.stage)
            row.append(TimedOp(op, start, now))
            if op.kind is not Kind.W:
                made = _made(op)
                ended[made] = now
                if made in waiting:
                    runnable.extend(waiting.pop(made))
        clock[rank] = now
    if waiting:
        rank, result = min((rank, result) for result, ranks in waiting.items() for rank in ranks)
        position = len(rows[rank])
        reason = f"waits for {_describe(result)}, which never comes"
        raise DeadlockError.at(rank, position, schedule.orders[rank][position], reason)
    return rows


def _describe(result: _Result) -> str:
    forward, stage, microbatch, part = result
    what = "the output" if forward else "the gradient"
    return f"{what} of stage {stage} for microbatch {microbatch}" + (
        f", slice {part}" if part else ""
    )


def _block(schedule: Schedule, costs: Costs, programs: Sequence[Program]) -> list[list[TimedOp]]:
    latency = _latency(schedule, costs)
    crosses = schedule.placement.crosses
    done: set[_Result] = set()
    rows: list[list[TimedOp]] = [[] for _ in programs]
    clock = [0.0] * len(rows)
    position = [0] * len(rows)
    arriving: dict[Channel, deque[tuple[Op, float]]] = defaultdict(deque)
    waiting: dict[Channel, int] = {}
    runnable = list(range(len(rows)))
    while runnable:
        rank = runnable.pop()
        program, row = programs[rank].instructions, rows[rank]
        while position[rank] < len(program):
            step = program[position[rank]]
            if isinstance(step, Compute):
                op = step.op
                for result, boundary in _needs(op, costs.stages):
                    here = boundary is None or not crosses(boundary)
                    if here and result not in done:
                        reason = (
                            f"needs {_describe(result)}, which rank {rank} makes later or never"
                        )
                        raise DeadlockError.at(rank, len(row), op, reason)
                start = clock[rank]
                clock[rank] = start + costs.time(op.kind, op.stage)
                row.append(TimedOp(op, start, clock[rank]))
                if op.kind is not Kind.W:
                    done.add(_made(op))
            elif isinstance(step, Send):
                there = clock[rank] + latency[step.channel.boundary]
                arriving[step.channel].append((step.op, there))
                if step.channel in waiting:
                    runnable.append(waiting.pop(step.channel))
            elif isinstance(step, Wait):
                if not arriving[step.channel]:
                    waiting[step.channel] = rank
                    break
                made, there = arriving[step.channel].popleft()
                if (made.microbatch, made.slice) != (step.op.microbatch, step.op.slice):
                    raise MispairingError.at(
                        rank, len(row), step.op, f"would receive the result of {made}"
                    )
                clock[rank] = max(clock[rank], there)
            position[rank] += 1
    if waiting:
        rank, channel = min(
            ((rank, channel) for channel, rank in waiting.items()), key=itemgetter(0)
        )
        op = schedule.orders[rank][len(rows[rank])]
        raise DeadlockError.at(
            rank, len(rows[rank]), op, f"waits for {channel}, and nothing more is sent there"
        )
    return rows
