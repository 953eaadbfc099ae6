"""OGB's raw layouts: what is written by their rules is read back, and what breaks them is refused by file name."""

from __future__ import annotations

import logging
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nugnn.datasets import load
from nugnn.datasets.graph_data import GraphData
from nugnn.datasets.ogb import read_ogb
from ogb_folders import lines, write_binary_layout, write_csv_layout, write_gz, write_mag_layout

DATA = Path(os.environ.get("NUGNN_DATA") or Path(__file__).resolve().parents[2].parent / "shared" / "data")
SAMPLES = DATA / "ogb_layout"
needs_samples = pytest.mark.skipif(not SAMPLES.is_dir(), reason="no folder of public graphs (NUGNN_DATA)")
EDGES = np.array([[0, 1], [1, 2], [2, 2], [3, 0]])


def arcs(data: GraphData) -> list[tuple[int, int]]:
    return list(zip(data.src.tolist(), data.dst.tolist(), strict=True))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_edges_come_as_stored_and_each_inverse_follows_its_edge(tmp_path_factory, data):
    num_nodes = data.draw(st.integers(3, 40))
    node = st.integers(0, num_nodes - 1)
    edges = data.draw(st.lists(st.tuples(node, node), max_size=60))
    table = np.array(edges, np.int64).reshape(-1, 2)
    edge_feat = np.arange(len(table) * 2).reshape(-1, 2) / 4
    folder = tmp_path_factory.mktemp("ogb")
    write_csv_layout(folder, table, num_nodes, split="sales_ranking", further={"edge-feat": edge_feat})
    both = read_ogb(folder, "ogbn-products")
    assert arcs(both) == [arc for u, v in edges for arc in ((u, v), (v, u))]
    assert both.num_nodes == num_nodes
    stored = read_ogb(folder, "my-graph")
    assert arcs(stored) == edges
    if len(edges):
        assert torch.equal(stored.edge_data["feat"], torch.from_numpy(edge_feat).float())
        assert torch.equal(both.edge_data["feat"], stored.edge_data["feat"].repeat_interleave(2, 0))


def test_a_file_of_many_blocks_is_the_file(tmp_path):
    rng = np.random.default_rng(0)
    edges = rng.integers(0, 3000, (400_000, 2))
    feat = rng.standard_normal((3000, 40)).astype(np.float32)
    write_csv_layout(tmp_path / "g", edges, 3000, feat=feat)
    for cache in (None, tmp_path / "cache", tmp_path / "cache"):
        data = read_ogb(tmp_path / "g", cache=cache)
        assert np.array_equal(torch.stack([data.src, data.dst], 1).numpy(), edges)
        assert np.array_equal(data.features.numpy(), feat)


def test_labels_that_are_missing_are_minus_one_and_whole_floats_are_class_ids(tmp_path):
    folder = write_csv_layout(tmp_path, EDGES, 5, labels='0.0\nnan\n2.0\n""\n1\n', ids=([0], [2], [4]))
    data = read_ogb(folder, "ogbn-arxiv")
    assert data.labels.dtype == torch.int64
    assert data.labels.tolist() == [0, -1, 2, -1, 1]
    assert data.num_classes == 3


def test_datasets_04_a_training_node_without_a_label_is_named(tmp_path):
    folder = write_csv_layout(tmp_path, EDGES, 5, labels="0\nnan\n2\nnan\n1\n", ids=([0, 1], [2], [4]))
    with pytest.raises(ValueError, match=r"1 of 2 train nodes have no label, for example node 1"):
        read_ogb(folder, "ogbn-arxiv")


def test_integer_features_become_float32_and_further_files_keep_their_kind(tmp_path):
    further = {"node_year": np.array([2016, 2017, 2018, 2019]), "node_score": "1\n0.5\n2\n3\n"}
    folder = write_csv_layout(tmp_path, EDGES, 4, feat=np.array([[1, 0], [0, 1], [1, 1], [0, 0]]), further=further)
    data = read_ogb(folder, "ogbn-arxiv")
    assert data.features.dtype == torch.float32
    assert data.features.tolist() == [[1, 0], [0, 1], [1, 1], [0, 0]]
    assert data.node_data["node_year"].dtype == torch.int64
    assert data.node_data["node_year"].tolist() == [[2016], [2017], [2018], [2019]]
    assert data.node_data["node_score"].dtype == torch.float32
    assert data.node_data["node_score"].tolist() == [[1], [0.5], [2], [3]]


