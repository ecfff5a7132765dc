"""Planning: families as a start, a search per placement, and a bound to stop at."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from zerobubble.errors import UserError
from zerobubble.planner.bounds import lower_bound
from zerobubble.planner.candidates import Candidate, candidates, ready_families, searching_families
from zerobubble.planner.exact import solve
from zerobubble.planner.instance import TOLERANCE, Instance, make_instance, shortfall, to_ops
from zerobubble.planner.kernels import make_workspace, simulate_orders
from zerobubble.planner.layout import Layout, least_work, promising_layouts
from zerobubble.planner.problem import Objective, Problem
from zerobubble.planner.refine import State
from zerobubble.planner.result import Alternative, Plan, warnings_of
from zerobubble.planner.search import Best, compile_search, default_seconds, search, splitting_costs
from zerobubble.schedule import families
from zerobubble.schedule.costs import Costs
from zerobubble.schedule.placement import Placement
from zerobubble.schedule.schedule import Schedule
from zerobubble.schedule.verify import verify

Progress = Callable[[str], None]
"""Told, now and then, what the planner is at."""

_QUICKLY_BUILT = 2000  # ops
_LAYOUTS = 3  # per placement, searched side by side


class InfeasibleError(UserError):
    """No placement that the problem allows fits in memory; `rank` lacks `shortfall`."""

    def __init__(self, message: str, *, rank: int, shortfall: float) -> None:
        super().__init__(message)
        self.rank = rank
        self.shortfall = shortfall


def plan(
    problem: Problem,
    *,
    objective: Objective = "makespan",
    schedule: str = "auto",
    time_limit: float | None = None,
    prove: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> Plan:
    """The best schedule found for `problem` in `time_limit` seconds (see `default_seconds`).

    It fits every rank's limit, is verified, and is never worse than any of its alternatives that
    fits. The search ends early where a lower bound proves it optimal; `prove` gives what is left of
    the time, two thirds at least, to an exact solver. `schedule` names a family to
    take instead of the best; it is priced for the problem all the same. The time is for the search
    alone: compiling it the first time takes some seconds more.

    Raises InfeasibleError, naming rank and shortfall, where not even one microbatch fits, or where
    the family asked for does not; UserError for an unknown family or objective, or no time.
    """
    if objective not in ("makespan", "span"):
        raise UserError(f"objective is {objective!r}; use makespan or span")
    if time_limit is not None and not 0 < time_limit < math.inf:
        raise UserError(f"time limit is {time_limit:g}; give seconds above 0")
    say = progress or (lambda _: None)
    say("compiling the search loops, this first time only")
    compile_search()
    started = time.perf_counter()
    limit = default_seconds(problem.ranks) if time_limit is None else time_limit
    only = None if schedule == "auto" else families.get(schedule).name
    planner = _Planner(problem, objective, seed, say)
    planner.open_arenas(only)
    planner.price_families(started + limit, only)
    if only is None:
        # A proof gets the greater part of the time: the search rarely needs a third of it.
        planner.search(started + (limit / 3 if prove else limit))
        if prove:
            planner.prove(started + limit)
        planner.price_the_rest()
    return planner.finish(started, only)


def _hope(arena: _Arena) -> float:
    """What an arena's objective may come to: most of the way to the bound is usually gone."""
    bound = arena.best.lower_bound
    return bound + 0.3 * (arena.best.objective - bound)


@dataclass
class _Arena:
    """One placement and layout, and the best found there."""

    placement: Placement
    layout: Layout | None
    costs: Costs
    instance: Instance
    best: Best
    name: str = "searched"
    seeds: tuple[State, ...] = ()


