"""How to train on a graph: what `nugnn.fit` takes by name and hands to the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from nugnn.activations import checked_activations
from nugnn.comm.groups import Ranks
from nugnn.comm.halo_mode import HaloMode, checked_halo_mode
from nugnn.comm.halo_target import HaloTarget, checked_target
from nugnn.comm.halo_wire import check_halo_feedback, checked_halo_wire
from nugnn.comm.overlap import Overlap, overlapping_passes
from nugnn.datasets.graph_data import GraphData
from nugnn.planning.imbalance import RebalanceRules
from nugnn.rebalance import OnMove, checked_rules
from nugnn.sample_options import SAMPLES_ONLY
from nugnn.train_options import TrainOptions, check_options, named_options


@dataclass(frozen=True, kw_only=True)
class FitOptions(TrainOptions):
    """How to train on a graph, by Adam; what `nugnn.fit` takes by name, beside the options of every family.

    Args:
        weight_decay_first_layer_only: Apply ``weight_decay``, an L2 penalty, to the parameters of ``model.layers[0]``
            (or of the first child that has parameters) only.
        recompute_inputs: Aggregate the input features anew in every epoch; their aggregate, which is the same, is kept
            otherwise.
        overlap: ``auto``, ``on``, ``backward`` or ``off``: whether edges are summed while halo rows travel, see
            `nugnn.comm.overlap`; the result is the same to rounding.
        activations: What a step keeps for backward: ``keep`` everything; ``recompute`` the insides of message-passing
            layers, which run a second time; ``offload`` to the host's memory, from a GPU. Results are the same.
        halo_wire: How halo rows and their gradients travel in training: ``fp32`` (as they are, in the type of the
            computation), ``bf16``, ``fp16``, ``int8``, ``int4`` or ``int2``, see `nugnn.comm.halo_wire`; ``auto``
            chooses by operator, direction and worker, see `nugnn.comm.halo_auto`. Evaluation is exact. It has no effect
            on one worker.
        halo_feedback: Add what rows of ``int8``, ``int4`` or ``int2`` have left out to the same rows in the next step,
            see `nugnn.comm.halo_feedback`.
        halo_mode: Which halo rows, and gradients of a worker's own nodes, an epoch reads: ``exact``; ``stale``, those
            of the epoch before; or ``sampled:P``, such as ``sampled:0.1``, a random share P of its own, scaled by 1/P.
            The last two are approximate, see `nugnn.comm.halo_mode`. Evaluation is exact. It has no effect on one
            worker.
        halo_target: How long the exchanges of an epoch may take under ``auto``, predicted: a share of its computation
            such as ``10%`` (when None), or seconds such as ``0.05s``, see `nugnn.comm.halo_bits`.
        rebalance: ``auto``: nodes move between workers where these have ended an epoch at different times for a while
            and the rest of the run has seconds to gain; ``off``; or `nugnn.RebalanceRules`. Results are the same to
            rounding, see ``docs/rebalance.md``. It has no effect on one worker.
        on_move: ``on_move(model, move)``, called in each worker after a move, for tensors with a row for each node or
            edge that the model keeps and nuGNN does not know: ``move`` is a `nugnn.node_move.NodeMove`.
    """

    family: ClassVar[str] = "graphs"
    rows: ClassVar[str] = "nodes"
    of_traffic: ClassVar[tuple[str, ...]] = (
        *TrainOptions.of_traffic,
        *("overlap", "halo_wire", "halo_feedback", "halo_mode", "halo_target"),
    )

    weight_decay_first_layer_only: bool = False
    recompute_inputs: bool = False
    overlap: Overlap = "auto"
    activations: str = "keep"
    halo_wire: str = "fp32"
    halo_feedback: bool = False
    halo_mode: str = "exact"
    halo_target: str | None = None
    rebalance: str | RebalanceRules = "auto"
    on_move: OnMove | None = None

    def deciding(self) -> dict[str, Any]:
        """Options of graphs that decide the weights, beside the settings of every family."""
        return {
            "label_smoothing": self.label_smoothing,
            "halo_wire": self.halo_wire,
            "halo_feedback": self.halo_feedback,
            "halo_mode": str(HaloMode.parse(self.halo_mode)),
            "halo_target": None if self.halo_target is None else str(HaloTarget.parse(self.halo_target)),
        }

    def usual_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Adam with decay on all parameters or on the first layer's."""
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
        ValueError: The graph has no labels, an option belongs to samples, or metric or class weights do not fit.
    """
    chosen = named_options(FitOptions, options, dict.fromkeys(SAMPLES_ONLY, "samples"), others)
    if data.labels is None:
        raise ValueError(
            f"{data.name}: the graph has no labels, so there is nothing to train for; give labels "
            f"(docs/datasets.md), or "
            "partition it, or predict on it with a finished run"
        )
    if len(data.train_nodes) == 0:
        raise ValueError(
            f"{data.name}: there are no training nodes, so there is nothing to learn from; name some, in DGL's graphs "
            "by ndata['train_mask']"
        )
    overlapping_passes(chosen.overlap, Ranks())
    checked_activations(chosen.activations)
    checked_halo_wire(chosen.halo_wire)
    check_halo_feedback(chosen.halo_wire, chosen.halo_feedback)
    mode = checked_halo_mode(chosen.halo_mode, halo_feedback=chosen.halo_feedback, precision=chosen.precision)
    checked_target(chosen.halo_target, halo_wire=chosen.halo_wire, mode=mode)
    if checked_rules(chosen.rebalance) is None and chosen.on_move is not None:
        raise ValueError("on_move has no effect where rebalance is off; leave one of them out")
    check_options(chosen, data.name, data.metric, is_multilabel=data.labels.dim() == 2, num_classes=data.num_classes)
    chosen.built_schedule(1)  # an epoch is one step; refused here, before workers start
    return chosen
