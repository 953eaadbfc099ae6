"""Runs one graph call on plain DGL and on the parts of a split graph, and puts the answers side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import dgl
import torch
from torch import Tensor

from nugnn import intercept
from nugnn.comm.groups import Ranks
from nugnn.datasets.graph_data import GraphData
from nugnn.kernels.rows import tag
from nugnn.partition.assign import partition_nodes
from nugnn.partition.shard import build_shard
from nugnn.shard_graph import ShardGraph

NUM_NODES = 23


def make_data(seed: int = 0, *, num_nodes: int = NUM_NODES) -> GraphData:
    """A directed graph with a hub, parallel edges, self-loops and two nodes without edges; float64 columns."""
    generator = torch.Generator().manual_seed(seed)
    used = num_nodes - 2
    src = (torch.rand(70, generator=generator) ** 2 * used).long()
    dst = torch.randint(0, used, (70,), generator=generator)
    src = torch.cat([src, src[:3], torch.zeros(12, dtype=torch.int64), torch.tensor([1, 4])])
    dst = torch.cat([dst, dst[:3], torch.arange(5, 17), torch.tensor([1, 4])])
    num_edges = len(src)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return GraphData(
        name="calls",
        num_nodes=num_nodes,
        src=src,
        dst=dst,
        num_classes=2,
        node_data={"h": randn(num_nodes, 3), "k": randn(num_nodes, 3) + 3, "id": torch.arange(num_nodes)},
        edge_data={"w": randn(num_edges, 1), "e": randn(num_edges, 3) + 4, "eid": torch.arange(num_edges)},
    )


def uneven_parts(num_nodes: int, num_parts: int) -> Tensor:
    """Interleaved parts; the last holds the two nodes without edges, so none of its counts of rows fit by chance."""
    parts = (torch.arange(num_nodes) * 7 // 3) % max(num_parts - 1, 1)
    if num_parts > 1:
        parts[-2:] = num_parts - 1
    return parts


def shard_of(ranks: Ranks, data: GraphData, parts: Tensor | None = None) -> ShardGraph:
    parts = uneven_parts(data.num_nodes, ranks.world_size) if parts is None else parts
    shares = [1.0] * ranks.world_size
    assignment = partition_nodes(data.num_nodes, data.src, data.dst, shares, method="given", parts=parts)
    return ShardGraph(build_shard(data, assignment, ranks.rank), ranks)


def plain_of(data: GraphData, edge_ids: Tensor | None = None) -> dgl.DGLGraph:
    """The same graph in plain DGL; edges in the order of ``edge_ids``."""
    order = torch.arange(len(data.src)) if edge_ids is None else edge_ids
    graph = dgl.graph((data.src.long()[order], data.dst.long()[order]), num_nodes=data.num_nodes)
    graph.ndata.update(data.node_data)
    graph.edata.update({key: value[order] for key, value in data.edge_data.items()})
    return graph


@dataclass
class Out:
    """A result: ``kind`` is ``node`` or ``edge`` (one row for each of ``ids``), or ``same`` on every rank."""

    kind: str
    value: Tensor
    ids: Tensor | None = None


@dataclass
class Kit:
    """A graph, plain or part of a split one, and its rows by global id."""

    graph: Any
    node_ids: Tensor
    edge_ids: Tensor
    h: Tensor
    """``(N, 3)`` leaf that is ``ndata['h']``."""
    w: Tensor
    """``(E, 1)`` leaf that is ``edata['w']``."""
    e: Tensor
    """``(E, 3)`` leaf that is ``edata['e']``."""
    k: Tensor = field(default_factory=lambda: torch.empty(0))

    def nodes(self, wanted: list[int]) -> Tensor:
        """Local rows of the wanted nodes that are here."""
        return torch.isin(self.node_ids, torch.tensor(wanted)).nonzero().view(-1)

    def edges(self, wanted: list[int]) -> Tensor:
        """Local rows of the wanted edges that are here."""
        return torch.isin(self.edge_ids, torch.tensor(wanted)).nonzero().view(-1)

    def node(self, value: Tensor, graph: Any = None) -> Out:
        return Out("node", value, self.node_ids)

    def edge(self, value: Tensor, graph: Any = None) -> Out:
        """``value`` has a row for each edge of ``graph``, which was derived from the kit's own."""
        if graph is None or not isinstance(graph, ShardGraph):
            ids = self.edge_ids if graph is None else torch.arange(graph.num_edges())
            return Out("edge", value, ids)
        # DGL numbers the edges of a derived graph anew: places among the ids that are left
        everywhere = torch.cat(graph.ranks.gather_rows(graph.global_edge_ids)).sort().values
        return Out("edge", value, torch.searchsorted(everywhere, graph.global_edge_ids))

    def column(self, name: str, graph: Any = None) -> Out:
        return self.node((self.graph if graph is None else graph).ndata[name])

    def edge_column(self, name: str, graph: Any = None) -> Out:
        return self.edge((self.graph if graph is None else graph).edata[name], graph)


