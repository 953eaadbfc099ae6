"""Fused GATv2 attention and maxima on the GPU: nuGNN beside turbo-gnn and torch's scatter; a JSON row for each.

    python benchmarks/gpu_peers.py --out rows               # full size, within 120 s
    python benchmarks/gpu_peers.py --device cpu --nodes 3000 --arcs 40000

Graphs and orders are those of gpu_kernels.py. Every call is one of training: gradients are wanted, so maxima come with
their argmax; ``f+b`` is forward and backward together. Each system is checked on sampled rows against float64 before it
is timed. ``held_bytes`` of a row is what stands between calls and ``input_bytes`` the operands, so that a call's own
peak as a multiple of its inputs is ``(peak_bytes - held_bytes) / input_bytes``; the N x H floats that turbo-gnn takes
from CUDA directly in the backward of attention are not in it.

Shape suffixes: N nodes, E edges, H heads, D features of a head, F features.
"""

from __future__ import annotations

import argparse
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from baselines import Csr, edges_of_rows
from gpu_kernels import DTYPES, ORDERS, ordered_graphs
from harness import Recorder, free_memory, result_differs, time_ms
from torch import Tensor

from nugnn.datasets.synthetic_device import FAMILIES
from nugnn.datasets.synthetic_recipe import FULL_ARCS, FULL_NODES
from nugnn.kernels.attention import gatv2_attention
from nugnn.kernels.attention.reference import gatv2_attention_reference
from nugnn.kernels.spmm import spmm
from nugnn.kernels.structure import Structure

SLOPE = 0.2
CASES: tuple[tuple[str, str], ...] = (("GATv2 4x32", "fp32"), ("max F=64", "fp32"), ("max F=128", "fp32"))
CASES += tuple((name, "bf16") for name, _ in CASES)
"""The most important first."""
_EDGES_AT_ONCE = 1 << 23
_CHECKED_EDGES = 300_000
"""Edges whose float64 messages a check holds: with 128 features 300 MB for each of its temporaries."""

Function = Callable[[], tuple[Tensor, ...]]


class System(ABC):
    """One system on one graph; its methods prepare a call and return the function to time.

    Args:
        csr: A symmetric graph, so that its CSR is also that of the reversed edges.
    """

    def __init__(self, csr: Csr) -> None:
        self.csr = csr

    @abstractmethod
    def attention(self, operands: list[Tensor], grad: Tensor | None) -> Function:
        """GATv2 of ``[x_src (N, H, D), x_dst (N, H, D), attn (H, D)]``.

        Returns:
            Gives ``(output (N, H, D),)``, or with ``grad`` of that shape the gradients of the operands.
        """

    @abstractmethod
    def maximum(self, operands: list[Tensor], grad: Tensor | None) -> Function:
        """Largest of the neighbours of ``[x (N, F)]``, feature by feature; returns as `attention` does."""


def differentiated(forward: Callable[[], Tensor], operands: list[Tensor], grad: Tensor | None) -> Function:
    """The forward pass alone, or the gradients."""
    if grad is None:
        return lambda: (forward().detach(),)
    return lambda: torch.autograd.grad(forward(), operands, grad)


class NuGnn(System):
    """Ours, through the operators and on the structure that a shard graph holds."""

    @cached_property
    def _structure(self) -> Structure:
        return Structure(self.csr.num_nodes, self.csr.indptr.long(), self.csr.indices)

    def attention(self, operands: list[Tensor], grad: Tensor | None) -> Function:
        return differentiated(lambda: gatv2_attention(self._structure, *operands, SLOPE), operands, grad)

    def maximum(self, operands: list[Tensor], grad: Tensor | None) -> Function:
        return differentiated(lambda: spmm(self._structure, "copy_lhs", "max", *operands, None), operands, grad)


