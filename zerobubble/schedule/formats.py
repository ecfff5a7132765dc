"""Schedules and timelines as text: a readable timeline, nodes, and JSON that loads back."""

from __future__ import annotations

import json
import math
from typing import Any

from zerobubble.errors import UserError
from zerobubble.schedule.ops import Kind, Op
from zerobubble.schedule.placement import Placement
from zerobubble.schedule.schedule import Schedule
from zerobubble.schedule.timeline import TimedOp, Timeline

_IDLE = "·"
_SHORTEST = 1e-9


def format_text(timeline: Timeline, width: int | None = None) -> str:
    """One monospaced row per rank, time to the right; `·` is idle time.

    An op is written `F3` (kind, microbatch), or `F3-1` (kind, microbatch, chunk) where ranks
    hold several stages, and is as wide as it takes time. `width` is the columns of a row's
    longest line; without it, the shortest op that takes time gets a column more than its name.
    """
    labels = [[_label(timeline, timed) for timed in row] for row in timeline.rows]
    start = timeline.start if any(timeline.rows) else 0.0
    makespan = timeline.makespan if any(timeline.rows) else 0.0
    if width is None:
        needed = [
            (len(label) + 1) / (timed.end - timed.start)
            for row, names in zip(timeline.rows, labels, strict=True)
            for timed, label in zip(row, names, strict=True)
            if timed.end - timed.start > _SHORTEST
        ]
        columns = math.ceil(max(needed, default=0.0) * makespan)
    else:
        columns = width
    scale = columns / makespan if makespan else 0.0

    margin = len(f"rank {len(timeline.rows) - 1}")
    length = f"{makespan:g} {timeline.unit}".rstrip()
    lines = [
        f"{timeline.name}: {len(timeline.rows)} ranks, {timeline.microbatches} microbatches, "
        f"makespan {length}, bubble rate {timeline.bubble_rate:.1%}"
        if makespan
        else f"{timeline.name}: {len(timeline.rows)} ranks, nothing ran"
    ]
    for rank, (row, names) in enumerate(zip(timeline.rows, labels, strict=True)):
        cells = [_IDLE] * columns
        for timed, label in zip(row, names, strict=True):
            first = round((timed.start - start) * scale)
            last = round((timed.end - start) * scale)
            # A cut label would read as another op: where it does not fit, only the kind stands.
            name = label if len(label) <= last - first else timed.op.kind[: last - first]
            cells[first:last] = name.ljust(last - first)
        lines.append(f"{f'rank {rank}':>{margin}} |{''.join(cells)}|")
    return "\n".join(lines)


def format_small(timeline: Timeline, width: int) -> str:
    """One row of `width` columns per rank: which kind of op runs in the middle of each column.

    F, B, W, and X for a BW; in lower case on a rank's later chunks; `·` is idle time.
    """
    start, makespan = (timeline.start, timeline.makespan) if any(timeline.rows) else (0.0, 0.0)
    lines = []
    for rank, row in enumerate(timeline.rows):
        cells = []
        ops = iter(row)
        timed = next(ops, None)
        for column in range(width):
            at = start + (column + 0.5) * makespan / width
            while timed is not None and timed.end <= at:
                timed = next(ops, None)
            if timed is None or timed.start > at:
                cells.append(_IDLE)
                continue
            letter = "X" if timed.op.kind is Kind.BW else str(timed.op.kind)
            later = timeline.placement.chunk_of(timed.op.stage) > 0
            cells.append(letter.lower() if later else letter)
        lines.append(f"rank {rank}  {''.join(cells)}")
    return "\n".join(lines)


def _label(timeline: Timeline, timed: TimedOp) -> str:
    op, placement = timed.op, timeline.placement
    chunk = f"-{placement.chunk_of(op.stage)}" if placement.chunks > 1 else ""
    part = f".{op.slice}" if op.slice else ""
    return f"{op.kind}{op.microbatch}{chunk}{part}"


def format_nodes(schedule: Schedule) -> str:
    """Per rank `##### rank r schedules:`, then one `F-microbatch-chunk-slice` a line."""
    lines = []
    for rank, order in enumerate(schedule.orders):
        lines.append(f"##### rank {rank} schedules:")
        lines += [
            f"{op.kind}-{op.microbatch}-{schedule.placement.chunk_of(op.stage)}-{op.slice}"
            for op in order
        ]
    return "\n".join(lines)


_KEYS = ("schedule", "placement", "rank_of", "microbatches", "slices", "orders")


def to_json(schedule: Schedule) -> str:
    """`schedule` as JSON; its ops as torch.distributed.pipelining writes them (`Op.text`)."""
    rows = ",\n    ".join(json.dumps([op.text for op in order]) for order in schedule.orders)
    head = {
        "schedule": schedule.name,
        "placement": schedule.placement.name,
        "rank_of": list(schedule.placement.rank_of),
        "microbatches": schedule.microbatches,
        "slices": schedule.slices,
    }
    lines = "".join(f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items())
    return f'{{\n{lines}  "orders": [\n    {rows}\n  ]\n}}\n'


def from_json(text: str) -> Schedule:
    """The schedule that `to_json` wrote.

    Raises UserError, naming the key, for anything that is not one. Whether its orders are
    right is for `verify` to say.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise UserError(f"not a schedule: the JSON is broken or cut off ({error})") from None
    if not isinstance(data, dict):
        raise UserError(f"not a schedule: the JSON is a {type(data).__name__}, not an object")
    for key in data:
        if key not in _KEYS:
            raise UserError(f"unknown key {key!r} in a schedule; its keys are {', '.join(_KEYS)}")
    orders = _read(data, "orders", list)
    for rank, row in enumerate(orders):
        if not isinstance(row, list):
            raise UserError(f"'orders' has {row!r} for rank {rank}; give a list of ops")
    rank_of = _read(data, "rank_of", list)
    for entry in rank_of:
        _check(entry, "rank_of", int)
    return Schedule(
        name=_read(data, "schedule", str),
        placement=Placement(_read(data, "placement", str), tuple(rank_of)),
        microbatches=_read(data, "microbatches", int),
        orders=tuple(
            tuple(_read_op(cell, rank, position) for position, cell in enumerate(row))
            for rank, row in enumerate(orders)
        ),
        slices=_read(data, "slices", int),
    )


def _read(data: dict[str, Any], key: str, kind: type) -> Any:
    if key not in data:
        raise UserError(f"the schedule has no {key!r}")
    return _check(data[key], key, kind)


def _check(value: Any, key: str, kind: type) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise UserError(f"{key!r} holds {value!r}; it takes {kind.__name__} only")
    if isinstance(value, int) and value < 0:
        raise UserError(f"{key!r} holds {value}; nothing here can be negative")
    return value


def _read_op(cell: Any, rank: int, position: int) -> Op:
    try:
        return Op.parse(_check(cell, "orders", str))
    except UserError as error:
        raise UserError(f"rank {rank}, op {position} of 'orders': {error}") from None