def test_proteins_have_edge_features_twice_a_label_matrix_and_their_species(tmp_path):
    labels = (np.arange(4 * 112).reshape(4, 112) % 3 == 0).astype(int)
    further = {"edge-feat": np.arange(32).reshape(4, 8) / 8, "species": np.array([9606, 3702, 9606, 511145])}
    folder = write_csv_layout(tmp_path, EDGES, 4, feat="", labels=labels, split="species", further=further)
    data = read_ogb(folder, "ogbn_proteins")
    assert (data.metric, data.num_classes, data.features) == ("roc_auc", 112, None)
    assert torch.equal(data.labels, torch.from_numpy(labels).to(torch.uint8))
    assert data.node_data["node_species"].flatten().tolist() == [9606, 3702, 9606, 511145]
    assert data.edge_data["feat"].shape == (8, 8)
    assert torch.equal(data.edge_data["feat"][::2], data.edge_data["feat"][1::2])


def test_a_missing_label_among_several_tasks_is_refused(tmp_path):
    folder = write_csv_layout(tmp_path, EDGES, 4, labels="0,1\n1,nan\n0,0\n1,1\n")
    with pytest.raises(ValueError, match=r"node-label.csv.gz: label row 1, task 1 is nan"):
        read_ogb(folder, "ogbn-arxiv")


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("fortran", [False, True])
def test_the_binary_layout(tmp_path, fortran, compressed, cached):
    folder = write_binary_layout(tmp_path / "ogbn_papers100M", fortran=fortran, compressed=compressed)
    data = read_ogb(folder, cache=tmp_path / "cache" if cached else None)
    assert data.name == "ogbn-papers100m"
    assert arcs(data) == [(0, 1), (1, 2), (2, 3), (4, 0)]
    assert torch.equal(data.features, torch.arange(15, dtype=torch.float32).view(5, 3))
    assert data.labels.tolist() == [0, 1, -1, 1, 0]
    assert data.node_data["node_year"].flatten().tolist() == [2010, 2011, 2012, 2013, 2014]
    assert data.edge_data["edge_kind"].tolist() == [0, 1, 2, 3]
    assert [ids.tolist() for ids in data.split] == [[0], [1], [3]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"edge_index": np.array([[0, 1, 2, -3], [1, 2, 3, 0]])}, r"the source of edge row 3 is -3, out of range"),
        ({"edge_index": np.array([[0, 1, 2, 3], [1, 5, 3, 0]])}, r"the target of edge row 1 is 5, out of range"),
        ({"edge_index": np.zeros((2, 3), int)}, r"edge_index is int64 \(2, 3\); expected .* \(2, 4\)"),
        ({"edge_index": np.zeros((2, 4))}, r"edge_index is float64"),
        ({"edge_index": None}, r"data.npz lacks edge_index"),
        ({"node_feat": np.zeros((4, 3), np.float32)}, r"node_feat has shape \(4, 3\); expected 5 rows"),
        ({"node_feat": np.full((5, 3), np.inf, np.float32)}, r"node_feat, row 0, column 0 is inf"),
        ({"node_feat": np.asfortranarray(np.zeros((5, 3)))}, r"node_feat is stored in Fortran order"),
        ({"node_feat": np.array([[None] * 3] * 5)}, r"'node_feat' is damaged|pickle"),
        ({"num_nodes_list": np.array([5, 6])}, r"num_nodes_list is int64 \(2,\); expected one number of nodes"),
        ({"num_nodes_list": np.array([0])}, r"data.npz says 0 nodes"),
        ({"strange": np.zeros(3)}, r"unknown array 'strange'"),
    ],
)
def test_binary_arrays_that_contradict_each_other_are_refused(tmp_path, changes, message):
    folder = write_binary_layout(tmp_path / "ogbn_papers100M", **changes)
    with pytest.raises(ValueError, match=message):
        read_ogb(folder)


