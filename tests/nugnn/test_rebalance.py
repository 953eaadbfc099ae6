"""A rank that becomes slow in mid-run gives nodes away; what a model holds for them goes along, or nothing moves."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dgl.nn import SGConv
from torch import Tensor, nn

import nugnn
from exactness import NUM_CLASSES, NUM_FEATURES, make_graph
from nugnn.balancer import most_growth
from nugnn.checkpoint import CheckpointError, open_checkpoint, write_checkpoint
from nugnn.comm.gradients import sum_gradients
from nugnn.comm.groups import Ranks
from nugnn.datasets.graph_data import GraphData
from nugnn.fit_options import FitOptions, checked_options
from nugnn.graph_family import GraphFamily
from nugnn.held_rows import HeldRows
from nugnn.history import Epoch, History
from nugnn.kernels.rows import identity_of
from nugnn.models import GNN
from nugnn.node_move import NodeMove, move_nodes
from nugnn.partition.assign import partition_nodes
from nugnn.partition.shard import build_shard
from nugnn.planning.imbalance import RebalanceRules
from nugnn.planning.imbalance_watch import Shortfall
from nugnn.planning.work_model import LinearCost, LinearWork
from nugnn.rebalance import OnMove, PlannedBalance, checked_rules, move_text, return_text, shortfall_text
from nugnn.run import _EpochLog
from nugnn.shard_graph import ShardGraph
from nugnn.trainer_state import capture, restore
from trainers import fit_rank
from work_time import WorkTime, work_time

# in-edges alone are work here
RULES = RebalanceRules(least_gain_seconds=0.0, node_work=0.0)
_SECONDS_PER_EDGE = 1e-5


class Slowed(nn.Module):
    """Takes its time for each in-edge of its rank; rank 1 three times as long from an epoch on.

    Args:
        model: What is computed.
        begins: Epoch after which rank 1 is slow.
        seconds_per_edge: Of work, see `work_time`.
        exchange_seconds_per_node: That exchanges take longer for each node that came to a rank.
    """

    def __init__(
        self,
        model: nn.Module,
        begins: int,
        seconds_per_edge: float = _SECONDS_PER_EDGE,
        exchange_seconds_per_node: float = 0.0,
    ) -> None:
        super().__init__()
        self.model, self.begins, self.seconds_per_edge, self.num_epochs = model, begins, seconds_per_edge, 0
        self.exchange_seconds_per_node, self.num_nodes_at_first = exchange_seconds_per_node, 0

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        if self.training:
            self.num_epochs += 1
            is_slow = graph.ranks.rank == 1 and self.num_epochs > self.begins
            clock = work_time()
            clock.work(graph.ranks, graph.num_edges() * self.seconds_per_edge * (3 if is_slow else 1))
            self.num_nodes_at_first = self.num_nodes_at_first or graph.num_nodes()
            came = max(graph.num_nodes() - self.num_nodes_at_first, 0)
            clock.exchange(graph.ranks, came * self.exchange_seconds_per_node)
        return self.model(graph, x)  # type: ignore[no-any-return]


def make_data(num_nodes: int = 400) -> GraphData:
    return make_graph(num_nodes=num_nodes, directed=False)


def gnn(norm: str = "batch") -> nn.Module:
    torch.manual_seed(0)
    return GNN("sage", NUM_FEATURES, NUM_CLASSES, hidden=5, norm=norm, dropout=0.4).double()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-5)  # eps: as in test_exactness


def _fitted(ranks: Ranks, model: nn.Module, data: GraphData, **options: Any) -> dict[str, Any]:
    said: list[str] = []
    options |= {"seed": 3, "make_optimizer": adam, "on_note": said.append}
    with WorkTime().installed():
        outcome = fit_rank(ranks, model, data, [1.0, 1.0], **options)
    return outcome | {"said": said}


def test_a_rank_slowed_threefold_gives_nodes_away(ranks: Any) -> None:
    data, begins, epochs = make_data(), 6, 32
    slow = ranks.run(2, _fitted, Slowed(gnn(), begins), data, epochs=epochs, rebalance=RULES)
    steady = ranks.run(2, _fitted, Slowed(gnn(), epochs, 0.0), data, epochs=epochs, rebalance="off")
    moves = slow[0]["moves"]
    assert slow[1]["moves"] == moves and not steady[0]["moves"] and 1 <= len(moves) <= 3
    assert begins < moves[0]["after_epoch"] <= begins + 15 and moves[0]["counts"][1][0] == moves[0]["nodes"] > 0
    edges = [outcome["report"]["edges"] for outcome in slow]
    optimum = sum(edges) / (1 + 1 / 3)
    assert max(edges[0], 3 * edges[1]) <= 1.25 * optimum, "seconds by edges, three times as many on rank 1"
    assert sum(edges) == len(data.src) and sum(outcome["report"]["nodes"] for outcome in slow) == data.num_nodes
    losses, wanted = (torch.tensor([e["loss"] for e in each[0]["epochs"]]) for each in (slow, steady))
    # sums of at most 400 terms in another order, 400 eps = 1e-13, and three orders for 32 steps, norms and Adam
    assert float((losses.double() / wanted - 1).abs().max()) <= 1e-10
    assert float((slow[0]["logits"] - steady[0]["logits"]).abs().max()) <= 1e-8
    assert slow[0]["said"] and "from worker 1 to 0" in slow[0]["said"][0]
    assert not any(move["is_return"] for move in moves), "epochs are shorter since"


def test_a_move_that_makes_exchanges_dear_is_taken_back(ranks: Any) -> None:
    data, epochs = make_data(), 50
    model = Slowed(gnn(), 0, exchange_seconds_per_node=5e-3)  # above 200 ms in all, where computing gains some 40
    dear = ranks.run(2, _fitted, model, data, epochs=epochs, rebalance=RULES)
    steady = ranks.run(2, _fitted, Slowed(gnn(), epochs, 0.0), data, epochs=epochs, rebalance="off")
    moves, said = dear[0]["moves"], dear[0]["said"]
    assert dear[1]["moves"] == moves and [move["is_return"] for move in moves] == [False, True]
    away, back = moves
    assert back["counts"] == [list(column) for column in zip(*away["counts"], strict=True)] and away["nodes"] > 0
    assert back["epoch_seconds"] > 1.5 * away["epoch_seconds"] and back["halo_rows"] == away["halo_rows"][::-1]
    assert away["after_epoch"] + 8 <= back["after_epoch"] <= away["after_epoch"] + 12
    assert len(said) == 2 and "Moved back" in said[1] and "The next move waits longer" in said[1]
    for before, now in zip(steady, dear, strict=True):
        assert all(before["report"][name] == now["report"][name] for name in ("nodes", "edges", "halo_rows"))
    losses, wanted = (torch.tensor([e["loss"] for e in each[0]["epochs"]]) for each in (dear, steady))
    # as above, for 50 steps
    assert float((losses.double() / wanted - 1).abs().max()) <= 1e-10
    assert float((dear[0]["logits"] - steady[0]["logits"]).abs().max()) <= 1e-8


def test_fit_reports_its_moves(forked_workers: None) -> None:
    said, moved = list[str](), list[dict[str, Any]]()
    model = Slowed(gnn(), 0)
    result = nugnn.fit(
        model, make_data(), workers=2, epochs=30, check=False, rebalance=RULES, on_note=said.append,
        on_rebalance=moved.append,
    )  # fmt: skip
    assert moved and list(result.moves) == moved and sum("Moved" in text for text in said) == len(moved)
    assert result.rank_reports[0]["edges"] > 1.5 * result.rank_reports[1]["edges"]


# -- what a model holds ------------------------------------------------------------------------------------------------


class Holding(nn.Module):
    """A model that keeps what ``hold`` makes of the graph and a hidden layer."""

    def __init__(self, hold: str) -> None:
        super().__init__()
        self.layer, self.hold = nn.Linear(NUM_FEATURES, NUM_CLASSES).double(), hold
        self.kept: Any = None

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.kept = {
            "nothing": lambda: None,
            "rows": lambda: [x * 2],
            "edges": lambda: {"a": graph.edata["weight"] + 1},
            "graph": lambda: graph,
            "reversed": graph.reverse,
            "unknown": lambda: torch.tensor(y.tolist()),
            "array": lambda: np.zeros(len(y)),
            "some": lambda: x[:3],
            "numbers": lambda: torch.zeros(3),
        }[self.hold]()
        return y


def _graph(ranks: Ranks, data: GraphData) -> ShardGraph:
    parts = torch.arange(data.num_nodes) * ranks.world_size // data.num_nodes
    given = partition_nodes(data.num_nodes, data.src, data.dst, [1.0] * ranks.world_size, method="given", parts=parts)
    return ShardGraph(build_shard(data, given, ranks.rank), ranks)


def _kept(ranks: Ranks, hold: str, data: GraphData, trusts_user: bool = False) -> str | None:
    """Why nothing can move; after a move everything that was kept is where its node or edge is."""
    graph, model = _graph(ranks, data), Holding(hold)
    rows = torch.arange(0)
    family = GraphFamily(model, graph, {"train": rows if ranks.rank else torch.arange(3), "val": rows, "test": rows})
    family.predict(0)
    held = HeldRows(model, None, graph, trusts_user=trusts_user)
    if held.why_not is not None:
        return held.why_not
    ids = graph.global_node_ids
    family.move(torch.where(ids % 3 == 0, 1 - ranks.rank, ranks.rank), held)
    graph = family.graph
    assert not torch.equal(graph.global_node_ids, ids)
    if hold == "rows":
        assert torch.equal(model.kept[0], graph.ndata["feat"] * 2)
    elif hold == "edges":
        assert torch.equal(model.kept["a"], graph.edata["weight"] + 1)
    elif hold == "graph":
        assert model.kept is graph
    again = HeldRows(model, None, graph, trusts_user=trusts_user)
    assert again.why_not is None, "what has followed is known still"
    return None


@pytest.mark.parametrize("hold", ["nothing", "rows", "edges", "graph", "numbers"])
def test_what_a_model_keeps_follows(ranks: Any, hold: str) -> None:
    assert ranks.run(2, _kept, hold, make_graph()) == [None, None]


@pytest.mark.parametrize(
    ("hold", "text"),
    [
        ("reversed", "kept keeps a graph that was derived"),
        ("unknown", "nothing says whether they are theirs"),
        ("array", "nothing says whether they are theirs"),
        ("some", "kept holds rows of some nodes only"),
    ],
)
def test_what_nobody_can_tell_keeps_nodes_where_they_are(ranks: Any, hold: str, text: str) -> None:
    reasons = ranks.run(2, _kept, hold, make_graph())
    assert reasons[0] == reasons[1] and text in reasons[0]
    if hold in ("unknown", "array"):
        assert ranks.run(2, _kept, hold, make_graph(), trusts_user=True) == [None, None]


class Cached(nn.Module):
    """A layer of DGL that keeps its aggregate for good."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = SGConv(NUM_FEATURES, NUM_CLASSES, k=2, cached=True).double()

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.layer(graph, x)  # type: ignore[no-any-return]


