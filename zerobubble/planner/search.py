"""The search for good orders: patterns first, then priorities of single ops, on a few threads.

Each thread is an island with its own random numbers: it samples patterns, climbs from the best,
and reorders what climbing reached, in cycles. All stop as soon as the lower bound is met.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TypeVar

import numpy as np

from zerobubble.planner.bounds import lower_bound
from zerobubble.planner.instance import TOLERANCE, Flags, Floats, Instance, Ints, make_instance
from zerobubble.planner.kernels import (
    BW,
    CAPS,
    DISORDER,
    PATIENCE,
    PATIENCE_W,
    B,
    F,
    Value,
    W,
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
from zerobubble.planner.reorder import make_room, make_tables, reorder
from zerobubble.schedule.costs import Costs
from zerobubble.schedule.placement import v

T = TypeVar("T")

_SECONDS = 0.85  # of a search at 8 ranks or fewer; see `default_seconds`
_SLICE = 0.02  # s: how long a compiled call may run before the clock is looked at


@dataclass
class Best:
    """The best orders found so far, shared by the islands."""

    instance: Instance
    lower_bound: float
    orders: Ints | None = None
    lengths: Ints | None = None
    value: Value = field(default=Value(math.inf, math.inf, math.inf))
    evaluations: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    proved: threading.Event = field(default_factory=threading.Event)

    @property
    def objective(self) -> float:
        """The makespan or the longest span, as the instance asks."""
        return self.value.longest_span if self.instance.span else self.value.makespan

    def offer(self, orders: Ints, lengths: Ints, value: Value) -> None:
        """Take over what is better."""
        with self.lock:
            if worth(self.instance, value) < worth(self.instance, self.value):
                self.orders, self.lengths, self.value = orders.copy(), lengths.copy(), value
            if self.objective <= self.lower_bound * (1 + TOLERANCE):
                self.proved.set()


def default_seconds(ranks: int) -> float:
    """How long to look for a better schedule unless told otherwise."""
    return min(30.0, _SECONDS * max(1.0, ranks / 8) ** 2)


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
        for state in (*seeds, *preferences(best.instance)):
            if time.perf_counter() < deadline:
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


class _Bench:
    """What compiled searches of one instance write."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.workspace = make_workspace(instance)
        self.keys = np.zeros((3, instance.stages, instance.microbatches))
        self.tries = 4  # per compiled call; follows the clock


def _few_microbatches(instance: Instance) -> Instance | None:
    """The same problem with fewer microbatches, for which good patterns are found sooner."""
    few = max(2 * instance.ranks, 12)
    return instance._replace(microbatches=few) if instance.microbatches >= 1.5 * few else None


