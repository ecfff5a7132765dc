"""Exact: the best orders of one placement, with a proof, by OR-tools' CP-SAT.

For small cases, and to certify: CP-SAT needs no bound and no seed, but takes both.

Two things make the proofs short. Memory is a sum over "B or W of that microbatch ends before
this F starts", one Boolean each, which the solver learns from; time tables over intervals, which
say the same, prove less. And some of these hold in every order that keeps the limit: see
`_Model._room`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from zerobubble.planner.instance import Instance, Ints, encode, shortfall

F, B, W, BW = range(4)
"""The numbers of the kinds; see `instance.KINDS`."""

Task: TypeAlias = tuple[int, int, int]
"""Kind, stage, microbatch."""

MEETS = 1e-9
"""An order is optimal when it is above the bound by at most this share of its value."""

_DECIMALS = 6
"""Amounts with up to so many decimals are exact in the model."""

_FINEST = 2.0**50
"""Ticks of the longest run where times are not exact."""

_SEARCHES = ("objective_lb_search", "quick_restart_no_lp", "default_lp", "reduced_costs", "no_lp")
"""CP-SAT's searches, one per worker: the first raises the bound, the others find orders."""


@dataclass(frozen=True)
class Exact:
    """What the solver found and what it proved, in the instance's unit of time.

    `orders` and `lengths` as `instance.to_ops` takes them; None where no order was found, and
    `value` is then inf. `value`: the objective of the orders as they run on ideal links.
    `lower_bound`: no order is below it. `optimal`: `value` meets it.
    """

    orders: Ints | None
    lengths: Ints | None
    value: float
    lower_bound: float
    optimal: bool


def solve(
    instance: Instance,
    *,
    seconds: float,
    hint: tuple[Ints, Ints] | None = None,
    lower_bound: float = 0.0,
    stop_at: float = 0.0,
    workers: int = 2,
    split_choice: bool = False,
) -> Exact:
    """The best orders found in `seconds`, and how far down others are ruled out.

    The objective is the makespan, or the longest span where `instance.span` says so. A joint
    stage runs BW; `split_choice` lets every other stage choose, for each microbatch, between B
    with W and a BW where that is faster. W, also as part of a BW, keeps ascending microbatch
    order, as F and B do.

    `hint`: orders to start from; never is anything worse returned. They must run, keep
    the limits and the order of microbatches. `lower_bound`: a proven one; it is taken on trust,
    and orders that meet it end the search. `stop_at`: so does a value of at most this. Both in
    the instance's unit of time.

    Times with up to six decimals are exact in the model. Others are rounded down to less than
    1e-11 of the longest run, so that the bound stays valid; so are activations. An order
    that keeps its limits in rounded amounts alone is dropped. Where a rank cannot
    hold one microbatch of its stages, the result has no orders and a bound of inf.

    Raises ValueError for a hint that does not run or passes a limit, and for a `lower_bound` above
    orders that were found.
    """
    if shortfall(instance) is not None:
        return Exact(None, None, math.inf, math.inf, False)
    best: list[list[Task]] | None = None
    value = math.inf
    if hint is not None:
        best = _decode(instance, *hint, split_choice)
        if not keeps_limits(instance, best):
            raise ValueError("the orders of the hint pass a memory limit")
        value = evaluate(instance, best)
    if best is None or value > max(stop_at, lower_bound * (1 + MEETS)):
        found, proved = _search(
            instance, best, max(1, workers), seconds, lower_bound, stop_at, split_choice
        )
        reached = math.inf
        if found is not None and keeps_limits(instance, found):
            reached = evaluate(instance, found)
        if reached < value:
            best, value = found, reached
        lower_bound = max(lower_bound, proved)
    if lower_bound - value > MEETS * value:
        raise ValueError(f"the lower bound is {lower_bound}, and orders take {value}")
    if best is None:
        return Exact(None, None, value, lower_bound, False)
    lower_bound = min(lower_bound, value)
    return Exact(*_encode(instance, best), value, lower_bound, value - lower_bound <= MEETS * value)


