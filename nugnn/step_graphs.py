"""Steps of training as CUDA graphs: recorded once, then started again whole, with no work for the host in between.

What a step asks of the GPU stays the same from step to step, but for its batch and its random keys. Both lie in memory
where the recorded launches find them. Forward, backward and the sums over ranks are recorded; the optimizer, gradient
clipping and schedules run as ever. A step has the same bits either way.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from nugnn.comm.clock import Recorded
from nugnn.comm.groups import keeps_exchanges
from nugnn.family import Family, Work
from nugnn.kernels.green_context import new_stream
from nugnn.known_models import HOOKS, is_known
from nugnn.planning.device_facts import memory_bytes
from nugnn.precision.storage import Storage

OnLoss = Callable[[Tensor], Any]
Passes = Callable[[Sequence[Work], OnLoss | None], tuple[Tensor, Any]]
"""Forward, backward and sums of a step: gradients are left at the parameters. Gives this rank's share of the loss, and
what the second argument says of it."""

_STEPS_BEFORE = 3
"""Steps of a kind that run as usual before one is recorded: kernels are compiled, buffers made, and the first step is
one that sums gradients after its backward (see `nugnn.comm.backward_sums`)."""
_MOST_KINDS = 8
"""Kinds of step that are kept, each with memory of its own; further ones run as usual."""
_MOST_KINDS_SEEN = 1024
"""Kinds that are counted: batches of ever new sizes must not pile up."""


_logger = logging.getLogger(__name__)

CUDA_GRAPHS = ("auto", "on", "off")
CudaGraphs = Literal["auto", "on", "off"]
"""Whether steps are recorded: ``auto`` for the models of which it is known that they may be, see `nugnn.known_models`,
where there is memory to spare and no rows travel between ranks."""


class CaptureError(ValueError):
    """A step cannot be recorded."""


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """What decides whether steps are recorded: of a run that is there, or of one that is planned.

    Args:
        choice: The user's.
        is_known: Whether all that runs in a step is code of `nugnn`, of torch's and DGL's layers, and of torchvision's
            ResNets and VGGs; a loss or regularizer of the user's is none.
        is_on_gpu: Whether this worker computes on a GPU.
        is_split: Whether there are several workers.
        carries_cuda: Whether sums over workers go from GPU to GPU (NCCL).
        exchanges_rows: Whether workers send each other rows inside of steps, see `nugnn.family.Family`.
        compresses: Whether gradients are compressed on their way between workers, see `counts_as_compressed`.
        precision: Of the run.
        why_not_family: What the family has against it, see `nugnn.family.Family.why_not_recorded`.
        has_triton: Whether the GPU's kernels can be compiled.
    """

    choice: CudaGraphs
    is_known: bool
    is_on_gpu: bool
    is_split: bool
    carries_cuda: bool
    exchanges_rows: bool
    compresses: bool
    precision: str
    why_not_family: str | None
    has_triton: bool

    @property
    def why_not(self) -> str | None:
        """What keeps a step from being recorded; None where nothing does."""
        if not self.is_on_gpu:
            return "this worker does not compute on a GPU"
        if self.is_split and not self.carries_cuda:
            return "sums over workers go through the host's memory here, which cannot be recorded"
        if self.is_split and self.compresses:
            return "gradients travel compressed, or may (grad_sync), which the host takes part in"
        if Storage(self.precision).needs_loss_scale:
            return f"under {self.precision} whether a step counts depends on its gradients"
        if not self.has_triton:
            return "Triton is not installed"
        return self.why_not_family

    @property
    def is_recorded(self) -> bool:
        """Whether steps are recorded: under ``auto`` only where all that runs in them is known, and no rows travel."""
        is_unasked = self.choice == "auto" and self.is_known and not self.exchanges_rows
        return (self.choice == "on" or is_unasked) and self.why_not is None


def counts_as_compressed(grad_sync: str, choice: CudaGraphs) -> bool:
    """Whether gradients that travel so keep steps from being recorded, as far as that is known before training.

    ``auto`` may come to float32, on GPUs before the first step: unless recording was asked for, it is looked at then.

    Args:
        grad_sync: The wire that was asked for.
        choice: Of recording, the user's.

    >>> counts_as_compressed("auto", "auto"), counts_as_compressed("auto", "on"), counts_as_compressed("8bit", "auto")
    (False, True, True)
    """
    return grad_sync != "fp32" and (grad_sync != "auto" or choice == "on")


def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def records_steps(
    choice: CudaGraphs, family: Family, *, has_regularizer: bool = False, compresses: bool = False
) -> bool:
    """Whether the steps of ``family`` are recorded: see `StepFacts.is_recorded`.

    Args:
        choice: The user's.
        family: Whose steps these are.
        has_regularizer: Whether a function of the user adds a term to the loss.
        compresses: Whether gradients are compressed on their way between workers, see `counts_as_compressed`.

    Raises:
        ValueError: No such choice; ``on`` where it is not to be had.
    """
    if choice not in CUDA_GRAPHS:
        raise ValueError(f"cuda_graphs is {choice!r}, must be auto, on or off")
    ranks = family.ranks
    facts = StepFacts(
        choice=choice,
        is_known=not (has_regularizer or family.has_own_loss) and is_known(family.model),
        is_on_gpu=ranks.device.type == "cuda",
        is_split=ranks.is_split,
        carries_cuda=ranks.carries_cuda,
        exchanges_rows=family.exchanges_rows,
        compresses=compresses,
        precision=family.storage.precision,
        why_not_family=family.why_not_recorded,
        has_triton=has_triton(),
    )
    if choice == "on" and facts.why_not is not None:
        raise ValueError(f"cuda_graphs is on, but {facts.why_not}; leave it at auto or off")
    return facts.is_recorded


def _leaves_room(most: int, *, total: int, free: int, reserved: int, given_out: int) -> bool:
    """Whether a graph of a step leaves room for all else: it keeps its memory to itself, and evaluation comes on top.

    Args:
        most: Bytes that steps have taken so far.
        total: Of the GPU, for this process.
        free: That no process has; others may be on the GPU.
        reserved: That torch's allocator has of it.
        given_out: Of these, tensors.

    >>> gpu = {"total": 900, "free": 500, "reserved": 250, "given_out": 100}
    >>> _leaves_room(200, **gpu), _leaves_room(300, **gpu), _leaves_room(200, **gpu | {"free": 40})
    (True, False, False)
    """
    return most < total // 3 and reserved < total // 2 and most < free + reserved - given_out


def _mode_of(module: nn.Module) -> tuple[Any, ...]:
    """What torch's layers look at in each call: in training, probability of dropping, momentum; and who hooks in."""
    numbers = (getattr(module, name, None) for name in ("p", "momentum"))
    plain = (number if isinstance(number, (int, float)) else None for number in numbers)
    return (module.training, *plain, *(len(getattr(module, hooks)) for hooks in HOOKS))


