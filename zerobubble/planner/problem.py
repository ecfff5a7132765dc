"""A planning problem: ranks, microbatches, costs and limits, as `zerobubble plan` reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from zerobubble.errors import UserError
from zerobubble.schedule.costs import Costs
from zerobubble.schedule.placement import Placement, linear, looped, v

Objective = Literal["makespan", "span"]

PLACEMENTS = ("linear", "v", "looped", "any")
_REQUIRED = (
    "ranks",
    "microbatches",
    "placement",
    "link_latency",
    "released_by_backward_input",
    "memory_limit",
)
_OPTIONAL = (
    "chunks",
    "stage_times",
    "layer_times",
    "layer_activation",
    "layer_fixed",
    "activation_per_stage",
    "fixed_memory",
    "split_overhead",
    "joint_stages",
    # What a published target carries beside its problem; not used in planning.
    "id",
    "lower_bound",
    "public_best",
    "best_known_makespan",
    "proved_optimum",
)


@dataclass(frozen=True)
class Block:
    """An indivisible layer, or a stage: times, and memory in microbatches of a rank."""

    forward: float
    backward_input: float
    """Of a B that is split from its W."""
    backward_weight: float
    backward_joint: float
    activation: float
    """What F adds."""
    released: float
    """What B releases of it; W releases the rest."""
    fixed_memory: float


@dataclass(frozen=True)
class Problem:
    """What to plan for. Times in any one unit; memory in microbatches of a rank.

    `blocks`: one per stage in layer order, or, where `divisible`, the layers that the planner
    divides over the stages. Under placement "any" the blocks are 2p half-stages. `link_latency`:
    one number, or one per boundary. `memory_limit`: one per rank, inf for none.
    """

    ranks: int
    microbatches: int
    placement: str
    blocks: tuple[Block, ...]
    link_latency: float | tuple[float, ...]
    memory_limit: tuple[float, ...]
    chunks: int = 2
    divisible: bool = False
    joint_stages: frozenset[int] = frozenset()

    def placements(self) -> tuple[Placement, ...]:
        """Those that the planner may choose from."""
        choices = {
            "linear": (linear(self.ranks),),
            "v": (v(self.ranks),),
            "looped": (looped(self.ranks, self.chunks),),
        }
        if self.placement != "any":
            return choices[self.placement]
        if self.ranks == 1:
            return choices["linear"]  # the others only cut its one rank's work into two stages
        return (*choices["linear"], *choices["v"], looped(self.ranks, 2))

    def costs(self, placement: Placement, layout: Sequence[int] | None = None) -> Costs:
        """Costs per stage of `placement`; `layout`: blocks per stage, where they are divisible."""
        stages = placement.stages
        if layout is None:
            if len(self.blocks) % stages:
                raise UserError(
                    f"{len(self.blocks)} rows of costs do not make {stages} stages; give one "
                    "row per stage"
                )
            layout = [len(self.blocks) // stages] * stages
        rows, first = [], 0
        for count in layout:
            rows.append(self.blocks[first : first + count])
            first += count
        link = self.link_latency
        activation = tuple(sum(b.activation for b in row) for row in rows)
        released = (sum(b.released for b in row) for row in rows)
        return Costs(
            forward=tuple(sum(b.forward for b in row) for row in rows),
            backward_input=tuple(sum(b.backward_input for b in row) for row in rows),
            backward_weight=tuple(sum(b.backward_weight for b in row) for row in rows),
            backward_joint=tuple(sum(b.backward_joint for b in row) for row in rows),
            link_latency=link if isinstance(link, tuple) else (link,) * (stages - 1),
            activation=activation,
            released_by_backward_input=tuple(
                part / whole if whole else 0.0
                for part, whole in zip(released, activation, strict=True)
            ),
            fixed_memory=tuple(sum(b.fixed_memory for b in row) for row in rows),
            memory_limit=None if math.inf == min(self.memory_limit) else self.memory_limit,
            joint_stages=self._joint(stages),
        )

    @staticmethod
    def of_costs(placement: Placement, microbatches: int, costs: Costs) -> Problem:
        """The problem of costs on a given placement."""
        return Problem(
            ranks=placement.ranks,
            microbatches=microbatches,
            placement=placement.name,
            blocks=tuple(
                Block(
                    forward=costs.forward[s],
                    backward_input=costs.backward_input[s],
                    backward_weight=costs.backward_weight[s],
                    backward_joint=costs.backward_joint[s],
                    activation=costs.activation[s],
                    released=costs.activation[s] * costs.released_by_backward_input[s],
                    fixed_memory=costs.fixed_memory[s],
                )
                for s in range(costs.stages)
            ),
            link_latency=costs.link_latency,
            memory_limit=costs.memory_limit or (math.inf,) * placement.ranks,
            chunks=placement.chunks,
            joint_stages=costs.joint_stages,
        )

    def _joint(self, stages: int) -> frozenset[int]:
        if self.divisible:
            return frozenset(s for s in self.joint_stages if s < stages)
        if self.placement != "any" or stages == 2 * self.ranks:
            return self.joint_stages
        # Rows are half-stages: a stage joined from two cannot be split if either cannot.
        return frozenset(s // 2 for s in self.joint_stages) | frozenset(
            s for s in self.joint_stages if s < stages
        )


def load_problem(path: str | Path) -> Problem:
    """The problem of a JSON file. Raises UserError, naming key and value, for a wrong one."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    try:
        return parse_problem(json.loads(text, object_pairs_hook=_once))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from None