class _Island:
    def __init__(self, best: Best, seed: int, deadline: float) -> None:
        instance = best.instance
        self.best, self.instance, self.deadline = best, instance, deadline
        self.random = np.random.default_rng(seed)
        self.full = _Bench(instance)
        # What makes a short longest span is in the pattern, and carries over to more microbatches.
        few = _few_microbatches(instance) if instance.span else None
        self.few = _Bench(few) if few is not None else None
        self.workspace, self.keys = self.full.workspace, self.full.keys
        self.rule = np.zeros(CAPS + 2 * instance.chunks)
        self.trial = make_pattern(instance)
        self.tables, self.room = make_tables(instance), make_room(instance)

    def run(self) -> None:
        """Cycles until time is nearly up; then go on from the best of all islands."""
        started = time.perf_counter()
        total = self.deadline - started
        usual = default_seconds(self.instance.ranks)
        cycles = max(1, min(5, int(total / usual)))
        cycle = 0.75 * total / cycles
        for number in range(cycles):
            until = started + (number + 1) * cycle
            if self._over() or time.perf_counter() > until:
                break
            self._cycle(until)
        self._reorder_best(self.deadline)

    def _cycle(self, until: float) -> None:
        """From random patterns to reordered ops."""
        total = until - time.perf_counter()
        # Single ops do little for the longest span: it depends on all microbatches at once.
        rest = 0.35 if self.instance.span else 0.5
        patterns = self._sample(self.few or self.full, until - 0.85 * total)
        if self.few is not None:
            patterns = self._climb(self.few, patterns, until - (rest + 0.85) / 2 * total)
            patterns = [(self._worth_of(pattern), pattern) for _, pattern in patterns]
        patterns = self._climb(self.full, patterns, until - rest * total)
        state = self.offer_pattern(patterns[0][1])
        if splitting_costs(self.instance):
            state = self._anneal(state, until - 0.6 * rest * total)
        if self.offer(state).makespan == math.inf:
            return  # so few tries that each of them got stuck
        # What the workspace holds is this island's own; the best of all comes later.
        self._reorder(self.workspace.orders.copy(), self.workspace.lengths.copy(), until)

    def _sample(self, bench: _Bench, until: float) -> list[tuple[float, Pattern]]:
        """Random patterns, the best first, with their worth."""
        found: list[tuple[float, Pattern]] = []
        while not found or (time.perf_counter() < until and not self._over()):
            pattern = make_pattern(self.instance)
            least = self.timed(
                bench, sample, bench.keys, self.rule, bench.workspace, pattern, self.trial
            )
            found.append((least, pattern))
        return sorted(found, key=itemgetter(0))[:4]

    def _climb(
        self, bench: _Bench, patterns: list[tuple[float, Pattern]], until: float
    ) -> list[tuple[float, Pattern]]:
        """Improve the patterns side by side, the worse ones left behind one by one."""
        began = time.perf_counter()
        while time.perf_counter() < until and not self._over():
            gone = (time.perf_counter() - began) / (until - began)
            patterns = patterns[: max(1, 4 - int(5 * gone))]
            for i, (least, pattern) in enumerate(patterns):
                least = self.timed(
                    bench,
                    climb,
                    1.0,
                    least,
                    bench.keys,
                    self.rule,
                    bench.workspace,
                    pattern,
                    self.trial,
                )
                patterns[i] = (least, pattern)
            patterns.sort(key=itemgetter(0))
            if bench is self.full:
                self.offer_pattern(patterns[0][1])
        return patterns

    def _worth_of(self, pattern: Pattern) -> float:
        keys_of(self.instance, pattern, self.keys, self.rule, self.workspace.whole)
        return worth(
            self.instance, list_schedule(self.instance, self.keys, self.rule, self.workspace)
        )

    def _anneal(self, start: State, until: float) -> State:
        """Move priorities and choices of splitting; the best state."""
        state, best, trial = _copy(start), _copy(start), _copy(start)
        current = least = worth(self.instance, self.listed(start))
        began = time.perf_counter()
        while time.perf_counter() < until and not self._over():
            gone = (time.perf_counter() - began) / (until - began)
            current, least = self.timed(
                self.full,
                anneal,
                0.3,
                0.3 * self.instance.unit * max(0.0, 1 - gone) ** 2,
                current,
                least,
                state,
                best,
                trial,
                self.workspace,
            )
        return best

    def _reorder_best(self, until: float) -> None:
        with self.best.lock:
            orders, lengths = self.best.orders, self.best.lengths
            if orders is None or lengths is None:
                return
            orders, lengths = orders.copy(), lengths.copy()
        self._reorder(orders, lengths, until)

    def _reorder(self, orders: Ints, lengths: Ints, until: float) -> None:
        """Move single ops, from hot to cold."""
        best = orders.copy()
        least = math.inf
        hot = self.instance.unit * 0.05 * 6 ** self.random.random()
        began = time.perf_counter()
        while time.perf_counter() < until and not self._over():
            gone = (time.perf_counter() - began) / (until - began)
            before = least
            least = self.timed(
                self.full,
                reorder,
                hot * max(0.0, 1 - gone) ** 2,
                least,
                self.tables,
                orders,
                lengths,
                self.room,
                best,
            )
            if least < min(before, worth(self.instance, self.best.value)):
                value = simulate_orders(self.instance, best, lengths, self.workspace.starts)
                self.best.offer(best, lengths, value)

    def timed(self, bench: _Bench, call: Callable[..., T], *arguments: object) -> T:
        """Run a compiled search of about _SLICE seconds, with fresh random numbers."""
        seed = int(self.random.integers(2**31))
        began = time.perf_counter()
        tries = bench.tries
        found = call(bench.instance, seed, tries, *arguments)
        took = time.perf_counter() - began
        self.best.evaluations += tries
        bench.tries = max(2, min(5000, round(tries * min(4.0, _SLICE / max(took, 1e-6)))))
        return found

    def _over(self) -> bool:
        return self.best.proved.is_set() or time.perf_counter() >= self.deadline

    def offer_pattern(self, pattern: Pattern) -> State:
        """Offer what a pattern leads to; its state."""
        keys_of(self.instance, pattern, self.keys, self.rule, self.workspace.whole)
        state = _copy((self.keys, self.rule, self.workspace.whole))
        self.offer(state)
        return state

    def offer(self, state: State) -> Value:
        """Offer what a state leads to; it is in the workspace then."""
        value = self.listed(state)
        self.best.offer(self.workspace.orders, self.workspace.lengths, value)
        return value

    def listed(self, state: State) -> Value:
        """List the ops as a state has it."""
        keys, rule, whole = state
        self.workspace.whole[:] = whole
        return list_schedule(self.instance, keys, rule, self.workspace)


