"""GraphData: what it refuses, what it fills in, and its content hash; docs/cases.md says where each case is tested."""

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from nugnn.datasets import GraphData, class_ids
from nugnn.datasets.sparse import csr_matrix


def ids(*values):
    return torch.tensor(values, dtype=torch.int64)


def small(**changes):
    """Four nodes, three edges, everything present."""
    fields = {
        "name": "small",
        "num_nodes": 4,
        "src": ids(0, 1, 3),
        "dst": ids(1, 2, 1),
        "features": torch.arange(8.0).reshape(4, 2),
        "labels": ids(0, 1, 1, -1),
        "train_nodes": ids(0),
        "val_nodes": ids(1),
        "test_nodes": ids(2),
        "splits": ((ids(0), ids(1), ids(2)), (ids(2), ids(1), ids(0))),
        "node_data": {"age": torch.arange(4)},
        "edge_data": {"weight": torch.tensor([0.5, 1.0, 2.0])},
    }
    return GraphData(**{**fields, **changes})


def test_valid_graph_keeps_its_fields_and_fills_in_the_rest():
    data = small()
    assert (data.num_edges, data.num_features, data.num_classes, data.metric) == (3, 2, 2, "accuracy")
    assert not data.is_multilabel
    assert data.num_splits == 2


def test_node_ids_are_kept_ascending():
    data = small(train_nodes=ids(2, 0), val_nodes=ids(1), test_nodes=ids())
    assert data.train_nodes.tolist() == [0, 2]


@pytest.mark.parametrize("bad_id", [-5, 4, 9])
@pytest.mark.parametrize("end", ["src", "dst"])
def test_datasets_06_end_point_out_of_range_names_row_value_and_range(end, bad_id):
    changes = {end: ids(0, bad_id, 3)}
    with pytest.raises(ValueError, match=rf"edge row 1 is .*id {bad_id} is out of range for 4 nodes.*largest.* 3"):
        small(**changes)


def test_datasets_06_first_bad_row_is_named_when_several_are_bad():
    with pytest.raises(ValueError, match="edge row 1 is -5 -> 2"):
        small(src=ids(0, -5, 9), dst=ids(1, 2, 1))


def test_partition_02_one_based_ids_are_not_shifted():
    with pytest.raises(ValueError, match="id 4 is out of range for 4 nodes; ids start at 0"):
        small(src=ids(1, 2, 3), dst=ids(2, 3, 4))


def test_datasets_07_nodes_without_edges_count():
    data = GraphData(
        name="tail",
        num_nodes=10,
        src=torch.arange(6),
        dst=(torch.arange(6) + 1) % 6,
        features=torch.arange(20.0).reshape(10, 2),
        labels=torch.arange(10) % 2,
        train_nodes=ids(0, 3, 6, 9),
    )
    assert data.num_nodes == 10
    assert data.features[9].tolist() == [18.0, 19.0]


@pytest.mark.parametrize("num_rows", [3, 5])
def test_datasets_07_feature_rows_other_than_nodes_are_refused(num_rows):
    with pytest.raises(ValueError, match=f"features have {num_rows} rows for 4 nodes"):
        small(features=torch.zeros(num_rows, 2))
    with pytest.raises(ValueError, match=f"labels have {num_rows} rows for 4 nodes"):
        small(labels=torch.zeros(num_rows, dtype=torch.int64))


def test_datasets_04_unlabelled_nodes_are_marked_and_not_counted():
    labels = class_ids(torch.tensor([0, float("nan"), 2, float("nan"), 1]))
    data = GraphData(name="x", num_nodes=5, src=ids(), dst=ids(), labels=labels, train_nodes=ids(0, 2, 4))
    assert data.num_classes == 3
    assert data.labels.tolist() == [0, -1, 2, -1, 1]


@pytest.mark.parametrize("which", ["train", "val", "test"])
def test_datasets_04_unlabelled_nodes_in_a_split_are_counted_with_an_example(which):
    labels = class_ids(torch.tensor([0, float("nan"), 2, float("nan"), 1]))
    with pytest.raises(ValueError, match=f"2 of 3 {which} nodes have no label, for example node 1"):
        GraphData(name="x", num_nodes=5, src=ids(), dst=ids(), labels=labels, **{f"{which}_nodes": ids(0, 1, 3)})


