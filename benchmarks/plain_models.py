"""SAGE, GCN and GAT in plain torch on cuSPARSE, as an expert would write them today: the baseline of an epoch.

What makes them good baselines:

* CSR with int32 indices, built once; the transposed matrix for the backward built once, too (torch would transpose in
  every backward). The benchmark graphs are symmetric, so both share one pattern and only the values are stored twice.
* On a GPU each of these matrices is multiplied by the fastest of torch's own call and cuSPARSE's ALG2 and ALG3 with
  their analysis kept, for each width, as found out before the first epoch.
* The mean's ``1 / degree`` and GCN's ``1 / sqrt(d_u d_v)`` are values of the matrix: they cost no pass of their own.
* A layer multiplies with the weight first where that makes the rows narrower, last where it makes them wider.
* Under autocast the features are stored in bfloat16 and aggregated in it.
* GAT aggregates head by head with cuSPARSE, each product by the fastest call, too: its analysis is one of the pattern,
  which all heads and epochs share. Heads have widths that are multiples of 16. Its softmax scatters, with a
  hand-written backward that keeps only the result; gradients of scores are cuSPARSE's sampled products (SDDMM), so no
  ``(E, H, D)`` tensor exists.

Parameters have the names and shapes of ``dgl.nn``, so a state of ``nugnn.GNN`` loads and the results can be compared.

Shape suffixes: N nodes, E edges, H heads, D features of a head.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from baselines import Csr
from cusparse import CuSparseError, CuSparseProduct
from harness import time_ms
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

Product = Callable[[Tensor], Tensor]
WeightedProduct = Callable[[Tensor, Tensor], Tensor]
Way = TypeVar("Way", bound=Callable[..., Tensor])


class Adjacency:
    """A symmetric graph's matrices in CSR, by normalisation and dtype, each with its transpose; made once.

    Args:
        csr: The graph; in-edges and out-edges of a node are the same lists.
    """

    def __init__(self, csr: Csr) -> None:
        self.csr = csr
        self._matrices: dict[tuple[str, torch.dtype, bool], Tensor] = {}
        self._products: dict[tuple[str, torch.dtype, bool, int], Product] = {}
        self._weighted: dict[tuple[torch.dtype, int], WeightedProduct] = {}
        self._reverse: Tensor | None = None
        self._destinations: Tensor | None = None

    def matrix(self, norm: str, dtype: torch.dtype, is_transposed: bool) -> Tensor:
        """The CSR tensor of ``norm``: ``mean`` or ``both``."""
        key = (norm, dtype, is_transposed and norm == "mean")  # the other is symmetric
        if key not in self._matrices:
            inverse = 1 / self.csr.degrees.clamp(min=1).double()
            if norm == "mean":
                values = inverse.to(dtype)
                per_edge = values[self.csr.indices] if is_transposed else values[self.destinations]
            else:
                root = inverse.sqrt().float()
                per_edge = (root[self.csr.indices] * root[self.destinations]).to(dtype)
            self._matrices[key] = self.with_values(per_edge)
        return self._matrices[key]

    def with_values(self, values_E: Tensor) -> Tensor:
        """A CSR tensor of this pattern."""
        size = (self.csr.num_nodes, self.csr.num_nodes)
        return torch.sparse_csr_tensor(self.csr.indptr, self.csr.indices, values_E, size, check_invariants=False)

    @property
    def destinations(self) -> Tensor:
        """``(E,)`` int32 destination of each edge."""
        if self._destinations is None:
            nodes = torch.arange(self.csr.num_nodes, dtype=torch.int32, device=self.csr.indices.device)
            self._destinations = torch.repeat_interleave(nodes, self.csr.degrees, output_size=self.csr.num_edges)
        return self._destinations

    @property
    def reverse(self) -> Tensor:
        """``(E,)`` int32: the edge v -> u of each edge u -> v; also where the transposed matrix finds its values."""
        if self._reverse is None:
            # edges are ordered by (destination, source): sorted by source first, they are the reversed ones in order
            order = torch.argsort(self.csr.indices, stable=True)
            self._reverse = order.int()
        return self._reverse

    def prepare(self, norm: str, dtype: torch.dtype, widths: Iterable[int] = ()) -> None:
        """Make a matrix and its transpose now, and forget what only their making needed.

        On a GPU also find out the fastest way to multiply each with rows of these widths.
        """
        widths = set(widths)
        for is_transposed in (False, True):
            matrix = self.matrix(norm, dtype, is_transposed)
            for width in widths if matrix.is_cuda else ():
                key = (norm, dtype, is_transposed and norm == "mean", width)
                if key not in self._products:
                    x = torch.ones(len(matrix), width, dtype=dtype, device=matrix.device)
                    self._products[key] = fastest_product(matrix, x)
        self._destinations = None

    def prepare_weighted(self, dtype: torch.dtype, widths: Iterable[int]) -> None:
        """Find out the fastest way of `multiply_weighted` for rows of these widths on a GPU."""
        for width in set(widths) if self.csr.indices.is_cuda else ():
            x = torch.ones(self.csr.num_nodes, width, dtype=dtype, device=self.csr.indices.device)
            values = torch.ones(self.csr.num_edges, dtype=dtype, device=x.device)
            self._weighted[dtype, width] = fastest_weighted_product(self, values, x)

    def multiply(self, norm: str, x: Tensor, is_transposed: bool) -> Tensor:
        """The matrix of ``norm`` with ``x``, in the way found out by `prepare`."""
        product = self._products.get((norm, x.dtype, is_transposed and norm == "mean", x.shape[1]))
        return self.matrix(norm, x.dtype, is_transposed) @ x if product is None else product(x)

    def multiply_weighted(self, values_E: Tensor, x: Tensor) -> Tensor:
        """The matrix with these values in its pattern, with ``x``, in the way found out by `prepare_weighted`."""
        product = self._weighted.get((x.dtype, x.shape[1]))
        return self.with_values(values_E) @ x if product is None else product(values_E, x)


def fastest_product(matrix: Tensor, x: Tensor) -> Product:
    """The fastest way to multiply a CSR ``matrix`` with rows like ``x``: torch's call, or cuSPARSE's ALG2 or ALG3."""
    ways: list[Product] = [lambda x: matrix @ x]
    ways += analysed(matrix.crow_indices(), matrix.col_indices(), matrix.values(), x)
    return fastest(ways, x)


def fastest_weighted_product(adjacency: Adjacency, values_E: Tensor, x: Tensor) -> WeightedProduct:
    """As `fastest_product`, of a matrix whose values change from call to call.

    Raises:
        RuntimeError: An analysed product is not that of values which it gets later.
    """
    ways: list[WeightedProduct] = [lambda values_E, x: adjacency.with_values(values_E) @ x]
    others = torch.rand(len(values_E), device=x.device).to(x.dtype)
    expected = adjacency.with_values(others.float()) @ x.float()
    for product in analysed(adjacency.csr.indptr, adjacency.csr.indices, values_E, x):
        # bfloat16 sums of ALG2 are off by up to 4 % of the largest; with the first values, ones, by half of it
        if float((product(x, values=others).float() - expected).abs().max() / expected.max()) > 0.1:
            raise RuntimeError("an analysed product keeps the values that it has analysed")
        ways.append(lambda values_E, x, product=product: product(x, values=values_E))
    return fastest(ways, others, x)


def analysed(indptr: Tensor, indices: Tensor, values_E: Tensor, x: Tensor) -> Iterator[CuSparseProduct]:
    """CuSPARSE's ALG2 and ALG3 with their analysis, where they take the type."""
    for algorithm in ("alg2", "alg3"):
        with contextlib.suppress(CuSparseError):
            yield CuSparseProduct(indptr, indices, values_E, x, algorithm, preprocess=True)