Case = Callable[[Kit], dict[str, Out]]


def _kit(graph: Any, node_ids: Tensor, edge_ids: Tensor) -> Kit:
    def leaf(x: Tensor, rows: Any) -> Tensor:
        return tag(x.detach().clone().requires_grad_(), rows)

    node_rows = graph.index.node_rows if isinstance(graph, ShardGraph) else None
    edge_rows = graph.index.edge_rows if isinstance(graph, ShardGraph) else None
    h, k = leaf(graph.ndata["h"], node_rows), leaf(graph.ndata["k"], node_rows)
    w, e = leaf(graph.edata["w"], edge_rows), leaf(graph.edata["e"], edge_rows)
    graph.ndata["h"], graph.ndata["k"], graph.edata["w"], graph.edata["e"] = h, k, w, e
    return Kit(graph, node_ids, edge_ids, h, w, e, k)


def _weights(value: Tensor, ids: Tensor | None) -> Tensor:
    """Fixed numbers by global id and column, so that every part weighs its rows as the whole graph does."""
    rows = torch.arange(len(value)) if ids is None else ids
    columns = torch.arange(value[0].numel() if len(value) else 1)
    table = torch.sin(rows[:, None].double() * 1.7 + columns[None] * 0.6 + 0.3)
    return table.view(len(value), *value.shape[1:]) if len(value) else table.new_zeros(value.shape)


def _finish(kit: Kit, outs: dict[str, Out], counts: bool) -> dict[str, Any]:
    """Backward from a weighted sum of all results; ``counts``: whether this rank weighs results all ranks have."""
    loss: Tensor = sum((x.sum() * 0 for x in (kit.h, kit.k, kit.w, kit.e)), torch.zeros((), dtype=torch.float64))
    for out in outs.values():
        if out.value.requires_grad:
            share = 1.0 if out.kind != "same" or counts else 0.0
            # nodes without in-edges: infinite after max, whose gradient DGL's kernel sends to row 0
            finite = out.value.masked_fill(out.value.detach().isinf(), 0)
            loss = loss + share * (finite * _weights(out.value, out.ids)).sum()
    loss.backward()
    plain = {name: (out.kind, out.value.detach().clone(), out.ids) for name, out in outs.items()}
    grads = {"h": ("node", kit.h.grad, kit.node_ids), "k": ("node", kit.k.grad, kit.node_ids)}
    grads |= {"w": ("edge", kit.w.grad, kit.edge_ids), "e": ("edge", kit.e.grad, kit.edge_ids)}
    return plain | {f"gradient of {name}": value for name, value in grads.items()}


def on_plain(case: Case, data: GraphData) -> dict[str, Any]:
    graph = plain_of(data)
    kit = _kit(graph, torch.arange(graph.num_nodes()), torch.arange(graph.num_edges()))
    return _finish(kit, case(kit), True)


def on_rank(ranks: Ranks, case: Case, data: GraphData) -> dict[str, Any]:
    graph = shard_of(ranks, data)
    kit = _kit(graph, graph.global_node_ids, graph.global_edge_ids)
    with intercept(torch.nn.Identity(), graph).step(0):
        return _finish(kit, case(kit), ranks.rank == 0)


def joined(parts: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Rows of all ranks in the order of global ids; what every rank has alike is checked to be alike."""
    whole = {}
    for name, (kind, value, _) in parts[0].items():
        if kind == "same":
            for part in parts[1:]:
                assert torch.equal(part[name][1], value), f"{name} differs between ranks"
            whole[name] = value
            continue
        ids = torch.cat([part[name][2] for part in parts])
        assert len(ids.unique()) == len(ids), f"{name}: a row is on two ranks"
        whole[name] = torch.cat([part[name][1] for part in parts])[torch.argsort(ids)]
    return whole


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor], num_terms: int) -> None:
    """Equal up to the order of sums of at most ``num_terms`` terms; integers exactly."""
    assert one.keys() == other.keys()
    for name, a in one.items():
        b = other[name]
        assert a.shape == b.shape, f"{name}: {tuple(a.shape)} and {tuple(b.shape)}"
        assert a.dtype == b.dtype, f"{name}: {a.dtype} and {b.dtype}"
        if not a.is_floating_point() or a.numel() == 0:
            assert torch.equal(a, b), name
            continue
        # a sum of n terms in any order is within n eps of the sum of magnitudes (Higham 2002, sec. 4.2); a case chains
        # at most four sums or quotients
        bound = 4 * num_terms * torch.finfo(a.dtype).eps * float(a.abs().max().clamp_min(1.0))
        assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf(), b.isinf()), name
        worst = float((a - b).nan_to_num(0, 0, 0).abs().max())
        assert worst <= bound, f"{name}: {worst} > {bound}"
