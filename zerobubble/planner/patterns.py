"""Patterns: a few numbers that describe one microbatch's way through the stages, as priorities.

In the steady state every published schedule repeats one building block per microbatch, shifted by
a period (Qi et al., arXiv 2405.15362): how long F and B rest at each hop, at each turn from one
chunk to the next and in the middle, and how late W follows. A pattern holds those numbers. They
become priorities (`keys_of`), not times: `kernels.list_schedule` keeps their order where it can
and fills every gap that it finds, so a pattern need not fit exactly, nor be periodic at the ends.
The search over patterns is by random draws and hill climbing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zerobubble.planner.compiled import compiled
from zerobubble.planner.instance import Flags, Floats, Instance
from zerobubble.planner.kernels import (
    CAPS,
    DISORDER,
    PATIENCE,
    PATIENCE_W,
    B,
    F,
    Value,
    W,
    Workspace,
    list_schedule,
)

HOP_F, TURN_F, HOP_B, TURN_B, DELAY_W, SLOPE_W, CAP_FIRST, CAP_LAST = range(8)
"""Columns per chunk. Rests at hops within the chunk, and at the turn into it (F) or out of it (B);
W's delay after its B on rank 0, and how that grows per rank; caps as in `kernels.CAPS`."""

(
    MIDDLE,
    PERIOD,
    LONGER_F,
    LONGER_W,
    BE_PATIENT,
    BE_PATIENT_W,
    BE_DISORDERLY,
    SPLIT_FIRST,
    SPLIT_LAST,
    SPLIT_SLOPE,
) = range(10)
"""Places of what all chunks share. The rest before the first B; the period, in periods of the
busiest rank, and what F and W take longer: fewer microbatches are then in flight, and more W left
over, as time goes by; the rule's first three numbers; which backwards are split where splitting
costs: the first so many microbatches, and the last so many, more by SPLIT_SLOPE per rank."""

FREE = 1e6
"""A cap or a disorder that never binds."""


class Pattern(NamedTuple):
    """Rests and delays in units of `Instance.unit`."""

    chunks: Floats
    """(C, 8)"""
    shared: Floats
    """(10,)"""


def make_pattern(instance: Instance) -> Pattern:
    """No rests at all: every op as early as possible, every W as a filler of gaps."""
    pattern = Pattern(np.zeros((instance.chunks, 8)), np.zeros(10))
    pattern.chunks[:, CAP_FIRST:] = FREE
    pattern.shared[PERIOD] = 1.0
    pattern.shared[BE_DISORDERLY] = FREE
    return pattern


@compiled
def keys_of(instance: Instance, pattern: Pattern, keys: Floats, rule: Floats, whole: Flags) -> None:
    """Write the pattern's priorities (3, S, m), its rule and its joint backwards (S, m)."""
    chunks, shared = pattern
    p, m, unit = instance.ranks, instance.microbatches, instance.unit
    stages = len(instance.rank_of)
    times, latency = instance.times, instance.latency
    offset = np.empty((3, stages))
    at = 0.0
    for s in range(stages):
        offset[F, s] = at
        at += times[F, s] + latency[s]
        c = s // p
        if (s + 1) % p:
            at += chunks[c, HOP_F] * unit
        elif s + 1 < stages:
            at += chunks[c + 1, TURN_F] * unit
    at += shared[MIDDLE] * unit
    for s in range(stages - 1, -1, -1):
        offset[B, s] = at
        at += times[B, s]
        c = s // p
        offset[W, s] = at + unit * (chunks[c, DELAY_W] + chunks[c, SLOPE_W] * instance.rank_of[s])
        if s:
            at += latency[s - 1]
        at += unit * (chunks[c, HOP_B] if s % p else chunks[c, TURN_B])
    for k in range(3):
        period = shared[PERIOD]
        if k == F:
            period += shared[LONGER_F]
        elif k == W:
            period += shared[LONGER_W]
        period *= instance.period
        for s in range(stages):
            for j in range(m):
                keys[k, s, j] = offset[k, s] + period * j
    rule[PATIENCE] = shared[BE_PATIENT]
    rule[PATIENCE_W] = shared[BE_PATIENT_W]
    rule[DISORDER] = shared[BE_DISORDERLY]
    for c in range(instance.chunks):
        rule[CAPS + c] = chunks[c, CAP_FIRST]
        rule[CAPS + instance.chunks + c] = chunks[c, CAP_LAST]
    for s in range(stages):
        costs = times[B, s] + times[W, s] > times[3, s] * (1 + 1e-12)
        last = shared[SPLIT_LAST] + shared[SPLIT_SLOPE] * instance.rank_of[s]
        for j in range(m):
            split = j < shared[SPLIT_FIRST] or j >= m - last
            whole[s, j] = instance.joint[s] or (costs and not split)


