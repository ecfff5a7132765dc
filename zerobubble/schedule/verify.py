"""Verification: a schedule is proved right before any process computes (design, promise 3)."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

from zerobubble.errors import UserError
from zerobubble.schedule.costs import Costs
from zerobubble.schedule.errors import (
    BlockingReceiveError,
    DeadlockError,
    DependencyOrderError,
    DuplicateOpError,
    MemoryLimitError,
    MicrobatchOrderError,
    MispairingError,
    MissingOpError,
    MixedBackwardError,
    RowCountError,
    ScheduleError,
    UnknownMicrobatchError,
    UnknownStageError,
    WrongRankError,
)
from zerobubble.schedule.lower import Channel, Compute, Post, Program, Release, Send, Wait, lower
from zerobubble.schedule.ops import Kind, Op
from zerobubble.schedule.schedule import Schedule
from zerobubble.schedule.simulate import simulate
from zerobubble.schedule.timeline import Timeline

# Times come from sums of floats in different orders; memory likewise.
_TOLERANCE = 1e-9

Route = Callable[[Channel], Hashable]
"""Maps a channel to the transport's in-order queue that carries it."""


@dataclass(frozen=True)
class Proof:
    """What `verify` found: the programs it checked and the timeline they are to have."""

    programs: tuple[Program, ...]
    timeline: Timeline


def verify(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    window: int = 4,
    route: Route | None = None,
) -> Proof:
    """Prove that `schedule` can run, or raise the ScheduleError that says why not.

    Checked, each with its own error that names rank and op: every op once and on its rank;
    a backward joint or split, not both; dependencies in order; F, B and W of a stage in
    microbatch order; no deadlock and no mis-pairing under rendezvous sends (see
    `verify_transfers`, also for `route` and `window`); memory within `costs.memory_limit`;
    and that receives which block cost no time. Without `costs`, F = B = W = 1 on every stage.
    """
    _verify_ops(schedule)
    _verify_orders(schedule)
    programs = lower(schedule, window)
    verify_transfers(programs, route)
    costs = costs or Costs.uniform(schedule.placement.stages)
    free = simulate(schedule, costs)
    _verify_memory(free, costs)
    blocking = simulate(schedule, costs, receives="block", programs=programs)
    if blocking.makespan > free.makespan * (1 + _TOLERANCE):
        raise _first_blocked(free, blocking)
    return Proof(programs, free)


def verify_transfers(programs: Sequence[Program], route: Route | None = None) -> None:
    """Prove that the programs' transfers all pair, whatever the ops' times.

    A rank's posts and sends enter the queue that `route` names (default: one per channel) in
    the program's order, and a send completes only with its receive. Only the heads of two
    ranks' queues can pair: a send with the receive of the same tensor.

    Raises DeadlockError or MispairingError, naming ranks and ops.
    """
    _Rendezvous(programs, route or (lambda channel: channel)).run()


