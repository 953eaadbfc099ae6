"""On a GPU: every DGL module, a whole run, and workers that share one card say what the CPU says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nugnn
from conformance import compare, run_shards
from conformance_cases import all_cases
from exactness import NUM_CLASSES, NUM_FEATURES, make_graph
from nugnn.models import GNN

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CASES = all_cases()
# Float64, six steps on 61 nodes, sums in another order: as in test_fit.
FLOAT64_BOUND = 1e-10


@pytest.mark.filterwarnings("ignore::UserWarning")  # DGL's own, about defaults
@pytest.mark.parametrize("name", sorted({case.name for case in CASES}))
def test_parts_on_the_gpu_equal_one_part_there_dgl_and_the_cpu(ranks: Any, name: str) -> None:
    device = torch.device("cuda", 0)
    cases = [case for case in CASES if case.name == name]
    for outcome in compare(cases, lambda jobs: ranks.run(3, run_shards, jobs, device), device):
        job = outcome.job
        where = f"{name} ({job.case.options}) on {job.graph_name} with dropout {job.drop}"
        assert not outcome.error, f"{where}: {outcome.error}"
        assert outcome.to_one[0] <= job.case.bound, f"{where}: {outcome.to_one}"
        if outcome.to_dgl is not None:
            assert outcome.to_dgl[0] <= job.case.bound, f"{where}: {outcome.to_dgl}"


def _train(kind: str, **options: Any) -> nugnn.FitResult:
    torch.manual_seed(0)
    model = GNN(kind, NUM_FEATURES, NUM_CLASSES, hidden=8, norm="batch").double()
    return nugnn.fit(model, make_graph(), epochs=6, make_optimizer=_sgd, check=False, seed=3, **options)


def _sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("kind", ["gcn", "sage", "gat", "gatv2", "gin"])
def test_a_run_on_the_gpu_equals_one_on_the_cpu(kind: str) -> None:
    on_cpu, on_gpu = _train(kind, device="cpu"), _train(kind, device="cuda")
    assert "cpu" not in on_gpu.rank_reports[0]["device"] and on_gpu.logits.device.type == "cpu"
    gap = float((on_cpu.logits - on_gpu.logits).abs().max() / on_cpu.logits.abs().max())
    assert gap <= FLOAT64_BOUND


@pytest.mark.parametrize("kind", ["gcn", "sage", "gatv2"])
@pytest.mark.parametrize("device", ["cuda", "cuda:0,cpu,cuda:0"])
def test_workers_that_share_a_card_or_mix_with_the_cpu_equal_one(device: str, kind: str) -> None:
    one = _train(kind, device="cpu")
    three = _train(kind, device=device, workers=3, shares=[0.5, 0.3, 0.2])
    gap = float((one.logits - three.logits).abs().max() / one.logits.abs().max())
    assert gap <= FLOAT64_BOUND


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_cards_equal_one() -> None:
    one = _train("gatv2", device="cpu")
    two = _train("gatv2", device="cuda", workers=2, shares=[0.6, 0.4])
    gap = float((one.logits - two.logits).abs().max() / one.logits.abs().max())
    assert gap <= FLOAT64_BOUND
