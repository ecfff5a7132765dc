"""The families of schedules. Each module here is one; there is no list to edit.

A family is a module with

    NAME = "1f1b"                   how users ask for it
    ALIASES = ("one-f-one-b",)      optional
    def placement(ranks, chunks) -> Placement
    def orders(placement, microbatches, costs) -> list[list[Op]]

`chunks` is None where the caller leaves it to the family. `orders` returns one row of ops per
rank for any number of microbatches from 1; `costs` is None or has one entry per stage. What a
family returns is proved by `verify`, not here. Modules without NAME are not families.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from zerobubble.errors import UserError
from zerobubble.schedule.costs import Costs
from zerobubble.schedule.ops import Op
from zerobubble.schedule.placement import Placement
from zerobubble.schedule.schedule import Schedule


@dataclass(frozen=True)
class Family:
    """One family: its names, its placement and its orders."""

    name: str
    aliases: tuple[str, ...]
    placement: Callable[[int, int | None], Placement]
    orders: Callable[[Placement, int, Costs | None], Sequence[Sequence[Op]]]
    description: str
    """The module's docstring: source, memory, bubble, when to use."""


def names() -> tuple[str, ...]:
    """The name of every family, sorted."""
    return tuple(sorted(_families()))


def get(name: str) -> Family:
    """The family called `name`, or with it as an alias; case and `_` for `-` do not matter.

    Raises UserError, naming the nearest, for an unknown name.
    """
    families = _families()
    known = {alias: family for family in families.values() for alias in family.aliases}
    known |= families
    wanted = name.strip().lower().replace("_", "-")
    if wanted not in known:
        nearest = difflib.get_close_matches(wanted, known, n=1, cutoff=0.0)
        raise UserError(
            f"unknown schedule {name!r}; did you mean {nearest[0]!r}? "
            f"Known schedules: {', '.join(sorted(families))}"
        )
    return known[wanted]


def build(
    name: str,
    ranks: int,
    microbatches: int,
    *,
    chunks: int | None = None,
    costs: Costs | None = None,
) -> Schedule:
    """The schedule of family `name` for `ranks` >= 1 and `microbatches` >= 1.

    `chunks`: stages per rank, where the family leaves a choice. `costs`: planned for, by the
    families that plan. Raises UserError for an impossible combination.
    """
    family = get(name)
    if microbatches < 1:
        raise UserError(
            f"schedule {family.name!r} with {microbatches} microbatches; give 1 or more"
        )
    placement = family.placement(ranks, chunks)
    if chunks is not None and placement.chunks != chunks:
        raise UserError(
            f"schedule {family.name!r} has {placement.chunks} stage(s) per rank, {chunks} were "
            "asked for; leave chunks out or choose another schedule"
        )
    if costs is not None and costs.stages != placement.stages:
        raise UserError(
            f"schedule {family.name!r} on {ranks} ranks has {placement.stages} stages, the costs "
            f"have {costs.stages}; give one row of costs per stage"
        )
    orders = family.orders(placement, microbatches, costs)
    return Schedule(family.name, placement, microbatches, tuple(tuple(row) for row in orders))


@cache
def _families() -> dict[str, Family]:
    found = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        if hasattr(module, "NAME"):
            found[module.NAME] = Family(
                name=module.NAME,
                aliases=getattr(module, "ALIASES", ()),
                placement=module.placement,
                orders=module.orders,
                description=module.__doc__ or "",
            )
    return found
