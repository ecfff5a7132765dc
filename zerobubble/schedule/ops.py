"""Op: one unit of computation on one stage for one microbatch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from zerobubble.errors import UserError


class Kind(StrEnum):
    """What an op computes (the paper's F, B and W; BW is B and W at once)."""

    F = "F"
    """Forward of a stage."""
    B = "B"
    """Gradient of the stage's input."""
    W = "W"
    """Gradient of the stage's weights."""
    BW = "BW"
    """Both gradients in one op."""

    @property
    def is_backward(self) -> bool:
        """Whether the op produces the gradient of the stage's input."""
        return self is Kind.B or self is Kind.BW

    @property
    def is_weight(self) -> bool:
        """Whether the op produces the gradient of the stage's weights."""
        return self is Kind.W or self is Kind.BW


# torch.distributed.pipelining writes our B as I and our BW as B.
_LETTER = {Kind.F: "F", Kind.B: "I", Kind.W: "W", Kind.BW: "B"}
_KIND = {letter: kind for kind, letter in _LETTER.items()}
_TEXT = re.compile(r"(\d+)([A-Z])(\d+)(?:\.(\d+))?")


@dataclass(frozen=True, slots=True, order=True)
class Op:
    """`kind` on `stage` for `microbatch` (and `slice` of its sequence)."""

    kind: Kind
    stage: int
    microbatch: int
    slice: int = 0

    def __str__(self) -> str:
        return f"{self.kind} of microbatch {self.microbatch} on stage {self.stage}" + (
            f", slice {self.slice}" if self.slice else ""
        )

    @property
    def text(self) -> str:
        """`2F0`: stage, letter, microbatch, as torch.distributed.pipelining writes it.

        F is F, our B is `I`, W is `W`, our BW is `B`; a slice other than 0 follows a dot.
        """
        suffix = f".{self.slice}" if self.slice else ""
        return f"{self.stage}{_LETTER[self.kind]}{self.microbatch}{suffix}"

    @staticmethod
    def parse(text: str) -> Op:
        """The inverse of `text`. Raises UserError on anything else."""
        match = _TEXT.fullmatch(text.strip())
        if match is None or match[2] not in _KIND:
            raise UserError(
                f"cannot read op {text!r}; write stage, letter, microbatch "
                f"({', '.join(_KIND)}), for example 2F0"
            )
        return Op(_KIND[match[2]], int(match[1]), int(match[3]), int(match[4] or 0))
