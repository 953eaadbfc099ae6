"""A folder of image files, one folder for each class, read with Pillow."""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from nugnn.datasets.download import Progress
from nugnn.datasets.samples.class_labels import refuse_unseen
from nugnn.datasets.samples.division import Division
from nugnn.datasets.samples.parts import PART_NAMES, joined
from nugnn.datasets.samples.sample_data import SampleData
from nugnn.datasets.samples.tensor_samples import TensorSamples

if TYPE_CHECKING:
    from PIL import Image

_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")  # 8 bits a channel: the others would be clipped
_MOST_PIXELS = 89_478_485  # where Pillow too begins to suspect a decompression bomb
_KEPT_BYTES = 1 << 28
_NUM_THREADS = 4


class _Listed(NamedTuple):
    """Files in the order of classes and names, and each file's class."""

    files: list[Path]
    labels: np.ndarray


class ImageFiles(Dataset[tuple[Tensor, int]]):
    """Images decoded when they are asked for; for sets that do not fit into memory.

    Args:
        files: One for each sample.
        labels: ``(n,)`` int64.
        size: Height and width of every ``x``.
        is_fitted: Whether images are scaled and cropped to that size; otherwise they have it.
    """

    def __init__(self, files: Sequence[Path], labels: Tensor, size: tuple[int, int], is_fitted: bool) -> None:
        self.files, self.labels, self.size, self.is_fitted = list(files), labels, size, is_fitted

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        pixels = read_image(self.files[number], self.size, self.is_fitted)
        return torch.from_numpy(pixels).to(torch.float32).div_(255), int(self.labels[number])

    def content_hash(self) -> str:
        """sha256 over names and sizes of the files, labels and size, not over pixels; as 64 hexadecimal digits."""
        facts = (f"{file.parent.name}/{file.name} {file.stat().st_size}" for file in self.files)
        digest = hashlib.sha256(f"{self.size} {self.is_fitted}\n".encode())
        digest.update("\n".join(facts).encode("utf-8", "surrogateescape"))
        digest.update(self.labels.contiguous().numpy().data)
        return digest.hexdigest()


def load_image_folder(
    path: Path,
    *,
    image_size: int | None,
    seed: int,
    val_fraction: float | None,
    test_fraction: float | None,
    progress: Progress | None = None,
) -> SampleData:
    """``PATH/CLASS/FILE``, or ``PATH/train/CLASS/FILE`` with ``val`` (``valid``, ``dev``) and ``test`` beside it.

    Images become RGB in [0, 1]; transparency is dropped, and orientation tags are not followed. Where ``val`` is
    missing it is drawn from the training images; where both are missing, both are. Up to 256 MiB are kept as bytes in
    memory; more are decoded when they are asked for.

    Args:
        path: The folder.
        image_size: Scale each image so that its shorter side has so many pixels, and take the square in the middle;
            None when all have one size.
        seed: Of the division, where one is drawn.
        val_fraction: See `parts.joined`.
        test_fraction: See `parts.joined`.
        progress: Called with files looked at and their number.

    Raises:
        ImportError: Pillow is not installed.
        ValueError: no such folder, no classes or images in it, files that are no images, images of several sizes, or a
            class that no training image has; with the file.
    """
    _pillow()
    if not path.is_dir():
        raise ValueError(f"{path}: {'is a file, not a folder' if path.exists() else 'no such folder'}")
    if image_size is not None and image_size < 1:
        raise ValueError(f"an image size of {image_size} pixels; it is at least 1")
    places = _part_folders(path)
    class_names = tuple(sorted({folder.name for place in places.values() for folder in _class_folders(place)}))
    if not class_names:
        raise ValueError(f"{path}: there is no folder in it; make one for each class, and put the images of it there")
    listed = {part: _listed(place, class_names) for part, place in places.items()}
    files = [file for one in listed.values() for file in one.files]
    labels = np.concatenate([one.labels for one in listed.values()])
    size = _common_size(files, image_size, progress)
    counts = {part: len(one.files) for part, one in listed.items()}
    division = joined(counts, labels, seed=seed, val_fraction=val_fraction, test_fraction=test_fraction)
    refuse_unseen(labels, division.train, class_names, lambda sample: str(files[sample]))
    train, val, test = _datasets(files, labels, division, size, image_size is not None)
    return SampleData(
        name=path.resolve().name,
        kind="image",
        train=train,
        val=val,
        test=test,
        num_classes=len(class_names),
        class_names=class_names,
        input_shape=(3, *size),
    )


