"""A model on one rank's part of a graph: features, forward pass, predictions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nugnn import recognition
from nugnn._counted import counted
from nugnn.comm.halo_auto import AutoBits
from nugnn.comm.halo_feedback import HaloFeedback
from nugnn.comm.halo_handler import HaloHandler
from nugnn.comm.halo_stale import StaleRows
from nugnn.comm.halo_traffic import HaloTraffic
from nugnn.comm.overlap import Overlap
from nugnn.embedding import shard_embeddings
from nugnn.kernels.padded import is_padded, padded_copy, padded_width
from nugnn.kernels.rows import rows_of, tag
from nugnn.modes import evaluating
from nugnn.precision.storage import Storage, at_least_float32, model_dtype
from nugnn.session import intercept
from nugnn.shard_graph import ShardGraph


def refuse_empty_features(features: Tensor) -> None:
    """Raise ValueError for features of width 0: torch would train on them, or fail in words about matrices."""
    if 0 in features.shape[1:]:
        raise ValueError(
            f"features of shape {tuple(features.shape)} hold no value; leave them out, or give them columns"
        )


class ModelOnShard:
    """What training, evaluation and prediction on this rank have in common.

    Args:
        model: Called as ``model(graph, features)``, or ``model(graph)`` when the graph has no features. Its node
            embeddings are split.
        graph: From `nugnn.shard`; the ``ndata`` column ``feat`` (dense or sparse CSR) is optional.
        seed: Of dropout masks.
        precision: One of `nugnn.precision.storage.PRECISIONS`.
        recompute_inputs: Aggregate the input features anew in every pass.
        overlap: Whether edges are summed while halo rows travel, see `nugnn.comm.overlap`.
        halo_wire: How halo rows travel in training, see `nugnn.comm.halo_wire`.
        halo_feedback: Whether what they leave out is added in the next step, see `nugnn.comm.halo_feedback`.
        halo_mode: Which halo rows are read in training, see `nugnn.comm.halo_mode`.
        halo_target: How long their exchanges may take under ``halo_wire auto``, see `nugnn.comm.halo_target`.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: ShardGraph,
        *,
        seed: int = 0,
        precision: str = "fp32",
        recompute_inputs: bool = False,
        overlap: Overlap = "auto",
        halo_wire: str = "fp32",
        halo_feedback: bool = False,
        halo_mode: str = "exact",
        halo_target: str | None = None,
    ) -> None:
        self.model, self.graph = model, graph
        self.storage = Storage(precision)
        shard_embeddings(model, graph)
        self.features_ND = self._features()
        constant = None if recompute_inputs else self.features_ND
        halo: dict[str, Any] = {"overlap": overlap, "halo_wire": halo_wire, "halo_feedback": halo_feedback}
        halo |= {"halo_mode": halo_mode, "halo_target": halo_target}
        self.interceptor = intercept(model, graph, seed=seed, constant=constant, **halo)

    @property
    def halo_feedback(self) -> HaloFeedback | None:
        """What this rank owes to rows that it sent compressed."""
        return self.interceptor.find(HaloHandler).feedback

    @property
    def halo_bits(self) -> AutoBits | None:
        """What decides about the wires of halo rows under ``halo_wire auto``."""
        return self.interceptor.find(HaloHandler).bits

    @property
    def stale_rows(self) -> StaleRows | None:
        """What the last step was sent, and the next one reads."""
        return self.interceptor.find(HaloHandler).stale

    @property
    def halo_traffic(self) -> HaloTraffic:
        """What this rank has exchanged for halo rows."""
        return self.interceptor.find(HaloHandler).traffic

    def count_in(self, traffic: HaloTraffic) -> None:
        """Count exchanges there from now on."""
        self.interceptor.find(HaloHandler).traffic = traffic

    def _features(self) -> Tensor | None:
        if "feat" not in self.graph.ndata:
            return None
        feat = self.graph.ndata["feat"]
        refuse_empty_features(feat)
        dtype = self.storage.dtype_of(model_dtype(self.model))
        pads = self._pads(feat, dtype) and not (is_padded(feat) and feat.dtype == dtype)
        stored = tag(padded_copy(feat, dtype) if pads else feat.to(dtype), rows_of(feat))
        if stored is not feat and (self.storage.is_half or is_padded(stored)):
            self.graph.ndata["feat"] = stored  # what the model reads by name is what it is given, and kept once
        return stored

    def _pads(self, feat: Tensor, dtype: torch.dtype) -> bool:
        """Whether products read ``feat`` faster from padded rows (`nugnn.kernels.padded`)."""
        is_constant = feat.layout is torch.strided and feat.dim() == 2 and not feat.requires_grad
        return (
            is_constant
            and feat.device.type in recognition.FUSED_DEVICES
            and self.storage.pads(dtype)
            and padded_width(feat.shape[1], dtype.itemsize) != feat.shape[1]
        )

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around the forward and backward pass of step ``number``, which keys whatever is drawn at random."""
        with self.storage.casts(self.model, self.graph.device), self.interceptor.step(number):
            yield

    def forward(self) -> Tensor:
        """``(N, C)`` logits of the inner nodes, in the type the model works in; inside `step`."""
        inputs = (self.graph,) if self.features_ND is None else (self.graph, self.features_ND)
        logits_NC: Tensor = self.model(*inputs)
        is_tensor = isinstance(logits_NC, Tensor)
        if not is_tensor or logits_NC.shape[:1] != (self.graph.num_nodes(),):
            given = f"shape {tuple(logits_NC.shape)}" if is_tensor else type(logits_NC).__name__
            raise ValueError(
                f"the model returned {given}; it has to return one row for each of the "
                f"{counted(self.graph.num_nodes(), 'node')} "
                "it was given"
            )
        return logits_NC

    def predict(self, step: int = 0) -> Tensor:
        """``(N, C)`` logits of the inner nodes in evaluation mode, float32 or wider; a collective call.

        Args:
            step: Number of the training step after which this is; keys whatever the model draws at random.
        """
        with evaluating(self.model), self.step(step):
            logits_NC = self.forward()
        return at_least_float32(logits_NC)

    def predict_all(self, step: int = 0) -> Tensor:
        """``(num_nodes_global, C)`` logits in the original node order, on every rank; a collective call."""
        logits = self.predict(step)
        ids = torch.cat(self.graph.ranks.gather_rows(self.graph.global_node_ids))
        rows = torch.cat(self.graph.ranks.gather_rows(logits.contiguous()))
        return torch.empty_like(rows).index_copy_(0, ids, rows)
