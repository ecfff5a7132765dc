"""Lower bounds: closed forms, known optima, and what must not lower them."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.random_problems import random_problem
from zerobubble.planner.bounds import lower_bound
from zerobubble.planner.instance import make_instance
from zerobubble.planner.plan import plan
from zerobubble.planner.problem import Objective, parse_problem

TARGETS = Path(__file__).parent.parent / "benchmarks/reference/planner_targets.json"
CASES: list[dict[str, Any]] = json.loads(TARGETS.read_text())["cases"]
UNIT = (1.0, 1.0, 1.0)
PAPER = (1.0, 1.2, 0.8)


def uniform(
    ranks: int,
    microbatches: int,
    memory: float | None,
    times: tuple[float, float, float] = UNIT,
    link: float = 0.0,
    placement: str = "linear",
) -> dict[str, Any]:
    """All ranks alike: `times` of a rank's share of the model, a microbatch takes 1 of memory."""
    chunks = 1 if placement == "linear" else 2
    return {
        "ranks": ranks,
        "microbatches": microbatches,
        "placement": placement,
        "stage_times": [[time / chunks for time in times]],
        "link_latency": link,
        "activation_per_stage": 1 / chunks,
        "released_by_backward_input": 0.5,
        "memory_limit": memory,
    }


def bound_of(document: dict[str, Any], objective: Objective = "makespan") -> float:
    """The least of the placements that the problem allows."""
    problem = parse_problem(document)
    return min(
        lower_bound(
            make_instance(
                placement,
                problem.microbatches,
                problem.costs(placement),
                span=objective == "span",
            )
        )
        for placement in problem.placements()
    )


def linear_optimum(ranks: int, microbatches: int, memory: int, f: float, b: float, w: float,
                   link: float) -> float:  # fmt: skip
    """Of the makespan, for memory of at most m microbatches that B halves.

    The last rank starts late. The first has too few F to wait for the first gradient with, and
    too few backwards to wait for the last one with: a microbatch's way down and up again.
    """
    work = microbatches * (f + b + w)
    way = (ranks - 1) * (f + b + 2 * link)
    first = max(0.0, way + f - memory * f) + max(0.0, way + b + w - memory * (b + w))
    return work + max((ranks - 1) * (f + link), first)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "memory", "times", "link", "optimum"),
    [
        # As many microbatches as ranks: the last rank's start decides, 3 m + p - 1.
        (4, 8, 4, UNIT, 0.0, 27.0),
        (8, 16, 8, UNIT, 0.0, 55.0),
        (5, 7, 5, UNIT, 0.0, 25.0),
        (4, 64, 4, UNIT, 0.0, 195.0),
        # W is cheaper than B: rank 0 idles at both ends.
        (4, 8, 4, PAPER, 0.05, 28.8),
        (4, 64, 4, PAPER, 0.05, 196.8),
        (4, 8, 8, PAPER, 0.05, 27.15),
        (4, 64, 4, (1.0, 1.0, 0.3), 0.0, 152.3),
        # Less memory than ranks: proved optima.
        (8, 16, 7, UNIT, 0.0, 58.0),
        (8, 32, 6, UNIT, 0.0, 109.0),
    ],
)
def test_uniform_stages_have_their_closed_form(
    ranks: int,
    microbatches: int,
    memory: int,
    times: tuple[float, float, float],
    link: float,
    optimum: float,
) -> None:
    assert linear_optimum(ranks, microbatches, memory, *times, link) == pytest.approx(optimum)
    document = uniform(ranks, microbatches, memory, times, link)
    assert bound_of(document) == pytest.approx(optimum)
    found = plan(parse_problem(document))
    assert found.makespan == pytest.approx(optimum)
    assert found.lower_bound == pytest.approx(optimum)
    assert found.proven_optimal


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 3), (4, 8), (8, 16)])
def test_a_v_without_bubble_starts_its_last_rank_half_as_late(
    ranks: int, microbatches: int
) -> None:
    document = uniform(ranks, microbatches, ranks, placement="v")
    assert bound_of(document) == pytest.approx(3 * microbatches + (ranks - 1) / 2)
    assert bound_of(document, "span") == pytest.approx(3 * microbatches)


@pytest.mark.parametrize("memory", [1, 3, None])
@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_one_rank_has_its_work(memory: float | None, objective: Objective) -> None:
    document = uniform(1, 5, memory, PAPER)
    assert bound_of(document, objective) == pytest.approx(15)
    found = plan(parse_problem(document), objective=objective)
    assert found.proven_optimal
    assert found.value == pytest.approx(15)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 3), (3, 4), (5, 2)])
