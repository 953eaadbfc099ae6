"""Training on batches of samples, divided unevenly among ranks: an optimizer step for each global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves
from torch.utils.data import Dataset, default_collate

from nugnn._counted import counted
from nugnn.augmentation import Augmentation, AugmentationKey, augmented
from nugnn.batches import Batch, SplitBatchSampler, batch_loader, map_tensors
from nugnn.comm.batch_norm import BatchNormRows
from nugnn.comm.groups import Ranks
from nugnn.known_rows import KnownRows
from nugnn.local_statistics import LocalStatistics, check_local_batches
from nugnn.loss import RowLoss, choose_loss
from nugnn.metrics import evaluate_rows
from nugnn.modes import evaluating
from nugnn.precision.storage import Storage, at_least_float32, model_dtype
from nugnn.samples import BatchMean, as_samples, called, intercept_samples
from nugnn.user_code import UserCodeError, described, is_of_users_code, whose


@dataclass(frozen=True, eq=False)
class _Part:
    """A micro-batch: samples of this rank, and what the losses of its optimizer step are divided by; their numbers."""

    x: Any
    labels: Tensor
    total: float | Tensor
    ids: Tensor


def why_batch_is_not_recorded(micro_batches: int) -> str | None:
    """What of a batch keeps a step from being a CUDA graph; None where nothing does."""
    return "the batch runs in micro_batches" if micro_batches > 1 else None


class SampleFamily:
    """A model on map-style data sets of ``(x, label)``; see `nugnn.family.Family`.

    Args:
        model: Called with ``x`` as the collate function joined it: ``model(x)``, ``model(*x)`` for a tuple or list,
            ``model(**x)`` for a mapping; gives one row of logits for each sample.
        train: Samples to train on.
        ranks: Who takes part.
        sizes: Samples of each rank in a full batch, one number for each rank; see `SplitBatchSampler`.
        val: Samples that choose the best epoch; none when None.
        test: Samples to measure on; none when None.
        loss: See `nugnn.loss.RowLoss`; cross-entropy, or binary cross-entropy for multi-label targets, when None.
        metric: See `nugnn.metrics.evaluate_rows`.
        class_weights: ``(C,)``, for the loss.
        label_smoothing: See `nugnn.loss.SmoothedCrossEntropy`.
        batch_norm: ``all``: statistics over the samples of all ranks, as one process has them; ``local``: approximate,
            each rank's own samples, no exchange in forward; running statistics are averaged over ranks in each step,
            with the gradients where they are of one type, see `nugnn.local_statistics`.
        augment: Changes training samples at random, keyed by sample and epoch; see `nugnn.augmentation`.
        seed: Of the order of samples, of dropout masks and of augmentation.
        precision: See `nugnn.precision.storage.Storage`.
        micro_batches: Parts of each batch that run one after the other, for less memory; batch norm sees one at a time.
        drop_last: Leave out the last batch of an epoch when it is smaller.
        measure_train: Measure the metric on the training samples too, which takes a pass over them.
        collate_fn: See `nugnn.batches.batch_loader`.
        num_data_workers: Processes that read ahead on each rank.

    Raises:
        ValueError: An option is not known or does not fit.
    """

    def __init__(
        self,
        model: nn.Module,
        train: Dataset[Any],
        ranks: Ranks,
        *,
        sizes: Sequence[int],
        val: Dataset[Any] | None = None,
        test: Dataset[Any] | None = None,
        loss: RowLoss | None = None,
        metric: str = "accuracy",
        class_weights: Tensor | None = None,
        label_smoothing: float = 0.0,
        batch_norm: BatchNormRows = "all",
        augment: Augmentation | None = None,
        seed: int = 0,
        precision: str = "fp32",
        micro_batches: int = 1,
        drop_last: bool = False,
        measure_train: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_data_workers: int = 0,
    ) -> None:
        if len(sizes) != ranks.world_size:
            raise ValueError(
                f"there are {len(sizes)} batch sizes for {counted(ranks.world_size, 'worker')}; give one for each"
            )
        if micro_batches < 1:
            raise ValueError(f"micro_batches is {micro_batches}, must be 1 or more")
        self.model, self.ranks, self.metric = model, ranks, metric
        self.storage = Storage(precision)
        self.interceptor = intercept_samples(model, ranks, seed=seed, batch_norm=batch_norm)
        self._known_rows = KnownRows(model, self.interceptor, ranks, batch_norm=batch_norm)
        self.sampler = SplitBatchSampler(_length(train), sizes, ranks.rank, seed=seed, drop_last=drop_last)
        self._micro_batches, self._augment, self._seed = micro_batches, augment, seed
        self._statistics: LocalStatistics | None = None
        if batch_norm == "local":
            self._statistics = LocalStatistics(model, ranks)
            check_local_batches(self.sampler, micro_batches)
        is_gpu = ranks.device.type == "cuda"
        how: dict[str, Any] = {"collate_fn": collate_fn, "num_workers": num_data_workers, "pin_memory": is_gpu}
        self._loader = batch_loader(train, self.sampler, **how)
        self._measured, self._measures_train = {}, measure_train
        self._num_test = 0 if test is None else _length(test)
        for split, data in {"train": train, "val": val, "test": test}.items():
            if data is not None and _length(data) > 0:
                sampler = SplitBatchSampler(_length(data), sizes, ranks.rank, shuffle=False)
                self._measured[split] = batch_loader(data, sampler, **how)
        self.has_own_loss = loss is not None
        with whose("the data set", "sample 0"):
            first = train[0]
        chosen = choose_loss(loss, default_collate([first[1]]), label_smoothing)
        self._mean = BatchMean(chosen, ranks, class_weights)

    sums_in_backward = True
    exchanges_rows = False
    remedy = (
        "Every worker has other samples, so what forward writes must not depend on them (nn.Embedding(max_norm=...) "
        "rescales the rows that it reads, for one): leave that out, or train with workers=1."
    )

    @property
    def riders(self) -> LocalStatistics | None:
        return self._statistics if self._statistics is not None and self._statistics.num_values else None

    @property
    def why_not_recorded(self) -> str | None:
        return why_batch_is_not_recorded(self._micro_batches)

    @property
    def row_ids(self) -> Tensor:
        return torch.empty(0, dtype=torch.int64)

    @property
    def num_rows_global(self) -> int:
        return self.sampler.num_samples

    @property
    def steps_per_epoch(self) -> int:
        return self.sampler.num_batches

    @property
    def division(self) -> tuple[int, ...]:
        return self.sampler.sizes

    def steps(self, epoch: int, start: int = 0) -> Iterator[Sequence[_Part]]:
        self.sampler.begin(epoch, start)
        dtype = self._input_dtype()
        for number, batch in enumerate(self._loader, start):
            if not self.has_own_loss:
                _refuse_negative_labels(batch)
            whole = batch.to(self.ranks.device)
            counts = self.sampler.counts(number)
            if self._statistics is not None:
                self._statistics.counts = counts
            if self._augment is not None:
                x, labels = whole.data
                with whose("augment"):
                    key = AugmentationKey(self._seed, epoch)
                    x = augmented(self._augment, x, whole.ids, key, is_split=self.ranks.is_split)
                whole = Batch(whole.ids, (x, labels))
            pieces = [whole.part(part, self._micro_batches) for part in range(self._micro_batches)]
            parts = [self._prepared(piece, dtype) for piece in pieces]
            total = self._mean.total(counts, [labels for _, labels in parts])
            yield [_Part(x, labels, total, piece.ids) for (x, labels), piece in zip(parts, pieces, strict=True)]

    @contextmanager
    def around(self, step: int, work: _Part | None = None) -> Iterator[None]:
        with self.storage.casts(self.model, self.ranks.device):
            if work is None or self.has_own_loss:
                with self.interceptor.step(step):
                    yield
            else:
                with self._known_rows.step(step, work.x, work.ids):
                    yield

    def loss(self, work: _Part) -> Tensor:
        logits = self._logits(work.x)  # an IndexError of the model's own is none of labels
        try:
            # no handler is for a function of ours, so none of its calls is looked at
            with whose("the loss function") if self.has_own_loss else torch._C.DisableTorchFunction():
                return self._mean(logits, work.labels, work.total)
        except IndexError as error:  # from a loss on the CPU
            raise ValueError(
                f"{error}: labels of this batch go up to {work.labels.max()}; the model has to return a column for "
                "each class, and labels have to count from 0"
            ) from error

    def tensors_of(self, work: _Part) -> list[Tensor]:
        total = [work.total] if isinstance(work.total, Tensor) else []
        return [work.ids, work.labels, *total, *(x for x in tree_leaves(work.x) if isinstance(x, Tensor))]

    def copy_of(self, work: _Part) -> _Part:
        x, labels = (map_tensors(torch.clone, value) for value in (work.x, work.labels))
        total = work.total.clone() if isinstance(work.total, Tensor) else work.total
        batch = as_samples(Batch(work.ids.clone(), (x, labels)), self.ranks)
        return _Part(x, labels, total, batch.ids)

    def kind_of(self, work: _Part) -> Any:
        leaves, structure = tree_flatten(work.x)
        known = (bool, int, float, str, type(None))  # of others it is not known when they are the same
        plain = [None if isinstance(x, Tensor) else x if isinstance(x, known) else object() for x in leaves]
        total = None if isinstance(work.total, Tensor) else work.total
        counts = None if self._statistics is None else tuple(self._statistics.counts)  # weights of its averages
        return total, counts, structure, tuple(plain)

    def weight(self, work: _Part) -> float | Tensor:
        return work.total

    def settle(self, *, is_good: bool) -> None:
        if self._statistics is not None:
            self._statistics.average_unless_carried()

    def own_rows(self) -> dict[str, Tensor]:
        """None: what is kept between steps is parameters and buffers."""
        return {}

    def load_own_rows(self, rows: dict[str, Tensor]) -> None:
        """There are none."""

    def own_state(self) -> dict[str, Any]:
        """None, likewise."""
        return {}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """There is none."""

    first_split = ""

    def move_as(self, ids_of: Callable[[int], Tensor], trainer: Any) -> None:
        """Samples belong to no rank."""

    def rebalancer(self, trainer: Any) -> None:
        """Samples belong to no rank."""

    def evaluate(self, num_steps: int, *, with_train: bool = False) -> dict[str, float]:
        scores = dict.fromkeys(("train", "val", "test"), float("nan"))
        for split in self._measured:
            if split == "train" and not (with_train or self._measures_train):
                continue
            logits, labels, _ = self._predicted(split, num_steps)
            scores[split] = evaluate_rows(self.metric, logits, labels, self.ranks)
        return scores

    def predict_all(self, num_steps: int) -> Tensor:
        """``(n, C)`` logits of the test samples in their order, on every rank; a collective call.

        Raises:
            ValueError: There are none.
        """
        if "test" not in self._measured:
            raise ValueError("there are no test samples to predict")
        logits, _, ids = self._predicted("test", num_steps)
        rows = torch.cat(self.ranks.gather_rows(logits.contiguous()))
        return torch.empty_like(rows).index_copy_(0, torch.cat(self.ranks.gather_rows(ids)), rows)

    @property
    def num_predicted(self) -> int:
        return self._num_test

    def news(self) -> None:
        return None

    def report(self) -> dict[str, Any]:
        sampler = self.sampler
        whole = sampler.num_batches * sampler.batch_size
        return {
            "batch_samples": sampler.sizes[sampler.rank],
            "samples": min(whole, sampler.num_samples),
        }

    def whole_state(self) -> dict[str, Tensor]:
        return {key: value.detach().clone().cpu() for key, value in self.model.state_dict().items()}

    def _predicted(self, split: str, num_steps: int) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, labels and numbers of this rank's samples of a split."""
        logits, labels, ids, dtype = [], [], [], self._input_dtype()
        with evaluating(self.model):
            for batch in self._measured[split]:
                whole = batch.to(self.ranks.device)
                x, truth = self._prepared(whole, dtype)
                with self.around(num_steps):
                    logits.append(at_least_float32(self._logits(x)))
                labels.append(truth)
                ids.append(whole.ids)
        return torch.cat(logits), torch.cat(labels), torch.cat(ids)

    def _input_dtype(self) -> torch.dtype:
        return self.storage.dtype_of(model_dtype(self.model))

    def _prepared(self, batch: Batch, dtype: torch.dtype) -> tuple[Any, Tensor]:
        """``x`` in the type of the model, and the labels; both know whose rows they are."""
        x, labels = batch.data
        x = map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, x)
        as_samples(Batch(batch.ids, (x, labels)), self.ranks)
        return x, labels

    def _logits(self, x: Any) -> Tensor:
        try:
            out = called(self.model, x)
        except Exception as error:
            if isinstance(error, UserCodeError) or not is_of_users_code(error):
                raise
            shapes = ", ".join(str(tuple(t.shape)) for t in tree_leaves(x) if isinstance(t, Tensor))
            raise UserCodeError(described(error, "the model", f"a batch of shape {shapes}")) from error
        if not isinstance(out, Tensor) or out.dim() < 2:
            what = f"a tensor of shape {tuple(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
            raise ValueError(f"the model returned {what}; it has to return a tensor (n, C), a row for each sample")
        return out


def _refuse_negative_labels(batch: Batch) -> None:
    """Torch leaves the label -100 out of the loss without a word, and a mean over all samples would still count it."""
    labels = batch.data[1] if isinstance(batch.data, (tuple, list)) and len(batch.data) == 2 else None
    if not isinstance(labels, Tensor) or labels.dim() != 1 or labels.dtype is not torch.int64 or labels.is_cuda:
        return
    if labels.numel() and int(labels.min()) < 0:
        wrong = (labels < 0).nonzero().flatten().tolist()
        raise ValueError(
            f"training sample {int(batch.ids[wrong[0]])} has the label {int(labels[wrong[0]])}, and classes are "
            "numbered from 0; leave samples without a label out of the data set"
        )


def _length(data: Any) -> int:
    try:
        return len(data)
    except TypeError:
        raise ValueError(
            f"{type(data).__name__} has no length: a map-style data set is needed, with len(data) and data[i]"
        ) from None
