"""Samples in tensors: one by one, by list and by batch the same values."""

import pickle

import pytest
import torch

from nugnn.datasets.samples import TensorSamples
from nugnn.datasets.samples.sample_data import SampleData


@pytest.mark.parametrize(
    ("stored", "dtype", "largest"),
    [(torch.uint8, torch.float32, 255.0), (torch.int32, torch.int64, 1.0), (torch.float32, torch.float32, 2.0)],
)
def test_all_ways_to_a_sample_agree_and_leave_the_store_as_it_is(stored, dtype, largest):
    x = torch.arange(24).reshape(6, 2, 2).to(stored)
    samples = TensorSamples(x, torch.arange(6), dtype=dtype, largest=largest)
    before = x.clone()
    wanted = [4, 0, 4]
    for (one, label), (many, many_label) in zip(
        [samples[i] for i in wanted], samples.__getitems__(wanted), strict=True
    ):
        assert one.dtype == many.dtype == dtype
        assert torch.equal(one, many)
        assert label == many_label
        assert torch.equal(one, (before[label].double() / largest).to(dtype))
    batch, labels = samples.take(torch.tensor(wanted))
    assert torch.equal(batch, torch.stack([samples[i][0] for i in wanted]))
    assert labels.tolist() == wanted
    assert torch.equal(samples.x, before)
    assert torch.equal(pickle.loads(pickle.dumps(samples))[4][0], samples[4][0])


def test_a_loop_over_all_samples_ends():
    samples = TensorSamples(torch.zeros(3, 1), torch.arange(3))
    assert [label for _, label in samples] == [0, 1, 2]


def test_labels_have_to_fit():
    with pytest.raises(ValueError, match="one int64 label for each sample"):
        TensorSamples(torch.zeros(3, 1), torch.arange(4))
    with pytest.raises(ValueError, match="one int64 label for each sample"):
        TensorSamples(torch.zeros(3, 1), torch.zeros(3))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"num_classes": 1, "class_names": ("a",)}, "nothing can be learned"),
        ({"class_names": ("a",)}, "2 classes and 1 names"),
        ({"vocabulary_size": 5}, "vocabulary of 5"),
        ({"train": TensorSamples(torch.zeros(0, 1), torch.arange(0))}, "no training samples"),
    ],
)
def test_data_that_do_not_fit_together_are_refused(change, problem):
    part = TensorSamples(torch.zeros(2, 1), torch.arange(2))
    valid = {
        "name": "d",
        "kind": "table",
        "train": part,
        "val": part,
        "test": part,
        "num_classes": 2,
        "class_names": ("a", "b"),
        "input_shape": (1,),
    }
    SampleData(**valid)
    with pytest.raises(ValueError, match=problem):
        SampleData(**valid | change)
