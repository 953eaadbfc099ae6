"""Nodes that move between ranks while these train change nothing that is computed."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from dgl import function as fn
from torch import Tensor, nn

import nugnn
from exactness import NUM_CLASSES, NUM_FEATURES, make_graph
from nugnn.checkpoint import open_checkpoint, write_checkpoint
from nugnn.comm import halo_stale
from nugnn.comm.groups import Ranks
from nugnn.datasets.graph_data import GraphData
from nugnn.embedding import NodeEmbedding
from nugnn.graph_family import GraphFamily
from nugnn.held_rows import HeldRows
from nugnn.history import History
from nugnn.models import GNN, WithNodeEmbedding
from nugnn.node_move import move_nodes
from nugnn.partition.assign import partition_nodes
from nugnn.partition.shard import Shard, build_shard
from nugnn.shard_graph import ShardGraph
from nugnn.trainer import Trainer
from nugnn.trainer_state import capture, restore
from trainers import graph_trainer

# as in test_exactness: sums over at most 61 terms in another order, 61 eps = 1e-14 relative, and what norms amplify
FLOAT64_BOUND = 1e-10
_EPOCHS = 8


@dataclass
class Outcome:
    losses: Tensor
    scores: Tensor
    logits: Tensor
    best: dict[str, Tensor]
    moved: list[int]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=1e-3, eps=1e-5)


def parts_of(data: GraphData, num_parts: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randint(0, num_parts, (data.num_nodes,), generator=generator)
    parts[torch.randperm(data.num_nodes, generator=generator)[:num_parts]] = torch.arange(num_parts)
    return parts


def shard_of_parts(ranks: Ranks, data: GraphData, parts: Tensor, order: Any = "none") -> Shard:
    whole = [1.0] * ranks.world_size
    given = partition_nodes(data.num_nodes, data.src, data.dst, whole, method="given", parts=parts)
    return build_shard(data, given, ranks.rank, order=order)


def trainer_on(ranks: Ranks, data: GraphData, model: nn.Module, parts: Tensor, **options: Any) -> Trainer:
    shard = shard_of_parts(ranks, data, parts, options.pop("order", "none"))
    rows = {"train": shard.train_rows, "val": shard.val_rows, "test": shard.test_rows}
    return graph_trainer(model, ShardGraph(shard, ranks), rows, seed=7, **{"make_optimizer": adam} | options)


def train(ranks: Ranks, data: GraphData, model: nn.Module, splits: dict[int, Tensor], **options: Any) -> Outcome:
    """Train on ``splits[0]``, and from each epoch that is listed on that other split."""
    own = copy.deepcopy(model)
    trainer = trainer_on(ranks, data, own, splits[0], **options)
    return _trained(ranks, trainer, own, splits)


def _trained(
    ranks: Ranks,
    trainer: Trainer,
    own: nn.Module,
    splits: dict[int, Tensor],
    history: History | None = None,
    epochs: int = _EPOCHS,
) -> Outcome:
    family, moved = trainer.family, list[int]()
    assert isinstance(family, GraphFamily)

    def between_epochs(history: History) -> bool:
        if (parts := splits.get(len(history.epochs))) is not None:
            held = HeldRows(own, trainer.optimizer, family.graph, trusts_user=False)
            assert held.why_not is None, held.why_not
            move = family.move(parts[family.graph.global_node_ids], held)
            assert torch.equal(family.graph.global_node_ids.sort().values, (parts == ranks.rank).nonzero().flatten())
            for name in history.best_state:
                if name.endswith("weight") and isinstance(own.get_submodule(name.rpartition(".")[0]), NodeEmbedding):
                    history.best_state[name] = move.rows(history.best_state[name])
            moved.append(move.num_moved)
            history.moves.append({"after_epoch": len(history.epochs)})
            history.num_on_another_split = len(history.epochs)
        return False

    history = trainer.fit(epochs, between_epochs=between_epochs, history=history)
    if epochs == _EPOCHS:
        own.load_state_dict(history.best_state)
    return Outcome(
        torch.tensor([e.loss for e in history.epochs], dtype=torch.float64),
        torch.tensor([[e.train, e.val, e.test] for e in history.epochs], dtype=torch.float64),
        trainer.predict_all(),
        family.whole_state(),
        moved,
    )


MODELS: dict[str, dict[str, Any]] = {
    "gcn": dict(kind="gcn", norm="batch", dropout=0.4, input_dropout=0.3),
    "sage": dict(kind="sage", norm="batch", dropout=0.4, residual=True),
    "gat": dict(kind="gat", heads=2, norm="batch", dropout=0.4, attention_dropout=0.3),
}


def build(name: str, num_nodes: int = 61, *, embeds: bool = False) -> nn.Module:
    torch.manual_seed(0)
    options = dict(MODELS[name])
    model: nn.Module = GNN(options.pop("kind"), NUM_FEATURES, NUM_CLASSES, hidden=5, layers=3, **options)
    model = WithNodeEmbedding(num_nodes, NUM_FEATURES, model) if embeds else model
    return model.double()


@pytest.mark.parametrize(
    ("name", "num_parts", "options"),
    [
        ("gcn", 3, {"embeds": True}),
        ("sage", 2, {"embeds": True}),
        ("gat", 3, {"overlap": "on", "activations": "recompute"}),
    ],
    ids=str,
)
def test_losses_are_those_of_the_undisturbed_run(
    ranks: Any, name: str, num_parts: int, options: dict[str, Any]
) -> None:
    options = dict(options)
    embeds = options.pop("embeds", False)
    data = make_graph(features=not embeds)
    model = build(name, embeds=embeds)
    splits = {epoch: parts_of(data, num_parts, epoch) for epoch in (0, 3, 6)}
    alone = ranks.run(num_parts, train, data, model, {0: splits[0]}, **options)[0]
    runs = ranks.run(num_parts, train, data, model, splits, **options)
    assert min(runs[0].moved) > 10 and not alone.moved
    for run in runs:
        assert float((run.losses / alone.losses - 1).abs().max()) <= FLOAT64_BOUND
        assert torch.equal(run.scores, alone.scores)
        assert float((run.logits - alone.logits).abs().max() / alone.logits.abs().max()) <= FLOAT64_BOUND
        for key, value in alone.best.items():
            assert float((run.best[key] - value).abs().max()) <= FLOAT64_BOUND * max(1.0, float(value.abs().max())), key


def train_and_resume(
    ranks: Ranks, data: GraphData, model: nn.Module, splits: dict[int, Tensor], folder: Path, **options: Any
) -> Outcome:
    """The same with a checkpoint in place of a move, from which a new trainer on the other split goes on."""
    (first, second), stop = splits.values(), max(splits)
    trainer = trainer_on(ranks, data, copy.deepcopy(model), first, **options)
    shared, own = capture(trainer, trainer.fit(stop))
    path = write_checkpoint(folder, ranks, epoch=stop, shared=shared, own=own, identity={})
    other = copy.deepcopy(model)
    trainer = trainer_on(ranks, data, other, second, **options)
    return _trained(ranks, trainer, other, {}, restore(trainer, open_checkpoint(path)))


@pytest.mark.parametrize(
    "options",
    [
        {"halo_wire": "int8"},
        {"halo_wire": "int4", "halo_feedback": True},
        {"halo_mode": "stale", "class_weights": torch.arange(1.0, NUM_CLASSES + 1)},
        {"halo_mode": "sampled:0.5"},
    ],
    ids=str,
)
def test_a_move_is_a_checkpoint_resumed_on_the_other_split(ranks: Any, options: dict[str, Any], tmp_path: Path) -> None:
    data, model = make_graph(features=False), build("sage", embeds=True)
    splits = {0: parts_of(data, 3, 0), 4: parts_of(data, 3, 4)}
    moved = ranks.run(3, train, data, model, splits, **options)
    resumed = ranks.run(3, train_and_resume, data, model, splits, tmp_path, **options)
    for here, there in zip(moved, resumed, strict=True):
        assert here.moved == [here.moved[0]] and here.moved[0] > 10
        assert torch.equal(here.losses, there.losses) and torch.equal(here.scores, there.scores)
        assert torch.equal(here.logits, there.logits)
        assert all(torch.equal(value, there.best[name]) for name, value in here.best.items())


def train_stop_and_go_on(
    ranks: Ranks, data: GraphData, model: nn.Module, splits: dict[int, Tensor], stop: int, folder: Path, **options: Any
) -> tuple[Outcome, int]:
    """A run with moves that ends after ``stop`` epochs; a new trainer on the first split goes on from there."""
    own = copy.deepcopy(model)
    trainer = trainer_on(ranks, data, own, splits[0], **options)
    history = History()
    _trained(ranks, trainer, own, {epoch: parts for epoch, parts in splits.items() if 0 < epoch <= stop}, history, stop)
    shared, mine = capture(trainer, history)
    path = write_checkpoint(folder, ranks, epoch=stop, shared=shared, own=mine, identity={})
    other = copy.deepcopy(model)
    trainer = trainer_on(ranks, data, other, splits[0], **options)
    history = restore(trainer, open_checkpoint(path))
    later = {epoch: parts for epoch, parts in splits.items() if epoch > stop}
    num_before = history.num_on_another_split
    return _trained(ranks, trainer, other, later, history), num_before


@pytest.mark.parametrize("order", ["none", "clusters"])
def test_a_resumed_run_is_where_its_nodes_were(ranks: Any, order: str, tmp_path: Path) -> None:
    data, model = make_graph(features=False), build("sage", embeds=True)
    splits = {0: parts_of(data, 3, 0), 3: parts_of(data, 3, 3), 6: parts_of(data, 3, 6)}
    options = {"halo_mode": "stale", "order": order}
    whole = ranks.run(3, train, data, model, splits, **options)
    resumed = ranks.run(3, train_stop_and_go_on, data, model, splits, 5, tmp_path, **options)
    for there, (here, num_before) in zip(whole, resumed, strict=True):
        assert num_before == 3 and here.moved == there.moved[1:]
        assert torch.equal(here.losses, there.losses) and torch.equal(here.logits, there.logits)
        assert all(torch.equal(value, there.best[name]) for name, value in here.best.items())


class Wide(nn.Module):
    """Sends rows that take a while."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(NUM_FEATURES, 32000), nn.Linear(32000, NUM_CLASSES)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        with graph.local_scope():
            graph.ndata["h"] = self.widen(x)
            graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "h"))
            return self.narrow(graph.ndata["h"])  # type: ignore[no-any-return]


