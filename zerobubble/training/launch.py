"""Processes: joining them, agreeing on errors, and leaving with one line from one rank."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn, TypeVar

from zerobubble.errors import UserError

T = TypeVar("T")

# torchrun ends the others as soon as one rank leaves: those with nothing to say leave last.
_LET_RANK_0_SPEAK_S = 5.0


def rank_and_world() -> tuple[int, int]:
    """This process's rank and the number of processes, as torchrun tells them."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def join(backend: str | None, timeout: timedelta = timedelta(minutes=10)) -> None:
    """Initialise torch.distributed over Gloo; a single process needs no launcher.

    Raises UserError for `nccl` without a GPU, and with one until that transport exists.
    """
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore, PrefixStore
    from torch.distributed.rendezvous import rendezvous

    if backend == "nccl":
        found = "no GPU is here" if not torch.cuda.is_available() else "it is not there yet"
        raise UserError(f"--distributed-backend nccl: {found}; use gloo, on CPUs")
    if rank_and_world()[1] == 1:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        return
    rank, world = rank_and_world()
    store, _, _ = next(rendezvous("env://", rank, world, timeout=timeout))
    # A restart of torchrun keeps its store: a fresh prefix hides the dead processes' addresses.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"restart-{restart}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)


def agree(prepare: Callable[[], T]) -> T:
    """`prepare()` on every rank; where it failed on any, a UserError of the first on all.

    Collective over the default group.
    """
    import torch.distributed as dist

    message: str | None = None
    value: T | None = None
    try:
        value = prepare()
    except (UserError, OSError, MemoryError) as error:
        message = str(error) or type(error).__name__
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    for rank, text in enumerate(messages):
        if text is not None:
            first = messages[0] is not None or len(messages) == 1
            raise UserError(text if first else f"rank {rank}: {text}")
    return value  # type: ignore[return-value]


def refuse(program: str, error: UserError, code: int = 2) -> NoReturn:
    """Leave with the error in one line. All ranks usually have the same: rank 0 prints it, and
    another only where rank 0 has not ended the run within a few seconds."""
    rank, _ = rank_and_world()
    if rank:
        time.sleep(_LET_RANK_0_SPEAK_S)
    where = f"rank {rank}: " if rank else ""
    print(f"{program}: error: {where}{error}", file=sys.stderr, flush=True)
    os._exit(code)


def die(program: str, error: Exception, iteration: int, *, trace: bool) -> NoReturn:
    """Leave at once from within training, so that the other ranks see the closed connections.

    One line; after it, where `trace`, the traceback of the error's cause.
    """
    print(f"{program}: error: iteration {iteration}, {error}", file=sys.stderr, flush=True)
    if trace and error.__cause__ is not None:
        traceback.print_exception(error.__cause__)
    os._exit(1)


def leave() -> None:
    """The end of a run: wait for everybody, then close the groups."""
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()
