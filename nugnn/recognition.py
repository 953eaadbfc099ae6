"""When a class of DGL's may be run in another way: its code, its parts and its graph are known."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from nugnn.kernels.interceptor import current_interceptor
from nugnn.kernels.structure import Structure

FUSED_DEVICES = {"cuda"}
"""Device types on which other ways are taken; elsewhere their steps would be those of DGL's forward."""


def fingerprint(function: Callable[..., Any]) -> str:
    """Of a function's statements without its docstring: comments and layout do not count."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(tree, ast.FunctionDef)
    tree.body = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:16]


_empty_rows: WeakKeyDictionary[Structure, bool] = WeakKeyDictionary()


def has_empty_rows(structure: Structure) -> bool:
    """Whether a node has no in-edges; asked once, because the answer of a GPU is waited for."""
    if structure not in _empty_rows:
        _empty_rows[structure] = bool((structure.in_degrees == 0).any())
    return _empty_rows[structure]


def is_plain(module: Any, cls: type[nn.Module]) -> bool:
    """Whether ``module`` is of ``cls`` itself, without hooks or a forward of its own: its call may be left out."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return type(module) is cls and "forward" not in module.__dict__ and not any(getattr(module, h) for h in hooks)


def count_operators(*operators: tuple[nn.Module | None, str]) -> None:
    """Count operators that a fused layer does itself, so that names in the step that is open stay those of its parts.

    Args:
        *operators: Module that would call it, and its kind; None for the layer itself.
    """
    interceptor = current_interceptor()
    if interceptor is None:
        return
    for module, kind in operators:
        if module is None:
            interceptor.skip(kind)
        else:
            interceptor.name_inside(module, kind)
