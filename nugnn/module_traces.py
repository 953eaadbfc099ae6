"""What each module takes and gives while a model runs over some ranks, and where two such records first differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from nugnn.comm.gradients import sum_gradients
from nugnn.comm.groups import Ranks
from nugnn.comm.local_ranks import RanksDisagree
from nugnn.error_place import place_of_error
from nugnn.kernels.interceptor import Interceptor, current_interceptor
from nugnn.own_rows import sharded_parameters
from nugnn.user_code import describe_error
from nugnn.worker_process import is_user_error

TOLERANCE = 1e-8
"""Relative, in float64: sums over a few hundred rows in another order differ by about 1e-14, amplified by a few layers
and a batch norm by at most a few orders of magnitude; a wrong count or mask differs by more than 1e-3."""
_CANCELLED = 1e-6
"""Values below this part of the largest one so far are compared on that scale, not on their own."""

TOP = "the model itself"


class ModelFails(ValueError):  # noqa: N818 - a finding about the model
    """A model raises an error of its own, on one part."""


class ModelDiffers(ValueError):  # noqa: N818 - a finding about the model
    """A model depends on how the graph, or the batch, is split."""


@dataclass(frozen=True)
class CheckReport:
    """What a check compared.

    Args:
        num_nodes: Nodes of the graph it ran on; 0 for samples.
        num_parts: Parts compared with one.
        num_modules: Module calls compared.
        largest_difference: Over logits and gradients, relative to the largest value.
        num_samples: Samples of the batch it ran on; 0 for a graph.
        notes: What the user should know besides.
    """

    num_nodes: int
    num_parts: int
    num_modules: int
    largest_difference: float
    num_samples: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wording:
    """How a finding is told.

    Args:
        rows: What is split, ``nodes`` or ``samples``.
        whole: What one rank has, to be read after "than on".
        parts: What several have, to be read after "on".
        instead: What a model should do where it mixes rows.
        draw: What it should do where it draws random numbers.
    """

    rows: str
    whole: str
    parts: str
    instead: str
    draw: str

    def differs(self, what: str, **values: Any) -> str:
        """A sentence about an ``output``, an ``input``, a ``gradient`` or a ``buffer`` that differs."""
        another = f"gives another result on {self.parts} than on {self.whole} (relative difference {{difference:.2g}})"
        mixes = f"It mixes {self.rows} in a way that cannot be seen from outside, such as a mean over all rows."
        return {
            "output": f"{{module}} {another} although its input is the same. {mixes} {self.instead}",
            "input": f"{{caller}} {another} in its own code, before it calls {{module}}. {mixes} {self.instead}",
            "gradient": f"the gradient of {{module}} {another} although all outputs agree: a custom backward does not "
            "account for other ranks.",
            "buffer": f"the buffer {{module}} is not the same on {self.parts} as on {self.whole} (relative difference "
            f"{{difference:.2g}}): the model updates it from a rank's own rows. {self.instead}",
        }[what].format(**values)

    def is_random(self, where: str) -> str:
        return (
            f"{where} draws random numbers that nothing keeps equal: two runs on one part differ already. {self.draw}"
        )


@dataclass(frozen=True)
class Value:
    """What went into or came out of a module call.

    Args:
        module: Path and class of the module.
        caller: Path and class of the module whose forward made the call; empty for the model itself.
        role: ``input``, ``output``, or ``gradient`` of rows that ranks have of their own.
        x: The tensor, rows on axis 0.
        ids: Global id of each row; None where rows are not those that are split.
    """

    module: str
    caller: str
    role: str
    x: Tensor
    ids: Tensor | None


@dataclass
class Trace:
    """Inputs and outputs of module calls in the order they came up, the gradients, and the buffers afterwards."""

    values: list[Value] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)

    @property
    def num_outputs(self) -> int:
        return sum(value.role == "output" for value in self.values)

    @property
    def calls(self) -> list[tuple[str, str]]:
        """What was called, in order."""
        return [(value.module, value.role) for value in self.values]

    def ends(self) -> Trace:
        """With the model's own outputs alone."""
        ends = [value for value in self.values if value.module == TOP and value.role == "output"]
        return replace(self, values=ends)

    def keep_state(self, model: nn.Module, ranks: Ranks, row_ids: Tensor | None = None) -> None:
        """Sum the gradients of ``model`` over ranks and note them, and its buffers; a collective call.

        Args:
            model: After its steps.
            ranks: Who takes part.
            row_ids: Global ids of the rows of parameters of which each rank has its own.
        """
        own = {id(p) for p in sharded_parameters(model)}
        sum_gradients([p for p in model.parameters() if id(p) not in own], ranks)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and id(parameter) in own:
                self.values.append(Value(name, "", "gradient", parameter.grad, row_ids))
            elif parameter.grad is not None:
                self.gradients[name] = parameter.grad
        self.buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