def test_float16_features_stay_float16(tmp_path):
    folder = write_binary_layout(tmp_path / "ogbn_papers100M", node_feat=np.ones((5, 3), np.float16))
    assert read_ogb(folder).features.dtype == torch.float16


def test_mag_is_read_as_the_graph_of_its_papers_and_says_so(tmp_path, caplog):
    folder = write_mag_layout(tmp_path / "ogbn_mag")
    with caplog.at_level(logging.INFO, "nugnn.datasets"):
        data = read_ogb(folder)
    assert "homogeneous graph: its paper nodes and the relation paper___cites___paper alone" in caplog.text
    assert arcs(data) == [(0, 1), (1, 2), (3, 0)]
    assert data.features.tolist() == [[0.5, 1], [1.5, 2], [2.5, 3], [3.5, 4]]
    assert data.labels.tolist() == [0, 1, 0, 2]
    assert data.node_data["node_year"].flatten().tolist() == [2016, 2017, 2018, 2019]
    assert data.edge_data["edge_reltype"].flatten().tolist() == [1, 1, 1]
    assert [ids.tolist() for ids in data.split] == [[0, 1], [2], [3]]
    with pytest.raises(ValueError, match="heterogeneous data set; of these only ogbn-mag is read"):
        read_ogb(folder, "my-mag")


def test_an_unknown_name_takes_edges_as_stored_and_the_only_split(tmp_path):
    folder = write_csv_layout(tmp_path / "mine", EDGES, 4, split="whatever")
    assert arcs(read_ogb(folder)) == [tuple(edge) for edge in EDGES.tolist()]
    (folder / "split" / "second").mkdir()
    with pytest.raises(ValueError, match=r"split holds second, whatever; expected one folder"):
        read_ogb(folder)


class Bomb:
    def __reduce__(self):
        return (os.abort, ())


def test_pickles_in_the_folder_are_not_opened(tmp_path):
    folder = write_csv_layout(tmp_path / "ogbn_arxiv", EDGES, 4)
    bomb = pickle.dumps(Bomb())
    (folder / "split" / "time" / "split_dict.pt").write_bytes(bomb)
    (folder / "processed").mkdir()
    (folder / "processed" / "data_processed").write_bytes(bomb)
    assert read_ogb(folder, cache=folder / "processed").num_nodes == 4


