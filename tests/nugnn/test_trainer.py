"""The loop: flat memory, evaluation that leaves no trace, decisions equal on all ranks, exchanges counted."""

from __future__ import annotations

import copy
import gc
import sys
import tracemalloc
from typing import Any

import psutil
import pytest
import torch
from dgl.nn import GATv2Conv
from torch import Tensor, nn

from exactness import NUM_CLASSES, NUM_FEATURES, make_graph, make_parts
from nugnn.comm.groups import Ranks
from nugnn.comm.halo_handler import HaloHandler
from nugnn.comm.local_ranks import run_local_ranks
from nugnn.datasets.graph_data import GraphData
from nugnn.embedding import NodeEmbedding
from nugnn.history import Epoch
from nugnn.models import GNN
from nugnn.parameter_groups import parameter_groups
from nugnn.partition.assign import partition_nodes
from nugnn.partition.shard import build_shard
from nugnn.sample_family import SampleFamily
from nugnn.schedules import Cosine
from nugnn.shard_graph import ShardGraph
from nugnn.trainer import Trainer
from sample_cases import make_data, make_model
from trainers import graph_trainer


def _trainer(ranks: Ranks, data: GraphData, model: nn.Module, parts: Tensor | None = None, **options: Any) -> Trainer:
    parts = make_parts(data, ranks.world_size, "unequal") if parts is None else parts
    shares = [1.0] * ranks.world_size
    assignment = partition_nodes(data.num_nodes, data.src, data.dst, shares, method="given", parts=parts)
    shard = build_shard(data, assignment, ranks.rank)
    rows = {"train": shard.train_rows, "val": shard.val_rows, "test": shard.test_rows}
    return graph_trainer(copy.deepcopy(model), ShardGraph(shard, ranks), rows, seed=3, **options)


def _gnn(kind: str = "sage") -> nn.Module:
    torch.manual_seed(0)
    return GNN(kind, NUM_FEATURES, NUM_CLASSES, hidden=8, norm="batch", dropout=0.4).double()


# -- pieces that samples have too ----------------------------------------------------------------------------------


def _smoothed(ranks: Ranks) -> tuple[list[float], list[float]]:
    """Losses and rates of a fit with a schedule, groups for weight decay and label smoothing."""
    trainer = _trainer(
        ranks, make_graph(), _gnn(), schedule=Cosine(5, 2), label_smoothing=0.2,
        class_weights=torch.arange(1.0, NUM_CLASSES + 1, dtype=torch.float64),
        make_optimizer=lambda m: torch.optim.AdamW(parameter_groups(m, 0.1), lr=0.02, eps=1e-5),
    )  # fmt: skip
    rates: list[float] = []
    history = trainer.fit(4, on_epoch=lambda epoch: rates.append(trainer.optimizer.param_groups[0]["lr"]))
    return [epoch.loss for epoch in history.epochs], rates


def test_schedule_groups_and_label_smoothing_on_any_parts(ranks: Any) -> None:
    losses, rates = _smoothed(Ranks())
    assert rates == [0.02 * Cosine(5, 2)(step) for step in range(1, 5)]
    for others in ranks.run(3, _smoothed):
        assert others[0] == pytest.approx(losses, rel=1e-10)  # as in test_exactness.py
        assert others[1] == rates


# -- memory --------------------------------------------------------------------------------------------------------


def _memory(ranks: Ranks) -> dict[str, Any]:
    data = make_graph()
    trainer = _trainer(ranks, data, _gnn())
    frames = {key: value.clone() for key, value in trainer.family.graph.ndata.items()}
    columns = (set(trainer.family.graph.ndata), set(trainer.family.graph.edata))
    kept: list[Epoch] = []
    traced, blocks, resident = [], [], []
    process = psutil.Process()
    if ranks.world_size == 1:  # it makes all three times as slow; blocks are counted anyway
        tracemalloc.start()

    def note(epoch: Epoch) -> None:
        kept.append(epoch)
        if epoch.number in (5, 200):
            gc.collect()
            traced.append(tracemalloc.get_traced_memory()[0])
            blocks.append(sys.getallocatedblocks())
            resident.append(process.memory_info().rss)

    history = trainer.fit(200, on_epoch=note)
    tracemalloc.stop()
    assert len(history.epochs) == len(kept) == 200
    assert all(isinstance(value, float) for epoch in kept for value in (epoch.loss, epoch.train, epoch.val, epoch.test))
    graph = trainer.family.graph
    assert columns == (set(graph.ndata), set(graph.edata)), "the user's graph is as it was"
    assert all(torch.equal(frames[key], trainer.family.graph.ndata[key]) for key in frames)
    return {"traced": traced, "blocks": blocks, "resident": resident}


