"""The pieces for a loop of one's own: declared rows, halo rows, values over all nodes; the example under torchrun."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn

import nugnn
from nugnn.comm.groups import Ranks
from nugnn.comm.local_ranks import run_local_ranks
from nugnn.kernels.rows import rows_of
from nugnn.partition.assign import partition_nodes
from nugnn.partition.shard import iter_shards
from nugnn.partition.store import write_shards
from shard_calls import NUM_NODES, make_data, shard_of, uneven_parts

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_loop.py"


def _losses(*command: str) -> list[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, *command, str(EXAMPLE)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return re.findall(r"loss ([0-9.]+)", done.stdout)


def test_own_loop_under_torchrun_gives_the_losses_of_one_process() -> None:
    alone = _losses()
    assert len(alone) == 5 and float(alone[-1]) < float(alone[0])
    # printed with 12 digits, computed in float64: differences of order 1e-15 never show
    assert _losses("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2") == alone


@pytest.mark.parametrize("ending", ["", "raise RuntimeError"])
def test_a_loop_of_ones_own_leaves_its_groups_before_the_interpreter_ends(ending: str) -> None:
    script = f"""
import atexit, torch.distributed as dist
atexit.register(lambda: print("groups left:", not dist.is_initialized()))  # runs last
import nugnn
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
nugnn.init()
{ending}
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    # a failing rank does not wait for work its peers will never join
    assert f"groups left: {not ending}" in done.stdout, done.stderr[-2000:]
    assert done.returncode == (1 if ending else 0), done.stderr[-2000:]


