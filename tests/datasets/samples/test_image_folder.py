"""Folders of images: classes by folder, one size for all, kept or decoded on demand with the same result."""

import sys

import numpy as np
import pytest
import torch
from PIL import Image

from nugnn.datasets.samples import image_folder, load_samples


def picture(seed, size=(6, 4), mode="RGB"):
    """Width and height ``size``."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def save_all(folder, classes=("cat", "dog"), count=10, **options):
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            picture(100 * number + i, **options).save(folder / name / f"{i:03}.png")
    return folder


def test_classes_are_folders_and_images_become_rgb_in_0_to_1(tmp_path):
    save_all(tmp_path)
    (tmp_path / "dog" / "notes.txt").write_text("not an image")
    data = load_samples(f"imagefolder:{tmp_path}")
    assert [len(part) for _, part in data.parts] == [14, 2, 4]
    assert (data.class_names, data.input_shape) == (("cat", "dog"), (3, 4, 6))
    found = torch.cat([part.x[part.labels == 1] for _, part in data.parts]).flatten(1).tolist()
    wanted = [np.asarray(picture(100 + i)).transpose(2, 0, 1).reshape(-1).tolist() for i in range(10)]
    assert sorted(found) == sorted(wanted)
    x, _ = data.train[0]
    assert torch.equal(x, data.train.x[0].float() / 255)


def test_parts_are_folders_too(tmp_path):
    for part, count in (("train", 5), ("valid", 2), ("test", 3)):
        save_all(tmp_path / part, count=count)
    data = load_samples(f"imagefolder:{tmp_path.name}", tmp_path.parent)  # relative: found in the data folder
    assert [len(part) for _, part in data.parts] == [10, 4, 6]
    (tmp_path / "mouse").mkdir()
    with pytest.raises(ValueError, match="'mouse'; is it a class, or a part"):
        load_samples(f"imagefolder:{tmp_path}")


@pytest.mark.parametrize("image_size", [None, 3])
def test_images_that_do_not_fit_into_memory_are_decoded_on_demand(tmp_path, monkeypatch, image_size):
    save_all(tmp_path)
    kept = load_samples(f"imagefolder:{tmp_path}", image_size=image_size)
    monkeypatch.setattr(image_folder, "_KEPT_BYTES", 0)
    on_demand = load_samples(f"imagefolder:{tmp_path}", image_size=image_size)
    assert isinstance(on_demand.train, image_folder.ImageFiles)
    for (_, one), (_, other) in zip(kept.parts, on_demand.parts, strict=True):
        assert len(one) == len(other)
        for number in range(len(one)):
            assert torch.equal(one[number][0], other[number][0])
            assert one[number][1] == other[number][1]


def test_one_size_by_scaling_the_shorter_side_and_cropping_the_middle(tmp_path):
    for name, colour in (("a", (255, 0, 0)), ("b", (0, 0, 255))):
        (tmp_path / name).mkdir()
        for number, (width, height) in enumerate([(8, 4), (4, 8), (5, 5), (1, 9)]):
            image = Image.new("RGB", (width, height), (0, 255, 0))  # the border, which is cut off
            image.paste(colour, ((width - 4) // 2, (height - 4) // 2, (width + 4) // 2, (height + 4) // 2))
            image.save(tmp_path / name / f"{number}.png")
    data = load_samples(f"imagefolder:{tmp_path}", image_size=4, test_fraction=0, val_fraction=0)
    assert data.input_shape == (3, 4, 4)
    assert data.train.x[0, :, 0, 0].tolist() == [255, 0, 0]
    assert (data.train.x[:2] == data.train.x[0, :, :1, :1]).all()


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1"])
def test_other_modes_become_rgb(tmp_path, mode):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(2):
            picture(i, mode=mode).save(tmp_path / name / f"{i}.png")
    data = load_samples(f"imagefolder:{tmp_path}")
    expected = np.asarray(picture(0, mode=mode).convert("RGB")).transpose(2, 0, 1)
    assert any(np.array_equal(x.numpy(), expected) for x in data.train.x)


def cut(path):
    path.write_bytes(path.read_bytes()[:60])


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda root: cut(root / "dog" / "003.png"), r"003.png cannot be read as an image"),
        (lambda root: (root / "dog" / "003.png").write_bytes(b"no image"), r"003.png cannot be read as an image"),
        (lambda root: (root / "dog" / "003.png").write_bytes(b""), r"003.png cannot be read as an image"),
        (lambda root: picture(0, size=(7, 4)).save(root / "dog" / "003.png"), r"003.png has 7 x 4 .*000.png 6 x 4"),
        (
            lambda root: Image.fromarray(np.zeros((4, 6), np.uint16)).save(root / "dog" / "003.png"),
            r"003.png is of mode 'I;16', more than 8 bits",
        ),
        (lambda root: (root / "empty").mkdir(), r"empty: there is no image in it"),
    ],
)
def test_broken_folders_are_refused(tmp_path, spoil, problem):
    spoil(save_all(tmp_path))
    with pytest.raises(ValueError, match=problem):
        load_samples(f"imagefolder:{tmp_path}")


def test_no_error_advises_to_remove_what_is_the_users(tmp_path):
    """A path that holds no set of images may be a slip: ``imagefolder:/tmp``."""
    for spoil in (
        lambda root: (root / "empty").mkdir(parents=True),
        lambda root: (root / "a" / "deep").mkdir(parents=True),
        lambda root: (save_all(root / "train"), (root / "mouse").mkdir()),
        lambda root: cut(save_all(root) / "dog" / "003.png"),
    ):
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        spoil(root)
        with pytest.raises(ValueError, match=str(root)) as caught:
            load_samples(f"imagefolder:{root}")
        assert not {"remove", "delete", "away"} & set(str(caught.value).lower().replace(",", " ").split())


def test_folders_without_classes_or_with_one_are_refused(tmp_path):
    with pytest.raises(ValueError, match="make one for each class"):
        load_samples(f"imagefolder:{tmp_path}")
    save_all(tmp_path, classes=("cat",))
    with pytest.raises(ValueError, match="nothing can be learned"):
        load_samples(f"imagefolder:{tmp_path}")


def test_a_class_without_training_images_is_refused(tmp_path):
    save_all(tmp_path / "train")
    save_all(tmp_path / "test", classes=("cat", "dog", "mouse"))
    with pytest.raises(ValueError, match=r"mouse.000.png: no training sample has the label 'mouse'"):
        load_samples(f"imagefolder:{tmp_path}")


def test_without_pillow_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"nugnn\[images\]"):
        load_samples(f"imagefolder:{tmp_path}")