def splitting_costs(instance: Instance) -> bool:
    """Whether a B and a W take longer than a BW on any stage that can be split."""
    split = instance.times[B] + instance.times[W]
    return bool(((split > instance.times[BW] * (1 + 1e-12)) & ~instance.joint).any())


def state_of_starts(starts: Floats, whole: Flags, chunks: int) -> State:
    """A state that keeps to given starts (3, S, m) of F, B and W as priorities."""
    rule = np.full(CAPS + 2 * chunks, FREE)
    rule[:DISORDER] = 0.0
    return starts.copy(), rule, whole.copy()


def preferences(instance: Instance) -> Iterator[State]:
    """States in which ranks prefer one kind and chunk to another, whatever the microbatch.

    W comes last, as a filler of gaps, under three rules of patience. So do the published
    heuristics of ZB-1p and ZB-V (Qi et al., arXiv 2401.10241) choose. None for over two chunks.
    """
    chunks, m = instance.chunks, instance.microbatches
    if chunks > 2:
        return
    lanes = [(kind, chunk) for kind in (F, B) for chunk in range(chunks)]
    whole = np.repeat(instance.joint[:, None], m, axis=1)
    chunk_of = np.arange(instance.stages) // instance.ranks
    for order in itertools.permutations(range(len(lanes))):
        keys = np.full((3, instance.stages, m), float(len(lanes)))
        for (kind, chunk), place in zip(lanes, order, strict=True):
            keys[kind, chunk_of == chunk] = place
        for patience in (0.0, 0.5, 1.0):
            rule = np.full(CAPS + 2 * chunks, FREE)
            rule[PATIENCE] = 0.0
            rule[PATIENCE_W] = patience
            yield keys, rule, whole


def _copy(state: State) -> State:
    keys, rule, whole = state
    return keys.copy(), rule.copy(), whole.copy()


def compile_search() -> None:
    """Compile every loop now, or load what an earlier process compiled (some 0.1 s)."""
    costs = Costs.uniform(4, activation=0.5, released_by_backward_input=0.5)
    best = Best(make_instance(v(2), 2, costs), 0.0)
    island = _Island(best, 0, time.perf_counter() + 60)
    pattern = make_pattern(best.instance)
    bench = island.full
    bench.tries = 1
    arrays = island.keys, island.rule, island.workspace, pattern, island.trial
    least = island.timed(bench, sample, *arrays)
    island.timed(bench, climb, 1.0, least, *arrays)
    state = island.offer_pattern(pattern)
    three = _copy(state), _copy(state), _copy(state)
    island.timed(bench, anneal, 1.0, 0.0, least, least, *three, island.workspace)
    orders, lengths = island.workspace.orders, island.workspace.lengths
    island.timed(
        bench, reorder, 0.0, least, island.tables, orders, lengths, island.room, orders.copy()
    )
    simulate_orders(best.instance, orders, lengths, island.workspace.starts)
    peak_memory(best.instance, orders, lengths)
    lower_bound(best.instance)
