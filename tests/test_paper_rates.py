"""Simulated bubble rates against the published ones (arXiv 2401.10241, Tables 4 to 9)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zerobubble.schedule import families
from zerobubble.schedule.costs import Costs
from zerobubble.schedule.verify import verify

REFERENCE = Path(__file__).parent.parent / "benchmarks" / "reference"
CASES = json.loads((REFERENCE / "zero_bubble_paper.json").read_text())["cases"]

TORCH = {
    row["name"]: row["pytorch_2.13"]
    for row in json.loads((REFERENCE / "public_schedulers_on_paper_profiles.json").read_text())[
        "rows"
    ]
    if "pytorch_2.13" in row
}


def profile(case):
    """The published times of a rank (F, B, W) and of a hop."""
    chunk = case.get("times_from_authors_code_per_chunk")
    if chunk:
        return tuple(2 * chunk[kind] for kind in "FBW"), chunk["T_comm"]
    return (case["T_F"], case["T_B"], case["T_W"]), case["T_comm"]


def simulated(name, case):
    """The verified timeline of a family on the case's profile, memory in microbatches."""
    times, hop = profile(case)
    ranks = case["p"]
    chunks = families.get(name).placement(ranks, None).chunks
    costs = Costs.per_stage(
        [tuple(time / chunks for time in times)] * (ranks * chunks),
        link_latency=hop,
        activation=1 / chunks,
        released_by_backward_input=1 - case["M_W_over_M_B"],
    )
    return verify(families.build(name, ranks, case["m"], costs=costs), costs).timeline


def test_all_published_cells_are_here():
    assert len(CASES) == 21


@pytest.mark.parametrize(
    ("name", "published"), [("1f1b", "1F1B"), ("zb-h1", "ZB-H1"), ("zb-h2", "ZB-H2")]
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_handcrafted_schedules_have_the_published_rate(case, name, published):
    timeline = simulated(name, case)
    rate = case["published_bubble_rate"][published]
    assert round(timeline.longest_span_bubble_rate, 4) == pytest.approx(rate, abs=1e-9)


@pytest.mark.parametrize(
    ("name", "published", "most_held"),
    [("zb-1p", "ZB-1p", 1), ("zb-2p", "ZB-2p", 2), ("zb-v", "ZB-V", 1)],
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_planned_schedules_are_not_above_the_published_rate(case, name, published, most_held):
    rate = case["published_bubble_rate"][published]
    if rate is None:  # not every profile has every schedule
        return
    timeline = simulated(name, case)
    assert round(timeline.longest_span_bubble_rate, 4) <= rate + 1e-9
    assert max(timeline.peak_memory) <= most_held * case["p"] + 1e-9


@pytest.mark.parametrize(
    ("name", "torchs", "memory"),
    [
        ("interleaved-zb", "InterleavedZeroBubble_v2", "InterleavedZeroBubble_v2"),
        ("dualpipev", "DualPipeV_F_then_B", "DualPipeV"),
    ],
)
@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case["name"] in TORCH],
    ids=lambda case: case["name"],
)
def test_torchs_schedules_have_the_rate_and_memory_of_torchs_orders(case, name, torchs, memory):
    timeline = simulated(name, case)
    torch = TORCH[case["name"]]
    assert timeline.longest_span_bubble_rate == pytest.approx(torch[torchs], abs=5.1e-5)
    peak = max(timeline.peak_memory) / case["p"]
    assert peak == pytest.approx(torch["peak_memory_pM_B"][memory], abs=5.1e-3)
