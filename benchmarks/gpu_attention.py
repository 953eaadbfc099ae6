"""Attention on a GPU: correctness, then forward, backward and memory of the fused kernels on a products-like graph.

    python benchmarks/gpu_attention.py                          # everything, within 150 seconds
    python benchmarks/gpu_attention.py --only check             # one part: check, speed, sweep, baseline
    python benchmarks/gpu_attention.py --num-nodes 300000 --num-edges 12000000

The graph is made on the device: power-law in-degrees (exponent 1.9, capped at 3,000), 1,880 communities with 80 % of
the edges inside; once with nodes in random order and once with communities contiguous. No speed is printed when a
check fails. Times are medians of repeated calls between device events. Baselines run in the same process, forward,
float32: gathers, scatter softmax and one cuSPARSE product per head, and our own operators one by one; for GAT on the
whole graph, for GATv2, whose steps hold a value for each edge, head and feature, on the first 24 M edges.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from nugnn.kernels.attention import AttentionDropout, gat_attention, gatv2_attention
from nugnn.kernels.attention import gpu as attention_gpu
from nugnn.kernels.attention.reference import gat_attention_reference, gatv2_attention_reference
from nugnn.kernels.edge_softmax import edge_softmax
from nugnn.kernels.edge_softmax.gpu import softmax_backward
from nugnn.kernels.edge_softmax.reference import edge_softmax_reference
from nugnn.kernels.philox import RandomKey
from nugnn.kernels.rows import IdRuns
from nugnn.kernels.sddmm import sddmm
from nugnn.kernels.sddmm.reference import sddmm_reference
from nugnn.kernels.spmm import spmm
from nugnn.kernels.structure import Structure

NUM_COMMUNITIES = 1880
CHECKED = [
    (4, 32, torch.float32, 0.0),
    (4, 32, torch.float32, 0.6),
    (4, 32, torch.bfloat16, 0.0),
    (4, 64, torch.float32, 0.0),
    (3, 5, torch.float64, 0.6),
    (1, 47, torch.float16, 0.6),
    (2, 700, torch.float32, 0.0),
]
"""Heads, width, type and dropout. Few, because every row compiles four kernels; the laws are in the tests."""
TILES = [(2, 1, 1), (4, 1, 1), (8, 1, 1), (16, 1, 1), (4, 1, 2), (4, 1, 3), (8, 1, 3), (8, 2, 1)]
"""Edges at once, warps and stages for `sweep`."""
SECONDS = 150.0
_START = time.perf_counter()


# -- graphs -----------------------------------------------------------------------------------------------------------


def powerlaw_structure(num_nodes: int, num_edges: int, device: str, seed: int) -> Structure:
    """Communities contiguous; sources drawn by their weight, 80 % of them inside the destination's community."""
    generator = torch.Generator(device).manual_seed(seed)
    uniform = torch.rand(num_nodes, device=device, generator=generator, dtype=torch.float64)
    weights = uniform.clamp(min=1e-12) ** (-1 / 0.9)
    factor = num_edges / num_nodes / float(weights.mean())
    for _ in range(50):  # the cap takes edges away; scale until their number is right
        factor *= num_edges / float((weights * factor).clamp(1, 3000).sum())
    weights = (weights * factor).clamp(1, 3000)
    degrees = weights.round().long()
    indptr = torch.zeros(num_nodes + 1, dtype=torch.int64, device=device)
    torch.cumsum(degrees, 0, out=indptr[1:])
    total = torch.cat([weights.new_zeros(1), weights.cumsum(0)])
    bounds = torch.linspace(0, num_nodes, NUM_COMMUNITIES + 1, device=device).long()
    community = torch.bucketize(torch.arange(num_nodes, device=device), bounds, right=True) - 1
    low, high = total[bounds[community]], total[bounds[community + 1]]
    indices = torch.empty(int(indptr[-1]), dtype=torch.int32, device=device)
    step = 1 << 24
    for begin in range(0, len(indices), step):
        edges = torch.arange(begin, min(begin + step, len(indices)), device=device)
        dst = torch.searchsorted(indptr, edges, right=True) - 1
        inside = torch.rand(len(edges), device=device, generator=generator) < 0.8
        draw = torch.rand(len(edges), device=device, generator=generator, dtype=torch.float64)
        draw = torch.where(inside, low[dst] + draw * (high[dst] - low[dst]), draw * total[-1])
        indices[edges] = (torch.searchsorted(total, draw, right=True) - 1).clamp(0, num_nodes - 1).int()
    return Structure(num_nodes, indptr, indices)


