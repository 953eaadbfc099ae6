"""User functions on parts: what a batch shows, in which order, which columns travel, and ranks without edges."""

from __future__ import annotations

from typing import Any

import dgl
import pytest
import torch
from dgl import function as fn
from torch import Tensor, nn

from nugnn import intercept
from nugnn.comm.groups import Ranks
from nugnn.comm.halo_handler import HaloHandler
from nugnn.comm.local_ranks import run_local_ranks
from nugnn.kernels.rows import rows_of
from shard_calls import make_data, plain_of, shard_of


def _mailboxes(ranks: Ranks) -> dict[int, list[int]]:
    graph, seen = shard_of(ranks, make_data()), {}

    def reduce(nodes: Any) -> dict[str, Tensor]:
        for node, mail in zip(nodes.data["id"].tolist(), nodes.mailbox["m"].tolist(), strict=True):
            seen[node] = mail
        return {"a": nodes.mailbox["m"].sum(1)}

    with intercept(nn.Identity(), graph).step(0):
        graph.update_all(lambda edges: {"m": edges.data["eid"]}, reduce)
    return seen


@pytest.mark.parametrize("num_parts", [1, 3])
def test_a_mailbox_holds_all_in_edges_in_global_order(ranks: Any, num_parts: int) -> None:
    data, expected = make_data(), {}
    for edge, node in enumerate(data.dst.tolist()):
        expected.setdefault(node, []).append(edge)
    merged: dict[int, list[int]] = {}
    for seen in ranks.run(num_parts, _mailboxes):
        assert not merged.keys() & seen.keys()
        merged |= seen
    assert merged == expected


def _mapping(ranks: Ranks) -> None:
    graph = shard_of(ranks, make_data())

    def message(edges: Any) -> dict[str, Tensor]:
        for view, known in (
            (edges.src, {"h", "k", "id"}),
            (edges.dst, {"h", "k", "id"}),
            (edges.data, {"w", "e", "eid"}),
        ):
            assert set(view) == set(view.keys()) == known and len(view) == 3
            assert "h" in view or "e" in view
            assert "absent" not in view and view.get("absent") is None and view.get("absent", 7) == 7
            with pytest.raises(KeyError):
                view["absent"]
            assert dict(view.items()).keys() == known and len(list(view.values())) == 3
        assert edges.batch_size() == graph.num_edges() == len(edges)
        assert torch.equal(edges.data["eid"], graph.global_edge_ids)
        assert rows_of(edges.src["h"]).kind == rows_of(edges.dst["h"]).kind == "edge"  # type: ignore[union-attr]
        first = edges.src["h"]
        assert edges.src["h"] is first, "read once"
        edges.src["scratch"] = first  # stays in this batch
        assert edges.src["scratch"] is first and "scratch" in edges.src
        del edges.src["scratch"]
        assert "scratch" not in edges.src
        return {"m": first + edges.dst["h"]}

    with intercept(nn.Identity(), graph).step(0):
        graph.update_all(message, fn.sum("m", "id"))
        graph.apply_edges(message)
    assert "scratch" not in graph.ndata and rows_of(graph.edata["m"]) is graph.index.edge_rows


@pytest.mark.parametrize("num_parts", [1, 3])
def test_src_dst_and_data_are_mappings_of_columns(ranks: Any, num_parts: int) -> None:
    ranks.run(num_parts, _mapping)


def _columns_that_travel(ranks: Ranks) -> list[int]:
    graph = shard_of(ranks, make_data())
    interceptor = intercept(nn.Identity(), graph)
    counts = []
    with interceptor.step(0):
        handler = interceptor.find(HaloHandler)

        def count(call: Any) -> None:
            before = handler.num_exchanges
            call()
            counts.append(handler.num_exchanges - before)

        count(lambda: graph.apply_edges(lambda edges: {"x": edges.data["e"] + edges.dst["h"]}))
        count(lambda: graph.apply_edges(lambda edges: {"x": edges.src["h"]}))
        count(lambda: graph.apply_edges(lambda edges: {"x": edges.src["h"] + edges.src["k"]}))  # h is known
        count(lambda: graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "a")))  # to DGL's operators too
        graph.ndata["h"] += 1
        count(lambda: graph.apply_edges(lambda edges: {"x": edges.src["h"]}))  # changed, so it travels again
        assert torch.equal(graph.ndata["a"].isnan().sum(), torch.tensor(0))
    return counts


