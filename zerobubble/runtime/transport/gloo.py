"""Gloo (CPU): one process group per channel.

Gloo pairs sends and receives of a group in order, so with one group per channel no transfer
ever stands behind one of another channel. An isend is a rendezvous at every size: it is done
once the peer has posted the receive, and its transfer goes on while either side computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from zerobubble.runtime.transport import Transfer
from zerobubble.schedule.lower import Channel


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

    def sender(self, channel: Channel) -> Callable[[Tensor], Transfer]:
        """A call that issues a send on `channel` and returns at once."""
        group, peer = self._peers[channel]
        return lambda tensor: group.send([tensor], peer, 0)

    def receiver(self, channel: Channel) -> Callable[[Tensor], Transfer]:
        """A call that posts a receive on `channel` into a tensor and returns at once."""
        group, peer = self._peers[channel]
        return lambda tensor: group.recv([tensor], peer, 0)
