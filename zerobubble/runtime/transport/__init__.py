"""Transports carry tensors over channels: one file each, all with the same few calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from zerobubble.schedule.lower import Channel


class Transfer(Protocol):
    """A send under way. Its tensor must live until `wait` has returned."""

    def wait(self) -> object:
        """Return once the transfer is done; raise if the peer is gone."""


class Arrival(Protocol):
    """A posted receive."""

    def wait(self) -> Tensor:
        """The tensor, once it is there; raise if the peer is gone."""


Send = Callable[[Tensor], Transfer | None]
"""Issues a send and returns at once: None where the tensor may be given up already."""

Post = Callable[[Sequence[int], torch.dtype], Arrival]
"""Posts a receive of a tensor of that shape and type, and returns at once."""


class Transport(Protocol):
    """One in-order queue of tensors per channel."""

    def sender(self, channel: Channel) -> Send:
        """The sends of `channel`, whose source is here."""

    def receiver(self, channel: Channel) -> Post:
        """The receives of `channel`, whose destination is here."""

    def freer(self, channel: Channel) -> Callable[[], None] | None:
        """What to call when the oldest tensor received is not used any more; None: nothing."""

    def fit(self, slots: Mapping[Channel, int], nbytes: int) -> None:
        """Before a step: per channel, be ready for that many tensors of that size in flight."""
