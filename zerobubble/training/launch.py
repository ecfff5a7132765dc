"""Processes: joining them, agreeing on errors, and leaving with one line from one rank."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn, TypeVar

from zerobubble.errors import UserError

T = TypeVar("T")

# torchrun ends the others as soon as one rank leaves: those with nothing to say leave last.
_LET_RANK_0_SPEAK_S = 20.0


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
    """`prepare()` on every rank; where it failed on any, the first rank's UserError on all.

    Collective over the default group.
    """
    import torch.distributed as dist

    message: str | None = None
    value: T | None = None
    try:
        value = prepare()
    except UserError as error:
        message = str(error)
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    for rank, text in enumerate(messages):
        if text is not None:
            first = messages[0] is not None or len(messages) == 1
            raise UserError(text if first else f"rank {rank}: {text}")
    return value  # type: ignore[return-value]


def refuse(program: str, error: UserError, code: int = 2) -> NoReturn:
    """Leave before training: rank 0 prints the error in one line, the others say nothing."""
    rank, world = rank_and_world()
    if rank == 0 or world == 1:
        print(f"{program}: error: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(_LET_RANK_0_SPEAK_S)
    os._exit(code)


def die(program: str, error: BaseException, iteration: int) -> NoReturn:
    """Leave at once from within training, so that the other ranks see the closed connections."""
    print(f"{program}: error: iteration {iteration}, {error}", file=sys.stderr, flush=True)
    os._exit(1)


def leave() -> None:
    """The end of a run: wait for everybody, then close the groups."""
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()