class TurboGnn(System):
    """turbo-gnn's fused kernels: int32, both directions of the graph, its light and heavy nodes, settings searched.

    The search is ours, over the values that its own tuner goes through, one setting after the other: ``autotune=True``
    times the product of all, 6,720 times 60 calls for a maximum, which is over an hour here, most of them alike (more
    warps than a row has features are cut back, tiles count only in the 2-D kernel, edges only in the other). For
    attention its tuner varies nothing but the bound between light and heavy nodes, which the attention kernels do not
    read; the chunk of the attention vector's gradient, which it leaves alone, is searched here. Maxima
    forward alone, and with backward, are searched each for itself; attention forward has nothing to search.
    """

    def __init__(self, csr: Csr) -> None:
        super().__init__(csr)
        self._found: dict[Any, Any] = {}

    @cached_property
    def _graph(self) -> Any:
        from turbo_gnn import AdjacencyForwardBackwardWithNodeBuckets

        both = (self.csr.indptr, self.csr.indices) * 2  # symmetric
        return AdjacencyForwardBackwardWithNodeBuckets.from_csr(*both, index_dtype=torch.int32)

    def attention(self, operands: list[Tensor], grad: Tensor | None) -> Function:
        from turbo_gnn import gatv2_aggr

        x_src, x_dst, attn = operands

        def prepared(chunk: int) -> Function:
            def forward() -> Tensor:
                out = gatv2_aggr(
                    self._graph, x_dst, x_neighbors=x_src, attention_weights=attn, negative_slope=SLOPE,
                    grad_A_reduce_row_chunk_size=chunk,
                )  # fmt: skip
                return out.view(x_src.shape)

            return differentiated(forward, operands, grad)

        if grad is None:
            return prepared(512)
        chunks = [128, 256, 512, 1024, 2048]
        return prepared(self._searched(x_src, grad, lambda: self._fastest(chunks, prepared)))

    def maximum(self, operands: list[Tensor], grad: Tensor | None) -> Function:
        from turbo_gnn import reduction_aggr

        (x,) = operands

        def prepared(settings: dict[str, Any]) -> Function:
            chosen = dict(settings)
            graph = self._graph.repartition(forward_huge_degree_threshold_quantile=chosen.pop("quantile"))
            return differentiated(lambda: reduction_aggr(graph, x, reduce="max", **chosen), operands, grad)

        return prepared(self._searched(x, grad, lambda: self._searched_maximum(x, prepared)))

    def _searched_maximum(self, x: Tensor, prepared: Callable[[Any], Function]) -> dict[str, Any]:
        needed = -(-x.shape[1] * x.element_size() // 128)  # a thread takes four bytes of a row
        warps = [warps for warps in (1, 2, 4, 8, 16, 32) if warps <= needed] or [1]
        edges = [{"use_2d_kernel": False, "edges_per_block_heavy_nodes": 32 << k} for k in range(7)]
        tiles = [
            {"use_2d_kernel": True, "features_per_block": features, "tiles_y": rows}
            for features in (32, 64, 128, 256)
            for rows in (2, 4, 8, 16)
            if features * rows <= 1024
        ]
        best = self._fastest([{"warps_per_block": w, "quantile": -1} for w in warps], prepared)
        heavy = self._fastest([best | form | {"quantile": 0.99} for form in edges + tiles], prepared)
        bounds = [heavy | {"quantile": quantile} for quantile in (0.9, 0.95, 0.99, 0.999)]
        return self._fastest([best, *bounds], prepared)

    def _searched(self, x: Tensor, grad: Tensor | None, search: Callable[[], Any]) -> Any:
        """What a search has found for rows of this shape and type, with or without backward."""
        key = (x.shape, x.dtype, grad is None)
        if key not in self._found:
            self._found[key] = search()
        return self._found[key]

    def _fastest(self, settings: list[Any], prepared: Callable[[Any], Function]) -> Any:
        """The setting with the least time; one that is refused is passed over.

        Raises:
            RuntimeError: All are refused: the last refusal.
        """
        times, refusal = [], None
        quick = {"warmup": 1, "budget_seconds": 0.0, "flush_l2": False, "least_repeats": 2}
        for place, setting in enumerate(settings):
            try:
                timing = time_ms(prepared(setting), self.csr.indices.device, **quick)
                times.append((timing.median_ms, place))
            except RuntimeError as error:
                refusal = error
        if not times:
            assert refusal is not None
            raise refusal
        return settings[min(times)[1]]


class TorchScatter(System):
    """``scatter_reduce_`` in slices of the edges, whose messages do not fit at once.

    Backward is that of torch, ties sharing the gradient evenly, in slices as well: torch's own would keep all messages.
    """

    def attention(self, operands: list[Tensor], grad: Tensor | None) -> Function:
        raise NotImplementedError("a scatter softmax writes (E, H, D) scores; see gpu_attention.py for it in part")

    def maximum(self, operands: list[Tensor], grad: Tensor | None) -> Function:
        (x,) = (operand.detach() for operand in operands)
        dst = torch.repeat_interleave(torch.arange(self.csr.num_nodes, device=x.device), self.csr.degrees)

        def parts() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
            for begin in range(0, self.csr.num_edges, _EDGES_AT_ONCE):
                some = slice(begin, begin + _EDGES_AT_ONCE)
                yield dst[some], self.csr.indices[some], x.index_select(0, self.csr.indices[some])

        def run() -> tuple[Tensor]:
            out = torch.full_like(x, -torch.inf)
            for rows, _, messages in parts():
                out.scatter_reduce_(0, rows[:, None].expand_as(messages), messages, "amax")
            if grad is None:
                return (out,)
            ties = torch.zeros_like(x)
            for rows, _, messages in parts():
                ties.index_add_(0, rows, (messages == out[rows]).to(x.dtype))
            share, grad_x = grad / ties, torch.zeros_like(x)
            for rows, sources, messages in parts():
                grad_x.index_add_(0, sources, torch.where(messages == out[rows], share[rows], 0))
            return (grad_x,)

        return run


SYSTEMS: dict[str, type[System]] = {"nugnn": NuGnn, "turbo-gnn": TurboGnn, "torch scatter": TorchScatter}


# -- checks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Sample:
    """Some rows of the graph with all their in-edges, as a graph of its own.

    Args:
        rows: ``(R,)`` int64.
        sources: ``(S,)`` int64, the distinct sources of their in-edges.
        structure: R destinations, S sources.
    """

    rows: Tensor
    sources: Tensor
    structure: Structure

    @classmethod
    def of(cls, csr: Csr, rows: Tensor) -> Sample:
        _, sources = edges_of_rows(csr, rows)
        distinct, numbers = torch.unique(sources, return_inverse=True)
        indptr = torch.cat([torch.zeros(1, dtype=torch.int64, device=rows.device), csr.degrees[rows].cumsum(0)])
        return cls(rows, distinct, Structure(len(distinct), indptr, numbers))


class Checks:
    """Holds results against float64: outputs of some rows, the heaviest among them, and gradients of some sources.

    Args:
        csr: The graph, symmetric.
        seed: Of the choice of rows.
    """

    def __init__(self, csr: Csr, seed: int) -> None:
        self.csr = csr
        device, generator = csr.indices.device, torch.Generator().manual_seed(seed)
        some = torch.randint(csr.num_nodes, (2_000,), generator=generator).to(device)
        linked = some[csr.degrees[some] > 0]
        self.forward = Sample.of(csr, torch.unique(torch.cat([some, csr.degrees.argmax()[None]])))
        # a source's gradient comes from all its destinations, and each of these needs all its in-edges
        count = 64
        while True:
            self.sources = torch.unique(linked[:count])
            destinations = torch.unique(edges_of_rows(csr, self.sources)[1])
            if int(csr.degrees[destinations].sum()) <= _CHECKED_EDGES or count == 1:
                break
            count //= 2
        self.backward = Sample.of(csr, destinations)

    def attention(self, operands: list[Tensor], grad: Tensor | None, result: tuple[Tensor, ...]) -> str | None:
        """What is wrong, or None.

        float32 may err by 1e-3, some ten times what scores of this size bring about in it; a half type by three
        of its roundings in the output, and by twelve in gradients, whose terms some systems round one by one. Outputs
        are measured beside the largest feature of their row and head; gradients in norm.
        """
        sample = self.forward if grad is None else self.backward
        x_src, x_dst, attn = (operand.detach() for operand in operands)
        wide = [x_src[sample.sources].double(), x_dst[sample.rows].double(), attn.double()]
        eps = torch.finfo(x_src.dtype).eps
        if grad is None:
            exact = gatv2_attention_reference(sample.structure, *wide, SLOPE)
            bound = (max(1e-3, 3 * eps) * exact.abs().amax(-1, keepdim=True)).expand_as(exact)
            return result_differs(result[0][sample.rows].flatten(1), exact.flatten(1), bound.flatten(1))
        wide = [operand.requires_grad_() for operand in wide]
        out = gatv2_attention_reference(sample.structure, *wide, SLOPE)
        exact_src, exact_dst = torch.autograd.grad(out, wide[:2], grad[sample.rows].double())
        places = torch.searchsorted(sample.sources, self.sources)
        pairs = {"x_src": (result[0][self.sources], exact_src[places]), "x_dst": (result[1][sample.rows], exact_dst)}
        for name, (got, exact) in pairs.items():
            error = float((got.double() - exact).norm() / exact.norm())
            if not error <= max(1e-3, 12 * eps):
                return f"gradient of {name} of sampled rows is off by {error:.1e} in norm"
        return None if bool(result[2].isfinite().all()) else "gradient of attn is not finite"

    def maximum(self, operands: list[Tensor], grad: Tensor | None, result: tuple[Tensor, ...]) -> str | None:
        """What is wrong, or None: maxima are exact, and a gradient goes to any of several equal neighbours.

        So a sum of gradients lies between what is certain plus the negative and plus the positive ties; each of its
        terms may be rounded once to the type.
        """
        sample = self.forward if grad is None else self.backward
        x = operands[0].detach()[sample.sources].double()
        structure = sample.structure
        edge_rows = structure.dst.long()
        messages = x[structure.indices]
        most = torch.full((structure.num_dst, x.shape[1]), -torch.inf, dtype=x.dtype, device=x.device)
        most.scatter_reduce_(0, edge_rows[:, None].expand_as(messages), messages, "amax")
        if grad is None:
            got = result[0][sample.rows]
            got = torch.where(structure.in_degrees[:, None] > 0, got, -torch.inf)  # some give zeros there
            same = got.double() == most
            return None if bool(same.all()) else f"{int((~same).sum())} of {same.numel()} sampled maxima differ"
        wins = messages == most[edge_rows]
        del messages
        count = torch.zeros_like(most).index_add_(0, edge_rows, wins.double())
        terms = torch.where(wins, grad[sample.rows].double()[edge_rows], 0)
        is_tie = count[edge_rows] > 1
        low, high, mass, won = (torch.zeros_like(x) for _ in range(4))
        low.index_add_(0, structure.indices, torch.where(is_tie, terms.clamp(max=0), terms))
        high.index_add_(0, structure.indices, torch.where(is_tie, terms.clamp(min=0), terms))
        mass.index_add_(0, structure.indices, terms.abs())
        won.index_add_(0, structure.indices, wins.double())
        places = torch.searchsorted(sample.sources, self.sources)
        low, high, mass, won = (each[places] for each in (low, high, mass, won))
        slack = (won + 1) * torch.finfo(result[0].dtype).eps * mass
        return result_differs(result[0][self.sources], (low + high) / 2, (high - low) / 2 + slack)


# -- measurement ------------------------------------------------------------------------------------------------------


def operands_of(name: str, dtype: torch.dtype, csr: Csr, seed: int) -> tuple[str, list[Tensor], Tensor]:
    """The method of a system, its operands, which want gradients, and a gradient of the output."""
    device = csr.indices.device
    generator = torch.Generator(device=device).manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator).to(dtype)

    operator, size = name.split()
    if operator == "max":
        shapes = [(csr.num_nodes, int(size.removeprefix("F=")))]
        operands = [random(*shapes[0])]
    else:
        heads, dim = map(int, size.split("x"))
        operands = [random(csr.num_nodes, heads, dim), random(csr.num_nodes, heads, dim), random(heads, dim)]
        operands[2] *= dim**-0.5  # weights as after training's usual first values, not one neighbour alone
    grad = random(*operands[0].shape)
    method = "maximum" if operator == "max" else "attention"
    return method, [operand.requires_grad_() for operand in operands], grad


