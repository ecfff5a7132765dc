"""Shared memory (CPU ranks of one host): a ring of slots and two semaphores per channel.

One copy per message: the sender writes into the next slot, and the receiver's tensor is that
slot, until its stage is done with the microbatch and hands it back. With as many slots as
`ring_slots` finds for the schedule, a send never waits for one.

Nothing has a name in any file system: the memory is a memfd that the peer opens through /proc,
the semaphores lie in it. What a killed process leaves behind, the kernel frees.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerobubble.errors import UserError
from zerobubble.runtime.transport import Post, Send
from zerobubble.schedule.lower import Channel

# The layout of a channel's control page: two semaphores, then what describes the ring.
_FILLED, _FREE, _RING = 0, 64, 128
_PAGE = 4096
_ALIGNMENT = 64
_LOOK_AFTER_S = 0.5  # how often a waiting rank looks whether its peer still lives


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None, use_errno=True)  # its calls let other threads run


class _Semaphore:
    """A process-shared POSIX semaphore at an address."""

    def __init__(self, address: int) -> None:
        self._at = ctypes.c_void_p(address)

    def create(self, value: int) -> None:
        if _libc.sem_init(self._at, 1, value):
            raise OSError(ctypes.get_errno(), "sem_init")

    def post(self) -> None:
        _libc.sem_post(self._at)

    def take(self) -> bool:
        """Whether it could be taken at once."""
        return bool(_libc.sem_trywait(self._at) == 0)

    def wait(self, seconds: float) -> bool:
        """Whether it was taken within `seconds`."""
        end = time.time() + seconds
        until = _Timespec(int(end), int(end % 1 * 1e9))
        return bool(_libc.sem_timedwait(self._at, ctypes.byref(until)) == 0)


def _alive(process: int) -> bool:
    """Whether it runs; one that was killed and not yet waited for does not."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] not in (b"Z", b"X")
    except OSError:
        return False


