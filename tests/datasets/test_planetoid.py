"""Planetoid's pickles: the stored graphs come back exactly, and nothing a file names is run."""

import collections
import io
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given
from hypothesis import strategies as st

from nugnn.datasets import GraphData, load
from nugnn.datasets.planetoid import PARTS, read_planetoid
from nugnn.datasets.simple_graph import simple_undirected
from nugnn.datasets.sparse import csr_matrix

FOLDER = Path(os.environ.get("NUGNN_DATA") or Path(__file__).resolve().parents[2].parent / "shared" / "data")


class _Python2Pickler(pickle._Pickler):
    """Writes bytes as Python 2 wrote its strings, and the module names of that time."""

    dispatch = {**pickle._Pickler.dispatch}  # noqa: RUF012

    def save_bytes(self, content):
        self.write(b"T" + len(content).to_bytes(4, "little") + content)
        self.memoize(content)

    dispatch[bytes] = save_bytes


def python2_pickle(value):
    buffer = io.BytesIO()
    _Python2Pickler(buffer, protocol=2).dump(value)
    names = {b"cscipy.sparse._csr\n": b"cscipy.sparse.csr\n", b"cnumpy._core.multiarray\n": b"cnumpy.core.multiarray\n"}
    content = buffer.getvalue()
    for new, old in names.items():
        content = content.replace(new, old)
    return content


def python3_pickle(value):
    return pickle.dumps(value, protocol=2)


def write_raw(folder, name, data, dump=python2_pickle):
    """The eight files that hold a graph whose test nodes are its last ones, in a shuffled order."""
    folder.mkdir(exist_ok=True)
    x = data.features
    features = sp.csr_matrix((x.values().numpy(), x.col_indices().numpy(), x.crow_indices().numpy()), x.shape)
    one_hot = np.zeros((data.num_nodes, data.num_classes), dtype=np.int32)
    labelled = (data.labels >= 0).numpy()
    one_hot[labelled, data.labels.numpy()[labelled]] = 1
    test = np.random.default_rng(0).permutation(data.test_nodes.numpy())
    first, num_train = int(test.min()), len(data.train_nodes)
    graph = collections.defaultdict(list)
    for u, v in zip(data.src.tolist(), data.dst.tolist(), strict=True):
        graph[u].append(v)
    graph[0] += [*graph[0][:1], 0]  # a repeated edge and a self-loop, as the real files have
    parts = {
        **{"x": features[:num_train], "tx": features[test], "allx": features[:first]},
        **{"y": one_hot[:num_train], "ty": one_hot[test], "ally": one_hot[:first]},
        "graph": graph,
    }
    for part, value in parts.items():
        (folder / f"ind.{name}.{part}").write_bytes(dump(value))
    (folder / f"ind.{name}.test.index").write_text("".join(f"{node}\n" for node in test))
    return folder


def small():
    """506 nodes: 4 to train on, 500 to validate, and two test nodes with an empty id between them."""
    num_nodes = 507
    rng = np.random.default_rng(1)
    src, dst = simple_undirected(rng.integers(0, num_nodes, 2000), rng.integers(0, num_nodes, 2000), num_nodes)
    dense = (rng.random((num_nodes, 9)) < 0.3).astype(np.float32)
    labels = rng.integers(0, 3, num_nodes)
    dense[505], labels[505] = 0, -1
    x = sp.csr_matrix(dense)
    features = csr_matrix(*(torch.from_numpy(a) for a in (x.indptr, x.indices, x.data)), shape=x.shape)
    split = {"train_nodes": torch.arange(4), "val_nodes": torch.arange(4, 504), "test_nodes": torch.tensor([504, 506])}
    edges = {"src": torch.from_numpy(src), "dst": torch.from_numpy(dst)}
    labels = torch.from_numpy(labels)
    return GraphData(
        name="tiny", num_nodes=num_nodes, features=features, labels=labels, num_classes=3, **edges, **split
    )


@pytest.mark.parametrize("dump", [python2_pickle, python3_pickle, pickle.dumps], ids=["python 2", "python 3", "newest"])
def test_graph_comes_back_exactly(tmp_path, dump):
    data = small()
    assert read_planetoid(write_raw(tmp_path, "tiny", data, dump), "tiny").content_hash() == data.content_hash()


