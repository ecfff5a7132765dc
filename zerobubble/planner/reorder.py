"""Reordering: single ops moved along the critical path, under a falling temperature.

The orders of the ranks are changed themselves, and simulated exactly: so a rank may wait where a
list scheduler would not. Only moves on the critical path can shorten a schedule (van Laarhoven et
al., Operations Research 40, 1992, for job shops); memory and the order of microbatches are checked
on the one rank that changes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zerobubble.planner.compiled import compiled
from zerobubble.planner.instance import Floats, Instance, Ints
from zerobubble.planner.kernels import BW, B, F, W


class Tables(NamedTuple):
    """What moves need to know of an op, by its number. A BW's result is that of its B."""

    time: Floats
    result: Ints
    """The number under which its end is kept."""
    before: Ints
    """The result, of another stage, that it needs; -1 for none."""
    latency: Floats
    """From that result until the input is there."""
    rank: Ints
    to_rank: Ints
    """The rank that needs its result; -1 for none."""
    lane: Ints
    """Ops of one lane (a kind on a stage) keep the order of microbatches; a BW is in B's."""
    change: Floats
    """Of the rank's memory: what F adds as it starts, what B, W and BW release as they end."""


class Room(NamedTuple):
    """What moves write: one per thread. Rows (p, n) are of the ops in their places."""

    starts: Floats
    old: Floats
    """(p, n): the starts before the last simulation, where it went."""
    ends: Floats
    """By result."""
    place: Ints
    """By result: where in its rank's order the op is."""
    held: Floats
    """(p, n): the rank's memory before the op."""
    left: Floats
    """(p, n): the rank's work from the op on."""
    first: Ints
    """(p,): where the last simulation began."""
    at: Ints
    """(p,): and how far it came."""
    pairs: Ints
    """(p n, 2): ranks and places where the critical path goes from one op to the next."""


def make_tables(instance: Instance) -> Tables:
    """The tables of an instance, 4 S m long."""
    stages, m = instance.stages, instance.microbatches
    each = stages * m
    number = np.arange(4 * each)
    kind, stage = number // each, number // m % stages
    result = np.where(kind == BW, number - (BW - B) * each, number)
    forward, backward = kind == F, (kind == B) | (kind == BW)
    before = np.full(4 * each, -1)
    to_rank = np.full(4 * each, -1)
    latency = np.zeros(4 * each)
    inner = forward & (stage > 0)
    before[inner] = number[inner] - m
    latency[inner] = instance.latency[stage[inner] - 1]
    inner = backward & (stage < stages - 1)
    before[inner] = result[inner] + m
    latency[inner] = instance.latency[stage[inner]]
    inner = forward & (stage < stages - 1)
    to_rank[inner] = instance.rank_of[stage[inner] + 1]
    inner = backward & (stage > 0)
    to_rank[inner] = instance.rank_of[stage[inner] - 1]
    held, released = instance.activation[stage], instance.released[stage]
    return Tables(
        time=instance.times[kind, stage],
        result=result,
        before=before,
        latency=latency,
        rank=instance.rank_of[stage],
        to_rank=to_rank,
        lane=np.where(kind == BW, B, kind) * stages + stage,
        change=np.select(
            [forward, kind == B, kind == W], [held, -released, released - held], -held
        ),
    )


def make_room(instance: Instance) -> Room:
    """Room for one schedule of the instance."""
    width = 3 * instance.chunks * instance.microbatches
    results = 3 * instance.stages * instance.microbatches
    return Room(
        starts=np.zeros((instance.ranks, width)),
        old=np.zeros((instance.ranks, width)),
        ends=np.zeros(results),
        place=np.zeros(results, dtype=np.int64),
        held=np.zeros((instance.ranks, width)),
        left=np.zeros((instance.ranks, width)),
        first=np.zeros(instance.ranks, dtype=np.int64),
        at=np.zeros(instance.ranks, dtype=np.int64),
        pairs=np.zeros((instance.ranks * width, 2), dtype=np.int64),
    )


