"""SpMM on one GPU: exact first, then beside cuSPARSE at every width, in random and in clustered node order.

The graph has the sizes of ogbn-products (2,449,029 nodes, 120.4 M arcs): power-law in-degrees capped at 3,000, sources
drawn by degree, 80 % of them inside one of 1,880 communities. It is made in torch on the GPU. Nothing is timed when a
result is wrong.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nugnn.kernels.row_schedule import row_schedule
from nugnn.kernels.spmm import spmm, spmm_sum
from nugnn.kernels.spmm.gpu_aggregate import aggregate_rows, aligned_rows, in_edges
from nugnn.kernels.spmm.reference import spmm_reference
from nugnn.kernels.spmm.tiles import Tile, choose_tile
from nugnn.kernels.structure import Structure

WIDTHS = (1, 4, 16, 47, 64, 100, 128, 256, 512, 1024)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DEGREE_CAP = 3_000
EXPONENT = 1.9


def make_graph(num_nodes: int, num_arcs: int, num_communities: int, seed: int, shuffled: bool) -> Structure:
    """In-edges of a graph whose communities are runs of node ids, or whose ids are shuffled."""
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def uniform(count: int) -> Tensor:
        return torch.rand(count, generator=generator, device="cuda", dtype=torch.float64)

    # Pareto weights, scaled until they sum to the arcs below the cap
    weight = uniform(num_nodes).clamp(min=1e-12) ** (-1 / (EXPONENT - 1))
    low, high = 1e-6, 1e6
    for _ in range(60):
        scale = (low * high) ** 0.5
        total = float((weight * scale).clamp(max=DEGREE_CAP).sum())
        low, high = (scale, high) if total < num_arcs else (low, scale)
    degree = (weight * low).clamp(max=DEGREE_CAP)
    counts = (degree + uniform(num_nodes)).long()  # rounded at random, so that the sum stays
    num_edges = int(counts.sum())
    cumulative = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
    bounds = torch.arange(num_communities + 1, device="cuda") * num_nodes // num_communities
    new_id = torch.randperm(num_nodes, generator=generator, device="cuda") if shuffled else None
    order = None if new_id is None else torch.argsort(new_id)  # old ids of rows in their new order
    row_counts = counts if order is None else counts[order]
    indptr = torch.zeros(num_nodes + 1, dtype=torch.int64, device="cuda")
    torch.cumsum(row_counts, 0, out=indptr[1:])
    indices = torch.empty(num_edges, dtype=torch.int32, device="cuda")
    for begin in range(0, num_edges, 1 << 24):
        end = min(num_edges, begin + (1 << 24))
        row = torch.searchsorted(indptr, torch.arange(begin, end, device="cuda"), right=True) - 1
        old = row if order is None else order[row]
        community = torch.searchsorted(bounds, old, right=True) - 1
        inside = uniform(end - begin) < 0.8
        first = torch.where(inside, cumulative[bounds[community]], 0)
        last = torch.where(inside, cumulative[bounds[community + 1]], cumulative[-1])
        source = torch.searchsorted(cumulative, first + uniform(end - begin) * (last - first), right=True) - 1
        source = source.clamp(0, num_nodes - 1)
        indices[begin:end] = (source if new_id is None else new_id[source]).int()
    return Structure(num_nodes, indptr, indices)


def milliseconds(function: Callable[[], object], repeats: int, warmup: int = 2) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile."""
    for _ in range(warmup):
        function()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) for start, end in events)
    return statistics.median(times), times[len(times) // 5], times[-1 - len(times) // 5]


def copy_bandwidth() -> float:
    """Bytes per second, read and written."""
    x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    return 2 * len(x) / (milliseconds(lambda: y.copy_(x), 10)[0] / 1e3)


def as_csr(structure: Structure, dtype: torch.dtype) -> Tensor:
    """For cuSPARSE at its best: 32-bit offsets and indices, values of the features' type."""
    return torch.sparse_csr_tensor(
        structure.indptr.int(),
        structure.indices,
        torch.ones(structure.num_edges, dtype=dtype, device="cuda"),
        (structure.num_dst, structure.num_src),
        check_invariants=False,
    )


def check(structure: Structure) -> Iterator[str]:
    """Names of what disagrees with float64 beyond the bound of a sum of in-degree terms and one rounding."""
    generator = torch.Generator(device="cuda").manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    cases = [("copy_lhs", (width,), None) for width in (1, 4, 16, 47, 100, 128, 256, 320)]
    cases += [("mul", (128,), (1,)), ("mul", (4, 32), (4, 1)), ("mul", (24,), (24,)), ("copy_rhs", None, (16,))]
    cases += [(op, (4, 8), (4, 1)) for op in ("add", "sub", "div")]
    in_half = [((width,), None) for width in (4, 47, 128)] + [((4, 32), (4, 1))]  # a second to compile each
    degree = structure.in_degrees
    most = int(torch.bincount(structure.indices).max())
    for op, u_shape, e_shape in cases:
        for dtype in (torch.float32, torch.bfloat16):
            if dtype != torch.float32 and (u_shape, e_shape) not in in_half:
                continue
            for reduce in ("sum", "max"):
                if reduce == "max" and op in ("sub", "div", "add"):
                    continue
                if reduce == "max" and u_shape in ((1,), (16,), (100,), (256,)):
                    continue
                u = None if u_shape is None else random(structure.num_src, *u_shape).to(dtype).requires_grad_()
                e = None if e_shape is None else random(structure.num_edges, *e_shape).abs().add(0.5).to(dtype)
                e = None if e is None else e.requires_grad_()
                leaves = [x for x in (u, e) if x is not None]
                wide = [None if x is None else x.detach().double().requires_grad_() for x in (u, e)]
                out = spmm(structure, op, reduce, u, e)
                exact = spmm_reference(structure, op, reduce, *wide)
                grad = random(*out.shape).to(dtype)
                grads = torch.autograd.grad(out, leaves, grad)
                exact_grads = torch.autograd.grad(exact, [x for x in wide if x is not None], grad.double())
                absolute = [None if x is None else x.detach().abs().requires_grad_() for x in wide]
                mass = spmm_reference(structure, {"sub": "add"}.get(op, op), "sum", *absolute)
                mass_grads = torch.autograd.grad(mass, [x for x in absolute if x is not None], grad.double().abs())
                unit = torch.finfo(torch.float32).eps / 2
                rounding = 0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
                name = f"{op} {reduce} {u_shape} {e_shape} {dtype}"
                terms = degree.view(-1, *[1] * (out.dim() - 1)) + 4
                finite = exact.isfinite()
                if not torch.equal(out.double()[~finite], exact[~finite]):
                    yield f"{name}: empty rows"
                bound = 1.01 * terms * unit * mass + 1.01 * rounding * exact.abs() + 1e-37
                worst = float(((out.double() - exact).abs() / bound)[finite].max().detach())
                if not worst <= 1:
                    yield f"{name}: output, {worst:.2f} of the bound"
                if reduce == "max" and not op.startswith("copy"):
                    continue  # float32 messages may tie where float64 ones do not
                for mine, right, weight in zip(grads, exact_grads, mass_grads, strict=True):
                    bound = 1.02 * (most + 320) * unit * weight.abs() + 1.01 * rounding * right.abs() + 1e-37
                    worst = float(((mine.double() - right).abs() / bound).max())
                    if not worst <= 1:
                        yield f"{name}: gradient of shape {tuple(mine.shape)}, {worst:.2f} of the bound"
                if not torch.equal(out, spmm(structure, op, reduce, u, e)):
                    yield f"{name}: two runs differ"


def check_of_scales(structure: Structure) -> Iterator[str]:
    x = torch.randn(structure.num_src, 64, device="cuda", requires_grad=True)
    scale = structure.in_degrees.clamp(min=1).float() ** -0.5
    out = spmm_sum(structure, x, None, scale, scale)
    wide = x.detach().double().requires_grad_()
    exact = spmm_reference(structure, "copy_lhs", "sum", wide * scale.double()[:, None], None) * scale.double()[:, None]
    (mine,), (right,) = torch.autograd.grad(out.sum(), x), torch.autograd.grad(exact.sum(), wide)
    for got, expected in ((out, exact), (mine, right)):
        if not torch.allclose(got.double(), expected, rtol=1e-4, atol=1e-3):
            yield "scaled sum"


class Report:
    """Prints rows as they come and keeps them."""

    def __init__(self, seconds: float) -> None:
        self.rows: list[dict[str, Any]] = []
        self._end = time.monotonic() + seconds

    def has_time(self, what: str) -> bool:
        left = self._end - time.monotonic()
        if left <= 0:
            print(f"no time left for {what}")
        return left > 0

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        shown = (f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
        print("  ".join(shown), flush=True)


def time_sums(report: Report, structure: Structure, order: str, bandwidth: float, widths: tuple, repeats: int) -> None:
    for dtype_name, dtype in DTYPES.items():
        csr = as_csr(structure, dtype)
        for width in widths:
            if not report.has_time(f"sums {order} {dtype_name} F = {width}"):
                return
            x = torch.randn(structure.num_src, width, device="cuda").to(dtype)
            ours = milliseconds(lambda x=x: spmm(structure, "copy_lhs", "sum", x, None), repeats)
            theirs = milliseconds(lambda x=x, csr=csr: csr @ x, repeats)
            gathered = structure.num_edges * width * x.element_size()
            floor = 2 * x.numel() * x.element_size() + 4 * structure.num_edges + 8 * structure.num_dst
            report.add(
                what="sum", order=order, dtype=dtype_name, F=width, ms=ours[0], p20=ours[1], p80=ours[2],
                cusparse_ms=theirs[0], ratio=theirs[0] / ours[0], gathered_TBps=gathered / ours[0] / 1e9,
                floor_ms=floor / bandwidth * 1e3,
            )  # fmt: skip
        del csr


def time_gradients(report: Report, structure: Structure, order: str, repeats: int) -> None:
    """Forward with weights, backward of sums, maxima forward and backward."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    transposed = structure.transposed
    row_schedule(transposed.indptr)
    torch.cuda.synchronize()
    report.add(what="transpose", order=order, seconds=time.perf_counter() - start)
    for dtype_name, shape, e_shape in (
        ("bf16", (128,), None),
        ("fp32", (128,), None),
        ("bf16", (128,), (1,)),
        ("bf16", (4, 32), (4, 1)),
        ("fp32", (4, 32), (4, 1)),
    ):
        for reduce in ("sum", "max"):
            if e_shape is not None and reduce == "max":
                continue
            if not report.has_time(f"gradients {order} {dtype_name} {shape} {reduce}"):
                return
            dtype = DTYPES[dtype_name]
            u = torch.randn(structure.num_src, *shape, device="cuda").to(dtype).requires_grad_()
            e = None
            if e_shape is not None:
                e = torch.rand(structure.num_edges, *e_shape, device="cuda").to(dtype).requires_grad_()
            op = "copy_lhs" if e is None else "mul"
            forward = milliseconds(lambda u=u, e=e, op=op, r=reduce: spmm(structure, op, r, u, e), repeats)
            out = spmm(structure, op, reduce, u, e)
            grad = torch.randn_like(out)
            row: dict[str, Any] = {"forward_ms": forward[0]}
            for name, leaf in (("grad_u_ms", u), ("grad_e_ms", e)):
                if leaf is not None:
                    row[name] = milliseconds(
                        lambda out=out, leaf=leaf, grad=grad: torch.autograd.grad(out, leaf, grad, retain_graph=True),
                        repeats,
                    )[0]
            report.add(what=f"{op} {reduce}", order=order, dtype=dtype_name, u=shape, e=e_shape, **row)
    if report.has_time("torch scatter"):
        x = torch.randn(structure.num_src, 64, device="cuda")
        dst = structure.dst.long()

        def scatter() -> Tensor:  # all messages at once would not fit
            out = torch.full((structure.num_dst, 64), -torch.inf, device="cuda")
            for begin in range(0, structure.num_edges, 1 << 23):
                part = slice(begin, begin + (1 << 23))
                message = x.index_select(0, structure.indices[part])
                out.scatter_reduce_(0, dst[part, None].expand(message.shape), message, "amax")
            return out

        theirs = milliseconds(scatter, 3, 1)
        ours = milliseconds(lambda: spmm(structure, "copy_lhs", "max", x, None), repeats)
        report.add(what="max", order=order, dtype="fp32", F=64, ms=ours[0], scatter_reduce_ms=theirs[0])


def other_tiles(chosen: Tile, row_bytes: int) -> Iterator[Tile]:
    """More or fewer loads in flight, other shares of a warp for rows and edges, programs of several warps and rows."""
    if row_bytes <= 16:
        shapes = ((16, 4, 4, 1, 1), (1, 32, 1, 1, 1), (1, 32, 2, 1, 1), (2, 16, 4, 4, 1), (4, 32, 2, 4, 4))
        for rows, edges, unroll, sets, warps in shapes:
            yield Tile(rows, edges, unroll, 1, chosen.columns, sets, warps)
        return
    for factor in (0.5, 2):
        yield replace(chosen, unroll=max(1, int(chosen.unroll * factor)))
    if row_bytes > 128:
        lanes = max(1, 512 // row_bytes)
        shapes = ((2, 4, 4), (4, 8, 8), (8, 4, 8), (8, 8, 4), (8, 8, 8), (16, 4, 8), (16, 8, 8), (16, 16, 8))
        for rows, sets, unroll in shapes:
            unroll = min(unroll, max(1, 8 * 512 // row_bytes))
            yield Tile(rows, lanes, unroll, 1, chosen.columns, sets, rows)
        return
    for rows in (1, 2, 4, 8, 16, 32):
        for edges in (1, 2, 4, 8, 16):
            for unroll in (2, 4, 8):
                if 1024 <= rows * edges * unroll * max(4, row_bytes) <= 8192:
                    yield Tile(rows, edges, unroll, 1, chosen.columns)
    yield replace(chosen, row_sets=4)
    yield replace(chosen, rows=chosen.rows * 4, row_sets=4, num_warps=4)


def tune(report: Report, structure: Structure, order: str, widths: tuple, repeats: int) -> None:
    """Other tiles than the chosen one, best first."""
    edges = in_edges(structure)
    for dtype_name in ("bf16", "fp32"):
        dtype = DTYPES[dtype_name]
        for width in widths:
            x = torch.randn(structure.num_src, width, device="cuda").to(dtype)
            columns = aligned_rows(x, structure.num_edges).shape[1]
            mean = -(-structure.num_edges // structure.num_dst)
            chosen = choose_tile(1, columns, x.element_size(), mean)
            tiles = {chosen, *other_tiles(chosen, chosen.columns * x.element_size())}
            results = []
            for tile in tiles:
                if not report.has_time(f"tiles {order} {dtype_name} F = {width}"):
                    break
                run = partial(aggregate_rows, edges, x, 1, tile=tile)
                results.append((milliseconds(run, repeats, 1)[0], tile))
            results.sort(key=lambda pair: pair[0])
            for rank, (took, tile) in enumerate(results):
                if rank < 4 or tile == chosen:
                    row = {"order": order, "dtype": dtype_name, "F": width, "ms": took}
                    report.add(what="tile", **row, chosen=tile == chosen, tile=str(tile))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2_449_029)
    parser.add_argument("--arcs", type=int, default=120_400_000)
    parser.add_argument("--communities", type=int, default=1_880)
    parser.add_argument("--orders", default="random,clustered")
    parser.add_argument("--widths", default=",".join(map(str, WIDTHS)))
    parser.add_argument("--parts", default="check,sums,gradients", help="of check, sums, gradients, tune")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=140, help="nothing new is started after so long")
    parser.add_argument("--json", help="file for the rows")
    arguments = parser.parse_args()
    parts, report = arguments.parts.split(","), Report(arguments.seconds)
    widths = tuple(map(int, arguments.widths.split(",")))
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    bandwidth = copy_bandwidth()
    report.add(
        what="machine", device=torch.cuda.get_device_name(), torch=torch.__version__, commit=git.stdout.strip(), seed=0,
        copy_TBps=bandwidth / 1e12,
    )  # fmt: skip
    if "check" in parts:
        start = time.perf_counter()
        small = make_graph(3_000, 100_000, 20, 0, True)
        wrong = [*check(small), *check_of_scales(small)]
        print(f"checked in {time.perf_counter() - start:.0f} s:", "all within their bounds" if not wrong else "")
        if wrong:
            raise SystemExit("\n".join(wrong))
    for order in arguments.orders.split(","):
        start = time.perf_counter()
        structure = make_graph(arguments.nodes, arguments.arcs, arguments.communities, 0, order == "random")
        schedule = row_schedule(structure.indptr)
        torch.cuda.synchronize()
        report.add(
            what="graph", order=order, nodes=structure.num_dst, arcs=structure.num_edges,
            largest=int(structure.in_degrees.max()), pieces=schedule.num_pieces, groups=schedule.num_groups,
            seconds=time.perf_counter() - start,
        )  # fmt: skip
        if "sums" in parts:
            time_sums(report, structure, order, bandwidth, widths, arguments.repeats)
        if "gradients" in parts:
            time_gradients(report, structure, order, arguments.repeats)
        if "tune" in parts:
            tune(report, structure, order, widths, arguments.repeats)
        del structure, schedule
        torch.cuda.empty_cache()
    ratios = [row["ratio"] for row in report.rows if row["what"] == "sum"]
    if ratios:
        report.add(
            what="cuSPARSE", least=min(ratios), median=statistics.median(ratios), slower=sum(r < 1 for r in ratios)
        )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(report.rows, file, indent=1)


if __name__ == "__main__":
    main()