class _Ring:
    """One channel as both ends see it: a control page and, growing as needed, the slots."""

    def __init__(self, control: mmap.mmap, peer: tuple[int, int], timeout: float) -> None:
        base = ctypes.addressof(ctypes.c_char.from_buffer(control))
        self.filled, self.free = _Semaphore(base + _FILLED), _Semaphore(base + _FREE)
        # Of the ring in use: its number, file descriptor at the sender, slots, bytes of each.
        self._described = (ctypes.c_long * 4).from_buffer(control, _RING)
        self._count = 0  # tensors so far
        self._descriptor = -1
        self._control = control
        self._peer_rank, self._peer_process = peer
        self._timeout = timeout
        self._number = 0
        self._slots = self._slot_bytes = 0
        self._memory: mmap.mmap | None = None
        self._tensors: dict[tuple[int, tuple[int, ...], torch.dtype], Tensor] = {}

    def acquire(self, semaphore: _Semaphore, what: str) -> None:
        """Take a semaphore that the peer posts. Raises where it is gone or too slow."""
        if semaphore.take():
            return
        end = time.monotonic() + self._timeout
        while not semaphore.wait(_LOOK_AFTER_S):
            if not _alive(self._peer_process):
                raise ConnectionError(f"rank {self._peer_rank} is gone")
            if time.monotonic() > end:
                raise TimeoutError(
                    f"no {what} from rank {self._peer_rank} in {self._timeout:.0f} s"
                )

    def slot(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The tensor over the next slot: the same object each time round."""
        place = self._count % self._slots
        self._count += 1
        key = place, tuple(shape), dtype
        found = self._tensors.get(key)
        if found is None:
            assert self._memory is not None
            offset, elements = place * self._slot_bytes, math.prod(shape)
            flat = torch.frombuffer(self._memory, dtype=dtype, count=elements, offset=offset)
            found = self._tensors[key] = flat.view(tuple(shape))
        return found

    def make(self, slots: int, slot_bytes: int) -> None:
        """At the sender, between two steps: a ring of new memory, once the old one is free."""
        for _ in range(self._slots):
            self.acquire(self.free, "slot")
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._number += 1
        self._slots, self._slot_bytes = slots, slot_bytes
        # It stays open: the receiver opens it by its number when it comes to the next tensor.
        self._descriptor = os.memfd_create("zerobubble")
        os.ftruncate(self._descriptor, slots * slot_bytes)
        self._memory = mmap.mmap(self._descriptor, slots * slot_bytes)
        self._tensors = {}
        self._described[:] = [self._number, self._descriptor, slots, slot_bytes]
        for _ in range(slots):
            self.free.post()

    def follow(self) -> None:
        """At the receiver: open the sender's ring where it is a new one."""
        if self._described[0] == self._number:
            return
        number, descriptor, slots, slot_bytes = self._described
        self._number, self._slots, self._slot_bytes = number, slots, slot_bytes
        opened = os.open(f"/proc/{self._peer_process}/fd/{descriptor}", os.O_RDWR)
        self._memory = mmap.mmap(opened, slots * slot_bytes)
        self._tensors = {}
        os.close(opened)

    def holds(self, slots: int, slot_bytes: int) -> bool:
        """Whether that many slots of that size are there."""
        return slots <= self._slots and slot_bytes <= self._slot_bytes

    def check(self, tensor: Tensor) -> None:
        """Raise unless a slot holds the tensor."""
        if tensor.nbytes > self._slot_bytes:
            raise UserError(
                f"a tensor of {tensor.nbytes} bytes for rank {self._peer_rank}, where this step's "
                f"shape takes {self._slot_bytes}; hand the stages' true shape to the step"
            )


class _Arrival:
    def __init__(self, ring: _Ring, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._ring, self._shape, self._dtype = ring, shape, dtype

    def wait(self) -> Tensor:
        ring = self._ring
        ring.acquire(ring.filled, "tensor")
        ring.follow()
        # A tensor of its own over the slot: the stage makes it the leaf of a graph.
        return ring.slot(self._shape, self._dtype).detach()


class SharedMemoryTransport:
    """The channels of one pipeline group whose pipeline rank r is global rank `ranks[r]`.

    Collective: every process of the default group makes it, with the same channels; all of
    them on one host.
    """

    def __init__(
        self, channels: Sequence[Channel], ranks: Sequence[int], timeout: timedelta
    ) -> None:
        me = ranks.index(dist.get_rank())
        made: dict[Channel, tuple[int, int]] = {}
        controls: dict[Channel, tuple[mmap.mmap, int]] = {}
        for channel in channels:
            if channel.source == me:
                descriptor = os.memfd_create("zerobubble")
                os.ftruncate(descriptor, _PAGE)
                controls[channel] = mmap.mmap(descriptor, _PAGE), descriptor
                base = ctypes.addressof(ctypes.c_char.from_buffer(controls[channel][0]))
                _Semaphore(base + _FILLED).create(0)
                _Semaphore(base + _FREE).create(0)
                made[channel] = os.getpid(), descriptor
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, (os.getpid(), made))
        processes = [everywhere[rank][0] for rank in ranks]
        self._rings: dict[Channel, _Ring] = {}
        self._sending: set[Channel] = {c for c in channels if c.source == me}
        for channel in channels:
            if me not in (channel.source, channel.destination):
                continue
            other = channel.destination if channel.source == me else channel.source
            if channel.source == me:
                control = controls[channel][0]
            else:
                process, descriptor = everywhere[ranks[channel.source]][1][channel]
                opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR)
                control = mmap.mmap(opened, _PAGE)
                os.close(opened)
            self._rings[channel] = _Ring(
                control, (other, processes[other]), timeout.total_seconds()
            )
        dist.barrier()  # everybody has opened what it needs
        for _, descriptor in controls.values():
            os.close(descriptor)

    def sender(self, channel: Channel) -> Send:
        """The sends of `channel`, whose source is here."""
        ring = self._rings[channel]

        def send(tensor: Tensor) -> None:
            ring.check(tensor)
            ring.acquire(ring.free, "slot")
            ring.slot(tensor.shape, tensor.dtype).copy_(tensor)
            ring.filled.post()

        return send

    def receiver(self, channel: Channel) -> Post:
        """The receives of `channel`; a tensor is its slot, until `freer` is called for it."""
        ring = self._rings[channel]
        return lambda shape, dtype: _Arrival(ring, shape, dtype)

    def freer(self, channel: Channel) -> Callable[[], None]:
        """Hands the oldest slot back."""
        return self._rings[channel].free.post

    def fit(self, slots: Mapping[Channel, int], nbytes: int) -> None:
        """Before a step: rings of that many slots for tensors of that many bytes."""
        slot_bytes = -(-max(1, nbytes) // _ALIGNMENT) * _ALIGNMENT
        for channel in self._sending:
            count = slots.get(channel, 0)
            if count and not self._rings[channel].holds(count, slot_bytes):
                self._rings[channel].make(count, slot_bytes)
