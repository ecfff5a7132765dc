"""Trains a small GPT on the Python standard library's source, once under 1F1B and once under
ZB-V, and compares what the simulator says of each with what was measured.

    python examples/train_and_compare.py --out runs/train

Everything that it prints comes from the two runs: the losses, which must be the same to the
last bit, and the op times in their traces.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from zerobubble.report.chrome_trace import read_chrome_trace
from zerobubble.report.compare import compare
from zerobubble.report.picture import draw
from zerobubble.runtime.measure import measured_costs
from zerobubble.schedule import families
from zerobubble.schedule.simulate import simulate
from zerobubble.schedule.timeline import Timeline

ROOT = Path(__file__).resolve().parent.parent
RANKS, MICROBATCHES, ITERATIONS, TRACED = 2, 8, 60, 12
SCHEDULES = ("1f1b", "zb-v")
MODEL = (
    "--num-layers 8 --hidden-size 128 --num-attention-heads 4 --seq-length 256 "
    "--max-position-embeddings 256 --attention-dropout 0 --hidden-dropout 0 "
    "--untie-embeddings-and-output-weights --micro-batch-size 2 "
    f"--global-batch-size {2 * MICROBATCHES} --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine "
    f"--lr-warmup-iters 5 --train-iters {ITERATIONS} --log-interval 10 --eval-interval 1000 "
    "--eval-iters 2 --distributed-backend gloo"
).split()


def train(schedule: str, out: Path) -> tuple[list[float], list[Timeline]]:
    """One run over RANKS processes; its losses and the timelines of its last iterations."""
    log, trace = out / f"{schedule}.jsonl", out / f"{schedule}.trace.json"
    log.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(RANKS), str(ROOT / "pretrain_gpt.py"), *MODEL),
        *("--pipeline-model-parallel-size", str(RANKS), "--schedule", schedule),
        *("--log-json", str(log), "--profile", "--trace-path", str(trace)),
        *("--profile-step-start", str(ITERATIONS - TRACED)),
        *("--profile-step-end", str(ITERATIONS)),
    ]
    print(f"\n== {schedule}: {RANKS} processes, {ITERATIONS} iterations ==", flush=True)
    subprocess.run(command, check=True)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    losses = [line["lm_loss"] for line in lines if line["kind"] == "train"]
    return losses, read_chrome_trace(trace)


def main() -> None:
    """Run both, then print the comparison and draw it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/train"), help="where files go")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)

    losses, pairs = {}, []
    for name in SCHEDULES:
        losses[name], timelines = train(name, out)
        typical = sorted(timelines, key=lambda t: t.makespan)[len(timelines) // 2]
        schedule = families.build(name, RANKS, MICROBATCHES)
        pairs.append((simulate(schedule, measured_costs(timelines)), typical))
        spread = statistics.pstdev([t.makespan for t in timelines])
        print(f"{name}: {len(timelines)} iterations traced, standard deviation {spread:.1f} ms")

    first, second = (losses[name] for name in SCHEDULES)
    print(f"\nloss {first[0]:.4f} -> {first[-1]:.4f} under {SCHEDULES[0]}; ", end="")
    print("bitwise the same under both" if first == second else "DIFFERENT under the two")
    print("\nSimulated from the median op times of each run, and measured (its median iteration):")
    print(compare(pairs))
    picture = out / "timelines.png"
    draw([measured for _, measured in pairs], picture)
    print(f"\npicture: {picture}")
    for name in SCHEDULES:
        print(f"trace:   {out / f'{name}.trace.json'} (open it in Perfetto)")
    if first != second:
        sys.exit("the losses differ between schedules: that is a defect")


if __name__ == "__main__":
    main()
