"""One rank at a time as a single machine: earliest starts, least remainders, preemption allowed.

Each op of a rank gets a head (it cannot start earlier) and a tail (so much must follow it), from
the ways of its microbatch through the other ranks and from what memory forces: with room for K
microbatches of a stage, F of microbatch j comes after the B that releases j - K. Jackson's
preemptive schedule (Carlier, European Journal of Operational Research 11, 1982) is then the
earliest end of the rank, and no real schedule is earlier.
"""

from __future__ import annotations

import numpy as np

from zerobubble.planner.compiled import compiled
from zerobubble.planner.instance import TOLERANCE, Floats, Instance, Ints

F, B, W = range(3)


@compiled
def one_machine_bound(instance: Instance, gradient: Floats, weight: Floats) -> float:
    """The greatest over the ranks of the least makespan, or span where the instance says so.

    `gradient` (S,): the least time of a B, split or joint. `weight` (S,): what a backward takes
    beyond that at least.
    """
    stages, m = len(instance.rank_of), instance.microbatches
    heads = np.zeros((3, stages, m))
    tails = np.zeros((3, stages, m))
    window = _window(instance)
    bound = 0.0
    if not instance.span:
        _heads(instance, gradient, weight, window, 0, heads)
        _tails(instance, gradient, weight, window, 0, -1, tails)
    for r in range(instance.ranks):
        if instance.span:
            first = instance.stages_of[r, 0]
            _heads(instance, gradient, weight, window, first, heads)
            _tails(instance, gradient, weight, window, first, r, tails)
        bound = max(bound, _preemptive(instance, gradient, weight, heads, tails, r))
    return bound


@compiled
def _window(instance: Instance) -> Ints:
    """Per stage, how many microbatches may be between its F and its release at once.

    Whoever is past F of a stage is past F of the rank's stages before it, and leaves them later.
    """
    stages = len(instance.rank_of)
    window = np.full(stages, instance.microbatches)
    for r in range(instance.ranks):
        size = 0.0
        for c in range(instance.chunks):
            s = instance.stages_of[r, c]
            size += instance.activation[s]
            if size > 0:
                most = np.floor(instance.limit[r] / size + TOLERANCE)
                if most < window[s]:
                    window[s] = max(1, int(most))
    return window


@compiled
def _sums(instance: Instance, row: Floats, first: int) -> tuple[Floats, Floats]:
    """Per stage, the sum of `row` over its rank's stages before it, and over those after it.

    Only stages from `first` on count.
    """
    stages = len(instance.rank_of)
    before, after = np.zeros(stages), np.zeros(stages)
    for s in range(first, stages):
        for t in range(first, stages):
            if instance.rank_of[s] == instance.rank_of[t]:
                if t < s:
                    before[s] += row[t]
                elif t > s:
                    after[s] += row[t]
    return before, after


@compiled
def _heads(
    instance: Instance, gradient: Floats, weight: Floats, window: Ints, first: int, heads: Floats
) -> None:
    """Write the earliest starts (3, S, m), those of stage `first` from 0 on.

    An op comes after its inputs and, on its own rank, after everything that must precede it.
    """
    stages, m = len(instance.rank_of), instance.microbatches
    times, latency = instance.times, instance.latency
    forward = times[F]
    f_before, f_after = _sums(instance, forward, first)
    _, g_after = _sums(instance, gradient, first)
    begin = np.full(instance.ranks, np.inf)  # of the rank's first op
    for j in range(m):
        for s in range(first, stages):
            at = 0.0
            if s > first:
                at = heads[F, s - 1, j] + forward[s - 1] + latency[s - 1]
            begin[instance.rank_of[s]] = min(begin[instance.rank_of[s]], at)
            if j > 0:
                at = max(at, heads[F, s, j - 1] + forward[s])
            k = j - window[s]
            work = (j + 1) * f_before[s] + j * forward[s]
            if k >= 0:
                work += (k + 1) * (gradient[s] + g_after[s])
                if instance.released[s] > 0:
                    at = max(at, heads[B, s, k] + gradient[s])
                else:
                    at = max(at, heads[W, s, k] + weight[s])
                    work += (k + 1) * weight[s]
            heads[F, s, j] = max(at, begin[instance.rank_of[s]] + work)
        for s in range(stages - 1, first - 1, -1):
            at = heads[F, s, j] + forward[s]
            if s + 1 < stages:
                at = max(at, heads[B, s + 1, j] + gradient[s + 1] + latency[s])
            if j > 0:
                at = max(at, heads[B, s, j - 1] + gradient[s])
            work = (j + 1) * (f_before[s] + forward[s] + f_after[s] + g_after[s])
            work += j * gradient[s]
            at = max(at, begin[instance.rank_of[s]] + work)
            heads[B, s, j] = at
            at += gradient[s]
            if j > 0:
                at = max(at, heads[W, s, j - 1] + weight[s])
            heads[W, s, j] = at


