"""Exchanges foreseen from classes of ranks take what they take from rank to rank, and alike ranks get the same bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nugnn.planning.links import Links
from nugnn.planning.peer_classes import fitted, num_peers, ways_to_classes

RATES = np.array([[3e11, 2e11], [2e11, 7e10]])


def links_of(hosts: list[int], sorts: list[int], *, has_cards: bool, staging: float) -> Links:
    """Ways inside a host depend on the sorts of both ends, those between hosts on nothing."""
    is_same = np.equal.outer(hosts, hosts)
    of_sorts = RATES[np.ix_(sorts, sorts)]
    rates, latencies = np.where(is_same, of_sorts, 1.1e9), np.where(is_same, 1e6 / of_sorts, 3e-5)
    cards = dict.fromkeys(hosts, 1.1e9) if has_cards else {}
    copies = staging * np.array(sorts, float) if staging else None
    return Links(rates, latencies, tuple(hosts), cards, copies)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1)), min_size=2, max_size=14),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=3),
    st.booleans(),
    st.sampled_from([0.0, 1e-10]),
    st.randoms(use_true_random=False),
)
def test_seconds_of_classes_are_those_of_all_pairs(ranks, totals, has_cards, staging, random):
    hosts, sorts = (list(each) for each in zip(*ranks, strict=True))
    links = links_of(hosts, sorts, has_cards=has_cards, staging=staging)
    own = [random.choice(totals) for _ in ranks]
    sent, received = (1e6 * np.array(each, float) for each in zip(*own, strict=True))
    distinct, class_of = np.unique([sent, received], axis=1, return_inverse=True)
    table = links.spread(sent, received)
    expected = links.transfer_seconds(table), links.latency_of(table)
    for found in (links.spread_seconds(sent, received), links._seconds_of_classes(distinct, class_of.reshape(-1))):
        assert found[0] == pytest.approx(expected[0], rel=1e-6, abs=1e-15)
        assert found[1].tolist() == expected[1].tolist()


def test_alike_ranks_of_many_hosts_have_the_same_bits():
    """Their ways are added up in another order on each host, and 1.1e9 has no finite binary fraction."""
    hosts = [rank // 3 for rank in range(150)]
    sorts = [rank % 3 // 2 for rank in range(150)]
    links = links_of(hosts, sorts, has_cards=False, staging=0.0)
    for class_of in (np.zeros(150, np.intp), np.array(sorts), np.arange(150) // 60):
        ways = ways_to_classes(links.bytes_per_second, links.latency_seconds, class_of)
        if class_of.max() < 2:
            assert len({row.tobytes() for row in np.hstack(ways)}) == 2  # of two sorts
        exact = [(1 / np.delete(row, rank)).sum() for rank, row in enumerate(links.bytes_per_second)]
        assert ways.seconds_per_byte.sum(1) == pytest.approx(exact, rel=1e-12)
    assert len({links.of_rank(rank) for rank in range(150)}) == 2


def test_each_class_sends_and_receives_its_totals():
    counts = np.array([3, 1, 4])
    sent, received = np.array([5.0, 7.0, 2.0]), np.array([6.0, 4.0, 2.0])
    assert counts @ sent == counts @ received
    peers = num_peers(counts)
    table = fitted(sent, received, peers)
    assert peers.tolist() == [[2, 1, 4], [3, 0, 4], [3, 1, 3]]
    assert (table * peers).sum(1) == pytest.approx(sent)
    assert (table * peers.T).sum(0) == pytest.approx(received, rel=1e-3)
