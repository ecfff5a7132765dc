"""Runs schedules with ops that sleep, so that more ranks than cores can show their order.

    torchrun --nproc-per-node 4 benchmarks/emulated_run.py --png timeline.png --json run.json

Real processes, transfers and autograd; only the computation is a sleep of --op-ms for each of
F, B and W of a whole stage (a chunk of V sleeps half of that). Prints, per schedule, the makespan
that the simulator gives for those times and the median of the measured ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
import torch.distributed as dist

from zerobubble.pipeline import Pipeline
from zerobubble.report.compare import compare
from zerobubble.report.picture import draw
from zerobubble.runtime.emulate import EmulatedStage
from zerobubble.schedule import families
from zerobubble.schedule.costs import Costs
from zerobubble.schedule.simulate import simulate
from zerobubble.schedule.timeline import Timeline


def run(name: str, microbatches: int, op_ms: float, steps: int) -> tuple[Timeline, list[Timeline]]:
    """The simulated timeline, and on rank 0 the measured ones without the first step."""
    schedule = families.build(name, dist.get_world_size(), microbatches)
    placement = schedule.placement
    sleep = op_ms / placement.chunks
    shape = (128, 128)  # 64 KiB in fp32
    modules = {
        s: EmulatedStage(shape, sleep, sleep, sleep, last=s == placement.stages - 1)
        for s in placement.stages_of(dist.get_rank())
    }
    pipeline = Pipeline(modules, schedule)
    measured = []
    for step in range(steps + 1):
        dist.barrier()
        pipeline.step([None] * microbatches, shape=shape)
        timeline = pipeline.timeline()
        if step and timeline is not None:
            measured.append(timeline)
    return simulate(schedule, Costs.uniform(placement.stages, sleep, sleep, sleep)), measured


def main() -> None:
    """Run every schedule, print the table on rank 0, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zb-v"], help="family names")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--op-ms", type=float, default=20.0, help="F, B and W of a whole stage")
    parser.add_argument("--steps", type=int, default=5, help="measured steps, after one more")
    parser.add_argument("--png", type=Path, help="draw the median step of every schedule")
    parser.add_argument("--json", type=Path, help="write the figures")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    pairs, figures = [], []
    for name in arguments.schedules:
        simulated, measured = run(name, arguments.microbatches, arguments.op_ms, arguments.steps)
        if not measured:
            continue
        middle = sorted(measured, key=lambda t: t.makespan)[len(measured) // 2]
        pairs.append((simulated, middle))
        makespans = [t.makespan for t in measured]
        figures.append(
            {
                "schedule": name,
                "ranks": dist.get_world_size(),
                "microbatches": arguments.microbatches,
                "op_ms": arguments.op_ms,
                "simulated_ms": simulated.makespan,
                "measured_ms": makespans,
                "ratio": statistics.median(makespans) / simulated.makespan,
            }
        )
    if dist.get_rank() == 0:
        print(compare(pairs))
        if arguments.png:
            draw([measured for _, measured in pairs], arguments.png)
        if arguments.json:
            arguments.json.write_text(json.dumps(figures, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
