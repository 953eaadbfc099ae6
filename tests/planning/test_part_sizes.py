"""What parts of a cut can have at most: held against cuts of small graphs, counted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nugnn.planning.expected_halo import ExpectedHalo
from nugnn.planning.part_sizes import PartSizes, bounded
from nugnn.planning.share_curves import relaxed_sizes, scaled_sizes
from nugnn.planning.work_model import count_sizes


@st.composite
def graphs(draw, most_nodes: int) -> tuple[int, list[int], list[int]]:
    """Nodes, sources and destinations; self-loops and parallel edges among them."""
    nodes = draw(st.integers(2, most_nodes))
    ends = draw(st.lists(st.tuples(st.integers(0, nodes - 1), st.integers(0, nodes - 1)), max_size=3 * nodes))
    return nodes, [one for one, _ in ends], [other for _, other in ends]


@given(graphs(14), st.integers(1, 5), st.randoms(use_true_random=False))
def test_parts_of_cuts_have_no_more_than_that(graph, num_parts, random):
    nodes, src, dst = graph
    part = np.array([random.randrange(num_parts) for _ in range(nodes)])
    parts = count_sizes(src, dst, part, num_parts)
    across = [(one, other) for one, other in zip(src, dst, strict=True) if part[one] != part[other]]
    for number, sizes in enumerate(parts):
        assert bounded(sizes, nodes, len(src), num_parts) == sizes
        assert sizes.halo <= sum(part[other] == number for _, other in across) <= sizes.edges
    assert sum(sizes.halo for sizes in parts) == sum(sizes.sent for sizes in parts) <= len(across)


@given(
    st.builds(PartSizes, inner=st.integers(1, 10**6), edges=st.integers(0, 10**7), train=st.integers(0, 100)),
    st.floats(0, 1),
    st.one_of(st.floats(0, 100), st.builds(ExpectedHalo, st.floats(0, 100), st.floats(0, 100))),
    st.integers(1, 5000),
)
def test_what_is_expected_of_a_part_is_within_its_edges_and_the_nodes_outside(whole, fraction, halo, num_parts):
    sizes = relaxed_sizes(whole, fraction, halo, num_parts)
    rest = whole.inner - sizes.inner
    assert sizes.halo <= min(sizes.edges, rest)
    assert sizes.sent <= min(whole.edges - sizes.edges, sizes.inner * rest, sizes.inner * (num_parts - 1))
    assert num_parts > 1 or not (sizes.halo or sizes.sent)
    grown = scaled_sizes(sizes, 7.5, whole.inner)
    assert grown.halo <= whole.inner - grown.inner and grown.sent <= grown.inner * (whole.inner - grown.inner)


@given(st.floats(0.01, 100), st.floats(0, 100), st.floats(0.01, 0.99))
def test_of_two_parts_each_sends_what_the_other_reads(of_two, degree, fraction):
    whole = PartSizes(inner=10**6, edges=round(10**6 * degree))
    one, other = (relaxed_sizes(whole, f, ExpectedHalo(of_two, degree), 2) for f in (fraction, 1 - fraction))
    if one.inner + other.inner == whole.inner:
        small, large = sorted((one, other), key=lambda sizes: sizes.inner)
        assert large.sent == pytest.approx(min(small.halo, large.inner), abs=2)
        assert small.sent <= small.inner


@given(graphs(7), st.integers(1, 9))
def test_a_part_drawn_at_random_needs_no_more_rows_than_the_bound_in_the_mean(graph, tenths):
    """All parts are tried, each with its probability; however uneven the degrees are."""
    nodes, src, dst = graph
    f = tenths / 10
    mean = 0.0
    for mask in range(2**nodes):
        part = np.array([mask >> node & 1 for node in range(nodes)])
        own = int(part.sum())
        mean += f**own * (1 - f) ** (nodes - own) * count_sizes(src, dst, part, 2)[1].halo
    degree = sum(one != other for one, other in zip(src, dst, strict=True)) / nodes
    assert mean <= ExpectedHalo(1e9, degree)(f) * f * nodes * (1 + 1e-12) + 1e-12


@given(st.floats(0, 3), st.floats(1e-9, 1))
def test_no_more_rows_are_expected_than_edges_come_from_outside(degree, fraction):
    assert ExpectedHalo(1e9, degree)(fraction) <= degree * (1 - fraction) * (1 + 1e-9)