@compiled
def _simulate(
    instance: Instance,
    tables: Tables,
    orders: Ints,
    lengths: Ints,
    room: Room,
    since: float,
    most_allowed: float,
) -> float:
    """The worth of the orders (see `patterns.worth`), where nothing before `since` has changed.

    Infinite where they deadlock, and as soon as the objective is sure to pass `most_allowed`.
    """
    ranks = instance.ranks
    starts, ends, first, at = room.starts, room.ends, room.first, room.at
    clock = np.zeros(ranks)
    work = np.zeros(ranks)
    todo = np.empty(ranks, np.int64)
    waits = np.full(ranks, -1)  # the result that a rank waits for
    count = 0
    for r in range(ranks):
        i = np.searchsorted(starts[r, : lengths[r]], since)
        first[r] = at[r] = i
        if i > 0:
            clock[r] = starts[r, i - 1] + tables.time[orders[r, i - 1]]
        if i < lengths[r]:
            work[r] = room.left[r, i]
            todo[count] = r
            count += 1
    while count > 0:
        count -= 1
        r = todo[count]
        now = clock[r]
        i = at[r]
        begun = starts[r, 0] if instance.span and i > 0 else 0.0
        while i < lengths[r]:
            op = orders[r, i]
            before = tables.before[op]
            if before >= 0:
                if room.place[before] >= at[tables.rank[before]] and (
                    tables.rank[before] != r or room.place[before] >= i
                ):
                    waits[r] = before
                    break
                now = max(now, ends[before] + tables.latency[op])
            if i == 0 and instance.span:
                begun = now
            if now + work[r] - begun > most_allowed:
                at[r] = i
                return np.inf
            room.old[r, i] = starts[r, i]
            starts[r, i] = now
            now += tables.time[op]
            work[r] -= tables.time[op]
            result = tables.result[op]
            ends[result] = now
            i += 1
            q = tables.to_rank[op]
            if q >= 0 and waits[q] == result:
                waits[q] = -1
                todo[count] = q
                count += 1
                at[r] = i
        at[r] = i
        clock[r] = now
    most = tie = 0.0
    for r in range(ranks):
        if at[r] < lengths[r]:
            return np.inf
        cost = clock[r]
        if instance.span and lengths[r] > 0:
            cost -= starts[r, 0]
        most = max(most, cost)
        tie += cost
    return most + 1e-3 * tie / ranks


@compiled
def _restore(tables: Tables, orders: Ints, room: Room) -> None:
    """Undo what the last simulation wrote; the orders are as before it."""
    for r in range(len(room.at)):
        for i in range(room.first[r], room.at[r]):
            op = orders[r, i]
            room.starts[r, i] = room.old[r, i]
            room.ends[tables.result[op]] = room.old[r, i] + tables.time[op]


@compiled
def _trace(instance: Instance, tables: Tables, orders: Ints, lengths: Ints, room: Room) -> int:
    """Write the places of one critical path, those where a rank goes on without a pause."""
    ranks = instance.ranks
    starts, ends, pairs = room.starts, room.ends, room.pairs
    tiny = 1e-9 * instance.period
    most = -1.0
    r = 0
    for offset in range(ranks):
        q = (offset + np.random.randint(ranks)) % ranks
        if lengths[q] == 0:
            continue
        last = lengths[q] - 1
        cost = starts[q, last] + tables.time[orders[q, last]]
        if instance.span:
            cost -= starts[q, 0]
        if cost > most + tiny:
            most = cost
            r = q
    i = lengths[r] - 1
    count = 0
    while i >= 0 and count < len(pairs):
        op = orders[r, i]
        start = starts[r, i]
        before = tables.before[op]
        by_input = before >= 0 and ends[before] + tables.latency[op] >= start - tiny
        by_rank = i > 0 and (starts[r, i - 1] + tables.time[orders[r, i - 1]] >= start - tiny)
        if by_rank and (not by_input or np.random.random() < 0.5):
            pairs[count, 0] = r
            pairs[count, 1] = i
            count += 1
            i -= 1
        elif by_input:
            r = tables.rank[before]
            i = room.place[before]
        else:
            break
    return count


