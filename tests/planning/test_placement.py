"""Parts are placed on devices like theirs, such that no order of the parts is made slower."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nugnn.planning.links import Links
from nugnn.planning.placement import place
from nugnn.planning.work_model import count_sizes, edges_and_traffic


def hosts_of_two(num_hosts: int, inside: float = 1e11, between: float = 1e9) -> Links:
    hosts = tuple(rank // 2 for rank in range(2 * num_hosts))
    same = np.equal.outer(hosts, hosts)
    rates = np.where(same, inside, between)
    return Links(rates, np.where(same, 1e-6, 1e-5), hosts, dict.fromkeys(range(num_hosts), between), is_nccl=True)


@given(st.integers(1, 4), st.integers(0, 10**6))
def test_never_slower_than_unplaced_and_only_among_alike(num_hosts: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = 2 * num_hosts
    rows = rng.integers(0, 1000, (count, count))
    np.fill_diagonal(rows, 0)
    kinds = rng.integers(0, 2, count).tolist()
    links = hosts_of_two(num_hosts)
    placed = place(rows, 400.0, links, kinds)
    assert sorted(placed.rank_of) == list(range(count))
    assert [kinds[rank] for rank in placed.rank_of] == kinds
    part_at = np.argsort(placed.rank_of)
    seconds = links.exchange_seconds(400.0 * rows[np.ix_(part_at, part_at)].astype(float)).max()
    assert placed.seconds == pytest.approx(seconds) and placed.seconds <= placed.seconds_unplaced


def test_parts_that_exchange_much_share_a_host() -> None:
    rows = np.zeros((6, 6), int)
    for a, b in ((0, 3), (1, 5), (2, 4)):  # pairs on different hosts when nothing is moved
        rows[a, b] = rows[b, a] = 10**6
    placed = place(rows, 400.0, hosts_of_two(3), ["card"] * 6)
    assert all(placed.rank_of[a] // 2 == placed.rank_of[b] // 2 for a, b in ((0, 3), (1, 5), (2, 4)))
    assert placed.seconds < placed.seconds_unplaced / 50
    apart = place(rows, 400.0, hosts_of_two(3), range(6))  # nothing alike
    assert apart.rank_of == tuple(range(6))
    assert place(rows, 400.0, Links.equal(6, 1e9), ["card"] * 6).rank_of == tuple(range(6))


@given(st.integers(2, 5), st.integers(0, 10**6))
def test_traffic_is_distinct_nodes_that_others_read(num_parts: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    src, dst = rng.integers(0, 40, (2, 150))
    part = np.concatenate([np.arange(num_parts), rng.integers(0, num_parts, 40 - num_parts)])
    _, rows = edges_and_traffic(src, dst, part, num_parts)
    read = {(int(u), int(part[v])) for u, v in zip(src, dst, strict=True) if part[u] != part[v]}
    wanted = np.zeros((num_parts, num_parts), np.int64)
    for node, reader in read:
        wanted[part[node], reader] += 1
    assert (rows == wanted).all()
    sizes = count_sizes(src, dst, part, num_parts)
    assert wanted.sum(axis=0).tolist() == [size.halo for size in sizes]
    assert wanted.sum(axis=1).tolist() == [size.sent for size in sizes]
    assert np.bincount(part[dst], minlength=num_parts).tolist() == [size.edges for size in sizes]
