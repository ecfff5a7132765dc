"""Loss scales: constant, or dynamic as in Megatron-LM (DynamicGradScaler)."""

from __future__ import annotations

from typing import Any, Protocol


class LossScaler(Protocol):
    """The factor of the loss before its backward."""

    @property
    def scale(self) -> float:
        """The factor for the next step."""

    def update(self, overflow: bool) -> None:
        """Tell it whether the step's gradients overflowed."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""


class StaticLossScale:
    """A constant; 1 for fp32 and bf16."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def update(self, overflow: bool) -> None:
        """Nothing changes."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to continue from."""


class DynamicLossScale:
    """Halved after `hysteresis` overflows, doubled after `window` steps without one.

    As in Megatron-LM the tolerance is not refilled when the scale falls, only when it grows:
    once used up, every further overflow halves the scale.
    """

    def __init__(
        self,
        initial: float = 2.0**32,
        lowest: float = 1.0,
        window: int = 1000,
        hysteresis: int = 2,
    ) -> None:
        self.scale = initial
        self._lowest, self._window, self._hysteresis = lowest, window, hysteresis
        self._clean_steps = 0
        self._tolerance = hysteresis

    def update(self, overflow: bool) -> None:
        """Tell it whether the step's gradients overflowed."""
        if overflow:
            self._clean_steps = 0
            self._tolerance -= 1
            if self._tolerance <= 0:
                self.scale = max(self.scale / 2, self._lowest)
            return
        self._clean_steps += 1
        if self._clean_steps == self._window:
            self._clean_steps = 0
            self._tolerance = self._hysteresis
            self.scale *= 2

    def state_dict(self) -> dict[str, Any]:
        """The scale and both counters."""
        return {
            "scale": self.scale,
            "clean_steps": self._clean_steps,
            "tolerance": self._tolerance,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`; an empty one, of a constant scale, changes nothing."""
        if not state:
            return
        self.scale = state["scale"]
        self._clean_steps = state["clean_steps"]
        self._tolerance = state["tolerance"]
