"""How to train: what `nugnn.fit` takes by name and hands to the ranks."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from nugnn.activations import checked_activations
from nugnn.comm.groups import Ranks
from nugnn.comm.overlap import Overlap, overlaps
from nugnn.datasets.graph_data import GraphData
from nugnn.loss import RowLoss
from nugnn.metrics import METRICS
from nugnn.precision.storage import Storage
from nugnn.trainer import MakeScheduler

_OTHER_NAMES = {
    "learning_rate": "lr",
    "num_epochs": "epochs",
    "optimizer": "make_optimizer",
    "scheduler": "make_scheduler",
}
"""What other libraries call our options."""


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """How to train; what `nugnn.fit` takes by name and hands to the ranks.

    Args:
        epochs: Upper bound of epochs.
        patience: Stop after so many epochs without a better validation metric; None to train all.
        evaluate_every: Epochs between evaluations; the last one is always evaluated.
        lr: Learning rate of Adam.
        weight_decay: L2 penalty of Adam.
        weight_decay_first_layer_only: Apply it to the parameters of ``model.layers[0]`` (or of the first child that
            has parameters) only.
        make_optimizer: Replaces Adam; gets the model.
        make_scheduler: Makes a learning-rate schedule; gets the optimizer. It steps once after each epoch.
        loss: Replaces cross-entropy; one value per row.
        metric: Replaces the metric of the data.
        class_weights: ``(C,)``, for the loss.
        regularizer: Parameter-only term added to the loss once.
        seed: Of dropout masks.
        precision: ``fp32``, ``tf32``, ``bf16``, ``fp16`` or ``amp``; see `nugnn.precision.storage.Storage`.
        recompute_inputs: Aggregate the input features anew in every epoch; their aggregate, which is the same, is kept
            otherwise.
        overlap: ``auto``, ``on`` or ``off``: whether sums over edges begin while halo rows travel, see
            `nugnn.comm.overlap`; the result is the same to rounding.
        activations: What a step keeps for backward: ``keep`` everything; ``recompute`` the insides of message-passing
            layers, which run a second time; ``offload`` to the host's memory, from a GPU. Results are the same.
    """

    epochs: int = 200
    patience: int | None = None
    evaluate_every: int = 1
    lr: float = 0.01
    weight_decay: float = 5e-4
    weight_decay_first_layer_only: bool = False
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    make_scheduler: MakeScheduler | None = None
    loss: RowLoss | None = None
    metric: str | None = None
    class_weights: Tensor | None = None
    regularizer: Callable[[nn.Module], Tensor] | None = None
    seed: int = 0
    precision: str = "fp32"
    recompute_inputs: bool = False
    overlap: Overlap = "auto"
    activations: str = "keep"

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Adam with decay on all parameters or on the first layer's; or what ``make_optimizer`` returns."""
        if self.make_optimizer is not None:
            try:
                return self.make_optimizer(model)
            except TypeError as error:
                raise ValueError(
                    f"make_optimizer: {error}. It is called with the model and returns an optimizer: "
                    "make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1)"
                ) from error
        if not self.weight_decay_first_layer_only:
            return torch.optim.Adam(model.parameters(), lr=self.lr, weight_decay=self.weight_decay)
        first = {id(p) for p in _first_layer(model).parameters()}
        groups = [
            {"params": [p for p in model.parameters() if id(p) in first], "weight_decay": self.weight_decay},
            {"params": [p for p in model.parameters() if id(p) not in first], "weight_decay": 0.0},
        ]
        return torch.optim.Adam([group for group in groups if group["params"]], lr=self.lr)


def _first_layer(model: nn.Module) -> nn.Module:
    layers = getattr(model, "layers", None)
    if isinstance(layers, nn.ModuleList) and len(layers):
        return layers[0]
    for child in model.children():
        if any(True for _ in child.parameters()):
            return child
    return model


def checked_options(options: Mapping[str, Any], data: GraphData, others: Iterable[str] = ()) -> FitOptions:
    """``options`` by name, found to fit ``data``; ``others`` are names that a wrong one may have meant, too.

    Raises:
        TypeError: There is no option of that name; says which one was meant.
        ValueError: The graph has no labels, or metric or class weights do not fit them.
    """
    known = {field.name: field.name for field in fields(FitOptions)}
    meant = known | {name: name for name in others} | _OTHER_NAMES
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, meant, n=1)
            hint = f"did you mean {meant[near[0]]!r}?" if near else f"it has {', '.join(known)}"
            raise TypeError(f"nugnn.fit has no option {name!r}; {hint}")
    chosen = FitOptions(**options)
    _check_labels(chosen, data)
    return chosen


def _check_labels(options: FitOptions, data: GraphData) -> None:
    """Refuse what does not fit the labels, before anything is started."""
    if data.labels is None:
        raise ValueError(f"{data.name}: the graph has no labels, so there is nothing to train for")
    if len(data.train_nodes) == 0:
        raise ValueError(
            f"{data.name}: there are no training nodes, so there is nothing to learn from; name some, in DGL's graphs "
            "by ndata['train_mask']"
        )
    Storage(options.precision)
    overlaps(options.overlap, Ranks())
    checked_activations(options.activations)
    metric, is_multilabel = options.metric or data.metric, data.labels.dim() == 2
    if metric not in METRICS:
        raise ValueError(f"metric {metric!r} is not known; choose one of {', '.join(METRICS)}")
    if metric in ("accuracy", "micro_f1") and is_multilabel != (metric == "micro_f1"):
        raise ValueError(
            f"metric {metric} does not fit {data.name}, whose nodes have "
            + ("several labels each; use micro_f1" if is_multilabel else "one label each; use accuracy")
        )
    weights = options.class_weights
    if weights is not None and weights.shape != (data.num_classes,):
        raise ValueError(f"class_weights has shape {tuple(weights.shape)}, the data {data.num_classes} classes")
