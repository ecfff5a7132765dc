"""Refinement: priorities of single ops, moved about under a falling temperature.

Where a pattern's few numbers say no more, boxes of priorities (a kind, some stages, some
microbatches) are shifted. A worse schedule is kept with the probability of simulated annealing.
"""

from __future__ import annotations

import numpy as np

from zerobubble.planner.compiled import compiled
from zerobubble.planner.instance import Flags, Floats, Instance
from zerobubble.planner.kernels import (
    DISORDER,
    PATIENCE,
    PATIENCE_W,
    B,
    F,
    W,
    Workspace,
    list_schedule,
)
from zerobubble.planner.patterns import FREE, worth

State = tuple[Floats, Floats, Flags]
"""Keys (3, S, m), rule, joint backwards (S, m): what `list_schedule` turns into orders."""


@compiled
def _some(count: int) -> tuple[int, int]:
    """A random range: one, all, a tail, a head, or a piece."""
    u = np.random.randint(5)
    first = np.random.randint(count)
    if u == 0:
        return first, first + 1
    if u == 1:
        return 0, count
    if u == 2:
        return first, count
    if u == 3:
        return 0, first + 1
    return first, min(count, first + 1 + np.random.randint(max(1, count // 4)))


@compiled
def _shift_hop(instance: Instance, keys: Floats, step: float) -> None:
    """Put off everything after one hop of some microbatches' way."""
    stages = len(instance.rank_of)
    first, last = _some(instance.microbatches)
    for hop in range(np.random.randint(2 * stages), 2 * stages):
        if hop < stages:
            keys[F, hop, first:last] += step
        else:
            keys[B, 2 * stages - 1 - hop, first:last] += step
            keys[W, 2 * stages - 1 - hop, first:last] += step


@compiled
def _shift_box(instance: Instance, keys: Floats, step: float) -> None:
    """Put off one kind, on some stages of one chunk, of some microbatches."""
    kind = np.random.randint(3)
    p = instance.ranks
    first_stage = np.random.randint(instance.chunks) * p
    a = np.random.randint(p)
    u = np.random.randint(3)
    low, high = 0, p
    if u == 0:
        low, high = a, a + 1
    elif u == 1:
        b = np.random.randint(p)
        low, high = min(a, b), max(a, b) + 1
    first, last = _some(instance.microbatches)
    for s in range(first_stage + low, first_stage + high):
        for j in range(first, last):
            keys[kind, s, j] += step


@compiled
def _switch_split(instance: Instance, whole: Flags) -> None:
    """Split or join some backwards of one stage, where splitting costs."""
    s = np.random.randint(len(instance.rank_of))
    times = instance.times
    if instance.joint[s] or times[B, s] + times[W, s] <= times[3, s] * (1 + 1e-12):
        return
    first, last = _some(instance.microbatches)
    whole[s, first:last] = not whole[s, first]


@compiled
def anneal(
    instance: Instance,
    seed: int,
    tries: int,
    scale: float,
    temperature: float,
    current: float,
    least: float,
    state: State,
    best: State,
    trial: State,
    workspace: Workspace,
) -> tuple[float, float]:
    """Change `state` (keys, rule, whole), worth `current`, by `tries` moves.

    `best`, worth `least`, keeps the best state seen. `temperature` is in the unit of time.
    Returns both worths.
    """
    np.random.seed(seed)
    costly = False
    for s in range(len(instance.rank_of)):
        costly |= instance.times[B, s] + instance.times[W, s] > instance.times[3, s] * (1 + 1e-12)
    for _ in range(tries):
        keys, rule, whole = trial
        keys[:] = state[0]
        rule[:] = state[1]
        whole[:] = state[2]
        for _move in range(1 + np.random.randint(2)):
            u = np.random.random()
            step = np.random.normal() * scale * instance.unit * np.exp(-2 * np.random.random())
            if u < 0.03:
                rule[PATIENCE] = np.random.random() * 1.2
            elif u < 0.06:
                rule[PATIENCE_W] = np.random.random() * 1.2
            elif u < 0.08:
                rule[DISORDER] = (0.1, 0.3, 1.0, 3.0, FREE)[np.random.randint(5)]
            elif u < 0.10:
                longer = step * 0.06
                for j in range(instance.microbatches):
                    keys[:, :, j] += longer * j
            elif u < 0.30:
                _shift_hop(instance, keys, step)
            elif costly and u < 0.5:
                _switch_split(instance, whole)
            else:
                _shift_box(instance, keys, step)
        workspace.whole[:] = whole
        found = worth(instance, list_schedule(instance, keys, rule, workspace))
        if found <= current or (
            temperature > 0
            and found < np.inf
            and np.random.random() < np.exp((current - found) / temperature)
        ):
            current = found
            state[0][:] = keys
            state[1][:] = rule
            state[2][:] = whole
            if found < least:
                least = found
                best[0][:] = keys
                best[1][:] = rule
                best[2][:] = whole
    return current, least
