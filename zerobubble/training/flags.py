"""The command line of pretrain_gpt.py: Megatron-LM's names, types and defaults.

Only what a flag is; what flags mean together is in `arguments`.
"""

from __future__ import annotations

import argparse
import math
from typing import NoReturn

from zerobubble.errors import UserError

# Flags that choose an implementation in Megatron-LM or its zero-bubble fork. Ours has one.
WITHOUT_EFFECT = {
    "--use-legacy-models": 0,
    "--use-mcore-models": 0,
    "--transformer-impl": 1,
    "--attention-backend": 1,
    "--use-flash-attn": 0,
    "--attention-softmax-in-fp32": 0,
    "--no-query-key-layer-scaling": 0,
    "--no-create-attention-mask-in-dataloader": 0,
    "--no-masked-softmax-fusion": 0,
    "--no-bias-gelu-fusion": 0,
    "--no-bias-swiglu-fusion": 0,
    "--no-bias-dropout-fusion": 0,
    "--no-rope-fusion": 0,
    "--no-gradient-accumulation-fusion": 0,
    "--no-persist-layer-norm": 0,
    "--cross-entropy-loss-fusion": 0,
    "--no-cross-entropy-loss-fusion": 0,
    "--no-overlap-p2p-communication": 0,
    "--no-barrier-with-level-1-timing": 0,
    "--no-pre-communication-optimization": 0,
    "--no-async-tensor-model-parallel-allreduce": 0,
    "--no-mmap-bin-files": 0,
}

# Flags of Megatron-LM or its fork for what is not there yet: values, and what to do instead.
_RECOMPUTE = (1, "recomputation is not there yet; remove it")
REFUSED = {
    "--recompute-activations": (0, _RECOMPUTE[1]),
    "--recompute-granularity": _RECOMPUTE,
    "--recompute-method": _RECOMPUTE,
    "--recompute-num-layers": _RECOMPUTE,
    "--recompute-modules": _RECOMPUTE,
    "--distribute-saved-activations": (0, _RECOMPUTE[1]),
    "--enable-optimizer-post-validation": (
        0,
        "post-validation is not there yet; remove it: the synchronous step gives the same weights",
    ),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message.removeprefix("argument "))


def natural(text: str) -> int:
    """An integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def whole(text: str) -> int:
    """An integer of at least 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} must not be negative")
    return value


def steps(text: str) -> int:
    """A whole number of at least 1, also written as 1e3."""
    value = float(text)
    if not 1 <= value < math.inf or value != int(value):
        raise argparse.ArgumentTypeError(f"{text} must be a whole number of at least 1")
    return int(value)


def number(text: str) -> float:
    """A finite number of at least 0."""
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"{text} must be a finite number, not negative")
    return value


def positive(text: str) -> float:
    """A finite number above 0."""
    value = number(text)
    if not value:
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return value


def share(text: str) -> float:
    """A number from 0 up to, not including, 1."""
    value = number(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"{text} must be below 1")
    return value


for _type, _name in (
    (natural, "int"),
    (whole, "int"),
    (steps, "int"),
    (number, "float"),
    (positive, "float"),
    (share, "float"),
):
    _type.__name__ = _name  # what argparse calls them in an error


