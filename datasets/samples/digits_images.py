"""The built-in images: scikit-learn's 1,797 handwritten digits of 8 x 8 pixels."""

from __future__ import annotations

import numpy as np

from nugnn.datasets.digits import images
from nugnn.datasets.samples.division import divide
from nugnn.datasets.samples.image_arrays import image_parts
from nugnn.datasets.samples.sample_data import SampleData

_LARGEST_PIXEL = 16


def digits_images(seed: int, val_fraction: float, test_fraction: float) -> SampleData:
    """The digits as ``(1, 8, 8)`` float32 in [0, 1], divided class by class.

    Args:
        seed: Of the division.
        val_fraction: Of all images.
        test_fraction: Of all images.

    Raises:
        ImportError: scikit-learn, which carries the images, is not installed.

    Source: UCI "Optical Recognition of Handwritten Digits" test set, as in ``sklearn.datasets.load_digits``.
    """
    pixels, labels = images()
    division = divide(labels, seed=seed, val_fraction=val_fraction, test_fraction=test_fraction)
    train, val, test = image_parts(pixels.reshape(-1, 8, 8).astype(np.uint8), labels, division, _LARGEST_PIXEL)
    return SampleData(
        name="digits-images",
        kind="image",
        train=train,
        val=val,
        test=test,
        num_classes=10,
        class_names=tuple("0123456789"),
        input_shape=(1, 8, 8),
    )
