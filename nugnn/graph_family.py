"""Training on a split graph: the whole graph is one optimizer step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nugnn.activations import make_activations
from nugnn.comm.halo_mode import HaloMode, checked_halo_mode
from nugnn.comm.halo_stale import arrived
from nugnn.comm.overlap import Overlap
from nugnn.embedding import NodeEmbedding
from nugnn.held_rows import HeldRows
from nugnn.loss import GlobalMean, RowLoss, choose_loss
from nugnn.metrics import evaluate_rows
from nugnn.model_on_shard import ModelOnShard
from nugnn.node_move import NodeMove, move_nodes
from nugnn.planning.imbalance import RebalanceRules
from nugnn.rebalance import OnMove, Rebalancer
from nugnn.shard_graph import ShardGraph

if TYPE_CHECKING:
    from nugnn.trainer import Trainer

Rows = dict[str, Tensor]


def why_halo_is_not_recorded(halo_wire: str, halo_mode: HaloMode) -> str | None:
    """What of halo rows keeps a step over several ranks from being a CUDA graph; None where nothing does."""
    if halo_wire != "fp32":
        return "halo rows travel compressed (halo_wire)"
    if not halo_mode.is_exact:
        return f"the host has a part in which halo rows a step reads (halo_mode {halo_mode})"
    return None


class GraphFamily:
    """A model on this rank's part of a graph; see `nugnn.family.Family`.

    Args:
        model: Called as ``model(graph, features)``, or ``model(graph)`` when the graph has no features.
        graph: From `nugnn.shard`; with ``ndata`` columns ``feat`` (dense or sparse CSR, optional) and ``label``.
        rows: Local rows of the splits: ``train``, ``val``, ``test``.
        loss: See `nugnn.loss.RowLoss`; cross-entropy, or binary cross-entropy for multi-label targets, when None.
        metric: See `nugnn.metrics.evaluate_rows`.
        class_weights: ``(C,)``, for the loss.
        label_smoothing: See `nugnn.loss.SmoothedCrossEntropy`.
        seed: Of dropout masks.
        precision: See `nugnn.precision.storage.Storage`.
        evaluate_on: Another graph, with its rows of the splits, on which the metric is measured and predictions are
            made: inductive training sees the training nodes alone.
        recompute_inputs: Aggregate the input features anew in every epoch, though the result is the same.
        overlap: Whether edges are summed while halo rows travel, see `nugnn.comm.overlap`.
        activations: What a step keeps for backward, see `nugnn.activations`; the result is the same.
        halo_wire: How halo rows and their gradients travel in training: ``fp32`` (as they are, in the type of the
            computation), ``bf16``, ``fp16``, ``int8``, ``int4`` or ``int2``, see `nugnn.comm.halo_wire`; ``auto``
            chooses by operator, direction and rank, see `nugnn.comm.halo_auto`. Evaluation and predictions are exact.
        halo_feedback: Whether what compressed rows have left out is added to the same rows in the next step, see
            `nugnn.comm.halo_feedback`; of ``int8``, ``int4`` and ``int2``.
        halo_mode: Which halo rows, and gradients of a rank's own rows, a training step reads: ``exact``; ``stale``,
            those of the step before; or ``sampled:P``, a random share P of its own, scaled by 1/P. See
            `nugnn.comm.halo_mode`. Evaluation and predictions are exact.
        halo_target: How long the exchanges of an epoch may take under ``auto``, predicted: a share of its computation
            such as ``10%`` (when None), or seconds such as ``0.05s``, see `nugnn.comm.halo_bits`.
        rebalance: When nodes move between ranks, where `nugnn.train_rank` trains; never when None.
        on_move: Called after a move, see `nugnn.rebalance.OnMove`.

    Raises:
        ValueError: An option is not known, or does not fit the device or another option.
    """

    steps_per_epoch = 1
    division: tuple[int, ...] = ()

    def __init__(
        self,
        model: nn.Module,
        graph: ShardGraph,
        rows: Rows,
        *,
        loss: RowLoss | None = None,
        metric: str = "accuracy",
        class_weights: Tensor | None = None,
        label_smoothing: float = 0.0,
        seed: int = 0,
        precision: str = "fp32",
        evaluate_on: tuple[ShardGraph, Rows] | None = None,
        recompute_inputs: bool = False,
        overlap: Overlap = "auto",
        activations: str = "keep",
        halo_wire: str = "fp32",
        halo_feedback: bool = False,
        halo_mode: str = "exact",
        halo_target: str | None = None,
        rebalance: RebalanceRules | None = None,
        on_move: OnMove | None = None,
    ) -> None:
        self.model, self.metric, self.ranks = model, metric, graph.ranks
        self._how: dict[str, Any] = {"seed": seed, "precision": precision, "recompute_inputs": recompute_inputs}
        self._how |= {"overlap": overlap, "halo_wire": halo_wire, "halo_feedback": halo_feedback}
        self._how |= {"halo_mode": halo_mode, "halo_target": halo_target}
        self._halo_wire, self._activations_choice = halo_wire, activations
        self._halo_mode = checked_halo_mode(halo_mode, halo_feedback=halo_feedback, precision=precision)
        self._loss = choose_loss(loss, graph.ndata["label"], label_smoothing)
        self._class_weights, self.has_own_loss = class_weights, loss is not None
        self._rebalance, self._on_move = rebalance, on_move
        self._open(graph, rows)
        self.first_split = hashlib.blake2b(graph.global_node_ids.cpu().numpy().data, digest_size=8).hexdigest()
        self._evaluated, self._evaluated_rows = self.net, rows
        if evaluate_on is not None:
            evaluation_graph, self._evaluated_rows = evaluate_on
            self._evaluated = ModelOnShard(model, evaluation_graph, **self._how)
            self._evaluated.count_in(self.net.halo_traffic)
        self.storage = self.net.storage

    def _open(self, graph: ShardGraph, rows: Rows) -> None:
        """Train on ``graph``."""
        self.graph, self.rows = graph, rows
        self.net = ModelOnShard(self.model, graph, **self._how)
        self._activations = make_activations(self._activations_choice, self.net)
        labels = graph.ndata["label"][rows["train"]]
        self._mean = GlobalMean(self._loss, labels, self.ranks, self._class_weights, rows["train"])

    sums_in_backward = False  # few parameters, and halo rows travel then
    riders = None
    remedy = "Use nugnn.global_mean(x, graph) or nugnn.global_sum(x, graph) for values over all nodes."

    @property
    def exchanges_rows(self) -> bool:
        return self.ranks.is_split

    @property
    def why_not_recorded(self) -> str | None:
        of_halo = why_halo_is_not_recorded(self._halo_wire, self._halo_mode) if self.ranks.is_split else None
        return of_halo or self._activations.why_not_recorded

    @property
    def row_ids(self) -> Tensor:
        return self.graph.global_node_ids

    @property
    def num_rows_global(self) -> int:
        return self.graph.num_nodes_global()

    def steps(self, epoch: int, start: int = 0) -> Iterator[Sequence[None]]:
        yield [None]

    @contextmanager
    def around(self, step: int, work: Any = None) -> Iterator[None]:
        with self.net.step(step), self._activations.step():
            yield

    def loss(self, work: None) -> Tensor:
        return self._mean(self._activations.forward())

    def tensors_of(self, work: None) -> list[Tensor]:
        return []

    def copy_of(self, work: None) -> None:
        return None

    def kind_of(self, work: None) -> Any:
        features = self.net.features_ND  # what was aggregated once is kept until they are changed
        return None if features is None else features._version

    def weight(self, work: None) -> float:
        return 1.0

    def predict(self, num_steps: int) -> Tensor:
        """``(N, C)`` logits of the inner nodes in evaluation mode; a collective call."""
        return self._evaluated.predict(num_steps)

    def settle(self, *, is_good: bool) -> None:
        """Nothing differs: batch norm counts the rows of all ranks. A plan of wires that is due is made."""
        if (feedback := self.net.halo_feedback) is not None and not is_good:
            feedback.discard()
        if (stale := self.net.stale_rows) is not None and not is_good:
            stale.restart()
        if (bits := self.net.halo_bits) is not None:
            bits.settle(is_good=is_good)

    def own_rows(self) -> dict[str, Tensor]:
        feedback = self.net.halo_feedback
        return {} if feedback is None else feedback.rows()

    def load_own_rows(self, rows: dict[str, Tensor]) -> None:
        if (feedback := self.net.halo_feedback) is not None:
            feedback.load(rows)

    def move(self, destination: Tensor, held: HeldRows, *, arranged_as: Tensor | None = None) -> NodeMove:
        """Nodes go to other ranks between two steps, and with them all that this family keeps; a collective call.

        The graph that metric and predictions are of stays where it is, if it is another one. Halo rows of the step
        before, and what decides about wires, begin anew.

        Args:
            destination: ``(N,)`` rank of each row.
            held: What the model and its optimizer hold, found to be movable.
            arranged_as: See `move_nodes`.
        """
        graph, splits, owed, traffic = self.graph, self.rows, self.own_rows(), self.net.halo_traffic
        is_evaluated = self._evaluated is self.net
        arrived(graph.index.plan)  # before nobody holds what is on its way
        del self.net, self._activations, self._mean, self.graph, self.rows  # what they keep of the features goes first
        if is_evaluated:
            del self._evaluated
        move = move_nodes(graph, destination, splits, arranged_as=arranged_as)
        held.follow(move)
        self._open(move.graph, move.splits)
        self.load_own_rows({name: move.rows(rows) for name, rows in owed.items()})
        self.net.count_in(traffic)
        if is_evaluated:
            self._evaluated, self._evaluated_rows = self.net, self.rows
        return move

    def move_as(self, ids_of: Callable[[int], Tensor], trainer: Trainer) -> str | None:
        own_ids, wanted = self.row_ids.cpu(), None
        destination, is_listed = torch.zeros_like(own_ids), torch.zeros(len(own_ids), dtype=torch.bool)
        for rank in range(self.ranks.world_size):
            ids = ids_of(rank)
            is_theirs = torch.isin(own_ids, ids)
            destination[is_theirs], is_listed = rank, is_listed | is_theirs
            wanted = ids if rank == self.ranks.rank else wanted
        if bool(self.ranks.max_(torch.tensor([float(not is_listed.all())]))):
            return "some nodes are on no worker of the checkpoint, so it is of another graph or damaged"
        held = HeldRows(trainer.model, trainer.optimizer, self.graph, trusts_user=self._on_move is not None)
        if held.why_not is None:
            move = self.move(destination, held, arranged_as=wanted)
            if self._on_move is not None:
                self._on_move(trainer.model, move)
        return held.why_not

    def rebalancer(self, trainer: Trainer) -> Rebalancer | None:
        if self._rebalance is None or not self.ranks.is_split:
            return None
        return Rebalancer(trainer, self, self._rebalance, self._on_move)

    def own_state(self) -> dict[str, Any]:
        bits = self.net.halo_bits
        return self._stale_state() | ({} if bits is None else {"halo_bits": bits.state()})

    def _stale_state(self) -> dict[str, Any]:
        stale, plan = self.net.stale_rows, self.graph.index.plan
        if stale is None or not self.ranks.is_split or not (rows := stale.rows(plan)):
            return {}
        return {"sent_ids": self.graph.global_node_ids.index_select(0, plan.send_rows), "stale_rows": rows}

    def load_own_state(self, state: dict[str, Any]) -> None:
        if (bits := self.net.halo_bits) is not None:
            bits.load(state.get("halo_bits"))
        stale, plan = self.net.stale_rows, self.graph.index.plan
        if stale is None or not self.ranks.is_split:
            return
        sent_ids = self.graph.global_node_ids.index_select(0, plan.send_rows).cpu()
        is_known = "sent_ids" in state and torch.equal(state["sent_ids"].cpu(), sent_ids)
        is_missing = self.ranks.max_(torch.tensor([float(not is_known)]))  # on one rank: all read what is true
        stale.load({} if bool(is_missing) else state["stale_rows"], plan)

    def evaluate(self, num_steps: int, *, with_train: bool = False) -> dict[str, float]:
        logits_NC, labels_N = self.predict(num_steps), self._evaluated.graph.ndata["label"]
        scores = {}
        for split, rows in self._evaluated_rows.items():
            logits_nC, labels_n = logits_NC.index_select(0, rows), labels_N.index_select(0, rows)
            scores[split] = evaluate_rows(self.metric, logits_nC, labels_n, self.ranks)
        return scores

    def predict_all(self, num_steps: int) -> Tensor:
        return self._evaluated.predict_all(num_steps)

    @property
    def num_predicted(self) -> int:
        return self._evaluated.graph.num_nodes_global()

    def report(self) -> dict[str, Any]:
        graph = self.graph
        report = {"nodes": graph.num_nodes(), "edges": graph.num_edges(), "halo_rows": graph.index.plan.num_halo}
        return report | ({"halo": self._halo_report()} if self.ranks.is_split else {})

    def _halo_report(self) -> dict[str, Any]:
        self.ranks.clock.catch_up()
        report = {"wire": self._halo_wire, "mode": str(self._halo_mode), **self.net.halo_traffic.report()}
        bits = self.net.halo_bits
        return report if bits is None else report | {"plan": bits.report()}

    def news(self) -> str | None:
        bits = self.net.halo_bits
        return None if bits is None else bits.news()

    def whole_state(self) -> dict[str, Tensor]:
        """Every node embedding is whole, in original node order."""
        state = {key: value.detach().clone().cpu() for key, value in self.model.state_dict().items()}
        for name, module in self.model.named_modules():
            if isinstance(module, NodeEmbedding):
                state[f"{name}.weight" if name else "weight"] = module.gather(self.graph).cpu()
        return state