def build_parser() -> argparse.ArgumentParser:
    """The parser; its `error` raises UserError. Every flag is also found by `known_flags`."""
    parser = _Parser(
        prog="pretrain_gpt.py",
        description="Train a GPT or Llama through a pipelined schedule: "
        "torchrun --nproc-per-node P pretrain_gpt.py --pipeline-model-parallel-size P ...",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _model(parser)
    _pipeline(parser)
    _batch_and_length(parser)
    _optimizer(parser)
    _precision(parser)
    _data(parser)
    _run(parser)
    group = parser.add_argument_group(
        "accepted without effect", "they choose an implementation in Megatron-LM; here is one"
    )
    for flag, values in WITHOUT_EFFECT.items():
        _inert(group, flag, values, "no effect")
    group = parser.add_argument_group("not there yet", "refused, with what to do instead")
    for flag, (values, reason) in REFUSED.items():
        _inert(group, flag, values, reason)
    return parser


def known_flags(parser: argparse.ArgumentParser) -> list[str]:
    """Every long flag that the parser knows."""
    return [o for action in parser._actions for o in action.option_strings if o.startswith("--")]


def _inert(group: argparse._ArgumentGroup, flag: str, values: int, text: str) -> None:
    default = argparse.SUPPRESS
    if values:
        count = "+" if flag == "--recompute-modules" else None
        group.add_argument(flag, default=default, nargs=count, metavar="X", help=text)
    else:
        group.add_argument(flag, action="store_true", default=default, help=text)


def _model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    add = group.add_argument
    add("--num-layers", type=natural, help="transformer layers")
    add("--hidden-size", type=natural, help="width of the model")
    add("--ffn-hidden-size", type=natural, help="4 x hidden; with --swiglu 2/3 of that in 64s")
    add("--num-attention-heads", type=natural, help="heads of queries")
    add("--kv-channels", type=natural, help="channels of a head; hidden / heads if not given")
    add("--group-query-attention", action="store_true", help="share keys and values in groups")
    add("--num-query-groups", type=natural, help="groups, with --group-query-attention")
    add("--max-position-embeddings", type=natural, help="positions; --seq-length if not given")
    add(
        "--position-embedding-type",
        choices=("learned_absolute", "rope", "none"),
        default="learned_absolute",
        help="how positions enter",
    )
    add("--use-rotary-position-embeddings", action="store_true", help="the same as type rope")
    add("--rotary-base", type=number, default=10000.0, help="base of rotary frequencies")
    add("--normalization", choices=("LayerNorm", "RMSNorm"), default="LayerNorm", help="norm")
    add("--norm-epsilon", type=number, default=1e-5, help="epsilon of the norms")
    add("--swiglu", action="store_true", help="SwiGLU instead of GELU")
    add("--disable-bias-linear", action="store_true", help="no biases in linear layers")
    add(
        "--untie-embeddings-and-output-weights",
        action="store_true",
        help="own weights for the head (needed for now)",
    )
    add("--attention-dropout", type=share, default=0.1, help="dropout of attention weights")
    add("--hidden-dropout", type=share, default=0.1, help="dropout of hidden states")
    add("--init-method-std", type=number, default=0.02, help="standard deviation at start")
    add(
        "--make-vocab-size-divisible-by",
        type=natural,
        default=128,
        help="the vocabulary is padded to a multiple of this",
    )
    add("--vocab-size", type=natural, help="before padding; the tokenizer's if not given")


def _pipeline(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pipeline")
    add = group.add_argument
    add("--pipeline-model-parallel-size", type=natural, default=1, help="ranks of the pipeline")
    add("--tensor-model-parallel-size", type=natural, default=1, help="1 for now")
    add("--sequence-parallel", action="store_true", help="off where tensor parallelism is 1")
    add(
        "--schedule",
        metavar="NAME",
        help="a family (1f1b, zb-v, ...) or a .json or .csv file",
    )
    add("--enable-zb-runtime", action="store_true", help="this runtime; alone it means 1f1b")
    add("--enable-zero-bubble", action="store_true", help="zb-h1")
    add("--zero-bubble-v-schedule", action="store_true", help="zb-v")
    add(
        "--num-layers-per-virtual-pipeline-stage",
        type=natural,
        help="interleaved, with this many layers per stage",
    )
    add(
        "--interleave-group-size",
        "--microbatch-group-size-per-virtual-pipeline-stage",
        type=natural,
        help="of interleaved: microbatches that a stage runs in a row; the ranks, or more",
    )
    add(
        "--allow-padding-num-layers",
        action="store_true",
        help="layers need not divide over the stages; exactly --num-layers are built",
    )
    add("--print-schedule", action="store_true", help="print every rank's ops before training")
    add("--profile", action="store_true", help="write a Chrome trace of every op")
    add("--profile-step-start", type=whole, default=10, help="first iteration traced (from 0)")
    add("--profile-step-end", type=natural, default=12, help="first iteration not traced any more")
    add("--trace-path", default="trace.json", help="where --profile writes")
    add(
        "--transport",
        choices=("auto", "gloo", "shared-memory"),
        default="auto",
        help="between stages; auto: shared memory where all ranks are on one host",
    )
    add(
        "--distributed-backend",
        choices=("nccl", "gloo"),
        help="gloo if not given; nccl is not there yet",
    )


def _batch_and_length(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("batch")
    add = group.add_argument
    add("--seq-length", type=natural, help="tokens of a sequence")
    add("--micro-batch-size", type=natural, help="sequences of a microbatch")
    add(
        "--global-batch-size",
        type=natural,
        help="sequences of an iteration; one microbatch if none",
    )
    add("--eval-micro-batch-size", type=natural, help="--micro-batch-size if not given")


def _optimizer(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("optimizer and learning rate")
    add = group.add_argument
    add("--lr", type=number, help="highest learning rate")
    add("--min-lr", type=number, default=0.0, help="lowest learning rate")
    add(
        "--lr-decay-style",
        choices=("constant", "linear", "cosine", "inverse-square-root"),
        default="linear",
        help="shape of the decay",
    )
    add("--lr-decay-iters", type=natural, help="iterations until --min-lr; all if not given")
    add("--lr-decay-samples", type=natural, help="the same in samples")
    add("--lr-warmup-fraction", type=share, help="share of the decay that warms up")
    add("--lr-warmup-iters", type=whole, default=0, help="iterations of warm-up")
    add("--lr-warmup-samples", type=whole, default=0, help="the same in samples")
    add("--weight-decay", type=number, default=0.01, help="decay of weights that are matrices")
    add("--clip-grad", type=number, default=1.0, help="largest global norm; 0 does not clip")
    add("--adam-beta1", type=share, default=0.9, help="of AdamW")
    add("--adam-beta2", type=share, default=0.999, help="of AdamW")
    add("--adam-eps", type=positive, default=1e-8, help="of AdamW")


def _precision(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("precision")
    add = group.add_argument
    add("--fp16", action="store_true", help="fp16 with a loss scale")
    add("--bf16", action="store_true", help="bf16")
    add("--loss-scale", type=number, help="constant loss scale (fp16); dynamic if not given")
    add("--initial-loss-scale", type=number, default=2.0**32, help="of the dynamic one")
    add("--min-loss-scale", type=number, default=1.0, help="of the dynamic one")
    add("--loss-scale-window", type=steps, default=1000, help="clean steps until it doubles")
    add("--hysteresis", type=natural, default=2, help="overflows until it halves")


def _data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    add = group.add_argument
    add(
        "--data-path",
        nargs="+",
        help="prefix of .bin/.idx, or weight prefix ...; without it, the built-in corpus",
    )
    add("--mock-data", action="store_true", help="made-up sequences, no files")
    add("--split", default="969,30,1", help="shares of training, validation and test")
    add("--tokenizer-type", help="GPT2BPETokenizer if --vocab-file is given, else bytes")
    add("--vocab-file", help="vocabulary of GPT2BPETokenizer (JSON)")
    add("--merge-file", help="merges of GPT2BPETokenizer")
    add("--tokenizer-model", help="SentencePiece model")
    add("--num-workers", type=whole, default=0, help="processes that load ahead")
    add("--seed", type=whole, default=1234, help="of weights, dropout and sample order")


def _run(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("run")
    add = group.add_argument
    add("--train-iters", type=natural, help="iterations to train")
    add("--train-samples", type=natural, help="the same in samples")
    add("--log-interval", type=natural, default=100, help="iterations between log lines")
    add("--log-json", nargs="?", const="-", metavar="PATH", help="JSON lines to PATH, or to stdout")
    add("--eval-interval", type=natural, default=1000, help="iterations between evaluations")
    add("--eval-iters", type=whole, default=100, help="iterations of an evaluation; 0: none")
    add("--eval-at-start", action="store_true", help="evaluate before the first iteration too")
    add("--exit-interval", type=natural, help="leave after an iteration divisible by this")
    add("--save", help="folder for checkpoints")
    add("--save-interval", type=natural, help="iterations between checkpoints; at the end always")
    add("--load", help="folder to continue from, if it holds a checkpoint")
