"""Stale and sampled boundaries in training: against a reference by hand, exact where they have to be, and resumed."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from dgl import function as fn
from dgl.nn.functional import edge_softmax
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import nugnn
from exactness import NUM_CLASSES, NUM_FEATURES, Run, largest_difference, make_graph, make_parts, run_steps
from nugnn.checkpoint import open_checkpoint, write_checkpoint
from nugnn.comm.groups import Ranks
from nugnn.comm.halo_handler import HaloHandler
from nugnn.config import TrainConfig
from nugnn.fit_options import FitOptions, checked_options
from nugnn.graph_run import fit_arguments
from nugnn.history import History
from nugnn.model_on_shard import ModelOnShard
from nugnn.models import GNN
from nugnn.options import ConfigError
from nugnn.trainer import Trainer
from nugnn.trainer_state import capture, restore
from shard_calls import make_data, shard_of
from trainers import graph_trainer

WIDTH, HEADS = 8, 2
FLOAT64_BOUND = 1e-10  # see test_exactness.py


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def _at_rest(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-5)


def _model(name: str, *, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    options: dict[str, Any] = {"heads": HEADS} if name.startswith("gat") else {"norm": "batch"}
    return GNN(name, NUM_FEATURES, NUM_CLASSES, hidden=WIDTH, layers=3, dropout=dropout, **options).double()


def _runs(ranks: Any, model: nn.Module, num_parts: int = 3, num_steps: int = 3, **options: Any) -> list[Run]:
    data, make_optimizer = make_graph(), options.pop("make_optimizer", _sgd)
    parts = make_parts(data, num_parts, "metis_unequal")
    return ranks.run(num_parts, run_steps, data, parts, model, make_optimizer, num_steps, **options)  # type: ignore[no-any-return]


def _same_bits(one: list[Run], other: list[Run]) -> bool:
    return all(
        a.losses == b.losses
        and torch.equal(a.logits, b.logits)
        and all(torch.equal(value, b.parameters[name]) for name, value in a.parameters.items())
        for a, b in zip(one, other, strict=True)
    )


# -- stale, against a reference by hand ----------------------------------------------------------------------------


class Late(torch.autograd.Function):
    """Rows as other parts read them, those of the last epoch; gradients of other parts likewise. ``box`` keeps both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, box: dict[str, Tensor]) -> Tensor:
        ctx.box = box
        read, box["rows"] = box.get("rows", x), x.detach().clone()
        return read.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        read, ctx.box["gradient"] = ctx.box.get("gradient", grads[0]), grads[0].clone()
        return read, None


class Whole:
    """The whole graph on one device, of which rows of other parts are read through `Late`."""

    def __init__(self, data: Any, parts: Tensor) -> None:
        self.src, self.dst, self.num_nodes = data.src.long(), data.dst.long(), data.num_nodes
        self.is_remote = (parts[self.src] != parts[self.dst])[:, None]
        self._boxes: list[dict[str, Tensor]] = []
        self._place = 0

    def begin_epoch(self) -> None:
        self._place = 0

    def read(self, x: Tensor) -> Tensor:
        """``(E, D)`` rows of the sources."""
        if self._place == len(self._boxes):
            self._boxes.append({})
        late = Late.apply(x, self._boxes[self._place])
        self._place += 1
        return torch.where(self.is_remote, late[self.src], x[self.src])

    def sum(self, m_E: Tensor) -> Tensor:
        return m_E.new_zeros(self.num_nodes, m_E.shape[1]).index_add(0, self.dst, m_E)


class Layers(nn.Module):
    """A mean, attention of two heads, and a mean of weighted rows; on a shard through DGL, on `Whole` by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.near = nn.Linear(NUM_FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.score = nn.Linear(WIDTH, 2 * HEADS, bias=False)
        self.last = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        h = (self.near(h) + self._mean(graph, h)).tanh()
        h = (h + self._attention(graph, h)).tanh()
        return self.last(h) + self._mean(graph, self.last(h).sin())

    def _mean(self, graph: Any, h: Tensor) -> Tensor:
        if isinstance(graph, Whole):
            degrees = torch.bincount(graph.dst, minlength=graph.num_nodes).clamp(min=1)
            return graph.sum(graph.read(h)) / degrees[:, None]
        with graph.local_scope():
            graph.ndata["h"] = h
            graph.update_all(fn.copy_u("h", "m"), fn.mean("m", "y"))
            return graph.ndata["y"]  # type: ignore[no-any-return]

    def _attention(self, graph: Any, h: Tensor) -> Tensor:
        left, right = self.score(h).chunk(2, 1)
        if isinstance(graph, Whole):
            score_E = (graph.read(left) + right[graph.dst]).tanh().exp()
            weight_E = score_E / graph.sum(score_E)[graph.dst]
            rows_E = graph.read(h).view(-1, HEADS, WIDTH // HEADS)
            return graph.sum((rows_E * weight_E[:, :, None]).flatten(1))
        with graph.local_scope():
            graph.ndata.update({"l": left, "r": right, "h": h.view(-1, HEADS, WIDTH // HEADS)})
            graph.apply_edges(fn.u_add_v("l", "r", "s"))
            graph.edata["a"] = edge_softmax(graph, graph.edata["s"].tanh())[:, :, None]
            graph.update_all(fn.u_mul_e("h", "a", "m"), fn.sum("m", "y"))
            return graph.ndata["y"].flatten(1)  # type: ignore[no-any-return]


class InLayers(nn.Module):
    """The same as layers that are called with the graph, which may run again in backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = Layers().double()

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        out: Tensor = self.inner(graph, x)
        return out


