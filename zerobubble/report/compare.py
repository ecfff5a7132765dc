"""Simulated and measured timelines side by side, as a small text table."""

from __future__ import annotations

from collections.abc import Sequence

from zerobubble.errors import UserError
from zerobubble.schedule.timeline import Timeline

_HEAD = ("schedule", "simulated", "measured", "ratio", "simulated bubble", "measured bubble")


def compare(pairs: Sequence[tuple[Timeline, Timeline]]) -> str:
    """One line per (simulated, measured) pair: iteration time, its ratio, and bubble rate.

    Iteration time is the makespan. Raises UserError for a pair in different units.
    """
    rows = [_HEAD]
    for simulated, measured in pairs:
        if simulated.unit != measured.unit:
            raise UserError(
                f"schedule {simulated.name!r} is simulated in {simulated.unit} and measured in "
                f"{measured.unit}; simulate with the measured costs"
            )
        rows.append(
            (
                simulated.name,
                f"{simulated.makespan:.1f} {simulated.unit}",
                f"{measured.makespan:.1f} {measured.unit}",
                f"{measured.makespan / simulated.makespan:.3f}",
                f"{simulated.bubble_rate:.1%}",
                f"{measured.bubble_rate:.1%}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
