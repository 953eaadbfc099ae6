"""The arithmetic of steps over slow links: the model, and where two ways cross."""

from __future__ import annotations

import math

import link_rows
import pytest
from hypothesis import given
from hypothesis import strategies as st

seconds, sizes = st.floats(1e-3, 10), st.floats(1e3, 1e9)


@given(local=seconds, sent=sizes, more_local=seconds, share=st.floats(0.01, 0.99))
def test_ways_take_the_same_time_where_they_cross(local: float, sent: float, more_local: float, share: float) -> None:
    exact, short = (local, sent), (local + more_local, share * sent)
    rate = link_rows.predicted_crossover(exact, short)
    at_rate = [link_rows.predicted_seconds(*side, rate) for side in (exact, short)]
    assert at_rate[0] == pytest.approx(at_rate[1], rel=1e-9)
    assert link_rows.predicted_seconds(*short, rate / 2) < link_rows.predicted_seconds(*exact, rate / 2)
    assert link_rows.predicted_seconds(*short, 2 * rate) > link_rows.predicted_seconds(*exact, 2 * rate)


def test_who_sends_less_and_computes_less_always_wins() -> None:
    assert link_rows.predicted_crossover((1.0, 100.0), (1.0, 50.0)) == math.inf
    assert link_rows.predicted_crossover((1.0, 50.0), (2.0, 100.0)) == 0
    assert link_rows.predicted_crossover((1.0, 50.0), (0.5, 100.0)) == 0  # it wins above a rate, if at all


@given(local=seconds, more_local=seconds, crossing=st.floats(0.2, 5))
def test_what_is_measured_crosses_between_the_right_rates(local: float, more_local: float, crossing: float) -> None:
    sent = 1e9
    saved = crossing * link_rows.PAYLOAD_SHARE * 1e9 * more_local / 8
    exact = {rate: link_rows.predicted_seconds(local, sent + saved, rate) for rate in (0.1, 0.3, 1.0, 3.0, 10.0)}
    short = {rate: link_rows.predicted_seconds(local + more_local, sent, rate) for rate in exact}
    found = link_rows.measured_crossover(exact, short)
    below = max(rate for rate in exact if rate <= crossing)
    above = min(rate for rate in exact if rate >= crossing)
    assert below * (1 - 1e-9) <= found <= above * (1 + 1e-9)


def test_crossings_beyond_the_rates_are_said_to_be_there() -> None:
    assert link_rows.measured_crossover({0.1: 2, 1: 2}, {0.1: 1, 1: 1}) == math.inf
    assert link_rows.measured_crossover({0.1: 1, 1: 1}, {0.1: 2, 1: 2}) == 0