def fastest(ways: list[Way], *given: Tensor) -> Way:
    """The one with the smallest median time."""
    device = given[0].device
    times = [time_ms(lambda way=way: way(*given), device, budget_seconds=0.1).median_ms for way in ways]
    return ways[times.index(min(times))]


class _Product(torch.autograd.Function):
    """``A @ x``; its backward multiplies with the prebuilt transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, adjacency: Adjacency, norm: str) -> Tensor:
        ctx.adjacency, ctx.norm = adjacency, norm
        with torch.autocast(x.device.type, enabled=False):  # it would cast the matrix in every step
            return adjacency.multiply(norm, x, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.adjacency.multiply(ctx.norm, grad.contiguous(), True), None, None


def aggregate(adjacency: Adjacency, norm: str, x: Tensor) -> Tensor:
    """Sum over in-edges, weighted by ``norm``."""
    out: Tensor = _Product.apply(x, adjacency, norm)
    return out


class SageMean(nn.Module):
    """``x W_self + b + mean(x_u) W_neigh``, as ``dgl.nn.SAGEConv(..., "mean")``."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.fc_neigh = nn.Linear(width, out, bias=False)
        self.fc_self = nn.Linear(width, out)
        for linear in (self.fc_neigh, self.fc_self):  # as in DGL
            nn.init.xavier_uniform_(linear.weight, gain=nn.init.calculate_gain("relu"))
        self.transforms_first = width > out

    def forward(self, adjacency: Adjacency, x: Tensor) -> Tensor:
        if self.transforms_first:
            neighbours = aggregate(adjacency, "mean", self.fc_neigh(x))
        else:
            neighbours = self.fc_neigh(aggregate(adjacency, "mean", x))
        return self.fc_self(x) + neighbours


