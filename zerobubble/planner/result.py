"""Plans: a verified schedule, how good it is for certain, and what it beat."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from zerobubble.planner.instance import TOLERANCE
from zerobubble.planner.layout import Layout
from zerobubble.planner.problem import Objective
from zerobubble.schedule.costs import Costs
from zerobubble.schedule.ops import Kind
from zerobubble.schedule.schedule import Schedule
from zerobubble.schedule.timeline import Timeline


@dataclass(frozen=True)
class Alternative:
    """A published family on the same problem."""

    schedule: str
    placement: str
    chunks: int
    layout: Layout | None
    makespan: float
    longest_span: float
    peak_memory: tuple[float, ...]
    fits: bool

    def objective(self, objective: Objective) -> float:
        """The makespan or the longest span."""
        return self.longest_span if objective == "span" else self.makespan


@dataclass(frozen=True)
class RankReport:
    """Where a rank's share of the makespan goes, and its memory."""

    work: float
    imbalance: float
    """What it has less to do than the busiest rank."""
    bubble: float
    """The rest of its idle time."""
    fixed_memory: float
    peak_memory: float
    memory_limit: float | None


@dataclass(frozen=True)
class Plan:
    """A verified schedule within the limits, with its certificate."""

    schedule: Schedule
    costs: Costs
    layout: Layout | None
    """Blocks per stage, where the planner divided them."""
    objective: Objective
    timeline: Timeline
    lower_bound: float
    """No schedule on any placement that the problem allows has a smaller objective."""
    proven_optimal: bool
    alternatives: tuple[Alternative, ...]
    warnings: tuple[str, ...]
    planning_seconds: float

    @property
    def value(self) -> float:
        """The objective: the makespan or the longest span."""
        return self.longest_span if self.objective == "span" else self.makespan

    @property
    def makespan(self) -> float:
        """From time 0 to the latest end."""
        return self.timeline.end

    @property
    def longest_span(self) -> float:
        """The longest time from one rank's first start to its last end."""
        return self.timeline.longest_span

    @property
    def gap(self) -> float:
        """How far above the lower bound the plan may be, as a share of the bound."""
        return self.value / self.lower_bound - 1 if self.lower_bound else 0.0

    def ranks(self) -> tuple[RankReport, ...]:
        """Per rank: work, idle time by cause, memory."""
        work = [self.timeline.work(rank) for rank in range(self.schedule.ranks)]
        makespan = self.makespan
        limits = self.costs.memory_limit
        assert self.timeline.peak_memory is not None
        reports = []
        for rank, held in enumerate(map(self.schedule.placement.stages_of, range(len(work)))):
            imbalance = max(work) - work[rank]
            if imbalance < TOLERANCE * max(work):
                imbalance = 0.0  # the same work, summed in another order
            limit = limits[rank] if limits is not None else math.inf
            reports.append(
                RankReport(
                    work=work[rank],
                    imbalance=imbalance,
                    bubble=makespan - work[rank] - imbalance,
                    fixed_memory=sum(self.costs.fixed_memory[s] for s in held),
                    peak_memory=self.timeline.peak_memory[rank],
                    memory_limit=None if limit == math.inf else limit,
                )
            )
        return tuple(reports)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON has it (docs/planning.md)."""
        placement = self.schedule.placement
        work = max(report.work for report in self.ranks())
        document: dict[str, Any] = {
            "schedule": self.schedule.name,
            "placement": placement.name,
            "chunks": placement.chunks,
            "objective": self.objective,
            "makespan": self.makespan,
            "longest_span": self.longest_span,
            "bubble_rate": _rate(self.makespan, work),
            "longest_span_bubble_rate": _rate(self.longest_span, work),
            "lower_bound": self.lower_bound,
            "gap": self.gap,
            "proven_optimal": self.proven_optimal,
            "peak_memory": list(self.timeline.peak_memory or ()),
            "planning_seconds": self.planning_seconds,
            "per_rank": [vars(report) for report in self.ranks()],
            "alternatives": [vars(other) for other in self.alternatives],
            "warnings": list(self.warnings),
            "orders": [[op.text for op in row] for row in self.schedule.orders],
        }
        if self.layout is not None:
            document["layout"] = list(self.layout)
        return document


def _rate(cost: float, work: float) -> float:
    return (cost - work) / cost if cost else 0.0


def warnings_of(found: Plan) -> list[str]:
    """What its user should know about a plan: little to gain, layers in the wrong place."""
    said = []
    classics = [
        other
        for other in found.alternatives
        if other.schedule in ("1f1b", "interleaved") and other.fits
    ]
    split = any(op.kind is Kind.W for row in found.schedule.orders for op in row)
    if classics and split:
        classic = min(classics, key=lambda other: other.objective(found.objective))
        before = classic.objective(found.objective)
        gain = 1 - found.value / before if before else 0.0
        if gain < 0.05:
            work = max(report.work for report in found.ranks())
            dearer = (before - found.value) / work if work else 0.0
            said.append(
                f"the gain over {classic.schedule} is {100 * gain:.1f}%: if splitting makes all "
                f"work {100 * dearer:.1f}% dearer it is gone; measure it and give split_overhead"
            )
    reports = found.ranks()
    heaviest = max(range(len(reports)), key=lambda rank: reports[rank].work)
    gap = sum(report.imbalance for report in reports) / len(reports)
    if found.layout is None and gap > 0.02 * found.makespan:
        said.append(
            f"rank {heaviest} has {reports[heaviest].work:g} of work, the mean is "
            f"{reports[heaviest].work - gap:g}: move layers off rank {heaviest} (give layer_times "
            "instead of stage_times and the planner does it); that is imbalance, no bubble"
        )
    return said
