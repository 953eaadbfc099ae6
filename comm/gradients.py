"""Gradients are summed over ranks: each rank's loss is already its share of the global one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from nugnn.comm.buckets import Bucket
from nugnn.comm.groups import Ranks


def sum_gradients(parameters: Iterable[nn.Parameter], ranks: Ranks) -> None:
    """Add up the gradients of replicated parameters over ranks, in place; every rank ends with the same bits.

    A parameter that has a gradient on some ranks only counts as zero on the others; one that has none anywhere keeps
    none, so that optimizers skip it as they would on one device.

    Args:
        parameters: Same order on every rank; sharded parameters (`nugnn.NodeEmbedding`) do not belong here.
        ranks: Who takes part.
    """
    if not ranks.is_split:
        return
    with ranks.clock.measure("sync", ranks.device):
        _sum_gradients([p for p in parameters if p.requires_grad], ranks)


def _sum_gradients(trainable: list[nn.Parameter], ranks: Ranks) -> None:
    by_type: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in trainable:
        by_type.setdefault(parameter.dtype, []).append(parameter)
    for group in by_type.values():
        bucket = Bucket(group)
        bucket.unpack(ranks.sum_(bucket.packed()))


def broadcast_state(tensors: Sequence[Tensor], ranks: Ranks) -> bool:
    """Make parameters and buffers equal to rank 0's, in place; nothing travels when they are equal already.

    Returns:
        Whether they differed on some rank; the same answer everywhere.
    """
    if not ranks.is_split or equal_everywhere(tensors, ranks):
        return False
    with torch.no_grad():
        for tensor in tensors:
            wire = tensor.detach().contiguous()
            ranks.broadcast_(wire)
            if wire.data_ptr() != tensor.data_ptr():
                tensor.copy_(wire)
    return True


def equal_everywhere(tensors: Sequence[Tensor], ranks: Ranks) -> bool:
    """Whether all ranks hold the same bits; the same answer everywhere, a collective call."""
    digest = hashlib.blake2b(digest_size=7)  # 56 bits: its negative is an int64 too
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    number = int.from_bytes(digest.digest(), "little")
    largest, smallest = ranks.max_(torch.tensor([number, -number])).tolist()
    return largest == -smallest  # type: ignore[no-any-return]