class GraphConv(nn.Module):
    """``D^-1/2 A D^-1/2 x W + b``, as ``dgl.nn.GraphConv``."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.xavier_uniform_(torch.empty(width, out)))
        self.bias = nn.Parameter(torch.zeros(out))
        self.transforms_first = width > out

    def forward(self, adjacency: Adjacency, x: Tensor) -> Tensor:
        if self.transforms_first:
            return aggregate(adjacency, "both", x @ self.weight) + self.bias.to(x.dtype)
        return F.linear(aggregate(adjacency, "both", x), self.weight.t(), self.bias)


class _EdgeSoftmax(torch.autograd.Function):
    """Softmax of ``scores (E, H)`` over the in-edges of each destination by scattering; keeps the result alone."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, destinations: Tensor, num_nodes: int) -> Tensor:
        largest = scores.new_full((num_nodes, scores.shape[1]), -torch.inf)
        largest.index_reduce_(0, destinations, scores, "amax")
        alpha = torch.sub(scores, largest.index_select(0, destinations)).exp_()
        total = scores.new_zeros(num_nodes, scores.shape[1]).index_add_(0, destinations, alpha)
        alpha /= total.index_select(0, destinations)
        ctx.save_for_backward(alpha, destinations)
        ctx.num_nodes = num_nodes
        return alpha

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        alpha, destinations = ctx.saved_tensors
        weighted = grad * alpha
        total = grad.new_zeros(ctx.num_nodes, grad.shape[1]).index_add_(0, destinations, weighted)
        weighted -= total.index_select(0, destinations).mul_(alpha)
        return weighted, None, None


class _WeightedHeads(torch.autograd.Function):
    """``out[v, h] = sum over in-edges of alpha[e, h] * z[u, h]``: a cuSPARSE product and, back, an SDDMM per head."""

    @staticmethod
    def forward(ctx: Any, alpha: Tensor, z: Tensor, adjacency: Adjacency) -> Tensor:
        ctx.save_for_backward(alpha, z)
        ctx.adjacency = adjacency
        out = torch.empty_like(z)
        with torch.autocast(z.device.type, enabled=False):
            for head in range(z.shape[1]):
                values = alpha[:, head].to(z.dtype).contiguous()
                out[:, head] = adjacency.multiply_weighted(values, _head_of(z, head))[:, : z.shape[2]]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        alpha, z = ctx.saved_tensors
        adjacency: Adjacency = ctx.adjacency
        grad_alpha, grad_z = torch.empty_like(alpha), torch.empty_like(z)
        zeros = adjacency.with_values(alpha.new_zeros(len(alpha)))
        for head in range(z.shape[1]):
            grad_h, z_h = _head_of(grad, head), _head_of(z, head)
            # the matrix is symmetric in pattern: the transpose has the value of the reversed edge at each place
            values = alpha[:, head].index_select(0, adjacency.reverse).to(grad.dtype)
            grad_z[:, head] = adjacency.multiply_weighted(values, grad_h)[:, : z.shape[2]]
            # SDDMM takes float32 alone
            sampled = torch.sparse.sampled_addmm(zeros, grad_h.float(), z_h.float().t(), beta=0.0)
            grad_alpha[:, head] = sampled.values()
        return grad_alpha, grad_z, None


def _head_of(z: Tensor, head: int) -> Tensor:
    """Rows of one head, contiguous, with columns of zeros behind up to a multiple of 16."""
    return F.pad(z[:, head], (0, padded(z.shape[2]) - z.shape[2])).contiguous()


class GraphAttention(nn.Module):
    """Scores ``leaky_relu(a_l z_u + a_r z_v)``, softmax over in-edges, as ``dgl.nn.GATConv``."""

    def __init__(self, width: int, out: int, num_heads: int) -> None:
        super().__init__()
        self.shape = (num_heads, out)
        self.fc = nn.Linear(width, num_heads * out, bias=False)
        nn.init.xavier_normal_(self.fc.weight, gain=2**0.5)
        self.attn_l = nn.Parameter(nn.init.xavier_normal_(torch.empty(1, num_heads, out), gain=2**0.5))
        self.attn_r = nn.Parameter(nn.init.xavier_normal_(torch.empty(1, num_heads, out), gain=2**0.5))
        self.bias = nn.Parameter(torch.zeros(num_heads * out))

    def forward(self, adjacency: Adjacency, x: Tensor) -> Tensor:
        z = self.fc(x).view(-1, *self.shape)
        left, right = ((z * a.to(z.dtype)).sum(-1, dtype=torch.float32) for a in (self.attn_l, self.attn_r))
        scores = left.index_select(0, adjacency.csr.indices) + right.index_select(0, adjacency.destinations)
        alpha = _EdgeSoftmax.apply(F.leaky_relu(scores, 0.2), adjacency.destinations, len(x))
        return _WeightedHeads.apply(alpha, z, adjacency).flatten(1) + self.bias.to(z.dtype)