@pytest.mark.parametrize("name", ["cora", "citeseer"])
def test_stored_public_graphs_come_back_exactly_from_raw_files(tmp_path, name):
    if not (FOLDER / name / f"{name}.npz").is_file():
        pytest.skip(f"{name}/{name}.npz is not under {FOLDER}; name a folder of public graphs with NUGNN_DATA")
    stored = load(name, FOLDER)
    assert read_planetoid(write_raw(tmp_path, name, stored), name).content_hash() == stored.content_hash()


class Payload:
    def __init__(self, call, *arguments):
        self.reduced = (call, arguments)

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Payload(os.system, "echo run > ran"), r"(posix|nt)\.system"),
        (Payload(eval, "open('ran', 'w')"), r"builtins\.eval"),
        (Payload(getattr, "x", "upper"), r"builtins\.getattr"),
        (np.zeros(2).view(np.recarray), r"numpy.*recarray|numpy.*record"),
        (sp.coo_matrix(np.eye(2)), r"scipy\.sparse\._coo\.coo_matrix"),
    ],
)
@pytest.mark.parametrize("part", ["x", "y", "graph"])
def test_other_names_are_refused_by_name_and_not_run(tmp_path, monkeypatch, value, named, part):
    monkeypatch.chdir(tmp_path)
    write_raw(tmp_path, "tiny", small())
    (tmp_path / f"ind.tiny.{part}").write_bytes(pickle.dumps(value))
    with pytest.raises(ValueError, match=rf"ind\.tiny\.{part} is not .* read safely: it names {named}, which"):
        read_planetoid(tmp_path, "tiny")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("part", PARTS)
def test_missing_or_cut_file_is_named(tmp_path, part):
    path = write_raw(tmp_path, "tiny", small()) / f"ind.tiny.{part}"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if part != "test.index" else b"")
    with pytest.raises(ValueError, match=rf"ind\.tiny\.{part}"):
        read_planetoid(tmp_path, "tiny")
    path.unlink()
    with pytest.raises(ValueError, match=rf"ind\.tiny\.{part} is missing"):
        read_planetoid(tmp_path, "tiny")


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("x", np.zeros((4, 9)), "holds ArrayState, not a sparse matrix"),
        ("y", sp.csr_matrix(np.eye(4, 3)), "where an array is expected"),
        ("y", np.array([["a"]]), "its type is 'U1'"),
        ("y", np.zeros(4), r"has shape \(4,\)"),
        ("y", np.zeros((5, 3)), "x is 4 x 9 and its labels 5 x 3"),
        ("tx", sp.csr_matrix(np.eye(2, 8)), "tx is 2 x 8"),
        ("graph", [1, 2], "holds list, not a dictionary"),
        ("graph", {0: 1}, "neighbours of 0 are no list"),
        ("graph", {0: [1], 3: [507]}, "edge 3 - 507 is out of range for 507 nodes"),
        ("graph", {0: [-1]}, "edge 0 - -1 is out of range"),
        ("graph", {"0": [1]}, "edge '0' - 1"),
    ],
)
def test_content_that_does_not_fit_is_refused(tmp_path, part, value, message):
    write_raw(tmp_path, "tiny", small())
    (tmp_path / f"ind.tiny.{part}").write_bytes(python2_pickle(value))
    with pytest.raises(ValueError, match=message):
        read_planetoid(tmp_path, "tiny")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ("504\n504\n", "each row once"),
        ("503\n506\n", "from 504 on"),
        ("504\n", "lists 1 ids from 504 for 2 test rows"),
        ("504\n900000000\n", "goes up to 900000000"),
        ("504\nx\n", "one node id per line"),
    ],
)
def test_test_index_is_checked(tmp_path, ids, message):
    write_raw(tmp_path, "tiny", small())
    (tmp_path / "ind.tiny.test.index").write_text(ids)
    with pytest.raises(ValueError, match=message):
        read_planetoid(tmp_path, "tiny")


WHOLE = {}


@given(part=st.sampled_from(PARTS), place=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
def test_changed_byte_is_a_clean_error_or_another_valid_graph(tmp_path_factory, part, place, byte):
    if not WHOLE:
        folder = write_raw(tmp_path_factory.mktemp("whole"), "tiny", small())
        WHOLE.update({name: (folder / f"ind.tiny.{name}").read_bytes() for name in PARTS}, folder=folder)
    path = WHOLE["folder"] / f"ind.tiny.{part}"
    content = bytearray(WHOLE[part])
    content[int(place * len(content))] = byte
    path.write_bytes(content)
    try:
        read_planetoid(path.parent, "tiny")
    except ValueError as error:
        assert str(error)
    finally:
        path.write_bytes(WHOLE[part])
