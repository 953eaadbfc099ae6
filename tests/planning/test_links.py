"""Seconds of exchanges: shared ways are shared, totals are kept, twice the bytes take twice the time."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nugnn.planning.links import LOOPBACK, LinkError, Links, Place, Rested
from nugnn.planning.profiles import LinkProfile

NETWORK = LinkProfile(between="hosts", via="sheet", bytes_per_second=1e9, latency_seconds=5e-5)
NVLINK = LinkProfile(between="devices", via="nccl", bytes_per_second=2e11, latency_seconds=2e-5)


def _card(name: str, rate: float) -> LinkProfile:
    return LinkProfile(between="host", ends=(name, "cpu"), via="copy", bytes_per_second=rate, latency_seconds=1e-5)


def _random(num_ranks: int) -> np.ndarray:
    sent = np.random.default_rng(num_ranks).uniform(0, 1e8, (num_ranks, num_ranks))
    np.fill_diagonal(sent, 0)
    return sent


def _two_hosts() -> Links:
    places = [Place(0, "a"), Place(0, "b"), Place(1, "c"), Place(1, "d")]
    return Links.of_places(places, {0: [NVLINK], 1: [NVLINK]}, NETWORK)


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
    network = NETWORK.model_copy(update={"latency_seconds": 5e-6})
    inside = {0: [gloo.model_copy(update=ring)], 1: [gloo]}
    three = Links.of_places([Place(0)] * 3, inside)
    assert three.all_reduce_seconds(1e6) == pytest.approx(4 * (1e-5 + 1e6 / 3 / 4e9))
    assert three.among([0, 2]).all_reduce_seconds(1e6) == pytest.approx(2 * (1e-5 + 1e6 / 2 / 4e9))
    assert three.exchange_seconds(_random(3)) == pytest.approx(Links.equal(3, 1e9, 1e-4).exchange_seconds(_random(3)))
    both = Links.of_places([Place(0), Place(0), Place(1)], inside, network)  # two ways of the ring are the network's
    assert both.all_reduce_seconds(1e6) == pytest.approx(4 * (1e-5 + 1e6 / 3 / 1e9))
    other = Links.of_places([Place(1)] * 2, inside)  # nobody has measured its sums
    assert other.all_reduce_seconds(1e6) == pytest.approx(2 * (1e-4 + 1e6 / 2 / 1e9))


def test_sums_of_few_values_go_directly_inside_a_host_alone():
    direct = {"sum_bytes_per_second": 4e9, "sum_latency_seconds": 1e-3, "few_seconds": 1e-4}
    gloo = LinkProfile(between="devices", via="gloo", bytes_per_second=1e9, latency_seconds=1e-3, **direct)
    three = Links.of_places([Place(0)] * 3, {0: [gloo]})
    assert three.all_reduce_seconds(1e4) == pytest.approx(1e-4 + 2 * 1e4 / 4e9)  # to each of two peers
    assert three.passing_seconds(1e4) == pytest.approx(2 * 1e4 / 4e9)
    assert three.all_reduce_seconds(1e6) == pytest.approx(4 * (1e-3 + 1e6 / 3 / 4e9))
    assert three.passing_seconds(1e6) == pytest.approx(4 * 1e6 / 3 / 4e9)
    both = Links.of_places([Place(0), Place(0), Place(1)], {0: [gloo], 1: [gloo]}, NETWORK)
    assert both.all_reduce_seconds(1e4) > 4e-3  # four messages of the ring


def test_sums_beside_computation_and_broadcasts_are_the_process_groups():
    direct = {"sum_bytes_per_second": 4e9, "sum_latency_seconds": 1e-3, "few_seconds": 1e-4}
    gloo = LinkProfile(between="devices", via="gloo", bytes_per_second=1e9, latency_seconds=1e-3, **direct)
    three = Links.of_places([Place(0)] * 3, {0: [gloo]})
    ring = pytest.approx(4 * (1e-3 + 1e4 / 3 / 4e9))
    assert three.all_reduce_seconds(1e4, is_aside=True) == ring
    assert three.collective_seconds("all_reduce", 1e4, is_aside=True) == ring
    assert 2 * three.collective_seconds("broadcast", 1e4) == ring
    assert three.passing_seconds(1e4, is_aside=True) == pytest.approx(4 * 1e4 / 3 / 4e9)


def test_cores_work_for_the_bytes_that_a_rank_passes_on():
    known = {"sum_bytes_per_second": 4e9, "sum_latency_seconds": 1e-5, "sum_core_seconds_per_byte": 5e-10}
    gloo = LinkProfile(between="devices", via="gloo", bytes_per_second=1e9, latency_seconds=1e-4, **known)
    three = Links.of_places([Place(0)] * 3, {0: [gloo]})
    assert three.core_seconds(1, 3e6) == pytest.approx(5e-10 * 4e6)
    assert three.core_seconds(1, 6e6) == 2 * three.core_seconds(1, 3e6)
    both = Links.of_places([Place(0), Place(0), Place(1)], {0: [gloo]}, NETWORK)
    assert both.core_seconds(0, 3e6) == pytest.approx(5e-10 * 4e6)
    assert both.core_seconds(2, 3e6) == 0.0  # nobody has measured it there
    # a host's only rank adds up with ranks of others, in the same threads
    far = Links.of_places([Place(0), Place(1)], {0: [gloo]}, NETWORK)
    assert (far.core_seconds(0, 3e6), far.core_seconds(1, 3e6)) == (pytest.approx(5e-10 * 3e6), 0.0)
    assert both.among([2, 0]).core_seconds(1, 3e6) == pytest.approx(5e-10 * 3e6)
    assert Links.alone().core_seconds(0, 1e6) == 0.0
    with pytest.raises(ValueError, match="sum_core_seconds_per_byte is known with sum_latency_seconds alone"):
        LinkProfile(
            between="devices", via="gloo", bytes_per_second=1e9, latency_seconds=0.0, sum_core_seconds_per_byte=1e-9
        )


@given(
    burst=st.floats(0, 5),
    exchanges=st.lists(st.tuples(st.floats(0, 4), st.floats(0, 4)), min_size=1, max_size=12),
)
def test_a_rested_link_saves_no_more_than_its_rest(burst, exchanges):
    rested, now, took, passed = Rested(burst, 1), 0.0, 0.0, 0.0
    for pause, passing in exchanges:
        now += pause
        (left,) = rested.left(now, np.array([passing]))
        assert 0 <= left <= passing and passing - left <= burst + 1e-9
        now, took, passed = now + left, took + left, passed + passing
        # over all time so far, no more than the burst and what the rate lets pass
        assert passed <= burst + now + 1e-9
    if burst == 0:
        assert took == pytest.approx(passed)


def test_a_link_that_rested_long_enough_is_as_at_the_start():
    rested = Rested(2.0, 2)
    assert rested.left(0.0, np.array([5.0, 1.0])).tolist() == [3.0, 0.0]
    assert rested.left(3.0, np.array([1.0, 1.0])).tolist() == [1.0, 0.0]
    assert rested.left(10.0, np.array([5.0, 5.0])).tolist() == [3.0, 3.0]


def test_sums_in_a_quarter_of_the_bytes_take_a_quarter_of_the_time():
    links = Links.equal(4, 1e9)
    assert links.coded_sum_seconds(1e6) == pytest.approx(2 * 3 / 4 * 1e6 / 1e9)
    assert links.coded_sum_seconds(1e6) == pytest.approx(links.all_reduce_seconds(1e6))  # a ring moves as much


def test_cpus_and_gpus_of_one_run_meet_in_the_memory_of_the_host():
    places = [Place(0, "a"), Place(0)]
    mixed = Links.of_places(places, {0: [NVLINK, _card("a", 1e10)]})
    assert mixed.stages == (True, False)
    sent = np.array([[0.0, 1.5e9], [0.0, 0.0]])
    seconds = mixed.exchange_seconds(sent)
    wire = 1.5e9 / LOOPBACK.bytes_per_second + LOOPBACK.latency_seconds
    assert seconds == pytest.approx([wire + 0.15, wire])
    with pytest.raises(LinkError, match="no link from a to the host's memory"):
        Links.of_places(places, {0: [NVLINK]})


def test_a_pairs_own_link_goes_before_one_for_all():
    own = LinkProfile(between="devices", ends=("a", "b"), via="nccl", bytes_per_second=1e10, latency_seconds=1e-5)
    links = Links.of_places([Place(0, "b"), Place(0, "a"), Place(0, "c")], {0: [NVLINK, own]})
    assert links.bytes_per_second[0, 1] == 1e10
    assert links.bytes_per_second[0, 2] == 2e11
    assert links.is_nccl
    assert not any(links.stages)
    measured = LinkProfile(between="devices", ends=("cpu", "cpu"), via="gloo", bytes_per_second=9e8, latency_seconds=0)
    assert Links.of_places([Place(0), Place(0)], {0: [measured]}).bytes_per_second[0, 1] == 9e8


def test_gpus_without_a_link_go_through_the_host_and_hosts_without_a_network_are_refused():
    copies = [_card("a", 1e10), _card("b", 2e10)]
    assert Links.of_places([Place(0, "a"), Place(0, "b")], {0: copies}).bytes_per_second[0, 1] == 1e10
    with pytest.raises(LinkError, match="no link between b and a, nor from each of them"):
        Links.of_places([Place(0, "a"), Place(0, "b")], {0: copies[:1]})
    with pytest.raises(LinkError, match="ranks 0 and 1 are on hosts 0 and 1, and no network"):
        Links.of_places([Place(0, "a"), Place(1, "b")], {})
    slow = NETWORK.model_copy(update={"bytes_per_second": 1e8})
    links = Links.of_places([Place(0, "a"), Place(1, "b")], {}, {0: NETWORK, 1: slow})
    assert links.bytes_per_second[0, 1] == 1e8


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
