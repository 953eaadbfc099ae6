"""Where operators are timed: pieces of real parts are parts, random ones can be, and each device has enough."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nugnn.datasets.graph_data import GraphData
from nugnn.datasets.sparse import csr_matrix, stored_values
from nugnn.measured_step import measure_graph_step
from nugnn.models import GNN, WithNodeEmbedding
from nugnn.partition.check import check_shard
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.trace import StepTrace
from nugnn.random_data import random_part
from nugnn.timed_parts import RealPart, _is_of_use, places_of, random_parts, real_parts
from nugnn.traced_step import graph_trainer, run_steps, sizes_of, trace_graph_step

NODES = 3000


@pytest.fixture(scope="module")
def trace() -> StepTrace:
    torch.manual_seed(0)
    return trace_graph_step(GNN("gcn", 12, 4, hidden=16, layers=3), in_features=12, num_classes=4)


def neighbours(**more: Any) -> GraphData:
    """Node i has in-edges from i + 1 to i + 5: parts have few halo rows, random ones would have very many."""
    dst = torch.arange(NODES).repeat_interleave(5)
    src = (dst + torch.arange(1, 6).repeat(NODES)) % NODES
    labels = torch.arange(NODES) % 4
    columns: dict[str, Any] = {"features": torch.randn(NODES, 12, generator=torch.Generator().manual_seed(0))}
    columns |= {"labels": labels, "train_nodes": torch.arange(0, NODES, 3), **more}
    return GraphData(name="neighbours", num_nodes=NODES, src=src, dst=dst, num_classes=4, **columns)


def nothing(_: PartSizes) -> float:
    return 0.0


def parts_of(graph: GraphData, trace: StepTrace, inner: tuple[int, ...], seconds: Any = nothing) -> list[RealPart]:
    sizes = [PartSizes(inner=n, edges=5 * n, halo=50, sent=50, train=n // 3) for n in inner]
    return list(real_parts(graph, [trace] * len(inner), [seconds] * len(inner), sizes))


@pytest.mark.parametrize("inner", [(3000,), (2000, 1000), (1000, 500, 1500)])
def test_pieces_of_a_graph_at_hand_are_parts_of_it(trace: StepTrace, inner: tuple[int, ...]) -> None:
    graph = neighbours()
    for part, expected in zip(parts_of(graph, trace, inner), inner, strict=True):
        assert part.shard.num_inner == pytest.approx(expected, rel=0.11)
        assert part.shard.num_halo < 0.1 * part.shard.num_inner
        pieces = places_of(part)
        for piece in pieces:
            check_shard(piece)
            assert set(piece.node_data) == {"feat", "label"} and piece.name == graph.name
        counts = [piece.num_inner for piece in pieces]
        assert counts == sorted(counts) and len(counts) >= 4 and counts[-1] == part.shard.num_inner


def test_a_device_that_would_have_one_node_has_enough_to_be_timed_on(trace: StepTrace) -> None:
    small, large = parts_of(neighbours(), trace, (1, NODES - 1))
    assert small.shard.num_inner > 250 and len(small.pieces()) >= 3
    assert large.shard.num_inner > 2000


def test_what_takes_long_is_timed_on_a_piece(trace: StepTrace) -> None:
    (part, other) = parts_of(neighbours(), trace, (1500, 1500), lambda sizes: sizes.inner / 1600)
    assert part.shard.num_inner == pytest.approx(375, rel=0.1)  # a quarter of a second
    assert other.shard.num_inner == pytest.approx(375, rel=0.1)


def test_sparse_features_are_timed_as_they_are() -> None:
    """Their products are sparse in every piece, and the trace's own; a piece that stores nothing is left out."""
    wide = torch.zeros(NODES, 300)
    wide[torch.arange(NODES), torch.arange(NODES) % 300] = 1
    wide[:1000, 7] = 1
    model = GNN("gcn", 300, 4, hidden=16)
    how: dict[str, Any] = {"in_features": 300, "num_classes": 4}
    stored = stored_values(wide.to_sparse_csr())
    assert stored == 1
    trace = trace_graph_step(model, **how, stored_features=stored)
    for part in parts_of(neighbours(features=wide.to_sparse_csr()), trace, (1500, 1500)):
        pieces = part.pieces()
        assert all(piece.node_data["feat"].layout is torch.sparse_csr for piece in pieces)
        times = measure_graph_step(model, trace, pieces, seconds=0.01, **how)
        assert [o for o in times.operators if o.kind == "sparse_product"]
        assert not times.fallbacks(trace.at(sizes_of(pieces[-1])))
        nothing_stored = csr_matrix(torch.zeros(pieces[0].num_inner + 1), torch.zeros(0), torch.zeros(0), (1, 300))
        assert not _is_of_use(replace(pieces[0], node_data={"feat": nothing_stored}))


def test_parts_without_a_training_node_are_trained_on(trace: StepTrace) -> None:
    train = torch.arange(40)
    labels = torch.full((NODES,), -1).index_fill_(0, train, 3)
    parts = parts_of(neighbours(labels=labels, train_nodes=train), trace, (1500, 1500))
    assert min(len(part.shard.train_rows) for part in parts) == 0
    model = GNN("gcn", 12, 4, hidden=16, layers=3)
    for part in parts:
        for piece in part.pieces():
            (loss,) = run_steps(graph_trainer(model, piece, in_features=12, num_classes=4), 1)
            assert loss > 0


def test_models_with_a_row_for_each_node_have_those_of_the_piece(trace: StepTrace) -> None:
    made = []

    def model(num_nodes: int) -> WithNodeEmbedding:
        made.append(num_nodes)
        return WithNodeEmbedding(num_nodes, 12, GNN("gcn", 12, 4, hidden=16, layers=3))

    for part in parts_of(neighbours(features=None), trace, (2000, 1000)):
        for piece in part.pieces():
            trainer = graph_trainer(model, piece, in_features=None, num_classes=4)
            run_steps(trainer, 1)
            assert made.pop() == piece.num_local < NODES
            rows = trainer.model.embedding.weight  # type: ignore[attr-defined]
            assert rows.shape == (piece.num_inner, 12)


def test_random_parts_can_be(trace: StepTrace) -> None:
    """A small part of many that sends its rows to several others; at all sizes up to its own."""
    sizes = PartSizes(inner=400, edges=6000, halo=500, sent=700, train=400)
    parts = random_parts(trace, nothing, sizes)
    assert max(part.inner for part in parts) == 400 and len(parts) > 2
    for part in parts:
        random_part(part, 12, 4, multilabel=False, num_parts=2)
