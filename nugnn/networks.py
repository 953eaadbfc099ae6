"""Built-in models of samples: a perceptron, a small convolutional network, and a transformer encoder."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from nugnn._counted import counted


class MLP(nn.Module):
    """Linear layers with batch norm, ReLU and dropout between them; samples of any shape are flattened.

    Args:
        in_features: Values of a sample.
        num_classes: Width of the result.
        hidden: Width of the layers between.
        layers: Linear layers in all.
        norm: ``batch`` or ``none``.
        dropout: Probability, after each hidden layer.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        hidden: int = 128,
        layers: int = 2,
        norm: str = "none",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        widths = [in_features, *[hidden] * (layers - 1)]
        steps: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            norms = [nn.BatchNorm1d(after)] if norm == "batch" else []
            steps += [nn.Linear(before, after), *norms, nn.ReLU(), nn.Dropout(dropout)]
        self.layers = nn.Sequential(nn.Flatten(), *steps, nn.Linear(widths[-1], num_classes))

    def forward(self, x: Tensor) -> Tensor:
        """``(n, num_classes)`` logits of ``x (n, ...)``."""
        return self.layers(x)  # type: ignore[no-any-return]


class CNN(nn.Module):
    """Pairs of 3 x 3 convolutions with batch norm, each followed by a maximum over 2 x 2, then one linear layer.

    The linear layer reads the mean of each channel in each of ``regions`` x ``regions`` parts of the image, so that it
    knows roughly where something was seen. Images may be of any size.

    Args:
        channels: Of an image.
        num_classes: Width of the result.
        widths: Channels after each pair.
        regions: Parts along each side; 1 for the mean over the whole image.
        dropout: Probability, before the last layer.

    Raises:
        ValueError: ``regions`` is below 1.
    """

    def __init__(
        self,
        channels: int,
        num_classes: int,
        *,
        widths: Sequence[int] = (32, 64),
        regions: int = 2,
        dropout: float = 0.25,
    ) -> None:
        super().__init__()
        if regions < 1:
            raise ValueError(f"regions is {regions}, must be 1 or more")
        steps: list[nn.Module] = []
        for before, after in zip([channels, *widths], widths, strict=False):
            for first in (before, after):
                steps += [nn.Conv2d(first, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
            steps.append(nn.MaxPool2d(2, ceil_mode=True))
        self.features, self.regions = nn.Sequential(*steps), regions
        self.dropout = nn.Dropout(dropout)
        self.classify = nn.Linear(widths[-1] * regions**2, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """``(n, num_classes)`` logits of images ``x (n, channels, height, width)``."""
        return self.classify(self.dropout(self._means(self.features(x)).flatten(1)))  # type: ignore[no-any-return]

    def _means(self, x: Tensor) -> Tensor:
        """``(n, channels, regions, regions)``; of an image with fewer pixels than regions, some are zero."""
        # torch's adaptive mean adds its gradients on a GPU in no fixed order, this one in a fixed one
        sides = x.shape[-2:]
        size = [-(-side // self.regions) for side in sides]
        means = F.avg_pool2d(x, size, ceil_mode=True)
        missing = [self.regions - side for side in means.shape[-2:]]
        return F.pad(means, (0, missing[1], 0, missing[0])) if any(missing) else means


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.project, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, is_token: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = (
            part.view(n, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.project(x).chunk(3, dim=-1)
        )
        mask = is_token[:, None, None, :]
        if self.training and self.dropout.p > 0:
            scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
            weights = self.dropout(scores.masked_fill(~mask, -torch.inf).softmax(-1))
            mixed = weights @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.merge(mixed.transpose(1, 2).reshape(n, length, width))  # type: ignore[no-any-return]


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = _Attention(width, heads, dropout)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.ModuleList(nn.Dropout(dropout) for _ in range(3))

    def forward(self, x: Tensor, is_token: Tensor) -> Tensor:
        x = x + self.dropout[0](self.attention(self.before(x), is_token))
        hidden = self.dropout[1](F.gelu(self.widen(self.between(x))))
        return x + self.dropout[2](self.narrow(hidden))  # type: ignore[no-any-return]


class TransformerClassifier(nn.Module):
    """A pre-norm transformer encoder over tokens; the mean or maximum over a sample's tokens is classified.

    Args:
        num_tokens: Size of the vocabulary; 0 is padding.
        num_classes: Width of the result.
        width: Of a token, a multiple of ``heads``.
        heads: Of the attention.
        layers: Blocks.
        max_length: Longest sample, in tokens.
        dropout: Probability, of embeddings, attention weights and each block's results.
        convolution: Tokens that a convolution before the blocks joins, an odd number; 0 for none.
        pooling: ``mean`` or ``max`` over tokens.
        token_dropout: Probability of replacing a token by the unknown one, number 1, in training: otherwise it would
            mean nothing to the model where words of further texts are unknown.

    Raises:
        ValueError: ``width`` is no multiple of ``heads``, ``convolution`` is even, or there is no such ``pooling``.

    Sources: Vaswani et al., "Attention Is All You Need", NeurIPS 2017; norm before each part as in Xiong et al., "On
    Layer Normalization in the Transformer Architecture", ICML 2020.
    """

    def __init__(
        self,
        num_tokens: int,
        num_classes: int,
        *,
        width: int = 128,
        heads: int = 4,
        layers: int = 2,
        max_length: int = 128,
        dropout: float = 0.1,
        convolution: int = 3,
        pooling: str = "mean",
        token_dropout: float = 0.1,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"a width of {width} cannot be divided among {counted(heads, 'head')}; choose a multiple")
        if convolution < 0 or (convolution and convolution % 2 == 0):
            raise ValueError(
                f"a convolution over {counted(convolution, 'token')} has no middle; give an odd number, or 0 for none"
            )
        if pooling not in ("mean", "max"):
            raise ValueError(f"pooling is {pooling!r}, must be mean or max")
        self.pooling, self.token_dropout = pooling, nn.Dropout(token_dropout)
        self.convolution = nn.Conv1d(width, width, convolution, padding=convolution // 2) if convolution else None
        self.tokens, self.places = nn.Embedding(num_tokens, width, padding_idx=0), nn.Embedding(max_length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(_Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.classify = nn.LayerNorm(width), nn.Linear(width, num_classes)
        # torch's own spread of 1 would drown what the blocks add; which token matters more than where it is
        nn.init.normal_(self.tokens.weight, std=0.3)
        nn.init.normal_(self.places.weight, std=0.02)
        with torch.no_grad():
            self.tokens.weight[0] = 0

    def forward(self, ids: Tensor) -> Tensor:
        """``(n, num_classes)`` logits of token numbers ``ids (n, length)``, 0 behind the end of a sample."""
        is_token = ids != 0
        if self.training and self.token_dropout.p > 0:  # by the sample's own mask, as all dropout is
            is_kept = self.token_dropout(is_token.to(self.tokens.weight.dtype)) > 0
            ids = ids.masked_fill(is_token & ~is_kept, 1)
        x = self.tokens(ids)
        if self.convolution is not None:
            x = x + F.gelu(self.convolution(x.transpose(1, 2))).transpose(1, 2)
        x = self.dropout(x + self.places.weight[: ids.shape[1]])
        for block in self.blocks:
            x = block(x, is_token)
        x, is_padding = self.norm(x), ~is_token[..., None]
        if self.pooling == "max":
            return self.classify(x.masked_fill(is_padding, -torch.inf).amax(1))  # type: ignore[no-any-return]
        x = x.masked_fill(is_padding, 0).sum(1) / is_token.sum(1, keepdim=True).clamp(min=1)
        return self.classify(x)  # type: ignore[no-any-return]
