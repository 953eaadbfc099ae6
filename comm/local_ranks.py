"""Several ranks as threads of this process, for checks on small graphs that should not wait for processes to start.

CPU only: backward of CUDA tensors runs on one thread for all ranks, where the first exchange would wait for ever.

No sockets: ranks meet in memory. A rank that makes another call than its peers, or ends while they wait, is an error on
all of them at once; a transport between processes can only time out, or end the interpreter.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from nugnn.comm.groups import Ranks
from nugnn.comm.hosts import HostGroups, host_grid, numbered

T = TypeVar("T")


class RanksDisagree(RuntimeError):  # noqa: N818 - a finding about the program
    """Ranks made different collective calls, or one ended while others waited for it."""


class _Meeting:
    """Where all ranks bring a value and get what was made of all of them.

    Args:
        num_ranks: P.
        timeout_seconds: How long a rank waits for the others.
    """

    def __init__(self, num_ranks: int, timeout_seconds: float) -> None:
        self._num_ranks, self._timeout_seconds = num_ranks, timeout_seconds
        self._changed = threading.Condition()
        self._brought: dict[int, tuple[str, Any]] = {}
        self._ended: set[int] = set()
        self._round = 0
        self._outcome: Any = None

    def meet(self, rank: int, what: str, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """``combine(values in rank order)``, computed once while all ranks wait, so it may write to their tensors.

        Raises:
            RanksDisagree: ``what`` differs between ranks, or a rank has ended.
            TimeoutError: The others did not come in time.
        """
        with self._changed:
            self._brought[rank] = (what, value)
            if len(self._brought) == self._num_ranks:
                self._outcome = self._combined(combine)
                self._brought = {}
                self._round += 1
                self._changed.notify_all()
            else:
                self._wait(rank, what)
            if isinstance(self._outcome, Exception):
                raise self._outcome
            return self._outcome

    def leave(self, rank: int) -> None:
        """Rank ``rank`` will not come again."""
        with self._changed:
            self._ended.add(rank)
            self._changed.notify_all()

    def _combined(self, combine: Callable[[list[Any]], Any]) -> Any:
        calls = [self._brought[rank][0] for rank in range(self._num_ranks)]
        if len(set(calls)) > 1:
            told = "; ".join(f"rank {rank} {call}" for rank, call in enumerate(calls))
            return RanksDisagree(
                f"ranks made different calls at the same point: {told}. Every rank has to make the same calls in the "
                "same order, so control flow must not depend on a rank's own rows."
            )
        try:
            return combine([self._brought[rank][1] for rank in range(self._num_ranks)])
        except Exception as error:
            return error

    def _wait(self, rank: int, what: str) -> None:
        begun = self._round

        def settled() -> bool:
            return self._round != begun or bool(self._ended)

        self._changed.wait_for(settled, self._timeout_seconds)
        if self._round != begun:
            return
        missing = sorted(set(range(self._num_ranks)) - self._brought.keys())
        self._brought.pop(rank)
        if self._ended:
            raise RanksDisagree(f"rank {rank} {what}, but rank {min(self._ended)} has ended and will not take part")
        raise RuntimeError(
            f"rank {rank} {what} and waited {self._timeout_seconds:g} s for rank {', '.join(map(str, missing))}"
        )


@dataclass(frozen=True, eq=False)
class _LocalHalo:
    """Stands for the process group of halo exchanges."""

    rank: int
    meeting: _Meeting

    def alltoall_base(self, out: Tensor, rows: Tensor, out_splits: Sequence[int], splits: Sequence[int]) -> _LocalHalo:
        """Send ``splits[r]`` values of ``rows`` to each rank ``r``; fills ``out``."""
        self.meeting.meet(self.rank, "exchanges halo rows", (out, rows, out_splits, splits), _deliver)
        return self

    def _allgather_base(self, out: Tensor, row: Tensor) -> _LocalHalo:
        """Fill ``out`` with every rank's ``row``."""
        what = f"gathers {row.numel()} values of {row.dtype}"
        out.copy_(self.meeting.meet(self.rank, what, row, torch.cat))
        return self

    def wait(self) -> None:
        """Nothing to do: the exchange is over when the call returns."""


