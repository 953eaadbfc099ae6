"""Schedules over rows: every edge and every row exactly once, balanced, made once; sorting in bounded scratch."""

from __future__ import annotations

import gc
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nugnn.kernels import row_schedule as schedules
from nugnn.kernels import structure as structures
from nugnn.kernels.row_schedule import ROW_COST, RowSchedule, make_row_schedule, row_schedule
from nugnn.kernels.structure import Structure, edges_by_source

from .conftest import MakeStructure

DEGREES = st.lists(st.one_of(st.integers(0, 4), st.integers(0, 60)), max_size=60)


def offsets(degrees: list[int]) -> torch.Tensor:
    return torch.tensor([0, *degrees], dtype=torch.int64).cumsum(0)


@settings(max_examples=100, deadline=None)
@given(degrees=DEGREES, piece_edges=st.integers(1, 20), group_cost=st.integers(1, 60))
def test_each_row_and_each_edge_has_one_place(degrees: list[int], piece_edges: int, group_cost: int) -> None:
    indptr = offsets(degrees)
    schedule = make_row_schedule(indptr, piece_edges, group_cost)
    heavy = [row for row, degree in enumerate(degrees) if degree > piece_edges]
    assert schedule.split_rows.tolist() == heavy
    grouped = [
        row
        for begin, end in zip(schedule.group_begin.tolist(), schedule.group_end.tolist(), strict=True)
        for row in range(begin, end)
    ]
    assert grouped == [row for row in range(len(degrees)) if row not in heavy]
    assert sorted(schedule.lockstep_rows.tolist()) == grouped
    ptr = schedule.split_ptr.tolist()
    assert ptr[0] == 0 and ptr[-1] == schedule.num_pieces
    for s, row in enumerate(heavy):
        pieces = range(ptr[s], ptr[s + 1])
        assert schedule.piece_row[pieces.start : pieces.stop].tolist() == [row] * len(pieces)
        edges = [(int(schedule.piece_begin[p]), int(schedule.piece_end[p])) for p in pieces]
        assert edges[0][0] == indptr[row] and edges[-1][1] == indptr[row + 1]
        assert all(a[1] == b[0] for a, b in pairwise(edges))
        sizes = [end - begin for begin, end in edges]
        assert max(sizes) <= piece_edges and max(sizes) - min(sizes) <= 1


@settings(max_examples=50, deadline=None)
@given(degrees=DEGREES, piece_edges=st.integers(1, 20), group_cost=st.integers(1, 60))
def test_groups_are_balanced(degrees: list[int], piece_edges: int, group_cost: int) -> None:
    schedule = make_row_schedule(offsets(degrees), piece_edges, group_cost)
    for begin, end in zip(schedule.group_begin.tolist(), schedule.group_end.tolist(), strict=True):
        before_last = sum(degrees[row] + ROW_COST for row in range(begin, end - 1))
        assert begin < end and before_last < group_cost
    num_light = len(schedule.lockstep_rows)
    cost = sum(degrees[row] + ROW_COST for row in schedule.lockstep_rows.tolist())
    # a group ends at a multiple of the cost, at a heavy row, or at the end of the rows
    assert schedule.num_groups <= min(num_light, cost // group_cost + schedule.num_split + 1)


def test_lockstep_rows_sort_by_degree_among_neighbours_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "_WINDOW", 4)
    schedule = make_row_schedule(offsets([1, 3, 3, 0, 9, 2, 5, 2, 1]), piece_edges=8)
    assert schedule.lockstep_rows.tolist() == [1, 2, 0, 3, 6, 5, 7, 8]
    assert schedule.split_rows.tolist() == [4]


def test_a_schedule_is_made_once_per_structure_and_goes_with_it(make_structure: MakeStructure) -> None:
    structure = make_structure(5)
    first = row_schedule(structure.indptr)
    assert isinstance(first, RowSchedule) and row_schedule(structure.indptr) is first
    count = len(schedules._schedules)
    assert row_schedule(structure.transposed.indptr) is not first
    assert len(schedules._schedules) == count + 1
    del structure
    gc.collect()
    assert len(schedules._schedules) == count - 1


def test_sizes_must_be_positive() -> None:
    for sizes in ((0, 4), (4, 0)):
        with pytest.raises(ValueError, match="must be positive"):
            make_row_schedule(offsets([1]), *sizes)


@settings(max_examples=60, deadline=None)
@given(
    sources=st.lists(st.one_of(st.integers(0, 2), st.integers(0, 30)), max_size=80),
    num_src=st.integers(31, 40),
    edges_per_pass=st.integers(1, 90),
)
def test_sorting_by_ranges_of_sources_equals_one_stable_sort(
    sources: list[int], num_src: int, edges_per_pass: int
) -> None:
    indices = torch.tensor(sources, dtype=torch.int32)
    indptr = torch.zeros(num_src + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(indices, minlength=num_src), 0, out=indptr[1:])
    edges = edges_by_source(indices, indptr, edges_per_pass)
    assert edges.dtype == torch.int32 and torch.equal(edges.long(), torch.argsort(indices, stable=True))


def test_the_row_of_an_edge_is_found_in_the_offsets(
    make_structure: MakeStructure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structures, "_EDGES_PER_PASS", 4)
    structure = make_structure(6)  # with empty rows
    edges = torch.argsort(structure.indices, stable=True).int()
    rows = structures._rows_of_edges(structure.indptr, edges)
    assert rows.dtype == torch.int32 and torch.equal(rows, structure.dst[edges])


def test_a_structure_moves_once_and_stays_where_it_is(make_structure: MakeStructure) -> None:
    structure = make_structure(3, dtype=torch.int64)
    assert structure.to("cpu") is structure
    moved = structure.to("meta")
    assert moved is structure.to(torch.device("meta")) and moved.device.type == "meta"
    assert moved.indices.dtype == torch.int32 and moved.num_edges == structure.num_edges
    assert isinstance(moved, Structure) and moved.num_src == structure.num_src
