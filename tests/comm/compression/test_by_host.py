"""Sums inside hosts first: the same bits everywhere, an L-th of the bytes across hosts, nothing lost."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from nugnn.comm.compression.layout import Layout
from nugnn.comm.compression.link import Link, Sent
from nugnn.comm.compression.reduction import Rounding, sum_encoded
from nugnn.comm.compression.wire import WIRES, Wire
from nugnn.comm.groups import Ranks, groups_by_host
from nugnn.comm.local_ranks import run_local_ranks

HOSTS = ("aabb", "aaabbb", "aabbcc", "abcbca")
_SIZES = ([], [1], [6, 0, 1000], [65, 3, 2570, 1])


def _summands(num_ranks: int, size: int) -> Tensor:
    return torch.randn(num_ranks, size, generator=torch.Generator().manual_seed(size))


def _layout(sizes: list[int], name: str, num_ranks: int) -> Layout:
    wires = [Wire(name if size > 5 else "fp32", bucket=64) for size in sizes]
    return Layout(sizes, wires, range(len(sizes)), num_ranks)


def _sums(hosts: str, summands: Tensor, layout: Layout, rounding: Rounding) -> list[tuple[Tensor, Tensor, Sent]]:
    def run(ranks: Ranks) -> tuple[Any, ...]:
        link = Link.of(ranks, groups=groups_by_host(ranks))
        assert link.by_host is not None
        return *sum_encoded(summands[ranks.rank].clone(), layout, link, rounding, keep_rest=True), link.sent

    return run_local_ranks(len(hosts), run, hosts=hosts)


@pytest.mark.parametrize("hosts", HOSTS)
def test_every_rank_has_the_same_bits_and_rests_make_up_for_the_error(hosts: str) -> None:
    num_ranks, num_hosts = len(hosts), len(set(hosts))
    per_host = num_ranks // num_hosts
    for sizes in _SIZES:
        summands = _summands(num_ranks, sum(sizes))
        exact = summands.double().sum(0)
        for name in ("fp32", "bf16", "fp16", "8bit", "3bit", "1bit"):
            for rounding in (Rounding(), Rounding(seed=7, step=3)):
                layout = _layout(sizes, name, num_ranks)
                results = _sums(hosts, summands, layout, rounding)
                out = results[0][0]
                assert all(torch.equal(out, other) for other, *_ in results)
                error = (out.double() + sum(rest.double() for _, rest, _ in results) - exact).abs()
                # P - 1 additions and H + 1 subtractions in float32, of values below 2 P max
                bound = 2 * num_ranks * 2.0**-24 * 2 * num_ranks * float(summands.abs().amax() if sum(sizes) else 0)
                assert error.numel() == 0 or float(error.max()) <= bound
                pieces = layout.pieces(per_host)
                for rank, (_, rest, sent) in enumerate(results):
                    place = hosts[:rank].count(hosts[rank])
                    own, largest = pieces[place], max(piece.size for piece in pieces)
                    owner = sorted(r for r in range(num_ranks) if hosts[:r].count(hosts[r]) == place).index(rank)
                    across = sum(own.chunk_bytes) - own.chunk_bytes[owner] + (num_hosts - 1) * max(own.chunk_bytes)
                    inside = 4 * (layout.size - own.size) + 4 * (per_host - 1) * largest
                    assert (sent.across_bytes, sent.num_bytes) == (across, across + inside)
                    start = sum(piece.size for piece in pieces[:place])
                    assert not rest[:start].any() and not rest[start + own.size :].any()


def test_a_piece_is_what_hosts_alone_would_sum() -> None:
    """Each piece is the encoded sum, between as many ranks as there are hosts, of the sums of hosts."""
    size, hosts = 5000, "aaabbb"
    summands = _summands(6, size)
    layout = _layout([size], "3bit", 6)
    found = _sums(hosts, summands, layout, Rounding(seed=1))[0][0]
    of_hosts = [summands[0] + summands[1] + summands[2], summands[3] + summands[4] + summands[5]]
    start, expected = 0, []
    for piece in layout.pieces(3):

        def run(ranks: Ranks, piece: Layout = piece, start: int = start) -> Tensor:
            values = of_hosts[ranks.rank][start : start + piece.size]
            return sum_encoded(values, piece, Link.of(ranks), Rounding(seed=1), keep_rest=False)[0]

        expected.append(run_local_ranks(2, run)[0])
        start += piece.size
    assert torch.equal(found, torch.cat(expected))


@pytest.mark.parametrize(("hosts", "expected"), [("aabb", 0.155), ("aaaabbbb", 0.155), ("aabbccdd", 0.166)])
def test_the_error_is_that_of_as_many_ranks_as_there_are_hosts(hosts: str, expected: float) -> None:
    size = 1 << 17
    summands = _summands(len(hosts), size)
    layout = Layout([size], [Wire("4bit")], [0], len(hosts))
    out, exact = _sums(hosts, summands, layout, Rounding())[0][0], summands.sum(0)
    assert float((out - exact).norm() / exact.norm()) == pytest.approx(expected, rel=0.02)


def test_whole_numbers_that_travel_as_they_are_have_the_plain_sum() -> None:
    summands = _summands(6, 3000).mul(1000).round()
    for hosts in ("aaabbb", "aabbcc"):
        out = _sums(hosts, summands, _layout([2000, 1000], "fp32", 6), Rounding())[0][0]
        assert torch.equal(out, summands.sum(0))


def test_what_is_not_finite_on_one_rank_is_nan_on_all() -> None:
    for name in WIRES:
        for bad in (math.nan, math.inf, -math.inf):
            summands = torch.ones(4, 300)
            summands[2, 100] = bad
            for out, *_ in _sums("aabb", summands, _layout([300], name, 4), Rounding()):
                assert not torch.isfinite(out[100]) and torch.equal(out[:64], torch.full((64,), 4.0))


def test_fewer_bytes_leave_a_host() -> None:
    """An L-th for each rank of what leaves it where every rank exchanges with every other one, times (H-1) L / (P-1)."""
    size, num_ranks = 1 << 18, 8
    summands = _summands(num_ranks, size)

    def flat(ranks: Ranks) -> int:
        link = Link.of(ranks)
        sum_encoded(summands[ranks.rank], layout, link, Rounding(), keep_rest=False)
        return link.sent.across_bytes

    layout = Layout([size], [Wire("4bit")], [0], num_ranks)
    for hosts in ("aaaabbbb", "aabbccdd"):
        num_hosts = len(set(hosts))
        per_host = num_ranks // num_hosts
        before = sum(run_local_ranks(num_ranks, flat, hosts=hosts))
        after = sum(sent.across_bytes for *_, sent in _sums(hosts, summands, layout, Rounding()))
        total = sum(layout.chunk_bytes)
        assert after == 2 * (num_hosts - 1) * total  # both ways once between hosts, whatever the number of their ranks
        assert before == per_host * after
