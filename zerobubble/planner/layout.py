"""Layouts: how many layers each stage gets, chosen with the placement."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from zerobubble.planner.bounds import lower_bound
from zerobubble.planner.instance import make_instance, shortfall
from zerobubble.planner.problem import Problem
from zerobubble.schedule.placement import Placement

Layout = tuple[int, ...]
"""Blocks per stage, in layer order."""


def promising_layouts(
    problem: Problem, placement: Placement, count: int, *, span: bool, tries: int = 400
) -> list[Layout]:
    """Up to `count` layouts, those with the least lower bounds first.

    Starts from layers divided evenly by time and moves single layers over boundaries while that
    lowers the bound (or what is missing of memory). Empty where there are more stages than
    layers.
    """
    if len(problem.blocks) < placement.stages:
        return []

    def score(layout: Layout) -> tuple[float, float]:
        instance = make_instance(
            placement, problem.microbatches, problem.costs(placement, layout), span=span
        )
        missing = shortfall(instance)
        # Layouts that do not fit come after all that do, the nearest to fitting first.
        return (missing[1], 0.0) if missing else (0.0, lower_bound(instance))

    start = _even(problem, placement.stages)
    scores = {start: score(start)}
    frontier = [(scores[start], start)]
    while frontier and len(scores) < tries:
        _, layout = heapq.heappop(frontier)
        for moved in _moves(layout):
            if moved not in scores:
                scores[moved] = score(moved)
                heapq.heappush(frontier, (scores[moved], moved))
    ranked = sorted(scores, key=lambda layout: (scores[layout], layout))
    fitting = [layout for layout in ranked if scores[layout][0] == 0.0]
    return (fitting or ranked[:1])[:count]


def least_work(problem: Problem) -> float:
    """No layout's makespan or longest span is less: an even share, or the largest layer."""
    work = [b.forward + b.backward_input + b.backward_weight for b in problem.blocks]
    return problem.microbatches * max(max(work), sum(work) / problem.ranks)


def _even(problem: Problem, stages: int) -> Layout:
    """Contiguous parts whose times come as near to equal as a walk along the layers gets."""
    work = [b.forward + b.backward_input + b.backward_weight for b in problem.blocks]
    total, layout, taken = sum(work), [], 0
    cumulative = list(itertools.accumulate(work))
    for stage in range(stages):
        goal = total * (stage + 1) / stages
        last = len(work) - (stages - stage - 1)
        end = taken + 1
        while end < last and abs(cumulative[end] - goal) <= abs(cumulative[end - 1] - goal):
            end += 1
        if stage == stages - 1:
            end = len(work)
        layout.append(end - taken)
        taken = end
    return tuple(layout)


def _moves(layout: Layout) -> Iterator[Layout]:
    """One layer from a stage to another, those between shifted along."""
    for source, target in itertools.permutations(range(len(layout)), 2):
        if layout[source] > 1:
            moved = list(layout)
            moved[source] -= 1
            moved[target] += 1
            yield tuple(moved)
