"""The planner on random problems: every one a plan that the referee accepts, or "infeasible".

    python benchmarks/planner_fuzz.py --count 1000 --json fuzz.json

Problems come from random_problems.py (up to 12 ranks and 24 microbatches); every twentieth has a
limit just below what one microbatch needs and must be refused with the rank and what it lacks.
Objectives alternate. Exit status 1 if a plan is refused, a claim is false, or anything crashes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import traceback
from collections import defaultdict
from pathlib import Path
from typing import Any

from planner_targets import REFEREE
from random_problems import random_problem

from zerobubble.planner.plan import InfeasibleError, plan
from zerobubble.planner.problem import Objective, Problem, parse_problem
from zerobubble.planner.search import compile_search


def least_limits(problem: Problem) -> list[float]:
    """Per rank, the memory of one microbatch of its stages and what is fixed.

    For a given placement and stages that are given.
    """
    (placement,) = problem.placements()
    costs = problem.costs(placement)
    return [
        sum(costs.activation[s] + costs.fixed_memory[s] for s in placement.stages_of(rank))
        for rank in range(problem.ranks)
    ]


def make_infeasible(document: dict[str, Any], rng: random.Random) -> tuple[int, float] | None:
    """Lower one rank's limit below the least; that rank and what it lacks. None where it can't."""
    problem = parse_problem({**document, "memory_limit": None})
    if document["placement"] == "any" or problem.divisible:
        return None
    least = least_limits(problem)
    rank = rng.randrange(problem.ranks)
    if least[rank] <= 0:
        return None
    limits: list[float | None] = [None] * problem.ranks
    limits[rank] = least[rank] * 0.9
    document["memory_limit"] = limits
    return rank, least[rank] * 0.1


def check(
    document: dict[str, Any],
    objective: Objective,
    lacks: tuple[int, float] | None,
    time_limit: float,
    prove: bool,
) -> dict[str, Any]:
    """Plan one problem; `fault` is "" or what is wrong."""
    try:
        found = plan(
            parse_problem(document), objective=objective, time_limit=time_limit, prove=prove
        )
    except InfeasibleError as error:
        if lacks is None:
            return {"fault": f"called infeasible: {error}"}
        rank, shortfall = lacks
        good = error.rank == rank and abs(error.shortfall - shortfall) < 1e-6 * max(1, shortfall)
        return {"fault": "" if good else f"wrong reason: {error}", "infeasible": True}
    except Exception:
        return {"fault": traceback.format_exc()}
    if lacks is not None:
        return {"fault": "planned beyond the limit"}
    claim = json.loads(json.dumps(found.to_json()))
    try:
        REFEREE.judge(document, claim)
    except (ValueError, KeyError, TypeError) as error:
        return {"fault": f"refused: {error!r}"}
    worse = [
        other.schedule
        for other in found.alternatives
        if other.fits and other.objective(objective) < found.value * (1 - 1e-9)
    ]
    return {
        "fault": f"worse than {worse}" if worse else "",
        "value": found.value,
        "lower_bound": found.lower_bound,
        "optimal": found.proven_optimal,
    }


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time-limit", type=float, default=0.3, help="seconds per problem")
    parser.add_argument("--prove", action="store_true", help="certify with the exact solver")
    parser.add_argument("--json", type=Path, help="write the rows there")
    arguments = parser.parse_args()
    compile_search()
    rows = []
    began = time.perf_counter()
    for number in range(arguments.count):
        rng = random.Random(f"fuzz {arguments.seed} {number}")
        document = random_problem(rng)
        lacks = make_infeasible(document, rng) if number % 20 == 0 else None
        objective: Objective = "span" if number % 2 else "makespan"
        row = check(document, objective, lacks, arguments.time_limit, arguments.prove)
        row |= {"number": number, "objective": objective, "placement": document["placement"]}
        row |= {"layers": "layer_times" in document}
        rows.append(row)
        if row["fault"]:
            print(f"problem {number} ({objective}): {row['fault']}\n{json.dumps(document)}")
        if sys.stderr.isatty():
            print(f"\r{number + 1}", end="", file=sys.stderr, flush=True)
    planned = [row for row in rows if "optimal" in row]
    print(f"problems {len(rows)} in {time.perf_counter() - began:.0f} s")
    print(f"planned {len(planned)}, infeasible {sum('infeasible' in row for row in rows)}")
    faults = sum(bool(row["fault"]) for row in rows)
    print(f"faults {faults}")
    share = sum(row["optimal"] for row in planned) / max(1, len(planned))
    print(f"proven optimal {100 * share:.1f} % (60 % asked)")
    by: dict[str, list[bool]] = defaultdict(list)
    for row in planned:
        by[row["placement"] + (" with layers" if row["layers"] else "")].append(row["optimal"])
        by[row["objective"]].append(row["optimal"])
    for name, optimal in sorted(by.items()):
        print(f"  {name:<20} {100 * sum(optimal) / len(optimal):5.1f} % of {len(optimal)}")
    gaps = sorted(row["value"] / row["lower_bound"] - 1 for row in planned if row["lower_bound"])
    print(f"gap to the bound: median {gaps[len(gaps) // 2]:.2%}, worst {gaps[-1]:.1%}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
