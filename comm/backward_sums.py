"""Sums of gradients that travel while backward still makes others."""

from __future__ import annotations

import operator
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nugnn.comm.buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES, Bucket, Riders, memory_order
from nugnn.comm.clock import Note, is_recording
from nugnn.comm.compression.traffic import PlainCounts
from nugnn.comm.gradients import equal_everywhere
from nugnn.comm.groups import Ranks


class Sums(Protocol):
    """How what a bucket holds is summed over ranks; all calls are collective, in the same order on all ranks."""

    def sum_(self, bucket: Bucket) -> Tensor:
        """The sum over ranks of ``bucket.packed()``."""
        ...

    def begin(self, bucket: Bucket) -> tuple[Tensor, Callable[[], None]]:
        """Begin it while backward runs: where the sum will be, and what waits until it is there."""
        ...


class PlainSums:
    """By the process group's own all-reduce, in the type of the gradients; see `Sums`.

    Args:
        ranks: Who takes part.
        names: Of parameters, by their `id`: a bucket is counted under that of its first one.

    Attributes:
        counts: What has travelled.
    """

    def __init__(self, ranks: Ranks, names: Mapping[int, str] | None = None) -> None:
        self._ranks, self._names = ranks, names or {}
        self.counts = PlainCounts()

    def sum_(self, bucket: Bucket) -> Tensor:
        packed = bucket.packed()
        begin = time.perf_counter()
        total = self._ranks.sum_(packed)
        self._count(bucket, packed, self._ranks.bytes_of_sum(packed), time.perf_counter() - begin)
        return total

    def begin(self, bucket: Bucket) -> tuple[Tensor, Callable[[], None]]:
        packed = bucket.packed()
        begin = time.perf_counter()
        done = self._ranks.begin_sum(packed)
        self._count(bucket, packed, self._ranks.bytes_of_sum(packed, aside=True), time.perf_counter() - begin)

        def wait() -> None:
            begin = time.perf_counter()
            done()
            self._wait(bucket, time.perf_counter() - begin)

        return packed, wait

    def _count(self, bucket: Bucket, packed: Tensor, sent_bytes: int, seconds: float) -> None:
        name, num_values = self._name(bucket), packed.numel() - bucket.num_plain
        self._ranks.clock.count(packed.device, lambda: self.counts.count(name, num_values, sent_bytes))
        self._wait(bucket, seconds)

    def _wait(self, bucket: Bucket, seconds: float) -> None:
        if not is_recording(self._ranks.device):  # of a step that is recorded the host only takes down what to do
            self.counts.wait(self._name(bucket), seconds)

    def _name(self, bucket: Bucket) -> str:
        return self._names.get(id(bucket.parameters[0]), "")


class OwnGradients:
    """Sums of which nothing travels: each rank keeps its own gradients; see `Sums`."""

    def sum_(self, bucket: Bucket) -> Tensor:
        return bucket.packed()

    def begin(self, bucket: Bucket) -> tuple[Tensor, Callable[[], None]]:
        return bucket.packed(), lambda: None


