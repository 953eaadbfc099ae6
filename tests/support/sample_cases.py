"""Small data sets and models of samples."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from nugnn.networks import CNN, MLP, TransformerClassifier

# a few steps of small networks: sums of at most a few thousand terms in another order, each off by eps of its mass
FLOAT64_BOUND = 1e-10
NUM_CLASSES = 5


def make_data(kind: str, num_samples: int, dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, NUM_CLASSES, (num_samples,), generator=generator)
    if kind == "tokens":
        ids = torch.randint(1, 30, (num_samples, 7), generator=generator)
        lengths = torch.randint(1, 8, (num_samples, 1), generator=generator)
        return TensorDataset(ids * (torch.arange(7) < lengths), labels)
    return TensorDataset(torch.randn(num_samples, 2, 6, 6, generator=generator, dtype=dtype), labels)


def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "mlp":
        return MLP(72, NUM_CLASSES, hidden=16, layers=3, norm="batch", dropout=0.3)
    if name == "cnn":
        return CNN(2, NUM_CLASSES, widths=(4, 6), dropout=0.3)
    return TransformerClassifier(30, NUM_CLASSES, width=8, heads=2, max_length=7, dropout=0.2)
