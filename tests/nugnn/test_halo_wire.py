"""Training with compressed halo rows: one rounding whatever the schedule, exact evaluation, and near float32."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from dgl import function as fn
from dgl.nn.functional import edge_softmax
from torch import Tensor, nn

import nugnn
from exactness import NUM_CLASSES, NUM_FEATURES, Run, largest_difference, make_graph, make_parts, run_steps
from nugnn.checkpoint import open_checkpoint, write_checkpoint
from nugnn.comm.groups import Ranks
from nugnn.comm.halo_handler import HaloHandler
from nugnn.comm.halo_wire import HaloWire
from nugnn.config import TrainConfig
from nugnn.embedding import NodeEmbedding
from nugnn.history import History
from nugnn.model_on_shard import ModelOnShard
from nugnn.models import GNN
from nugnn.options import ConfigError
from nugnn.shard_graph import ShardGraph
from nugnn.trainer import Trainer
from nugnn.trainer_state import capture, restore
from shard_calls import make_data, shard_of
from trainers import graph_trainer

WIDTH = 24
FLOAT64_BOUND = 1e-10  # see test_exactness.py


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-5)


class Readers(nn.Module):
    """Reads one tensor by two sums, on edges and in a user's function, which reads a mask, too."""

    def __init__(self, num_features: int = NUM_FEATURES) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(num_features, WIDTH), nn.Linear(4 * WIDTH, NUM_CLASSES)
        self.drop = nn.Dropout(0.3)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        with graph.local_scope():
            graph.ndata["h"] = self.drop(self.first(x)).relu()
            graph.ndata["is_even"] = graph.in_degrees() % 2 == 0
            graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "a"))
            graph.update_all(fn.copy_u("h", "m"), fn.max("m", "b"))
            graph.apply_edges(fn.u_add_v("h", "h", "e"))
            graph.update_all(fn.copy_e("e", "m"), fn.sum("m", "c"))
            graph.update_all(lambda edges: {"m": edges.src["h"] * edges.src["is_even"][:, None]}, fn.sum("m", "d"))
            return self.second(torch.cat([graph.ndata[name] for name in "abcd"], 1))


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Readers(), Readers(NUM_CLASSES)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.second(graph, self.first(graph, x))


def _model(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "readers":
        return _Twice().double()
    options: dict[str, Any] = {"norm": "batch", "dropout": 0.4} if name != "gat" else {"heads": 2, "dropout": 0.4}
    return GNN(name, NUM_FEATURES, NUM_CLASSES, hidden=WIDTH, layers=3, **options).double()


def _trainer(ranks: Ranks, model: nn.Module, **options: Any) -> Trainer:
    data = options.pop("data", None) or make_graph()
    graph = shard_of(ranks, data, make_parts(data, ranks.world_size, "metis_unequal"))
    ids = graph.global_node_ids
    splits = {"train": data.train_nodes, "val": data.val_nodes, "test": data.test_nodes}
    rows = {split: torch.isin(ids, nodes).nonzero().flatten() for split, nodes in splits.items()}
    return graph_trainer(model, graph, rows, seed=7, make_optimizer=_adam, **options)


def _runs(ranks: Any, model: nn.Module, num_parts: int = 3, **options: Any) -> list[Run]:
    data = make_graph()
    parts = make_parts(data, num_parts, "metis_unequal")
    return ranks.run(num_parts, run_steps, data, parts, model, _adam, **options)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["sage", "readers"])
def test_overlap_does_not_change_what_is_rounded_to_what(ranks: Any, name: str) -> None:
    off = _runs(ranks, _model(name), halo_wire="int4", overlap="off")
    exact = _runs(ranks, _model(name), halo_wire="fp32", overlap="off")
    for overlap in ("on", "backward"):
        for usual, run in zip(off, _runs(ranks, _model(name), halo_wire="int4", overlap=overlap), strict=True):
            worst, where = largest_difference(usual, run)
            assert worst <= FLOAT64_BOUND, where
    assert largest_difference(exact[0], off[0])[0] > 1e-3
    assert all(torch.equal(value, off[0].parameters[key]) for run in off for key, value in run.parameters.items())


