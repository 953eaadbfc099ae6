"""How the gradients of a run travel: as they are, or compressed; what `nugnn.comm.backward_sums` sends them through."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nugnn.comm.backward_sums import PlainSums
from nugnn.comm.buckets import Bucket
from nugnn.comm.compression.compressor import Compressor
from nugnn.comm.compression.lane import Lane
from nugnn.comm.compression.link import Link
from nugnn.comm.compression.settings import Compression, wire_names
from nugnn.comm.groups import Ranks

GRAD_SYNCS = wire_names()
"""Values of the option ``grad_sync``."""


def checked_grad_sync(name: str) -> str:
    """``name``.

    Raises:
        ValueError: There is no such choice.
    """
    if name not in GRAD_SYNCS:
        raise ValueError(f"grad_sync {name!r} is not known; choose one of {', '.join(GRAD_SYNCS)}")
    return name


class GradientSync:
    """Sums gradients of replicated parameters over the ranks of a run.

    Args:
        name: One of `GRAD_SYNCS`.
        named: Parameters by name, in the same order on every rank.
        ranks: Who takes part.

    Raises:
        ValueError: There is no such choice, or parameters are of a type that cannot be compressed.
    """

    def __init__(self, name: str, named: Mapping[str, nn.Parameter], ranks: Ranks) -> None:
        self.name, self._ranks = checked_grad_sync(name), ranks
        self._names = {id(p): key for key, p in named.items()}
        self._named = dict(named)
        self._plain = PlainSums(ranks)
        self._compressor: Compressor | None = None
        self._lane = Lane(ranks.device)
        self._link, self._link_aside = Link.of(ranks), Link.of(ranks, aside=True)
        if name != "fp32":
            self._compressor = Compressor(self._named, Compression(wire=name), ranks.world_size)

    def open(self, scale: float) -> None:
        """Begin a step whose loss was multiplied by ``scale``."""
        if self._compressor is not None and self._ranks.is_split:
            self._compressor.open(scale)

    def sum_(self, bucket: Bucket) -> Tensor:
        """The sum over ranks of what ``bucket`` holds, flags too; a collective call."""
        if self._compressor is None:
            return self._plain.sum_(bucket)
        packed = bucket.packed()
        self._compress(packed, bucket, self._link)
        return packed

    def begin(self, bucket: Bucket) -> tuple[Tensor, Callable[[], None]]:
        """Begin the same while backward runs: where the sum will be, and what waits until it is there."""
        if self._compressor is None:
            return self._plain.begin(bucket)
        packed = bucket.packed()
        return packed, self._lane.submit(lambda: self._compress(packed, bucket, self._link_aside))

    def settle(self, *, is_good: bool) -> None:
        """End a step; ``is_good`` says whether the optimizer took it. A collective call."""
        if self._compressor is not None and self._ranks.is_split:
            self._compressor.settle(self._link, is_good=is_good)

    def _compress(self, packed: Tensor, bucket: Bucket, link: Link) -> None:
        assert self._compressor is not None
        names = [self._names[id(p)] for p in bucket.parameters]
        with torch.no_grad(), torch._C.DisableTorchFunction():
            values = packed.to(torch.float32, copy=True)
            packed.copy_(self._compressor.sum(values, names, bucket.orders, len(names), link))

    # -- state ---------------------------------------------------------------------------------------------------------

    def shared_state(self) -> dict[str, Any] | None:
        """What is the same on every rank, for a checkpoint."""
        return None if self._compressor is None else self._compressor.shared_state()

    @property
    def residuals(self) -> dict[str, Tensor]:
        """What this rank has kept, by name of the parameter."""
        return {} if self._compressor is None else self._compressor.residuals

    def load(self, shared: Mapping[str, Any] | None, residuals: Mapping[str, Tensor]) -> None:
        """Go on where a checkpoint was written."""
        if self._compressor is not None and shared is not None:
            self._compressor.load(shared, residuals)

    def report(self) -> dict[str, Any] | None:
        """What has travelled; None where nothing was compressed."""
        if self._compressor is None or not self._ranks.is_split:
            return None
        return self._compressor.report()


def add_residuals(total: dict[str, Tensor], residuals: Mapping[str, Tensor]) -> None:
    """Add what one rank has kept to ``total``, in float64."""
    for name, kept in residuals.items():
        total[name] = total[name] + kept.double() if name in total else kept.double()


def even_share(total: Mapping[str, Tensor], world_size: int) -> dict[str, Tensor]:
    """What each rank keeps of what other ranks have kept in all, so that nothing is lost when their number changes."""
    return {name: (kept / world_size).float() for name, kept in total.items()}
