"""Random planning problems as JSON documents, for the audits: the same for the same seed.

    python benchmarks/random_problems.py --count 3 --seed 0

Prints one problem per line. All are feasible, every limit holds one microbatch of a rank's stages,
unless some are asked not to be.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from typing import Any

PLACEMENTS = ("linear", "v", "looped", "any")


def random_problem(
    rng: random.Random,
    *,
    max_ranks: int = 12,
    max_microbatches: int = 24,
    placements: Sequence[str] = PLACEMENTS,
    layers: bool = True,
    infeasible: float = 0.0,
) -> dict[str, Any]:
    """One problem: 1 to `max_ranks` ranks, 1 to `max_microbatches`, one of `placements`.

    Costs lie within two orders of magnitude, in some problems equal for all stages, in some with
    zeros; limits from one microbatch of a rank's stages to none; some have joint stages, latency
    (of one boundary or all), fixed memory, a split overhead. `layers`: some give rows per layer.
    `infeasible`: the share of problems where some rank's limit is a little too small.
    """
    ranks = rng.randint(1, max_ranks)
    microbatches = rng.randint(1, max_microbatches)
    placement = rng.choice(list(placements))
    problem: dict[str, Any] = {
        "ranks": ranks,
        "microbatches": microbatches,
        "placement": placement,
    }
    chunks = {"linear": 1, "looped": rng.choice([2, 3])}.get(placement, 2)
    if placement == "looped":
        problem["chunks"] = chunks
    stages = ranks * chunks
    divisible = layers and rng.random() < 0.15
    rows = rng.randint(max(ranks, 2), 3 * stages) if divisible else stages
    times = _times(rng, rows)
    problem["layer_times" if divisible else "stage_times"] = times
    activation = _amounts(rng, rows, least=0.1, most=2.0)
    fixed = _amounts(rng, rows, least=0.1, most=3.0) if rng.random() < 0.2 else [0.0] * rows
    problem["layer_activation" if divisible else "activation_per_stage"] = activation
    if any(fixed):
        problem["layer_fixed" if divisible else "fixed_memory"] = fixed
    links = _links(rng, stages - 1)
    per_boundary = placement != "any" and rng.random() < 0.3
    problem["link_latency"] = links if per_boundary else max([0.0, *links])
    problem["released_by_backward_input"] = rng.choice([0.0, 0.5, 1.0, round(rng.random(), 2)])
    problem["memory_limit"] = _limits(rng, problem, activation, fixed, chunks, divisible)
    if rng.random() < 0.25:
        problem["split_overhead"] = rng.choice([0.05, 0.2, 0.5])
    if rng.random() < 0.25:
        problem["joint_stages"] = sorted(rng.sample(range(stages), rng.randint(1, stages)))
    if rng.random() < infeasible:
        problem["memory_limit"] = _too_little(rng, problem, activation, fixed, divisible)
    _shorten(rng, problem)
    return problem


def random_problems(count: int, seed: int, **options: Any) -> list[dict[str, Any]]:
    """`count` problems, each with its "id"; the first are the same for every count."""
    problems = []
    for index in range(count):
        rng = random.Random(f"{seed}.{index}")
        problems.append(random_problem(rng, **options) | {"id": f"random-{seed}-{index}"})
    return problems


def _times(rng: random.Random, rows: int) -> list[list[float]]:
    """Rows of F, B and W."""
    if rng.random() < 0.3:
        return [rng.choice([[1.0, 1.0, 1.0], [1.0, 2.0, 1.0], _row(rng)])] * rows
    times = [_row(rng) for _ in range(rows)]
    if rng.random() < 0.3:
        times = [[0.0 if rng.random() < 0.25 else x for x in row] for row in times]
    return times


def _row(rng: random.Random) -> list[float]:
    return [round(10 ** rng.uniform(-1, 1), 2) for _ in range(3)]


def _amounts(rng: random.Random, rows: int, *, least: float, most: float) -> list[float]:
    if rng.random() < 0.5:
        return [rng.choice([0.5, 1.0])] * rows
    zeros = 0.2 if rng.random() < 0.2 else 0.0
    amounts = [round(rng.uniform(least, most), 2) for _ in range(rows)]
    return [0.0 if rng.random() < zeros else x for x in amounts]


def _links(rng: random.Random, boundaries: int) -> list[float]:
    if rng.random() < 0.3:
        return [0.0] * boundaries
    return [round(10 ** rng.uniform(-2, 0.5), 2) for _ in range(boundaries)]


def _limits(
    rng: random.Random,
    problem: dict[str, Any],
    activation: list[float],
    fixed: list[float],
    chunks: int,
    divisible: bool,
) -> Any:
    """A number, one per rank, or None, in which one microbatch fits on every placement."""
    ranks, rows = problem["ranks"], len(activation)
    if rng.random() < 0.2:
        return None
    held, kept = [0.0] * ranks, [0.0] * ranks
    if divisible:
        # What an even layout of the largest layers would put on one rank.
        largest = chunks * -(-rows // (chunks * ranks))
        held = [sum(sorted(activation)[-largest:])] * ranks
        kept = [sum(sorted(fixed)[-largest:])] * ranks
    else:
        for rank in range(ranks):
            sets = _held_together(problem["placement"], ranks, rank, rows)
            held[rank] = max(sum(activation[s] for s in stages) for stages in sets)
            kept[rank] = max(sum(fixed[s] for s in stages) for stages in sets)
    more = [rng.choice([0.0, 0.5, 1.0, rng.random(), 2.0]) * ranks for _ in range(ranks)]
    if rng.random() < 0.6:
        more = [more[0]] * ranks
    limits = [round(k + h * (1 + x), 2) for k, h, x in zip(kept, held, more, strict=True)]
    limits = [max(x, round(k + h, 6)) for x, k, h in zip(limits, kept, held, strict=True)]
    if rng.random() < 0.5:
        return max(limits)
    return [None if rng.random() < 0.1 else x for x in limits]


def _held_together(placement: str, ranks: int, rank: int, rows: int) -> list[Sequence[int]]:
    """The rows that a rank may come to hold: one set per placement."""
    if placement == "v":
        return [(rank, rows - 1 - rank)]
    sets: list[Sequence[int]] = [range(rank, rows, ranks)]
    if placement == "any":
        sets += [(rank, rows - 1 - rank), (2 * rank, 2 * rank + 1)]
    return sets


def _too_little(
    rng: random.Random,
    problem: dict[str, Any],
    activation: list[float],
    fixed: list[float],
    divisible: bool,
) -> Any:
    """Limits, one or all of which are a little under one microbatch on every placement."""
    ranks, rows = problem["ranks"], len(activation)
    rank = rng.randrange(ranks)
    if divisible:
        need = max(a + f for a, f in zip(activation, fixed, strict=True))
    else:
        sets = _held_together(problem["placement"], ranks, rank, rows)
        need = min(sum(activation[s] + fixed[s] for s in stages) for stages in sets)
    less = need - rng.choice([1e-6, 0.01, 0.5, need])
    if less < 0:
        less = need / 2
    if divisible or rng.random() < 0.5:
        return less
    limits = problem["memory_limit"]
    limits = list(limits) if isinstance(limits, list) else [limits] * ranks
    limits[rank] = less
    return limits


def _shorten(rng: random.Random, problem: dict[str, Any]) -> None:
    """Now and then write once what is equal for all."""
    for key in ("stage_times", "activation_per_stage", "layer_activation", "fixed_memory"):
        value = problem.get(key)
        if value and all(x == value[0] for x in value) and rng.random() < 0.5:
            problem[key] = value[:1] if key == "stage_times" else value[0]


def main() -> None:
    """Print problems, one per line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for problem in random_problems(arguments.count, arguments.seed):
        print(json.dumps(problem))


if __name__ == "__main__":
    main()