@pytest.mark.parametrize(("name", "overlap"), [("gat", "off"), ("sage", "on"), ("readers", "backward")])
def test_a_layer_that_runs_again_reads_the_same_rows(ranks: Any, name: str, overlap: str) -> None:
    runs = [
        _runs(ranks, _model(name), halo_wire="int4", overlap=overlap, activations=activations)
        for activations in ("keep", "recompute")
    ]
    for kept, repeated in zip(*runs, strict=True):
        assert kept.losses == repeated.losses
        assert all(torch.equal(value, repeated.gradients[key]) for key, value in kept.gradients.items())
        assert all(torch.equal(value, repeated.parameters[key]) for key, value in kept.parameters.items())


class _Checkpointed(nn.Module):
    """One tensor is read by two layers; the second is repeated by torch's own checkpoint."""

    def __init__(self, *, repeats: bool) -> None:
        super().__init__()
        self.repeats = repeats
        self.first, self.head = nn.Linear(NUM_FEATURES, WIDTH), nn.Linear(2 * WIDTH, NUM_CLASSES)
        self.near, self.far = _Sum(), _Sum()

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        near = self.near(graph, h)
        if self.repeats:
            far = torch.utils.checkpoint.checkpoint(self.far, graph, near, use_reentrant=False)
        else:
            far = self.far(graph, near)
        return self.head(torch.cat([near, far], 1))


class _Sum(nn.Module):
    def forward(self, graph: Any, x: Tensor) -> Tensor:
        with graph.local_scope():
            graph.ndata["x"] = x
            graph.update_all(fn.copy_u("x", "m"), fn.mean("m", "y"))
            return graph.ndata["y"].tanh() + 0.1 * x


def test_a_checkpoint_of_the_user_s_reads_the_same_rows(ranks: Any) -> None:
    torch.manual_seed(0)
    plain, repeating = _Checkpointed(repeats=False), _Checkpointed(repeats=True)
    repeating.load_state_dict(plain.state_dict())
    runs = [_runs(ranks, model.double(), 2, halo_wire="int2") for model in (plain, repeating)]
    for one, other in zip(*runs, strict=True):
        assert one.losses == other.losses
        assert all(torch.equal(value, other.parameters[key]) for key, value in one.parameters.items())


# -- evaluation ----------------------------------------------------------------------------------------------------


def _evaluated(ranks: Ranks, name: str, recompute_inputs: bool) -> list[bool]:
    """Whether predictions are those of exact rows, before and after training steps."""
    model = _model(name)
    trainer = _trainer(ranks, model, halo_wire="int2", recompute_inputs=recompute_inputs)
    exact = ModelOnShard(model, trainer.family.graph, seed=7, recompute_inputs=True)
    same = []
    for _ in range(2):
        same.append(torch.equal(trainer.predict_all(), exact.predict_all(trainer.num_steps)))
        trainer.train_epoch()
    logits = trainer.predict_all()
    same.append(torch.equal(logits, exact.predict_all(trainer.num_steps)))
    handler = trainer.family.net.interceptor.find(HaloHandler)
    return [*same, handler.traffic.evaluation > 0]


@pytest.mark.parametrize(("name", "recompute_inputs"), [("gin", False), ("gat", True)])
def test_evaluation_is_exact(ranks: Any, name: str, recompute_inputs: bool) -> None:
    assert ranks.run(2, _evaluated, name, recompute_inputs) == [[True] * 4] * 2


def _inductive(ranks: Ranks) -> bool:
    """The other graph, on which is evaluated, is read exactly too."""
    data = make_graph()
    graph = shard_of(ranks, data, make_parts(data, ranks.world_size, "random"))
    rows = {"train": torch.arange(graph.num_nodes()), "val": torch.arange(0), "test": torch.arange(0)}
    other = shard_of(ranks, data, make_parts(data, ranks.world_size, "metis"))
    rows_there = {"val": torch.arange(other.num_nodes())}
    model = _model("gcn")
    trainer = graph_trainer(model, graph, rows, evaluate_on=(other, rows_there), halo_wire="int4", make_optimizer=_adam)
    trainer.train_epoch()
    report = trainer.family.report()["halo"]
    exact = ModelOnShard(model, other)
    same = torch.equal(trainer.predict_all(), exact.predict_all(1))
    return same and report["forward_bytes"] > 0 and trainer.family.report()["halo"]["evaluation_bytes"] > 0


def test_inductive_training_evaluates_exactly(ranks: Any) -> None:
    assert ranks.run(3, _inductive) == [True] * 3


