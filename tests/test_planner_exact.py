"""The exact solver: known optima, and agreement with a search through all orders."""

import itertools
import json
import math
import random
from pathlib import Path

import pytest

from tests.referee import judge
from zerobubble.planner.exact import BW, B, F, Task, W, evaluate, keeps_limits, solve
from zerobubble.planner.instance import Instance, make_instance, to_numbers, to_ops
from zerobubble.planner.problem import parse_problem
from zerobubble.schedule import families
from zerobubble.schedule.costs import Costs
from zerobubble.schedule.ops import Kind
from zerobubble.schedule.placement import Placement, linear, looped, v
from zerobubble.schedule.schedule import Schedule
from zerobubble.schedule.simulate import simulate

TARGETS = Path(__file__).parent.parent / "benchmarks/reference/planner_targets.json"


def target(name: str) -> dict:
    cases = json.loads(TARGETS.read_text())["cases"]
    return next(case for case in cases if case["id"] == name)


def instance_of(document: dict, *, span: bool = False) -> Instance:
    problem = parse_problem(document)
    (placement,) = problem.placements()
    return make_instance(placement, problem.microbatches, problem.costs(placement), span=span)


def enumerate_orders(instance: Instance, split_choice: bool = False) -> float:
    """The best objective over all orders, by trying them; inf where none keeps the limits.

    Appends ops to the ranks' rows in the order of their starts, each as early as it can, and
    leaves what cannot be better than the best so far.
    """
    stages, m, ranks = instance.stages, instance.microbatches, instance.ranks
    rank_of, times = instance.rank_of.tolist(), instance.times.tolist()
    wait, limit = instance.latency.tolist(), instance.limit.tolist()
    held, freed = instance.activation.tolist(), instance.released.tolist()
    joint = instance.joint.tolist()
    shortest = [
        min(times[B][s] + times[W][s], times[BW][s] if split_choice or joint[s] else math.inf)
        for s in range(stages)
    ]
    best = math.inf
    seen = set()
    end: dict[Task, float] = {}
    begun: list[float | None] = [None] * ranks
    clock, live = [0.0] * ranks, [0.0] * ranks
    count = [[0] * stages for _ in range(3)]  # Fs, Bs and Ws so far

    def left(rank: int) -> float:
        total = 0.0
        for s in range(stages):
            if rank_of[s] == rank:
                total += (m - count[F][s]) * times[F][s] + (m - count[B][s]) * shortest[s]
                total += (count[B][s] - count[W][s]) * times[W][s]
        return total

    def ready(kind: int, s: int) -> float | None:
        """When the next op of this kind and stage could start, or None."""
        j = count[B if kind == BW else kind][s]
        if j == m:
            return None
        if kind == W:
            return end.get((B, s, j))
        if kind == F:
            needs = [(F, s - 1, j)] if s else []
        else:
            if joint[s] != (kind == BW) and not (split_choice and not joint[s]):
                return None
            if kind == BW and count[W][s] < j:
                return None  # the W of an earlier microbatch first
            needs = [(F, s, j)] + ([(B, s + 1, j)] if s + 1 < stages else [])
        if any(need not in end for need in needs):
            return None
        gap = {s - 1: wait[s - 1] if s else 0.0, s: 0.0, s + 1: wait[s]}
        return max([0.0, *(end[need] + gap[need[1]] for need in needs)])

    def visit(now: float, missing: int) -> None:
        nonlocal best
        start = [x or 0.0 for x in begun] if instance.span else [0.0] * ranks
        if max(clock[r] + left(r) - start[r] for r in range(ranks)) >= best - 1e-12:
            return
        if not missing:
            best = max(clock[r] - start[r] for r in range(ranks))
            return
        state = (now, *clock, *live, *begun, *itertools.chain(*count), *sorted(end.items()))
        if state in seen:
            return
        seen.add(state)
        for s, kind in itertools.product(range(stages), range(4)):
            at, r = ready(kind, s), rank_of[s]
            if at is None or max(at, clock[r]) < now:
                continue
            if kind == F and live[r] + held[s] > limit[r]:
                continue
            at = max(at, clock[r])
            j = count[B if kind == BW else kind][s]
            before = clock[r], live[r], begun[r]
            clock[r] = at + times[kind][s]
            live[r] += (held[s], -freed[s], freed[s] - held[s], -held[s])[kind]
            begun[r] = at if begun[r] is None else begun[r]
            parts = (B, W) if kind == BW else (kind,)
            for part in parts:
                count[part][s] += 1
                end[part, s, j] = clock[r]
            visit(at, missing - len(parts))
            for part in parts:
                count[part][s] -= 1
                del end[part, s, j]
            clock[r], live[r], begun[r] = before

    visit(0.0, 3 * stages * m)
    return best


