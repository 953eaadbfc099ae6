"""Seconds of exchanges: shared ways are shared, totals are kept, twice the bytes take twice the time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from nugnn.planning.links import Links, Sums
from nugnn.planning.profiles import LinkProfile

NETWORK_RATE, NETWORK_LATENCY = 1e9, 5e-5
NVLINK = LinkProfile(between="devices", via="nccl", bytes_per_second=2e11, latency_seconds=2e-5)


def _random(num_ranks: int) -> np.ndarray:
    sent = np.random.default_rng(num_ranks).uniform(0, 1e8, (num_ranks, num_ranks))
    np.fill_diagonal(sent, 0)
    return sent


def _hosts(
    hosts: tuple[int, ...], inside: LinkProfile, sums_of: Sequence[int] = (), latency: float = NETWORK_LATENCY
) -> Links:
    """Ranks on ``hosts``: ``inside`` within each, whose sums were measured on hosts ``sums_of``, a network between."""
    is_same = np.equal.outer(hosts, hosts)
    rates = np.where(is_same, inside.bytes_per_second, NETWORK_RATE)
    latencies = np.where(is_same, inside.latency_seconds, latency)
    sums, cores = Sums.of(inside), inside.sum_core_seconds_per_byte
    return Links(
        rates, latencies, hosts, dict.fromkeys(hosts, NETWORK_RATE), is_nccl=inside.via == "nccl",
        sums_inside={host: sums for host in sums_of if sums is not None},
        core_seconds_per_byte={host: cores for host in sums_of if cores is not None},
    )  # fmt: skip


def _two_hosts() -> Links:
    return _hosts((0, 0, 1, 1), NVLINK)


def test_a_pair_takes_its_bytes_over_its_rate_and_the_latency():
    links = Links.equal(2, 1e9, 1e-3)
    sent = np.array([[0.0, 3e6], [1e6, 0.0]])
    assert links.exchange_seconds(sent) == pytest.approx([4e-3, 4e-3])  # both ways at once, the longer one counts


def test_who_has_nothing_to_exchange_takes_no_time():
    sent = np.zeros((3, 3))
    sent[0, 1] = 1e6
    seconds = Links.equal(3, 1e9, 1e-3).exchange_seconds(sent)
    assert seconds[2] == 0
    assert seconds[:2] == pytest.approx([2e-3, 2e-3])


def test_ranks_of_a_host_share_its_network_card():
    sent = np.zeros((4, 4))
    sent[0, 2] = sent[1, 3] = 1e9
    assert _two_hosts().exchange_seconds(sent) == pytest.approx(np.full(4, 2 + 5e-5))
    sent[1, 3] = 0
    assert _two_hosts().exchange_seconds(sent)[[0, 2]] == pytest.approx(np.full(2, 1 + 5e-5))


def test_what_stays_in_a_host_does_not_pass_its_card():
    sent = np.zeros((4, 4))
    sent[0, 1] = 1e9
    assert _two_hosts().exchange_seconds(sent)[:2] == pytest.approx(np.full(2, 1e9 / 2e11 + 2e-5))


def test_renumbered_ranks_take_renumbered_seconds():
    order = np.array([2, 0, 3, 1])
    links, sent = _two_hosts(), _random(4)
    other = Links(
        links.bytes_per_second[np.ix_(order, order)], links.latency_seconds[np.ix_(order, order)],
        tuple(links.hosts[rank] for rank in order), links.host_bytes_per_second, is_nccl=True,
    )  # fmt: skip
    assert other.exchange_seconds(sent[np.ix_(order, order)]) == pytest.approx(links.exchange_seconds(sent)[order])


def test_twice_the_bytes_and_latencies_take_twice_the_time():
    links, sent = _two_hosts(), _random(4)
    twice = Links(
        links.bytes_per_second, 2 * links.latency_seconds, links.hosts, links.host_bytes_per_second, is_nccl=True
    )
    assert twice.exchange_seconds(2 * sent) == pytest.approx(2 * links.exchange_seconds(sent))
    assert twice.all_reduce_seconds(2e6) == pytest.approx(2 * links.all_reduce_seconds(1e6))


@pytest.mark.parametrize("num_ranks", [2, 3, 7])
def test_spreading_keeps_totals_and_sends_nobody_to_himself(num_ranks):
    table = _random(num_ranks)
    spread = Links.equal(num_ranks, 1e9).spread(table.sum(1), table.sum(0))
    assert spread.sum(1) == pytest.approx(table.sum(1))
    assert spread.sum(0) == pytest.approx(table.sum(0), rel=1e-3)
    assert not spread.diagonal().any()


@pytest.mark.parametrize("links", [Links.equal(5, 1e9, 1e-4), _two_hosts()], ids=["equal", "two hosts"])
def test_a_rank_among_equals_takes_what_its_own_link_says(links):
    num_ranks = links.num_ranks
    spread = links.spread([4e6] * num_ranks, [4e6] * num_ranks)
    seconds = links.exchange_seconds(spread)
    for rank in range(num_ranks):
        assert links.of_rank(rank).seconds(4e6, 4e6) == pytest.approx(seconds[rank])


def test_a_sum_passes_each_byte_nearly_twice_over_the_slowest_link():
    for num_ranks in (2, 5, 64):
        links = Links.equal(num_ranks, 1e9, 1e-4)
        pieces = 2 * (num_ranks - 1)
        assert links.all_reduce_seconds(1e6) == pytest.approx(pieces * (1e-4 + 1e6 / num_ranks / 1e9))
    assert Links.alone().all_reduce_seconds(1e6) == 0
    quick = Links.equal(64, 1e9, 1e-4, is_nccl=True)
    assert quick.all_reduce_seconds(8) < Links.equal(64, 1e9, 1e-4).all_reduce_seconds(8) / 5
    # in a ring over two hosts one rank of each sends to the other host
    assert _two_hosts().all_reduce_seconds(4e9) == pytest.approx(4 * 5e-5 + 6 * 1e9 / 1e9)


def test_sums_go_as_they_were_measured_inside_hosts_and_as_exchanges_between_them():
    ring = {"sum_bytes_per_second": 4e9, "sum_latency_seconds": 1e-5}
    gloo = LinkProfile(between="devices", via="gloo", bytes_per_second=1e9, latency_seconds=1e-4)
    with_ring = gloo.model_copy(update=ring)
    three = Links.of_host(3, with_ring)
    assert three.all_reduce_seconds(1e6) == pytest.approx(4 * (1e-5 + 1e6 / 3 / 4e9))
    assert three.among([0, 2]).all_reduce_seconds(1e6) == pytest.approx(2 * (1e-5 + 1e6 / 2 / 4e9))
    assert three.exchange_seconds(_random(3)) == pytest.approx(Links.equal(3, 1e9, 1e-4).exchange_seconds(_random(3)))
    both = _hosts((0, 0, 1), with_ring, [0], latency=5e-6)  # two ways of the ring are the network's
    assert both.all_reduce_seconds(1e6) == pytest.approx(4 * (1e-5 + 1e6 / 3 / 1e9))
    other = Links.of_host(2, gloo)  # nobody has measured its sums
    assert other.all_reduce_seconds(1e6) == pytest.approx(2 * (1e-4 + 1e6 / 2 / 1e9))


def test_sums_of_few_values_go_directly_inside_a_host_alone():
    direct = {"sum_bytes_per_second": 4e9, "sum_latency_seconds": 1e-3, "few_seconds": 1e-4}
    gloo = LinkProfile(between="devices", via="gloo", bytes_per_second=1e9, latency_seconds=1e-3, **direct)
    three = Links.of_host(3, gloo)
    assert three.all_reduce_seconds(1e4) == pytest.approx(1e-4 + 2 * 1e4 / 4e9)  # to each of two peers
    assert three.passing_seconds(1e4) == pytest.approx(2 * 1e4 / 4e9)
    assert three.all_reduce_seconds(1e6) == pytest.approx(4 * (1e-3 + 1e6 / 3 / 4e9))
    assert three.passing_seconds(1e6) == pytest.approx(4 * 1e6 / 3 / 4e9)
    both = _hosts((0, 0, 1), gloo, [0, 1])
    assert both.all_reduce_seconds(1e4) > 4e-3  # four messages of the ring


def test_sums_beside_computation_and_broadcasts_are_the_process_groups():
    direct = {"sum_bytes_per_second": 4e9, "sum_latency_seconds": 1e-3, "few_seconds": 1e-4}
    gloo = LinkProfile(between="devices", via="gloo", bytes_per_second=1e9, latency_seconds=1e-3, **direct)
    three = Links.of_host(3, gloo)
    ring = pytest.approx(4 * (1e-3 + 1e4 / 3 / 4e9))
    assert three.all_reduce_seconds(1e4, is_aside=True) == ring
    assert three.collective_seconds("all_reduce", 1e4, is_aside=True) == ring
    assert 2 * three.collective_seconds("broadcast", 1e4) == ring
    assert three.passing_seconds(1e4, is_aside=True) == pytest.approx(4 * 1e4 / 3 / 4e9)


def test_cores_work_for_the_bytes_that_a_rank_passes_on():
    known = {"sum_bytes_per_second": 4e9, "sum_latency_seconds": 1e-5, "sum_core_seconds_per_byte": 5e-10}
    gloo = LinkProfile(between="devices", via="gloo", bytes_per_second=1e9, latency_seconds=1e-4, **known)
    three = Links.of_host(3, gloo)
    assert three.core_seconds(1, 3e6) == pytest.approx(5e-10 * 4e6)
    assert three.core_seconds(1, 6e6) == 2 * three.core_seconds(1, 3e6)
    both = _hosts((0, 0, 1), gloo, [0])
    assert both.core_seconds(0, 3e6) == pytest.approx(5e-10 * 4e6)
    assert both.core_seconds(2, 3e6) == 0.0  # nobody has measured it there
    # a host's only rank adds up with ranks of others, in the same threads
    far = _hosts((0, 1), gloo, [0])
    assert (far.core_seconds(0, 3e6), far.core_seconds(1, 3e6)) == (pytest.approx(5e-10 * 3e6), 0.0)
    assert both.among([2, 0]).core_seconds(1, 3e6) == pytest.approx(5e-10 * 3e6)
    assert Links.alone().core_seconds(0, 1e6) == 0.0
    with pytest.raises(ValueError, match="sum_core_seconds_per_byte is known with sum_latency_seconds alone"):
        LinkProfile(
            between="devices", via="gloo", bytes_per_second=1e9, latency_seconds=0.0, sum_core_seconds_per_byte=1e-9
        )


def test_sums_in_a_quarter_of_the_bytes_take_a_quarter_of_the_time():
    links = Links.equal(4, 1e9)
    assert links.coded_sum_seconds(1e6) == pytest.approx(2 * 3 / 4 * 1e6 / 1e9)
    assert links.coded_sum_seconds(1e6) == pytest.approx(links.all_reduce_seconds(1e6))  # a ring moves as much


def test_ranks_of_a_host_have_all_that_was_measured_of_its_link():
    gloo = LinkProfile(
        between="devices", via="gloo", bytes_per_second=1e9, latency_seconds=1e-3, burst_seconds=2e-3,
        sum_bytes_per_second=4e9, sum_latency_seconds=1e-5, few_seconds=1e-4, sum_core_seconds_per_byte=5e-10,
    )  # fmt: skip
    links = Links.of_host(2, gloo)
    assert links.exchange_seconds(np.full((2, 2), 4e6)) == pytest.approx([5e-3, 5e-3])
    assert links.sums_inside == {0: Sums(4e9, 1e-5, 1e-4, 5e-10)}
    assert (links.burst_seconds, links.core_seconds_per_byte) == (2e-3, {0: 5e-10})
    assert not links.is_nccl and not any(links.stages) and links.blocks_host(0)
    direct = Links.of_host(2, NVLINK)
    assert direct.is_nccl and (direct.burst_seconds, direct.sums_inside, direct.core_seconds_per_byte) == (0.0, {}, {})


def test_each_end_of_a_pair_takes_what_it_sees():
    rates = np.array([[np.inf, 2e9], [1e9, np.inf]])
    links = Links(rates, np.array([[0, 1e-3], [4e-3, 0]]), (0, 0), {})
    sent = np.array([[0.0, 4e6], [2e6, 0.0]])
    assert links.exchange_seconds(sent) == pytest.approx([2e-3 + 1e-3, 4e-3 + 4e-3])
    for rank in range(2):
        assert links.of_rank(rank).seconds(4e6, 2e6) == pytest.approx(links.exchange_seconds(sent)[rank])
    turned = links.among([1, 0])
    assert turned.exchange_seconds(sent[::-1, ::-1]) == pytest.approx(links.exchange_seconds(sent)[::-1])
    # a sum has ended when both have: by the slower end
    assert links.all_reduce_seconds(1e6) == Links.equal(2, 1e9, 4e-3).all_reduce_seconds(1e6)


def test_tables_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"3 ranks need \(3, 3\)"):
        Links(np.ones((2, 2)), np.zeros((2, 2)), (0, 0, 0), {})
    with pytest.raises(ValueError, match="not positive"):
        Links.equal(2, 0.0)
    assert Links.alone().exchange_seconds(np.zeros((1, 1))).tolist() == [0.0]
    assert math.isinf(Links.alone().bytes_per_second[0, 0])