def _deliver(values: list[tuple[Tensor, Tensor, Sequence[int], Sequence[int]]]) -> None:
    pieces = [rows.split(list(splits)) for _, rows, _, splits in values]
    for receiver, (out, _, out_splits, _) in enumerate(values):
        for sender, place in enumerate(out.split(list(out_splits))):
            sent = pieces[sender][receiver]
            if sent.numel() != place.numel():
                raise RanksDisagree(
                    f"rank {sender} sends {sent.numel()} bytes to rank {receiver}, which expects {place.numel()}: "
                    "they exchange tensors of different shape or type"
                )
            place.copy_(sent)


@dataclass(frozen=True, eq=False)
class LocalRanks(Ranks):
    """One of several ranks in this process.

    Args:
        meeting: Shared by all of them.
    """

    meeting: _Meeting = field(default_factory=lambda: _Meeting(1, 0.0))

    def sum_(self, x: Tensor) -> Tensor:
        return self._reduce("sums", x, torch.add)

    def max_(self, x: Tensor) -> Tensor:
        return self._reduce("takes the maximum of", x, torch.maximum)

    def broadcast_(self, x: Tensor, source: int = 0) -> Tensor:
        return self._replace(f"broadcasts from rank {source}", x, lambda values: values[source].clone())

    def gather_rows(self, x: Tensor) -> list[Tensor]:
        what = f"gathers rows of {x.dtype} {tuple(x.shape[1:])}"
        gathered: list[Tensor] = self.meeting.meet(
            self.rank, what, x.detach(), lambda values: [value.clone() for value in values]
        )
        return [rows.clone() for rows in gathered]

    def _reduce(self, verb: str, x: Tensor, operation: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return self._replace(verb, x, lambda values: functools.reduce(operation, values[1:], values[0].clone()))

    def _replace(self, verb: str, x: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> Tensor:
        what = f"{verb} {x.dtype} {tuple(x.shape)}"
        with torch.no_grad():
            x.copy_(self.meeting.meet(self.rank, what, x.detach(), combine))
        return x


def run_local_ranks(
    num_ranks: int,
    function: Callable[[Ranks], T],
    *,
    timeout_seconds: float = 60.0,
    hosts: Sequence[str] = (),
) -> list[T]:
    """Call ``function(ranks)`` on ``num_ranks`` threads of this process.

    Args:
        num_ranks: P; one rank runs in the calling thread.
        function: Must not share mutable state between ranks (give each its own copy of a model).
        timeout_seconds: How long a rank waits for its peers.
        hosts: Name of the host that each rank pretends to be on; all on one when empty.

    Returns:
        Results in rank order.

    Raises:
        BaseException: What the first failing rank raised, before what its peers raised because of it.
    """
    if num_ranks == 1:
        return [function(Ranks())]
    meeting = _Meeting(num_ranks, timeout_seconds)
    numbers = numbered(hosts)
    grid = host_grid(numbers)
    of_groups = [] if grid is None else [_meetings(way, timeout_seconds) for way in (grid.rows, grid.columns)]
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        halo: Any = _LocalHalo(rank, meeting)
        of_rank = [_LocalHalo(*way[rank]) for way in of_groups]
        groups = None if grid is None else HostGroups(grid, *of_rank)
        try:
            own = LocalRanks(rank, num_ranks, halo, hosts=numbers, host_groups=groups, meeting=meeting)
            results[rank] = function(own)
        except BaseException as error:
            errors.append(error)
        finally:
            meeting.leave(rank)
            for place in of_rank:
                place.meeting.leave(place.rank)

    threads = [threading.Thread(target=run, args=(rank,), name=f"nugnn-rank-{rank}") for rank in range(num_ranks)]
    for thread in threads:
        thread.daemon = True  # a rank that never returns does not keep the process alive
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(num_ranks)]


def _meetings(groups: Sequence[Sequence[int]], timeout_seconds: float) -> dict[int, tuple[int, _Meeting]]:
    """Of each rank its number in its group, and where that meets."""
    places = {}
    for members in groups:
        meeting = _Meeting(len(members), timeout_seconds)
        places.update({rank: (number, meeting) for number, rank in enumerate(members)})
    return places
