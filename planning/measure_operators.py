"""Times the operators of a training step where they run: one lap for each record of a trace of that step.

The step is the trainer's own, so operands, their layouts, what is left in the caches, and kernels that are not torch's
are those of training. On a CPU a lap goes from the end of one operator to the end of the next, so that all of a step's
seconds are some operator's, Python's among them. On a GPU it is the device's, between two events behind a pause in
which the host puts the operator into the queue; what such a pair takes with nothing in between is taken off, and what a
kernel takes longer when it follows another one is added, so that the laps of small kernels add up to a row of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from nugnn.kernels.interceptor import Interceptor
from nugnn.kernels.operator_call import OperatorCall
from nugnn.planning.doors import StepWatcher, torch_name
from nugnn.planning.operator_kinds import SEEN_THROUGH

Now = Callable[[], float]
"""A clock of the host, in seconds: `time.perf_counter`, or `time.thread_time` for what one thread has worked."""
_FIRST_PAUSE = 500e-6
"""Seconds in which the host has put any operator into the queue, while it is not known how long that takes."""
_LEAST_PAUSE, _MOST_PAUSE = 30e-6, 5e-3
_WARM_CYCLES = 50_000_000
"""After which a GPU that was idle runs at its usual clock."""
_IN_A_ROW, _ROW_PAUSE, _ROUNDS = 64, 4e-3, 9
"""Small kernels in a row, and seconds in which the host has put them into the queue."""
_SHORTEST_KERNEL = 0.5e-6
"""Seconds of a lap; a shorter one is taken to have no kernel in it. About so fine is the clock of events by CUDA's
manual (`cudaEventElapsedTime`): laps that differ from none by less are none for all that it tells. How short a lap with
a kernel may be on a card was never counted."""


class OperatorClock(Protocol):
    """Times the operators of one step after the other."""

    def open(self) -> None:
        """A step begins."""
        ...

    def begin(self, number: int) -> None:
        """Operator ``number`` of the step comes next."""
        ...

    def end(self) -> None:
        """The host has done its part of it."""
        ...

    def close(self) -> list[float]:
        """The step has ended: seconds of its operators, in order."""
        ...


def clock_for(device: torch.device, now: Now = time.perf_counter) -> OperatorClock:
    """Of the device's own kind; ``now`` is asked for a CPU alone."""
    return DeviceClock(device) if device.type == "cuda" else HostClock(now)


class HostClock:
    """For devices that have done what they were asked when a call returns."""

    def __init__(self, now: Now = time.perf_counter) -> None:
        self._now = now
        self._ends: list[float] = []

    def open(self) -> None:
        self._ends = [self._now()]

    def begin(self, number: int) -> None:
        """What comes before belongs to the operator, too."""

    def end(self) -> None:
        self._ends.append(self._now())

    def close(self) -> list[float]:
        self._ends[-1] = self._now()  # what is left of the step is the last operator's
        return [end - before for before, end in zip(self._ends, self._ends[1:], strict=False)]