def _moves_while_rows_travel(ranks: Ranks, data: GraphData) -> list[float]:
    torch.manual_seed(0)
    model = Wide()
    trainer = trainer_on(ranks, data, model, parts_of(data, 2, 9), halo_mode="stale")
    family, losses = trainer.family, list[float]()
    assert isinstance(family, GraphFamily)
    for number in range(2):
        held = HeldRows(model, trainer.optimizer, family.graph, trusts_user=False)
        losses += [trainer.train_epoch() for _ in range(2)]
        family.move(parts_of(data, 2, number)[family.graph.global_node_ids], held)
    return losses


def test_rows_that_are_on_their_way_arrive_before_nodes_move(ranks: Any) -> None:
    one, other = ranks.run(2, _moves_while_rows_travel, make_graph(num_nodes=600, dtype=torch.float32), timeout=60)
    assert one == other


def _moves_in_a_loop_of_ones_own(ranks: Ranks, data: GraphData) -> tuple[int, int]:
    """Exchanges that the model's interceptor has under way before a move and after it."""
    model = GNN("gcn", NUM_FEATURES, NUM_CLASSES, hidden=4)
    graph = ShardGraph(shard_of_parts(ranks, data, parts_of(data, 2, 9)), ranks)
    interceptor, plan, counts = nugnn.intercept(model, graph, halo_mode="stale"), graph.index.plan, list[int]()
    with interceptor.step(0):
        model(graph, graph.ndata["feat"]).sum().backward()
    senders = list(halo_stale._sent_under[plan])
    counts.append(sum(len(stale._sent) for stale in senders))
    move_nodes(graph, parts_of(data, 2, 0)[graph.global_node_ids])
    return counts[0], sum(len(stale._sent) for stale in senders)


def test_nothing_is_on_its_way_after_a_move_in_a_loop_of_ones_own(ranks: Any) -> None:
    for before, after in ranks.run(2, _moves_in_a_loop_of_ones_own, make_graph(dtype=torch.float32)):
        assert before > 0 and after == 0
