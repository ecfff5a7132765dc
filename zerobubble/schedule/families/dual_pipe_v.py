"""DualPipeV: two stages per rank in a V, F of one chunk next to BW of the other.

Source: DeepSeek's DualPipeV, the cut-in-half form of DualPipe (arXiv 2412.19437); torch calls it
DualPipeV. What is overlapped there, F and BW of different chunks, runs here in that order. B and W
are split where W fills a gap: before the steady state and at the end. Memory: p + 1/2 microbatches
on every rank. Bubble: (p - 1)(F + B - W) / 2 for m >= 2p where W is the shortest; fewer take the
pattern of 2p without the microbatches that do not exist. Use it where expert parallelism makes an
F hide the transfers of a BW.
"""

from __future__ import annotations

from zerobubble.schedule.costs import Costs
from zerobubble.schedule.ops import Kind, Op
from zerobubble.schedule.placement import Placement, v

NAME = "dualpipev"
ALIASES = ("dual-pipe-v",)

F, B, W, BW = Kind.F, Kind.B, Kind.W, Kind.BW


def placement(ranks: int, _chunks: int | None) -> Placement:
    """Stage s on rank s, then back: rank 0 holds the first and the last stage."""
    return v(ranks)


def orders(placement: Placement, microbatches: int, _costs: Costs | None) -> list[list[Op]]:
    """The eight phases of each rank."""
    ranks = placement.ranks
    pattern = max(microbatches, 2 * ranks)
    return [
        [op for op in _row(ranks, rank, pattern) if op.microbatch < microbatches]
        for rank in range(ranks)
    ]


def _row(ranks: int, rank: int, microbatches: int) -> list[Op]:
    stages = (rank, 2 * ranks - 1 - rank)
    later = ranks - 1 - rank  # ranks between this one and the turn of the V
    forwards, backwards = [0, 0], [0, 0]
    put_off: list[Op] = []
    row: list[Op] = []

    def forward(chunk: int) -> None:
        row.append(Op(F, stages[chunk], forwards[chunk]))
        forwards[chunk] += 1

    def backward(chunk: int, *, split: bool = False) -> None:
        where = stages[chunk], backwards[chunk]
        row.append(Op(B if split else BW, *where))
        backwards[chunk] += 1
        if split:
            put_off.append(Op(W, *where))

    def weight() -> None:
        row.append(put_off.pop(0))

    # Warm-up: the first chunk alone until its first output is back from the turn, then both.
    for _ in range(2 * later):
        forward(0)
    for _ in range(rank + 1):
        forward(0)
        forward(1)
    # The second chunk alone until its gradients have come round to the first.
    for _ in range(later):
        backward(1, split=True)
        weight()
        forward(1)
    # The steady state: each F next to the BW of the other chunk.
    for _ in range(microbatches - 2 * ranks + rank + 1):
        forward(0)
        backward(1)
        forward(1)
        backward(0)
    # No F of the first chunk is left, then none of the second.
    for _ in range(later):
        backward(1)
        forward(1)
        backward(0)
    # The last r + 1 of these are split: their W fill the gaps between what is to come.
    for step in range(2 * (rank + 1)):
        backward((step + 1) % 2, split=step >= rank + 1)
    for _ in range(later):
        weight()
        backward(0, split=True)
    while put_off:
        weight()
    return row
