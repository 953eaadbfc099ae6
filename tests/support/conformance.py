"""One step of one DGL module on a plain graph, on one part and on several, with every number that can be compared."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import dgl
import torch
from torch import Tensor, nn

from nugnn.comm.gradients import sum_gradients
from nugnn.comm.groups import Ranks
from nugnn.datasets.graph_data import GraphData
from nugnn.declared_rows import as_edge_rows, as_node_rows
from nugnn.partition.assign import partition_nodes
from nugnn.partition.shard import build_shard
from nugnn.session import intercept
from nugnn.shard_graph import ShardGraph

NUM_FEATURES, NUM_EDGE_FEATURES, NUM_TYPES = 6, 4, 3
DROP = 0.4
NUM_NODES, MAX_ROWS = 43, 300
GRAPHS = ("loops", "sources")
BOUND = 1e-9
"""Relative, float64. A sum of at most 40 terms (the hub) in another order is off by 40 * 1.1e-16; eight such sums in a
row (TWIRLS) and conditions of powers and norms up to 1e4 make 4e-10. Wrong counts, masks or gradients exceed 1e-3."""


def make_graph(name: str) -> GraphData:
    """A directed graph with a hub and parallel edges.

    ``loops``: each node has a self-loop, two have nothing else. ``sources``: no self-loops, the last nodes have no
    in-edges and two of them no edges at all. No in-degree is 2: the third central moment of two values is zero, so its
    cube root and gradient (a PNA aggregator) would be rounding noise in DGL itself.
    """
    generator = torch.Generator().manual_seed(5)
    targets = NUM_NODES - (2 if name == "loops" else 7)
    src = (torch.rand(3 * NUM_NODES, generator=generator) ** 2 * (NUM_NODES - 2)).long()
    dst = torch.randint(0, targets, (3 * NUM_NODES,), generator=generator)
    src = torch.cat([src, src[:4], torch.full((9,), 1), torch.arange(2, 12)])
    dst = torch.cat([dst, dst[:4], torch.arange(2, 11), torch.full((10,), 1)])
    keep = src != dst
    src, dst = src[keep], dst[keep]
    if name == "loops":
        ids = torch.arange(NUM_NODES)
        src, dst = torch.cat([src, ids]), torch.cat([dst, ids])
    pairs = (torch.bincount(dst, minlength=NUM_NODES) == 2).nonzero().view(-1)
    src, dst = torch.cat([src, (pairs + 5) % (NUM_NODES - 2)]), torch.cat([dst, pairs])
    num_edges = len(src)

    def normal(rows: int, width: int) -> Tensor:
        return torch.randn(rows, width, generator=generator, dtype=torch.float64)

    return GraphData(
        name=name,
        num_nodes=NUM_NODES,
        src=src,
        dst=dst,
        labels=torch.zeros(NUM_NODES, dtype=torch.int64),
        num_classes=2,
        node_data={
            "x": normal(NUM_NODES, NUM_FEATURES),
            "coord": normal(NUM_NODES, 3),
            "eig": normal(NUM_NODES, 3),
            "ntype": torch.arange(NUM_NODES) * NUM_TYPES // NUM_NODES,
        },
        edge_data={
            "e": normal(num_edges, NUM_EDGE_FEATURES),
            "w": torch.rand(num_edges, generator=generator, dtype=torch.float64) + 0.5,
            "etype": torch.arange(num_edges) * NUM_TYPES // num_edges,
        },
    )


def make_parts(name: str, num_parts: int) -> Tensor:
    """Three parts of about 60, 25 and 15 % of the nodes; in ``sources`` the last one has no in-edge."""
    if num_parts == 1:
        return torch.zeros(NUM_NODES, dtype=torch.int64)
    assert num_parts == 3
    draw = torch.rand(NUM_NODES, generator=torch.Generator().manual_seed(6))
    if name == "loops":
        return (draw > 0.6).long() + (draw > 0.85).long()
    parts = (draw > 0.7).long()
    parts[NUM_NODES - 7 :] = 2
    return parts


@dataclass(frozen=True)
class Inputs:
    """What a module may be given: differentiable leaves, and types.

    Args:
        x: ``(N, 6)`` node features.
        coord: ``(N, 3)``.
        e: ``(E, 4)`` edge features.
        w: ``(E,)`` positive edge weights.
        eig: ``(N, 3)``, no gradient: precomputed eigenvectors.
        ntype: ``(N,)`` in [0, 3), ascending in global id.
        etype: ``(E,)`` in [0, 3), ascending in global id.
    """

    x: Tensor
    coord: Tensor
    e: Tensor
    w: Tensor
    eig: Tensor
    ntype: Tensor
    etype: Tensor


_LEAVES = {"x": "node", "coord": "node", "e": "edge", "w": "edge"}


@dataclass(frozen=True)
class Case:
    """One configuration of one module.

    Args:
        name: Name in ``dgl.nn.pytorch``.
        options: What is special about it, for people.
        build: Gets the dropout probability; called under a fixed seed.
        call: ``call(module, graph, inputs)``; ``module(graph, inputs.x)`` by default.
        outputs: A letter for each output: ``n`` node rows, ``e`` edge rows, ``g`` one result for the whole graph.
        graphs: Which graphs it runs on.
        bound: Largest difference allowed.
    """

    name: str
    options: str
    build: Callable[[float], nn.Module]
    call: Callable[[nn.Module, Any, Inputs], Any] = lambda module, graph, i: module(graph, i.x)
    outputs: str = "n"
    graphs: tuple[str, ...] = GRAPHS
    bound: float = BOUND

    def make(self, drop: float, graph_name: str) -> nn.Module:
        """A fresh module in float64 and train mode; layers that refuse nodes without in-edges are told to allow them
        on the graph that has some.
        """
        torch.manual_seed(0)
        module = self.build(drop).double().train()
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.requires_grad:
                    parameter += 0.1 * torch.randn_like(parameter)  # no bias stays 0
        for part in module.modules():
            if graph_name == "sources" and hasattr(part, "_allow_zero_in_degree"):
                part._allow_zero_in_degree = True
        return module


@dataclass
class Run:
    """Numbers of one rank: tensors by name, with the global ids of their rows (None: the same on every rank)."""

    values: dict[str, Tensor] = field(default_factory=dict)
    ids: dict[str, Tensor | None] = field(default_factory=dict)

    def put(self, name: str, value: Tensor, ids: Tensor | None = None) -> None:
        self.values[name], self.ids[name] = value.detach().clone().cpu(), None if ids is None else ids.cpu()


def _weights(number: int, rows: Tensor, shape: Sequence[int]) -> Tensor:
    """Fixed random weight of every entry of output ``number``, by global id of its row."""
    generator = torch.Generator().manual_seed(100 + number)
    return torch.randn((MAX_ROWS, *shape), generator=generator, dtype=torch.float64)[rows]


def _finish(
    run: Run,
    case: Case,
    out: Any,
    inputs: Inputs,
    ids: dict[str, Tensor],
    head: Callable[[Tensor], Tensor],
) -> Tensor:
    """Record the outputs; the loss of these rows. A whole-graph output is used by every node's loss."""
    outputs = out if isinstance(out, tuple) else (out,)
    assert len(outputs) == len(case.outputs), f"{case.name}: {len(outputs)} outputs"
    loss = inputs.x.new_zeros(())
    for number, (x, kind) in enumerate(zip(outputs, case.outputs, strict=True)):
        rows = ids["edge" if kind == "e" else "node"]
        x = head(x)
        run.put(f"output {number}", x, None if kind == "g" else rows)
        weights = _weights(number, rows.cpu(), x.shape[1:]).to(x.device)
        loss = loss + (x * weights).sum()  # (1, D) times (N, D) for a whole-graph output
    return loss


