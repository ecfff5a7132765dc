"""One clock for all ranks: how far every process's perf_counter is from rank 0's."""

from __future__ import annotations

from time import perf_counter

import torch
import torch.distributed as dist


def clock_offset(rounds: int = 16) -> float:
    """Seconds to add to this process's perf_counter to get rank 0's.

    Collective over the default group. Each rank exchanges `rounds` messages with rank 0 and
    keeps the fastest (Cristian 1989), so the error is at most half of its round trip. An
    offset within that error is taken as none: processes of one host share a clock.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return 0.0
    me = dist.get_rank()
    offset = 0.0
    for rank in range(1, dist.get_world_size()):
        if me == 0:
            _answer(rank, rounds)
        elif me == rank:
            offset = _ask(rounds)
        dist.barrier()
    return offset


def _answer(rank: int, rounds: int) -> None:
    message = torch.zeros(1, dtype=torch.float64)
    for _ in range(rounds):
        dist.recv(message, rank)
        message[0] = perf_counter()
        dist.send(message, rank)


def _ask(rounds: int) -> float:
    message = torch.zeros(1, dtype=torch.float64)
    best, offset = float("inf"), 0.0
    for _ in range(rounds):
        sent = perf_counter()
        dist.send(message, 0)
        dist.recv(message, 0)
        back = perf_counter()
        if back - sent < best:
            best, offset = back - sent, message.item() - (sent + back) / 2
    return 0.0 if abs(offset) <= best / 2 else offset
