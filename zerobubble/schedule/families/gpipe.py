"""GPipe: all forwards, then all backwards.

Source: Huang et al., arXiv 1811.06965. Memory: m microbatches on every rank. Bubble:
(p - 1)(F + BW), a share (p - 1) / (m + p - 1) of the makespan. Use it as the baseline, or where
memory does not matter: no schedule is simpler.
"""

from __future__ import annotations

from zerobubble.schedule.costs import Costs
from zerobubble.schedule.ops import Kind, Op
from zerobubble.schedule.placement import Placement, linear

NAME = "gpipe"


def placement(ranks: int, _chunks: int | None) -> Placement:
    """One stage per rank, in order."""
    return linear(ranks)


def orders(placement: Placement, microbatches: int, _costs: Costs | None) -> list[list[Op]]:
    """Every F, then every BW, both in microbatch order."""
    return [
        [
            Op(kind, rank, microbatch)
            for kind in (Kind.F, Kind.BW)
            for microbatch in range(microbatches)
        ]
        for rank in range(placement.ranks)
    ]
