"""Global batches of a map-style data set, divided unevenly among ranks: every sample once an epoch, whatever the split.

A global batch is the same set of samples for every split. Ranks differ in how many of them they take; one may take
none. Each rank knows the counts of all, so a mean over the batch needs no exchange.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset, default_collate, get_worker_info

from nugnn._counted import counted
from nugnn.planning.apportioned import apportioned
from nugnn.user_code import UserCodeError, described, is_of_users_code
from nugnn.worker_process import is_user_error


class SplitBatchSampler(Sampler[list[int]]):
    """The samples of one rank in each global batch; use it as ``batch_sampler``, or through `batch_loader`.

    Args:
        num_samples: Of the data set.
        sizes: Samples of each rank in a full batch, such as ``(18, 6)``; their sum is the global batch size. Of the
            last, smaller batch each rank takes its proportion, rounded to the nearest counts that add up.
        rank: Of this process.
        seed: Of the order.
        shuffle: Another order in each epoch, the same on every rank; ids ascend otherwise.
        drop_last: Leave the last batch out when it is smaller.

    Raises:
        ValueError: Sizes or rank do not fit.
    """

    def __init__(
        self,
        num_samples: int,
        sizes: Sequence[int],
        rank: int = 0,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        self.num_samples, self.sizes, self.rank = num_samples, tuple(sizes), rank
        self.seed, self.shuffle = seed, shuffle
        if num_samples < 1:
            raise ValueError("the data set has no samples")
        if any(not isinstance(size, Integral) or size < 0 for size in self.sizes) or sum(self.sizes) < 1:
            raise ValueError(f"batch sizes are {self.sizes}, must be whole numbers of samples, at least one in all")
        self.sizes = tuple(map(int, self.sizes))
        if not 0 <= rank < len(self.sizes):
            raise ValueError(f"rank {rank} has no batch size: there are {len(self.sizes)}, {self.sizes}")
        self.batch_size = sum(self.sizes)
        self.num_batches = num_samples // self.batch_size if drop_last else -(-num_samples // self.batch_size)
        if self.num_batches == 0:
            raise ValueError(
                f"{counted(num_samples, 'sample')} make no batch of {self.batch_size}, and drop_last is on"
            )
        self._epoch, self._start = 0, 0

    def begin(self, epoch: int, start: int = 0) -> None:
        """The next iteration is that of ``epoch``, from its batch ``start`` on: to go on in mid-epoch."""
        self._epoch, self._start = epoch, start

    def __len__(self) -> int:
        """Batches that the next iteration gives, the same on every rank."""
        return self.num_batches - self._start

    def counts(self, batch: int) -> tuple[int, ...]:
        """Samples of each rank in a batch."""
        num = min(self.batch_size, self.num_samples - batch * self.batch_size)
        return self.sizes if num == self.batch_size else apportioned(num, self.sizes)

    def order(self, epoch: int) -> Tensor:
        """``(num_samples,)`` int64, the order of the samples in an epoch."""
        if not self.shuffle:
            return torch.arange(self.num_samples)
        generator = torch.Generator().manual_seed((self.seed << 32) + epoch)
        return torch.randperm(self.num_samples, generator=generator)

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order(self._epoch)
        for batch in range(self._start, self.num_batches):
            counts = self.counts(batch)
            first = batch * self.batch_size + sum(counts[: self.rank])
            yield order[first : first + counts[self.rank]].tolist()


@dataclass(frozen=True, eq=False)
class Batch:
    """The samples of this rank in one global batch.

    Args:
        ids: ``(n,)`` int64 numbers of the samples in the data set.
        data: What the collate function made of them; tensors have samples on axis 0.
    """

    ids: Tensor
    data: Any

    def pin_memory(self) -> Batch:
        """For `DataLoader`."""
        return Batch(self.ids.pin_memory(), map_tensors(lambda x: x.pin_memory(), self.data))

    def to(self, device: torch.device) -> Batch:
        """Every tensor of ``data`` on ``device``; copies from pinned memory do not wait. ``ids`` go along."""
        if device.type == "cpu" and self.ids.device.type == "cpu":
            return self
        ids = self.ids.to(device, non_blocking=True)
        return Batch(ids, map_tensors(lambda x: x.to(device, non_blocking=True), self.data))

    def part(self, part: int, num_parts: int) -> Batch:
        """Its samples in ``num_parts`` parts of about the same size: one of them."""
        if num_parts == 1:
            return self
        return self.rows(*(len(self.ids) * (part + more) // num_parts for more in (0, 1)))

    def rows(self, first: int, end: int) -> Batch:
        """Its samples from number ``first`` up to, but not including, ``end``."""
        return Batch(self.ids[first:end], _cut(self.data, slice(first, end), len(self.ids)))


def batch_loader(
    dataset: Dataset[Any],
    sampler: SplitBatchSampler,
    *,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> DataLoader[Any]:
    """A loader of `Batch`, in the order of ``sampler``.

    Args:
        dataset: Map-style: ``len(dataset)`` and ``dataset[i]``. A `TensorDataset`, or one with ``take(ids)`` that
            gives a whole batch, is asked for batches instead of samples unless there is a collate function.
        sampler: Which samples.
        collate_fn: Joins a list of samples; puts samples on axis 0 of every tensor. torch's own when None.
        num_workers: Processes that read ahead; 0 reads in this one.
        pin_memory: Put batches where copies to a GPU need not wait.

    What the data set or the collate function raises comes out of the iteration as `nugnn.user_code.UserCodeError`,
    wherever it ran.
    """
    take = _taking(dataset) if collate_fn is None else None
    collate: Any = _Collate(dataset, collate_fn) if take is None else _as_it_is
    return _Loader(
        _Numbered(dataset) if take is None else _Taken(take),
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=num_workers,
        pin_memory=pin_memory,
        worker_init_fn=_leave_ctrl_c_to_the_parent if num_workers else None,
        # a new iterator draws a number; drawn here, a run that is resumed in mid-epoch draws nothing that others miss
        generator=torch.Generator().manual_seed(sampler.seed),
    )


@dataclass(frozen=True)
class _Failure:
    """In the place of a batch that could not be read; raised where nothing of torch's loader stands in between."""

    error: Exception