Noted = tuple[Tensor, "Tensor | None"]
"""A tensor with rows on axis 0, not to be written to by others, and the global ids of the rows."""


@contextmanager
def watched(model: nn.Module, interceptor: Interceptor, rows_on_top: Callable[[Tensor], Noted]) -> Iterator[Trace]:
    """While open, what modules of ``model`` take and give on this thread is noted.

    Args:
        model: Run in steps of ``interceptor``.
        interceptor: Tells this thread's steps from those of other ranks.
        rows_on_top: What is to be kept of a tensor; without ids where its rows are not those that are split.
    """
    trace = Trace()
    names = {id(m): f"{path} ({type(m).__name__})" if path else TOP for path, m in model.named_modules()}
    callers: list[str] = []

    def concerns(module: nn.Module) -> bool:
        """Not another thread's module, and not inside a user's reduce function."""
        return current_interceptor() is interceptor and id(module) in names and not interceptor.in_scope

    def note(module: nn.Module, role: str, values: Any) -> None:
        for x in values if isinstance(values, (tuple, list)) else (values,):
            if isinstance(x, Tensor) and x.dim() and x.layout is torch.strided:
                caller = callers[-1] if callers else ""
                trace.values.append(Value(names[id(module)], caller, role, *rows_on_top(x)))

    def enter(module: nn.Module, args: Any) -> None:
        if concerns(module):
            note(module, "input", args)
            callers.append(names[id(module)])

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if concerns(module):
            callers.pop()
            note(module, "output", output)

    hooks = (
        nn.modules.module.register_module_forward_pre_hook(enter),
        nn.modules.module.register_module_forward_hook(leave),
    )
    try:
        yield trace
    finally:
        for hook in hooks:
            hook.remove()


def merged(traces: Sequence[Trace]) -> Trace:
    """All ranks' rows together, in the order of their global ids.

    Raises:
        ValueError: Ranks called a different number of modules.
    """
    whole = Trace(gradients=traces[0].gradients, buffers=dict(traces[0].buffers))
    for trace in traces[1:]:  # a rank that differs from rank 0 is the one to look at
        for name, buffer in trace.buffers.items():
            if not torch.equal(buffer, traces[0].buffers[name]):
                whole.buffers[name] = buffer
    if len({len(trace.values) for trace in traces}) > 1:
        raise ValueError("ranks called a different number of modules; control flow must not depend on local data")
    for first, *others in zip(*(trace.values for trace in traces), strict=True):
        parts = [first.x, *(other.x for other in others)]
        ids = [i for i in (first.ids, *(other.ids for other in others)) if i is not None]
        if len(ids) == len(parts) and len({part.shape[1:] for part in parts}) == 1:
            order = torch.argsort(torch.cat(ids))
            whole.values.append(replace(first, x=torch.cat(parts)[order], ids=torch.cat(ids)[order]))
        else:
            whole.values.append(replace(first, ids=None))
    return whole


