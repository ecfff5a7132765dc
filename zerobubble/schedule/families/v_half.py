"""V-Half: two stages per rank in a V, half of 1F1B's memory.

Source: Qi et al., arXiv 2405.15362. Memory: at most p/2 + 1 microbatches on every rank (rounded
up, and never more than p). Bubble: at most (p - 1)(F + B + W)/2 when F = B = W, half of 1F1B's.
Planned for the given costs (F = B = W without any): a building block repeated, the same with W
moved, and list schedules within the same memory; the shortest wins. Use it where p microbatches do
not fit.
"""

from __future__ import annotations

from zerobubble.schedule.costs import Costs
from zerobubble.schedule.families.building_block import Block, build
from zerobubble.schedule.ops import Op
from zerobubble.schedule.placement import Placement, v

NAME = "v-half"
ALIASES = ("vhalf",)

# Three ops for every two hops, half of a block of ZB-V; the waits are those that won.
_BLOCKS = (Block((1, 2, 1, 2), (3, 0, 4)), Block((1, 2, 1, 2), (3, 0, 1)))


def placement(ranks: int, _chunks: int | None) -> Placement:
    """Stage s on rank s, then back: rank 0 holds the first and the last stage."""
    return v(ranks)


def orders(
    placement: Placement, microbatches: int, costs: Costs | None
) -> tuple[tuple[Op, ...], ...]:
    """The shortest order found within the family's memory."""
    ranks = placement.ranks
    most_held = min(ranks, -(-ranks // 2) + 1)
    return build(placement, microbatches, costs, most_held, _BLOCKS)
