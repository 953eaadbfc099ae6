"""Plans of halo wires: within the time, of least error, never worse for more time, and from measured rows."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nugnn.comm import halo_bits
from nugnn.comm.groups import Ranks
from nugnn.comm.halo_auto import RowWatch, measured_speed, rounds_of_pairs
from nugnn.comm.halo_bits import CANDIDATES, LEAST_GAIN, HaloBits, LinkSpeed, Traffic, least_error, plan_bits
from nugnn.comm.halo_mode import HaloMode
from nugnn.comm.halo_target import HaloTarget, checked_target
from nugnn.comm.halo_wire import HaloWire
from nugnn.kernels.philox import RandomKey

SLACK = 1e-9
"""Sums of at most a dozen numbers below 10, in float64."""

_amounts = st.one_of(st.sampled_from([0.0, 1.0, 2.0]), st.floats(0, 4))
_journeys = st.lists(st.lists(st.tuples(_amounts, _amounts), min_size=1, max_size=4), min_size=1, max_size=5)


def _of(values: list[list[tuple[float, float]]], place: int, choice: Any) -> float:
    return math.fsum(journey[c][place] for journey, c in zip(values, choice, strict=True))


@settings(max_examples=60, deadline=None)
@given(journeys=_journeys, budgets=st.lists(st.floats(0, 12), min_size=2, max_size=4))
def test_a_choice_is_within_budget_of_least_error_and_no_worse_for_more(
    journeys: list[list[tuple[float, float]]], budgets: list[float]
) -> None:
    seconds, errors = ([[c[place] for c in of_one] for of_one in journeys] for place in (0, 1))
    every = list(itertools.product(*(range(len(of_one)) for of_one in journeys)))
    fastest = _of(journeys, 0, [min(range(len(s)), key=s.__getitem__) for s in seconds])
    fronts = [halo_bits._front(s, e) for s, e in zip(seconds, errors, strict=True)]
    hulls = [halo_bits._hull(front) for front in fronts]
    most_of_a_step = max((a[1] - b[1] for hull in hulls for a, b in itertools.pairwise(hull)), default=0.0)
    before = [math.inf, math.inf]
    for budget in sorted(budgets):
        exact, greedy = least_error(seconds, errors, budget), halo_bits._greedy(fronts, budget)
        within = [c for c in every if _of(journeys, 0, c) <= budget]
        if not within:
            assert _of(journeys, 0, exact) == pytest.approx(fastest, abs=SLACK)
            assert _of(journeys, 0, greedy) == pytest.approx(fastest, abs=SLACK)
            continue
        assert max(_of(journeys, 0, exact), _of(journeys, 0, greedy)) <= budget + SLACK
        least = min(_of(journeys, 1, c) for c in within)
        assert _of(journeys, 1, exact) == pytest.approx(least, abs=SLACK)
        assert _of(journeys, 1, greedy) <= least + most_of_a_step + SLACK
        now = [_of(journeys, 1, exact), _of(journeys, 1, greedy)]
        assert all(n <= b + SLACK for n, b in zip(now, before, strict=True))
        before = now


def _traffic(seed: int = 0, num_ranks: int = 3, num_names: int = 2, width: int = 32) -> Traffic:
    generator = np.random.default_rng(seed)
    rows = generator.integers(1, 50, (num_names, num_ranks, num_ranks)) * (1 - np.eye(num_ranks, dtype=int))
    row_bytes = np.array([HaloWire(name).row_bytes(width, torch.float32) for name in CANDIDATES])
    ranges = rows * generator.uniform(1, 9, rows.shape)
    squares = rows * width * generator.uniform(0.1, 1, rows.shape)
    errors = np.zeros((*rows.shape, len(CANDIDATES)))
    for place in np.ndindex(rows.shape):
        errors[place] = halo_bits.rounding_errors(ranges[place], squares[place], width)
    names = tuple(f"rows {number}" for number in range(num_names))
    return Traffic(names, 2 * num_names, rows[..., None] * row_bytes, errors, squares, rows * float(width))


def _speed(num_ranks: int = 3, slow: float = 1.0, codec: float = 0.0) -> LinkSpeed:
    """Microseconds a byte; those from and to rank 0 take ``slow`` times as long."""
    each = [
        [0.0 if a == b else 1e-6 * (slow if 0 in (a, b) else 1.0) for b in range(num_ranks)] for a in range(num_ranks)
    ]
    return LinkSpeed(1e-4, tuple(map(tuple, each)), (0.0, *[codec] * (len(CANDIDATES) - 1)))


@pytest.mark.parametrize("num_names", [1, 4])
def test_a_plan_keeps_to_its_target_and_errs_less_with_more_time(num_names: int) -> None:
    traffic, compute = _traffic(num_names=num_names), 0.01
    plans = [plan_bits(traffic, _speed(), compute, HaloTarget(share / 5, True)) for share in range(50)]
    whole = plans[0].plain_seconds
    fastest = (traffic.num_bytes.min(-1) * np.array(_speed().seconds_per_byte)).sum() + 2 * num_names * 1e-4
    for plan in plans:
        nearly = fastest + LEAST_GAIN * (compute + fastest)
        assert fastest <= plan.seconds <= max(plan.target_seconds, nearly) * (1 + SLACK)
        assert plan.plain_seconds == whole
        assert sum(plan.values.values()) == traffic.num_values.sum()
    assert [plan.error for plan in plans] == sorted((plan.error for plan in plans), reverse=True)
    assert plans[-1].target_seconds > whole and plans[-1].error == 0
    assert all(map(plans[-1].is_plain, traffic.names)) and not any(map(plans[0].is_plain, traffic.names))
    assert HaloBits.from_plain({**vars(plans[3])}) == plans[3]


def test_rows_on_a_slow_link_get_fewer_bits() -> None:
    plan = plan_bits(_traffic(), _speed(slow=50.0), 0.01, HaloTarget(0.02, False))
    bits = {name: number for number, name in enumerate(CANDIDATES)}
    for rows in plan.wires.values():
        slow = [bits[rows[a][b]] for a in range(3) for b in range(3) if a != b and 0 in (a, b)]
        fast = [bits[rows[1][2]], bits[rows[2][1]]]
        assert max(fast) < min(slow)


def test_what_brings_nothing_is_left_alone() -> None:
    traffic, fast = _traffic(), LinkSpeed(0.0, tuple([(0.0,) * 3] * 3), (0.0, *[1e-9] * 4))
    none = HaloTarget(0.0, False)
    assert all(map(plan_bits(traffic, fast, 0.01, none).is_plain, traffic.names))
    # what bytes save, the codec takes
    slow_codec = plan_bits(traffic, _speed(codec=1e-4), 0.01, none)
    assert all(map(slow_codec.is_plain, traffic.names)) and slow_codec.seconds == slow_codec.plain_seconds
    # a step that computes long would not notice
    assert all(map(plan_bits(traffic, _speed(), 10.0, none).is_plain, traffic.names))
    # nothing travels
    empty = Traffic((), 0, np.zeros((0, 3, 3, 5)), np.zeros((0, 3, 3, 5)), np.zeros((0, 3, 3)), np.zeros((0, 3, 3)))
    assert plan_bits(empty, _speed(), 0.01, none).wires == {}


@pytest.mark.parametrize("width", [1, 3, 64])
def test_the_watch_knows_bytes_and_errors_of_rows(width: int) -> None:
    rows = torch.randn(600, width, generator=torch.Generator().manual_seed(0))
    splits, watch = (0, 200, 400), RowWatch()
    watch.see("x", rows, splits)
    watch.see("y", rows.bfloat16(), splits)
    traffic = _alone(watch)
    for number, part in enumerate(rows.split(splits)):
        assert traffic.squares[0, 0, number] == pytest.approx(float(part.double().square().sum()), rel=1e-5)
        for place, name in enumerate(CANDIDATES):
            wire = HaloWire(name)
            assert traffic.num_bytes[0, 0, number, place] == len(part) * wire.row_bytes(width, torch.float32)
            assert traffic.num_bytes[1, 0, number, place] == len(part) * wire.row_bytes(width, torch.bfloat16)
            expected = traffic.errors[0, 0, number, place]
            if not wire.compresses(width, torch.float32):
                assert expected == 0
            elif wire.is_random and len(part) and width == 64:
                out = torch.empty_like(part)
                wire.decode(wire.encode(part, RandomKey(1, 2, 3), torch.arange(len(part))), out)
                error = float((out - part).double().square().sum())
                # 2 of 64 values are the ends of their row and exact; an error's square deviates by at most 1.5 times
                # its mean, so 5 deviations of a mean over n values are 7.5 / sqrt(n). Steps of 2 bits are so wide that
                # values are not spread evenly over them, and f (1 - f) lies up to 1/4 - 1/6 off its mean over a step
                rough = 0.5 if name == "int2" else 0.0
                assert abs(error / expected - 1) <= 2 / 64 + 7.5 / math.sqrt(part.numel()) + rough
    assert watch.num_exchanges == 2 and watch.num_columns == width


def _alone(watch: RowWatch) -> Traffic:
    """Of rank 0 as if it had peers."""

    class _Peers(Ranks):
        def sum_(self, x: torch.Tensor) -> torch.Tensor:
            return x

    return watch.over_ranks(_Peers(0, 3))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 6, 7])
def test_every_two_ranks_meet_once(num_ranks: int) -> None:
    rounds = rounds_of_pairs(num_ranks)
    assert all(len({rank for pair in pairs for rank in pair}) == 2 * len(pairs) for pairs in rounds)
    met = sorted(pair for pairs in rounds for pair in pairs)
    assert met == sorted(itertools.combinations(range(num_ranks), 2))


def _measured(ranks: Ranks) -> LinkSpeed:
    busiest = np.arange(9.0).reshape(3, 3) * 1000 * (1 - np.eye(3))
    return measured_speed(ranks, busiest, 16)


def test_a_measured_link_is_the_same_for_all(ranks: Any) -> None:
    first, *others = ranks.run(3, _measured)
    assert all(speed == first for speed in others)
    each, codec = np.array(first.seconds_per_byte), np.array(first.codec_seconds_per_value)
    assert first.latency_seconds > 0 and (np.diag(each) == 0).all() and (each >= 0).all()
    assert codec[0] == 0 and (codec[1:] > 0).all()


def test_targets() -> None:
    for text in ("25%", "0%", "0.05s", "150%"):
        assert str(HaloTarget.parse(text)) == text
    assert HaloTarget.parse("25%").seconds(2.0) == 0.5 and HaloTarget.parse("3s").seconds(2.0) == 3.0
    for wrong in ("25", "-1s", "nan%", "infs", "s", "", "1 ms"):
        with pytest.raises(ValueError, match="is not known; choose a share of the computation such as 10%"):
            HaloTarget.parse(wrong)
    assert checked_target(None, halo_wire="auto", mode=HaloMode()) == HaloTarget(0.1, True)
    assert checked_target(None, halo_wire="int8", mode=HaloMode()) is None
    with pytest.raises(ValueError, match="halo_target has no effect on halo_wire int8, only on auto"):
        checked_target("10%", halo_wire="int8", mode=HaloMode())
    with pytest.raises(ValueError, match="under sampled boundaries these change from step to step"):
        checked_target(None, halo_wire="auto", mode=HaloMode.parse("sampled:0.5"))