def _record_gradients(run: Run, inputs: Inputs, module: nn.Module, ids: dict[str, Tensor]) -> None:
    for name, kind in _LEAVES.items():
        if (grad := getattr(inputs, name).grad) is not None:
            run.put(f"gradient of {name}", grad, ids[kind])
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            run.put(f"gradient of {name}", parameter.grad)
    for name, buffer in module.named_buffers():
        run.put(f"buffer {name}", buffer)


def run_plain(case: Case, graph_name: str) -> Run:
    """Plain DGL on the whole graph, without dropout."""
    data = make_graph(graph_name)
    graph = dgl.graph((data.src, data.dst), num_nodes=data.num_nodes)
    values = {key: value.clone() for key, value in {**data.node_data, **data.edge_data}.items()}
    inputs = Inputs(**{key: value.requires_grad_(key in _LEAVES) for key, value in values.items()})
    ids = {"node": torch.arange(data.num_nodes), "edge": torch.arange(data.num_edges)}
    run, module = Run(), case.make(0.0, graph_name)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # APPNPConv multiplies features with ones of the default type
    try:
        out = case.call(module, graph, inputs)
    finally:
        torch.set_default_dtype(usual)
    loss = _finish(run, case, out, inputs, ids, lambda x: x)
    if loss.requires_grad:  # label propagation has nothing to train
        loss.backward()
    _record_gradients(run, inputs, module, ids)
    return run


