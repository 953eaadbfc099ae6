"""DGL's attention layers through the fused operator: the numbers of the steps one by one, and when it is not taken."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dgl.base import DGLError
from dgl.nn.pytorch import conv
from torch import Tensor, nn

from exactness import NUM_CLASSES, NUM_FEATURES, Run, largest_difference, make_graph, make_parts, run_steps
from nugnn import fused_attention, recognition
from nugnn.comm.groups import Ranks
from nugnn.comm.halo_handler import HaloHandler
from nugnn.kernels.handlers import DropoutHandler
from nugnn.kernels.interceptor import Interceptor
from nugnn.partition.assign import partition_nodes
from nugnn.partition.shard import build_shard
from nugnn.session import intercept
from nugnn.shard_graph import ShardGraph


class Attention(nn.Module):
    """Both layers with all they offer, one of them called twice, between dropouts of the other kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        allow = {"allow_zero_in_degree": True}
        self.first = conv.GATConv(NUM_FEATURES, 3, 2, 0.2, 0.3, 0.1, True, nn.functional.elu, **allow)
        self.twice = conv.GATv2Conv(6, 3, 2, 0.1, 0.4, 0.3, True, torch.tanh, **allow)
        self.last = conv.GATv2Conv(6, NUM_CLASSES, 2, 0.0, 0.2, share_weights=True, **allow)
        self.side = conv.GATConv(6, NUM_CLASSES, 1, 0.0, 0.5, residual=True, bias=False, **allow)
        self.double()

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        x = self.first(graph, x).flatten(1)
        x = self.twice(graph, self.twice(graph, x).flatten(1)).flatten(1)
        return self.last(graph, x).mean(1) + self.side(graph, (x, x))[:, 0]


def steps_of(ranks: Ranks, data: Any, parts: Tensor, model: nn.Module, fuse: bool) -> tuple[Run, int]:
    """A run of some steps, and how often the fused operator ran."""
    count = 0
    plain = fused_attention._attention

    def counted(*args: Any) -> Tensor:
        nonlocal count
        count += 1
        return plain(*args)

    fused_attention._attention = counted
    if fuse:
        recognition.FUSED_DEVICES.add("cpu")
    try:
        return run_steps(ranks, data, parts, model, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), 3), count
    finally:
        fused_attention._attention = plain
        recognition.FUSED_DEVICES.discard("cpu")


@pytest.mark.parametrize("num_parts", [1, 3])
def test_the_same_steps_with_dropout_on_any_number_of_parts(ranks: Any, num_parts: int) -> None:
    data, model = make_graph(), Attention()
    one, count = steps_of(Ranks(), data, make_parts(data, 1, "random"), model, False)
    assert count == 0
    parts = make_parts(data, num_parts, "unequal")
    if num_parts == 1:
        results = [steps_of(Ranks(), data, parts, model, True)]
    else:
        results = ranks.run(num_parts, steps_of, data, parts, model, True)
    for run, count in results:
        assert count >= 5 * 3  # five layers in each of three steps, and evaluation
        difference, name = largest_difference(one, run)
        assert difference <= 1e-10, f"{name}: {difference}"  # the law of the project for float64 and SGD


