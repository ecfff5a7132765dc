"""Looped BFS: GPipe with v stages per rank, one chunk after the other.

Source: Lamy-Poirier, arXiv 2211.05953 (breadth-first pipelines); torch calls it LoopedBFS. Memory:
m microbatches on every rank. Bubble: (p - 1)(F + BW) / v for m >= p. Use it where memory does not
matter and a chunk's weights should be needed once per pass, as sharded weights are.
"""

from __future__ import annotations

from zerobubble.schedule.costs import Costs
from zerobubble.schedule.ops import Kind, Op
from zerobubble.schedule.placement import Placement, looped

NAME = "looped-bfs"
ALIASES = ("loopedbfs", "bfs")


def placement(ranks: int, chunks: int | None) -> Placement:
    """Stage s on rank s mod p; 2 stages per rank unless told otherwise."""
    return looped(ranks, 2 if chunks is None else chunks)


def orders(placement: Placement, microbatches: int, _costs: Costs | None) -> list[list[Op]]:
    """Every F chunk by chunk, then every BW from the last chunk to the first."""
    rows = []
    for rank in range(placement.ranks):
        stages = placement.stages_of(rank)
        forwards = [Op(Kind.F, s, j) for s in stages for j in range(microbatches)]
        backwards = [Op(Kind.BW, s, j) for s in reversed(stages) for j in range(microbatches)]
        rows.append(forwards + backwards)
    return rows
