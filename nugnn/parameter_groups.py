"""Which parameters weight decay is for."""

from __future__ import annotations

from typing import Any

from torch import nn

_NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Groups for an optimizer: ``weight_decay`` on matrices and kernels, none on biases and the parameters of norms.

    A parameter with fewer than two axes counts as a bias, wherever it is: it scales or shifts. Each parameter is in one
    group, also one that several modules share; a group without parameters is left out.

    Args:
        model: Its parameters in their order, frozen ones left out.
        weight_decay: As the optimizer takes it.

    Returns:
        ``{"params": [...], "weight_decay": ...}`` once or twice; the same groups on every rank.

    Raises:
        ValueError: ``weight_decay`` is negative, or there is nothing to train.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    >>> [(len(group["params"]), group["weight_decay"]) for group in parameter_groups(model, 0.1)]
    [(1, 0.1), (3, 0.0)]
    """
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay is {weight_decay}, must be 0 or more")
    of_norms = {id(p) for module in model.modules() if isinstance(module, _NORMS) for p in module.parameters(False)}
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ValueError("the model has no parameters to train: all are frozen, or it has none")
    is_spared = [p.dim() < 2 or id(p) in of_norms for p in trained]
    groups = []
    for decay, spared in ((weight_decay, False), (0.0, True)):
        members = [p for p, mine in zip(trained, is_spared, strict=True) if mine is spared]
        if members:
            groups.append({"params": members, "weight_decay": decay})
    return groups