def parse_problem(document: object) -> Problem:
    """The problem of parsed JSON. Raises UserError, naming key and value, for a wrong one."""
    if not isinstance(document, Mapping):
        raise UserError("a problem is a JSON object with ranks, microbatches, placement, ...")
    return _Reader(document).read()


class _Reader:
    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = document

    def read(self) -> Problem:
        document = self.document
        known = {*_REQUIRED, *_OPTIONAL}
        for key in document:
            if key not in known:
                raise UserError(f"unknown key {key!r}; known are {', '.join(sorted(known))}")
        for key in _REQUIRED:
            if key not in document:
                raise UserError(f"key {key!r} is missing")
        ranks, microbatches = self._count("ranks"), self._count("microbatches")
        placement = document["placement"]
        if placement not in PLACEMENTS:
            raise UserError(f"placement is {placement!r}; use one of {', '.join(PLACEMENTS)}")
        chunks = {"linear": 1, "looped": self._count("chunks", 2)}.get(placement, 2)
        if document.get("chunks", chunks) != chunks:
            raise UserError(
                f"chunks is {document['chunks']!r}, placement {placement!r} has {chunks}; "
                "leave it out"
            )
        stages = ranks * chunks
        layers = "layer_times" in document
        if layers == ("stage_times" in document):
            raise UserError("give one of the keys 'stage_times' and 'layer_times'")
        blocks = self._layers() if layers else self._stages(stages)
        if layers and len(blocks) < ranks:
            raise UserError(
                f"layer_times has {len(blocks)} rows for {ranks} ranks; every rank needs one"
            )
        limits = self._spread("memory_limit", ranks, "rank", none=math.inf)
        return Problem(
            ranks=ranks,
            microbatches=microbatches,
            placement=placement,
            blocks=blocks,
            link_latency=self._link(stages),
            memory_limit=limits,
            chunks=chunks,
            divisible=layers,
            joint_stages=self._joint(stages),
        )

    def _stages(self, stages: int) -> tuple[Block, ...]:
        rows = self._rows("stage_times")
        if len(rows) not in (1, stages):
            raise UserError(
                f"stage_times has {len(rows)} rows for {stages} stages; give one per stage, or "
                "one for all"
            )
        if "activation_per_stage" not in self.document:
            raise UserError("key 'activation_per_stage' is missing")
        for key in ("layer_activation", "layer_fixed"):
            if key in self.document:
                raise UserError(f"{key} goes with layer_times, not with stage_times")
        rows = rows * stages if len(rows) == 1 else rows
        activation = self._spread("activation_per_stage", stages, "stage")
        fixed = self._spread("fixed_memory", stages, "stage", default=0.0)
        return self._blocks(rows, activation, fixed)

    def _layers(self) -> tuple[Block, ...]:
        rows = self._rows("layer_times")
        if "layer_activation" not in self.document:
            raise UserError("key 'layer_activation' is missing")
        for key in ("activation_per_stage", "fixed_memory"):
            if key in self.document:
                raise UserError(f"{key} goes with stage_times; use layer_activation, layer_fixed")
        activation = self._spread("layer_activation", len(rows), "layer")
        fixed = self._spread("layer_fixed", len(rows), "layer", default=0.0)
        return self._blocks(rows, activation, fixed)

    def _blocks(
        self,
        rows: Sequence[tuple[float, float, float]],
        activation: Sequence[float],
        fixed: Sequence[float],
    ) -> tuple[Block, ...]:
        key = "released_by_backward_input"
        share = self._number(self.document[key], key)
        if share > 1:
            raise UserError(f"{key} is {share:g}; it is a share, 0 to 1")
        overhead = self._number(self.document.get("split_overhead", 0.0), "split_overhead")
        return tuple(
            Block(
                forward=forward,
                backward_input=backward_input * (1 + overhead),
                backward_weight=backward_weight * (1 + overhead),
                backward_joint=backward_input + backward_weight,
                activation=held,
                released=held * share,
                fixed_memory=kept,
            )
            for (forward, backward_input, backward_weight), held, kept in zip(
                rows, activation, fixed, strict=True
            )
        )

    def _link(self, stages: int) -> float | tuple[float, ...]:
        value = self.document["link_latency"]
        if not isinstance(value, list):
            return self._number(value, "link_latency")
        if self.document["placement"] == "any":
            raise UserError(
                f"link_latency has {len(value)} entries; under placement 'any' give one number, "
                "for placements differ in their boundaries"
            )
        if len(value) != stages - 1:
            raise UserError(
                f"link_latency has {len(value)} entries for {stages - 1} boundaries; give one "
                "per boundary, or one number"
            )
        return tuple(self._number(x, f"link_latency[{i}]") for i, x in enumerate(value))

    def _joint(self, stages: int) -> frozenset[int]:
        value = self.document.get("joint_stages", [])
        if not isinstance(value, list):
            raise UserError(f"joint_stages is {value!r}; give a list of stages")
        for stage in value:
            if not _is_int(stage) or not 0 <= stage < stages:
                raise UserError(f"joint_stages holds {stage!r}; stages are 0 to {stages - 1}")
        return frozenset(value)

    def _count(self, key: str, default: int | None = None) -> int:
        value = self.document.get(key, default)
        if not _is_int(value) or value < 1:
            raise UserError(f"{key} is {value!r}; give a whole number of at least 1")
        return int(value)

    def _rows(self, key: str) -> list[tuple[float, float, float]]:
        value = self.document[key]
        if not isinstance(value, list) or not value:
            raise UserError(f"{key} is {value!r}; give a list of rows [F, B, W]")
        rows = []
        for i, row in enumerate(value):
            if not isinstance(row, list) or len(row) != 3:
                raise UserError(f"{key}[{i}] is {row!r}; give [F, B, W]")
            forward, backward_input, backward_weight = (
                self._number(x, f"{key}[{i}][{k}]") for k, x in enumerate(row)
            )
            rows.append((forward, backward_input, backward_weight))
        return rows

    def _spread(
        self,
        key: str,
        count: int,
        what: str,
        *,
        default: float | None = None,
        none: float | None = None,
    ) -> tuple[float, ...]:
        """A number for all or a list with one each; a null counts as `none` where given."""
        value = self.document.get(key, default)
        entries = value if isinstance(value, list) else [value] * count
        if len(entries) != count:
            raise UserError(f"{key} has {len(entries)} entries for {count} {what}s; give one each")
        named = [f"{key}[{i}]" if isinstance(value, list) else key for i in range(count)]
        return tuple(
            none if entry is None and none is not None else self._number(entry, name)
            for entry, name in zip(entries, named, strict=True)
        )

    def _number(self, value: object, name: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"{name} is {value!r}; give a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or number < 0:
            raise UserError(f"{name} is {value!r}; give a finite number of at least 0")
        return number


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of a JSON file, in which no key stands twice."""
    document = dict(pairs)
    for key in document:
        if sum(key == other for other, _ in pairs) > 1:
            raise UserError(f"key {key!r} is given twice; leave one")
    return document


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
