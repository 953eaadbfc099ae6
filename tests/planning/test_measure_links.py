"""Links between processes are measured in pairs, the same on every rank, with what arrives checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nugnn.comm.groups import Ranks
from nugnn.planning.links import Sums
from nugnn.planning.measure_links import Exchange, as_links, measure_copies, measure_exchanges, measure_sums


def exchanges_of(ranks: Ranks) -> tuple[Exchange, ...]:
    return measure_exchanges(ranks, seconds=0.3)


def test_every_pair_is_measured_and_all_ranks_know_the_same(ranks: Any) -> None:
    results = ranks.run(3, exchanges_of)
    assert results[0] == results[1] == results[2]
    assert [exchange.ends for exchange in results[0]] == [(0, 1), (0, 2), (1, 2)]
    for exchange in results[0]:
        assert 1e6 < exchange.bytes_per_second < 1e12 and 1e-6 < exchange.latency_seconds < 1


def sums_of(ranks: Ranks) -> Sums | None:
    return measure_sums(ranks, seconds=0.3)


def test_sums_are_measured_of_all_ranks_together(ranks: Any) -> None:
    results = ranks.run(3, sums_of)
    assert results[0] == results[1] == results[2]
    assert 1e6 < results[0].bytes_per_second < 1e12 and 1e-6 < results[0].latency_seconds < 1
    assert 1e-12 < results[0].core_seconds_per_byte < 1e-6
    assert measure_sums(Ranks(), seconds=0.1) is None


def wrongly_exchanged(ranks: Ranks) -> str:
    from nugnn.comm.compression.link import Link

    right = Link.exchange

    def exchange(self: Link, rows: torch.Tensor, *sizes: Any) -> torch.Tensor:
        return right(self, rows, *sizes) + int(ranks.rank == 1)

    Link.exchange = exchange  # type: ignore[method-assign]
    try:
        measure_exchanges(ranks, seconds=0.1)
    except RuntimeError as error:
        return str(error)
    finally:
        Link.exchange = right  # type: ignore[method-assign]
    return ""


def test_bytes_that_differ_have_no_rate_on_any_rank(ranks: Any) -> None:
    assert ranks.run(2, wrongly_exchanged) == ["bytes of an exchange between processes differ from what was sent"] * 2


def test_equal_links_are_one_of_a_kind_and_one_pair_keeps_its_names() -> None:
    (link,) = as_links([Exchange((0, 1), 5.0, 1e-5)], ["GPU-a", "GPU-b"], is_nccl=True)
    assert (link.ends, link.via, link.between) == (("GPU-a", "GPU-b"), "nccl", "devices")
    equal = [Exchange((0, 1), 100.0, 1e-5), Exchange((0, 2), 105.0, 1e-5), Exchange((1, 2), 109.0, 1e-5)]
    (link,) = as_links(equal, ["a", "b", "c"], is_nccl=False)
    assert (link.ends, link.via, link.bytes_per_second) == ((), "gloo", 105.0)
    assert as_links([], [], is_nccl=False) == ()
    (link,) = as_links([Exchange((0, 1), 5.0, 1e-5)], ["cpu", "cpu"], is_nccl=False, sums=Sums(8.0, 2e-5))
    assert (link.sum_bytes_per_second, link.sum_latency_seconds) == (8.0, 2e-5)
    assert link.few_seconds is None and link.burst_seconds is None
    rested = [Exchange(ends, 5.0, 1e-5, burst) for ends, burst in (((0, 1), 2e-3), ((0, 2), 3e-3), ((1, 2), 4e-3))]
    (link,) = as_links(rested, ["a", "b", "c"], is_nccl=False, sums=Sums(8.0, 2e-5, 1e-6, 5e-10))
    assert (link.few_seconds, link.burst_seconds) == (1e-6, 2e-3)
    assert link.sum_core_seconds_per_byte == 5e-10 and Sums.of(link) == Sums(8.0, 2e-5, 1e-6, 5e-10)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_between_a_gpu_and_its_host() -> None:
    rate, latency = measure_copies(torch.device("cuda", 0), seconds=0.5, on_note=print)
    assert 1e8 < rate < 1e12 and 1e-7 < latency < 1e-2
