"""ZB-V: two stages per rank in a V, backward split, no bubble in the steady state.

Source: Qi et al., arXiv 2401.10241 v2, the section on ZB-V. Memory: p microbatches on every
rank, as 1F1B's rank 0, even where B releases nothing. Bubble: none within a rank's span when
F = B = W and m >= 2p - 1, so the makespan is m (F + B + W) + (p - 1) F / 2. Planned for the given
costs (F = B = W without any): the published pattern, the same with W moved into the gaps, and
list schedules under the same memory; the shortest wins. Use it where split backward is cheap and
the links can carry twice as many transfers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zerobubble.schedule.costs import Costs
from zerobubble.schedule.list_scheduling import Listed, Preference, Rule, list_schedule
from zerobubble.schedule.ops import Kind, Op
from zerobubble.schedule.placement import Placement, v
from zerobubble.schedule.schedule import Schedule
from zerobubble.schedule.simulate import peak_memory, simulate

NAME = "zb-v"
ALIASES = ("zbv",)

F, B, W = Kind.F, Kind.B, Kind.W

# Preferences between (F or B, chunk), most wanted first: the ones that won for some p and m.
_PREFERENCES = (
    ((F, 1), (F, 0), (B, 1), (B, 0)),
    ((B, 0), (B, 1), (F, 1), (F, 0)),
    ((F, 1), (B, 0), (F, 0), (B, 1)),
    ((B, 0), (F, 1), (F, 0), (B, 1)),
)


def placement(ranks: int, _chunks: int | None) -> Placement:
    """Stage s on rank s, then back: rank 0 holds the first and the last stage."""
    return v(ranks)


def orders(
    placement: Placement, microbatches: int, costs: Costs | None
) -> tuple[tuple[Op, ...], ...]:
    """The shortest of the orders tried; one that reaches the bound ends the search."""
    costs = costs or Costs.uniform(placement.stages)
    limit = [
        placement.ranks * sum(costs.activation[s] for s in placement.stages_of(rank))
        for rank in range(placement.ranks)
    ]
    bound = _lower_bound(placement, microbatches, costs)
    best: Listed | None = None
    for found in _candidates(placement, microbatches, costs, limit):
        if best is None or (found.makespan, found.longest_span) < (
            best.makespan,
            best.longest_span,
        ):
            best = found
        if best.makespan <= bound * (1 + 1e-9):
            break
    assert best is not None
    return best.orders


def _candidates(
    placement: Placement, microbatches: int, costs: Costs, limit: Sequence[float]
) -> Iterator[Listed]:
    published = Schedule(NAME, placement, microbatches, _published(placement.ranks, microbatches))
    fixed = [sum(costs.fixed_memory[s] for s in placement.stages_of(r)) for r in range(len(limit))]
    peak = peak_memory(published, costs)
    # With unequal activations, as many chunks can be more than as many microbatches.
    if all(
        top - base <= most * (1 + 1e-9) for top, base, most in zip(peak, fixed, limit, strict=True)
    ):
        timeline = simulate(published, costs)
        yield Listed(published.orders, timeline.makespan, timeline.longest_span)
        for rule in _rules(_in_order_of(published)):
            found = list_schedule(placement, microbatches, costs, limit, rule)
            if found is not None:
                yield found
        if microbatches >= 2 * placement.ranks - 1:
            return
    # Too few microbatches for the pattern's steady state, or too little memory for it.
    for preference in _PREFERENCES:
        for rule in _rules(_by_chunk(placement, preference)):
            found = list_schedule(placement, microbatches, costs, limit, rule)
            if found is not None:
                yield found


def _rules(prefer: Preference) -> list[Rule]:
    return [Rule(prefer, pending, overhang) for pending in (None, 2, 1) for overhang in (0.0, 0.5)]


def _in_order_of(schedule: Schedule) -> Preference:
    """F and B exactly as in `schedule`."""
    rows = [[(op.kind, op.stage) for op in order if op.kind is not W] for order in schedule.orders]
    return lambda rank, position: rows[rank][position : position + 1]


def _by_chunk(placement: Placement, preference: Sequence[tuple[Kind, int]]) -> Preference:
    rows = [
        [(kind, placement.stages_of(rank)[chunk]) for kind, chunk in preference]
        for rank in range(placement.ranks)
    ]
    return lambda rank, _position: rows[rank]


def _lower_bound(placement: Placement, microbatches: int, costs: Costs) -> float:
    """No makespan is shorter: a rank waits for its first input, then has all its work."""
    bound = head = 0.0
    for stage, rank in enumerate(placement.rank_of[: placement.ranks]):
        work = sum(costs.time(k, s) for s in placement.stages_of(rank) for k in (F, B, W))
        bound = max(bound, head + microbatches * work)
        head += costs.forward[stage]
        if placement.crosses(stage):
            head += costs.link_latency[stage]
    return bound


def _published(ranks: int, microbatches: int) -> tuple[tuple[Op, ...], ...]:
    """The paper's pattern; microbatches under 2p - 1 are those of a longer pattern, alone."""
    return tuple(
        tuple(
            op
            for op in _row(ranks, rank, max(microbatches, 2 * ranks - 1))
            if op.microbatch < microbatches
        )
        for rank in range(ranks)
    )


def _row(ranks: int, rank: int, microbatches: int) -> list[Op]:
    stages = (rank, 2 * ranks - 1 - rank)
    count = dict.fromkeys([(kind, chunk) for kind in (F, B, W) for chunk in (0, 1)], 0)
    row: list[Op] = []

    def add(*ops: tuple[Kind, int]) -> None:
        for kind, chunk in ops:
            row.append(Op(kind, stages[chunk], count[kind, chunk]))
            count[kind, chunk] += 1

    # Phase 1: forwards until the first microbatch is back from the turn of the V.
    for _ in range(2 * (ranks - rank) - 1):
        add((F, 0))
    # Phase 2: both forwards in turn until its gradient is here.
    for _ in range(rank):
        add((F, 1), (F, 0))
    # Phase 3: the second chunk alone, until the gradient has come round to the first.
    for _ in range(ranks - rank):
        add((F, 1), (B, 1), (W, 1))
    # Phase 4, the steady state, until the forwards are used up.
    while count[F, 1] < microbatches:
        if count[F, 0] < microbatches:
            add((F, 0))
        add((B, 0), (W, 0), (F, 1), (B, 1), (W, 1))
    # Phase 5: gradients first, for the ranks upstream wait for them; W fills what is left.
    for _ in range(rank):
        add((B, 0), (B, 1))
    for _ in range(ranks - rank):
        add((B, 0), (W, 0))
    for chunk in (1, 0):
        while count[W, chunk] < microbatches:
            add((W, chunk))
    return row
