"""ZB-H2: ZB-H1 with twice the warm-up, so that no rank waits when F = B = W.

Source: Qi et al., arXiv 2401.10241, the handcrafted schedule of section 2.2. Memory: at most
2p - 1 microbatches on every rank, whatever B releases. Bubble: (p - 1)(F + B - 2W), none when
F = B = W, of the longest span (every rank ends one op after the rank before it); each hop adds
its latency. Use it where memory is plenty, F, B and W take about as long, and no barrier ends the
step.
"""

from __future__ import annotations

from zerobubble.schedule.costs import Costs
from zerobubble.schedule.ops import Kind, Op
from zerobubble.schedule.placement import Placement, linear

NAME = "zb-h2"
ALIASES = ("zbh2",)


def placement(ranks: int, _chunks: int | None) -> Placement:
    """One stage per rank, in order."""
    return linear(ranks)


def orders(placement: Placement, microbatches: int, _costs: Costs | None) -> list[list[Op]]:
    """2(p - r) - 1 forwards, then B, W and F in turn; on rank r W comes 2r microbatches late."""
    return [_order(placement.ranks, rank, microbatches) for rank in range(placement.ranks)]


def _order(ranks: int, rank: int, microbatches: int) -> list[Op]:
    # Rank r's first gradient has p - 1 - r hops to come back, after as many there.
    warm_up = min(2 * (ranks - rank) - 1, microbatches)
    # Rank r's last B is r hops before rank 0's, its end r hops after: W fills both.
    late = 2 * rank
    order = [Op(Kind.F, rank, microbatch) for microbatch in range(warm_up)]
    for backward in range(microbatches):
        order.append(Op(Kind.B, rank, backward))
        if backward >= late:
            order.append(Op(Kind.W, rank, backward - late))
        if warm_up + backward < microbatches:
            order.append(Op(Kind.F, rank, warm_up + backward))
    for microbatch in range(max(0, microbatches - late), microbatches):
        order.append(Op(Kind.W, rank, microbatch))
    return order
