"""Compiled loops: list scheduling by priorities, and the exact simulation of given orders.

Both are numba functions that hold no lock, so that threads can search side by side.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zerobubble.planner.compiled import compiled
from zerobubble.planner.instance import TOLERANCE, Flags, Floats, Instance, Ints

F, B, W, BW = 0, 1, 2, 3

PATIENCE, PATIENCE_W, DISORDER, CAPS = 0, 1, 2, 3
"""Places in a rule. PATIENCE: an F or B is put off for a more urgent op that comes within this
share of its time; PATIENCE_W: the same for a W. DISORDER: how much less urgent than an op whose
input is not yet on its way an F or B may be, in periods. CAPS: then per chunk how many microbatches
may be between their F and their B on rank 0, and then the same on the last rank."""


class Workspace(NamedTuple):
    """What a search writes: one per thread."""

    orders: Ints
    """(p, 3 C m): op numbers, see `instance.to_ops`."""
    lengths: Ints
    """(p,): how many of each row are used."""
    starts: Floats
    """(3, S, m): when F, B and W start; a BW counts as B."""
    whole: Flags
    """(S, m): backwards that run as one BW."""


class Value(NamedTuple):
    """What orders come to."""

    makespan: float
    longest_span: float
    tie: float
    """Decides between equals: the mean over ranks of their ends (or spans)."""


def make_workspace(instance: Instance) -> Workspace:
    """Room for one schedule of the instance."""
    stages, microbatches = instance.stages, instance.microbatches
    return Workspace(
        orders=np.zeros((instance.ranks, 3 * instance.chunks * microbatches), dtype=np.int64),
        lengths=np.zeros(instance.ranks, dtype=np.int64),
        starts=np.zeros((3, stages, microbatches)),
        whole=np.zeros((stages, microbatches), dtype=np.bool_),
    )


@compiled
def list_schedule(instance: Instance, keys: Floats, rule: Floats, workspace: Workspace) -> Value:
    """The schedule that priorities lead to: every rank runs the smallest of `keys` (3, S, m).

    Ranks decide in the order of time. An F leaves room for one F of each deeper stage of its
    rank, unless memory that the rank can free by itself makes up for it: so the oldest
    unfinished microbatch always finds room, and nothing gets stuck for want of memory. A W whose
    memory a waiting F needs takes over that F's urgency. `workspace.whole` says which backwards
    are one BW; the rest of it is written. Infinite where the rule's DISORDER got it stuck.
    """
    ranks, chunks, m = instance.ranks, instance.chunks, instance.microbatches
    rank_of, times = instance.rank_of, instance.times
    activation, released = instance.activation, instance.released
    stages = len(rank_of)
    orders, lengths, starts, whole = workspace
    patience, patience_w = rule[PATIENCE], rule[PATIENCE_W]
    disorder = rule[DISORDER] * instance.period
    tiny = TOLERANCE * instance.period
    # When the inputs and gradients of the next microbatches are there, and how many are known.
    ready = np.empty((2, stages, m))
    known = np.zeros((2, stages), np.int64)
    done = np.zeros((3, stages), np.int64)
    ready[F, 0, :] = 0.0
    known[F, 0] = m
    live = np.zeros(ranks)
    freeable = np.zeros(ranks)
    clock = np.zeros(ranks)
    first = np.full(ranks, -1.0)
    # When each rank has something to decide.
    event = np.full(ranks, np.inf)
    event[rank_of[0]] = 0.0
    lengths[:] = 0
    finished = 0
    while True:
        r = 0
        now = event[0]
        for q in range(1, ranks):
            if event[q] < now:
                now = event[q]
                r = q
        if now == np.inf:
            break
        best = np.inf  # of what can start now
        stage = -1
        kind = F
        coming = np.inf  # of what is known to become ready, and when
        coming_at = np.inf
        soonest = np.inf
        unknown = np.inf  # of what is not on its way yet
        cramped = np.inf  # of an F that only lacks memory
        weight = np.inf
        weight_stage = -1
        for c in range(chunks):
            s = instance.stages_of[r, c]
            j = done[F, s]
            if j < m:
                if j >= known[F, s]:
                    unknown = min(unknown, keys[F, s, j])
                else:
                    cap = rule[CAPS + c]
                    if ranks > 1:
                        cap += (rule[CAPS + chunks + c] - cap) * r / (ranks - 1)
                    after = live[r] + activation[s]
                    room = after <= instance.limit[r] and (
                        after + instance.reserve[s] - freeable[r] <= instance.limit[r]
                    )
                    at = ready[F, s, j]
                    key = keys[F, s, j]
                    if not room:
                        if at <= now + tiny:
                            cramped = min(cramped, key)
                    elif j - done[B, s] < max(1.0, cap):
                        if at <= now + tiny:
                            if key < best:
                                best, stage, kind = key, s, F
                        else:
                            soonest = min(soonest, at)
                            if key < coming:
                                coming, coming_at = key, at
            j = done[B, s]
            if j < m:
                if j >= known[B, s] or j >= done[F, s]:
                    unknown = min(unknown, keys[B, s, j])
                else:
                    at = ready[B, s, j]
                    key = keys[B, s, j]
                    if at <= now + tiny:
                        if key < best:
                            best, stage, kind = key, s, B
                    else:
                        soonest = min(soonest, at)
                        if key < coming:
                            coming, coming_at = key, at
            j = done[W, s]
            while j < done[B, s] and whole[s, j]:
                j += 1
            done[W, s] = j
            if j < done[B, s] and keys[W, s, j] < weight:
                weight, weight_stage = keys[W, s, j], s
        if weight_stage >= 0 and min(weight, cramped) < best:
            best, stage, kind = min(weight, cramped), weight_stage, W
        if stage < 0:
            event[r] = soonest
            continue
        run = BW if kind == B and whole[stage, done[B, stage]] else kind
        if run == BW and done[W, stage] < done[B, stage]:
            kind = run = W  # an earlier microbatch's gradient is to be added first
        time = times[run, stage]
        if coming < best:
            share = patience_w if kind == W else patience
            if coming_at - now < share * time - tiny:
                event[r] = coming_at
                continue
        if kind != W and best - unknown > disorder:
            # Hold it back, unless a W fits meanwhile.
            if weight_stage < 0 or (soonest - now < patience_w * times[W, weight_stage] - tiny):
                event[r] = soonest
                continue
            stage, kind, run = weight_stage, W, W
            time = times[W, stage]
        j = done[kind, stage]
        end = now + time
        if first[r] < 0:
            first[r] = now
        clock[r] = end
        event[r] = end
        orders[r, lengths[r]] = (run * stages + stage) * m + j
        lengths[r] += 1
        finished += 1
        starts[kind, stage, j] = now
        done[kind, stage] = j + 1
        to = -1
        if kind == F:
            live[r] += activation[stage]
            if stage + 1 < stages:
                to = stage + 1
                ready[F, to, j] = end + instance.latency[stage]
                known[F, to] = j + 1
            else:
                ready[B, stage, j] = end
                known[B, stage] = j + 1
                freeable[r] += activation[stage]
        elif kind == B:
            frees = activation[stage]
            if run == BW:
                finished += 1
            else:
                frees = released[stage]
            live[r] -= frees
            freeable[r] -= frees
            if stage > 0:
                to = stage - 1
                ready[B, to, j] = end + instance.latency[to]
                known[B, to] = j + 1
                freeable[rank_of[to]] += activation[to]
        else:
            frees = activation[stage] - released[stage]
            live[r] -= frees
            freeable[r] -= frees
        if to >= 0:
            q = rank_of[to]
            at = max(ready[F if kind == F else B, to, j], clock[q])
            event[q] = min(event[q], at)
    if finished < 3 * stages * m:
        return Value(np.inf, np.inf, np.inf)
    makespan = longest = tie = 0.0
    for r in range(ranks):
        makespan = max(makespan, clock[r])
        longest = max(longest, clock[r] - first[r])
        tie += clock[r] - (first[r] if instance.span else 0.0)
    return Value(makespan, longest, tie / ranks)


@compiled
def simulate_orders(instance: Instance, orders: Ints, lengths: Ints, starts: Floats) -> Value:
    """The exact value of given orders (see `instance.to_numbers`); fills `starts` (3, S, m).

    Infinite where they deadlock. Receives are free: only the op that needs a tensor waits.
    """
    ranks, m = instance.ranks, instance.microbatches
    rank_of, times = instance.rank_of, instance.times
    stages = len(rank_of)
    ends = np.full((2, stages, m), np.inf)
    position = np.zeros(ranks, np.int64)
    clock = np.zeros(ranks)
    first = np.full(ranks, -1.0)
    todo = np.arange(ranks)
    queued = np.ones(ranks, np.bool_)
    count = ranks
    left = lengths.sum()
    while count > 0:
        count -= 1
        r = todo[count]
        queued[r] = False
        while position[r] < lengths[r]:
            code = orders[r, position[r]]
            j = code % m
            s = (code // m) % stages
            run = code // m // stages
            at = clock[r]
            if run == F:
                if s > 0:
                    at = max(at, ends[F, s - 1, j] + instance.latency[s - 1])
            elif run == W:
                at = max(at, ends[B, s, j])
            else:
                at = max(at, ends[F, s, j])
                if s + 1 < stages:
                    at = max(at, ends[B, s + 1, j] + instance.latency[s])
            if at == np.inf:
                break
            kind = B if run == BW else run
            starts[kind, s, j] = at
            if first[r] < 0:
                first[r] = at
            clock[r] = at + times[run, s]
            position[r] += 1
            left -= 1
            if kind != W:
                ends[kind, s, j] = clock[r]
                to = s + 1 if kind == F else s - 1
                if 0 <= to < stages:
                    q = rank_of[to]
                    if q != r and not queued[q]:
                        queued[q] = True
                        todo[count] = q
                        count += 1
    if left > 0:
        return Value(np.inf, np.inf, np.inf)
    makespan = longest = tie = 0.0
    for r in range(ranks):
        makespan = max(makespan, clock[r])
        longest = max(longest, clock[r] - max(0.0, first[r]))
        tie += clock[r] - (max(0.0, first[r]) if instance.span else 0.0)
    return Value(makespan, longest, tie / ranks)


@compiled
def peak_memory(instance: Instance, orders: Ints, lengths: Ints) -> Floats:
    """Per rank the most activations held at once, without fixed memory."""
    m, stages = instance.microbatches, len(instance.rank_of)
    peaks = np.zeros(instance.ranks)
    for r in range(instance.ranks):
        live = 0.0
        for i in range(lengths[r]):
            code = orders[r, i]
            s = (code // m) % stages
            run = code // m // stages
            if run == F:
                live += instance.activation[s]
            elif run == W:
                live -= instance.activation[s] - instance.released[s]
            elif run == B:
                live -= instance.released[s]
            else:
                live -= instance.activation[s]
            peaks[r] = max(peaks[r], live)
    return peaks