def shuffled(structure: Structure, seed: int) -> Structure:
    """The same graph with its nodes in random order."""
    device = structure.indptr.device
    generator = torch.Generator(device).manual_seed(seed)
    old_of_new = torch.randperm(structure.num_dst, device=device, generator=generator)
    new_of_old = torch.empty_like(old_of_new)
    new_of_old[old_of_new] = torch.arange(structure.num_dst, device=device)
    degrees = structure.indptr.diff()[old_of_new]
    indptr = torch.zeros_like(structure.indptr)
    torch.cumsum(degrees, 0, out=indptr[1:])
    shift = structure.indptr[:-1][old_of_new] - indptr[:-1]
    indices = torch.empty_like(structure.indices)
    step = 1 << 24
    for begin in range(0, len(indices), step):
        edges = torch.arange(begin, min(begin + step, len(indices)), device=device)
        rows = torch.searchsorted(indptr, edges, right=True) - 1
        indices[edges] = new_of_old[structure.indices[edges + shift[rows]].long()].int()
    return Structure(structure.num_src, indptr, indices)


# -- checks -----------------------------------------------------------------------------------------------------------


def hub_structure(device: str, seed: int) -> Structure:
    """2,000 rows: empty ones, light ones, and one with 50,000 edges; sources with a hub as well."""
    generator = torch.Generator().manual_seed(seed)
    degrees = torch.randint(0, 40, (2000,), generator=generator)
    degrees[::7] = 0
    degrees[1234] = 50_000
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
    indices = torch.randint(0, 2500, (int(indptr[-1]),), generator=generator, dtype=torch.int32)
    indices[torch.rand(len(indices), generator=generator) < 0.2] = 77
    return Structure(2500, indptr.to(device), indices.to(device))


def relative_error(got: Tensor, exact: Tensor) -> float:
    return float(((got.double() - exact).norm() / exact.norm().clamp(min=1e-300)).detach())


def limit(dtype: torch.dtype) -> float:
    """Of the relative error in norm: rounding of the result for half types; for float32 that of sums of 50,000 terms of
    both signs, which is some 1e-4 on the CPU as well.
    """
    return {torch.float64: 1e-11, torch.float32: 1e-3}.get(dtype, 3 * torch.finfo(dtype).eps)


def check(device: str) -> None:
    worst: dict[str, float] = {}
    structure = hub_structure(device, 1)
    runs = IdRuns(torch.arange(structure.num_dst, device=device) * 10**7 + 2**33, structure.indptr)
    key = RandomKey(1, 2, 3)
    for heads, dim, dtype, p in CHECKED:
        dropout = AttentionDropout(p, key, runs) if p else None
        for kind in ("gat", "gatv2"):
            error = attention_error(structure, kind, heads, dim, dtype, dropout)
            name = f"{kind} {str(dtype)[6:]}"
            worst[name] = max(worst.get(name, 0.0), error)
            if not error <= limit(dtype):
                sys.exit(f"FAILED: {kind} {heads}x{dim} {dtype} p={p}: relative error {error:.2e}")
    for dtype in (torch.float32, torch.bfloat16):
        error = edge_operator_error(structure, dtype)
        worst[f"edge operators {str(dtype)[6:]}"] = error
        if not error <= limit(dtype):
            sys.exit(f"FAILED: edge operators {dtype}: relative error {error:.2e}")
    print("checks passed; largest relative error in norm (outputs and gradients), hub of 50,000 edges:")
    for name, error in worst.items():
        print(f"  {name:28s} {error:.1e}")


