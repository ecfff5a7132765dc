"""What can be wrong with a schedule: one error for each of `verify`'s promises."""

from __future__ import annotations

from zerobubble.errors import UserError
from zerobubble.schedule.ops import Op


class ScheduleError(UserError):
    """A schedule that must not run. `rank` and `op` say where, where one place is at fault."""

    def __init__(self, message: str, *, rank: int | None = None, op: Op | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.op = op

    @classmethod
    def at(cls, rank: int, position: int, op: Op, reason: str) -> ScheduleError:
        """The error of the op at `position` (from 0) of the rank's row."""
        return cls(f"rank {rank}, op {position} ({op}): {reason}", rank=rank, op=op)


class RowCountError(ScheduleError):
    """There is not one row per rank."""


class UnknownStageError(ScheduleError):
    """An op names a stage that the placement does not have."""


class WrongRankError(ScheduleError):
    """An op is in the row of a rank that does not hold its stage."""


class UnknownMicrobatchError(ScheduleError):
    """An op names a microbatch or slice that the schedule does not have."""


class DuplicateOpError(ScheduleError):
    """An op is there twice."""


class MissingOpError(ScheduleError):
    """An op is not there."""


class MixedBackwardError(ScheduleError):
    """A backward is both joint (BW) and split (B, W)."""


class DependencyOrderError(ScheduleError):
    """An op comes before one of the same rank that it depends on."""


class MicrobatchOrderError(ScheduleError):
    """The ops of one kind on one stage are not in microbatch order."""


class DeadlockError(ScheduleError):
    """Ranks wait for each other, or for a tensor that nobody makes."""


class MispairingError(ScheduleError):
    """A send meets the receive of another tensor."""


class MemoryLimitError(ScheduleError):
    """A rank needs more memory than it has."""


class BlockingReceiveError(ScheduleError):
    """A rank that stops at its receives takes longer than one that does not."""
