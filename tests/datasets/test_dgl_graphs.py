"""GraphData to DGLGraph and back: nothing lost, edge ids unchanged, unsuitable graphs refused."""

import nugnn  # noqa: F401  # lets dgl import under this torch

# isort: split
import dgl
import pytest
import torch

from nugnn.datasets import GraphData, read_path


def users_graph():
    g = dgl.graph((torch.tensor([2, 0, 0, 1]), torch.tensor([1, 1, 1, 2])), num_nodes=4)
    g.ndata["feat"] = torch.arange(8.0).reshape(4, 2)
    g.ndata["label"] = torch.tensor([0, 2, 1, -1])
    g.ndata["train_mask"] = torch.tensor([True, False, False, False])
    g.ndata["val_mask"] = torch.tensor([False, True, False, False])
    g.ndata["test_mask"] = torch.tensor([False, False, True, False])
    g.ndata["year"] = torch.tensor([1990, 1991, 1992, 1993])
    g.edata["weight"] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    return g


def test_masks_without_labels_name_the_column_that_is_looked_for():
    g = dgl.graph(([0, 1], [1, 0]))
    g.ndata["y"] = torch.tensor([0, 1])
    g.ndata["train_mask"] = torch.tensor([True, False])
    with pytest.raises(ValueError, match=r"no labels: they are looked for in the node data 'label', and there is 'y'"):
        GraphData.from_dgl(g)
    assert GraphData.from_dgl(g, labels="y").labels.tolist() == [0, 1]
    with pytest.raises(ValueError, match="1 train nodes, but no labels"):
        GraphData.from_dgl(g, labels=None)
    g.ndata["train_mask"] = torch.tensor([False, False])
    assert GraphData.from_dgl(g).labels is None


def test_round_trip_gives_the_same_graph():
    g = users_graph()
    keys = set(g.ndata)
    data = GraphData.from_dgl(g)
    assert data.src.tolist() == [2, 0, 0, 1]
    assert data.num_classes == 3
    assert [nodes.tolist() for nodes in data.split] == [[0], [1], [2]]
    assert set(data.node_data) == {"year"}
    assert data.edge_data["weight"].tolist() == [1, 2, 3, 4]
    assert set(g.ndata) == keys, "the user's graph is not modified"
    back = data.to_dgl()
    assert set(back.ndata) == keys
    for key in keys:
        assert torch.equal(back.ndata[key], g.ndata[key])
    again = GraphData.from_dgl(back)
    assert again.content_hash() == data.content_hash()


def test_graph_with_nothing_but_edges_is_fine():
    data = GraphData.from_dgl(dgl.graph(([0, 1], [1, 0]), num_nodes=3))
    assert (data.num_nodes, data.features, data.labels, len(data.train_nodes)) == (3, None, None, 0)


def test_other_keys_can_be_named_and_a_missing_one_is_refused():
    g = users_graph()
    g.ndata["x"] = g.ndata.pop("feat").double()
    assert GraphData.from_dgl(g, features="x").features.dtype == torch.float64
    with pytest.raises(ValueError, match=r"features='z' is not in graph.ndata, which has .*'x'"):
        GraphData.from_dgl(g, features="z")


def test_column_and_float_labels_are_read_and_a_matrix_is_multilabel():
    g = users_graph()
    g.ndata["label"] = torch.tensor([[0.0], [2.0], [1.0], [float("nan")]])
    assert GraphData.from_dgl(g).labels.tolist() == [0, 2, 1, -1]
    g.ndata["label"] = torch.tensor([[0.0, 1], [1, 1], [0, 0], [0, 1]])
    data = GraphData.from_dgl(g)
    assert (data.is_multilabel, data.num_classes, data.labels.dtype) == (True, 2, torch.uint8)
    g.ndata["label"] = torch.tensor([[0.0, 1], [1, 3], [0, 0], [0, 1]])
    with pytest.raises(ValueError, match="label row 1 holds other values"):
        GraphData.from_dgl(g)


