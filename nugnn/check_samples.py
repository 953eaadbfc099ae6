"""Does a model of samples give the same answer on a batch and on its parts? Names the first module that does not."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from nugnn._counted import counted
from nugnn.augmentation import Augmentation, AugmentationKey, augmented
from nugnn.batches import Batch, SplitBatchSampler, batch_loader, map_tensors
from nugnn.comm.groups import Ranks
from nugnn.comm.local_ranks import run_local_ranks
from nugnn.datasets.samples.registry import load_samples
from nugnn.datasets.samples.sample_data import SampleData
from nugnn.kernels.rows import identity_of
from nugnn.loss import RowLoss, choose_loss
from nugnn.module_traces import (
    TOLERANCE,
    CheckReport,
    ModelDiffers,
    ModelFails,
    Noted,
    Trace,
    Wording,
    compared,
    merged,
    watched,
)
from nugnn.precision.storage import model_dtype
from nugnn.samples import BatchMean, as_samples, called, intercept_samples
from nugnn.user_code import describe_error, whose

LEAST_SAMPLES = 4
_COLLATED = 64
"""Samples that are joined by a collate function, to see whether one of them decides about the others."""
_COARSE = 1e-3
"""Relative, in float32, for models that do not run in float64: rounding, amplified by a few layers, stays below 1e-4;
what depends on the other samples differs by percents."""
_MOST_IN_ROW, _NUM_SUMS, _MOST_WHOLE = 256, 64, 1 << 16
_SECONDS_TO_WAIT = 600.0
"""For a part of the batch that takes longer than another one."""


def check_samples(
    model: nn.Module,
    data: SampleData | Dataset[Any] | str,
    *,
    loss: RowLoss | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_parts: int = 3,
    max_samples: int = 12,
) -> CheckReport:
    """Compare a batch in one process with the same batch in unequal parts, in float64, on the CPU.

    A training step with its gradients, a second forward in training mode, one in evaluation mode, then the buffers. One
    part has a single sample, and of three or more one is empty, unless the model cannot run without samples, which the
    report then says.

    Args:
        model: Not modified. One that fails in float64 is compared in its own type, by a coarser measure.
        data: As for `nugnn.fit`; the first samples of the training part are used.
        loss: As for `nugnn.fit`.
        collate_fn: As for `nugnn.fit`.
        num_parts: Parts to compare with, at least 2.
        max_samples: Of the batch, at least 4 and one for each part.

    Returns:
        What was compared.

    Raises:
        ValueError: There are too few samples, or parts.
        ModelFails: The model raises on the whole batch.
        ModelDiffers: Naming the first module whose rows depend on the rest of the batch, or a gradient or buffer.
    """
    if isinstance(data, str):
        data = load_samples(data)
    samples = data.train if isinstance(data, SampleData) else data
    if num_parts < 2:
        raise ValueError(f"nugnn.check: num_parts is {num_parts}; one part is compared with at least 2")
    num_samples, least = min(max_samples, len(samples)), max(LEAST_SAMPLES, num_parts + 1)  # type: ignore[arg-type]
    if num_samples < least:
        raise ValueError(
            f"nugnn.check: max_samples is {max_samples} and there are {counted(len(samples), 'sample')}; "  # type: ignore[arg-type]
            f"{counted(num_parts, 'part')} need {least} at least"
        )
    if collate_fn is not None:
        compare_collation(samples, collate_fn)
    batch = first_batch(samples, num_samples, collate_fn)
    full = (num_samples - num_parts, 2, *[1] * (num_parts - 2))
    if num_parts == 2:
        return compare_batch(model, batch, (num_samples - 1, 1), loss=loss)
    with_empty = (num_samples - num_parts + 2, *[1] * (num_parts - 2), 0)
    try:
        return compare_batch(model, batch, with_empty, loss=loss)
    except ModelDiffers as error:
        without = str(error)
    report = compare_batch(model, batch, full, loss=loss)
    note = f"a worker that has no samples in a batch would fail, or make another result: {without}"
    return replace(report, notes=(*report.notes, note))


def first_batch(samples: Dataset[Any], num_samples: int, collate_fn: Callable[[list[Any]], Any] | None = None) -> Batch:
    """The first samples of a data set, as training would join them."""
    one = SplitBatchSampler(num_samples, (num_samples,), shuffle=False)
    with _same_random_state():
        return next(iter(batch_loader(samples, one, collate_fn=collate_fn)))


def compare_batch(model: nn.Module, batch: Batch, sizes: Sequence[int], *, loss: RowLoss | None = None) -> CheckReport:
    """`check_samples` on one batch and one division of it.

    Args:
        model: Not modified.
        batch: ``(x, labels)``.
        sizes: Samples of each part, whose sum is that of the batch.
        loss: See `nugnn.loss.RowLoss`; the usual one when None.
    """
    job = _Job(model, batch, loss)
    with _same_random_state(), _refused_draws(tuple(sizes)):
        try:
            return job.compared(tuple(sizes), torch.float64)
        except ModelFails as error:
            in_double = error
        own_type = model_dtype(model)
        if own_type is torch.float64:
            raise in_double
        report = job.compared(tuple(sizes), own_type)  # says what is wrong, where that is not the type
    note = f"compared in {own_type}, to {_COARSE:g}, since the model does not run in float64: {in_double.__cause__}"
    return replace(report, notes=(note,))


def compare_collation(
    samples: Dataset[Any], collate_fn: Callable[[list[Any]], Any], most_samples: int = _COLLATED
) -> None:
    """A batch joined whole and in two parts, as two workers would, which has to come to the same rows.

    Args:
        samples: The first ones are joined.
        collate_fn: See `nugnn.batches.batch_loader`.
        most_samples: Of the batch; there are at least two.

    Raises:
        ModelDiffers: What becomes of a sample depends on the others of its part, such as the length it is padded to.
    """
    num_samples = min(most_samples, len(samples))  # type: ignore[arg-type]
    sizes = (num_samples - num_samples // 3, num_samples // 3)
    whole, first = first_batch(samples, num_samples, collate_fn), 0
    for rank, size in enumerate(sizes):
        if size == 0:
            continue
        one = SplitBatchSampler(num_samples, sizes, rank, shuffle=False)
        with _same_random_state():
            part = next(iter(batch_loader(samples, one, collate_fn=collate_fn)))
        for x, mine in zip(_leaves(whole.rows(first, first + size).data), _leaves(part.data), strict=True):
            if x.shape != mine.shape:
                raise ModelDiffers(
                    f"collate_fn makes a tensor of shape {tuple(mine.shape)} of {counted(size, 'sample')}, which is "
                    f"{tuple(x.shape)} where they are in a batch of {num_samples}: padded to the longest of its part, "
                    "dropout masks and batch norm would depend on who shares a worker. Pad to one length, such as that "
                    "of the data set's longest sample."
                )
            if not _same_rows(mine, x):
                raise ModelDiffers(
                    f"collate_fn makes other values of {counted(size, 'sample')} than where they are in a batch "
                    f"of {num_samples}: "
                    "it mixes samples of a batch, or draws. Leave means over the batch to batch norm, and draws to "
                    "augment, which has a key for each sample."
                )
        first += size


def compare_augmentation(augment: Augmentation, batch: Batch, sizes: Sequence[int]) -> None:
    """One batch changed whole, and in parts, which have to come to the same; what torch draws inside is refused.

    Args:
        augment: See `nugnn.augmentation.Augmentation`.
        batch: ``(x, labels)``, on the CPU; not modified.
        sizes: Samples of each part, whose sum is that of the batch.

    Raises:
        ModelDiffers: What becomes of a sample depends on the rest of the batch, or on draws that are nobody's.
        NotImplementedError, ValueError: See `nugnn.augmentation.augmented`.
    """
    ends = list(itertools.accumulate(sizes, initial=0))
    with _same_random_state(), whose("augment"):

        def changed(part: Batch) -> list[Tensor]:
            x = map_tensors(torch.clone, part.data[0])
            return _leaves(augmented(augment, x, part.ids, AugmentationKey(seed=0, epoch=0), is_split=True))

        whole, *parts = map(changed, (batch, *(batch.rows(a, b) for a, b in itertools.pairwise(ends))))
    for (first, end), part in zip(itertools.pairwise(ends), parts, strict=True):
        if not all(_same_rows(mine, x[first:end]) for x, mine in zip(whole, part, strict=True)):
            raise ModelDiffers(
                f"augment gives other samples on a batch in parts of {' and '.join(map(str, sizes))} than on the "
                "whole: it mixes samples of a batch, or draws numbers that do not belong to them, such as those of "
                "NumPy. Change each row of x by itself, and draw with key.uniform(ids, num, purpose)."
            )


def _leaves(data: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(data) if isinstance(leaf, Tensor)]


def _same_rows(mine: Tensor, expected: Tensor) -> bool:
    scale = float(expected.abs().max()) if expected.is_floating_point() and expected.numel() else 0.0
    same = expected.shape == mine.shape and expected.dtype == mine.dtype
    return same and torch.allclose(mine, expected, rtol=0, atol=_COARSE * scale, equal_nan=True)


def seconds_of_a_sample(model: nn.Module, batch: Batch) -> float:
    """How long the first sample takes forward, on the CPU in float64; 0 where it fails, which a comparison explains."""
    with _same_random_state(), torch.no_grad(), contextlib.suppress(Exception):
        own = copy.deepcopy(model).to("cpu", torch.float64).eval()
        x, _ = map_tensors(lambda x: x.double() if x.is_floating_point() else x, batch.rows(0, 1).data)
        begin = time.perf_counter()
        called(own, x)
        return time.perf_counter() - begin
    return 0.0


@dataclass(frozen=True)
class _Job:
    """A model, a batch and a loss, to be run over any number of ranks."""

    model: nn.Module
    batch: Batch
    loss: RowLoss | None

    def compared(self, sizes: tuple[int, ...], dtype: torch.dtype) -> CheckReport:
        try:
            model = copy.deepcopy(self.model).to("cpu", dtype)
        except Exception as error:
            raise ModelFails(f"the model cannot be copied, so it cannot be checked: {describe_error(error)}") from error
        whole = (len(self.batch.ids),)
        alone, split = self._run(model, whole, dtype), self._run(model, sizes, dtype)
        wording, tolerance = _wording(sizes), TOLERANCE if dtype is torch.float64 else _COARSE
        num_modules, largest = compared(alone, split, wording, tolerance=tolerance, ways_may_differ=True)
        return CheckReport(0, len(sizes), num_modules, largest, num_samples=sum(sizes))

    def _run(self, model: nn.Module, sizes: tuple[int, ...], dtype: torch.dtype) -> Callable[[], Trace]:
        def run() -> Trace:
            def on_rank(ranks: Ranks) -> Trace:
                return self._traced(model, sizes, dtype, ranks)

            return merged(_alike(run_local_ranks(len(sizes), on_rank, timeout_seconds=_SECONDS_TO_WAIT)))

        return run

    def _traced(self, model: nn.Module, sizes: tuple[int, ...], dtype: torch.dtype, ranks: Ranks) -> Trace:
        """What this rank's part of the batch does."""
        own = copy.deepcopy(model).train()
        first = sum(sizes[: ranks.rank])
        part = self.batch.rows(first, first + sizes[ranks.rank])
        interceptor = intercept_samples(own, ranks)
        interceptor.notes_losses = True
        mean = BatchMean(choose_loss(self.loss, part.data[1]), ranks)

        def fresh() -> Any:
            """Inputs that nobody has written to."""
            data = map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x.clone(), part.data)
            return as_samples(Batch(part.ids, map_tensors(torch.clone, data)), ranks).data

        with watched(own, interceptor, lambda x: _rows_on_top(x, part.ids)) as trace:
            x, labels = fresh()
            with interceptor.step(0):
                logits = called(own, x)
                if not isinstance(logits, Tensor) or logits.dim() < 2 or len(logits) != len(part.ids):
                    raise ValueError("the model has to return one row of logits for each sample")
                mean(logits, labels, float(sum(sizes))).backward()
            with torch.no_grad():
                with interceptor.step(1):
                    called(own, fresh()[0])
                own.eval()
                with interceptor.step(2):
                    called(own, fresh()[0])
        trace.keep_state(own, ranks)
        return trace


