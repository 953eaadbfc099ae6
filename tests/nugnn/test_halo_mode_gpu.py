"""Stale and sampled halo rows between two GPUs: the losses of two CPUs, and the same bits again."""

from __future__ import annotations

import pytest
import torch

import nugnn
from exactness import NUM_CLASSES, NUM_FEATURES, make_graph
from nugnn.models import GNN

pytestmark = pytest.mark.gpu


def _losses(kind: str, device: str, mode: str) -> list[float]:
    torch.manual_seed(0)
    model = GNN(kind, NUM_FEATURES, NUM_CLASSES, hidden=8, dropout=0.2)
    options = {"workers": 2, "partitioner": "random", "epochs": 6, "check": False, "seed": 3}
    return [epoch.loss for epoch in nugnn.fit(model, make_graph(), device=device, halo_mode=mode, **options).history]


@pytest.mark.parametrize(("kind", "mode"), [("sage", "stale"), ("gat", "stale"), ("sage", "sampled:0.5")])
def test_losses_are_those_of_the_same_run_again_and_of_cpus(kind: str, mode: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    there = _losses(kind, "cuda", mode)
    assert there == _losses(kind, "cuda", mode)
    exact = _losses(kind, "cuda", "exact")
    assert (there[0] == exact[0]) == (mode == "stale") and there != exact  # the first epoch is real
    if kind == "sage":  # fused attention makes the scores of stale rows where they are read, with today's weights
        # float32 on both sides, sums in another order, six steps of Adam
        assert there == pytest.approx(_losses(kind, "cpu", mode), rel=1e-3)
