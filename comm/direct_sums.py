"""Sums of few values over the ranks of a host, from the thread that needs them to its peers' and back.

gloo hands a sum to a thread of its own, and that one to another which reads connections: six times somebody is woken
for a sum on two ranks. Where the reading thread wakes on the core of the thread that holds a connection's lock, it asks
for the lock until its slice of time ends, some 3 ms (``Pair::handleEvents`` tries, and does not wait). Batch norm has
some dozens of such sums in a step. Here every rank sends its values to every other one and adds up what comes, by rank,
so that all have the same bits; nobody but the waiting thread is woken.
"""

from __future__ import annotations

import os
import secrets
import select
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

MOST_BYTES = 64 << 10
"""That a rank sends for a sum; with more, gloo's ring sends less."""
_TYPES = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})
_LONGEST_POLL = 2**31 - 1
"""Milliseconds."""
_CONNECT_SECONDS = 10.0
_HELLO = struct.Struct("!qi")
"""What who connects says first: the number that the listening rank gave to its peers, and its own rank."""
_HEAD = struct.Struct("=4si")
"""What comes before values: of which type they are, as numpy has it, and how many bytes. Without it ranks that are out
of step would add up parts of different sums, and nobody would notice."""


@dataclass(eq=False)
class DirectSums:
    """Connections to all other ranks.

    A sum that was left in the middle, by an error or by Ctrl-C, is the last: what its peers send for it would be taken
    for a part of the next one. Nor do two threads have sums at once, which would come in another order on each rank.

    Args:
        rank: This process.
        peers: A connection with each other rank, that does not block.
        timeout_seconds: How long a sum may wait for its peers.
    """

    rank: int
    peers: Mapping[int, socket.socket]
    timeout_seconds: float
    _between: threading.Lock = field(default_factory=threading.Lock, repr=False)
    """Free between sums."""

    def takes(self, x: Tensor) -> bool:
        """Whether sums of such tensors go this way: the same answer on every rank."""
        is_dense = x.dtype in _TYPES and x.layout is torch.strided
        return is_dense and is_small(x.numel() * x.element_size(), len(self.peers) + 1)

    def sum_(self, x: Tensor) -> None:
        """Add up ``x``, on the CPU and of a kind that `takes` takes, over all ranks, in place.

        Raises:
            ConnectionError: A peer has gone.
            RuntimeError: A peer adds up values of another type or number; an earlier sum was left in the middle, or
                another thread is in one.
            TimeoutError: A peer did not come in time.
        """
        with torch._C.DisableTorchFunction():
            values = x.detach().numpy()
        own = np.ascontiguousarray(values)
        if not self._between.acquire(blocking=False):
            raise RuntimeError(
                "a sum over all workers cannot begin: an earlier one was left in the middle by an error or by Ctrl-C, "
                "or another thread is in one"
            )
        received = self._exchange(_HEAD.pack(own.dtype.str.encode(), own.nbytes), own.data.cast("B"))
        self._between.release()
        values[...] = _added(
            own if rank == self.rank else np.ndarray(own.shape, own.dtype, received[rank], _HEAD.size)
            for rank in range(len(self.peers) + 1)
        )

    def close(self) -> None:
        """End the connections, also where a process that was forked from this one has them still."""
        for connection in self.peers.values():
            with suppress(OSError):  # the peer was faster
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _exchange(self, head: bytes, values: memoryview) -> dict[int, bytearray]:
        """Send ``head`` and ``values`` to every peer; as many bytes of each, which begin in the same way."""
        own = memoryview(b"".join((head, values)))
        received = {peer: bytearray(len(own)) for peer in self.peers}
        unread = {peer: memoryview(buffer) for peer, buffer in received.items()}
        unsent = dict.fromkeys(self.peers, own)
        deadline = None
        while True:
            for peer, left in list(unsent.items()):
                _keep(unsent, peer, _sent(self.peers[peer], left, peer))
            for peer, place in list(unread.items()):
                _keep(unread, peer, place[_read(self.peers[peer], place, peer) :])
                if len(unread.get(peer, b"")) <= len(values) and not received[peer].startswith(head):
                    raise self._out_of_step(head, peer, received[peer])
            if not unread and not unsent:
                return received
            now = time.monotonic()
            deadline = deadline or now + self.timeout_seconds
            waiting = select.poll()
            for peer in unread.keys() | unsent.keys():
                events = (select.POLLIN if peer in unread else 0) | (select.POLLOUT if peer in unsent else 0)
                waiting.register(self.peers[peer], events)
            if not waiting.poll(min(1000 * max(deadline - now, 0.0), _LONGEST_POLL)):
                late = ", ".join(str(peer) for peer in sorted(unread.keys() | unsent.keys()))
                raise TimeoutError(f"a sum over all workers waited {self.timeout_seconds:g} s for worker {late}")

    def _out_of_step(self, head: bytes, peer: int, received: bytearray) -> RuntimeError:
        ours, theirs = (_in_words(*_HEAD.unpack_from(each)) for each in (head, received))
        return RuntimeError(
            f"workers are out of step: in a sum over all workers worker {self.rank} has {ours}, worker {peer} "
            f"{theirs}. Every worker has to make the same calls in the same order"
        )


@np.errstate(all="ignore")  # infinities are not the business of a sum
def _added(parts: Iterator[np.ndarray]) -> np.ndarray:
    total = next(parts) + next(parts)
    for part in parts:
        total += part
    return total


