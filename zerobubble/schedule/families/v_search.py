"""What the planned families of a V placement share: candidates, and the choice of the shortest.

Not a family of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from zerobubble.errors import UserError
from zerobubble.schedule.costs import Costs
from zerobubble.schedule.list_scheduling import Listed, Preference, Rule, list_schedule
from zerobubble.schedule.ops import Kind, Op
from zerobubble.schedule.placement import Placement
from zerobubble.schedule.schedule import Schedule
from zerobubble.schedule.simulate import peak_memory, simulate

F, B, W = Kind.F, Kind.B, Kind.W

_TOLERANCE = 1e-9

# Preferences between (F or B, chunk), most wanted first: the ones that won for some p and m.
_PREFERENCES = (
    ((F, 1), (F, 0), (B, 1), (B, 0)),
    ((B, 0), (B, 1), (F, 1), (F, 0)),
    ((F, 1), (B, 0), (F, 0), (B, 1)),
    ((B, 0), (F, 1), (F, 0), (B, 1)),
)


def memory_of(placement: Placement, costs: Costs, microbatches: int) -> list[float]:
    """Per rank, the activations of so many microbatches."""
    return [
        microbatches * sum(costs.activation[s] for s in placement.stages_of(rank))
        for rank in range(placement.ranks)
    ]


def shortest(
    candidates: Iterable[Listed], placement: Placement, microbatches: int, costs: Costs
) -> tuple[tuple[Op, ...], ...]:
    """The orders of the shortest longest span, then makespan; reaching both bounds ends it.

    Raises UserError where there is no candidate.
    """
    span, makespan = _lower_bounds(placement, microbatches, costs)
    best: Listed | None = None
    for found in candidates:
        if best is None or (found.longest_span, found.makespan) < (
            best.longest_span,
            best.makespan,
        ):
            best = found
        if max(best.longest_span - span, best.makespan - makespan) <= _TOLERANCE * makespan:
            break
    if best is None:
        raise UserError(
            f"no order of this schedule for {placement.ranks} ranks and {microbatches} "
            "microbatches keeps within its memory: the stages' activations are too unequal; "
            "use `zerobubble plan`"
        )
    return best.orders


def as_it_is(schedule: Schedule, costs: Costs, limit: Sequence[float]) -> Listed | None:
    """`schedule` itself; None where its activations exceed the limit of a rank."""
    placement = schedule.placement
    # With unequal activations, as many chunks can be more than as many microbatches.
    for rank, (peak, most) in enumerate(zip(peak_memory(schedule, costs), limit, strict=True)):
        fixed = sum(costs.fixed_memory[s] for s in placement.stages_of(rank))
        if peak - fixed > most * (1 + _TOLERANCE):
            return None
    timeline = simulate(schedule, costs)
    return Listed(schedule.orders, timeline.makespan, timeline.longest_span)


def listed(
    placement: Placement,
    microbatches: int,
    costs: Costs,
    limit: Sequence[float],
    prefer: Preference,
    pendings: Sequence[int | None] = (None, 2, 1),
    overhangs: Sequence[float] = (0.0, 0.5),
) -> Iterator[Listed]:
    """List schedules of one preference, with W put in by several rules."""
    for pending in pendings:
        for overhang in overhangs:
            rule = Rule(prefer, pending, overhang)
            found = list_schedule(placement, microbatches, costs, limit, rule)
            if found is not None:
                yield found


def by_preference(
    placement: Placement,
    microbatches: int,
    costs: Costs,
    limit: Sequence[float],
    pendings: Sequence[int | None] = (None, 2, 1),
    overhangs: Sequence[float] = (0.0, 0.5),
) -> Iterator[Listed]:
    """List schedules by preferences between kinds and chunks: one for any costs and memory."""
    for preference in _PREFERENCES:
        rows = [
            [(kind, placement.stages_of(rank)[chunk]) for kind, chunk in preference]
            for rank in range(placement.ranks)
        ]
        prefer = _by_chunk(rows)
        yield from listed(placement, microbatches, costs, limit, prefer, pendings, overhangs)


def _by_chunk(rows: Sequence[Sequence[tuple[Kind, int]]]) -> Preference:
    return lambda rank, _position: rows[rank]


def in_order_of(schedule: Schedule) -> Preference:
    """F and B exactly as in `schedule`."""
    return in_rows(
        [[(op.kind, op.stage) for op in row if op.kind is not W] for row in schedule.orders]
    )


def in_rows(rows: Sequence[Sequence[tuple[Kind, int]]]) -> Preference:
    """F and B exactly as in `rows`."""
    return lambda rank, position: rows[rank][position : position + 1]


def _lower_bounds(placement: Placement, microbatches: int, costs: Costs) -> tuple[float, float]:
    """No longest span and no makespan is shorter: a rank has its work, after its first input."""
    span = makespan = head = 0.0
    for stage, rank in enumerate(placement.rank_of[: placement.ranks]):
        work = microbatches * sum(
            costs.time(k, s) for s in placement.stages_of(rank) for k in (F, B, W)
        )
        span, makespan = max(span, work), max(makespan, head + work)
        head += costs.forward[stage]
        if placement.crosses(stage):
            head += costs.link_latency[stage]
    return span, makespan