def test_train_nodes_of_a_graph_without_labels_are_refused():
    with pytest.raises(ValueError, match="1 train nodes, but no labels; give labels"):
        small(labels=None)


def test_empty_graph_is_refused():
    with pytest.raises(ValueError, match="empty graph"):
        GraphData(name="none", num_nodes=0, src=ids(), dst=ids())


def test_graph_without_edges_is_fine():
    assert GraphData(name="dots", num_nodes=5, src=ids(), dst=ids()).num_edges == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"src": ids(0, 1)}, "src lists 2 edges and dst 3"),
        ({"src": torch.tensor([0.0, 1, 3])}, "src is torch.float32"),
        ({"src": torch.tensor([0, 1, 3], dtype=torch.int32)}, "one integer type"),
        ({"src": [0, 1, 3]}, "src is a list"),
        ({"features": torch.zeros(4, 2, dtype=torch.int64)}, r"x.float\(\)"),
        ({"features": torch.zeros(4)}, "shape"),
        ({"features": torch.tensor([[0, 0], [0, 0], [0, float("nan")], [0, 0]])}, "feature row 2, column 1 is nan"),
        ({"features": torch.tensor([[0, 0], [float("-inf"), 0], [0, 0], [0, 0]])}, "feature row 1, column 0 is -inf"),
        ({"labels": ids(0, 1, -2, 0)}, "label of node 2 is -2"),
        ({"labels": ids(0, 1, 5, 0), "num_classes": 3}, "label of node 2 is 5; allowed are 0 to 2"),
        ({"labels": torch.zeros(4)}, "class_ids"),
        ({"labels": torch.tensor([[0, 1], [1, 1], [0, 2], [0, 0]], dtype=torch.uint8)}, "label row 2 holds 2"),
        ({"train_nodes": ids(0, 4)}, "train node 1 is 4, out of range for 4 nodes"),
        ({"train_nodes": ids(0, 0)}, "node 0 is listed twice among the train"),
        ({"train_nodes": ids(0, 1)}, "node 1 is among both the train and the val nodes"),
        ({"train_nodes": torch.tensor([True, False, False, False])}, r"mask.nonzero\(\)"),
        ({"splits": ((ids(0), ids(1), ids(1)),)}, "split 0: node 1 is among both the val and the test"),
        ({"node_data": {"age": torch.arange(3)}}, "node data 'age'.*has to be 4"),
        ({"edge_data": {"weight": torch.zeros(4)}}, "edge data 'weight'.*has to be 3"),
        ({"edge_data": {"weight": torch.tensor(1.0)}}, "edge data 'weight'"),
        ({"metric": "f1"}, "allowed are accuracy, micro_f1 and roc_auc"),
        ({"metric": "roc_auc", "num_classes": 3}, "there are 3 classes"),
    ],
)
def test_refused_with_what_is_wrong(changes, message):
    with pytest.raises(ValueError, match=f"graph 'small'.*{message}"):
        small(**changes)


def test_sparse_features_are_checked_too():
    def features(indptr, indices, values):
        return csr_matrix(ids(*indptr), ids(*indices), torch.tensor(values), (4, 2))

    assert small(features=features([0, 1, 1, 2, 2], [1, 0], [1.0, 2.0])).features.layout == torch.sparse_csr
    with pytest.raises(ValueError, match="entry 1, in row 2, is 2, out of range for 2 columns"):
        small(features=features([0, 1, 1, 2, 2], [1, 2], [1.0, 2.0]))
    with pytest.raises(ValueError, match="feature row 2, column 0 is nan"):
        small(features=features([0, 1, 1, 2, 2], [1, 0], [1.0, float("nan")]))
    with pytest.raises(ValueError, match="row 1 would have -1 entries"):
        small(features=features([0, 2, 1, 2, 2], [1, 0], [1.0, 2.0]))


