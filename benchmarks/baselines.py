"""SpMM as others do it, each system at its best known use; every function says what that is and why.

Each maker takes a graph and features and returns the function to time. Indices are int32 throughout: half the bytes of
int64, which the larger part of cuSPARSE's own traffic beside the features would otherwise be.

Shape suffixes: N nodes, E edges, F features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from cusparse import ALGORITHMS, CuSparseProduct
from torch import Tensor

Product = Callable[[], Tensor]


@dataclass(frozen=True, eq=False)
class Csr:
    """In-edges by destination: ``indptr (N + 1,)`` and ``indices (E,)``, both int32."""

    indptr: Tensor
    indices: Tensor

    @property
    def num_nodes(self) -> int:
        return len(self.indptr) - 1

    @property
    def num_edges(self) -> int:
        return len(self.indices)

    @cached_property
    def degrees(self) -> Tensor:
        """``(N,)`` int64."""
        return self.indptr.long().diff()


def torch_sparse(csr: Csr, x: Tensor) -> Product:
    """``torch.sparse_csr_tensor @ x``: CSR (COO is slower), int32, values built once and reused.

    torch passes the product to cuSPARSE and chooses the algorithm itself; `kernel_names` tells which kernels ran.
    """
    ones = torch.ones(csr.num_edges, dtype=x.dtype, device=x.device)
    matrix = torch.sparse_csr_tensor(csr.indptr, csr.indices, ones, (csr.num_nodes, len(x)), check_invariants=False)
    return lambda: matrix @ x


def cusparse(algorithm: str, preprocess: bool) -> Callable[[Csr, Tensor], Product]:
    """CuSPARSE called directly, with a fixed algorithm, the workspace kept and, if asked, the matrix analysed once."""

    def make(csr: Csr, x: Tensor) -> Product:
        ones = torch.ones(csr.num_edges, dtype=x.dtype, device=x.device)
        product = CuSparseProduct(csr.indptr, csr.indices, ones, x, algorithm, preprocess)
        y = torch.empty(csr.num_nodes, x.shape[1], dtype=x.dtype, device=x.device)
        return lambda: product(x, y)

    return make


def pyg_edge_index(csr: Csr, x: Tensor) -> Product:
    """PyG's ``EdgeIndex.matmul``: sorted by row, undirected, its CSR cached beforehand, which is PyG's fast path.

    Without pyg-lib and torch-sparse it ends in torch's CSR product. PyG's rows are what is aggregated into, so the CSR
    of in-edges is given as ``(destination, source)``.
    """
    from torch_geometric import EdgeIndex

    nodes = torch.arange(csr.num_nodes, dtype=torch.int32, device=x.device)
    pairs = torch.stack([torch.repeat_interleave(nodes, csr.degrees), csr.indices])
    size = (csr.num_nodes, csr.num_nodes)
    edges = EdgeIndex(pairs, sparse_size=size, sort_order="row", is_undirected=True).fill_cache_()
    ones = torch.ones(csr.num_edges, dtype=x.dtype, device=x.device)  # else PyG makes float32 ones in each call
    return lambda: edges.matmul(x, ones, reduce="sum")


def turbo_gnn(csr: Csr, x: Tensor) -> Product:
    """turbo-gnn's ``spmm_aggr``: cuSPARSE with descriptors and buffers kept, float32 and int32 only."""
    from turbo_gnn import spmm_aggr

    if x.dtype != torch.float32:  # it ends the process: its matrix stays float32, which cuSPARSE does not multiply
        raise TypeError(f"spmm_aggr takes float32 alone, not {x.dtype}")

    return lambda: spmm_aggr(
        x, csr.indptr, csr.indices, norm_type="none", cu_sparse_algorithm_id=-1, block_dim=256
    )  # fmt: skip


def ours(csr: Csr, x: Tensor) -> Product:
    """NuGNN's kernel through its operator, on the structure that a shard graph holds."""
    from nugnn.kernels.spmm import spmm
    from nugnn.kernels.structure import Structure

    structure = Structure(len(x), csr.indptr.long(), csr.indices)
    return lambda: spmm(structure, "copy_lhs", "sum", x, None)


SYSTEMS: dict[str, Callable[[Csr, Tensor], Product]] = {
    "nugnn": ours,
    "torch.sparse": torch_sparse,
    "pyg": pyg_edge_index,
    "turbo-gnn": turbo_gnn,
    "cusparse": cusparse("default", preprocess=False),
    **{f"cusparse {name}": cusparse(name, preprocess=False) for name in ALGORITHMS if name != "default"},
    **{f"cusparse {name} pre": cusparse(name, preprocess=True) for name in ALGORITHMS if name != "default"},
}
"""By the name in the rows; a system that cannot be imported or refuses a type has a row that says so."""


def kernel_names(function: Product) -> list[str]:
    """Names of the CUDA kernels that a call runs, the longest-running first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        function()
        torch.cuda.synchronize()
    events = sorted(profiled.key_averages(), key=lambda event: -event.self_device_time_total)
    return [event.key for event in events if event.self_device_time_total]


def edges_of_rows(csr: Csr, rows: Tensor) -> tuple[Tensor, Tensor]:
    """For each in-edge of ``rows``, row by row: the place of its row in the list, and its source; both int64."""
    degrees = csr.degrees[rows]
    places = torch.arange(len(rows), device=rows.device)
    place = torch.repeat_interleave(places, degrees)
    within = torch.arange(len(place), device=rows.device) - (degrees.cumsum(0) - degrees)[place]
    return place, csr.indices.long()[csr.indptr.long()[rows][place] + within]


class SampledSums:
    """Exact sums of some rows, the heaviest among them, to hold a result against before it is timed.

    Args:
        csr: The graph.
        num_rows: How many rows beside the heaviest.
        seed: Of their choice.
    """

    def __init__(self, csr: Csr, num_rows: int = 2_000, seed: int = 0) -> None:
        device = csr.indices.device
        generator = torch.Generator().manual_seed(seed)
        some = torch.randint(csr.num_nodes, (min(num_rows, csr.num_nodes),), generator=generator).to(device)
        self.rows = torch.unique(torch.cat([some, csr.degrees.argmax()[None]]))
        self._degrees = csr.degrees[self.rows]
        self._place, self._sources = edges_of_rows(csr, self.rows)

    def problem(self, result: Tensor, x: Tensor) -> str | None:
        """What is wrong with ``result = A @ x`` in these rows, or None.

        The bound is that of float32 additions in any order, plus four roundings to the type of the result, for systems
        that add up pieces of a row in it: ``(degree * eps32 + 4 * eps) * sum of |x|``.
        """
        from harness import result_differs

        exact, mass = (torch.zeros(len(self.rows), x.shape[1], dtype=torch.float64, device=x.device) for _ in range(2))
        for begin in range(0, len(self._place), 1 << 20):
            messages = x[self._sources[begin : begin + (1 << 20)]].double()
            exact.index_add_(0, self._place[begin : begin + (1 << 20)], messages)
            mass.index_add_(0, self._place[begin : begin + (1 << 20)], messages.abs())
        factor = self._degrees[:, None] * torch.finfo(torch.float32).eps + 4 * torch.finfo(result.dtype).eps
        return result_differs(result[self.rows], exact, factor * mass)
