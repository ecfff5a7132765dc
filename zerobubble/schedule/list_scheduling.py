"""List scheduling: ranks choose their next op in the order of time, within a memory limit.

A rule says which F or B each rank prefers. W is run where nothing else can be: in gaps that it
fits into, when memory is short, or when too many are pending.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zerobubble.schedule.costs import Costs
from zerobubble.schedule.ops import Kind, Op
from zerobubble.schedule.placement import Placement

Preference = Callable[[int, int], Sequence[tuple[Kind, int]]]
"""(rank, how many F and B it has run) -> the (F or B, stage) it would run next, best first."""

_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Rule:
    """How ranks choose."""

    prefer: Preference
    pending_weights: int | None = None
    """W goes before F as soon as so many are pending; None: never for that reason."""
    overhang: float = 0.0
    """The share of a W that may stick out of the gap it is put into."""
    undelayed: int = 0
    """So many B, a rank's last ones, are not delayed by a W that sticks out."""


@dataclass(frozen=True)
class Listed:
    """The orders found, one row per rank, with their makespan and longest span."""

    orders: tuple[tuple[Op, ...], ...]
    makespan: float
    longest_span: float


def list_schedule(
    placement: Placement,
    microbatches: int,
    costs: Costs,
    memory_limit: Sequence[float],
    rule: Rule,
) -> Listed | None:
    """The orders that `rule` leads to; None where it gets stuck.

    `memory_limit`: per rank, in the costs' unit, for activations alone. A rule that offers
    every stage's F and B cannot get stuck if each rank can hold one microbatch of each of its
    stages: an F leaves room for one F of each deeper stage of its rank, unless memory that
    the rank can free by itself makes up for it.
    """
    return _Ranks(placement, microbatches, costs, memory_limit, rule).run()