@pytest.mark.parametrize("cached", [False, True])
def test_datasets_01_a_cut_edge_file_is_named_each_time_and_nothing_is_kept(tmp_path, cached):
    folder = write_csv_layout(tmp_path / "ogb", np.arange(4000).reshape(-1, 2) % 50, 50)
    path = folder / "raw" / "edge.csv.gz"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    cache = tmp_path / "cache" if cached else None
    for _ in range(2):
        with pytest.raises(ValueError, match=r"edge.csv.gz is not a complete gzip file: it is cut off after \d+ bytes"):
            read_ogb(folder, cache=cache)
        if cache is not None:
            assert [entry.name for entry in cache.iterdir() if not entry.name.endswith(".lock")] in ([], ["sources"])
    path.write_bytes(whole)
    assert read_ogb(folder, cache=cache).num_edges == 2000


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("edge", "0,1\n-5,2\n3,1\n0,0\n", r"edge.csv.gz, edge row 1 is -5 -> 2: id -5 is out of range.*largest is 3"),
        ("edge", "0,1\n2,9\n3,1\n0,0\n", r"edge row 1 is 2 -> 9: id 9 is out of range"),
        ("edge", "0,1\n2,x\n3,1\n0,0\n", r"edge.csv.gz, line 2, value 2 is 'x'; expected a whole number"),
        ("edge", "0,1\n2,1.5\n3,1\n0,0\n", r"line 2, value 2 is '1.5'"),
        ("edge", "0,1\n2,\n3,1\n0,0\n", r"line 2, value 2 is missing"),
        ("edge", "0,1\n2,1,7\n3,1\n0,0\n", r"line 2 has 3 values, expected 2"),
        ("edge", "0,1\n2,99999999999\n3,1\n0,0\n", r"line 2, value 2 is 99999999999; allowed are"),
        ("edge", "0,1\n1,2\n", r"edge.csv.gz has 2 lines, .*num-edge-list.csv.gz says 4"),
        ("edge", "0,1\n" * 5, r"edge.csv.gz has more than 4 lines"),
        ("num-node-list", "4\n4\n", r"num-node-list.csv.gz lists 2 graphs"),
        ("num-node-list", "0\n", r"says 0 nodes; at least 1"),
        ("num-node-list", "many\n", r"num-node-list.csv.gz, line 1, value 1 is 'many'"),
        ("num-node-list", f"{10**15}\n", r"says 10+ nodes, more than .*node-label.csv.gz can hold"),
        ("num-edge-list", f"{10**15}\n", r"says 10+ edges, more than .*edge.csv.gz can hold"),
        ("node-feat", "1,2\n3,4\n5,6\n", r"node-feat.csv.gz has 3 lines, .*num-node-list.csv.gz says 4"),
        ("node-feat", "1,2\n3,nan\n5,6\n7,8\n", r"node-feat.csv.gz, line 2, value 2 is 'nan', which stands for"),
        ("node-feat", "1,2\n3,\n5,6\n7,8\n", r"node-feat.csv.gz, line 2, value 2 is missing; expected a number"),
        ("node-feat", "1,2\n3,inf\n5,6\n7,8\n", r"node-feat.csv.gz: row 1, column 1 is inf"),
        ("node-label", "0\n1\n1.5\n0\n", r"node-label.csv.gz.*label row 2 is 1.5"),
        ("node-label", "0\n1\n", r"node-label.csv.gz has 2 lines"),
    ],
)
def test_datasets_06_what_is_wrong_is_named_with_file_and_line(tmp_path, name, text, message):
    folder = write_csv_layout(tmp_path, EDGES, 4, feat=np.ones((4, 2)), further={name: text})
    with pytest.raises(ValueError, match=message) as caught:
        read_ogb(folder, "ogbn-arxiv")
    assert str(tmp_path) in str(caught.value)


def test_an_error_far_into_a_file_names_its_line(tmp_path):
    text = lines(np.zeros((600_000, 2), np.int64)) + "0,oops\n" + "0,0\n"
    folder = write_csv_layout(tmp_path, EDGES, 4, further={"edge": text, "num-edge-list": np.array([600_002])})
    with pytest.raises(ValueError, match=r"line 600001, value 2 is 'oops'"):
        read_ogb(folder, "ogbn-arxiv")


def test_a_split_id_out_of_range_or_twice_is_named(tmp_path):
    folder = write_csv_layout(tmp_path, EDGES, 4, ids=([0], [1], [4]))
    with pytest.raises(ValueError, match=r"test.csv.gz, entry 0 is node 4, out of range"):
        read_ogb(folder, "ogbn-arxiv")
    write_gz(folder / "split" / "time" / "test.csv.gz", "0\n")
    with pytest.raises(ValueError, match=r"node 0 is among both the train and the test nodes"):
        read_ogb(folder, "ogbn-arxiv")


@pytest.mark.parametrize("path", ["raw/edge.csv.gz", "raw/node-label.csv.gz", "split/time/valid.csv.gz"])
def test_a_missing_file_and_a_web_page_in_its_place_are_named(tmp_path, path):
    folder = write_csv_layout(tmp_path, EDGES, 4)
    (folder / path).write_bytes(b"<html>503</html>")
    with pytest.raises(ValueError, match=rf"{Path(path).name} is not a complete gzip file: it is a web page"):
        read_ogb(folder, "ogbn-arxiv")
    (folder / path).unlink()
    with pytest.raises(ValueError, match=rf"{Path(path).name} is missing"):
        read_ogb(folder, "ogbn-arxiv")


def test_bom_and_windows_line_ends_are_no_obstacle(tmp_path):
    folder = write_csv_layout(tmp_path, EDGES, 4, further={"edge": "\ufeff0,1\r\n1,2\r\n2,2\r\n3,0\r\n\r\n"})
    assert arcs(read_ogb(folder, "ogbn-arxiv")) == [tuple(edge) for edge in EDGES.tolist()]


