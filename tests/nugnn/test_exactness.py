"""P unequal parts train the same model as one device: the law of the whole project."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from exactness import NUM_CLASSES, NUM_FEATURES, Run, largest_difference, make_graph, make_parts, run_steps
from nugnn.comm.groups import Ranks
from nugnn.datasets.graph_data import GraphData
from nugnn.models import GNN

# Five steps through at most three layers and a batch norm: each sum over at most 61 terms in another order is off by
# 61 eps relative, amplified by conditioning of norm and softmax; 1e-10 leaves 4 orders of magnitude above 1e-14.
FLOAT64_BOUND = 1e-10

MODELS: dict[str, dict[str, Any]] = {
    "gcn": dict(kind="gcn", norm="batch", dropout=0.4, input_dropout=0.3),
    "gcn-layer-norm-residual": dict(kind="gcn", norm="layer", residual=True, dropout=0.4),
    "sage-mean": dict(kind="sage", norm="batch", dropout=0.4, residual=True),
    "sage-gcn": dict(kind="sage", aggregator="gcn", dropout=0.4),
    "sage-pool": dict(kind="sage", aggregator="pool", norm="batch", dropout=0.4),
    "sage-lstm": dict(kind="sage", aggregator="lstm", dropout=0.4),
    "gat": dict(kind="gat", heads=2, out_heads=3, norm="batch", dropout=0.4, attention_dropout=0.3, residual=True),
    "gatv2": dict(kind="gatv2", heads=2, norm="batch", dropout=0.4, attention_dropout=0.3, activation="elu"),
    "gin": dict(kind="gin", norm="batch", dropout=0.4, input_dropout=0.2),
    "gin-max": dict(kind="gin", aggregator="max", norm="layer", dropout=0.4),
}


def adam(model: nn.Module) -> torch.optim.Optimizer:
    # eps: a bias before a batch norm has a gradient of rounding noise, about 1e-17, which the default 1e-8 would turn
    # into steps of 1e-9
    return torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=1e-3, eps=1e-5)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class WithUserFunctions(nn.Module):
    """Message, reduce and apply functions of the user's own, with edge weights, dropout inside, max and std."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(2 * NUM_FEATURES + 1, 8), nn.Linear(24, NUM_CLASSES)
        self.drop_message, self.drop_mail = nn.Dropout(0.3), nn.Dropout(0.2)
        self.norm = nn.BatchNorm1d(8)

    def message(self, edges: Any) -> dict[str, torch.Tensor]:
        joined = torch.cat([edges.src["h"], edges.dst["h"], edges.data["weight"][:, None]], 1)
        return {"m": self.drop_message(self.norm(self.inner(joined)).relu())}

    def reduce(self, nodes: Any) -> dict[str, torch.Tensor]:
        mail = self.drop_mail(nodes.mailbox["m"])
        return {"a": torch.cat([mail.max(1).values, mail.mean(1), mail.var(1, unbiased=False)], 1)}

    def forward(self, graph: Any, x: torch.Tensor) -> torch.Tensor:
        with graph.local_scope():
            graph.ndata["h"] = x
            graph.update_all(self.message, self.reduce, lambda nodes: {"a": nodes.data["a"].tanh()})
            return self.outer(graph.ndata["a"])


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "user-functions":
        return WithUserFunctions().double()
    options = dict(MODELS[name])
    return GNN(options.pop("kind"), NUM_FEATURES, NUM_CLASSES, hidden=5, layers=3, **options).double()


# parts, how they are made, whether every edge has its reverse, whether every node has a self-loop (without: nodes that
# have no in-edge), optimizer
SPLITS = {
    "2-no-train": (2, "no_train", False, True, adam),
    "3-unequal": (3, "unequal", False, True, sgd),
    "3-metis": (3, "metis", True, True, adam),
    "3-metis-unequal": (3, "metis_unequal", False, False, sgd),
    "5-random": (5, "random", False, False, adam),
    "5-unequal": (5, "unequal", True, True, sgd),
}


# every model on the split that leaves a part without training nodes, on METIS's unequal parts and on most parts; every
# split with a convolution, an attention and functions of a user's own
_OF_ALL_MODELS = {"2-no-train", "3-metis-unequal", "5-random"}
_OF_ALL_SPLITS = {"gcn", "gat", "user-functions"}