class PlainModel(nn.Module):
    """Three layers with ReLU and dropout between, no dropout of the input.

    Args:
        kind: ``sage``, ``gcn`` or ``gat``.
        width: Of the features.
        hidden: Of a hidden layer, of one head for ``gat``.
        num_classes: Width of the output.
        heads: Of hidden ``gat`` layers; the last has one.
        dropout: Probability.

    Attributes:
        summed_widths: Columns of the rows that each layer of ``sage`` and ``gcn`` aggregates.
    """

    def __init__(
        self, kind: str, width: int, hidden: int, num_classes: int, heads: int = 1, dropout: float = 0.5
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.layers = nn.ModuleList()
        self.summed_widths = []
        for number in range(3):
            out, num_heads = (num_classes, 1) if number == 2 else (hidden, heads)
            self.summed_widths.append(min(width, out))
            layer: nn.Module = {
                "sage": lambda i, o, h: SageMean(i, o),
                "gcn": lambda i, o, h: GraphConv(i, o),
                "gat": GraphAttention,
            }[kind](width, out, num_heads)
            self.layers.append(layer)
            width = out * num_heads

    def forward(self, adjacency: Adjacency, x: Tensor) -> Tensor:
        """Logits ``(N, num_classes)``."""
        for layer in self.layers[:-1]:
            x = F.dropout(F.relu(layer(adjacency, x)), self.dropout, self.training)
        logits: Tensor = self.layers[-1](adjacency, x)
        return logits


class TunedModel(PlainModel):
    """`PlainModel` of kind ``sage`` or ``gcn`` with what constant features and unlucky widths allow besides.

    The first layer's sum is kept over epochs: features do not change, and nothing drops any. Products have widths that
    are multiples of 16, with columns of zeros behind.
    """

    def __init__(self, kind: str, *settings: Any, **more: Any) -> None:
        super().__init__(kind, *settings, **more)
        self.summed_widths[-1] = padded(self.summed_widths[-1])
        self._norm = {"sage": "mean", "gcn": "both"}[kind]
        self._kept: tuple[Tensor, Tensor] | None = None

    def forward(self, adjacency: Adjacency, x: Tensor) -> Tensor:
        """Logits ``(N, num_classes)`` for the same ``x`` in every call."""
        if self._kept is None:
            x = F.pad(x, (0, padded(x.shape[1]) - x.shape[1]))
            self._kept = (x, aggregate(adjacency, self._norm, x).contiguous())
        x, first = self._kept
        for number, layer in enumerate(self.layers):
            own, neigh, bias = _weights(layer)
            grown = (0, padded(neigh.shape[1]) - neigh.shape[1], 0, padded(len(neigh)) - len(neigh))
            if layer.transforms_first:
                out = aggregate(adjacency, self._norm, F.linear(x, F.pad(neigh, grown)))
                out = out + (F.pad(bias, grown[2:]) if own is None else F.linear(x, *_pair(own, bias, grown)))
            else:
                summed = first if number == 0 else aggregate(adjacency, self._norm, x)
                out = F.linear(summed, F.pad(neigh, grown), F.pad(bias, grown[2:]) if own is None else None)
                out = out if own is None else out + F.linear(x, *_pair(own, bias, grown))
            if number < len(self.layers) - 1:
                x = F.dropout(F.relu(out), self.dropout, self.training)
        return out[:, : len(neigh)]


def padded(width: int) -> int:
    """The next multiple of 16."""
    return -(-width // 16) * 16


def _weights(layer: nn.Module) -> tuple[Tensor | None, Tensor, Tensor]:
    """Of the node itself, of its neighbours, each ``(out, in)``, and the bias."""
    if isinstance(layer, SageMean):
        return layer.fc_self.weight, layer.fc_neigh.weight, layer.fc_self.bias
    assert isinstance(layer, GraphConv)
    return None, layer.weight.t(), layer.bias


def _pair(weight: Tensor, bias: Tensor, grown: tuple[int, int, int, int]) -> tuple[Tensor, Tensor]:
    return F.pad(weight, grown), F.pad(bias, grown[2:])
