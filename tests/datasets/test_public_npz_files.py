"""Public graphs as .npz files, where a folder of them is at hand: counts as published, and rough accuracy floors.

The folder is the environment's ``NUGNN_DATA``, or ``../shared/data`` beside the repository. Arcs count each undirected
edge twice. The floors are those of logistic regression on row-normalised features, alone and after two steps of
symmetric-normalised smoothing: far off when nodes, features, labels or splits are read out of step.
"""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from nugnn.datasets import load, normalize_features, self_loops, write_npz

FOLDER = Path(os.environ.get("NUGNN_DATA") or Path(__file__).resolve().parents[2].parent / "shared" / "data")

# name: nodes, arcs, features, classes, train / val / test, metric
GRAPHS = {
    "fb100_cornell5": (18_660, 1_581_554, 347, 6, (9224, 3075, 3075), "accuracy"),
    "tolokers": (11_758, 1_038_000, 10, 2, (5879, 2939, 2940), "roc_auc"),
    "coauthor_physics": (34_493, 495_924, 8415, 5, (100, 150, 34_243), "accuracy"),
    "amazon_computers": (13_752, 491_722, 767, 10, (200, 300, 13_252), "accuracy"),
    "flickr_attr": (7_575, 479_476, 12_047, 9, (180, 270, 7125), "accuracy"),
    "squirrel": (5_201, 396_706, 2089, 5, (2496, 1664, 1041), "accuracy"),
    "wordnet": (117_659, 367_578, 1024, 45, (70_595, 23_532, 23_532), "accuracy"),
    "blogcatalog_attr": (5_196, 343_486, 8189, 6, (120, 180, 4896), "accuracy"),
    "facebook_pages": (22_470, 341_646, 4714, 4, (13_482, 4494, 4494), "accuracy"),
    "amazon_photo": (7_650, 238_162, 745, 8, (160, 240, 7250), "accuracy"),
    "dblp": (17_716, 105_734, 1639, 4, (80, 120, 17_516), "accuracy"),
    "minesweeper": (10_000, 78_804, 7, 2, (5000, 2500, 2500), "roc_auc"),
    "actor": (7_600, 53_318, 932, 5, (3648, 2432, 1520), "accuracy"),
    "cora": (2_708, 10_556, 1433, 7, (140, 500, 1000), "accuracy"),
    "citeseer": (3_327, 9_104, 3703, 6, (120, 500, 1000), "accuracy"),
    "ego_twitter": (81_306, 2_684_592, 0, 0, (0, 0, 0), "accuracy"),
    "road_world_highways": (560_282, 1_644_468, 0, 0, (0, 0, 0), "accuracy"),
    "mesh_mdual": (258_569, 1_026_264, 0, 0, (0, 0, 0), "accuracy"),
    "soc_slashdot0902": (82_168, 870_161, 0, 0, (0, 0, 0), "accuracy"),
    "mesh_copter2": (55_476, 704_476, 0, 0, (0, 0, 0), "accuracy"),
    "blogcatalog_multilabel": (10_312, 667_966, 0, 39, (6187, 2062, 2063), "micro_f1"),
    "road_world_railways": (274_974, 657_500, 0, 0, (0, 0, 0), "accuracy"),
    "github_topology": (37_700, 578_006, 0, 2, (22_620, 7540, 7540), "accuracy"),
    "pubmed_topology": (19_717, 88_648, 0, 3, (60, 500, 1000), "accuracy"),
    "email_eu_core": (1_005, 24_929, 0, 42, (603, 201, 201), "accuracy"),
}
DIRECTED = {"soc_slashdot0902", "email_eu_core"}
TEN_SPLITS = {"tolokers", "squirrel", "minesweeper", "actor"}
WEIGHTED = {"road_world_highways", "road_world_railways"}


def load_or_skip(name):
    if not (FOLDER / name / f"{name}.npz").is_file():
        pytest.skip(f"{name}/{name}.npz is not under {FOLDER}; name a folder of public graphs with NUGNN_DATA")
    return load(name, FOLDER)


@pytest.mark.parametrize("name", GRAPHS)
def test_counts_are_the_published_ones(name):
    data = load_or_skip(name)
    counts = (data.num_nodes, data.num_edges, data.num_features, data.num_classes)
    assert (*counts, tuple(len(nodes) for nodes in data.split), data.metric) == GRAPHS[name]
    keys = data.src * data.num_nodes + data.dst
    assert (keys.diff() > 0).all()
    is_symmetric = torch.equal((data.dst * data.num_nodes + data.src).sort().values, keys)
    assert is_symmetric == (name not in DIRECTED)
    assert (data.src != data.dst).all()
    assert data.num_splits == (10 if name in TEN_SPLITS else 1)
    assert ("weight" in data.edge_data) == (name in WEIGHTED)


@pytest.mark.parametrize("name", ["cora", "minesweeper", "blogcatalog_multilabel", "email_eu_core"])
def test_writing_and_reading_changes_nothing(name, tmp_path):
    data = load_or_skip(name)
    write_npz(data, tmp_path / f"{name}.npz")
    assert load(tmp_path / f"{name}.npz").content_hash() == data.content_hash()


def test_citeseer_keeps_its_fifteen_unlabelled_nodes_out_of_the_split():
    data = load_or_skip("citeseer")
    unlabelled = (data.labels < 0).nonzero().squeeze(1)
    assert len(unlabelled) == 15
    assert not torch.isin(unlabelled, torch.cat(data.split)).any()
    assert (data.features.to_dense()[unlabelled] == 0).all()
    assert (torch.bincount(data.dst, minlength=data.num_nodes)[unlabelled] >= 1).all(), "they do have neighbours"


@pytest.mark.parametrize(
    ("name", "alone", "smoothed"), [("cora", 0.608, 0.797), ("citeseer", 0.599, 0.684), ("minesweeper", 0.521, 0.711)]
)
def test_logistic_regression_finds_the_floor_figures(name, alone, smoothed):
    import scipy.sparse as sp
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score

    data = normalize_features(load_or_skip(name), "row")
    x = data.features
    if x.layout == torch.sparse_csr:
        parts = (x.values().numpy(), x.col_indices().numpy(), x.crow_indices().numpy())
        x_NF = sp.csr_matrix(parts, x.shape)
    else:
        x_NF = sp.csr_matrix(x.numpy())
    looped = self_loops(data, "add")
    ones = np.ones(looped.num_edges)
    adjacency = sp.csr_matrix((ones, (looped.dst.numpy(), looped.src.numpy())), (data.num_nodes,) * 2)
    scale = sp.diags(np.asarray(adjacency.sum(axis=1)).ravel() ** -0.5)
    smooth = scale @ adjacency @ scale
    train, _, test = (nodes.numpy() for nodes in data.split)
    y = data.labels.numpy()
    for features, floor in ((x_NF, alone), (smooth @ (smooth @ x_NF), smoothed)):
        model = LogisticRegression(C=100, max_iter=2000).fit(features[train], y[train])
        if data.metric == "roc_auc":
            found = roc_auc_score(y[test], model.predict_proba(features[test])[:, 1])
        else:
            found = float((model.predict(features[test]) == y[test]).mean())
        # three standard errors of a proportion over the test nodes; the floors are untuned, which adds less than that
        slack = 3 * (floor * (1 - floor) / len(test)) ** 0.5
        assert abs(found - floor) <= slack
