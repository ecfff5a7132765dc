"""Checks lower bounds and claims of optimality against exact solutions of random problems.

    python benchmarks/bound_audit.py --count 500 --json audit.json

Every problem (at most 4 ranks and 4 microbatches) is solved by CP-SAT alone, without the planner's
bound or plan. Wrong are: a bound above an order that exists; a plan below a bound, the planner's or
CP-SAT's; a plan called optimal that is not. Exit status 1 if anything is wrong. A problem that
CP-SAT leaves unproven is compared with what it found and ruled out.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from random_problems import random_problems

from zerobubble.planner.bounds import lower_bound
from zerobubble.planner.exact import Exact, solve
from zerobubble.planner.instance import make_instance
from zerobubble.planner.plan import Plan, plan
from zerobubble.planner.problem import Objective, parse_problem

SLACK = 1e-9
"""Of values that are to be equal, as a share."""


@dataclass(frozen=True)
class Audit:
    """One problem: what was claimed and what is true, in its unit of time."""

    id: str
    objective: Objective
    bound: float
    plan: float
    claimed_optimal: bool
    exact: float
    exact_bound: float
    proven: bool
    wrong: tuple[str, ...]


def audit(document: dict[str, Any], objective: Objective, exact_s: float, plan_s: float) -> Audit:
    """Solve one problem both ways."""
    problem = parse_problem(document)
    (placement,) = problem.placements()
    instance = make_instance(
        placement, problem.microbatches, problem.costs(placement), span=objective == "span"
    )
    exact = solve(instance, seconds=exact_s, split_choice=True)
    bound = lower_bound(instance)
    planned = plan(problem, objective=objective, time_limit=plan_s)
    return Audit(
        id=document["id"],
        objective=objective,
        bound=bound,
        plan=planned.value,
        claimed_optimal=planned.proven_optimal,
        exact=exact.value,
        exact_bound=exact.lower_bound,
        proven=exact.optimal,
        wrong=tuple(_wrong(bound, planned, exact)),
    )


def _wrong(bound: float, planned: Plan, exact: Exact) -> list[str]:
    wrong = []
    for name, claimed in (("bound", bound), ("plan's bound", planned.lower_bound)):
        if _above(claimed, exact.value):
            wrong.append(f"{name} {claimed} is above orders of {exact.value}")
        if _above(claimed, planned.value):
            wrong.append(f"{name} {claimed} is above the plan, {planned.value}")
    if _above(exact.lower_bound, planned.value):
        wrong.append(f"plan {planned.value} is below what is possible, {exact.lower_bound}")
    if planned.proven_optimal and _above(planned.value, exact.value):
        wrong.append(f"plan {planned.value} is called optimal, orders take {exact.value}")
    return wrong


def _above(one: float, other: float) -> bool:
    return one > other * (1 + SLACK)


def report(audits: list[Audit]) -> str:
    """The counts, and every wrong claim."""
    proven = [a for a in audits if a.proven]
    tight = [a for a in proven if not _above(a.exact, a.bound)]
    best = [a for a in proven if not _above(a.plan, a.exact)]
    claimed = [a for a in audits if a.claimed_optimal]
    wrong = [a for a in audits if a.wrong]
    gaps = sorted(a.exact / a.bound - 1 for a in proven if a.bound > 0)
    lines = [
        f"problems                      {len(audits)}",
        f"optimum proven by CP-SAT      {len(proven)}, unproven {len(audits) - len(proven)}",
        f"of the proven: bound is tight {len(tight)}, plan is optimal {len(best)}",
        f"plans called optimal          {len(claimed)}",
        f"wrong                         {len(wrong)}",
    ]
    if gaps:
        mean = sum(gaps) / len(gaps)
        lines.append(f"optimum above the bound by    {mean:.2%} on average, {gaps[-1]:.2%} at most")
    lines += [f"{a.id} ({a.objective}): {text}" for a in wrong for text in a.wrong]
    return "\n".join(lines)


def main() -> None:
    """Audit, print the counts, exit with 1 if a claim is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--exact-seconds", type=float, default=20.0, help="at most, per problem")
    parser.add_argument("--plan-seconds", type=float, default=0.3, help="at most, per problem")
    parser.add_argument("--json", type=Path, help="write every problem and what came of it")
    arguments = parser.parse_args()
    documents = random_problems(
        arguments.count,
        arguments.seed,
        max_ranks=4,
        max_microbatches=4,
        placements=("linear", "v", "looped"),
        layers=False,
    )
    audits = []
    for index, document in enumerate(documents):
        objective: Objective = "span" if index % 2 else "makespan"
        audits.append(audit(document, objective, arguments.exact_seconds, arguments.plan_seconds))
        for text in audits[-1].wrong:
            print(f"{document['id']} ({objective}): {text}", file=sys.stderr, flush=True)
    print(report(audits))
    if arguments.json:
        rows = [asdict(a) | {"problem": d} for a, d in zip(audits, documents, strict=True)]
        arguments.json.write_text(json.dumps(rows, indent=1))
    sys.exit(any(a.wrong for a in audits))


if __name__ == "__main__":
    main()
