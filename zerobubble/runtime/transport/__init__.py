"""Transports carry tensors over channels: one file each, all with the same two calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from zerobubble.schedule.lower import Channel


class Transfer(Protocol):
    """A send or a receive under way. Its tensor must live until `wait` has returned."""

    def wait(self) -> object:
        """Return once the transfer is done; raise if the peer is gone."""


class Transport(Protocol):
    """One in-order queue of tensors per channel."""

    def sender(self, channel: Channel) -> Callable[[Tensor], Transfer]:
        """A call that issues a send on `channel` and returns at once."""

    def receiver(self, channel: Channel) -> Callable[[Tensor], Transfer]:
        """A call that posts a receive on `channel` into a tensor and returns at once."""