def layer_inputs(
    structure: Structure, kind: str, heads: int, dim: int, dtype: torch.dtype, seed: int = 0
) -> list[Tensor]:
    device = structure.indptr.device
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator, dtype=torch.float32).to(dtype)

    x = randn(structure.num_src, heads, dim)
    if kind == "gat":
        return [x, randn(structure.num_src, heads), randn(structure.num_dst, heads)]
    return [x, randn(structure.num_dst, heads, dim), randn(heads, dim)]


def attention_error(
    structure: Structure, kind: str, heads: int, dim: int, dtype: torch.dtype, dropout: AttentionDropout | None
) -> float:
    """Largest relative error of output and gradients; also that two runs are equal bit for bit."""
    function, exact_function = {
        "gat": (gat_attention, gat_attention_reference),
        "gatv2": (gatv2_attention, gatv2_attention_reference),
    }[kind]
    inputs = [x.requires_grad_() for x in layer_inputs(structure, kind, heads, dim, dtype)]
    out = function(structure, *inputs, 0.2, dropout)
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, inputs, grad)
    again = function(structure, *inputs, 0.2, dropout)
    if not torch.equal(out, again) or not all(map(torch.equal, grads, torch.autograd.grad(again, inputs, grad))):
        sys.exit(f"FAILED: {kind} {heads}x{dim} {dtype}: two runs differ")
    wide = [x.detach().double().requires_grad_() for x in inputs]
    options = () if dropout is None else (dropout.p, dropout.key, dropout.ids(structure))
    exact = exact_function(structure, *wide, 0.2, *options)
    exact_grads = torch.autograd.grad(exact, wide, grad.double())
    return max(relative_error(a, b) for a, b in zip((out, *grads), (exact, *exact_grads), strict=True))


def edge_operator_error(structure: Structure, dtype: torch.dtype) -> float:
    """Largest relative error of SDDMM in its forms and of edge softmax, with gradients."""
    device = structure.indptr.device
    rows = {"u": structure.num_src, "v": structure.num_dst, "e": structure.num_edges}
    errors = []
    for op, lt, rt, a, b in (
        ("add", "u", "v", (4,), (4,)),
        ("sub", "v", "u", (3, 1), (3, 7)),
        ("mul", "u", "e", (4, 16), (4, 1)),
        ("div", "e", "v", (5,), (5,)),
        ("dot", "u", "v", (2, 33), (2, 33)),
    ):
        lhs, rhs = (torch.randn(rows[t], *shape, device=device).to(dtype) for t, shape in ((lt, a), (rt, b)))
        rhs = (rhs.sign() * (rhs.abs() + 0.5)).masked_fill(rhs == 0, 1).detach()
        errors.append(
            _error(
                lambda x, y, op=op, lt=lt, rt=rt: sddmm(structure, op, x, y, lt, rt),
                lambda x, y, op=op, lt=lt, rt=rt: sddmm_reference(structure, op, x, y, lt, rt),
                (lhs, rhs),
            )
        )
    for columns in (1, 4):
        scores = (3 * torch.randn(structure.num_edges, columns, device=device)).to(dtype)
        errors.append(
            _error(lambda s: edge_softmax(structure, s), lambda s: edge_softmax_reference(structure, s), (scores,))
        )
    return max(errors)


def _error(function: Callable[..., Tensor], exact_function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> float:
    inputs = tuple(x.requires_grad_() for x in inputs)
    out = function(*inputs)
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, inputs, grad)
    wide = tuple(x.detach().double().requires_grad_() for x in inputs)
    exact = exact_function(*wide)
    exact_grads = torch.autograd.grad(exact, wide, grad.double())
    return max(relative_error(a, b) for a, b in zip((out, *grads), (exact, *exact_grads), strict=True))


