"""What `zerobubble show` prints: a schedule in every form it has. Needs no torch."""

from __future__ import annotations

from zerobubble.errors import UserError
from zerobubble.schedule import families
from zerobubble.schedule.costs import Costs
from zerobubble.schedule.files import ENDINGS, load_schedule
from zerobubble.schedule.formats import format_nodes, format_text, to_json
from zerobubble.schedule.schedule import Schedule
from zerobubble.schedule.simulate import simulate
from zerobubble.schedule.timeline import Timeline
from zerobubble.schedule.torch_csv import to_csv

FORMATS = ("text", "nodes", "json", "csv")


def describe_families() -> str:
    """Every family with its memory, bubble and when to use it, from its own docstring."""
    return "\n\n".join(
        f"{name}\n  {families.get(name).description.strip().replace(chr(10), chr(10) + '  ')}"
        for name in families.names()
    )


def load_or_build(
    schedule: str,
    ranks: int,
    microbatches: int,
    chunks: int | None,
    *,
    slices: int | None = None,
    group: int | None = None,
) -> Schedule:
    """The schedule of a file, verified, or of a family."""
    if schedule.endswith(ENDINGS):
        return load_schedule(schedule)
    return families.build(schedule, ranks, microbatches, chunks=chunks, slices=slices, group=group)


def simulated(schedule: Schedule, times: str, link: float) -> Timeline:
    """Its timeline for `F,B,W` of a rank's stages together. Raises UserError for other text."""
    try:
        forward, backward_input, backward_weight = (float(word) for word in times.split(","))
    except ValueError:
        raise UserError(f"--times {times} is not F,B,W, such as 1,1,1") from None
    parts = schedule.placement.chunks * schedule.slices
    row = forward / parts, backward_input / parts, backward_weight / parts
    costs = Costs.uniform(schedule.placement.stages, *row, link_latency=link, activation=1 / parts)
    return simulate(schedule, costs, unit="")


def render(schedule: Schedule, timeline: Timeline, format: str) -> str:
    """The schedule in one of FORMATS, ending in a new line."""
    if format == "nodes":
        return format_nodes(schedule) + "\n"
    if format == "json":
        return to_json(schedule)
    if format == "csv":
        return to_csv(schedule)
    if format != "text":
        raise UserError(f"--format {format} is unknown; use one of {', '.join(FORMATS)}")
    assert timeline.peak_memory is not None
    peaks = ", ".join(f"{peak:g}" for peak in timeline.peak_memory)
    return (
        f"{format_text(timeline)}\n"
        f"makespan {timeline.makespan:g}, bubble rate {timeline.bubble_rate:.4f}; "
        f"longest span {timeline.longest_span:g}, bubble rate "
        f"{timeline.longest_span_bubble_rate:.4f}\n"
        f"most activations held, in microbatches of a rank: {peaks}\n"
    )
