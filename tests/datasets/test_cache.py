"""The processed cache: a hit is what was built, a changed source or option is a miss, damage is built again."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from nugnn.datasets import mapped
from nugnn.datasets.cache import cached_graph
from nugnn.datasets.graph_data import GraphData
from nugnn.datasets.mapped import gather_rows, map_npy, row_windows
from nugnn.datasets.ogb import read_ogb
from ogb_folders import write_csv_layout, write_gz

EDGES = np.array([[0, 1], [1, 2], [2, 2], [3, 0]])


@pytest.fixture
def folder(tmp_path):
    feat = np.arange(8, dtype=np.float32).reshape(4, 2)
    return write_csv_layout(tmp_path / "ogbn_arxiv", EDGES, 4, feat=feat, further={"node_year": np.arange(4)})


def entries(cache: Path) -> list[Path]:
    return sorted(path.parent for path in cache.glob("*/meta.json"))


def test_a_hit_is_the_graph_that_was_built_and_that_without_a_cache(folder, tmp_path):
    hashes = {read_ogb(folder, cache=cache).content_hash() for cache in (None, tmp_path / "c", tmp_path / "c")}
    assert len(hashes) == 1
    assert len(entries(tmp_path / "c")) == 1


def test_datasets_08_the_key_covers_sources_and_options_and_hit_and_miss_are_logged(folder, tmp_path, caplog):
    cache = tmp_path / "c"
    with caplog.at_level(logging.INFO, "nugnn.datasets"):
        read_ogb(folder, cache=cache)
        read_ogb(folder, cache=cache)
        other_name = read_ogb(folder, "mine", cache=cache)
        write_gz(folder / "raw" / "edge.csv.gz", "0,1\n1,2\n2,2\n3,1\n")
        other_source = read_ogb(folder, cache=cache)
    words = [record.message.split()[2].rstrip(":") for record in caplog.records if "dataset cache" in record.message]
    assert words == ["miss", "hit", "miss", "miss"]
    assert other_name.name == "mine"
    assert other_source.dst.tolist() == [1, 2, 2, 1]
    assert len(entries(cache)) == 3


def test_datasets_08_options_make_other_graphs(tmp_path):
    source = tmp_path / "source"
    source.write_text("4")

    def graph(loops: bool) -> GraphData:
        def build(arrays):
            ids = np.arange(4)
            arrays.add("src", ids)
            arrays.add("dst", ids if loops else (ids + 1) % 4)
            return {"name": "ring", "num_nodes": 4}

        return cached_graph(tmp_path / "c", [source], {"loops": loops}, build)

    for _ in range(2):
        assert graph(True).dst.tolist() == [0, 1, 2, 3]
        assert graph(False).dst.tolist() == [1, 2, 3, 0]


def test_datasets_02_a_torch_save_of_another_reader_is_not_read(folder, tmp_path, caplog):
    cache = folder / "processed"
    cache.mkdir()
    torch.save({"graph": {"edge_index": np.zeros((2, 3), np.int64), "num_nodes": 5}}, cache / "data_processed")
    assert read_ogb(folder, cache=cache).num_edges == 4
    key = entries(cache)[0]
    (key / "meta.json").unlink()
    torch.save({"graph": 1}, key / "meta.json")
    with caplog.at_level(logging.WARNING, "nugnn.datasets"):
        assert read_ogb(folder, cache=cache).num_edges == 4
    assert json.loads((key / "meta.json").read_text())["key"] == key.name


def test_every_kind_of_damage_is_built_again(folder, tmp_path, caplog):
    cache = tmp_path / "c"
    whole = read_ogb(folder, cache=cache).content_hash()
    rng = np.random.default_rng(0)
    for path in sorted(entries(cache)[0].iterdir()):
        for kind in ("cut", "flip", "flip", "empty", "gone"):
            content = bytearray(path.read_bytes())
            if kind == "gone":
                path.unlink()
            else:
                if kind == "flip":
                    content[rng.integers(len(content))] ^= 1 << rng.integers(8)
                path.write_bytes({"cut": content[: len(content) // 2], "empty": b"", "flip": content}[kind])
            caplog.clear()
            with caplog.at_level(logging.WARNING, "nugnn.datasets"):
                assert read_ogb(folder, cache=cache).content_hash() == whole, (path.name, kind)
            assert path.is_file()
            # a flip in the spaces of the JSON or of a .npy header changes nothing that is read
            assert "is built again" in caplog.text or kind == "flip"
    assert len(entries(cache)) == 1
    assert not list(cache.glob(".*.unfinished"))


def test_arrays_are_mapped_without_a_warning_and_writing_changes_memory_only(folder, tmp_path):
    read_ogb(folder, cache=tmp_path / "c")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = read_ogb(folder, cache=tmp_path / "c")
    assert mapped.known_checked(data.features)
    data.features[0, 0] = 100
    assert not mapped.known_checked(data.features)
    assert read_ogb(folder, cache=tmp_path / "c").features[0, 0] == 0
    assert [window[0, 0].item() for _, window in row_windows(data.features)] == [100]


def test_a_source_hash_is_not_trusted_after_a_change_of_size_or_time(folder, tmp_path):
    path = folder / "raw" / "node_year.csv.gz"
    old, later = 1_600_000_000, time.time() + 3600
    for each in folder.rglob("*.*"):
        os.utime(each, (later, later))  # however long this test takes, they have just been written
    os.utime(path, (old, old))
    read_ogb(folder, cache=tmp_path / "c")
    notes = [json.loads(note.read_text()) for note in (tmp_path / "c" / "sources").iterdir()]
    assert [note["path"] for note in notes] == [str(path.resolve())]  # the others are too new to be remembered
    write_gz(path, "9\n9\n9\n9\n")
    assert read_ogb(folder, cache=tmp_path / "c").node_data["node_year"].flatten().tolist() == [9] * 4


def test_nothing_is_kept_of_a_build_that_fails(tmp_path):
    def build(arrays):
        arrays.add("src", np.array([0, 7]))
        arrays.add("dst", np.array([1, 1]))
        return {"name": "bad", "num_nodes": 2}

    for _ in range(2):
        with pytest.raises(ValueError, match="id 7 is out of range"):
            cached_graph(tmp_path / "c", [], {}, build)
        assert not entries(tmp_path / "c")
        assert not list((tmp_path / "c").glob(".*.unfinished"))


def test_a_folder_that_cannot_be_made_is_one_sentence(folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"the cache .*file.* cannot be used .*choose another cache folder"):
        read_ogb(folder, cache=tmp_path / "file" / "c")


_CHILD = """
import sys
from nugnn.datasets.ogb import read_ogb
for _ in range(3):
    print(read_ogb(sys.argv[1], cache=sys.argv[2]).content_hash())
