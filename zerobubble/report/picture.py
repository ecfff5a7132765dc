"""Pictures of timelines, as the papers draw them: one row per rank, one box per op."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zerobubble.errors import UserError
from zerobubble.schedule.ops import Kind
from zerobubble.schedule.timeline import TimedOp, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Per kind: fill of the first chunk, fill of the last chunk (white text). Chosen to stay apart
# in greyscale and for the common colour blindnesses.
_FILL = {
    Kind.F: ("#4878b8", "#1d3f73"),
    Kind.B: ("#e0a030", "#a86a08"),
    Kind.W: ("#6bab72", "#2f6b39"),
    Kind.BW: ("#d9805f", "#9c4527"),
}
_MEANING = {
    Kind.F: "F: forward",
    Kind.B: "B: gradient of input",
    Kind.W: "W: gradient of weights",
    Kind.BW: "BW: both gradients",
}
_INK = "#22262b"
_IDLE = "#eceef1"
_FORMATS = ("png", "svg", "pdf")
_ROW = 0.86
_BOX_AREA_INCHES = 12.2
_SMALLEST_POINTS = 3.5


def draw(timelines: Sequence[Timeline], path: str | Path, *, title: str | None = None) -> None:
    """Draw timelines above each other, on one time axis, to a .png, .svg or .pdf file.

    Every box carries its microbatch; darker boxes are later chunks of a rank. Raises UserError
    for another kind of file, a timeline without ops, or a path that cannot be written.
    """
    path = Path(path)
    if path.suffix.lstrip(".").lower() not in _FORMATS:
        raise UserError(f"cannot draw to {path.name!r}; use one of .{', .'.join(_FORMATS)}")
    if not timelines or not all(any(timeline.rows) for timeline in timelines):
        raise UserError("nothing to draw; give timelines with at least one op")

    # Imported here: it takes long, and reports without pictures do not need it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    longest = max(timeline.makespan for timeline in timelines)
    ranks = [len(timeline.rows) for timeline in timelines]
    height = 0.95 + sum(0.62 + 0.34 * count for count in ranks) + (0.3 if title else 0.0)
    figure = Figure(figsize=(13.0, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(timelines), 1, squeeze=False, sharex=True, height_ratios=ranks)[:, 0]
    for axis, timeline in zip(axes, timelines, strict=True):
        _draw_timeline(axis, timeline, longest)
    axes[-1].set_xlabel(f"time ({timelines[0].unit})", color=_INK, fontsize=9)
    if title:
        figure.suptitle(title, color=_INK, fontsize=12, fontweight="bold")
    _draw_legend(figure, timelines)
    try:
        figure.savefig(path, dpi=160)
    except OSError as error:
        raise UserError(f"cannot write picture {path}: {error.strerror}") from None


def _draw_timeline(axis: Axes, timeline: Timeline, longest: float) -> None:
    start, makespan = timeline.start, timeline.makespan
    inches_per_unit = _BOX_AREA_INCHES / longest
    # Boxes of one width get one size of text, whatever their number.
    digits = len(str(max(timed.op.microbatch for _, timed in timeline)))
    for rank, row in enumerate(timeline.rows):
        axis.barh(rank, makespan, height=_ROW, left=0.0, color=_IDLE, linewidth=0, zorder=1)
        for timed in row:
            duration = timed.end - timed.start
            axis.barh(
                rank,
                duration,
                height=_ROW,
                left=timed.start - start,
                color=_fill(timeline, timed),
                edgecolor="white",
                linewidth=min(0.7, duration * inches_per_unit * 6),
                zorder=2,
            )
            points = min(8.5, 0.85 * duration * inches_per_unit * 72 / (0.62 * digits))
            if points >= _SMALLEST_POINTS:
                axis.text(
                    timed.start - start + duration / 2,
                    rank + 0.03,
                    str(timed.op.microbatch),
                    ha="center",
                    va="center",
                    color="white",
                    fontsize=points,
                    zorder=3,
                )
    axis.set_yticks(range(len(timeline.rows)), [f"rank {r}" for r in range(len(timeline.rows))])
    axis.set_ylim(len(timeline.rows) - 0.4, -0.6)
    axis.set_xlim(0.0, longest * 1.002)
    axis.tick_params(labelsize=8.5, colors=_INK, length=0, axis="y")
    axis.tick_params(labelsize=8.5, colors=_INK, length=3, axis="x", labelbottom=True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color("#9aa1ab")
    axis.axvline(makespan, color=_INK, linewidth=1.0, linestyle=(0, (3, 2)), zorder=4)
    axis.set_title(
        f"{timeline.name}:  makespan {makespan:.4g} {timeline.unit},  "
        f"bubble rate {timeline.bubble_rate:.1%}",
        loc="left",
        fontsize=10.5,
        color=_INK,
    )


def _fill(timeline: Timeline, timed: TimedOp) -> tuple[float, float, float]:
    """The kind's colour, darker with the chunk."""
    from matplotlib.colors import to_rgb

    placement = timeline.placement
    first, last = (to_rgb(colour) for colour in _FILL[timed.op.kind])
    depth = placement.chunk_of(timed.op.stage) / max(1, placement.chunks - 1)
    red, green, blue = (a + (b - a) * depth for a, b in zip(first, last, strict=True))
    return red, green, blue


def _draw_legend(figure: Figure, timelines: Sequence[Timeline]) -> None:
    from matplotlib.patches import Patch

    used = {timed.op.kind for timeline in timelines for _, timed in timeline}
    handles = [Patch(color=_FILL[kind][0], label=_MEANING[kind]) for kind in Kind if kind in used]
    handles.append(Patch(color=_IDLE, label="idle"))
    if any(timeline.placement.chunks > 1 for timeline in timelines):
        handles.append(Patch(color="none", label="darker: later chunk of the rank"))
    handles.append(Patch(color="none", label="number: microbatch"))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles),
        frameon=False,
        fontsize=8.5,
        labelcolor=_INK,
        handlelength=1.1,
        handleheight=1.1,
        columnspacing=1.6,
    )
