"""The partition book: its maps invert each other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nugnn.partition.book import PartitionBook


@given(parts=st.lists(st.integers(0, 4), max_size=50))
def test_global_to_local_and_back(parts):
    book = PartitionBook.from_parts(torch.tensor(parts, dtype=torch.int32), 5)
    for part in range(5):
        ids = book.global_ids(part)
        assert ids.tolist() == [node for node, owner in enumerate(parts) if owner == part]
        assert book.local_ids(ids).tolist() == list(range(len(ids)))
        assert book.part_of(ids).tolist() == [part] * len(ids)
        assert book.positions(ids).tolist() == list(range(int(book.offsets[part]), int(book.offsets[part + 1])))
    assert book.node_counts == tuple(parts.count(part) for part in range(5))
    assert (book.num_nodes, book.num_parts) == (len(parts), 5)


def test_unknown_ids_and_parts_are_refused():
    book = PartitionBook.from_parts(torch.tensor([0, 1, 0]), 2)
    with pytest.raises(ValueError, match="id 3 is out of range for 3 nodes"):
        book.part_of(torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="id -1 is out of range"):
        book.local_ids(torch.tensor([-1]))
    with pytest.raises(ValueError, match="part 2 does not exist; parts are 0 to 1"):
        book.global_ids(2)
    with pytest.raises(ValueError, match="parts reach from 0 to 2; they must lie in 0 to 1"):
        PartitionBook.from_parts(torch.tensor([0, 2]), 2)
