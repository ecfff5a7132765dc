"""Measured costs: what a plan needs to know, read off timelines of real iterations."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from zerobubble.errors import UserError
from zerobubble.schedule.costs import Costs
from zerobubble.schedule.ops import Kind
from zerobubble.schedule.timeline import Timeline


def measured_costs(timelines: Sequence[Timeline]) -> Costs:
    """The median time of every kind of op on every stage, in the timelines' unit.

    Links cost nothing here, every F adds 1 of memory and W (or BW) releases all of it. Where a
    stage ran B and W apart, a joint backward is taken as their sum; where it ran BW, B is
    taken as all of it.

    Raises UserError if there is no timeline or a stage has no F or no backward in it.
    """
    if not timelines:
        raise UserError("no timeline to measure; run at least one iteration")
    stages = timelines[0].placement.stages
    found: dict[tuple[Kind, int], list[float]] = {}
    for timeline in timelines:
        for _, timed in timeline:
            found.setdefault((timed.op.kind, timed.op.stage), []).append(timed.end - timed.start)

    def row(kind: Kind) -> list[float]:
        return [median(found.get((kind, stage), [0.0])) for stage in range(stages)]

    forward, backward, weight, joint = (row(kind) for kind in (Kind.F, Kind.B, Kind.W, Kind.BW))
    for stage in range(stages):
        if not forward[stage] or not (backward[stage] or joint[stage]):
            raise UserError(f"stage {stage} has no F or no backward in the timelines")
    split = [value > 0 for value in backward]
    return Costs(
        forward=tuple(forward),
        backward_input=tuple(b if s else j for b, j, s in zip(backward, joint, split, strict=True)),
        backward_weight=tuple(weight),
        backward_joint=tuple(
            b + w if s else j for b, w, j, s in zip(backward, weight, joint, split, strict=True)
        ),
        link_latency=(0.0,) * (stages - 1),
        activation=(1.0,) * stages,
        released_by_backward_input=(0.0,) * stages,
        fixed_memory=(0.0,) * stages,
    )