# -- timing -----------------------------------------------------------------------------------------------------------


def milliseconds(function: Callable[[], Any], repeats: int = 7) -> float:
    """Median over ``repeats`` calls between device events, after two calls to warm up."""
    function()
    function()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def out_of_time(what: str, reserve: float = 8.0) -> bool:
    if time.perf_counter() - _START > SECONDS - reserve:
        print(f"  {what}: left out, {SECONDS:.0f} s are over")
        return True
    return False


def structures(num_nodes: int, num_edges: int, device: str) -> Iterator[tuple[str, Structure]]:
    contiguous = powerlaw_structure(num_nodes, num_edges, device, 0)
    random_order = shuffled(contiguous, 1)
    yield "random", random_order
    del random_order
    yield "communities", contiguous


def copy_terabytes_per_second(device: torch.device) -> float:
    source = torch.empty(1 << 28, device=device)
    return 2 * source.numel() * 4 / milliseconds(source.clone) / 1e9


def speed(order: str, structure: Structure) -> None:
    """Forward, forward + backward and peak memory, fused."""
    print(f"  copy {copy_terabytes_per_second(structure.indptr.device):.2f} TB/s")
    begin = time.perf_counter()
    _ = structure.transposed
    torch.cuda.synchronize()
    print(f"  transposed structure made in {time.perf_counter() - begin:.2f} s")
    for kind, heads, dim in (("gatv2", 4, 32), ("gat", 4, 64)):
        for dtype, p in ((torch.float32, 0.0), (torch.bfloat16, 0.0), (torch.float32, 0.5)):
            name = f"{order} {kind} {heads}x{dim} {str(dtype)[6:]}{' dropout' if p else ''}"
            if out_of_time(name):
                return
            print(f"  {name:42s} {measured(structure, kind, heads, dim, dtype, p)}", flush=True)


def measured(structure: Structure, kind: str, heads: int, dim: int, dtype: torch.dtype, p: float) -> str:
    function = gat_attention if kind == "gat" else gatv2_attention
    inputs = [x.requires_grad_() for x in layer_inputs(structure, kind, heads, dim, dtype)]
    runs = IdRuns(structure.indptr[:-1].clone(), structure.indptr)
    dropout = AttentionDropout(p, RandomKey(0, 0, 0), runs) if p else None
    grad = torch.randn(structure.num_dst, heads, dim, device=structure.indptr.device).to(dtype)
    with torch.no_grad():
        forward = milliseconds(lambda: function(structure, *inputs, 0.2, dropout))
    both = milliseconds(
        lambda: torch.autograd.grad(function(structure, *inputs, 0.2, dropout), inputs, grad), repeats=5
    )
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(function(structure, *inputs, 0.2, dropout), inputs, grad)
    extra = torch.cuda.max_memory_allocated() - before
    given = sum(x.numel() * x.element_size() for x in inputs)
    gathered = structure.num_edges * heads * dim * inputs[0].element_size()
    passes = (
        "" if p else "backward alone {1:.1f} + {2:.1f} ms   ".format(*pass_times(structure, operands_of(kind, inputs)))
    )
    return (
        f"forward {forward:6.1f} ms ({gathered / forward / 1e9:5.2f} TB/s gathered)   with backward {both:6.1f} ms   "
        f"{passes}inputs {given / 2**30:5.2f} GiB, peak above them {extra / given:4.2f} x"
    )


