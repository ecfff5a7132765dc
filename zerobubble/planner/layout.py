"""Layouts: how many layers each stage gets, chosen with the placement."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from zerobubble.planner.bounds import lower_bound
from zerobubble.planner.instance import TOLERANCE, make_instance
from zerobubble.planner.problem import Block, Problem
from zerobubble.schedule.placement import Placement

Layout = tuple[int, ...]
"""Blocks per stage, in layer order."""

_TRIES = 3000  # layouts that are weighed
_BOUNDED = 60  # and whose lower bounds are worked out


def promising_layouts(
    problem: Problem, placement: Placement, count: int, *, span: bool
) -> list[Layout]:
    """Up to `count` layouts, those with the least lower bounds first.

    Starts from layers divided evenly by time, moves single layers between stages while that makes
    the busiest rank less busy (or memory less short), and takes the lower bounds of the best. Only
    one that does not fit where none does. A stage is left without layers only where there are
    fewer layers than stages.
    """
    scale = _Scale(problem, placement)
    least = 1 if len(problem.blocks) >= placement.stages else 0
    start = _even(problem, placement.stages)
    weights = {start: scale.weigh(start)}
    frontier = [(weights[start], start)]
    while frontier and len(weights) < _TRIES:
        _, layout = heapq.heappop(frontier)
        for moved in _moves(layout, least):
            if moved not in weights:
                weights[moved] = scale.weigh(moved)
                heapq.heappush(frontier, (weights[moved], moved))
    ranked = heapq.nsmallest(_BOUNDED, weights, key=lambda layout: (weights[layout], layout))
    fitting = [layout for layout in ranked if weights[layout][0] == 0.0]
    if not fitting:
        return ranked[:1]

    def bound(layout: Layout) -> float:
        costs = problem.costs(placement, layout)
        return lower_bound(make_instance(placement, problem.microbatches, costs, span=span))

    return heapq.nsmallest(count, fitting, key=lambda layout: (bound(layout), layout))


def least_work(problem: Problem) -> float:
    """No layout's makespan or longest span is less: an even share, or the largest layer."""
    work = [_work(block) for block in problem.blocks]
    return problem.microbatches * max(max(work), sum(work) / problem.ranks)


def _work(block: Block) -> float:
    split = block.backward_input + block.backward_weight
    return block.forward + min(split, block.backward_joint)


class _Scale:
    """Weighs layouts: what memory lacks for one microbatch, then the busiest rank's work."""

    def __init__(self, problem: Problem, placement: Placement) -> None:
        self.rank_of = placement.rank_of
        self.limits = problem.memory_limit
        memory = (block.activation + block.fixed_memory for block in problem.blocks)
        self.memory = [0.0, *itertools.accumulate(memory)]
        self.work = [0.0, *itertools.accumulate(map(_work, problem.blocks))]

    def weigh(self, layout: Layout) -> tuple[float, float]:
        memory = [0.0] * len(self.limits)
        work = [0.0] * len(self.limits)
        first = 0
        for rank, count in zip(self.rank_of, layout, strict=True):
            memory[rank] += self.memory[first + count] - self.memory[first]
            work[rank] += self.work[first + count] - self.work[first]
            first += count
        lacks = sum(
            need - limit
            for need, limit in zip(memory, self.limits, strict=True)
            if need > limit + TOLERANCE / 2
        )
        return lacks, max(work)


def _even(problem: Problem, stages: int) -> Layout:
    """Contiguous parts whose times come as near to equal as a walk along the layers gets."""
    reached = list(itertools.accumulate(map(_work, problem.blocks)))
    layout: list[int] = []
    taken = 0
    for stage in range(stages):
        goal = reached[-1] * (stage + 1) / stages
        last = max(taken, len(reached) - (stages - stage - 1))
        end = min(taken + 1, last)
        while 0 < end < last and abs(reached[end] - goal) <= abs(reached[end - 1] - goal):
            end += 1
        if stage == stages - 1:
            end = len(reached)
        layout.append(end - taken)
        taken = end
    return tuple(layout)


def _moves(layout: Layout, least: int) -> Iterator[Layout]:
    """One layer from a stage to another, those between shifted along."""
    for source, target in itertools.permutations(range(len(layout)), 2):
        if layout[source] > least:
            moved = list(layout)
            moved[source] -= 1
            moved[target] += 1
            yield tuple(moved)
