"""Ranks of NCCL that share a GPU, for machines with fewer GPUs than a test has ranks."""

from __future__ import annotations

import os

import torch


def share_gpus() -> torch.device:
    """This rank's GPU, for a process that ``torchrun`` has started and that has no communicator yet.

    NCCL refuses two ranks on one GPU of a host. Where there are too few it is told that each rank is on a host of its
    own: they then talk over loopback sockets, as ranks of several hosts do over the network.
    """
    rank, num_gpus = int(os.environ["RANK"]), torch.cuda.device_count()
    if num_gpus < int(os.environ["WORLD_SIZE"]):
        os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    device = torch.device("cuda", rank % num_gpus)
    torch.cuda.set_device(device)
    return device
