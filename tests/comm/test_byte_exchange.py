"""Every byte arrives where a table says, whatever the sizes; as gloo's own exchanges have it."""

from __future__ import annotations

import gc
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nugnn.comm.byte_exchange import begin_exchange, begin_gathering
from nugnn.comm.groups import Ranks
from rank_pool import RankPool

TABLES = {
    2: [[0, 70_000], [3, 0]],
    3: [[5, 0, 1], [2, 0, 300_000], [0, 0, 0]],
}
"""Bytes that each rank (row) sends to each (column), itself included."""


def _exchanged(ranks: Ranks, table: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """What arrives in two exchanges that are under way at once, and by gloo's own."""
    sizes = table[ranks.rank]
    own_sizes = [row[ranks.rank] for row in table]
    sent = torch.arange(sum(sizes)).add(31 * ranks.rank).to(torch.uint8)
    places = [torch.full((sum(own_sizes),), 99, dtype=torch.uint8) for _ in range(3)]
    works = [begin_exchange(ranks.halo, places[n], rows, own_sizes, sizes) for n, rows in enumerate((sent, ~sent))]
    for work in works:
        work.wait()
    assert ranks.halo is not None
    ranks.halo.alltoall_base(places[2], sent, own_sizes, sizes).wait()
    return places[0], places[1], places[2]


@pytest.mark.parametrize("num_ranks", sorted(TABLES))
def test_every_byte_arrives(ranks: RankPool, num_ranks: int) -> None:
    for found, turned, expected in ranks.run(num_ranks, _exchanged, TABLES[num_ranks]):
        assert torch.equal(found, expected) and torch.equal(turned, ~expected)


def _gathered(ranks: Ranks, length: int) -> Tensor:
    row = torch.arange(length, dtype=torch.float32) + 1000 * ranks.rank
    received = torch.empty(ranks.world_size * length)
    begin_gathering(ranks.control, received, row).wait()
    return received.view(ranks.world_size, length)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_rank_gets_every_row(ranks: RankPool, num_ranks: int) -> None:
    expected = torch.arange(7.0) + 1000 * torch.arange(num_ranks)[:, None]
    assert all(torch.equal(found, expected) for found in ranks.run(num_ranks, _gathered, 7))


def _posted(ranks: Ranks) -> list[str]:
    """What happens in turn at the begin of an exchange."""
    found: list[str] = []
    group = ranks.halo

    class Noting(dist.ProcessGroup):
        def __init__(self) -> None:
            super().__init__(ranks.rank, ranks.world_size)

        def recv(self, *arguments: Any) -> Any:
            found.append("recv")
            return group.recv(*arguments)

        def send(self, *arguments: Any) -> Any:
            found.append("send")
            return group.send(*arguments)

    before = os.sched_yield
    os.sched_yield = lambda: found.append("yield")
    try:
        sizes = [3] * ranks.world_size
        begin_exchange(Noting(), *(torch.zeros(6, dtype=torch.uint8) for _ in range(2)), sizes, sizes).wait()
    finally:
        os.sched_yield = before
    return found


def test_a_slice_of_time_and_what_comes_are_there_before_anything_is_sent(ranks: RankPool) -> None:
    assert ranks.run(2, _posted) == [["yield", "recv", "send"]] * 2


def _dropped(ranks: Ranks) -> list[list[int]]:
    """Exchanges of which one rank forgets the first before its peer has begun it."""
    found = []
    for size in (3, 70_000):
        first, second = (torch.full((ranks.world_size * size,), 10 * n + ranks.rank, dtype=torch.uint8) for n in (1, 2))
        sizes, received = [size] * ranks.world_size, torch.zeros_like(first)
        if ranks.rank:
            time.sleep(0.2)
        work = begin_exchange(ranks.halo, received, first, sizes, sizes)
        if ranks.rank:
            work.wait()
            found.append(received[::size].tolist())
        del work, received
        gc.collect()
        received = torch.zeros_like(second)
        begin_exchange(ranks.halo, received, second, sizes, sizes).wait()
        found.append([*received[::size].tolist(), int(received.min()), int(received.max())])
    return found


def test_an_exchange_that_is_forgotten_is_not_taken_for_the_next_one(ranks: RankPool) -> None:
    first, other = ranks.run(2, _dropped, timeout=60)
    assert first == [[20, 21, 20, 21]] * 2
    assert other == [[10, 11], [20, 21, 20, 21]] * 2


def _broken_off(ranks: Ranks) -> tuple[list[str], str]:
    """What is waited for by an exchange of which the second message fails, and by the next one."""
    found: list[str] = []

    class Message:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait(self) -> None:
            found.append(self.name)
            if self.name == "recv":
                raise RuntimeError("lost a peer")

    class Group(dist.ProcessGroup):
        def __init__(self) -> None:
            super().__init__(ranks.rank, ranks.world_size)
            self.names = iter(["done", "recv", "send", "send"])

        def recv(self, *_: Any) -> Any:
            return Message(next(self.names))

        send = recv

    group, sizes = Group(), [2] * ranks.world_size
    tensors = [torch.zeros(2 * ranks.world_size, dtype=torch.uint8) for _ in range(2)]
    work = begin_exchange(group, *tensors, sizes, sizes)
    with pytest.raises(RuntimeError, match="lost a peer"):
        work.wait()
    del work
    gc.collect()
    with pytest.raises(RuntimeError) as error:
        begin_exchange(group, *tensors, sizes, sizes)
    return found, str(error.value)


def test_what_came_before_a_failure_is_not_waited_for_again(ranks: RankPool) -> None:
    """Waited for again, it would take one more message of that peer, or the whole timeout."""
    for found, said in ranks.run(3, _broken_off):
        assert said == "lost a peer" and found.count("done") == 1