def sweep(order: str, structure: Structure) -> None:
    """Each kernel under other tiles: how many edges at once, on how many warps."""
    for kind, heads, dim, dtype in (
        ("gatv2", 4, 32, torch.float32),
        ("gatv2", 4, 32, torch.bfloat16),
        ("gat", 4, 64, torch.float32),
    ):
        operands = operands_of(kind, layer_inputs(structure, kind, heads, dim, dtype))
        for block_edges, num_warps, num_stages in TILES:
            if out_of_time(f"sweep {kind} {dtype}"):
                return
            tile = attention_gpu.Tile(block_edges, heads, dim, num_warps, num_stages)
            times = pass_times(structure, operands, tile)
            print(
                f"  {order} {kind} {heads}x{dim} {str(dtype)[6:]:9s} edges {block_edges:2d} warps {num_warps} "
                f"stages {num_stages}: forward {times[0]:5.1f}  to dst {times[1]:5.1f}  to src {times[2]:5.1f} ms",
                flush=True,
            )


def operands_of(kind: str, inputs: list[Tensor]) -> Any:
    x, first, second = (y.detach() for y in inputs)
    if kind == "gat":
        return attention_gpu.Operands(x, first, second, None, 0.2)
    return attention_gpu.Operands(x, None, first, second, 0.2)


def pass_times(structure: Structure, operands: Any, tile: Any = None) -> tuple[float, float, float]:
    """Milliseconds of forward and of both backward passes, without dropout; with their own tiles when None."""
    none = attention_gpu.no_dropout(operands.x)
    out, stats = attention_gpu.attention_forward(structure, operands, none, tile)
    return (
        milliseconds(lambda: attention_gpu.attention_forward(structure, operands, none, tile), 3),
        milliseconds(lambda: attention_gpu.backward_to_dst(structure, operands, none, stats, out, tile), 3),
        milliseconds(lambda: attention_gpu.backward_to_src(structure, operands, none, stats, out, tile), 3),
    )


# -- baselines --------------------------------------------------------------------------------------------------------


def scatter_softmax(scores_EH: Tensor, dst: Tensor, num_dst: int) -> Tensor:
    """As PyG writes it: maximum, exponential, sum, each a scatter or gather."""
    where = dst[:, None].expand_as(scores_EH)
    largest = scores_EH.new_full((num_dst, scores_EH.shape[1]), -torch.inf).scatter_reduce(0, where, scores_EH, "amax")
    exponentials = (scores_EH - largest[dst]).exp()
    total = scores_EH.new_zeros(num_dst, scores_EH.shape[1]).scatter_add(0, where, exponentials)
    return exponentials / total[dst]


def per_head_cusparse(structure: Structure, weights_EH: Tensor, x_LHD: Tensor) -> Tensor:
    """One sparse product per head, with 32-bit offsets and indices."""
    indptr = structure.indptr.int()
    size = (structure.num_dst, structure.num_src)
    heads = [
        torch.sparse_csr_tensor(indptr, structure.indices, weights_EH[:, h].contiguous(), size, check_invariants=False)
        @ x_LHD[:, h].contiguous()
        for h in range(x_LHD.shape[1])
    ]
    return torch.stack(heads, 1)


def baseline(structure: Structure) -> None:
    """GAT 4x64 in full, GATv2 4x32 on a slice of the rows; forward, float32, beside the fused kernels."""
    dst = structure.dst.long()
    x, el, er = layer_inputs(structure, "gat", 4, 64, torch.float32)

    def gat_scatter() -> Tensor:
        scores = F.leaky_relu(el[structure.indices.long()] + er[dst], 0.2)
        return per_head_cusparse(structure, scatter_softmax(scores, dst, structure.num_dst), x)

    def gat_steps() -> Tensor:
        weights = edge_softmax(structure, F.leaky_relu(sddmm(structure, "add", el, er, "u", "v"), 0.2))
        return spmm(structure, "mul", "sum", x, weights[..., None])

    with torch.no_grad():
        fused = gat_attention(structure, x, el, er, 0.2)
        for name, function in (
            ("gather, scatter softmax, cuSPARSE per head", gat_scatter),
            ("our SDDMM, edge softmax and SpMM", gat_steps),
        ):
            if out_of_time(name):
                return
            difference = relative_error(function(), fused.double())
            print(f"  GAT 4x64 float32 {name:48s} {milliseconds(function, 3):7.1f} ms  (differs by {difference:.0e})")
        edge_pieces(structure, el, er)


