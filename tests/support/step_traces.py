"""Traces of small steps, and times that are easy to add up, for tests of predictions."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from nugnn.models import GNN
from nugnn.networks import MLP
from nugnn.planning.after_rest import AfterRest
from nugnn.planning.operator_costs import tensor_bytes
from nugnn.planning.trace import StepTrace
from nugnn.planning.trace_records import OperatorRecord, Storage
from nugnn.traced_step import trace_graph_step, trace_sample_step

IN, CLASSES = 20, 5


@functools.cache
def graph_trace(name: str, ranks: int = 2) -> StepTrace:
    """Of two layers with 16 hidden values, on a CPU."""
    torch.manual_seed(0)
    aggregator = {"aggregator": "mean"} if name == "sage" else {}
    model = GNN(name, IN, CLASSES, layers=2, hidden=16, **aggregator)
    return trace_graph_step(model, in_features=IN, num_classes=CLASSES, ranks=ranks)


@functools.cache
def sample_trace(ranks: int = 2, hidden: int = 700) -> StepTrace:
    """Of an MLP whose gradients travel in two buckets if it is wide."""
    torch.manual_seed(0)
    return trace_sample_step(MLP(30, CLASSES, hidden=hidden, layers=4), [torch.zeros(30)], num_classes=5, ranks=ranks)


class LinearTimes:
    """Seconds for each byte that an operator makes, and for each operator; linear in all counts.

    Args:
        of_byte: Seconds.
        of_operator: Seconds.
        launch_seconds: Of a GPU's host.
        threads: Of a CPU.
    """

    def __init__(self, of_byte: float, of_operator: float = 0.0, launch_seconds: float = 0.0, threads: int = 1) -> None:
        self.of_byte, self.of_operator, self.launch_seconds = of_byte, of_operator, launch_seconds
        self.captured_launch_seconds: float | None = None
        self.after_rest: AfterRest | None = None
        self.multiprocessors = threads

    def seconds(self, record: OperatorRecord, storages: Sequence[Storage]) -> float:
        """See `nugnn.planning.operator_times.OperatorTimes`."""
        if record.kind == "metadata":
            return 0.0
        edges = record.sizes.get("edges", 0)
        assert isinstance(edges, int)
        return self.of_operator + self.of_byte * (edges + sum(tensor_bytes(x) for x in record.outputs))


def times_of_all(trace: StepTrace, times: LinearTimes) -> float:
    """Seconds of all operators of a trace whose dimensions are numbers, one after the other."""
    return sum(times.seconds(record, trace.storages) for record in trace.operators)
