"""A folder that ``nugnn train`` has written, opened again: its settings, its graph, its model."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from nugnn._counted import counted
from nugnn.checkpoint import CheckpointError
from nugnn.comm.groups import Ranks
from nugnn.config import TrainConfig
from nugnn.datasets.graph_data import GraphData
from nugnn.graph_run import build_model, prepare
from nugnn.metrics import evaluate_rows
from nugnn.settings_file import read_config
from nugnn.weights import load_weights

_NEEDED = ("config.yaml", "result.json", "model.safetensors")


def finished_folder(folder: str | Path) -> Path:
    """The folder of a run that has ended.

    Raises:
        ValueError: It holds no finished run.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; give what --out of nugnn train named")
    lacking = [name for name in _NEEDED if not (folder / name).is_file()]
    if lacking:
        known = sorted(path.parent.name for path in folder.parent.glob("*/model.safetensors"))
        hint = f"; finished runs beside it: {', '.join(known[:5])}" if known else ""
        raise ValueError(f"{folder} holds no finished run: {' and '.join(lacking)} missing{hint}")
    return folder


@dataclass(frozen=True)
class FinishedRun:
    """A run with its best model.

    Args:
        folder: What ``--out`` named.
        config: The settings it ran with.
    """

    folder: Path
    config: TrainConfig

    @classmethod
    def open(cls, folder: str | Path, **changes: Any) -> FinishedRun:
        """Read the settings of a run.

        Args:
            folder: What ``--out`` named.
            **changes: Settings to replace, None leaves one as it was: ``dataset`` (which takes the run's ``num_nodes``
                with it), ``data_dir``, ``num_nodes``, ``split``.

        Raises:
            ValueError: The folder holds no finished run.
        """
        folder = finished_folder(folder)
        config = read_config(folder / "config.yaml")
        if not isinstance(config, TrainConfig):
            raise ValueError(f"{folder} is a run on samples, and this takes one on a graph")
        given = {name: value for name, value in changes.items() if value is not None}
        if "dataset" in given:
            given = {"num_nodes": None} | given
        return cls(folder, config.replaced(**given))

    def load_data(self) -> GraphData:
        """The graph, prepared as for training; one without labels has as many classes as the model."""
        data = prepare(self.config)
        if data.labels is not None:
            return data
        result = json.loads((self.folder / "result.json").read_text(encoding="utf-8"))
        return dataclasses.replace(data, num_classes=int(result["num_classes"]))

    def load_model(self, data: GraphData) -> nn.Module:
        """The model with the weights of the best validation epoch, in evaluation mode.

        Raises:
            ValueError: Weights and model, or model and graph, do not fit.
        """
        model = build_model(self.config, data)
        try:
            load_weights(model, self.folder / "model.safetensors")
        except CheckpointError as error:
            raise ValueError(self._said_of(data, error)) from error
        return model.eval()

    def _said_of(self, data: GraphData, error: CheckpointError) -> str:
        """Why the weights do not fit the model that this graph asks for."""
        own = f"{counted(data.num_features, 'feature')} and {counted(data.num_classes, 'class', 'classes')}"
        result = json.loads((self.folder / "result.json").read_text(encoding="utf-8"))
        features, classes = int(result["num_features"]), int(result["num_classes"])
        if (features, classes) == (data.num_features, data.num_classes):
            return f"{error}. Graph {data.name!r} has {counted(data.num_nodes, 'node')}, {own}"
        trained = f"{counted(features, 'feature')} and {counted(classes, 'class', 'classes')}"
        return (
            f"{self.folder} was trained on {result['dataset']!r} with {trained}, and {data.name!r} has {own}; give a "
            "graph with as many as it was trained with"
        )


def scores(data: GraphData, logits: Tensor) -> dict[str, float]:
    """The metric of ``data`` on each split; NaN for one without nodes.

    Args:
        data: With labels.
        logits: ``(num_nodes, C)``.

    Raises:
        ValueError: The graph has no labels, or none of its nodes is in a split.
    """
    if data.labels is None:
        raise ValueError(f"{data.name}: the graph has no labels to compare with; use nugnn predict")
    if not any(len(nodes) for nodes in data.split):
        raise ValueError(
            f"{data.name}: the graph has labels, and no node for training, validation or test to compare them on; give "
            "it masks, or use nugnn predict"
        )
    labels = data.labels
    splits = dict(zip(("train", "val", "test"), data.split, strict=True))
    return {name: evaluate_rows(data.metric, logits[nodes], labels[nodes], Ranks()) for name, nodes in splits.items()}
