"""What the command line asks for, checked: small frozen groups, handed to who needs them."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from zerobubble.errors import UserError
from zerobubble.model.config import ModelConfig
from zerobubble.optim.learning_rate import LearningRate
from zerobubble.schedule import families
from zerobubble.schedule.files import ENDINGS, load_schedule
from zerobubble.schedule.schedule import Schedule
from zerobubble.training.flags import REFUSED, WITHOUT_EFFECT, build_parser, known_flags


@dataclass(frozen=True)
class Vocabulary:
    """How many rows embedding and head get."""

    size: int | None
    divisible_by: int

    def padded(self, tokenizer_size: int) -> int:
        """Rows for a tokenizer of that size. Raises UserError where they are too few."""
        if self.size is not None and self.size < tokenizer_size:
            raise UserError(
                f"--vocab-size {self.size} is less than the tokenizer's {tokenizer_size} tokens; "
                "raise it or leave it out"
            )
        size = self.size or tokenizer_size
        return -(-size // self.divisible_by) * self.divisible_by


@dataclass(frozen=True)
class PipelineArguments:
    """Which schedule over how many ranks."""

    schedule: Schedule
    allow_padding: bool
    print_schedule: bool
    backend: Literal["gloo", "nccl"] | None
    transport: Literal["auto", "gloo", "shared-memory"]

    @property
    def ranks(self) -> int:
        """Number of ranks, p."""
        return self.schedule.ranks


@dataclass(frozen=True)
class BatchArguments:
    """Sequences per microbatch and per iteration."""

    micro: int
    global_: int
    eval_micro: int

    @property
    def microbatches(self) -> int:
        """m."""
        return self.global_ // self.micro

    @property
    def eval_microbatches(self) -> int:
        """m of an iteration of an evaluation."""
        return self.global_ // self.eval_micro


@dataclass(frozen=True)
class OptimizerArguments:
    """AdamW and clipping."""

    learning_rate: LearningRate
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    clip_grad: float


@dataclass(frozen=True)
class PrecisionArguments:
    """The type of parameters and activations, and the loss scale."""

    dtype: Literal["fp32", "bf16", "fp16"]
    loss_scale: float | None
    initial_loss_scale: float
    min_loss_scale: float
    loss_scale_window: int
    hysteresis: int


@dataclass(frozen=True)
class DataArguments:
    """Where tokens come from."""

    path: tuple[str, ...] | None
    mock: bool
    split: str
    tokenizer_type: str | None
    vocab_file: str | None
    merge_file: str | None
    tokenizer_model: str | None
    workers: int


@dataclass(frozen=True)
class RunArguments:
    """How long, and what is written when. Intervals are in iterations."""

    iterations: int
    log_interval: int
    log_json: str | None
    eval_interval: int
    eval_iterations: int
    eval_at_start: bool
    exit_interval: int | None
    save: str | None
    save_interval: int | None
    load: str | None
    trace_path: str | None
    """None: nothing is traced."""
    trace_from: int
    trace_to: int


@dataclass(frozen=True)
class Arguments:
    """Everything, in groups."""

    seed: int
    model: ModelConfig
    """Its vocabulary is known once the tokenizer is: see `model_config`."""
    vocabulary: Vocabulary
    pipeline: PipelineArguments
    batch: BatchArguments
    optimizer: OptimizerArguments
    precision: PrecisionArguments
    data: DataArguments
    run: RunArguments
    notes: tuple[str, ...]
    """Lines to print at the start."""

    def model_config(self, tokenizer_size: int) -> ModelConfig:
        """The model for a tokenizer of that many tokens."""
        return dataclasses.replace(self.model, vocab=self.vocabulary.padded(tokenizer_size))

    def check_world(self, world: int) -> None:
        """Raise UserError unless `world` processes are just what is asked for."""
        ranks = self.pipeline.ranks
        if world % ranks:
            raise UserError(
                f"{world} processes are not a multiple of --pipeline-model-parallel-size {ranks}; "
                f"start {ranks}: torchrun --nproc-per-node {ranks} pretrain_gpt.py ..."
            )
        if world > ranks:
            raise UserError(
                f"{world} processes over {ranks} pipeline ranks mean data parallelism of "
                f"{world // ranks}, which is not there yet; start {ranks} processes"
            )


def parse(argv: Sequence[str]) -> Arguments:
    """Read and check a command line (without the program's name).

    Raises UserError, one line, for anything that cannot be done as asked. `--help` prints and
    exits.
    """
    parser = build_parser()
    flags, unknown = parser.parse_known_args(list(argv))
    if unknown:
        _refuse_unknown(unknown, known_flags(parser))
    given = [a.split("=")[0] for a in argv if a.startswith("--")]
    for flag in given:
        if flag in REFUSED:
            raise UserError(f"{flag}: {REFUSED[flag][1]}")
    _require(flags)
    if flags.tensor_model_parallel_size > 1:
        raise UserError(
            f"--tensor-model-parallel-size {flags.tensor_model_parallel_size} is not there yet; "
            "use 1 and more pipeline ranks"
        )
    if not flags.untie_embeddings_and_output_weights:
        raise UserError(
            "tied weights of embedding and head are not there yet; "
            "add --untie-embeddings-and-output-weights"
        )
    batch = _batch(flags)
    iterations = _iterations(flags, batch)
    return Arguments(
        seed=flags.seed,
        model=_model(flags, given),
        vocabulary=Vocabulary(flags.vocab_size, flags.make_vocab_size_divisible_by),
        pipeline=_pipeline(flags, batch.microbatches),
        batch=batch,
        optimizer=OptimizerArguments(
            learning_rate=_learning_rate(flags, batch, iterations),
            weight_decay=flags.weight_decay,
            betas=(flags.adam_beta1, flags.adam_beta2),
            eps=flags.adam_eps,
            clip_grad=flags.clip_grad,
        ),
        precision=_precision(flags, given),
        data=_data(flags),
        run=_run(flags, iterations),
        notes=_notes(flags, given),
    )


def _refuse_unknown(unknown: list[str], known: list[str]) -> None:
    first = unknown[0].split("=")[0]
    if not first.startswith("-"):
        raise UserError(f"{first!r} belongs to no flag; is a -- missing before it?")
    nearest = difflib.get_close_matches(first, known, n=1, cutoff=0.0)[0]
    raise UserError(f"unknown flag {first}; the nearest known one is {nearest} (see --help)")


def _require(flags: argparse.Namespace) -> None:
    needed = (
        *("num_layers", "hidden_size", "num_attention_heads", "seq_length"),
        *("micro_batch_size", "lr"),
    )
    missing = ["--" + n.replace("_", "-") for n in needed if getattr(flags, n) is None]
    if flags.train_iters is None and flags.train_samples is None:
        missing.append("--train-iters (or --train-samples)")
    if missing:
        raise UserError(f"these flags are needed: {', '.join(missing)}")


def _model(flags: argparse.Namespace, given: list[str]) -> ModelConfig:
    hidden, heads = flags.hidden_size, flags.num_attention_heads
    if flags.kv_channels is None and hidden % heads:
        raise UserError(
            f"--hidden-size {hidden} does not divide over --num-attention-heads {heads}; "
            "change one or give --kv-channels"
        )
    head_size = flags.kv_channels or hidden // heads
    groups = heads
    if flags.group_query_attention:
        groups = flags.num_query_groups or 1
    elif flags.num_query_groups not in (None, heads):
        raise UserError(
            f"--num-query-groups {flags.num_query_groups} needs --group-query-attention; "
            f"add it, or use the {heads} of --num-attention-heads"
        )
    position_type = flags.position_embedding_type
    if flags.use_rotary_position_embeddings:
        if "--position-embedding-type" in given and position_type != "rope":
            raise UserError(
                f"--position-embedding-type {position_type} contradicts "
                "--use-rotary-position-embeddings, which means rope; keep one"
            )
        position_type = "rope"
    positions = flags.max_position_embeddings or flags.seq_length
    if positions < flags.seq_length:
        raise UserError(
            f"--max-position-embeddings {positions} is less than --seq-length "
            f"{flags.seq_length}; raise the one or lower the other"
        )
    ffn = flags.ffn_hidden_size
    if ffn is None:
        ffn = max(64, int(hidden * 4 * 2 / 3) // 64 * 64) if flags.swiglu else 4 * hidden
    config = ModelConfig(
        layers=flags.num_layers,
        hidden=hidden,
        heads=heads,
        vocab=0,
        seq_length=flags.seq_length,
        max_positions=positions,
        query_groups=groups,
        head_size=head_size,
        ffn_hidden=ffn,
        normalization=flags.normalization,
        norm_epsilon=flags.norm_epsilon,
        position_embedding=position_type,
        rotary_base=flags.rotary_base,
        swiglu=flags.swiglu,
        linear_bias=not flags.disable_bias_linear,
        hidden_dropout=flags.hidden_dropout,
        attention_dropout=flags.attention_dropout,
        init_std=flags.init_method_std,
    )
    # Every other size is known, so a wrong one is answered before any data is read.
    dataclasses.replace(config, vocab=1).check()
    return config


def _pipeline(flags: argparse.Namespace, microbatches: int) -> PipelineArguments:
    ranks, per_stage = (
        flags.pipeline_model_parallel_size,
        flags.num_layers_per_virtual_pipeline_stage,
    )
    asked = []  # what implies a schedule, the most particular first
    if per_stage is not None:
        asked.append(("--num-layers-per-virtual-pipeline-stage", "interleaved"))
    if flags.zero_bubble_v_schedule:  # it includes --enable-zero-bubble, as in the fork
        asked.append(("--zero-bubble-v-schedule", "zb-v"))
    elif flags.enable_zero_bubble:
        asked.append(("--enable-zero-bubble", "zb-h1"))
    custom = None
    if flags.schedule is not None and flags.schedule.endswith(ENDINGS):
        custom = _custom_schedule(flags.schedule, ranks, microbatches)
        asked.append((f"--schedule {flags.schedule}", f"{custom.name} of that file"))
    elif flags.schedule is not None:
        asked.append((f"--schedule {flags.schedule}", families.get(flags.schedule).name))
    if len({name for _, name in asked}) > 1:
        first, second = asked[0], asked[-1]
        raise UserError(
            f"{first[0]} means schedule {first[1]} and {second[0]} means {second[1]}; keep one"
        )
    name = asked[0][1] if asked else "1f1b"
    chunks = None
    if per_stage is not None:
        places = flags.num_layers
        if flags.allow_padding_num_layers:  # the fork counts padded layers here
            places = -(-places // ranks) * ranks
        if places % (ranks * per_stage):
            padded = f" ({places} places with padding)" if places != flags.num_layers else ""
            fitting = -(-places // (ranks * per_stage)) * ranks * per_stage
            raise UserError(
                f"{flags.num_layers} layers{padded} do not divide over {ranks} ranks in stages of "
                f"{per_stage} (--num-layers-per-virtual-pipeline-stage); use {fitting} layers or "
                "other stages"
            )
        chunks = places // (ranks * per_stage)
    if custom is None:
        group = flags.interleave_group_size
        schedule = families.build(name, ranks, microbatches, chunks=chunks, group=group)
    elif flags.interleave_group_size is not None:
        raise UserError(
            f"--schedule {flags.schedule} is a whole schedule already, --interleave-group-size "
            f"{flags.interleave_group_size} cannot change it; leave one out"
        )
    else:
        schedule = custom
    if schedule.slices > 1:
        raise UserError(
            f"--schedule {flags.schedule} has {schedule.slices} slices, which cannot run yet; "
            "choose one of 1 slice"
        )
    return PipelineArguments(
        schedule=schedule,
        allow_padding=flags.allow_padding_num_layers,
        print_schedule=flags.print_schedule,
        backend=flags.distributed_backend,
        transport=flags.transport,
    )


def _custom_schedule(path: str, ranks: int, microbatches: int) -> Schedule:
    schedule = load_schedule(path)
    if schedule.ranks != ranks:
        raise UserError(
            f"--schedule {path} is for {schedule.ranks} ranks, --pipeline-model-parallel-size is "
            f"{ranks}; make them equal"
        )
    if schedule.microbatches != microbatches:
        raise UserError(
            f"--schedule {path} is for {schedule.microbatches} microbatches, the batch sizes give "
            f"{microbatches}; make --global-batch-size {schedule.microbatches} microbatches"
        )
    if schedule.forward_only:
        raise UserError(f"--schedule {path} has no backward; nothing would be trained")
    return schedule


def _batch(flags: argparse.Namespace) -> BatchArguments:
    micro = flags.micro_batch_size
    whole = flags.global_batch_size or micro
    eval_micro = flags.eval_micro_batch_size or micro
    for size, flag in ((micro, "--micro-batch-size"), (eval_micro, "--eval-micro-batch-size")):
        if whole % size:
            both = math.lcm(micro, eval_micro)
            nearest = max(1, round(whole / both)) * both
            raise UserError(
                f"--global-batch-size {whole} is not a multiple of {flag} {size}; "
                f"use {nearest} or change {flag}"
            )
    return BatchArguments(micro=micro, global_=whole, eval_micro=eval_micro)


def _iterations(flags: argparse.Namespace, batch: BatchArguments) -> int:
    if flags.train_iters is not None and flags.train_samples is not None:
        raise UserError(
            f"--train-iters {flags.train_iters} and --train-samples {flags.train_samples} both "
            "say how long; keep one"
        )
    iterations: int = flags.train_iters or flags.train_samples // batch.global_
    if iterations < 1:
        raise UserError(
            f"--train-samples {flags.train_samples} is less than one iteration of "
            f"--global-batch-size {batch.global_}; use at least {batch.global_}"
        )
    return iterations


def _learning_rate(
    flags: argparse.Namespace, batch: BatchArguments, iterations: int
) -> LearningRate:
    if flags.min_lr > flags.lr:
        raise UserError(f"--min-lr {flags.min_lr} is above --lr {flags.lr}; lower it")
    wrong, right = ("samples", "iters") if flags.train_iters is not None else ("iters", "samples")
    for what in ("decay", "warmup"):
        if getattr(flags, f"lr_{what}_{wrong}"):
            raise UserError(
                f"--lr-{what}-{wrong} does not go with --train-{right}; use --lr-{what}-{right}"
            )
    per = batch.global_ if right == "iters" else 1
    decay = getattr(flags, f"lr_decay_{right}")
    if decay is None:
        decay = iterations if right == "iters" else flags.train_samples
    decay *= per
    warmup = getattr(flags, f"lr_warmup_{right}") * per
    if flags.lr_warmup_fraction is not None:
        if warmup:
            raise UserError(
                f"--lr-warmup-fraction {flags.lr_warmup_fraction} and --lr-warmup-{right} "
                f"{warmup // per} both give the warm-up; keep one"
            )
        warmup = flags.lr_warmup_fraction * decay
    if warmup >= decay:
        raise UserError(
            f"the warm-up of {warmup / per:g} {right} does not end before the decay at "
            f"{decay // per}; shorten it or raise --lr-decay-{right}"
        )
    return LearningRate(flags.lr, flags.min_lr, warmup, decay, flags.lr_decay_style)


def _precision(flags: argparse.Namespace, given: list[str]) -> PrecisionArguments:
    if flags.fp16 and flags.bf16:
        raise UserError("--fp16 and --bf16 are two types for the same weights; keep one")
    if "--loss-scale" in given and not flags.fp16:
        raise UserError(
            f"--loss-scale {flags.loss_scale} needs --fp16: there is no loss scale without it; "
            "add --fp16 or leave it out"
        )
    for flag in ("initial_loss_scale", "min_loss_scale"):
        if getattr(flags, flag) == 0:
            raise UserError(
                f"--{flag.replace('_', '-')} 0 would scale every loss to nothing; use 1 or more"
            )
    if _dynamic_scale(flags) and flags.initial_loss_scale < flags.min_loss_scale:
        raise UserError(
            f"--initial-loss-scale {flags.initial_loss_scale} is below --min-loss-scale "
            f"{flags.min_loss_scale}; raise the one or lower the other"
        )
    return PrecisionArguments(
        dtype="fp16" if flags.fp16 else "bf16" if flags.bf16 else "fp32",
        loss_scale=flags.loss_scale or None,  # 0 is dynamic, as in Megatron-LM
        initial_loss_scale=flags.initial_loss_scale,
        min_loss_scale=flags.min_loss_scale,
        loss_scale_window=flags.loss_scale_window,
        hysteresis=flags.hysteresis,
    )


def _dynamic_scale(flags: argparse.Namespace) -> bool:
    return bool(flags.fp16 and not flags.loss_scale)


def _data(flags: argparse.Namespace) -> DataArguments:
    if flags.mock_data and flags.data_path:
        raise UserError(
            f"--mock-data makes up what --data-path {' '.join(flags.data_path)} reads; keep one"
        )
    return DataArguments(
        path=tuple(flags.data_path) if flags.data_path else None,
        mock=flags.mock_data,
        split=flags.split,
        tokenizer_type=flags.tokenizer_type,
        vocab_file=flags.vocab_file,
        merge_file=flags.merge_file,
        tokenizer_model=flags.tokenizer_model,
        workers=flags.num_workers,
    )


def _run(flags: argparse.Namespace, iterations: int) -> RunArguments:
    if flags.profile and not flags.profile_step_start < flags.profile_step_end:
        raise UserError(
            f"--profile-step-start {flags.profile_step_start} is not before "
            f"--profile-step-end {flags.profile_step_end}; raise the latter"
        )
    if flags.profile and flags.profile_step_start >= iterations:
        raise UserError(
            f"--profile-step-start {flags.profile_step_start} is not within the {iterations} "
            "iterations (the first is 0); lower it"
        )
    return RunArguments(
        iterations=iterations,
        log_interval=flags.log_interval,
        log_json=flags.log_json,
        eval_interval=flags.eval_interval,
        eval_iterations=flags.eval_iters,
        eval_at_start=flags.eval_at_start,
        exit_interval=flags.exit_interval,
        save=flags.save,
        save_interval=flags.save_interval if flags.save else None,
        load=flags.load,
        trace_path=flags.trace_path if flags.profile else None,
        trace_from=flags.profile_step_start,
        trace_to=flags.profile_step_end,
    )


def _notes(flags: argparse.Namespace, given: list[str]) -> tuple[str, ...]:
    notes = []
    inert = dict.fromkeys(flag for flag in given if flag in WITHOUT_EFFECT)
    if inert:
        notes.append(
            f"accepted without effect, they choose an implementation in Megatron-LM: "
            f"{' '.join(inert)}"
        )
    for needed, missing, dependents in (
        ("--save", not flags.save, ("--save-interval",)),
        (
            "--profile",
            not flags.profile,
            ("--profile-step-start", "--profile-step-end", "--trace-path"),
        ),
        (
            "--fp16 and a loss scale that is not constant",
            not _dynamic_scale(flags),
            ("--initial-loss-scale", "--min-loss-scale", "--loss-scale-window", "--hysteresis"),
        ),
    ):
        idle = dict.fromkeys(flag for flag in given if flag in dependents)
        if missing and idle:
            notes.append(f"no effect without {needed}: {' '.join(idle)}")
    if flags.mock_data:
        idle = dict.fromkeys(flag for flag in given if flag in ("--split", "--tokenizer-type"))
        if idle:
            notes.append(f"no effect with --mock-data: {' '.join(idle)}")
    rope = flags.use_rotary_position_embeddings or flags.position_embedding_type == "rope"
    if "--rotary-base" in given and not rope:
        notes.append("no effect without --position-embedding-type rope: --rotary-base")
    if flags.sequence_parallel:
        notes.append("--sequence-parallel is off: --tensor-model-parallel-size is 1")
    return tuple(notes)
