"""1F1B-V: two stages per rank in a V, the backward joint.

Source: Qi et al., arXiv 2405.15362, the V placement without splitting the backward; here with the
building block whose ops never meet when BW = 2F: every hop takes half of a rank's time for one
microbatch. Memory: p microbatches on every rank. Bubble: 2(p - 1)(F + BW) / 3 when BW = 2F, two
thirds of 1F1B's. Use it where the backward cannot be split and 1F1B's memory is there on all
ranks.
"""

from __future__ import annotations

from zerobubble.schedule.costs import Costs
from zerobubble.schedule.families.building_block import Block
from zerobubble.schedule.ops import Kind, Op
from zerobubble.schedule.placement import Placement, v

NAME = "1f1b-v"
ALIASES = ("1f1bv",)

# F and BW of a chunk are 3 ops long together; the first B waits for its own W at the last turn.
_BLOCK = Block((3, 3, 3, 3), (0, 0, 1))


def placement(ranks: int, _chunks: int | None) -> Placement:
    """Stage s on rank s, then back: rank 0 holds the first and the last stage."""
    return v(ranks)


def orders(placement: Placement, microbatches: int, _costs: Costs | None) -> list[list[Op]]:
    """The building block repeated, with BW where it has B."""
    return [
        [
            Op(Kind.BW, op.stage, op.microbatch) if op.kind is Kind.B else op
            for op in row
            if op.kind is not Kind.W
        ]
        for row in _BLOCK.schedule(placement, microbatches).orders
    ]