def _search(
    instance: Instance,
    hint: list[list[Task]] | None,
    workers: int,
    seconds: float,
    lower_bound: float,
    stop_at: float,
    split_choice: bool,
) -> tuple[list[list[Task]] | None, float]:
    """Orders, where any were found, and a bound that CP-SAT proved; 0 for none."""
    from ortools.sat.python import cp_model  # takes half a second

    ticks = _ticks(instance, split_choice)
    enough = max(ticks.ceil(lower_bound), ticks.floor(stop_at)) * ticks.stretch + ticks.zeros
    model = _Model(cp_model, instance, ticks, split_choice)
    model.finish(enough, hint)
    solver = cp_model.CpSolver()
    searches = _SEARCHES[:workers]
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = len(searches)
    solver.parameters.subsolvers.extend(searches)
    status = solver.solve(model.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN):
        raise RuntimeError(f"CP-SAT: {solver.status_name(status)} {model.model.validate()}")
    proved = round(solver.best_objective_bound)
    found = None if status == cp_model.UNKNOWN else model.orders(solver)
    return found, ticks.real(proved) if proved > enough else 0.0


def evaluate(instance: Instance, rows: Sequence[Sequence[Task]]) -> float:
    """The objective of orders, one row per rank: every op as early as its row lets it.

    Raises ValueError where they stop, as an op waits for what comes later or never.
    """
    times = instance.times.tolist()
    start = _run(instance, rows, times, instance.latency.tolist())
    value = 0.0
    for row in rows:
        kind, stage, _ = row[-1]
        end = start[row[-1]] + times[kind][stage]
        value = max(value, end - start[row[0]] if instance.span else end)
    return value


def keeps_limits(instance: Instance, rows: Sequence[Sequence[Task]]) -> bool:
    """Whether the activations of every row stay within its rank's limit."""
    for row, limit in zip(rows, instance.limit.tolist(), strict=True):
        live = 0.0
        for kind, stage, _ in row:
            held, freed = float(instance.activation[stage]), float(instance.released[stage])
            live += (held, -freed, freed - held, -held)[kind]
            if live > limit:
                return False
    return True


