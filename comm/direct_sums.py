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
import socket
import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True, eq=False)
class DirectSums:
    """Connections to all other ranks.

    Args:
        rank: This process.
        peers: A connection with each other rank, that does not block.
        timeout_seconds: How long a sum may wait for its peers.
    """

    rank: int
    peers: Mapping[int, socket.socket]
    timeout_seconds: float

    def takes(self, x: Tensor) -> bool:
        """Whether sums of such tensors go this way: the same answer on every rank."""
        return x.dtype in _TYPES and is_small(x.numel() * x.element_size(), len(self.peers) + 1)

    def sum_(self, x: Tensor) -> None:
        """Add up ``x``, on the CPU and of a kind that `takes` takes, over all ranks, in place.

        Raises:
            ConnectionError: A peer has gone.
            TimeoutError: A peer did not come in time.
        """
        with torch._C.DisableTorchFunction():
            values = x.detach().numpy()
        own = np.ascontiguousarray(values)
        received = self._exchange(own.data.cast("B"))
        parts = [
            own if rank == self.rank else np.frombuffer(received[rank], own.dtype).reshape(own.shape)
            for rank in range(len(self.peers) + 1)
        ]
        total = parts[0] + parts[1]
        for part in parts[2:]:
            total += part
        values[...] = total

    def close(self) -> None:
        """End the connections."""
        for connection in self.peers.values():
            connection.close()

    def _exchange(self, own: memoryview) -> dict[int, bytearray]:
        """Send ``own`` to every peer; as many bytes of each."""
        received = {peer: bytearray(len(own)) for peer in self.peers}
        unread = {peer: memoryview(buffer) for peer, buffer in received.items()}
        unsent = {peer: own for peer in self.peers}
        deadline = None
        while True:
            for peer, left in list(unsent.items()):
                _keep(unsent, peer, _sent(self.peers[peer], left))
            for peer, place in list(unread.items()):
                _keep(unread, peer, place[_read(self.peers[peer], place, peer) :])
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


def _keep(left: dict[int, memoryview], peer: int, rest: memoryview) -> None:
    if rest:
        left[peer] = rest
    else:
        del left[peer]


def is_small(num_bytes: float, num_ranks: int) -> bool:
    """Whether a sum of so many bytes is one of few values."""
    return 0 < num_bytes * (num_ranks - 1) <= MOST_BYTES


def _sent(connection: socket.socket, left: memoryview) -> memoryview:
    """What is still left once the connection has taken what it can."""
    try:
        return left[connection.send(left) :]
    except BlockingIOError:
        return left


def _read(connection: socket.socket, place: memoryview, peer: int) -> int:
    try:
        count = connection.recv_into(place)
    except BlockingIOError:
        return 0
    if count == 0:
        raise ConnectionError(f"connection closed by worker {peer} in the middle of a sum over all workers")
    return count


# -- connections -------------------------------------------------------------------------------------------------------


def connect_directly(rank: int, num_ranks: int, timeout_seconds: float) -> DirectSums | None:
    """Connections between all ranks of the default process group, which are on one host; a collective call.

    Returns:
        None on every rank where one could not reach another.
    """
    peers: dict[int, socket.socket] = {}
    with socket.socket() as listener:
        problem = False
        try:
            listener.bind((_own_address(), 0))
            listener.listen(num_ranks)
        except OSError:
            problem = True
        address, port = listener.getsockname() if not problem else ("0.0.0.0", 0)
        number = secrets.randbits(62)
        (as_number,) = struct.unpack("!I", socket.inet_aton(address))
        known = [torch.zeros(3, dtype=torch.int64) for _ in range(num_ranks)]
        dist.all_gather(known, torch.tensor([as_number, port, number]))
        try:
            if not problem and all(int(each[1]) for each in known):
                _connect(rank, [tuple(each.tolist()) for each in known[:rank]], peers)
                _accept(listener, number, set(range(rank + 1, num_ranks)), peers)
        except (OSError, struct.error):
            problem = True
    lacking = torch.tensor([float(problem or len(peers) < num_ranks - 1)])
    dist.all_reduce(lacking)
    if float(lacking):
        for connection in peers.values():
            connection.close()
        return None
    for connection in peers.values():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
    return DirectSums(rank, dict(sorted(peers.items())), timeout_seconds)


def _connect(rank: int, known: list[tuple[int, ...]], peers: dict[int, socket.socket]) -> None:
    """To ranks before this one; each by its address, port and number."""
    for peer, (address, port, number) in enumerate(known):
        host = socket.inet_ntoa(struct.pack("!I", address))
        peers[peer] = socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
        peers[peer].sendall(_HELLO.pack(number, rank))


def _accept(listener: socket.socket, number: int, missing: set[int], peers: dict[int, socket.socket]) -> None:
    """From ranks after this one; who does not know the number is sent away."""
    listener.settimeout(_CONNECT_SECONDS)
    deadline = time.monotonic() + _CONNECT_SECONDS
    while missing and time.monotonic() < deadline:
        connection, _ = listener.accept()
        connection.settimeout(_CONNECT_SECONDS)
        said = connection.recv(_HELLO.size, socket.MSG_WAITALL)
        given, peer = _HELLO.unpack(said) if len(said) == _HELLO.size else (None, -1)
        if given == number and peer in missing:
            peers[peer] = connection
            missing.remove(peer)
        else:
            connection.close()


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
