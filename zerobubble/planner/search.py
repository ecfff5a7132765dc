"""The search for good orders: patterns first, then priorities of single ops, on a few threads.

Each thread is an island with its own random numbers: it samples patterns, climbs from the best,
and anneals what climbing reached, in cycles. All stop as soon as the lower bound is met.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from zerobubble.planner.instance import TOLERANCE, Flags, Floats, Instance, Ints, make_instance
from zerobubble.planner.kernels import (
    CAPS,
    DISORDER,
    Value,
    list_schedule,
    make_workspace,
    peak_memory,
    simulate_orders,
)
from zerobubble.planner.patterns import (
    FREE,
    Pattern,
    climb,
    keys_of,
    make_pattern,
    sample,
    worth,
)
from zerobubble.planner.refine import State, anneal
from zerobubble.schedule.costs import Costs
from zerobubble.schedule.placement import v

T = TypeVar("T")

_SLICE = 0.02  # s: how long a compiled call may run before the clock is looked at


@dataclass
class Best:
    """The best orders found so far, shared by the islands."""

    instance: Instance
    lower_bound: float
    orders: Ints | None = None
    lengths: Ints | None = None
    value: Value = field(default=Value(math.inf, math.inf, math.inf))
    state: State | None = None
    evaluations: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    proved: threading.Event = field(default_factory=threading.Event)

    @property
    def objective(self) -> float:
        """The makespan or the longest span, as the instance asks."""
        return self.value.longest_span if self.instance.span else self.value.makespan

    def offer(self, orders: Ints, lengths: Ints, value: Value, state: State | None = None) -> None:
        """Take over what is better."""
        with self.lock:
            if worth(self.instance, value) < worth(self.instance, self.value):
                self.orders, self.lengths, self.value = orders.copy(), lengths.copy(), value
                if state is not None:
                    self.state = _copy(state)
            if self.objective <= self.lower_bound * (1 + TOLERANCE):
                self.proved.set()


def search(
    best: Best,
    seconds: float,
    *,
    threads: int = 2,
    seed: int = 0,
    seeds: Sequence[State] = (),
    progress: Callable[[float], None] | None = None,
) -> None:
    """Improve `best` for `seconds`, or until its lower bound is met.

    `seeds`: states to start from beside random patterns. `progress` is told the objective, about
    every 0.2 s.
    """
    deadline = time.perf_counter() + seconds
    islands = [_Island(best, seed * 1000 + i, deadline) for i in range(threads)]
    for island in islands[:1]:
        for state in seeds:
            island.offer(state)
    if best.proved.is_set():
        return
    with ThreadPoolExecutor(threads) as pool:
        running = [pool.submit(island.run) for island in islands]
        while not all(future.done() for future in running):
            time.sleep(0.002 if best.proved.is_set() else 0.01)
            if progress is not None:
                progress(best.objective)
        for future in running:
            future.result()


class _Island:
    def __init__(self, best: Best, seed: int, deadline: float) -> None:
        instance = best.instance
        self.best, self.instance, self.deadline = best, instance, deadline
        self.seed = seed * 1_000_003 % 2**31
        self.workspace = make_workspace(instance)
        self.keys = np.zeros((3, instance.stages, instance.microbatches))
        self.rule = np.zeros(CAPS + 2 * instance.chunks)
        self.trial = make_pattern(instance)
        self.states = [self._room() for _ in range(3)]
        self.tries = 4  # per compiled call; follows the clock

    def run(self) -> None:
        """Cycles until time is up; the last one anneals the best of all islands."""
        started = time.perf_counter()
        cycle = max((self.deadline - started) / 3, 0.15)
        while not self._over():
            left = self.deadline - time.perf_counter()
            if left < cycle * 1.2 and self.best.state is not None and left < 0.9 * cycle * 3:
                self._anneal(self.best.state, time.perf_counter() + left)
            else:
                self._cycle(time.perf_counter() + min(cycle, left))

    def _cycle(self, until: float) -> None:
        now = time.perf_counter()
        ranked: list[tuple[float, Pattern]] = []
        while time.perf_counter() < now + 0.3 * (until - now) or not ranked:
            if self._over() and ranked:
                break
            pattern = make_pattern(self.instance)
            least = self.timed(sample, self.keys, self.rule, self.workspace, pattern, self.trial)
            ranked.append((least, pattern))
        ranked.sort(key=lambda entry: entry[0])
        ranked = ranked[:4]
        now, share = time.perf_counter(), 0.6 * (until - time.perf_counter())
        while time.perf_counter() < now + share and not self._over():
            gone = (time.perf_counter() - now) / share
            # The worse ones are left behind one by one.
            ranked = ranked[: max(1, 4 - int(5 * gone))]
            for i, (least, pattern) in enumerate(ranked):
                least = self.timed(
                    climb,
                    1.0,
                    least,
                    self.keys,
                    self.rule,
                    self.workspace,
                    pattern,
                    self.trial,
                )
                ranked[i] = (least, pattern)
            ranked.sort(key=lambda entry: entry[0])
            self.offer_pattern(ranked[0][1])
        state = self.offer_pattern(ranked[0][1])
        self._anneal(state, until)

    def _anneal(self, start: State, until: float) -> None:
        state, best, trial = self.states
        for target in (state, best):
            for to, value in zip(target, start, strict=True):
                to[:] = value
        current = least = worth(self.instance, self._listed(start))
        started = time.perf_counter()
        hot = 0.3 * self.instance.unit
        while time.perf_counter() < until and not self._over():
            gone = (time.perf_counter() - started) / (until - started)
            before = least
            current, least = self.timed(
                anneal,
                0.3 + 0.7 * (self.seed % 2),
                hot * max(0.0, 1 - gone) ** 2,
                current,
                least,
                state,
                best,
                trial,
                self.workspace,
            )
            if least < before:
                self.offer(best)

    def timed(self, call: Callable[..., T], *arguments: object) -> T:
        """Run a compiled search of about _SLICE seconds, with fresh random numbers."""
        self.seed = (self.seed * 1_103_515_245 + 12_345) % 2**31
        began = time.perf_counter()
        tries = self.tries
        found = call(self.instance, self.seed, tries, *arguments)
        took = time.perf_counter() - began
        self.best.evaluations += tries
        self.tries = max(2, min(2000, round(tries * min(4.0, _SLICE / max(took, 1e-6)))))
        return found

    def _over(self) -> bool:
        return self.best.proved.is_set() or time.perf_counter() >= self.deadline

    def _room(self) -> State:
        return (
            np.zeros_like(self.keys),
            np.zeros_like(self.rule),
            np.zeros_like(self.workspace.whole),
        )

    def offer_pattern(self, pattern: Pattern) -> State:
        """Offer what a pattern leads to; its state."""
        keys_of(self.instance, pattern, self.keys, self.rule, self.workspace.whole)
        state = _copy((self.keys, self.rule, self.workspace.whole))
        self.offer(state)
        return state

    def offer(self, state: State) -> None:
        """Offer what a state leads to."""
        value = self._listed(state)
        self.best.offer(self.workspace.orders, self.workspace.lengths, value, state)

    def _listed(self, state: State) -> Value:
        keys, rule, whole = state
        self.workspace.whole[:] = whole
        return list_schedule(self.instance, keys, rule, self.workspace)


def state_of_starts(instance: Instance, starts: Floats, whole: Flags) -> State:
    """A state that keeps to given starts (3, S, m) of F, B and W as priorities."""
    rule = np.full(CAPS + 2 * instance.chunks, FREE)
    rule[:DISORDER] = 0.0
    return starts.copy(), rule, whole.copy()


def _copy(state: State) -> State:
    keys, rule, whole = state
    return keys.copy(), rule.copy(), whole.copy()


def compile_search() -> None:
    """Compile every loop now, or load what an earlier process compiled (some 0.1 s)."""
    costs = Costs.uniform(4, activation=0.5, released_by_backward_input=0.5)
    best = Best(make_instance(v(2), 2, costs), 0.0)
    island = _Island(best, 0, time.perf_counter() + 60)
    pattern = make_pattern(best.instance)
    island.tries = 1
    arrays = island.keys, island.rule, island.workspace, pattern, island.trial
    least = island.timed(sample, *arrays)
    island.timed(climb, 1.0, least, *arrays)
    state = island.offer_pattern(pattern)
    island.timed(anneal, 1.0, 0.0, least, least, *_three(state), island.workspace)
    orders, lengths = island.workspace.orders, island.workspace.lengths
    simulate_orders(best.instance, orders, lengths, island.workspace.starts)
    peak_memory(best.instance, orders, lengths)


def _three(state: State) -> tuple[State, State, State]:
    return _copy(state), _copy(state), _copy(state)