def test_api_02_memory_is_flat_over_200_epochs(ranks: Any) -> None:
    for num_parts in (1, 2):
        for memory in ranks.run(num_parts, _memory):
            # 195 more epochs keep 195 Epoch objects, in two lists: below 2 kB, and 32 of Python's blocks, each
            assert memory["traced"][1] - memory["traced"][0] <= 195 * 2048
            assert memory["blocks"][1] - memory["blocks"][0] <= 195 * 32
            assert memory["resident"][1] <= 1.01 * memory["resident"][0]


class _ReadsEarly(Trainer):
    """As on GPUs, whose host reads an epoch's loss before the last backward pass has run."""

    _reads_early = True  # type: ignore[assignment]


def _either_way(ranks: Ranks, kind: type[Trainer]) -> tuple[list[float], list[Tensor]]:
    """Losses of two epochs, of graphs in one step and of samples in several, and what they leave."""
    graphs = _trainer(ranks, make_graph(), _gnn())
    family = SampleFamily(make_model("cnn"), make_data("images", 50), ranks, sizes=(12,) * ranks.world_size, seed=3)
    trainers = [kind(each, clip_norm=1.0) for each in (graphs.family, family)]
    losses = [trainer.train_epoch() for trainer in trainers for _ in range(2)]
    losses += [epoch.loss for trainer in trainers for epoch in trainer.fit(1).epochs]
    return losses, [p.detach().clone() for trainer in trainers for p in trainer.model.parameters()]


def test_a_loss_that_is_read_early_is_the_loss(ranks: Any) -> None:
    for num_parts in (1, 3):
        late, early = (ranks.run(num_parts, _either_way, kind) for kind in (Trainer, _ReadsEarly))
        for (a_losses, a_state), (b_losses, b_state) in zip(late, early, strict=True):
            assert a_losses == b_losses
            assert all(torch.equal(a, b) for a, b in zip(a_state, b_state, strict=True))


def test_a_loss_is_known_before_the_last_backward_pass() -> None:
    trainer = _ReadsEarly(_trainer(Ranks(), make_graph(), _gnn()).family)
    known = []
    share = trainer.step([None], on_loss=lambda loss: known.append((loss, next(trainer.model.parameters()).grad)))
    assert known == [(share, None)] and next(trainer.model.parameters()).grad is not None


