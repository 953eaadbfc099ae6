"""What rows that travel take each rank: measured by the run's own exchange, and kept as a file that is checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exchange_time import let_exchanges_take
from nugnn.comm.groups import Ranks
from nugnn.planning.links import Links
from nugnn.planning.measure_ways import Travel, _line, measure_ways
from nugnn.planning.measured_ways import MeasuredWays, Way, WaysError, read_ways

_SLOW, _FAST = (0.02, 5e-8), (1e-4, 1e-9)
"""Latency, and seconds of a byte."""


def ways_of(ranks: Ranks, travel: Travel) -> tuple[Way, ...]:
    return measure_ways(ranks, travel, seconds=0.3)


def ways_of_a_slow_rank(ranks: Ranks, travel: Travel, slow: int) -> tuple[Way, ...]:
    """Rank ``slow`` takes longer with what has come."""
    latency, of_byte = _SLOW if ranks.rank == slow else _FAST
    undo = let_exchanges_take(lambda num_bytes: latency + of_byte * num_bytes)
    try:
        return measure_ways(ranks, travel, seconds=0.3)
    finally:
        undo()


def test_every_rank_knows_every_way(ranks: Any) -> None:
    rows = ((0, 900, 0), (700, 0, 40_000), (300, 20, 0))
    results = ranks.run(3, ways_of, Travel(rows=rows, row_bytes=(64,)))
    assert results[0] == results[1] == results[2]
    assert sorted((way.rank, way.peer) for way in results[0]) == [(a, b) for a in range(3) for b in range(3) if a != b]
    assert all(1e6 < way.bytes_per_second < 1e12 and 1e-6 < way.latency_seconds < 1 for way in results[0])


def test_who_takes_longer_with_rows_is_seen_at_that_end(ranks: Any) -> None:
    travel = Travel(rows=((0, 20_000), (15_000, 0)), row_bytes=(64, 28))
    ways = sorted(ranks.run(2, ways_of_a_slow_rank, travel, slow=1)[0], key=lambda way: way.rank)
    for way, (latency, of_byte) in zip(ways, (_FAST, _SLOW), strict=True):
        # the smallest exchange has a row of 28 bytes
        assert way.latency_seconds == pytest.approx(latency + 28 * of_byte)
        # bytes are those of the direction that has more; rank 0 receives three for four that it sends
        assert way.bytes_per_second == pytest.approx((4 / 3, 1)[way.rank] / of_byte, rel=1e-3)


def test_a_rate_comes_from_what_is_beyond_the_latency() -> None:
    latency, per_byte = _line([1e-4, 1e-4 + 1e-3, 1e-4 + 4e-3], [64, 1_000_000, 4_000_000])
    assert (latency, per_byte) == pytest.approx((1e-4, 1e-9))
    # noise may make the smallest the longest: a rate is there still, within a factor of two of all seconds
    assert _line([5e-3, 1e-3, 4e-3], [64, 1_000_000, 4_000_000])[1] == pytest.approx(0.5e-9)
    assert _line([0.0, 0.0, 0.0], [64, 1_000_000, 4_000_000])[1] > 0


def ways(rates: dict[tuple[int, int], float]) -> MeasuredWays:
    each = [Way(rank=a, peer=b, bytes_per_second=rate, latency_seconds=1e-4) for (a, b), rate in rates.items()]
    return MeasuredWays(schema="nugnn.ways/1", via="gloo", num_ranks=2, ways=tuple(each), versions={"torch": "2"})


def test_links_are_those_that_were_measured() -> None:
    before = Links(np.full((2, 2), 1e9), np.zeros((2, 2)), (0, 0), {0: 1e9}, np.array([1e-9, 0.0]))
    links = ways({(0, 1): 5e8, (1, 0): 2e8}).over(before)
    assert (links.bytes_per_second[0, 1], links.bytes_per_second[1, 0]) == (5e8, 2e8)
    assert links.latency_seconds[1, 0] == 1e-4 and not any(links.stages) and links.host_bytes_per_second == {0: 1e9}
    with pytest.raises(WaysError, match="between 2 ranks were measured, and there are 3"):
        ways({(0, 1): 5e8, (1, 0): 2e8}).over(Links.equal(3, 1e9))


def test_a_file_is_read_back_equal_and_a_broken_one_is_refused(tmp_path: Path) -> None:
    whole, path = ways({(0, 1): 5e8, (1, 0): 2e8}), tmp_path / "ways.json"
    path.write_text(whole.to_json())
    assert read_ways(path) == whole
    content = json.loads(path.read_text())
    for change, said in (
        ({"schema": "nugnn.ways/2"}, "schema"),
        ({"ways": content["ways"][:1]}, "2 ranks need a way from each of them to each other one"),
        ({"num_ranks": 3}, "3 ranks need a way"),
        ({"num_ranks": 10**9}, "1000000000 ranks need a way"),
        ({"ways": content["ways"] + content["ways"][:1]}, "2 ranks need a way from each of them to each other one"),
        ({"ways": [content["ways"][0] | {"peer": 0}, content["ways"][1]]}, "2 ranks need a way"),
        ({"ways": [content["ways"][0] | {"peer": 2}, content["ways"][1]]}, "2 ranks need a way"),
        ({"ways": [content["ways"][0] | {"bytes_per_second": 0}, content["ways"][1]]}, "bytes_per_second"),
        ({"speed": 1}, "speed"),
    ):
        path.write_text(json.dumps(content | change))
        with pytest.raises(WaysError, match=said):
            read_ways(path)
    path.write_text(whole.to_json()[:-20])
    with pytest.raises(WaysError, match=r"ways\.json"):
        read_ways(path)
    with pytest.raises(WaysError, match="cannot be read: No such file"):
        read_ways(tmp_path / "none.json")
