"""The training loop: from checked arguments to trained weights."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerobubble.data.datasets import Datasets, build_datasets
from zerobubble.data.loader import Loader
from zerobubble.data.tokenizer import build_tokenizer
from zerobubble.errors import UserError
from zerobubble.model.batch import Batch
from zerobubble.model.layout import layers_per_stage
from zerobubble.model.seeds import mix
from zerobubble.model.stage import StageModule, build_stage
from zerobubble.optim.loss_scale import DynamicLossScale, LossScaler, StaticLossScale
from zerobubble.optim.optimizer import Optimizer
from zerobubble.pipeline import Pipeline
from zerobubble.report.chrome_trace import check_trace_path, write_chrome_trace
from zerobubble.runtime.executor import StepError
from zerobubble.schedule.formats import format_nodes
from zerobubble.schedule.ops import Kind
from zerobubble.schedule.timeline import Timeline
from zerobubble.training import checkpoint
from zerobubble.training.arguments import Arguments, PrecisionArguments
from zerobubble.training.launch import agree, die
from zerobubble.training.progress import JsonLog, Progress
from zerobubble.training.step import StepResult, Trainer

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Training:
    """One run on one rank. Collective: every rank makes it and calls `run`.

    Raises UserError, before anything is computed, for what cannot be done as asked.
    """

    def __init__(self, arguments: Arguments, rank: int) -> None:
        self.arguments = arguments
        self.rank = rank
        self.iteration = 0
        """Iterations done."""
        self.consumed_samples = 0
        self.scheduled_samples = 0
        """Samples of the iterations that updated the weights: they move the learning rate."""
        run, pipeline = arguments.run, arguments.pipeline
        self.schedule = pipeline.schedule
        # The first rank writes indices that the others then read.
        first = agree(lambda: _datasets(arguments) if rank == 0 else None)
        tokenizer_size, self.datasets = agree(lambda: first or _datasets(arguments))
        self.config = arguments.model_config(tokenizer_size)
        self.layout = layers_per_stage(
            self.config, self.schedule.placement, allow_padding=pipeline.allow_padding
        )
        self._log = agree(lambda: JsonLog(run.log_json) if run.log_json and rank == 0 else None)
        if run.trace_path is not None:
            trace = run.trace_path
            agree(lambda: check_trace_path(trace) if rank == 0 else None)
        if run.save is not None:
            folder = run.save
            agree(lambda: checkpoint.prepare_folder(folder) if rank == 0 else None)
        self.trainer, self.parameters = self._build()
        if run.load is not None:
            self._load(run.load)
        self._traced: list[Timeline] = []

    def _build(self) -> tuple[Trainer, dict[str, torch.nn.Parameter]]:
        arguments = self.arguments
        dtype = _DTYPES[arguments.precision.dtype]
        modules: dict[int, StageModule] = {
            stage: build_stage(self.config, self.layout, stage, arguments.seed, dtype)
            for stage in self.schedule.placement.stages_of(self.rank)
        }
        parameters = {n: p for s in sorted(modules) for n, p in modules[s].named_parameters()}
        optimizer = Optimizer(
            parameters,
            weight_decay=arguments.optimizer.weight_decay,
            betas=arguments.optimizer.betas,
            eps=arguments.optimizer.eps,
        )
        trainer = Trainer(
            Pipeline(modules, self.schedule, transport=arguments.pipeline.transport),
            optimizer,
            _scaler(arguments.precision),
            width=self.config.hidden,
            dtype=dtype,
            clip_grad=arguments.optimizer.clip_grad,
        )
        return trainer, parameters

    def run(self) -> None:
        """Train to the end, or to the exit interval."""
        self._announce()
        run = self.arguments.run
        loader = self._loader(self.consumed_samples)
        if run.eval_at_start and run.eval_iterations:
            self._evaluate("valid", self.iteration, self.iteration // run.eval_interval)
        window: list[StepResult] = []
        since = time.perf_counter()
        saved = self.iteration
        while self.iteration < run.iterations:
            window.append(self._train(loader))
            if self.iteration % run.log_interval == 0:
                now = time.perf_counter()
                self._report(window, (now - since) * 1e3 / len(window))
                window, since = [], now
            if self.iteration % run.eval_interval == 0 and run.eval_iterations:
                before = time.perf_counter()
                number = self.iteration // run.eval_interval
                self._evaluate("valid", self.iteration, number - 1)
                since += time.perf_counter() - before
            if run.save_interval and self.iteration % run.save_interval == 0:
                before = time.perf_counter()
                self._save()
                saved = self.iteration
                since += time.perf_counter() - before
            if run.exit_interval and self.iteration % run.exit_interval == 0:
                break
        if window:
            self._report(window, (time.perf_counter() - since) * 1e3 / len(window))
        if self.iteration < run.iterations:
            self._print(f"exiting at iteration {self.iteration} (--exit-interval)")
        if self._traced and run.trace_path is not None:
            write_chrome_trace(run.trace_path, self._traced)
            self._print(f"wrote {run.trace_path}: {len(self._traced)} iterations")
        elif run.trace_path is not None:
            self._print(
                f"no trace was written: iterations {run.trace_from} to {run.trace_to} were not run"
            )
        if run.save is not None and saved != self.iteration:
            self._save()
        if self.iteration == run.iterations and run.eval_iterations:
            if self.iteration % run.eval_interval:  # else it has just been done
                number = self.iteration // run.eval_interval
                self._evaluate("valid", self.iteration, number)
            self._evaluate("test", self.iteration, 0)

    def _train(self, loader: Loader) -> StepResult:
        arguments = self.arguments
        batches = self._seeded(loader.next(arguments.batch.microbatches))
        rate = arguments.optimizer.learning_rate.at(self.scheduled_samples)
        try:
            result = self.trainer.step(batches, rate)
        except StepError as error:
            die("pretrain_gpt.py", error, self.iteration + 1, trace=error.computing)
        run = arguments.run
        if run.trace_path is not None and run.trace_from <= self.iteration < run.trace_to:
            timeline = self.trainer.pipeline.timeline()
            if timeline is not None:
                self._traced.append(timeline)
        self.iteration += 1
        self.consumed_samples += arguments.batch.global_
        if result.updated:
            self.scheduled_samples += arguments.batch.global_
        return result

    def _seeded(self, batches: Sequence[Batch]) -> list[Batch]:
        """Each with the dropout seed of its place in the run, whatever rank asks."""
        return [
            dataclasses.replace(b, dropout_seed=mix(self.arguments.seed, self.iteration, i))
            for i, b in enumerate(batches)
        ]

    def _loader(self, consumed: int) -> Loader:
        return Loader(
            self.datasets.train,
            micro_batch_size=self.arguments.batch.micro,
            consumed_samples=consumed,
            num_workers=self.arguments.data.workers,
        )

    def _evaluate(self, split: str, iteration: int, number: int) -> None:
        """The mean loss of evaluation `number` (from 0), which has samples of its own."""
        arguments = self.arguments
        dataset = getattr(self.datasets, split)
        if dataset is None:
            return
        batch, iterations = arguments.batch, arguments.run.eval_iterations
        loader = Loader(
            dataset,
            micro_batch_size=batch.eval_micro,
            consumed_samples=number * iterations * batch.global_,
            num_workers=0,
        )
        losses: list[float] = []
        for _ in range(iterations):
            try:
                losses += self.trainer.evaluate(loader.next(batch.eval_microbatches))
            except StepError as error:
                die("pretrain_gpt.py", error, iteration, trace=error.computing)
        loss = sum(losses) / len(losses)
        perplexity = math.exp(min(20.0, loss))
        name = "validation" if split == "valid" else "test"
        self._print(
            f" {name} loss at iteration {iteration} | lm loss value: {loss:.6E} | "
            f"lm loss PPL: {perplexity:.6E} |"
        )
        self._write(name, {"iteration": iteration, "lm_loss": loss})

    def _report(self, window: Sequence[StepResult], elapsed_ms: float) -> None:
        losses = [sum(r.losses) / len(r.losses) for r in window]
        progress = Progress(
            iteration=self.iteration,
            train_iterations=self.arguments.run.iterations,
            consumed_samples=self.consumed_samples,
            elapsed_ms_per_iteration=elapsed_ms,
            learning_rate=self.arguments.optimizer.learning_rate.at(self.scheduled_samples),
            global_batch_size=self.arguments.batch.global_,
            lm_loss=sum(losses) / len(losses),
            loss_scale=self.trainer.scaler.scale,
            grad_norm=window[-1].grad_norm,
            skipped_iterations=sum(not r.updated for r in window),
            nan_iterations=sum(math.isnan(loss) for loss in losses),
        )
        self._print(progress.line())
        self._write("train", progress)

    def _print(self, line: str) -> None:
        if self.rank == 0:
            print(line, flush=True)

    def _write(self, kind: str, values: Progress | dict[str, Any]) -> None:
        if self._log is not None:
            self._log.write(kind, values)

    def _announce(self) -> None:
        arguments = self.arguments
        for note in arguments.notes:
            self._print(f"note: {note}")
        if arguments.run.eval_iterations:
            for name in ("valid", "test"):
                if getattr(self.datasets, name) is None:
                    self._print(
                        f"note: --split {arguments.data.split} leaves no {name} data to evaluate"
                    )
        weights = sum(p.numel() for p in self.parameters.values())
        total = agree_sum(weights)
        placement = self.schedule.placement
        self._print(
            f"model: {total / 1e6:.2f} M parameters in {arguments.precision.dtype}, "
            f"{self.config.layers} layers, vocabulary {self.config.vocab} with padding"
        )
        self._print(
            f"pipeline: schedule {self.schedule.name}, {placement.ranks} ranks x "
            f"{placement.chunks} stages, layers per stage {list(self.layout)}, "
            f"{self.schedule.microbatches} microbatches, {torch.get_num_threads()} thread(s) a rank"
        )
        self._announce_split()
        if arguments.pipeline.print_schedule:
            self._print(format_nodes(self.schedule))

    def _announce_split(self) -> None:
        """What share of every stage's parameters has its gradient at W, where there is a W."""
        if not any(op.kind is Kind.W for _, op in self.schedule.ops()):
            return
        reports: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, self.trainer.pipeline.split_reports)
        shares = {
            stage: report.deferred / report.parameters if report.parameters else 0.0
            for held in reports
            for stage, report in held.items()
        }
        text = ", ".join(f"{shares[stage]:.1%}" for stage in sorted(shares))
        self._print(f"split backward: parameters deferred to W, per stage: {text}")

    def _save(self) -> None:
        assert self.arguments.run.save is not None
        place = checkpoint.save(
            self.arguments.run.save,
            self.iteration,
            self.parameters,
            self.trainer.optimizer.state_dict(),
            {
                "iteration": self.iteration,
                "consumed_samples": self.consumed_samples,
                "scheduled_samples": self.scheduled_samples,
                "loss_scale": self.trainer.scaler.state_dict(),
            },
            self._identity,
        )
        self._print(f"saved {place}")

    def _load(self, folder: str) -> None:
        place = agree(lambda: checkpoint.latest(folder))
        if place is None:
            self._print(f"note: --load {folder} holds no checkpoint yet; starting from the seed")
            return
        optimizer, progress = agree(lambda: checkpoint.load(place, self.parameters, self._identity))
        self.trainer.optimizer.load_state_dict(optimizer)
        self.trainer.scaler.load_state_dict(progress["loss_scale"])
        self.iteration = progress["iteration"]
        self.consumed_samples = progress["consumed_samples"]
        self.scheduled_samples = progress["scheduled_samples"]
        self._print(f"continuing from {place}")
        batch, iterations = self.arguments.batch.global_, self.arguments.run.iterations
        if self.iteration >= iterations:
            self._print(
                f"note: nothing to train: {self.iteration} iterations are done, {iterations} were "
                "asked for in all; raise --train-iters to go on"
            )
        elif self.consumed_samples > self.iteration * batch:
            raise UserError(
                f"{place} has consumed {self.consumed_samples} samples in {self.iteration} "
                f"iterations, more than --global-batch-size {batch} would have; use "
                f"{self.consumed_samples // self.iteration} as before, or a larger one"
            )

    @property
    def _identity(self) -> dict[str, Any]:
        """What must be alike in a run and the checkpoint that it continues from."""
        free = ("seq_length", "hidden_dropout", "attention_dropout", "init_std")
        return {n: v for n, v in dataclasses.asdict(self.config).items() if n not in free}