def _cached(ranks: Ranks, data: GraphData) -> float:
    torch.manual_seed(0)  # the same weights on all ranks, whatever they did before
    graph, model = _graph(ranks, data), Cached()
    family = GraphFamily(model, graph, {name: torch.arange(3) for name in ("train", "val", "test")})
    before = family.predict_all(0)
    held = HeldRows(model, None, graph, trusts_user=False)
    assert held.why_not is None, held.why_not
    family.move(torch.where(graph.global_node_ids % 3 == 0, 1 - ranks.rank, ranks.rank), held)
    return float((family.predict_all(0) - before).abs().max())


def test_the_aggregate_that_sgconv_caches_follows(ranks: Any) -> None:
    assert max(ranks.run(2, _cached, make_graph())) < 1e-12


def _odd_optimizer(ranks: Ranks, data: GraphData) -> str | None:
    torch.manual_seed(0)
    model = nugnn.models.WithNodeEmbedding(data.num_nodes, 5, GNN("gcn", 5, NUM_CLASSES, hidden=4))
    graph = _graph(ranks, data)
    family = GraphFamily(model, graph, {name: torch.arange(3) for name in ("train", "val", "test")})
    trainer = nugnn.Trainer(family, make_optimizer=lambda m: torch.optim.Adafactor(m.parameters()))
    trainer.train_epoch()
    return HeldRows(model, trainer.optimizer, graph, trusts_user=True).why_not