class _Rendezvous:
    def __init__(self, programs: Sequence[Program], route: Route) -> None:
        self.programs = programs
        self.route = route
        self.queues: dict[tuple[Hashable, int], deque[Post | Send]] = defaultdict(deque)
        self.met: set[tuple[Channel, Op]] = set()
        self.position = [0] * len(programs)

    def run(self) -> None:
        runnable = list(range(len(self.programs)))
        while runnable:
            rank = runnable.pop()
            for head in self._issue(rank):
                runnable.extend(self._pair(head.channel, rank))
        for rank, program in enumerate(self.programs):
            if self.position[rank] < len(program.instructions):
                step = program.instructions[self.position[rank]]
                assert isinstance(step, Wait | Release)
                reason = f"waits for {step.channel}, whose send and receive never meet"
                raise DeadlockError.at(rank, *self._computation(rank), reason)
        for (_, rank), queue in self.queues.items():
            for step in queue:
                raise DeadlockError(
                    f"rank {rank}: '{step}' never finds its other end", rank=rank, op=step.op
                )

    def _issue(self, rank: int) -> Iterator[Post | Send]:
        """Go on in the program until a Wait (or Release) is not met; yield what enters a queue."""
        instructions = self.programs[rank].instructions
        while self.position[rank] < len(instructions):
            step = instructions[self.position[rank]]
            if isinstance(step, Wait | Release):
                if (step.channel, step.op) not in self.met:
                    return
            elif isinstance(step, Post | Send):
                queue = self.queues[self.route(step.channel), rank]
                queue.append(step)
                if len(queue) == 1:
                    yield step
            self.position[rank] += 1

    def _pair(self, channel: Channel, rank: int) -> Iterator[int]:
        """Pair heads from `rank`'s queue on; yield the ranks whose Wait may now be over."""
        key = self.route(channel)
        pending = [rank]
        while pending:
            here = pending.pop()
            mine = self.queues[key, here]
            if not mine:
                continue
            there = _peer(mine[0])
            theirs = self.queues[key, there]
            if not theirs or _peer(theirs[0]) != here:
                continue
            self._check(here, mine[0], there, theirs[0])
            self.met.update((head.channel, head.op) for head in (mine.popleft(), theirs.popleft()))
            yield from (here, there)
            pending += [here, there]

    def _check(self, rank: int, mine: Post | Send, peer: int, theirs: Post | Send) -> None:
        if type(mine) is type(theirs):
            both = "send" if isinstance(mine, Send) else "receive"
            raise DeadlockError(
                f"rank {rank} and rank {peer} both wait in a shared queue for their {both} to be "
                f"met: rank {rank} with {mine.op}, rank {peer} with {theirs.op}",
                rank=rank,
                op=mine.op,
            )
        same = mine.channel == theirs.channel and (
            (mine.op.microbatch, mine.op.slice) == (theirs.op.microbatch, theirs.op.slice)
        )
        if not same:
            raise MispairingError(
                f"rank {rank} and rank {peer} would pair different tensors: rank {rank} has "
                f"'{mine}', rank {peer} has '{theirs}'",
                rank=rank,
                op=mine.op,
            )

    def _computation(self, rank: int) -> tuple[int, Op]:
        """Position in the schedule's row, and the op, that the rank has come to."""
        instructions = self.programs[rank].instructions
        done = instructions[: self.position[rank]]
        step = instructions[self.position[rank]]
        return sum(isinstance(s, Compute) for s in done), step.op


def _peer(step: Post | Send) -> int:
    return step.channel.source if isinstance(step, Post) else step.channel.destination


def _verify_ops(schedule: Schedule) -> None:
    """Every op once, on its rank, of a known stage and microbatch; backwards not mixed."""
    placement = schedule.placement
    if schedule.microbatches < 1 or schedule.slices < 1:
        raise UnknownMicrobatchError(
            f"the schedule has {schedule.microbatches} microbatches of {schedule.slices} slices; "
            "both must be at least 1"
        )
    if len(schedule.orders) != placement.ranks:
        raise RowCountError(
            f"the schedule has {len(schedule.orders)} rows, its placement "
            f"{placement.ranks} ranks; give one row per rank"
        )
    seen: set[Op] = set()
    for rank, order in enumerate(schedule.orders):
        for position, op in enumerate(order):
            fault = _misplaced(schedule, rank, op)
            if fault is not None:
                error, reason = fault
                raise error.at(rank, position, op, reason)
            if op in seen:
                raise DuplicateOpError.at(rank, position, op, "is there a second time")
            seen.add(op)
    _verify_complete(schedule, seen)


def _misplaced(schedule: Schedule, rank: int, op: Op) -> tuple[type[ScheduleError], str] | None:
    placement = schedule.placement
    if not 0 <= op.stage < placement.stages:
        return (
            UnknownStageError,
            f"there are {placement.stages} stages, 0 to {placement.stages - 1}",
        )
    if placement.rank_of[op.stage] != rank:
        return WrongRankError, f"stage {op.stage} is on rank {placement.rank_of[op.stage]}"
    if not 0 <= op.microbatch < schedule.microbatches:
        return UnknownMicrobatchError, f"there are {schedule.microbatches} microbatches"
    if not 0 <= op.slice < schedule.slices:
        return UnknownMicrobatchError, f"there are {schedule.slices} slices"
    return None