def _own_loop(ranks: Ranks) -> list[bool]:
    """Rows are compressed while the model trains, whatever asks for gradients; a tensor has the same bits twice."""
    graph = shard_of(ranks, make_data())
    model = nn.Identity()
    interceptor = nugnn.intercept(model, graph, seed=1, halo_wire="int4")
    plan, generator = graph.index.plan, torch.Generator().manual_seed(ranks.rank)
    x = torch.randn(plan.num_inner, 30, generator=generator).requires_grad_()
    with interceptor.step(3):
        with torch.no_grad():
            first = nugnn.halo(x, graph)
        again, other = nugnn.halo(x, graph), nugnn.halo(x * 1.0, graph)
        model.eval()
        exact = nugnn.halo(x, graph)
        model.train()
        ids = nugnn.halo(graph.global_node_ids, graph)
    with interceptor.step(3):
        repeated = nugnn.halo(x, graph)
    with interceptor.step(4):
        later = nugnn.halo(x, graph)
    has_halo = plan.num_halo > 0
    return [
        again.requires_grad and torch.equal(first, again),
        torch.equal(first, repeated),
        torch.equal(first, later) != has_halo,
        torch.equal(first, other) != has_halo,
        torch.equal(exact, first) != has_halo,
        torch.equal(exact[: plan.num_inner], x),
        ids.dtype is torch.int64 and torch.equal(ids[: plan.num_inner], graph.global_node_ids),
    ]


def test_own_loops(ranks: Any) -> None:
    assert ranks.run(3, _own_loop) == [[True] * 7] * 3


def _shared_softmax(ranks: Ranks, wire: str) -> tuple[Tensor, Tensor]:
    """Softmax over out-edges, which ranks share, and sums over out-edges, whose shares go home."""
    data = make_data()
    graph = shard_of(ranks, data)
    scores = torch.randn(len(data.src), 40, generator=torch.Generator().manual_seed(0))[graph.global_edge_ids]
    with nugnn.intercept(nn.Identity(), graph, halo_wire=wire).step(0):
        shared = edge_softmax(graph, scores, norm_by="src")
        turned = graph.reverse()
        turned.ndata["x"] = torch.ones(graph.num_nodes(), 40) * torch.arange(40)
        turned.update_all(fn.copy_u("x", "m"), fn.sum("m", "y"))
    return shared, turned.ndata["y"]


def test_values_that_ranks_have_to_share_stay_exact(ranks: Any) -> None:
    pairs = list(zip(*(ranks.run(3, _shared_softmax, wire) for wire in ("fp32", "int2")), strict=True))
    for exact, rounded in pairs:
        assert torch.equal(exact[0], rounded[0])
        # each of two shares lies between 0 and 39 times its edges, and is off by at most a third of that
        assert ((exact[1] - rounded[1]).abs() <= 2 * exact[1].amax(1, keepdim=True) / 3).all()
    assert any(not torch.equal(exact[1], rounded[1]) for exact, rounded in pairs)


# -- what travelled ------------------------------------------------------------------------------------------------


def _traffic(ranks: Ranks, wire: str, overlap: str) -> list[int]:
    torch.manual_seed(0)
    model = GNN("gin", NUM_FEATURES, NUM_CLASSES, hidden=WIDTH, layers=3).float()
    trainer = _trainer(ranks, model, data=make_graph(dtype=torch.float32), halo_wire=wire, overlap=overlap)
    plan = trainer.family.graph.index.plan
    for _ in range(2):
        trainer.train_epoch()
    trainer.predict_all()
    got = trainer.family.report()["halo"]
    handler = trainer.family.net.interceptor.find(HaloHandler)
    assert handler.halo_bytes == sum(got[f"{name}_bytes"] for name in ("forward", "gradient", "evaluation"))
    row = functools.partial(HaloWire(wire).row_bytes, dtype=torch.float32)
    plain = functools.partial(HaloWire().row_bytes, dtype=torch.float32)
    sent, halo = len(plan.send_rows), plan.num_halo
    # each layer sends its input; the first one features, once and as they are
    forward = 2 * 2 * row(WIDTH) + plain(NUM_FEATURES)
    gradient, evaluation = 2 * 2 * row(WIDTH), 2 * plain(WIDTH)
    return [
        got["forward_bytes"] - sent * forward,
        got["gradient_bytes"] - halo * gradient,
        got["evaluation_bytes"] - sent * evaluation,
    ]


@pytest.mark.parametrize(("wire", "overlap"), [("fp32", "off"), ("int4", "off"), ("int2", "on"), ("bf16", "backward")])
def test_bytes_are_those_of_the_formula(ranks: Any, wire: str, overlap: str) -> None:
    assert ranks.run(3, _traffic, wire, overlap) == [[0, 0, 0]] * 3


