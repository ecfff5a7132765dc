"""The command line: what it means, and one clear line for everything that cannot be done."""

from __future__ import annotations

import subprocess
import sys

import pytest

from zerobubble.errors import UserError
from zerobubble.training.arguments import Arguments, parse
from zerobubble.training.flags import build_parser, known_flags

SCRIPT = (
    "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --sequence-parallel "
    "--num-layers 24 --hidden-size 64 --num-attention-heads 4 --seq-length 128 "
    "--max-position-embeddings 8192 --micro-batch-size 2 --global-batch-size 16 --lr 0.00015 "
    "--train-iters 20 --lr-decay-iters 320 --lr-decay-style cosine --min-lr 1.0e-5 "
    "--weight-decay 1e-2 --lr-warmup-fraction .01 --clip-grad 1.0 --fp16 "
    "--initial-loss-scale 16384 --attention-softmax-in-fp32 --data-path PREFIX "
    "--vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --split 949,50,1 "
    "--log-interval 1 --save-interval 10000 --eval-interval 1000 --eval-iters 1 "
    "--untie-embeddings-and-output-weights --enable-zb-runtime "
    "--no-pre-communication-optimization --transformer-impl local "
    "--no-create-attention-mask-in-dataloader --use-legacy-models --distributed-backend gloo"
)
BASE = (
    "--num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --train-iters 10 "
    "--untie-embeddings-and-output-weights"
)


def read(text: str) -> Arguments:
    return parse(text.split())


def test_an_ordinary_script_is_read_as_it_is() -> None:
    arguments = read(SCRIPT)
    assert arguments.pipeline.ranks == 4
    assert arguments.pipeline.schedule.name == "1f1b"
    assert arguments.batch.microbatches == 8
    assert arguments.precision.dtype == "fp16"
    assert arguments.precision.initial_loss_scale == 16384
    assert arguments.data.path == ("PREFIX",)
    config = arguments.model_config(50257)
    assert (config.vocab, config.ffn_hidden, config.head_size) == (50304, 256, 16)
    assert (config.hidden_dropout, config.attention_dropout, config.norm_epsilon) == (
        0.1,
        0.1,
        1e-5,
    )
    rate = arguments.optimizer.learning_rate
    assert (rate.warmup_samples, rate.decay_samples) == (pytest.approx(51.2), 5120)
    first = arguments.notes[0]
    for flag in ("--use-legacy-models", "--transformer-impl", "--attention-softmax-in-fp32"):
        assert flag in first
    assert arguments.notes[1:] == (
        "no effect without --save: --save-interval",
        "--sequence-parallel is off: --tensor-model-parallel-size is 1",
    )


@pytest.mark.parametrize(
    ("flags", "name", "placement"),
    [
        ("", "1f1b", (0, 1, 2, 3)),
        ("--pipeline-model-parallel-size 2", "1f1b", (0, 1)),
        ("--zero-bubble-v-schedule", "zb-v", (0, 1, 2, 3, 3, 2, 1, 0)),
        ("--num-layers-per-virtual-pipeline-stage 3", "interleaved", (0, 1, 2, 3) * 2),
    ],
)
def test_the_same_script_on_other_pipelines(
    flags: str, name: str, placement: tuple[int, ...]
) -> None:
    pipeline = read(f"{SCRIPT} {flags}").pipeline
    assert pipeline.schedule.name == name
    assert pipeline.schedule.placement.rank_of == placement


@pytest.mark.parametrize(
    ("flags", "name", "stages"),
    [
        ("", "1f1b", 1),
        ("--enable-zb-runtime", "1f1b", 1),
        ("--enable-zb-runtime --enable-zero-bubble", "zb-h1", 1),
        ("--enable-zb-runtime --enable-zero-bubble --zero-bubble-v-schedule", "zb-v", 2),
        ("--num-layers-per-virtual-pipeline-stage 1", "interleaved", 4),
        ("--schedule gpipe", "gpipe", 1),
        ("--schedule ZB_V --zero-bubble-v-schedule", "zb-v", 2),
    ],
)
def test_flags_choose_the_schedule(flags: str, name: str, stages: int) -> None:
    pipeline = read(f"{BASE} --pipeline-model-parallel-size 2 {flags}").pipeline
    assert pipeline.schedule.name == name
    assert pipeline.schedule.placement.chunks == stages


def test_defaults_are_megatrons() -> None:
    arguments = read(f"{BASE} --fp16")
    precision = arguments.precision
    assert precision.initial_loss_scale == 2**32
    assert precision.loss_scale is None
    assert (precision.min_loss_scale, precision.loss_scale_window, precision.hysteresis) == (
        1.0,
        1000,
        2,
    )
    assert arguments.seed == 1234
    assert arguments.optimizer.betas == (0.9, 0.999)
    assert (arguments.optimizer.clip_grad, arguments.optimizer.weight_decay) == (1.0, 0.01)
    assert arguments.run.eval_interval == 1000
    assert read(f"{BASE} --swiglu --hidden-size 4096").model.ffn_hidden == 10880
    assert read(f"{BASE} --ffn-hidden-size 11 --swiglu").model.ffn_hidden == 11
    grouped = read(f"{BASE} --group-query-attention --num-query-groups 2").model
    assert grouped.query_groups == 2