def test_ranks_that_were_left_are_joined_again(tmp_path: Path) -> None:
    """Under torchrun, whose store outlives the groups; each time the same groups in the same order."""
    script = """
import pathlib, sys
import nugnn, torch
from nugnn.comm.groups import leave_ranks
for _ in range(12):
    ranks = nugnn.init()
    found = ranks.sum_(torch.ones(1)).item()
    leave_ranks(ranks)
pathlib.Path(sys.argv[1], f"rank{ranks.rank}").write_text(str(found))  # ranks share the output: lines may mix
"""
    (tmp_path / "again.py").write_text(script)
    two_ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [sys.executable, *two_ranks, str(tmp_path / "again.py"), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == 2 * ["2.0"]


# -- values over all nodes -----------------------------------------------------------------------------------------


def _global_values(ranks: Ranks) -> dict[str, Tensor]:
    graph = shard_of(ranks, make_data())
    x = graph.ndata["h"].clone().requires_grad_()
    with nugnn.intercept(nn.Identity(), graph).step(0):
        total, mean = nugnn.global_sum(x, graph), nugnn.global_mean(x, graph)
        # every rank uses both in its own share of the loss
        share = ((x - mean) * total.tanh()).square().sum()
        share.backward()
    assert x.grad is not None
    assert rows_of(total).kind == "replicated" and rows_of(mean).kind == "replicated"  # type: ignore[union-attr]
    return {"ids": graph.global_node_ids, "sum": total.detach(), "mean": mean.detach(), "gradient": x.grad}


def test_global_sum_and_mean_with_gradients(ranks: Any) -> None:
    x = make_data().node_data["h"].clone().requires_grad_()
    ((x - x.mean(0)) * x.sum(0).tanh()).square().sum().backward()
    for num_parts in (1, 3):
        parts = ranks.run(num_parts, _global_values)
        order = torch.argsort(torch.cat([part["ids"] for part in parts]))
        gradient = torch.cat([part["gradient"] for part in parts])[order]
        # sums over 23 nodes, chained three times
        bound = 3 * NUM_NODES * torch.finfo(torch.float64).eps
        assert torch.allclose(parts[-1]["sum"], x.sum(0), rtol=bound, atol=bound)
        assert torch.allclose(parts[-1]["mean"], x.mean(0), rtol=bound, atol=bound)
        assert x.grad is not None
        assert torch.allclose(gradient, x.grad, rtol=10 * bound, atol=10 * bound)


def _own_aggregation(ranks: Ranks) -> dict[str, Tensor]:
    """Sum over in-edges by hand, from halo rows and local edges."""
    graph = shard_of(ranks, make_data())
    x = nugnn.as_node_rows(graph.ndata["h"].clone().requires_grad_(), graph)
    with nugnn.intercept(nn.Identity(), graph).step(0):
        rows = nugnn.halo(x, graph)
        source, target = nugnn.local_edges(graph)
        assert source.dtype == target.dtype == torch.int64 and len(rows) == graph.index.plan.num_local
        weighted = rows[source] * graph.edata["w"]
        out = torch.zeros_like(x).index_add(0, target, weighted)
        out.square().sum().backward()
    assert x.grad is not None
    return {"ids": graph.global_node_ids, "out": out.detach(), "gradient": x.grad}


def test_halo_and_local_edges_make_any_aggregation(ranks: Any) -> None:
    data = make_data()
    x = data.node_data["h"].clone().requires_grad_()
    expected = torch.zeros_like(x).index_add(0, data.dst.long(), x[data.src.long()] * data.edge_data["w"])
    expected.square().sum().backward()
    parts = ranks.run(3, _own_aggregation)
    order = torch.argsort(torch.cat([part["ids"] for part in parts]))
    bound = 2 * len(data.src) * torch.finfo(torch.float64).eps * float(expected.detach().abs().max()) ** 2
    assert x.grad is not None
    assert torch.allclose(torch.cat([p["out"] for p in parts])[order], expected.detach(), rtol=0, atol=bound)
    assert torch.allclose(torch.cat([p["gradient"] for p in parts])[order], x.grad, rtol=0, atol=bound)


def test_local_edges_of_a_reversed_graph_point_back() -> None:
    graph = shard_of(Ranks(), make_data())
    source, target = nugnn.local_edges(graph)
    back_source, back_target = nugnn.local_edges(graph.reverse())
    assert torch.equal(source, back_target) and torch.equal(target, back_source)


# -- declared rows -------------------------------------------------------------------------------------------------


def test_rows_have_to_fit_the_graph() -> None:
    graph = shard_of(Ranks(), make_data())
    with pytest.raises(ValueError, match="as_node_rows: 3 rows for 23 inner nodes"):
        nugnn.as_node_rows(torch.ones(3), graph)
    with pytest.raises(ValueError, match=f"as_edge_rows: 3 rows for {graph.num_edges()} local edges"):
        nugnn.as_edge_rows(torch.ones(3), graph)
    x = torch.ones(3)
    assert nugnn.as_replicated(x) is x and rows_of(x).kind == "replicated"  # type: ignore[union-attr]


def test_a_split_graph_outside_a_step_says_what_to_do() -> None:
    def use(ranks: Ranks) -> str:
        graph = shard_of(ranks, make_data())
        with pytest.raises(RuntimeError) as raised:
            graph.update_all(lambda edges: {"m": edges.src["h"]}, lambda nodes: {"a": nodes.mailbox["m"].sum(1)})
        return str(raised.value)

    assert all("nugnn.intercept(model, graph).step(number)" in text for text in run_local_ranks(2, use))


# -- shard ---------------------------------------------------------------------------------------------------------


def _shares(ranks: Ranks, folder: str | None) -> list[int]:
    data = make_data()
    graph = nugnn.shard(data if folder is None else folder, ranks, **({"shares": [3, 1]} if folder is None else {}))
    return graph.global_node_ids.tolist()


def test_shard_cuts_by_share_or_reads_a_folder(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks.run(2, _shares, None)
    assert sorted(first + second) == list(range(NUM_NODES)) and len(first) > 2 * len(second)
    data, parts = make_data(), uneven_parts(NUM_NODES, 2)
    assignment = partition_nodes(data.num_nodes, data.src, data.dst, [1, 1], method="given", parts=parts)
    write_shards(tmp_path / "shards", iter_shards(data, assignment), key="test", versions={})
    stored = ranks.run(2, _shares, str(tmp_path / "shards"))
    assert stored == [(parts == part).nonzero().view(-1).tolist() for part in (0, 1)]


def test_wrong_shares_and_wrong_parts_are_refused(tmp_path: Path) -> None:
    data = make_data()
    with pytest.raises(ValueError, match="shares: 2 numbers for 1 worker"):
        nugnn.shard(data, shares=[1, 2])
    parts = uneven_parts(NUM_NODES, 2)
    assignment = partition_nodes(data.num_nodes, data.src, data.dst, [1, 1], method="given", parts=parts)
    write_shards(tmp_path / "shards", iter_shards(data, assignment), key="test", versions={})
    with pytest.raises(ValueError, match="rank 0 of 1 was given the shard of part 0 of 2"):
        nugnn.shard(tmp_path / "shards")


def test_the_package_travels_by_name() -> None:
    def uses_nugnn() -> object:
        return nugnn.global_mean

    assert pickle.loads(cloudpickle.dumps(uses_nugnn))() is nugnn.global_mean


def test_init_without_peers_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    ranks = nugnn.init()
    assert (ranks.rank, ranks.world_size, ranks.is_split) == (0, 1, False)


@pytest.mark.parametrize("ranks", [None, Ranks()], ids=["left out", "of one process"])
def test_shares_of_ranks_that_nobody_started_say_how_to_start_them(ranks: Ranks | None) -> None:
    """README's loop, run as any script is: it said that 2 numbers are not 1, and not what to do."""
    with pytest.raises(ValueError, match="shares: 2 numbers for 1 worker: start the script with torchrun --standalone"):
        nugnn.shard(make_data(), ranks, shares=[0.7, 0.3])
    with pytest.raises(ValueError, match=r"--nproc-per-node 3, and give shard the ranks of nugnn.init\(\)$"):
        nugnn.shard(make_data(), ranks, shares=[1, 1, 1])
    assert nugnn.shard(make_data(), ranks, shares=[1.0]).num_nodes() == NUM_NODES
