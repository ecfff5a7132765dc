"""Interleaved 1F1B: v stages per rank, so that the pipeline fills v times faster.

Source: Narayanan et al., arXiv 2104.04473; the order of Megatron-LM where p divides m. Any other
m takes the order for the next multiple of p and leaves out the microbatches that do not exist,
which cannot deadlock: an order without some microbatches waits for nothing new. Memory: rank 0
holds (p - 1) / v + p microbatches at most. Bubble: (p - 1)(F + BW) / v where p divides m,
between that and 1F1B's otherwise. Use it where links are fast (v times as many transfers) and
memory allows.
"""

from __future__ import annotations

from zerobubble.schedule.costs import Costs
from zerobubble.schedule.ops import Kind, Op
from zerobubble.schedule.placement import Placement, looped

NAME = "interleaved"
ALIASES = ("interleaved-1f1b", "1f1b-interleaved", "1f1b-i")


def placement(ranks: int, chunks: int | None) -> Placement:
    """Stage s on rank s mod p; 2 stages per rank unless told otherwise."""
    return looped(ranks, 2 if chunks is None else chunks)


def orders(placement: Placement, microbatches: int, _costs: Costs | None) -> list[list[Op]]:
    """Per rank: warm-up forwards, then F and BW in turn, then the remaining BW."""
    return [_order(placement, rank, microbatches) for rank in range(placement.ranks)]


def _order(placement: Placement, rank: int, microbatches: int) -> list[Op]:
    ranks, stages = placement.ranks, placement.stages_of(rank)
    padded = -(-microbatches // ranks) * ranks
    forwards = [
        Op(Kind.F, stage, microbatch)
        for first in range(0, padded, ranks)
        for stage in stages
        for microbatch in range(first, first + ranks)
    ]
    backwards = [
        Op(Kind.BW, stage, microbatch)
        for first in range(0, padded, ranks)
        for stage in reversed(stages)
        for microbatch in range(first, first + ranks)
    ]
    # Each later rank gets its first gradient two ops earlier: one less hop there, one back.
    ahead = 2 * (ranks - 1 - rank) + (len(stages) - 1) * ranks
    warm_up = min(ahead, len(forwards))
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [forward, backward]
    order += backwards[len(forwards) - warm_up :]
    return [op for op in order if op.microbatch < microbatches]