class BackwardSums:
    """Adds up the gradients of replicated parameters over ranks, as `nugnn.comm.gradients.sum_gradients` does.

    Parameters stand in buckets, the last ones first, since backward comes to them first. As soon as all gradients of a
    bucket are there, and those of the buckets before it have left, it leaves too. What has not left when backward ends
    (parameters that this rank's loss does not depend on) leaves then: every rank sends the same buckets in the same
    order, whatever it has. Buckets do not change while the same parameters are trained, so a run that is resumed adds
    in the same order as one that was not.

    The first step is watched, with sums after its backward: a model in which a parameter gets its gradient in several
    pieces (`torch.utils.checkpoint` with ``use_reentrant=True`` on a layer that is called twice) goes on like that.
    These sums travel as those that begin in backward: values sent from rank to rank (`nugnn.comm.direct_sums`) are
    added in another order, and the first step of a run that is resumed is one that the other run did not watch.

    Args:
        parameters: Same order on every rank; those that are frozen do not count as long as they are.
        ranks: Who takes part.
        while_backward_runs: Whether sums may begin before it has ended. They go through the group ``ranks.halo`` then,
            which has to be free of other exchanges.
        sums: How they travel; `PlainSums` when None.
        riders: Travel with the last bucket, if it is of their type.
        note: Is told for how many seconds of each step sums were exposed: from the end of backward until they are all
            there, packing and unpacking included.

    Attributes:
        may_begin: Whether sums may begin before backward has ended, the same on every rank.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        ranks: Ranks,
        *,
        while_backward_runs: bool,
        sums: Sums | None = None,
        riders: Riders | None = None,
        note: Note | None = None,
    ) -> None:
        self._all, self._ranks, self._riders, self._note = list(parameters), ranks, riders, note
        self._sums = PlainSums(ranks) if sums is None else sums
        self.may_begin = while_backward_runs and ranks.is_split and ranks.sums_aside
        self._trained: list[nn.Parameter] | None = None
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[int, int] = {}
        self._hooks: list[RemovableHandle] = []
        self._remove = weakref.finalize(self, _remove_all, self._hooks)
        self._is_watching = self.may_begin
        self._begins = False
        self._is_open = False
        self._seen: set[int] = set()
        self._is_in_pieces = False
        self._missing: list[int] = []
        self._sent: list[tuple[Tensor, Callable[[], None]]] = []

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """Around the backward pass after which a step has all its gradients."""
        if not self.may_begin:
            yield
            return
        for _, wait in self._sent:  # of a backward that failed on all ranks: no gradients of this one
            wait()
        self._sent = []
        self._lay_out()
        self._seen, self._is_in_pieces = set(), False
        self._missing = [len(bucket.parameters) for bucket in self._buckets]
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def finish(self) -> None:
        """Wait until all gradients are sums over ranks; a collective call, after `last_backward`.

        A parameter that has a gradient on some ranks only counts as zero on the others; one that has none anywhere
        keeps none. Every rank ends with the same bits.

        Raises:
            RuntimeError: A parameter got its gradient in several pieces, for the first time after the first step.
        """
        if not self._ranks.is_split:
            return
        with self._ranks.clock.measure("sync", self._ranks.device, "sums of gradients", self._note):
            if not self._begins:  # else they were laid out before backward
                self._lay_out()
            if not self.may_begin:
                for bucket in self._buckets:
                    bucket.unpack(self._sums.sum_(bucket))
            else:
                self._send(len(self._buckets))
                for bucket, (total, wait) in zip(self._buckets, self._sent, strict=True):
                    wait()
                    bucket.unpack(total)
                self._sent = []
            if self._is_watching:
                in_pieces = torch.tensor([float(self._is_in_pieces)])
                self._begins, self._is_watching = float(self._ranks.max_(in_pieces)) == 0, False
            elif self._begins and self._is_in_pieces:
                raise RuntimeError(
                    "a parameter got its gradient in several pieces in one backward, after steps in which it did not: "
                    "sums over workers had begun with the first. Call torch.utils.checkpoint with use_reentrant=False"
                )

    def _lay_out(self) -> None:
        """Buckets of the parameters that are trained now; a collective call when they have changed."""
        trained = [p for p in self._all if p.requires_grad]
        known = self._trained
        if known is not None and len(trained) == len(known) and all(map(operator.is_, trained, known)):
            return
        self._trained = trained
        orders = {id(p): memory_order(p) for p in trained}
        numbers = torch.tensor([axis for p in trained for axis in orders[id(p)]], dtype=torch.int64)
        if not equal_everywhere([numbers], self._ranks):
            orders = {id(p): list(range(p.dim())) for p in trained}
        groups = in_buckets(trained)
        self._buckets = [Bucket(group, [orders[id(p)] for p in group]) for group in groups]
        if self._riders is not None:
            fits = bool(groups) and groups[-1][0].dtype is self._riders.dtype
            self._riders.are_carried = fits
            if fits:
                self._buckets[-1].riders = self._riders
        self._bucket_of = {id(p): i for i, bucket in enumerate(self._buckets) for p in bucket.parameters}
        _remove_all(self._hooks)
        self._is_watching, self._begins = self.may_begin, False
        if self.may_begin:
            own = weakref.ref(self)

            def arrived(parameter: Tensor) -> None:
                if (sums := own()) is not None and sums._is_open:
                    sums._arrived(parameter)

            self._hooks += [p.register_post_accumulate_grad_hook(arrived) for p in trained]

    def _arrived(self, parameter: Tensor) -> None:
        if id(parameter) in self._seen:
            self._is_in_pieces = True
            return
        self._seen.add(id(parameter))
        if not self._begins:
            return
        self._missing[self._bucket_of[id(parameter)]] -= 1
        complete = len(self._sent)
        while complete < len(self._buckets) and self._missing[complete] == 0:
            complete += 1
        with torch._C.DisableTorchFunction():
            self._send(complete)

    def _send(self, until: int) -> None:
        for bucket in self._buckets[len(self._sent) : until]:
            sent = self._sums.begin(bucket)
            for parameter in bucket.parameters:  # the memory is free for what backward makes next
                parameter.grad = None
            self._sent.append(sent)


def in_buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters from the last to the first, in groups of one dtype and device that may travel together."""
    done: list[list[nn.Parameter]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in reversed(parameters):
        key = (parameter.dtype, parameter.device)
        group = filling.setdefault(key, [])
        group.append(parameter)
        num_bytes = sum(p.numel() * p.element_size() for p in group)
        if num_bytes >= (BUCKET_BYTES if done else FIRST_BUCKET_BYTES):
            done.append(filling.pop(key))
    return done + list(filling.values())


def _remove_all(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()