def read_image(path: Path, size: tuple[int, int], is_fitted: bool) -> np.ndarray:
    """``(3, height, width)`` uint8; scaled and cropped when ``is_fitted``.

    Raises:
        ValueError: the file is damaged, or no longer of that size.
    """
    image_type = _pillow()
    height, width = size
    try:
        with image_type.open(path) as opened:
            _check(path, opened)
            image = opened.convert("RGB")
    except ValueError as error:
        raise error if str(path) in str(error) else _unreadable(path, error) from error
    except Exception as error:  # a damaged image can raise nearly anything in a decoder
        raise _unreadable(path, error) from error
    if is_fitted:
        scale = max(height / image.height, width / image.width)
        scaled = (max(width, round(image.width * scale)), max(height, round(image.height * scale)))
        image = image.resize(scaled, image_type.Resampling.BILINEAR)
        left, top = (scaled[0] - width) // 2, (scaled[1] - height) // 2
        image = image.crop((left, top, left + width, top + height))
    if image.size != (width, height):
        raise ValueError(f"{path} has {_sides(image.size)} pixels, and had {_sides((width, height))} before")
    return np.ascontiguousarray(np.asarray(image, dtype=np.uint8).transpose(2, 0, 1))


def _part_folders(path: Path) -> dict[str, Path]:
    """The folder of each part; ``all`` for a folder that is not divided."""
    found: dict[str, Path] = {}
    for folder in _class_folders(path):
        part = PART_NAMES.get(folder.name.lower())
        if part is not None:
            if part in found:
                raise ValueError(f"{path}: {found[part].name} and {folder.name} mean the same part; keep one")
            found[part] = folder
    if "train" not in found:
        return {"all": path}
    others = [folder.name for folder in _class_folders(path) if folder not in found.values()]
    if others:
        raise ValueError(
            f"{path}: beside {', '.join(place.name for place in found.values())} there is the folder {others[0]!r}; "
            "is it a class, or a part? A class belongs into each part, and anything else beside this folder"
        )
    return found


def _class_folders(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _listed(place: Path, class_names: Sequence[str]) -> _Listed:
    number = {name: label for label, name in enumerate(class_names)}
    files: list[Path] = []
    labels: list[int] = []
    for folder in _class_folders(place):
        inside = [
            Path(parent, name)
            for parent, folders, names in os.walk(folder)
            if folders.sort() is None  # in place: the order in which they are walked
            for name in sorted(names)
            if name.lower().endswith(_SUFFIXES) and not name.startswith(".")
        ]
        if not inside:
            raise ValueError(
                f"{folder}: there is no image in it (looked for {', '.join(_SUFFIXES)}), and each folder in {place} "
                "stands for a class; name the folder in which each class has a folder of its images"
            )
        files += inside
        labels += [number[folder.name]] * len(inside)
    if not files:
        raise ValueError(f"{place}: there is no folder in it; make one for each class")
    return _Listed(files, np.array(labels, dtype=np.int64))


def _common_size(files: Sequence[Path], image_size: int | None, progress: Progress | None) -> tuple[int, int]:
    """Height and width of every sample, from the headers of all files."""
    image_type = _pillow()
    first: tuple[int, int] | None = None
    for number, file in enumerate(files):
        try:
            with image_type.open(file) as image:
                _check(file, image)
                sides = image.size
        except ValueError as error:
            raise error if str(file) in str(error) else _unreadable(file, error) from error
        except Exception as error:  # as above
            raise _unreadable(file, error) from error
        first = first or sides
        if image_size is None and sides != first:
            raise ValueError(
                f"{file} has {_sides(sides)} pixels and {files[0]} {_sides(first)}; give one size for all with "
                "--image-size, or scale them"
            )
        if progress is not None and (number % 1000 == 999 or number == len(files) - 1):
            progress(number + 1, len(files))
    assert first is not None
    return (first[1], first[0]) if image_size is None else (image_size, image_size)


def _check(path: Path, image: Image.Image) -> None:
    if image.mode not in _MODES:
        raise ValueError(
            f"{path} is of mode {image.mode!r}, more than 8 bits a channel, which RGB cannot hold; convert it first"
        )
    if image.width * image.height > _MOST_PIXELS:
        raise ValueError(f"{path} has {_sides(image.size)} pixels, more than {_MOST_PIXELS:,}; scale it down first")


def _datasets(
    files: Sequence[Path], labels: np.ndarray, division: Division, size: tuple[int, int], is_fitted: bool
) -> list[Dataset[tuple[Tensor, int]]]:
    if 3 * size[0] * size[1] * len(files) > _KEPT_BYTES:
        return [
            ImageFiles([files[number] for number in ids], torch.from_numpy(labels[ids]), size, is_fitted)
            for ids in division
        ]
    pixels = np.empty((len(files), 3, *size), np.uint8)
    with concurrent.futures.ThreadPoolExecutor(_NUM_THREADS) as pool:  # Pillow decodes without holding the GIL
        for number, image in enumerate(pool.map(lambda file: read_image(file, size, is_fitted), files)):
            pixels[number] = image
    return [
        TensorSamples(torch.from_numpy(pixels[ids]), torch.from_numpy(labels[ids]), largest=255.0) for ids in division
    ]


def _sides(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"


def _unreadable(path: Path, error: BaseException) -> ValueError:
    return ValueError(
        f"{path} cannot be read as an image ({str(error)[:200]}); get the file again, or keep it elsewhere"
    )


def _pillow():  # type: ignore[no-untyped-def]  # the module PIL.Image
    try:
        from PIL import Image
    except ImportError:
        raise ImportError("folders of images need Pillow: pip install 'nugnn[images]'") from None
    return Image
