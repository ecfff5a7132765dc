"""What training prints: Megatron's log line, and the same as JSON."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass
from typing import TextIO

from zerobubble.errors import UserError


@dataclass(frozen=True)
class Progress:
    """One line of the log: means over the iterations since the last one, or their counts."""

    iteration: int
    train_iterations: int
    consumed_samples: int
    elapsed_ms_per_iteration: float
    learning_rate: float
    global_batch_size: int
    lm_loss: float
    loss_scale: float
    grad_norm: float
    skipped_iterations: int
    nan_iterations: int

    def line(self) -> str:
        """The line, character for character as Megatron-LM prints it."""
        return (
            f" iteration {self.iteration:8d}/{self.train_iterations:8d} |"
            f" consumed samples: {self.consumed_samples:12d} |"
            f" elapsed time per iteration (ms): {self.elapsed_ms_per_iteration:.1f} |"
            f" learning rate: {self.learning_rate:.3E} |"
            f" global batch size: {self.global_batch_size:5d} |"
            f" lm loss: {self.lm_loss:.6E} |"
            f" loss scale: {self.loss_scale:.1f} |"
            f" grad norm: {self.grad_norm:.3f} |"
            f" number of skipped iterations: {self.skipped_iterations:3d} |"
            f" number of nan iterations: {self.nan_iterations:3d} |"
        )


class JsonLog:
    """JSON lines to a file, or to standard output for "-"; every line is written at once.

    A number that is not finite (the norm of a skipped iteration) is null.
    """

    def __init__(self, path: str) -> None:
        try:
            self._file: TextIO = sys.stdout if path == "-" else open(path, "a")  # noqa: SIM115
        except OSError as error:
            raise UserError(f"--log-json {path} cannot be written: {error.strerror}") from error

    def write(self, kind: str, values: Progress | dict[str, object]) -> None:
        """One line: {"kind": kind, ...values}."""
        fields = asdict(values) if isinstance(values, Progress) else values
        # JSON has no nan and no inf.
        fields = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in fields.items()
        }
        print(json.dumps({"kind": kind, **fields}), file=self._file, flush=True)
