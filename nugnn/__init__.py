"""Exact full-graph GNN training over unequal devices, built on DGL.

Importing the package loads neither torch nor DGL; public names are imported on first use. It also puts a hook in place
that lets a later ``import dgl`` work with torch versions newer than DGL's binaries (see ``nugnn._dgl_compat``).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nugnn import _dgl_compat

if TYPE_CHECKING:
    from nugnn import comm as comm
    from nugnn import datasets as datasets
    from nugnn.balancer import Balancer as Balancer
    from nugnn.batches import SplitBatchSampler as SplitBatchSampler
    from nugnn.batches import batch_loader as batch_loader
    from nugnn.check import CheckReport as CheckReport
    from nugnn.check import ModelDiffers as ModelDiffers
    from nugnn.check import ModelFails as ModelFails
    from nugnn.check import check as check
    from nugnn.check import check_model as check_model
    from nugnn.config import TrainConfig as TrainConfig
    from nugnn.datasets.graph_data import GraphData as GraphData
    from nugnn.declared_rows import as_edge_rows as as_edge_rows
    from nugnn.declared_rows import as_node_rows as as_node_rows
    from nugnn.declared_rows import as_replicated as as_replicated
    from nugnn.declared_rows import as_rows_of as as_rows_of
    from nugnn.embedding import NodeEmbedding as NodeEmbedding
    from nugnn.fit import fit as fit
    from nugnn.fit_options import FitOptions as FitOptions
    from nugnn.fit_result import FitResult as FitResult
    from nugnn.graph_family import GraphFamily as GraphFamily
    from nugnn.history import Epoch as Epoch
    from nugnn.interrupt import Interrupted as Interrupted
    from nugnn.join import init as init
    from nugnn.models import GNN as GNN
    from nugnn.node_move import NodeMove as NodeMove
    from nugnn.node_move import move_nodes as move_nodes
    from nugnn.planning.imbalance import RebalanceRules as RebalanceRules
    from nugnn.planning.limits import DeviceLimits as DeviceLimits
    from nugnn.sample_family import SampleFamily as SampleFamily
    from nugnn.samples import BatchMean as BatchMean
    from nugnn.samples import as_samples as as_samples
    from nugnn.samples import intercept_samples as intercept_samples
    from nugnn.session import global_mean as global_mean
    from nugnn.session import global_sum as global_sum
    from nugnn.session import halo as halo
    from nugnn.session import intercept as intercept
    from nugnn.session import local_edges as local_edges
    from nugnn.session import shard as shard
    from nugnn.shard_graph import ShardGraph as ShardGraph
    from nugnn.trainer import Trainer as Trainer
    from nugnn.weights import load_weights as load_weights

_dgl_compat.install()

_EXPORTS = {
    "Balancer": "nugnn.balancer",
    "BatchMean": "nugnn.samples",
    "CheckReport": "nugnn.check",
    "DeviceLimits": "nugnn.planning.limits",
    "Epoch": "nugnn.history",
    "FitOptions": "nugnn.fit_options",
    "FitResult": "nugnn.fit_result",
    "GNN": "nugnn.models",
    "GraphData": "nugnn.datasets.graph_data",
    "GraphFamily": "nugnn.graph_family",
    "Interrupted": "nugnn.interrupt",
    "ModelDiffers": "nugnn.check",
    "ModelFails": "nugnn.check",
    "NodeEmbedding": "nugnn.embedding",
    "NodeMove": "nugnn.node_move",
    "RebalanceRules": "nugnn.planning.imbalance",
    "SampleFamily": "nugnn.sample_family",
    "ShardGraph": "nugnn.shard_graph",
    "SplitBatchSampler": "nugnn.batches",
    "TrainConfig": "nugnn.config",
    "Trainer": "nugnn.trainer",
    "as_edge_rows": "nugnn.declared_rows",
    "as_node_rows": "nugnn.declared_rows",
    "as_replicated": "nugnn.declared_rows",
    "as_rows_of": "nugnn.declared_rows",
    "as_samples": "nugnn.samples",
    "batch_loader": "nugnn.batches",
    "check": "nugnn.check",
    "check_model": "nugnn.check",
    "fit": "nugnn.fit",
    "global_mean": "nugnn.session",
    "global_sum": "nugnn.session",
    "halo": "nugnn.session",
    "init": "nugnn.join",
    "intercept": "nugnn.session",
    "intercept_samples": "nugnn.samples",
    "load_weights": "nugnn.weights",
    "local_edges": "nugnn.session",
    "move_nodes": "nugnn.node_move",
    "shard": "nugnn.session",
}
"""Public name -> module that defines it."""

__all__ = [
    "GNN",
    "Balancer",
    "BatchMean",
    "CheckReport",
    "DeviceLimits",
    "Epoch",
    "FitOptions",
    "FitResult",
    "GraphData",
    "GraphFamily",
    "Interrupted",
    "ModelDiffers",
    "ModelFails",
    "NodeEmbedding",
    "NodeMove",
    "RebalanceRules",
    "SampleFamily",
    "ShardGraph",
    "SplitBatchSampler",
    "TrainConfig",
    "Trainer",
    "__version__",
    "as_edge_rows",
    "as_node_rows",
    "as_replicated",
    "as_rows_of",
    "as_samples",
    "batch_loader",
    "check",
    "check_model",
    "comm",
    "datasets",
    "fit",
    "global_mean",
    "global_sum",
    "halo",
    "init",
    "intercept",
    "intercept_samples",
    "load_weights",
    "local_edges",
    "move_nodes",
    "shard",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version("nugnn")
    if name in ("comm", "datasets"):
        return importlib.import_module(f"nugnn.{name}")  # which makes it an attribute
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    setattr(sys.modules[__name__], name, value)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps a public function that has its module's name: ``nugnn.fit`` is callable after ``import nugnn.fit``."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and name in _EXPORTS:
            value = getattr(value, name)
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        # by name: a user's model that mentions nugnn travels to the workers
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package
