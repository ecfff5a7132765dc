"""Interleaved 1F1B: v stages per rank, so that the pipeline fills v times faster.

Source: Narayanan et al., arXiv 2104.04473; the order of Megatron-LM where p divides m. Any other
m takes the order for the next multiple of p and leaves out the microbatches that do not exist,
which cannot deadlock: an order without some microbatches waits for nothing new. A chunk runs
`group` microbatches before the next chunk does (p unless told otherwise; Megatron's microbatch
group size per virtual pipeline stage). Memory: rank 0 holds (p - 1) / v + p microbatches at most,
with a group g > p (v - 1)(g - p) / v more. Bubble: (p - 1)(F + BW) / v where p divides m, between
that and 1F1B's otherwise. Use it where links are fast (v times as many transfers) and memory
allows, with a larger group where transfers need more time to hide.
"""

from __future__ import annotations

from collections.abc import Sequence

from zerobubble.errors import UserError
from zerobubble.schedule.costs import Costs
from zerobubble.schedule.ops import Kind, Op
from zerobubble.schedule.placement import Placement, looped

NAME = "interleaved"
ALIASES = ("interleaved-1f1b", "1f1b-interleaved", "1f1b-i")
OPTIONS = ("group",)


def placement(ranks: int, chunks: int | None) -> Placement:
    """Stage s on rank s mod p; 2 stages per rank unless told otherwise."""
    return looped(ranks, 2 if chunks is None else chunks)


def orders(
    placement: Placement, microbatches: int, _costs: Costs | None, *, group: int | None = None
) -> list[list[Op]]:
    """Per rank: warm-up forwards, then F and BW in turn, then the remaining BW."""
    group = placement.ranks if group is None else group
    if group < placement.ranks:
        raise UserError(
            f"an interleave group of {group} microbatches on {placement.ranks} ranks would leave "
            f"ranks waiting for each other; use {placement.ranks} or more"
        )
    return [_order(placement, rank, microbatches, group) for rank in range(placement.ranks)]


def in_groups(kind: Kind, stages: Sequence[int], microbatches: int, group: int) -> list[Op]:
    """Ops by groups of microbatches, stage by stage within each; the last group is filled up."""
    return [
        Op(kind, stage, microbatch)
        for first in range(0, microbatches, group)
        for stage in stages
        for microbatch in range(first, first + group)
    ]


def _order(placement: Placement, rank: int, microbatches: int, group: int) -> list[Op]:
    ranks, stages = placement.ranks, placement.stages_of(rank)
    forwards = in_groups(Kind.F, stages, microbatches, group)
    backwards = in_groups(Kind.BW, stages[::-1], microbatches, group)
    # Each later rank gets its first gradient two ops earlier: one less hop there, one back.
    ahead = 2 * (ranks - 1 - rank) + (len(stages) - 1) * group
    warm_up = min(ahead, len(forwards))
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [forward, backward]
    order += backwards[len(forwards) - warm_up :]
    return [op for op in order if op.microbatch < microbatches]
