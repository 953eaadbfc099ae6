"""Epochs as TensorBoard scalars."""

from __future__ import annotations

import math
from pathlib import Path

from nugnn.history import Epoch


class ScalarLog:
    """Writes ``loss``, the metric of each split and the seconds of each epoch; `close` it.

    Args:
        folder: Where event files go; those of an earlier run in it are removed, so that one run is one curve.
        metric: Name of the metric, such as ``accuracy``.
        first_epoch: Number of the first epoch of this run; later than 1 when resumed, and then files are kept.

    Raises:
        ValueError: The package ``tensorboard`` is not installed.
    """

    def __init__(self, folder: Path, metric: str, *, first_epoch: int = 1) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                f"--tensorboard needs the package tensorboard ({error}): pip install 'nugnn[tensorboard]', or "
                "leave the option out; metrics.jsonl holds the same numbers"
            ) from error
        if first_epoch == 1:
            for stale in folder.glob("events.out.tfevents.*"):
                stale.unlink()
        self._metric = metric
        self._writer = SummaryWriter(str(folder), purge_step=first_epoch if first_epoch > 1 else None)

    def add(self, epoch: Epoch) -> None:
        """Write one epoch; splits that were not evaluated are left out."""
        self._writer.add_scalar("loss", epoch.loss, epoch.number)
        for split in ("train", "val", "test"):
            score = getattr(epoch, split)
            if not math.isnan(score):
                self._writer.add_scalar(f"{self._metric}/{split}", score, epoch.number)
        for part, seconds in epoch.seconds.items():
            self._writer.add_scalar(f"seconds/{part}", seconds, epoch.number)
        self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()
