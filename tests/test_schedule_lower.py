"""Lowering: one program per rank, transfers included."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerobubble.errors import UserError
from zerobubble.schedule import families
from zerobubble.schedule.families.forward_only import forward_only
from zerobubble.schedule.lower import Channel, Compute, Post, Send, Wait, channels, lower
from zerobubble.schedule.ops import Kind
from zerobubble.schedule.placement import linear, v


def transfers(program):
    """The program without releases, one line per instruction."""
    lines = str(program).splitlines()[1:]
    return [" ".join(line.split()) for line in lines if "release" not in line]


def test_programs_print():
    first, second = lower(families.build("1f1b", 2, 1))
    assert transfers(first) == [
        "post B of boundary 0 (rank 1 -> 0) for 0B0",
        "compute 0F0",
        "send F of boundary 0 (rank 0 -> 1) of 0F0",
        "wait B of boundary 0 (rank 1 -> 0) for 0B0",
        "compute 0B0",
    ]
    assert transfers(second) == [
        "post F of boundary 0 (rank 0 -> 1) for 1F0",
        "wait F of boundary 0 (rank 0 -> 1) for 1F0",
        "compute 1F0",
        "compute 1B0",
        "send B of boundary 0 (rank 1 -> 0) of 1B0",
    ]


def test_the_turn_of_a_v_stays_on_its_rank():
    assert channels(v(2)) == (
        Channel(0, Kind.F, 0, 1),
        Channel(0, Kind.B, 1, 0),
        Channel(2, Kind.F, 1, 0),
        Channel(2, Kind.B, 0, 1),
    )
    assert channels(v(1)) == ()
    (program,) = lower(families.build("zb-v", 1, 3))
    assert all(isinstance(step, Compute) for step in program.instructions)


def test_forward_only_programs_hold_no_gradient():
    for program in lower(forward_only(linear(3), 2)):
        for step in program.instructions:
            assert isinstance(step, Compute) or step.channel.kind is Kind.F


def test_a_window_of_nothing_is_refused():
    with pytest.raises(UserError, match="window of 0"):
        lower(families.build("1f1b", 2, 2), window=0)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(families.names()),
    st.integers(1, 8),
    st.integers(1, 12),
    st.integers(1, 5),
)
def test_transfers_of_any_schedule(name, ranks, microbatches, window):
    schedule = families.build(name, ranks, microbatches)
    sent, received = {}, {}
    for program, order in zip(lower(schedule, window), schedule.orders, strict=True):
        steps = program.instructions
        assert tuple(step.op for step in steps if isinstance(step, Compute)) == order
        posted = {}
        for before, step, after in zip((None, *steps), steps, (*steps[1:], None), strict=False):
            if isinstance(step, Post):
                posted.setdefault(step.channel, []).append(step.op)
                assert len(posted[step.channel]) <= window
                assert step.channel.destination == program.rank
            elif isinstance(step, Wait):
                # In posting order, and nothing but the next post or a release before the op.
                assert posted[step.channel].pop(0) == step.op
                received.setdefault(step.channel, []).append((step.op.microbatch, step.op.slice))
                assert not isinstance(after, Send)
            elif isinstance(step, Send):
                assert before == Compute(step.op)
                assert step.channel.source == program.rank
                sent.setdefault(step.channel, []).append((step.op.microbatch, step.op.slice))
        assert not any(posted.values())
    assert sent == received
    assert set(sent) == set(channels(schedule.placement))
    for channel, order in sent.items():
        down = -1 if channel.kind == "B" else 1  # slices ascend forward and descend backward
        assert order == sorted(order, key=lambda at: (at[0], down * at[1]))