def _by_hand(model: nn.Module, num_parts: int, num_steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of stale training, and the parameters after it."""
    data, own = make_graph(), copy.deepcopy(model)
    whole = Whole(data, make_parts(data, num_parts, "metis_unequal"))
    optimizer, losses = _sgd(own), []
    for _ in range(num_steps):
        whole.begin_epoch()
        optimizer.zero_grad()
        loss = F.cross_entropy(own(whole, data.features)[data.train_nodes], data.labels[data.train_nodes])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: p.detach() for name, p in own.named_parameters()}


@pytest.mark.parametrize(
    ("num_parts", "how"),
    [
        (2, {"overlap": "backward", "activations": "recompute"}),
        (3, {"overlap": "off"}),
    ],
)
def test_each_epoch_reads_rows_and_gradients_of_the_one_before(ranks: Any, num_parts: int, how: Any) -> None:
    model, num_steps = InLayers(), 4
    losses, parameters = _by_hand(model, num_parts, num_steps)
    for run in _runs(ranks, model, num_parts, num_steps, halo_mode="stale", **how):
        for got, expected in zip(run.losses, losses, strict=True):
            assert abs(got - expected) <= FLOAT64_BOUND * abs(expected)
        for name, expected in parameters.items():
            assert float((run.parameters[name] - expected).abs().max()) <= FLOAT64_BOUND * float(expected.abs().max())
    exact = _runs(ranks, model, num_parts, num_steps, **how)[0]
    assert abs(exact.losses[1] - losses[1]) > 1e-6 * losses[1]  # it makes a difference from the second epoch on


@pytest.mark.parametrize("name", ["gcn", "gat"])
def test_the_first_epoch_is_exact(ranks: Any, name: str) -> None:
    model = _model(name, dropout=0.4)
    assert _same_bits(*(_runs(ranks, model, num_steps=1, halo_mode=mode) for mode in ("exact", "stale")))


@pytest.mark.parametrize(("name", "overlap"), [("sage", "on"), ("gatv2", "off")])
def test_with_weights_at_rest_stale_is_exact(ranks: Any, name: str, overlap: str) -> None:
    model, how = _model(name), {"make_optimizer": _at_rest, "overlap": overlap}
    assert _same_bits(*(_runs(ranks, model, halo_mode=mode, **how) for mode in ("exact", "stale")))


def test_neither_schedule_nor_repetition_changes_what_is_stale(ranks: Any) -> None:
    model, how = _model("sage", dropout=0.4), {"halo_mode": "stale", "halo_wire": "int4"}
    off = _runs(ranks, model, **how, overlap="off")
    assert _same_bits(off, _runs(ranks, model, **how, overlap="off", activations="recompute"))
    for usual, run in zip(off, _runs(ranks, model, **how, overlap="on"), strict=True):
        worst, where = largest_difference(usual, run)
        assert worst <= FLOAT64_BOUND, where
    exact = _runs(ranks, model, halo_wire="int4", overlap="off")
    assert largest_difference(exact[0], off[0])[0] > 1e-6


# -- sampled -------------------------------------------------------------------------------------------------------


def test_sampled_runs_are_one_function_of_the_seed(ranks: Any) -> None:
    model, how = _model("gcn", dropout=0.4), {"halo_mode": "sampled:0.5", "overlap": "off"}
    first = _runs(ranks, model, **how)
    assert _same_bits(first, _runs(ranks, model, **how, activations="recompute"))
    for usual, run in zip(first, _runs(ranks, model, **how | {"overlap": "on"}), strict=True):
        worst, where = largest_difference(usual, run)
        assert worst <= FLOAT64_BOUND, where
    assert all(torch.equal(value, first[0].parameters[name]) for run in first for name, value in run.parameters.items())
    assert largest_difference(_runs(ranks, model, overlap="off")[0], first[0])[0] > 1e-6


def test_a_share_of_1_is_the_exact_run(ranks: Any) -> None:
    model = _model("gin", dropout=0.4)
    assert _same_bits(*(_runs(ranks, model, halo_mode=mode) for mode in ("exact", "sampled:1")))


def test_one_worker_is_exact(ranks: Any) -> None:
    exact = _runs(ranks, _model("gat"), 1)
    for mode in ("stale", "sampled:0.1"):
        assert _same_bits(exact, _runs(ranks, _model("gat"), 1, halo_mode=mode))


# -- evaluation, and runs ------------------------------------------------------------------------------------------


def _trainer(ranks: Ranks, model: nn.Module, **options: Any) -> Trainer:
    data = make_graph()
    graph = shard_of(ranks, data, make_parts(data, ranks.world_size, "metis_unequal"))
    ids = graph.global_node_ids
    splits = {"train": data.train_nodes, "val": data.val_nodes, "test": data.test_nodes}
    rows = {split: torch.isin(ids, nodes).nonzero().flatten() for split, nodes in splits.items()}
    return graph_trainer(model, graph, rows, seed=7, make_optimizer=_adam, **options)


def _is_equal(one: nn.Module, other: nn.Module) -> bool:
    mine, its = one.state_dict(), other.state_dict()
    return all(torch.equal(value, its[name]) for name, value in mine.items())


def _evaluated(ranks: Ranks, mode: str) -> list[bool]:
    """Predictions are exact; and whether they are made in between makes no difference."""
    looked, quiet = (_trainer(ranks, _model("gcn", dropout=0.4), halo_mode=mode) for _ in range(2))
    exact = ModelOnShard(looked.model, looked.family.graph, seed=7)
    found = []
    for _ in range(3):
        looked.train_epoch()
        quiet.train_epoch()
        found.append(torch.equal(looked.predict_all(), exact.predict_all(looked.num_steps)))
    report = looked.family.report()["halo"]
    return [*found, _is_equal(looked.model, quiet.model), report["mode"] == mode, report["evaluation_bytes"] > 0]


@pytest.mark.parametrize("mode", ["stale", "sampled:0.25"])
def test_evaluation_is_exact_and_disturbs_nothing(ranks: Any, mode: str) -> None:
    assert ranks.run(2, _evaluated, mode) == [[True] * 6] * 2


def _resumed(ranks: Ranks, folder: Path, how: dict[str, Any]) -> list[bool]:
    made = functools.partial(_trainer, **how)
    whole, first = (made(ranks, _model("gcn", dropout=0.4)) for _ in range(2))
    for trainer in (whole, first):
        for _ in range(2):
            trainer.train_epoch()
    shared, own = capture(first, History())
    where = write_checkpoint(folder, ranks, epoch=2, shared=shared, own=own, identity={})
    second = made(ranks, _model("gcn", dropout=0.4))
    second.train_epoch()  # which was sent something else
    restore(second, open_checkpoint(where))
    found = []
    for _ in range(2):
        whole.train_epoch()
        second.train_epoch()
        found.append(_is_equal(whole.model, second.model))
    exact = made(ranks, _model("gcn", dropout=0.4), halo_mode="exact")
    restore(exact, open_checkpoint(where))
    exact.train_epoch()
    exact.train_epoch()
    return [*found, not _is_equal(exact.model, second.model)]


def _moved(ranks: Ranks, folder: Path) -> list[bool]:
    """On another split, the first epoch reads what is true; the second one reads the first."""
    stale, exact = (_trainer(ranks, _model("gcn", dropout=0.4), halo_mode=mode) for mode in ("stale", "exact"))
    found = []
    for trainer in (stale, exact):
        restore(trainer, open_checkpoint(next(folder.iterdir())))
    for _ in range(2):
        stale.train_epoch()
        exact.train_epoch()
        found.append(_is_equal(stale.model, exact.model))
    return found


@pytest.mark.parametrize(
    "how",
    [
        {"halo_mode": "stale"},
        {"halo_mode": "stale", "halo_wire": "int4", "halo_feedback": True, "overlap": "on"},
        {"halo_mode": "sampled:0.5", "halo_wire": "int8"},
    ],
    ids=str,
)
def test_a_resumed_run_goes_on_in_the_same_bits(ranks: Any, tmp_path: Path, how: dict[str, Any]) -> None:
    assert ranks.run(3, _resumed, tmp_path, how) == [[True] * 3] * 3
    if how == {"halo_mode": "stale"}:
        assert ranks.run(2, _moved, tmp_path) == [[True, False]] * 2


def _left_out(ranks: Ranks) -> list[bool]:
    """After a step that the optimizer leaves out, a step reads what is true."""
    # without batch norm, whose running statistics saw the step
    stale, exact = (_trainer(ranks, _model("gat"), halo_mode=mode) for mode in ("stale", "exact"))
    for trainer in (stale, exact):
        trainer.train_epoch()
        with trainer.family.around(trainer.num_steps):
            trainer.family.loss(None).backward()
        trainer.family.settle(is_good=False)
        trainer.train_epoch()
    found = [_is_equal(stale.model, exact.model)]
    for trainer in (stale, exact):
        trainer.train_epoch()
    return [*found, not _is_equal(stale.model, exact.model)]


def test_a_step_that_is_left_out_leaves_nothing_behind(ranks: Any) -> None:
    assert ranks.run(2, _left_out) == [[True] * 2] * 2


# -- one's own loop ------------------------------------------------------------------------------------------------


def _own_loop(ranks: Ranks) -> dict[str, bool]:
    graph = shard_of(ranks, make_data())
    model = nn.Identity()
    interceptor = nugnn.intercept(model, graph, halo_mode="stale")
    plan = graph.index.plan
    ids = graph.global_node_ids[:, None].double()
    found = {}

    def read(step: int, value: float, width: int = 3, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """Halo rows of ``value``, read twice, and the gradient of one's own rows after two backward passes."""
        x = (ids * value * torch.ones(width)).to(dtype).requires_grad_()
        with interceptor.step(step):
            local = nugnn.halo(x, graph)
            again = nugnn.halo(x, graph)
            assert torch.equal(local, again)
            (local.sum() * value).backward(retain_graph=True)
            (local.sum() * 10 * value).backward()
        assert x.grad is not None
        return local[plan.num_inner :].detach(), x.grad

    with nugnn.intercept(nn.Identity(), graph).step(0):
        halo_ids = nugnn.halo(graph.global_node_ids, graph)[plan.num_inner :, None].double()
    readers = torch.bincount(plan.send_rows, minlength=plan.num_inner)[:, None]
    seen = [read(step, value) for step, value in enumerate((1.0, 2.0, 3.0))]
    for step, (now, before) in enumerate(((1.0, 1.0), (2.0, 1.0), (3.0, 2.0))):
        halo, gradient = seen[step]
        found[f"rows {step}"] = torch.equal(halo, (halo_ids * before).expand(-1, 3))
        found[f"gradient {step}"] = torch.equal(gradient, (11 * now + readers * 11 * before).expand(-1, 3))
    model.eval()
    found["evaluation"] = torch.equal(read(3, 9.0)[0], (halo_ids * 9).expand(-1, 3))
    model.train()
    found["after it"] = torch.equal(read(4, 4.0)[0], (halo_ids * 3).expand(-1, 3))
    found["other width"] = torch.equal(read(5, 5.0, width=4)[0], (halo_ids * 5).expand(-1, 4))
    half = read(6, 6.0, width=4, dtype=torch.float32)[0]
    found["other type"] = torch.equal(half, (halo_ids * 6).float().expand(-1, 4))
    found["and from then on"] = torch.equal(read(7, 7.0, width=4, dtype=torch.float32)[0], half)
    x = ids.clone().requires_grad_()
    with interceptor.step(8):
        try:
            (slope,) = torch.autograd.grad((nugnn.halo(x, graph) ** 2).sum(), x, create_graph=True)
            slope.sum().backward()
            said = ""
        except NotImplementedError as error:
            said = str(error)
    found["a gradient's gradient"] = "gradient of a gradient is not defined" in said
    return found


def test_an_own_loop_reads_the_step_before(ranks: Any) -> None:
    for found in ranks.run(3, _own_loop):
        assert all(found.values()), [name for name, is_so in found.items() if not is_so]


def _in_flight(ranks: Ranks) -> list[bool]:
    """What a step sends is not waited for until the next step asks for it."""
    trainer = _trainer(ranks, _model("gin"), halo_mode="stale")
    trainer.train_epoch()
    trainer.train_epoch()
    stale = trainer.family.net.interceptor.find(HaloHandler).stale
    assert stale is not None
    # of two layers (what the first one aggregates is kept), rows and gradients
    return [sent.rows._work is not None for sent in stale._sent.values()]


def test_rows_are_on_their_way_until_the_next_epoch(ranks: Any) -> None:
    assert ranks.run(2, _in_flight) == [[True] * 4] * 2


# -- options -------------------------------------------------------------------------------------------------------


def test_options_reach_the_run() -> None:
    config = TrainConfig(dataset="digits", halo_mode="sampled:.10")
    assert config.halo_mode == "sampled:0.1" == config.fixed_settings()["halo_mode"]
    assert fit_arguments(config)["halo_mode"] == "sampled:0.1"
    assert FitOptions(halo_mode="sampled:0.10").deciding()["halo_mode"] == "sampled:0.1"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"halo_mode": "late"}, "--halo-mode late is not allowed; allowed: exact, stale, or sampled:P"),
        ({"halo_mode": "sampled"}, "--halo-mode sampled is not allowed"),
        ({"halo_mode": "sampled:0"}, "--halo-mode sampled:0 is not allowed"),
        ({"halo_mode": "sampled:1.5"}, "--halo-mode sampled:1.5 is not allowed"),
        ({"halo_mode": "sampled:nan"}, "--halo-mode sampled:nan is not allowed"),
        ({"halo_mode": "stale:0.5"}, "--halo-mode stale:0.5 is not allowed"),
        ({"halo_mode": "sampled:0.5", "model": "gat"}, "--halo-mode sampled:0.5: sums and means"),
        ({"halo_mode": "sampled:0.5", "model": "sage", "aggregator": "pool"}, "--aggregator pool makes something else"),
        ({"halo_mode": "sampled:0.5", "halo_wire": "int4", "halo_feedback": True}, "leave halo_feedback out"),
        ({"halo_mode": "stale", "precision": "fp16"}, "--halo-mode stale: precision fp16 scales the loss"),
    ],
)
def test_what_does_not_go_together_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig(dataset="digits", **values)
    assert words in str(caught.value)
    if "model" not in values:  # fit does not know it
        with pytest.raises(ValueError, match="halo_mode"):
            checked_options(values, make_graph())


