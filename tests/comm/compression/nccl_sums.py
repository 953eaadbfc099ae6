"""Trains under DDP, uneven batches, each code with feedback and without; prints a digest of the weights. By torchrun.

torchrun --nproc-per-node 2 nccl_sums.py BACKEND cuda WAY...
"""

from __future__ import annotations

import hashlib
import itertools
import sys

import torch
import torch.distributed as dist
from shared_gpus import share_gpus
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import nugnn
from nugnn.comm.compression import compressor

STEPS = 200
compressor.FIRST_PLAN, compressor.STEPS_BETWEEN_PLANS = 3, 5
"""With inputs of this size ``adaptive`` takes other bits than 4 on its way."""


def _num_rows(rank: int) -> int:
    """Uneven batches, so that the weights of ranks differ."""
    return 16 - 5 * (rank % 2)


def main() -> None:
    backend, _, *ways = sys.argv[1:]
    assert ways, "name what gradients travel as, such as 4 or bf16"
    device = share_gpus()
    dist.init_process_group(backend)
    rank = dist.get_rank()
    torch.use_deterministic_algorithms(True)
    digest = hashlib.sha256()
    total = sum(_num_rows(each) for each in range(dist.get_world_size()))
    for way, feeds_back in itertools.product(ways, (True, False)):
        bits = int(way) if way.isdigit() else way
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(200, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 10))
        model = DistributedDataParallel(net.to(device), device_ids=[device.index], bucket_cap_mb=0.2)
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=5)
        sync = nugnn.comm.compress(model, bits, scaler=scaler, error_feedback=feeds_back, check_every=3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses, bits_seen = [], set()
        for step in range(STEPS):
            x = 16 * torch.randn(_num_rows(rank), 200, generator=torch.Generator().manual_seed(100 * step + rank))
            sync.weight = len(x) / total
            optimizer.zero_grad()
            loss = model(x.to(device)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.detach())
            bits_seen |= set(sync.report().get("bits", {}).values())
        assert sync.report()["steps"] == STEPS
        assert float(losses[-1]) < 0.9 * float(losses[0]), "weights that nothing moves are the same everywhere, too"
        assert way != "adaptive" or len(bits_seen) > 1, bits_seen
        for p in model.parameters():
            digest.update(p.detach().cpu().numpy().tobytes())
    seen: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(seen, digest.hexdigest())
    if rank == 0:
        assert len(set(seen)) == 1, seen
        print("DIGEST", seen[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
