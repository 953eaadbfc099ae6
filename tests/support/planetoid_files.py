"""Graphs written as Planetoid's raw files, as Python 2 and as later versions pickled them."""

from __future__ import annotations

import collections
import io
import pickle

import numpy as np
import scipy.sparse as sp
import torch

from nugnn.datasets import GraphData
from nugnn.datasets.simple_graph import simple_undirected
from nugnn.datasets.sparse import csr_matrix


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
