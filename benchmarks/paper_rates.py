"""Simulated bubble rates of our families next to the published ones, on the published profiles.

    python benchmarks/paper_rates.py [--json rates.json]

Profiles and rates are those of arXiv 2401.10241 (`benchmarks/reference/zero_bubble_paper.json`).
Rate = (longest span - m (F + B + W)) / longest span; every hop between ranks takes T_comm, a stage
cut in v chunks takes 1/v of the time in each. F adds M_B of memory, B releases what is not W's
share. Handcrafted schedules must have the published rate to 4 decimals, planned ones must not be
above it, within the published memory. The paper's 1F1B-I cells are a formula with 2pv - p - 2 hops
of T_comm; the first microbatch alone has 2pv - 2 to go, and that is what Megatron's order in
groups of p takes, p more ("p hops more"). In groups of 2p the later microbatches hide hops, at the
price of memory, and the rate must not be above the published one. Exit code 1 if a cell fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REFERENCE = Path(__file__).resolve().parent / "reference" / "zero_bubble_paper.json"


@dataclass(frozen=True)
class Column:
    """What is compared in every profile."""

    published: str
    family: str | None
    """None: the paper's formula."""
    equal: bool
    """Whether the rate must be equal, or may be below."""
    memory: int | None = None
    """The limit, in p microbatches."""
    group: int = 1
    """Of interleaved, in p microbatches."""


COLUMNS = (
    Column("1F1B", "1f1b", True),
    Column("1F1B-I", None, True),
    Column("1F1B-I", "interleaved", True),
    Column("1F1B-I", "interleaved", False, group=2),
    Column("ZB-H1", "zb-h1", True, 1),
    Column("ZB-H2", "zb-h2", True, 2),
    Column("ZB-1p", "zb-1p", False, 1),
    Column("ZB-2p", "zb-2p", False, 2),
    Column("ZB-V", "zb-v", False, 1),
)


@dataclass(frozen=True)
class Cell:
    """One profile and one schedule."""

    profile: str
    published: str
    ours: str
    rate: float | None
    simulated: float
    memory: float | None
    verdict: str


@dataclass(frozen=True)
class Profile:
    """One line of the paper's tables."""

    name: str
    ranks: int
    microbatches: int
    times: tuple[float, float, float]
    hop: float
    released: float
    chunks: int
    """Of 1F1B-I."""
    rates: dict[str, float | None]

    @staticmethod
    def read(case: dict[str, Any]) -> Profile:
        """From the reference file; the ZB-V profiles give times per half of a stage."""
        half = case.get("times_from_authors_code_per_chunk")
        if half:
            times, hop = (2 * half["F"], 2 * half["B"], 2 * half["W"]), half["T_comm"]
        else:
            times, hop = (case["T_F"], case["T_B"], case["T_W"]), case["T_comm"]
        return Profile(
            name=case["name"],
            ranks=case["p"],
            microbatches=case["m"],
            times=times,
            hop=hop,
            released=1 - case["M_W_over_M_B"],
            chunks=case["chunks_per_stage_1F1B_I"],
            rates=case["published_bubble_rate"],
        )

    def formula(self, more_hops: int = 0) -> float:
        """The rate of 1F1B-I as the paper's cells have it."""
        p, v = self.ranks, self.chunks
        bubble = (p - 1) * sum(self.times) / v + (2 * p * v - p - 2 + more_hops) * self.hop
        return bubble / (bubble + self.microbatches * sum(self.times))

    def simulate(self, family: str, group: int) -> tuple[float, float]:
        """The rate of our verified schedule, and its peak memory in p microbatches."""
        from zerobubble.schedule import families
        from zerobubble.schedule.costs import Costs
        from zerobubble.schedule.verify import verify

        looped = family == "interleaved"
        wanted = self.chunks if looped else None
        chunks = families.get(family).placement(self.ranks, wanted).chunks
        forward, backward_input, backward_weight = (time / chunks for time in self.times)
        costs = Costs.uniform(
            self.ranks * chunks,
            forward,
            backward_input,
            backward_weight,
            link_latency=self.hop,
            activation=1 / chunks,
            released_by_backward_input=self.released,
        )
        schedule = families.build(
            family,
            self.ranks,
            self.microbatches,
            chunks=wanted,
            costs=costs,
            group=group * self.ranks if looped else None,
        )
        timeline = verify(schedule, costs).timeline
        assert timeline.peak_memory is not None
        return timeline.longest_span_bubble_rate, max(timeline.peak_memory) / self.ranks


def cell(profile: Profile, column: Column) -> Cell:
    """Ours next to the published one."""
    memory = None
    ours = column.family or "formula"
    if column.family is None:
        simulated = profile.formula()
    else:
        simulated, memory = profile.simulate(column.family, column.group)
        if column.family == "interleaved":
            ours += f", {column.group}p"
    rate = profile.rates[column.published]
    rounded = round(simulated, 4)
    if memory is not None and column.memory is not None and memory > column.memory + 1e-9:
        verdict = f"memory {memory:.3f} > {column.memory}"
    elif rate is None:
        verdict = "not published"
    elif rounded == rate:
        verdict = "equal"
    elif column.family == "interleaved" and column.equal:
        known = abs(simulated - profile.formula(profile.ranks)) < 1e-9
        verdict = "p hops more" if known else "DIFFERS"
    elif column.equal:
        verdict = "DIFFERS"
    else:
        verdict = "below" if rounded < rate else "ABOVE"
    return Cell(profile.name, column.published, ours, rate, rounded, memory, verdict)


def main() -> int:
    """Print the table row by row; 1 if a cell fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    profiles = [Profile.read(case) for case in json.loads(REFERENCE.read_text())["cases"]]
    print(f"{'profile':20} {'published':9} {'rate':>6}   {'ours':15} {'rate':>6}  {'memory':>6}")
    cells = []
    for profile in profiles:
        for column in COLUMNS:
            found = cell(profile, column)
            cells.append(found)
            rate = "" if found.rate is None else f"{found.rate:.4f}"
            memory = "" if found.memory is None else f"{found.memory:.3f}"
            print(
                f"{found.profile:20} {found.published:9} {rate:>6}   {found.ours:15} "
                f"{found.simulated:.4f}  {memory:>6}  {found.verdict}",
                flush=True,
            )
    good = ("equal", "below", "p hops more", "not published")
    counts = [f"{sum(c.verdict == verdict for c in cells)} {verdict}" for verdict in good]
    failed = sum(c.verdict not in good for c in cells)
    print(f"{len(cells)} cells: {', '.join(counts)}, {failed} failed")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(c) for c in cells], indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    sys.exit(main())
