"""1F1B: after a warm-up, each rank alternates one forward and one backward.

Source: Narayanan et al., arXiv 1806.03377 (PipeDream) and 2006.09503 (its flushing form).
Memory: min(p - r, m) microbatches on rank r. Bubble: (p - 1)(F + BW), as GPipe. The default to
compare with: use it where a split backward costs more than its bubble, or where the last ranks
need the memory.
"""

from __future__ import annotations

from zerobubble.schedule.costs import Costs
from zerobubble.schedule.ops import Kind, Op
from zerobubble.schedule.placement import Placement, linear

NAME = "1f1b"


def placement(ranks: int, _chunks: int | None) -> Placement:
    """One stage per rank, in order."""
    return linear(ranks)


def orders(placement: Placement, microbatches: int, _costs: Costs | None) -> list[list[Op]]:
    """Warm-up of p - 1 - r forwards, then F and BW in turn, then the remaining BW."""
    return [_order(placement.ranks, rank, microbatches) for rank in range(placement.ranks)]


def _order(ranks: int, rank: int, microbatches: int) -> list[Op]:
    warm_up = min(ranks - 1 - rank, microbatches)
    order = [Op(Kind.F, rank, microbatch) for microbatch in range(warm_up)]
    for microbatch in range(warm_up, microbatches):
        order.append(Op(Kind.F, rank, microbatch))
        order.append(Op(Kind.BW, rank, microbatch - warm_up))
    for microbatch in range(microbatches - warm_up, microbatches):
        order.append(Op(Kind.BW, rank, microbatch))
    return order