def test_an_optimizer_that_keeps_no_rows_is_refused(ranks: Any) -> None:
    for reason in ranks.run(2, _odd_optimizer, make_graph(features=False, dtype=torch.float32)):
        assert reason is not None and "which is not one row for each node" in reason


def _unmovable(ranks: Ranks, data: GraphData) -> dict[str, Any]:
    model = Holding("unknown")
    return _fitted(ranks, Slowed(model, 0), data, epochs=30, rebalance=RULES)


def test_a_run_that_cannot_move_says_so_once(ranks: Any) -> None:
    outcome = ranks.run(2, _unmovable, make_data())[0]
    assert outcome["moves"] == [] and len(outcome["said"]) == 1 and "no nodes move between them" in outcome["said"][0]


class _Follows:
    """An ``on_move`` that has a tensor of its own follow."""

    def __call__(self, model: nn.Module, move: NodeMove) -> None:
        assert isinstance(model, Slowed) and isinstance(model.model, Holding)
        labels = model.model.kept
        model.model.kept = move.rows(labels)
        assert torch.equal(move.new_ids, move.graph.global_node_ids) and len(move.old_ids) == len(labels)


def test_users_tensors_follow_in_on_move(ranks: Any) -> None:
    model = Slowed(Holding("unknown"), 0)
    outcome = ranks.run(2, _fitted, model, make_data(), epochs=30, rebalance=RULES, on_move=_Follows())[0]
    assert outcome["moves"]


