"""`zerobubble plan` as its user sees it: a table, a file to train with, errors of one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from zerobubble.errors import UserError
from zerobubble.planner.plan import plan
from zerobubble.planner.problem import Problem
from zerobubble.schedule.costs import Costs
from zerobubble.schedule.files import load_schedule
from zerobubble.schedule.placement import linear

SMALL = ("--ranks", "4", "--microbatches", "8")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from zerobubble.cli import main; main()", "plan", *arguments],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


@pytest.mark.parametrize("ending", [".json", ".csv"])
def test_a_table_and_a_schedule_to_train_with(tmp_path: Path, ending: str) -> None:
    saved = tmp_path / f"best{ending}"
    shown = run(*SMALL, "--memory", "1", "--save", str(saved))
    assert shown.returncode == 0, shown.stderr
    assert "makespan 25.5, longest span 24" in shown.stdout
    assert "proven optimal" in shown.stdout
    for name in ("1f1b", "gpipe", "zb-h1", "interleaved"):
        assert f"\n {name} " in shown.stdout
    schedule = load_schedule(str(saved))
    assert schedule.microbatches == 8
    assert schedule.placement.name == "v"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--ranks", "4"), "--microbatches is missing"),
        ((*SMALL, "--times", "1,2"), "--times 1,2 is not F,B,W"),
        ((*SMALL, "--memory", "0.1"), "memory_limit of rank 0 is 0.4"),
        ((*SMALL, "--memory", "nan"), "memory_limit is nan"),
        ((*SMALL, "--time-limit", "0"), "time limit is 0; give seconds above 0"),
        ((*SMALL, "--objective", "time"), "objective is 'time'; use makespan or span"),
        ((*SMALL, "--schedule", "zb-x"), "unknown schedule 'zb-x'"),
        ((*SMALL, "--schedule", "seq1f1b"), "'seq1f1b' cuts microbatches into slices"),
        ((*SMALL, "--schedule", "gpipe", "--memory", "1"), "'gpipe' needs 8 on rank"),
        (("none.json",), "cannot read none.json"),
        (("none.json", *SMALL), "--ranks is for a problem without a file"),
    ],
)
def test_what_is_wrong_is_one_line(arguments: tuple[str, ...], said: str) -> None:
    wrong = run(*arguments)
    assert wrong.returncode == 2
    assert said in wrong.stderr
    assert len(wrong.stderr.strip().splitlines()) == 1
    assert not wrong.stdout


@pytest.mark.parametrize(
    ("path", "said"), [("none/x.json", "cannot be written"), ("x.txt", "neither .json nor .csv")]
)
def test_where_it_cannot_save(tmp_path: Path, path: str, said: str) -> None:
    wrong = run(*SMALL, "--save", str(tmp_path / path))
    assert wrong.returncode == 2
    assert said in wrong.stderr.strip().splitlines()[-1]
    assert "Traceback" not in wrong.stderr


def test_the_function_refuses_the_same() -> None:
    problem = Problem.of_costs(linear(2), 2, Costs.uniform(2))
    with pytest.raises(UserError, match="objective is 'time'"):
        plan(problem, objective="time")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="time limit is nan"):
        plan(problem, time_limit=float("nan"))
