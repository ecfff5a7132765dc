"""V-Min: two stages per rank in a V, a third of 1F1B's memory.

Source: Qi et al., arXiv 2405.15362. Memory: at most p/3 + 1 microbatches on every rank (rounded
up, and never more than p). Bubble: at most (2p - 3/2)(F + B + W)/3 when F = B = W, about two
thirds of 1F1B's, and more when they differ. Planned for the given costs (F = B = W without any): a
building block repeated, the same with W moved, and list schedules within the same memory; the
shortest wins. Use it where V-Half does not fit.
"""

from __future__ import annotations

from zerobubble.schedule.costs import Costs
from zerobubble.schedule.families.building_block import Block, build
from zerobubble.schedule.ops import Op
from zerobubble.schedule.placement import Placement, v

NAME = "v-min"
ALIASES = ("vmin",)

# One op per hop: the shortest lifespan that there is. Where 3 divides p, the B down the V would
# meet the F down without a wait at the second turn.
_BLOCKS = (
    Block((1, 1, 1, 1)),
    Block((1, 1, 1, 1), (0, 2, 0)),
    Block((1, 1, 1, 1), (2, 0, 0)),
    Block((1.25, 1, 1, 1), (4, 0, 0)),
)


def placement(ranks: int, _chunks: int | None) -> Placement:
    """Stage s on rank s, then back: rank 0 holds the first and the last stage."""
    return v(ranks)


def orders(
    placement: Placement, microbatches: int, costs: Costs | None
) -> tuple[tuple[Op, ...], ...]:
    """The shortest order found within the family's memory."""
    ranks = placement.ranks
    most_held = min(ranks, -(-ranks // 3) + 1)
    return build(placement, microbatches, costs, most_held, _BLOCKS)
