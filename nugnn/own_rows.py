"""Parameters of which each rank has rows of its own, such as those of `nugnn.NodeEmbedding`."""

from __future__ import annotations

from torch import nn


def sharded_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that differ from rank to rank: ``weight`` of modules that say so by ``is_sharded``."""
    return [module.weight for module in model.modules() if getattr(module, "is_sharded", None) is True]  # type: ignore[misc]


def sharded_names(model: nn.Module) -> set[str]:
    """Their names in ``model``; all of them where one has several."""
    own = {id(p) for p in sharded_parameters(model)}
    return {name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in own}