def cut(ranks: Ranks, graph_name: str) -> ShardGraph:
    """This rank's part."""
    data, parts = make_graph(graph_name), make_parts(graph_name, ranks.world_size)
    assignment = partition_nodes(
        data.num_nodes, data.src, data.dst, [1.0] * ranks.world_size, method="given", parts=parts
    )
    return ShardGraph(build_shard(data, assignment, ranks.rank), ranks)


def shard_inputs(graph: ShardGraph) -> Inputs:
    """The inputs of this rank's rows."""
    values = {}
    for frame, mark in ((graph.ndata, as_node_rows), (graph.edata, as_edge_rows)):
        for key in ("x", "coord", "eig", "ntype", "e", "w", "etype"):
            if key in frame:
                values[key] = mark(frame[key].clone().requires_grad_(key in _LEAVES), graph)
    return Inputs(**values)


@dataclass(frozen=True)
class Job:
    """A case on a graph with a dropout probability; ``module`` is made once, because ranks may be threads that share
    torch's generator.
    """

    case: Case
    graph_name: str
    drop: float
    module: nn.Module

    @classmethod
    def of(cls, case: Case, graph_name: str, drop: float) -> Job:
        return cls(case, graph_name, drop, case.make(drop, graph_name))


def run_shard(ranks: Ranks, job: Job, step: int = 3) -> Run:
    """The same on this rank's part. With ``drop``, outputs pass through one more dropout, as a model's next layer
    would do: their rows have to be known.
    """
    case, drop = job.case, job.drop
    graph = cut(ranks, job.graph_name)
    inputs = shard_inputs(graph)
    ids = {"node": graph.global_node_ids, "edge": graph.global_edge_ids}
    run, module = Run(), copy.deepcopy(job.module).to(ranks.device)
    with intercept(module, graph, seed=11).step(step):
        out = case.call(module, graph, inputs)
        loss = _finish(run, case, out, inputs, ids, lambda x: nn.functional.dropout(x, drop))
        if loss.requires_grad:
            loss.backward()
    sum_gradients(module.parameters(), ranks)
    _record_gradients(run, inputs, module, ids)
    return run


def run_shards(ranks: Ranks, jobs: Iterable[Job], device: torch.device | None = None) -> list[Run | str]:
    """One run for each job, or what was wrong with it; an error on one rank only would leave its peers waiting."""
    ranks = ranks if device is None else replace(ranks, device=device)
    results: list[Run | str] = []
    for job in jobs:
        run: Run | str
        try:
            run = run_shard(ranks, job)
        except Exception as error:
            run = f"{type(error).__name__}: {error}"
        if ranks.is_split:
            failed = ranks.sum_(torch.tensor([float(isinstance(run, str))]))
            assert float(failed) in (0, ranks.world_size) or isinstance(run, str), "a peer failed"
        results.append(run)
    return results