def _not_recorded(ranks: Ranks, mode: str) -> str | None:
    return _trainer(ranks, _model("gcn"), halo_mode=mode).family.why_not_recorded  # type: ignore[no-any-return]


def test_such_steps_are_no_cuda_graphs(ranks: Any) -> None:
    for mode in ("stale", "sampled:0.5"):
        assert all(f"(halo_mode {mode})" in said for said in ranks.run(2, _not_recorded, mode))
    assert ranks.run(2, _not_recorded, "exact") == [None, None]
    assert ranks.run(1, _not_recorded, "stale") == [None]


@pytest.mark.parametrize(
    "options",
    [
        {"halo_mode": "stale"},
        {"halo_wire": "int4", "halo_feedback": True},
        {"halo_wire": "auto", "halo_target": "5%"},
        {"grad_sync": "4bit", "grad_sync_hosts": "flat", "overlap": "on"},
    ],
)
def test_one_worker_is_told_that_nothing_travels(options: dict[str, Any]) -> None:
    notes: list[str] = []
    model = GNN("gcn", NUM_FEATURES, NUM_CLASSES, hidden=4, layers=1)
    result = nugnn.fit(model, make_graph(dtype=torch.float32), epochs=1, check=False, on_note=notes.append, **options)
    given = [name if value is True else f"{name} {value}" for name, value in options.items()]
    said = [f"{each} has no effect with one worker: nothing travels" for each in given]
    assert sorted(said) == sorted(note for note in notes if "nothing travels" in note)
    assert set(said) <= set(result.notes)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["stale", "sampled:0.3"])
def test_a_run_reports_its_mode_and_goes_on(tmp_path: Path, mode: str) -> None:
    from nugnn.run import run_from_config

    how = {"dataset": "digits", "workers": 2, "shares": "0.7,0.3", "halo_mode": mode, "seed": 1}
    whole = run_from_config(TrainConfig(**how, epochs=4, out=str(tmp_path / "whole")))
    run_from_config(TrainConfig(**how, epochs=2, out=str(tmp_path / "parts")))
    parts = run_from_config(TrainConfig(**how, epochs=4, out=str(tmp_path / "parts"), resume=True))
    assert (parts["val"], parts["last_test"]) == (whole["val"], whole["last_test"])
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert files[0] == files[1]
    assert all(report["halo"]["mode"] == mode for report in whole["ranks"])
    with pytest.raises(ValueError, match=f"halo_mode was {mode}, is exact"):
        run_from_config(TrainConfig(**how | {"halo_mode": "exact"}, epochs=5, out=str(tmp_path / "parts"), resume=True))
