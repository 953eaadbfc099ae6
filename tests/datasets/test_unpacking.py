"""A compressed file that unpacks far beyond its size or the memory ends in one sentence; honest ones load."""

import gzip
import re
import tracemalloc
import zipfile

import numpy as np
import pytest

from nugnn.datasets import load, unpacking
from nugnn.datasets.archive import check_complete
from nugnn.datasets.text_table import read_bytes
from nugnn.datasets.unpacking import UnpacksTooFarError, available_memory_bytes
from ogb_folders import write_binary_layout, write_csv_layout

EDGES = np.array([[0, 1], [1, 2], [2, 3]])
MIB = 1 << 20


@pytest.fixture
def small_machine(monkeypatch):
    """Half a MiB may always be unpacked, as well as a hundred times the file's size, and there is 1 MiB of memory."""
    monkeypatch.setattr(unpacking, "_ALWAYS_BYTES", MIB // 2)
    monkeypatch.setattr(unpacking, "available_memory_bytes", lambda: MIB)


def gz(path, head, filling, num_bytes):
    path.write_bytes(gzip.compress(head + filling * (num_bytes // len(filling)), mtime=0))
    return path


TEXTS = {
    "g.csv.gz": (b"src,dst\n", b"0,1\n"),
    "g.txt.gz": (b"0 1\n", b"0 1\n"),
    "g.mtx.gz": (b"%%MatrixMarket matrix coordinate pattern general\n", b"% \n"),
    "g.graph.gz": (b"2 1\n2\n1\n", b"% \n"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_bomb_is_named_with_both_sizes_and_what_to_do(tmp_path, small_machine, name):
    path = gz(tmp_path / name, *TEXTS[name], 8 * MIB)
    said = rf"{re.escape(str(path))}.* unpacks to more than [\d,]+ bytes.*(by hand|machine with more)"
    with pytest.raises(UnpacksTooFarError, match=said) as error:
        load(path)
    assert f"{path.stat().st_size:,}" in str(error.value)


def test_a_text_bomb_is_left_before_it_takes_memory(tmp_path, monkeypatch):
    path = gz(tmp_path / "g.txt.gz", b"", bytes(1000), 200 * MIB)
    monkeypatch.setattr(unpacking, "_ALWAYS_BYTES", 20 * MIB)
    monkeypatch.setattr(unpacking, "available_memory_bytes", lambda: 90 * MIB)
    tracemalloc.start()
    try:
        with pytest.raises(UnpacksTooFarError, match=r"more than 23,592,960 bytes"):  # a quarter of 90 MiB
            read_bytes(path)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 40 * MIB, "what is allowed, a chunk of 8 MiB, and buffers"


def write_npz(path, arrays):
    np.savez_compressed(path, **arrays)
    return path


GRAPH = {"num_nodes": np.array(4), "adj_indptr": np.array([0, 1, 2, 3, 3]), "adj_indices": np.array([1, 2, 3])}
SHCHUR = {
    "adj_indptr": np.array([0, 1, 2, 3, 3]),
    "adj_indices": np.array([1, 2, 3]),
    "adj_shape": np.array([4, 4]),
    "labels": np.array([0, 1, 0, 1]),
}


@pytest.mark.parametrize(
    "arrays",
    [{**GRAPH, "feat": np.zeros((4, MIB))}, {**SHCHUR, "attr_matrix": np.zeros((4, MIB))}],
    ids=["own", "shchur"],
)
def test_an_npz_bomb_is_refused_by_what_it_declares(tmp_path, small_machine, arrays):
    path = write_npz(tmp_path / "g.npz", arrays)
    said = rf"{re.escape(str(path))} unpacks to 33,[\d,]+ bytes from {path.stat().st_size:,}, as a decompression bomb"
    with pytest.raises(UnpacksTooFarError, match=said):
        load(path)


@pytest.mark.parametrize("name", ["edge", "node-feat", "node-label"])
def test_a_bomb_among_ogbs_files_is_refused(tmp_path, small_machine, name):
    folder = write_csv_layout(tmp_path / "mine", EDGES, 4)
    path = gz(folder / "raw" / f"{name}.csv.gz", b"", b"\n", 8 * MIB)
    with pytest.raises(UnpacksTooFarError, match=rf"{name}.csv.gz unpacks to more than [\d,]+ bytes from"):
        load(folder, cache=tmp_path / "cache")
    assert path.exists()


def test_a_split_of_more_lines_than_nodes_is_left_at_once(tmp_path):
    folder = write_csv_layout(tmp_path / "mine", EDGES, 4)
    gz(folder / "split" / "time" / "train.csv.gz", b"", b"0\n", 8 * MIB)
    with pytest.raises(ValueError, match=r"train.csv.gz has more than 4 lines"):
        load(folder, cache=tmp_path / "cache")


def test_an_npz_bomb_in_ogbs_binary_layout_is_refused(tmp_path, small_machine):
    folder = write_binary_layout(tmp_path / "mine", compressed=True, node_feat=np.zeros((5, MIB), np.float32))
    with pytest.raises(UnpacksTooFarError, match=r"data.npz unpacks to 2[01],[\d,]+ bytes from"):
        load(folder, cache=tmp_path / "cache")


def test_a_zip_bomb_is_refused_whole_and_leaves_nothing(tmp_path, small_machine):
    path = tmp_path / "g.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("edges.csv", b"src,dst\n" + b"0,1\n" * MIB)
    with pytest.raises(UnpacksTooFarError, match=r"g.zip unpacks to more than 4,[\d,]+ bytes from"):
        load(path, cache=tmp_path / "cache")
    assert not [left for left in (tmp_path / "cache" / "extracted").iterdir() if not left.name.endswith(".lock")]


@pytest.mark.parametrize("name", ["x.gz", "x.zip", "x.npz"])
def test_a_downloaded_bomb_is_not_read_to_its_end(tmp_path, small_machine, name):
    path = tmp_path / name
    if name == "x.gz":
        gz(path, b"", bytes(1000), 8 * MIB)
    else:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a.npy", bytes(8 * MIB))
    with pytest.raises(UnpacksTooFarError, match="as a decompression bomb does"):
        check_complete(path)


def test_honest_files_far_larger_than_what_is_always_allowed_load(tmp_path, monkeypatch):
    monkeypatch.setattr(unpacking, "_ALWAYS_BYTES", 1024)
    monkeypatch.setattr(unpacking, "available_memory_bytes", lambda: 64 * MIB)
    ids = np.random.default_rng(0).integers(0, 50_000, (100_000, 2))
    text = "src,dst\n" + "".join(f"{u},{v}\n" for u, v in ids.tolist())
    path = tmp_path / "g.csv.gz"
    path.write_bytes(gzip.compress(text.encode()))
    assert len(text) > 1024 * 1000
    assert load(path).num_edges == 100_000
    feat = np.random.default_rng(0).standard_normal((4, 200_000))
    assert load(write_npz(tmp_path / "g.npz", {**GRAPH, "feat": feat})).num_features == 200_000


def test_zeros_that_the_machine_has_room_for_load(tmp_path, monkeypatch):
    """A thousandth of its size on disk, and honest: features of a graph that are nearly all zero."""
    monkeypatch.setattr(unpacking, "_ALWAYS_BYTES", 1024)
    monkeypatch.setattr(unpacking, "available_memory_bytes", lambda: 160 * MIB)
    path = write_npz(tmp_path / "g.npz", {**GRAPH, "feat": np.zeros((4, MIB))})
    assert path.stat().st_size * 100 < 32 * MIB
    assert load(path).num_features == MIB


@pytest.mark.parametrize("is_compressed", [True, False])
def test_arrays_without_room_in_memory_are_refused_before_they_are_read(tmp_path, monkeypatch, is_compressed):
    feat = np.random.default_rng(0).standard_normal((4, 100_000))
    save = np.savez_compressed if is_compressed else np.savez
    save(tmp_path / "g.npz", **GRAPH, feat=feat)
    monkeypatch.setattr(unpacking, "available_memory_bytes", lambda: feat.nbytes - 1)
    with pytest.raises(
        UnpacksTooFarError, match=r"g.npz .*have to be in memory; 3,199,999 bytes of memory are available"
    ):
        load(tmp_path / "g.npz")


def test_a_plain_text_file_without_room_in_memory_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "g.txt"
    path.write_text("0 1\n" * 1000)
    monkeypatch.setattr(unpacking, "available_memory_bytes", lambda: 11_999)
    with pytest.raises(UnpacksTooFarError, match="and reading it takes 3 times its size; 11,999 bytes of memory"):
        load(path)
    monkeypatch.setattr(unpacking, "available_memory_bytes", lambda: 12_000)
    assert load(path).num_edges == 1000


def test_available_memory_is_that_of_the_machine_or_the_tightest_group(tmp_path, monkeypatch):
    with open("/proc/meminfo") as file:
        kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in file}
    found = available_memory_bytes()
    assert found is not None
    assert 0 < found <= (kilobytes["MemTotal"] + kilobytes["SwapTotal"]) * 1024
    for name, text in {"memory.max": "5000", "memory.current": "3000", "memory.stat": "anon 1000\nfile 700"}.items():
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(unpacking, "_GROUPS", ((tmp_path, "memory.max", "memory.current", "file"),))
    assert available_memory_bytes() == 2700
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory_bytes() > 5000
    monkeypatch.setattr(unpacking, "_MEMINFO", tmp_path / "nowhere")
    assert available_memory_bytes() is None
