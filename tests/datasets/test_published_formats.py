"""The formats of gnn-benchmark, heterophilous-graphs, GraphSAINT and Reddit: whole graphs back, errors by name."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given
from hypothesis import strategies as st

from nugnn.datasets import load
from nugnn.datasets.gnn_benchmark import read_gnn_benchmark, split_per_class
from nugnn.datasets.graphsaint import read_graphsaint, read_reddit
from nugnn.datasets.heterophilous import read_heterophilous
from nugnn.datasets.npz_arrays import npz_arrays
from nugnn.datasets.simple_graph import simple_undirected

FOLDER = Path(os.environ.get("NUGNN_DATA") or Path(__file__).resolve().parents[2].parent / "shared" / "data")


def stored(name):
    if not (FOLDER / name / f"{name}.npz").is_file():
        pytest.skip(f"{name}/{name}.npz is not under {FOLDER}; name a folder of public graphs with NUGNN_DATA")
    return load(name, FOLDER)


def same_tensors(a, b):
    return torch.equal(a.to_dense(), b.to_dense()) and a.dtype == b.dtype and a.layout == b.layout


@given(edges=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=20))
def test_simple_undirected_is_symmetric_simple_and_complete(edges):
    src, dst = (np.array([edge[end] for edge in edges], dtype=np.int64) for end in (0, 1))
    arcs = list(zip(*(ids.tolist() for ids in simple_undirected(src, dst, 6)), strict=True))
    assert arcs == sorted({(u, v) for a, b in edges for u, v in ((a, b), (b, a)) if u != v})


@given(labels=st.lists(st.integers(-1, 4), max_size=300), seed=st.integers(0, 3))
def test_split_per_class_covers_every_labelled_node_once(labels, seed):
    labels = np.array(labels, dtype=np.int64)
    train, val, test = split_per_class(labels, seed)
    assert np.array_equal(np.sort(np.concatenate([train, val, test])), np.flatnonzero(labels >= 0))
    for label in range(5):
        size = int((labels == label).sum())
        expected = (20, 30) if size > 50 else (size // 2, size // 4)
        assert (int((labels[train] == label).sum()), int((labels[val] == label).sum())) == expected
    assert all(np.array_equal(a, b) for a, b in zip(split_per_class(labels, seed), (train, val, test), strict=True))


def gnn_benchmark_arrays(data, upper=True):
    """As published: each undirected edge once, a self-loop, and names as pickled objects."""
    src, dst = data.src.numpy(), data.dst.numpy()
    kept = src < dst if upper else src != dst
    ones = np.ones(kept.sum(), dtype=np.float32)
    adjacency = sp.csr_matrix((ones, (src[kept], dst[kept])), (data.num_nodes,) * 2).tolil()
    adjacency[3, 3] = 1
    adjacency = adjacency.tocsr()
    x = data.features
    return {
        **{f"adj_{key}": getattr(adjacency, key) for key in ("data", "indices", "indptr", "shape")},
        **{"attr_data": x.values().numpy(), "attr_indices": x.col_indices().numpy().astype(np.int32)},
        **{"attr_indptr": x.crow_indices().numpy().astype(np.int32), "attr_shape": np.array(x.shape)},
        "labels": data.labels.numpy(),
        "attr_names": np.array(["a", None, "c"], dtype=object),
        "class_names": np.array(["a", "b"], dtype=object),
    }


@pytest.mark.parametrize("name", ["amazon_photo", "dblp"])
def test_stored_graph_comes_back_from_the_gnn_benchmark_format(tmp_path, name):
    data = stored(name)
    path = tmp_path / "published.npz"
    np.savez(path, **gnn_benchmark_arrays(data))
    for back in (read_gnn_benchmark(path, name), load(path)):
        assert torch.equal(back.src, data.src)
        assert torch.equal(back.dst, data.dst)
        assert same_tensors(back.features, data.features)
        assert torch.equal(back.labels, data.labels)
        assert (len(back.train_nodes), len(back.val_nodes)) == (20 * data.num_classes, 30 * data.num_classes)


def small_benchmark(**changes):
    """Three nodes; a change to None drops the key."""
    fields = {
        "adj_indptr": np.array([0, 2, 2, 3]),
        "adj_indices": np.array([1, 2, 0]),
        "adj_shape": np.array([3, 3]),
        "attr_matrix": np.eye(3, dtype=np.float32),
        "labels": np.array([0, 1, 1]),
        **changes,
    }
    return {key: value for key, value in fields.items() if value is not None}


def test_dense_or_missing_attributes(tmp_path):
    np.savez(tmp_path / "a.npz", **small_benchmark())
    data = read_gnn_benchmark(tmp_path / "a.npz", "a")
    assert data.src.tolist() == [0, 0, 1, 2]
    assert data.features.tolist() == torch.eye(3).tolist()
    np.savez(tmp_path / "a.npz", **small_benchmark(attr_matrix=None))
    assert read_gnn_benchmark(tmp_path / "a.npz", "a").features is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": np.array([0, None, 1], dtype=object)}, "labels holds pickled Python objects; .* refused"),
        ({"labels": None}, "lacks labels; it holds adj_indices"),
        ({"labels": np.array([0, 1])}, "2 labels for 3 nodes"),
        ({"labels": np.array([0.0, 1.0, 1.0])}, "labels is float64"),
        ({"adj_shape": np.array([3, 4])}, r"adj_shape is \[3, 4\]"),
        ({"adj_shape": np.array([2**40, 2**40])}, "adj_shape is"),
        ({"adj_indices": np.array([1, 3, 0])}, "entry 1, in row 0, is 3, out of range"),
        ({"adj_indptr": np.array([0, 2, 3])}, "indptr has shape"),
        ({"attr_matrix": np.full((3, 1), np.nan)}, "feature row 0, column 0 is nan"),
        ({"attr_matrix": np.eye(2)}, "2 rows for 3 nodes"),
        ({"attr_matrix": None, "attr_data": np.ones(1)}, "attr_indices, attr_indptr, attr_shape missing"),
        ({"labels": np.array([0, 1, -2])}, "label of node 2 is -2"),
    ],
)
def test_gnn_benchmark_arrays_are_checked(tmp_path, changes, message):
    np.savez(tmp_path / "a.npz", **small_benchmark(**changes))
    with pytest.raises(ValueError, match=rf"a\.npz.*{message}"):
        read_gnn_benchmark(tmp_path / "a.npz", "a")


def test_header_that_promises_more_than_is_stored_is_refused_before_memory_is_taken(tmp_path):
    import io
    import zipfile

    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "<i8", "fortran_order": False, "shape": (2**40,)})
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("labels.npy", buffer.getvalue())
    with pytest.raises(ValueError, match=r"bytes, where .* are stored"):
        npz_arrays(tmp_path / "a.npz", ("labels",))


@pytest.mark.parametrize("name", ["tolokers", "minesweeper", "actor", "squirrel"])
def test_stored_graph_comes_back_from_the_heterophilous_format(tmp_path, name):
    data = stored(name)
    half = data.src < data.dst
    masks = np.zeros((3, len(data.splits), data.num_nodes), dtype=bool)
    for row, triple in enumerate(data.splits):
        for part, ids in enumerate(triple):
            masks[part, row, ids.numpy()] = True
    dense = data.features.to_dense().numpy()
    np.savez(
        tmp_path / f"{name}.npz",
        edges=torch.stack([data.src, data.dst], 1)[half].numpy(),
        node_features=dense,
        node_labels=data.labels.numpy(),
        **dict(zip(("train_masks", "val_masks", "test_masks"), masks, strict=True)),
    )
    back = load(name, tmp_path)
    assert torch.equal(back.src, data.src)
    assert torch.equal(back.dst, data.dst)
    assert np.array_equal(back.features.numpy(), dense)
    assert back.metric == data.metric
    for mine, theirs in zip(back.splits, data.splits, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_heterophilous_arrays_are_checked(tmp_path):
    good = {
        "edges": np.array([[0, 1]]),
        "node_features": np.eye(3),
        "node_labels": np.array([0, 1, 1]),
        **{f"{part}_masks": np.eye(3, dtype=bool)[row : row + 1] for row, part in enumerate(("train", "val", "test"))},
    }
    path = tmp_path / "a.npz"
    np.savez(path, **good)
    assert read_heterophilous(path, "a").num_splits == 1
    for key, value, message in (
        ("edges", np.array([[0, 3]]), "ids out of range for 3 nodes"),
        ("edges", np.array([[0, 1, 2]]), "no \\(E, 2\\)"),
        ("node_labels", np.array([0, 1]), "split masks have shape|rows for 2 nodes"),
        ("val_masks", np.eye(3, dtype=bool), "expected three bool arrays of one shape"),
        ("test_masks", np.eye(3, dtype=bool)[:1], "the sets have to be disjoint"),
    ):
        np.savez(path, **{**good, key: value})
        with pytest.raises(ValueError, match=rf"a\.npz.*({message})"):
            read_heterophilous(path, "a")


def write_graphsaint(folder, multilabel=False, kind="csr"):
    """Four nodes; node 3 is in no split and has no label."""
    folder.mkdir(parents=True, exist_ok=True)
    adjacency = sp.csr_matrix(np.array([[0, 1, 1, 0], [1, 0, 0, 0], [1, 0, 0, 1], [0, 0, 1, 0]], dtype=bool))
    sp.save_npz(folder / "adj_full.npz", adjacency.asformat(kind))
    np.save(folder / "feats.npy", np.arange(8.0).reshape(4, 2))
    classes = {0: [1, 0, 1], 1: [0, 0, 0], 2: [1, 1, 1]} if multilabel else {0: 4, 1: 0, 2: 1}
    (folder / "class_map.json").write_text(json.dumps(classes))
    (folder / "role.json").write_text(json.dumps({"tr": [1], "va": [0], "te": [2]}))
    return folder


@pytest.mark.parametrize("kind", ["csr", "coo"])
def test_graphsaint_files_are_read(tmp_path, kind):
    data = read_graphsaint(write_graphsaint(tmp_path / "flickr", kind=kind), "flickr")
    assert list(zip(data.src.tolist(), data.dst.tolist(), strict=True)) == [
        (0, 1),
        (0, 2),
        (1, 0),
        (2, 0),
        (2, 3),
        (3, 2),
    ]
    assert data.features.dtype == torch.float32
    assert data.features[3].tolist() == [6, 7]
    assert data.labels.tolist() == [4, 0, 1, -1]
    assert [ids.tolist() for ids in data.split] == [[1], [0], [2]]
    assert load("flickr", tmp_path).content_hash() == data.content_hash()


def test_graphsaint_label_vectors_are_multilabel(tmp_path):
    data = read_graphsaint(write_graphsaint(tmp_path, multilabel=True), "yelp")
    assert data.labels.tolist() == [[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 0, 0]]
    assert (data.metric, data.num_classes) == ("micro_f1", 3)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("class_map.json", "{", "no complete JSON"),
        ("class_map.json", "[1]", "holds a list"),
        ("class_map.json", '{"9": 1}', "not all in 0 to 3"),
        ("class_map.json", '{"x": 1}', "not whole numbers"),
        ("class_map.json", '{"0": 0.5}', "classes are float64"),
        ("class_map.json", '{"0": [1], "1": [0, 1]}', "not whole numbers"),
        ("class_map.json", '{"0": [2]}', "other values than 0 and 1"),
        ("role.json", '{"tr": [0], "va": [1]}', "'te' is no list of node ids"),
        ("role.json", '{"tr": [9], "va": [1], "te": []}', "'tr' is no list of node ids from 0 to 3"),
        ("feats.npy", "hello", "no complete .npy"),
        ("adj_full.npz", "hello", "not a complete"),
        *((file, None, "is missing") for file in ("class_map.json", "role.json", "feats.npy", "adj_full.npz")),
    ],
)
def test_graphsaint_files_are_checked(tmp_path, file, content, message):
    path = write_graphsaint(tmp_path) / file
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(ValueError, match=rf"{file.replace('.', chr(92) + '.')}.*{message}"):
        read_graphsaint(tmp_path, "flickr")


def test_reddit_files_are_read_and_checked(tmp_path):
    folder = tmp_path / "reddit"
    folder.mkdir()
    sp.save_npz(folder / "reddit_graph.npz", sp.coo_matrix(([1.0, 1.0], ([2, 0], [0, 1])), (3, 3)))
    rest = {"feature": np.eye(3), "label": np.array([0, 1, 1]), "node_types": np.array([1, 3, 2])}
    np.savez(folder / "reddit_data.npz", **rest, node_ids=np.array([1, "x", None], dtype=object))
    data = read_reddit(folder, "reddit")
    assert (data.src.tolist(), data.dst.tolist()) == ([2, 0], [0, 1])
    assert [ids.tolist() for ids in data.split] == [[0], [2], [1]]
    assert load("reddit", tmp_path).content_hash() == data.content_hash()
    np.savez(folder / "reddit_data.npz", **{**rest, "node_types": np.array([1, 3])})
    with pytest.raises(ValueError, match=r"node_types lists 2 nodes, reddit_graph\.npz 3"):
        read_reddit(folder, "reddit")


@given(
    place=st.floats(0, 1, exclude_max=True),
    byte=st.integers(0, 255),
    file=st.sampled_from(["adj_full.npz", "feats.npy", "class_map.json", "role.json"]),
)
def test_changed_byte_is_a_clean_error_or_another_valid_graph(tmp_path_factory, place, byte, file):
    path = write_graphsaint(tmp_path_factory.mktemp("saint")) / file
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] = byte
    path.write_bytes(content)
    try:
        read_graphsaint(path.parent, "x")
    except ValueError as error:
        assert str(path.parent) in str(error)
