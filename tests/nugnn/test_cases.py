"""Acceptance cases of the areas halo, api, kernels, partition and comm that need several parts of a whole run.

`docs/cases.md` lists every case with its test.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import dgl
import pytest
import torch
from dgl import function as fn
from dgl.nn import GraphConv
from torch import Tensor, nn

import nugnn
from exactness import NUM_CLASSES, NUM_FEATURES, make_graph, make_parts
from nugnn import intercept
from nugnn.comm.groups import Ranks
from nugnn.comm.halo_transfer import HaloExchangeError
from nugnn.datasets.graph_data import GraphData
from nugnn.metrics import evaluate_rows
from nugnn.models import GNN
from nugnn.partition.assign import partition_nodes
from nugnn.partition.shard import build_shard, iter_shards
from nugnn.partition.store import load_shard, write_shards
from nugnn.sample_family import SampleFamily
from nugnn.shard_graph import ShardGraph
from nugnn.trainer import Trainer
from rank_pool import RankError
from sample_cases import make_data, make_model
from trainers import graph_trainer


def cut(ranks: Ranks, data: GraphData, parts: Tensor) -> tuple[ShardGraph, dict[str, Tensor]]:
    shares = [1.0] * ranks.world_size
    assignment = partition_nodes(data.num_nodes, data.src, data.dst, shares, method="given", parts=parts)
    shard = build_shard(data, assignment, ranks.rank)
    return ShardGraph(shard, ranks), {"train": shard.train_rows, "val": shard.val_rows, "test": shard.test_rows}


def in_order(graph: ShardGraph, rows: Tensor) -> Tensor:
    """Rows of all ranks in the original node order."""
    ids = torch.cat(graph.ranks.gather_rows(graph.global_node_ids))
    return torch.cat(graph.ranks.gather_rows(rows.detach().contiguous()))[torch.argsort(ids)]


# -- halo ----------------------------------------------------------------------------------------------------------


def _star() -> GraphData:
    leaves = torch.arange(1, 7)
    centre = torch.zeros(6, dtype=torch.int64)
    return GraphData(
        name="star",
        num_nodes=7,
        src=torch.stack([centre, leaves], 1).view(-1),
        dst=torch.stack([leaves, centre], 1).view(-1),
        features=torch.eye(7),
        num_classes=7,
    )


def _identity_layer(ranks: Ranks, parts: Tensor) -> tuple[Tensor, Tensor]:
    graph, _ = cut(ranks, _star(), parts)
    layer = GraphConv(7, 7, norm="both", weight=False, bias=False)
    with intercept(layer, graph).step(0):
        out = layer(graph, graph.ndata["feat"])
    return in_order(graph, out), in_order(graph, torch.stack([graph.in_degrees(), graph.out_degrees()], 1))


def test_halo_01_normalisation_uses_degrees_of_the_whole_graph(ranks: Any) -> None:
    data = _star()
    expected = GraphConv(7, 7, norm="both", weight=False, bias=False)(dgl.graph((data.src, data.dst)), torch.eye(7))
    for out, degrees in ranks.run(2, _identity_layer, torch.tensor([0, 0, 0, 1, 1, 1, 1])):
        assert float((out - expected).abs().max()) <= 1e-6  # the case's own bound; six products are within 12 eps
        assert degrees.tolist() == [[6, 6]] + [[1, 1]] * 6


def _path() -> GraphData:
    ids = torch.arange(5)
    return GraphData(
        name="path",
        num_nodes=6,
        src=torch.cat([ids, ids + 1]),
        dst=torch.cat([ids + 1, ids]),
        features=torch.ones(6, 2),
        labels=torch.tensor([0, 1, 0, 1, 0, 1]),
        num_classes=2,
        train_nodes=torch.arange(6),
        val_nodes=torch.arange(0),
    )


def _loss_by_id(ranks: Ranks, parts: Tensor) -> tuple[float, int, float]:
    graph, rows = cut(ranks, _path(), parts)
    ids = graph.global_node_ids[rows["train"]]

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return ids.to(logits.dtype) + 0 * logits.sum(1)

    trainer = graph_trainer(GraphConv(2, 2, allow_zero_in_degree=True), graph, rows, loss=loss)
    counted = int(ranks.sum_(torch.tensor(len(rows["train"]))))
    hits = torch.nn.functional.one_hot(graph.ndata["label"], 2).float()
    return trainer.train_epoch(), counted, evaluate_rows("accuracy", hits, graph.ndata["label"], ranks)


def test_halo_02_halo_nodes_are_not_counted(ranks: Any) -> None:
    for num_parts, parts in ((1, torch.zeros(6, dtype=torch.int64)), (2, torch.tensor([0, 0, 0, 1, 1, 1]))):
        for loss, counted, accuracy in ranks.run(num_parts, _loss_by_id, parts):
            assert loss == 2.5 and counted == 6 and accuracy == 1.0


# halo-03 and halo-04 need no run: tests/comm/test_halo_exchange.py


def _disconnected() -> GraphData:
    generator = torch.Generator().manual_seed(0)
    half = torch.randint(0, 8, (2, 30), generator=generator)
    return GraphData(
        name="two islands",
        num_nodes=16,
        src=torch.cat([half[0], half[0] + 8]),
        dst=torch.cat([half[1], half[1] + 8]),
        features=torch.randn(16, NUM_FEATURES, generator=generator, dtype=torch.float64),
        labels=torch.randint(0, NUM_CLASSES, (16,), generator=generator),
        num_classes=NUM_CLASSES,
        train_nodes=torch.arange(16),
    )


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    # eps: biases before a batch norm have gradients of rounding noise, which 1e-8 would turn into steps
    return torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-5)


def _train(ranks: Ranks, data: GraphData, parts: Tensor, steps: int = 3) -> tuple[list[float], Tensor, int]:
    graph, rows = cut(ranks, data, parts)
    torch.manual_seed(0)
    assert data.features is not None
    model = GNN("gcn", data.features.shape[1], data.num_classes, hidden=8, norm="batch", dropout=0.3)
    trainer = graph_trainer(model.to(data.features.dtype), graph, rows, make_optimizer=_adam, seed=5)
    losses = [trainer.train_epoch() for _ in range(steps)]
    return losses, trainer.predict_all(), graph.index.plan.num_halo


# Three steps through two layers and a batch norm: sums of at most 100 terms, and conditioning below 1e4 as in the
# exactness tests, which hold to 1e-10 over five steps.
BOUND = 1e-10


def _assert_same_training(ranks: Any, data: GraphData, parts: Tensor) -> list[int]:
    ((losses, logits, _),) = ranks.run(1, _train, data, torch.zeros(data.num_nodes, dtype=torch.int64))
    assert losses[-1] != losses[0]
    halos = []
    for other_losses, other_logits, halo in ranks.run(int(parts.max()) + 1, _train, data, parts):
        assert max(abs(a - b) for a, b in zip(losses, other_losses, strict=True)) <= BOUND
        assert float((logits - other_logits).abs().max()) <= BOUND
        halos.append(halo)
    return halos


def test_halo_05_disconnected_parts_exchange_nothing_and_train(ranks: Any) -> None:
    assert _assert_same_training(ranks, _disconnected(), torch.arange(16) // 8) == [0, 0]


# -- partition -----------------------------------------------------------------------------------------------------


def test_partition_06_training_on_features_without_edges(ranks: Any) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    data = GraphData(
        name="no edges",
        num_nodes=5,
        src=none,
        dst=none,
        features=torch.eye(5, dtype=torch.float64),
        labels=torch.tensor([0, 1, 0, 1, 1]),
        num_classes=2,
        train_nodes=torch.arange(5),
    )
    parts = partition_nodes(5, data.src, data.dst, [0.6, 0.4]).part
    assert torch.bincount(parts).tolist() == [3, 2]
    ((alone, _),) = ranks.run(1, _features_alone, data, torch.zeros(5, dtype=torch.int64))
    for losses, halo in ranks.run(2, _features_alone, data, parts):
        assert halo == 0 and losses[-1] < 0.7 * losses[0]
        assert max(abs(a - b) for a, b in zip(alone, losses, strict=True)) <= BOUND


class _SelfAndNeighbours(nn.Module):
    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(width, num_classes), nn.Linear(width, num_classes)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        with graph.local_scope():
            graph.ndata["h"] = self.others(x)
            graph.update_all(fn.copy_u("h", "m"), fn.mean("m", "h"))
            return self.own(x) + graph.ndata["h"]


def _features_alone(ranks: Ranks, data: GraphData, parts: Tensor) -> tuple[list[float], int]:
    graph, rows = cut(ranks, data, parts)
    torch.manual_seed(0)
    trainer = graph_trainer(
        _SelfAndNeighbours(5, 2).double(), graph, rows, make_optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1.0)
    )
    return [trainer.train_epoch() for _ in range(20)], graph.index.plan.num_halo


# -- kernels -------------------------------------------------------------------------------------------------------


def _train_stored(ranks: Ranks, folder: str, idtype: torch.dtype) -> tuple[list[float], Tensor]:
    shard = load_shard(Path(folder), ranks.rank)
    graph = ShardGraph(shard, ranks)
    graph = graph.int() if idtype is torch.int32 else graph.long()
    assert graph.idtype is idtype and graph.nodes().dtype is idtype
    rows = {"train": shard.train_rows, "val": shard.val_rows, "test": shard.test_rows}
    torch.manual_seed(0)
    model = GNN("gat", NUM_FEATURES, NUM_CLASSES, hidden=4, heads=2, dropout=0.3).double()
    trainer = graph_trainer(model, graph, rows, seed=5)
    return [trainer.train_epoch() for _ in range(3)], trainer.predict_all()


@pytest.mark.parametrize("num_parts", [1, 3])
def test_kernels_07_int32_and_int64_ids_train_alike_through_partition_and_disk(
    ranks: Any, tmp_path: Path, num_parts: int
) -> None:
    wide = make_graph()
    narrow = dataclasses.replace(wide, src=wide.src.int(), dst=wide.dst.int())
    results = []
    for data in (wide, narrow):
        folder = tmp_path / str(data.src.dtype)
        parts = make_parts(data, num_parts, "unequal")
        shares = [1.0] * num_parts
        assignment = partition_nodes(data.num_nodes, data.src, data.dst, shares, method="given", parts=parts)
        write_shards(folder, iter_shards(data, assignment), key="test", versions={})
        for idtype in (torch.int64, torch.int32):
            results.append(ranks.run(num_parts, _train_stored, str(folder), idtype))
    for other in results[1:]:
        for (a_losses, a_logits), (b_losses, b_logits) in zip(results[0], other, strict=True):
            assert a_losses == b_losses and torch.equal(a_logits, b_logits)


def test_kernels_07_mixed_id_types_are_refused_with_both_named() -> None:
    data = make_graph()
    with pytest.raises((ValueError, TypeError), match=r"(?s)int32.*int64|int64.*int32"):
        dataclasses.replace(data, src=data.src.int())
    graph = ShardGraph(build_shard(data, partition_nodes(data.num_nodes, data.src, data.dst, [1.0]), 0), Ranks())
    with pytest.raises(dgl.DGLError, match=r"torch\.int64.*torch\.int32"):
        graph.in_degrees(torch.tensor([0], dtype=torch.int32))


def _integers(ranks: Ranks, parts: Tensor) -> dict[str, Tensor]:
    """Copies to edges, maxima and minima over edges and user functions, for types without gradients."""
    data = make_graph()
    graph, _ = cut(ranks, data, parts)
    ids = graph.global_node_ids
    columns = {
        "bool": ids % 3 == 0,
        "int64": (ids * 7) % 61 + 2**53 + 1,
        "uint8": ((ids * 11) % 256).to(torch.uint8),
        "int32": (-ids).int(),
    }
    results = {}
    with intercept(nn.Identity(), graph).step(0):
        for name, column in columns.items():
            graph.ndata["x"] = column
            graph.apply_edges(fn.copy_u("x", "e"))
            graph.update_all(fn.copy_u("x", "m"), fn.max("m", "max"))
            graph.update_all(fn.copy_e("e", "m"), fn.min("m", "min"))
            graph.update_all(lambda edges: {"m": edges.src["x"]}, lambda nodes: {"last": nodes.mailbox["m"][:, -1]})
            order = torch.argsort(torch.cat(ranks.gather_rows(graph.global_edge_ids)))
            results[f"{name} edges"] = torch.cat(ranks.gather_rows(graph.edata["e"]))[order]
            for key in ("max", "min", "last"):
                results[f"{name} {key}"] = in_order(graph, graph.ndata[key])
    return results


def test_kernels_10_integers_and_bool_pass_unchanged_over_parts(ranks: Any) -> None:
    data = make_graph()
    (alone,) = ranks.run(1, _integers, torch.zeros(data.num_nodes, dtype=torch.int64))
    ids = torch.arange(data.num_nodes)
    assert torch.equal(alone["int64 edges"], ((ids * 7) % 61 + 2**53 + 1)[data.src])
    assert torch.equal(alone["bool edges"], (ids % 3 == 0)[data.src])
    largest = torch.zeros(61, dtype=torch.int64).scatter_reduce(0, data.dst, alone["int64 edges"], "amax")
    assert torch.equal(alone["int64 max"], largest), "nodes without in-edges hold zero"
    assert all(str(value.dtype) == f"torch.{name.split()[0]}" for name, value in alone.items())
    for results in ranks.run(3, _integers, make_parts(data, 3, "unequal")):
        for name, value in results.items():
            assert value.dtype == alone[name].dtype and torch.equal(value, alone[name]), name


def test_kernels_10_a_mean_of_integers_is_refused() -> None:
    data = make_graph()
    graph, _ = cut(Ranks(), data, torch.zeros(data.num_nodes, dtype=torch.int64))
    graph.ndata["x"] = torch.arange(61)
    with pytest.raises(dgl.DGLError, match=r"mean of torch\.int64 is not defined; convert the messages to float"):
        graph.update_all(fn.copy_u("x", "m"), fn.mean("m", "a"))


# -- api -----------------------------------------------------------------------------------------------------------


def _with_loops(ranks: Ranks, parts: Tensor) -> tuple[int, list[list[float]], list[int]]:
    """Graph 0->1, 1->1, 2->0 with an edge value; loops removed and added, twice."""
    data = GraphData(
        name="loops",
        num_nodes=3,
        src=torch.tensor([0, 1, 2]),
        dst=torch.tensor([1, 1, 0]),
        num_classes=1,
        edge_data={"value": torch.tensor([10.0, 11.0, 20.0])},
    )
    graph, _ = cut(ranks, data, parts)
    once = dgl.add_self_loop(dgl.remove_self_loop(graph))
    twice = dgl.add_self_loop(dgl.remove_self_loop(once))
    with intercept(nn.Identity(), twice).step(0):
        twice.ndata["id"] = twice.global_node_ids[:, None].float()
        twice.apply_edges(lambda edges: {"ends": torch.cat([edges.src["id"], edges.dst["id"]], 1)})
    ends = torch.cat(ranks.gather_rows(twice.edata["ends"])).tolist()
    assert once.num_edges_global() == twice.num_edges_global() == 5
    assert graph.num_edges_global() == 3 and torch.equal(
        graph.edata["value"], data.edge_data["value"][graph.global_edge_ids]
    )
    return twice.num_edges_global(), sorted(ends), in_order(twice, twice.in_degrees()[:, None]).view(-1).tolist()


def test_api_01_every_node_gets_exactly_one_self_loop(ranks: Any) -> None:
    expected = (5, [[0, 0], [0, 1], [1, 1], [2, 0], [2, 2]], [2, 2, 1])
    for num_parts, parts in ((1, torch.tensor([0, 0, 0])), (2, torch.tensor([0, 1, 1])), (3, torch.tensor([2, 0, 1]))):
        for count, ends, degrees in ranks.run(num_parts, _with_loops, parts):
            assert (count, ends, degrees) == expected


# -- the table -----------------------------------------------------------------------------------------------------


def test_the_table_names_every_case_once_with_a_test_or_what_brings_it() -> None:
    root = Path(__file__).resolve().parents[2]
    text = (root / "docs" / "cases.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([a-z]+-\d\d) [^|]*\|([^|]*)\|([^|]*)\|$", text, re.MULTILINE)
    counts = {"datasets": 8, "partition": 9, "halo": 5, "kernels": 10, "comm": 6, "launch": 4, "cli": 3}
    counts |= {"checkpoint": 4, "api": 3}
    expected = [f"{area}-{number:02d}" for area, count in counts.items() for number in range(1, count + 1)]
    assert sorted(name for name, _, _ in rows) == sorted(expected)
    for name, tests, later in rows:
        assert tests.strip() or later.strip(), name
        for file in re.findall(r"`(tests/[^`]+)`", tests):
            source = (root / file).read_text(encoding="utf-8")
            assert re.search(rf"^ *def test_\w*{name.replace('-', '_')}_", source, re.MULTILINE), f"{name}: {file}"


# -- comm ----------------------------------------------------------------------------------------------------------


def test_comm_03_90_10_and_0_training_nodes_train_as_one(ranks: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    ends = torch.randint(0, 120, (2, 500), generator=generator)
    data = GraphData(
        name="90, 10 and 0",
        num_nodes=120,
        src=ends[0],
        dst=ends[1],
        features=torch.randn(120, NUM_FEATURES, generator=generator, dtype=torch.float64),
        labels=torch.randint(0, NUM_CLASSES, (120,), generator=generator),
        num_classes=NUM_CLASSES,
        train_nodes=torch.arange(100),
    )
    parts = torch.tensor([0] * 90 + [1] * 10 + [2] * 20)
    assert all(halo > 0 for halo in _assert_same_training(ranks, data, parts))


def _samples_of_uneven_ranks(ranks: Ranks, sizes: tuple[int, ...]) -> tuple[list[float], int, list[list[int]]]:
    """Losses and steps of three epochs, and the samples that this rank's loader gives in each."""
    family = SampleFamily(make_model("mlp").double(), make_data("images", 23), ranks, sizes=sizes, seed=3)
    trainer = Trainer(family, make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    losses, seen = [], []
    for epoch in range(3):
        family.sampler.begin(epoch)
        seen.append([sample for batch in family.sampler for sample in batch])
        losses.append(trainer.train_epoch())
    return losses, trainer.num_steps, seen


def test_comm_04_10_and_13_samples_end_together_each_counted_once(ranks: Any) -> None:
    alone, num_steps, _ = _samples_of_uneven_ranks(Ranks(), (7,))
    answers = ranks.run(2, _samples_of_uneven_ranks, (3, 4))
    assert [steps for _, steps, _ in answers] == [num_steps] * 2 == [12, 12]
    for epoch in range(3):
        own = [seen[epoch] for _, _, seen in answers]
        assert [len(samples) for samples in own] == [10, 13]
        assert sorted(own[0] + own[1]) == list(range(23))
    for losses, _, _ in answers:
        assert losses == pytest.approx(alone, rel=1e-10)


def _evaluate_alone(ranks: Ranks, data: GraphData, parts: Tensor, out: str, num_calls: int) -> None:
    """Both ranks evaluate twice; then rank 1 is gone, and rank 0 goes on and writes down how that ended."""
    graph, rows = cut(ranks, data, parts)
    assert data.features is not None
    model = GNN("gcn", data.features.shape[1], data.num_classes, hidden=8).to(data.features.dtype)
    trainer = graph_trainer(model, graph, rows)
    for _ in range(2):
        trainer.evaluate()
    if ranks.rank == 1:
        os._exit(3)
    begin = time.monotonic()
    try:
        for _ in range(num_calls):
            trainer.evaluate()
    except HaloExchangeError as error:
        Path(out).write_text(f"{time.monotonic() - begin:.3f}\n{error}", encoding="utf-8")


@pytest.mark.parametrize("num_calls", [1, 3])
def test_comm_06_a_lone_evaluate_ends_at_once_when_its_peer_is_gone(ranks: Any, num_calls: int, tmp_path: Path) -> None:
    """Not after the collective's timeout, which is half an hour here."""
    data, out = make_graph(dtype=torch.float64), tmp_path / "end"
    with pytest.raises(RankError, match="the process ended"):
        ranks.run(2, _evaluate_alone, data, torch.arange(data.num_nodes) % 2, str(out), num_calls)
    seconds, text = out.read_text(encoding="utf-8").split("\n", 1)
    assert float(seconds) < 120
    assert text.startswith("rank 0: halo exchange ") and "exchanges rows with rank 1" in text


# -- cli -----------------------------------------------------------------------------------------------------------

_NO_NETWORK = """
import os, socket
with open(os.environ["NETWORK_LOG"], "a") as log:
    log.write(f"process {os.getpid()}\\n")

def refuse(what):
    with open(os.environ["NETWORK_LOG"], "a") as log:
        log.write(f"network {what}\\n")
    raise OSError(101, "Network is unreachable")

def is_here(host):
    return host in (None, "", "localhost", "::1") or str(host).startswith("127.") or host == socket.gethostname()

class Socket(socket.socket):
    def connect(self, address):
        return super().connect(address) if self.here(address) else refuse(address)
    def connect_ex(self, address):
        return super().connect_ex(address) if self.here(address) else refuse(address)
    def sendto(self, data, *rest):
        return super().sendto(data, *rest) if self.here(rest[-1]) else refuse(rest[-1])
    def here(self, address):
        return self.family == socket.AF_UNIX or is_here(address[0])

found = socket.getaddrinfo
socket.getaddrinfo = lambda host, *rest, **named: found(host, *rest, **named) if is_here(host) else refuse(host)
socket.socket = Socket
"""


def _without_network(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """``nugnn`` in a process whose own and whose children's sockets reach this machine alone; what they tried."""
    site, log = folder / "site", folder / "network.log"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_NO_NETWORK, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(site), "NETWORK_LOG": str(log), "NUGNN_CACHE": str(folder / "cache")}
    environment.pop("NUGNN_DATA", None)
    command = [sys.executable, "-m", "nugnn", *arguments]
    run = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    return run, log.read_text(encoding="utf-8").splitlines()


def test_cli_03_a_built_in_graph_trains_without_a_network(tmp_path: Path) -> None:
    run, tried = _without_network(tmp_path, "train", "--dataset", "digits", "--epochs", "2", "--workers", "2")
    assert run.returncode == 0, run.stderr
    assert len({line for line in tried if line.startswith("process ")}) >= 3, "the launcher and two workers"
    assert [line for line in tried if line.startswith("network ")] == []
    assert (tmp_path / "runs" / "digits-gcn" / "result.json").is_file()
    assert not (tmp_path / "cache").exists()


def test_cli_03_only_a_download_uses_the_network_and_says_what_to_put_where(tmp_path: Path) -> None:
    run, tried = _without_network(tmp_path, "train", "--dataset", "ogbn-arxiv", "--epochs", "2")
    assert run.returncode == 2
    assert {line for line in tried if line.startswith("network ")} == {"network snap.stanford.edu"}
    assert "arxiv.zip" in run.stderr and "put it here" in run.stderr and len(run.stderr.splitlines()) == 1


class _MovesItsGraph(nn.Module):
    """As much published code does; also a graph that is copied for it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GraphConv(NUM_FEATURES, NUM_CLASSES, allow_zero_in_degree=True)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        out: Tensor = self.conv(graph.to(x.device), x)
        return out


@pytest.mark.parametrize("workers", [1, 2])
def test_launch_02_the_graph_library_is_never_asked_for_a_device(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """DGL stays as built for CPUs: its graphs lie on the host, whatever the device of the tensors."""

    def refuse(*_: Any, **__: Any) -> None:
        raise dgl.DGLError("Device API cuda is not enabled. Please install the cuda version of dgl.")

    monkeypatch.setattr(dgl.DGLGraph, "to", refuse)
    monkeypatch.setattr(dgl.heterograph_index.HeteroGraphIndex, "copy_to", refuse)
    data = make_graph(dtype=torch.float32)
    with pytest.raises(dgl.DGLError, match="not enabled"):
        dgl.graph((data.src, data.dst)).to("cpu")
    if workers == 1:
        result = nugnn.fit(_MovesItsGraph(), data, epochs=2, device="cpu")
        assert len(result.history) == 2
    report = nugnn.check(_MovesItsGraph(), data, num_parts=workers + 1)
    assert report.largest_difference < 1e-8