# -- resumed runs ------------------------------------------------------------------------------------------------------


class Keeping(nn.Module):
    """A model with a number for each row of its rank, of which nuGNN knows nothing."""

    def __init__(self, graph: ShardGraph) -> None:
        super().__init__()
        self.layer = nn.Linear(NUM_FEATURES, NUM_CLASSES).double()
        self.kept = graph.global_node_ids.clone()

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.layer(x)


def _keep_up(model: nn.Module, move: NodeMove) -> None:
    assert isinstance(model, Keeping)
    model.kept = move.rows(model.kept)


def _trainer(ranks: Ranks, data: GraphData, on_move: OnMove | None) -> nugnn.Trainer:
    torch.manual_seed(0)
    graph = _graph(ranks, data)
    rows = {name: torch.arange(3) for name in ("train", "val", "test")}
    return nugnn.Trainer(GraphFamily(Keeping(graph), graph, rows, on_move=on_move), make_optimizer=adam)


def _resumed(ranks: Ranks, data: GraphData, folder: Path, on_move: OnMove | None) -> list[Any]:
    """Of a run whose nodes have moved: whether rows and what is kept for them are where they were, and what it says."""
    first = _trainer(ranks, data, _keep_up)
    ids = first.family.row_ids
    family = first.family
    assert isinstance(family, GraphFamily)
    held = HeldRows(first.model, first.optimizer, family.graph, trusts_user=True)
    _keep_up(first.model, family.move(torch.where(ids % 3 == 0, 1 - ranks.rank, ranks.rank), held))
    shared, own = capture(first, History(moves=[{"after_epoch": 1}]))
    where = write_checkpoint(folder, ranks, epoch=1, shared=shared, own=own, identity={})
    again = _trainer(ranks, data, on_move)
    said = ""
    try:
        restore(again, open_checkpoint(where))
    except CheckpointError as error:
        said = str(error)
    assert isinstance(again.model, Keeping) and not torch.equal(family.row_ids, ids)
    is_there = torch.equal(again.family.row_ids, family.row_ids)
    return [is_there, torch.equal(again.model.kept, again.family.row_ids), said]


def test_a_resumed_run_brings_nodes_where_they_were_or_says_why_not(ranks: Any, tmp_path: Path) -> None:
    data = make_graph()
    assert ranks.run(2, _resumed, data, tmp_path / "a", _keep_up) == [[True, True, ""]] * 2
    for is_there, is_kept, said in ranks.run(2, _resumed, data, tmp_path / "b", None):
        assert not is_there and is_kept, "refused before anything has moved"
        assert "nodes moved between workers, and here they cannot: kept holds" in said
        assert "Give rebalance and on_move as that run had them" in said


def _of_another_graph(ranks: Ranks, data: GraphData) -> tuple[str | None, bool]:
    trainer = _trainer(ranks, data, _keep_up)
    before = trainer.family.row_ids
    return trainer.family.move_as(lambda rank: torch.arange(rank, 10, 2), trainer), trainer.family.row_ids is before


def test_a_list_that_lacks_nodes_moves_none(ranks: Any) -> None:
    for said, has_stayed in ranks.run(2, _of_another_graph, make_graph()):
        assert said is not None and "some nodes are on no worker of the checkpoint" in said and has_stayed


