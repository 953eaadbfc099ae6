"""What is kept for backward changes no bit: layers that run again, counters, buffers, exchanges, memory, options."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import dgl.function as fn
import pytest
import torch
from dgl import nn as dgl_nn
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import nugnn
from exactness import NUM_CLASSES, NUM_FEATURES, make_graph
from nugnn import cli, recognition
from nugnn import graph_family as family_module
from nugnn.activations import ACTIVATIONS, Offloaded
from nugnn.comm.gradients import sum_gradients
from nugnn.comm.groups import Ranks
from nugnn.comm.halo_handler import HaloHandler
from nugnn.config import TrainConfig
from nugnn.datasets.graph_data import GraphData
from nugnn.kernels.module_state import ModuleState
from nugnn.model_on_shard import ModelOnShard
from nugnn.models import GNN, WithNodeEmbedding
from nugnn.offload import HostMemory
from nugnn.options import ConfigError, option_spec
from nugnn.partition.assign import partition_nodes
from nugnn.partition.shard import build_shard
from nugnn.seam import install
from nugnn.shard_graph import ShardGraph
from nugnn.trainer import Trainer
from trainers import fit_rank, graph_trainer

NUM_STEPS = 4


def _shard(ranks: Ranks, data: GraphData) -> Any:
    """Parts of consecutive nodes: of three, only the first has training nodes."""
    install()
    parts = torch.arange(data.num_nodes) * ranks.world_size // data.num_nodes
    shares = [1.0] * ranks.world_size
    given = partition_nodes(data.num_nodes, data.src, data.dst, shares, method="given", parts=parts)
    return build_shard(data, given, ranks.rank)


def _trainer(ranks: Ranks, model: nn.Module, *, features: bool = True, **options: Any) -> Trainer:
    shard = _shard(ranks, make_graph(features=features))
    rows = {"train": shard.train_rows, "val": shard.val_rows, "test": shard.test_rows}
    return graph_trainer(copy.deepcopy(model), ShardGraph(shard, ranks), rows, seed=3, **options)


# -- models --------------------------------------------------------------------------------------------------------


class _Block(nn.Module):
    """Message passing of one's own between DGL's: user functions, norm, dropout of both kinds."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = dgl_nn.SAGEConv(width, out, "pool", 0.3), nn.BatchNorm1d(out), nn.Dropout(0.3)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        h = self.drop(F.relu(self.norm(self.conv(graph, x))))
        with graph.local_scope():
            graph.ndata["h"] = h
            graph.update_all(
                lambda edges: {"m": edges.src["h"] * torch.sigmoid(edges.dst["h"])},
                lambda nodes: {"out": F.dropout(nodes.mailbox["m"].sum(1), 0.2, self.training)},
            )
            return F.dropout(graph.ndata["out"], 0.2, self.training) + h  # type: ignore[no-any-return]


class _Encoder(nn.Module):
    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(a, b) for a, b in pairwise(widths))

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(graph, x)
        return x


class _Wrapped(nn.Module):
    """Layers below a module that gets the graph, too."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = _Encoder([NUM_FEATURES, 5, 5]), nn.Linear(5, NUM_CLASSES)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.head(F.dropout(self.encoder(graph, x), 0.3, self.training))  # type: ignore[no-any-return]


class _Tamed(nn.Linear):
    """Divided by an estimate of the weight's norm that gets better with every call, as spectral normalisation is."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out)
        self.register_buffer("u", torch.ones(out))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.u.copy_(F.normalize(self.weight @ F.normalize(self.weight.t() @ self.u, dim=0), dim=0))
        return F.linear(x, self.weight / (self.u.clone() @ self.weight).norm(), self.bias)


