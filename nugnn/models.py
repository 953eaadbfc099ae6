"""The built-in models: plain DGL layers between the usual norm, activation, dropout and residual."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import cloudpickle
import torch
from dgl import nn as dgl_nn
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from nugnn._counted import counted
from nugnn.embedding import NodeEmbedding
from nugnn.kernels.handlers import epilogue
from nugnn.kernels.interceptor import current_interceptor
from nugnn.options import ConfigError, closest
from nugnn.user_code import describe_error

ModelName = Literal["gcn", "sage", "gat", "gatv2", "gin"]
MODEL_NAMES: tuple[str, ...] = ("gcn", "sage", "gat", "gatv2", "gin")
SAGE_AGGREGATORS = ("mean", "gcn", "pool", "lstm")
GIN_AGGREGATORS = ("sum", "mean", "max")
_STAMP = "__nugnn_stamp__"
"""In a module of the user's: which file it was made from, and when that was written."""
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "elu": F.elu,
    "gelu": F.gelu,
    "leaky_relu": F.leaky_relu,
    "tanh": torch.tanh,
    "none": lambda x: x,
}
ACTIVATIONS: tuple[str, ...] = tuple(_ACTIVATIONS)


class GNN(nn.Module):
    """Layers of one kind; the same code runs on a plain `dgl.DGLGraph` and on a shard.

    Args:
        kind: ``gcn``, ``sage``, ``gat``, ``gatv2`` or ``gin``.
        in_features: Width of the input.
        num_classes: Width of the output.
        layers: Number of graph layers, at least 1.
        hidden: Width of a hidden layer (of one head for ``gat`` and ``gatv2``).
        heads: Attention heads of hidden layers; their outputs are concatenated.
        out_heads: Attention heads of the last layer; their outputs are averaged.
        aggregator: ``sage``: mean, gcn, pool, lstm. ``gin``: sum, mean, max. None for the usual one.
        norm: ``none``, ``layer`` or ``batch``, after each hidden layer.
        residual: Add a hidden layer's input to its output (through a linear map where widths differ).
        activation: After each hidden layer.
        dropout: Before each layer but the first.
        input_dropout: Before the first layer.
        attention_dropout: On attention scores.

    Raises:
        ValueError: An option does not fit the kind.
    """

    def __init__(
        self,
        kind: str,
        in_features: int,
        num_classes: int,
        *,
        layers: int = 2,
        hidden: int = 64,
        heads: int = 1,
        out_heads: int = 1,
        aggregator: str | None = None,
        norm: str = "none",
        residual: bool = False,
        activation: str = "relu",
        dropout: float = 0.5,
        input_dropout: float = 0.0,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if kind not in MODEL_NAMES:
            raise ValueError(f"model {kind!r} is not known; choose one of {', '.join(MODEL_NAMES)} or FILE.py:Class")
        if layers < 1:
            raise ValueError(f"layers has to be at least 1, got {layers}")
        attends = kind in ("gat", "gatv2")
        if heads != 1 and not attends:
            raise ValueError(f"heads={heads} has no meaning for {kind}; use gat or gatv2")
        if attention_dropout and not attends:
            raise ValueError(f"attention_dropout={attention_dropout} has no meaning for {kind}; use gat or gatv2")
        self.kind, self.hidden = kind, hidden if layers > 1 else None
        self.activation = _ACTIVATIONS[activation]
        self.input_dropout, self.dropout = nn.Dropout(input_dropout), ActivationDropout(self.activation, dropout)
        self.layers, self.norms, self.residuals = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        width = in_features
        for number in range(layers):
            is_last = number == layers - 1
            out = num_classes if is_last else hidden
            num_heads = (out_heads if is_last else heads) if attends else 1
            self.layers.append(_layer(kind, width, out, num_heads, aggregator, attention_dropout))
            if is_last:
                break
            out_width = out * num_heads
            self.norms.append(_norm(norm, out_width))
            if residual:
                self.residuals.append(nn.Identity() if width == out_width else nn.Linear(width, out_width, bias=False))
            else:
                self.residuals.append(_Nothing())
            width = out_width

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        """``(N, num_classes)`` logits from features ``(N, in_features)``."""
        h = self.input_dropout(x)
        for step in zip(self.layers[:-1], self.norms, self.residuals, strict=True):
            h = self.dropout(_before_activation(*step, graph, h))
        out = self.layers[-1](graph, h)
        return out.mean(1) if out.dim() == 3 else out  # type: ignore[no-any-return]


def _before_activation(layer: nn.Module, norm: nn.Module, residual: nn.Module, graph: Any, h: Tensor) -> Tensor:
    """Held by nobody but who asks: the rows are gone when their activation is there."""
    out = layer(graph, h)
    out = norm(out.flatten(1) if out.dim() == 3 else out)
    added = residual(h)
    return out if added is None else out + added  # type: ignore[no-any-return]


class ActivationDropout(nn.Dropout):
    """An activation, then dropout; relu and dropout in one pass where row identity is known.

    Args:
        activation: Element-wise.
        p: Probability of dropping.
    """

    def __init__(self, activation: Callable[[Tensor], Tensor], p: float) -> None:
        super().__init__(p)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        fuses = self.activation is F.relu and self.training and self.p > 0 and x.dim() == 2
        if current_interceptor() is None or not fuses:
            return super().forward(self.activation(x))
        return epilogue(x, p=self.p, activation="relu")


class _Nothing(nn.Module):
    """No residual."""

    def forward(self, x: Tensor) -> None:
        return None


def _norm(norm: str, width: int) -> nn.Module:
    kinds: dict[str, Callable[[int], nn.Module]] = {
        "none": lambda _: nn.Identity(),
        "layer": nn.LayerNorm,
        "batch": nn.BatchNorm1d,
    }
    if norm not in kinds:
        raise ValueError(f"norm {norm!r} is not known; choose one of {', '.join(kinds)}")
    return kinds[norm](width)


def _layer(kind: str, width: int, out: int, heads: int, aggregator: str | None, attention_dropout: float) -> nn.Module:
    """One DGL layer. Nodes without in-edges get an empty aggregate (zeros) instead of an error."""
    if kind == "gcn":
        _only(kind, aggregator, ())
        return dgl_nn.GraphConv(width, out, allow_zero_in_degree=True)  # type: ignore[no-any-return]
    if kind == "sage":
        _only(kind, aggregator, SAGE_AGGREGATORS)
        return dgl_nn.SAGEConv(width, out, aggregator or "mean")  # type: ignore[no-any-return]
    if kind == "gin":
        _only(kind, aggregator, GIN_AGGREGATORS)
        mlp = nn.Sequential(nn.Linear(width, out), nn.ReLU(), nn.Linear(out, out))
        return dgl_nn.GINConv(mlp, aggregator or "sum", learn_eps=True)  # type: ignore[no-any-return]
    _only(kind, aggregator, ())
    layer = dgl_nn.GATConv if kind == "gat" else dgl_nn.GATv2Conv
    return layer(width, out, heads, attn_drop=attention_dropout, allow_zero_in_degree=True)  # type: ignore[no-any-return]


def _only(kind: str, aggregator: str | None, allowed: tuple[str, ...]) -> None:
    if aggregator is not None and aggregator not in allowed:
        choices = f"choose one of {', '.join(allowed)}" if allowed else "it has one aggregator only"
        raise ValueError(f"aggregator {aggregator!r} does not fit {kind}; {choices}")


class WithNodeEmbedding(nn.Module):
    """A model on learnable node rows instead of features.

    Args:
        num_nodes: Nodes of the whole graph.
        dim: Width of a row: the input width of ``model``.
        model: Called as ``model(graph, rows)``.
        seed: Of the initial rows.
    """

    def __init__(self, num_nodes: int, dim: int, model: nn.Module, *, seed: int = 0) -> None:
        super().__init__()
        self.embedding = NodeEmbedding(num_nodes, dim, seed=seed)
        self.model = model

    def forward(self, graph: Any) -> Tensor:
        return self.model(graph, self.embedding(graph))  # type: ignore[no-any-return]


def load_user_class(spec: str) -> type[nn.Module]:
    """The class named by ``FILE.py:Class``.

    The file may import its neighbours. Worker processes get the class by value: they do not know the module's name.

    Raises:
        ValueError: No such file or class, the file cannot be imported, or it is not a `torch.nn.Module`.
    """
    path_text, _, class_name = spec.rpartition(":")
    module = _imported(path_text)
    found = getattr(module, class_name, None)
    if found is None:
        names = _own_modules(module)
        raise ValueError(f"{path_text} has no class {class_name!r}{closest(class_name, names)}; {_defines(names)}")
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ValueError(f"{spec} is not a torch.nn.Module")
    return found


def said_of_file(path_text: str) -> str:
    """What to write in place of a file that was named without a class of it.

    Raises:
        ValueError: The file cannot be imported.
    """
    names = _own_modules(_imported(path_text))
    example = f"{Path(path_text).name}:{[*names, 'Class'][0]}"
    return f"{path_text} is a file: name the class in it, as in {example}; {_defines(names)}"


def _imported(path_text: str) -> ModuleType:
    """What the file defines; it runs once, unless it has changed since."""
    path = Path(path_text)
    if not path.is_file():
        raise ValueError(f"model file {path_text} does not exist")
    facts = path.stat()
    stamp = (str(path.resolve()), facts.st_mtime_ns, facts.st_size)
    module_spec = importlib.util.spec_from_file_location(f"nugnn_user_{path.stem}", path)
    assert module_spec is not None and module_spec.loader is not None
    before = sys.modules.get(module_spec.name)
    if before is not None and getattr(before, _STAMP, None) == stamp:
        return before
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path_text} cannot be imported: {describe_error(error)}") from error
    cloudpickle.register_pickle_by_value(module)
    setattr(module, _STAMP, stamp)
    return module


