"""Plans: judged by the referee, at known optima, and never worse than what they compare with."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.random_problems import random_problem
from tests.referee import judge
from zerobubble import plan_report
from zerobubble.errors import UserError
from zerobubble.planner.plan import InfeasibleError, plan
from zerobubble.planner.problem import Objective, parse_problem
from zerobubble.planner.result import Plan
from zerobubble.schedule.verify import verify

TARGETS = Path(__file__).parent.parent / "benchmarks/reference/planner_targets.json"
CASES: dict[str, dict[str, Any]] = {
    case["id"]: case for case in json.loads(TARGETS.read_text())["cases"]
}
UNIT = (1.0, 1.0, 1.0)
PAPER = (1.0, 1.2, 0.8)
CHEAP_W = (1.0, 1.0, 0.3)


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
        "released_by_backward_input": 0.0,
        "memory_limit": memory,
    }


def planned(document: dict[str, Any], **options: Any) -> Plan:
    """A plan that the referee and `verify` accept, no worse than any alternative that fits."""
    found = plan(parse_problem(document), **options)
    judge(document, json.loads(json.dumps(found.to_json())))
    verify(found.schedule, found.costs)
    if options.get("schedule", "auto") == "auto":
        for other in found.alternatives:
            assert not other.fits or found.value <= other.objective(found.objective) * (1 + 1e-9)
    return found


def kinds(found: Plan, stage: int) -> set[str]:
    """Letters of the ops of a stage."""
    return {op.kind.name for row in found.schedule.orders for op in row if op.stage == stage}


# Known results.


@pytest.mark.parametrize(
    "name",
    [
        "proved-p8-m16-linear-K7",
        "proved-p4-m4-v-K4-link0.2",
        "proved-p4-m4-v-K3",
        "proved-p8-m8-v-K8-link0.2",
        "lowmem-p8-m32-linear-K6",
        "comm0.2-p8-m8-v-K4",
    ],
)
def test_proved_optima_are_met(name: str) -> None:
    found = planned(CASES[name], time_limit=15)
    assert found.makespan == pytest.approx(CASES[name]["proved_optimum"], rel=1e-6)
    assert found.lower_bound <= CASES[name]["proved_optimum"] * (1 + 1e-6)


@pytest.mark.parametrize(
    "name",
    [
        "comm0.2-p8-m8-linear-K8",
        "comm0.2-p8-m16-linear-K8",
        "rand0-p8-m8-linear-K8",
        "firstlast1.3-p8-m8-v-K4",
        "paper1.5B-p8-m24-linear-K8",
        "paper6.2B-p8-m24-v-K8",
        "rand0-p8-m16-v-K4",
    ],
)
def test_no_plan_is_above_a_published_scheduler(name: str) -> None:
    case = CASES[name]
    provable = case["lower_bound"] == case["best_known_makespan"]
    found = planned(case, time_limit=20 if provable else 1)  # a proof ends it
    assert found.makespan <= case["public_best"]["makespan"] * (1 + 1e-6)
    if provable:
        assert found.makespan == pytest.approx(case["best_known_makespan"], rel=1e-4)


@pytest.mark.parametrize("name", ["looped2-p4-m8-link0.1", "layers-p4-m16"])
def test_targets_without_a_published_scheduler(name: str) -> None:
    planned(CASES[name], time_limit=0.3)


# Bug reports of pipeline-parallel software (C04, C08, C10).


@pytest.mark.parametrize(
    ("times", "link", "one_f_one_b", "zb_v"),
    [(UNIT, 0.0, 201, 193.5), (PAPER, 0.05, 206, 194.6), (CHEAP_W, 0.0, 154.1, 149.2)],
)
@pytest.mark.parametrize("cap", [0.7, 1.0, 2.0])
def test_never_slower_than_1f1b(
    times: tuple[float, float, float], link: float, one_f_one_b: float, zb_v: float, cap: float
) -> None:
    document = uniform(4, 64, 4 * cap, times, link, placement="any")
    found = planned(document, time_limit=0.3 if cap < 1 else 5)
    assert max(found.to_json()["peak_memory"]) <= 4 * cap + 1e-9
    by_name = {other.schedule: other for other in found.alternatives}
    classic = by_name["1f1b"]
    assert classic.makespan == pytest.approx(one_f_one_b)
    assert classic.peak_memory == pytest.approx((4, 3, 2, 1))
    assert classic.fits == (cap >= 1)
    if cap >= 1:
        assert {"zb-h1", "zb-1p", "zb-2p", "zb-v", "interleaved"} <= set(by_name)
        assert found.makespan <= zb_v * (1 + 1e-9)
    if cap == 1 and times == UNIT:
        assert found.makespan == pytest.approx(193.5)  # 3.7% under 1F1B
        assert any("3.7%" in said for said in found.warnings)


@pytest.mark.parametrize(
    ("times", "placement"), [(UNIT, "any"), (PAPER, "any"), (CHEAP_W, "any"), (PAPER, "linear")]
)
def test_dearer_splitting_is_never_worse_than_joint_backwards(
    times: tuple[float, float, float], placement: str
) -> None:
    document = uniform(4, 64, 4, times, placement=placement) | {"split_overhead": 0.08}
    every = {"joint_stages": list(range(8 if placement == "any" else 4))}
    joint = planned(document | every, time_limit=0.3)
    assert all(op.kind.name in ("F", "BW") for row in joint.schedule.orders for op in row)
    assert planned(document, time_limit=0.3).makespan <= joint.makespan * (1 + 1e-9)


def test_plan_json_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    flags = {"ranks": 4, "microbatches": 64, "times": "1,1,1", "memory": 1.0}
    plan_report.run(
        None, flags, schedule="auto", objective="makespan", time_limit=2.0, prove=False,
        as_json=True, picture=None, save=None, seed=0,
    )  # fmt: skip
    claim = json.loads(capsys.readouterr().out)
    judge(uniform(4, 64, 4, placement="any"), claim)
    assert claim["makespan"] == pytest.approx(193.5)
    assert claim["proven_optimal"]
    assert claim["lower_bound"] == pytest.approx(193.5)
    assert claim["gap"] == pytest.approx(0)
    assert claim["bubble_rate"] == pytest.approx(1.5 / 193.5)
    rows = {row["schedule"]: row for row in claim["alternatives"]}
    assert rows["1f1b"]["makespan"] == 201
    assert max(rows["1f1b"]["peak_memory"]) == 4


def test_limits_are_per_rank() -> None:
    document = uniform(4, 8, None) | {"memory_limit": [8, 8, 8, 3]}
    found = planned(document)
    claim = found.to_json()
    assert all(x <= y for x, y in zip(claim["peak_memory"], [8, 8, 8, 3], strict=True))
    # Rank 3 starts at 3 and can put off three W; its last B is then done at 3 + 24 - 3, and three
    # more B and the W of rank 0 follow.
    assert found.makespan == pytest.approx(28)
    assert found.proven_optimal
    with pytest.raises(InfeasibleError, match=r"rank 3 is 0\.5") as refused:
        plan(parse_problem(document | {"memory_limit": [8, 8, 8, 0.5]}))
    assert (refused.value.rank, refused.value.shortfall) == (3, pytest.approx(0.5))


def test_embedding_and_head_share_a_rank_of_a_v() -> None:
    ends = {"fixed_memory": [3, 0, 0, 0, 0, 0, 0, 3]}
    folded = planned(uniform(4, 8, 10, placement="v") | ends, schedule="zb-v")
    assert [rank.fixed_memory for rank in folded.ranks()] == [6, 0, 0, 0]
    assert folded.to_json()["peak_memory"][0] == pytest.approx(10)
    straight = planned(uniform(4, 8, 10) | {"fixed_memory": [3, 0, 0, 3]}, schedule="1f1b")
    assert [rank.fixed_memory for rank in straight.ranks()] == [3, 0, 0, 3]
    assert straight.to_json()["peak_memory"] == pytest.approx([7, 3, 2, 4])
    # 6 of fixed memory and 4 of activations do not fit into 8: another order does.
    with pytest.raises(InfeasibleError, match="'zb-v' needs 10 on rank 0") as refused:
        plan(parse_problem(uniform(4, 8, 8, placement="v") | ends), schedule="zb-v")
    assert (refused.value.rank, refused.value.shortfall) == (0, pytest.approx(2))
    assert (
        planned(uniform(4, 8, 8, placement="v") | ends, time_limit=0.3).to_json()["peak_memory"][0]
        <= 8
    )


def test_imbalance_is_told_apart_from_bubble() -> None:
    rows = [[1, 1, 1], [1, 1, 1], [1, 1, 1], [1.5, 1.5, 1.5]]
    found = planned(uniform(4, 8, 4) | {"stage_times": rows})
    assert (found.makespan, found.lower_bound) == (pytest.approx(39), pytest.approx(39))
    assert found.proven_optimal
    ranks = found.ranks()
    assert [rank.work for rank in ranks] == pytest.approx([24, 24, 24, 36])
    assert [rank.imbalance for rank in ranks] == pytest.approx([12, 12, 12, 0])
    assert [rank.bubble for rank in ranks] == pytest.approx([3, 3, 3, 3])
    assert next(o for o in found.alternatives if o.schedule == "1f1b").makespan == 45
    assert any("move layers off rank 3" in said for said in found.warnings)
    slow_first = planned(uniform(4, 8, 4) | {"stage_times": rows[::-1]})
    assert slow_first.makespan <= 37.5 * (1 + 1e-9)
    assert next(o for o in slow_first.alternatives if o.schedule == "1f1b").makespan == 40.5
    assert any("move layers off rank 0" in said for said in slow_first.warnings)


# Families by name.

# p, m, times, link; the published planners' makespans of ZB-1p, ZB-2p, ZB-V and V-Half.
REFERENCE = [
    (4, 8, UNIT, 0.0, (27, 27, 25.5, 26.5)),
    (4, 8, PAPER, 0.05, (28.8, 27.15, 26.55, 28.8)),
    (8, 16, UNIT, 0.0, (55, 55, 51.5, 56.5)),
    (4, 64, PAPER, 0.05, (196.8, 195.15, 194.55, 196.8)),
    (4, 64, CHEAP_W, 0.0, (152.3, 150.2, 149.15, 151.45)),
    (4, 2, UNIT, 0.0, (11, 11, 9.5, 11)),
    (5, 7, UNIT, 0.0, (25, 25, 23.5, 26.5)),
]


@pytest.mark.parametrize(("ranks", "microbatches", "times", "link", "makespans"), REFERENCE)
def test_published_planners_are_met_within_their_memory(
    ranks: int,
    microbatches: int,
    times: tuple[float, float, float],
    link: float,
    makespans: tuple[float, ...],
) -> None:
    places = [("linear", ranks), ("linear", 2 * ranks), ("v", ranks), ("v", -(-ranks // 2) + 1)]
    for (placement, memory), makespan in zip(places, makespans, strict=True):
        document = uniform(ranks, microbatches, memory, times, link, placement)
        document["released_by_backward_input"] = 0.5
        assert planned(document, time_limit=2).makespan <= makespan * (1 + 1e-9)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "times", "link", "makespan"),
    [
        (4, 8, UNIT, 0.0, 33),  # (m + p - 1)(F + B + W)
        (8, 16, UNIT, 0.0, 69),
        (4, 64, PAPER, 0.05, 206),
        (4, 64, CHEAP_W, 0.0, 154.1),
        (4, 2, UNIT, 0.0, 15),
        (5, 7, UNIT, 0.0, 33),
    ],
)
def test_a_family_by_name_is_priced_for_the_problem(
    ranks: int,
    microbatches: int,
    times: tuple[float, float, float],
    link: float,
    makespan: float,
) -> None:
    document = uniform(ranks, microbatches, None, times, link, placement="any")
    found = planned(document, schedule="1f1b")
    assert (found.schedule.name, found.schedule.placement.name) == ("1f1b", "linear")
    assert found.makespan == pytest.approx(makespan)
    assert all(kinds(found, s) == {"F", "BW"} for s in range(ranks))
    # By an alias, on the other placement; planned for the costs.
    found = planned(document, schedule="ZBV")
    assert (found.schedule.name, found.schedule.placement.name) == ("zb-v", "v")
    assert max(found.to_json()["peak_memory"]) <= ranks + 1e-9


def test_a_family_that_does_not_fit_names_rank_and_shortfall() -> None:
    with pytest.raises(InfeasibleError, match="'1f1b' needs 4 on rank 0") as refused:
        plan(parse_problem(uniform(4, 8, 3.5)), schedule="1f1b")
    assert (refused.value.rank, refused.value.shortfall) == (0, pytest.approx(0.5))


def test_a_family_of_another_placement_is_refused() -> None:
    with pytest.raises(UserError, match="'zb-v' lives on placement 'v'"):
        plan(parse_problem(uniform(4, 8, 4)), schedule="zb-v")
    with pytest.raises(UserError, match="did you mean 'zb-v'"):
        plan(parse_problem(uniform(4, 8, 4)), schedule="zb-w")


# Objectives, placements, joint stages, layers.


def test_longest_span_is_an_objective_of_its_own() -> None:
    for memory, placement in ((8, "linear"), (4, "v")):
        found = planned(uniform(4, 8, memory, placement=placement), objective="span")
        assert found.longest_span == pytest.approx(24)  # no bubble at all: 3 m
        assert found.lower_bound == pytest.approx(24)
        assert found.proven_optimal
        assert found.to_json()["longest_span_bubble_rate"] == pytest.approx(0, abs=1e-9)
        assert found.makespan >= 24 + (1.5 if placement == "v" else 3) - 1e-9


def test_any_takes_the_better_placement() -> None:
    found = planned(uniform(4, 8, 4, placement="any"))
    assert (found.schedule.placement.chunks, found.makespan) == (2, pytest.approx(25.5))
    # The heavy ends of this one are on one rank in a V: linear is better.
    found = planned(CASES["any-firstlast1.3-p8-m64-K8"], time_limit=2)
    assert found.schedule.placement.name != "v"
    assert found.makespan <= 256.9 * (1 + 1e-9)


def test_any_is_infeasible_only_if_every_placement_is() -> None:
    # Rank 0 of linear would hold 0.5 + 3, of V 0.5 + 0.5, of looped 0.5 + 0.5.
    held = {"activation_per_stage": [0.5, 3, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]}
    found = planned(
        uniform(4, 8, None, placement="any") | held | {"memory_limit": [1, 4, 4, 4]},
        time_limit=0.3,
    )
    assert found.schedule.placement.name in ("v", "looped")


def test_joint_stages_are_not_split() -> None:
    found = planned(uniform(4, 8, 4) | {"joint_stages": [1, 3]}, time_limit=0.5)
    assert [kinds(found, s) for s in (1, 3)] == [{"F", "BW"}] * 2
    assert found.makespan <= 33
    all_joint = planned(uniform(4, 8, 4) | {"joint_stages": [0, 1, 2, 3]})
    assert all_joint.makespan == pytest.approx(33)
    assert all_joint.proven_optimal


def test_splitting_that_never_pays_is_left_out() -> None:
    # Split, one backward alone would take 22.
    found = planned(uniform(4, 8, 4) | {"split_overhead": 10.0}, time_limit=0.5)
    assert found.makespan == pytest.approx(33)
    assert all(kinds(found, s) == {"F", "BW"} for s in range(4))


def test_some_backwards_are_split_where_that_pays() -> None:
    # A little dearer: all joint takes 33, all split 27 and 8% of 8 more.
    found = planned(uniform(4, 8, 4) | {"split_overhead": 0.08}, time_limit=0.5)
    assert found.makespan <= 27 + 8 * 2 * 0.08 + 3 * 0.08 + 1e-9
    assert found.makespan >= 27


def test_layers_are_moved_off_the_busiest_rank() -> None:
    document = {
        "ranks": 2,
        "microbatches": 4,
        "placement": "linear",
        "layer_times": [[1, 1, 1]] * 6 + [[2, 2, 2]],
        "layer_activation": 0.25,
        "link_latency": 0.0,
        "released_by_backward_input": 0.5,
        "memory_limit": None,
    }
    found = planned(document)
    # Four layers on either side, the head counts for two: 12 of work each, rank 1 starts at 4.
    assert found.layout == (4, 3)
    assert found.makespan == pytest.approx(4 * 12 + 4)
    assert not any("move layers" in said for said in found.warnings)
    # Rank 0 has room for three layers and one microbatch only.
    tight = planned(document | {"memory_limit": [0.75, None]}, time_limit=0.3)
    assert tight.layout is not None
    assert tight.layout[0] <= 3


def test_a_layout_that_fits_is_found() -> None:
    # The first two layers are large: rank 0 has room for one of them alone.
    document = {
        "ranks": 3,
        "microbatches": 3,
        "placement": "linear",
        "layer_times": [[1, 1, 1]] * 9,
        "layer_activation": [4, 4, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5],
        "layer_fixed": [1, 0, 0, 0, 0, 0, 0, 0, 1],
        "link_latency": 0.0,
        "released_by_backward_input": 0.0,
        "memory_limit": [5, 4, 4.5],
    }
    found = planned(document, time_limit=0.3)
    assert found.layout == (1, 1, 7)
    # 13.5 does not fit into 13.
    with pytest.raises(InfeasibleError, match=r"0\.5 short"):
        plan(parse_problem(document | {"memory_limit": [5, 4, 4]}))


def test_more_stages_than_layers() -> None:
    document = CASES["layers-p4-m16"] | {"placement": "looped", "chunks": 3}
    document = document | {"layer_times": [[1, 1, 1]] * 5, "layer_activation": 0.2}
    document.pop("layer_fixed", None)
    found = planned(document | {"memory_limit": None}, time_limit=0.3)
    assert sum(found.layout or ()) == 5
    assert len(found.layout or ()) == 12


def test_proving_closes_the_gap() -> None:
    # One microbatch at a time on two ranks of a V, latency on the way: no closed form.
    document = uniform(2, 4, 1, PAPER, 0.3, "v")
    found = planned(document, time_limit=0.3)
    assert found.lower_bound <= found.makespan
    proved = planned(document, time_limit=2, prove=True)
    assert proved.proven_optimal
    assert proved.lower_bound == pytest.approx(proved.makespan)
    assert found.lower_bound <= proved.makespan * (1 + 1e-9)
    assert proved.makespan <= found.makespan * (1 + 1e-9)


def test_no_memory_is_enough_for_what_takes_none() -> None:
    found = planned(uniform(3, 4, 0) | {"activation_per_stage": 0})
    assert found.proven_optimal
    assert found.makespan == pytest.approx(14)  # 3 m + p - 1


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
@given(
    rng=st.integers(0, 10**9).map(random.Random), objective=st.sampled_from(["makespan", "span"])
)
def test_random_problems_have_plans(rng: random.Random, objective: Objective) -> None:
    document = random_problem(rng, max_ranks=4, max_microbatches=6)
    planned(document, objective=objective, time_limit=0.05)


# Without torch.

NO_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "megatron"):
            raise ImportError(name + " is not to be imported")
sys.meta_path.insert(0, Refuse())
from zerobubble.cli import main
sys.argv = ["zerobubble", "plan", *sys.argv[1:]]
try:
    main()
except SystemExit as done:
    assert not done.code, done.code
assert not any(name.split(".")[0] in ("torch", "megatron") for name in sys.modules)
"""


@pytest.mark.parametrize("more", [["--json"], ["--prove", "--time-limit", "1"]])
def test_planning_needs_no_torch(more: list[str]) -> None:
    arguments = ["--ranks", "4", "--microbatches", "8", "--memory", "1", *more]
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "25.5" in done.stdout