class DeviceClock:
    """For GPUs: events around each operator, the host ahead of the device.

    Args:
        device: Whose current stream the operators run on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[tuple[Any, Any]] = []
        self._host_began = 0.0
        self._host_laps: list[float] = []
        self._pauses: list[float] = []
        self._cycles_per_second = self._measured_rate()
        self._nothing = self._measured_nothing()
        self._after_another = self._measured_after_another()

    def open(self) -> None:
        self._events, self._host_laps = [], []

    def begin(self, number: int) -> None:
        if self._events:  # one operator in the queue at a time: the host never waits for room in it
            self._events[-1][1].synchronize()
        self._pause(self._pauses[number] if number < len(self._pauses) else _FIRST_PAUSE)
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._events.append(pair)
        pair[0].record()
        self._host_began = time.perf_counter()

    def end(self) -> None:
        self._events[-1][1].record()
        self._host_laps.append(time.perf_counter() - self._host_began)

    def close(self) -> list[float]:
        torch.cuda.synchronize(self._device)
        laps = [max(before.elapsed_time(after) / 1e3 - self._nothing, 0.0) for before, after in self._events]
        laps = [lap + self._after_another if lap > _SHORTEST_KERNEL else lap for lap in laps]
        self._pauses = [min(_LEAST_PAUSE + 2 * seconds, _MOST_PAUSE) for seconds in self._host_laps]
        return laps

    def _pause(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * self._cycles_per_second))

    def _measured_rate(self) -> float:
        cycles = 2_000_000
        torch.cuda._sleep(_WARM_CYCLES)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        torch.cuda.synchronize(self._device)
        return cycles / (begin.elapsed_time(end) / 1e3)

    def _measured_nothing(self) -> float:
        return statistics.median(self._measured(_FIRST_PAUSE, lambda: None) for _ in range(32))

    def _measured_after_another(self) -> float:
        """Seconds that a kernel takes longer than its own lap when it comes right after another one."""
        x = torch.zeros(1024, device=self._device)

        def row() -> None:
            for _ in range(_IN_A_ROW):
                x.add_(1)

        self._measured(_ROW_PAUSE, row)  # compiled, or loaded
        in_a_row = statistics.median(self._measured(_ROW_PAUSE, row) for _ in range(_ROUNDS)) / _IN_A_ROW
        alone = statistics.median(self._measured(_FIRST_PAUSE, lambda: x.add_(1)) for _ in range(32)) - self._nothing
        return max(in_a_row - alone, 0.0)

    def _measured(self, pause: float, run: Callable[[], Any]) -> float:
        """Seconds between two events around ``run``, which the host puts into the queue while the device pauses."""
        self._pause(pause)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize(self._device)
        return float(begin.elapsed_time(end)) / 1e3


class OperatorTimer(StepWatcher):
    """Times the operators of steps, each as the one record that it is.

    Args:
        optimizer: Its step is one operator.
        clock: Of the device.

    Attributes:
        names: Of the operators of the last step, as in `OperatorRecord.op`.
        laps: Their seconds.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, clock: OperatorClock) -> None:
        super().__init__(optimizer)
        self._clock = clock
        self._is_inside = False
        self._quiet: Any = None
        self.names: list[str] = []
        self.laps: list[float] = []
        self._maker: dict[int, int] = {}

    @contextmanager
    def timing(self, interceptor: Interceptor) -> Iterator[None]:
        """Around one step."""
        self.names, self._maker = [], {}
        with self.at_the_doors(interceptor), self:
            self._clock.open()
            yield
            self.laps = self._clock.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_inside:
            return func(*args, **(kwargs or {}))
        run = _add_in_place if self._is_sum_of_gradients(func, args) else func
        self._clock.begin(len(self.names))
        out = run(*args, **(kwargs or {}))
        self._clock.end()
        self.names.append(torch_name(func))
        self._note_maker(out)
        return out

    def _is_sum_of_gradients(self, func: Any, args: Any) -> bool:
        """Whether it is autograd that adds, to what another node has made: in place, where no mode is on."""
        if func is not torch.ops.aten.add.Tensor or torch._C._current_graph_task_id() == -1 or len(args) != 2:
            return False
        first, second = args
        if not (isinstance(second, Tensor) and first.shape == second.shape and first.dtype is second.dtype):
            return False
        maker = self._maker.get(first.untyped_storage()._cdata)
        return maker is not None and maker != _node() and first.is_contiguous()

    def _note_maker(self, out: Any) -> None:
        """Which node's backward has made a tensor."""
        if isinstance(out, Tensor) and torch._C._current_graph_task_id() != -1 and out.layout is torch.strided:
            self._maker[out.untyped_storage()._cdata] = _node()

    def passed(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if self._is_inside or name.partition(".")[0] in SEEN_THROUGH:
            return function(*args)
        return self._whole(name, function, *args)

    def on_graph(self, call: OperatorCall, proceed: Callable[[OperatorCall], Any]) -> Any:
        return proceed(call) if self._is_inside else self._whole(call.kind, proceed, call)

    def kernel_of_dgl(self, kind: str, function: Callable[..., Any], graph: Any, op: str, *args: Any) -> Any:
        if self._is_inside:
            return function(graph, op, *args)
        return self._whole(f"dgl.{kind}", function, graph, op, *args)

    def begin_optimizer(self) -> None:
        self._begin_whole()

    def end_optimizer(self) -> None:
        self._end_whole("optimizer")

    def _whole(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """An operator that is one whatever it calls: nobody looks at that, which would take time."""
        self._begin_whole()
        try:
            out = function(*args)
        finally:
            self._end_whole(name)
        for x in out if isinstance(out, tuple) else (out,):
            self._note_maker(x)
        return out

    def _begin_whole(self) -> None:
        self._is_inside = True
        self._quiet = torch._C._DisableTorchDispatch()
        self._clock.begin(len(self.names))

    def _end_whole(self, name: str) -> None:
        self._clock.end()
        self._quiet = None
        self._is_inside = False
        self.names.append(name)


def _add_in_place(first: Tensor, second: Tensor) -> Tensor:
    return first.add_(second)


def _node() -> int:
    """Number of the node whose backward runs; -1 for none."""
    node = torch._C._current_autograd_node()
    return -1 if node is None else node._sequence_nr()
