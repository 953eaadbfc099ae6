"""Running statistics of batch norm where each rank normalises with its own samples."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nugnn._counted import counted
from nugnn.batches import SplitBatchSampler
from nugnn.comm.groups import Ranks


class LocalStatistics:
    """Averages running means and variances over ranks in each step, weighted by the ranks' samples in it.

    They are moving averages of what each rank found in its own samples. Averaged after every step they stay the same
    bits everywhere: the moving average of the weighted means over ranks. Training reads none of them. The variance is
    that inside the ranks' samples; what their means differ by, one batch's worth of chance, is left out.

    They ride with the gradients where these are of their type, see `nugnn.comm.buckets.Riders`.

    Args:
        model: With modules of batch norm; their buffers are changed in place.
        ranks: Who takes part.

    Attributes:
        counts: Samples of each rank in the step; to be set before it.

    Raises:
        ValueError: The model has no batch norm.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        if not norms:
            raise ValueError("batch_norm is local, but the model has no batch norm; leave the option out")
        kept = [buffer for norm in norms for buffer in (norm.running_mean, norm.running_var)]
        self._buffers: list[Tensor] = [buffer for buffer in kept if buffer is not None]
        self._ranks = ranks
        self.counts: Sequence[int] = ()
        types = [buffer.dtype for buffer in self._buffers] or [torch.float32]
        self.dtype = functools.reduce(torch.promote_types, types)
        self.num_values = sum(buffer.numel() for buffer in self._buffers)
        self.are_carried = False

    def average_unless_carried(self) -> None:
        """Average, where no gradients carry them; a collective call, at the end of a step."""
        if self._ranks.is_split and self.num_values and not self.are_carried:
            with self._ranks.clock.measure("sync", self._ranks.device):
                self.take(self._ranks.sum_(self.summand()))

    def summand(self) -> Tensor:
        """``(num_values,)``: this rank's, by the weight of its samples."""
        weight = self.counts[self._ranks.rank] / sum(self.counts)
        return torch.cat([buffer.reshape(-1) for buffer in self._buffers]) * weight

    def take(self, total: Tensor) -> None:
        """The weighted averages, ``(num_values,)``."""
        sizes = [buffer.numel() for buffer in self._buffers]
        for buffer, mean in zip(self._buffers, total.split(sizes), strict=True):
            buffer.copy_(mean.view_as(buffer))


def check_local_batches(sampler: SplitBatchSampler, micro_batches: int) -> None:
    """Raises ValueError where a rank would have to normalise a single sample by itself; the same on every rank."""
    for batch in sorted({0, sampler.num_batches - 1}):
        for rank, count in enumerate(sampler.counts(batch)):
            cuts = [count * part // micro_batches for part in range(micro_batches + 1)]
            if any(b - a == 1 for a, b in itertools.pairwise(cuts)):
                raise ValueError(
                    f"worker {rank} has {count} of the samples of batch {batch}, in "
                    f"{counted(micro_batches, 'part')}, one of them "
                    "a single sample, which has no variance: local batch norm needs two or more at a time. Choose "
                    "other batch sizes, drop_last or fewer micro_batches, or batch norm over all workers"
                )
