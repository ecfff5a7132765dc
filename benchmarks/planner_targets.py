"""The planner against published schedulers and the best orders known.

    cd benchmarks/reference
    python ../planner_targets.py planner_targets.json
    python ../planner_targets.py planner_targets.json --time-limit 10,20,60 --json OUT
    python ../planner_targets.py planner_targets.json --objective span --only p8
    python ../planner_targets.py public_schedulers_on_paper_profiles.json

A FILE with "cases" holds problems (docs/planning.md) with their targets. One with "rows" holds the
published schedulers' bubble rates on the zero-bubble paper's profiles, whose times are in
zero_bubble_paper.json beside it; memory is as in that file. Every plan is judged by
tests/referee.py, which recomputes what it claims. Exit status 1 if a plan is refused, above a
published schedule, or misses one of the profiles' targets.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zerobubble.errors import UserError
from zerobubble.planner.plan import plan
from zerobubble.planner.problem import Objective, parse_problem
from zerobubble.planner.search import compile_search

TARGETS = ("id", "lower_bound", "public_best", "best_known_makespan", "proved_optimum")


def load_referee() -> Any:
    """The module tests/referee.py."""
    path = Path(__file__).resolve().parents[1] / "tests" / "referee.py"
    spec = importlib.util.spec_from_file_location("referee", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


REFEREE = load_referee()
NO_PLAN = {
    "schedule": "none",
    "placement": "none",
    "value": math.inf,
    "lower_bound": 0.0,
    "bubble_rate": 1.0,
    "longest_span_bubble_rate": 1.0,
    "proven_optimal": False,
}
ENOUGH_STRICTLY_BELOW = {"span": 8, "makespan": 4}
"""Of the 12 profiles at a memory limit of p M_B."""


def run(
    document: dict[str, Any], objective: Objective, time_limit: float | None, prove: bool
) -> dict[str, Any]:
    """Plan one problem and have the plan judged. `verdict` is "" or why it was refused."""
    began = time.perf_counter()
    try:
        found = plan(
            parse_problem(document), objective=objective, time_limit=time_limit, prove=prove
        )
    except UserError as error:
        return {**NO_PLAN, "seconds": time.perf_counter() - began, "verdict": f"refused: {error}"}
    seconds = time.perf_counter() - began
    claim = json.loads(json.dumps(found.to_json()))
    try:
        REFEREE.judge(document, claim)
        verdict = ""
    except (ValueError, KeyError, TypeError) as error:
        verdict = f"refused: {error!r}"
    return {**claim, "value": found.value, "seconds": seconds, "verdict": verdict}


def limit_for(ranks: int, given: list[float] | None) -> float | None:
    """Of a list, the one for up to 8 ranks, up to 16, or more."""
    if given is None:
        return None
    return given[min(len(given) - 1, 0 if ranks <= 8 else 1 if ranks <= 16 else 2)]


def cases(
    documents: list[dict[str, Any]],
    limits: list[float] | None,
    prove: bool,
    objective: Objective = "makespan",
) -> Iterator[dict[str, Any]]:
    """Print and yield one row per case. The targets are makespans; spans are only judged."""
    print(
        f"{'case':<34}{'plan':<11}{'placement':<10}{objective:>10}{'bound':>10}"
        f"{'best known':>11}{'diff %':>8}{'public':>10}{'s':>7}  "
    )
    for document in documents:
        row = run(document, objective, limit_for(document["ranks"], limits), prove)
        goals = document if objective == "makespan" else {}
        best, public = goals.get("best_known_makespan"), goals.get("public_best") or {}
        row["id"] = document.get("id", "")
        row["ranks"] = document["ranks"]
        row["difference"] = 100 * (row["value"] / best - 1) if best and not row["verdict"] else None
        row["public"] = public.get("makespan")
        row["above_public"] = bool(public) and row["value"] > public["makespan"] * (1 + 1e-6)
        optimum = goals.get("proved_optimum")
        row["meets_optimum"] = row["value"] <= optimum * (1 + 1e-6) if optimum else None
        notes = ["optimal"] if row["proven_optimal"] else []
        notes += ["ABOVE PUBLIC"] if row["above_public"] else []
        notes += [row["verdict"]] if row["verdict"] else []
        difference = "" if row["difference"] is None else f"{row['difference']:+.3f}"
        print(
            f"{row['id']:<34}{row['schedule']:<11}{row['placement']:<10}{row['value']:>10.3f}"
            f"{row['lower_bound']:>10.3f}{best or '':>11}{difference:>8}{row['public'] or '':>10}"
            f"{row['seconds']:>7.2f}  {' '.join(notes)}",
            flush=True,
        )
        yield row


def summary(rows: list[dict[str, Any]]) -> bool:
    """Print what all cases come to. True where nothing is refused or above public_best."""
    known = [row["difference"] for row in rows if row["difference"] is not None]
    refused = [row for row in rows if row["verdict"]]
    above = [row for row in rows if row["above_public"]]
    optima = [row["meets_optimum"] for row in rows if row["meets_optimum"] is not None]
    print(f"\ncases {len(rows)}, refused {len(refused)}, above public_best {len(above)}")
    if known:
        ratio = statistics.geometric_mean(1 + d / 100 for d in known)
        print(
            f"difference to best_known: mean {statistics.fmean(known):+.4f} %, worst "
            f"{max(known):+.4f} %, below it in {sum(d < -1e-3 for d in known)}; geometric mean of "
            f"the ratios {ratio:.6f}"
        )
    print(f"proved optima met: {sum(optima)} of {len(optima)}")
    print(f"proven optimal: {sum(row['proven_optimal'] for row in rows)} of {len(rows)}")
    for ranks in sorted({row["ranks"] for row in rows}):
        slowest = max(row["seconds"] for row in rows if row["ranks"] == ranks)
        print(f"slowest at p={ranks}: {slowest:.2f} s")
    return not refused and not above


def profile_document(case: dict[str, Any], memory: float) -> dict[str, Any]:
    """A profile of the paper as a problem; `memory` in microbatches of a rank."""
    return {
        "ranks": case["p"],
        "microbatches": case["m"],
        "placement": "any",
        "stage_times": [[case["T_F"] / 2, case["T_B"] / 2, case["T_W"] / 2]],
        "link_latency": case["T_comm"],
        "activation_per_stage": 0.5,
        "released_by_backward_input": 1 - case["M_W_over_M_B"],
        "memory_limit": memory,
    }


def profiles(
    published: list[dict[str, Any]],
    paper: dict[str, dict[str, Any]],
    limits: list[float] | None,
    prove: bool,
    only: Objective | None = None,
) -> Iterator[dict[str, Any]]:
    """Print and yield one row per profile, memory limit and objective (or `only` one of them)."""
    print(f"{'profile':<20}{'objective':<10}{'memory':>8}{'rate':>9}{'published':>10}{'s':>7}")
    for row in published:
        if "with_optimizer_barrier" not in row:
            continue  # no published scheduler but V-Half and V-Min was run on it
        case = paper[row["name"]]
        one, two = (
            {
                float(key): rate
                for key, rate in row[f"{name}_heuristic_rate_by_limit_in_pM_B"].items()
            }
            for name in ("zb", "zbv")
        )
        barrier = row["with_optimizer_barrier"]
        p = case["p"]
        goals: list[tuple[Objective, str, float, float]] = [
            ("span", "1.0", 1.0 * p, two[1.0]),
            ("span", "1.25", 1.25 * p, min(one[1.25], two[1.25])),
            ("span", "1.5", 1.5 * p, min(one[1.5], two[1.5])),
            ("span", "2.0", 2.0 * p, min(one[2.0], two[2.0])),
            ("span", "half", p / 2 + 1, row["v_half_greedy_rate"]),
            ("makespan", "1.0", 1.0 * p, min(barrier["ZB-1p"], barrier["ZB-V"])),
            ("makespan", "2.0", 2.0 * p, barrier["ZB-2p"]),
        ]
        for objective, memory, limit, goal in goals:
            if only not in (None, objective):
                continue
            document = profile_document(case, limit)
            found = run(document, objective, limit_for(p, limits), prove)
            key = "longest_span_bubble_rate" if objective == "span" else "bubble_rate"
            rate = round(found[key], 4) + 0.0  # no -0.0
            result = {
                "profile": row["name"],
                "objective": objective,
                "memory": memory,
                "rate": rate,
                "published": goal,
                "strictly": rate < goal,
                "missed": rate > goal,
                **{k: found[k] for k in ("value", "lower_bound", "verdict", "seconds")},
            }
            if (row["name"], memory, objective) == ("zb-1.5B-p8-m24", "2.0", "span"):
                result["missed"] |= rate >= 0.0076
            print(
                f"{row['name']:<20}{objective:<10}{memory:>8}{rate:>9.4f}{goal:>10.4f}"
                f"{found['seconds']:>7.2f}  {'MISSED' if result['missed'] else ''}"
                f"{found['verdict']}",
                flush=True,
            )
            yield result


def profiles_hold(rows: list[dict[str, Any]]) -> bool:
    """Print what the profiles come to. True where every target is met."""
    missed = sum(row["missed"] for row in rows)
    refused = sum(bool(row["verdict"]) for row in rows)
    print(f"\ncells {len(rows)}, above the published rate {missed}, refused {refused}")
    enough = True
    for objective, asked in ENOUGH_STRICTLY_BELOW.items():
        tight = [r for r in rows if r["objective"] == objective and r["memory"] == "1.0"]
        below = sum(row["strictly"] for row in tight)
        print(
            f"{objective} at p M_B: strictly below in {below} of {len(tight)} ({asked} of 12 asked)"
        )
        enough &= len(tight) < 12 or below >= asked
    return enough and not missed and not refused


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--time-limit", help="seconds, or three: up to 8 ranks, up to 16, more")
    parser.add_argument(
        "--objective", choices=("makespan", "span"), help="of cases (makespan); rows have both"
    )
    parser.add_argument("--prove", action="store_true", help="certify with the exact solver")
    parser.add_argument("--json", type=Path, help="write the rows there")
    arguments = parser.parse_args()
    limits = None
    if arguments.time_limit:
        try:
            limits = [float(word) for word in arguments.time_limit.split(",")]
        except ValueError:
            parser.error(f"--time-limit {arguments.time_limit}: give numbers, such as 10,20,60")
    try:
        document = json.loads(arguments.file.read_text())
    except (OSError, ValueError) as error:
        sys.exit(f"{arguments.file}: {error}")
    compile_search()
    try:
        if "cases" in document:
            chosen = [c for c in document["cases"] if arguments.only in c.get("id", "")]
            objective = arguments.objective or "makespan"
            rows = list(cases(chosen, limits, arguments.prove, objective))
            good = summary(rows)
        else:
            beside = arguments.file.parent / "zero_bubble_paper.json"
            paper = {case["name"]: case for case in json.loads(beside.read_text())["cases"]}
            chosen = [r for r in document["rows"] if arguments.only in r["name"]]
            rows = list(profiles(chosen, paper, limits, arguments.prove, arguments.objective))
            good = profiles_hold(rows)
    except OSError as error:
        sys.exit(str(error))
    if not rows:
        sys.exit(f"{arguments.file}: nothing to plan; is --only {arguments.only!r} meant?")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
