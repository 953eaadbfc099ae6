"""The ranks of a run: who we are, how many we are, and the process group each kind of traffic uses."""

from __future__ import annotations

import hashlib
import platform
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from nugnn.comm.clock import CommClock
from nugnn.comm.direct_sums import DirectSums, connect_directly
from nugnn.comm.gloo_threads import let_gloo_wait_its_turn
from nugnn.comm.hosts import HostGroups, host_grid, host_name, make_host_groups, numbered
from nugnn.comm.nccl_settings import exchange_through_own_buffers
from nugnn.comm.pulse import Pulse

_CPU = torch.device("cpu")


class Recording(Protocol):
    """What has exchanges of the process groups in CUDA graphs."""

    def forget(self) -> None:
        """Give the graphs up."""
        ...


_recordings: weakref.WeakSet[Any] = weakref.WeakSet()


def keeps_exchanges(recording: Recording) -> None:
    """``recording`` forgets when the ranks are left: NCCL does not end a group that is in a CUDA graph still."""
    _recordings.add(recording)


@dataclass(frozen=True, eq=False)
class Ranks:
    """Process groups of a run, one for each kind of traffic so that their orders cannot interfere.

    Args:
        rank: This process, in ``[0, world_size)``.
        world_size: P, the number of ranks (= parts).
        halo: Group of halo exchanges; None when P = 1. Samples have none: sums that begin in backward go through it.
        control: Group of gradient sums, metrics and decisions; None when P = 1.
        device: Where this rank computes.
        carries_cuda: Whether the groups take CUDA tensors (NCCL); they travel through the host's memory otherwise.
        reads_peers: Whether all ranks' GPUs are in one host and read each other's memory directly (NVLink, mostly).
        is_uniform: Whether all ranks compute on the same type of device; the same answer everywhere. Where they do not,
            every rank has to exchange what the others do, so that none may take a shorter way of its own.
        hosts: Number of each rank's host, see `nugnn.comm.hosts`; all on one when empty.
        timeout_seconds: Of groups that are made later; torch's own when None.
        host_groups: See `groups_by_host`; None until they are asked for.
        direct: The way of sums of few values in the host's memory; as all others where None.
        clock: Where communication time is added up.
        pulse: Where this rank notes its progress and what it waits for.
    """

    rank: int = 0
    world_size: int = 1
    halo: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    device: torch.device = _CPU
    carries_cuda: bool = False
    is_uniform: bool = True
    reads_peers: bool = False
    hosts: tuple[int, ...] = ()
    timeout_seconds: float | None = None
    host_groups: HostGroups | None = None
    direct: DirectSums | None = None
    clock: CommClock = field(default_factory=CommClock)
    pulse: Pulse = field(default_factory=Pulse)

    @property
    def is_split(self) -> bool:
        return self.world_size > 1

    def synchronize(self) -> None:
        """Wait until this rank's GPU has nothing left to do; nothing on a CPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def on_wire(self, x: Tensor) -> Tensor:
        """``x`` where the process groups take it: itself, or a copy in the host's memory."""
        return x if self.carries_cuda or x.device.type == "cpu" else x.cpu()

    def _on_the_clock(self, x: Tensor, label: str) -> AbstractContextManager[None]:
        """Around a collective of ``x``: it takes time from computing, unless a GPU computes on beside it."""
        return self.clock.measure("sync", x.device, label) if x.device.type == self.device.type else nullcontext()

    def sum_(self, x: Tensor) -> Tensor:
        """All-reduce ``x`` by sum, in place."""
        if self.is_split:
            with self._on_the_clock(x, "a sum over all workers"):
                wire = self.on_wire(x)
                with self.pulse.waiting("a sum over all workers"):
                    if self.direct is not None and self.direct.takes(wire):
                        self.direct.sum_(wire)
                    else:
                        dist.all_reduce(wire, group=self.control)
                _bring_back(x, wire)
        return x

    def bytes_of_sum(self, x: Tensor, *, aside: bool = False) -> int:
        """What this rank sends in `sum_` of ``x``, or in `begin_sum`: to each other rank directly, or as in a ring.

        A process group does not say which way it takes; a ring sends as little as any.
        """
        num_bytes = x.numel() * x.element_size()
        if not aside and self.direct is not None and self.direct.takes(x):
            return (self.world_size - 1) * num_bytes
        return 2 * (self.world_size - 1) * num_bytes // self.world_size

    @property
    def sums_aside(self) -> bool:
        """Whether `begin_sum` is to be had: the same answer everywhere."""
        return self.halo is not None and self.is_uniform and (self.carries_cuda or self.device.type == "cpu")

    def begin_sum(self, x: Tensor) -> Callable[[], None]:
        """Begin to all-reduce ``x`` by sum, in place, in the group ``halo``.

        Returns:
            What waits until it is done; ``x`` belongs to the sum until then.
        """
        assert self.halo is not None
        options = dist.AllreduceOptions()  # a sum; `dist.all_reduce` is this and half as much time again
        options.asyncOp = True
        work = self.halo.allreduce([x], options)

        def wait() -> None:
            with self.pulse.waiting("a sum over all workers"):
                work.wait()

        return wait

    def max_(self, x: Tensor) -> Tensor:
        """All-reduce ``x`` by maximum, in place."""
        if self.is_split:
            with self._on_the_clock(x, "a maximum over all workers"):
                wire = self.on_wire(x)
                with self.pulse.waiting("a maximum over all workers"):
                    dist.all_reduce(wire, op=dist.ReduceOp.MAX, group=self.control)
                _bring_back(x, wire)
        return x

    def broadcast_(self, x: Tensor, source: int = 0) -> Tensor:
        """Overwrite ``x`` with the values of rank ``source``."""
        if self.is_split:
            with self._on_the_clock(x, f"a broadcast from worker {source}"):
                wire = self.on_wire(x)
                with self.pulse.waiting(f"a broadcast from worker {source}"):
                    dist.broadcast(wire, group_src=source, group=self.control)
                _bring_back(x, wire)
        return x

    def gather_rows(self, x: Tensor) -> list[Tensor]:
        """Every rank's ``x (n_r, ...)``, on every rank, in rank order; the ``n_r`` may differ."""
        if not self.is_split:
            return [x]
        counts = torch.zeros(self.world_size, dtype=torch.int64)
        counts[self.rank] = len(x)
        self.sum_(counts)
        width = x[:1].numel() if len(x) else max(1, x.new_empty((1, *x.shape[1:])).numel())
        longest = int(counts.max())
        padded = self.on_wire(x).new_zeros((longest, *x.shape[1:]))
        padded[: len(x)] = x
        received = [torch.empty_like(padded) for _ in range(self.world_size)]
        if longest * width:
            what = "a gathering of rows from all workers"
            with self._on_the_clock(x, what), self.pulse.waiting(what):
                dist.all_gather(
                    [r.view(torch.uint8) if r.dtype is torch.bool else r for r in received],
                    padded.view(torch.uint8) if padded.dtype is torch.bool else padded,
                    group=self.control,
                )
        return [r[:n].to(x.device) for r, n in zip(received, counts.tolist(), strict=True)]


