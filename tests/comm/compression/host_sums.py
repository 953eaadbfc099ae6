"""Sums inside hosts first, between processes that pretend to be on two hosts; prints a digest. Run by torchrun.

torchrun --nproc-per-node 4 host_sums.py BACKEND DEVICE
"""

from __future__ import annotations

import hashlib
import os
import sys

import torch
import torch.distributed as dist
from shared_gpus import share_gpus
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import nugnn
from nugnn.comm.buckets import Bucket
from nugnn.comm.compression.gradient_sync import GradientSync
from nugnn.comm.groups import groups_by_host, join_ranks, leave_ranks


def script(rank: int, device: torch.device, bits: int | str, hosts: str) -> list[Tensor]:
    """Some steps of DistributedDataParallel."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(200, 300), nn.Tanh(), nn.Linear(300, 10)).to(device)
    model = DistributedDataParallel(net, bucket_cap_mb=0.1)
    sync = nugnn.comm.compress(model, bits, hosts=hosts, check_every=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        x = torch.randn(16, 200, generator=torch.Generator().manual_seed(100 * step + rank)).to(device)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    report = sync.report()
    assert (report["hosts"], report["sums_inside_hosts_first"]) == (2, hosts == "auto")
    if bits == "fp32":  # summed by the process group, which does not say what crosses between hosts
        assert report["sent_bytes"] and report["sent_bytes_across_hosts"] is None
    else:
        assert 0 < report["sent_bytes_across_hosts"] < report["sent_bytes"]
    return [p.detach().cpu() for p in model.parameters()]


def run(device: torch.device) -> list[Tensor]:
    """Sums of gradients as a run makes them, on the main thread and beside it."""
    ranks = join_ranks(device=device)
    assert ranks.hosts == (0, 0, 1, 1)
    named = {"w": nn.Parameter(torch.zeros(300, 200, device=device)), "b": nn.Parameter(torch.zeros(7, device=device))}
    sync, flat = GradientSync("4bit", named, ranks), GradientSync("4bit", named, ranks, "flat")
    assert groups_by_host(ranks) is groups_by_host(ranks) is not None
    draw, bucket, found = torch.Generator().manual_seed(ranks.rank), Bucket(list(named.values())), []
    for step in range(4):
        for p in named.values():
            p.grad = torch.randn(p.shape, generator=draw).to(device)
        for way in (sync, flat):
            way.open(1.0)
            if step < 2:
                total = way.sum_(bucket)
            else:
                total, wait = way.begin(bucket)
                wait()
            found.append(total.cpu())
            way.settle(is_good=True)
    reports = [sync.report() or {}, flat.report() or {}]
    assert [report["sums_inside_hosts_first"] for report in reports] == [True, False]
    assert reports[0]["sent_bytes_across_hosts"] < reports[1]["sent_bytes_across_hosts"]
    leave_ranks(ranks)
    assert ranks.host_groups is None
    return found


def main() -> None:
    backend, device = sys.argv[1], torch.device(sys.argv[2])
    rank = int(os.environ["RANK"])
    os.environ["NUGNN_HOST"] = "first" if rank < 2 else "second"
    if device.type == "cuda":
        device = share_gpus()
        torch.use_deterministic_algorithms(True)
    dist.init_process_group(backend)
    found: list[Tensor] = []
    for bits in ("fp32", 4, "adaptive", "powersgd"):
        found += script(rank, device, bits, "auto")
    found += script(rank, device, 4, "flat")
    seen: list[str] = [""] * dist.get_world_size()
    digest = hashlib.sha256()
    for tensor in found:
        digest.update(tensor.numpy().tobytes())
    dist.all_gather_object(seen, digest.hexdigest())
    assert len(set(seen)) == 1, seen
    for tensor in run(device):
        digest.update(tensor.numpy().tobytes())
    print(f"DIGEST {digest.hexdigest()}\n", end="", flush=True)  # in one write: ranks share the output


if __name__ == "__main__":
    main()