def _run(
    instance: Instance,
    rows: Sequence[Sequence[Task]],
    times: Sequence[Sequence[float]],
    latency: Sequence[float],
) -> dict[Task, float]:
    """When every op starts, in the unit of `times` (4, S) and `latency` (S,)."""
    last = instance.stages - 1
    start: dict[Task, float] = {}
    made: dict[Task, float] = {}
    clock, at = [0.0] * len(rows), [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                kind, s, j = row[at[rank]]
                needs: list[tuple[Task, float]] = []
                if kind == F and s:
                    needs = [((F, s - 1, j), latency[s - 1])]
                elif kind in (B, BW):
                    needs = [((F, s, j), 0.0)]
                    needs += [((B, s + 1, j), latency[s])] if s < last else []
                elif kind == W:
                    needs = [((B, s, j), 0.0)]
                if any(need not in made for need, _ in needs):
                    break
                begin = max([clock[rank], *(made[need] + wait for need, wait in needs)])
                start[kind, s, j] = begin
                clock[rank] = begin + times[kind][s]
                made[B if kind == BW else kind, s, j] = clock[rank]
                at[rank] += 1
                moved = True
    for rank, row in enumerate(rows):
        if at[rank] < len(row):
            raise ValueError(f"the orders stop at op {at[rank]} of rank {rank}: {row[at[rank]]}")
    return start


def _decode(
    instance: Instance, orders: Ints, lengths: Ints, split_choice: bool
) -> list[list[Task]]:
    """Rows of ops, with BW, or B and W, only where the model has them."""
    backwards = _backwards(instance, split_choice)
    rows = []
    for row, length in zip(orders, lengths, strict=True):
        tasks: list[Task] = []
        for code in row[:length].tolist():
            rest, j = divmod(code, instance.microbatches)
            kind, s = divmod(rest, instance.stages)
            if kind == BW and backwards[s] == (B,):
                tasks += [(B, s, j), (W, s, j)]
            elif kind == B and backwards[s] == (BW,):
                tasks.append((BW, s, j))
            elif kind != W or backwards[s] != (BW,):
                tasks.append((kind, s, j))
        rows.append(tasks)
    return rows


def _backwards(instance: Instance, split_choice: bool) -> list[tuple[int, ...]]:
    """Per stage, whether its backward is B (and W), BW, or either; BW alone if B is no faster."""
    kinds: list[tuple[int, ...]] = []
    for joint, (_, b, w, both) in zip(instance.joint, instance.times.T.tolist(), strict=True):
        gains = split_choice and both < (b + w) * (1 - MEETS)
        if joint or (gains and both <= b * (1 + MEETS)):
            kinds.append((BW,))
        else:
            kinds.append((B, BW) if gains else (B,))
    return kinds


def _encode(instance: Instance, rows: Sequence[Sequence[Task]]) -> tuple[Ints, Ints]:
    width = 3 * instance.chunks * instance.microbatches
    orders = np.zeros((instance.ranks, width), dtype=np.int64)
    for rank, row in enumerate(rows):
        orders[rank, : len(row)] = [encode(*task, instance) for task in row]
    return orders, np.array([len(row) for row in rows], dtype=np.int64)


class _Ticks(NamedTuple):
    """Times as whole numbers, of which `stretch` make a step of `step` time units.

    An op of no time takes one tick, so that the ops of a rank keep an order: CP-SAT lets
    intervals of no length overlap. All these ticks, `zeros`, are less than one step.
    """

    times: list[list[int]]
    """(4, S), as `Instance.times`."""
    latency: list[int]
    """(S,)"""
    step: float
    stretch: int
    zeros: int
    slack: int
    """Steps that rounding may add to the objective."""

    def ceil(self, value: float) -> int:
        """The steps in a time, up."""
        return math.ceil(value / self.step * (1 - MEETS / 10))

    def floor(self, value: float) -> int:
        """The steps in a time, down."""
        return math.floor(value / self.step * (1 + MEETS / 10))

    def real(self, ticks: int) -> float:
        """The least time of orders that take so many ticks in the model."""
        return max(0, -((self.zeros - ticks) // self.stretch) - self.slack) * self.step


def _ticks(instance: Instance, split_choice: bool) -> _Ticks:
    amounts = np.vstack([instance.times, instance.latency])
    longest = float(amounts.sum()) * instance.microbatches
    scale = _whole(amounts.ravel())
    exact = scale > 0
    if not exact:
        scale = _FINEST / longest / (1 + 3 * instance.stages * instance.microbatches)
    whole = np.rint(amounts * scale) if exact else np.floor(amounts * scale)
    steps = whole.astype(np.int64)
    common = max(1, int(np.gcd.reduce(steps.ravel()))) if exact else 1
    steps //= common
    # ticks of ops that take no time, at most: of a backward in two, or else in one
    zero = (steps[:4] == 0).astype(int)
    ops = np.where(instance.joint, zero[0] + zero[3], zero[0] + zero[1] + zero[2])
    if split_choice:
        ops = np.maximum(ops, zero[0] + zero[3])
    zeros = int(ops.sum()) * instance.microbatches
    times = np.where(zero > 0, 1, steps[:4] * (zeros + 1))
    return _Ticks(
        times=times.tolist(),
        latency=(steps[4] * (zeros + 1)).tolist(),
        step=common / scale,
        stretch=zeros + 1,
        zeros=zeros,
        # a span starts at a sum of rounded times, and so does what a BW takes beyond B
        slack=0 if exact else 5 * instance.stages * instance.microbatches,
    )


def _whole(values: npt.NDArray[np.float64]) -> float:
    """The least power of ten that makes all values whole; 0 for more than `_DECIMALS`."""
    for digits in range(_DECIMALS + 1):
        scaled = values * 10.0**digits
        if np.all(np.abs(scaled - np.rint(scaled)) <= MEETS / 10 * np.maximum(1.0, scaled)):
            return 10.0**digits
    return 0.0


class _Memory(NamedTuple):
    """A rank's amounts as whole numbers, rounded so that no order within the limit is lost."""

    held: list[int]
    """Per chunk, what F adds, rounded down."""
    by_b: list[int]
    by_w: list[int]
    """Per chunk, what B and W release; together at least what F adds."""
    limit: int


def _memory(instance: Instance, rank: int) -> _Memory | None:
    """None where all activations fit."""
    stages = instance.stages_of[rank]
    adds, freed = instance.activation[stages], instance.released[stages]
    limit = float(instance.limit[rank])
    if adds.sum() * instance.microbatches <= limit:
        return None
    scale = _whole(np.concatenate([adds, freed]))
    if scale:
        whole, first = np.rint(adds * scale), np.rint(freed * scale)
        rest = whole - first
    else:
        scale = 2.0**40 / limit
        whole, first = np.floor(adds * scale), np.ceil(freed * scale)
        rest = np.where(freed < adds, np.ceil((adds - freed) * scale), 0)
    most = math.floor(limit * scale)
    held, by_b, by_w = (row.astype(int).tolist() for row in (whole, first, rest))
    return _Memory(held, by_b, by_w, most)


class _Model:
    """The model: a start and an end per op, and on every rank one op at a time."""

    def __init__(
        self, cp_model: Any, instance: Instance, ticks: _Ticks, split_choice: bool
    ) -> None:
        self.model = cp_model.CpModel()
        self.instance = instance
        self.ticks = ticks
        stages, times = instance.stages, ticks.times
        self.backwards = _backwards(instance, split_choice)
        longest = sum(
            times[F][s] + max(times[B][s] + times[W][s], times[BW][s]) + 2 * ticks.latency[s]
            for s in range(stages)
        )
        self.horizon = longest * instance.microbatches
        self.start: dict[Task, Any] = {}
        self.end: dict[Task, Any] = {}
        self.joins: dict[tuple[int, int], Any] = {}
        self.intervals: list[list[Any]] = [[] for _ in range(instance.ranks)]
        self.befores: dict[tuple[Task, Task], Any] = {}
        for s in range(stages):
            for j in range(instance.microbatches):
                self._add_ops(s, j)
        self._add_dependencies()
        for rank in range(instance.ranks):
            self.model.add_no_overlap(self.intervals[rank])
            memory = _memory(instance, rank)
            if memory is not None:
                self._add_limit(rank, memory)

    def _add_ops(self, s: int, j: int) -> None:
        """F, B and W of a stage and microbatch; B and W are one op where they are BW."""
        model, start, end, times = self.model, self.start, self.end, self.ticks.times
        sizes = {F: times[F][s], B: times[B][s], W: times[W][s]}
        if self.backwards[s] == (BW,):
            sizes = {F: times[F][s], B: times[BW][s]}
        elif self.backwards[s] == (B, BW):
            sizes[W] = max(1, min(times[W][s], times[BW][s] - times[B][s]))
        for kind in (F, B, W):
            start[kind, s, j] = model.new_int_var(0, self.horizon, "")
            end[kind, s, j] = start[kind, s, j] + sizes.get(kind, 0)
        intervals = self.intervals[self.instance.rank_of[s]]
        intervals += [
            model.new_fixed_size_interval_var(start[kind, s, j], size, "")
            for kind, size in sizes.items()
        ]
        if self.backwards[s] == (BW,):
            end[W, s, j] = end[B, s, j]
            model.add(start[W, s, j] == start[B, s, j])
        else:
            model.add(start[W, s, j] >= end[B, s, j])
        if self.backwards[s] == (B, BW):
            self._add_choice(s, j, sizes[W])

    def _add_choice(self, s: int, j: int, least: int) -> None:
        """W as the `least` that it takes within a BW, right after B, or anywhere with the rest."""
        model, start, end = self.model, self.start, self.end
        join = self.joins[s, j] = model.new_bool_var("")
        split = join.negated()
        part, rest = end[B, s, j], end[W, s, j]
        end[B, s, j] = model.new_int_var(0, self.horizon, "")
        end[W, s, j] = model.new_int_var(0, self.horizon, "")
        more = self.ticks.times[W][s] - least
        model.add(end[B, s, j] >= part)
        model.add(end[W, s, j] >= rest)
        model.add(start[W, s, j] == part).only_enforce_if(join)
        model.add(end[B, s, j] == part + least).only_enforce_if(join)
        model.add(end[W, s, j] == rest).only_enforce_if(join)
        model.add(end[B, s, j] == part).only_enforce_if(split)
        model.add(end[W, s, j] == rest + more).only_enforce_if(split)
        self.intervals[self.instance.rank_of[s]].append(
            model.new_optional_fixed_size_interval_var(rest, more, split, "")
        )

    def _add_dependencies(self) -> None:
        model, start, end = self.model, self.start, self.end
        last = self.instance.stages - 1
        for _, s, j in [task for task in start if task[0] == F]:
            if s:
                model.add(start[F, s, j] >= end[F, s - 1, j] + self.ticks.latency[s - 1])
            model.add(start[B, s, j] >= end[F, s, j])
            if s < last:
                model.add(start[B, s, j] >= end[B, s + 1, j] + self.ticks.latency[s])
            if j:
                for kind in (F, B, W):
                    model.add(start[kind, s, j] >= end[kind, s, j - 1])

    def _add_limit(self, rank: int, memory: _Memory) -> None:
        """At every F, the Fs so far less what ended of the Bs and Ws stays within the limit."""
        stages = self.instance.stages_of[rank].tolist()
        microbatches = range(self.instance.microbatches)
        self._room(stages, memory)
        for chunk, s in enumerate(stages):
            for j in microbatches:
                this = (F, s, j)
                live: list[Any] = []
                for other, t in enumerate(stages):
                    # Decided: earlier chunks have run F up to j, later ones not from j on.
                    begun = 0 if other > chunk else j + 1
                    live.append(memory.held[other] * begun)
                    if other != chunk:
                        open_ = range(j) if other > chunk else microbatches[j + 1 :]
                        live += [memory.held[other] * self.before((F, t, i), this) for i in open_]
                    for kind, freed in ((B, memory.by_b[other]), (W, memory.by_w[other])):
                        if freed:
                            live += [-freed * self.before((kind, t, i), this) for i in range(j)]
                self.model.add(sum(live) <= memory.limit)

    def _room(self, stages: Sequence[int], memory: _Memory) -> None:
        """Precedences that hold in every order within the limit.

        Of n microbatches that have begun F on chunk c and not ended B on chunk d >= c, all hold
        chunks 0..c (B runs the chunks from the last to the first), and the oldest also holds, or
        will before any of these Bs ends, chunks up to d. With n at its most, the F of
        microbatch j on c comes after the B of microbatch j - n on d.
        """
        held = np.cumsum(memory.held).tolist()
        for c, s in enumerate(stages):
            for d in range(c, len(stages)):
                if held[c] == 0:
                    continue
                most = max(1, 1 + (memory.limit - held[d]) // held[c])
                for j in range(most, self.instance.microbatches):
                    self.model.add(self.start[F, s, j] >= self.end[B, stages[d], j - most])

    def before(self, first: Task, second: Task) -> Any:
        """Whether `first` ends before `second` starts; else it starts after `second` ends."""
        if (first, second) in self.befores:
            return self.befores[first, second]
        if (second, first) in self.befores:
            return self.befores[second, first].negated()
        model = self.model
        literal = model.new_bool_var("")
        model.add(self.start[second] >= self.end[first]).only_enforce_if(literal)
        model.add(self.start[first] >= self.end[second]).only_enforce_if(literal.negated())
        self.befores[first, second] = literal
        shorter = ((first[0], first[1], first[2] - 1), second)
        if shorter in self.befores:
            model.add_implication(literal, self.befores[shorter])
        shorter = (first, (second[0], second[1], second[2] - 1))
        if shorter in self.befores:
            model.add_implication(self.befores[shorter], literal)
        return literal

    def finish(self, enough: int, hint: Sequence[Sequence[Task]] | None) -> None:
        """Adds the objective, down to `enough` ticks, and the orders to start from."""
        instance, model = self.instance, self.model
        cost = model.new_int_var(enough, max(enough, self.horizon), "")
        lowest = instance.stages_of[:, 0].tolist()
        head: list[int | None] = [0]
        for s in range(1, instance.stages):
            before = head[s - 1]
            fixed = before is not None and s in lowest
            wait = self.ticks.times[F][s - 1] + self.ticks.latency[s - 1]
            head.append(before + wait if before is not None and fixed else None)
        for s in range(instance.stages):
            first = lowest[int(instance.rank_of[s])]
            begin = 0
            if instance.span:
                # A rank begins as soon as it can; where that depends on no choice, it is known.
                begin = self.start[F, first, 0] if head[first] is None else head[first]
                if head[first] is not None:
                    model.add(self.start[F, first, 0] == begin)
            model.add(cost >= self.end[W, s, instance.microbatches - 1] - begin)
        model.minimize(cost)
        if hint is not None:
            value = max(enough, self._add_hint(hint))
            model.add(cost <= value)
            model.add_hint(cost, value)

    def _add_hint(self, rows: Sequence[Sequence[Task]]) -> int:
        """Returns the ticks that the orders take."""
        model, times = self.model, self.ticks.times
        start: dict[Task, int] = {}
        end: dict[Task, int] = {}
        value = 0
        begun = _run(self.instance, rows, times, self.ticks.latency)
        for row in rows:
            for kind, s, j in row:
                at = int(begun[kind, s, j])
                for part in (B, W) if kind == BW else (kind,):
                    start[part, s, j], end[part, s, j] = at, at + times[kind][s]
                if kind == BW and (s, j) in self.joins:
                    start[W, s, j] += times[B][s]
                if (s, j) in self.joins and kind in (B, BW):
                    model.add_hint(self.joins[s, j], kind == BW)
            kind, s, j = row[-1]
            first = int(begun[row[0]]) if self.instance.span else 0
            value = max(value, int(begun[kind, s, j]) + times[kind][s] - first)
        for task, variable in self.start.items():
            model.add_hint(variable, start[task])
        for s, j in self.joins:
            model.add_hint(self.end[B, s, j], end[B, s, j])
            model.add_hint(self.end[W, s, j], end[W, s, j])
        for (one, other), literal in self.befores.items():
            model.add_hint(literal, end[one] <= start[other])
        return value

    def orders(self, solver: Any) -> list[list[Task]]:
        """The orders of the solver's solution."""
        rows: list[list[tuple[int, Task]]] = [[] for _ in range(self.instance.ranks)]
        for task, variable in self.start.items():
            kind, s, j = task
            joint = self.backwards[s] == (BW,) or (
                (s, j) in self.joins and solver.boolean_value(self.joins[s, j])
            )
            if joint and kind == W:
                continue
            number = BW if joint and kind == B else kind
            rows[self.instance.rank_of[s]].append((solver.value(variable), (number, s, j)))
        return [[task for _, task in sorted(row)] for row in rows]
