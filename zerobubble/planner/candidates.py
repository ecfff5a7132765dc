"""Candidates: the published families, priced for a problem, to beat and to start from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from zerobubble.errors import UserError
from zerobubble.planner.instance import Instance, Ints, to_numbers
from zerobubble.planner.kernels import Value, make_workspace, peak_memory, simulate_orders
from zerobubble.planner.refine import State
from zerobubble.planner.search import state_of_starts
from zerobubble.schedule import families
from zerobubble.schedule.costs import Costs
from zerobubble.schedule.ops import Kind, Op
from zerobubble.schedule.placement import Placement

_SEARCHING: dict[str, Callable[[int], int]] = {
    "zb-v": lambda ranks: ranks,
    "zb-1p": lambda ranks: ranks,
    "zb-2p": lambda ranks: 2 * ranks,
    "v-half": lambda ranks: min(ranks, -(-ranks // 2) + 1),
    "v-min": lambda ranks: min(ranks, -(-ranks // 3) + 1),
}
"""The microbatches of activations that each may hold on p ranks."""

Rows = tuple[tuple[Op, ...], ...]


@dataclass(frozen=True)
class Candidate:
    """One family's schedule of a problem and what it comes to."""

    schedule: str
    placement: Placement
    orders: Ints
    lengths: Ints
    value: Value
    peak_memory: tuple[float, ...]
    """Per rank, fixed memory included."""
    fits: bool
    state: State
    """Its own starts as priorities."""


def searching_families(instance: Instance, *, fitting: bool) -> list[str]:
    """The families that search themselves, so take long to build.

    Those that are sure to fit in memory, first those that use most of it; or all others.
    """
    held = instance.activation[instance.stages_of].sum(axis=1)
    return [
        name
        for name, microbatches in _SEARCHING.items()
        if fitting == bool((held * microbatches(instance.ranks) <= instance.limit).all())
    ]


def ready_families() -> list[str]:
    """The other families, which are built at once."""
    return [name for name in families.names() if name not in _SEARCHING]


def candidates(
    placement: Placement,
    costs: Costs,
    instance: Instance,
    names: Sequence[str],
    *,
    strict: bool = False,
) -> Iterator[Candidate]:
    """Those of the families `names` that live on `placement`.

    A family that plans for costs gets them; one that refuses this problem is left out, or, where
    `strict`, its UserError is raised.
    """
    for name in names:
        family = families.get(name)
        try:
            if family.placement(placement.ranks, None) != placement:
                built = family.placement(placement.ranks, placement.chunks)
                if built != placement:
                    continue
            rows = tuple(
                tuple(row) for row in family.orders(placement, instance.microbatches, costs)
            )
        except UserError:
            if strict:
                raise
            continue
        if any(op.slice for row in rows for op in row):
            if strict:
                raise UserError(
                    f"schedule {name!r} cuts microbatches into slices, a problem has the times of "
                    "whole ones; `zerobubble show` prices it, or choose another schedule"
                )
            continue
        yield price(family.name, placement, costs, instance, _joined(rows, costs))


def price(
    name: str, placement: Placement, costs: Costs, instance: Instance, rows: Rows
) -> Candidate:
    """What given rows of ops come to. Raises UserError where they deadlock."""
    orders, lengths = to_numbers(instance, rows)
    workspace = make_workspace(instance)
    value = simulate_orders(instance, orders, lengths, workspace.starts)
    if value.makespan == float("inf"):
        raise UserError(f"schedule {name!r} deadlocks; `zerobubble show` says where")
    for row in rows:
        for op in row:
            if op.kind is Kind.BW:
                workspace.whole[op.stage, op.microbatch] = True
    held = peak_memory(instance, orders, lengths)
    fixed = [
        sum(costs.fixed_memory[s] for s in placement.stages_of(rank))
        for rank in range(placement.ranks)
    ]
    return Candidate(
        schedule=name,
        placement=placement,
        orders=orders,
        lengths=lengths,
        value=value,
        peak_memory=tuple(float(h) + f for h, f in zip(held, fixed, strict=True)),
        fits=bool((held <= instance.limit).all()),
        state=state_of_starts(workspace.starts, workspace.whole, instance.chunks),
    )


def _joined(rows: Rows, costs: Costs) -> Rows:
    """The rows with one BW for B and W on the stages that cannot be split."""
    if not costs.joint_stages:
        return rows
    joined = []
    for row in rows:
        ops = []
        for op in row:
            if op.stage not in costs.joint_stages:
                ops.append(op)
            elif op.kind is Kind.B:
                ops.append(Op(Kind.BW, op.stage, op.microbatch, op.slice))
            elif op.kind is not Kind.W:
                ops.append(op)
        joined.append(tuple(ops))
    return tuple(joined)
