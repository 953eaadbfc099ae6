"""The model and the graph that a call of a script is given, checked and brought into one form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from nugnn.datasets.graph_data import GraphData


def checked_inputs(caller: str, model: Any, data: Any) -> GraphData:
    """The graph as `GraphData`.

    Args:
        caller: Name of the function that was called, for errors.
        model: What was given as the model.
        data: What was given as the graph.

    Raises:
        TypeError: One of them is something else; says what was meant.
        ValueError: The ``DGLGraph`` cannot be converted.
    """
    if not isinstance(model, nn.Module):
        hint = f"; give one of its instances, {model.__name__}(...)" if isinstance(model, type) else ""
        raise TypeError(f"{caller}: the model is {model!r}, not a torch.nn.Module{hint}")
    if isinstance(data, (str, Path)):
        raise TypeError(f"{caller}: the data is a name or path; give nugnn.datasets.load({str(data)!r})")
    if isinstance(data, GraphData):
        return data
    if not hasattr(data, "is_homogeneous"):
        raise TypeError(
            f"{caller}: the data is a {type(data).__name__}, neither a graph nor a map-style data set, which has "
            "len(data) and gives pairs (x, label) as data[i]"
        )
    return GraphData.from_dgl(data)
