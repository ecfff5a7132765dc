"""Gloo (CPU): one process group per channel.

Gloo pairs sends and receives of a group in order, so with one group per channel no transfer
ever stands behind one of another channel. An isend is a rendezvous at every size: it is done
once the peer has posted the receive, and its transfer goes on while either side computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerobubble.runtime.transport import Post, Send
from zerobubble.schedule.lower import Channel


@dataclass(slots=True)
class _Arrival:
    work: Any
    buffer: Tensor

    def wait(self) -> Tensor:
        self.work.wait()
        return self.buffer


class GlooTransport:
    """The channels of one pipeline group whose pipeline rank r is global rank `ranks[r]`.

    Collective: every process of the default group makes it, with the same channels.
    """

    def __init__(
        self, channels: Sequence[Channel], ranks: Sequence[int], timeout: timedelta
    ) -> None:
        me = dist.get_rank()
        self._peers: dict[Channel, tuple[dist.ProcessGroup, int]] = {}
        for channel in channels:
            pair = sorted((ranks[channel.source], ranks[channel.destination]))
            group = dist.new_group(pair, timeout=timeout, backend="gloo")
            if me in pair:
                self._peers[channel] = (group, 1 - pair.index(me))

    def sender(self, channel: Channel) -> Send:
        """The sends of `channel`, whose source is here."""
        group, peer = self._peers[channel]
        return lambda tensor: group.send([tensor], peer, 0)

    def receiver(self, channel: Channel) -> Post:
        """The receives of `channel`; each into a buffer of its own, which its op may keep."""
        group, peer = self._peers[channel]

        def post(shape: Sequence[int], dtype: torch.dtype) -> _Arrival:
            buffer = torch.empty(shape, dtype=dtype)
            return _Arrival(group.recv([buffer], peer, 0), buffer)

        return post

    def freer(self, _channel: Channel) -> Callable[[], None] | None:
        """Nothing is reused."""
        return None

    def fit(self, _slots: Mapping[Channel, int], _nbytes: int) -> None:
        """Gloo keeps whatever is in flight."""