@compiled
def worth(instance: Instance, value: Value) -> float:
    """The objective, with the tie-breaker as a small part of it."""
    return (value.longest_span if instance.span else value.makespan) + 1e-3 * value.tie


@compiled
def _most_held(instance: Instance, chunk: int) -> float:
    """About how many microbatches of the chunk could be held at once."""
    most = 3.0 * instance.ranks
    for r in range(instance.ranks):
        s = instance.stages_of[r, chunk]
        if instance.activation[s] > 0:
            most = min(most, instance.limit[r] / instance.activation[s] + 2)
    return most


@compiled
def draw(instance: Instance, pattern: Pattern) -> None:
    """Write a random pattern."""
    chunks, shared = pattern
    chunks[:] = 0.0
    shared[:] = 0.0
    for c in range(instance.chunks):
        for column in (HOP_F, HOP_B):
            if np.random.random() < 0.5:
                chunks[c, column] = np.random.exponential(1.0)
        for column in (TURN_F, TURN_B):
            if c and np.random.random() < 0.5:
                chunks[c, column] = np.random.exponential(2.0)
        if np.random.random() < 0.7:
            chunks[c, DELAY_W] = np.random.exponential(3.0)
        u = np.random.random()
        # Without a barrier, deeper ranks may end later: they keep their W for the end.
        if u < (0.7 if instance.span else 0.15):
            chunks[c, SLOPE_W] = np.random.exponential(5.0)
        elif u < (0.8 if instance.span else 0.4):
            chunks[c, SLOPE_W] = np.random.normal(0.0, 0.5)
        chunks[c, CAP_FIRST] = chunks[c, CAP_LAST] = FREE
        if np.random.random() < 0.4:
            most = _most_held(instance, c)
            chunks[c, CAP_FIRST] = 1 + np.random.random() * most
            chunks[c, CAP_LAST] = 1 + np.random.random() * most
    if np.random.random() < 0.3:
        shared[MIDDLE] = np.random.exponential(1.0)
    shared[PERIOD] = 1.0
    if np.random.random() < 0.3:
        shared[PERIOD] = 1.0 + 0.1 * np.random.random()
    if np.random.random() < 0.4:
        shared[LONGER_F] = np.random.normal(0.0, 0.1)
    if np.random.random() < 0.4:
        shared[LONGER_W] = np.random.exponential(0.2)
    shared[BE_PATIENT] = (0.0, 0.3, 0.6, 1.0)[np.random.randint(4)]
    shared[BE_PATIENT_W] = (0.0, 0.5, 1.0, 1.0)[np.random.randint(4)]
    shared[BE_DISORDERLY] = (0.3, 1.0, 3.0, FREE, FREE)[np.random.randint(5)]
    _draw_split(instance, shared)


