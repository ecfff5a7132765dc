"""Verification: what is right passes, and every fault has its own error."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerobubble.errors import UserError
from zerobubble.schedule import errors, families
from zerobubble.schedule import verify as verification
from zerobubble.schedule.costs import Costs
from zerobubble.schedule.lower import Channel, Compute, Post, Program, Send, Wait, lower
from zerobubble.schedule.ops import Kind, Op
from zerobubble.schedule.placement import linear
from zerobubble.schedule.schedule import Schedule
from zerobubble.schedule.verify import verify, verify_transfers

F, B, W, BW = Kind


def mutate(schedule, change):
    """`schedule` with its rows, as lists, changed in place by `change`."""
    rows = [list(order) for order in schedule.orders]
    change(rows)
    return replace(schedule, orders=tuple(tuple(row) for row in rows))


def swap(rank, one, other):
    def change(rows):
        i, j = rows[rank].index(one), rows[rank].index(other)
        rows[rank][i], rows[rank][j] = other, one

    return change


def put(rank, position, op):
    return lambda rows: rows[rank].insert(position, op)


def set_op(rank, old, new):
    def change(rows):
        rows[rank][rows[rank].index(old)] = new

    return change


# Of zb-v with p = 2, m = 4: rank 0 holds stages 0 and 3, rank 1 stages 1 and 2.
MUTANTS = {
    "W missing": (
        lambda rows: rows[1].remove(Op(W, 2, 3)),
        errors.MissingOpError,
        r"rank 1: W of microbatch 3 on stage 2 is missing",
    ),
    "F twice": (
        put(0, 1, Op(F, 0, 0)),
        errors.DuplicateOpError,
        r"rank 0, op 1 \(F of microbatch 0 on stage 0\): is there a second time",
    ),
    "W before B": (
        swap(0, Op(W, 3, 0), Op(B, 3, 0)),
        errors.DependencyOrderError,
        r"rank 0, op \d+ \(W of microbatch 0 on stage 3\): comes before B of microbatch 0",
    ),
    "B before F": (
        swap(1, Op(B, 2, 0), Op(F, 2, 0)),
        errors.DependencyOrderError,
        r"rank 1, op \d+ \(B of microbatch 0 on stage 2\): comes before F of microbatch 0",
    ),
    "stage on a wrong rank": (
        set_op(1, Op(F, 1, 1), Op(F, 0, 1)),
        errors.WrongRankError,
        r"rank 1, op \d+ \(F of microbatch 1 on stage 0\): stage 0 is on rank 0",
    ),
    "unknown stage": (
        set_op(1, Op(F, 1, 1), Op(F, 4, 1)),
        errors.UnknownStageError,
        r"rank 1, op \d+ \(F of microbatch 1 on stage 4\): there are 4 stages",
    ),
    "microbatch out of range": (
        set_op(1, Op(F, 1, 1), Op(F, 1, 4)),
        errors.UnknownMicrobatchError,
        r"rank 1, op \d+ \(F of microbatch 4 on stage 1\): there are 4 microbatches",
    ),
    "unknown slice": (
        set_op(1, Op(F, 1, 1), Op(F, 1, 1, 1)),
        errors.UnknownMicrobatchError,
        r"rank 1, op \d+ \(F of microbatch 1 on stage 1, slice 1\): there are 1 slices",
    ),
    "extra row": (
        lambda rows: rows.append([]),
        errors.RowCountError,
        r"has 3 rows, its placement 2 ranks",
    ),
    "a row missing": (
        lambda rows: rows.pop(),
        errors.RowCountError,
        r"has 1 rows, its placement 2 ranks",
    ),
    "B missing": (
        lambda rows: rows[1].remove(Op(B, 2, 3)),
        errors.MissingOpError,
        r"rank 1: B of microbatch 3 on stage 2 is missing",
    ),
    "joint and split": (
        put(1, 24, Op(BW, 1, 2)),
        errors.MixedBackwardError,
        r"rank 1: BW of microbatch 2 on stage 1 and B of microbatch 2 on stage 1",
    ),
    "W out of order": (
        swap(0, Op(W, 0, 2), Op(W, 0, 3)),
        errors.DependencyOrderError,
        r"rank 0, op \d+ \(W of microbatch 3 on stage 0\)",
    ),
    "F out of order": (
        swap(0, Op(F, 0, 0), Op(F, 0, 1)),
        errors.MicrobatchOrderError,
        r"rank 0, op 1 \(F of microbatch 0 on stage 0\): comes after F of microbatch 1",
    ),
    "interleaved ops": (
        lambda rows: rows.__setitem__(
            slice(None), map(list, families.build("interleaved", 2, 4).orders)
        ),
        errors.WrongRankError,
        r"rank 0, op 2 \(F of microbatch 0 on stage 2\): stage 2 is on rank 1",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_refused(mutant):
    change, error, message = MUTANTS[mutant]
    schedule = mutate(families.build("zb-v", 2, 4), change)
    with pytest.raises(error) as caught:
        verify(schedule)
    text = str(caught.value)
    assert type(caught.value) is error
    assert re.search(message, text), text
    assert "\n" not in text


def test_w_and_bw_go_in_microbatch_order():
    late = tuple(
        sorted(families.build("zb-h1", 1, 3).orders[0], key=lambda op: (op.kind is W, op.kind is B))
    )
    reversed_weights = (*late[:6], *reversed(late[6:]))
    verify(Schedule("late W", linear(1), 3, (late,)))
    with pytest.raises(errors.MicrobatchOrderError, match="W of microbatch 1"):
        verify(Schedule("reversed W", linear(1), 3, (reversed_weights,)))
    gpipe = families.build("gpipe", 1, 2)
    with pytest.raises(errors.MicrobatchOrderError, match="BW of microbatch 0"):
        verify(mutate(gpipe, swap(0, Op(BW, 0, 0), Op(BW, 0, 1))))


def test_a_missing_joint_backward_is_called_so():
    schedule = families.build("1f1b", 2, 2)
    with pytest.raises(errors.MissingOpError, match="rank 1: BW of microbatch 1 on stage 1"):
        verify(mutate(schedule, lambda rows: rows[1].remove(Op(BW, 1, 1))))


def test_slices_ascend_forward_and_descend_backward():
    forwards = (Op(F, 0, 0, 0), Op(F, 0, 0, 1))
    backwards = (Op(BW, 0, 0, 1), Op(BW, 0, 0, 0))
    verify(Schedule("sliced", linear(1), 1, (forwards + backwards,), slices=2))
    with pytest.raises(errors.MicrobatchOrderError, match="BW of microbatch 0 on stage 0, slice 1"):
        verify(Schedule("sliced", linear(1), 1, (forwards + backwards[::-1],), slices=2))


def test_an_evaluation_needs_forwards_only():
    orders = ((Op(F, 0, 0),), (Op(F, 1, 0),))
    verify(Schedule("evaluation", linear(2), 1, orders))
    with pytest.raises(errors.MissingOpError, match="rank 1: F of microbatch 0 on stage 1"):
        verify(Schedule("evaluation", linear(2), 1, (orders[0], ())))


def test_ranks_that_wait_for_each_other():
    first = (Op(F, 0, 0), Op(BW, 0, 0), Op(F, 0, 1), Op(BW, 0, 1))
    second = (Op(F, 1, 0), Op(F, 1, 1), Op(BW, 1, 0), Op(BW, 1, 1))
    with pytest.raises(errors.DeadlockError, match=r"rank 0, op 1 \(BW of microbatch 0") as caught:
        verify(Schedule("by hand", linear(2), 2, (first, second)))
    assert caught.value.rank == 0
    assert caught.value.op == Op(BW, 0, 0)


def shared(_channel: Channel) -> int:
    return 0


def one_way(channel: Channel) -> tuple[int, int]:
    return channel.source, channel.destination


def test_receives_posted_ahead_deadlock_on_one_shared_queue():
    schedule = families.build("1f1b", 2, 2)
    verify(schedule, route=one_way)
    with pytest.raises(errors.DeadlockError) as caught:
        verify(schedule, route=shared)
    text = str(caught.value)
    for part in ("rank 0", "rank 1", "BW of microbatch 0 on stage 0", "F of microbatch 0 on stage"):
        assert part in text
    assert "their receive" in text


def test_two_boundaries_between_the_same_ranks_need_two_queues():
    schedule = families.build("zb-v", 2, 4)
    verify(schedule)
    with pytest.raises(errors.MispairingError, match=r"rank 0.*rank 1|rank 1.*rank 0"):
        verify(schedule, route=one_way)


FORWARD = Channel(0, F, 0, 1)
BACKWARD = Channel(0, B, 1, 0)


def fragment():
    """Both ranks send first, then receive: F of microbatch 1 against BW of microbatch 0."""
    f1, bw0 = Op(F, 0, 1), Op(BW, 1, 0)
    needs_bw0, needs_f1 = Op(BW, 0, 0), Op(F, 1, 1)
    return (
        Program(0, (Compute(f1), Send(FORWARD, f1), Post(BACKWARD, needs_bw0),
                    Wait(BACKWARD, needs_bw0), Compute(needs_bw0))),
        Program(1, (Compute(bw0), Send(BACKWARD, bw0), Post(FORWARD, needs_f1),
                    Wait(FORWARD, needs_f1), Compute(needs_f1))),
    )  # fmt: skip


def test_two_sends_deadlock_on_one_queue_but_not_on_two():
    verify_transfers(fragment())
    with pytest.raises(errors.DeadlockError) as caught:
        verify_transfers(fragment(), shared)
    text = str(caught.value)
    for part in ("rank 0", "rank 1", "their send", str(Op(F, 0, 1)), str(Op(BW, 1, 0))):
        assert part in text


def test_a_send_that_nobody_receives():
    first, second = fragment()
    with pytest.raises(errors.DeadlockError, match=r"rank 0: 'send .*0F1' never finds"):
        verify_transfers((first, replace(second, instructions=second.instructions[:2])))


def test_a_send_that_meets_another_receive():
    op = Op(F, 0, 1)
    needs = Op(F, 1, 0)
    programs = (
        Program(0, (Compute(op), Send(FORWARD, op))),
        Program(1, (Post(FORWARD, needs), Wait(FORWARD, needs), Compute(needs))),
    )
    with pytest.raises(errors.MispairingError, match=r"0F1.*1F0|1F0.*0F1"):
        verify_transfers(programs)


def test_memory_limit_names_rank_peak_limit_and_shortfall():
    schedule = families.build("zb-h1", 4, 8)
    costs = Costs.per_stage([(1, 1, 1)] * 4, memory_limit=(8, 8, 8, 3))
    with pytest.raises(errors.MemoryLimitError, match=r"rank 3 needs 4 of memory.* 3: 1 short"):
        verify(schedule, costs)
    verify(schedule, replace(costs, memory_limit=(4.0,) * 4))
    with pytest.raises(UserError, match="2 entries for 4 ranks"):
        verify(schedule, replace(costs, memory_limit=(4.0,) * 2))


def test_a_schedule_of_nothing_is_refused():
    with pytest.raises(errors.UnknownMicrobatchError, match="0 microbatches"):
        verify(Schedule("empty", linear(1), 0, ((),)))


def test_receives_that_block_the_compute_behind_them(monkeypatch):
    """A runtime that waits for a tensor one op too early is slower; the proof sees it."""

    def eager(schedule, window=4):
        programs = []
        for program in lower(schedule, window):
            steps = list(program.instructions)
            for i in [i for i, step in enumerate(steps) if isinstance(step, Wait)]:
                before = [j for j in range(i) if isinstance(steps[j], Compute)]
                if program.rank == 0 and before:
                    steps.insert(before[-1], steps.pop(i))
            programs.append(Program(program.rank, tuple(steps)))
        return tuple(programs)

    schedule = families.build("1f1b", 3, 6)
    verify(schedule)
    monkeypatch.setattr(verification, "lower", eager)
    with pytest.raises(errors.BlockingReceiveError, match=r"rank 0, op \d+ .*delays it from"):
        verify(schedule)


def test_the_proof_carries_programs_and_timeline():
    proof = verify(families.build("1f1b", 4, 8))
    assert [program.rank for program in proof.programs] == [0, 1, 2, 3]
    assert proof.timeline.makespan == 33
    assert proof.timeline.peak_memory == (4, 3, 2, 1)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(families.names()), st.integers(1, 5), st.integers(2, 6), st.data())
def test_a_lost_or_doubled_op_is_always_found(name, ranks, microbatches, data):
    schedule = families.build(name, ranks, microbatches)
    rank = data.draw(st.integers(0, ranks - 1))
    position = data.draw(st.integers(0, len(schedule.orders[rank]) - 1))
    op = schedule.orders[rank][position]
    with pytest.raises(errors.MissingOpError) as lost:
        verify(mutate(schedule, lambda rows: rows[rank].pop(position)))
    assert lost.value.rank == rank
    with pytest.raises(errors.DuplicateOpError) as doubled:
        verify(mutate(schedule, put(rank, position, op)))
    assert (doubled.value.rank, doubled.value.op) == (rank, op)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(families.names()), st.integers(1, 5), st.integers(1, 6), st.data())
def test_any_exchange_is_proved_or_refused(name, ranks, microbatches, data):
    """Whatever the order, verify ends: with a proof that both simulations share, or an error."""
    schedule = families.build(name, ranks, microbatches)
    rank = data.draw(st.integers(0, ranks - 1))
    places = st.integers(0, len(schedule.orders[rank]) - 1)
    one, other = data.draw(places), data.draw(places)

    def change(rows):
        rows[rank][one], rows[rank][other] = rows[rank][other], rows[rank][one]

    try:
        verify(mutate(schedule, change))
    except errors.ScheduleError as error:
        reason = str(error)
    else:
        return
    assert "rank" in reason
    assert "\n" not in reason
