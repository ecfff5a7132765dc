"""Schedules and timelines as text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerobubble.errors import UserError
from zerobubble.schedule import families
from zerobubble.schedule.costs import Costs
from zerobubble.schedule.errors import WrongRankError
from zerobubble.schedule.formats import format_nodes, format_text, from_json, to_json
from zerobubble.schedule.placement import linear
from zerobubble.schedule.simulate import simulate
from zerobubble.schedule.timeline import Timeline
from zerobubble.schedule.verify import verify


def test_text_of_1f1b():
    timeline = simulate(families.build("1f1b", 2, 3), Costs.uniform(2))
    assert format_text(timeline) == "\n".join(
        [
            "1f1b: 2 ranks, 3 microbatches, makespan 12 ms, bubble rate 25.0%",
            "rank 0 |F0 F1 ······BW0   F2 BW1   ···BW2   |",
            "rank 1 |···F0 BW0   F1 BW1   F2 BW2   ······|",
        ]
    )


def test_text_names_chunks_and_keeps_a_width():
    timeline = simulate(families.build("zb-v", 2, 2), Costs.uniform(4))
    rows = format_text(timeline).splitlines()[1:]
    assert rows[0].startswith("rank 0 |F0-0 F1-0 ")
    assert "F0-1" in rows[0]
    narrow = format_text(timeline, width=20).splitlines()[1:]
    assert {len(row) for row in narrow} == {len("rank 0 ||") + 20}
    assert "F0" not in narrow[0]  # a name that does not fit is its kind alone
    assert "nothing ran" in format_text(Timeline("empty", linear(1), 1, ((),)))


def test_nodes():
    lines = format_nodes(families.build("zb-v", 2, 1)).splitlines()
    assert lines[0] == "##### rank 0 schedules:"
    assert lines[1:3] == ["F-0-0-0", "F-0-1-0"]
    assert "##### rank 1 schedules:" in lines
    assert "BW-1-0-0" in format_nodes(families.build("1f1b", 2, 2)).splitlines()


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(families.names()), st.integers(1, 6), st.integers(1, 8))
def test_json_round_trip(name, ranks, microbatches):
    schedule = families.build(name, ranks, microbatches)
    assert from_json(to_json(schedule)) == schedule


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"microbatches": "4"}, "'microbatches' holds '4'"),
        ({"microbatches": True}, "'microbatches' holds True"),
        ({"microbatches": -1}, "'microbatches' holds -1"),
        ({"schedule": 7}, "'schedule' holds 7"),
        ({"orders": {}}, "'orders' holds {}"),
        ({"orders": [3]}, "'orders' has 3 for rank 0"),
        ({"orders": [["0F0", "0X0"]]}, "rank 0, op 1 of 'orders': cannot read op '0X0'"),
        ({"orders": [["0F0"], [None]]}, "rank 1, op 0 of 'orders': 'orders' holds None"),
        ({"rank_of": [0, "1"]}, "'rank_of' holds '1'"),
        ({"rank_of": [0, 0, 1]}, "gives its 2 ranks"),
        ({"microbatch": 4}, "unknown key 'microbatch'"),
    ],
)
def test_garbage_is_refused(change, message):
    data = json.loads(to_json(families.build("1f1b", 2, 4))) | change
    with pytest.raises(UserError) as caught:
        from_json(json.dumps(data))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_broken_json_and_missing_keys_are_refused():
    text = to_json(families.build("1f1b", 2, 4))
    with pytest.raises(UserError, match="broken or cut off"):
        from_json(text[: len(text) // 2])
    with pytest.raises(UserError, match="is a list"):
        from_json("[]")
    data = json.loads(text)
    del data["slices"]
    with pytest.raises(UserError, match="no 'slices'"):
        from_json(json.dumps(data))


def test_a_v_map_with_interleaved_ops_loads_and_is_refused_by_verify():
    data = json.loads(to_json(families.build("zb-v", 2, 4)))
    data["orders"] = json.loads(to_json(families.build("interleaved", 2, 4)))["orders"]
    with pytest.raises(WrongRankError):
        verify(from_json(json.dumps(data)))
