"""Interleaved ZB-H1: v stages per rank with the backward split, W put off by the rank.

Source: Qi et al., arXiv 2401.10241, ZB-H1's rule on the order of Narayanan et al., arXiv
2104.04473; torch calls it InterleavedZeroBubble. Memory: at most p microbatches on every rank.
Bubble: (p - 1)(F + B - W) / v where p divides m and W is the shortest. Any other m leaves out the
microbatches that do not exist. Use it where ZB-H1 is right and links can carry v times as much.
"""

from __future__ import annotations

from zerobubble.schedule.costs import Costs
from zerobubble.schedule.families.interleaved import in_groups
from zerobubble.schedule.ops import Kind, Op
from zerobubble.schedule.placement import Placement, looped

NAME = "interleaved-zb"
ALIASES = ("interleaved-zero-bubble", "interleavedzerobubble", "zb-interleaved")


def placement(ranks: int, chunks: int | None) -> Placement:
    """Stage s on rank s mod p; 2 stages per rank unless told otherwise."""
    return looped(ranks, 2 if chunks is None else chunks)


def orders(placement: Placement, microbatches: int, _costs: Costs | None) -> list[list[Op]]:
    """Interleaved 1F1B with a shorter warm-up; on rank r each W comes r ops after its B."""
    return [_order(placement, rank, microbatches) for rank in range(placement.ranks)]


def _order(placement: Placement, rank: int, microbatches: int) -> list[Op]:
    ranks, stages = placement.ranks, placement.stages_of(rank)
    forwards = in_groups(Kind.F, stages, microbatches, ranks)
    backwards = in_groups(Kind.B, stages[::-1], microbatches, ranks)
    # The gradient of a stage is one op away per rank, not two as with BW.
    warm_up = min(ranks - 1 - rank + (len(stages) - 1) * ranks, len(forwards))
    order = forwards[:warm_up]
    for index, backward in enumerate(backwards):
        order += forwards[warm_up + index : warm_up + index + 1]
        order.append(backward)
        # As ZB-H1: rank r runs r hops ahead of rank 0's last backward.
        if index >= rank:
            order.append(_weight(backwards[index - rank]))
    order += [_weight(op) for op in backwards[max(0, len(backwards) - rank) :]]
    return [op for op in order if op.microbatch < microbatches]


def _weight(op: Op) -> Op:
    return Op(Kind.W, op.stage, op.microbatch)