def _keep(left: dict[int, memoryview], peer: int, rest: memoryview) -> None:
    if rest:
        left[peer] = rest
    else:
        del left[peer]


def _in_words(type_name: bytes, num_bytes: int) -> str:
    dtype = np.dtype(type_name.rstrip(b"\0").decode())
    return f"{num_bytes // dtype.itemsize} values of {dtype}"


def is_small(num_bytes: float, num_ranks: int) -> bool:
    """Whether a sum of so many bytes is one of few values."""
    return 0 < num_bytes * (num_ranks - 1) <= MOST_BYTES


def _sent(connection: socket.socket, left: memoryview, peer: int) -> memoryview:
    """What is still left once the connection has taken what it can."""
    try:
        return left[connection.send(left) :]
    except BlockingIOError:
        return left
    except OSError as error:
        raise _gone(peer) from error


def _read(connection: socket.socket, place: memoryview, peer: int) -> int:
    try:
        count = connection.recv_into(place)
    except BlockingIOError:
        return 0
    except OSError as error:
        raise _gone(peer) from error
    if count == 0:
        raise _gone(peer)
    return count


def _gone(peer: int) -> ConnectionError:
    return ConnectionError(f"connection closed by worker {peer} in the middle of a sum over all workers")


# -- connections -------------------------------------------------------------------------------------------------------


def connect_directly(
    rank: int, num_ranks: int, timeout_seconds: float, group: dist.ProcessGroup | None = None
) -> DirectSums | None:
    """Connections between all ranks of a process group, which are on one host; a collective call.

    Args:
        rank: This process, in the group.
        num_ranks: Of the group.
        timeout_seconds: How long a sum may wait for its peers.
        group: Through which they find each other; the default one when None.

    Returns:
        None on every rank where one could not reach another.
    """
    peers: dict[int, socket.socket] = {}
    with socket.socket() as listener:
        problem = False
        try:
            listener.bind((_own_address(), 0))
            listener.listen(socket.SOMAXCONN)
        except OSError:
            problem = True
        address, port = listener.getsockname() if not problem else ("0.0.0.0", 0)
        number = secrets.randbits(62)
        (as_number,) = struct.unpack("!I", socket.inet_aton(address))
        known = [torch.zeros(3, dtype=torch.int64) for _ in range(num_ranks)]
        dist.all_gather(known, torch.tensor([as_number, port, number]), group=group)
        try:
            if not problem and all(int(each[1]) for each in known):
                _connect(rank, [tuple(each.tolist()) for each in known[:rank]], peers)
        except OSError:
            problem = True
        if not (problem := _any_rank(problem or len(peers) < rank, group)):  # else nobody waits for who does not come
            _accept(listener, number, set(range(rank + 1, num_ranks)), peers)
            problem = _any_rank(len(peers) < num_ranks - 1, group)
    if problem:
        for connection in peers.values():
            connection.close()
        return None
    for connection in peers.values():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
    return DirectSums(rank, dict(sorted(peers.items())), timeout_seconds)


def _any_rank(problem: bool, group: dist.ProcessGroup | None) -> bool:
    number = torch.tensor([float(problem)])
    dist.all_reduce(number, group=group)
    return bool(number)


def _connect(rank: int, known: list[tuple[int, ...]], peers: dict[int, socket.socket]) -> None:
    """To ranks before this one; each by its address, port and number."""
    for peer, (address, port, number) in enumerate(known):
        host = socket.inet_ntoa(struct.pack("!I", address))
        peers[peer] = socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
        peers[peer].sendall(_HELLO.pack(number, rank))


def _accept(listener: socket.socket, number: int, missing: set[int], peers: dict[int, socket.socket]) -> None:
    """From ranks after this one; who does not know the number is sent away, and nobody waits for who says nothing."""
    deadline = time.monotonic() + _CONNECT_SECONDS
    listener.setblocking(False)
    with selectors.DefaultSelector() as waiting:
        waiting.register(listener, selectors.EVENT_READ)
        while missing and (left := deadline - time.monotonic()) > 0:
            for key, _ in waiting.select(left):
                found = key.fileobj
                assert isinstance(found, socket.socket)
                if found is listener:
                    with suppress(OSError):  # it has gone again
                        connection, _ = listener.accept()
                        connection.setblocking(False)
                        waiting.register(connection, selectors.EVENT_READ)
                    continue
                waiting.unregister(found)
                peer = _rank_of(found, number)
                if peer in missing:
                    peers[peer] = found
                    missing.remove(peer)
                else:
                    found.close()
        for key in waiting.get_map().values():
            if isinstance(key.fileobj, socket.socket) and key.fileobj is not listener:
                key.fileobj.close()


def _rank_of(connection: socket.socket, number: int) -> int:
    """Of whoever is at the other end; -1 for a stranger."""
    try:
        said = connection.recv(_HELLO.size)
    except OSError:
        return -1
    given, rank = _HELLO.unpack(said) if len(said) == _HELLO.size else (None, -1)
    return rank if given == number else -1


def _own_address() -> str:
    """Where peers of this host find this rank: on the interface that gloo has, else on the loopback interface."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if not interface or interface.startswith("lo") or sys.platform != "linux":
        return "127.0.0.1"
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        request = struct.pack("256s", interface.encode()[:15])
        answer = fcntl.ioctl(asking.fileno(), 0x8915, request)  # SIOCGIFADDR
    return socket.inet_ntoa(answer[20:24])