def tiny_instance(rng: random.Random, *, span: bool) -> Instance:
    """At most 2 ranks, 2 microbatches and 4 stages, of any shape."""
    ranks = rng.choice([1, 2, 2])
    placement = rng.choice([linear(ranks), v(ranks), looped(ranks, 2)])
    stages = placement.stages

    def amounts() -> tuple[float, ...]:
        return tuple(rng.choice([0.0, 0.0, 0.5, 1.0, 1.3, 2.0]) for _ in range(stages))

    f, b, w = amounts(), amounts(), amounts()
    over = rng.choice([1.0, 1.0, 1.25])
    activation = tuple(rng.choice([0.0, 0.5, 1.0]) for _ in range(stages))
    need = [sum(activation[s] for s in placement.stages_of(r)) for r in range(ranks)]
    return make_instance(
        placement,
        rng.choice([1, 2, 2]),
        Costs(
            forward=f,
            backward_input=tuple(x * over for x in b),
            backward_weight=tuple(x * over for x in w),
            backward_joint=tuple(x + y for x, y in zip(b, w, strict=True)),
            link_latency=tuple(rng.choice([0.0, 0.2, 1.0]) for _ in range(stages - 1)),
            activation=activation,
            released_by_backward_input=(rng.choice([0.0, 0.5, 1.0]),) * stages,
            fixed_memory=(0.0,) * stages,
            memory_limit=tuple(x * rng.choice([1.0, 1.25, 1.5, 9.0]) for x in need),
            joint_stages=frozenset(s for s in range(stages) if rng.random() < 0.2),
        ),
        span=span,
    )


@pytest.mark.parametrize("span", [False, True])
@pytest.mark.parametrize("split_choice", [False, True])
def test_finds_the_best_of_all_orders(span: bool, split_choice: bool) -> None:
    rng = random.Random(2 * span + split_choice)
    for _ in range(12):
        instance = tiny_instance(rng, span=span)
        exact = solve(instance, seconds=10, split_choice=split_choice)
        assert exact.optimal
        assert exact.value == pytest.approx(enumerate_orders(instance, split_choice), rel=1e-9)


@pytest.mark.parametrize(
    "name",
    ["proved-p4-m8-linear-K3-link0.2", "proved-p4-m4-v-K4-link0.2", "proved-p4-m4-v-K3"],
)
def test_proves_known_optima(name: str) -> None:
    document = target(name)
    instance = instance_of(document)
    exact = solve(instance, seconds=30)
    assert exact.optimal
    assert exact.value == pytest.approx(document["proved_optimum"], abs=1e-9)
    assert exact.orders is not None
    assert exact.lengths is not None
    rows = to_ops(instance, exact.orders, exact.lengths)
    plan = {
        "orders": [[op.text for op in row] for row in rows],
        "makespan": exact.value,
        "lower_bound": exact.lower_bound,
        "proven_optimal": True,
    }
    (placement,) = parse_problem(document).placements()
    costs = parse_problem(document).costs(placement)
    timeline = simulate(Schedule("exact", placement, document["microbatches"], rows), costs)
    assert max(row[-1].end for row in timeline.rows) == pytest.approx(exact.value)
    spans = [row[-1].end - row[0].start for row in timeline.rows]
    judge(document, plan | {"longest_span": max(spans), "peak_memory": [*timeline.peak_memory]})


def uniform(placement: Placement, microbatches: int, **changes: object) -> Instance:
    """One unit per op, nothing released at B, no latency, no limit."""
    settings = {"link_latency": 0.0, "memory_limit": None, "released_by_backward_input": 0.0}
    settings |= changes
    costs = Costs.per_stage(
        [(1.0, 1.0, 1.0)] * placement.stages,
        ranks=placement.ranks,
        **settings,  # type: ignore[arg-type]
    )
    return make_instance(placement, microbatches, costs)


def test_span_of_two_ranks_has_no_bubble() -> None:
    # Zero bubble: with W to fill, no rank idles but to start (rank 1, 1 unit).
    instance = uniform(linear(2), 4)
    assert solve(instance, seconds=10).value == 13  # 3 m + (p - 1)
    assert solve(instance._replace(span=True), seconds=10).value == 12  # 3 m


