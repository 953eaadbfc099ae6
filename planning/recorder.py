"""Records the operators of a training step while it runs: those of torch below autograd, our own at their doors.

Torch's dispatch mode sees what autograd and the optimizer call, too. Our operators, and DGL's kernels, are one record
each, whatever they do inside: see `nugnn.planning.doors`. Nothing that is computed changes: results are passed on as
they are. Memory is followed by `nugnn.planning.memory_follower`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from nugnn.kernels.interceptor import Interceptor
from nugnn.kernels.operator_call import KINDS, OperatorCall
from nugnn.planning.doors import StepWatcher, torch_name
from nugnn.planning.memory_follower import Memory, MemoryFollower
from nugnn.planning.operator_kinds import SEEN_THROUGH, Described, describe, describe_on_graph, describe_own
from nugnn.planning.optimizer_launches import LaunchCount
from nugnn.planning.trace_records import Category, OperatorRecord, Phase, Storage, TensorRecord


class _Operands(NamedTuple):
    """What an operator reads, and the records that wrote it last."""

    inputs: tuple[TensorRecord, ...]
    written_by: tuple[int, ...]


class Recorder(StepWatcher):
    """Notes every operator of this thread while `recording` is open, once.

    Args:
        model: Its module paths name the operators that the interceptor has no name for.
        optimizer: Its step is one operator.
        marks_saved: Note which memory autograd keeps for backward. Some of it then lives longer than it would: torch
            hands hooks the tensors themselves, in whose place it keeps others.

    Attributes:
        operators: So far.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, marks_saved: bool) -> None:
        super().__init__(optimizer)
        self._marks_saved = marks_saved
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._parameters = {id(p): name for name, p in model.named_parameters()}
        self.operators: list[OperatorRecord] = []
        self._memory = MemoryFollower()
        self._writer: dict[int, int] = {}
        self._node_of: list[int] = []
        self._path_stack: list[str] = []
        self._calls: list[OperatorCall] = []
        self._name_of_node: dict[int, str] = {}
        self._record_of_node: dict[int, OperatorRecord] = {}
        self._step_of_optimizer: tuple[_Operands, list[Memory], LaunchCount] | None = None
        self._has_left_model = self._has_run_backward = False

    # -- opening -------------------------------------------------------------------------------------------------------

    @contextmanager
    def recording(self, interceptor: Interceptor, known: Mapping[Category, Mapping[str, Tensor]]) -> Iterator[None]:
        """Around one training step.

        Args:
            interceptor: Names the step's operators.
            known: Tensors that are there before the step, by name. Not held, so that what the step lets go of, as the
                last step's gradients, is noted to have gone; the caller should not hold them either.
        """
        with self._memory.following(), ExitStack() as stack:
            for category, tensors in known.items():
                for name in tensors:
                    self._memory.show([tensors[name]], category, name)
            del known, tensors
            for hook in self._hooks():
                stack.callback(hook.remove)
            stack.enter_context(self.at_the_doors(interceptor, _Naming(self)))
            if self._marks_saved:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._save, _itself))
            stack.enter_context(self)
            yield

    def storages(self) -> tuple[Storage, ...]:
        """All memory that the step touched; to be asked right after it."""
        return self._memory.storages({"gradient": self._gradients(), "optimizer": _state_of(self._optimizer)})

    def _save(self, x: Tensor) -> Tensor:
        self._memory.mark_saved(x)
        return x

    def _hooks(self) -> list[Any]:
        def enter(module: nn.Module, args: Any) -> None:
            self._path_stack.append(self._paths.get(id(module), type(module).__name__))

        def leave(module: nn.Module, args: Any, out: Any) -> None:
            self._path_stack.pop()
            self._has_left_model = not self._path_stack

        return [
            nn.modules.module.register_module_forward_pre_hook(enter),
            nn.modules.module.register_module_forward_hook(leave, always_call=True),
        ]

    # -- operators of torch --------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._memory.is_inside:
            self._memory.show(_tensors((args, kwargs)))  # what was there before, seen for the first time
            out = func(*args, **kwargs)
            self._memory.show(_tensors(out), "activation")
            if self._step_of_optimizer is not None:
                self._step_of_optimizer[2].note(func, args, kwargs, out)
            return out
        name = torch_name(func)
        operands = self._read((args, kwargs))
        out = func(*args, **kwargs)
        described = describe(func, args, kwargs, out)
        changed = [
            x
            for argument, x in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if name == "aten.add" and self._is_sum_of_gradients(operands.inputs):
            described = Described("elementwise", {}, {"op": "sum of gradients"})
            self._memory.expect_addition(operands.inputs[0].storage)
        record = self._note(name, described, operands, (out, changed))
        if not _in_backward():
            self._name_of_node.setdefault(_last_node(), record.name)
        return out

    def _is_sum_of_gradients(self, inputs: Sequence[TensorRecord]) -> bool:
        """Whether it is autograd that adds: to what another operator's backward has made."""
        if not _in_backward() or self._path_stack or len(inputs) != 2 or inputs[0].shape != inputs[1].shape:
            return False
        writer = self._writer.get(inputs[0].storage)
        return writer is not None and self._node_of[writer] not in (-1, _node_in_backward())

    # -- operators of our own ------------------------------------------------------------------------------------------

    def passed(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        cls, _, is_backward = name.partition(".")
        is_inside = self._memory.is_inside
        if is_inside or cls in SEEN_THROUGH:
            if not (is_inside or is_backward):  # what is recorded inside has this node in backward
                self._name_of_node.setdefault(_last_node(), self._name(cls))
            return function(*args)
        operands = self._read(args)
        node = _last_node()
        with self._memory.inside() as taken:
            out = function(*args)
        described = self._own_backward() if is_backward else describe_own(cls, args)
        record = self._note(name, described, operands, out, taken)
        if not is_backward and not _in_backward():
            self._name_of_node.setdefault(node, record.name)
            self._record_of_node.setdefault(node, record)
        return out

    def _own_backward(self) -> Described:
        node = torch._C._current_autograd_node()
        forward = None if node is None else self._record_of_node.get(node._sequence_nr())
        if forward is None:
            return Described("other", {}, {"direction": "backward"})
        sizes: dict[str, Any] = dict(forward.sizes)
        attrs = forward.attrs | {"direction": "backward"}
        if forward.kind == "spmm":
            sizes["rows"], sizes["sources"] = sizes["sources"], sizes["rows"]
        if forward.kind == "exchange":
            sizes["received"], sizes["sent"] = sizes["sent"], sizes["received"]
        return Described(forward.kind, sizes, attrs)

    def on_graph(self, call: OperatorCall, proceed: Callable[[OperatorCall], Any]) -> Any:
        if self._memory.is_inside:
            return proceed(call)
        operands = self._read((call.inputs, call.attrs))
        first = _last_node() + 1
        with self._memory.inside() as taken:
            out = proceed(call)
        described = describe_on_graph(call.kind, call.structure, call.inputs, call.attrs, out)
        record = self._note(call.kind, described, operands, out, taken)
        for node in range(first, _last_node() + 1):
            self._name_of_node.setdefault(node, record.name)
            self._record_of_node.setdefault(node, record)
        return out

    def kernel_of_dgl(self, kind: str, function: Callable[..., Any], graph: Any, op: str, *args: Any) -> Any:
        if self._memory.is_inside:
            return function(graph, op, *args)
        operands = self._read(args)
        with self._memory.inside() as taken:
            out = function(graph, op, *args)
        first: Tensor = _tensors(out)[0]
        given = next(x for x in args if isinstance(x, Tensor))
        sizes = {"rows": first.shape[0], "sources": given.shape[0], "edges": graph.num_edges(0)}
        sizes["width"] = math.prod((given if op == "dot" else first).shape[1:])
        words = [x for x in args if isinstance(x, str)]
        names = ("reduce",) if kind == "spmm" else ("lhs_target", "rhs_target")
        attrs = {"op": op, **dict(zip(names, words, strict=False)), "direction": "backward"}
        self._note(f"dgl.{kind}", Described(kind, sizes, attrs), operands, out, taken)  # type: ignore[arg-type]
        return out

    def begin_optimizer(self) -> None:
        operands = self._read([self._stepped(), self._gradients(), _state_of(self._optimizer)])
        self._step_of_optimizer = operands, self._memory.begin_inside(), LaunchCount(self._optimizer)

    def end_optimizer(self) -> None:
        self._memory.end_inside()
        assert self._step_of_optimizer is not None
        (operands, taken, launched), self._step_of_optimizer = self._step_of_optimizer, None
        sizes = {"tensors": len(operands.inputs)}
        described = Described("optimizer", sizes, {"optimizer": type(self._optimizer).__name__})
        changed = self._stepped(), _state_of(self._optimizer)
        self._note("optimizer", described, operands, changed, taken, launches=launched.total)

    def _stepped(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._stepped() if p.grad is not None]

    # -- notes ---------------------------------------------------------------------------------------------------------

    def _read(self, operands: Any) -> _Operands:
        """What comes next reads, to be asked before it writes; ``operands`` is any tree with tensors in it."""
        inputs = self._memory.show(_tensors(operands))
        written_by = {self._writer[x.storage] for x in inputs if x.storage in self._writer}
        return _Operands(tuple(inputs), tuple(sorted(written_by)))

    def _note(
        self,
        op: str,
        described: Described,
        operands: _Operands,
        results: Any,
        taken: Sequence[Memory] = (),
        *,
        launches: int = 1,
    ) -> OperatorRecord:
        """Makes the record of what has run; ``results`` is any tree with tensors, those changed in place among them."""
        number = len(self.operators)
        workspace = self._memory.workspace(taken)
        outputs = self._memory.show(_tensors(results), "activation")
        for output in outputs:
            if described.kind != "metadata" or self._memory.made_by(output.storage) == number:
                self._writer[output.storage] = number
        record = OperatorRecord(
            name=self._name(op), op=op, kind=described.kind, phase=self._phase(), inputs=operands.inputs,
            outputs=tuple(dict.fromkeys(outputs)), sizes=dict(described.sizes), attrs=described.attrs,
            depends_on=operands.written_by, workspace=workspace, launches=launches,
            within=self._calls[-1].kind if self._calls else "",
        )  # fmt: skip
        self.operators.append(record)
        self._node_of.append(_node_in_backward())
        self._memory.operator = len(self.operators)
        return record

    def _phase(self) -> Phase:
        if _in_backward():
            self._has_run_backward, self._has_left_model = True, False
            return "backward"
        if self._path_stack or not (self._has_left_model or self._has_run_backward):
            return "forward"
        return "loss" if self._has_left_model else "optimizer"

    def _name(self, op: str) -> str:
        if self._calls:
            return self._calls[-1].name
        if _in_backward() and not self._path_stack:
            return self._name_in_backward(op)
        path = self._path_stack[-1] if self._path_stack else ""
        return f"{path}/{op}" if path else op

    def _name_in_backward(self, op: str) -> str:
        node = torch._C._current_autograd_node()
        if node is None:
            return op
        if node.name().endswith("AccumulateGrad"):
            return f"{self._parameters.get(id(getattr(node, 'variable', None)), 'leaf')}/gradient"
        return self._name_of_node.get(node._sequence_nr(), node.name())


@dataclass(frozen=True, eq=False)
class _Naming:
    """The chain's outermost link: what runs inside a call has its name."""

    recorder: Recorder
    kinds: frozenset[str] | None = KINDS

    def __call__(self, call: OperatorCall, proceed: Callable[[OperatorCall], Any], interceptor: Interceptor) -> Any:
        calls = self.recorder._calls
        calls.append(call)
        try:
            return proceed(call)
        finally:
            calls.pop()


def _itself(x: Tensor) -> Tensor:
    return x


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]


def _last_node() -> int:
    """Number of the node that autograd made last on this thread."""
    number: int = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
    return number


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _node_in_backward() -> int:
    """Number of the node whose backward runs; -1 for none."""
    node = torch._C._current_autograd_node() if _in_backward() else None
    return -1 if node is None else node._sequence_nr()
