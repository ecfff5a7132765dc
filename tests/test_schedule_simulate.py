"""The simulator against closed forms, published figures and hand-made schedules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zerobubble.errors import UserError
from zerobubble.schedule import families
from zerobubble.schedule.costs import Costs
from zerobubble.schedule.errors import DeadlockError, MispairingError, UnknownStageError
from zerobubble.schedule.ops import Kind, Op
from zerobubble.schedule.placement import linear, v
from zerobubble.schedule.schedule import Schedule
from zerobubble.schedule.simulate import simulate
from zerobubble.schedule.timeline import Timeline

REFERENCE = Path(__file__).parent.parent / "benchmarks/reference"
PAPER = json.loads((REFERENCE / "zero_bubble_paper.json").read_text())
PROFILED = [case for case in PAPER["cases"] if case["T_F"] is not None]


def run(
    name: str,
    ranks: int,
    microbatches: int,
    times: tuple[float, float, float] = (1.0, 1.0, 1.0),
    link: float = 0.0,
    chunks: int = 1,
) -> Timeline:
    """Simulate a family; times are those of a rank's stages together, as is one activation."""
    forward, backward, weight = (time / chunks for time in times)
    costs = Costs.uniform(
        ranks * chunks, forward, backward, weight, link_latency=link, activation=1 / chunks
    )
    schedule = families.build(name, ranks, microbatches, chunks=chunks, costs=costs)
    blocking = simulate(schedule, costs, receives="block")
    timeline = simulate(schedule, costs)
    assert blocking.makespan == pytest.approx(timeline.makespan, abs=1e-9)
    assert blocking.peak_memory == timeline.peak_memory
    return timeline


# (p, m, (F, B, W), link): makespans of 1F1B and, to be met or beaten, of the published ZB-V.
REFERENCE = [
    (4, 8, (1, 1, 1), 0, 33, 25.5),
    (4, 8, (1, 1.2, 0.8), 0.05, 33.8, 26.55),
    (8, 16, (1, 1, 1), 0, 69, 51.5),
    (4, 64, (1, 1, 1), 0, 201, 193.5),
    (4, 64, (1, 1.2, 0.8), 0.05, 206, 194.55),
    (4, 64, (1, 1, 0.3), 0, 154.1, 149.15),
    (4, 2, (1, 1, 1), 0, 15, 9.5),
    (5, 7, (1, 1, 1), 0, 33, 23.5),
]


@pytest.mark.parametrize(("p", "m", "times", "link", "one_f_one_b", "zb_v"), REFERENCE)
def test_reference_makespans(p, m, times, link, one_f_one_b, zb_v):
    assert run("1f1b", p, m, times, link).makespan == pytest.approx(one_f_one_b)
    timeline = run("zb-v", p, m, times, link, chunks=2)
    assert timeline.makespan <= zb_v + 1e-9
    assert max(timeline.peak_memory) <= p + 1e-9


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 16), (5, 7)])
@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("zb-h1", 1), ("zb-v", 2), ("gpipe", 1)])
def test_first_forward_starts_as_soon_as_its_input_is_there(name, chunks, p, m):
    times = run(name, p, m, chunks=chunks).times()
    for rank in range(p):
        assert times[Op(Kind.F, rank, 0)].start == pytest.approx(rank / chunks)


@pytest.mark.parametrize("m", [1, 2, 3])
def test_fewer_microbatches_than_ranks(m):
    assert run("1f1b", 4, m).makespan == 3 * (m + 3)
    assert run("zb-h1", 4, m).makespan <= {1: 9, 2: 11, 3: 13}[m]
    assert run("zb-v", 4, m, chunks=2).makespan <= {1: 8.5, 2: 9.5, 3: 11.5}[m]


def test_unequal_stages():
    slow_last = Costs.per_stage([(1, 1, 1)] * 3 + [(1.5, 1.5, 1.5)])
    slow_first = Costs.per_stage([(1.5, 1.5, 1.5)] + [(1, 1, 1)] * 3)
    schedule = families.build("1f1b", 4, 8)
    assert simulate(schedule, slow_last).makespan == 45
    assert simulate(schedule, slow_last).work(3) == 36
    assert simulate(schedule, slow_first).makespan == 40.5


@pytest.mark.parametrize("case", PROFILED, ids=lambda case: case["name"])
def test_published_bubble_rates(case):
    p, m, link = case["p"], case["m"], case["T_comm"]
    times = (case["T_F"], case["T_B"], case["T_W"])
    published = case["published_bubble_rate"]
    for name, key in (("1f1b", "1F1B"), ("zb-h1", "ZB-H1")):
        rate = run(name, p, m, times, link).longest_span_bubble_rate
        assert round(rate, 4) == published[key], name


