"""Seq1F1B: 1F1B on slices of the sequence, so that the pipeline fills k times faster.

Source: Sun et al., arXiv 2406.03488. A slice's F follows the slices before it, its BW those after
it, so the backward of a microbatch takes its k slices in descending order. Memory:
(p - r + k - 1) / k microbatches on rank r. Bubble: (p - 1)(F + BW) / k with slices that take as
long. Use it for long sequences: less memory and less bubble than 1F1B with the same transfers.
`slices`: k, 4 unless told otherwise. Costs are those of one slice.
"""

from __future__ import annotations

from zerobubble.errors import UserError
from zerobubble.schedule.costs import Costs
from zerobubble.schedule.ops import Kind, Op
from zerobubble.schedule.placement import Placement, linear

NAME = "seq1f1b"
ALIASES = ("seq-1f1b",)
OPTIONS = ("slices",)


def placement(ranks: int, _chunks: int | None) -> Placement:
    """One stage per rank, in order."""
    return linear(ranks)


def orders(
    placement: Placement, microbatches: int, _costs: Costs | None, *, slices: int | None = None
) -> list[list[Op]]:
    """1F1B's order, with the first microbatch's other slices in the warm-up too."""
    slices = 4 if slices is None else slices
    if slices < 1:
        raise UserError(f"schedule {NAME!r} with {slices} slices per sequence; give 1 or more")
    return [
        _order(rank, placement.ranks - 1 - rank, microbatches, slices)
        for rank in range(placement.ranks)
    ]


def _order(stage: int, ahead: int, microbatches: int, slices: int) -> list[Op]:
    microbatch_range, slice_range = range(microbatches), range(slices)
    forwards = [Op(Kind.F, stage, j, k) for j in microbatch_range for k in slice_range]
    backwards = [Op(Kind.BW, stage, j, k) for j in microbatch_range for k in reversed(slice_range)]
    warm_up = min(ahead + slices - 1, len(forwards))
    order = forwards[:warm_up]
    for index, backward in enumerate(backwards):
        order += forwards[warm_up + index : warm_up + index + 1]
        order.append(backward)
    return order
