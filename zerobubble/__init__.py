"""zerobubble: plan, run and explain pipeline-parallel training.

The planning half, which never imports torch, can be had from here: `Costs`, `Problem`, `plan`,
`simulate`, `verify`, `families` (docs/planning.md). Each is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerobubble.planner.plan import plan as plan
    from zerobubble.planner.problem import Problem as Problem
    from zerobubble.schedule import families as families
    from zerobubble.schedule.costs import Costs as Costs
    from zerobubble.schedule.schedule import Schedule as Schedule
    from zerobubble.schedule.simulate import simulate as simulate
    from zerobubble.schedule.verify import verify as verify

__version__ = "0.1.0"

_HOME = {
    "Costs": "zerobubble.schedule.costs",
    "Problem": "zerobubble.planner.problem",
    "Schedule": "zerobubble.schedule.schedule",
    "plan": "zerobubble.planner.plan",
    "simulate": "zerobubble.schedule.simulate",
    "verify": "zerobubble.schedule.verify",
}


def __getattr__(name: str) -> Any:
    if name == "families":
        return importlib.import_module("zerobubble.schedule.families")
    if name not in _HOME:
        raise AttributeError(f"module 'zerobubble' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
