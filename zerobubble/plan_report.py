"""What `zerobubble plan` prints: a plan for people. Needs no torch."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, cast

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from zerobubble.errors import UserError
from zerobubble.planner.problem import Objective, Problem, load_problem, parse_problem
from zerobubble.planner.result import Plan
from zerobubble.schedule.files import check_ending, save_schedule
from zerobubble.schedule.formats import format_small, format_text


def uniform_problem(
    ranks: int | None = None,
    microbatches: int | None = None,
    times: str = "1,1,1",
    link: float = 0.0,
    memory: float | None = None,
    released: float = 0.0,
    placement: str = "any",
    chunks: int | None = None,
    split_overhead: float = 0.0,
) -> Problem:
    """The problem of a model whose ranks all cost alike. Raises UserError for what is wrong.

    `times`: F,B,W of a rank's share of the model. `memory`: the limit in units of 1F1B's peak,
    which is min(p, m) microbatches.
    """
    if ranks is None or microbatches is None:
        missing = "--ranks" if ranks is None else "--microbatches"
        raise UserError(f"{missing} is missing; give it, or a problem file")
    try:
        row = [float(word) for word in times.split(",")]
    except ValueError:
        row = []
    if len(row) != 3:
        raise UserError(f"--times {times} is not F,B,W, such as 1,1,1")
    stages = {"linear": 1, "looped": chunks or 2}.get(placement, 2)
    document: dict[str, object] = {
        "ranks": ranks,
        "microbatches": microbatches,
        "placement": placement,
        "stage_times": [[time / stages for time in row]],
        "link_latency": link,
        "activation_per_stage": 1 / stages,
        "released_by_backward_input": released,
        "memory_limit": None if memory is None else memory * min(ranks, microbatches),
        "split_overhead": split_overhead,
    }
    if chunks is not None:
        document["chunks"] = chunks
    return parse_problem(document)


def run(
    path: str | None,
    flags: Mapping[str, Any],
    *,
    schedule: str,
    objective: str,
    time_limit: float | None,
    prove: bool,
    as_json: bool,
    picture: str | None,
    save: str | None,
    seed: int,
) -> None:
    """Plan the problem of a file, or of flags (None where not given), and print the plan.

    Raises UserError.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    if path is not None and given:
        flag = "--" + next(iter(given)).replace("_", "-")
        raise UserError(f"{flag} is for a problem without a file; {path} says it all")
    if save is not None:
        check_ending(save)
    problem = uniform_problem(**given) if path is None else load_problem(path)
    with ProgressLine() as progress:
        from zerobubble.planner.plan import plan

        found = plan(
            problem,
            objective=cast(Objective, objective),
            schedule=schedule,
            time_limit=time_limit,
            prove=prove,
            seed=seed,
            progress=progress,
        )
    print(json.dumps(found.to_json()) if as_json else render_plan(found))
    if save is not None:
        save_schedule(found.schedule, save)
        print(f"schedule: {save}; train with --schedule {save}", file=sys.stderr)
    if picture is not None:
        from zerobubble.report.picture import draw

        draw([found.timeline], picture)
        print(f"picture: {picture}", file=sys.stderr)


def render_plan(plan: Plan, *, width: int | None = None) -> str:
    """The plan as text: verdict, candidates, ranks, timeline, warnings."""
    columns = width or shutil.get_terminal_size((100, 24)).columns
    return "\n".join(
        part
        for part in (
            _verdict(plan),
            _candidates(plan, columns),
            _ranks(plan, columns),
            _timeline(plan, columns),
            *(f"note: {warning}" for warning in plan.warnings),
        )
        if part
    )


def _verdict(plan: Plan) -> str:
    placement = plan.schedule.placement
    if plan.proven_optimal:
        certificate = "proven optimal: no schedule of this problem does better"
    else:
        certificate = (
            f"at most {100 * plan.gap:.2f}% above the optimum (lower bound {plan.lower_bound:.6g})"
        )
    lines = [
        f"{_name(plan)} on placement {placement.name}, {placement.ranks} ranks, "
        f"{plan.schedule.microbatches} microbatches: makespan {plan.makespan:.6g}, "
        f"longest span {plan.longest_span:.6g}",
        f"{plan.objective}: {certificate}",
    ]
    if plan.layout is not None:
        lines.append(f"layers per stage: {', '.join(map(str, plan.layout))}")
    return "\n".join(lines)


def _name(plan: Plan) -> str:
    return {"searched": "searched schedule", "exact": "exact schedule"}.get(
        plan.schedule.name, plan.schedule.name
    )


def _candidates(plan: Plan, columns: int) -> str:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("candidate")
    table.add_column("placement")
    for column in ("makespan", "longest span", "plan gains", "peak memory"):
        table.add_column(column, justify="right")
    table.add_column("fits")
    assert plan.timeline.peak_memory is not None
    table.add_row(
        "this plan",
        plan.schedule.placement.name,
        f"{plan.makespan:.6g}",
        f"{plan.longest_span:.6g}",
        "",
        f"{max(plan.timeline.peak_memory):.4g}",
        "yes",
    )
    for other in plan.alternatives:
        value = other.objective(plan.objective)
        gain = 100 * (1 - plan.value / value) if value else 0.0
        table.add_row(
            other.schedule,
            other.placement,
            f"{other.makespan:.6g}",
            f"{other.longest_span:.6g}",
            f"{gain:.2f}%",
            f"{max(other.peak_memory):.4g}",
            "yes" if other.fits else "no",
        )
    return _text(table, columns)


def _ranks(plan: Plan, columns: int) -> str:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("rank", justify="right")
    for column in ("work", "imbalance", "bubble", "fixed memory", "peak memory", "limit"):
        table.add_column(column, justify="right")
    for rank, report in enumerate(plan.ranks()):
        limit = "none" if report.memory_limit is None else f"{report.memory_limit:.6g}"
        table.add_row(
            str(rank),
            *(
                f"{value:.6g}"
                for value in (
                    report.work,
                    report.imbalance,
                    report.bubble,
                    report.fixed_memory,
                    report.peak_memory,
                )
            ),
            limit,
        )
    return _text(table, columns)


def _timeline(plan: Plan, columns: int) -> str:
    """The timeline op by op where there is room, else kind by kind."""
    whole = format_text(plan.timeline)
    widest = max(map(len, whole.splitlines()))
    if widest <= columns:
        return whole + "\n"
    later = ", lower case on later chunks" if plan.schedule.placement.chunks > 1 else ""
    legend = f"time to the right; F, B, W, X for a joint backward{later}; · is idle"
    return f"{format_small(plan.timeline, columns - 10)}\n{legend}\n"


def _text(table: Table, columns: int) -> str:
    console = Console(width=max(columns, 60), color_system=None)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines() if line.strip()) + "\n"


class ProgressLine:
    """What the planner is at, on stderr, once it takes over a second.

    On a terminal one line is rewritten; elsewhere a new one says it every five seconds. To be used
    in a `with`; call it with what there is to say.
    """

    def __init__(self) -> None:
        self._text = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> ProgressLine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def __call__(self, text: str) -> None:
        self._text = text

    def _run(self) -> None:
        terminal = sys.stderr.isatty()
        started = time.monotonic()
        wait = 1.0
        while not self._over.wait(wait):
            line = f"{time.monotonic() - started:3.0f} s  {self._text}"
            print(
                f"\r\033[K{line}" if terminal else line,
                end="" if terminal else "\n",
                file=sys.stderr,
                flush=True,
            )
            wait = 0.2 if terminal else 5.0
        if terminal and time.monotonic() - started > 1.0:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