def agree_sum(value: int) -> int:
    """The sum of every rank's value. Collective."""
    total = torch.tensor(value, dtype=torch.int64)
    dist.all_reduce(total)
    return int(total)


def _datasets(arguments: Arguments) -> tuple[int, Datasets]:
    """The tokenizer's size, and datasets with enough samples for the whole run."""
    data, run, batch = arguments.data, arguments.run, arguments.batch
    tokenizer = build_tokenizer(
        data.tokenizer_type, data.vocab_file, data.merge_file, data.tokenizer_model
    )
    size = tokenizer.vocab_size
    if data.mock and arguments.vocabulary.size is not None:
        size = arguments.vocabulary.size  # made-up tokens need no tokenizer
    arguments.model_config(size)  # refused here, before any data is built
    evaluation = run.eval_iterations * batch.global_
    datasets = build_datasets(
        data.path,
        mock=data.mock,
        tokenizer=tokenizer,
        vocab_size=size,
        seq_length=arguments.model.seq_length,
        seed=arguments.seed,
        split=data.split,
        samples=(
            run.iterations * batch.global_,
            (run.iterations // run.eval_interval + 1) * evaluation,
            evaluation,
        ),
    )
    return size, datasets


def _scaler(precision: PrecisionArguments) -> LossScaler:
    if precision.dtype != "fp16":
        return StaticLossScale(1.0)
    if precision.loss_scale is not None:
        return StaticLossScale(precision.loss_scale)
    return DynamicLossScale(
        precision.initial_loss_scale,
        precision.min_loss_scale,
        precision.loss_scale_window,
        precision.hysteresis,
    )
