"""Named sets of images: every layout gives the same images; broken files are refused with their names."""

import gzip
import re
import struct
import tarfile

import numpy as np
import pytest
import torch

from nugnn.datasets import download
from nugnn.datasets.samples import load_samples
from nugnn.datasets.samples.idx import read_idx
from nugnn.datasets.samples.image_sources import IMAGE_SETS

GENERATOR = np.random.default_rng(0)
TRAIN = (GENERATOR.integers(0, 256, (40, 5, 4), dtype=np.uint8), np.arange(40, dtype=np.uint8) % 10)
TEST = (GENERATOR.integers(0, 256, (10, 5, 4), dtype=np.uint8), np.arange(10, dtype=np.uint8))


def idx(array):
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def idx_folder(folder, separator="-", gz=False):
    folder.mkdir(parents=True, exist_ok=True)
    for part, (images, labels) in (("train", TRAIN), ("t10k", TEST)):
        for name, array in ((f"{part}-images", images), (f"{part}-labels", labels)):
            content = idx(array)
            path = folder / f"{name}{separator}idx{array.ndim}-ubyte{'.gz' if gz else ''}"
            path.write_bytes(gzip.compress(content) if gz else content)
    return folder


def npz_folder(folder):
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / "mnist.npz", x_train=TRAIN[0], y_train=TRAIN[1], x_test=TEST[0], y_test=TEST[1])