@compiled
def _draw_split(instance: Instance, shared: Floats) -> None:
    u = np.random.random()
    if u < 0.3:
        shared[SPLIT_FIRST] = shared[SPLIT_LAST] = shared[SPLIT_SLOPE] = 0.0
    elif u < 0.5:
        shared[SPLIT_FIRST] = instance.microbatches
    else:
        shared[SPLIT_FIRST] = np.random.randint(instance.ranks) * (np.random.random() < 0.3)
        shared[SPLIT_LAST] = np.random.randint(2 * instance.ranks + 1)
        shared[SPLIT_SLOPE] = np.random.randint(5) * 0.5 - 1.0


@compiled
def mutate(instance: Instance, pattern: Pattern, scale: float) -> None:
    """Change one to three of the pattern's numbers."""
    chunks, shared = pattern
    places = 8 * instance.chunks + 10
    for _ in range(1 + np.random.randint(3)):
        i = np.random.randint(places)
        if i < 8 * instance.chunks:
            c, column = i // 8, i % 8
            if column >= CAP_FIRST:
                most = _most_held(instance, c)
                if np.random.random() < 0.2:
                    chunks[c, CAP_FIRST] = chunks[c, CAP_LAST] = FREE
                elif chunks[c, column] == FREE or np.random.random() < 0.2:
                    chunks[c, CAP_FIRST] = 1 + np.random.random() * most
                    chunks[c, CAP_LAST] = 1 + np.random.random() * most
                else:
                    chunks[c, column] = max(1.0, chunks[c, column] + np.random.normal())
            elif np.random.random() < 0.1:
                chunks[c, column] = 0.0
            else:
                step = np.random.normal() * scale * np.exp(-2 * np.random.random())
                chunks[c, column] += step
            continue
        place = i - 8 * instance.chunks
        if place == MIDDLE:
            shared[place] += np.random.normal() * scale * np.exp(-2 * np.random.random())
        elif place == PERIOD:
            shared[place] = max(0.5, shared[place] + np.random.normal() * 0.03 * scale)
        elif place in (LONGER_F, LONGER_W):
            if np.random.random() < 0.2:
                shared[place] = 0.0
            else:
                shared[place] += np.random.normal() * 0.1 * scale * np.exp(-2 * np.random.random())
        elif place == BE_DISORDERLY:
            shared[place] = (0.1, 0.3, 1.0, 3.0, FREE)[np.random.randint(5)]
        elif place >= SPLIT_FIRST:
            if np.random.random() < 0.3:
                _draw_split(instance, shared)
            else:
                step = 0.5 if place == SPLIT_SLOPE else 1.0
                shared[place] += step * (2 * np.random.randint(2) - 1)
        else:
            shared[place] = np.random.random() * 1.2


@compiled
def sample(
    instance: Instance,
    seed: int,
    tries: int,
    keys: Floats,
    rule: Floats,
    workspace: Workspace,
    best: Pattern,
    trial: Pattern,
) -> float:
    """The best of `tries` random patterns, written to `best`; `trial` is room for one."""
    np.random.seed(seed)
    least = np.inf
    for _ in range(tries):
        draw(instance, trial)
        keys_of(instance, trial, keys, rule, workspace.whole)
        found = worth(instance, list_schedule(instance, keys, rule, workspace))
        if found < least or least == np.inf:
            least = found
            best.chunks[:] = trial.chunks
            best.shared[:] = trial.shared
    return least


@compiled
def climb(
    instance: Instance,
    seed: int,
    tries: int,
    scale: float,
    least: float,
    keys: Floats,
    rule: Floats,
    workspace: Workspace,
    best: Pattern,
    trial: Pattern,
) -> float:
    """Improve `best`, worth `least`, by `tries` mutations; equals are taken too."""
    np.random.seed(seed)
    for _ in range(tries):
        trial.chunks[:] = best.chunks
        trial.shared[:] = best.shared
        mutate(instance, trial, scale)
        keys_of(instance, trial, keys, rule, workspace.whole)
        found = worth(instance, list_schedule(instance, keys, rule, workspace))
        if found <= least:
            least = found
            best.chunks[:] = trial.chunks
            best.shared[:] = trial.shared
    return least
