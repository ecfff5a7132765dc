"""Forward only: the order of an evaluation, for any placement. Not a family to train with."""

from __future__ import annotations

from zerobubble.errors import UserError
from zerobubble.schedule.ops import Kind, Op
from zerobubble.schedule.placement import Placement
from zerobubble.schedule.schedule import Schedule


def forward_only(placement: Placement, microbatches: int) -> Schedule:
    """Every F once, in the order of a wave of microbatches through the stages.

    F of microbatch j on stage s belongs to step j + s, deeper stages first within a step, so
    every F comes after the one that it needs and no placement can deadlock. At most S tensors
    wait on a rank, whatever m.
    """
    if microbatches < 1:
        raise UserError(f"a forward-only schedule with {microbatches} microbatches; give 1 or more")
    orders = tuple(
        tuple(
            Op(Kind.F, stage, step - stage)
            for step in range(microbatches + placement.stages - 1)
            for stage in reversed(placement.stages_of(rank))
            if 0 <= step - stage < microbatches
        )
        for rank in range(placement.ranks)
    )
    return Schedule("forward-only", placement, microbatches, orders)