class _Planner:
    def __init__(self, problem: Problem, objective: Objective, seed: int, say: Progress) -> None:
        self.problem = problem
        self.objective: Objective = objective
        self.seed = seed
        self.say = say
        self.arenas: list[_Arena] = []
        self.alternatives: list[tuple[Candidate, Alternative]] = []

    def open_arenas(self, only: str | None) -> None:
        """The placements (and layouts) that fit. Raises InfeasibleError where none does."""
        problem = self.problem
        missing: tuple[float, int, str, float, float] | None = None
        placements = problem.placements()
        if only is not None:
            family = families.get(only)
            placements = tuple(
                p
                for p in placements
                if p in (family.placement(p.ranks, None), _placement(only, p.ranks, p.chunks))
            )
            if not placements:
                wanted = family.placement(problem.ranks, None).name
                raise UserError(
                    f"schedule {only!r} lives on placement {wanted!r}, the problem asks for "
                    f"{problem.placement!r}; change one of them, or use placement 'any'"
                )
        for placement in placements:
            layouts: list[Layout | None] = [None]
            if problem.divisible:
                layouts = list(
                    promising_layouts(problem, placement, _LAYOUTS, span=self.objective == "span")
                )
            for layout in layouts:
                costs = problem.costs(placement, layout)
                instance = make_instance(
                    placement, problem.microbatches, costs, span=self.objective == "span"
                )
                lacks = shortfall(instance)
                if lacks is not None:
                    rank, short = lacks
                    least = float(instance.activation[instance.stages_of[rank]].sum())
                    fixed = sum(costs.fixed_memory[s] for s in placement.stages_of(rank))
                    if missing is None or short < missing[0]:
                        missing = short, rank, placement.name, least, fixed
                    continue
                best = Best(instance, lower_bound(instance))
                self.arenas.append(_Arena(placement, layout, costs, instance, best))
        if not self.arenas:
            assert missing is not None
            short, rank, name, least, fixed = missing
            raise InfeasibleError(
                f"infeasible: memory_limit of rank {rank} is {problem.memory_limit[rank]:g}, one "
                f"microbatch of its stages ({name}) needs {least:g} beside {fixed:g} of fixed "
                f"memory: {short:g} short; raise the limit or use more ranks",
                rank=rank,
                shortfall=short,
            )

    def price_families(self, deadline: float, only: str | None) -> None:
        """The published families as alternatives; those that fit are also where search begins.

        Families that search themselves are built as long as there is time: where the bound
        promises most first.
        """
        began = time.perf_counter()
        for arena in self.arenas:
            self._price(arena, [only] if only else ready_families(), strict=only is not None)
        if only:
            return
        # Turn by turn, so that no placement's families wait for all of another's.
        queues = [
            [(arena, name) for name in searching_families(arena.instance, fitting=True)]
            for arena in sorted(self.arenas, key=lambda arena: arena.best.lower_bound)
        ]
        for turn in itertools.chain(*itertools.zip_longest(*queues)):
            # Once the optimum is found, the rest is for the table alone.
            proved = not any(map(self._promising, self.arenas))
            spent = time.perf_counter() - began
            if turn and spent < (0.4 if proved else 0.25 * (deadline - began)):
                arena, name = turn
                self.say(f"pricing {name} on placement {arena.placement.name}")
                self._price(arena, [name])

    def price_the_rest(self) -> None:
        """For the table alone: families that may not fit, where that takes next to no time."""
        for arena in self.arenas:
            if 3 * arena.instance.stages * self.problem.microbatches <= _QUICKLY_BUILT:
                self._price(arena, searching_families(arena.instance, fitting=False))

    def _price(self, arena: _Arena, names: Sequence[str], *, strict: bool = False) -> None:
        for found in candidates(arena.placement, arena.costs, arena.instance, names, strict=strict):
            alternative = Alternative(
                schedule=found.schedule,
                placement=arena.placement.name,
                chunks=arena.placement.chunks,
                layout=arena.layout,
                makespan=found.value.makespan,
                longest_span=found.value.longest_span,
                peak_memory=found.peak_memory,
                fits=found.fits,
            )
            self.alternatives.append((found, alternative))
            arena.seeds = (*arena.seeds, found.state)
            if found.fits:
                before = arena.best.value
                arena.best.offer(found.orders, found.lengths, found.value)
                if arena.best.value is not before:
                    arena.name = found.schedule

    def search(self, deadline: float) -> None:
        """Search every arena a little, then the better ones longer."""
        rounds = (
            [(0.15, len(self.arenas)), (0.25, 2), (1.0, 1)] if len(self.arenas) > 1 else [(1.0, 1)]
        )
        for number, (share, most) in enumerate(rounds):
            racing = [arena for arena in self.arenas if self._promising(arena)]
            racing = sorted(racing, key=_hope)[:most]
            left = deadline - time.perf_counter()
            for arena in racing:
                if self._promising(arena):
                    seeds = () if number else arena.seeds
                    seconds = max(0.02, left * share / len(racing))
                    self._search_arena(arena, seconds, self.seed + number, seeds)

    def _search_arena(
        self, arena: _Arena, seconds: float, seed: int, seeds: Sequence[State]
    ) -> None:
        where = arena.placement.name
        before = arena.best.value

        def told(objective: float) -> None:
            self.say(f"searching on placement {where}: {self.objective} {objective:.6g} so far")

        search(arena.best, seconds, seed=seed, seeds=seeds, progress=told)
        if arena.best.value is not before:
            arena.name = "searched"

    def prove(self, deadline: float) -> None:
        """Give what is left of the time to the exact solver, the most promising arena first."""
        for arena in self._by_value():
            left = deadline - time.perf_counter()
            best = arena.best
            if left <= 0 or not self._promising(arena):
                continue
            self.say(f"proving on placement {arena.placement.name}")
            least = min(other.best.objective for other in self.arenas)
            hint = None
            if best.orders is not None and best.lengths is not None:
                hint = best.orders, best.lengths
            exact = solve(
                arena.instance,
                seconds=left,
                hint=hint,
                lower_bound=best.lower_bound,
                split_choice=splitting_costs(arena.instance),
            )
            best.lower_bound = max(best.lower_bound, exact.lower_bound)
            if exact.orders is None or exact.lengths is None:
                continue
            starts = make_workspace(arena.instance).starts
            value = simulate_orders(arena.instance, exact.orders, exact.lengths, starts)
            best.offer(exact.orders, exact.lengths, value)
            if best.objective < least:
                arena.name = "exact"

    def finish(self, started: float, only: str | None) -> Plan:
        """The plan, verified."""
        arena = self._by_value()[0]
        best = arena.best
        if best.orders is None or best.lengths is None:
            raise self._unfit(only)
        rows = to_ops(arena.instance, best.orders, best.lengths)
        schedule = Schedule(arena.name, arena.placement, self.problem.microbatches, rows)
        timeline = verify(schedule, arena.costs).timeline
        value = timeline.longest_span if self.objective == "span" else timeline.end
        bound = min(other.best.lower_bound for other in self.arenas)
        if self.problem.divisible:
            bound = min(bound, least_work(self.problem))
        proven = value <= bound * (1 + 1e-7)
        found = Plan(
            schedule=schedule,
            costs=arena.costs,
            layout=arena.layout,
            objective=self.objective,
            timeline=timeline,
            lower_bound=min(bound, value),
            proven_optimal=proven,
            alternatives=tuple(
                sorted(
                    (other for _, other in self.alternatives),
                    key=lambda other: (not other.fits, other.objective(self.objective)),
                )
            ),
            warnings=(),
            planning_seconds=time.perf_counter() - started,
        )
        return replace(found, warnings=tuple(warnings_of(found)))

    def _by_value(self) -> list[_Arena]:
        return sorted(self.arenas, key=lambda arena: (arena.best.objective, arena.best.lower_bound))

    def _promising(self, arena: _Arena) -> bool:
        """Whether a better schedule may be there."""
        least = min(other.best.objective for other in self.arenas)
        return not arena.best.proved.is_set() and arena.best.lower_bound < least * (1 - TOLERANCE)

    def _unfit(self, only: str | None) -> InfeasibleError:
        """The family asked for does not fit."""
        limits = self.problem.memory_limit
        short, rank, candidate = min(
            (
                *max((peak - limits[r], r) for r, peak in enumerate(found.peak_memory)),
                found.schedule,
            )
            for found, _ in self.alternatives
        )
        return InfeasibleError(
            f"infeasible: schedule {only or candidate!r} needs {limits[rank] + short:g} on rank "
            f"{rank}, memory_limit is {limits[rank]:g}: {short:g} short; use --schedule auto or "
            "raise the limit",
            rank=rank,
            shortfall=short,
        )


def _placement(name: str, ranks: int, chunks: int) -> Placement | None:
    try:
        return families.get(name).placement(ranks, chunks)
    except UserError:
        return None
