"""The .npz format: what is written is read back, and a broken file is one error that names it."""

import io
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nugnn.datasets import GraphData, read_npz, write_npz
from nugnn.datasets.sparse import csr_matrix


def arrays(**changes):
    """Three nodes, edges 0->1, 0->2, 2->2; a change to None drops the key."""
    fields = {
        "num_nodes": np.int64(3),
        "adj_indptr": np.array([0, 2, 2, 3]),
        "adj_indices": np.array([1, 2, 2], dtype=np.int32),
        "edge_weight": np.array([1.0, 2.0, 3.0], dtype=np.float32),
        "feat_indptr": np.array([0, 1, 1, 3]),
        "feat_indices": np.array([4, 0, 3], dtype=np.int32),
        "feat_data": np.array([1.0, 2.0, 3.0], dtype=np.float32),
        "feat_shape": np.array([3, 5]),
        "label": np.array([1, -1, 0]),
        "train_idx": np.array([0]),
        "val_idx": np.array([2]),
        "test_idx": np.array([], dtype=np.int64),
        "train_masks": np.array([[True, False, False], [False, False, True]]),
        "val_masks": np.array([[False, False, True], [True, False, False]]),
        "test_masks": np.zeros((2, 3), dtype=bool),
        **changes,
    }
    return {key: value for key, value in fields.items() if value is not None}


def write(path, **changes):
    np.savez_compressed(path, **arrays(**changes))
    return path


NO_FEATURES = dict.fromkeys(["feat_indptr", "feat_indices", "feat_data", "feat_shape"])
NO_MASKS = dict.fromkeys(["train_masks", "val_masks", "test_masks"])


def test_every_key_arrives_where_it_belongs(tmp_path):
    data = read_npz(write(tmp_path / "tiny.npz", class_years=np.array([2004, 2005])))
    assert (data.name, data.num_nodes, data.num_classes, data.metric) == ("tiny", 3, 2, "accuracy")
    assert list(zip(data.src.tolist(), data.dst.tolist(), strict=True)) == [(0, 1), (0, 2), (2, 2)]
    assert data.edge_data["weight"].tolist() == [1, 2, 3]
    assert data.features.layout == torch.sparse_csr
    assert data.features.to_dense().tolist() == [[0, 0, 0, 0, 1], [0, 0, 0, 0, 0], [2, 0, 0, 3, 0]]
    assert data.features.dtype == torch.float32
    assert data.labels.tolist() == [1, -1, 0]
    assert data.num_splits == 2
    assert data.with_split(1).train_nodes.tolist() == [2]


def test_label_matrix_is_multilabel(tmp_path):
    data = read_npz(write(tmp_path / "m.npz", label=np.array([[1, 0], [1, 1], [0, 0]], dtype=np.uint8)))
    assert (data.is_multilabel, data.num_classes, data.metric) == (True, 2, "micro_f1")


@st.composite
def graphs(draw):
    num_nodes = draw(st.integers(1, 6))
    node = st.integers(0, num_nodes - 1)
    edges = sorted(draw(st.lists(st.tuples(node, node), max_size=12)))
    src, dst = (torch.tensor([edge[end] for edge in edges], dtype=torch.int64) for end in (0, 1))
    dense = torch.randn(num_nodes, 3, generator=torch.Generator().manual_seed(draw(st.integers(0, 9))))
    all_zero = csr_matrix(torch.zeros(num_nodes + 1), torch.zeros(0), torch.zeros(0), (num_nodes, 4))
    order = draw(st.permutations(range(num_nodes)))
    cuts = sorted([draw(st.integers(0, num_nodes)), draw(st.integers(0, num_nodes))])
    parts = [torch.tensor(order[a:b], dtype=torch.int64) for a, b in zip([0, *cuts], [*cuts, num_nodes], strict=True)]
    splits = (tuple(parts), (parts[2], parts[0], parts[1])) if draw(st.booleans()) else ()
    labels = torch.tensor(draw(st.lists(st.integers(0, 2), min_size=num_nodes, max_size=num_nodes)))
    return GraphData(
        name="written",
        num_nodes=num_nodes,
        src=src,
        dst=dst,
        features=draw(st.sampled_from([dense, dense.double(), all_zero, None])),
        labels=draw(st.sampled_from([labels, torch.nn.functional.one_hot(labels, 3).to(torch.uint8)])),
        num_classes=3,
        train_nodes=parts[0],
        val_nodes=parts[1],
        test_nodes=parts[2],
        splits=splits,
        node_data=draw(st.sampled_from([{}, {"year": torch.arange(num_nodes)}])),
        edge_data=draw(st.sampled_from([{}, {"weight": torch.rand(len(src)), "kind": torch.arange(len(src))}])),
    )


