"""Plans: right values, within limits, never worse than what is published, judged independently."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import referee
from zerobubble.errors import UserError
from zerobubble.planner.bounds import lower_bound
from zerobubble.planner.instance import make_instance
from zerobubble.planner.plan import InfeasibleError, plan
from zerobubble.planner.problem import Objective, Problem, parse_problem
from zerobubble.planner.result import Plan
from zerobubble.schedule.files import load_schedule
from zerobubble.schedule.verify import verify

REFERENCE = Path(__file__).parents[1] / "benchmarks" / "reference"
TARGETS = {
    case["id"]: case
    for case in json.loads((REFERENCE / "planner_targets.json").read_text())["cases"]
}


def uniform(ranks: int, microbatches: int, row: tuple[float, ...], **more: Any) -> dict[str, Any]:
    """Half-stages of equal ranks, for any placement. `row`: F, B, W of a rank."""
    return {
        "ranks": ranks,
        "microbatches": microbatches,
        "placement": "any",
        "stage_times": [[time / 2 for time in row]],
        "link_latency": 0.0,
        "activation_per_stage": 0.5,
        "released_by_backward_input": 0.0,
        "memory_limit": None,
        **more,
    }


def planned(document: dict[str, Any], objective: Objective = "makespan", **more: Any) -> Plan:
    """The plan, after the referee and its own verification agree with it."""
    found = plan(parse_problem(document), objective=objective, **more)
    referee.judge(document, json.loads(json.dumps(found.to_json())))
    verify(found.schedule, found.costs)
    return found


@pytest.mark.parametrize(
    "name",
    [
        "comm0.2-p8-m8-linear-K8",
        "comm0.2-p8-m8-v-K8",
        "comm0.2-p8-m8-v-K5",
        "rand0-p8-m16-linear-K8",
        "firstlast1.3-p8-m16-v-K8",
        "paper6.2B-p8-m24-linear-K8",
        "firstlast1.3-p8-m64-v-K5",
        "proved-p8-m16-linear-K7",
        "proved-p4-m4-v-K4-link0.2",
        "proved-p4-m4-v-K3",
        "lowmem-p8-m32-linear-K6",
        "looped2-p4-m8-link0.1",
    ],
)
def test_targets_are_met_and_proven(name: str) -> None:
    case = TARGETS[name]
    found = planned(case, time_limit=10.0)  # it ends as soon as the bound is met
    if case["best_known_makespan"] is not None:
        assert found.makespan <= case["best_known_makespan"] * (1 + 1e-6)
    assert found.proven_optimal


@pytest.mark.parametrize("case", TARGETS.values(), ids=TARGETS)
def test_no_bound_is_above_a_known_order(case: dict[str, Any]) -> None:
    if case["best_known_makespan"] is None or case["placement"] == "any":
        return
    problem = parse_problem(case)
    (placement,) = problem.placements()
    bound = lower_bound(make_instance(placement, problem.microbatches, problem.costs(placement)))
    # Some known orders are printed with three decimals.
    assert bound <= case["best_known_makespan"] + 1e-3


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 3, 16])
def test_the_bound_of_equal_stages_without_limits(ranks: int, microbatches: int) -> None:
    """The last rank waits for p - 1 hops; then it works, or its last gradient travels back."""
    problem = parse_problem(
        uniform(ranks, microbatches, (1.0, 1.0, 1.0), placement="linear", activation_per_stage=1.0)
        | {"stage_times": [[1.0, 1.0, 1.0]]}
    )
    (placement,) = problem.placements()
    bound = lower_bound(make_instance(placement, microbatches, problem.costs(placement)))
    work = ranks - 1 + 3 * microbatches
    way = 2 * (ranks - 1) + 2 + 1 + (microbatches - 1)
    assert bound >= max(work, way) - 1e-9
    found = plan(problem, time_limit=5.0)
    assert found.proven_optimal


@pytest.mark.parametrize(
    ("row", "link", "one_f_one_b", "at_most"),
    [
        ((1.0, 1.0, 1.0), 0.0, 201.0, 193.5),
        ((1.0, 1.2, 0.8), 0.05, 206.0, 194.6),
        ((1.0, 1.0, 0.3), 0.0, 154.1, 149.2),
    ],
)
def test_c04_never_slower_than_1f1b(
    row: tuple[float, ...], link: float, one_f_one_b: float, at_most: float
) -> None:
    for memory in (0.7, 1.0, 2.0):
        document = uniform(4, 64, row, link_latency=link, memory_limit=4.0 * memory)
        found = planned(document)
        assert all(peak <= 4.0 * memory + 1e-9 for peak in found.timeline.peak_memory or ())
        classic = next(other for other in found.alternatives if other.schedule == "1f1b")
        assert classic.makespan == pytest.approx(one_f_one_b, abs=0.15)
        assert classic.fits == (memory >= 1)
        if memory >= 1:
            assert found.makespan <= at_most + 0.05
            assert {"zb-h1", "zb-v", "gpipe"} <= {other.schedule for other in found.alternatives}
        for other in found.alternatives:
            assert not other.fits or found.makespan <= other.makespan * (1 + 1e-9)


def test_c04_split_overhead_is_worth_less_than_the_bubble() -> None:
    document = uniform(4, 64, (1.0, 1.0, 1.0), memory_limit=4.0, split_overhead=0.08)
    found = planned(document, time_limit=2.0)
    joint = [o for o in found.alternatives if o.fits and o.schedule in ("1f1b", "1f1b-v")]
    assert joint
    assert found.makespan <= min(other.makespan for other in joint)
    assert found.makespan < 200.0  # all joint but the last few, which fill the drain
    kinds = {str(op.kind) for row in found.schedule.orders for op in row}
    assert {"BW", "B", "W"} <= kinds


def test_c08_limits_of_single_ranks() -> None:
    limits = [8.0, 8.0, 8.0, 3.0]
    document = uniform(4, 8, (1.0, 1.0, 1.0), memory_limit=limits)
    found = planned(document)
    assert found.timeline.peak_memory is not None
    for peak, limit in zip(found.timeline.peak_memory, limits, strict=True):
        assert peak <= limit + 1e-9


def test_c08_embedding_and_head_meet_on_rank_0_of_a_v() -> None:
    fixed = [3.0, *[0.0] * 6, 3.0]
    document = uniform(4, 8, (1.0, 1.0, 1.0), fixed_memory=fixed)
    one = plan(parse_problem(document), schedule="1f1b")
    assert [report.fixed_memory for report in one.ranks()] == [3.0, 0.0, 0.0, 3.0]
    two = plan(parse_problem(document), schedule="zb-v")
    assert [report.fixed_memory for report in two.ranks()] == [6.0, 0.0, 0.0, 0.0]
    for found in (one, two):
        assert found.timeline.peak_memory is not None
        assert found.to_json()["peak_memory"] == list(found.timeline.peak_memory)


def test_c10_imbalance_is_told_apart_from_bubble() -> None:
    document = {
        "ranks": 4,
        "microbatches": 8,
        "placement": "linear",
        "stage_times": [[1.0, 1.0, 1.0]] * 3 + [[1.5, 1.5, 1.5]],
        "link_latency": 0.0,
        "activation_per_stage": 1.0,
        "released_by_backward_input": 0.0,
        "memory_limit": 4.0,
    }
    found = planned(document)
    assert found.makespan == pytest.approx(39.0)
    assert found.lower_bound == pytest.approx(39.0)
    assert found.proven_optimal
    reports = found.ranks()
    assert [report.work for report in reports] == pytest.approx([24.0, 24.0, 24.0, 36.0])
    assert [report.imbalance for report in reports] == pytest.approx([12.0, 12.0, 12.0, 0.0])
    assert [report.bubble for report in reports] == pytest.approx([3.0] * 4)
    classic = next(other for other in found.alternatives if other.schedule == "1f1b")
    assert classic.makespan == pytest.approx(45.0)
    assert any("move layers off rank 3" in warning for warning in found.warnings)
    document["stage_times"] = [[1.5, 1.5, 1.5]] + [[1.0, 1.0, 1.0]] * 3
    found = planned(document)
    assert found.makespan <= 37.5 + 1e-9
    classic = next(other for other in found.alternatives if other.schedule == "1f1b")
    assert classic.makespan == pytest.approx(40.5)


def test_layers_are_divided_within_limits() -> None:
    case = TARGETS["layers-p4-m16"]
    found = planned(case)
    assert found.layout is not None
    assert sum(found.layout) == len(case["layer_times"])


def test_a_heavy_head_gets_fewer_layers_beside_it() -> None:
    """Eight layers of 1 and a head of 3 over 4 ranks: no rank need do more than the head's 3."""
    document = uniform(4, 12, (1.0, 1.0, 1.0), placement="linear")
    del document["stage_times"], document["activation_per_stage"]
    document |= {"layer_times": [[1.0] * 3] * 8 + [[3.0] * 3], "layer_activation": 1.0}
    found = planned(document)
    assert found.layout is not None
    assert found.layout[-1] == 1
    assert max(report.work for report in found.ranks()) == pytest.approx(3 * 3 * 12)