def _some_trained(ranks: Ranks) -> list[Tensor]:
    """What an optimizer of the last layer alone leaves; the gradients of the others are summed and clipped, too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 4), nn.Tanh(), nn.Linear(4, 5)).double()
    data, sizes = make_data("images", 30), (10,) if ranks.world_size == 1 else (6, 4)
    family = SampleFamily(model, data, ranks, sizes=sizes)
    trainer = Trainer(family, clip_norm=0.5, make_optimizer=lambda m: torch.optim.SGD(m[3].parameters(), lr=0.1))
    norms = []
    for _ in range(3):
        trainer.train_epoch()
        norms.append(torch.stack([p.grad.norm() for p in model.parameters()]))  # type: ignore[union-attr]
    return [*norms, *(p.detach().clone() for p in model.parameters())]


def test_gradients_that_no_optimizer_takes_are_those_of_one_step(ranks: Any) -> None:
    alone = _some_trained(Ranks())
    for others in ranks.run(2, _some_trained):
        for a, b in zip(alone, others, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)  # as in test_exactness.py


# -- evaluation ----------------------------------------------------------------------------------------------------


def _losses(ranks: Ranks, evaluate_every: int) -> tuple[list[float], list[Tensor]]:
    trainer = _trainer(ranks, make_graph(), _gnn())
    history = trainer.fit(12, evaluate_every=evaluate_every)
    return [epoch.loss for epoch in history.epochs], [p.detach().clone() for p in trainer.model.state_dict().values()]


def test_evaluation_changes_no_bit_of_training(ranks: Any) -> None:
    for num_parts in (1, 3):
        often, seldom = (ranks.run(num_parts, _losses, every) for every in (1, 50))
        for (a_losses, a_state), (b_losses, b_state) in zip(often, seldom, strict=True):
            assert a_losses == b_losses
            assert all(torch.equal(a, b) for a, b in zip(a_state, b_state, strict=True))


@pytest.mark.parametrize("training", [True, False])
def test_predict_leaves_mode_counters_and_state(training: bool) -> None:
    trainer = _trainer(Ranks(), make_graph(), _gnn())
    trainer.train_epoch()
    trainer.model.train(training)
    modes = [module.training for module in trainer.model.modules()]
    state = copy.deepcopy(trainer.model.state_dict())
    generator, steps = torch.get_rng_state(), trainer.num_steps
    first = trainer.family.predict(trainer.num_steps)
    trainer.evaluate()
    assert torch.equal(trainer.family.predict(trainer.num_steps), first) and not first.requires_grad
    assert [module.training for module in trainer.model.modules()] == modes and trainer.num_steps == steps
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(state[key], value) for key, value in trainer.model.state_dict().items())
    assert all(p.grad is not None for p in trainer.model.parameters())


def test_predict_keeps_parts_of_the_model_that_were_frozen_in_evaluation_mode() -> None:
    trainer = _trainer(Ranks(), make_graph(), _gnn())
    trainer.model.train()
    frozen = next(m for m in trainer.model.modules() if isinstance(m, nn.BatchNorm1d))
    frozen.eval()
    trainer.family.predict(trainer.num_steps)
    assert not frozen.training and trainer.model.training


def _predictions(ranks: Ranks) -> Tensor:
    data = make_graph()

    class Number(nn.Module):
        """Logits that tell the node's number in the original order."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

        def forward(self, graph: Any, x: Tensor) -> Tensor:
            return graph.global_node_ids[:, None].double().expand(-1, NUM_CLASSES) * self.scale

    return _trainer(ranks, data, Number()).predict_all()


def test_predictions_come_in_the_original_order(ranks: Any) -> None:
    for logits in ranks.run(3, _predictions):
        assert torch.equal(logits[:, 0], torch.arange(61, dtype=torch.float64))


# -- early stopping ------------------------------------------------------------------------------------------------


def _stopped(ranks: Ranks, how: str) -> tuple[int, int, list[float]]:
    trainer = _trainer(ranks, make_graph(), _gnn(), make_parts(make_graph(), ranks.world_size, how))
    history = trainer.fit(60, patience=4)
    assert history.best is not None
    return len(history.epochs), history.best.number, [epoch.val for epoch in history.epochs]


@pytest.mark.parametrize("how", ["unequal", "no_train"])
def test_all_ranks_stop_at_the_same_epoch_as_one(ranks: Any, how: str) -> None:
    ((epochs, best, values),) = ranks.run(1, _stopped, "random")
    assert epochs < 60 and epochs == best + 4 and values[best - 1] == max(values)
    for result in ranks.run(3, _stopped, how):
        assert result == (epochs, best, values)


# -- errors --------------------------------------------------------------------------------------------------------


class _FailsOn(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer, self.rank = nn.Linear(NUM_FEATURES, NUM_CLASSES).double(), rank

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        if graph.ranks.rank == self.rank:
            raise ZeroDivisionError("only on this rank")
        return self.layer(x)


def test_an_error_on_one_rank_is_the_error_that_shows() -> None:
    with pytest.raises(ZeroDivisionError, match="only on this rank"):
        run_local_ranks(3, lambda ranks: _trainer(ranks, make_graph(), _FailsOn(1)).train_epoch(), timeout_seconds=30)


def _no_weights(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1)], lr=0.1)