class _Shared(nn.Module):
    """One layer called on the same tensor twice, with batch norm and a norm of the weights that move at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.first = _Tamed(NUM_FEATURES, 8)
        self.layer = _Normed(8)
        self.head = dgl_nn.GraphConv(8, NUM_CLASSES, allow_zero_in_degree=True)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.head(graph, self.layer(graph=graph, x=h) + self.layer(graph, h))  # type: ignore[no-any-return]


class _Normed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = dgl_nn.GATConv(width, width // 2, 2, 0.2, 0.2, allow_zero_in_degree=True)
        self.linear, self.norm = _Tamed(width, width), nn.BatchNorm1d(width)
        self.register_buffer("num_calls", torch.zeros(()))
        self.calls = 0
        self.last: Tensor | None = None

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        self.calls += 1
        self.num_calls = self.num_calls + 1
        h = F.dropout(self.conv(graph, x).flatten(1), 0.1 * self.calls % 0.7, self.training)
        self.last = self.norm(self.linear(h))
        return self.last


class _ThroughTheGraph(nn.Module):
    """Layers that hand their results on in the graph's own data."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_InPlace(a, b) for a, b in ((NUM_FEATURES, 7), (7, 6), (6, NUM_CLASSES)))

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        graph.ndata["h"] = x
        for layer in self.layers:
            layer(graph)
        return graph.ndata.pop("h")  # type: ignore[no-any-return]


class _InPlace(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out)

    def forward(self, graph: Any) -> None:
        graph.update_all(fn.copy_u("h", "m"), fn.mean("m", "h"))
        graph.ndata["h"] = F.dropout(torch.tanh(self.linear(graph.ndata["h"])), 0.3, self.training)


class _OwnCheckpoint(nn.Module):
    """A layer that checkpoints its own convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _Own(NUM_FEATURES, 6), _Own(6, NUM_CLASSES)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.second(graph, self.first(graph, x))  # type: ignore[no-any-return]


class _Own(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.conv, self.norm = dgl_nn.SAGEConv(width, out, "pool", 0.4), nn.BatchNorm1d(out)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        h = checkpoint(self.conv, graph, x, use_reentrant=False)
        return F.dropout(self.norm(h), 0.3, self.training)


class _Reversible(nn.Module):
    """Layers of DGL's that save memory in a way of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, 8)
        self.layers = nn.ModuleList(dgl_nn.GroupRevRes(_Inner(4), 2) for _ in range(2))
        self.last = dgl_nn.GraphConv(8, NUM_CLASSES, allow_zero_in_degree=True)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        h = self.first(x)
        for layer in self.layers:
            h = layer(graph, h)
        return self.last(graph, h)  # type: ignore[no-any-return]