def test_joint_stages_never_split() -> None:
    document = uniform(4, 8, (1.0, 1.0, 1.0), placement="v", joint_stages=[0, 7])
    found = planned(document)
    for row in found.schedule.orders:
        for op in row:
            assert op.stage not in (0, 7) or str(op.kind) in ("F", "BW")


def test_span_is_an_objective_of_its_own() -> None:
    """Without a barrier and with memory enough, F = B = W leaves no bubble (ZB-H2, ZB-V)."""
    found = planned(uniform(4, 12, (1.0, 1.0, 1.0), memory_limit=8.0), "span", time_limit=10.0)
    assert found.longest_span == pytest.approx(36.0)
    assert found.proven_optimal


def test_one_family_by_name() -> None:
    document = uniform(4, 8, (1.0, 1.0, 1.0))
    assert planned(document, schedule="1f1b").makespan == pytest.approx(33.0)
    with pytest.raises(UserError, match="lives on placement 'linear'"):
        plan(parse_problem({**document, "placement": "v"}), schedule="1f1b")
    with pytest.raises(InfeasibleError, match="gpipe' needs 8 on rank"):
        plan(parse_problem({**document, "memory_limit": 4.0}), schedule="gpipe")


def test_prove_closes_the_gap_of_a_small_case() -> None:
    case = TARGETS["proved-p4-m8-linear-K3-link0.2"]
    found = planned(case, time_limit=20.0, prove=True)
    assert found.makespan == pytest.approx(case["proved_optimum"])
    assert found.proven_optimal


