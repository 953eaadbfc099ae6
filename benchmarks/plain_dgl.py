"""An ordinary DGL training script: one process, ``dgl.nn`` layers, torch's dropout and Adam, best validation epoch.

The yardstick of ``accuracy.py``. Of nuGNN it imports the reader of data sets, and with it what lets DGL import beside
a torch it was not built for; message passing, dropout, optimizer and metrics are those of DGL, torch and scikit-learn.

    python benchmarks/plain_dgl.py SETTINGS.json    # options of `nugnn train` and "seeds"; prints an object per seed
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nugnn.datasets import load  # before dgl: it lets DGL import

# isort: split
import dgl
import numpy as np
import torch
from dgl import nn as dgl_nn
from sklearn.metrics import f1_score, roc_auc_score
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

WIDEST_DENSE = 5_000
"""Sparse features with more columns stay sparse (GCN only): dense, Coauthor Physics is 1.2 GB, its dropout again."""
ACTIVATIONS = {"relu": F.relu, "elu": F.elu, "tanh": torch.tanh}


class SparseGraphConv(nn.Module):
    """`GraphConv` of sparse COO features: the product with the weight first, as `GraphConv` has it, then the rest."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.xavier_uniform_(torch.empty(width, out)))
        self.conv = dgl_nn.GraphConv(out, out, weight=False, allow_zero_in_degree=True)

    def forward(self, graph: dgl.DGLGraph, x: Tensor) -> Tensor:
        return self.conv(graph, torch.sparse.mm(x, self.weight))


def dropout(x: Tensor, p: float, is_training: bool) -> Tensor:
    """Of sparse features, dropout of the stored values: zeros stay zeros either way."""
    if not x.is_sparse:
        return F.dropout(x, p, is_training)
    values = F.dropout(x.values(), p, is_training)
    return torch.sparse_coo_tensor(x.indices(), values, x.shape, is_coalesced=True)


class Net(nn.Module):
    """Layers of one kind with dropout, norm and activation between; node embeddings where there are no features."""

    def __init__(
        self, options: dict[str, Any], num_nodes: int, num_features: int, num_classes: int, is_sparse: bool = False
    ) -> None:
        super().__init__()
        self.options = options
        hidden, width = options["hidden"], num_features or options["hidden"]
        heads = options["heads"] if options["model"] == "gat" else 1
        self.layers, self.norms = nn.ModuleList(), nn.ModuleList()
        for number in range(options["layers"]):
            is_last = number == options["layers"] - 1
            out, num_heads = (num_classes, 1) if is_last else (hidden, heads)
            if is_sparse and number == 0:
                layer: nn.Module = SparseGraphConv(width, out)
            elif options["model"] == "gcn":
                layer = dgl_nn.GraphConv(width, out, allow_zero_in_degree=True)
            elif options["model"] == "sage":
                layer = dgl_nn.SAGEConv(width, out, options["aggregator"] or "mean")
            else:
                attention = options["attention_dropout"]
                layer = dgl_nn.GATConv(width, out, num_heads, attn_drop=attention, allow_zero_in_degree=True)
            self.layers.append(layer)
            width = out * num_heads
            if not is_last:
                norm = {"none": nn.Identity, "batch": nn.BatchNorm1d, "layer": nn.LayerNorm}[options["norm"]]
                self.norms.append(norm(width))
        self.embedding = None
        if not num_features:
            self.embedding = nn.Embedding(num_nodes, hidden)
            nn.init.normal_(self.embedding.weight, std=hidden**-0.5)

    def forward(self, graph: dgl.DGLGraph, x: Tensor | None) -> Tensor:
        h = x if self.embedding is None else self.embedding.weight
        h = dropout(h, self.options["input_dropout"], self.training)
        for layer, norm in zip(self.layers[:-1], self.norms, strict=True):
            h = ACTIVATIONS[self.options["activation"]](norm(layer(graph, h).flatten(1)))
            h = F.dropout(h, self.options["dropout"], self.training)
        h = self.layers[-1](graph, h)
        return h.mean(1) if h.dim() == 3 else h