class _Inner(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = dgl_nn.GraphConv(width, width, allow_zero_in_degree=True)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return F.dropout(self.norm(self.conv(graph, x)), 0.3, self.training)


class _Branching(nn.Module):
    """One tensor is the source of several sums, inside one layer and in two."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, 8)
        self.branches = nn.ModuleList(_Branch(8) for _ in range(2))

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        h = torch.sin(self.first(x))
        return sum(branch(graph, h) for branch in self.branches)  # type: ignore[return-value]


class _Branch(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(2 * width, NUM_CLASSES), nn.Dropout(0.3)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        with graph.local_scope():
            graph.ndata["h"] = x
            graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "sum"))
            graph.update_all(fn.copy_u("h", "m"), fn.mean("m", "mean"))
            return self.drop(self.linear(torch.tanh(torch.cat([graph.ndata["sum"], graph.ndata["mean"]], 1))))  # type: ignore[no-any-return]


def _gnn(kind: str, **options: Any) -> nn.Module:
    return GNN(kind, NUM_FEATURES, NUM_CLASSES, hidden=8, layers=3, norm="batch", dropout=0.4, **options)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gcn": lambda: _gnn("gcn", residual=True),
    "sage": lambda: _gnn("sage", input_dropout=0.2),
    "sage lstm": lambda: _gnn("sage", aggregator="lstm"),
    "gat": lambda: _gnn("gat", heads=2, attention_dropout=0.3),
    "gatv2": lambda: _gnn("gatv2", heads=2, attention_dropout=0.3),
    "gin": lambda: _gnn("gin"),
    "embedding": lambda: WithNodeEmbedding(61, NUM_FEATURES, _gnn("gin"), seed=1),
    "layers in an encoder": _Wrapped,
    "a layer called twice": _Shared,
    "data in the graph": _ThroughTheGraph,
    "a checkpoint of its own": _OwnCheckpoint,
    "reversible layers": _Reversible,
    "branches": _Branching,
}


def _model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()


# -- the same bits -------------------------------------------------------------------------------------------------


def _trained(ranks: Ranks, model: nn.Module, **options: Any) -> dict[str, Any]:
    trainer = _trainer(ranks, model, **options)
    torch.manual_seed(5)
    values: dict[str, Any] = {"losses": []}
    for step in range(NUM_STEPS):
        values["losses"].append(trainer.train_epoch())
        values |= {f"gradient {step} of {n}": p.grad.clone() for n, p in trainer.model.named_parameters()}
        if step == 1:
            values["logits"] = trainer.family.predict(trainer.num_steps)  # on the way, in evaluation mode
    values |= {f"state {name}": value.clone() for name, value in trainer.model.state_dict().items()}
    values |= {f"calls of {name}": m.calls for name, m in trainer.model.named_modules() if isinstance(m, _Normed)}
    values["random numbers"] = torch.get_rng_state()
    return values


def _differences(ranks: Ranks, model: nn.Module, activations: str, **options: Any) -> list[str]:
    kept = _trained(ranks, model, **options)
    other = _trained(ranks, model, activations=activations, **options)
    return _unequal(kept, other)


def _unequal(kept: dict[str, Any], other: dict[str, Any]) -> list[str]:
    assert kept.keys() == other.keys() and len(kept["losses"]) == NUM_STEPS
    return [
        name
        for name, value in kept.items()
        if not (torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name])
    ]


@pytest.mark.filterwarnings("ignore:TypedStorage")  # DGL's
@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(
            *(name, size),
            marks=pytest.mark.slow if size == 2 and name not in ("gcn", "a layer called twice", "branches") else (),
        )
        for name in MODELS
        for size in (1, 2, 3)
    ],
)
def test_layers_that_run_again_change_no_bit(ranks: Any, name: str, size: int) -> None:
    features = name != "embedding"
    for wrong in ranks.run(size, _differences, _model(name), "recompute", features=features):
        assert not wrong


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, 3) for name in ("gcn", "sage", "gin", "data in the graph", "a checkpoint of its own", "branches")),
        *((name, 2) for name in ("gcn", "branches")),
        *(
            pytest.param(name, 2, marks=pytest.mark.slow)
            for name in ("sage", "gin", "data in the graph", "a checkpoint of its own")
        ),
    ],
)
def test_layers_whose_sums_overlap_with_the_exchange_change_no_bit(ranks: Any, name: str, size: int) -> None:
    for wrong in ranks.run(size, _differences, _model(name), "recompute", overlap="on"):
        assert not wrong


def test_torch_s_own_draws_are_repeated() -> None:
    """On one rank a dropout of whole channels is drawn by torch."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = dgl_nn.GraphConv(NUM_FEATURES, NUM_CLASSES, allow_zero_in_degree=True)

        def forward(self, graph: Any, x: Tensor) -> Tensor:
            return F.alpha_dropout(torch.tanh(self.conv(graph, x)), 0.3, self.training)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()

        def forward(self, graph: Any, x: Tensor) -> Tensor:
            return torch.tanh(self.layer(graph, x)) + torch.rand(())

    torch.manual_seed(0)
    assert not _differences(Ranks(), Model().double(), "recompute")


@pytest.mark.parametrize("name", ["gcn", "sage", "gat", "gatv2"])
def test_layers_that_are_taken_over_stay_so(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(recognition, "FUSED_DEVICES", {"cpu"})
    assert not _differences(Ranks(), _model(name), "recompute")


@pytest.mark.parametrize("precision", ["bf16", "amp"])
def test_other_precisions_change_no_bit(precision: str) -> None:
    torch.manual_seed(0)
    model = GNN("sage", NUM_FEATURES, NUM_CLASSES, hidden=8, layers=3, norm="batch", dropout=0.4)
    assert not _differences(Ranks(), model, "recompute", precision=precision)


# -- exchanges -----------------------------------------------------------------------------------------------------


def _exchanges(ranks: Ranks, model: nn.Module, activations: str) -> list[tuple[int, int]]:
    """Exchanges forward, and all with those of backward, in each step."""
    trainer = _trainer(ranks, model, activations=activations)
    handler = trainer.family.net.interceptor.find(HaloHandler)
    counts = [(0, 0)]
    for _ in range(3):
        trainer.train_epoch()
        counts.append((handler.num_exchanges, ranks.clock.halo_rounds))
    return [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(counts[1:])]


def test_rows_that_came_for_a_layer_s_input_do_not_travel_again(ranks: Any) -> None:
    kept = ranks.run(3, _exchanges, _model("gin"), "keep")
    again = ranks.run(3, _exchanges, _model("gin"), "recompute")
    assert kept == again == [[(2, 4)] * 2] * 3  # layers 1 and 2, forward and backward; layer 0's aggregate is kept


def test_rows_made_inside_a_layer_travel_again_on_every_rank(ranks: Any) -> None:
    torch.manual_seed(0)
    model = GNN("gatv2", NUM_FEATURES, NUM_CLASSES, hidden=8, heads=2, layers=3, norm="batch").double()
    kept = ranks.run(3, _exchanges, model, "keep")
    again = ranks.run(3, _exchanges, model, "recompute")
    assert kept == [[(3, 6)] * 2] * 3
    assert again == [[(6, 9)] * 2] * 3  # the projected rows of three layers, once more


class _SavesOn(torch.autograd.Function):
    """``x``, saved for backward on some ranks alone: as where one has another device, and another kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, saves: bool) -> Tensor:
        ctx.save_for_backward(*([x] if saves else []))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        _ = ctx.saved_tensors
        return grads[0], None


class _Uneven(nn.Module):
    """Saves nothing but what the ranks in ``first`` and ``last`` do, before and after its exchanges."""

    def __init__(self, first: set[int], last: set[int], sums: bool) -> None:
        super().__init__()
        self.first, self.last, self.sums = first, last, sums

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        rank = graph.ranks.rank
        h = nugnn.as_node_rows(_SavesOn.apply(x + 1, rank in self.first), graph)
        with graph.local_scope():
            for _ in range(2):
                graph.ndata["h"] = h
                graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "h"))
                h = graph.ndata["h"] - nugnn.global_sum(h, graph) if self.sums else graph.ndata["h"] + h
            return _SavesOn.apply(h, rank in self.last)  # type: ignore[no-any-return]


class _Layers(nn.Module):
    def __init__(self, *layers: nn.Module, own: bool) -> None:
        super().__init__()
        self.layers, self.own = nn.ModuleList(layers), own
        self.linear = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        h = nugnn.as_node_rows(x.clone().requires_grad_(), graph)
        for layer in self.layers:
            h = checkpoint(layer, graph, h, use_reentrant=False) if self.own else layer(graph, h)
        return self.linear(h)  # type: ignore[no-any-return]


@pytest.mark.parametrize("own", [False, True])
def test_ranks_that_save_different_tensors_exchange_in_one_order(ranks: Any, own: bool) -> None:
    for first, last in (({0}, {1}), ({1}, set()), (set(), {0, 2}), (set(), set())):
        for sums in (False, True):
            model = _Layers(_Uneven(first, last, sums), _Uneven(last, first, sums), own=own).double()
            if own:
                assert len(ranks.run(3, _trained, model)) == 3
            else:
                for wrong in ranks.run(3, _differences, model, "recompute"):
                    assert not wrong


# -- torch's own checkpoint in a loop of one's own ------------------------------------------------------------------


class _Checkpointed(nn.Module):
    """Convolutions under torch's checkpoint, or not; the last one draws again after the first backward."""

    def __init__(self, again: bool, reentrant: bool) -> None:
        super().__init__()
        self.again, self.reentrant = again, reentrant
        self.convs = nn.ModuleList(_Normed2(a, b) for a, b in ((NUM_FEATURES, 8), (8, 8), (8, NUM_CLASSES)))

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = checkpoint(conv, graph, x, use_reentrant=self.reentrant) if self.again else conv(graph, x)
        return x


class _Normed2(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.conv = dgl_nn.GATConv(width, out // 2, 2, 0.2, 0.2, allow_zero_in_degree=True)
        self.norm = nn.BatchNorm1d(out)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return F.dropout(self.norm(self.conv(graph, x).flatten(1)), 0.3, self.training)


def _own_loop(ranks: Ranks, again: bool, reentrant: bool = False) -> dict[str, Tensor]:
    graph = ShardGraph(_shard(ranks, make_graph()), ranks)
    torch.manual_seed(0)
    model = _Checkpointed(again, reentrant).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    interceptor = nugnn.intercept(model, graph, seed=2)
    values = {}
    for number in range(3):
        x = graph.ndata["feat"].clone().requires_grad_(reentrant)  # the reentrant one asks for it
        nugnn.as_node_rows(x, graph)
        with interceptor.step(number):
            optimizer.zero_grad()
            out = model(graph, x)
            out.square().sum().backward()
            # what runs after a backward is counted as if no layer had run again
            mask = F.dropout(torch.ones_like(out).mul(nugnn.as_node_rows(torch.ones_like(out), graph)), 0.5)
            values[f"later mask {number}"] = mask
            second = model(graph, nugnn.as_node_rows(x.clone(), graph))
            second.cos().sum().backward()
        sum_gradients(list(model.parameters()), ranks)
        optimizer.step()
        values |= {f"{number} {name}": value.clone() for name, value in model.state_dict().items()}
        values |= {f"{number} output": out.detach(), f"{number} second": second.detach()}
    return values


@pytest.mark.parametrize("size", [1, 3])
def test_torch_s_checkpoint_in_a_loop_of_one_s_own_changes_no_bit(ranks: Any, size: int) -> None:
    kept, again = (ranks.run(size, _own_loop, which) for which in (False, True))
    for a, b in zip(kept, again, strict=True):
        assert a.keys() == b.keys()
        assert not [name for name in a if not torch.equal(a[name], b[name])]


def test_a_layer_that_stops_half_way_leaves_nothing_for_the_next_one(ranks: Any) -> None:
    for left in ranks.run(2, _exchanges_left):
        assert left == []


def _exchanges_left(ranks: Ranks) -> list[Tensor]:
    class Layer(nn.Module):
        def forward(self, graph: Any, x: Tensor) -> Tensor:
            with graph.local_scope():
                graph.ndata["h"] = torch.sin(x)
                # the product saves its operands, and nothing after it saves anything
                graph.update_all(lambda edges: {"m": edges.src["h"] * edges.dst["h"]}, fn.sum("m", "out"))
                return graph.ndata["out"]  # type: ignore[no-any-return]

    graph, layer = ShardGraph(_shard(ranks, make_graph()), ranks), Layer()
    x = nugnn.as_node_rows(graph.ndata["feat"].clone().requires_grad_(), graph)
    with nugnn.intercept(layer, graph).step(0):
        checkpoint(layer, graph, x, use_reentrant=False).sum().backward()
    return graph.take_exchanges()


# -- state ---------------------------------------------------------------------------------------------------------


def test_a_buffer_that_others_change_before_backward_is_refused() -> None:
    layer = nn.Linear(2, 2)
    layer.register_buffer("large", torch.zeros(1 << 19))
    state = ModuleState(layer)
    state.forget_unchanged()
    layer.large.add_(1)
    with pytest.raises(RuntimeError, match="'large' of Linear was changed"), state.restored():
        pass
    assert layer.large[0] == 1


def _plain(model: nn.Module) -> bool:
    hooks = (nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks)
    return not any(hooks) and not any("forward" in vars(module) for module in model.modules())


def test_nothing_of_it_stays_on_the_model() -> None:
    forwards = {cls: cls.forward for cls in (_Block, _Encoder, dgl_nn.SAGEConv)}
    trainer = _trainer(Ranks(), _model("layers in an encoder"), activations="recompute")
    trainer.train_epoch()
    assert _plain(trainer.model)
    trainer.family.predict(trainer.num_steps)

    def interrupt(_: Any) -> Tensor:
        raise KeyboardInterrupt

    hook = trainer.model.encoder.blocks[0].norm.register_full_backward_hook(lambda *_: interrupt(None))
    with pytest.raises(KeyboardInterrupt):
        trainer.train_epoch()  # in the midst of backward, between layers that run again
    hook.remove()
    assert _plain(trainer.model)
    trainer._regularizer = interrupt
    with pytest.raises(KeyboardInterrupt):
        trainer.train_epoch()
    assert _plain(trainer.model) and all(cls.forward is forward for cls, forward in forwards.items())
    trainer._regularizer = None
    assert trainer.train_epoch() > 0
    copy.deepcopy(trainer.model)


def test_a_forward_of_the_model_s_own_instance_comes_back() -> None:
    model = _gnn("sage").double()
    calls = []
    plain = model.layers[0].forward
    own = lambda *args: calls.append(1) or plain(*args)  # noqa: E731
    trainer = _trainer(Ranks(), model, activations="recompute")
    trainer.model.layers[0].forward = own
    trainer.train_epoch()
    assert trainer.model.layers[0].forward is own and calls


# -- memory --------------------------------------------------------------------------------------------------------


class _Peak(TorchDispatchMode):
    """The largest number of bytes in storages that operators made and somebody still holds."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, int] = {}
        self.bytes = self.most_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor) and x.layout is torch.strided:
                self._note(x.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._live:
            return
        self._live[key] = storage.nbytes()
        self.bytes += storage.nbytes()
        self.most_bytes = max(self.most_bytes, self.bytes)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.bytes -= self._live.pop(key, 0)


class _Deep(nn.Module):
    """``num_layers`` blocks of equal width: each saves several tensors of the size of its input."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_DeepBlock(8) for _ in range(num_layers))

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(graph, x)
        return x


class _DeepBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = dgl_nn.SAGEConv(width, width, "mean"), nn.LayerNorm(width)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(self.norm(self.conv(graph, x))), 0.3, self.training)


def _deep_trainer(num_layers: int, activations: str) -> Trainer:
    generator = torch.Generator().manual_seed(0)
    num_nodes = 4096
    ends = torch.randint(0, num_nodes, (2, 2 * num_nodes), generator=generator)
    x = torch.randn(num_nodes, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 8, (num_nodes,), generator=generator)
    data = GraphData(
        name="deep",
        num_nodes=num_nodes,
        src=ends[0],
        dst=ends[1],
        features=x,
        labels=labels,
        num_classes=8,
        train_nodes=torch.arange(num_nodes),
        val_nodes=torch.arange(0),
        test_nodes=torch.arange(0),
    )
    shard = _shard(Ranks(), data)
    model = _Deep(num_layers).double()
    sgd = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)  # noqa: E731
    rows = {"train": shard.train_rows}
    return graph_trainer(model, ShardGraph(shard), rows, make_optimizer=sgd, activations=activations)


def _peak_bytes(num_layers: int, activations: str) -> int:
    trainer = _deep_trainer(num_layers, activations)
    trainer.train_epoch()  # what is made once, and at the first step's every level
    with _Peak() as peak:
        trainer.train_epoch()
    return peak.most_bytes


def test_a_further_layer_adds_its_input_alone() -> None:
    one_tensor = 4096 * 8 * 8
    # gradients of a layer: two matrices of 8 x 8, and less than as much again of vectors; counters of the step
    small = 4 * 8 * 8 * 8
    kept = [_peak_bytes(layers, "keep") for layers in (4, 12)]
    again = [_peak_bytes(layers, "recompute") for layers in (4, 12)]
    assert again[1] - again[0] <= 8 * (one_tensor + small)
    # what each block saves: its input, the sum over neighbours, the norm's input, the hyperbolic tangent
    assert kept[1] - kept[0] >= 8 * 3 * one_tensor
    assert again[1] <= kept[1] / 2


# -- options -------------------------------------------------------------------------------------------------------


def test_the_command_line_knows_the_same_choices() -> None:
    field = TrainConfig.__dataclass_fields__["activations"]
    assert option_spec(field).choices == ACTIVATIONS


def test_unknown_choices_are_refused_with_a_hint() -> None:
    model, data = _model("gcn"), make_graph()
    with pytest.raises(ValueError, match=r"'recompte' is not known .did you mean 'recompute'..; choose one of keep"):
        nugnn.fit(model, data, activations="recompte")
    with pytest.raises(TypeError, match="did you mean 'activations'"):
        nugnn.fit(model, data, activation="recompute")
    with pytest.raises(ConfigError, match="--activations checkpoint is not allowed; allowed: keep, recompute"):
        TrainConfig(dataset="digits", activations="checkpoint")
    with pytest.raises(ValueError, match="'all' is not known"):
        _trainer(Ranks(), model, activations="all")


def test_a_model_without_layers_is_refused() -> None:
    trainer = _trainer(Ranks(), dgl_nn.SAGEConv(NUM_FEATURES, NUM_CLASSES, "mean").double(), activations="recompute")
    with pytest.raises(ValueError, match=r"nothing below the model is called with the graph.* use keep"):
        trainer.train_epoch()


def test_offload_without_a_gpu_is_refused() -> None:
    model, data = _model("gcn"), make_graph()
    for device in ("cpu", *(() if torch.cuda.is_available() else ("auto",))):
        with pytest.raises(ValueError, match="computes on the CPU, where it is already; use recompute"):
            nugnn.fit(model, data, activations="offload", device=device, check=False)
    with pytest.raises(ConfigError, match="--activations offload is not allowed; allowed: keep, recompute: with"):
        TrainConfig(dataset="digits", activations="offload", device="cpu,cpu", workers=2)
    TrainConfig(dataset="digits", activations="offload", device="cuda:0,cpu", workers=2)
    with pytest.raises(ValueError, match="on the CPU"):
        _trainer(Ranks(), model, activations="offload")


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_that_is_resumed_with_the_other_choice_ends_the_same(tmp_path: Any, workers: int) -> None:
    model, data = _gnn("gat", heads=2, attention_dropout=0.3).double(), make_graph()
    how: dict[str, Any] = {"workers": workers, "device": "cpu", "check": False, "checkpoint_folder": tmp_path}
    nugnn.fit(model, data, epochs=3, activations="recompute", **how)
    resumed = nugnn.fit(model, data, epochs=6, activations="keep", resume=True, **how)
    del how["checkpoint_folder"]
    straight = nugnn.fit(model, data, epochs=6, activations="recompute", **how)
    assert torch.equal(resumed.logits, straight.logits)
    assert [epoch.loss for epoch in resumed.history] == [epoch.loss for epoch in straight.history]


def test_ranks_that_are_resumed_with_the_other_choice_end_the_same(ranks: Any, tmp_path: Any) -> None:
    model, data = _gnn("gat", heads=2, attention_dropout=0.3).double(), make_graph()
    how: dict[str, Any] = {"epochs": 6, "checkpoint_folder": tmp_path}
    ranks.run(2, fit_rank, model, data, [0.6, 0.4], activations="recompute", **how | {"epochs": 3})
    resumed = ranks.run(2, fit_rank, model, data, [0.6, 0.4], activations="keep", resume=True, **how)[0]
    straight = ranks.run(2, fit_rank, model, data, [0.6, 0.4], activations="recompute", epochs=6)[0]
    assert torch.equal(resumed["logits"], straight["logits"])
    assert [epoch["loss"] for epoch in resumed["epochs"]] == [epoch["loss"] for epoch in straight["epochs"]]


def test_the_command_line_refuses_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", "--dataset", "digits", "--device", "cpu", "--activations", "offload"])
    said = capsys.readouterr().err
    assert caught.value.code == 2 and said.count("\n") == 1 and "in the host's memory already" in said


def test_the_run_folder_says_what_was_kept(tmp_path: Any) -> None:
    line = f"train --dataset digits --epochs 2 --device cpu --activations recompute --out {tmp_path}/run"
    with pytest.raises(SystemExit) as caught:
        cli.main(line.split())
    assert not caught.value.code and "activations: recompute" in (tmp_path / "run" / "config.yaml").read_text()


# -- in the host's memory: on the CPU the same steps copy from memory to memory --------------------------------------


def _offloaded(ranks: Ranks, model: nn.Module, **options: Any) -> list[str]:
    kept = _trained(ranks, model, **options)
    moved: list[HostMemory] = []

    def make(_: str, net: ModelOnShard) -> Offloaded:
        activations = Offloaded(net, least_bytes=256)
        moved.append(activations.host)
        return activations

    plain, family_module.make_activations = family_module.make_activations, make
    try:
        other = _trained(ranks, model, activations="offload", **options)
    finally:
        family_module.make_activations = plain
    assert moved[0].moved_bytes > 0
    return _unequal(kept, other)


@pytest.mark.filterwarnings("ignore:TypedStorage")
@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, 1) for name in MODELS),
        # exchanges save the same tensors for every convolution: over ranks one of each kind of module
        *((name, 3) for name in ("gcn", "gat", "embedding", "a layer called twice", "data in the graph", "branches")),
        *(
            pytest.param(name, 3, marks=pytest.mark.slow)
            for name in ("sage", "sage lstm", "gatv2", "gin", "layers in an encoder", "a checkpoint of its own")
        ),
        pytest.param("reversible layers", 3, marks=pytest.mark.slow),
    ],
)
def test_tensors_that_wait_on_the_host_change_no_bit(ranks: Any, name: str, size: int) -> None:
    for wrong in ranks.run(size, _offloaded, _model(name), features=name != "embedding"):
        assert not wrong


