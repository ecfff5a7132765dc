"""The families of schedules. Each module here is one; there is no list to edit.

A family is a module with

    NAME = "1f1b"                   how users ask for it
    ALIASES = ("one-f-one-b",)      optional
    OPTIONS = ("slices",)           optional: what else `orders` takes, as keyword arguments
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
    orders: Callable[..., Sequence[Sequence[Op]]]
    options: tuple[str, ...]
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
    slices: int | None = None,
    group: int | None = None,
) -> Schedule:
    """The schedule of family `name` for `ranks` >= 1 and `microbatches` >= 1.

    `chunks`: stages per rank, where the family leaves a choice. `costs`: planned for, by the
    families that plan. `slices` per sequence and `group` (microbatches that a chunk runs before
    the next one does): for the families that have that option, which choose where it is None.
    Raises UserError for an impossible combination.
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
    options = {
        option: value
        for option, value in (("slices", slices), ("group", group))
        if value is not None
    }
    for option, value in options.items():
        if option not in family.options:
            having = [other.name for other in _families().values() if option in other.options]
            raise UserError(
                f"schedule {family.name!r} has no {option}, {value} were asked for; leave it out "
                f"or choose {' or '.join(sorted(having))}"
            )
    rows = family.orders(placement, microbatches, costs, **options)
    orders = tuple(tuple(row) for row in rows)
    parts = 1 + max(op.slice for row in orders for op in row)
    return Schedule(family.name, placement, microbatches, orders, parts)


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
                options=getattr(module, "OPTIONS", ()),
                description=module.__doc__ or "",
            )
    return found
