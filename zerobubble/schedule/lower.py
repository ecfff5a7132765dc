"""Lowering: a schedule becomes one program per rank, transfers included.

A boundary that crosses ranks has two channels, one for activations (F) and one for gradients
(B), also where two boundaries join the same two ranks. A boundary inside one rank needs no
instruction: the executor keeps the tensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zerobubble.errors import UserError
from zerobubble.schedule.ops import Kind, Op
from zerobubble.schedule.placement import Placement
from zerobubble.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Channel:
    """A FIFO of tensors across `boundary`, from rank `source` to rank `destination`.

    Kind F carries stage s's output to stage s + 1, kind B the gradient of it back.
    """

    boundary: int
    kind: Kind
    source: int
    destination: int

    def __str__(self) -> str:
        return f"{self.kind} of boundary {self.boundary} (rank {self.source} -> {self.destination})"


@dataclass(frozen=True, slots=True)
class Post:
    """Post the receive of the tensor that `op` needs."""

    channel: Channel
    op: Op

    def __str__(self) -> str:
        return f"post    {self.channel} for {self.op.text}"


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for the tensor that `op`, the next computation, needs."""

    channel: Channel
    op: Op

    def __str__(self) -> str:
        return f"wait    {self.channel} for {self.op.text}"


@dataclass(frozen=True, slots=True)
class Compute:
    """Run `op`."""

    op: Op

    def __str__(self) -> str:
        return f"compute {self.op.text}"


@dataclass(frozen=True, slots=True)
class Send:
    """Issue the send of the tensor that `op` has just made; nothing waits for it here."""

    channel: Channel
    op: Op

    def __str__(self) -> str:
        return f"send    {self.channel} of {self.op.text}"


@dataclass(frozen=True, slots=True)
class Release:
    """Give up the buffer of an earlier send, of what `op` made: it is known to be done."""

    channel: Channel
    op: Op

    def __str__(self) -> str:
        return f"release {self.channel} of {self.op.text}"


Instruction = Post | Wait | Compute | Send | Release


@dataclass(frozen=True)
class Program:
    """What `rank` does, in order."""

    rank: int
    instructions: tuple[Instruction, ...]

    def __str__(self) -> str:
        return "\n".join([f"rank {self.rank}:", *(f"  {step}" for step in self.instructions)])


def channels(placement: Placement) -> tuple[Channel, ...]:
    """Every channel of a placement: per boundary that crosses ranks, F then B."""
    found = []
    for boundary in range(placement.stages - 1):
        if placement.crosses(boundary):
            here, there = placement.rank_of[boundary], placement.rank_of[boundary + 1]
            found.append(Channel(boundary, Kind.F, here, there))
            found.append(Channel(boundary, Kind.B, there, here))
    return tuple(found)


def lower(schedule: Schedule, window: int = 4) -> tuple[Program, ...]:
    """One program per rank.

    Per channel at most `window` receives are posted ahead: the first ones when the program
    starts, each further one right after a Wait. A Wait comes right before the op that needs
    the tensor, a Send right after the op that made it. A Release comes as soon as a tensor
    received back proves that the peer has what was sent to it; the buffers of sends that
    nothing proves done live until the step ends. Nothing is checked here: `verify` is what
    proves that both ends of every channel agree.
    """
    if window < 1:
        raise UserError(f"a window of {window} receives; post at least 1 ahead")
    by_end = {(c.boundary, c.kind): c for c in channels(schedule.placement)}
    rows = [_instructions(order, by_end, window) for order in schedule.orders]
    received = [_counts_by_send(row, _received_with) for row in rows]
    return tuple(Program(rank, _with_releases(row, received)) for rank, row in enumerate(rows))


def ring_slots(programs: Sequence[Program]) -> dict[Channel, int]:
    """Per channel, how many tensors its sender can be ahead of what the receiver is done with.

    A receiver is done with a tensor at the end of its stage's W (or BW) of that microbatch, of
    its F where there is no backward. With a ring of that many slots no send ever finds it full:
    what the sender has received back proves that the slot is free again.
    """
    backward = any(
        isinstance(step, Compute) and step.op.kind is not Kind.F
        for program in programs
        for step in program.instructions
    )

    def freed(step: Instruction, channels: dict[int, list[Channel]]) -> list[Channel]:
        last = isinstance(step, Compute) and step.op.kind.is_weight is backward
        return channels.get(step.op.stage, []) if last else []

    known = [_counts_by_send(program.instructions, freed) for program in programs]
    slots: dict[Channel, int] = {}
    for program in programs:
        sent: dict[Channel, int] = {}
        free: dict[Channel, int] = {}
        waited: dict[Channel, int] = {}
        for step in program.instructions:
            channel = None if isinstance(step, Compute) else step.channel
            if channel is not None and isinstance(step, Wait):
                number = waited.get(channel, 0)
                waited[channel] = number + 1
                free.update(known[channel.source].get((channel, number), {}))
            elif channel is not None and isinstance(step, Send):
                sent[channel] = sent.get(channel, 0) + 1
                ahead = sent[channel] - free.get(channel, 0)
                slots[channel] = max(slots.get(channel, 0), ahead)
    return slots


