"""`zerobubble show`: a schedule in every form, without torch, and one line for what is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from zerobubble.schedule import families
from zerobubble.schedule.files import load_schedule


def show(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it where torch cannot be imported."""
    code = "import sys; sys.modules['torch'] = None; from zerobubble.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, "show", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_every_family_is_described() -> None:
    printed = show().stdout
    for name in families.names():
        assert f"\n{name}\n" in f"\n{printed}"


def test_text_and_other_costs() -> None:
    printed = show("zb-v", "--ranks", "4", "--microbatches", "8").stdout
    assert "makespan 25.5, bubble rate 0.0588; longest span 24, bubble rate 0.0000" in printed
    assert "most activations held, in microbatches of a rank: 4, 4, 4, 4" in printed
    printed = show("1f1b", "--times", "1,1.2,.8", "--link", "0.05").stdout
    assert "makespan 33.8," in printed


@pytest.mark.parametrize("form", ["csv", "json"])
def test_what_it_writes_loads_back(form: str, tmp_path: Path) -> None:
    path = tmp_path / f"x.{form}"
    path.write_text(show("zb-v", "--ranks", "2", "--microbatches", "3", "--format", form).stdout)
    assert load_schedule(str(path)).orders == families.build("zb-v", 2, 3).orders
    assert show(str(path), "--format", form).stdout == path.read_text()
    assert "makespan" in show(str(path)).stdout


def test_nodes_and_picture(tmp_path: Path) -> None:
    done = show("1f1b", "--ranks", "2", "--format", "nodes", "--picture", f"{tmp_path}/x.svg")
    assert done.stdout.startswith("##### rank 0 schedules:\nF-0-0-0\n")
    assert "<svg" in (tmp_path / "x.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("zvb",), "unknown schedule 'zvb'; did you mean"),
        (("1f1b", "--times", "1,2"), "--times 1,2 is not F,B,W"),
        (("1f1b", "--times", "1,2,-1"), "nothing here can be negative"),
        (("1f1b", "--format", "xml"), "--format xml is unknown"),
        (("1f1b", "--chunks", "2"), "has 1 stage(s) per rank, 2 were asked for"),
        (("none.csv",), "cannot be read"),
    ],
)
def test_what_is_wrong_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    done = show(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