LAYOUTS = {
    "plain files in the folder itself": idx_folder,
    "compressed in a folder of its name": lambda root: idx_folder(root / "mnist", gz=True),
    "torchvision": lambda root: idx_folder(root / "MNIST" / "raw"),
    "dots in names": lambda root: idx_folder(root / "mnist", separator="."),
    "npz": npz_folder,
    "npz in a folder": lambda root: npz_folder(root / "mnist_test"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_images(tmp_path, layout):
    LAYOUTS[layout](tmp_path)
    data = load_samples("mnist", tmp_path, cache=tmp_path / "cache", val_fraction=0)
    assert [len(part) for _, part in data.parts] == [40, 0, 10]
    assert (data.kind, data.input_shape, data.num_classes) == ("image", (1, 5, 4), 10)
    assert torch.equal(data.test.x[:, 0], torch.from_numpy(TEST[0]))
    assert torch.equal(data.train.x[:, 0], torch.from_numpy(TRAIN[0]))
    assert data.train.labels.tolist() == TRAIN[1].tolist()
    x, _ = data.train[3]
    assert torch.equal(x[0], torch.from_numpy(TRAIN[0][3].astype(np.float32) / np.float32(255)))


def test_val_is_drawn_from_the_training_images_only(tmp_path):
    idx_folder(tmp_path)
    data = load_samples("mnist", tmp_path, val_fraction=0.25, seed=2)
    assert [len(part) for _, part in data.parts] == [30, 10, 10]
    assert sorted(data.val.labels.tolist()) == [*range(10)]
    both = torch.cat([data.train.x, data.val.x]).flatten(1).tolist()
    assert sorted(both) == sorted(TRAIN[0].reshape(40, -1).tolist())
    assert torch.equal(data.test.x[:, 0], torch.from_numpy(TEST[0]))
    with pytest.raises(ValueError, match="test images of its own"):
        load_samples("mnist", tmp_path, test_fraction=0.1)


def test_an_undivided_npz_is_cut_after_four_fifths(tmp_path):
    np.savez(tmp_path / "mnist_test.npz", x=TRAIN[0], y=TRAIN[1])
    data = load_samples("mnist", tmp_path, val_fraction=0)
    assert torch.equal(data.train.x[:, 0], torch.from_numpy(TRAIN[0][:32]))
    assert torch.equal(data.test.x[:, 0], torch.from_numpy(TRAIN[0][32:]))


def test_digits_are_there_without_any_file():
    data = load_samples("digits-images")
    assert [len(part) for _, part in data.parts] == [1259, 179, 359]
    x, label = data.train[0]
    assert (x.shape, x.dtype, type(label)) == ((1, 8, 8), torch.float32, int)
    whole = torch.cat([part.take(torch.arange(len(part)))[0] for _, part in data.parts])
    assert (whole.min(), whole.max()) == (0, 1)
    for _, part in data.parts:
        counts = torch.bincount(part.labels, minlength=10)
        assert counts.max() - counts.min() <= 0.06 * len(part) / 10 + 1
    assert not torch.equal(load_samples("digits-images", seed=1).test.x, data.test.x)


def cifar_batch(start, count=20):
    labels = (np.arange(start, start + count) % 10).astype(np.uint8)
    pixels = GENERATOR.integers(0, 256, (count, 3072), dtype=np.uint8)
    return np.concatenate([labels[:, None], pixels], axis=1)


def cifar_folder(folder):
    folder.mkdir(parents=True)
    batches = [cifar_batch(number * 20) for number in range(6)]
    for number, batch in enumerate(batches[:5], start=1):
        batch.tofile(folder / f"data_batch_{number}.bin")
    batches[5].tofile(folder / "test_batch.bin")
    return batches


def test_cifar_in_its_binary_version(tmp_path):
    batches = cifar_folder(tmp_path / "cifar-10-batches-bin")
    data = load_samples("CIFAR10", tmp_path, val_fraction=0)
    assert data.input_shape == (3, 32, 32)
    assert data.class_names[:2] == ("airplane", "automobile")
    assert torch.equal(data.train.x.flatten(1), torch.from_numpy(np.concatenate(batches[:5])[:, 1:]))
    assert torch.equal(data.test.labels, torch.from_numpy(batches[5][:, 0]).long())


def test_pickled_cifar_is_refused(tmp_path):
    folder = tmp_path / "cifar10"
    folder.mkdir()
    (folder / "data_batch_1").write_bytes(b"\x80\x02}.")
    with pytest.raises(ValueError, match=r"pickled Python objects.*cifar-10-binary.tar.gz"):
        load_samples("cifar10", tmp_path)


def test_a_cut_cifar_batch_is_refused(tmp_path):
    cifar_folder(tmp_path / "cifar10")
    path = tmp_path / "cifar10" / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"data_batch_3.bin has \d+ bytes, no whole number"):
        load_samples("cifar10", tmp_path)


def test_the_archive_of_cifar_put_there_by_hand_is_extracted_into_the_cache(tmp_path):
    cifar_folder(tmp_path / "made" / "cifar-10-batches-bin")
    (tmp_path / "data").mkdir()
    with tarfile.open(tmp_path / "data" / "cifar-10-binary.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "made" / "cifar-10-batches-bin", "cifar-10-batches-bin")
    data = load_samples("cifar10", tmp_path / "data", cache=tmp_path / "cache")
    assert len(data.test) == 20
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["cifar-10-binary.tar.gz"]
    assert len(load_samples("cifar10", cache=tmp_path / "cache").test) == 20


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda x, y: (x[:-1], y), r"train-images.* announces 40 x 5 x 4 bytes and holds 799"),
        (lambda x, y: (x + b"\0", y), r"train-images.* announces 40 x 5 x 4 bytes and holds more"),
        (lambda x, y: (x, x), r"train-labels.* is no IDX file of labels .*0x00000803, images"),
        (lambda x, y: (b"\0\0\x0d\x03" + x[4:], y), r"train-images.*float32"),
        (lambda x, y: (x[:9], y), r"ends within its header, after 9 bytes"),
        (lambda x, y: (b"", y), r"has 0 bytes"),
        (lambda x, y: (b"<!DOCTYPE html><html>" * 9, y), r"is a web page"),
        (lambda x, y: (gzip.compress(x), y), r"is compressed; name it train-images-idx3-ubyte.gz"),
        (lambda x, y: (x[:4] + struct.pack(">3I", 2**32 - 1, 2**16, 2**16), y), r"cannot hold so many"),
        (lambda x, y: (x, idx(np.full(40, 10, np.uint8))), r"training image 0 has the label 10; labels are 0 to 9"),
        (lambda x, y: (x, idx(np.zeros(39, np.uint8))), r"40 images and 39 labels"),
        (lambda x, y: (idx(np.zeros((0, 5, 4), np.uint8)), idx(np.zeros(0, np.uint8))), r"no images"),
        (lambda x, y: (idx(np.zeros((40, 4, 4), np.uint8)), y), r"training images have shape .*test images"),
        (lambda x, y: (x, None), r"train-labels-idx1-ubyte is missing"),
    ],
)
def test_broken_idx_files_are_refused(tmp_path, change, problem):
    idx_folder(tmp_path)
    paths = [tmp_path / "train-images-idx3-ubyte", tmp_path / "train-labels-idx1-ubyte"]
    for path, content in zip(paths, change(*(path.read_bytes() for path in paths)), strict=True):
        path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ValueError, match=problem) as caught:
        load_samples("mnist", tmp_path, cache=tmp_path / "cache")
    assert str(tmp_path) in str(caught.value) or "mnist" in str(caught.value)