def a_layer(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return conv.GATConv(NUM_FEATURES, 3, 2, attn_drop=0.5, allow_zero_in_degree=True, **options).double()


class Scaled(conv.GATConv):
    def forward(self, graph: Any, feat: Tensor) -> Tensor:
        return 2 * super().forward(graph, feat)


def a_shard() -> ShardGraph:
    data = make_graph()
    assignment = partition_nodes(
        data.num_nodes, data.src, data.dst, [1.0], method="given", parts=torch.zeros(data.num_nodes, dtype=torch.int64)
    )
    return ShardGraph(build_shard(data, assignment, 0), Ranks())


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The layers that took the fused path, which is open to the CPU meanwhile."""
    calls: list[Any] = []
    plain = fused_attention._attention
    monkeypatch.setattr(
        fused_attention, "_attention", lambda layer, *rest: (calls.append(layer), plain(layer, *rest))[1]
    )
    monkeypatch.setattr(recognition, "FUSED_DEVICES", {"cpu"})
    return calls


def hooked(layer: Any) -> Any:
    layer.attn_drop.register_forward_hook(lambda *_: None)
    return layer


def replaced(layer: Any) -> Any:
    layer.leaky_relu = nn.ELU()
    return layer


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (a_layer, {"get_attention": True}),
        (a_layer, {"edge_weight": torch.ones(1)}),
        (lambda: Scaled(NUM_FEATURES, 3, 2, allow_zero_in_degree=True).double(), {}),
        (lambda: hooked(a_layer()), {}),
        (lambda: replaced(a_layer()), {}),
    ],
    ids=["attention weights asked for", "edge weights", "subclass", "hook", "another rectifier"],
)
def test_whatever_is_not_the_plain_layer_takes_dgls_way(
    fused_calls: list[Any], make: Callable[[], Any], arguments: dict[str, Any]
) -> None:
    graph, layer = a_shard(), make()
    arguments = {k: v.double().expand(graph.num_edges()) if isinstance(v, Tensor) else v for k, v in arguments.items()}
    with intercept(layer, graph).step(0):
        layer(graph, graph.ndata["feat"], **arguments)
        assert fused_calls == []
        a_layer()(graph, graph.ndata["feat"])
        assert len(fused_calls) == 1


def test_dropout_outside_a_step_is_torchs_own(fused_calls: list[Any]) -> None:
    """Its mask comes from torch's generator, so the steps run one by one; without dropout nothing is drawn."""
    graph, layer = a_shard(), a_layer()
    layer(graph, graph.ndata["feat"])
    assert fused_calls == []
    expected = copy.deepcopy(layer).eval()
    expected.attn_drop.register_forward_hook(lambda *_: None)
    out = layer.eval()(graph, graph.ndata["feat"])
    assert fused_calls == [layer] and torch.allclose(out, expected(graph, graph.ndata["feat"]), rtol=1e-12, atol=1e-12)
    with Interceptor((HaloHandler(),), layer).step(0):  # a chain that does not draw by identity
        layer.train()(graph, graph.ndata["feat"])
    assert fused_calls == [layer]


def test_dgls_own_errors_stay(fused_calls: list[Any]) -> None:
    graph, layer = a_shard(), a_layer().eval()
    with pytest.raises(DGLError, match="Expect number of features"):
        layer(graph, graph.ndata["feat"][:-1])
    bare = make_graph(self_loops=False)
    parts = torch.zeros(bare.num_nodes, dtype=torch.int64)
    lonely = partition_nodes(bare.num_nodes, bare.src, bare.dst, [1.0], method="given", parts=parts)
    graph = ShardGraph(build_shard(bare, lonely, 0), Ranks())
    layer.set_allow_zero_in_degree(False)
    with pytest.raises(DGLError, match="0-in-degree nodes"):
        layer(graph, graph.ndata["feat"])
    assert fused_calls == []


def test_the_exchange_happens_once_and_names_stay(fused_calls: list[Any]) -> None:
    """Names of dropouts, by which masks are drawn, in a step with the fused path and in one without."""
    graph, model = a_shard(), Attention()
    names: dict[bool, list[str]] = {}
    for fuse in (True, False):
        recognition.FUSED_DEVICES.clear()
        recognition.FUSED_DEVICES.update({"cpu"} if fuse else set())
        interceptor = intercept(model, graph)
        drawn: list[str] = []
        plain = interceptor.random_key
        interceptor.random_key = lambda name, *rows, plain=plain, drawn=drawn: (drawn.append(name), plain(name, *rows))[
            1
        ]  # type: ignore[method-assign]
        with interceptor.step(0):
            model(graph, graph.ndata["feat"])
        counters = interceptor._counters.calls
        names[fuse] = [*drawn, *sorted(f"{path}/{kind} x{count}" for (path, kind), count in counters.items())]
    assert names[True] == names[False] and "twice.attn_drop/dropout#1" in names[True]
    assert len(fused_calls) == 5 and interceptor.find(DropoutHandler)


def test_the_forwards_repeated_here_are_those_of_the_installed_dgl() -> None:
    for cls in (conv.GATConv, conv.GATv2Conv):
        original = cls.forward.__wrapped__  # type: ignore[attr-defined]
        assert recognition.fingerprint(original) in fused_attention.KNOWN_FORWARDS[cls.__name__]
