"""Parameters of which each rank has rows of its own, such as those of `nugnn.NodeEmbedding`."""

from __future__ import annotations

from torch import nn


def sharded_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that differ from rank to rank: ``weight`` of modules that say so by ``is_sharded``."""
    return [module.weight for module in model.modules() if getattr(module, "is_sharded", None) is True]  # type: ignore[misc]
