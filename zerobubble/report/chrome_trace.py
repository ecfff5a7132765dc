"""Timelines as Chrome-trace JSON, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerobubble.errors import UserError
from zerobubble.schedule.ops import Kind, Op
from zerobubble.schedule.placement import Placement
from zerobubble.schedule.timeline import TimedOp, Timeline

FORMAT = "zerobubble-timeline"
VERSION = 1

# Microseconds in one of a timeline's unit. An abstract unit is drawn as a millisecond.
_MICROSECONDS = {"s": 1e6, "ms": 1e3, "us": 1.0}


def to_chrome_trace(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """The timelines of successive iterations as one trace.

    One process per rank (pid), one complete event ("X") per op with `ts` and `dur` in
    microseconds and its iteration, stage, microbatch, slice, kind and chunk in `args`. A
    timeline that does not start after the one before is moved behind it.
    """
    if not timelines:
        raise UserError("a trace of no iteration; give at least one timeline")
    first = timelines[0]
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": rank, "name": name, "args": args}
        for rank in range(first.placement.ranks)
        for name, args in (
            ("process_name", {"name": f"rank {rank}"}),
            ("process_sort_index", {"sort_index": rank}),
        )
    ]
    iterations = []
    free_from = 0.0
    for iteration, timeline in enumerate(timelines):
        scale = _MICROSECONDS.get(timeline.unit, 1e3)
        offset = 0.0
        if any(timeline.rows):
            offset = max(0.0, free_from - timeline.start * scale)
            free_from = timeline.end * scale + offset
        events += [
            _event(timeline.placement, iteration, rank, timed, scale, offset)
            for rank, timed in timeline
        ]
        iterations.append(
            {
                "schedule": timeline.name,
                "placement": timeline.placement.name,
                "rank_of": list(timeline.placement.rank_of),
                "microbatches": timeline.microbatches,
                "unit": timeline.unit,
                "peak_memory": timeline.peak_memory and list(timeline.peak_memory),
                "offset_us": offset,
            }
        )
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "format": FORMAT,
            "version": VERSION,
            "schedule": first.name,
            "iterations": iterations,
        },
        "traceEvents": events,
    }


def _event(
    placement: Placement, iteration: int, rank: int, timed: TimedOp, scale: float, offset: float
) -> dict[str, Any]:
    op = timed.op
    return {
        # Perfetto colours by name without its digits, so by kind.
        "name": f"{op.kind} {op.microbatch}",
        "cat": str(op.kind),
        "ph": "X",
        "pid": rank,
        "tid": 0,
        "ts": timed.start * scale + offset,
        "dur": (timed.end - timed.start) * scale,
        "args": {
            "iteration": iteration,
            "stage": op.stage,
            "microbatch": op.microbatch,
            "slice": op.slice,
            "kind": str(op.kind),
            "chunk": placement.chunk_of(op.stage),
        },
    }


def write_chrome_trace(path: str | Path, timelines: Sequence[Timeline]) -> None:
    """Write `to_chrome_trace` to `path`. Raises UserError where that is not possible."""
    text = json.dumps(to_chrome_trace(timelines))
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write trace {path}: {error.strerror}") from None


def check_trace_path(path: str | Path) -> None:
    """Make sure, before a long run, that a trace can be written. Raises UserError if not."""
    new = not Path(path).exists()
    try:
        with Path(path).open("a", encoding="utf-8"):
            pass
        if new:
            Path(path).unlink()
    except OSError as error:
        raise UserError(f"cannot write trace {path}: {error.strerror}") from None


def read_chrome_trace(path: str | Path) -> list[Timeline]:
    """The timelines, one per iteration, that `write_chrome_trace` wrote.

    Raises UserError for a file that cannot be read, is cut off, or was written by others.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read trace {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"trace {path} is cut off or no JSON: {error}") from None
    other = data.get("otherData") if isinstance(data, dict) else None
    if not isinstance(other, dict) or other.get("format") != FORMAT:
        raise UserError(f"{path} is not a trace of zerobubble; its 'otherData' does not say so")
    if other.get("version") != VERSION:
        raise UserError(
            f"trace {path} has version {other.get('version')}, this program reads {VERSION}; "
            "record it again"
        )
    try:
        return _timelines(other["iterations"], data["traceEvents"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise UserError(f"trace {path} is damaged: {type(error).__name__} at {error}") from None


def _timelines(iterations: list[dict[str, Any]], events: list[dict[str, Any]]) -> list[Timeline]:
    rows: list[list[list[TimedOp]]] = [
        [[] for _ in range(max(described["rank_of"]) + 1)] for described in iterations
    ]
    for event in events:
        if event["ph"] != "X":
            continue
        args = event["args"]
        described = iterations[args["iteration"]]
        scale = _MICROSECONDS.get(described["unit"], 1e3)
        start = (event["ts"] - described["offset_us"]) / scale
        op = Op(Kind(args["kind"]), args["stage"], args["microbatch"], args["slice"])
        timed = TimedOp(op, start, start + event["dur"] / scale)
        rows[args["iteration"]][event["pid"]].append(timed)
    return [
        Timeline(
            name=described["schedule"],
            placement=Placement(described["placement"], tuple(described["rank_of"])),
            microbatches=described["microbatches"],
            rows=tuple(tuple(sorted(row, key=lambda timed: timed.start)) for row in ranks),
            peak_memory=described["peak_memory"] and tuple(described["peak_memory"]),
            unit=described["unit"],
        )
        for described, ranks in zip(iterations, rows, strict=True)
    ]