def test_a_cut_gzip_file_is_refused(tmp_path):
    idx_folder(tmp_path, gz=True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=re.escape(str(path))):
        load_samples("mnist", tmp_path)


def test_a_small_gzip_file_cannot_ask_for_memory(tmp_path):
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(struct.pack(">HBB3I", 0, 8, 3, 2**31, 28, 28)))
    with pytest.raises(ValueError, match="cannot hold so many"):
        read_idx(path, 3)


@pytest.mark.parametrize(
    ("arrays", "problem"),
    [
        ({"x": TRAIN[0].astype(np.float32), "y": TRAIN[1]}, "x is float32"),
        ({"x": TRAIN[0], "y": TRAIN[1].astype(float)}, "y is float64"),
        ({"x": TRAIN[0][0], "y": TRAIN[1]}, "expected uint8 images"),
        ({"x": TRAIN[0]}, "lacks x_test, x_train, y_test, y_train"),
        ({"x": TRAIN[0], "y": np.array(["a"] * 40, dtype=object)}, "pickled"),
        ({"x": TRAIN[0], "y": TRAIN[1].astype(np.int64) - 1}, "label -1"),
    ],
)
def test_broken_npz_files_are_refused(tmp_path, arrays, problem):
    np.savez(tmp_path / "mnist.npz", **arrays)
    with pytest.raises(ValueError, match=problem):
        load_samples("mnist", tmp_path)


def test_colour_images_of_an_npz_have_channels_last(tmp_path):
    x = GENERATOR.integers(0, 256, (20, 5, 4, 3), dtype=np.uint8)
    np.savez(tmp_path / "cifar10.npz", x=x, y=np.arange(20) % 2)
    data = load_samples("cifar10", tmp_path, val_fraction=0)
    assert data.input_shape == (3, 5, 4)
    assert torch.equal(data.train.x, torch.from_numpy(x[:16].transpose(0, 3, 1, 2).copy()))


def test_without_a_network_the_error_says_which_files_and_where(tmp_path, monkeypatch):
    def refuse(remote, target, *, progress=None):
        raise download.DownloadError(f"cannot download {remote.url} (no network)")

    monkeypatch.setattr("nugnn.datasets.samples.image_sources.download", refuse)
    with pytest.raises(
        ValueError, match=r"train-images-idx3-ubyte.gz, .*from https://storage.googleapis.com/cvdf-data"
    ):
        load_samples("mnist", cache=tmp_path)
    with pytest.raises(ValueError, match=r"cifar-10-binary.tar.gz \(the binary version"):
        load_samples("cifar10", cache=tmp_path)


def test_an_interrupted_download_goes_on(tmp_path, monkeypatch):
    made = idx_folder(tmp_path / "made", gz=True)
    fetched = []

    def fetch(remote, target, *, progress=None):
        if not target.is_file():
            if len(fetched) == 2:
                fetched.append(None)
                raise download.DownloadError("the connection was cut")
            fetched.append(target.name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((made / target.name).read_bytes())
        return target

    monkeypatch.setattr("nugnn.datasets.samples.image_sources.download", fetch)
    with pytest.raises(ValueError, match="the connection was cut"):
        load_samples("mnist", cache=tmp_path / "cache")
    assert len(load_samples("mnist", cache=tmp_path / "cache").test) == 10
    assert len(load_samples("mnist", cache=tmp_path / "cache").test) == 10
    assert [name for name in fetched if name] == [remote.file_name for remote in IMAGE_SETS["mnist"].files]


@pytest.mark.parametrize(
    ("spec", "options", "problem"),
    [
        ("mnits", {}, "did you mean mnist"),
        ("mnist:here", {}, "takes no path"),
        ("text", {}, "write text:PATH"),
        ("csv:", {}, "names no path"),
        ("csv:missing.csv", {}, "missing.csv: no such file"),
        ("mnist", {"vocabulary_size": 500}, "--vocabulary-size belongs to text:PATH"),
        ("text:x.tsv", {"image_size": 5}, "--image-size belongs to imagefolder:PATH"),
        ("digits-images", {"data_dir": "no/such/folder"}, "does not exist"),
        ("text:" + "x" * 300, {}, "x cannot be read: File name too long|no such file"),
        ("", {}, "Known are digits-images"),
    ],
)
def test_names_and_options_that_do_not_belong_are_refused(spec, options, problem):
    with pytest.raises(ValueError, match=problem):
        load_samples(spec, **options)
