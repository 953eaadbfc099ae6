"""Whatever the bytes, a reader of samples gives samples or a ValueError that names the file."""

import gzip
import struct
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nugnn.datasets.samples import load_samples

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 4, 4), dtype=np.uint8)
LABELS = np.arange(12, dtype=np.uint8) % 3
IMAGES = struct.pack(">HBB3I", 0, 8, 3, *PIXELS.shape) + PIXELS.tobytes()
NUMBERS = struct.pack(">HBBI", 0, 8, 1, len(LABELS)) + LABELS.tobytes()
TSV = "label\ttext\n" + "".join(f"{i % 2}\tword {i} \u2603 other\n" for i in range(12))
CSV = "a,b,label\n" + "".join(f"{i}.5,{'xy'[i % 2]},{i % 3}\n" for i in range(12))

TARGETS = {
    "train-images-idx3-ubyte": ("mnist", IMAGES),
    "train-labels-idx1-ubyte": ("mnist", NUMBERS),
    "train-images-idx3-ubyte.gz": ("mnist", gzip.compress(IMAGES, mtime=0)),
    "a.tsv": ("text", TSV.encode()),
    "a.tsv.gz": ("text", gzip.compress(TSV.encode(), mtime=0)),
    "a.csv": ("csv", CSV.encode()),
    "a.csv.gz": ("csv", gzip.compress(CSV.encode(), mtime=0)),
    "cat/1.png": ("imagefolder", None),
    "data_batch_2.bin": ("cifar10", bytes(range(3)) + bytes(3 * 3073 - 3)),
}


def surroundings(folder, kind):
    """The other files of the data set; the one to be damaged is written over them."""
    if kind == "mnist":
        for part in ("train", "t10k"):
            (folder / f"{part}-images-idx3-ubyte").write_bytes(IMAGES)
            (folder / f"{part}-labels-idx1-ubyte").write_bytes(NUMBERS)
    elif kind == "cifar10":
        for name in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
            (folder / name).write_bytes(bytes(3 * 3073))
    elif kind == "imagefolder":
        from PIL import Image

        for name in ("cat", "dog"):
            (folder / name).mkdir()
            for i in range(3):
                Image.fromarray(PIXELS[i]).save(folder / name / f"{i}.png")


def load(kind, folder, path):
    specs = {"mnist": "mnist", "cifar10": "cifar10", "imagefolder": f"imagefolder:{folder}"}
    vocabulary_size = 300 if kind == "text" else None
    return load_samples(
        specs.get(kind, f"{kind}:{path}"), folder, cache=folder / "none", vocabulary_size=vocabulary_size
    )


damage = st.tuples(
    st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 255)), max_size=6),  # bytes to set
    st.one_of(st.none(), st.integers(0, 2**20)),  # where to cut
    st.binary(max_size=8),  # what to add
)


def damaged(content, change):
    edits, cut, tail = change
    changed = bytearray(content)
    for place, value in edits:
        changed[place % len(changed)] = value
    return bytes(changed[: None if cut is None else cut % (len(changed) + 1)]) + tail


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=60, deadline=None)
@given(change=damage)
def test_damaged_files_give_samples_or_a_clean_error(tmp_path_factory, name, change):
    folder = tmp_path_factory.mktemp("fuzz")
    kind, content = TARGETS[name]
    surroundings(folder, kind)
    path = folder / name
    plain = path.with_suffix("") if name.endswith("ubyte.gz") else None
    if plain is not None:
        plain.unlink()  # it would be read first
    path.write_bytes(damaged(path.read_bytes() if content is None else content, change))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, about odd but readable files
            data = load(kind, folder, path)
    except ValueError as error:
        assert str(folder) in str(error) or kind in str(error) or "a:" in str(error) or "a.csv" in str(error)
    else:
        assert len(data.train) > 0
        x, label = data.train[0]
        assert tuple(x.shape) == data.input_shape
        assert 0 <= label < data.num_classes


@pytest.mark.parametrize("name", TARGETS)
def test_undamaged_files_are_read(tmp_path, name):
    kind, content = TARGETS[name]
    surroundings(tmp_path, kind)
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    spec = {"mnist": "mnist", "cifar10": "cifar10", "imagefolder": f"imagefolder:{tmp_path}"}.get(
        kind, f"{kind}:{path}"
    )
    assert len(load_samples(spec, tmp_path, vocabulary_size=300 if kind == "text" else None).train) > 0