# -- own loops ---------------------------------------------------------------------------------------------------------


def own_loop(ranks: Ranks, data: GraphData, *, moves: bool) -> tuple[list[float], int]:
    """Training as `docs/rebalance.md` shows it, with an embedding and a tensor of the user's own."""
    torch.manual_seed(0)
    graph = _graph(ranks, data)
    embedding = nugnn.NodeEmbedding(data.num_nodes, 5).double()
    model = nn.ModuleDict({"rows": embedding, "net": GNN("gcn", 5, NUM_CLASSES, hidden=4).double()})
    embedding.shard(graph)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-5)
    interceptor, labels = nugnn.intercept(model, graph, seed=1), graph.ndata["label"]
    balancer, losses, num_moved = nugnn.Balancer(ranks, RULES), [], 0
    for epoch in range(16):
        with balancer.epoch(), interceptor.step(epoch):
            if moves:
                work_time().work(ranks, graph.num_edges() * _SECONDS_PER_EDGE * (4 if ranks.rank else 1))
            logits = model["net"](graph, embedding(graph))
            loss = nn.functional.cross_entropy(logits, labels, reduction="sum") / data.num_nodes
            optimizer.zero_grad()
            loss.backward()
            sum_gradients(model["net"].parameters(), ranks)
            optimizer.step()
        losses.append(float(ranks.sum_(loss.detach().clone())))
        move = balancer.move(graph, 100) if moves else None
        if move is not None:
            num_moved += move.num_moved
            graph, labels = move.graph, move.rows(labels)
            move.parameters(model, optimizer)
            interceptor = nugnn.intercept(model, graph, seed=1)
    return losses, num_moved


def _own_loop_by_work(ranks: Ranks, data: GraphData) -> tuple[list[float], int]:
    with WorkTime().installed():
        return own_loop(ranks, data, moves=True)


def test_a_loop_of_ones_own(ranks: Any) -> None:
    data = make_graph(num_nodes=300, features=False)
    losses, num_moved = ranks.run(2, _own_loop_by_work, data)[0]
    wanted, _ = ranks.run(2, own_loop, data, moves=False)[0]
    assert num_moved > 30
    assert float((torch.tensor(losses) / torch.tensor(wanted) - 1).abs().max()) <= 1e-10


def _paced_loop(ranks: Ranks, data: GraphData, exchange_seconds: float, between: str) -> tuple[list[float], list[bool]]:
    """A loop whose clock is told what epochs take; losses, and after each move whether all nodes are where they began.

    Args:
        ranks: Who takes part; rank 1 takes three times as long for an edge.
        data: The graph.
        exchange_seconds: That an epoch takes longer for each node that is not where it began.
        between: What happens after the first move: ``nothing``; ``resumed``, a balancer that knows nothing of it;
            ``moved``, nodes go elsewhere by hand.
    """
    torch.manual_seed(0)
    graph = _graph(ranks, data)
    embedding = nugnn.NodeEmbedding(data.num_nodes, 5).double()
    model = nn.ModuleDict({"rows": embedding, "net": GNN("gcn", 5, NUM_CLASSES, hidden=4).double()})
    embedding.shard(graph)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-5)
    interceptor, labels, first_ids = nugnn.intercept(model, graph, seed=1), graph.ndata["label"], graph.global_node_ids
    balancer, losses, is_home = nugnn.Balancer(ranks, RULES), [], list[bool]()

    def epoch_seconds() -> float:
        computed = 0.1 * graph.num_edges() * (3 if ranks.rank else 1)
        came = float((~torch.isin(graph.global_node_ids, first_ids)).sum())
        slowest, away = ranks.max_(torch.tensor([computed, came], dtype=torch.float64)).tolist()
        balancer.note(computed, slowest + exchange_seconds * away)
        return computed

    for epoch in range(40):
        with interceptor.step(epoch):
            loss = nn.functional.cross_entropy(model["net"](graph, embedding(graph)), labels, reduction="sum")
            optimizer.zero_grad()
            (loss / data.num_nodes).backward()
            sum_gradients(model["net"].parameters(), ranks)
            optimizer.step()
        losses.append(float(ranks.sum_(loss.detach().clone())))
        epoch_seconds()
        move = balancer.move(graph, 10_000)
        if move is None:
            continue
        is_home.append(torch.equal(move.new_ids, first_ids))
        moves = [move]
        if between == "moved" and len(is_home) == 1:
            moves.append(move_nodes(move.graph, torch.full_like(move.new_ids, ranks.rank)))
        elif between == "resumed":
            balancer = nugnn.Balancer(ranks, RULES)
        for each in moves:
            graph, labels = each.graph, each.rows(labels)
            each.parameters(model, optimizer)
        interceptor = nugnn.intercept(model, graph, seed=1)
    return losses, is_home


