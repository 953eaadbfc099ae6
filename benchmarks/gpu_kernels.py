"""SpMM on the GPU: nuGNN beside cuSPARSE, PyG and turbo-gnn, with the card's own bounds; a JSON row for each.

    python benchmarks/gpu_kernels.py --out rows             # full size, both graphs, given and planted order
    python benchmarks/gpu_kernels.py --device cpu --nodes 5000 --arcs 60000 --widths 16

Graphs are generated on the device with shuffled node ids, and that is all that the systems see. The planted order, in
which communities are contiguous, serves as the yardstick of an order found by nuGNN; no system is told of it.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from baselines import SYSTEMS, Csr, SampledSums, kernel_names, torch_sparse
from harness import Recorder, free_memory, peak_bytes, synchronize
from torch import Tensor

from nugnn.datasets import planted_communities
from nugnn.datasets.synthetic_device import FAMILIES, DeviceGraph, device_graph
from nugnn.datasets.synthetic_recipe import FULL_ARCS, FULL_NODES

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ORDERS = ("given", "planted", "found")


def generated(recorder: Recorder, family: str, arguments: argparse.Namespace, device: torch.device) -> DeviceGraph:
    """The graph, and a row with the seconds and memory that making it took."""
    kept: list[DeviceGraph] = []

    def make() -> None:
        begin = time.perf_counter()
        kept.append(device_graph(family, arguments.nodes, arguments.arcs, arguments.seed, device=device))
        synchronize(device)
        seconds.append(time.perf_counter() - begin)

    seconds: list[float] = []
    most = peak_bytes(make, device)
    graph = kept[0]
    shape = f"{graph.num_nodes} nodes {graph.num_edges} arcs"
    row = {"kind": "generate", "system": "generator", "graph": family, "shape": shape, "seed": arguments.seed}
    recorder.add(row | {"value": seconds[0], "unit": "s", "peak_bytes": most})
    return graph


def planted_order(graph: DeviceGraph, seed: int) -> Tensor:
    """New id of each node such that communities are contiguous."""
    communities = planted_communities(graph.num_nodes, seed).to(graph.indices.device)
    return _ranks(torch.argsort(communities, stable=True))


def found_order(graph: DeviceGraph, row_bytes: int) -> Tensor:
    """New id of each node in nuGNN's own order, found on the host from the shuffled edges alone.

    Args:
        graph: Whose edges are read, and nothing else of it.
        row_bytes: Of a node's features.

    Raises:
        ImportError: This version of nuGNN finds no order.
    """
    from nugnn.partition.clusters import unweighted_lists
    from nugnn.partition.order import locality_order, rows_in_cache

    lists = unweighted_lists(graph.indptr.cpu().numpy(), graph.indices.cpu().numpy())
    order, _ = locality_order(lists, rows_in_cache(row_bytes))
    return _ranks(torch.from_numpy(order).to(graph.indices.device))


def _ranks(order: Tensor) -> Tensor:
    """Place of each node in a list of all nodes."""
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(len(order), device=order.device)
    return ranks


def ordered_graphs(
    recorder: Recorder, family: str, arguments: argparse.Namespace, device: torch.device
) -> Iterator[tuple[str, Csr]]:
    """Each order that was asked for and can be had, with the CSR in it."""
    graph = generated(recorder, family, arguments, device)
    for order in arguments.orders:
        row = {"kind": "order", "system": f"order {order}", "graph": family, "seed": arguments.seed}
        try:
            begin = time.perf_counter()
            if order == "given":
                ordered = graph
            else:
                if order == "planted":
                    new_ids = planted_order(graph, arguments.seed)
                else:
                    new_ids = found_order(graph, 4 * max(arguments.widths))
                row = row | {"value": time.perf_counter() - begin, "unit": "s"}
                ordered = graph.renumbered(new_ids)
        except Exception as error:
            recorder.add(row | {"error": f"{type(error).__name__}: {error}"})
            continue
        if order != "given":
            recorder.add(row)
        yield order, Csr(ordered.indptr.int(), ordered.indices)
        del ordered
        free_memory()


def measure_bounds(recorder: Recorder, arguments: argparse.Namespace, device: torch.device) -> None:
    """Rows of the copy rate and of the gather out of the cache, in bytes per second."""
    from bounds import copy_rate, gather_rate

    rate, timing = copy_rate(device, arguments.copied_bytes)
    row = {"kind": "bound", "system": "copy", "shape": f"{arguments.copied_bytes >> 20} MiB"}
    recorder.add(row | {"value": rate, "unit": "B/s", "timing": vars(timing)})
    for dtype in arguments.dtypes:
        for width in arguments.widths:
            if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
                row = {"kind": "bound", "system": "gather from cache", "dtype": dtype, "shape": f"F={width}"}
                recorder.add(row | {"error": "a kernel of Triton: needs a GPU, or TRITON_INTERPRET=1"})
                continue
            best = gather_rate(device, width, DTYPES[dtype], **arguments.gather)
            row = {"kind": "bound", "system": "gather from cache", "dtype": dtype, "shape": f"F={width}"}
            recorder.add(
                row
                | {"value": best["bytes_per_second"], "unit": "B/s", "width": width, "config": best["config"]}
                | {"timing": vars(best["timing"])}
            )


def measure_products(recorder: Recorder, arguments: argparse.Namespace, device: torch.device) -> None:
    """Rows of every system on every graph, order, type and width.

    After the first order only those direct ways to call cuSPARSE run again that took at most twice as long as the
    fastest there, for the type and width.
    """
    for family in arguments.families:
        in_reach: dict[tuple[str, int], list[str]] = {}
        for order, csr in ordered_graphs(recorder, family, arguments, device):
            sums = SampledSums(csr)
            for dtype in arguments.dtypes:
                for width in arguments.widths:
                    generator = torch.Generator(device=device).manual_seed(arguments.seed)
                    x = torch.randn(csr.num_nodes, width, device=device, generator=generator).to(DTYPES[dtype])
                    row = {"kind": "spmm", "graph": family, "order": order, "dtype": dtype, "shape": f"F={width}"}
                    row |= {"width": width, "num_nodes": csr.num_nodes, "num_edges": csr.num_edges}
                    is_first = (dtype, width) not in in_reach
                    measured = []
                    for system in arguments.systems:
                        if system.startswith("cusparse") and not is_first and system not in in_reach[dtype, width]:
                            continue
                        done = recorder.measure(
                            row | {"system": system, "seed": arguments.seed, "flushed": True},
                            lambda csr=csr, x=x, system=system: SYSTEMS[system](csr, x),
                            lambda result, x=x, sums=sums: sums.problem(result, x),
                            budget_seconds=arguments.budget_seconds,
                        )
                        if system.startswith("cusparse") and "median_ms" in done:
                            measured.append((done["median_ms"], system))
                    if is_first:
                        least = min(measured, default=(0.0, ""))[0]
                        in_reach[dtype, width] = [each for ms, each in measured if ms <= 2 * least]
                    del x
            if device.type == "cuda" and order == "given" and "torch.sparse" in arguments.systems:
                name_kernels(recorder, family, csr, arguments)


def name_kernels(recorder: Recorder, family: str, csr: Csr, arguments: argparse.Namespace) -> None:
    """Which kernels of cuSPARSE torch's choice of algorithm comes to."""
    for dtype in arguments.dtypes:
        x = torch.ones(csr.num_nodes, arguments.widths[0], dtype=DTYPES[dtype], device=csr.indices.device)
        row = {"kind": "kernels", "system": "torch.sparse", "graph": family, "dtype": dtype}
        try:
            recorder.add(row | {"kernels": kernel_names(torch_sparse(csr, x))[:3]})
        except Exception as error:
            recorder.add(row | {"error": f"{type(error).__name__}: {error}"})


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options, and what depends on the device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--nodes", type=int, default=FULL_NODES)
    parser.add_argument("--arcs", type=int, default=FULL_ARCS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=["given", "planted", "found"])
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=["fp32", "bf16"])
    parser.add_argument("--widths", nargs="+", type=int, default=[128, 256])
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--budget-seconds", type=float, default=0.3, help="timed calls of one case together")
    parser.add_argument("--without-bounds", action="store_true")
    parser.add_argument("--out", type=Path, help="folder for kernels.jsonl")
    options = parser.parse_args(arguments)
    is_gpu = torch.device(options.device).type == "cuda"
    options.copied_bytes = 1 << 30 if is_gpu else 1 << 22
    options.gather = {}
    if not is_gpu:  # Triton's interpreter, to see that it runs
        options.gather = {"table_bytes": 1 << 12, "gathered_bytes": 1 << 16}
        options.gather["configs"] = [{"edges": 64, "unroll": 8, "num_warps": 1}]
    return options


def main(given: list[str] | None = None) -> Recorder:
    """Run what the options ask for."""
    arguments = parse(given)
    device = torch.device(arguments.device)
    recorder = Recorder(None if arguments.out is None else arguments.out / "kernels.jsonl", device)
    if not arguments.without_bounds:
        measure_bounds(recorder, arguments, device)
    measure_products(recorder, arguments, device)
    return recorder


if __name__ == "__main__":
    main()
