"""Which transport carries a pipeline's channels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from zerobubble.errors import UserError
from zerobubble.runtime.transport import Transport
from zerobubble.runtime.transport.gloo import GlooTransport
from zerobubble.runtime.transport.shared_memory import SharedMemoryTransport
from zerobubble.schedule.lower import Channel

TransportName = Literal["auto", "gloo", "shared-memory"]


def open_transport(
    name: TransportName, channels: Sequence[Channel], ranks: Sequence[int], timeout: timedelta
) -> Transport:
    """The transport of that name; "auto": shared memory where all ranks can, else Gloo.

    Collective over the default group. Raises UserError for shared memory across hosts.
    """
    if name == "gloo":
        return GlooTransport(channels, ranks, timeout)
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, _host())
    places = {hosts[rank] for rank in ranks}
    if len(places) == 1 and None not in places:
        return SharedMemoryTransport(channels, ranks, timeout)
    if name == "shared-memory":
        raise UserError(
            f"shared memory needs all ranks on one host, these are on {len(places)}; use gloo"
        )
    return GlooTransport(channels, ranks, timeout)


def _host() -> tuple[str, str] | None:
    """The running kernel and process namespace, so that /proc is the same; None: not Linux."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot, os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
