"""Models known through and through: built-in networks, and ResNets and VGGs of torchvision, as they were made."""

from __future__ import annotations

from torch import nn

_NETWORKS = ("nugnn.networks", "torchvision.models.resnet", "torchvision.models.vgg")
"""Modules whose classes take no other course from step to step, whatever the numbers are."""
_PARTS = (*_NETWORKS, "torchvision.ops.misc")
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
    return is_part and not _overrides(module) and not any(getattr(module, name) for name in HOOKS)


def _overrides(module: nn.Module) -> bool:
    """Whether a method of its class is another one for this module alone."""
    return any(callable(getattr(type(module), name, None)) for name in vars(module))