def edge_pieces(structure: Structure, el: Tensor, er: Tensor) -> None:
    scores = torch.randn(structure.num_edges, 4, device=el.device)
    weights, grad = edge_softmax(structure, scores), torch.randn_like(scores)
    print(
        f"  pieces: SDDMM add {milliseconds(lambda: sddmm(structure, 'add', el, er, 'u', 'v'), 3):.1f} ms, edge "
        f"softmax {milliseconds(lambda: edge_softmax(structure, scores), 3):.1f} ms, its backward "
        f"{milliseconds(lambda: softmax_backward(structure.indptr, weights, grad), 3):.1f} ms"
    )


@torch.no_grad()
def gatv2_baseline(structure: Structure) -> None:
    """The (E, H, D) tensor limits it: the first rows up to 24 M edges."""
    num_rows = int(torch.searchsorted(structure.indptr, min(24_000_000, structure.num_edges), right=True)) - 1
    indptr = structure.indptr[: num_rows + 1].contiguous()
    part = Structure(structure.num_src, indptr, structure.indices[: int(indptr[-1])].contiguous())
    x, xr, attn = layer_inputs(part, "gatv2", 4, 32, torch.float32)
    dst = part.dst.long()

    def steps() -> Tensor:
        hidden = F.leaky_relu_(sddmm(part, "add", x, xr, "u", "v"), 0.2)
        scores = hidden.mul_(attn).sum(-1)
        del hidden
        return spmm(part, "mul", "sum", x, edge_softmax(part, scores)[..., None])

    def scattered() -> Tensor:
        hidden = F.leaky_relu_(x[part.indices.long()] + xr[dst], 0.2)
        scores = hidden.mul_(attn).sum(-1)
        del hidden
        return per_head_cusparse(part, scatter_softmax(scores, dst, part.num_dst), x)

    if out_of_time("GATv2 step by step"):
        return
    difference = relative_error(steps(), gatv2_attention(part, x, xr, attn, 0.2).double())
    ours, theirs = milliseconds(steps, 3), milliseconds(scattered, 3)
    fused = milliseconds(lambda: gatv2_attention(part, x, xr, attn, 0.2), 3)
    print(
        f"  GATv2 4x32 float32 on {part.num_edges / 1e6:.0f} M edges: gather, scatter softmax, cuSPARSE "
        f"{theirs:.1f} ms, our operators one by one {ours:.1f} ms, fused {fused:.1f} ms (differ by {difference:.0e})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["check", "speed", "sweep", "baseline"], action="append")
    parser.add_argument("--num-nodes", type=int, default=2_449_029)
    parser.add_argument("--num-edges", type=int, default=124_000_000)
    args = parser.parse_args()
    parts = args.only or ["check", "speed", "baseline", "sweep"]
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    import triton

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}")
    if "check" in parts:
        check("cuda")
        print(f"  after {time.perf_counter() - _START:.0f} s", flush=True)
    if set(parts) == {"check"}:
        return
    for order, structure in structures(args.num_nodes, args.num_edges, "cuda"):
        largest = int(structure.indptr.diff().max())
        print(
            f"{order} order: {structure.num_dst:,} nodes, {structure.num_edges:,} edges, largest in-degree {largest:,}"
        )
        print(f"  after {time.perf_counter() - _START:.0f} s", flush=True)
        if "speed" in parts:
            speed(order, structure)
        if "baseline" in parts and order == "random":
            baseline(structure)
            gatv2_baseline(structure)
        if "sweep" in parts and order == "random":
            sweep(order, structure)
        torch.cuda.empty_cache()
    print(f"{time.perf_counter() - _START:.0f} s")


if __name__ == "__main__":
    main()
