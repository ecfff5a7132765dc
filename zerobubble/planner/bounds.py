"""Lower bounds: what no schedule of an instance can beat.

Every bound looks at one rank. Before its first B a rank can only run F, as many as its memory
holds; after its last F only B and W, of what its memory still holds. What the tensors' ways through
the other ranks take beyond that is idle time, at both ends. In between lies the rank's work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zerobubble.planner.instance import Instance
from zerobubble.planner.one_machine import one_machine_bound

_MOST_COMBINATIONS = 200_000


def lower_bound(instance: Instance) -> float:
    """No schedule within the limits has a smaller objective, in the unit of time.

    The greatest over the ranks of: its work between the idle times at both ends (see the module);
    all its F, then the way of the last microbatch back; the memory-time that its activations take
    at least, over its limit; and `one_machine.one_machine_bound`.
    """
    ways = _Ways(instance)
    machine = one_machine_bound(instance, np.array(ways.gradient), np.array(ways.only_weight))
    return max(
        float(machine),
        *(_both_ends(instance, ways, rank) for rank in range(instance.ranks)),
        *(_energy(instance, ways, rank) for rank in range(instance.ranks)),
    )


class _Ways:
    """Least times of tensors on their way through the stages, other ranks never busy."""

    def __init__(self, instance: Instance) -> None:
        forward, b, w, joint = (row.tolist() for row in instance.times)
        latency = instance.latency.tolist()
        stages = len(forward)
        self.forward = forward
        # Until the gradient leaves a stage, and until nothing of the stage is left to do.
        self.gradient = [min(split, both) for split, both in zip(b, joint, strict=True)]
        self.backward = [min(b[s] + w[s], joint[s]) for s in range(stages)]
        self.only_weight = [max(0.0, self.backward[s] - self.gradient[s]) for s in range(stages)]
        for s in range(stages):
            if instance.joint[s]:
                self.gradient[s] = self.backward[s] = joint[s]
                self.only_weight[s] = 0.0
        # From time 0 to the start of F.
        self.head = [0.0] * stages
        for s in range(1, stages):
            self.head[s] = self.head[s - 1] + forward[s - 1] + latency[s - 1]
        # From the start of F of a stage to the start of its B, both included between.
        self.turn = [0.0] * stages
        self.turn[-1] = forward[-1]
        for s in range(stages - 2, -1, -1):
            hops = forward[s] + latency[s] + self.turn[s + 1]
            self.turn[s] = hops + self.gradient[s + 1] + latency[s]
        # From the start of B to the end of everything downstream of it.
        self.tail = [0.0] * stages
        for s in range(stages):
            self.tail[s] = self.backward[s]
            if s:
                beyond = self.gradient[s] + latency[s - 1] + self.tail[s - 1]
                self.tail[s] = max(self.tail[s], beyond)
        self.latency = latency

    def first_backward(self, first: int, last: int) -> float:
        """From the start of F of stage `first` to the start of B of the deeper stage `last`."""
        return self.head[last] - self.head[first] + self.turn[last]

    def way_back(self, last: int, first: int) -> float:
        """From the start of B of `last` to the end of all of `first`, which is not deeper."""
        way = sum(self.gradient[s] + self.latency[s - 1] for s in range(first + 1, last + 1))
        return float(max(self.backward[last], way + self.backward[first]))


@dataclass(frozen=True)
class _Item:
    """What memory can hold: `size` each, `time` of work each, `least` to `most` of them."""

    size: float
    time: float
    least: int
    most: int


def most_work(items: Sequence[_Item], limit: float) -> float:
    """The most work of items that fit together within `limit`; -1 where the least do not fit.

    Exact where there are few combinations, else not less than that.
    """
    room = limit - sum(item.size * item.least for item in items)
    if room < 0:
        return -1.0
    base = sum(item.time * item.least for item in items)
    merged: dict[tuple[float, float], int] = {}
    for item in items:
        if item.time > 0 and item.most > item.least:
            key = (item.size, item.time)
            merged[key] = merged.get(key, 0) + item.most - item.least
    base += sum(time * count for (size, time), count in merged.items() if size <= 0)
    rest = [(size, time, count) for (size, time), count in merged.items() if size > 0]
    rest.sort(key=lambda entry: entry[1] / entry[0], reverse=True)
    if room == math.inf:
        return float(base + sum(time * count for _, time, count in rest))
    fits = [min(count, int(room / size)) for size, _, count in rest]
    if not rest:
        return base
    if math.prod(count + 1 for count in fits[:-1]) > _MOST_COMBINATIONS:
        for size, time, count in rest:
            taken = min(count, room / size)
            base += taken * time
            room -= taken * size
        return base
    used, work = np.zeros(1), np.zeros(1)
    for (size, time, _), most in zip(rest[:-1], fits, strict=False):
        counts = np.arange(most + 1)
        used = (used[:, None] + counts * size).ravel()
        work = (work[:, None] + counts * time).ravel()
        work, used = work[used <= room], used[used <= room]
    size, time, count = rest[-1]
    last = np.minimum(count, np.floor((room - used) / size))
    return float(base + (work + last * time).max())


def _both_ends(instance: Instance, ways: _Ways, rank: int) -> float:
    held = instance.stages_of[rank].tolist()
    first, last = held[0], held[-1]
    m, limit = instance.microbatches, float(instance.limit[rank])
    activation, released = instance.activation, instance.released
    forward = m * sum(ways.forward[s] for s in held)
    backward = m * sum(ways.backward[s] for s in held)
    head = 0.0 if instance.span else ways.head[first]
    # The first B on the rank is of its deepest stage, the last of its first.
    to_first_b = ways.first_backward(first, last)
    if instance.span:
        after_last_f = ways.turn[last] - ways.forward[last] + ways.way_back(last, first)
        after_last_b = 0.0
    else:
        after_last_f = ways.turn[last] - ways.forward[last] + ways.tail[last]
        after_last_b = ways.latency[first - 1] + ways.tail[first - 1] if first else 0.0
    before = most_work([_Item(float(activation[s]), ways.forward[s], 1, m) for s in held], limit)
    idle_first = max(0.0, to_first_b - max(0.0, before))
    # Work that can be left after the last F: all of a backward, or only its W.
    left = most_work(
        [_Item(float(activation[s]), ways.backward[s], 0, m) for s in held]
        + [_Item(float(activation[s] - released[s]), ways.only_weight[s], 0, m) for s in held],
        limit,
    )
    weights = most_work(
        [_Item(float(activation[s] - released[s]), ways.only_weight[s], 0, m) for s in held],
        limit,
    )
    weights = min(weights, m * sum(ways.only_weight[s] for s in held))
    left = min(left, backward)
    idle_last = max(0.0, after_last_f - left, after_last_b - weights)
    bound = idle_first + forward + backward + idle_last
    if m * float(activation[held].sum()) <= limit:
        # All F may come before the first B: then the two idle times may be one.
        start = max(forward, to_first_b)
        drained = start + backward + max(0.0, after_last_b - weights)
        bound = min(bound, max(drained, forward + after_last_f))
    return float(head + max(bound, forward + after_last_f))


def _energy(instance: Instance, ways: _Ways, rank: int) -> float:
    """Memory-time: what every microbatch holds at least, over what the limit offers."""
    limit = float(instance.limit[rank])
    if limit in (0.0, math.inf):
        return 0.0
    held = instance.stages_of[rank].tolist()
    taken = 0.0
    for s in held:
        activation, released = float(instance.activation[s]), float(instance.released[s])
        to_b = ways.turn[s] + ways.gradient[s]
        joint = activation * (ways.turn[s] + float(instance.times[3, s]))
        split = activation * to_b + (activation - released) * float(instance.times[2, s])
        taken += joint if instance.joint[s] else min(joint, split)
    taken *= instance.microbatches
    head = 0.0 if instance.span else ways.head[held[0]]
    # What whole activations, and what B leaves of them, can fill of the limit.
    sizes = {
        float(size)
        for s in held
        for size in (instance.activation[s], instance.activation[s] - instance.released[s])
    }
    m = instance.microbatches
    most = most_work([_Item(size, size, 0, m * len(held)) for size in sizes], limit)
    most = min(most, m * float(instance.activation[held].sum()))
    if most <= 0:
        return 0.0
    # At first one F after the other fills the memory; at last one op after the other empties it.
    filling = [(float(instance.activation[s]), ways.forward[s]) for s in held]
    emptying = [
        pair
        for s in held
        for pair in (
            (float(instance.released[s]), float(instance.times[1, s])),
            (float(instance.activation[s] - instance.released[s]), float(instance.times[2, s])),
            (float(instance.activation[s]), float(instance.times[3, s])),
        )
    ]
    return head + (taken + _ramp(filling, most) + _ramp(emptying, most)) / most


def _ramp(steps: Sequence[tuple[float, float]], limit: float) -> float:
    """Memory-time left unused while steps of (memory, time) fill `limit` at their fastest."""
    steps = [(size, time) for size, time in steps if size > 0]
    if not steps or any(time <= 0 for _, time in steps):
        return 0.0
    largest = max(size for size, _ in steps)
    rate = max(size / time for size, time in steps)
    if len(set(steps)) == 1:
        # Equal steps make a staircase: `size` more at the start of each.
        count = int(limit / largest)
        return sum((limit - i * largest) * steps[0][1] for i in range(1, count + 1))
    return max(0.0, limit - largest) ** 2 / (2 * rate)