def test_half_precision_waits_on_the_host_without_its_weights() -> None:
    torch.manual_seed(0)
    model = GNN("sage", NUM_FEATURES, NUM_CLASSES, hidden=8, layers=3, norm="layer", dropout=0.4)
    assert not _offloaded(Ranks(), model, precision="bf16")


def _packed(forward: Callable[[], Tensor], resident: list[Tensor], least_bytes: int = 1) -> tuple[HostMemory, Tensor]:
    host = HostMemory(torch.device("cpu"), lambda: resident, least_bytes=least_bytes)
    with host.saving():
        out = forward()
    return host, out


def test_the_same_bytes_move_once_and_come_back_as_they_lay() -> None:
    base = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    got: list[Tensor] = []

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *views: Tensor) -> Tensor:
            ctx.save_for_backward(*views)
            return views[0].sum()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
            got.extend(ctx.saved_tensors)
            return (None,) * 5

    h = base * 2
    views = (h, h.t(), h[1:4, ::3], h[0].expand(5, 8), h[2:, 4:])
    expected = [(v.clone(), v.stride()) for v in views]
    host, out = _packed(lambda: Saves.apply(*views), [])
    # h and its transpose; from h[1, 0] to h[3, 6]; a row; from h[2, 4] to the end
    assert host.moved_bytes == 8 * (48 + 23 + 8 + 28)
    with torch.no_grad():
        h.zero_()  # what waits is what was saved
    out.backward()
    for x, (values, strides) in zip(got, expected, strict=True):
        assert torch.equal(x, values) and x.stride() == strides
    assert got[0].data_ptr() == got[1].data_ptr(), "one copy comes back for both"