def _own_modules(module: ModuleType) -> list[str]:
    """Names of the `torch.nn.Module` classes that a file defines itself."""
    own = [v for v in vars(module).values() if isinstance(v, type) and v.__module__ == module.__name__]
    return [v.__name__ for v in own if issubclass(v, nn.Module)]


def _defines(names: list[str]) -> str:
    return f"it defines: {', '.join(names)}" if names else "it defines no torch.nn.Module"


def own_defaults(make: type[nn.Module]) -> dict[str, Any]:
    """The defaults of a user's class, by name of the parameter."""
    parameters = inspect.signature(make).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not each.empty}


def refuse_unused(make: type[nn.Module], changed: Mapping[str, tuple[str, Any]]) -> None:
    """Refuse an option that was set but that a user's class does not take: it would be ignored.

    Args:
        make: The class.
        changed: For each flag that was set, the name of the option and its value.

    Raises:
        ConfigError: The class does not take it.
    """
    parameters = inspect.signature(make).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for flag, (name, value) in changed.items():
        if name not in parameters:
            raise ConfigError(
                f"{flag} {value} would have no effect: {make.__name__}{inspect.signature(make)} has no "
                f"parameter {name!r}; leave the option out, or add the parameter"
            )


def make_user_model(make: Callable[..., nn.Module], in_features: int, num_classes: int, **options: Any) -> nn.Module:
    """Call a user's class with what it accepts.

    The first two positional parameters are the input width and the number of classes; of ``options`` it gets those it
    names.

    Raises:
        ValueError: It needs something else, or raises; says what and where.
    """
    parameters = inspect.signature(make).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {k: v for k, v in options.items() if k in parameters or takes_any}
    widths: tuple[int, ...] = (in_features, num_classes)
    if {"in_features", "num_classes"} <= set(parameters):
        widths, named = (), {"in_features": in_features, "num_classes": num_classes, **named}
    class_name = getattr(make, "__name__", make)
    try:
        inspect.signature(make).bind(*widths, **named)
    except TypeError as error:
        raise ValueError(
            f"{class_name}{inspect.signature(make)}: a model class is made as "
            f"Class(in_features, num_classes), with options it names ({', '.join(options)}): {error}"
        ) from error
    try:
        return make(*widths, **named)
    except Exception as error:
        got = ""
        if takes_any and isinstance(error, TypeError) and "unexpected keyword" in str(error):
            got = (
                f"; {class_name} takes any keyword, so that it got all options: {', '.join(options)}. Name those it has"
            )
        raise ValueError(
            f"{class_name} cannot be made for {counted(in_features, 'feature')} and "
            f"{counted(num_classes, 'class', 'classes')}: {describe_error(error)}{got}"
        ) from error