def row_normalised(x: Tensor) -> Tensor:
    if x.is_sparse:
        sums = torch.zeros(len(x)).index_add_(0, x.indices()[0], x.values().abs()).clamp(min=1e-12)
        values = x.values() / sums[x.indices()[0]]
        return torch.sparse_coo_tensor(x.indices(), values, x.shape, is_coalesced=True)
    return x / x.abs().sum(1, keepdim=True).clamp(min=1e-12)


def standardised(x: Tensor, train: Tensor) -> Tensor:
    deviation = x[train].std(0, unbiased=False)
    return (x - x[train].mean(0)) / torch.where(deviation > 0, deviation, 1.0)


def score(metric: str, logits: Tensor, labels: Tensor) -> float:
    if metric == "accuracy":
        return float((logits.argmax(1) == labels).float().mean())
    if metric == "roc_auc":
        return float(roc_auc_score(labels, logits[:, 1] - logits[:, 0]))
    return float(f1_score(labels, logits > 0, average="micro"))


def top_k_micro_f1(logits: Tensor, labels: Tensor) -> float:
    """Micro-F1 when each node gets as many labels as it truly has, the best-scored ones: the protocol of DeepWalk."""
    ranks = logits.argsort(1, descending=True).argsort(1)
    return float(f1_score(labels, ranks < labels.sum(1, keepdim=True), average="micro"))


def optimizer_of(model: Net, options: dict[str, Any]) -> torch.optim.Optimizer:
    if not options["weight_decay_first_layer_only"]:
        return torch.optim.Adam(model.parameters(), lr=options["lr"], weight_decay=options["weight_decay"])
    first, rest = list(model.layers[0].parameters()), list(model.layers[1:].parameters())
    groups = [{"params": first, "weight_decay": options["weight_decay"]}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.Adam(groups, lr=options["lr"])


def train(options: dict[str, Any], seeds: list[int]) -> Iterator[dict[str, Any]]:
    data = load(options["dataset"], options["data_dir"]).with_split(options["split"])
    graph = dgl.graph((data.src, data.dst), num_nodes=data.num_nodes)
    if options["self_loops"] == "add":
        graph = dgl.add_self_loop(dgl.remove_self_loop(graph))
    x = data.features
    is_sparse = x is not None and x.is_sparse_csr and x.shape[1] > WIDEST_DENSE and options["model"] == "gcn"
    if x is not None and x.is_sparse_csr:
        x = x.to_sparse_coo().coalesce() if is_sparse else x.to_dense()
    if x is not None and options["feature_norm"] != "none":
        x = row_normalised(x) if options["feature_norm"] == "row" else standardised(x, data.train_nodes)
    labels, splits = data.labels, {"train": data.train_nodes, "val": data.val_nodes, "test": data.test_nodes}
    is_multilabel = labels.dim() == 2
    loss_function = F.binary_cross_entropy_with_logits if is_multilabel else F.cross_entropy
    targets = labels.float() if is_multilabel else labels
    for seed in seeds:
        begin = time.perf_counter()
        torch.manual_seed(seed)
        model = Net(options, data.num_nodes, 0 if x is None else x.shape[1], data.num_classes, is_sparse)
        optimizer = optimizer_of(model, options)
        best: dict[str, Any] = {"val": -np.inf}
        weights: dict[str, Tensor] = {}
        for epoch in range(1, options["epochs"] + 1):
            model.train()
            loss = loss_function(model(graph, x)[splits["train"]], targets[splits["train"]])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if epoch % options["evaluate_every"] and epoch != options["epochs"]:
                continue
            model.eval()
            with torch.no_grad():
                logits = model(graph, x)
            scores = {split: score(data.metric, logits[rows], labels[rows]) for split, rows in splits.items()}
            if scores["val"] > best["val"]:
                best = {"best_epoch": epoch, "val": scores["val"], "test": scores["test"]}
                weights = copy.deepcopy(model.state_dict())
        if is_multilabel:
            model.load_state_dict(weights)
            model.eval()
            with torch.no_grad():
                best["top_k"] = top_k_micro_f1(model(graph, x)[splits["test"]], labels[splits["test"]])
        yield {"seed": seed, **best, "seconds": time.perf_counter() - begin}


if __name__ == "__main__":
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for run in train(settings["options"], settings["seeds"]):
        print(json.dumps(run), flush=True)
