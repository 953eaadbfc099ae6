"""class_ids: NaN and negative numbers mean unlabelled, everything else stays an exact integer."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nugnn.datasets import class_ids


@given(st.lists(st.one_of(st.none(), st.integers(0, 1000)), max_size=20))
def test_floats_with_gaps_become_ids_with_minus_one(labels):
    column = torch.tensor([float("nan") if label is None else float(label) for label in labels])
    expected = [-1 if label is None else label for label in labels]
    ids = class_ids(column)
    assert ids.dtype == torch.int64
    assert ids.tolist() == expected
    assert class_ids(column[:, None]).tolist() == expected


@given(st.lists(st.integers(-3, 1000), max_size=20))
def test_integers_stay_and_negative_ones_are_unlabelled(labels):
    assert class_ids(torch.tensor(labels, dtype=torch.int64)).tolist() == [max(-1, label) for label in labels]


@pytest.mark.parametrize("value", [0.5, float("inf"), 1e12])
def test_values_that_are_no_class_are_refused_with_their_row(value):
    with pytest.raises(ValueError, match="label row 1 is"):
        class_ids(torch.tensor([0.0, value]))


def test_several_columns_are_refused():
    with pytest.raises(ValueError, match="one column"):
        class_ids(torch.zeros(3, 2))
