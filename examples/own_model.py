"""An ordinary DGL model, trained over two unequal worker processes by one call.

    python examples/own_model.py
    nugnn check examples/own_model.py:Net      # is its result independent of how the graph is split?
    nugnn train --dataset digits --model examples/own_model.py:Net --hidden 32 --workers 2 --shares 0.7,0.3

There is no `if __name__ == "__main__"` around the model: workers get the class by value and do not run the script.
"""

import sys

import nugnn  # first: it lets DGL import beside a newer torch

import dgl.function as fn
import torch
from dgl.nn import GraphConv
from torch import nn

from nugnn.datasets import load


class Net(nn.Module):
    """A graph convolution, then neighbours weighted by a learned score of both ends, in DGL's own words."""

    def __init__(self, in_features: int, num_classes: int, hidden: int = 64) -> None:
        super().__init__()
        self.conv = GraphConv(in_features, hidden, allow_zero_in_degree=True)
        self.norm = nn.BatchNorm1d(hidden)
        self.dropout = nn.Dropout(0.5)
        self.score = nn.Linear(2 * hidden, 1)
        self.out = nn.Linear(2 * hidden, num_classes)

    def weigh(self, edges):
        """Message function: runs on edges, with both ends at hand."""
        return {"w": self.score(torch.cat([edges.src["h"], edges.dst["h"]], dim=1)).sigmoid()}

    def forward(self, graph, x):
        h = self.dropout(self.norm(self.conv(graph, x)).relu())
        with graph.local_scope():
            graph.ndata["h"] = h
            graph.apply_edges(self.weigh)
            graph.update_all(fn.u_mul_e("h", "w", "m"), fn.mean("m", "a"))
            return self.out(torch.cat([h, graph.ndata["a"]], dim=1))


if __name__ == "__main__":
    epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    data = load("digits")  # or a homogeneous DGLGraph with ndata feat, label, train_mask, val_mask, test_mask
    torch.manual_seed(0)
    model = Net(data.num_features, data.num_classes)
    for workers, shares in ((1, None), (2, [0.7, 0.3])):
        result = nugnn.fit(model, data, workers=workers, shares=shares, epochs=epochs)
        nodes = ", ".join(str(report["nodes"]) for report in result.rank_reports)
        print(f"{workers} worker(s), {nodes} nodes: loss {result.history[-1].loss:.6f}, test {result.best.test:.2%}")
