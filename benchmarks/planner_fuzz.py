"""Plans random problems of every kind and has the plans judged.

    python benchmarks/planner_fuzz.py --count 1000 --seed 0 --time-limit 0.2

Every problem must give a plan that tests/referee.py accepts and that no published schedule which
fits beats, or an InfeasibleError whose rank and shortfall are those of the closed form: the
activations of one microbatch and the fixed memory of a rank's stages, less its limit. Anything else
is a failure, as is a problem called infeasible that is not. Exit status 1 on a failure, or if less
than 60% of at least 100 plans are proven optimal.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from planner_targets import REFEREE
from random_problems import random_problems

from zerobubble.planner.plan import InfeasibleError, plan
from zerobubble.planner.problem import Objective, parse_problem
from zerobubble.planner.result import Plan
from zerobubble.planner.search import compile_search

LEAST_PROVEN = 0.6
SLACK = 1e-8
"""Of memory: what the planner may take for equal."""


@dataclass(frozen=True)
class Outcome:
    """What came of one problem. `failure` is "" where that is right."""

    id: str
    placement: str
    ranks: int
    microbatches: int
    objective: Objective
    kind: str
    """optimal, open (a plan that is not proven), infeasible or failed."""
    gap: float | None
    seconds: float
    failure: str


def attempt(
    document: dict[str, Any], objective: Objective, time_limit: float, prove: bool
) -> Outcome:
    """Plan one problem and judge what comes of it."""
    began = time.perf_counter()
    kind, gap = "failed", None
    try:
        found = plan(
            parse_problem(document), objective=objective, time_limit=time_limit, prove=prove
        )
        claim = json.loads(json.dumps(found.to_json()))
        kind, gap = "optimal" if found.proven_optimal else "open", found.gap
        failure = _refusal(document, claim) or _beaten(found)
    except InfeasibleError as error:
        kind = "infeasible"
        failure = _false_shortfall(document, error.rank, error.shortfall)
    except Exception:
        failure = traceback.format_exc().strip().splitlines()[-1]
        where = traceback.extract_tb(sys.exc_info()[2])[-1]
        failure = f"{failure} ({Path(where.filename).name}:{where.lineno})"
    return Outcome(
        id=document["id"],
        placement=document["placement"] + (", layers" if "layer_times" in document else ""),
        ranks=document["ranks"],
        microbatches=document["microbatches"],
        objective=objective,
        kind="failed" if failure else kind,
        gap=gap,
        seconds=time.perf_counter() - began,
        failure=failure,
    )


def _refusal(document: dict[str, Any], claim: dict[str, Any]) -> str:
    try:
        REFEREE.judge(document, claim)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        return f"refused: {error!r}"
    if all(short <= -SLACK for _, short in _shortfalls(document, claim)):
        return ""
    least = max(short for _, short in _shortfalls(document, claim))
    return f"planned, though a limit is {least:g} too small" if least > SLACK else ""


def _beaten(found: Plan) -> str:
    """The published schedules that fit and are better; or ""."""
    better = [
        other.schedule
        for other in found.alternatives
        if other.fits and other.objective(found.objective) < found.value * (1 - 1e-9)
    ]
    return f"worse than {', '.join(better)}" if better else ""


def _shortfalls(document: dict[str, Any], chosen: dict[str, Any]) -> list[tuple[int, float]]:
    """Per rank what one microbatch and the fixed memory need beyond the limit."""
    _, activation, fixed, where = REFEREE.stages_of(document, chosen)
    limits = REFEREE.spread(document["memory_limit"], document["ranks"], "memory_limit")
    return [
        (
            rank,
            -math.inf
            if limit is None
            else sum(a + f for a, f, r in zip(activation, fixed, where, strict=True) if r == rank)
            - limit,
        )
        for rank, limit in enumerate(limits)
    ]


def _false_shortfall(document: dict[str, Any], rank: int, shortfall: float) -> str:
    """Why it is wrong that `rank` lacks `shortfall` and that nothing else fits; or ""."""
    choices = list(_choices(document))
    if "layer_times" in document:
        fits = next((layout for choice in choices if (layout := find_layout(document, choice))), 0)
        if fits:
            return f"called infeasible, but layout {fits} fits"
        return "" if shortfall > 0 else f"infeasible with a shortfall of {shortfall:g}"
    worst = []
    for choice in choices:
        short = _shortfalls(document, choice)
        most = max(lack for _, lack in short)
        if most <= 0:
            return f"called infeasible, but placement {choice['placement']} fits"
        worst.append((most, {r for r, lack in short if lack >= most - SLACK}))
    least = min(most for most, _ in worst)
    ranks = set().union(*(held for most, held in worst if most <= least + SLACK))
    if abs(shortfall - least) > SLACK * max(1.0, least) * 10 or rank not in ranks:
        return f"rank {rank} is said to lack {shortfall:g}; it is {least:g} on one of {ranks}"
    return ""


def _choices(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The placements that the problem allows, as the key parts of a plan."""
    if document["placement"] != "any":
        yield {"placement": document["placement"], "chunks": document.get("chunks", 2)}
        return
    yield {"placement": "linear", "chunks": 1}
    if document["ranks"] > 1:
        yield {"placement": "v", "chunks": 2}
        yield {"placement": "looped", "chunks": 2}


