"""The most memory of a step by torch's allocator: what the trace has, where torch's kernels take nothing inside."""

from __future__ import annotations

import pytest
import torch

from nugnn.measured_memory import peak_of_step
from nugnn.models import GNN
from nugnn.networks import MLP
from nugnn.planning.part_sizes import PartSizes
from nugnn.traced_step import graph_trainer, run_steps, sample_trainer, trace_graph_step, trace_sample_step


def test_of_a_graph() -> None:
    torch.manual_seed(0)
    model, sizes = GNN("sage", 20, 5, hidden=16, layers=2), PartSizes(inner=2003, edges=9001, train=700)
    trace = trace_graph_step(model, in_features=20, num_classes=5, ranks=1).at(sizes)
    trainer = graph_trainer(model, sizes, in_features=20, num_classes=5, ranks=1)
    run_steps(trainer, 2)
    assert peak_of_step(trainer, trace) == pytest.approx(trace.peak_bytes(), rel=0.01)


def test_of_samples() -> None:
    torch.manual_seed(0)
    model, sample, sizes = MLP(300, 5, hidden=200), [torch.zeros(300)], PartSizes(batch=301)
    trace = trace_sample_step(model, sample, num_classes=5).at(sizes)
    trainer = sample_trainer(model, sample, sizes, num_classes=5)
    run_steps(trainer, 2)
    before = peak_of_step(trainer, trace)
    assert before == pytest.approx(trace.peak_bytes(), rel=0.01)
    held = torch.zeros(1_000_000)  # of somebody else
    assert peak_of_step(trainer, trace) == before
    del held