def stacked(ranks: Ranks, x: Tensor) -> Tensor:
    """``(P, ...)``: every rank's ``x``, of one shape and type on all, by rank; a collective call, one sum."""
    table = x.new_zeros((ranks.world_size, *x.shape))
    table[ranks.rank] = x
    return ranks.sum_(table)


def gather_texts(ranks: Ranks, text: str) -> list[str]:
    """Every rank's ``text`` on every rank, in rank order; a collective call."""
    rows = ranks.gather_rows(torch.tensor(list(text.encode()), dtype=torch.uint8))
    return [bytes(row.tolist()).decode() for row in rows]


def _bring_back(x: Tensor, wire: Tensor) -> None:
    if wire is not x:
        x.copy_(wire)


def join_ranks(timeout_seconds: float = 600.0, pulse: Pulse | None = None, device: torch.device = _CPU) -> Ranks:
    """The ranks of the initialised default process group, or a single rank when there is none.

    Tensors on GPUs travel through NCCL when every rank has a GPU of its own, through gloo and the host's memory when a
    rank computes on the CPU or two share a GPU.

    Args:
        timeout_seconds: How long a collective may wait for its peers.
        pulse: Where this rank notes its progress; nobody sees it when None.
        device: Where this rank computes.
    """
    pulse = pulse or Pulse()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return Ranks(device=device, pulse=pulse)
    timeout = timedelta(seconds=timeout_seconds)
    with pulse.waiting("the start of all workers"):
        known = _with_the_host()
        numbers = _device_numbers(device, known)
        carries_cuda = 0 not in numbers and len(set(numbers)) == len(numbers) and dist.is_nccl_available()
        is_uniform = len({number == 0 for number in numbers}) == 1
        backend = "cpu:gloo,cuda:nccl" if carries_cuda else "gloo"
        if carries_cuda:
            exchange_through_own_buffers()
        first = _first_on_the_gpu(timeout) if carries_cuda else None
        halo = dist.new_group(timeout=timeout, backend=backend, pg_options=first)
        control = dist.new_group(timeout=timeout, backend=backend)
        reads_peers = carries_cuda and _all_read_each_other(device, known)
        hosts = numbered(_of_all_ranks(number_of(host_name()), known))
        rank, size, direct = dist.get_rank(), dist.get_world_size(), None
        if not carries_cuda and len(set(hosts)) == 1:
            direct = connect_directly(rank, size, timeout_seconds, control)
    let_gloo_wait_its_turn()
    return Ranks(
        rank, size, halo, control, device,
        carries_cuda=carries_cuda, is_uniform=is_uniform, reads_peers=reads_peers, hosts=hosts,
        timeout_seconds=timeout_seconds, direct=direct, pulse=pulse,
    )  # fmt: skip