class _Ranks:
    def __init__(
        self,
        placement: Placement,
        microbatches: int,
        costs: Costs,
        memory_limit: Sequence[float],
        rule: Rule,
    ) -> None:
        stages, ranks = placement.stages, placement.ranks
        self.placement = placement
        self.microbatches = microbatches
        self.costs = costs
        self.limit = memory_limit
        self.rule = rule
        self.latency = [
            costs.link_latency[s] if placement.crosses(s) else 0.0 for s in range(stages - 1)
        ]
        # What an F of a stage leaves room for: one F of each deeper stage of its rank.
        self.reserve = [
            sum(costs.activation[d] for d in placement.stages_of(placement.rank_of[s]) if d > s)
            for s in range(stages)
        ]
        # When the next microbatches' inputs and gradients are there, in microbatch order.
        self.inputs: list[deque[float]] = [deque() for _ in range(stages)]
        self.gradients: list[deque[float]] = [deque() for _ in range(stages)]
        self.inputs[0].extend([0.0] * microbatches)
        self.done = {kind: [0] * stages for kind in (Kind.F, Kind.B)}
        self.weights: list[deque[Op]] = [deque() for _ in range(ranks)]
        self.backwards_left = [placement.chunks * microbatches] * ranks
        self.live = [0.0] * ranks
        self.chosen = [0] * ranks
        self.orders: list[list[Op]] = [[] for _ in range(ranks)]
        self.first = [0.0] * ranks
        self.clock = [0.0] * ranks
        # Times at which a rank may have something to choose.
        self.events = [(0.0, rank) for rank in range(ranks)]

    def run(self) -> Listed | None:
        while self.events:
            now, rank = heapq.heappop(self.events)
            if now >= self.clock[rank] - _TOLERANCE:
                self._choose(rank, now)
        if sum(map(len, self.orders)) < 3 * self.placement.stages * self.microbatches:
            return None
        return Listed(
            tuple(tuple(order) for order in self.orders),
            max(self.clock),
            max(end - start for start, end in zip(self.first, self.clock, strict=True)),
        )

    def _choose(self, rank: int, now: float) -> None:
        best: tuple[Kind, int] | None = None
        soon = short_of_memory = None
        for kind, stage in self.rule.prefer(rank, self.chosen[rank]):
            ready = self._ready(kind, stage)
            if ready is None:
                continue
            if kind is Kind.F and not self._has_room(rank, stage):
                short_of_memory = short_of_memory or ready <= now + _TOLERANCE
            elif ready <= now + _TOLERANCE:
                best = (kind, stage)
                break
            else:
                soon = ready if soon is None else min(soon, ready)
        if self._weight_first(rank, now, best, soon, bool(short_of_memory)):
            self._start(rank, now, self.weights[rank].popleft())
        elif best is not None:
            kind, stage = best
            self.chosen[rank] += 1
            self._start(rank, now, Op(kind, stage, self.done[kind][stage]))
        elif soon is not None:
            heapq.heappush(self.events, (soon, rank))

    def _ready(self, kind: Kind, stage: int) -> float | None:
        """When the next op of `kind` on `stage` has what it needs; None: not yet known."""
        if kind is Kind.F:
            return self.inputs[stage][0] if self.inputs[stage] else None
        if self.done[Kind.B][stage] == self.done[Kind.F][stage] or not self.gradients[stage]:
            return None
        return self.gradients[stage][0]

    def _has_room(self, rank: int, stage: int) -> bool:
        after = self.live[rank] + self.costs.activation[stage]
        limit = self.limit[rank] + _TOLERANCE
        if after > limit:
            return False
        if after + self.reserve[stage] <= limit:
            return True
        held, released = self.costs.activation, self.costs.released_by_backward_input
        # B has released its share of what a pending W still holds.
        freeable = sum(
            held[op.stage] * (1 - released[op.stage]) for op in self.weights[rank]
        ) + sum(held[s] * len(self.gradients[s]) for s in self.placement.stages_of(rank))
        return after + self.reserve[stage] - freeable <= limit

    def _weight_first(
        self,
        rank: int,
        now: float,
        best: tuple[Kind, int] | None,
        soon: float | None,
        short_of_memory: bool,
    ) -> bool:
        pending = self.weights[rank]
        if not pending:
            return False
        if best is not None:
            many = self.rule.pending_weights
            return best[0] is Kind.F and many is not None and len(pending) >= many
        time = self.costs.backward_weight[pending[0].stage]
        overhang = self.rule.overhang if self.backwards_left[rank] > self.rule.undelayed else 0.0
        return soon is None or short_of_memory or now + time * (1 - overhang) <= soon + _TOLERANCE

    def _start(self, rank: int, now: float, op: Op) -> None:
        stage = op.stage
        end = now + self.costs.time(op.kind, stage)
        if not self.orders[rank]:
            self.first[rank] = now
        self.orders[rank].append(op)
        self.clock[rank] = end
        heapq.heappush(self.events, (end, rank))
        activation = self.costs.activation[stage]
        released = activation * self.costs.released_by_backward_input[stage]
        if op.kind is Kind.W:
            self.live[rank] -= activation - released
            return
        self.done[op.kind][stage] += 1
        if op.kind is Kind.F:
            self.live[rank] += activation
            self.inputs[stage].popleft()
            if stage + 1 < self.placement.stages:
                self._deliver(self.inputs[stage + 1], end + self.latency[stage], stage + 1)
            else:
                self._deliver(self.gradients[stage], end, stage)
        else:
            self.live[rank] -= released
            self.gradients[stage].popleft()
            self.backwards_left[rank] -= 1
            self.weights[rank].append(Op(Kind.W, stage, op.microbatch))
            if stage > 0:
                self._deliver(self.gradients[stage - 1], end + self.latency[stage - 1], stage - 1)

    def _deliver(self, queue: deque[float], there: float, stage: int) -> None:
        queue.append(there)
        heapq.heappush(self.events, (there, self.placement.rank_of[stage]))
