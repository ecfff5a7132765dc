"""Every family, for any number of ranks and microbatches."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerobubble.errors import UserError
from zerobubble.schedule import families
from zerobubble.schedule.costs import Costs
from zerobubble.schedule.families.forward_only import forward_only
from zerobubble.schedule.families.v_search import by_preference, memory_of
from zerobubble.schedule.placement import linear, looped, v
from zerobubble.schedule.verify import verify

FAMILIES = (
    "1f1b",
    "1f1b-v",
    "dualpipev",
    "gpipe",
    "interleaved",
    "interleaved-zb",
    "looped-bfs",
    "seq1f1b",
    "v-half",
    "v-min",
    "zb-1p",
    "zb-2p",
    "zb-h1",
    "zb-h2",
    "zb-v",
)
LOOPED = ("interleaved", "interleaved-zb", "looped-bfs")

times = st.sampled_from([0.0, 0.3, 0.5, 1.0, 1.2, 2.0])


@st.composite
def problems(draw):
    """A family with ranks, microbatches, and None or unequal costs."""
    name = draw(st.sampled_from(FAMILIES))
    ranks, microbatches = draw(st.integers(1, 8)), draw(st.integers(1, 12))
    chunks = draw(st.integers(1, 3)) if name in LOOPED else None
    options = {}
    if name == "interleaved" and draw(st.booleans()):
        options["group"] = ranks + draw(st.integers(0, 4))
    if name == "seq1f1b":
        options["slices"] = draw(st.integers(1, 5))
    stages = families.get(name).placement(ranks, chunks).stages
    costs = None
    if draw(st.booleans()):
        rows = [(draw(times), draw(times), draw(times)) for _ in range(stages)]
        activation = tuple(draw(st.sampled_from([1.0, 1.0, 2.0])) for _ in range(stages))
        link = draw(st.sampled_from([0.0, 0.1, 3.0]))
        costs = Costs.per_stage(rows, link_latency=link, activation=activation)
    return name, ranks, microbatches, {"chunks": chunks, "costs": costs, **options}


@settings(max_examples=250, deadline=None)
@given(problems())
def test_every_schedule_is_proved(problem):
    name, ranks, microbatches, arguments = problem
    schedule = families.build(name, ranks, microbatches, **arguments)
    costs, slices = arguments["costs"], arguments.get("slices", 1)
    proof = verify(schedule, costs)
    stages = schedule.placement.stages
    kinds = Counter(op.kind for _, op in schedule.ops())
    each = stages * microbatches * slices
    if name == "dualpipev":
        assert kinds["F"] == kinds["BW"] + kinds["B"] == each
        assert kinds["B"] == kinds["W"]
    else:
        split = name.startswith(("zb", "v-")) or name == "interleaved-zb"
        assert kinds == dict.fromkeys(("F", "B", "W") if split else ("F", "BW"), each)

    activation = costs.activation if costs else (1.0,) * stages
    for rank, peak in enumerate(proof.timeline.peak_memory):
        held = [activation[s] for s in schedule.placement.stages_of(rank)]
        most = {
            "1f1b": min(ranks - rank, microbatches) * sum(held),
            "gpipe": microbatches * sum(held),
            "zb-1p": min(ranks, microbatches) * sum(held),
            "zb-2p": min(2 * ranks, microbatches) * sum(held),
            "zb-h1": min(ranks, microbatches) * sum(held),
            "zb-h2": min(2 * ranks - 1, microbatches) * sum(held),
            "zb-v": ranks * sum(held),
            "v-half": min(ranks, -(-ranks // 2) + 1) * sum(held),
            "v-min": min(ranks, -(-ranks // 3) + 1) * sum(held),
            # Warm-up and one more, in chunks.
            "interleaved": (
                2 * (ranks - rank) - 1 + (len(held) - 1) * arguments.get("group", ranks)
            )
            * max(held),
            "interleaved-zb": len(held) * ranks * max(held),
            "looped-bfs": microbatches * sum(held),
            "seq1f1b": min(ranks - rank + slices - 1, microbatches * slices) * sum(held),
            "1f1b-v": 2 * ranks * max(held),
            "dualpipev": (2 * ranks + 1) * max(held),
        }[name]
        assert peak <= most + 1e-9


@pytest.mark.parametrize("name", FAMILIES)
def test_any_number_of_ranks_and_microbatches(name):
    for ranks in range(1, 9):
        for microbatches in range(1, 2 * ranks + 1):
            verify(families.build(name, ranks, microbatches))


@settings(max_examples=100, deadline=None)
@given(
    st.one_of(
        st.builds(linear, st.integers(1, 8)),
        st.builds(v, st.integers(1, 8)),
        st.builds(looped, st.integers(1, 8), st.integers(1, 4)),
    ),
    st.integers(1, 20),
)
def test_forward_only_is_proved_for_any_placement(placement, microbatches):
    schedule = forward_only(placement, microbatches)
    assert schedule.forward_only
    verify(schedule)


def test_forward_only_fills_the_pipeline():
    assert verify(forward_only(linear(4), 8)).timeline.makespan == 8 + 3
    with pytest.raises(UserError, match="0 microbatches"):
        forward_only(linear(2), 0)


def texts(schedule):
    return [" ".join(op.text for op in order) for order in schedule.orders]


def test_1f1b_order():
    assert texts(families.build("1f1b", 3, 4)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_zb_h1_puts_w_off_by_the_rank():
    assert texts(families.build("zb-h1", 3, 4)) == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    ]


def test_zb_h2_warms_up_twice_as_deep_and_puts_w_off_twice_as_long():
    assert texts(families.build("zb-h2", 2, 4)) == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3",
    ]


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 3), (4, 7), (8, 15), (8, 40)])
def test_zb_h2_has_no_bubble_when_all_ops_take_as_long(p, m):
    timeline = verify(families.build("zb-h2", p, m)).timeline
    assert [timeline.span(rank) for rank in range(p)] == [3 * m] * p
    assert max(timeline.peak_memory) == 2 * p - 1


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 4), (4, 3), (4, 7), (8, 16), (8, 40)])
def test_zb_2p_has_no_bubble_when_all_ops_take_as_long(p, m):
    timeline = verify(families.build("zb-2p", p, m)).timeline
    # Too few microbatches cannot fill the time until rank 0's first gradient is back.
    assert timeline.longest_span == 3 * m + max(0, 2 * p - 1 - m)


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 4), (4, 7), (8, 16), (8, 40)])
def test_zb_1p_has_the_bubble_of_zb_h1_when_all_ops_take_as_long(p, m):
    # Nothing shorter is possible: rank 0 holds p microbatches, its first gradient comes at 2p - 1.
    timeline = verify(families.build("zb-1p", p, m)).timeline
    assert timeline.longest_span == 3 * m + p - 1


def test_zb_1p_and_zb_2p_are_never_worse_than_the_handcrafted_orders():
    rows = [(1.0, 1.2, 0.7)] * 3 + [(2.0, 1.5, 1.5), (0.0, 0.0, 0.0), (1.3, 1.2, 0.9)]
    costs = Costs.per_stage(rows, link_latency=0.1)
    span = {
        name: verify(families.build(name, 6, 14, costs=costs), costs).timeline.longest_span
        for name in ("zb-1p", "zb-2p", "zb-h1", "zb-h2")
    }
    assert span["zb-1p"] < span["zb-h1"]
    assert span["zb-2p"] == pytest.approx(14 * 5)  # the slowest rank's work: nothing is shorter


def test_interleaved_is_megatrons_order_where_p_divides_m():
    # Warm-up of 2 (p - 1 - r) + (v - 1) p chunks, groups of p microbatches.
    assert texts(families.build("interleaved", 2, 4, chunks=2)) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


@pytest.mark.parametrize(("p", "m", "v_"), [(4, 8, 2), (8, 24, 3), (3, 3, 4)])
def test_interleaved_bubble(p, m, v_):
    schedule = families.build("interleaved", p, m, chunks=v_)
    timeline = verify(schedule, Costs.uniform(p * v_, 1 / v_, 1 / v_, 1 / v_)).timeline
    assert timeline.makespan == pytest.approx(3 * m + 3 * (p - 1) / v_)


def test_zb_v_takes_costs_into_account():
    slow_first = [(0.75, 0.75, 0.75)] + [(0.5, 0.5, 0.5)] * 6 + [(0.75, 0.75, 0.75)]
    costs = Costs.per_stage(slow_first, activation=0.5)
    timeline = verify(families.build("zb-v", 4, 8, costs=costs), costs).timeline
    assert timeline.makespan == pytest.approx(36)  # rank 0's own work: nothing is shorter
    assert max(timeline.peak_memory) <= 4


def test_zb_v_keeps_p_microbatches_of_unequal_activations():
    costs = Costs.per_stage([(1, 1, 1)] * 8, activation=(3.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0))
    timeline = verify(families.build("zb-v", 4, 8, costs=costs), costs).timeline
    limits = (16.0, 12.0, 8.0, 8.0)
    for peak, limit in zip(timeline.peak_memory, limits, strict=True):
        assert peak <= limit


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16])
def test_v_half_and_v_min_bubbles_and_memory(p):
    costs = Costs.uniform(2 * p, 0.5, 0.5, 0.5, activation=0.5)
    for name, bubble, share in (("v-half", 1.5 * (p - 1), 2), ("v-min", 2 * p - 1.5, 3)):
        timeline = verify(families.build(name, p, 4 * p, costs=costs), costs).timeline
        assert 12 * p <= timeline.makespan <= 12 * p + bubble
        assert max(timeline.peak_memory) <= min(p, -(-p // share) + 1)


@pytest.mark.parametrize("p", range(1, 9))
@pytest.mark.parametrize(
    ("name", "bubble", "memory", "least"),
    [
        # Bubble of the makespan for F = B = W = 1 per rank, memory in microbatches, for m >= least.
        ("gpipe", lambda p: 3 * (p - 1), lambda _, m: m, lambda _: 1),
        ("1f1b", lambda p: 3 * (p - 1), min, lambda _: 1),
        ("1f1b-v", lambda p: 2 * (p - 1), lambda p, _: p, lambda p: p),
        ("zb-h1", lambda p: p - 1, lambda p, _: p, lambda p: p),
        ("zb-v", lambda p: (p - 1) / 2, lambda p, _: p, lambda p: 2 * p - 1),
        ("looped-bfs", lambda p: 1.5 * (p - 1), lambda _, m: m, lambda p: p),
        ("dualpipev", lambda p: (p - 1) / 2, lambda p, _: p + 0.5, lambda p: 2 * p),
        ("seq1f1b", lambda p: 0.75 * (p - 1), lambda p, m: min(m, (p + 3) / 4), lambda _: 1),
    ],
)
def test_bubble_and_memory_are_as_described(name, bubble, memory, least, p):
    chunks = families.get(name).placement(p, None).chunks
    for m in {least(p), 2 * p, 2 * p + 1, 4 * p}:
        schedule = families.build(name, p, m)
        part = 1 / chunks / schedule.slices
        costs = Costs.uniform(p * chunks, part, part, part, activation=part)
        timeline = verify(schedule, costs).timeline
        expected = bubble(p)
        if name == "zb-v":  # every rank starts late and ends late, none waits in between
            assert timeline.longest_span == pytest.approx(3 * m)
        assert timeline.makespan == pytest.approx(3 * m + expected)
        assert max(timeline.peak_memory) == pytest.approx(memory(p, m))


@pytest.mark.parametrize(("p", "v_"), [(1, 2), (2, 2), (4, 3), (8, 2)])
def test_interleaved_zb_is_zb_h1_in_v_chunks(p, v_):
    costs = Costs.uniform(p * v_, 1.2 / v_, 1 / v_, 0.8 / v_, activation=1 / v_)
    schedule = families.build("interleaved-zb", p, 2 * p, chunks=v_)
    timeline = verify(schedule, costs).timeline
    assert timeline.longest_span == pytest.approx(3 * 2 * p + (p - 1) * (1.2 + 1 - 0.8) / v_)
    assert max(timeline.peak_memory) == pytest.approx(p)


def test_seq1f1b_order():
    assert texts(families.build("seq1f1b", 2, 2, slices=2)) == [
        "0F0 0F0.1 0F1 0B0.1 0F1.1 0B0 0B1.1 0B1",
        "1F0 1F0.1 1B0.1 1F1 1B0 1F1.1 1B1.1 1B1",
    ]


def test_interleave_groups():
    # Megatron's table for 5 microbatches in groups of 3, two chunks: 0-2, 0-2, 3-4, 3-4.
    schedule = families.build("interleaved", 2, 5, group=3)
    forwards = [op.text for op in schedule.orders[0] if op.kind == "F"]
    assert forwards == ["0F0", "0F1", "0F2", "2F0", "2F1", "2F2", "0F3", "0F4", "2F3", "2F4"]
    # As long as with groups of p, but (v - 1)(g - p) more chunks held.
    for group in (4, 6, 8):
        costs = Costs.uniform(8, 0.5, 0.5, 0.5, activation=0.5)
        timeline = verify(families.build("interleaved", 4, 24, group=group), costs).timeline
        assert timeline.makespan == 3 * 24 + 9 / 2
        assert timeline.peak_memory[0] == 5.5 + (group - 4) / 2
    with pytest.raises(UserError, match=r"group of 3 microbatches on 4 ranks .* use 4 or more"):
        families.build("interleaved", 4, 8, group=3)


def test_options_that_a_family_does_not_have():
    with pytest.raises(UserError, match=r"'zb-v' has no slices, 2 .* choose seq1f1b"):
        families.build("zb-v", 2, 4, slices=2)
    with pytest.raises(UserError, match=r"'1f1b' has no group, 4 .* choose interleaved"):
        families.build("1f1b", 2, 4, group=4)
    with pytest.raises(UserError, match="'seq1f1b' with 0 slices"):
        families.build("seq1f1b", 2, 4, slices=0)


def test_names_and_aliases():
    assert families.names() == FAMILIES
    assert "forward_only" not in families.names()
    assert families.get("ZBV") is families.get("zb-v")
    assert families.get("zb_h1") is families.get("zb-h1")
    for name in families.names():
        text = families.get(name).description
        assert all(word in text for word in ("Source:", "Memory:", "Bubble:", "se it")), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f2b", 4, 8), "unknown schedule '1f2b'; did you mean '1f1b'"),
        (("1f1b", 4, 0), "'1f1b' with 0 microbatches"),
        (("1f1b", 0, 4), "0 ranks"),
    ],
)
def test_impossible_requests(arguments, message):
    with pytest.raises(UserError, match=message):
        families.build(*arguments)


def test_impossible_chunks_and_costs():
    with pytest.raises(UserError, match=r"has 1 stage\(s\) per rank, 2 were asked for"):
        families.build("zb-h1", 4, 8, chunks=2)
    with pytest.raises(UserError, match="has 8 stages, the costs have 4"):
        families.build("zb-v", 4, 8, costs=Costs.uniform(4))


TOY = '''
"""One microbatch at a time."""
from zerobubble.schedule.ops import Kind, Op
from zerobubble.schedule.placement import linear

NAME = "one-at-a-time"

def placement(ranks, chunks):
    return linear(ranks)

def orders(placement, microbatches, costs):
    return [
        [Op(kind, rank, j) for j in range(microbatches) for kind in (Kind.F, Kind.BW)]
        for rank in range(placement.ranks)
    ]
'''


def test_a_new_family_is_one_new_file(tmp_path, monkeypatch):
    (tmp_path / "one_at_a_time.py").write_text(TOY)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    families._families.cache_clear()
    try:
        assert "one-at-a-time" in families.names()
        proof = verify(families.build("one-at-a-time", 3, 2))
        assert proof.timeline.makespan == 2 * 9
    finally:
        families._families.cache_clear()


def test_schedule_does_not_import_torch():
    code = (
        "import sys, zerobubble.schedule.families as f, zerobubble.schedule.formats; "
        "import zerobubble.schedule.verify; f.names(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 3), st.randoms(use_true_random=False))
def test_list_scheduling_within_a_microbatch_or_more_never_gets_stuck(
    ranks, microbatches, most_held, random
):
    placement = v(ranks)

    def amounts():
        return tuple(random.choice([0.0, 0.1, 0.25, 1.0, 1.36]) for _ in range(2 * ranks))

    costs = Costs(
        **{part: amounts() for part in ("forward", "backward_input", "backward_weight")},
        backward_joint=(2.0,) * (2 * ranks),
        link_latency=tuple(random.choice([0.0, 2.0]) for _ in range(2 * ranks - 1)),
        activation=amounts(),
        released_by_backward_input=(random.choice([0.0, 0.69, 1.0]),) * (2 * ranks),
        fixed_memory=(0.0,) * (2 * ranks),
    )
    limit = memory_of(placement, costs, most_held)
    # Four preferences between F and B of the chunks, W put in by six rules.
    assert len(list(by_preference(placement, microbatches, costs, limit))) == 24