def first_difference(
    alone: Trace, split: Trace, wording: Wording, *, tolerance: float = TOLERANCE
) -> tuple[str | None, float]:
    """A sentence about the first value or gradient that differs, or None; and the largest difference."""
    largest = seen = 0.0
    for one, many in zip(alone.values, split.values, strict=False):
        if one.module != many.module or one.role != many.role:
            where = f"{one.module} is called on one part where {many.module} is called on {wording.parts}."
            return where, float("inf")
        if one.x.shape != many.x.shape and (one.ids is None or many.ids is None):
            continue  # rows that are not split, such as a rank's halo: what they lead to is compared
        seen = max(seen, _size(one.x))
        # Values that cancel to nothing are rounding noise of the larger ones they came from.
        difference = _difference(one.x, many.x, _CANCELLED * seen)
        largest = max(largest, difference)
        if difference > tolerance:
            told = {"module": one.module, "caller": one.caller or "nugnn", "difference": difference}
            return wording.differs(one.role, **told), largest
    if len(alone.values) != len(split.values):
        return f"the model calls other modules on one part than on {wording.parts}.", float("inf")
    scale = max((_size(gradient) for gradient in alone.gradients.values()), default=0.0)
    for name in sorted(alone.gradients.keys() | split.gradients.keys()):
        one_grad, many_grad = alone.gradients.get(name), split.gradients.get(name)
        missing = one_grad is None or many_grad is None
        difference = float("inf") if missing else _difference(alone.gradients[name], split.gradients[name], scale)
        largest = max(largest, difference)
        if difference > tolerance:
            return wording.differs("gradient", module=name, difference=difference), largest
    for name, buffer in alone.buffers.items():
        difference = _difference(buffer, split.buffers[name], 0.0)
        largest = max(largest, difference)
        if difference > tolerance:
            return wording.differs("buffer", module=name, difference=difference), largest
    return None, largest


def compared(
    alone: Callable[[], Trace],
    split: Callable[[], Trace],
    wording: Wording,
    *,
    tolerance: float = TOLERANCE,
    ways_may_differ: bool = False,
) -> tuple[int, float]:
    """Module calls and the largest difference of two runs that agree.

    Args:
        alone: Runs the model on one rank.
        split: Runs it on several.
        wording: Of what is found.
        tolerance: Relative difference up to which they agree.
        ways_may_differ: Compare by what comes out at the end where other modules are called, instead of finding fault.

    Raises:
        ModelFails: The model raises on one rank.
        ModelDiffers: Naming the first module whose output differs, or a gradient or buffer that does.
    """
    try:
        one = alone()
    except Exception as error:
        raise ModelFails(f"the model fails on one part already: {describe_error(error)}") from error
    try:
        many = split()
    except Exception as error:
        raise ModelDiffers(f"the model runs on one part but not on {wording.parts}: {told(error)}") from error
    if ways_may_differ and one.calls != many.calls:
        one, many = one.ends(), many.ends()
    finding, largest = first_difference(one, many, wording, tolerance=tolerance)
    if finding is not None:
        second = alone()
        again, _ = first_difference(
            one, second if second.calls == one.calls else second.ends(), wording, tolerance=tolerance
        )
        raise ModelDiffers(wording.is_random(again.split(" gives ")[0]) if again is not None else finding)
    return one.num_outputs, largest


def told(error: Exception) -> str:
    """What an error says, with its kind unless it speaks for itself, and the user's line."""
    is_sentence = isinstance(error, RanksDisagree) or (is_user_error(error) and bool(str(error)))
    if not is_sentence:
        return describe_error(error)
    place = place_of_error(error)
    return str(error) if place in str(error) else f"{error}{place}"


def _difference(a: Tensor, b: Tensor, scale: float) -> float:
    """Largest difference of entries, relative to the largest entry or to ``scale``, whichever is larger."""
    if a.shape != b.shape:
        return float("inf")
    a, b = _numbers(a), _numbers(b)
    differs = (a != b) & ~(a.isnan() & b.isnan())
    if not differs.any():
        return 0.0
    worst = float((a - b)[differs].abs().max()) / max(_size(a), _size(b), scale, 1e-300)
    return worst if math.isfinite(worst) else float("inf")


def _size(x: Tensor) -> float:
    return float(_numbers(x).abs().nan_to_num(0, 0, 0).max()) if x.numel() else 0.0


def _numbers(x: Tensor) -> Tensor:
    """In float64; flags as 0 and 1, complex numbers as pairs."""
    return (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).double()