def test_only_columns_that_are_read_travel_and_each_once(ranks: Any) -> None:
    for counts in ranks.run(3, _columns_that_travel):
        assert counts == [0, 1, 1, 0, 1]


def _no_edges(ranks: Ranks) -> tuple[Tensor, Tensor, Tensor]:
    """The last part of `uneven_parts` is two nodes without edges: its functions still run, on empty batches."""
    graph = shard_of(ranks, make_data())
    layer = nn.Linear(3, 2).double()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter))
    x = graph.ndata["h"].clone().requires_grad_()
    with intercept(layer, graph).step(0):
        graph.ndata["x"] = x
        graph.update_all(
            lambda edges: {"m": layer(edges.src["x"])}, lambda nodes: {"a": nodes.mailbox["m"].max(1).values}
        )
        graph.ndata["a"].square().sum().backward()
    assert x.grad is not None and layer.weight.grad is not None
    return graph.ndata["a"].detach(), x.grad, ranks.sum_(layer.weight.grad)


def test_a_rank_without_edges_takes_part_in_forward_and_backward(ranks: Any) -> None:
    results = ranks.run(3, _no_edges)
    assert len(results[-1][0]) == 2 and not results[-1][0].any()
    (alone,) = ranks.run(1, _no_edges)
    # 87 in-edges at most, a product with 3 columns and a square
    bound = 87 * 3 * 4 * torch.finfo(torch.float64).eps * float(alone[2].abs().max())
    assert float((results[0][2] - alone[2]).abs().max()) <= bound


def test_results_of_a_wrong_length_are_refused_as_in_dgl() -> None:
    for graph in (plain_of(make_data()), shard_of(Ranks(), make_data())):
        with pytest.raises(dgl.DGLError, match="Expect number of features to match number of edges"):
            graph.apply_edges(lambda edges: {"x": edges.src["h"][:2]})
        with pytest.raises(dgl.DGLError, match="Expect number of features to match number of nodes"):
            graph.apply_nodes(lambda nodes: {"x": nodes.data["h"][:2]})


def test_ids_of_ends_are_refused_on_a_part() -> None:
    def ask(ranks: Ranks) -> str:
        graph = shard_of(ranks, make_data())
        with intercept(nn.Identity(), graph).step(0), pytest.raises(NotImplementedError) as raised:
            graph.apply_edges(lambda edges: {"x": edges.edges()[0]})
        return str(raised.value)

    assert all("edges.src['id']" in text for text in run_local_ranks(2, ask))
    whole, plain = shard_of(Ranks(), make_data()), plain_of(make_data())
    for graph in (whole, plain):
        graph.apply_edges(lambda edges: {"u": edges.edges()[0], "v": edges.edges()[1]})
    order = torch.argsort(whole.global_edge_ids)
    assert torch.equal(whole.edata["u"][order], plain.edata["u"])
    assert torch.equal(whole.edata["v"][order], plain.edata["v"])


def test_repeated_ids_are_refused() -> None:
    graph = shard_of(Ranks(), make_data())
    for call in (graph.pull, graph.push, graph.send_and_recv):
        with pytest.raises(dgl.DGLError, match="an id is given twice"):
            call(torch.tensor([1, 1]), fn.copy_u("h", "m"), fn.sum("m", "a"))


def test_initializers_fill_nodes_without_mail() -> None:
    results = []
    for graph in (plain_of(make_data()), shard_of(Ranks(), make_data())):
        graph.set_n_initializer(lambda shape, dtype, device, rows: torch.full(shape, 9, dtype=dtype, device=device))
        graph.update_all(fn.copy_u("h", "m"), lambda nodes: {"a": nodes.mailbox["m"].sum(1)})
        results.append(graph.ndata["a"])
    assert torch.allclose(results[0], results[1], rtol=1e-13, atol=1e-13) and bool((results[0] == 9).any())
