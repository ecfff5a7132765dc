"""Timeline: start and end of every op, from a simulation or from a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zerobubble.schedule.ops import Op
from zerobubble.schedule.placement import Placement


@dataclass(frozen=True, slots=True)
class TimedOp:
    """One op with its start and end, in the timeline's unit, from a common zero."""

    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Per rank, its ops in order of execution; the same type for plans and for runs."""

    name: str
    placement: Placement
    microbatches: int
    rows: tuple[tuple[TimedOp, ...], ...]
    """One row per rank, by start."""
    peak_memory: tuple[float, ...] | None = None
    """Per rank, fixed memory included; None where it was not counted."""
    unit: str = "ms"

    def __iter__(self) -> Iterator[tuple[int, TimedOp]]:
        for rank, row in enumerate(self.rows):
            for timed in row:
                yield rank, timed

    @property
    def start(self) -> float:
        """The earliest start."""
        return min(timed.start for _, timed in self)

    @property
    def end(self) -> float:
        """The latest end."""
        return max(timed.end for _, timed in self)

    @property
    def makespan(self) -> float:
        """First start to last end over all ranks."""
        return self.end - self.start

    def span(self, rank: int) -> float:
        """First start to last end on one rank."""
        row = self.rows[rank]
        return max(t.end for t in row) - min(t.start for t in row) if row else 0.0

    @property
    def longest_span(self) -> float:
        """The longest span of any rank: the iteration's cost where no barrier ends it."""
        return max(self.span(rank) for rank in range(len(self.rows)))

    def work(self, rank: int) -> float:
        """Time that the rank spends in ops."""
        return sum(timed.end - timed.start for timed in self.rows[rank])

    def idle(self, rank: int) -> float:
        """Makespan less work: the rank's idle time when a barrier ends the step."""
        return self.makespan - self.work(rank)

    @property
    def bubble_rate(self) -> float:
        """(makespan - work of the busiest rank) / makespan: a barrier ends the step."""
        return self._rate(self.makespan)

    @property
    def longest_span_bubble_rate(self) -> float:
        """(longest span - work of the busiest rank) / longest span: no barrier."""
        return self._rate(self.longest_span)

    def _rate(self, cost: float) -> float:
        busiest = max(self.work(rank) for rank in range(len(self.rows)))
        return (cost - busiest) / cost if cost else 0.0

    def times(self) -> dict[Op, TimedOp]:
        """Every op's times, by op."""
        return {timed.op: timed for _, timed in self}