"""


def test_several_processes_prepare_one_graph_at_the_same_time(folder, tmp_path):
    command = [sys.executable, "-c", _CHILD, str(folder), str(tmp_path / "c")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    hashes = {line for process in running for line in process.communicate()[0].split()}
    assert [process.returncode for process in running] == [0, 0, 0]
    assert hashes == {read_ogb(folder).content_hash()}
    assert len(entries(tmp_path / "c")) == 1


@pytest.mark.parametrize("shape", [(1000, 3), (1000,), (1, 5), (0, 4), (257, 2, 2)])
def test_windows_and_gathered_rows_are_those_of_the_array(tmp_path, monkeypatch, shape):
    monkeypatch.setattr(mapped, "WINDOW_BYTES", 512)
    array = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    np.save(tmp_path / "x.npy", array)
    rows = map_npy(tmp_path / "x.npy")
    (tmp_path / "x.npy").unlink()  # a cache that is replaced while somebody reads it
    pieces = [window.clone() for _, window in row_windows(rows)]
    assert torch.equal(torch.cat([rows[:0], *pieces]), torch.from_numpy(array))
    generator = torch.Generator().manual_seed(0)
    if shape[0]:
        for ids in (torch.randint(0, shape[0], (300,), generator=generator), torch.arange(0, shape[0], 7)):
            assert torch.equal(gather_rows(rows, ids), torch.from_numpy(array)[ids])
        assert gather_rows(rows, torch.arange(shape[0])) is rows
