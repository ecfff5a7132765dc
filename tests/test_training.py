"""Whole training runs over real processes, against the one-process reference."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.reference import Reference
from zerobubble.data.loader import Loader
from zerobubble.errors import UserError
from zerobubble.model.batch import Batch
from zerobubble.model.seeds import mix
from zerobubble.training.arguments import parse
from zerobubble.training.loop import Training, _datasets

TINY = (
    "--num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 64 "
    "--mock-data --micro-batch-size 1 --lr 1e-3 --untie-embeddings-and-output-weights "
    "--log-interval 1 --attention-dropout 0 --hidden-dropout 0 --distributed-backend gloo "
    "--eval-iters 0 "
)
EVERY_FAMILY = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")


def _train(rank: int, text: str) -> None:
    Training(parse(text.split()), rank).run()


def train(ranks: int, text: str, log: Path) -> list[dict[str, Any]]:
    """Run it; the lines of its JSON log."""
    log.unlink(missing_ok=True)
    run_ranks(_train, ranks, f"{text} --pipeline-model-parallel-size {ranks} --log-json {log}")
    return [json.loads(line) for line in log.read_text().splitlines()]


def _print(rank: int, text: str) -> str:
    with redirect_stdout(io.StringIO()) as printed:
        _train(rank, text)
    return printed.getvalue()


def _printed(ranks: int, text: str) -> str:
    """What rank 0 prints; the others print nothing."""
    first, *others = run_ranks(_print, ranks, f"{text} --pipeline-model-parallel-size {ranks}")
    assert not any(others)
    return str(first)


def losses(lines: list[dict[str, Any]], kind: str = "train") -> list[float]:
    return [line["lm_loss"] for line in lines if line["kind"] == kind]


class OneProcess:
    """What the reference makes of the same command line."""

    def __init__(self, text: str) -> None:
        self.arguments = parse(text.split())
        size, self.datasets = _datasets(self.arguments)
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[self.arguments.precision.dtype]
        self.reference = Reference(self.arguments.model_config(size), self.arguments.seed, dtype)
        self.samples = 0

    def train(self, iterations: int) -> list[float]:
        batch = self.arguments.batch
        loader = Loader(self.datasets.train, micro_batch_size=batch.micro)
        means = []
        for iteration in range(iterations):
            batches = [
                dataclasses.replace(b, dropout_seed=mix(self.arguments.seed, iteration, i))
                for i, b in enumerate(loader.next(batch.microbatches))
            ]
            rate = self.arguments.optimizer.learning_rate.at(self.samples)
            means.append(_mean(self.reference.step(batches, rate).losses))
            self.samples += batch.global_
        return means

    def evaluate(self, number: int) -> float:
        batch, iterations = self.arguments.batch, self.arguments.run.eval_iterations
        first = number * iterations * batch.global_
        assert self.datasets.valid is not None
        loader = Loader(
            self.datasets.valid, micro_batch_size=batch.eval_micro, consumed_samples=first
        )
        batches: list[Batch] = loader.next(iterations * batch.eval_microbatches)
        return _mean(self.reference.evaluate(batches))


def _mean(values: list[torch.Tensor]) -> float:
    return sum(value.item() for value in values) / len(values)


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_fewer_microbatches_than_ranks(microbatches: int, tmp_path: Path) -> None:
    text = f"{TINY} --global-batch-size {microbatches} --train-iters 2"
    expected = OneProcess(text).train(2)
    for name in EVERY_FAMILY:
        found = losses(train(4, f"{text} --schedule {name}", tmp_path / "log"))
        assert found == expected, name


@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_evaluation_leaves_no_trace_in_training(name: str, tmp_path: Path) -> None:
    # Microbatches of an evaluation: 1, fewer than the ranks; it sits before, between and after.
    base = f"{TINY} --global-batch-size 2 --train-iters 4 --schedule {name}"
    text = base.replace("--eval-iters 0", "--eval-iters 3")
    text += " --eval-interval 2 --eval-micro-batch-size 2 --eval-at-start"
    plain = train(4, base, tmp_path / "plain")
    lines = train(4, text, tmp_path / "log")
    assert losses(lines) == losses(plain)

    one = OneProcess(text)
    expected = [one.evaluate(0)]
    assert losses(lines) == one.train(4)
    assert losses(lines, "validation")[0] == expected[0]
    assert losses(lines, "validation")[-1] == one.evaluate(1)
    assert [line["iteration"] for line in lines if line["kind"] == "validation"] == [0, 2, 4]
    assert all(math.isfinite(x) for x in losses(lines, "validation") + losses(lines, "test"))


def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    text = f"{TINY} --global-batch-size 4 --train-iters 6 --lr-warmup-iters 2".replace(
        "--hidden-dropout 0", "--hidden-dropout 0.1"
    )
    straight = losses(train(2, f"{text} --schedule zb-v", tmp_path / "straight"))
    save = f"--save {tmp_path}/save --save-interval 3 --exit-interval 3"
    first = losses(train(2, f"{text} --schedule zb-v {save}", tmp_path / "first"))
    assert first == straight[:3]
    for ranks, name in ((2, "zb-v"), (4, "1f1b"), (1, "zb-h1")):
        load = f"--schedule {name} --load {tmp_path}/save"
        rest = losses(train(ranks, f"{text} {load}", tmp_path / "rest"))
        assert rest == straight[3:], (ranks, name)


def test_padded_llama_in_bf16_is_the_same_under_both_schedules(tmp_path: Path) -> None:
    text = (
        TINY.replace("--num-layers 8", "--num-layers 14")
        + "--global-batch-size 16 --train-iters 20 --bf16 --swiglu --normalization RMSNorm "
        "--use-rotary-position-embeddings --disable-bias-linear --group-query-attention "
        "--num-query-groups 2 --allow-padding-num-layers --lr 3e-3"
    )
    plain = losses(train(4, text, tmp_path / "1f1b"))
    folded = losses(train(4, f"{text} --zero-bubble-v-schedule", tmp_path / "zbv"))
    assert folded == plain
    assert plain[0] == pytest.approx(math.log(128), abs=0.3)
    assert plain[-1] < math.log(64)


def test_fp16_counts_its_skipped_iterations(tmp_path: Path) -> None:
    # At 2^32 gradients overflow; one overflow is tolerated, then each halves the scale.
    text = f"{TINY} --global-batch-size 2 --train-iters 8 --fp16 --schedule zb-v"
    lines = train(2, text, tmp_path / "log")
    assert all(math.isfinite(loss) for loss in losses(lines))
    assert [line["skipped_iterations"] for line in lines] == [1] * 8
    assert [line["loss_scale"] for line in lines] == [2.0 ** (32 - max(0, i)) for i in range(8)]
    assert {line["learning_rate"] for line in lines} == {1e-3}
    low = train(2, f"{text} --initial-loss-scale 1024", tmp_path / "log")
    assert [line["skipped_iterations"] for line in low] == [0] * 8
    assert losses(low)[-1] < losses(low)[0]


def test_what_is_printed(tmp_path: Path) -> None:
    text = f"{TINY} --global-batch-size 2 --train-iters 5 --exit-interval 3 --print-schedule"
    trace = tmp_path / "trace.json"
    text += f" --profile --profile-step-start 1 --profile-step-end 3 --trace-path {trace}"
    log = tmp_path / "log"
    text = text.replace("--log-interval 1", "--log-interval 2") + f" --log-json {log}"
    printed = _printed(2, text)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [2, 3]
    number = r"[0-9.]+(E[+-]\d+)?"
    assert re.search(
        rf"^ iteration        2/       5 \| consumed samples:            4 \|"
        rf" elapsed time per iteration \(ms\): {number} \| learning rate: 6\.000E-04 \|"
        rf" global batch size:     2 \| lm loss: {number} \| loss scale: 1\.0 \|"
        rf" grad norm: {number} \| number of skipped iterations:   0 \|"
        rf" number of nan iterations:   0 \|$",
        printed,
        re.MULTILINE,
    )
    nodes = printed[printed.index("##### rank 0 schedules:") :].splitlines()
    assert nodes[:5] == ["##### rank 0 schedules:", *("F-0-0-0", "F-1-0-0", "BW-0-0-0", "BW-1-0-0")]
    assert "exiting at iteration 3" in printed
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 2 * 2 * 2 * 2  # p x m x (F, BW) x steps


def test_a_folder_to_load_that_is_empty_is_said(tmp_path: Path) -> None:
    printed = _printed(1, f"{TINY} --train-iters 1 --load {tmp_path}/none")
    assert "holds no checkpoint yet; starting from the seed" in printed


def _refusal(rank: int, text: str) -> str:
    try:
        _train(rank, text)
    except UserError as error:
        return str(error)
    return ""


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    text = f"{TINY} --global-batch-size 4"
    train(1, f"{text} --train-iters 2 --save {tmp_path}/save", tmp_path / "log")
    base = f"{text} --train-iters 4 --load {tmp_path}/save"
    for flags, message in (
        ("--num-layers 6", "layers is 8 there and 6 here"),
        ("--num-layers 10", "layers is 8 there and 10 here"),
        ("--num-attention-heads 8", "heads is 4 there and 8 here"),
        ("--normalization RMSNorm", "normalization is LayerNorm there and RMSNorm here"),
        ("--position-embedding-type none", "position_embedding is learned_absolute there"),
        ("--vocab-size 300", "vocab is 128 there and 384 here"),
        ("--global-batch-size 2", "has consumed 8 samples in 2 iterations"),
    ):
        (found,) = run_ranks(_refusal, 1, f"{base} {flags}")
        assert message in found, flags
        assert "\n" not in found
    for garbage in (b"\xff\xfe", b"x"):
        (tmp_path / "save" / "latest_checkpointed_iteration.txt").write_bytes(garbage)
        (found,) = run_ranks(_refusal, 1, base)
        assert "latest_checkpointed_iteration.txt" in found
        assert "correct or remove it" in found
    (found,) = run_ranks(_refusal, 1, base.replace(f"{tmp_path}/save", str(tmp_path / "log")))
    assert "is a file; name the folder" in found


def test_a_finished_run_says_that_there_is_nothing_to_train(tmp_path: Path) -> None:
    text = f"{TINY} --train-iters 2 --save {tmp_path}/save --load {tmp_path}/save"
    train(1, text, tmp_path / "log")
    assert "note: nothing to train: 2 iterations are done, 2 were asked for" in _printed(1, text)


def test_a_trace_of_iterations_that_were_not_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    text = f"{TINY} --train-iters 4 --exit-interval 1 --profile --profile-step-start 2"
    text += f" --profile-step-end 3 --trace-path {trace}"
    assert "no trace was written" in _printed(1, text)
    assert not trace.exists()


def test_the_share_that_is_split_is_printed() -> None:
    printed = _printed(2, f"{TINY} --train-iters 1 --schedule zb-v")
    assert "split backward: parameters deferred to W, per stage: 9" in printed
    assert "split backward" not in _printed(2, f"{TINY} --train-iters 1 --schedule 1f1b")


def test_what_is_not_finite_is_null_in_json(tmp_path: Path) -> None:
    text = f"{TINY} --train-iters 1 --fp16"
    (line,) = train(1, text, tmp_path / "log")
    assert line["grad_norm"] is None
    assert line["skipped_iterations"] == 1
