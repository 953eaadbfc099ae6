"""What is asked for is what cuts; where nothing is, large graphs that need many cuts get the quick one."""

from __future__ import annotations

from typing import get_args

import pytest

from nugnn.planning.loop_method import LARGE_EDGES, Partitioner, loop_method
from nugnn.planning.plan import SharesBy


@pytest.mark.parametrize("edges", [0, LARGE_EDGES - 1, LARGE_EDGES, 10 * LARGE_EDGES])
@pytest.mark.parametrize("shares_by", get_args(SharesBy))
def test_which_partitioner_cuts(edges: int, shares_by: SharesBy) -> None:
    for asked in get_args(Partitioner):
        if asked != "auto":
            assert loop_method(asked, edges, shares_by) == asked
    needs_many = shares_by == "auto" and edges >= LARGE_EDGES
    assert loop_method("auto", edges, shares_by) == ("clusters" if needs_many else "metis")
