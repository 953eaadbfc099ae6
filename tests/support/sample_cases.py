"""Small data sets and models of samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
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


class TorchAttention(nn.Module):
    """Attention as torch.nn and torch.nn.functional have it, with dropout of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(30, 8, padding_idx=0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.pool = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.classify = nn.Linear(8, NUM_CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.encoder(self.tokens(ids), src_key_padding_mask=ids == 0)
        x = x + self.pool(x, x, x, attn_mask=torch.ones(7, 7, device=x.device).triu(1).bool())[0]
        pair = x.unflatten(2, (2, 4)).transpose(1, 2)
        p = 0.4 if self.training else 0.0
        mixed = F.scaled_dot_product_attention(pair, pair, pair, dropout_p=p, is_causal=True)
        return self.classify(mixed.transpose(1, 2).flatten(2).mean(1))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """A text classifier as it is usually written, with dropout of the last states and of every step.

    Args:
        network: ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN``.
        packed: Whether padding is left out, by length.
        **options: Of the network.
    """

    def __init__(self, network: type[nn.RNNBase] = nn.LSTM, *, packed: bool = False, **options: Any) -> None:
        super().__init__()
        self.tokens = nn.Embedding(30, 8, padding_idx=0)
        self.recurrent: Any = network(8, 6, **options)
        self.dropout = nn.Dropout(0.4)
        width = options.get("proj_size", 0) or 6
        self.classify = nn.Linear(width * (3 if options.get("bidirectional") else 2), NUM_CLASSES)
        self.packed = packed

    def forward(self, ids: Tensor) -> Tensor:
        batch_first = self.recurrent.batch_first
        x, axis = self.tokens(ids), 1 if batch_first else 0
        x = x if batch_first else x.transpose(0, 1)
        if self.packed:
            lengths = (ids > 0).sum(1).cpu()
            x = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=batch_first, enforce_sorted=False)
            x = x._replace(data=self.dropout(x.data))
        out, h = self.recurrent(x)
        if self.packed:
            out = nn.utils.rnn.pad_packed_sequence(out, batch_first=batch_first)[0]
        h = h[0] if isinstance(h, tuple) else h
        last = torch.cat([h[-2], h[-1]], dim=1) if self.recurrent.bidirectional else h[-1]
        steps = self.dropout(out).sum(axis)[:, : h.shape[2]]
        return self.classify(self.dropout(torch.cat([last, steps], 1)))  # type: ignore[no-any-return]


class Cells(nn.Module):
    """Cells called step by step."""

    def __init__(self, cell: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.tokens, self.cell = nn.Embedding(30, 8), cell(8, 6)  # type: ignore[call-arg]
        self.dropout, self.classify = nn.Dropout(0.4), nn.Linear(6, NUM_CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        state: Any = None
        for step in self.tokens(ids).unbind(1):
            state = self.cell(self.dropout(step), state)
        return self.classify(self.dropout(state[0] if isinstance(state, tuple) else state))  # type: ignore[no-any-return]


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Recurrent(batch_first=True),
    "lstm-deep": lambda: Recurrent(batch_first=True, num_layers=2, bidirectional=True),
    "lstm-projected": lambda: Recurrent(bidirectional=True, proj_size=3),
    "lstm-packed": lambda: Recurrent(batch_first=True, bidirectional=True, packed=True),
    "gru": lambda: Recurrent(nn.GRU, num_layers=2),
    "gru-packed": lambda: Recurrent(nn.GRU, num_layers=2, packed=True),
    "rnn": lambda: Recurrent(nn.RNN, batch_first=True, nonlinearity="relu"),
    "lstm-cell": lambda: Cells(nn.LSTMCell),
    "gru-cell": lambda: Cells(nn.GRUCell),
    "rnn-cell": lambda: Cells(nn.RNNCell),
}


class InstanceNorms(nn.Module):
    """Instance norm with running statistics and without, and samples dropped whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3)
        self.tracking = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        self.norm = nn.InstanceNorm2d(4, affine=True)
        self.classify = nn.Linear(4, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tracking(self.first(x)).relu()
        x = x * F.dropout(torch.ones_like(x[:, :1, :1, :1]), 0.3, self.training)
        return self.classify(self.norm(self.second(x)).amax((2, 3)))  # type: ignore[no-any-return]


def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name in RECURRENT:
        return RECURRENT[name]()
    if name == "instance-norm":
        return InstanceNorms()
    if name == "mlp":
        return MLP(72, NUM_CLASSES, hidden=16, layers=3, norm="batch", dropout=0.3)
    if name == "cnn":
        return CNN(2, NUM_CLASSES, widths=(4, 6), dropout=0.3)
    if name == "torch-attention":
        return TorchAttention()
    how = {"width": 8, "heads": 2, "max_length": 7, "dropout": 0.2}
    if name == "transformer-max":
        how |= {"convolution": 3, "pooling": "max", "token_dropout": 0.3}
    return TransformerClassifier(30, NUM_CLASSES, **how)  # type: ignore[arg-type]
