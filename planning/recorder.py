"""Records the operators of a training step while it runs: those of torch below autograd, our own at their doors.

Torch's dispatch mode sees what autograd and the optimizer call, too. Our operators, and DGL's kernels, are one record
each, whatever they do inside: the interceptor's innermost link and `nugnn.kernels.operator` say when one runs. Nothing
that is computed changes: results are passed on as they are, and tensors are held by weak references alone.
"""

from __future__ import annotations

import functools
import gc
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nugnn.kernels.interceptor import KINDS, Interceptor, OperatorCall
from nugnn.kernels.operator import watched_by
from nugnn.planning.operator_kinds import SEEN_THROUGH, Described, describe, describe_on_graph, describe_own
from nugnn.planning.trace_records import Category, OperatorRecord, Phase, Storage, TensorRecord, WorkspaceRecord

_ON_GRAPHS = frozenset(("spmm", "sddmm", "edge_softmax"))


@dataclass(eq=False)
class _Memory:
    """A storage while the step runs.

    Args:
        number: Its place in the list; -1 inside an operator that has not ended.
        values: Of ``dtype``.
        num_bytes: Of all.
        dtype: Torch's name.
        category: As far as it is known before the step has ended.
        made_by: Number of a record; likewise ``freed_by``.
        name: Of what was there before.
    """

    number: int
    values: int
    num_bytes: int
    dtype: str
    category: Category
    made_by: int
    name: str = ""
    freed_by: int | None = None
    is_saved: bool = False


@dataclass(eq=False)
class _Taken:
    """Memory that an operator has taken inside, and `WorkspaceRecord.freed`."""

    memory: _Memory
    freed: int | None = None


@dataclass(eq=False)
class _Inside:
    """All that an operator has taken since it began, and by memory what of it is alive."""

    taken: list[_Taken] = field(default_factory=list)
    alive: dict[int, _Taken] = field(default_factory=dict)

    def add(self, memory: _Memory) -> None:
        taken = self.alive[id(memory)] = _Taken(memory)
        if memory.num_bytes:
            self.taken.append(taken)

    def dies(self, memory: _Memory) -> None:
        if (taken := self.alive.pop(id(memory), None)) is not None:
            taken.freed = len(self.taken)


