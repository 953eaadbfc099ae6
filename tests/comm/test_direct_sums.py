"""Sums that ranks send each other directly: what they add up to, of what, and what becomes of a peer that is gone."""

from __future__ import annotations

import functools
import itertools
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nugnn.comm import direct_sums
from nugnn.comm.direct_sums import MOST_BYTES, DirectSums, connect_directly, is_small
from nugnn.comm.groups import Ranks
from rank_pool import RankPool

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
        except (OSError, RuntimeError) as error:
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
    with _connected(num_ranks) as sums:
        for _ in range(2):  # a rank may begin the second sum while another still reads the first
            expected = functools.reduce(np.add, [part.numpy() for part in parts])
            _together(sums, lambda own: own.sum_(parts[own.rank]))
            assert all(np.array_equal(part.numpy(), expected) for part in parts)


def test_more_than_connections_hold_at_once_does_not_stand_still() -> None:
    parts = [torch.full((MOST_BYTES,), rank + 1.0) for rank in range(3)]
    with _connected(3, buffer_bytes=4096) as sums:
        _together(sums, lambda own: own.sum_(parts[own.rank]))
    assert all(bool((part == 6).all()) for part in parts)


def test_few_values_of_types_that_are_added_exactly_as_sent_go_this_way() -> None:
    with _connected(3) as sums:
        assert all(sums[0].takes(torch.zeros(7, dtype=dtype)) for dtype in TYPES)
        sparse = torch.zeros(7).to_sparse()
        for other in (torch.zeros(0), torch.zeros(7).half(), sparse, torch.zeros(MOST_BYTES // 8 + 1)):
            assert not sums[0].takes(other)
        assert sums[0].takes(torch.zeros(MOST_BYTES // 8))
    assert is_small(MOST_BYTES, 2) and not is_small(MOST_BYTES, 3) and not is_small(0, 2)


@pytest.mark.parametrize("num_ranks", [2, 3, 7])
def test_what_is_no_number_has_the_same_bits_on_all_ranks_and_is_nobodys_business(num_ranks: int) -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (num_ranks, 333), generator=generator).int()
    bits = bits & 0x807FFFFF | 0x7F800000  # infinities and NaNs of both signs with any payload
    bits[:, :30] = bits[:, :30] & -(2**31)  # zeros of both signs
    bits[:, 30:60] &= -(2**23)
    parts = [part.view(torch.float32) for part in bits.clone()]
    with _connected(num_ranks) as sums, warnings.catch_warnings():
        warnings.simplefilter("error")
        found = _together(sums, lambda own: own.sum_(parts[own.rank]))
    assert found == [None] * num_ranks
    assert all(torch.equal(part.view(torch.int32), parts[0].view(torch.int32)) for part in parts)
    expected = bits.view(torch.float32).double().sum(0).float()
    assert torch.equal(parts[0].isnan(), expected.isnan()) and bool(expected.isinf().any())
    assert torch.equal(parts[0][:30].signbit(), (bits[:, :30] != 0).all(0))


def _twos_of_any_kind() -> list[Tensor]:
    with torch.inference_mode():
        of_inference = torch.full((3,), 2.0)
    return [
        torch.tensor(2.0),
        torch.full((3,), 2.0, requires_grad=True),
        torch.full((2, 3), 2, dtype=torch.int64).T[1:],
        torch.full((7,), 2.0, dtype=torch.float64)[::3],
        of_inference,
    ]


def test_tensors_of_any_kind_are_added_up_in_place() -> None:
    with _connected(3) as sums:
        for parts in zip(*(_twos_of_any_kind() for _ in sums), strict=True):
            assert _together(sums, lambda own, parts=parts: own.sum_(parts[own.rank])) == [None] * 3
            assert all(bool((part == 6).all()) for part in parts)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (torch.ones(1), "worker 2 1 values of float32"),
        (torch.ones(5000), "worker 2 5000 values of float32"),
        (torch.ones(2, dtype=torch.int32), "worker 2 2 values of int32"),
    ],
)
def test_who_is_out_of_step_is_an_error_on_all_ranks(other: Tensor, said: str) -> None:
    with _connected(3, timeout=600.0) as sums:
        begin = time.monotonic()
        found = _together(sums, lambda own: own.sum_(torch.ones(2) if own.rank < 2 else other.clone()))
        assert time.monotonic() - begin < 120
        assert all(isinstance(error, RuntimeError) and "out of step" in str(error) for error in found)
        assert all(said in str(error) and "has 2 values of float32" in str(error) for error in found[:2])


def test_a_sum_that_was_left_in_the_middle_was_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its peer's values of then would be added to those of now."""

    class Interrupted:
        def register(self, *_: Any) -> None: ...

        def poll(self, _: float) -> None:
            raise KeyboardInterrupt

    with _connected(2, timeout=0.5) as sums:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("nugnn.comm.direct_sums.select.poll", Interrupted)
            sums[0].sum_(torch.ones(3))
        found = _together(sums, lambda own: own.sum_(torch.ones(3)))
        assert isinstance(found[0], RuntimeError) and "left in the middle" in str(found[0])


def test_two_threads_do_not_mix_their_sums() -> None:
    """They have no order in which all ranks would know them."""
    with _connected(2, timeout=60.0) as sums:
        waiting = threading.Thread(target=sums[0].sum_, args=(first := torch.ones(3),))
        waiting.start()
        while not sums[0]._between.locked():
            time.sleep(0.001)
        with pytest.raises(RuntimeError, match="another thread is in one"):
            sums[0].sum_(torch.ones(3))
        sums[1].sum_(torch.ones(3))
        waiting.join(60)
        assert first.tolist() == [2, 2, 2]
        assert _together(sums, lambda own: own.sum_(first if own.rank else first.clone())) == [None, None]


def test_a_peer_that_has_gone_and_one_that_does_not_come_are_named() -> None:
    with _connected(3, timeout=3.0) as sums:  # the other two come meanwhile
        found = _together(sums, lambda own: own.sum_(torch.zeros(3)) if own.rank else None)
        assert all(isinstance(error, TimeoutError) and "for worker 0" in str(error) for error in found[1:])
    with _connected(3) as sums:
        sums[0].close()
        for own in sums[1:]:  # one after the other: it may be a write or a read that finds out
            with pytest.raises(ConnectionError, match="closed by worker 0"):
                own.sum_(torch.zeros(3))


def test_connections_end_for_peers_although_a_forked_process_has_them_still() -> None:
    with _connected(2, timeout=20.0) as sums:
        forked = [connection.dup() for connection in sums[0].peers.values()]
        sums[0].close()
        with pytest.raises(ConnectionError, match="closed by worker 0"):
            sums[1].sum_(torch.zeros(3))
        for connection in forked:
            connection.close()


# -- connections -------------------------------------------------------------------------------------------------------


_CONNECT_SECONDS = 200.0
"""How long ranks wait for each other here: so long that who waits for that is told from who is slow."""


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _joined(ranks: Ranks, stranger: str, times: int) -> list[Any]:
    """How long it took to connect, what came of a sum, how many files are open more than before."""
    listen, before, strangers = socket.socket.listen, _open_files(), []

    def heard(listener: socket.socket, most: int) -> None:
        listen(listener, most)
        for _ in range(20 if stranger else 0):
            strangers.append(socket.create_connection(listener.getsockname()))
            if stranger == "talks":
                strangers[-1].sendall(b"GET / HTTP/1.1\r\n\r\n")
            elif stranger == "leaves":
                strangers.pop().close()

    socket.socket.listen = heard  # type: ignore[method-assign, assignment]
    values, begin = torch.full((3,), 1.0 + ranks.rank), time.monotonic()
    longest, direct_sums._CONNECT_SECONDS = direct_sums._CONNECT_SECONDS, _CONNECT_SECONDS
    try:
        for _ in range(times):
            found = connect_directly(ranks.rank, ranks.world_size, 30.0)
            assert found is not None
            found.sum_(values)
            found.close()
    finally:
        socket.socket.listen = listen  # type: ignore[method-assign]
        direct_sums._CONNECT_SECONDS = longest
    seconds = time.monotonic() - begin
    for each in strangers:
        each.close()
    return [seconds, values.tolist(), _open_files() - before]


@pytest.mark.parametrize("stranger", ["", "silent", "talks", "leaves"])
def test_strangers_neither_take_a_rank_s_place_nor_hold_it_up(ranks: RankPool, stranger: str) -> None:
    for seconds, values, files in ranks.run(5, _joined, stranger, 1):
        assert seconds < _CONNECT_SECONDS / 2 and values == [15.0] * 3 and files == 0


def test_connections_leave_no_open_files(ranks: RankPool) -> None:
    assert all(files == 0 for *_, files in ranks.run(5, _joined, "", 4))


def _elsewhere(ranks: Ranks) -> tuple[bool, float, int]:
    """Rank 0 says that it is where nobody finds it: on another host of the same name."""
    inet_aton, before = socket.inet_aton, _open_files()
    begin = time.monotonic()
    longest, direct_sums._CONNECT_SECONDS = direct_sums._CONNECT_SECONDS, _CONNECT_SECONDS
    socket.inet_aton = lambda address: inet_aton("127.0.0.1" if ranks.rank else "127.7.7.7")  # type: ignore[assignment]
    try:
        found = connect_directly(ranks.rank, ranks.world_size, 30.0)
    finally:
        socket.inet_aton = inet_aton
        direct_sums._CONNECT_SECONDS = longest
    return found is None, time.monotonic() - begin, _open_files() - before


def test_ranks_that_do_not_find_each_other_go_through_gloo_at_once(ranks: RankPool) -> None:
    for is_none, seconds, files in ranks.run(5, _elsewhere):
        assert is_none and seconds < _CONNECT_SECONDS / 2 and files == 0
