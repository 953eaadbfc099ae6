"""The pieces of a run for a loop of one's own: ranks, shard, interceptor, and values across ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

from nugnn import seam
from nugnn._counted import counted
from nugnn.comm.batch_norm import BatchNormHandler
from nugnn.comm.collectives import sum_over_ranks
from nugnn.comm.groups import Ranks
from nugnn.comm.halo_auto import AutoBits
from nugnn.comm.halo_feedback import HaloFeedback
from nugnn.comm.halo_handler import HaloHandler
from nugnn.comm.halo_mode import checked_halo_mode
from nugnn.comm.halo_target import checked_target
from nugnn.comm.halo_wire import AUTO, HaloWire, check_halo_feedback, checked_halo_wire
from nugnn.comm.overlap import Overlap, overlapping_passes
from nugnn.comm.pulse import ProgressHandler
from nugnn.datasets.graph_data import GraphData
from nugnn.devices import own_device
from nugnn.kernels.attention_handler import AttentionHandler
from nugnn.kernels.handlers import DropoutHandler, RandomDrawHandler, SparseRowsHandler
from nugnn.kernels.interceptor import Interceptor
from nugnn.kernels.reuse import ReuseHandler
from nugnn.kernels.rows import REPLICATED, tag
from nugnn.partition.assign import Method
from nugnn.partition.order import OrderChoice
from nugnn.partition.store import load_shard
from nugnn.precision.promotion import PromotionHandler
from nugnn.shard_graph import ShardGraph
from nugnn.shares import checked_shares, own_shard
from nugnn.udf import source_rows


def shard(
    data: GraphData | str | Path,
    ranks: Ranks | None = None,
    *,
    shares: Sequence[float] | None = None,
    method: Method = "metis",
    seed: int = 0,
    order: OrderChoice = "none",
    device: str = "cpu",
) -> ShardGraph:
    """Cut the part of this rank out of a graph; every rank has to call.

    Args:
        data: The whole graph (rank 0 partitions, every rank cuts its own part), or a folder of shards on disk.
        ranks: From `init`; a single rank when None.
        shares: Target share of each rank's nodes, any positive numbers; equal when None.
        method: ``metis``, ``clusters``, ``kaminpar`` or ``random``; ignored for a folder.
        seed: Of the partitioner.
        order: Of the rows; ``auto`` puts them in another order where that makes aggregation faster. A row's node is
            ``graph.global_node_ids[row]`` in any order, also on a single rank. Ignored for a folder.
        device: Of the single rank, as for `init`; given ``ranks``, their device counts.

    Raises:
        ValueError: The data or shares do not fit, or the folder holds another number of parts.
    """
    seam.install()
    ranks = ranks or Ranks(device=own_device(device))
    if isinstance(data, (str, Path)):
        return ShardGraph(load_shard(Path(data), ranks.rank), ranks)
    if ranks.world_size == 1 and shares is not None and len(shares) > 1:
        raise ValueError(
            f"shares: {counted(len(shares), 'number')} for 1 worker: start the script with torchrun --standalone "
            f"--nproc-per-node {len(shares)}, and give shard the ranks of nugnn.init()"
        )
    weights = checked_shares(shares, ranks.world_size, data)
    own, _ = own_shard(data, ranks, weights, method=method, order=order, seed=seed)
    return ShardGraph(own, ranks)


def intercept(
    model: nn.Module,
    graph: ShardGraph,
    *,
    seed: int = 0,
    constant: Tensor | None = None,
    overlap: Overlap = "auto",
    halo_wire: str = "fp32",
    halo_feedback: bool = False,
    halo_mode: str = "exact",
    halo_target: str | None = None,
) -> Interceptor:
    """The interceptor that keeps ``model`` exact on ``graph``.

    Run forward and backward inside ``with interceptor.step(number):``. There `torch.utils.checkpoint` repeats a module
    exactly, see ``docs/gpu.md``.

    Args:
        model: Its module paths name the operators.
        graph: From `shard`.
        seed: Of dropout masks; the same on every rank.
        constant: Input features that never change: what is aggregated from them is kept from step to step.
        overlap: Whether edges are summed while halo rows travel: ``on``, ``backward`` (there alone), ``off``, or
            ``auto``, see `nugnn.comm.overlap`; the same on every rank.
        halo_wire: How floating halo rows and their gradients travel while ``model.training``, see
            `nugnn.comm.halo_wire`, or ``auto``: wires by operator, direction and rank, see `nugnn.comm.halo_auto`;
            the same on every rank.
        halo_feedback: Add what compressed rows have left out to the same rows in the next step, see
            `nugnn.comm.halo_feedback`.
        halo_mode: Which floating halo rows, and gradients of one's own rows, are read while ``model.training``:
            ``exact``, ``stale`` (those of the step before) or ``sampled:P`` (a random share), see
            `nugnn.comm.halo_mode`; the same on every rank. Under ``stale`` the factor of a loss scaler must not change.
        halo_target: How long the exchanges of a step may take under ``auto``, predicted: a share of its computation
            such as ``10%`` (when None), or seconds such as ``0.05s``; the same on every rank.

    Raises:
        ValueError: No such choice of ``overlap``, ``halo_wire``, ``halo_mode`` or ``halo_target``, or one that does not
            go together with the others.
    """
    check_halo_feedback(halo_wire, halo_feedback)
    mode = checked_halo_mode(halo_mode, halo_feedback=halo_feedback)
    checked_halo_wire(halo_wire)
    target = checked_target(halo_target, halo_wire=halo_wire, mode=mode)
    plan = graph.index.plan
    handlers = (
        ProgressHandler(graph.ranks.pulse),
        *(() if constant is None else (ReuseHandler(constant),)),
        SparseRowsHandler(),
        DropoutHandler(is_split=graph.is_split),
        AttentionHandler(is_split=graph.is_split),
        RandomDrawHandler(is_split=graph.is_split),
        BatchNormHandler(graph.ranks),
        HaloHandler(
            passes=overlapping_passes(overlap, graph.ranks),
            wire=HaloWire() if halo_wire == AUTO else HaloWire(halo_wire),
            is_training=lambda: model.training,
            feedback=HaloFeedback(plan.num_inner, plan.send_rows) if halo_feedback and graph.is_split else None,
            mode=mode,
            bits=AutoBits(graph.ranks, target) if target is not None and graph.is_split else None,
        ),
        PromotionHandler(),
    )
    return Interceptor(handlers, model, seed=seed)


def halo(x: Tensor, graph: ShardGraph) -> Tensor:
    """Rows of ``x (N, ...)`` for every local source, ``(L, ...)``: inner rows, then halo rows from their owners.

    Every rank has to call. Gradients of halo rows return to their owners. Index it with `local_edges`.
    """
    return source_rows(graph, x)


def local_edges(graph: ShardGraph) -> tuple[Tensor, Tensor]:
    """``(source, destination)`` of each local edge: rows of `halo` and rows of ``ndata``, int64 ``(E,)`` each."""
    structure = graph.index.structure
    ends = structure.indices.long(), structure.dst.long()
    return ends[::-1] if graph.index.is_reversed else ends


def global_sum(x: Tensor, graph: ShardGraph) -> Tensor:
    """Sum of the rows of ``x (N, ...)`` over all nodes of the whole graph, ``(...)``, the same on every rank."""
    return tag(sum_over_ranks(x.sum(0), graph.ranks), REPLICATED)


def global_mean(x: Tensor, graph: ShardGraph) -> Tensor:
    """Mean of the rows of ``x (N, ...)`` over all nodes of the whole graph, ``(...)``, the same on every rank."""
    return tag(global_sum(x, graph) / graph.num_nodes_global(), REPLICATED)