@given(data=graphs())
def test_round_trip_is_exact_for_edges_in_csr_order(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("npz") / "written.npz"
    write_npz(data, path)
    assert read_npz(path).content_hash() == data.content_hash()
    assert [file.name for file in path.parent.iterdir()] == ["written.npz"], "nothing else is left behind"


def test_other_edge_orders_are_renumbered_with_their_data(tmp_path):
    number = torch.arange(4.0)
    data = GraphData(
        name="x",
        num_nodes=3,
        src=torch.tensor([2, 0, 2, 0]),
        dst=torch.tensor([0, 2, 0, 1]),
        edge_data={"weight": number},
    )
    write_npz(data, tmp_path / "x.npz")
    back = read_npz(tmp_path / "x.npz")
    assert back.src.tolist() == [0, 0, 2, 2]
    assert back.dst.tolist() == [1, 2, 0, 0]
    assert back.edge_data["weight"].tolist() == [3, 1, 0, 2], "parallel edges stay in edge-id order"


def test_half_precision_is_written_as_float32_with_the_same_values(tmp_path):
    x = torch.tensor([[1.5], [-0.25]])
    for dtype in (torch.float16, torch.bfloat16):
        data = GraphData(name="x", num_nodes=2, src=torch.tensor([0]), dst=torch.tensor([1]), features=x.to(dtype))
        write_npz(data, tmp_path / "x.npz")
        assert torch.equal(read_npz(tmp_path / "x.npz").features, x)


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (b"", "it is empty"),
        (b"\n<!DOCTYPE html><html>404</html>", "web page"),
        (b"num_nodes,3\n", "begins with"),
    ],
)
def test_datasets_01_file_that_is_no_archive_is_one_error_each_time(tmp_path, content, hint):
    path = tmp_path / "bad.npz"
    path.write_bytes(content)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"bad\.npz is not a complete \.npz archive: .*{hint}.*again"):
            read_npz(path)


def test_datasets_01_file_cut_anywhere_is_refused_by_name(tmp_path):
    whole = write(tmp_path / "whole.npz").read_bytes()
    cut = tmp_path / "cut.npz"
    for length in range(1, len(whole), 37):
        cut.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"cut\.npz"):
            read_npz(cut)


def test_damaged_byte_is_refused_by_name_or_harmless(tmp_path):
    whole = write(tmp_path / "same.npz").read_bytes()
    expected = read_npz(tmp_path / "same.npz").content_hash()
    (tmp_path / "damaged").mkdir()
    path = tmp_path / "damaged" / "same.npz"
    num_refused = 0
    for place in range(0, len(whole), 3):
        for flip in (0x01, 0x80):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :])
            try:
                data = read_npz(path)
            except ValueError as error:
                assert "same.npz" in str(error)
                num_refused += 1
            else:
                assert data.content_hash() == expected, f"byte {place} changed the graph unnoticed"
    assert num_refused > 0


class Payload:
    ran = False

    def __reduce__(self):
        return (setattr, (Payload, "ran", True))


def test_datasets_02_pickled_objects_are_refused_and_not_run(tmp_path):
    np.savez(tmp_path / "p.npz", **arrays(label=np.array([Payload(), Payload(), Payload()], dtype=object)))
    Payload.ran = False
    with pytest.raises(ValueError, match=r"p\.npz.*plain arrays"):
        read_npz(tmp_path / "p.npz")
    assert not Payload.ran