@needs_samples
def test_the_products_sample_is_amazon_photo():
    data, photo = read_ogb(SAMPLES / "ogbn_products"), load("amazon-photo", DATA)
    assert (data.num_nodes, data.num_edges, data.num_features, data.num_classes) == (7650, 238_162, 745, 8)
    assert [len(ids) for ids in data.split] == [612, 153, 6885]
    assert torch.equal(data.labels, photo.labels)
    assert torch.equal(data.features, photo.features.to_dense())
    keys = [(graph.src.long() * 7650 + graph.dst.long()).sort().values for graph in (data, photo)]
    assert torch.equal(*keys)
    assert torch.equal(data.src[::2], data.dst[1::2])
    assert torch.equal(data.dst[::2], data.src[1::2])


@needs_samples
def test_the_arxiv_sample_is_as_its_page_says():
    data = read_ogb(SAMPLES / "ogbn_arxiv")
    assert (data.num_nodes, data.num_edges, data.num_features, data.num_classes) == (2235, 181_908, 64, 35)
    assert [len(ids) for ids in data.split] == [1259, 380, 382]
    year = data.node_data["node_year"].flatten()
    train, val, test = data.split
    assert ((year[train] > 0) & (year[train] <= 2007)).all()
    assert (year[val] == 2008).all()
    assert (year[test] >= 2009).all()
    assert int((year == 0).sum()) == 214
    pairs = data.src.long() * 2235 + data.dst.long()
    assert torch.equal(pairs.sort().values, (data.dst.long() * 2235 + data.src.long()).sort().values)


@pytest.mark.parametrize("shape", [b"(5, 3(", b"(5, 3]", b"('5'3)", b"((((((", b"()()()", b"\x00\xff\x00\xff\x00\xff"])
def test_a_header_that_is_no_tuple_is_refused_by_name(tmp_path, shape):
    folder = write_binary_layout(tmp_path / "g")
    path = folder / "raw" / "data.npz"
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    assert b"(5, 3)" in members["node_feat.npy"]
    members["node_feat.npy"] = members["node_feat.npy"].replace(b"(5, 3)", shape)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    with pytest.raises(ValueError, match=r"data\.npz: array 'node_feat' is damaged") as raised:
        read_ogb(folder, "ogbn-papers100M")
    assert "\n" not in str(raised.value)


def test_features_that_a_data_set_of_that_name_has_may_not_be_missing(tmp_path):
    """It would train on nothing, with a warning at most."""
    folder = write_csv_layout(tmp_path / "ogbn_arxiv", EDGES, 4, feat="")
    with pytest.raises(ValueError, match=r"raw/node-feat.csv.gz is missing: ogbn-arxiv has 128 features of each node"):
        load("ogbn-arxiv", tmp_path)
    with pytest.raises(ValueError, match=r"raw/node-feat.csv.gz is missing: ogbn-arxiv has .* folder of another name"):
        read_ogb(folder)
    assert read_ogb(folder, "mine").features is None
    labels = np.ones((4, 112), int)
    folder = write_csv_layout(tmp_path / "p", EDGES, 4, feat="", labels=labels, split="species")
    with pytest.raises(ValueError, match=r"raw/edge-feat.csv.gz is missing: ogbn-proteins has features of each edge"):
        read_ogb(folder, "ogbn_proteins")
    folder = write_mag_layout(tmp_path / "ogbn_mag")
    path = folder / "raw" / "node-feat" / "paper" / "node-feat.csv.gz"
    path.unlink()
    with pytest.raises(ValueError, match=rf"{path} is missing: ogbn-mag has 128 features of each node"):
        read_ogb(folder)
    folder = write_binary_layout(tmp_path / "ogbn_papers100M", node_feat=None)
    with pytest.raises(ValueError, match=r"data.npz lacks node_feat, which ogbn-papers100m has"):
        read_ogb(folder)


@pytest.mark.parametrize("name", ["node-feat", "edge-feat", "node_year", "edge", "node-label"])
def test_a_pipe_among_the_files_is_named_and_not_waited_for(tmp_path, name):
    folder = write_csv_layout(tmp_path / "mine", EDGES, 4)
    path = folder / "raw" / f"{name}.csv.gz"
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(ValueError, match=rf"{path}: is a pipe, not a file"):
        read_ogb(folder)