def test_a_model_with_other_rows_is_refused_in_words() -> None:
    class Half(nn.Module):
        def forward(self, graph: Any, x: Tensor) -> Tensor:
            return x[::2]

    with pytest.raises(ValueError, match=r"shape \(31, 6\).*one row for each of the 61 nodes"):
        _trainer(Ranks(), make_graph(), nn.Sequential(Half())[0], make_optimizer=_no_weights).family.net.forward()


def test_halo_05_features_of_width_0_are_refused() -> None:
    data = make_graph()
    object.__setattr__(data, "features", torch.zeros(data.num_nodes, 0))
    with pytest.raises(ValueError, match=r"features of shape \(61, 0\) hold no value"):
        _trainer(Ranks(), data, _gnn())


def test_a_loss_that_is_not_finite_ends_training_with_the_epoch() -> None:
    trainer = _trainer(
        Ranks(), make_graph(), _gnn(), make_optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1e200)
    )
    with pytest.raises(FloatingPointError, match=r"epoch \d+; lower the learning rate"):
        trainer.fit(10)


# -- exchanges -----------------------------------------------------------------------------------------------------


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = GATv2Conv(NUM_FEATURES, 4, 2, allow_zero_in_degree=True)
        self.second = GATv2Conv(8, NUM_CLASSES, 1, allow_zero_in_degree=True)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.second(graph, self.first(graph, x).flatten(1).relu()).mean(1)


def _exchanges(ranks: Ranks, model: nn.Module, **options: Any) -> tuple[int, int, int]:
    trainer = _trainer(ranks, make_graph(), model, **options)
    handler = trainer.family.net.interceptor.find(HaloHandler)
    trainer.train_epoch()
    first, rounds = handler.num_exchanges, ranks.clock.halo_rounds
    trainer.train_epoch()
    second = handler.num_exchanges - first
    trainer.family.predict(trainer.num_steps)
    return second, ranks.clock.halo_rounds - rounds, handler.num_exchanges - first - second


def test_a_layer_sends_a_tensor_once(ranks: Any) -> None:
    torch.manual_seed(0)
    # GATv2 reads projected sources twice (scores, then sums): one exchange forward and one backward for each layer
    for result in ranks.run(3, _exchanges, _Attention().double()):
        assert result == (2, 2 * 2 + 2, 2)


def test_input_features_need_no_gradient_and_send_none(ranks: Any) -> None:
    torch.manual_seed(0)
    model = GNN("gin", NUM_FEATURES, NUM_CLASSES, hidden=8, layers=2).double()
    # the first layer aggregates the features themselves: nothing comes back for them
    for second, rounds, predicted in ranks.run(3, _exchanges, model, recompute_inputs=True):
        assert (second, predicted) == (2, 2)
        assert rounds == 2 + 1 + 2  # forward, backward of the second layer, prediction
    # what was aggregated of the features in the first epoch is kept: they do not travel again
    for second, rounds, predicted in ranks.run(3, _exchanges, model):
        assert (second, predicted) == (1, 1)
        assert rounds == 1 + 1 + 1


# -- optimizers ----------------------------------------------------------------------------------------------------


def _start(ranks: Ranks) -> list[Tensor]:
    torch.manual_seed(ranks.rank)  # a user who forgot the seed
    model = nn.Sequential(nn.Linear(3, 3), NodeEmbedding(61, NUM_FEATURES, seed=1))

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.rows = nn.Linear(NUM_FEATURES, NUM_CLASSES), model[1]

        def forward(self, graph: Any, x: Tensor) -> Tensor:
            return self.linear(self.rows(graph))

    trainer = _trainer(ranks, make_graph(dtype=torch.float32), Both())
    trainer.train_epoch()
    return [p.detach().clone() for p in trainer._replicated]


def test_replicas_start_and_stay_equal(ranks: Any) -> None:
    first, *others = ranks.run(3, _start)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