def _alike(traces: list[Trace]) -> list[Trace]:
    """Ranks whose samples took other ways through the modules are compared by what came out at the end."""
    return traces if len({tuple(trace.calls) for trace in traces}) == 1 else [trace.ends() for trace in traces]


def _rows_on_top(x: Tensor, ids: Tensor) -> Noted:
    """Samples on axis 0 and their ids, by provenance; where only the count speaks for it, all ranks have to agree."""
    rows = identity_of(x)
    with torch._C.DisableTorchFunction():  # nobody's layer
        x = x.detach()
        if rows is not None and rows.axis < x.dim():
            x = x.movedim(rows.axis, 0)
        if rows is not None and rows.source is not None and rows.num_rows == len(x):
            return _condensed(x), rows.row_ids(len(x))
        if rows is None and len(x) == len(ids):
            return _condensed(x), ids
        # too large to keep, and nobody's rows: its shape alone
        return (x.clone() if x.numel() <= _MOST_WHOLE else x.new_empty(0, *x.shape)), None


def _condensed(x: Tensor) -> Tensor:
    """``x`` itself where rows are short; else 64 sums of each row's values, every other of them negative, as it falls.

    All outputs of a deep network are more than its training keeps. Rounding, a share of the values, is about the same
    share of such sums, and so is what another result differs by.
    """
    if math.prod(x.shape[1:]) <= _MOST_IN_ROW:
        return x.clone()
    flat = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).flatten(1).double()
    places = torch.arange(flat.shape[1])
    signs = 1 - 2 * ((places * 2654435761 >> 16) & 1)
    return torch.zeros(len(x), _NUM_SUMS, dtype=torch.float64).index_add_(1, places % _NUM_SUMS, flat * signs)


def _wording(sizes: tuple[int, ...]) -> Wording:
    return Wording(
        rows="samples",
        whole="the whole",
        parts=f"a batch in parts of {', '.join(map(str, sizes[:-1]))} and {sizes[-1]} samples",
        instead="Let each sample's row depend on that sample alone; means over the batch are left to batch norm, which "
        "counts the samples of all workers.",
        draw="Use torch.nn.Dropout, whose masks belong to samples, or let the numbers come with the data.",
    )


@contextmanager
def _refused_draws(sizes: tuple[int, ...]) -> Iterator[None]:
    """Generators that torch's calls do not show have to stand where they stood.

    Raises:
        ModelDiffers: Python's or NumPy's was drawn from, whatever came of it this time.
    """
    before = random.getstate(), np.random.get_state()
    yield
    after = random.getstate(), np.random.get_state()
    for name, ours, theirs in zip(("Python's random", "numpy.random"), before, after, strict=True):
        if not all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True)):
            raise ModelDiffers(
                f"the model draws from {name}, whose numbers each worker draws for itself. {_wording(sizes).draw}"
            )


@contextmanager
def _same_random_state() -> Iterator[None]:
    """Whatever is drawn inside, the program's generators go on as if nothing had been."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
