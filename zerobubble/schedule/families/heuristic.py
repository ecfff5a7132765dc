"""The cost-driven heuristic behind zb-1p and zb-2p. Not a family of its own.

Source: the idea of Qi et al., arXiv 2401.10241, section 3.1: fill the time before the first
gradient with forwards, then alternate B and F, with W in the gaps and where memory asks for it.
Here each rank's F and B are a fixed row, list scheduling puts W in, and a small portfolio of
settings is tried until one meets a lower bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zerobubble.schedule.costs import Costs
from zerobubble.schedule.families import zb_h1, zb_h2
from zerobubble.schedule.list_scheduling import Listed, Preference, Rule, list_schedule
from zerobubble.schedule.ops import Kind, Op
from zerobubble.schedule.placement import Placement
from zerobubble.schedule.schedule import Schedule
from zerobubble.schedule.simulate import peak_memory, simulate

F, B, W = Kind.F, Kind.B, Kind.W

_TOLERANCE = 1e-9


def shortest(
    placement: Placement, microbatches: int, costs: Costs, most_held: int
) -> tuple[tuple[Op, ...], ...]:
    """The orders with the shortest longest span (then makespan) of those tried.

    `placement` has one stage per rank; no rank holds more than `most_held` microbatches.
    """
    limit = [most_held * activation for activation in costs.activation]
    bound = _lower_bound(placement, microbatches, costs, most_held)
    best: Listed | None = None
    for found in _candidates(placement, microbatches, costs, limit, most_held):
        if best is None or (found.longest_span, found.makespan) < (
            best.longest_span,
            best.makespan,
        ):
            best = found
        if best.longest_span <= bound * (1 + _TOLERANCE):
            break
    assert best is not None
    return best.orders


def _candidates(
    placement: Placement,
    microbatches: int,
    costs: Costs,
    limit: Sequence[float],
    most_held: int,
) -> Iterator[Listed]:
    ranks = placement.ranks
    warm_ups = []
    for rounding in (0.0, 0.5, 1.0):
        warm_up = _warm_up(ranks, microbatches, costs, most_held, rounding)
        if warm_up not in warm_ups:
            warm_ups.append(warm_up)
    # (share of a W that may stick out, B that it must not delay, whether the last F yields.)
    # A W that sticks out of its gap keeps its rank busy and makes the neighbours wait; near the
    # end, where nothing is left to fill a gap with, waiting is the dearer of the two.
    settings = (
        (1.0, 0, False),
        (1.0, 0, True),
        (0.0, 0, False),
        (0.5, 0, False),
        (1.0, 3, False),
        (0.5, ranks // 2, False),
    )
    for warm_up in warm_ups:
        for overhang, undelayed, yields in settings:
            rule = Rule(_alternating(warm_up, microbatches, yields), None, overhang, undelayed)
            found = list_schedule(placement, microbatches, costs, limit, rule)
            if found is not None:
                yield found
    # Where stages differ, a rank may have reason not to alternate.
    for overhang in (0.0, 1.0):
        rule = Rule(lambda rank, _position: ((B, rank), (F, rank)), None, overhang)
        found = list_schedule(placement, microbatches, costs, limit, rule)
        if found is not None:
            yield found
    for family in (zb_h1, zb_h2):
        orders = tuple(tuple(row) for row in family.orders(placement, microbatches, costs))
        schedule = Schedule(family.NAME, placement, microbatches, orders)
        peaks = zip(peak_memory(schedule, costs), costs.fixed_memory, limit, strict=True)
        if all(peak - fixed <= most * (1 + _TOLERANCE) for peak, fixed, most in peaks):
            timeline = simulate(schedule, costs)
            yield Listed(orders, timeline.makespan, timeline.longest_span)


def _heads(costs: Costs) -> list[float]:
    """Per rank, when its first F can start."""
    heads = [0.0]
    for forward, latency in zip(costs.forward, costs.link_latency, strict=False):
        heads.append(heads[-1] + forward + latency)
    return heads


def _first_gradients(costs: Costs, heads: Sequence[float]) -> list[float]:
    """Per rank, when its first B can start."""
    there = [heads[-1] + costs.forward[-1]]
    hops = list(zip(costs.backward_input[1:], costs.link_latency, strict=True))
    for backward, latency in reversed(hops):
        there.append(there[-1] + backward + latency)
    return there[::-1]


def _warm_up(
    ranks: int, microbatches: int, costs: Costs, most_held: int, rounding: float
) -> list[int]:
    """Per rank, how many F to run before its first B: as many as there is time for.

    `rounding` is the share of an F that may be missing: 0 never delays the first B.
    """
    heads = _heads(costs)
    gradients = _first_gradients(costs, heads)
    counts = [1] * ranks
    for rank in reversed(range(ranks)):
        # Inputs come no faster than the slowest rank before makes them.
        pace = max(costs.forward[: rank + 1])
        time = gradients[rank] - heads[rank]
        wanted = most_held if pace == 0 else int(time / pace + rounding + _TOLERANCE)
        # A rank that runs no more F ahead than the next one starves it.
        least = counts[rank + 1] + 1 if rank + 1 < ranks else 1
        counts[rank] = min(max(wanted, least), most_held - rank, microbatches)
    return counts


def _alternating(warm_up: Sequence[int], microbatches: int, yields: bool) -> Preference:
    """After its warm-up each rank runs B and F in turn.

    `yields`: the last F lets a second B go first, except on rank 0, whose B come without F
    between them from then on.
    """
    rows = []
    for rank, ahead in enumerate(warm_up):
        backward, forward = (B, rank), (F, rank)
        turns = [backward, forward] * (microbatches - ahead) + [backward] * ahead
        if yields and rank and 2 <= ahead < microbatches:
            last = 2 * (microbatches - ahead) - 1
            turns[last], turns[last + 1] = turns[last + 1], turns[last]
        rows.append([forward] * ahead + turns)
    return lambda rank, position: rows[rank][position : position + 1]


def _lower_bound(placement: Placement, microbatches: int, costs: Costs, most_held: int) -> float:
    """No longest span is shorter."""
    heads = _heads(costs)
    gradients = _first_gradients(costs, heads)
    rows = list(zip(costs.forward, costs.backward_input, costs.backward_weight, strict=True))
    # Every rank's own work.
    bound = max(microbatches * sum(row) for row in rows)
    # Rank 0 has nothing but as many F as it can hold to run before its first gradient.
    early = min(gradients[0], min(most_held, microbatches) * costs.forward[0])
    bound = max(bound, gradients[0] + microbatches * sum(rows[0]) - early)
    # Each rank has all F and B to run before its last gradient goes back to rank 0.
    back = costs.backward_weight[0]
    for rank in range(placement.ranks):
        forward, backward, _ = rows[rank]
        bound = max(bound, heads[rank] + microbatches * (forward + backward) + back)
        if rank < placement.ranks - 1:
            back += costs.backward_input[rank] + costs.link_latency[rank]
    return bound