class _Loader(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            if isinstance(batch, _Failure):
                raise batch.error
            yield batch


def _failure(error: Exception, what: str, where: str) -> _Failure:
    """What went wrong in the user's code, or in ours; from a process that reads ahead as its text alone."""
    if not isinstance(error, UserCodeError) and is_of_users_code(error):
        told = UserCodeError(described(error, what, where))
        told.__cause__ = error if get_worker_info() is None else None
        return _Failure(told)
    if get_worker_info() is None or not is_user_error(error):
        raise error
    return _Failure(ValueError(str(error)))


def _leave_ctrl_c_to_the_parent(worker: int) -> None:
    """A terminal sends it to all processes: this one goes on reading while the parent finishes its step."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _taking(dataset: Dataset[Any]) -> Callable[[Tensor], Any] | None:
    """What gives the samples of some ids as one batch; None where they come one by one."""
    if isinstance(dataset, TensorDataset):
        return functools.partial(_rows_of_all, dataset.tensors)
    return getattr(dataset, "take", None)


def _rows_of_all(tensors: tuple[Tensor, ...], ids: Tensor) -> tuple[Tensor, ...]:
    return tuple(x[ids] for x in tensors)


class _Taken(Dataset[Any]):
    def __init__(self, take: Callable[[Tensor], Any]) -> None:
        self._take = take

    def __getitems__(self, numbers: list[int]) -> Batch | _Failure:
        ids = torch.tensor(numbers, dtype=torch.int64)
        try:
            return Batch(ids, self._take(ids))
        except Exception as error:
            return _failure(error, "the data set", _samples(numbers))


def _as_it_is(batch: Batch | _Failure) -> Batch | _Failure:
    return batch


def _samples(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"sample {numbers[0]}"
    return f"samples {', '.join(map(str, numbers[:4]))}" + (", ..." if len(numbers) > 4 else "")


class _Numbered(Dataset[Any]):
    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitems__(self, numbers: list[int]) -> list[tuple[int, Any]] | _Failure:
        many = getattr(self.dataset, "__getitems__", None)
        here: Sequence[int] = numbers
        samples = []
        try:
            if many is not None and numbers:
                return list(zip(numbers, many(numbers), strict=True))
            for number in numbers:
                here = [number]
                samples.append((number, self.dataset[number]))
        except Exception as error:
            return _failure(error, "the data set", _samples(here))
        return samples


class _Collate:
    """Joins samples and keeps their numbers; an empty batch has the shapes of a full one."""

    def __init__(self, dataset: Dataset[Any], collate_fn: Callable[[list[Any]], Any] | None) -> None:
        self._dataset, self._collate = dataset, collate_fn or default_collate
        self._what = "joining samples into a batch" if collate_fn is None else "collate_fn"

    def __call__(self, numbered: list[tuple[int, Any]] | _Failure) -> Batch | _Failure:
        if isinstance(numbered, _Failure):
            return numbered
        numbers = [number for number, _ in numbered]
        ids = torch.tensor(numbers, dtype=torch.int64)
        try:
            if numbered:
                return Batch(ids, self._collate([sample for _, sample in numbered]))
            return Batch(ids, _cut(self._collate([self._dataset[0]]), slice(0), None))
        except Exception as error:
            return _failure(error, self._what, _samples(numbers))


def _cut(data: Any, rows: slice, num_samples: int | None) -> Any:
    """Some samples of a batch: rows of its tensors, and entries of its lists of other values, such as strings.

    Args:
        data: As the collate function joined it.
        rows: Which samples.
        num_samples: Length of lists; any when None.

    Raises:
        ValueError: A list has another length, so that nobody knows whose its values are.
    """

    def cut(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x[rows]
        if not _is_list_of_values(x):
            return x
        if num_samples is not None and len(x) != num_samples:
            raise ValueError(
                f"a batch of {counted(num_samples, 'sample')} cannot be divided: it has a list of "
                f"{counted(len(x), 'value')} ({x[0]!r}, "
                "...); let the collate function put samples on axis 0 of tensors, or of lists"
            )
        return x[rows]

    return torch.utils._pytree.tree_map(cut, data, is_leaf=_is_list_of_values)


def _is_list_of_values(x: Any) -> bool:
    return type(x) in (tuple, list) and len(x) > 0 and not any(isinstance(y, (Tensor, tuple, list, dict)) for y in x)


def map_tensors(function: Callable[[Tensor], Tensor], data: Any) -> Any:
    """``function`` of each tensor in nested tuples, lists and dictionaries; everything else stays as it is."""
    if isinstance(data, Tensor):
        return function(data)
    if type(data) in (tuple, list):  # pairs are the usual case, and a tree is slow to walk
        return type(data)(map_tensors(function, x) for x in data)
    return torch.utils._pytree.tree_map_only(Tensor, function, data)
