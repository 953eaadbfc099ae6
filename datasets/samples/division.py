"""Who learns and who judges, where a data set does not say: drawn class by class from a seed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nugnn.datasets.counter_hash import counter_hash

VAL_FRACTION, TEST_FRACTION = 0.1, 0.2


class Division(NamedTuple):
    """Ascending int64 numbers of the samples of each part."""

    train: np.ndarray
    val: np.ndarray
    test: np.ndarray


def divide(
    labels: np.ndarray, *, seed: int, val_fraction: float = VAL_FRACTION, test_fraction: float = TEST_FRACTION
) -> Division:
    """Divide samples so that each class has its proportion in each part, the same on every machine.

    Of a class with n samples, ``round(val_fraction * n)`` go to val and ``round(test_fraction * n)`` to test, halves
    rounded up, but at least one sample is left to train on.

    Args:
        labels: ``(n,)`` integers.
        seed: Of the draw.
        val_fraction: In [0, 1).
        test_fraction: In [0, 1); both together leave something to train.

    Raises:
        ValueError: fractions outside their range.

    >>> [len(part) for part in divide(np.repeat([0, 1], 50), seed=0)]
    [70, 10, 20]
    """
    if not (0 <= val_fraction < 1 and 0 <= test_fraction < 1 and val_fraction + test_fraction < 1):
        raise ValueError(
            f"a val fraction of {val_fraction} and a test fraction of {test_fraction} leave nothing to train on; "
            "both are at least 0, and their sum is below 1"
        )
    order = np.argsort(counter_hash(seed, "samples split", np.arange(len(labels))), kind="stable")
    order = order[np.argsort(labels[order], kind="stable")]  # class by class, drawn within
    parts: tuple[list[np.ndarray], ...] = ([], [], [])
    counts = np.unique(labels, return_counts=True)[1]
    for members in np.split(order, np.cumsum(counts)[:-1]):
        num_val = int(val_fraction * len(members) + 0.5)
        num_test = min(int(test_fraction * len(members) + 0.5), len(members) - 1)
        num_val = min(num_val, len(members) - 1 - num_test)
        for part, piece in zip(parts, np.split(members, [num_val, num_val + num_test]), strict=True):
            part.append(piece)
    val, test, train = (np.sort(np.concatenate(part)) for part in parts)
    return Division(train, val, test)