def test_one_activation_runs_one_microbatch_at_a_time() -> None:
    # F down two ranks, B up, W beside the other rank's B or next F.
    exact = solve(uniform(linear(2), 3, memory_limit=1.0), seconds=10)
    # Rank 0 holds a microbatch from F to W: F, 2 units elsewhere, B, W.
    assert exact.optimal
    assert exact.value == 15


def test_rounded_times_still_prove() -> None:
    third = 1 / 3
    placement = linear(3)
    costs = Costs.per_stage([(third, third, third)] * 3, memory_limit=2.0, ranks=3)
    whole = solve(uniform(placement, 4, memory_limit=2.0), seconds=10)
    exact = solve(make_instance(placement, 4, costs), seconds=10)
    assert exact.optimal
    assert exact.value == pytest.approx(whole.value / 3, rel=1e-12)


def test_all_times_zero() -> None:
    instance = uniform(linear(2), 2, memory_limit=1.0)
    exact = solve(instance._replace(times=instance.times * 0), seconds=10)
    assert (exact.value, exact.lower_bound, exact.optimal) == (0, 0, True)


def test_too_little_memory_has_no_orders() -> None:
    exact = solve(uniform(v(2), 2, memory_limit=1.0), seconds=10)
    assert exact.orders is None
    assert (exact.value, exact.lower_bound, exact.optimal) == (math.inf, math.inf, False)


def test_hint_and_bound_end_the_search() -> None:
    instance = uniform(linear(2), 4)
    best = solve(instance, seconds=10)
    assert best.orders is not None
    assert best.lengths is not None
    again = solve(instance, seconds=0.0, hint=(best.orders, best.lengths), lower_bound=13)
    assert (again.value, again.lower_bound, again.optimal) == (13, 13, True)
    assert solve(instance, seconds=10, stop_at=18).value <= 18
    with pytest.raises(ValueError, match="lower bound is 14"):
        solve(instance, seconds=10, hint=(best.orders, best.lengths), lower_bound=14)


def test_hint_is_kept_when_time_is_short() -> None:
    document = target("comm0.2-p8-m16-v-K8")
    instance = instance_of(document)
    hint = to_numbers(instance, families.build("zb-v", 8, 16).orders)
    exact = solve(instance, seconds=0.01, hint=hint)
    assert exact.orders is not None
    assert exact.value == pytest.approx(evaluate(instance, rows_of(instance, hint)))
    assert not exact.optimal


def rows_of(instance: Instance, orders: tuple) -> list[list[Task]]:
    kinds = (Kind.F, Kind.B, Kind.W, Kind.BW)
    rows = to_ops(instance, *orders)
    return [[(kinds.index(op.kind), op.stage, op.microbatch) for op in row] for row in rows]


def test_hint_that_passes_a_limit_is_refused() -> None:
    wide = solve(uniform(linear(2), 3), seconds=10)
    tight = uniform(linear(2), 3, memory_limit=1.0)
    assert wide.orders is not None
    assert wide.lengths is not None
    assert not keeps_limits(tight, rows_of(tight, (wide.orders, wide.lengths)))
    with pytest.raises(ValueError, match="memory limit"):
        solve(tight, seconds=10, hint=(wide.orders, wide.lengths))


def test_joint_stages_and_chosen_ones_run_bw() -> None:
    costs = Costs.per_stage([(1.0, 2.0, 2.0)] * 2)
    joint = make_instance(linear(2), 2, dataclass_replace(costs, joint_stages=frozenset({0, 1})))
    exact = solve(joint, seconds=10)
    assert exact.orders is not None
    assert exact.lengths is not None
    rows = to_ops(joint, exact.orders, exact.lengths)
    assert {op.kind for row in rows for op in row} == {Kind.F, Kind.BW}
    assert exact.value == 15  # 1F1B: (m + p - 1)(F + BW)
    # Split at twice the time, a W is worth it nowhere: one rank gains nothing from it.
    dear = make_instance(linear(1), 2, dearer(Costs.per_stage([(1.0, 2.0, 2.0)])))
    assert solve(dear, seconds=10).value == 18
    assert solve(dear, seconds=10, split_choice=True).value == 10


def dataclass_replace(costs: Costs, **changes: object) -> Costs:
    return Costs(**({name: getattr(costs, name) for name in costs.__dataclass_fields__} | changes))


def dearer(costs: Costs) -> Costs:
    return dataclass_replace(
        costs,
        backward_input=tuple(2 * x for x in costs.backward_input),
        backward_weight=tuple(2 * x for x in costs.backward_weight),
    )