def test_memory_of_one_runs_one_microbatch_at_a_time(ranks: int, microbatches: int) -> None:
    # Rank 0 holds a microbatch from its F, over the way down and up, to its B and W.
    document = uniform(ranks, microbatches, 1) | {"released_by_backward_input": 0.0}
    assert bound_of(document) == pytest.approx(microbatches * (2 * ranks + 1))


def test_a_single_microbatch_takes_its_way() -> None:
    # F and B through all stages and over all boundaries, and the W of the first stage.
    document = uniform(4, 1, None, PAPER, 0.05)
    way = 4 * (1.0 + 1.2) + 6 * 0.05 + 0.8
    assert bound_of(document) == pytest.approx(way)
    assert bound_of(document, "span") == pytest.approx(way)


@pytest.mark.parametrize(
    ("rows", "bound"),
    [
        # 8 * 4.5 of work; before it F of the ranks above the last.
        ([1.0, 1.0, 1.0, 1.5], 39.0),
        # Four F of 1.5 before the first gradient, which is there after 7.5.
        ([1.5, 1.0, 1.0, 1.0], 37.5),
    ],
)
def test_a_slow_stage_has_its_work_and_the_way_to_it(rows: list[float], bound: float) -> None:
    document = uniform(4, 8, 4) | {"stage_times": [[x, x, x] for x in rows]}
    assert bound_of(document) == pytest.approx(bound)


def test_joint_stages_have_no_w_to_fill_gaps_with() -> None:
    # 1F1B is optimal where nothing splits: (m + p - 1)(F + BW).
    document = uniform(4, 8, 4) | {"joint_stages": [0, 1, 2, 3]}
    assert bound_of(document) <= 33 * (1 + 1e-9)
    found = plan(parse_problem(document))
    assert found.makespan == pytest.approx(33)
    assert found.proven_optimal


def test_no_time_at_all() -> None:
    document = uniform(3, 4, 2, (0.0, 0.0, 0.0))
    assert bound_of(document) == 0
    found = plan(parse_problem(document))
    assert (found.makespan, found.lower_bound, found.proven_optimal) == (0, 0, True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_bounds_lie_between_a_proven_one_and_orders_that_are_known(case: dict[str, Any]) -> None:
    if "layer_times" in case:
        return  # the bound of a layout is another one for each
    bound = bound_of(case)
    # Published figures are rounded to 3 decimals.
    for known in (case["proved_optimum"], case["best_known_makespan"]):
        assert known is None or bound <= known * (1 + 1e-6) + 5e-4
    assert bound >= (case["lower_bound"] or 0) - 5e-4
    assert bound > 0


def random_documents(count: int) -> list[dict[str, Any]]:
    return [
        random_problem(random.Random(seed), max_ranks=6, max_microbatches=10, layers=False)
        for seed in range(count)
    ]


def limits_of(document: dict[str, Any]) -> list[float]:
    given = document["memory_limit"]
    each = given if isinstance(given, list) else [given] * document["ranks"]
    return [math.inf if limit is None else limit for limit in each]


@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_a_tighter_limit_never_lowers_the_bound(objective: Objective) -> None:
    for document in random_documents(120):
        bounds = []
        for more in (1.0, 1.03, 1.4, 2.0, 8.0, math.inf):
            limits = [more * limit if limit else 0.0 for limit in limits_of(document)]
            wider = document | {"memory_limit": [x if x < math.inf else None for x in limits]}
            bounds.append(bound_of(wider, objective))
        assert all(a >= b * (1 - 1e-9) for a, b in itertools.pairwise(bounds)), document


@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_more_microbatches_never_lower_the_bound(objective: Objective) -> None:
    for document in random_documents(120):
        bounds = [bound_of(document | {"microbatches": m}, objective) for m in (1, 2, 3, 5, 9, 17)]
        assert all(b >= a * (1 - 1e-9) for a, b in itertools.pairwise(bounds)), document


@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_dearer_ops_and_links_never_lower_the_bound(objective: Objective) -> None:
    for document in random_documents(60):
        bound = bound_of(document, objective)
        rows = [[f + 0.1, b, w + 0.2] for f, b, w in document["stage_times"]]
        dearer = bound_of(document | {"stage_times": rows}, objective)
        assert dearer >= bound * (1 - 1e-9), document
        link = document["link_latency"]
        longer = [x + 0.5 for x in link] if isinstance(link, list) else link + 0.5
        assert bound_of(document | {"link_latency": longer}, objective) >= bound * (1 - 1e-9)


def test_twice_the_times_are_twice_the_bound() -> None:
    for document in random_documents(40):
        link = document["link_latency"]
        twice = document | {
            "stage_times": [[2 * x for x in row] for row in document["stage_times"]],
            "link_latency": [2 * x for x in link] if isinstance(link, list) else 2 * link,
        }
        assert bound_of(twice) == pytest.approx(2 * bound_of(document), rel=1e-9)
