"""Divisions: each class in proportion, every sample once, the same on every machine."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nugnn.datasets.samples.class_labels import class_numbers, refuse_unseen
from nugnn.datasets.samples.division import divide
from nugnn.datasets.samples.parts import joined


@given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=200),
    val=st.floats(0, 0.4),
    test=st.floats(0, 0.4),
    seed=st.integers(0, 2**40),
)
def test_every_sample_is_in_one_part_and_every_class_in_proportion(labels, val, test, seed):
    labels = np.array(labels)
    parts = divide(labels, seed=seed, val_fraction=val, test_fraction=test)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    for label in np.unique(labels):
        num = (labels == label).sum()
        num_train, num_val, num_test = ((labels[ids] == label).sum() for ids in parts)
        assert num_train >= 1
        assert abs(num_test - test * num) <= 0.5 or num_test == num - 1
        assert abs(num_val - val * num) <= 0.5 or num_train == 1


def test_a_division_is_the_same_everywhere():
    parts = divide(np.arange(20) % 2, seed=3, val_fraction=0.1, test_fraction=0.2)
    assert [part.tolist() for part in parts[1:]] == [[10, 11], [5, 9, 14, 16]]
    other = divide(np.arange(20) % 2, seed=4, val_fraction=0.1, test_fraction=0.2)
    assert not np.array_equal(parts.test, other.test)


@pytest.mark.parametrize("fractions", [(-0.1, 0.2), (0.5, 0.5), (1.0, 0.0), (float("nan"), 0.0)])
def test_fractions_that_leave_nothing_are_refused(fractions):
    with pytest.raises(ValueError, match="nothing to train on"):
        divide(np.zeros(4, int), seed=0, val_fraction=fractions[0], test_fraction=fractions[1])


def test_parts_that_are_there_are_kept_and_the_others_drawn():
    labels = np.zeros(30, int)
    given_parts = joined({"train": 20, "val": 4, "test": 6}, labels, seed=0, val_fraction=None, test_fraction=None)
    assert [part.tolist() for part in given_parts] == [[*range(20)], [*range(20, 24)], [*range(24, 30)]]
    drawn = joined({"train": 20, "test": 10}, labels, seed=0, val_fraction=0.25, test_fraction=None)
    assert len(drawn.val) == 5
    assert sorted([*drawn.train, *drawn.val]) == [*range(20)]
    assert drawn.test.tolist() == [*range(20, 30)]
    assert [len(part) for part in joined({"all": 30}, labels, seed=0, val_fraction=None, test_fraction=None)] == [
        21,
        3,
        6,
    ]
    with pytest.raises(ValueError, match="val part of their own"):
        joined({"train": 20, "val": 10}, labels, seed=0, val_fraction=0.1, test_fraction=None)
    with pytest.raises(ValueError, match="parts of their own"):
        joined({"train": 20, "test": 10}, labels, seed=0, val_fraction=None, test_fraction=0.1)


def place(sample):
    return f"sample {sample}"


def test_whole_numbers_are_numbered_by_value_and_words_by_code_point():
    assert class_numbers(["10", "9", "-1"], place)[1] == ("-1", "9", "10")
    assert class_numbers(["b", "10", "a"], place)[1] == ("10", "a", "b")


@pytest.mark.parametrize(
    ("labels", "problem"),
    [
        (["a", ""], "sample 1: the label is empty"),
        (["1", "2", "01"], "'01' is the same number as '1'|'1' is the same number as '01'"),
        (["1", "2.5"], "sample 1: .* fraction"),
        ([f"row{i}" for i in range(30)], "no set of classes"),
    ],
)
def test_labels_that_are_no_classes_are_refused(labels, problem):
    with pytest.raises(ValueError, match=problem):
        class_numbers(labels, place)


def test_a_label_that_cannot_be_learned_is_refused():
    labels, names = class_numbers(["a", "b", "a"], place)
    with pytest.raises(ValueError, match="sample 1: no training sample has the label 'b'"):
        refuse_unseen(labels, np.array([0, 2]), names, place)