# -- runs ----------------------------------------------------------------------------------------------------------


def _resumed(ranks: Ranks, folder: Path, feedback: bool) -> tuple[bool, dict[str, Tensor]]:
    made = functools.partial(_trainer, halo_wire="int4", halo_feedback=feedback)
    whole, first = (made(ranks, _model("gcn")) for _ in range(2))
    for trainer in (whole, first):
        trainer.train_epoch()
    shared, own = capture(first, History())
    where = write_checkpoint(folder, ranks, epoch=1, shared=shared, own=own, identity={})
    second = made(ranks, _model("gcn"))
    second.train_epoch()  # owes something else
    restore(second, open_checkpoint(where))
    owed = _by_node(second)
    for trainer in (whole, second):
        trainer.predict_all()
        trainer.train_epoch()
    pairs = zip(whole.model.parameters(), second.model.parameters(), strict=True)
    same = all(torch.equal(a, b) for a, b in pairs)
    one, other = whole.family.own_rows(), second.family.own_rows()
    return same and one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one), owed


def _by_node(trainer: Trainer) -> dict[str, Tensor]:
    """What is owed to each node of the whole graph."""
    graph, rows = trainer.family.graph, trainer.family.own_rows()
    ids = torch.cat(graph.ranks.gather_rows(graph.global_node_ids))
    gathered = {name: torch.cat(graph.ranks.gather_rows(value)) for name, value in sorted(rows.items())}
    return {name: torch.zeros_like(value).index_copy(0, ids, value) for name, value in gathered.items()}


def _moved(ranks: Ranks, folder: Path) -> dict[str, Tensor]:
    trainer = _trainer(ranks, _model("gcn"), halo_wire="int4", halo_feedback=True)
    restore(trainer, open_checkpoint(next(folder.iterdir())))
    return _by_node(trainer)


def test_a_resumed_run_goes_on_in_the_same_bits(ranks: Any, tmp_path: Path) -> None:
    assert ranks.run(3, _resumed, tmp_path / "random", False) == [(True, {})] * 3
    for same, owed in (runs := ranks.run(3, _resumed, tmp_path / "kept", True)):
        assert same and len(owed) == 3  # of each layer
    before, after = runs[0][1], ranks.run(2, _moved, tmp_path / "kept")[0]
    for name, rows in after.items():
        stays = rows.any(1)  # sent on two parts as well
        assert stays.any() and torch.equal(rows[stays], before[name][stays])


def test_error_feedback_changes_neither_schedule_nor_repetition(ranks: Any) -> None:
    how: dict[str, Any] = {"halo_wire": "int2", "halo_feedback": True}
    off, at_random = _runs(ranks, _model("sage"), **how), _runs(ranks, _model("sage"), halo_wire="int2")
    again = _runs(ranks, _model("sage"), **how, activations="recompute")
    for usual, on, repeated in zip(off, _runs(ranks, _model("sage"), **how, overlap="on"), again, strict=True):
        worst, where = largest_difference(usual, on)
        assert worst <= FLOAT64_BOUND, where
        assert usual.losses == repeated.losses
    assert off[0].losses != at_random[0].losses


def _left_out(ranks: Ranks) -> list[bool]:
    """A step that the optimizer leaves out changes nothing that is owed; evaluation neither."""
    trainer = _trainer(ranks, _model("gcn"), halo_wire="int2", halo_feedback=True)
    trainer.train_epoch()
    before = trainer.family.own_rows()
    trainer.predict_all()
    seen = [_equal(before, trainer.family.own_rows())]
    with trainer.family.around(trainer.num_steps):
        trainer.family.loss(None).backward()
    trainer.family.settle(is_good=False)
    seen.append(_equal(before, trainer.family.own_rows()))
    trainer.train_epoch()
    has_sent = len(trainer.family.graph.index.plan.send_rows) > 0
    return [*seen, _equal(before, trainer.family.own_rows()) != has_sent]


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_step_that_is_left_out_owes_nothing(ranks: Any) -> None:
    assert ranks.run(2, _left_out) == [[True] * 3] * 2


class _WithRows(nn.Module):
    def __init__(self, num_nodes: int) -> None:
        super().__init__()
        self.rows, self.near, self.head = NodeEmbedding(num_nodes, WIDTH), _Sum(), nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.head(self.near(graph, self.rows(graph)))


