"""The V families of controllable memory: one building block, repeated. Not a family of its own.

Source: the idea of Qi et al., arXiv 2405.15362: the F and B of one microbatch at fixed times, the
next microbatch's the same 6 ops later, so that a microbatch's lifespan decides the memory. Only
the order that these times give is kept, W as in the block or where list scheduling puts it within
the memory; the shortest of a few blocks wins. Where no block fits, plain preferences take over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
from zerobubble.schedule.placement import Placement
from zerobubble.schedule.schedule import Schedule

F, B, W = Kind.F, Kind.B, Kind.W

PERIOD = 6
"""Ops of a rank per microbatch: F, B and W of two chunks."""


@dataclass(frozen=True)
class Block:
    """When the F and B of microbatch 0 run, in ops of equal length.

    `hops`: from rank to rank, of F down, F up, B down and B up the V. `waits`: at its three
    turns, after the op before.
    """

    hops: tuple[float, float, float, float]
    waits: tuple[int, int, int] = (0, 0, 0)

    def schedule(self, placement: Placement, microbatches: int) -> Schedule:
        """Every op in the order of its time."""
        rows = []
        for rank in range(placement.ranks):
            times = self._times(placement.ranks, rank)
            # Of two at once, the one that is deeper in its microbatch comes first.
            row = sorted(
                (start + PERIOD * microbatch, -start, Op(kind, stage, microbatch))
                for (kind, stage), start in times.items()
                for microbatch in range(microbatches)
            )
            rows.append(tuple(op for _, _, op in row))
        return Schedule("block", placement, microbatches, tuple(rows))

    def _times(self, ranks: int, rank: int) -> dict[tuple[Kind, int], float]:
        """When each (kind, stage) of microbatch 0 runs on `rank`; W in the first free slots."""
        way = ranks - 1
        turns = []
        time = 0.0
        for hop, wait in zip(self.hops, (*self.waits, 0), strict=True):
            turns.append(time)
            time += hop * way + 1 + wait
        down, up, back, home = self.hops
        first, last = rank, 2 * ranks - 1 - rank
        times = {
            (F, first): turns[0] + down * rank,
            (F, last): turns[1] + up * (way - rank),
            (B, last): turns[2] + back * rank,
            (B, first): turns[3] + home * (way - rank),
        }
        taken = {time % PERIOD for time in times.values()}
        for stage in (last, first):
            slot = times[B, stage] + 1
            while slot % PERIOD in taken:
                slot += 1
            taken.add(slot % PERIOD)
            times[W, stage] = slot
        return times


def build(
    placement: Placement,
    microbatches: int,
    costs: Costs | None,
    most_held: int,
    blocks: Sequence[Block],
) -> tuple[tuple[Op, ...], ...]:
    """The shortest order found that holds at most `most_held` microbatches on every rank."""
    costs = costs or Costs.uniform(placement.stages)
    limit = memory_of(placement, costs, most_held)
    candidates = _candidates(placement, microbatches, costs, limit, blocks)
    return shortest(candidates, placement, microbatches, costs)


def _candidates(
    placement: Placement,
    microbatches: int,
    costs: Costs,
    limit: Sequence[float],
    blocks: Sequence[Block],
) -> Iterator[Listed]:
    for block in blocks:
        schedule = block.schedule(placement, microbatches)
        fits = as_it_is(schedule, costs, limit)
        if fits is not None:
            yield fits
        yield from listed(placement, microbatches, costs, limit, in_order_of(schedule), (None,))
    yield from by_preference(placement, microbatches, costs, limit, (2,), (0.5,))