def test_samples_instead_of_iterations() -> None:
    text = BASE.replace("--train-iters 10", "--train-samples 83")
    arguments = read(f"{text} --lr-decay-samples 64 --lr-warmup-samples 8")
    assert arguments.run.iterations == 10
    assert arguments.optimizer.learning_rate.warmup_samples == 8
    assert arguments.optimizer.learning_rate.decay_samples == 64
    # Without --lr-decay-samples it is what --train-samples says, not whole iterations of it.
    rate = read(f"{text} --lr-warmup-fraction .1").optimizer.learning_rate
    assert (rate.decay_samples, rate.warmup_samples) == (83, pytest.approx(8.3))


def test_padding_counts_places_for_stages() -> None:
    text = f"{BASE} --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2"
    pipeline = read(f"{text} --num-layers 14 --allow-padding-num-layers").pipeline
    assert pipeline.schedule.placement.chunks == 2
    with pytest.raises(UserError, match=r"14 layers do not divide .* of 2 .*; use 16 layers"):
        read(f"{text} --num-layers 14")
    with pytest.raises(UserError, match=r"9 layers \(12 places with padding\) .*; use 16 layers"):
        read(f"{text} --num-layers 9 --allow-padding-num-layers")


def test_loss_scale_zero_is_dynamic() -> None:
    assert read(f"{BASE} --fp16 --loss-scale 0").precision.loss_scale is None
    assert read(f"{BASE} --fp16 --loss-scale 128").precision.loss_scale == 128


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("--save-interval 5", "no effect without --save: --save-interval"),
        (
            "--profile-step-start 3 --trace-path x",
            "no effect without --profile: --profile-step-start --trace-path",
        ),
        (
            "--bf16 --initial-loss-scale 65536",
            "no effect without --fp16 and a loss scale that is not constant: --initial-loss-scale",
        ),
        (
            "--fp16 --loss-scale 8 --hysteresis 3",
            "no effect without --fp16 and a loss scale that is not constant: --hysteresis",
        ),
    ],
)
def test_flags_that_change_nothing_are_said(flags: str, note: str) -> None:
    arguments = read(f"{BASE} {flags}")
    assert arguments.notes == (note,)
    assert arguments.run.save_interval is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2 is not there yet"),
        ("--recompute-activations", "--recompute-activations: recomputation is not there yet"),
        ("--recompute-granularity full", "--recompute-granularity: recomputation is not"),
        ("--enable-optimizer-post-validation", "post-validation is not there yet; remove it"),
        ("--zero-buble-v-schedule", "nearest known one is --zero-bubble-v-schedule"),
        ("--num-layer 3", "unknown flag --num-layer; the nearest known one is --num-layers"),
        ("--transformer-impl local stray", "'stray' belongs to no flag"),
        ("--fp16 --loss-scale-window inf", "--loss-scale-window: inf must be a whole number"),
        ("--adam-eps 0", "--adam-eps: 0 must be above 0"),
        (
            "--global-batch-size 4 --micro-batch-size 2 --eval-micro-batch-size 3",
            "4 is not a multiple of --eval-micro-batch-size 3; use 6",
        ),
        ("stray", "'stray' belongs to no flag"),
        ("--num-layers x", "--num-layers: invalid int value: 'x'"),
        ("--num-layers 0", "--num-layers: 0 must be at least 1"),
        ("--hidden-size 30", "--hidden-size 30 does not divide over --num-attention-heads 4"),
        (
            "--global-batch-size 7 --micro-batch-size 2",
            "7 is not a multiple of --micro",
        ),
        ("--global-batch-size 0", "--global-batch-size: 0 must be at least 1"),
        ("--eval-micro-batch-size 3", "8 is not a multiple of --eval-micro-batch-size 3"),
        ("--max-position-embeddings 8", "8 is less than --seq-length 16; raise"),
        (
            "--group-query-attention --num-query-groups 3",
            "--num-attention-heads 4 is not divisible by --num-query-groups 3",
        ),
        ("--num-query-groups 8 --group-query-attention", "4 is not divisible by --num-query"),
        ("--num-query-groups 2", "--num-query-groups 2 needs --group-query-attention"),
        ("--min-lr 1", "--min-lr 1.0 is above --lr 0.001"),
        ("--lr nan", "--lr: nan must be a finite number"),
        ("--lr-warmup-iters 2 --lr-warmup-fraction .1", "0.1 and --lr-warmup-iters 2 both"),
        ("--lr-warmup-iters 10", "the warm-up of 10 iters does not end before the decay at 10"),
        ("--lr-decay-samples 5", "--lr-decay-samples does not go with --train-iters"),
        ("--train-samples 5", "--train-iters 10 and --train-samples 5 both say how long"),
        ("--fp16 --bf16", "--fp16 and --bf16 are two types"),
        ("--loss-scale 8", "--loss-scale 8.0 needs --fp16"),
        ("--fp16 --initial-loss-scale 0", "--initial-loss-scale 0 would scale every loss"),
        ("--fp16 --initial-loss-scale 0.5", "0.5 is below --min-loss-scale 1.0"),
        ("--rotary-base 0 --position-embedding-type rope", "--rotary-base 0.0 is not positive"),
        ("--schedule zbx", "unknown schedule 'zbx'"),
        ("--schedule 1f1b --enable-zero-bubble", "--enable-zero-bubble means schedule zb-h1"),
        ("--num-layers-per-virtual-pipeline-stage 3", "8 layers do not divide over 1 ranks"),
        ("--mock-data --data-path x", "--data-path x reads; keep one"),
        ("--profile --profile-step-start 10", "--profile-step-start 10 is not"),
        ("--hidden-dropout 1", "--hidden-dropout: 1 must be below 1"),
        ("--kv-channels 7 --use-rotary-position-embeddings", "--kv-channels 7 is odd; use 8"),
        (
            "--use-rotary-position-embeddings --position-embedding-type none",
            "--position-embedding-type none contradicts --use-rotary-position-embeddings",
        ),
        ("--norm-epsilon 0", "--norm-epsilon 0.0 is not positive"),
        ("--normalization Batch", "--normalization: invalid choice: 'Batch'"),
    ],
)
def test_what_cannot_be_done_is_one_clear_line(flags: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        read(f"{BASE} {flags}")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_tied_weights_name_the_flag_to_add() -> None:
    with pytest.raises(UserError, match="add --untie-embeddings-and-output-weights"):
        read(BASE.replace("--untie-embeddings-and-output-weights", ""))


def test_missing_flags_are_all_named() -> None:
    with pytest.raises(UserError) as error:
        parse([])
    for flag in ("--num-layers", "--hidden-size", "--seq-length", "--lr", "--train-iters"):
        assert flag in str(error.value)


def test_the_number_of_processes_must_fit() -> None:
    arguments = read(f"{BASE} --pipeline-model-parallel-size 4")
    arguments.check_world(4)
    with pytest.raises(UserError, match=r"3 processes are not a multiple .* 4; start 4: torchrun"):
        arguments.check_world(3)
    with pytest.raises(UserError, match=r"8 processes over 4 .* data parallelism of 2"):
        arguments.check_world(8)


def test_the_vocabulary_is_padded_never_cut() -> None:
    arguments = read(f"{BASE} --vocab-size 300 --make-vocab-size-divisible-by 64")
    assert arguments.model_config(257).vocab == 320
    with pytest.raises(UserError, match="--vocab-size 300 is less than the tokenizer's 301"):
        arguments.model_config(301)


def test_help_is_complete_and_needs_no_torch() -> None:
    code = (
        "import sys; from zerobubble.training.arguments import parse\n"
        "try: parse(['--help'])\n"
        "except SystemExit: assert 'torch' not in sys.modules"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    for flag in known_flags(build_parser()):
        assert flag in printed


def test_sliced_schedules_are_refused_where_they_would_run() -> None:
    from zerobubble.pipeline import Pipeline
    from zerobubble.schedule import families

    with pytest.raises(UserError, match="--schedule seq1f1b has 4 slices, which cannot run yet"):
        read(f"{BASE} --pipeline-model-parallel-size 2 --schedule seq1f1b")
    with pytest.raises(UserError, match="'seq1f1b' cuts sequences into 3 slices, which cannot run"):
        Pipeline({}, families.build("seq1f1b", 2, 4, slices=3))


def test_interleave_group_size() -> None:
    interleaved = f"{BASE} --pipeline-model-parallel-size 2 --schedule interleaved"
    for flag in ("--interleave-group-size", "--microbatch-group-size-per-virtual-pipeline-stage"):
        forwards = [
            (op.stage, op.microbatch)
            for op in read(f"{interleaved} {flag} 3").pipeline.schedule.orders[0]
            if op.kind == "F"
        ]
        assert forwards[:6] == [(stage, j) for stage in (0, 2) for j in range(3)]
    with pytest.raises(UserError, match="group of 1 microbatches on 2 ranks"):
        read(f"{interleaved} --interleave-group-size 1")
    with pytest.raises(UserError, match="schedule 'zb-v' has no group"):
        read(f"{BASE} --pipeline-model-parallel-size 2 --schedule zb-v --interleave-group-size 4")