@pytest.mark.parametrize(("name", "precision"), [("gcn", "bf16"), ("sage", "fp32"), ("embedding", "fp32")])
def test_training_with_8_bits_stays_near_float32(ranks: Any, name: str, precision: str) -> None:
    data = make_graph(dtype=torch.float32)
    torch.manual_seed(0)
    model = (
        _WithRows(data.num_nodes)
        if name == "embedding"
        else GNN(name, NUM_FEATURES, NUM_CLASSES, hidden=WIDTH, layers=3)
    )
    parts = make_parts(data, 2, "metis")
    runs = [
        ranks.run(2, run_steps, data, parts, model.float(), _sgd, 8, halo_wire=wire, precision=precision)
        for wire in ("fp32", "int8")
    ]
    for exact, rounded in zip(*runs, strict=True):
        # a value is off by at most 1/255 of its row's range, and right in the mean; ten times that, relative, is
        # allowed for the losses of 8 steps
        for one, other in zip(exact.losses, rounded.losses, strict=True):
            assert abs(one - other) <= 10 / 255 * abs(one)
        assert rounded.losses[-1] < rounded.losses[0] and exact.losses != rounded.losses
    (one, other) = runs[1]
    assert all(torch.equal(value, other.parameters[key]) for key, value in one.parameters.items())


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _overflowed(ranks: Ranks) -> bool:
    """A row that is not finite on one rank: its readers see NaN, and nobody sees a number."""
    graph: ShardGraph = shard_of(ranks, make_data())
    x = torch.ones(graph.num_nodes(), 30)
    x[graph.global_node_ids == 0, 3] = torch.inf  # a hub
    interceptor = nugnn.intercept(nn.Identity(), graph, halo_wire="int8")
    with interceptor.step(0):
        local = nugnn.halo(x, graph)
        ids = nugnn.halo(graph.global_node_ids, graph)
    halo, ids = local[graph.num_nodes() :], ids[graph.num_nodes() :]
    return bool(torch.isnan(halo[ids == 0]).all() and (halo[ids != 0] == 1).all())


def test_overflow_is_seen_by_all_readers(ranks: Any) -> None:
    assert all(ranks.run(3, _overflowed))


# -- options -------------------------------------------------------------------------------------------------------


def test_options_reach_the_run_and_wrong_ones_are_refused() -> None:
    from nugnn.fit_options import FitOptions
    from nugnn.graph_run import fit_arguments

    config = TrainConfig(dataset="digits", halo_wire="int4")
    assert fit_arguments(config)["halo_wire"] == "int4" and config.fixed_settings()["halo_wire"] == "int4"
    assert FitOptions(halo_wire="int4").deciding()["halo_wire"] == "int4"
    with pytest.raises(ConfigError, match="--halo-wire int3 is not allowed; allowed: fp32, bf16, fp16, int8"):
        TrainConfig(dataset="digits", halo_wire="int3")
    with pytest.raises(ValueError, match="halo_wire '4bit' is not known; choose one of fp32"):
        nugnn.fit(nn.Identity(), make_graph(), workers=2, halo_wire="4bit")
    with pytest.raises(ValueError, match="halo_wire 'int5' is not known"):
        nugnn.intercept(nn.Identity(), shard_of(Ranks(), make_data()), halo_wire="int5")


@pytest.mark.slow
def test_a_run_reports_what_travelled_and_goes_on(tmp_path: Path) -> None:
    from nugnn.run import run_from_config

    how = {"dataset": "digits", "workers": 2, "shares": "0.7,0.3", "halo_wire": "int4", "seed": 1}
    whole = run_from_config(TrainConfig(**how, epochs=4, out=str(tmp_path / "whole")))
    run_from_config(TrainConfig(**how, epochs=2, out=str(tmp_path / "parts")))
    parts = run_from_config(TrainConfig(**how, epochs=4, out=str(tmp_path / "parts"), resume=True))
    assert (parts["val"], parts["last_test"]) == (whole["val"], whole["last_test"])
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert files[0] == files[1]
    for report in whole["ranks"]:
        assert report["halo"]["wire"] == "int4" and report["halo"]["gradient_bytes"] > 0
        assert math.isfinite(report["halo_seconds"])
    with pytest.raises(ValueError, match="halo_wire was int4, is int2"):
        run_from_config(TrainConfig(**how | {"halo_wire": "int2"}, epochs=5, out=str(tmp_path / "parts"), resume=True))