def groups_by_host(ranks: Ranks) -> HostGroups | None:
    """Groups of ``ranks`` inside this host and across hosts, made by the first call; a collective call.

    Returns:
        None where ranks do not lie on at least two hosts, with the same number of at least two on each.
    """
    grid = host_grid(ranks.hosts)
    if ranks.host_groups is None and grid is not None:
        timeout = None if ranks.timeout_seconds is None else timedelta(seconds=ranks.timeout_seconds)
        backend = "cpu:gloo,cuda:nccl" if ranks.carries_cuda else "gloo"

        def new_group(members: Sequence[int]) -> Any:
            return dist.new_group(list(members), timeout=timeout, backend=backend)

        with ranks.pulse.waiting("the groups of hosts"):
            object.__setattr__(ranks, "host_groups", make_host_groups(grid, ranks.rank, new_group))
        let_gloo_wait_its_turn()
    return ranks.host_groups


def _first_on_the_gpu(timeout: timedelta) -> Any:
    """Options of NCCL for exchanges that run beside kernels of ours: theirs start before blocks that are still to come.

    A sum over edges has some thousands of blocks; an exchange begun beside it would wait for most of them.
    """
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    options._timeout = timeout
    return options


def leave_ranks(ranks: Ranks) -> None:
    """End the threads of the process groups while the interpreter still stands; ``ranks`` is of no use afterwards.

    A thread of gloo drops the tensors of a collective after the collective has returned. Where the interpreter ends in
    between, the thread is stopped in the middle of C++ code, and the process dies with SIGABRT although its work is
    done. A group's threads end with the last reference to it, so ``ranks``, which a script may hold in a global, gives
    its own up.
    """
    for recording in list(_recordings):
        recording.forget()
    if ranks.direct is not None:
        ranks.direct.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    for group in ("halo", "control", "host_groups", "direct"):
        object.__setattr__(ranks, group, None)


def _with_the_host() -> Any:
    """A group that carries tensors of the host's memory: the default one unless it is of NCCL alone; a collective call.

    Returns:
        None for the default group.
    """
    return None if "cpu:" in dist.get_backend_config() else dist.new_group(backend="gloo")


def _device_numbers(device: torch.device, group: Any = None) -> list[int]:
    """Of each rank: 0 for the CPU, another number for each GPU of all hosts; a collective call."""
    number = 0
    if device.type == "cuda":
        number = number_of(f"{platform.node()} {torch.cuda.get_device_properties(device).uuid}")
    return _of_all_ranks(number, group)


def _all_read_each_other(device: torch.device, group: Any = None) -> bool:
    """Whether one host has all the GPUs, and each reads the memory of the others; a collective call."""
    own = torch.cuda.current_device() if device.index is None else device.index
    others = set(range(torch.cuda.device_count())) - {own}
    sees_all = len(others) + 1 >= dist.get_world_size()
    reads_all = sees_all and all(torch.cuda.can_device_access_peer(own, other) for other in others)
    return len(set(_of_all_ranks(number_of(platform.node()) if reads_all else dist.get_rank(), group))) == 1


def number_of(name: str) -> int:
    """Positive, above all ranks, and another one for another name."""
    return 2**32 + int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")


def _of_all_ranks(number: int, group: Any = None) -> list[int]:
    numbers = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(numbers, torch.tensor([number]), group=group)
    return [int(n) for n in numbers]
