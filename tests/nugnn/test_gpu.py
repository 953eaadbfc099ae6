"""On a GPU: every DGL module, a whole run, and workers that share one card say what the CPU says."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["gcn", "sage", "gat", "gatv2", "gin"])
def test_an_epoch_does_not_wait_for_the_gpu(kind: str, precision: str) -> None:
    """Until the loss is read: torch reports each of its calls that makes the host wait for the GPU."""
    data = make_graph(dtype=torch.float32)
    graph = nugnn.shard(data, device="cuda")
    rows = torch.argsort(graph.global_node_ids)
    torch.manual_seed(0)
    model = GNN(kind, NUM_FEATURES, NUM_CLASSES, hidden=8, norm="batch", dropout=0.3).to("cuda")
    family = nugnn.GraphFamily(model, graph, {"train": rows[data.train_nodes.cuda()]}, precision=precision, seed=3)
    trainer = nugnn.Trainer(family, make_optimizer=_adam, cuda_graphs="off", clip_norm=1.0)
    for _ in range(3):  # kernels are compiled, what the graph keeps is made
        trainer.train_epoch()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):  # it would be noticed
            graph.ndata["feat"].sum().item()
        losses = [trainer.train_epoch() for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(math.isfinite(loss) for loss in losses)


def _adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, fused=True)


# -- what is kept for backward -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gcn", "sage", "gat", "gatv2", "gin"])
def test_layers_that_run_again_change_no_bit_on_the_gpu(kind: str) -> None:
    kept, again = _train(kind, device="cuda"), _train(kind, device="cuda", activations="recompute")
    assert torch.equal(kept.logits, again.logits)
    assert [epoch.loss for epoch in kept.history] == [epoch.loss for epoch in again.history]


@pytest.mark.parametrize("device", ["cuda", "cuda:0,cpu,cuda:0"])
@pytest.mark.parametrize("activations", ["recompute", "offload"])
def test_workers_that_keep_less_equal_one(device: str, activations: str) -> None:
    one = _train("gatv2", device="cpu")
    three = _train("gatv2", device=device, workers=3, shares=[0.5, 0.3, 0.2], activations=activations)
    gap = float((one.logits - three.logits).abs().max() / one.logits.abs().max())
    assert gap <= FLOAT64_BOUND


def _large_graph() -> nugnn.GraphData:
    generator = torch.Generator().manual_seed(0)
    num_nodes = 200_000
    src, dst = torch.randint(0, num_nodes, (2, 5 * num_nodes), generator=generator)
    return nugnn.GraphData(
        name="large",
        num_nodes=num_nodes,
        src=src,
        dst=dst,
        features=torch.randn(num_nodes, 16, generator=generator),
        labels=torch.randint(0, 8, (num_nodes,), generator=generator),
        num_classes=8,
        train_nodes=torch.arange(num_nodes),
        val_nodes=torch.arange(0),
        test_nodes=torch.arange(0),
    )


@pytest.mark.parametrize("kind", ["sage", "gat"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_less_is_kept_on_the_gpu_and_no_bit_changes(kind: str, precision: str) -> None:
    data = _large_graph()

    def train(activations: str) -> nugnn.FitResult:
        torch.manual_seed(0)
        heads = 2 if kind == "gat" else 1
        model = GNN(kind, 16, 8, layers=10, hidden=64 // heads, heads=heads, dropout=0.3)
        options = {"epochs": 3, "device": "cuda", "check": False, "order": "none", "precision": precision}
        return nugnn.fit(model, data, activations=activations, **options)

    kept, again, moved = (train(activations) for activations in ("keep", "recompute", "offload"))
    for other in (again, moved):
        assert torch.equal(kept.logits, other.logits)
        assert [epoch.loss for epoch in kept.history] == [epoch.loss for epoch in other.history]
    peaks = [result.rank_reports[0]["peak_memory_bytes"] for result in (kept, again, moved)]
    seconds = [min(epoch.seconds["epoch"] for epoch in result.history) for result in (kept, again, moved)]
    print(f"{kind} {precision}: keep, recompute, offload: {peaks} bytes, {seconds} s")
    # layers 1 to 8 keep 64 columns of their input, GAT of an operand inside as well. The insides of one layer come back
    # at a time, as what moved to the host does: two tensors, and as many gradients beside them
    activation_bytes = 200_000 * 64 * (2 if precision == "bf16" else 4)
    num_inside = {"sage": 0, "gat": 1}[kind]
    assert peaks[0] - peaks[1] >= (8 * num_inside - 2) * activation_bytes
    assert peaks[0] - peaks[2] >= (8 * (1 + num_inside) - 4) * activation_bytes


def test_torch_s_own_checkpoint_on_the_gpu_changes_no_bit() -> None:
    """Backward runs on the thread of the step, so that the layers that run again find its interceptor."""
    device = torch.device("cuda", 0)
    graph = nugnn.shard(make_graph(), device="cuda")
    results = []
    for again in (False, True):
        torch.manual_seed(0)
        model = GNN("gatv2", NUM_FEATURES, NUM_CLASSES, hidden=8, heads=2, attention_dropout=0.3).double().to(device)
        interceptor = nugnn.intercept(model, graph, seed=1)
        with interceptor.step(0):
            h = graph.ndata["feat"]
            for layer in model.layers:
                h = checkpoint(layer, graph, h, use_reentrant=False) if again else layer(graph, h)
                h = h.flatten(1)
            h.square().sum().backward()
        results.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
