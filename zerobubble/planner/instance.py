"""Instance: one placement and its costs as arrays, for the compiled loops."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zerobubble.schedule.costs import Costs
from zerobubble.schedule.ops import Kind, Op
from zerobubble.schedule.placement import Placement

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

KINDS = (Kind.F, Kind.B, Kind.W, Kind.BW)
"""By their numbers in the arrays."""

TOLERANCE = 1e-9
"""Of times, as a share of a rank's work on one microbatch; of memory, in its unit."""


class Instance(NamedTuple):
    """What the compiled loops read. S stages, p ranks, C chunks; memory without what is fixed."""

    ranks: int
    chunks: int
    microbatches: int
    rank_of: Ints
    """(S,)"""
    stages_of: Ints
    """(p, C), in layer order."""
    times: Floats
    """(4, S): F, B, W, BW. Of a joint stage B is BW and W takes no time."""
    latency: Floats
    """(S,): of the boundary after a stage, 0 where it does not cross ranks; the last is 0."""
    activation: Floats
    """(S,): what F adds."""
    released: Floats
    """(S,): what B releases; W releases the rest."""
    reserve: Floats
    """(S,): activations of the rank's deeper stages, for which an F leaves room."""
    limit: Floats
    """(p,): for activations, with the tolerance."""
    joint: Flags
    """(S,): stages that cannot be split."""
    unit: float
    """The mean time of F, B and W over the stages."""
    period: float
    """The busiest rank's work on one microbatch."""
    span: bool
    """Whether the objective is the longest span; otherwise the makespan."""

    @property
    def stages(self) -> int:
        """Number of stages, S."""
        return len(self.rank_of)


def make_instance(
    placement: Placement, microbatches: int, costs: Costs, *, span: bool = False
) -> Instance:
    """The arrays of a problem; joint stages carry their BW in B's row."""
    stages, ranks = placement.stages, placement.ranks
    rank_of = np.array(placement.rank_of, dtype=np.int64)
    joint = np.zeros(stages, dtype=np.bool_)
    joint[list(costs.joint_stages)] = True
    times = np.array(
        [costs.forward, costs.backward_input, costs.backward_weight, costs.backward_joint],
        dtype=np.float64,
    )
    times[1, joint] = times[3, joint]
    times[2, joint] = 0.0
    latency = np.zeros(stages)
    for boundary in range(stages - 1):
        if placement.crosses(boundary):
            latency[boundary] = costs.link_latency[boundary]
    activation = np.array(costs.activation, dtype=np.float64)
    released = activation * np.array(costs.released_by_backward_input, dtype=np.float64)
    released[joint] = activation[joint]
    stages_of = np.array([placement.stages_of(rank) for rank in range(ranks)], dtype=np.int64)
    reserve = np.zeros(stages)
    limit = np.full(ranks, np.inf)
    fixed = np.array(costs.fixed_memory, dtype=np.float64)
    for rank, held in enumerate(stages_of):
        for chunk, stage in enumerate(held):
            reserve[stage] = activation[held[chunk + 1 :]].sum()
        if costs.memory_limit is not None:
            most = costs.memory_limit[rank]
            limit[rank] = most - fixed[held].sum() + TOLERANCE / 2
    work = np.bincount(rank_of, weights=times[:3].sum(axis=0), minlength=ranks)
    return Instance(
        ranks=ranks,
        chunks=placement.chunks,
        microbatches=microbatches,
        rank_of=rank_of,
        stages_of=stages_of,
        times=times,
        latency=latency,
        activation=activation,
        released=released,
        reserve=reserve,
        limit=limit,
        joint=joint,
        unit=float(times[:3].mean()),
        period=float(work.max()),
        span=span,
    )


def shortfall(instance: Instance) -> tuple[int, float] | None:
    """The rank that lacks most to hold one microbatch of each of its stages, and how much."""
    needs = instance.activation[instance.stages_of].sum(axis=1) - instance.limit
    rank = int(needs.argmax())
    return (rank, float(needs[rank])) if needs[rank] > 0 else None


def encode(kind: int, stage: int, microbatch: int, instance: Instance) -> int:
    """The number of an op in a row of orders."""
    return (kind * instance.stages + stage) * instance.microbatches + microbatch


def to_ops(instance: Instance, orders: Ints, lengths: Ints) -> tuple[tuple[Op, ...], ...]:
    """Rows of op numbers as rows of ops. A joint stage's B is a BW."""
    stages, microbatches = instance.stages, instance.microbatches
    rows = []
    for row, length in zip(orders, lengths, strict=True):
        ops = []
        for code in row[:length].tolist():
            rest, microbatch = divmod(code, microbatches)
            kind, stage = divmod(rest, stages)
            ops.append(Op(KINDS[kind], stage, microbatch))
        rows.append(tuple(ops))
    return tuple(rows)


def to_numbers(instance: Instance, rows: tuple[tuple[Op, ...], ...]) -> tuple[Ints, Ints]:
    """The inverse of `to_ops`: rows padded to (p, 3 C m), and their lengths."""
    width = 3 * instance.chunks * instance.microbatches
    orders = np.zeros((instance.ranks, width), dtype=np.int64)
    number = {kind: i for i, kind in enumerate(KINDS)}
    for rank, row in enumerate(rows):
        orders[rank, : len(row)] = [
            encode(number[op.kind], op.stage, op.microbatch, instance) for op in row
        ]
    return orders, np.array([len(row) for row in rows], dtype=np.int64)