def test_what_was_changed_in_between_is_saved_again() -> None:
    x = torch.ones(8, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        factor = torch.full((8,), 2.0, dtype=torch.float64)

    def forward() -> Tensor:
        first = x * factor
        factor.add_(1)
        return (first + x * factor).sum()

    host, out = _packed(forward, [x])
    assert host.moved_bytes == 2 * 64
    out.backward()
    assert torch.equal(x.grad, torch.full_like(x, 5.0))


def test_small_and_resident_tensors_stay() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    x = torch.randn(64, 8)

    def forward() -> Tensor:
        return (torch.tanh(x @ weight.t()) @ weight[:4].t()).sum()

    host, _ = _packed(forward, [weight, x])
    assert host.moved_bytes == 64 * 8 * 4  # the hyperbolic tangent's result, for itself and for the product
    host, _ = _packed(forward, [weight, x], least_bytes=64 * 8 * 4 + 1)
    assert host.moved_bytes == 0


def test_parameters_features_and_the_graph_never_move() -> None:
    trainer = _trainer(Ranks(), _gnn("gat", heads=2, attention_dropout=0.3).double())
    trainer.train_epoch()
    activations = Offloaded(trainer.family.net, least_bytes=1)
    fixed = {
        x.untyped_storage()._cdata
        for x in (*trainer.model.parameters(), *trainer.model.buffers(), trainer.family.net.features_ND)
    }
    structure = trainer.family.graph.index.structure
    fixed |= {x.untyped_storage()._cdata for x in (structure.indptr, structure.indices, structure.dst)}
    moved = set()
    plain = HostMemory._pack

    def pack(self: HostMemory, x: Tensor) -> Any:
        kept = plain(self, x)
        if not isinstance(kept, Tensor):
            moved.add(x.untyped_storage()._cdata)
        return kept

    HostMemory._pack = pack  # type: ignore[method-assign]
    try:
        with trainer.family.net.step(1):
            loss = activations.forward().square().sum()
    finally:
        HostMemory._pack = plain  # type: ignore[method-assign]
    assert moved and not moved & fixed
    loss.backward()


def test_nothing_but_small_tensors_is_left_on_the_device() -> None:
    trainer = _deep_trainer(8, "keep")
    trainer.train_epoch()
    activations = Offloaded(trainer.family.net, least_bytes=4096)
    with _Peak() as peak, trainer.family.net.step(1):
        out = activations.forward()
        total = out.sum()
        del out
        # of 8 layers each: eight vectors of a number for each of 4096 nodes at most (means, deviations, row numbers)
        assert peak.bytes - activations.host.moved_bytes <= 4096 * 8 * 8
        del total
