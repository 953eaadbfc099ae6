"""Counts come out of texts as they went in; expected halo rows never exceed the nodes that there are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nugnn.planning.expected_halo import ExpectedHalo
from nugnn.planning.graph_statistics import PRESETS, GraphStatistics, StatisticsError, parse_statistics


def test_presets_and_counts() -> None:
    papers = parse_statistics("ogbn_papers100m")
    assert papers is PRESETS["ogbn-papers100M"] and papers.nodes == 111_059_956 and papers.train == 1_207_179
    assert parse_statistics("nodes=5, edges=1_0, features=3,classes=2,train=1") == GraphStatistics(
        nodes=5, edges=10, features=3, classes=2, train=1
    )
    both = parse_statistics("ogbn-arxiv,undirected=true")
    assert both.sizes("add").edges == 2 * 1_166_243 + 169_343 and both.name == "ogbn-arxiv, changed"
    assert both.sizes("keep").edges == 2 * 1_166_243 == both.facts("remove").edges


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ogbn-product", "'ogbn-product' is not known; did you mean ogbn-products"),
        ("nodes=5", "edges, features, classes, train missing"),
        ("ogbn-arxiv,node=3", "'node=3' is not one of .*did you mean nodes"),
        ("ogbn-arxiv,nodes=3.5", "nodes=3.5 is not allowed; allowed: a whole number"),
        ("ogbn-arxiv,nodes=0", "nodes is 0, must be 1 or more"),
        ("ogbn-arxiv,nodes=1e99", r"nodes is 1e\+99, must be below 3.52e\+13"),
        ("ogbn-arxiv,train=1e6", "1000000 training nodes of 169343"),
        ("ogbn-arxiv,halo=-1", "halo is -1.0"),
        ("ogbn-arxiv,halo=nan", "halo is nan"),
        ("ogbn-arxiv,undirected=maybe", "allowed: true or false"),
        ("ogbn-arxiv,train=1,train=2", "train is given twice"),
        ("", "is not known"),
    ],
)
def test_what_is_wrong_is_said(text: str, message: str) -> None:
    with pytest.raises(StatisticsError, match=message):
        parse_statistics(text)


@given(st.floats(0, 50), st.floats(1e-9, 1.0))
def test_expected_halo_is_no_more_than_there_are_nodes(of_two: float, fraction: float) -> None:
    rows = ExpectedHalo(of_two)(fraction)
    assert 0 <= rows * fraction <= 1 - fraction + 1e-12


@given(st.floats(0, 50), st.integers(1, 20))
def test_more_parts_have_more_halo_together(of_two: float, halvings: int) -> None:
    halo = ExpectedHalo(of_two)
    assert halo(2.0**-halvings) >= halo(2.0 ** (1 - halvings)) * (1 - 1e-12)
