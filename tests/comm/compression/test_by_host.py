"""Sums inside hosts first: the same bits everywhere, an L-th of the bytes across hosts, nothing lost."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nugnn.checkpoint import open_checkpoint, write_checkpoint
from nugnn.comm.compression import ddp
from nugnn.comm.compression.ddp import compress
from nugnn.comm.compression.gradient_sync import GradientSync
from nugnn.comm.compression.layout import Layout
from nugnn.comm.compression.link import Link, Sent
from nugnn.comm.compression.reduction import Rounding, sum_encoded
from nugnn.comm.compression.wire import WIRES, Wire
from nugnn.comm.groups import Ranks, groups_by_host
from nugnn.comm.hosts import HostGrid, HostGroups, host_grid
from nugnn.comm.local_ranks import run_local_ranks
from nugnn.history import History
from nugnn.networks import MLP
from nugnn.sample_family import SampleFamily
from nugnn.trainer import Trainer
from nugnn.trainer_state import capture, restore
from sample_cases import NUM_CLASSES, make_data

HOSTS = ("aabb", "aaabbb", "aabbcc", "abcbca")
_SIZES = ([], [1], [6, 0, 1000], [65, 3, 2570, 1])


def _summands(num_ranks: int, size: int) -> Tensor:
    return torch.randn(num_ranks, size, generator=torch.Generator().manual_seed(size))


def _layout(sizes: list[int], name: str, num_ranks: int, num_slices: int = 1) -> Layout:
    wires = [Wire(name if size > 5 else "fp32", bucket=64) for size in sizes]
    return Layout(sizes, wires, range(len(sizes)), num_ranks * num_slices)


def _sums(hosts: str, summands: Tensor, layout: Layout, rounding: Rounding) -> list[tuple[Tensor, Tensor, Sent]]:
    def run(ranks: Ranks) -> tuple[Any, ...]:
        link = Link.of(ranks, groups=groups_by_host(ranks))
        assert link.by_host is not None
        values = summands[ranks.rank].clone()
        rest = torch.full_like(values, torch.nan)
        sum_encoded(values, layout, link, rounding, rest=rest)
        return values, rest, link.sent

    return run_local_ranks(len(hosts), run, hosts=hosts)


@pytest.mark.parametrize("hosts", HOSTS)
def test_every_rank_has_the_same_bits_and_rests_make_up_for_the_error(hosts: str) -> None:
    num_ranks, num_hosts = len(hosts), len(set(hosts))
    per_host = num_ranks // num_hosts
    for sizes in _SIZES:
        summands = _summands(num_ranks, sum(sizes))
        exact = summands.double().sum(0)
        for name in ("fp32", "bf16", "fp16", "8bit", "3bit", "1bit"):
            for rounding in (Rounding(), Rounding(seed=7, step=3)):
                num_slices = 2 if rounding.seed else 1
                layout = _layout(sizes, name, num_ranks, num_slices)
                results = _sums(hosts, summands, layout, rounding)
                out = results[0][0]
                assert all(torch.equal(out, other) for other, *_ in results)
                error = (out.double() + sum(rest.double() for _, rest, _ in results) - exact).abs()
                # P - 1 additions and H + 1 subtractions in float32, of values below 2 P max
                bound = 2 * num_ranks * 2.0**-24 * 2 * num_ranks * float(summands.abs().amax() if sum(sizes) else 0)
                assert error.numel() == 0 or float(error.max()) <= bound
                pieces = layout.pieces(per_host)
                for rank, (_, rest, sent) in enumerate(results):
                    place = hosts[:rank].count(hosts[rank])
                    own, largest = pieces[place], max(piece.size for piece in pieces)
                    owner = sorted(r for r in range(num_ranks) if hosts[:r].count(hosts[r]) == place).index(rank)
                    slices = [piece.chunk_bytes for piece in own.pieces(num_slices)]
                    across = sum(sum(c) - c[owner] + (num_hosts - 1) * max(c) for c in slices)
                    inside = 4 * (layout.size - own.size) + 4 * (per_host - 1) * largest
                    assert (sent.across_bytes, sent.num_bytes) == (across, across + inside)
                    start = sum(piece.size for piece in pieces[:place])
                    assert not rest[:start].any() and not rest[start + own.size :].any()


def test_a_piece_is_what_hosts_alone_would_sum() -> None:
    """Each piece is the encoded sum, between as many ranks as there are hosts, of the sums of hosts."""
    size, hosts = 5000, "aaabbb"
    summands = _summands(6, size)
    layout = _layout([size], "3bit", 6)
    found = _sums(hosts, summands, layout, Rounding(seed=1))[0][0]
    of_hosts = [summands[0] + summands[1] + summands[2], summands[3] + summands[4] + summands[5]]
    start, expected = 0, []
    for piece in layout.pieces(3):

        def run(ranks: Ranks, piece: Layout = piece, start: int = start) -> Tensor:
            values = of_hosts[ranks.rank][start : start + piece.size].clone()
            sum_encoded(values, piece, Link.of(ranks), Rounding(seed=1))
            return values

        expected.append(run_local_ranks(2, run)[0])
        start += piece.size
    assert torch.equal(found, torch.cat(expected))


@pytest.mark.parametrize(("hosts", "expected"), [("aabb", 0.155), ("aaaabbbb", 0.155), ("aabbccdd", 0.166)])
def test_the_error_is_that_of_as_many_ranks_as_there_are_hosts(hosts: str, expected: float) -> None:
    size = 1 << 17
    summands = _summands(len(hosts), size)
    layout = Layout([size], [Wire("4bit", 1024)], [0], len(hosts))
    out, exact = _sums(hosts, summands, layout, Rounding())[0][0], summands.sum(0)
    assert float((out - exact).norm() / exact.norm()) == pytest.approx(expected, rel=0.02)


def test_whole_numbers_that_travel_as_they_are_have_the_plain_sum() -> None:
    summands = _summands(6, 3000).mul(1000).round()
    for hosts in ("aaabbb", "aabbcc"):
        out = _sums(hosts, summands, _layout([2000, 1000], "fp32", 6), Rounding())[0][0]
        assert torch.equal(out, summands.sum(0))


def test_what_is_not_finite_on_one_rank_is_nan_on_all() -> None:
    for name in WIRES:
        for bad in (math.nan, math.inf, -math.inf):
            summands = torch.ones(4, 300)
            summands[2, 100] = bad
            for out, *_ in _sums("aabb", summands, _layout([300], name, 4), Rounding()):
                assert not torch.isfinite(out[100]) and torch.equal(out[:64], torch.full((64,), 4.0))


def test_fewer_bytes_leave_a_host() -> None:
    """An L-th of what leaves it where every rank exchanges with every other one."""
    size, num_ranks = 1 << 18, 8
    summands = _summands(num_ranks, size)

    def flat(ranks: Ranks) -> int:
        link = Link.of(ranks)
        sum_encoded(summands[ranks.rank].clone(), layout, link, Rounding())
        return link.sent.across_bytes

    layout = Layout([size], [Wire("4bit")], [0], num_ranks)
    for hosts in ("aaaabbbb", "aabbccdd"):
        num_hosts = len(set(hosts))
        per_host = num_ranks // num_hosts
        before = sum(run_local_ranks(num_ranks, flat, hosts=hosts))
        after = sum(sent.across_bytes for *_, sent in _sums(hosts, summands, layout, Rounding()))
        total = sum(layout.chunk_bytes)
        assert after == 2 * (num_hosts - 1) * total  # both ways once between hosts, whatever the number of their ranks
        assert before == per_host * after


# -- between processes -------------------------------------------------------------------------------------------------


def _on_two_hosts(ranks: Ranks) -> Ranks | None:
    """Four of the five ranks, two on each host; None on the fifth, which makes the groups with them."""
    grid = host_grid([0, 0, 1, 1])
    assert grid is not None
    halo, control, *others = [dist.new_group(m) for m in (range(4), range(4), *grid.rows, *grid.columns)]
    if ranks.rank == 4:
        return None
    groups = HostGroups(grid, others[ranks.rank // 2], others[2 + ranks.rank % 2])
    return Ranks(ranks.rank, 4, halo, control, hosts=(0, 0, 1, 1), host_groups=groups)


def _trainer(ranks: Ranks, **how: Any) -> Trainer:
    torch.manual_seed(0)
    model = MLP(72, NUM_CLASSES, hidden=64, layers=3, norm="batch", dropout=0.3)
    family = SampleFamily(model, make_data("images", 40, torch.float32), ranks, sizes=(9, 1, 8, 6), seed=3)
    return Trainer(family, grad_sync="4bit", **how)


def _bits(trainer: Trainer) -> list[Tensor]:
    return [value.clone() for value in trainer.model.state_dict().values()]


def _trained(five: Ranks, folder: Path) -> dict[str, Any] | None:
    """A run of unequal batches that goes on from its checkpoint, beside one that was not stopped and a flat one."""
    ranks = _on_two_hosts(five)
    if ranks is None:
        return None
    whole, first, flat = _trainer(ranks), _trainer(ranks), _trainer(ranks, grad_sync_hosts="flat")
    for trainer in (whole, first, flat):
        trainer.train_epoch()
    shared, own = capture(first, History())
    where = write_checkpoint(folder, ranks, epoch=1, shared=shared, own=own, identity={})
    second = _trainer(ranks)
    restore(second, open_checkpoint(where))
    for trainer in (whole, second, flat):
        trainer.train_epoch()
    same = all(torch.equal(a, b) for a, b in zip(_bits(whole), _bits(second), strict=True))
    return {"bits": _bits(whole), "resumed": same, "by host": whole.grad_sync.report(), "flat": flat.grad_sync.report()}


def test_a_run_has_the_same_bits_on_all_ranks_and_goes_on_in_them(ranks: Any, tmp_path: Path) -> None:
    found = ranks.run(5, _trained, tmp_path)[:4]
    for of_rank in found:
        assert all(torch.equal(a, b) for a, b in zip(found[0]["bits"], of_rank["bits"], strict=True))
        assert of_rank["resumed"]
        by_host, flat = of_rank["by host"], of_rank["flat"]
        assert (by_host["hosts"], by_host["sums_inside_hosts_first"]) == (2, True)
        assert (flat["hosts"], flat["sums_inside_hosts_first"]) == (2, False)
    across = [sum(of_rank[way]["sent_bytes_across_hosts"] for of_rank in found) for way in ("by host", "flat")]
    assert across[0] < 0.6 * across[1]  # half of it, but for chunks that are padded to the longest


def _script(five: Ranks) -> dict[str, Any] | None:
    """DistributedDataParallel with unequal batches and a layer that ranks leave out in turn."""
    ranks = _on_two_hosts(five)
    if ranks is None:
        return None
    arrived, own, bits = torch.zeros(48, 40).double(), torch.zeros(48, 40).double(), []
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 48), nn.Tanh(), nn.Linear(48, 30))
    model, twin = DistributedDataParallel(copy.deepcopy(net), process_group=ranks.control), net
    sync = compress(model, 3, bucket=64, check_every=2, group=ranks.halo, hosts=ranks.host_groups or "flat")
    sync.weight = (5 + ranks.rank) / 26
    for step in range(4):
        x = torch.randn(5 + ranks.rank, 40, generator=torch.Generator().manual_seed(10 * step + ranks.rank))
        for module in (model, twin):
            module.zero_grad()
            module(x).square().mean().backward()
        for total, module in ((arrived, model.module), (own, twin)):
            assert module[0].weight.grad is not None
            total += module[0].weight.grad
        bits += [p.grad for p in model.parameters() if p.grad is not None]
    return {
        "bits": bits,
        "arrived": arrived,
        "own": own * sync.weight,
        "kept": sync.state_dict()["residuals"]["0.weight"].double(),
        "report": sync.report(),
    }


def test_a_script_has_the_same_bits_on_all_ranks_and_loses_nothing(ranks: Any) -> None:
    found = ranks.run(5, _script)[:4]
    for of_rank in found:
        assert all(torch.equal(a, b) for a, b in zip(found[0]["bits"], of_rank["bits"], strict=True))
        assert (of_rank["report"]["hosts"], of_rank["report"]["sums_inside_hosts_first"]) == (2, True)
    given, kept = (sum(of_rank[what] for of_rank in found) for what in ("own", "kept"))
    error = (found[0]["arrived"] + kept - given).abs().max()
    # each of 4 steps: some 8 operations in float32
    assert float(error) < 4 * 8 * 2.0**-24 * float(given.abs().max() + kept.abs().max())
    assert bool(kept.any())


def _unequal(ranks: Ranks) -> list[Any]:
    """Hosts with two ranks and one."""
    name = mock.patch.object(ddp, "host_name", return_value="ab"[ranks.rank == 2])
    said = []
    for hosts in ("auto", "flat"):
        model = DistributedDataParallel(nn.Linear(40, 40), process_group=ranks.control)
        with name, warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            sync = compress(model, 4, group=ranks.halo, hosts=hosts)
        model(torch.ones(2, 40)).sum().backward()
        said.append([str(warning.message) for warning in seen])
        assert (sync.report()["hosts"], sync.report()["sums_inside_hosts_first"]) == (2, False)
    for wrong in ("host", HostGroups(HostGrid(((0, 1), (2, 3))), None, None)):
        try:
            model = DistributedDataParallel(nn.Linear(40, 40), process_group=ranks.control)
            compress(model, 4, group=ranks.halo, hosts=wrong)  # type: ignore[arg-type]
        except ValueError as error:
            said.append(str(error))
    return said


def test_hosts_of_unequal_numbers_of_ranks_are_left_flat_and_that_is_said(ranks: Any) -> None:
    for rank, (auto, flat, *refused) in enumerate(ranks.run(3, _unequal)):
        assert flat == [] and len(auto) == (rank == 0)
        assert all("hosts have 2, 1 workers: gradients are not summed inside each host first" in text for text in auto)
        assert refused == [
            "hosts 'host' is not known; choose one of auto, flat",
            "hosts has 4 ranks, and the model is on 3",
        ]

    def run(ranks: Ranks) -> list[Any]:
        named = {"w": nn.Parameter(torch.zeros(40, 50))}
        syncs = [GradientSync("4bit", named, ranks, hosts) for hosts in ("auto", "flat")]
        return [sync.prepare() for sync in syncs]

    for said, nothing in run_local_ranks(3, run, hosts="aab"):
        assert "hosts have 2, 1 workers" in said and nothing is None
    assert run_local_ranks(2, run, hosts="ab") == run_local_ranks(4, run, hosts="aabb")[:2] == [[None, None]] * 2


@pytest.mark.slow
def test_processes_that_pretend_to_be_on_two_hosts() -> None:
    """Groups that runs and scripts make themselves, from names of hosts."""
    script = str(Path(__file__).with_name("host_sums.py"))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--standalone"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, script, "gloo", "cpu"], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    digests = [line for line in done.stdout.splitlines() if line.startswith("DIGEST")]
    assert len(digests) == 4 and len(set(digests)) == 1
