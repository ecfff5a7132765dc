"""Executor: runs one rank's program, instruction by instruction, and times every op."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from zerobubble.errors import UserError
from zerobubble.runtime.stage import Stage
from zerobubble.runtime.transport import Arrival, Transfer, Transport
from zerobubble.schedule.lower import (
    Channel,
    Compute,
    Instruction,
    Post,
    Program,
    Release,
    Send,
    Wait,
)
from zerobubble.schedule.ops import Kind, Op
from zerobubble.schedule.placement import Placement


class StepError(UserError):
    """What ended a step: rank, op and cause in one line; the cause is chained.

    `computing`: an op's own code failed, so that the cause's traceback tells more.
    """

    def __init__(self, rank: int, where: str, cause: Exception, *, computing: bool) -> None:
        reason = (str(cause).strip().splitlines() or [""])[0]
        if computing or not reason:
            reason = f"{type(cause).__name__}: {reason}" if reason else type(cause).__name__
        super().__init__(f"rank {rank}, {where}: {reason}")
        self.computing = computing


class Executor:
    """Binds a program to stages and a transport once, and runs it any number of times.

    `transport` may be None where no boundary of the placement crosses ranks. A tensor on its
    way lives in a numbered slot from the op (or receive) that made it to the op (or send)
    that takes it. `slots`: what `ring_slots` finds for all ranks' programs. `evaluate` runs F
    without graphs.
    """

    def __init__(
        self,
        program: Program,
        placement: Placement,
        stages: Mapping[int, Stage],
        transport: Transport | None,
        *,
        slots: Mapping[Channel, int] | None = None,
        evaluate: bool = False,
    ) -> None:
        self.rank = program.rank
        self.ops = tuple(i.op for i in program.instructions if isinstance(i, Compute))
        self.starts = [0.0] * len(self.ops)
        """Start of every op in the last run, in seconds of this process's perf_counter."""
        self.ends = [0.0] * len(self.ops)
        self._placement = placement
        self._stages = stages
        self._transport = transport
        self._evaluate = evaluate
        self._slot_of: dict[tuple[bool, int, int, int], int] = {}
        self._slots: list[Any] = []
        self._posted: dict[Op, Arrival] = {}
        self._sends: dict[Channel, deque[tuple[Transfer, Tensor] | None]] = {}
        self._ring_slots = dict(slots or {})
        # What brings something to each stage from another rank.
        self._incoming: dict[int, list[Channel]] = {}
        for step in program.instructions:
            if isinstance(step, Wait):
                channels = self._incoming.setdefault(step.op.stage, [])
                if step.channel not in channels:
                    channels.append(step.channel)
        self._batches: Sequence[Any] = ()
        self._shape: Sequence[int] = ()
        self._dtype = torch.float32
        self._loss_gradient: Tensor | None = None
        self._losses: dict[int, Tensor] = {}
        self._instructions = program.instructions
        # What to call, and which op it is (-1: a transfer, not timed).
        numbers = iter(range(len(self.ops)))
        self._steps = [
            (self._bind(i), next(numbers) if isinstance(i, Compute) else -1)
            for i in program.instructions
        ]

    def run(
        self,
        batches: Sequence[Any],
        shape: Sequence[int],
        dtype: torch.dtype,
        loss_gradient: Tensor | None = None,
    ) -> dict[int, Tensor]:
        """One step over `batches`, one per microbatch; the losses if the last stage is here.

        shape, dtype: of the tensor that every boundary carries. loss_gradient: scalar, the
        root of every microbatch's backward. Raises StepError.
        """
        self._batches, self._shape, self._dtype = batches, shape, dtype
        self._loss_gradient = loss_gradient
        self._losses = {}
        starts, ends = self.starts, self.ends
        position = -1
        try:
            if self._transport is not None:
                nbytes = math.prod(shape) * dtype.itemsize
                self._transport.fit(self._ring_slots, nbytes)
            for position, (run, number) in enumerate(self._steps):  # noqa: B007
                if number < 0:
                    run()
                else:
                    starts[number] = perf_counter()
                    run()
                    ends[number] = perf_counter()
            for sends in self._sends.values():
                while sends:
                    _finish(sends.popleft())
        except Exception as error:
            instruction = self._instructions[position] if position >= 0 else None
            computing = isinstance(instruction, Compute)
            raise StepError(self.rank, _where(instruction), error, computing=computing) from error
        finally:
            self._batches = ()
        return self._losses

    def _slot(self, forward: bool, op: Op, stage: int) -> int:
        """The slot of what `stage` makes for op's microbatch: its output or its gradient."""
        key = (forward, stage, op.microbatch, op.slice)
        if key not in self._slot_of:
            self._slot_of[key] = len(self._slots)
            self._slots.append(None)
        return self._slot_of[key]

    def _take(self, slot: int) -> Any:
        value, self._slots[slot] = self._slots[slot], None
        return value

    def _bind(self, instruction: Instruction) -> Callable[[], None]:
        if isinstance(instruction, Compute):
            return self._bind_compute(instruction.op)
        if self._transport is None:
            raise UserError(f"{instruction} needs a transport, and none was given")
        channel, op = instruction.channel, instruction.op
        forward = channel.kind is Kind.F
        if isinstance(instruction, Post):
            receive = self._transport.receiver(channel)

            def post() -> None:
                self._posted[op] = receive(self._shape, self._dtype)

            return post
        if isinstance(instruction, Wait):
            slot = self._slot(forward, op, op.stage - 1 if forward else op.stage + 1)

            def wait() -> None:
                self._slots[slot] = self._posted.pop(op).wait()

            return wait
        sends = self._sends.setdefault(channel, deque())
        if isinstance(instruction, Send):
            send = self._transport.sender(channel)
            slot = self._slot(forward, op, op.stage)

            def issue() -> None:
                tensor = self._take(slot).contiguous()
                transfer = send(tensor)
                sends.append(None if transfer is None else (transfer, tensor))

            return issue
        assert isinstance(instruction, Release)

        def release() -> None:
            _finish(sends.popleft())

        return release

    def _bind_compute(self, op: Op) -> Callable[[], None]:
        stage = self._stages[op.stage]
        microbatch = op.microbatch
        if op.kind is Kind.F:
            return self._then_free(op, self._bind_forward(op, stage))
        if op.kind is Kind.W:
            return self._then_free(op, lambda: stage.backward_weight(microbatch))
        backward = stage.backward_input if op.kind is Kind.B else stage.backward
        into = self._slot(False, op, op.stage) if op.stage > 0 else None
        source = None if stage.last else self._slot(False, op, op.stage + 1)
        stays = op.stage > 0 and not self._placement.crosses(op.stage - 1)

        def run() -> None:
            gradient: Any = self._loss_gradient if source is None else self._take(source)
            result = backward(microbatch, gradient)
            if into is not None:
                self._slots[into] = _own(result, gradient) if stays else result

        return self._then_free(op, run)

    def _bind_forward(self, op: Op, stage: Stage) -> Callable[[], None]:
        microbatch = op.microbatch
        source = self._slot(True, op, op.stage - 1) if op.stage > 0 else None
        into = None if stage.last else self._slot(True, op, op.stage)
        stays = not stage.last and not self._placement.crosses(op.stage)

        def run() -> None:
            hidden = None if source is None else self._take(source)
            batch = self._batches[microbatch]
            if self._evaluate:
                output = stage.evaluate(hidden, batch)
            else:
                output = stage.forward(microbatch, hidden, batch)
            if into is None:
                self._losses[microbatch] = _own(output, hidden)
            else:
                self._slots[into] = _own(output, hidden) if stays else output

        return run

    def _then_free(self, op: Op, run: Callable[[], None]) -> Callable[[], None]:
        """`run`, then hand back what the stage received for this microbatch, if it was the last
        to use it: W or BW, and F where there is no backward."""
        last = (Kind.F,) if self._evaluate else (Kind.W, Kind.BW)
        channels = self._incoming.get(op.stage, []) if op.kind in last else []
        assert self._transport is not None or not channels
        freers = [self._transport.freer(c) for c in channels] if self._transport else []
        calls = [free for free in freers if free is not None]
        if not calls:
            return run

        def run_and_free() -> None:
            run()
            for free in calls:
                free()

        return run_and_free


def _own(result: Any, received: Tensor | None) -> Any:
    """`result`, in memory of its own: what was received is given back when its stage is done."""
    if result is None or received is None:
        return result
    shared = result.untyped_storage().data_ptr() == received.untyped_storage().data_ptr()
    return result.clone() if shared else result


def _finish(send: tuple[Transfer, Tensor] | None) -> None:
    if send is not None:
        send[0].wait()


def _where(instruction: Instruction | None) -> str:
    if instruction is None:
        return "before the first op"
    if isinstance(instruction, Compute):
        return str(instruction.op)
    channel = instruction.channel
    if isinstance(instruction, Post | Wait):
        return f"{instruction.op}, receiving from rank {channel.source}"
    return f"{instruction.op}, sending to rank {channel.destination}"
