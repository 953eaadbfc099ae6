"""Data sets of samples and the sizes of a batch's parts as a family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from nugnn.comm.groups import Ranks
from nugnn.sample_family import SampleFamily
from nugnn.sample_options import SampleOptions


@dataclass(frozen=True)
class SamplePart:
    """A `nugnn.train_rank.Part`.

    Args:
        train: Map-style data set of ``(x, label)``; all ranks have it whole.
        val: To choose the best epoch by; None or empty for none.
        test: To measure on; likewise.
        sizes: Samples of each rank in a full batch.
        metric: Of the data.
    """

    train: Dataset[Any]
    val: Dataset[Any] | None
    test: Dataset[Any] | None
    sizes: tuple[int, ...]
    metric: str

    def __call__(self, ranks: Ranks, model: nn.Module, options: SampleOptions) -> SampleFamily:
        """The family of ``model`` on them, on the device of this rank."""
        return SampleFamily(
            model.to(ranks.device),
            self.train,
            ranks,
            sizes=self.sizes,
            val=self.val,
            test=self.test,
            loss=options.loss,
            metric=options.metric or self.metric,
            class_weights=options.class_weights,
            label_smoothing=options.label_smoothing,
            batch_norm=options.batch_norm,
            augment=options.augment,
            seed=options.seed,
            precision=options.precision,
            micro_batches=options.micro_batches,
            drop_last=options.drop_last,
            measure_train=options.measure_train,
            collate_fn=options.collate_fn,
            num_data_workers=options.num_data_workers,
        )
