"""Targets, tolerance, and the repair that moves nodes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nugnn.partition import balance as balance_module
from nugnn.partition.balance import (
    Balance,
    heaviest_first,
    normalise_shares,
    reachable_shares,
    repair,
    settle,
    split_in_order,
)


@given(shares=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12), scale=st.floats(1e-200, 1e200))
def test_shares_sum_to_one_and_only_their_ratio_matters(shares, scale):
    normal = normalise_shares(shares)
    # P additions and two divisions, each within eps of values below 1
    slack = (len(shares) + 2) * np.finfo(float).eps
    assert abs(sum(normal) - 1) <= slack
    assert normalise_shares([share * scale for share in shares]) == pytest.approx(normal, rel=4 * slack)


@given(shares=st.lists(st.floats(1e-6, 1), min_size=1, max_size=12), spare=st.integers(0, 30))
def test_reachable_shares_give_every_part_an_average_node(shares, spare):
    num_nodes = len(shares) + spare
    reachable = reachable_shares(normalise_shares(shares), num_nodes)
    slack = 1e-12  # a dozen sums and products of numbers below 1
    assert sum(reachable) == pytest.approx(1, abs=slack)
    assert min(reachable) >= 1 / num_nodes - slack
    raised = [after <= 1 / num_nodes + slack for after in reachable]
    free = [after / before for after, before, up in zip(reachable, shares, raised, strict=True) if not up]
    assert not free or max(free) == pytest.approx(min(free), rel=1e-9)  # the others keep their proportions


@settings(deadline=None, max_examples=150)
@given(
    weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=60),
    shares=st.lists(st.floats(0.05, 1), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
def test_settling_keeps_every_part_used_and_reaches_the_tolerance(weights, shares, seed):
    shares = reachable_shares(normalise_shares(shares[: len(weights)]), len(weights))
    balance = Balance(np.array(weights)[:, None], shares, 0.02)
    rng = np.random.default_rng(seed)
    start = rng.integers(0, rng.integers(1, len(shares) + 1), len(weights))
    kept, notes = start.copy(), []

    repaired, moved = repair(start, balance, None)
    assert (start == kept).all()
    assert moved == (repaired != start).sum()
    assert set(repaired) == set(range(len(shares)))

    settled = settle(start, balance, None, notes)
    assert set(settled) == set(range(len(shares)))
    if not spent_on_empty_parts(heaviest_first(balance), weights, len(shares)):
        assert balance.violations(settled) == []


def spent_on_empty_parts(part, weights, num_parts) -> bool:
    """Whether the lightest node, given last, has a part to itself: then it may have been forced there."""
    last = part[np.argsort(-np.array(weights), kind="stable")][-1]
    return num_parts > 1 and int((part == last).sum()) == 1


@given(
    weights=st.lists(st.floats(0, 10), min_size=6, max_size=40).filter(lambda w: sum(w) > 1),
    shares=st.lists(st.floats(0.05, 1), min_size=1, max_size=6),
)
def test_a_split_order_is_one_run_per_part(weights, shares):
    balance = Balance(np.array(weights)[:, None], normalise_shares(shares), 0.02)
    order = np.random.default_rng(0).permutation(len(weights))
    runs = split_in_order(order, balance)[order]
    assert (np.diff(runs) >= 0).all()
    assert set(runs) == set(range(len(shares)))


@given(
    weights=st.lists(st.floats(0.01, 10), min_size=1, max_size=60),
    shares=st.lists(st.floats(0.01, 1), min_size=1, max_size=8),
)
def test_heaviest_first_stays_within_the_heaviest_node(weights, shares):
    shares = normalise_shares(shares[: len(weights)])
    balance = Balance(np.array(weights)[:, None], shares, 0.0)
    part = heaviest_first(balance)
    assert set(part) == set(range(len(shares)))
    if not spent_on_empty_parts(part, weights, len(shares)):
        loads = np.bincount(part, weights=weights, minlength=len(shares))
        # 1e-12 of the total: the rounding of at most 60 additions
        assert (np.abs(loads - np.array(shares) * sum(weights)) <= max(weights) + 1e-12 * sum(weights)).all()


def test_settle_turns_to_heaviest_first_when_moves_do_not_help(monkeypatch):
    balance = Balance(np.array([[5.0], [1.0], [1.0], [1.0], [1.0], [1.0]]), (0.5, 0.5), 0.02)
    start, notes = np.zeros(6, np.int64), []
    settled = settle(start, balance, None, notes)
    assert balance.violations(settled) == []
    assert "Repaired by moving" in notes[0]
    monkeypatch.setattr(balance_module, "repair", lambda part, *args: (part, 0))
    settled = settle(start, balance, None, notes)
    assert settled.tolist() == [0, 1, 1, 1, 1, 1]
    assert "gave out the nodes heaviest first" in notes[1]
    assert settle(settled, balance, None, notes) is settled


def test_violations_name_part_column_and_both_shares():
    balance = Balance(np.tile([[1.0, 2.0]], (100, 1)), (0.5, 0.5), 0.02)
    found = balance.violations(np.repeat([0, 1], [60, 40]))
    assert found[0] == "part 0 has 60.00% of node weight column 0 where 50.00% was asked for"
    assert len(found) == 4
    assert balance.violations(np.repeat([0, 1], [51, 49])) == []
    assert "part 1 is empty" in balance.violations(np.zeros(100, np.int64))