@compiled
def _may_pass(instance: Instance, tables: Tables, a: int, b: int) -> bool:
    """Whether two ops of a rank may change places, as far as they alone say."""
    each = len(instance.rank_of) * instance.microbatches
    if tables.lane[a] == tables.lane[b] or a % each == b % each:
        return False
    if tables.before[a] == tables.result[b] or tables.before[b] == tables.result[a]:
        return False
    kinds = a // each, b // each
    mixed = (kinds[0] == W and kinds[1] == BW) or (kinds[0] == BW and kinds[1] == W)
    return not (
        mixed
        and a // instance.microbatches % len(instance.rank_of)
        == b // instance.microbatches % len(instance.rank_of)
    )


@compiled
def _survey(tables: Tables, orders: Ints, lengths: Ints, room: Room, r: int) -> None:
    """Write a rank's places, memory and work left."""
    live = 0.0
    for i in range(lengths[r]):
        room.place[tables.result[orders[r, i]]] = i
        room.held[r, i] = live
        live += tables.change[orders[r, i]]
    work = 0.0
    for i in range(lengths[r] - 1, -1, -1):
        work += tables.time[orders[r, i]]
        room.left[r, i] = work


@compiled
def _move(
    instance: Instance, tables: Tables, orders: Ints, room: Room, r: int, source: int, to: int
) -> bool:
    """Move an op of a rank to another place, if the ops between and the memory let it."""
    op = orders[r, source]
    step = 1 if to > source else -1
    for i in range(source + step, to + step, step):
        if not _may_pass(instance, tables, op, orders[r, i]):
            return False
    for i in range(source, to, step):
        orders[r, i] = orders[r, i + step]
    orders[r, to] = op
    low, high = min(source, to), max(source, to)
    live = room.held[r, low]
    for i in range(low, high + 1):
        change = tables.change[orders[r, i]]
        live += change
        if change > 0 and live > instance.limit[r]:
            _put_back(tables, orders, room, r, source, to)
            return False
    for i in range(low, high + 1):
        room.place[tables.result[orders[r, i]]] = i
    return True


@compiled
def _put_back(tables: Tables, orders: Ints, room: Room, r: int, source: int, to: int) -> None:
    """Undo a move."""
    op = orders[r, to]
    step = 1 if to > source else -1
    for i in range(to, source, -step):
        orders[r, i] = orders[r, i - step]
    orders[r, source] = op
    for i in range(min(source, to), max(source, to) + 1):
        room.place[tables.result[orders[r, i]]] = i


@compiled
def reorder(
    instance: Instance,
    seed: int,
    tries: int,
    temperature: float,
    least: float,
    tables: Tables,
    orders: Ints,
    lengths: Ints,
    room: Room,
    best: Ints,
) -> float:
    """Change `orders` by `tries` moves; `best`, worth `least`, keeps the best seen.

    A worse schedule is kept with the probability of simulated annealing. Returns best's worth.
    `temperature` is in the unit of time.
    """
    np.random.seed(seed)
    for r in range(instance.ranks):
        _survey(tables, orders, lengths, room, r)
    current = _simulate(instance, tables, orders, lengths, room, -1.0, np.inf)
    if current == np.inf:
        return least  # not a schedule: nothing to trace
    count = _trace(instance, tables, orders, lengths, room)
    if current < least:
        least = current
        best[:] = orders
    for _ in range(tries):
        if count == 0:
            break
        pick = np.random.randint(count)
        r, i = room.pairs[pick, 0], room.pairs[pick, 1]
        reach = 1
        while reach < 8 and np.random.random() < 0.5:
            reach += 1
        if np.random.random() < 0.5:
            source, to = i, max(0, i - reach)
        else:
            source, to = i - 1, min(lengths[r] - 1, i - 1 + reach)
        if not _move(instance, tables, orders, room, r, source, to):
            continue
        allowed = current - temperature * np.log(1 - np.random.random())
        since = room.starts[r, min(source, to)]
        found = _simulate(instance, tables, orders, lengths, room, since, allowed)
        if found <= allowed:
            current = found
            _survey(tables, orders, lengths, room, r)
            count = _trace(instance, tables, orders, lengths, room)
            if current < least:
                least = current
                best[:] = orders
        else:
            _put_back(tables, orders, room, r, source, to)
            _restore(tables, orders, room)
    return least
