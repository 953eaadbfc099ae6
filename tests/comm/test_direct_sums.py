"""Sums that ranks send each other directly: what they add up to, of what, and what becomes of a peer that is gone."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nugnn.comm.direct_sums import MOST_BYTES, DirectSums, is_small

TYPES = [torch.float32, torch.float64, torch.int32, torch.int64]


@contextmanager
def _connected(num_ranks: int, *, timeout: float = 30.0, buffer_bytes: int | None = None) -> Iterator[list[DirectSums]]:
    """Ranks that are threads of this process."""
    peers: list[dict[int, socket.socket]] = [{} for _ in range(num_ranks)]
    for one, other in itertools.combinations(range(num_ranks), 2):
        peers[one][other], peers[other][one] = socket.socketpair()
    for connection in (each for own in peers for each in own.values()):
        connection.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF) if buffer_bytes else ():
            connection.setsockopt(socket.SOL_SOCKET, option, buffer_bytes)
    found = [DirectSums(rank, own, timeout) for rank, own in enumerate(peers)]
    try:
        yield found
    finally:
        for each in found:
            each.close()


def _together(sums: list[DirectSums], run: Callable[[DirectSums], Any]) -> list[Any]:
    results: list[Any] = [None] * len(sums)

    def of_rank(own: DirectSums) -> None:
        try:
            results[own.rank] = run(own)
        except OSError as error:
            results[own.rank] = error

    threads = [threading.Thread(target=of_rank, args=(own,)) for own in sums]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return results


@settings(max_examples=30, deadline=None)
@given(
    num_ranks=st.integers(2, 4),
    shape=st.lists(st.integers(1, 9), max_size=3),
    dtype=st.sampled_from(TYPES),
    seed=st.integers(0, 99),
    turned=st.booleans(),
)
def test_all_ranks_have_the_same_bits_of_the_sum_by_rank(
    num_ranks: int, shape: list[int], dtype: torch.dtype, seed: int, turned: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    whole = (1000 * torch.randn(num_ranks, *shape, generator=generator)).to(dtype)
    parts = [part.T.contiguous().T if turned and part.dim() == 2 else part.clone() for part in whole]
    expected = whole[0].numpy()
    for part in whole[1:]:
        expected = expected + part.numpy()
    with _connected(num_ranks) as sums:
        # two sums in a row: a rank may begin the second while another still reads the first
        for factor in (1, num_ranks):
            _together(sums, lambda own: own.sum_(parts[own.rank]))
            assert all(np.array_equal(part.numpy(), factor * expected) for part in parts) or factor > 1
            assert all(torch.equal(part, parts[0]) for part in parts)


def test_more_than_connections_hold_at_once_does_not_stand_still() -> None:
    parts = [torch.full((MOST_BYTES,), rank + 1.0) for rank in range(3)]
    with _connected(3, buffer_bytes=4096) as sums:
        _together(sums, lambda own: own.sum_(parts[own.rank]))
    assert all(bool((part == 6).all()) for part in parts)


def test_few_values_of_types_that_are_added_exactly_as_sent_go_this_way() -> None:
    with _connected(3) as sums:
        assert all(sums[0].takes(torch.zeros(7, dtype=dtype)) for dtype in TYPES)
        for other in (torch.zeros(0), torch.zeros(7, dtype=torch.bfloat16), torch.zeros(MOST_BYTES // 8 + 1)):
            assert not sums[0].takes(other)
        assert sums[0].takes(torch.zeros(MOST_BYTES // 8))
    assert is_small(MOST_BYTES, 2) and not is_small(MOST_BYTES, 3) and not is_small(0, 2)


def test_a_peer_that_has_gone_and_one_that_does_not_come_are_named() -> None:
    with _connected(3, timeout=0.2) as sums:
        found = _together(sums, lambda own: own.sum_(torch.zeros(3)) if own.rank else None)
        assert all(isinstance(error, TimeoutError) and "for worker 0" in str(error) for error in found[1:])
    with _connected(3) as sums:
        found = _together(sums, lambda own: own.sum_(torch.zeros(3)) if own.rank else own.close())
        # whoever hears of it first goes, too
        assert all(isinstance(error, ConnectionError) for error in found[1:])