@dataclass(eq=False)
class _Recorded:
    """A step of one kind."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    share: Tensor
    said: Any
    gradients: list[tuple[nn.Parameter, Tensor | None]]
    measured: Recorded


class StepGraphs:
    """Runs the passes of steps, from their fourth on as CUDA graphs.

    Steps are of one kind when their batches have the same shapes, the model's modules are in the same modes, drop with
    the same probabilities and have as many hooks, and its parameters and buffers lie where they lay. Of each kind three
    run as usual; the next is recorded. Whatever else the model does in Python happens while it is recorded and never
    again, so a step whose course depends on numbers, or that counts in Python, must not be recorded. When other
    parameters are trained than before, on all ranks, all begins anew: sums over ranks are laid out again then.

    Args:
        family: Whose steps these are.
        parameters: Gives all that are trained: gradients are left at them.
        is_auto: Go on as usual where a step cannot be recorded; leave it alone where it takes more than a third of the
            GPU's memory (a graph keeps its memory to itself, and evaluation comes on top), or has code in it that is
            not known.
    """

    def __init__(
        self, family: Family, parameters: Callable[[], Sequence[nn.Parameter]], *, is_auto: bool = False
    ) -> None:
        from nugnn.kernels.philox.key_table import KeyTable

        self._family, self._device, self._parameters = family, family.ranks.device, parameters
        self._is_auto, self._is_off = is_auto, False
        self._trained: list[bool] = []
        self._keys = KeyTable(self._device)
        self._stream = new_stream(self._device)
        self._num_seen: dict[Any, int] = {}
        self._recorded: dict[Any, _Recorded] = {}
        keeps_exchanges(self)

    def forget(self) -> None:
        """Give all graphs up, and the memory that they keep; steps are looked at anew."""
        self._recorded.clear()
        self._num_seen.clear()

    @property
    def num_recorded(self) -> int:
        """Kinds of step."""
        return len(self._recorded)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Around all GPU work of steps, batches included: recording needs a stream that is not the default one."""
        outer = torch.cuda.current_stream(self._device)
        if outer == self._stream:
            yield
            return
        self._stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outer.wait_stream(self._stream)

    def run(
        self, works: Sequence[Work], step: int, passes: Passes, on_loss: OnLoss | None = None
    ) -> tuple[Tensor, Any]:
        """``passes`` of step number ``step``, the same functions in each call; gives what they give.

        What ``on_loss`` does with the loss is recorded, too, and what it gave then is given again.

        Raises:
            CaptureError: The step does what cannot be recorded.
        """
        self._begin_anew_where_others_are_trained()
        if len(works) != 1 or self._is_off:
            return passes(works, on_loss)
        inputs = self._family.tensors_of(works[0])
        kind = (on_loss is not None, *self._kind_of(works[0], inputs))
        recorded = self._recorded.get(kind)
        if recorded is None:
            if not self._is_due(kind):
                with self._keys.of_step(step):
                    return passes(works, on_loss)
            try:
                recorded = self._recorded[kind] = self._record(works[0], step, passes, on_loss)
            except CaptureError as error:
                if not self._is_auto or self._family.ranks.is_split:  # other ranks may have recorded it
                    raise
                self._is_off = True
                _logger.warning("steps run without CUDA graphs: %s", error)
                return passes(works, on_loss)
        self._keys.fill(step)
        for held, given in zip(recorded.inputs, inputs, strict=True):
            held.copy_(given, non_blocking=True)
        ranks = self._family.ranks
        ranks.pulse.begin_step()
        recorded.graph.replay()
        ranks.pulse.beat()
        ranks.clock.add(recorded.measured)
        for parameter, gradient in recorded.gradients:
            parameter.grad = gradient
        return recorded.share.clone(), recorded.said

    def _begin_anew_where_others_are_trained(self) -> None:
        trained = [p.requires_grad for p in self._parameters()]
        if trained != self._trained:
            self._trained = trained
            self.forget()

    def _is_due(self, kind: Any) -> bool:
        """Whether a step of this kind is to be recorded now."""
        seen = self._num_seen.get(kind, 0)
        if seen or len(self._num_seen) < _MOST_KINDS_SEEN:
            self._num_seen[kind] = seen + 1
        return seen >= _STEPS_BEFORE and len(self._recorded) < _MOST_KINDS and self._is_fit()

    def _is_fit(self) -> bool:
        """Under ``auto``: whether memory is to spare, and the model still as it was made."""
        if not self._is_auto:
            return True
        device = self._device
        leaves_room = _leaves_room(
            int(torch.cuda.memory_stats(device)["allocated_bytes.all.peak"]),
            total=memory_bytes(device),
            free=torch.cuda.mem_get_info(device)[0],
            reserved=torch.cuda.memory_reserved(device),  # has the graphs in it that are there already
            given_out=torch.cuda.memory_allocated(device),
        )
        return leaves_room and is_known(self._family.model)

    def _kind_of(self, work: Work, inputs: Sequence[Tensor]) -> Any:
        model = self._family.model
        return (
            self._family.kind_of(work),
            tuple((x.shape, x.dtype, x.stride()) for x in inputs),
            tuple(x.data_ptr() for x in (*self._parameters(), *model.buffers()) if x.layout is torch.strided),
            tuple(_mode_of(module) for module in model.modules()),
        )

    def _record(self, work: Work, step: int, passes: Passes, on_loss: OnLoss | None) -> _Recorded:
        held, clock = self._family.copy_of(work), self._family.ranks.clock
        before = clock.withdraw()
        graph = torch.cuda.CUDAGraph()
        for parameter in self._parameters():
            parameter.grad = None
        try:
            # other threads (of the loader, of NCCL) may go on asking and allocating meanwhile
            with (
                self._keys.of_step(step, is_fixed=True),
                torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"),
            ):
                share, said = passes([held], on_loss)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            what = (str(error).splitlines() or [""])[0]
            raise CaptureError(
                f"a step of this model cannot be recorded as a CUDA graph ({type(error).__name__}: {what}): it asks "
                "the GPU for a number or waits for it, or takes another course from step to step. Train with "
                "cuda_graphs off (--cuda-graphs off)."
            ) from error
        measured = clock.withdraw()
        clock.add(before)
        gradients = [(p, p.grad) for p in self._parameters()]
        return _Recorded(graph, self._family.tensors_of(held), share, said, gradients, measured)
