"""A run that loses a rank ends at once; torchrun's restart continues it to the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from tests.test_training import TINY

ROOT = Path(__file__).parent.parent


def _start(folder: Path, restarts: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--max-restarts", str(restarts), "--nproc-per-node", "2", "pretrain_gpt.py"]
    text = f"{TINY} --global-batch-size 4 --train-iters 40 --pipeline-model-parallel-size 2"
    text += f" --zero-bubble-v-schedule --save {folder} --load {folder} --save-interval 5"
    return subprocess.Popen(
        [*command, *text.split()],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _ranks(folder: Path) -> list[int]:
    """The training processes of that run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if str(folder).encode() in words and b"torch.distributed.run" not in words:
            found.append(int(path.parent.name))
    return sorted(found)


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    parts = [
        torch.load(folder / "iter_0000040" / f"rank_{rank}.pt", weights_only=True)
        for rank in range(2)
    ]
    return {name: tensor for part in parts for name, tensor in part["parameters"].items()}


def _kill_one_after_a_checkpoint(folder: Path) -> None:
    pointer = folder / "latest_checkpointed_iteration.txt"
    end = time.monotonic() + 60
    while not pointer.exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    os.kill(_ranks(folder)[-1], signal.SIGKILL)


def test_a_killed_rank_ends_the_run_and_the_checkpoint_stays_whole(tmp_path: Path) -> None:
    run = _start(tmp_path, restarts=0)
    _kill_one_after_a_checkpoint(tmp_path)
    since = time.monotonic()
    while _ranks(tmp_path):
        assert time.monotonic() - since < 5
        time.sleep(0.05)
    output, _ = run.communicate(timeout=30)
    assert run.returncode != 0
    assert f'File "{ROOT}/zerobubble' not in output  # a lost peer is one line, if any
    latest = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    part = torch.load(tmp_path / f"iter_{latest:07d}" / "rank_0.pt", weights_only=True)
    assert part["progress"]["iteration"] == latest


def test_a_restart_continues_to_the_same_bits(tmp_path: Path) -> None:
    plain = _start(tmp_path / "plain", restarts=0)
    output, _ = plain.communicate(timeout=120)
    assert plain.returncode == 0, output
    disturbed = _start(tmp_path / "disturbed", restarts=1)
    _kill_one_after_a_checkpoint(tmp_path / "disturbed")
    output, _ = disturbed.communicate(timeout=120)
    assert disturbed.returncode == 0, output
    assert "continuing from" in output
    expected, found = _weights(tmp_path / "plain"), _weights(tmp_path / "disturbed")
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