def test_masks_with_columns_become_splits():
    g = users_graph()
    g.ndata["train_mask"] = torch.tensor([[1, 0], [0, 1], [0, 0], [0, 0]], dtype=torch.uint8)
    g.ndata["val_mask"] = torch.tensor([[0, 1], [1, 0], [0, 0], [0, 0]], dtype=torch.uint8)
    g.ndata["test_mask"] = torch.tensor([[0, 0], [0, 0], [1, 1], [0, 0]], dtype=torch.uint8)
    data = GraphData.from_dgl(g)
    assert data.num_splits == 2
    assert data.with_split(1).train_nodes.tolist() == [1]
    g.ndata["test_mask"] = torch.zeros(4, dtype=torch.bool)
    with pytest.raises(ValueError, match="the same number"):
        GraphData.from_dgl(g)


def test_heterograph_is_refused_with_what_to_do():
    g = dgl.heterograph({("user", "buys", "item"): ([0, 1], [0, 0])})
    with pytest.raises(ValueError, match=r"dgl\.to_homogeneous.*_TYPE"):
        GraphData.from_dgl(g)


def test_node_data_that_would_be_overwritten_is_refused():
    data = GraphData(
        name="x",
        num_nodes=2,
        src=torch.tensor([0]),
        dst=torch.tensor([1]),
        features=torch.zeros(2, 1),
        node_data={"feat": torch.zeros(2)},
    )
    with pytest.raises(ValueError, match=r"node_data \['feat'\]"):
        data.to_dgl()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_id_type_is_kept(dtype):
    data = GraphData(name="x", num_nodes=2, src=torch.tensor([0], dtype=dtype), dst=torch.tensor([1], dtype=dtype))
    assert GraphData.from_dgl(data.to_dgl()).src.dtype == dtype


@pytest.mark.parametrize("formats", ["coo", "csr", "csc", ["coo", "csr", "csc"]], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_file_that_dgl_saved_is_read_as_the_graph_in_memory(tmp_path, formats, dtype):
    g = users_graph().to("cpu")
    g = g.int() if dtype == torch.int32 else g
    g.ndata["half"] = torch.arange(4).to(torch.bfloat16)
    dgl.save_graphs(str(tmp_path / "g.bin"), [g], formats=formats)
    data = read_path(tmp_path / "g.bin")
    expected = GraphData.from_dgl(g, name="g")
    assert data.src.dtype == dtype
    assert data.content_hash() == expected.content_hash()


def test_file_of_several_graphs_and_of_a_heterograph_are_refused(tmp_path):
    g = users_graph()
    dgl.save_graphs(str(tmp_path / "g.bin"), [g, g], {"y": torch.tensor([1, 2])})
    with pytest.raises(ValueError, match=r"g\.bin: it holds 2 graphs; save the one"):
        read_path(tmp_path / "g.bin")
    h = dgl.heterograph({("user", "buys", "item"): ([0, 1], [0, 0])})
    dgl.save_graphs(str(tmp_path / "h.dgl"), [h])
    with pytest.raises(ValueError, match=r"h\.dgl: .*several node or edge types.*dgl\.to_homogeneous"):
        read_path(tmp_path / "h.dgl")


def test_file_cut_anywhere_is_refused_by_name(tmp_path):
    dgl.save_graphs(str(tmp_path / "g.bin"), [users_graph()])
    whole = (tmp_path / "g.bin").read_bytes()
    for length in [*range(0, 40), *range(4090, len(whole), 3)]:
        (tmp_path / "g.bin").write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"g\.bin: "):
            read_path(tmp_path / "g.bin")


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.tensor([0, 1, 2, 0]), r"train_mask of node 2 is 2; a mask holds only 0 and 1"),
        (torch.tensor([0.0, float("nan"), 0, 0]), r"train_mask of node 1 is nan"),
        (torch.zeros(4, 1, 1), r"train_mask has shape \(4, 1, 1\); a mask has one value per node"),
    ],
)
def test_mask_that_is_none_is_refused(mask, message):
    g = users_graph()
    g.ndata["train_mask"] = mask
    with pytest.raises(ValueError, match=message):
        GraphData.from_dgl(g)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32], ids=str)
def test_masks_of_any_type_are_read(dtype):
    g = users_graph()
    for key in ("train_mask", "val_mask", "test_mask"):
        g.ndata[key] = g.ndata[key].to(dtype)
    assert [nodes.tolist() for nodes in GraphData.from_dgl(g).split] == [[0], [1], [2]]