def test_member_that_is_no_array_is_refused(tmp_path):
    path = write(tmp_path / "t.npz")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("notes.txt", "hello")
    with pytest.raises(ValueError, match=r"t\.npz.*notes\.txt"):
        read_npz(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adj_indptr": None}, "not a graph: it lacks adj_indptr; it holds .*adj_indices"),
        ({"labels": np.array([0, 1, 1])}, "unknown key 'labels'; did you mean 'label'"),
        ({"feat_data": None}, "feat_data missing"),
        ({"test_idx": None}, "test_idx missing"),
        ({"val_masks": None}, "val_masks missing"),
        ({"feat": np.zeros((3, 2), dtype=np.float32)}, "both dense .* and sparse"),
        ({"num_nodes": np.float64(3)}, "num_nodes is float64"),
        ({"num_nodes": np.array([3])}, "num_nodes is int64"),
        ({"num_nodes": np.int64(4)}, "indptr has shape .*expected \\(5,\\)"),
        ({"adj_indptr": np.array([0, 2, 1, 3])}, "row 1 would have -1 entries"),
        ({"adj_indptr": np.array([0, 2, 2, 4])}, "indptr runs from 0 to 4; it has to run from 0 to 3"),
        ({"adj_indices": np.array([1, 7, 2])}, "entry 1, in row 0, is 7, out of range for 3 columns"),
        ({"adj_indices": np.array([1, -1, 2])}, "entry 1, in row 0, is -1"),
        ({"adj_indices": np.array([1.0, 2.0, 2.0])}, "adj_indices is float64"),
        ({"edge_weight": np.zeros(2, dtype=np.float32)}, "edge data 'weight'"),
        ({"edge_weight": np.array(["a", "b", "c"])}, "edge_weight is <U1"),
        ({"feat_shape": np.array([3])}, "feat_shape is \\[3\\]"),
        ({"feat_shape": np.array([3, 4])}, "features: entry 0, in row 0, is 4"),
        ({"feat_data": np.ones(2, dtype=np.float32)}, "feat_data has 2 entries and feat_indices 3"),
        ({**NO_FEATURES, "feat": np.zeros((2, 2), dtype=np.float32)}, "features have 2 rows for 3 nodes"),
        ({**NO_FEATURES, "feat": np.full((3, 2), np.nan, dtype=np.float32)}, "feature row 0, column 0 is nan"),
        ({"label": np.array([1.0, np.nan, 0.0])}, "label is float64"),
        ({"label": np.array([0, 1])}, "labels have 2 rows for 3 nodes"),
        ({"label": np.array([[0, 1]] * 3)}, "uint8 0/1; it is int64"),
        ({**NO_MASKS, "train_idx": np.array([1])}, "1 of 1 train nodes have no label, for example node 1"),
        ({**NO_MASKS, "train_idx": np.array([5])}, "train node 0 is 5"),
        ({"train_idx": np.array([], dtype=np.int64)}, "differ from row 0"),
        ({"train_masks": np.zeros((2, 3), dtype=np.int64)}, "expected three bool arrays"),
        ({"train_masks": np.zeros((1, 3), dtype=bool)}, "expected three bool arrays"),
        ({"metric": np.array("f1")}, "metric is 'f1'"),
        ({"num_classes": np.int64(1)}, "label of node 0 is 1; allowed are 0 to 0"),
        ({"node_data.year": np.arange(2)}, "node data 'year'"),
        ({"edge_data.weight": np.ones(3)}, "both edge_weight and edge_data.weight"),
    ],
)
def test_every_key_is_validated(tmp_path, changes, message):
    with pytest.raises(ValueError, match=rf"broken\.npz.*{message}"):
        read_npz(write(tmp_path / "broken.npz", **changes))


def test_missing_file_and_folder_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"none\.npz: no such file"):
        read_npz(tmp_path / "none.npz")
    with pytest.raises(ValueError, match="is a folder"):
        read_npz(tmp_path)


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    data = read_npz(write(tmp_path / "kept.npz"))
    before = (tmp_path / "kept.npz").read_bytes()

    def fail(file: io.BufferedWriter, **arrays: np.ndarray) -> None:
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez_compressed", fail)
    with pytest.raises(OSError, match="disk full"):
        write_npz(data, tmp_path / "kept.npz")
    assert (tmp_path / "kept.npz").read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["kept.npz"]