def test_multilabel_graph_counts_columns_and_reports_micro_f1():
    data = small(labels=torch.zeros(4, 3, dtype=torch.uint8))
    assert data.is_multilabel
    assert (data.num_classes, data.metric) == (3, "micro_f1")
    assert small(labels=data.labels, metric="roc_auc").metric == "roc_auc"
    with pytest.raises(ValueError, match="one class per node"):
        small(labels=data.labels, metric="accuracy")


def test_with_split_picks_and_returns():
    data = small()
    other = data.with_split(1)
    assert other.train_nodes.tolist() == [2]
    assert other.with_split(0).train_nodes.tolist() == [0]
    with pytest.raises(ValueError, match="no split 2; it has 2, numbered from 0 to 1"):
        data.with_split(2)


def test_graph_with_one_split_has_only_split_0():
    data = small(splits=())
    assert data.with_split(0) is data
    with pytest.raises(ValueError, match="no split 1"):
        data.with_split(1)


DIFFERENT = {
    "name": "other",
    "num_nodes": 5,
    "src": ids(0, 1, 2),
    "dst": ids(1, 2, 2),
    "features": torch.arange(8.0).reshape(4, 2) + 1,
    "labels": ids(1, 1, 1, -1),
    "num_classes": 7,
    "train_nodes": ids(),
    "val_nodes": ids(),
    "test_nodes": ids(),
    "splits": (),
    "node_data": {"Age": torch.arange(4)},
    "edge_data": {"weight": torch.tensor([0.5, 1.0, 2.5])},
    "original_ids": np.array(["a", "b", "c", "d"]),
    "metric": "micro_f1",
}


def test_content_hash_is_equal_for_equal_graphs():
    assert small().content_hash() == small().content_hash()
    one, two = torch.zeros(4), torch.ones(4)
    forward = small(node_data={"one": one, "two": two})
    assert forward.content_hash() == small(node_data={"two": two, "one": one}).content_hash()


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(GraphData)])
def test_content_hash_sees_every_field(field):
    changes = {field: DIFFERENT[field]}
    if field == "num_nodes":  # everything per node has to follow; features and labels alone are another test
        per_node = {"features": None, "labels": None, "node_data": {}, "splits": ()}
        per_node |= {"train_nodes": ids(), "val_nodes": ids(), "test_nodes": ids()}
        assert small(**per_node).content_hash() != small(**per_node, num_nodes=5).content_hash()
        return
    assert small(**changes).content_hash() != small().content_hash()


def test_content_hash_sees_dtype_shape_and_layout():
    x = torch.zeros(4, 2)
    sparse = csr_matrix(ids(0, 0, 0, 0, 0), ids(), torch.zeros(0), (4, 2))
    variants = [x, x.double(), torch.zeros(4, 3), sparse, None]
    assert len({small(features=variant).content_hash() for variant in variants}) == len(variants)


def test_content_hash_is_the_same_in_another_process():
    program = (
        "import torch; from nugnn.datasets import GraphData; t = torch.tensor;"
        "print(GraphData(name='p', num_nodes=3, src=t([0]), dst=t([2]), features=torch.eye(3), labels=t([0, 1, -1]),"
        "node_data={'a': t([1, 2, 3]), 'b': torch.zeros(3)}, train_nodes=t([0])).content_hash())"
    )
    another = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    seen = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONHASHSEED": another, "OMP_NUM_THREADS": "1", "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    here = GraphData(
        name="p",
        num_nodes=3,
        src=ids(0),
        dst=ids(2),
        features=torch.eye(3),
        labels=ids(0, 1, -1),
        node_data={"a": ids(1, 2, 3), "b": torch.zeros(3)},
        train_nodes=ids(0),
    )
    assert seen == here.content_hash() + "\n"


def test_one_wild_label_does_not_make_millions_of_classes() -> None:
    labels = torch.tensor([0, 1, 5_000_000])
    with pytest.raises(ValueError, match="label of node 2 is 5000000, which makes 5000001 classes for 3 nodes"):
        GraphData(name="g", num_nodes=3, src=torch.tensor([0]), dst=torch.tensor([1]), labels=labels)
