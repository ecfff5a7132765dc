"""Costs: how long ops and transfers take and what memory they hold."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zerobubble.errors import UserError
from zerobubble.schedule.ops import Kind


@dataclass(frozen=True)
class Costs:
    """Times in any one unit (ms in reports); memory in any one unit.

    Per stage: `forward`, `backward_input`, `backward_weight`, `backward_joint` (BW; the
    sum of the two where not given), `activation` (what F adds), `released_by_backward_input`
    (the share of it that B releases; W releases the rest, BW all), `fixed_memory`.
    Per boundary: `link_latency`, charged where the boundary crosses ranks.
    Per rank: `memory_limit`, or None. `joint_stages` cannot be split: their backward is BW.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    backward_joint: tuple[float, ...]
    link_latency: tuple[float, ...]
    activation: tuple[float, ...]
    released_by_backward_input: tuple[float, ...]
    fixed_memory: tuple[float, ...]
    memory_limit: tuple[float, ...] | None = None
    joint_stages: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        stages = len(self.forward)
        for name, want in (
            ("backward_input", stages),
            ("backward_weight", stages),
            ("backward_joint", stages),
            ("link_latency", stages - 1),
            ("activation", stages),
            ("released_by_backward_input", stages),
            ("fixed_memory", stages),
        ):
            row = getattr(self, name)
            if len(row) != want:
                raise UserError(f"{name} has {len(row)} entries, {want} are needed")
        for stage in self.joint_stages:
            if not 0 <= stage < stages:
                raise UserError(f"joint_stages holds {stage}; stages are 0 to {stages - 1}")
        for name in self.__dataclass_fields__:
            for value in getattr(self, name) or ():
                if not (math.isfinite(value) or (name == "memory_limit" and value == math.inf)):
                    raise UserError(f"{name} holds {value}; only finite numbers can be used")
                if value < 0:
                    raise UserError(f"{name} holds {value}; nothing here can be negative")
        if any(share > 1 for share in self.released_by_backward_input):
            raise UserError("released_by_backward_input is a share, from 0 to 1")

    @property
    def stages(self) -> int:
        """Number of stages, S."""
        return len(self.forward)

    def time(self, kind: Kind, stage: int) -> float:
        """How long an op takes."""
        row = {
            Kind.F: self.forward,
            Kind.B: self.backward_input,
            Kind.W: self.backward_weight,
            Kind.BW: self.backward_joint,
        }[kind]
        return row[stage]

    @staticmethod
    def per_stage(
        rows: list[tuple[float, float, float]],
        *,
        link_latency: float = 0.0,
        activation: float | tuple[float, ...] = 1.0,
        released_by_backward_input: float = 0.0,
        fixed_memory: float | tuple[float, ...] = 0.0,
        memory_limit: float | tuple[float, ...] | None = None,
        ranks: int | None = None,
    ) -> Costs:
        """Costs from one (F, B, W) row per stage; a number means the same for every stage.

        `ranks` is needed to spread a single `memory_limit` over the ranks.
        """
        stages = len(rows)

        def spread(value: float | tuple[float, ...]) -> tuple[float, ...]:
            return value if isinstance(value, tuple) else (float(value),) * stages

        if isinstance(memory_limit, int | float):
            if ranks is None:
                raise UserError("one memory_limit for all ranks needs the number of ranks")
            memory_limit = (float(memory_limit),) * ranks
        return Costs(
            forward=tuple(row[0] for row in rows),
            backward_input=tuple(row[1] for row in rows),
            backward_weight=tuple(row[2] for row in rows),
            backward_joint=tuple(row[1] + row[2] for row in rows),
            link_latency=(float(link_latency),) * (stages - 1),
            activation=spread(activation),
            released_by_backward_input=spread(released_by_backward_input),
            fixed_memory=spread(fixed_memory),
            memory_limit=memory_limit,
        )

    @staticmethod
    def uniform(
        stages: int,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        *,
        link_latency: float = 0.0,
        activation: float = 1.0,
        released_by_backward_input: float = 0.0,
    ) -> Costs:
        """The same costs for every stage."""
        return Costs.per_stage(
            [(forward, backward_input, backward_weight)] * stages,
            link_latency=link_latency,
            activation=activation,
            released_by_backward_input=released_by_backward_input,
        )
