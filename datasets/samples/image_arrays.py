"""MNIST, Fashion-MNIST and CIFAR-10 from the files that their authors publish, or from an ``.npz``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from nugnn.datasets.download import Progress
from nugnn.datasets.npz_arrays import npz_arrays, npz_keys
from nugnn.datasets.samples.division import Division, divide
from nugnn.datasets.samples.idx import read_idx
from nugnn.datasets.samples.image_sources import NPZ_KEYS, ImageSet, fetched, is_unfinished
from nugnn.datasets.samples.sample_data import SampleData
from nugnn.datasets.samples.tensor_samples import TensorSamples
from nugnn.datasets.sources import normalised

_TRAIN_SHARE_OF_UNDIVIDED = 0.8
_CIFAR_BATCHES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
_CIFAR_TEST = "test_batch.bin"
_CIFAR_IMAGE_BYTES = 3 * 32 * 32
_UNDIVIDED = ("x", "y")


def load_image_set(
    known: ImageSet, data_dir: Path | None, store: Path, *, seed: int, val_fraction: float, progress: Progress | None
) -> SampleData:
    """Images of a named set; the first that is there of a folder of its name in ``data_dir``, ``data_dir`` itself, the
    same in ``store``, and a download into ``store``.

    The published training images are divided into train and val, class by class; the published test images are test.
    Of an ``.npz`` with ``x`` and ``y`` alone, the first four fifths are the training images.

    Args:
        known: Which.
        data_dir: The user's folder, or None.
        store: The cache folder.
        seed: Of the division.
        val_fraction: Of the training images that go to val.
        progress: Called as bytes arrive.

    Raises:
        ValueError: broken files, or none and no network; says which files are wanted and where from.
    """
    for folder in (data_dir, store):
        for place in _places(known, folder):
            if folder is store and is_unfinished(known, place):
                continue
            found = _read(known, place)
            if found is not None:
                return _sample_data(known, *found, seed, val_fraction)
    folder = fetched(known, data_dir, store, progress)
    found = _read(known, folder)
    if found is None:
        raise ValueError(f"{folder} lacks some of the files of {known.name}; remove it and load again")
    return _sample_data(known, *found, seed, val_fraction)


Images = tuple[np.ndarray, np.ndarray]


def _places(known: ImageSet, folder: Path | None) -> Iterator[Path]:
    """Files and folders where the set may lie: called like it, then the folder itself; with torchvision's ``raw``."""
    if folder is None or not folder.is_dir():
        return
    entries = sorted(folder.iterdir())
    for name in known.folders:
        for entry in entries:
            stem = entry.name.removesuffix(".npz") if entry.is_file() else entry.name
            if normalised(stem) == name:
                yield entry
                if (entry / "raw").is_dir():
                    yield entry / "raw"
    yield folder
    if (folder / "raw").is_dir():
        yield folder / "raw"


def _read(known: ImageSet, place: Path) -> tuple[Images, Images | None] | None:
    """Train and test images in a file or folder, test None when it is not divided; None when it holds no such files."""
    if place.is_file():
        return _read_npz(place) if place.name.endswith(".npz") else None
    if known.kind == "cifar":
        if (place / "data_batch_1").is_file() and not (place / _CIFAR_BATCHES[0]).is_file():
            raise ValueError(
                f"{place} holds CIFAR-10 as pickled Python objects, and reading those runs code; get the binary "
                f"version, {known.files[0].url}"
            )
        if not (place / _CIFAR_BATCHES[0]).is_file():
            return _npz_in(known, place)
        train = [_read_cifar(place / name) for name in _CIFAR_BATCHES]
        images, labels = (np.concatenate(arrays) for arrays in zip(*train, strict=True))
        return (images, labels), _read_cifar(place / _CIFAR_TEST)
    if not any(_either(place, f"{part}-images", 3) for part in ("train", "t10k")):
        return _npz_in(known, place)
    return _read_pair(place, "train"), _read_pair(place, "t10k")


def _npz_in(known: ImageSet, folder: Path) -> tuple[Images, Images | None] | None:
    for name in known.folders:
        for file in sorted(folder.glob("*.npz")):
            if normalised(file.stem) == name:
                return _read_npz(file)
    return None


