"""Schedule: a placement and, per rank, the order of its ops. Computation only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zerobubble.schedule.ops import Op
from zerobubble.schedule.placement import Placement


@dataclass(frozen=True)
class Schedule:
    """What every rank computes, in its order; transfers are derived by `lower`.

    Holding one does not mean that it is right: `verify` proves that.
    """

    name: str
    placement: Placement
    microbatches: int
    orders: tuple[tuple[Op, ...], ...]
    """One row per rank."""
    slices: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks, p."""
        return self.placement.ranks

    @property
    def forward_only(self) -> bool:
        """Whether no op is a backward (an evaluation)."""
        return not any(op.kind != "F" for order in self.orders for op in order)

    def ops(self) -> Iterator[tuple[int, Op]]:
        """Every (rank, op), rank by rank, in order."""
        for rank, order in enumerate(self.orders):
            for op in order:
                yield rank, op
