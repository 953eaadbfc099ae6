"""What a kind of data brings to training; everything else is the same trainer for all.

`nugnn.graph_family` trains on a split graph, one optimizer step an epoch; `nugnn.sample_family` on batches of samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from nugnn.comm.buckets import Riders
from nugnn.comm.groups import Ranks
from nugnn.precision.storage import Storage

if TYPE_CHECKING:
    from nugnn.rebalance import Rebalancer
    from nugnn.trainer import Trainer

Work = Any
"""A part of an optimizer step: a batch, a micro-batch, or nothing more to be said than "the graph"."""


class Family(Protocol):
    """An adapter between data and `nugnn.trainer.Trainer`.

    Attributes:
        model: Trained in place; parameters of its own rows (`nugnn.NodeEmbedding`) are split already.
        ranks: Who takes part.
        storage: How numbers are stored.
        row_ids: ``(n,)`` int64 global ids of the rows that this rank's own parameters belong to; none for samples.
        num_rows_global: Of all ranks.
        steps_per_epoch: Optimizer steps.
        sums_in_backward: Whether gradients may be summed over ranks while backward runs, in the group ``ranks.halo``.
        has_own_loss: Whether the loss function is the user's.
        exchanges_rows: Whether ranks send each other rows inside of steps.
        remedy: What to do where a model's own code changes parameters or buffers by a rank's rows, in words.
    """

    model: nn.Module
    ranks: Ranks
    storage: Storage
    sums_in_backward: bool
    has_own_loss: bool
    remedy: str

    @property
    def exchanges_rows(self) -> bool: ...

    @property
    def riders(self) -> Riders | None:
        """What travels with the gradients of a step."""
        ...

    @property
    def why_not_recorded(self) -> str | None:
        """What keeps a step from being a CUDA graph, see `nugnn.step_graphs`; None where nothing does."""
        ...

    @property
    def row_ids(self) -> Tensor: ...

    @property
    def num_rows_global(self) -> int: ...

    @property
    def steps_per_epoch(self) -> int: ...

    @property
    def division(self) -> tuple[int, ...]:
        """What decides beside ``row_ids`` which rank does what: the batch sizes of samples; nothing for a graph."""
        ...

    def steps(self, epoch: int, start: int = 0) -> Iterator[Sequence[Work]]:
        """The optimizer steps of an epoch (from 0), from ``start`` on, each in parts that run one after the other.

        Every rank has as many steps, and as many parts in each, whatever its share of the rows.
        """
        ...

    def around(self, step: int, work: Work | None = None) -> AbstractContextManager[Any]:
        """Open around the forward and backward pass of each part of a step, in training and evaluation.

        ``work`` says that nothing but the loss of this part runs inside: a family that knows it well may look less.
        """
        ...

    def loss(self, work: Work) -> Tensor:
        """This rank's share of the loss of the step, as far as ``work`` goes: shares and parts add up to the loss."""
        ...

    def tensors_of(self, work: Work) -> list[Tensor]:
        """All tensors of ``work``, in an order that depends on its kind alone."""
        ...

    def copy_of(self, work: Work) -> Work:
        """``work`` with tensors of its own, which `tensors_of` gives."""
        ...

    def kind_of(self, work: Work) -> Any:
        """All that ``work`` is beside its tensors, hashable: works of one kind make the same step of their tensors."""
        ...

    def weight(self, work: Work) -> float | Tensor:
        """What the loss of the step that ``work`` belongs to counts for in the mean over the epoch."""
        ...

    def settle(self, *, is_good: bool) -> None:
        """Make equal on all ranks what differs after an optimizer step; a collective call.

        ``is_good`` is False where the optimizer left the step out, an overflow on some rank.
        """
        ...

    def own_rows(self) -> dict[str, Tensor]:
        """What the family keeps from step to step beside the model, by name: one row for each of `row_ids`."""
        ...

    def load_own_rows(self, rows: dict[str, Tensor]) -> None:
        """What `own_rows` gave on the ranks that had these rows then."""
        ...

    def own_state(self) -> dict[str, Any]:
        """What this rank alone keeps from step to step beside `own_rows`, of no use on another split; plain values and
        tensors by name.
        """
        ...

    def load_own_state(self, state: dict[str, Any]) -> None:
        """What `own_state` gave on this rank; nothing where the split is another now. A collective call."""
        ...

    @property
    def first_split(self) -> str:
        """A digest of the ids that this rank's rows had when the family was made; empty for samples."""
        ...

    def move_as(self, ids_of: Callable[[int], Tensor], trainer: Trainer) -> str | None:
        """Have each rank own the rows that ``ids_of`` lists for it, in that order; a collective call.

        Returns:
            Why they cannot move and have stayed, in words; None where they have. The same on every rank.
        """
        ...

    def rebalancer(self, trainer: Trainer) -> Rebalancer | None:
        """What moves rows between ranks while ``trainer`` trains on them; None where they stay."""
        ...

    def evaluate(self, num_steps: int, *, with_train: bool = False) -> dict[str, float]:
        """Metric on ``train``, ``val`` and ``test`` over all ranks, NaN where there are no rows; a collective call.

        Samples have one on ``train`` only when that was asked for.
        """
        ...

    @property
    def num_predicted(self) -> int:
        """Rows of which `predict_all` gives logits."""
        ...

    def predict_all(self, num_steps: int) -> Tensor:
        """Logits of all rows in their original order, on every rank; a collective call."""
        ...

    def news(self) -> str | None:
        """A sentence for the user about what was decided since the last call; asked after each epoch."""
        ...

    def report(self) -> dict[str, Any]:
        """What this rank has of the data, for results: plain numbers."""
        ...

    def whole_state(self) -> dict[str, Tensor]:
        """The model's state on the CPU, with the rows of all ranks; a collective call."""
        ...
