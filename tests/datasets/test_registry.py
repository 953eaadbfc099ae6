"""load: the order of places, tolerant spelling, and refusals that say where it looked."""

import numpy as np
import pytest
import torch

from nugnn.datasets import GraphData, load, write_npz


def save(path, num_nodes):
    """A graph told apart by its number of nodes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    labels = torch.arange(num_nodes) % 2
    src = torch.tensor([0])
    write_npz(GraphData(name="any", num_nodes=num_nodes, src=src, dst=src, labels=labels), path)
    return path


def test_path_of_a_file_or_of_its_folder_is_read(tmp_path):
    file = save(tmp_path / "mine" / "mine.npz", 3)
    for path in (file, str(file), file.parent):
        assert load(path).num_nodes == 3
    assert load(file).name == "mine"


def test_path_comes_before_a_name_under_the_data_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "cora.npz", 3)
    save(tmp_path / "data" / "cora.npz", 4)
    assert load("cora.npz", "data").num_nodes == 3
    assert load("cora", "data").num_nodes == 4


@pytest.mark.parametrize("stored", ["fb100_cornell5.npz", "fb100-cornell5/fb100-cornell5.npz", "FB100_Cornell5.npz"])
@pytest.mark.parametrize("asked", ["fb100_cornell5", "fb100-cornell5", "Fb100-CORNELL5"])
def test_names_match_whatever_their_case_and_dashes(tmp_path, stored, asked):
    save(tmp_path / stored, 3)
    assert load(asked, tmp_path).num_nodes == 3


def test_file_comes_before_folder_and_data_folder_before_built_in(tmp_path):
    save(tmp_path / "x" / "x.npz", 3)
    save(tmp_path / "digits" / "digits.npz", 5)
    assert load("x", tmp_path).num_nodes == 3
    assert load("digits", tmp_path).num_nodes == 5
    save(tmp_path / "x.npz", 4)
    assert load("x", tmp_path).num_nodes == 4


def test_array_file_called_like_a_built_in_graph_does_not_hide_it(tmp_path):
    np.savez(tmp_path / "digits.npz", x=np.zeros(3), y=np.zeros(3))
    assert load("digits", tmp_path).num_nodes == 1797
    np.savez(tmp_path / "mnist.npz", x=np.zeros(3), y=np.zeros(3))
    with pytest.raises(ValueError, match=r"mnist\.npz is not a graph.*it holds x, y"):
        load("mnist", tmp_path)


def test_broken_file_called_like_a_built_in_graph_is_an_error(tmp_path):
    (tmp_path / "digits.npz").write_bytes(b"<html>")
    with pytest.raises(ValueError, match=r"digits\.npz is not a complete"):
        load("digits", tmp_path)


def test_folder_called_like_a_dataset_is_no_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()
    assert load("digits").num_nodes == 1797
    with pytest.raises(ValueError, match=r"is a folder without digits\.npz"):
        load("./digits")


@pytest.mark.parametrize("name", ["products-like", "mixed_like", "Products_Like"])
def test_synthetic_arguments_reach_the_generator(name):
    data = load(f"{name}:200:600:3")
    assert (data.num_nodes, data.num_edges) == (200, 600)
    assert data.name == name.lower().replace("_", "-")
    assert load(f"{name}:200:600:4").content_hash() != data.content_hash()
    assert load(f"{name}:200").num_nodes == 200


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("products-like:many", r"whole numbers; write products-like\[:NODES"),
        ("products-like:200:600:1:9", "too many parts"),
        ("mixed-like:", "whole numbers"),
        ("digits:3", "unknown dataset 'digits:3'"),
    ],
)
def test_malformed_arguments_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        load(text)


@pytest.mark.parametrize(("typed", "meant"), [("digit", "digits"), ("product-like", "products-like"), ("coar", "cora")])
def test_near_miss_names_the_closest(typed, meant):
    with pytest.raises(ValueError, match=f"unknown dataset '{typed}': did you mean .*{meant}"):
        load(typed)


def test_near_miss_knows_the_data_folder(tmp_path):
    save(tmp_path / "company_graph.npz", 3)
    with pytest.raises(ValueError, match=r"did you mean company-graph.*Available: digits, .*company-graph"):
        load("compani-graph", tmp_path)


@pytest.mark.parametrize("name", ["cora", "ogbn-products", "OGBN_Products"])
def test_public_name_that_is_absent_says_where_it_looked_and_what_to_do(tmp_path, name):
    file = name.lower().replace("-", "_")
    with pytest.raises(ValueError, match="Downloading is not built yet") as caught:
        load(name, tmp_path)
    assert str(tmp_path / f"{file}.npz") in str(caught.value)
    assert str(tmp_path / file / f"{file}.npz") in str(caught.value)
    with pytest.raises(ValueError, match="no data folder was given"):
        load(name)


def test_folder_in_another_layout_is_pointed_out(tmp_path):
    (tmp_path / "ogbn_arxiv" / "raw").mkdir(parents=True)
    with pytest.raises(ValueError, match="ogbn_arxiv is there, but other layouts"):
        load("ogbn-arxiv", tmp_path)


def test_missing_data_folder_is_named_and_not_created(tmp_path):
    missing = tmp_path / "none"
    with pytest.raises(ValueError, match="none does not exist"):
        load("cora", missing)
    assert load("digits", missing).num_nodes == 1797
    assert list(tmp_path.iterdir()) == []


def test_missing_path_is_named():
    with pytest.raises(ValueError, match=r"nowhere/graph\.npz: no such file"):
        load("nowhere/graph.npz")


def test_published_metric_is_set_by_name_unless_the_file_has_one(tmp_path):
    arrays = {"num_nodes": np.int64(2), "adj_indptr": np.array([0, 1, 2]), "adj_indices": np.array([1, 0])}
    arrays["label"] = np.array([0, 1])
    np.savez(tmp_path / "tolokers.npz", **arrays)
    assert load("tolokers", tmp_path).metric == "roc_auc"
    np.savez(tmp_path / "other.npz", **arrays)
    assert load("other", tmp_path).metric == "accuracy"
    np.savez(tmp_path / "tolokers.npz", **arrays, metric=np.array("accuracy"))
    assert load("tolokers", tmp_path).metric == "accuracy"
