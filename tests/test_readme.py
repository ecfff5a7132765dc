"""What the README shows must work as shown."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from zerobubble.schedule import families
from zerobubble.schedule.costs import Costs
from zerobubble.schedule.simulate import simulate
from zerobubble.schedule.verify import verify
from zerobubble.training.arguments import parse

README = (Path(__file__).parent.parent / "README.md").read_text()


@pytest.fixture
def toy_family(tmp_path: Path) -> Iterator[str]:
    code = re.search(r"```python\n(\"\"\"Three waves.*?)```", README, re.DOTALL)
    assert code is not None
    (tmp_path / "three_waves.py").write_text(code[1])
    families.__path__.append(str(tmp_path))
    families._families.cache_clear()
    yield "three-waves"
    families.__path__.remove(str(tmp_path))
    families._families.cache_clear()


def test_the_toy_family_is_one_file_and_verifies(toy_family: str) -> None:
    for ranks in (1, 3, 4):
        for microbatches in (1, 2, 8):
            schedule = families.build(toy_family, ranks, microbatches)
            verify(schedule)
            timeline = simulate(schedule, Costs.uniform(ranks))
            assert timeline.makespan == 3 * microbatches + 2 * (ranks - 1)
    assert parse([*_script(), "--schedule", toy_family]).pipeline.schedule.name == toy_family


def test_the_script_parses() -> None:
    arguments = parse(_script())
    assert arguments.pipeline.ranks == 4
    assert arguments.batch.microbatches == 8


def _script() -> list[str]:
    block = re.search(r"    pretrain_gpt.py \\\n(.*?)```", README, re.DOTALL)
    assert block is not None
    return shlex.split(block[1].replace("\\\n", " "))


def test_the_table_of_schedules_is_right() -> None:
    ranks, microbatches = 4, 16
    right = {  # activations held, bubble
        "gpipe": (16, 9),
        "1f1b": (4, 9),
        "1f1b-v": (4, 6),
        "seq1f1b": (7 / 4, 9 / 4),
        "looped-bfs": (16, 4.5),
        "interleaved": (5.5, 4.5),
        "interleaved-zb": (4, 1.5),
        "zb-h1": (4, 3),
        "zb-1p": (4, 3),
        "zb-h2": (7, 3),
        "zb-2p": (8, 3),
        "zb-v": (4, 1.5),
        "dualpipev": (4.5, 1.5),
        "v-half": (3, 4.5),
        "v-min": (3, 6.5),
    }
    assert set(right) == set(families.names())
    for name, (held, bubble) in right.items():
        assert f"`{name}`" in README
        schedule = families.build(name, ranks, microbatches)
        part = 1 / schedule.placement.chunks / schedule.slices
        costs = Costs.uniform(schedule.placement.stages, part, part, part, activation=part)
        timeline = simulate(schedule, costs)
        longest = timeline.makespan - 3 * microbatches
        if name in ("v-half", "v-min"):
            assert longest <= bubble, name
        else:
            assert longest == pytest.approx(bubble), name
        assert timeline.peak_memory is not None
        assert max(timeline.peak_memory) == pytest.approx(held), name
        if name in ("zb-h2", "zb-2p", "zb-v"):
            assert timeline.longest_span == pytest.approx(3 * microbatches), name


def test_the_python_of_the_planning_guide_runs() -> None:
    guide = (Path(__file__).parent.parent / "docs" / "planning.md").read_text()
    code = re.search(r"```python\n(.*?)```", guide, re.DOTALL)
    assert code is not None
    exec(compile(code[1], "docs/planning.md", "exec"), {})
