"""Random programs of message passing on two or three unequal parts give every value that plain DGL gives."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import dgl
import pytest
import torch
from dgl import function as fn
from torch import Tensor

from exactness import make_graph, make_parts
from nugnn import intercept, seam
from nugnn.comm.groups import Ranks
from nugnn.comm.local_ranks import run_local_ranks
from nugnn.datasets.graph_data import GraphData
from nugnn.partition.assign import partition_nodes
from nugnn.partition.shard import build_shard
from nugnn.shard_graph import ShardGraph

COLUMNS = {"u": "h", "v": "k", "e": "e"}
OPERANDS = ("u", "e", "u_add_v", "u_sub_v", "u_mul_v", "u_dot_v", "u_add_e", "u_mul_e", "e_add_v", "v_sub_u", "v_mul_e")
REDUCERS = (fn.sum, fn.mean, fn.max, fn.min)


def message(rng: random.Random) -> Any:
    name = rng.choice(OPERANDS)
    if "_" not in name:
        return getattr(fn, f"copy_{name}")(COLUMNS[name], "m")
    return getattr(fn, name)(COLUMNS[name[0]], COLUMNS[name[-1]], "m")


def tame(x: Tensor) -> Tensor:
    """Bounded and of the width that every column has, so that programs can go on from it."""
    return torch.tanh(x).expand(-1, 3).clone()


def built_in(g: Any, rng: random.Random) -> None:
    g.update_all(message(rng), rng.choice(REDUCERS)("m", "t"))
    g.ndata[rng.choice("hk")] = tame(g.ndata.pop("t"))


def built_in_on_edges(g: Any, rng: random.Random) -> None:
    message_on_edges = message(rng)
    g.apply_edges(message_on_edges)
    g.edata["e"] = tame(g.edata.pop("m"))


def user_functions(g: Any, rng: random.Random) -> None:
    reduce = rng.choice(
        (
            lambda nodes: {"t": nodes.mailbox["m"].sort(1).values[:, 0]},
            lambda nodes: {"t": nodes.mailbox["m"].cumsum(1)[:, -1] + nodes.data["h"]},
            lambda nodes: {"t": nodes.mailbox["m"][:, 0] - nodes.mailbox["m"][:, -1]},  # the order of in-edges
        )
    )
    g.update_all(lambda edges: {"m": (edges.src["h"] - edges.dst["k"]) * edges.data["w"][:, None]}, reduce)
    g.ndata["k"] = tame(g.ndata.pop("t"))


def user_message(g: Any, rng: random.Random) -> None:
    g.update_all(lambda edges: {"m": edges.src["k"] * edges.dst["h"] + edges.data["e"]}, rng.choice(REDUCERS)("m", "t"))
    g.ndata["h"] = tame(g.ndata.pop("t"))


def softmax(g: Any, rng: random.Random) -> None:
    g.edata["e"] = dgl.nn.functional.edge_softmax(g, g.edata["e"], norm_by=rng.choice(("src", "dst")))


def reversed_graph(g: Any, rng: random.Random) -> None:
    backward = dgl.reverse(g, copy_ndata=True, copy_edata=True)
    backward.update_all(message(rng), rng.choice(REDUCERS)("m", "t"))
    g.ndata["k"] = tame(backward.ndata["t"])


def self_loops(g: Any, rng: random.Random) -> None:
    looped = dgl.add_self_loop(dgl.remove_self_loop(g) if rng.random() < 0.5 else g, fill_data=1.0)
    looped.ndata["h"] = g.ndata["h"]
    looped.update_all(fn.u_mul_e("h", "w", "m"), rng.choice(REDUCERS)("m", "t"))
    g.ndata["h"] = tame(looped.ndata["t"])


def readout(g: Any, rng: random.Random) -> None:
    over_all = rng.choice(
        (
            lambda: dgl.sum_nodes(g, "h"),
            lambda: dgl.mean_nodes(g, "k"),
            lambda: dgl.max_nodes(g, "h"),
            lambda: dgl.sum_edges(g, "e"),
            lambda: dgl.readout_nodes(g, "k", op="min"),
        )
    )
    g.ndata["k"] = tame(g.ndata["k"] + over_all())


def degrees(g: Any, rng: random.Random) -> None:
    g.ndata["h"] = g.ndata["h"] * g.in_degrees()[:, None] / (1.0 + g.out_degrees()[:, None])


def several_types(g: Any, rng: random.Random) -> None:
    g.multi_update_all({"_E": (message(rng), rng.choice(REDUCERS)("m", "t"))}, "sum")
    g.ndata["h"] = tame(g.ndata.pop("t"))


STEPS: tuple[Callable[[Any, random.Random], None], ...] = (
    *(built_in, built_in, built_in, built_in_on_edges, user_functions, user_message, softmax),
    *(reversed_graph, self_loops, readout, degrees, several_types),
)


def start(g: Any, node_ids: Tensor, edge_ids: Tensor, data: GraphData) -> None:
    columns = torch.arange(3)
    g.ndata["h"] = torch.sin(node_ids.double()[:, None] + columns)
    g.ndata["k"] = torch.cos(node_ids.double()[:, None] * 2 + columns)
    g.edata["e"] = torch.sin(edge_ids.double()[:, None] * 3 + columns)
    g.edata["w"] = data.edge_data["weight"][edge_ids]


def values(g: Any) -> tuple[Tensor, Tensor, Tensor]:
    return g.ndata["h"].clone(), g.ndata["k"].clone(), g.edata["e"].clone()


def compare_program(seed: int, num_steps: int = 10) -> None:
    """Run one program on plain DGL and on parts; every column of every node and edge agrees after each step."""
    seam.install()
    rng = random.Random(seed)
    data = make_graph(seed, self_loops=bool(seed % 2))
    program = [(rng.choice(STEPS), rng.randrange(10**6)) for _ in range(num_steps)]
    num_parts, how = (2, 3)[seed % 2], ("unequal", "no_train", "metis", "random")[seed % 4]
    parts = make_parts(data, num_parts, how)
    plain = dgl.graph((data.src, data.dst), num_nodes=data.num_nodes)
    start(plain, torch.arange(data.num_nodes), torch.arange(data.num_edges), data)
    expected = []
    for step, choice in program:
        step(plain, random.Random(choice))
        expected.append(values(plain))

    def on_rank(ranks: Ranks) -> list[tuple[Tensor, ...]]:
        shares = [1.0] * num_parts
        assignment = partition_nodes(data.num_nodes, data.src, data.dst, shares, method="given", parts=parts)
        g = ShardGraph(build_shard(data, assignment, ranks.rank), ranks)
        start(g, g.global_node_ids, g.global_edge_ids, data)
        found = []
        with intercept(torch.nn.Identity(), g).step(0):
            for step, choice in program:
                step(g, random.Random(choice))
                found.append((g.global_node_ids, g.global_edge_ids, *values(g)))
        return found

    by_rank = run_local_ranks(num_parts, on_rank, timeout_seconds=30)
    for number, (step, _) in enumerate(program):
        nodes, edges, *columns = (torch.cat(rows) for rows in zip(*(found[number] for found in by_rank), strict=True))
        for ids, mine, whole in zip((nodes, nodes, edges), columns, expected[number], strict=True):
            difference = float((mine - whole[ids]).abs().nan_to_num(nan=math.inf).max())
            assert torch.equal(mine, whole[ids]) or difference < 1e-9, (seed, number, step.__name__, difference)


@pytest.mark.parametrize("seed", range(12))
def test_a_random_program_over_parts_equals_plain_dgl(seed: int) -> None:
    compare_program(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12, 200))
def test_many_random_programs_over_parts_equal_plain_dgl(seed: int) -> None:
    compare_program(seed)
