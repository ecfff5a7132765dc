"""Schedules as torch.distributed.pipelining's CSV: one row per rank, one op per cell.

`2F0`, `2I0` (our B), `2W0`, `2B0` (our BW); an empty cell is an idle slot, and
`(0F3;3B1)OVERLAP_F_B` its two ops in order. The placement is read off the rows.
"""

from __future__ import annotations

import csv
import io
import re

from zerobubble.errors import UserError
from zerobubble.schedule.ops import Op
from zerobubble.schedule.placement import Placement, linear, looped, v
from zerobubble.schedule.schedule import Schedule

_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")


def to_csv(schedule: Schedule) -> str:
    """What `_PipelineScheduleRuntime._load_csv` reads. Raises UserError for slices."""
    if schedule.slices > 1:
        raise UserError(
            f"schedule {schedule.name!r} has {schedule.slices} slices, which "
            "torch.distributed.pipelining's CSV cannot hold; write JSON"
        )
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(
        [op.text for op in order] for order in schedule.orders
    )
    return text.getvalue()


def from_csv(text: str, name: str = "custom") -> Schedule:
    """The schedule of a CSV. Whether its orders are right is for `verify` to say.

    Raises UserError, naming row and cell, for what cannot be read, and for stages that no row
    or several rows hold.
    """
    orders = [
        tuple(op for column, cell in enumerate(row) for op in _read(cell, rank, column))
        for rank, row in enumerate(csv.reader(io.StringIO(text)))
    ]
    ops = [op for order in orders for op in order]
    if not ops:
        raise UserError("the CSV holds no op; write one row of ops such as 0F0 per rank")
    return Schedule(
        name=name,
        placement=_placement(orders),
        microbatches=max(op.microbatch for op in ops) + 1,
        orders=tuple(orders),
    )


def _read(cell: str, rank: int, column: int) -> list[Op]:
    cell = cell.strip()
    overlapped = _OVERLAP.fullmatch(cell)
    words = overlapped[1].split(";") if overlapped else [cell]
    try:
        ops = [Op.parse(word) for word in words if word]
    except UserError as error:
        raise UserError(f"row {rank}, cell {column}: {error}") from None
    for op in ops:
        if op.slice:
            raise UserError(f"row {rank}, cell {column}: {cell!r} has a slice; use JSON for that")
    return ops


def _placement(orders: list[tuple[Op, ...]]) -> Placement:
    """Which rank holds which stage, read off the rows."""
    stages = max(op.stage for order in orders for op in order) + 1
    rank_of: list[int | None] = [None] * stages
    # The rank that runs most ops of a stage holds it, so that one stray op is told as such.
    for stage in range(stages):
        counts = [sum(op.stage == stage for op in order) for order in orders]
        if max(counts):
            rank_of[stage] = counts.index(max(counts))
    missing = [stage for stage, rank in enumerate(rank_of) if rank is None]
    if missing:
        raise UserError(f"no row has an op of stage {missing[0]}, though there are {stages} stages")
    found = tuple(rank for rank in rank_of if rank is not None)
    ranks = len(orders)
    for known in (linear(ranks), v(ranks), looped(ranks, max(1, stages // ranks))):
        if known.rank_of == found:
            return known
    if max(found) + 1 != ranks:
        raise UserError(
            f"row {ranks - 1} holds no stage of its own, though there are {ranks} rows; "
            "give every rank as many stages"
        )
    return Placement("custom", found)