@compiled
def _tails(
    instance: Instance,
    gradient: Floats,
    weight: Floats,
    window: Ints,
    first: int,
    rank: int,
    tails: Floats,
) -> None:
    """Write the least times (3, S, m) from an op's end to the end of all, or of one rank.

    Of a rank, whose first stage is `first`: a W of another rank is then followed by nothing. On an
    op's own rank everything that must follow it does.
    """
    stages, m = len(instance.rank_of), instance.microbatches
    times, latency = instance.times, instance.latency
    forward = times[F]
    counted = weight.copy()  # the W that must end
    for s in range(stages):
        if rank >= 0 and instance.rank_of[s] != rank:
            counted[s] = 0.0
    _, f_after = _sums(instance, forward, first)
    g_before, g_after = _sums(instance, gradient, first)
    w_before, w_after = _sums(instance, counted, first)
    for j in range(m - 1, -1, -1):
        left = m - j  # microbatches from j on
        for s in range(first, stages):
            after = 0.0 if rank < 0 or instance.rank_of[s] == rank else -np.inf
            if j + 1 < m:
                after = max(after, weight[s] + tails[W, s, j + 1])
            k = j + window[s]
            if k < m and instance.released[s] <= 0:
                after = max(after, forward[s] + tails[F, s, k])
            tails[W, s, j] = after
            after += weight[s]
            if s > first:
                after = max(after, latency[s - 1] + gradient[s - 1] + tails[B, s - 1, j])
            if j + 1 < m:
                after = max(after, gradient[s] + tails[B, s, j + 1])
            work = left * (counted[s] + g_before[s] + w_before[s]) + (left - 1) * gradient[s]
            if k < m:
                work += (m - k) * (forward[s] + f_after[s])
                if instance.released[s] > 0:
                    after = max(after, forward[s] + tails[F, s, k])
            tails[B, s, j] = max(after, work)
        for s in range(stages - 1, first - 1, -1):
            after = gradient[s] + tails[B, s, j]
            if s + 1 < stages:
                after = max(after, latency[s] + forward[s + 1] + tails[F, s + 1, j])
            if j + 1 < m:
                after = max(after, forward[s] + tails[F, s, j + 1])
            both = g_before[s] + gradient[s] + g_after[s] + w_before[s] + counted[s] + w_after[s]
            work = left * (f_after[s] + both) + (left - 1) * forward[s]
            tails[F, s, j] = max(after, work)


@compiled
def _preemptive(
    instance: Instance, gradient: Floats, weight: Floats, heads: Floats, tails: Floats, r: int
) -> float:
    """The end of Jackson's preemptive schedule: of what can run, that with the longest tail."""
    m = instance.microbatches
    count = 3 * instance.chunks * m
    head, time, tail = np.empty(count), np.empty(count), np.empty(count)
    n = 0
    for c in range(instance.chunks):
        s = instance.stages_of[r, c]
        for k in range(3):
            p = instance.times[F, s] if k == F else gradient[s] if k == B else weight[s]
            for j in range(m):
                head[n], time[n], tail[n] = heads[k, s, j], p, tails[k, s, j]
                n += 1
    order = np.argsort(head)
    heap = np.empty(count, np.int64)  # by tail, the longest first
    size = 0
    bound = now = 0.0
    at = 0
    while at < count or size > 0:
        if size == 0:
            now = max(now, head[order[at]])
        while at < count and head[order[at]] <= now:
            i = size
            size += 1
            new = order[at]
            at += 1
            while i > 0 and tail[heap[(i - 1) // 2]] < tail[new]:
                heap[i] = heap[(i - 1) // 2]
                i = (i - 1) // 2
            heap[i] = new
        top = heap[0]
        until = now + time[top]
        if at < count and head[order[at]] < until:
            time[top] -= head[order[at]] - now
            now = head[order[at]]
            continue
        now = until
        bound = max(bound, now + tail[top])
        size -= 1
        last = heap[size]
        i = 0
        while True:
            child = 2 * i + 1
            if child >= size:
                break
            if child + 1 < size and tail[heap[child + 1]] > tail[heap[child]]:
                child += 1
            if tail[heap[child]] <= tail[last]:
                break
            heap[i] = heap[child]
            i = child
        heap[i] = last
    return bound