def test_a_loop_of_ones_own_takes_a_move_back(ranks: Any) -> None:
    data = make_graph(num_nodes=300, features=False)
    losses, is_home = ranks.run(2, _paced_loop, data, 100.0, "nothing")[0]
    wanted, stays = ranks.run(2, _paced_loop, data, 0.0, "nothing")[0]
    assert is_home == [False, True] and stays and not any(stays), "in the second run it brings less computing alone"
    assert float((torch.tensor(losses) / torch.tensor(wanted) - 1).abs().max()) <= 1e-10


@pytest.mark.parametrize("between", ["resumed", "moved"])
def test_without_a_way_back_nodes_stay(ranks: Any, between: str) -> None:
    data = make_graph(num_nodes=300, features=False)
    for _, is_home in ranks.run(2, _paced_loop, data, 100.0, between):
        assert is_home and not any(is_home)


def _moved_back(ranks: Ranks, data: GraphData) -> bool:
    graph = _graph(ranks, data)
    ids, weights = graph.global_node_ids, graph.edata["weight"].clone()
    there = move_nodes(graph, (ids % ranks.world_size).int())
    assert torch.equal(there.graph.global_node_ids % ranks.world_size, torch.full_like(there.new_ids, ranks.rank))
    with pytest.raises(ValueError, match="one for each edge of this rank"):
        there.edge_rows(weights[1:])
    assert torch.equal(there.edge_rows(weights), there.graph.edata["weight"])
    back = move_nodes(there.graph, there.new_ids * ranks.world_size // data.num_nodes)
    return torch.equal(back.new_ids, ids) and torch.equal(back.graph.edata["weight"], weights)


def test_there_and_back(ranks: Any) -> None:
    assert all(ranks.run(3, _moved_back, make_graph()))


def _moved_back_in_an_order(ranks: Ranks, data: GraphData) -> float:
    """Rows that stand in an order for locality; the seconds that the move is said to have taken."""
    parts = torch.randperm(data.num_nodes, generator=torch.Generator().manual_seed(0)) % ranks.world_size
    given = partition_nodes(data.num_nodes, data.src, data.dst, [1.0] * ranks.world_size, method="given", parts=parts)
    graph = ShardGraph(build_shard(data, given, ranks.rank, order="clusters"), ranks)
    ids, edge_ids, labels = graph.global_node_ids, graph.global_edge_ids, graph.ndata["label"].clone()
    assert not torch.equal(ids, ids.sort().values)
    there = move_nodes(graph, ids % ranks.world_size)
    stayed = ids[ids % ranks.world_size == ranks.rank]
    assert torch.equal(there.new_ids[: len(stayed)], stayed), "those that came stand behind the others"
    assert torch.equal(
        there.graph.global_edge_ids.sort().values, (data.dst % ranks.world_size == ranks.rank).nonzero()[:, 0]
    )
    assert identity_of(there.rows(labels)) is there.graph.index.node_rows
    assert identity_of(there.edge_rows(edge_ids)) is there.graph.index.edge_rows
    back = move_nodes(there.graph, there.came_from(), arranged_as=there.old_ids)
    assert torch.equal(back.new_ids, ids) and torch.equal(back.graph.global_edge_ids, edge_ids)
    halo = ranks.sum_(torch.tensor([g.index.plan.num_halo for g in (back.graph, there.graph)])).tolist()
    assert halo[0] != halo[1] and there.num_halo == tuple(halo) and back.num_halo == tuple(halo[::-1])
    return there.seconds


def test_there_and_back_where_rows_stand_in_an_order(ranks: Any) -> None:
    seconds = ranks.run(3, _moved_back_in_an_order, make_graph(num_nodes=90))
    assert seconds == [seconds[0]] * 3


# -- settings and reports ----------------------------------------------------------------------------------------------


def test_choices() -> None:
    assert checked_rules("off") is None and checked_rules("auto") == RebalanceRules() and checked_rules(RULES) is RULES
    with pytest.raises(ValueError, match="rebalance is 'on', must be auto, off, or"):
        checked_options({"rebalance": "on"}, make_graph())
    with pytest.raises(ValueError, match="on_move has no effect where rebalance is off"):
        checked_options({"rebalance": "off", "on_move": print}, make_graph())
    assert "rebalance" not in FitOptions(rebalance="off").deciding()
    assert most_growth(Ranks()) >= 1
    with pytest.raises(ValueError, match="left_out has rank 1; ranks are 0 to 0"):
        nugnn.Balancer(Ranks(), RebalanceRules(left_out=frozenset({0, 1})))


def test_rules_take_over_what_a_plan_knows() -> None:
    computing, whole = LinearWork((LinearCost(inner=1.0),) * 2), LinearWork((LinearCost(inner=1.0, halo=1.0),) * 2)
    planned = PlannedBalance(work=computing, whole=whole, left_out=frozenset({1}))
    rules = checked_rules("auto", planned)
    assert rules == RebalanceRules(work=computing, whole=whole, left_out=frozenset({1}))
    own = checked_rules(RebalanceRules(work=whole, left_out=frozenset({0})), planned)
    assert own == RebalanceRules(work=whole, left_out=frozenset({0, 1})), "exchanges are of the other model"
    assert checked_rules("off", planned) is None


_RECORD = {
    **{
        "after_epoch": 2,
        "is_return": False,
        "seconds": 0.31,
        "nodes": 12345,
        "share": 0.08,
        "counts": [[0, 0], [12345, 0]],
    },
    **{"compute_seconds": [0.5, 1.5], "predicted_compute_seconds": [0.75, 0.75], "halo_rows": [2000, 2210]},
    "epoch_seconds": 1.6,
}


def test_what_the_user_reads() -> None:
    assert move_text(_RECORD) == (
        "after epoch 2: worker 1 computes for 1.50 s in an epoch, another one for 500 ms. Moved 12,345 nodes (8.0%) in "
        "310 ms: 12,345 from worker 1 to 0. The slowest should take 750 ms now; halo rows 2,000 before, 2,210 now"
    )


def test_what_the_user_reads_of_a_return() -> None:
    back = _RECORD | {"after_epoch": 9, "counts": [[0, 12345], [0, 0]], "epoch_seconds": 2.5, "halo_rows": [2210, 2000]}
    assert return_text(back, _RECORD) == (
        "after epoch 9: an epoch takes 2.50 s since nodes moved after epoch 2, and took 1.60 s before. Moved back "
        "12,345 nodes (8.0%) in 310 ms: 12,345 from worker 0 to 1; halo rows 2,210 before, 2,000 now. The next move "
        "waits longer"
    )


@pytest.mark.parametrize(
    ("brought", "longer", "came"),
    [
        (0.01, 0.0, "brought 10 ms"),
        (-0.02, 0.0, "the slowest takes 20 ms longer than before"),
        (0.01, 0.03, "epochs are 30 ms longer than before"),
    ],
)
def test_what_the_user_reads_of_a_broken_promise(brought: float, longer: float, came: str) -> None:
    shortfall = Shortfall(promised=0.1, brought=brought, longer=longer)
    assert shortfall_text(7, shortfall) == (
        f"after epoch 7: the last move was to save 100 ms of an epoch, and {came}; the next one waits longer"
    )


def test_moves_in_the_log_of_epochs(tmp_path: Path) -> None:
    seconds = dict.fromkeys(("epoch", "compute", "halo", "sync", "evaluate"), 0.0)
    epochs = [Epoch(number, 1.0, 0.5, 0.5, 0.5, seconds) for number in (1, 2, 3)]
    path = tmp_path / "metrics.jsonl"

    def lines() -> list[str]:
        return ["move" if "move" in (one := json.loads(line)) else one["number"] for line in path.open()]

    log = _EpochLog(path, None)
    log.restart([])
    for epoch in epochs:
        log.add(epoch)
        if epoch.number > 1:
            log.add_move(_RECORD | {"after_epoch": epoch.number})
    log.close()
    assert lines() == [1, 2, "move", 3, "move"]
    log.restart(copy.copy(epochs[:2]))
    log.close()
    assert lines() == [1, 2, "move"], "what came after the checkpoint is dropped"
    log.restart([])
    log.close()
    assert lines() == []