def _read_npz(path: Path) -> tuple[Images, Images | None]:
    keys = npz_keys(path)
    wanted = _UNDIVIDED if set(_UNDIVIDED) <= keys and not set(NPZ_KEYS) & keys else NPZ_KEYS
    arrays = npz_arrays(path, wanted)
    for key in wanted:
        axes = (3, 4) if key.startswith("x") else (1,)
        kinds = "u" if key.startswith("x") else "iu"
        array = arrays[key]
        if array.ndim not in axes or array.dtype.kind not in kinds or (key.startswith("x") and array.itemsize != 1):
            expected = "uint8 images (n, height, width)" if key.startswith("x") else "whole numbers (n,)"
            raise ValueError(
                f"{path}: {key} is {array.dtype} {array.shape}; expected {expected}, or with channels last"
            )
        if array.ndim == 4:
            arrays[key] = array.transpose(0, 3, 1, 2)
    pairs = [_checked(str(path), arrays[x], arrays[y]) for x, y in zip(wanted[::2], wanted[1::2], strict=True)]
    return pairs[0], pairs[1] if len(pairs) == 2 else None


def _either(folder: Path, name: str, num_axes: int) -> Path | None:
    """``NAME-idxN-ubyte`` or ``NAME.idxN-ubyte``, plain or ``.gz``."""
    for separator in "-.":
        for suffix in ("", ".gz"):
            path = folder / f"{name}{separator}idx{num_axes}-ubyte{suffix}"
            if path.is_file():
                return path
    return None


def _read_pair(folder: Path, part: str) -> Images:
    images, labels = _either(folder, f"{part}-images", 3), _either(folder, f"{part}-labels", 1)
    if images is None or labels is None:
        missing = f"{part}-images-idx3-ubyte" if images is None else f"{part}-labels-idx1-ubyte"
        raise ValueError(f"{folder}: {missing} is missing, plain or with .gz; put it beside the other files")
    return _checked(f"{images} and {labels.name}", read_idx(images, 3), read_idx(labels, 1))


def _read_cifar(path: Path) -> Images:
    """One binary batch: for each image its label, then 32 x 32 bytes red, green and blue."""
    if not path.is_file():
        raise ValueError(f"{path} is missing; put it beside the other batches, or get the archive again")
    size, record = path.stat().st_size, 1 + _CIFAR_IMAGE_BYTES
    if size == 0 or size % record:
        raise ValueError(
            f"{path} has {size} bytes, no whole number of images of {record}; it was cut off or is no CIFAR-10 batch "
            "of the binary version. Get the file again"
        )
    rows = np.fromfile(path, np.uint8).reshape(-1, record)
    return _checked(str(path), rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0])


def _checked(where: str, images: np.ndarray, labels: np.ndarray) -> Images:
    if len(images) != len(labels):
        raise ValueError(f"{where}: {len(images)} images and {len(labels)} labels; they belong to different files")
    if images.size == 0:
        raise ValueError(f"{where}: there are no images (shape {images.shape}); get the file again")
    return images, labels


def _sample_data(known: ImageSet, train: Images, test: Images | None, seed: int, val_fraction: float) -> SampleData:
    if test is None:
        num_train = int(len(train[0]) * _TRAIN_SHARE_OF_UNDIVIDED)
        train, test = (train[0][:num_train], train[1][:num_train]), (train[0][num_train:], train[1][num_train:])
    if train[0].shape[1:] != test[0].shape[1:]:
        raise ValueError(
            f"{known.name}: the training images have shape {train[0].shape[1:]}, the test images {test[0].shape[1:]}"
        )
    num_classes = len(known.class_names)
    for part, (_, labels) in (("training", train), ("test", test)):
        if len(labels) and not 0 <= labels.min() <= labels.max() < num_classes:
            wrong = int(np.argmax((labels < 0) | (labels >= num_classes)))
            raise ValueError(
                f"{known.name}: {part} image {wrong} has the label {labels[wrong]}; labels are 0 to {num_classes - 1}"
            )
    division = divide(train[1].astype(np.int64), seed=seed, val_fraction=val_fraction, test_fraction=0.0)
    parts = image_parts(train[0], train[1].astype(np.int64), division)
    test_part = image_parts(test[0], test[1].astype(np.int64), Division(np.arange(len(test[1])), *[np.arange(0)] * 2))
    return SampleData(
        name=known.name,
        kind="image",
        train=parts[0],
        val=parts[1],
        test=test_part[0],
        num_classes=num_classes,
        class_names=known.class_names,
        input_shape=tuple(parts[0].x.shape[1:]),
    )


def image_parts(
    images: np.ndarray, labels: np.ndarray, division: Division, largest: float = 255.0
) -> tuple[TensorSamples, TensorSamples, TensorSamples]:
    """Parts of uint8 images ``(n, height, width)`` or ``(n, channels, height, width)``, kept as bytes."""
    if images.ndim == 3:
        images = images[:, None]
    train, val, test = (
        TensorSamples(
            torch.from_numpy(np.ascontiguousarray(images[ids])), torch.from_numpy(labels[ids]), largest=largest
        )
        for ids in division
    )
    return train, val, test
