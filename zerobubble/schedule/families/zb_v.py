"""ZB-V: two stages per rank in a V, backward split, no bubble in the steady state.

Source: Qi et al., arXiv 2401.10241 v2, the section on ZB-V. Memory: p microbatches on every
rank, as 1F1B's rank 0, even where B releases nothing. Bubble: none within a rank's span when
F = B = W and m >= 2p - 1, so the makespan is m (F + B + W) + (p - 1) F / 2. Planned for the given
costs (F = B = W without any): the published pattern, the same with the W after the last forward put
off or with every W moved into the gaps, and list schedules under the same memory; the shortest
longest span wins, then the shortest makespan. Use it where split backward is cheap and the links
can carry twice as many transfers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zerobubble.schedule.costs import Costs
from zerobubble.schedule.families.v_search import (
    as_it_is,
    by_preference,
    in_order_of,
    listed,
    memory_of,
    shortest,
)
from zerobubble.schedule.list_scheduling import Listed
from zerobubble.schedule.ops import Kind, Op
from zerobubble.schedule.placement import Placement, v
from zerobubble.schedule.schedule import Schedule

NAME = "zb-v"
ALIASES = ("zbv",)

F, B, W = Kind.F, Kind.B, Kind.W


def placement(ranks: int, _chunks: int | None) -> Placement:
    """Stage s on rank s, then back: rank 0 holds the first and the last stage."""
    return v(ranks)


def orders(
    placement: Placement, microbatches: int, costs: Costs | None
) -> tuple[tuple[Op, ...], ...]:
    """The shortest of the orders tried; one that reaches the bounds ends the search."""
    costs = costs or Costs.uniform(placement.stages)
    limit = memory_of(placement, costs, placement.ranks)
    candidates = _candidates(placement, microbatches, costs, limit)
    return shortest(candidates, placement, microbatches, costs)


def _candidates(
    placement: Placement, microbatches: int, costs: Costs, limit: Sequence[float]
) -> Iterator[Listed]:
    patterns = [
        Schedule(NAME, placement, microbatches, _published(placement.ranks, microbatches, w_last))
        for w_last in (False, True)
    ]
    found = False
    for pattern in patterns:
        fits = as_it_is(pattern, costs, limit)
        if fits is not None:
            found = True
            yield fits
    if found:
        yield from listed(placement, microbatches, costs, limit, in_order_of(patterns[0]))
        if microbatches >= 2 * placement.ranks - 1:
            return
    # Too few microbatches for the pattern's steady state, or too little memory for it.
    yield from by_preference(placement, microbatches, costs, limit)


def _published(ranks: int, microbatches: int, gives_way: bool) -> tuple[tuple[Op, ...], ...]:
    """The paper's pattern; microbatches under 2p - 1 are those of a longer pattern, alone.

    `gives_way`: on all ranks but the first, the W after the last forward waits for the end.
    """
    return tuple(
        tuple(
            op
            for op in _row(ranks, rank, max(microbatches, 2 * ranks - 1), gives_way)
            if op.microbatch < microbatches
        )
        for rank in range(ranks)
    )


def _row(ranks: int, rank: int, microbatches: int, gives_way: bool) -> list[Op]:
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
        add((B, 0), (W, 0), (F, 1), (B, 1))
        # The last forward has its memory: this W can give way to the gradients of phase 5.
        if count[F, 1] < microbatches or rank == 0 or not gives_way:
            add((W, 1))
    # Phase 5: gradients first, for the ranks upstream wait for them; W fills what is left.
    for _ in range(rank):
        add((B, 0), (B, 1))
    for _ in range(ranks - rank):
        add((B, 0), (W, 0))
    for chunk in (1, 0):
        while count[W, chunk] < microbatches:
            add((W, chunk))
    return row