class Recorder(TorchDispatchMode):
    """Notes every operator of this thread while `recording` is open, once.

    Args:
        model: Its module paths name the operators that the interceptor has no name for.
        optimizer: Its step is one operator.
        marks_saved: Note which memory autograd keeps for backward. Some of it then lives longer than it would: torch
            hands hooks the tensors themselves, in whose place it keeps others.

    Attributes:
        operators: So far.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, marks_saved: bool = False) -> None:
        super().__init__()
        self._optimizer, self._marks_saved = optimizer, marks_saved
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._parameters = {id(p): name for name, p in model.named_parameters()}
        self.operators: list[OperatorRecord] = []
        self._memories: list[_Memory] = []
        self._known: dict[int, _Memory] = {}
        self._finalizers: list[Any] = []
        self._writer: dict[int, int] = {}
        self._node_of: list[int] = []
        self._added_to: tuple[_Memory, int] | None = None
        self._path_stack: list[str] = []
        self._names: list[str] = []
        self._name_of_node: dict[int, str] = {}
        self._record_of_node: dict[int, OperatorRecord] = {}
        self._inside: _Inside | None = None
        self._has_left_model = self._has_run_backward = False

    # -- opening -------------------------------------------------------------------------------------------------------

    @contextmanager
    def recording(self, interceptor: Interceptor, known: Mapping[Category, Mapping[str, Tensor]]) -> Iterator[None]:
        """Around one training step.

        Args:
            interceptor: Names the step's operators.
            known: Tensors that are there before the step, by name.
        """
        for category, tensors in known.items():
            for name, x in tensors.items():
                for part in _parts(x):
                    self._memory_of(part, category, name)
        gc.collect(1)  # what the steps before have left
        was_collecting = gc.isenabled()
        gc.disable()  # memory goes when its last reference goes, and not at some later operator
        try:
            with ExitStack() as stack:
                for hook in self._hooks():
                    stack.callback(hook.remove)
                stack.enter_context(interceptor.watched(_Naming(self), _OnGraphs(self)))
                stack.enter_context(watched_by(self))
                stack.enter_context(_dgl_kernels(self))
                if self._marks_saved:
                    stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._save, _itself))
                stack.enter_context(self)
                yield
        finally:
            for finalizer in self._finalizers:
                finalizer.detach()
            if was_collecting:
                gc.enable()

    def storages(self) -> tuple[Storage, ...]:
        """All memory that the step touched; to be asked right after it."""
        groups = [p for group in self._optimizer.param_groups for p in group["params"]]
        of_gradients = {p.grad.untyped_storage()._cdata for p in groups if p.grad is not None}
        of_state = {x.untyped_storage()._cdata for x in _state_of(self._optimizer)}
        for key, memory in self._known.items():
            if memory.category == "activation" and key in of_gradients:
                memory.category = "gradient"
            elif memory.category == "activation" and key in of_state:
                memory.category = "optimizer"
        return tuple(
            Storage(
                values=m.values, dtype=m.dtype, category=m.category, made_by=m.made_by, freed_by=m.freed_by,
                is_saved=m.is_saved, name=m.name,
            )
            for m in self._memories
        )  # fmt: skip

    def _hooks(self) -> list[Any]:
        def enter(module: nn.Module, args: Any) -> None:
            self._path_stack.append(self._paths.get(id(module), type(module).__name__))

        def leave(module: nn.Module, args: Any, out: Any) -> None:
            self._path_stack.pop()
            self._has_left_model = not self._path_stack

        return [
            nn.modules.module.register_module_forward_pre_hook(enter),
            nn.modules.module.register_module_forward_hook(leave, always_call=True),
            register_optimizer_step_pre_hook(self._begin_optimizer),
            register_optimizer_step_post_hook(self._end_optimizer),
        ]

    # -- memory --------------------------------------------------------------------------------------------------------

    def _memory_of(self, x: Tensor, category: Category = "input", name: str = "") -> _Memory:
        storage = x.untyped_storage()
        key = storage._cdata
        memory = self._known.get(key)
        if memory is not None:
            if memory.number < 0 and self._inside is None:
                self._number(memory)
            return memory
        made_by = -1 if category not in ("activation",) else len(self.operators)
        num_bytes = storage.nbytes()
        dtype = _dtype(x)
        memory = _Memory(-1, num_bytes // x.element_size(), num_bytes, dtype, category, made_by, name)
        self._known[key] = memory
        self._finalizers.append(weakref.finalize(storage, self._dies, key))
        if self._inside is None:
            self._number(memory)
        elif category == "activation":  # else it is how an operator of ours has cut up the structure, kept inside
            self._inside.add(memory)
        return memory

    def _number(self, memory: _Memory) -> None:
        memory.number = len(self._memories)
        self._memories.append(memory)

    def _dies(self, key: int) -> None:
        memory = self._known.pop(key)
        if memory.number < 0:
            if self._inside is not None:
                self._inside.dies(memory)
            return
        memory.freed_by = len(self.operators) - (self._inside is None)  # during the operator that runs now, or before
        if self._added_to == (memory, memory.freed_by):
            memory.freed_by -= 1  # autograd adds to it in place where no mode is on

    def _save(self, x: Tensor) -> Tensor:
        for part in _parts(x):
            self._memory_of(part).is_saved = True
        return x

    # -- operators of torch --------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside is not None:
            for x in _tensors((args, kwargs)):  # what was there before, seen for the first time
                self._memory_of(x)
            out = func(*args, **kwargs)
            for x in _tensors(out):
                self._memory_of(x, "activation")
            return out
        name = f"aten.{func._schema.name.rpartition('::')[2]}"
        given = _tensors((args, kwargs))
        inputs, readers = self._read(given)
        out = func(*args, **kwargs)
        described = describe(func, args, kwargs, out)
        changed = [
            x
            for argument, x in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if name == "aten.add" and self._is_sum_of_gradients(given):
            described = Described("elementwise", {}, {"op": "sum of gradients"})
            self._added_to = self._memory_of(given[0]), len(self.operators)
        record = self._note(name, described, inputs, readers, [*_tensors(out), *_tensors(changed)])
        if not _in_backward():
            self._name_of_node.setdefault(torch.autograd._get_sequence_nr() - 1, record.name)  # type: ignore[attr-defined]
        return out

    def _is_sum_of_gradients(self, given: Sequence[Tensor]) -> bool:
        """Whether it is autograd that adds: to what another operator's backward has made."""
        if not _in_backward() or self._path_stack or len(given) != 2 or given[0].shape != given[1].shape:
            return False
        writer = self._writer.get(self._memory_of(given[0]).number)
        return writer is not None and self._node_of[writer] not in (-1, _node_in_backward())

    # -- operators of our own ------------------------------------------------------------------------------------------

    def passed(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """See `nugnn.kernels.operator.Watcher`."""
        cls, _, is_backward = name.partition(".")
        if self._inside is not None or cls in SEEN_THROUGH:
            if self._inside is None and not is_backward:  # what is recorded inside has this node in backward
                self._name_of_node.setdefault(_last_node(), self._name(cls))
            return function(*args)
        inputs, readers = self._read(_tensors(args))
        node = _last_node()
        with self._one_operator() as inside:
            out = function(*args)
        described = self._own_backward() if is_backward else describe_own(cls, args)
        record = self._note(name, described, inputs, readers, _tensors(out), inside)
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
        """Runs an operator on a graph."""
        if self._inside is not None:
            return proceed(call)
        inputs, readers = self._read(_tensors((call.inputs, call.attrs)))
        first = _last_node() + 1
        with self._one_operator() as inside:
            out = proceed(call)
        described = describe_on_graph(call.kind, call.structure, call.inputs, call.attrs, out)
        record = self._note(call.kind, described, inputs, readers, _tensors(out), inside)
        for node in range(first, _last_node() + 1):
            self._name_of_node.setdefault(node, record.name)
            self._record_of_node.setdefault(node, record)
        return out

    def kernel_of_dgl(self, kind: str, function: Callable[..., Any], graph: Any, op: str, *args: Any) -> Any:
        """Runs one of DGL's kernels, which its own autograd functions call in backward."""
        if self._inside is not None:
            return function(graph, op, *args)
        inputs, readers = self._read(_tensors(args))
        with self._one_operator() as inside:
            out = function(graph, op, *args)
        first: Tensor = _tensors(out)[0]
        operands = [x for x in args if isinstance(x, Tensor)]
        sizes = {"rows": first.shape[0], "sources": operands[0].shape[0], "edges": graph.num_edges(0)}
        sizes["width"] = math.prod((operands[0] if op == "dot" else first).shape[1:])
        words = [x for x in args if isinstance(x, str)]
        names = ("reduce",) if kind == "spmm" else ("lhs_target", "rhs_target")
        attrs = {"op": op, **dict(zip(names, words, strict=False)), "direction": "backward"}
        self._note(f"dgl.{kind}", Described(kind, sizes, attrs), inputs, readers, _tensors(out), inside)  # type: ignore[arg-type]
        return out

    @contextmanager
    def _one_operator(self) -> Iterator[_Inside]:
        self._inside = _Inside()
        try:
            yield self._inside
        finally:
            self._inside = None

    def _begin_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer is self._optimizer:
            self._read_by_optimizer = self._read(self._operands_of_optimizer())
            self._inside = _Inside()

    def _end_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer is not self._optimizer:
            return
        inside, self._inside = self._inside, None
        inputs, readers = self._read_by_optimizer
        described = Described("optimizer", {"tensors": len(inputs)}, {"optimizer": type(optimizer).__name__})
        outputs = [*self._stepped(), *_state_of(optimizer)]
        self._note("optimizer", described, inputs, readers, outputs, inside)

    def _stepped(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]

    def _operands_of_optimizer(self) -> list[Tensor]:
        stepped = self._stepped()
        return [*stepped, *(p.grad for p in stepped if p.grad is not None), *_state_of(self._optimizer)]

    # -- notes ---------------------------------------------------------------------------------------------------------

    def _read(self, tensors: Iterable[Tensor]) -> tuple[tuple[TensorRecord, ...], tuple[int, ...]]:
        """Inputs of the operator that comes next, and the records that wrote them; before it writes."""
        parts = [part for x in tensors for part in _parts(x)]
        records = tuple(self._tensor(x, self._memory_of(x)) for x in parts)
        writers = {self._writer[r.storage] for r in records if r.storage in self._writer}
        return records, tuple(sorted(writers))

    @staticmethod
    def _tensor(x: Tensor, memory: _Memory) -> TensorRecord:
        return TensorRecord(storage=memory.number, shape=tuple(x.shape), dtype=_dtype(x))

    def _note(
        self,
        op: str,
        described: Described,
        inputs: tuple[TensorRecord, ...],
        depends_on: tuple[int, ...],
        results: Sequence[Tensor],
        inside: _Inside | None = None,
    ) -> OperatorRecord:
        number = len(self.operators)
        workspace: list[WorkspaceRecord] = []
        if inside is not None:
            for each in inside.alive.values():
                self._number(each.memory)
            for each in inside.taken:
                m = each.memory
                shape = (m.values,)
                workspace.append(WorkspaceRecord(storage=m.number, shape=shape, dtype=m.dtype, freed=each.freed))
        outputs = []
        for x in (part for result in results for part in _parts(result)):
            memory = self._memory_of(x, "activation")
            output = self._tensor(x, memory)
            if output not in outputs:
                outputs.append(output)
            if described.kind != "metadata" or memory.made_by == number:
                self._writer[memory.number] = number
        record = OperatorRecord(
            name=self._name(op), op=op, kind=described.kind, phase=self._phase(), inputs=inputs, outputs=tuple(outputs),
            sizes=dict(described.sizes), attrs=described.attrs, depends_on=depends_on, workspace=tuple(workspace),
        )  # fmt: skip
        self.operators.append(record)
        self._node_of.append(_node_in_backward())
        return record

    def _phase(self) -> Phase:
        if _in_backward():
            self._has_run_backward, self._has_left_model = True, False
            return "backward"
        if self._path_stack or not (self._has_left_model or self._has_run_backward):
            return "forward"
        return "loss" if self._has_left_model else "optimizer"

    def _name(self, op: str) -> str:
        if self._names:
            return self._names[-1]
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
        names = self.recorder._names
        names.append(call.name)
        try:
            return proceed(call)
        finally:
            names.pop()


@dataclass(frozen=True, eq=False)
class _OnGraphs:
    """The chain's innermost link: an operator on a graph as it is computed, with its halo rows."""

    recorder: Recorder
    kinds: frozenset[str] | None = _ON_GRAPHS

    def __call__(self, call: OperatorCall, proceed: Callable[[OperatorCall], Any], interceptor: Interceptor) -> Any:
        return self.recorder.on_graph(call, proceed)


@contextmanager
def _dgl_kernels(recorder: Recorder) -> Iterator[None]:
    """While open, the recorder runs DGL's kernels, of which torch's dispatcher knows nothing."""
    from dgl.backend.pytorch import sparse

    before = {"spmm": sparse._gspmm, "sddmm": sparse._gsddmm}
    for kind, function in before.items():
        setattr(sparse, f"_g{kind}", functools.partial(recorder.kernel_of_dgl, kind, function))
    try:
        yield
    finally:
        for kind, function in before.items():
            setattr(sparse, f"_g{kind}", function)


def _itself(x: Tensor) -> Tensor:
    return x


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _parts(x: Tensor) -> tuple[Tensor, ...]:
    """What ``x`` lies in: of a sparse tensor its three."""
    if x.layout is torch.strided:
        return (x,)
    if x.layout is torch.sparse_csr:
        return x.crow_indices(), x.col_indices(), x.values()
    return ()


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


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
