"""What a model and its optimizer hold for each node or edge of this rank, and how it follows when nodes move.

Parameters that are split say so (`nugnn.own_rows`). Of other tensors that modules keep, such as the aggregate that
DGL's `SGConv` caches, provenance tells whose rows they are (`nugnn.kernels.rows`); what it leaves open is not guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from nugnn.comm.groups import gather_texts
from nugnn.kernels.rows import Rows, identity_of
from nugnn.own_rows import sharded_parameters
from nugnn.shard_graph import ShardGraph

if TYPE_CHECKING:
    from nugnn.node_move import NodeMove

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_DEPTH = 2
"""Lists in lists that are looked into."""
_UNKNOWN = (
    "{name} holds {length} rows, as many as this rank has {kind}, and nothing says whether they are theirs. Say it "
    "with nugnn.as_node_rows or nugnn.as_edge_rows, or move them in on_move"
)


def move_parameters(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, rows: Callable[[Tensor], Tensor]
) -> None:
    """`nugnn.node_move.NodeMove.parameters`; ``rows`` moves a tensor."""
    for parameter in sharded_parameters(model):
        state = {} if optimizer is None else optimizer.state.get(parameter, {})
        moved = rows(parameter.data)
        parameter.grad = None
        # of another type in between: autograd then forgets the shape that it has noted, also where somebody holds a
        # loss of the step before
        other = torch.float32 if moved.dtype is torch.float64 else torch.float64
        parameter.data = moved.new_empty(0, dtype=other)
        parameter.data = moved
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                state[key] = rows(value)


@dataclass(frozen=True, eq=False)
class _Place:
    """Where a tensor or graph is held: ``holder[key]``."""

    holder: dict[Any, Any] | list[Any]
    key: Any
    name: str
    kind: str

    def follow(self, move: NodeMove) -> None:
        if self.kind == "graph":
            self.holder[self.key] = move.graph
        elif self.kind == "node":
            self.holder[self.key] = move.rows(self.holder[self.key])
        else:
            self.holder[self.key] = move.edge_rows(self.holder[self.key])


class HeldRows:
    """What ``model`` and ``optimizer`` hold for rows of ``graph``, found before these move; a collective call.

    Args:
        model: Its modules' attributes are looked at, and lists and dictionaries that are such.
        optimizer: Of its parameters.
        graph: Before the move.
        trusts_user: Leave tensors of unknown rows to the user.
    """

    why_not: str | None
    """Why nodes cannot move, in words; None where they can. The same on every rank."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, graph: ShardGraph, *, trusts_user: bool
    ) -> None:
        self._model, self._optimizer, self._graph = model, optimizer, graph
        self._places: list[_Place] = []
        reason = self._of_optimizer() or self._of_modules(trusts_user=trusts_user) or ""
        names = " ".join(f"{place.name}:{place.kind}" for place in self._places)
        told = [text.split("\0") for text in gather_texts(graph.ranks, f"{reason}\0{names}")]
        self.why_not = next((each for each, _ in told if each), None)
        if self.why_not is None and len(kinds := sorted({each for _, each in told})) > 1:
            self.why_not = f"the model holds other rows on one rank than on another: {', '.join(kinds)}"
        del self._graph

    def follow(self, move: NodeMove) -> None:
        """Have all of it follow; a collective call."""
        move.parameters(self._model, self._optimizer)
        for place in self._places:
            place.follow(move)

    def _of_optimizer(self) -> str | None:
        num_rows = self._graph.num_nodes()
        for parameter in sharded_parameters(self._model):
            state = {} if self._optimizer is None else self._optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim() and len(value) != num_rows:
                    return (
                        f"the optimizer keeps {key!r} of shape {tuple(value.shape)} for a node embedding, which is not "
                        "one row for each node"
                    )
        return None

    def _of_modules(self, *, trusts_user: bool) -> str | None:
        for path, module in self._model.named_modules():
            for name, value in vars(module).items():
                if name in _OF_EVERY_MODULE:
                    continue
                for holder, key, each in _values(vars(module), name, value):
                    problem = self._look_at(holder, key, each, f"{path}.{name}".lstrip("."), trusts_user=trusts_user)
                    if problem is not None:
                        return problem
        return None

    def _look_at(self, holder: Any, key: Any, value: Any, name: str, *, trusts_user: bool) -> str | None:
        """Note what ``value`` is; or say what speaks against a move."""
        graph = self._graph
        if isinstance(value, ShardGraph):
            if value is not graph:
                return f"{name} keeps a graph that was derived from this rank's part; make it anew in each forward"
            self._places.append(_Place(holder, key, name, "graph"))
            return None
        rows, is_row_axis = identity_of(value), value.ndim > 0
        if rows is not None and rows.kind in ("node", "edge"):
            whole: Rows = graph.index.node_rows if rows.kind == "node" else graph.index.edge_rows
            if rows.axis == 0 and rows.same_as(whole):
                self._places.append(_Place(holder, key, name, rows.kind))
                return None
            return f"{name} holds rows of some {rows.kind}s only, or in another shape; make it anew in each forward"
        if rows is not None or not is_row_axis or trusts_user:
            return None
        for kind, length in (("nodes", graph.num_nodes()), ("edges", graph.num_edges())):
            if len(value) == length:
                return _UNKNOWN.format(name=name, length=length, kind=kind)
        return None


def _values(holder: Any, key: Any, value: Any, depth: int = 0) -> Iterator[tuple[Any, Any, Any]]:
    """Tensors and graphs in an attribute, or in a list or dictionary that is one, with where they are held."""
    if isinstance(value, (Tensor, ShardGraph, np.ndarray)) and not isinstance(value, nn.Parameter):
        yield holder, key, value
    elif isinstance(value, (dict, list)) and depth < _DEPTH:
        for inner, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _values(value, inner, each, depth + 1)
