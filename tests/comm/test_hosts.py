"""Ranks by hosts: each in one row and one column, a row and a column share one rank; the name of a host."""

from __future__ import annotations

import platform
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nugnn.comm.hosts import host_grid, host_name, make_host_groups, numbered, why_no_grid


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_a_grid_has_every_rank_in_one_row_and_one_column(hosts: list[str]) -> None:
    numbers = numbered(hosts)
    assert all((a == b) == (x == y) for a, x in zip(hosts, numbers, strict=True) for b, y in zip(hosts, numbers))  # noqa: B905
    grid, sizes = host_grid(numbers), list(Counter(numbers).values())
    assert (grid is not None) == (len(sizes) > 1 and sizes[0] > 1 and len(set(sizes)) == 1)
    assert (why_no_grid(numbers) is not None) == (len(set(sizes)) > 1)
    if grid is None:
        return
    assert grid.hosts() == numbers
    for way in (grid.rows, grid.columns):
        assert sorted(rank for members in way for rank in members) == list(range(len(hosts)))
        assert all(members == tuple(sorted(members)) for members in way)
    assert all(len(set(row) & set(column)) == 1 for row in grid.rows for column in grid.columns)
    made: list[list[object]] = []
    for rank in range(len(hosts)):
        asked: list[object] = []
        groups = make_host_groups(grid, rank, lambda members, asked=asked: asked.append(members) or members)  # type: ignore[misc]
        assert rank in groups.inside and rank in groups.across
        made.append(asked)
    assert all(asked == made[0] for asked in made)  # torch waits for ever where ranks make groups in another order


def test_hosts_of_unequal_numbers_of_ranks_are_named() -> None:
    assert "hosts have 2, 1 workers" in str(why_no_grid([0, 0, 1]))


def test_the_name_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUGNN_HOST", raising=False)
    assert host_name() == platform.node()
    monkeypatch.setenv("NUGNN_HOST", "rack-3")
    assert host_name() == "rack-3"
