"""How much of a plan a run keeps: measured makespan / simulated makespan, ours and torch's.

    python benchmarks/runtime_fidelity.py --json fidelity.json          # 64 KiB, 20 and 5 ms
    python benchmarks/runtime_fidelity.py --full --json fidelity.json   # the whole table

Stages are emulated: real autograd, real transfers, every op one `time.sleep(T)` (BW 2T, a chunk of
V also T), m = 2p. r = median measured makespan / makespan simulated with the nominal T and no link
cost; "op r" divides by the simulation with the measured op times instead. Each configuration runs
in fresh processes with one thread; the peer is torch.distributed.pipelining on the same orders.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zerobubble.schedule import families
from zerobubble.schedule.costs import Costs
from zerobubble.schedule.schedule import Schedule
from zerobubble.schedule.simulate import simulate
from zerobubble.schedule.torch_csv import to_csv

SYSTEMS = ("zerobubble", "torch")
STEPS = 6  # one more than measured: the first warms up


@dataclass(frozen=True)
class Case:
    """One configuration of the table."""

    schedule: str
    ranks: int
    op_ms: float
    kib: int

    def build(self) -> Schedule:
        """The order that both systems run."""
        return families.build(self.schedule, self.ranks, 2 * self.ranks)

    @property
    def shape(self) -> tuple[int, int]:
        """Of the fp32 tensor between stages."""
        return self.kib, 256


def _zerobubble(rank: int, case: Case) -> Any:
    import torch.distributed as dist

    from zerobubble.pipeline import Pipeline
    from zerobubble.runtime.emulate import EmulatedStage
    from zerobubble.runtime.measure import measured_costs

    schedule = case.build()
    last = schedule.placement.stages - 1
    modules = {
        s: EmulatedStage(case.shape, case.op_ms, case.op_ms, case.op_ms, last=s == last)
        for s in schedule.placement.stages_of(rank)
    }
    pipeline = Pipeline(modules, schedule)
    timelines = []
    for _ in range(STEPS):
        dist.barrier()
        pipeline.step([None] * schedule.microbatches, shape=case.shape)
        timelines.append(pipeline.timeline())
    measured = [t for t in timelines[1:] if t is not None]
    if not measured:
        return None
    own = simulate(schedule, measured_costs(measured)).makespan
    return [t.makespan for t in measured], own


def _torch(rank: int, case: Case) -> Any:
    import time

    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    from benchmarks.torch_emulation import SleepingStage

    schedule = case.build()
    placement = schedule.placement
    held = [
        PipelineStage(
            SleepingStage(case.op_ms, first=s == 0), s, placement.stages, torch.device("cpu")
        )
        for s in placement.stages_of(rank)
    ]
    runtime = _PipelineScheduleRuntime(
        held, schedule.microbatches, loss_fn=lambda y, _: y.mean(), scale_grads=False
    )
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        file.write(to_csv(schedule))
        file.flush()
        runtime._load_csv(file.name)
    rows = schedule.microbatches * case.shape[0]
    x = torch.zeros(rows, case.shape[1])
    is_first = placement.rank_of[0] == rank
    is_last = placement.rank_of[-1] == rank
    measured = []
    for step in range(STEPS):
        dist.barrier()
        start = time.perf_counter()
        arguments = (x,) if is_first else ()
        runtime.step(*arguments, **({"target": x} if is_last else {}), return_outputs=False)
        span = [None] * case.ranks if rank == 0 else None
        dist.gather_object((start, time.perf_counter()), span)
        if step and span:
            measured.append(1e3 * (max(e for _, e in span) - min(s for s, _ in span)))
    return (measured, None) if rank == 0 else None


def _work(rank: int, case: Case, system: str, store: str, results: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=case.ranks)
    found = (_zerobubble if system == "zerobubble" else _torch)(rank, case)
    if rank == 0:
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()


def run(case: Case, system: str, context: Any) -> tuple[list[float], float | None]:
    """Makespans (ms) in fresh processes, and the simulation with measured op times."""
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        workers = [
            context.Process(target=_work, args=(rank, case, system, store, results))
            for rank in range(case.ranks)
        ]
        for worker in workers:
            worker.start()
        try:
            found: tuple[list[float], float | None] = results.get(timeout=180)
        finally:
            for worker in workers:
                worker.join(10)
                worker.kill()
    return found


def main() -> None:
    """Run the table and print it row by row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="2 ms and 4 MiB too")
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zb-h1", "zb-v"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--op-ms", nargs="+", type=float, help="instead of the table's")
    parser.add_argument("--kib", nargs="+", type=int, help="instead of the table's")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    op_ms = arguments.op_ms or ([20, 5, 2] if arguments.full else [20, 5])
    kib = arguments.kib or ([64, 4096] if arguments.full else [64])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["zerobubble.pipeline", "torch.distributed.pipelining", "torch._dynamo"]
    )
    print(f"{'schedule':12} {'p':>2} {'T ms':>5} {'KiB':>5} {'system':>12} {'r':>7} {'op r':>7}")
    rows = []
    for case in (
        Case(name, ranks, op, size)
        for size in kib
        for op in op_ms
        for ranks in arguments.ranks
        for name in arguments.schedules
    ):
        schedule = case.build()
        times = [(case.op_ms,) * 3] * schedule.placement.stages
        simulated = simulate(schedule, Costs.per_stage(times)).makespan
        for system in arguments.systems:
            makespans, own = run(case, system, context)
            r = statistics.median(makespans) / simulated
            op_r = statistics.median(makespans) / own if own else None
            rows.append({**asdict(case), "system": system, "r": r, "op_r": op_r, "ms": makespans})
            print(
                f"{case.schedule:12} {case.ranks:2} {case.op_ms:5g} {case.kib:5} {system:>12} "
                f"{r:7.3f} {f'{op_r:7.3f}' if op_r else '':>7}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main()