def merge(runs: Sequence[Run]) -> Run:
    """Rows of all ranks in order of global id."""
    merged = Run()
    for name, first in runs[0].values.items():
        if runs[0].ids[name] is None:
            for run in runs[1:]:
                assert torch.equal(first, run.values[name]), f"{name} differs between ranks"
            merged.put(name, first)
            continue
        ids = torch.cat([run.ids[name] for run in runs])  # type: ignore[misc]
        rows = torch.cat([run.values[name] for run in runs])
        merged.put(name, torch.empty_like(rows).index_copy_(0, ids, rows))
    assert all(run.values.keys() == runs[0].values.keys() for run in runs)
    return merged


def difference(one: Run, other: Run) -> tuple[float, str]:
    """Largest difference with its name, relative to the largest entry of its group (outputs, gradients, buffers).

    A group shares one scale: a gradient that is truly zero is rounding noise on its own.
    """
    if one.values.keys() != other.values.keys():
        return float("inf"), f"only one has {sorted(one.values.keys() ^ other.values.keys())}"
    worst = (0.0, "equal")
    for group in ("output", "gradient", "buffer"):
        names = [name for name in one.values if name.startswith(group)]
        sizes = [float(one.values[name].abs().max()) for name in names if one.values[name].numel()]
        scale = max([size for size in sizes if size > 0], default=1.0)
        for name in names:
            a, b = one.values[name], other.values[name]
            if a.shape != b.shape:
                return float("inf"), f"{name}: {tuple(a.shape)} and {tuple(b.shape)}"
            if a.numel():
                gap = float((a - b).abs().max()) / scale
                worst = max(worst, (float("inf") if math.isnan(gap) else gap, name))
    return worst


@dataclass(frozen=True)
class Outcome:
    """What one job showed.

    Args:
        job: Which.
        to_one: Largest difference of three parts from one, with the name of the worst.
        to_dgl: The larger difference of one part and of three from plain DGL; None with dropout, whose masks are ours.
        effect: With dropout: difference from the same run without.
        error: What kept it from running.
    """

    job: Job
    to_one: tuple[float, str] = (float("inf"), "did not run")
    to_dgl: tuple[float, str] | None = None
    effect: float | None = None
    error: str = ""


def compare(
    cases: Iterable[Case],
    run_on_three: Callable[[list[Job]], list[list[Run | str]]],
    device: torch.device = torch.device("cpu"),  # noqa: B008 - immutable
) -> Iterator[Outcome]:
    """Every case on each of its graphs, without dropout and with it.

    Args:
        cases: Which configurations.
        run_on_three: Calls `run_shards` on three ranks.
        device: Of the single part; with dropout, one part on the CPU has to say the same.
    """
    jobs = [Job.of(case, graph, drop) for case in cases for graph in case.graphs for drop in (0.0, DROP)]
    on_three = zip(*run_on_three(jobs), strict=True)
    without_dropout = Run()
    for job, split in zip(jobs, on_three, strict=True):
        (alone,) = run_shards(Ranks(device=device), [job])
        errors = [run for run in (alone, *split) if isinstance(run, str)]
        if errors:
            yield Outcome(job, error=errors[0])
            continue
        one, three = merge([alone]), merge([run for run in split if isinstance(run, Run)])  # type: ignore[list-item]
        if job.drop:
            if device.type != "cpu":
                (on_host,) = run_shards(Ranks(), [job])
                assert isinstance(on_host, Run), on_host
                three_on_host = difference(merge([on_host]), three)
                yield Outcome(
                    job, max(difference(one, three), three_on_host), None, difference(without_dropout, one)[0]
                )
                continue
            yield Outcome(job, difference(one, three), None, difference(without_dropout, one)[0])
            continue
        without_dropout = one
        plain = run_plain(job.case, job.graph_name)
        yield Outcome(job, difference(one, three), max(difference(plain, one), difference(plain, three)))