def find_layout(document: dict[str, Any], choice: dict[str, Any]) -> list[int] | None:
    """Blocks per stage that fit every rank's limit, by CP-SAT; None where there are none.

    At least one block each, where there are enough.
    """
    from ortools.sat.python import cp_model

    ranks, scale = document["ranks"], 10**6
    chunks = 1 if choice["placement"] == "linear" else choice["chunks"]
    stages, blocks = ranks * chunks, len(document["layer_times"])
    least = 1 if blocks >= stages else 0
    held = REFEREE.spread(document["layer_activation"], blocks, "layer_activation")
    kept = REFEREE.spread(document.get("layer_fixed", 0.0), blocks, "layer_fixed")
    sizes = [round((h + k) * scale) for h, k in zip(held, kept, strict=True)]
    before = [0, *itertools.accumulate(sizes)]
    model = cp_model.CpModel()
    cuts = [model.new_int_var(0, blocks, f"cut {s}") for s in range(stages + 1)]
    reached = [model.new_int_var(0, before[-1], f"reached {s}") for s in range(stages + 1)]
    model.add(cuts[0] == 0)
    model.add(cuts[-1] == blocks)
    for s in range(stages + 1):
        model.add_element(cuts[s], before, reached[s])
        if s:
            model.add(cuts[s] >= cuts[s - 1] + least)
    limits = REFEREE.spread(document["memory_limit"], ranks, "memory_limit")
    for rank, limit in enumerate(limits):
        if limit is None:
            continue
        if choice["placement"] == "v":
            own = [rank, 2 * ranks - 1 - rank]
        else:
            own = list(range(rank, stages, ranks))
        model.add(sum(reached[s + 1] - reached[s] for s in own) <= math.floor(limit * scale + 1e-3))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    ends = [solver.value(cut) for cut in cuts]
    return [end - start for start, end in itertools.pairwise(ends)]


def report(outcomes: list[Outcome], seconds: float) -> str:
    """Counts, the share proven optimal by placement and by m, and the time."""
    kinds = [outcome.kind for outcome in outcomes]
    counts = ", ".join(f"{kinds.count(k)} {k}" for k in ("optimal", "open", "infeasible", "failed"))
    slowest = max(outcomes, key=lambda outcome: outcome.seconds)
    gaps = [outcome.gap for outcome in outcomes if outcome.gap is not None]
    lines = [
        f"{len(outcomes)} problems in {seconds:.1f} s: {counts}",
        f"proven optimal: {_share(outcomes)} ({100 * LEAST_PROVEN:.0f}% asked)",
        f"mean gap to the bound {100 * sum(gaps) / max(1, len(gaps)):.2f}%, slowest "
        f"{slowest.seconds:.2f} s ({slowest.id})",
    ]
    for placement in sorted({outcome.placement for outcome in outcomes}):
        these = [outcome for outcome in outcomes if outcome.placement == placement]
        lines.append(f"  {placement:<16}{_share(these)}")
    for least, most in ((1, 2), (3, 4), (5, 8), (9, 16), (17, 24), (25, 10**9)):
        these = [outcome for outcome in outcomes if least <= outcome.microbatches <= most]
        if these:
            lines.append(f"  m {least:>2} to {min(most, 99):<8}{_share(these)}")
    for objective in ("makespan", "span"):
        these = [outcome for outcome in outcomes if outcome.objective == objective]
        lines.append(f"  {objective:<16}{_share(these)}")
    return "\n".join(lines)


def proven_share(outcomes: list[Outcome]) -> float:
    """Of the plans, how many are proven optimal; 1 where there are none."""
    plans = [outcome for outcome in outcomes if outcome.kind in ("optimal", "open")]
    return sum(outcome.kind == "optimal" for outcome in plans) / len(plans) if plans else 1.0


def _share(outcomes: list[Outcome]) -> str:
    plans = sum(outcome.kind in ("optimal", "open") for outcome in outcomes)
    return f"{100 * proven_share(outcomes):5.1f}% of {plans}"


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time-limit", type=float, default=0.2, help="seconds per problem")
    parser.add_argument("--prove", action="store_true", help="certify with the exact solver")
    parser.add_argument("--only", help="the one problem with this id")
    parser.add_argument("--json", type=Path, help="write problems and outcomes there")
    arguments = parser.parse_args()
    if arguments.count < 1:
        parser.error("--count must be at least 1")
    compile_search()
    documents = random_problems(arguments.count, arguments.seed, infeasible=0.08)
    if arguments.only:
        documents = [document for document in documents if document["id"] == arguments.only]
        if not documents:
            parser.error(f"--only {arguments.only}: no such id")
    began = time.perf_counter()
    outcomes = []
    for document in documents:
        objective: Objective = random.Random(document["id"]).choice(("makespan", "span"))
        outcomes.append(attempt(document, objective, arguments.time_limit, arguments.prove))
        if outcomes[-1].failure:
            print(f"{document['id']} ({objective}): {outcomes[-1].failure}")
            print(f"  {json.dumps(document)}", flush=True)
    print(report(outcomes, time.perf_counter() - began))
    if arguments.json:
        rows = [asdict(o) | {"problem": d} for o, d in zip(outcomes, documents, strict=True)]
        arguments.json.write_text(json.dumps(rows, indent=1))
    enough = len(outcomes) < 100 or proven_share(outcomes) >= LEAST_PROVEN
    return 0 if enough and not any(outcome.failure for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
