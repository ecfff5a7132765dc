"""Pipeline: runs a schedule over the stages that this rank holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerobubble.errors import UserError
from zerobubble.runtime.clock import clock_offset
from zerobubble.runtime.executor import Executor
from zerobubble.runtime.split_backward import SplitReport
from zerobubble.runtime.stage import Stage
from zerobubble.runtime.transport import Transport
from zerobubble.runtime.transport.choose import TransportName, open_transport
from zerobubble.schedule.costs import Costs
from zerobubble.schedule.families.forward_only import forward_only
from zerobubble.schedule.lower import channels, ring_slots
from zerobubble.schedule.schedule import Schedule
from zerobubble.schedule.timeline import TimedOp, Timeline
from zerobubble.schedule.verify import verify


class Pipeline:
    """Trains and evaluates a model cut into stages, under one verified schedule.

    `modules` maps each stage that this rank holds to its module, called as
    `module(hidden, batch)`: hidden is the earlier stage's output (None on stage 0), the
    result is the next stage's input, or the scalar loss on the last stage. Known submodules
    are made to defer their weight gradients, in place. Every gradient is added, one
    contribution per microbatch in ascending order, to the parameter's `main_grad` where it
    has one, else to `.grad`.

    Every process of torch.distributed's default group is a rank of the pipeline, and all make
    the Pipeline at the same point: its channels are opened here. One rank needs no group.

    `transport`: "gloo", "shared-memory" (CPU ranks of one host), or "auto": shared memory where
    it can be. A rank that waits longer than `timeout` for a peer gives up.

    Raises a ScheduleError, before anything runs, if the schedule does not verify.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        schedule: Schedule,
        *,
        costs: Costs | None = None,
        transport: TransportName = "auto",
        timeout: timedelta = timedelta(minutes=5),
    ) -> None:
        if schedule.slices > 1:
            raise UserError(
                f"schedule {schedule.name!r} cuts sequences into {schedule.slices} slices, which "
                "cannot run yet; choose one of 1 slice"
            )
        self.proof = verify(schedule, costs)
        self.schedule = schedule
        world = dist.get_world_size() if dist.is_initialized() else 1
        self.ranks = tuple(range(world))
        if world != schedule.ranks:
            raise UserError(
                f"the schedule is for {schedule.ranks} ranks, {world} processes are here; start "
                f"{schedule.ranks} or build the schedule for {world}"
            )
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        held = schedule.placement.stages_of(self.rank)
        if sorted(modules) != list(held):
            raise UserError(
                f"rank {self.rank} holds stages {list(held)}, modules were given for "
                f"{sorted(modules)}"
            )
        self._last = schedule.placement.stages - 1
        self.stages = {s: Stage(s, modules[s], last=s == self._last) for s in held}
        self._transport: Transport | None = None
        crossing = channels(schedule.placement)
        if crossing:
            self._transport = open_transport(transport, crossing, self.ranks, timeout)
        self._offset = clock_offset()
        self._executor = Executor(
            self.proof.programs[self.rank],
            schedule.placement,
            self.stages,
            self._transport,
            slots=ring_slots(self.proof.programs),
        )
        self._evaluators: dict[int, Executor] = {}

    @property
    def split_reports(self) -> dict[int, SplitReport]:
        """Per stage of this rank, what share of its parameters is deferred to W."""
        return {index: stage.report for index, stage in self.stages.items()}

    def step(
        self,
        batches: Sequence[Any],
        *,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        loss_gradient: float = 1.0,
    ) -> list[Tensor]:
        """Forward and backward of every microbatch; the losses in order where the last stage is.

        batches: one per microbatch. shape, dtype: of the tensor between stages. loss_gradient:
        the root of every microbatch's backward (loss scale / m for a mean over microbatches).
        Raises StepError.
        """
        if len(batches) != self.schedule.microbatches:
            raise UserError(
                f"{len(batches)} batches for a schedule of {self.schedule.microbatches} "
                "microbatches; give one per microbatch"
            )
        root = torch.tensor(loss_gradient, dtype=torch.float32)
        losses = self._executor.run(batches, shape, dtype, root)
        return [losses[i] for i in sorted(losses)]

    def evaluate(
        self,
        batches: Sequence[Any],
        *,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
    ) -> list[Tensor]:
        """Forward of every batch in evaluation mode, any number of them; the losses in order.

        Leaves no gradient, no activation and no other trace.
        """
        count = len(batches)
        if count not in self._evaluators:
            schedule = forward_only(self.schedule.placement, count)
            programs = verify(schedule).programs
            self._evaluators[count] = Executor(
                programs[self.rank],
                schedule.placement,
                self.stages,
                self._transport,
                slots=ring_slots(programs),
                evaluate=True,
            )
        with _evaluation_mode([stage.module for stage in self.stages.values()]):
            losses = self._evaluators[count].run(batches, shape, dtype)
        return [losses[i] for i in sorted(losses)]

    def timeline(self) -> Timeline | None:
        """The last step as it ran, in ms from its first op, on rank 0 (None elsewhere).

        Collective over the pipeline's ranks (the default group).
        """
        executor = self._executor
        row = [
            (op, start + self._offset, end + self._offset)
            for op, start, end in zip(executor.ops, executor.starts, executor.ends, strict=True)
        ]
        rows: list[Any] = [row]
        if len(self.ranks) > 1:
            gathered: list[Any] | None = [None] * len(self.ranks) if self.rank == 0 else None
            dist.gather_object(row, gathered)
            if gathered is None:
                return None
            rows = gathered
        zero = min(start for row in rows for _, start, _ in row)
        return Timeline(
            name=self.schedule.name,
            placement=self.schedule.placement,
            microbatches=self.schedule.microbatches,
            rows=tuple(
                tuple(TimedOp(op, (s - zero) * 1e3, (e - zero) * 1e3) for op, s, e in row)
                for row in rows
            ),
        )


@contextmanager
def _evaluation_mode(modules: Sequence[nn.Module]) -> Any:
    training = [module for top in modules for module in top.modules() if module.training]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