times = st.one_of(st.just(0.0), st.floats(0.1, 10.0).map(lambda x: round(x, 2)))


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    ranks = draw(st.integers(1, 4))
    placement = draw(st.sampled_from(["linear", "v", "looped", "any"]))
    stages = ranks * (1 if placement == "linear" else 2)
    activation = [draw(st.sampled_from([0.0, 0.5, 1.0, 1.7])) for _ in range(stages)]
    share = draw(st.floats(1.0, 4.0))
    return {
        "ranks": ranks,
        "microbatches": draw(st.integers(1, 6)),
        "placement": placement,
        "stage_times": [[draw(times) for _ in range(3)] for _ in range(stages)],
        "link_latency": draw(times),
        "activation_per_stage": activation,
        "released_by_backward_input": draw(st.sampled_from([0.0, 0.5, 1.0])),
        "memory_limit": draw(st.sampled_from([None, share * sum(activation)])),
        "split_overhead": draw(st.sampled_from([0.0, 0.1])),
    }


@settings(max_examples=40, deadline=None)
@given(problems(), st.sampled_from(["makespan", "span"]))
def test_every_problem_has_a_plan_that_the_referee_accepts(
    document: dict[str, Any], objective: Objective
) -> None:
    found = planned(document, objective, time_limit=0.1)
    for other in found.alternatives:
        assert not other.fits or found.value <= other.objective(objective) * (1 + 1e-9) + 1e-12


def test_of_costs_is_the_inverse_of_costs() -> None:
    problem = parse_problem(TARGETS["rand0-p8-m8-v-K5"])
    (placement,) = problem.placements()
    costs = problem.costs(placement)
    again = Problem.of_costs(placement, 8, costs)
    assert again.costs(placement) == costs


def test_the_command(tmp_path: Path) -> None:
    """Without torch: a table, a file to train with, JSON, and one line for what is wrong."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = "import sys; sys.modules['torch'] = None; from zerobubble.cli import main; main()"
        command = [sys.executable, "-c", code, "plan", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    saved = tmp_path / "best.json"
    shown = run("--ranks", "4", "--microbatches", "8", "--memory", "1", "--save", str(saved))
    assert shown.returncode == 0, shown.stderr
    assert "proven optimal" in shown.stdout
    assert "makespan 25.5" in shown.stdout
    for name in ("1f1b", "gpipe", "zb-h1", "interleaved"):
        assert f"\n {name} " in shown.stdout
    assert load_schedule(str(saved)).microbatches == 8
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(TARGETS["proved-p4-m4-v-K3"]))
    document = json.loads(run(str(path), "--json").stdout)
    referee.judge(TARGETS["proved-p4-m4-v-K3"], document)
    assert {"schedule", "placement", "makespan", "longest_span", "peak_memory", "fits"} <= set(
        document["alternatives"][0]
    )
    for arguments, said in (
        ((str(path), "--ranks", "4"), "--ranks is for a problem without a file"),
        (("--ranks", "4"), "--microbatches is missing"),
        (("--ranks", "4", "--microbatches", "8", "--times", "1,2"), "--times 1,2"),
        (("--ranks", "4", "--microbatches", "8", "--memory", "0.1"), "infeasible: memory_limit"),
        (("--ranks", "4", "--microbatches", "8", "--time-limit", "0"), "--time-limit 0"),
        (("--ranks", "4", "--microbatches", "8", "--schedule", "zb-x"), "unknown schedule"),
    ):
        wrong = run(*arguments)
        assert wrong.returncode == 2
        assert said in wrong.stderr
        assert len(wrong.stderr.strip().splitlines()) == 1
