"""ZB-2p: zero bubble planned for the costs, within 2p microbatches.

Source: Qi et al., arXiv 2401.10241, section 3.1. Memory: at most 2p microbatches on every rank.
Bubble: none when F = B = W, never more than ZB-H2's. Planned for the given costs (F = B = W
without any), which may differ from stage to stage or be zero; the longest span is made short, then
the makespan. Use it where memory is plenty and no barrier ends the step.
"""

from __future__ import annotations

from zerobubble.schedule.costs import Costs
from zerobubble.schedule.families.heuristic import shortest
from zerobubble.schedule.ops import Op
from zerobubble.schedule.placement import Placement, linear

NAME = "zb-2p"
ALIASES = ("zb2p",)


def placement(ranks: int, _chunks: int | None) -> Placement:
    """One stage per rank, in order."""
    return linear(ranks)


def orders(
    placement: Placement, microbatches: int, costs: Costs | None
) -> tuple[tuple[Op, ...], ...]:
    """The shortest order found that holds at most 2p microbatches."""
    return shortest(
        placement, microbatches, costs or Costs.uniform(placement.stages), 2 * placement.ranks
    )
