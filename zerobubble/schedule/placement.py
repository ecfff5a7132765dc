"""Placement: which rank holds which stage."""

from __future__ import annotations

from dataclasses import dataclass

from zerobubble.errors import UserError


@dataclass(frozen=True)
class Placement:
    """`rank_of[s]` is the rank that holds stage s; every rank holds as many stages."""

    name: str
    rank_of: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.rank_of:
            raise UserError("a placement needs at least one stage")
        ranks = max(self.rank_of) + 1
        held = [self.rank_of.count(rank) for rank in range(ranks)]
        if min(self.rank_of) < 0 or len(set(held)) != 1:
            raise UserError(
                f"placement {self.name!r} gives its {ranks} ranks {held} stages; "
                "give every rank as many"
            )

    @property
    def ranks(self) -> int:
        """Number of ranks, p."""
        return max(self.rank_of) + 1

    @property
    def stages(self) -> int:
        """Number of stages, S."""
        return len(self.rank_of)

    @property
    def chunks(self) -> int:
        """Stages per rank, S/p."""
        return self.stages // self.ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, in layer order: its chunks 0, 1, ..."""
        return tuple(s for s, r in enumerate(self.rank_of) if r == rank)

    def chunk_of(self, stage: int) -> int:
        """Which of its rank's chunks `stage` is."""
        return self.rank_of[:stage].count(self.rank_of[stage])

    def crosses(self, boundary: int) -> bool:
        """Whether boundary s (stage s to s + 1) joins two different ranks."""
        return self.rank_of[boundary] != self.rank_of[boundary + 1]


def linear(ranks: int) -> Placement:
    """Stage s on rank s."""
    _check(ranks)
    return Placement("linear", tuple(range(ranks)))


def looped(ranks: int, chunks: int) -> Placement:
    """`chunks` stages per rank, stage s on rank s mod p."""
    _check(ranks, chunks)
    return Placement("looped", tuple(range(ranks)) * chunks)


def v(ranks: int) -> Placement:
    """2p stages: down the ranks, then back up, so rank 0 holds the first and the last."""
    _check(ranks)
    return Placement("v", (*range(ranks), *reversed(range(ranks))))


def _check(ranks: int, chunks: int = 1) -> None:
    if ranks < 1 or chunks < 1:
        raise UserError(f"{ranks} ranks with {chunks} stages each; both must be at least 1")
