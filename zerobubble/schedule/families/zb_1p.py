"""ZB-1p: zero bubble planned for the costs, within 1F1B's memory of p microbatches.

Source: Qi et al., arXiv 2401.10241, section 3.1. Memory: at most p microbatches on every rank.
Bubble: never more than ZB-H1's, so (p - 1)(F + B - W) at most on equal costs. Planned for the
given costs (F = B = W without any), which may differ from stage to stage or be zero; the longest
span is made short, then the makespan. Use it where ranks differ and a second stage per rank (zb-v)
does not pay.
"""

from __future__ import annotations

from zerobubble.schedule.costs import Costs
from zerobubble.schedule.families.heuristic import shortest
from zerobubble.schedule.ops import Op
from zerobubble.schedule.placement import Placement, linear

NAME = "zb-1p"
ALIASES = ("zb1p",)


def placement(ranks: int, _chunks: int | None) -> Placement:
    """One stage per rank, in order."""
    return linear(ranks)


def orders(
    placement: Placement, microbatches: int, costs: Costs | None
) -> tuple[tuple[Op, ...], ...]:
    """The shortest order found that holds at most p microbatches."""
    return shortest(
        placement, microbatches, costs or Costs.uniform(placement.stages), placement.ranks
    )