def _verify_complete(schedule: Schedule, seen: set[Op]) -> None:
    forward_only = schedule.forward_only
    joint_stages = {op.stage for op in seen if op.kind is Kind.BW}
    for stage, rank in enumerate(schedule.placement.rank_of):
        for microbatch in range(schedule.microbatches):
            for part in range(schedule.slices):
                where = (stage, microbatch, part)
                joint, split = Op(Kind.BW, *where), (Op(Kind.B, *where), Op(Kind.W, *where))
                there = [op for op in split if op in seen]
                if joint in seen and there:
                    raise MixedBackwardError(
                        f"rank {rank}: {joint} and {there[0]} compute the same gradient; "
                        "keep one of them",
                        rank=rank,
                        op=there[0],
                    )
                needed: tuple[Op, ...] = (Op(Kind.F, *where),)
                if not forward_only:
                    needed += (joint,) if stage in joint_stages and not there else split
                for op in needed:
                    if op not in seen:
                        raise MissingOpError(f"rank {rank}: {op} is missing", rank=rank, op=op)


def _verify_orders(schedule: Schedule) -> None:
    """On each rank, B after F, W after B, and each kind of a stage in microbatch order."""
    for rank, order in enumerate(schedule.orders):
        done: set[Op] = set()
        latest: dict[tuple[Kind, int], Op] = {}
        for position, op in enumerate(order):
            before = {Kind.F: None, Kind.W: Kind.B}.get(op.kind, Kind.F)
            if before is not None:
                earlier = Op(before, op.stage, op.microbatch, op.slice)
                if earlier not in done:
                    raise DependencyOrderError.at(rank, position, op, f"comes before {earlier}")
            for kind in (Kind.B, Kind.W) if op.kind is Kind.BW else (op.kind,):
                previous = latest.get((kind, op.stage))
                if previous is not None and _rank_in_order(op) < _rank_in_order(previous):
                    reason = f"comes after {previous}; keep microbatches in ascending order"
                    raise MicrobatchOrderError.at(rank, position, op, reason)
                latest[kind, op.stage] = op
            done.add(op)


def _rank_in_order(op: Op) -> tuple[int, int]:
    """Microbatches ascend; slices ascend forward and descend backward."""
    return (op.microbatch, op.slice if op.kind is Kind.F else -op.slice)


def _verify_memory(timeline: Timeline, costs: Costs) -> None:
    if costs.memory_limit is None or timeline.peak_memory is None:
        return
    ranks, limits = len(timeline.peak_memory), len(costs.memory_limit)
    if limits != ranks:
        raise UserError(f"memory_limit has {limits} entries for {ranks} ranks; give one per rank")
    for rank, (peak, limit) in enumerate(
        zip(timeline.peak_memory, costs.memory_limit, strict=True)
    ):
        if peak > limit * (1 + _TOLERANCE):
            raise MemoryLimitError(
                f"rank {rank} needs {peak:g} of memory, its limit is {limit:g}: {peak - limit:g} "
                "short; raise the limit or choose a schedule that holds less",
                rank=rank,
            )


def _first_blocked(free: Timeline, blocking: Timeline) -> ScheduleError:
    """The error of the first op that blocking receives delay."""
    late = [
        (quick.start, rank, position, quick.op, slow.start)
        for rank, rows in enumerate(zip(free.rows, blocking.rows, strict=True))
        for position, (quick, slow) in enumerate(zip(*rows, strict=True))
        if slow.start > quick.start + _TOLERANCE * max(1.0, quick.start)
    ]
    start, rank, position, op, delayed = min(late)
    return BlockingReceiveError.at(
        rank,
        position,
        op,
        f"a blocking receive delays it from {start:g} to {delayed:g}",
    )