def measure_order(
    recorder: Recorder,
    family: str,
    order: str,
    csr: Csr,
    arguments: argparse.Namespace,
    has_time: Callable[[str], bool],
) -> None:
    """Rows of all cases and systems in one order; torch's scatter, which is slow, last: one case in the first order."""
    checks = Checks(csr, arguments.seed)
    slow = "torch scatter"
    made = {system: SYSTEMS[system](csr) for system in arguments.systems if system != slow}
    for name, dtype in arguments.cases if made else ():
        measure_case(recorder, family, order, name, dtype, made, checks, arguments, has_time)
    del made
    free_memory()
    if slow in arguments.systems and order == arguments.orders[0] and "fp32" in arguments.dtypes:
        made = {slow: SYSTEMS[slow](csr)}
        options = {"warmup": 1, "least_repeats": 3}
        measure_case(recorder, family, order, "max F=64", "fp32", made, checks, arguments, has_time, **options)


def measure_case(
    recorder: Recorder,
    family: str,
    order: str,
    name: str,
    dtype: str,
    made: dict[str, System],
    checks: Checks,
    arguments: argparse.Namespace,
    has_time: Callable[[str], bool],
    **timing_options: Any,
) -> None:
    """Rows of one of `CASES` for each system, forward before forward and backward."""
    csr = checks.csr
    method, operands, grad = operands_of(name, DTYPES[dtype], csr, arguments.seed)
    short = name.removesuffix(" 4x32").replace(" F=", "")  # a line of the log has little room
    row = {"kind": "peers", "graph": family, "order": order, "dtype": dtype, "case": name, "flushed": True}
    row |= {"num_nodes": csr.num_nodes, "num_edges": csr.num_edges, "seed": arguments.seed}
    row |= {"input_bytes": sum(operand.numel() * operand.element_size() for operand in operands)}
    for step, given in (("fwd", None), ("f+b", grad)):
        for system, maker in made.items():
            if has_time(f"{system} {order} {dtype} {name} {step}"):
                recorder.measure(
                    row | {"system": system, "shape": f"{short} {step}", "step": step},
                    partial(getattr(maker, method), operands, given),
                    partial(getattr(checks, method), operands, given),
                    budget_seconds=arguments.budget_seconds,
                    **timing_options,
                )


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=["products-like"])
    parser.add_argument("--nodes", type=int, default=FULL_NODES)
    parser.add_argument("--arcs", type=int, default=FULL_ARCS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=["given", "found", "planted"])
    parser.add_argument("--dtypes", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--budget-seconds", type=float, default=0.3, help="timed calls of one case together")
    parser.add_argument("--seconds", type=float, default=110, help="nothing new is started after so long")
    parser.add_argument("--out", type=Path, help="folder for peers.jsonl")
    options = parser.parse_args(given)
    options.cases = [case for case in CASES if case[1] in options.dtypes]
    options.widths = [128]  # of the rows that an order is found for: the widest in the cases
    return options


def main(given: list[str] | None = None) -> Recorder:
    """Run what the options ask for."""
    arguments, begin = parse(given), time.monotonic()
    device = torch.device(arguments.device)
    recorder = Recorder(None if arguments.out is None else arguments.out / "peers.jsonl", device)

    def has_time(what: str) -> bool:
        is_left = time.monotonic() - begin < arguments.seconds
        if not is_left:
            print(f"{what}: left out, {arguments.seconds:.0f} s are over", flush=True)
        return is_left

    for family in arguments.families:
        for order, csr in ordered_graphs(recorder, family, arguments, device):
            measure_order(recorder, family, order, csr, arguments, has_time)
    return recorder


if __name__ == "__main__":
    main()
