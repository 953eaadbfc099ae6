"""Models known through and through, as they were made: built-in ones, and ResNets and VGGs of torchvision."""

from __future__ import annotations

from types import BuiltinFunctionType
from typing import Any

from torch import nn

_NETWORKS = ("nugnn.networks", "nugnn.models", "torchvision.models.resnet", "torchvision.models.vgg")
"""Modules whose classes take no other course from step to step, whatever the numbers are."""
_LAYERS = tuple(f"dgl.nn.pytorch.conv.{name}" for name in ("graphconv", "sageconv", "gatconv", "gatv2conv", "ginconv"))
_PARTS = (*_NETWORKS, *_LAYERS, "torchvision.ops.misc")
_BY_NUMBERS = ("lstm",)
"""Aggregators of `dgl.nn.SAGEConv` that take their course from the degrees of nodes."""
_FUNCTIONS = ("torch.nn.functional", "nugnn.models")
"""Modules whose functions a layer may be given; built-in ones it may be given, too."""
_GLOBAL_HOOKS = (
    *("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks"),
)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Attributes of a module that hold its hooks."""


def is_known(model: nn.Module) -> bool:
    """Whether ``model`` is one of these networks, of torch's own layers, with nobody's code in it.

    A class derived from one of them elsewhere is not known, nor is a model with a hook on a module or parameter.
    """
    return (
        type(model).__module__ in _NETWORKS
        and not has_global_hooks()
        and all(_is_plain(module) for module in model.modules())
        and not any(p._backward_hooks for p in model.parameters())
    )


def has_global_hooks() -> bool:
    """Whether somebody looks at the calls of all modules."""
    shared = nn.modules.module.__dict__
    return any(shared[name] for name in _GLOBAL_HOOKS)


def _is_plain(module: nn.Module) -> bool:
    home = type(module).__module__
    is_part = home in _PARTS or home.startswith("torch.nn.modules.")
    is_own = is_part and not _overrides(module) and all(map(_is_known_function, _functions_of(module)))
    takes_one_course = getattr(module, "_aggre_type", None) not in _BY_NUMBERS
    return is_own and takes_one_course and not any(getattr(module, name) for name in HOOKS)


def _functions_of(module: nn.Module) -> list[Any]:
    """Those that a layer was given; modules are looked at by themselves."""
    given = (getattr(module, name, None) for name in ("activation", "norm"))
    return [each for each in given if callable(each) and not isinstance(each, nn.Module)]


def _is_known_function(function: Any) -> bool:
    return isinstance(function, BuiltinFunctionType) or getattr(function, "__module__", None) in _FUNCTIONS


def _overrides(module: nn.Module) -> bool:
    """Whether a method of its class is another one for this module alone."""
    return any(callable(getattr(type(module), name, None)) for name in vars(module))
