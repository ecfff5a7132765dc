"""Runs a function in several processes joined by Gloo, one thread each, and collects results."""

from __future__ import annotations

import multiprocessing
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

# A fork of a process that has everything imported starts in milliseconds instead of seconds.
# The last is what torch imports in a first optimizer step.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["zerobubble.training.loop", "tests.reference", "torch._dynamo"])


def run_ranks(
    function: Callable[..., Any], ranks: int, *arguments: Any, timeout: float = 120
) -> list[Any]:
    """`function(rank, *arguments)` on every rank; the results in rank order.

    Raises AssertionError with the traceback of the first rank that failed, or on a time-out;
    no process is left behind.
    """
    results: Any = _context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        workers = [
            _context.Process(
                target=_work, args=(rank, ranks, store, results, function, arguments), daemon=True
            )
            for rank in range(ranks)
        ]
        for worker in workers:
            worker.start()
        found: dict[int, Any] = {}
        end = time.monotonic() + timeout
        try:
            while len(found) < ranks:
                rank, error, value = results.get(timeout=max(0.1, end - time.monotonic()))
                assert error is None, f"rank {rank} failed:\n{error}"
                found[rank] = value
        except queue.Empty:
            missing = sorted(set(range(ranks)) - set(found))
            raise AssertionError(f"no answer from ranks {missing} in {timeout} s") from None
        finally:
            for worker in workers:
                worker.join(5 if len(found) == ranks else 0.1)
                worker.kill()
                worker.join()
    return [found[rank] for rank in range(ranks)]


def _work(
    rank: int,
    ranks: int,
    store: str,
    results: Any,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        value = function(rank, *arguments)
        results.put((rank, None, value))
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        results.put((rank, traceback.format_exc(), None))
