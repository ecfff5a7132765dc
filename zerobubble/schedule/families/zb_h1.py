"""ZB-H1: 1F1B with the backward split, W put off to fill the bubble at the end.

Source: Qi et al., arXiv 2401.10241, the handcrafted schedule of section 2.2. Memory: at most p
microbatches on every rank (1F1B's rank 0), whatever B releases. Bubble: (p - 1)(F + B - W), a
third of 1F1B's when F = B = W. Use it for most of the gain without a second stage per rank.
"""

from __future__ import annotations

from zerobubble.schedule.costs import Costs
from zerobubble.schedule.ops import Kind, Op
from zerobubble.schedule.placement import Placement, linear

NAME = "zb-h1"
ALIASES = ("zbh1",)


def placement(ranks: int, _chunks: int | None) -> Placement:
    """One stage per rank, in order."""
    return linear(ranks)


def orders(placement: Placement, microbatches: int, _costs: Costs | None) -> list[list[Op]]:
    """1F1B's F and B; on rank r each W comes r microbatches after its B."""
    return [_order(placement.ranks, rank, microbatches) for rank in range(placement.ranks)]


def _order(ranks: int, rank: int, microbatches: int) -> list[Op]:
    warm_up = min(ranks - 1 - rank, microbatches)
    order = [Op(Kind.F, rank, microbatch) for microbatch in range(warm_up)]
    for backward in range(microbatches):
        if warm_up + backward < microbatches:
            order.append(Op(Kind.F, rank, warm_up + backward))
        order.append(Op(Kind.B, rank, backward))
        # Rank r runs r hops ahead of rank 0's last backward: it keeps r W for that time.
        if backward >= rank:
            order.append(Op(Kind.W, rank, backward - rank))
    for microbatch in range(max(0, microbatches - rank), microbatches):
        order.append(Op(Kind.W, rank, microbatch))
    return order