@pytest.mark.parametrize("case", PROFILED, ids=lambda case: case["name"])
def test_interleaved_follows_its_formula(case):
    p, m, link, v_ = case["p"], case["m"], case["T_comm"], case["chunks_per_stage_1F1B_I"]
    times = (case["T_F"], case["T_B"], case["T_W"])
    work = m * sum(times)

    def rate(hops: int) -> float:
        bubble = (p - 1) * sum(times) / v_ + hops * link
        return bubble / (work + bubble)

    # The paper counts p hops less than one microbatch makes there and back.
    assert round(rate(2 * p * v_ - p - 2), 4) == case["published_bubble_rate"]["1F1B-I"]
    timeline = run("interleaved", p, m, times, link, chunks=v_)
    assert timeline.longest_span_bubble_rate == pytest.approx(rate(2 * p * v_ - 2))


ZB_V = [
    case for case in PAPER["cases"] if case["name"] in ("zbv-14.6B-p24-m72", "zbv-28.3B-p32-m96")
]


@pytest.mark.parametrize("case", ZB_V, ids=lambda case: case["name"])
def test_zb_v_meets_published_rates_on_their_profiles(case):
    times = case["times_from_authors_code_per_chunk"]
    stage = (2 * times["F"], 2 * times["B"], 2 * times["W"])
    timeline = run("zb-v", case["p"], case["m"], stage, times["T_comm"], chunks=2)
    assert timeline.longest_span_bubble_rate <= case["published_bubble_rate"]["ZB-V"]
    assert max(timeline.peak_memory) <= case["p"]


def test_longest_span_of_zb_v_has_no_bubble():
    timeline = run("zb-v", 4, 8, chunks=2)
    assert timeline.longest_span == 24
    assert timeline.longest_span_bubble_rate == 0


def test_a_hand_over_inside_one_rank_takes_no_link_time():
    times = run("zb-v", 2, 1, link=10.0, chunks=2).times()
    assert times[Op(Kind.F, 2, 0)].start == times[Op(Kind.F, 1, 0)].end
    assert times[Op(Kind.F, 3, 0)].start == times[Op(Kind.F, 2, 0)].end + 10


def test_memory_is_fixed_memory_and_live_activations():
    costs = Costs.per_stage(
        [(1, 1, 1)] * 2, activation=(2.0, 3.0), fixed_memory=(10.0, 20.0),
        released_by_backward_input=0.5,
    )  # fmt: skip
    order = (Op(Kind.F, 0, 0), Op(Kind.F, 0, 1), Op(Kind.B, 0, 0), Op(Kind.W, 0, 0),
             Op(Kind.B, 0, 1), Op(Kind.W, 0, 1))  # fmt: skip
    last = tuple(
        Op(kind, 1, microbatch) for microbatch in (0, 1) for kind in (Kind.F, Kind.B, Kind.W)
    )
    schedule = Schedule("by hand", linear(2), 2, (order, last))
    assert simulate(schedule, costs).peak_memory == (14.0, 23.0)
    # W put off: its half stays when the next F comes.
    late = tuple(sorted(last, key=lambda op: op.kind is Kind.W))
    schedule = Schedule("by hand", linear(2), 2, (order, late))
    assert simulate(schedule, costs).peak_memory == (14.0, 24.5)


@pytest.mark.parametrize("receives", ["free", "block"])
def test_deadlock_names_rank_and_op(receives):
    first = (Op(Kind.F, 0, 0), Op(Kind.BW, 0, 0), Op(Kind.F, 0, 1), Op(Kind.BW, 0, 1))
    second = (Op(Kind.F, 1, 0), Op(Kind.F, 1, 1), Op(Kind.BW, 1, 0), Op(Kind.BW, 1, 1))
    schedule = Schedule("by hand", linear(2), 2, (first, second))
    with pytest.raises(DeadlockError, match=r"^rank 0, op 1 \(BW of microbatch 0 on stage 0\)"):
        simulate(schedule, Costs.uniform(2), receives)


@pytest.mark.parametrize("receives", ["free", "block"])
def test_an_op_before_its_own_input_never_starts(receives):
    schedule = Schedule("by hand", v(1), 1, ((Op(Kind.F, 1, 0), Op(Kind.F, 0, 0)),))
    with pytest.raises(DeadlockError, match="rank 0, op 0"):
        simulate(schedule, Costs.uniform(2), receives)


def test_blocking_receives_see_the_order_of_the_channel():
    orders = ((Op(Kind.F, 0, 0), Op(Kind.F, 0, 1)), (Op(Kind.F, 1, 1), Op(Kind.F, 1, 0)))
    schedule = Schedule("by hand", linear(2), 2, orders)
    assert simulate(schedule, Costs.uniform(2)).makespan == 4
    with pytest.raises(MispairingError, match=r"rank 1, op 0 \(F of microbatch 1 on stage 1\)"):
        simulate(schedule, Costs.uniform(2), receives="block")


def test_unfit_costs_are_refused():
    with pytest.raises(UserError, match=r"3 stages.* 2;"):
        simulate(families.build("1f1b", 2, 2), Costs.uniform(3))
    schedule = Schedule("by hand", linear(1), 1, ((Op(Kind.F, 5, 0),),))
    with pytest.raises(UnknownStageError, match="there are 1 stages"):
        simulate(schedule, Costs.uniform(1))