@pytest.mark.parametrize(
    ("split", "name"),
    [
        pytest.param(
            *(split, name),
            marks=() if split in _OF_ALL_MODELS or name in _OF_ALL_SPLITS else pytest.mark.slow,
        )
        for split in SPLITS
        for name in (*MODELS, "user-functions")
    ],
)
def test_parts_equal_one_device(ranks: Any, name: str, split: str) -> None:
    num_parts, how, undirected, self_loops, optimizer = SPLITS[split]
    data = make_graph(directed=not undirected, self_loops=self_loops)
    if not self_loops:
        assert (torch.bincount(data.dst, minlength=data.num_nodes) == 0).any()
    model = build(name)
    alone = run_steps(Ranks(), data, make_parts(data, 1, "random"), model, optimizer)
    runs = ranks.run(num_parts, run_steps, data, make_parts(data, num_parts, how), model, optimizer)
    for run in runs:
        worst, where = largest_difference(alone, run)
        assert worst <= FLOAT64_BOUND, where
        assert run.metrics == alone.metrics
    for run in runs[1:]:
        for key, value in runs[0].parameters.items():
            assert torch.equal(value, run.parameters[key]), f"replicas differ in {key}"


def test_a_wrong_run_is_seen() -> None:
    data = make_graph()
    run = run_steps(Ranks(), data, make_parts(data, 1, "random"), build("gcn"), sgd)
    assert largest_difference(run, replace(run, logits=run.logits + 1e-9))[0] > 1e-10
    assert largest_difference(run, replace(run, logits=run.logits * torch.nan))[0] == float("inf")


def plain_dgl_steps(data: GraphData, model: nn.Module, num_steps: int = 5) -> Run:
    """The same training as anyone writes it with DGL and torch: no shard, no interceptor."""
    model = copy.deepcopy(model).train()
    graph = data.to_dgl()
    optimizer = adam(model)
    features, train = graph.ndata["feat"], data.train_nodes
    assert data.labels is not None
    losses, gradients = [], {}
    for step in range(num_steps):
        loss = nn.functional.cross_entropy(model(graph, features)[train], data.labels[train])
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        logits = model(graph, features)
    return Run(logits, losses, gradients, {k: v.clone() for k, v in model.state_dict().items()}, {})


@pytest.mark.parametrize("name", [*MODELS, "user-functions"])
def test_without_dropout_it_is_plain_dgl(ranks: Any, name: str) -> None:
    data = make_graph()
    model = build(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    plain = plain_dgl_steps(data, model)
    worst, where = largest_difference(plain, run_steps(Ranks(), data, make_parts(data, 1, "random"), model, adam))
    assert worst <= FLOAT64_BOUND, where
    for run in ranks.run(3, run_steps, data, make_parts(data, 3, "unequal"), model, adam):
        worst, where = largest_difference(plain, run)
        assert worst <= FLOAT64_BOUND, where


def _penalty(model: nn.Module) -> torch.Tensor:
    return 0.01 * sum(p.square().sum() for p in model.parameters())  # type: ignore[return-value]


def test_class_weights_and_regularizer(ranks: Any) -> None:
    # SGD: with the penalty, biases before a batch norm have gradients of 1e-9 that Adam would blow up to full steps
    data = make_graph()
    options: dict[str, Any] = dict(class_weights=torch.tensor([1.0, 2.0, 0.5, 3.0]), regularizer=_penalty)
    model = build("gcn")
    alone = run_steps(Ranks(), data, make_parts(data, 1, "random"), model, sgd, **options)
    for run in ranks.run(3, run_steps, data, make_parts(data, 3, "no_train"), model, sgd, **options):
        worst, where = largest_difference(alone, run)
        assert worst <= FLOAT64_BOUND, where


def test_float32_stays_within_its_bound(ranks: Any) -> None:
    # SGD, lr 0.1, momentum 0.9, five steps: errors of one step are at most about 61 * eps32 * (condition of a 3-layer
    # net with batch norm, measured below 50) = 4e-4 relative, and add up over five steps.
    bound = 5 * 61 * torch.finfo(torch.float32).eps * 50

    data = make_graph(dtype=torch.float32)
    for name in ("gcn", "sage-mean", "gat", "gatv2", "gin", "user-functions"):
        model = build(name).float()
        alone = run_steps(Ranks(), data, make_parts(data, 1, "random"), model, sgd)
        for run in ranks.run(3, run_steps, data, make_parts(data, 3, "unequal"), model, sgd):
            worst, where = largest_difference(alone, run)
            assert worst <= bound, f"{name}: {where}"