def _received_with(step: Instruction, _channels: dict[int, list[Channel]]) -> list[Channel]:
    return [step.channel] if isinstance(step, Wait) else []


def _counts_by_send(
    row: tuple[Instruction, ...],
    counted: Callable[[Instruction, dict[int, list[Channel]]], list[Channel]],
) -> dict[tuple[Channel, int], dict[Channel, int]]:
    """Per (channel, n-th send on it): how often each channel of that peer had been counted.

    `counted` gets a step, and the channels that bring something to each stage here.
    """
    incoming: dict[int, list[Channel]] = {}
    for step in row:
        if isinstance(step, Wait) and step.channel not in incoming.get(step.op.stage, []):
            incoming.setdefault(step.op.stage, []).append(step.channel)
    counts: dict[Channel, int] = {}
    sent: dict[Channel, int] = {}
    known = {}
    for step in row:
        for channel in counted(step, incoming):
            counts[channel] = counts.get(channel, 0) + 1
        if isinstance(step, Send):
            number = sent.get(step.channel, 0)
            sent[step.channel] = number + 1
            known[step.channel, number] = {
                c: n for c, n in counts.items() if c.source == step.channel.destination
            }
    return known


def _with_releases(
    row: tuple[Instruction, ...],
    received: list[dict[tuple[Channel, int], dict[Channel, int]]],
) -> tuple[Instruction, ...]:
    """`row` with a Release after each Wait whose tensor proves earlier sends done."""
    unreleased: dict[Channel, deque[Op]] = {}
    released: dict[Channel, int] = {}
    waited: dict[Channel, int] = {}
    steps: list[Instruction] = []
    for step in row:
        steps.append(step)
        if isinstance(step, Send):
            unreleased.setdefault(step.channel, deque()).append(step.op)
        elif isinstance(step, Wait):
            number = waited.get(step.channel, 0)
            waited[step.channel] = number + 1
            proved = received[step.channel.source].get((step.channel, number), {})
            for channel, count in proved.items():
                while released.get(channel, 0) < count and unreleased.get(channel):
                    steps.append(Release(channel, unreleased[channel].popleft()))
                    released[channel] = released.get(channel, 0) + 1
    return tuple(steps)


def _instructions(
    order: tuple[Op, ...], by_end: dict[tuple[int, Kind], Channel], window: int
) -> tuple[Instruction, ...]:
    received = [_received(op, by_end) for op in order]
    needing: dict[Channel, list[Op]] = {}
    for op, channel in zip(order, received, strict=True):
        if channel is not None:
            needing.setdefault(channel, []).append(op)

    steps: list[Instruction] = [
        Post(channel, op) for channel, ops in needing.items() for op in ops[:window]
    ]
    unposted = {channel: iter(ops[window:]) for channel, ops in needing.items()}
    for op, channel in zip(order, received, strict=True):
        if channel is not None:
            steps.append(Wait(channel, op))
            following = next(unposted[channel], None)
            if following is not None:
                steps.append(Post(channel, following))
        steps.append(Compute(op))
        sent = _sent(op, by_end)
        if sent is not None:
            steps.append(Send(sent, op))
    return tuple(steps)


def _received(op: Op, by_end: dict[tuple[int, Kind], Channel]) -> Channel | None:
    """The channel that brings what `op` needs; None where it comes from this rank."""
    if op.kind is Kind.F:
        return by_end.get((op.stage - 1, Kind.F))
    return by_end.get((op.stage, Kind.B)) if op.kind.is_backward else None


def _sent(op: Op, by_end: dict[tuple[int, Kind], Channel]) -> Channel | None:
    """The channel that takes what `op` makes; None where it stays on this rank."""
    if op.kind is Kind.F:
        return by_end.get((op.stage, Kind.F))
    return by_end.get((op.stage - 1, Kind.B)) if op.kind.is_backward else None
