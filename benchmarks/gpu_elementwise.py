"""Element-wise kernels and losses on one GPU: equal to the CPU first, then milliseconds beside eager, compiled, copy.

    python benchmarks/gpu_elementwise.py                 # 2,449,029 x 256 in bfloat16 and float32; below 100 s
    python benchmarks/gpu_elementwise.py --rows 300000   # smaller
    python benchmarks/gpu_elementwise.py --no-compile    # without torch.compile, whose first call takes seconds

Results are one JSON row each: median, p20 and p80 of the milliseconds, bytes that have to move at the least, and their
time at the measured bandwidth of a copy. "ours" and the baselines run in turn, in the same process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from nugnn.kernels.cross_entropy import cross_entropy_rows
from nugnn.kernels.cross_entropy.reference import cross_entropy_rows_reference
from nugnn.kernels.dropout import dropout_csr_values, dropout_rows, mask_arguments, relu_dropout_rows
from nugnn.kernels.dropout.reference import dropout_csr_values_reference, dropout_rows_reference
from nugnn.kernels.epilogue import epilogue_rows
from nugnn.kernels.epilogue.reference import epilogue_rows_reference
from nugnn.kernels.philox import RandomKey

KEY = RandomKey(2**63 + 5, 3, 2**32 - 1)
P = 0.5
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16, "fp64": torch.float64}
STARTED = time.monotonic()


# -- equal to the CPU ----------------------------------------------------------------------------------------------


def check(device: str) -> None:
    """Bits where they have to be equal, bounds elsewhere; ends the program at the first difference."""
    generator = torch.Generator().manual_seed(0)
    for name, dtype in DTYPES.items():
        for shape in ((300, 256), (77, 100), (65, 3), (41, 4, 5), (20, 1433), (500,)):
            x = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            grad = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            ids = torch.randperm(10_000, generator=generator)[: len(x)] + 2**33
            for step in ("dropout", "relu dropout"):
                y, g = on_device(step, x, grad, ids, device)
                expected_y = dropout_rows_reference(x.relu() if "relu" in step else x, 0.3, KEY, ids)
                expected_g = dropout_rows_reference(grad, 0.3, KEY, ids)
                if "relu" in step:
                    expected_g = torch.where(x > 0, expected_g, 0)
                same(f"{step} {name} {shape}", y, expected_y)
                same(f"{step} gradient {name} {shape}", g, expected_g)
        dense = torch.where(torch.rand(400, 70, generator=generator) < 0.1, 1.0, 0.0).to(dtype)
        csr, ids = dense.to_sparse_csr(), torch.arange(400) + 7
        crow, col, values = csr.crow_indices(), csr.col_indices(), csr.values()
        out = dropout_csr_values(values.to(device), crow.to(device), col.to(device), 0.3, KEY, range(7, 407))
        same(f"sparse dropout {name}", out, dropout_csr_values_reference(values, crow, col, 0.3, KEY, ids))
    check_epilogue(device, generator)
    check_cross_entropy(device, generator)


def on_device(step: str, x: Tensor, grad: Tensor, ids: Tensor, device: str) -> tuple[Tensor, Tensor]:
    leaf = x.to(device).requires_grad_()
    y = (relu_dropout_rows if "relu" in step else dropout_rows)(leaf, 0.3, KEY, ids.to(device))
    (g,) = torch.autograd.grad(y, leaf, grad.to(device))
    return y.detach(), g


def check_epilogue(device: str, generator: torch.Generator) -> None:
    """float32 without layer norm and elu has the bits of the separate steps; else an error like theirs in float64."""
    n, width = 301, 100
    x, grad = (torch.randn(n, width, generator=generator) for _ in range(2))
    scale, (bias, weight, shift) = torch.rand(n, generator=generator), torch.randn(3, width, generator=generator)
    ids = torch.arange(5, 5 + n)
    for activation in ("none", "relu", "leaky_relu", "elu"):
        for normalises in (False, True):
            norm = (weight, shift, 1e-5) if normalises else None
            alpha = 0.2 if activation == "leaky_relu" else 1.0
            leaves = [t.to(device).requires_grad_() for t in (x, bias, weight, shift)]
            y = epilogue_rows(
                leaves[0], row_scale=scale.to(device), bias=leaves[1], layer_norm=normalises,
                norm_weight=leaves[2] if normalises else None, norm_bias=leaves[3] if normalises else None,
                activation=activation, alpha=alpha, p=0.3, key=KEY, row_ids=range(5, 5 + n),
            )  # fmt: skip
            wanted = leaves if normalises else leaves[:2]
            grads = torch.autograd.grad(y, wanted, grad.to(device))
            exact = [t.double().requires_grad_() for t in (x, bias, weight, shift)]
            exact_norm = (exact[2], exact[3], 1e-5) if normalises else None
            y64 = epilogue_rows_reference(
                exact[0], scale.double(), exact[1], exact_norm, activation, alpha, 0.3, KEY, ids
            )
            grads64 = torch.autograd.grad(y64, exact[: len(wanted)], grad.double())
            label = f"epilogue {activation} norm={normalises}"
            if not normalises and activation != "elu":
                same(label, y, epilogue_rows_reference(x, scale, bias, norm, activation, alpha, 0.3, KEY, ids))
            # a dozen roundings of values near 1 to 10; a sign that flips next to 0 moves a gradient, not a value
            close(label, y, y64, 64 * 2**-24 * float(y64.abs().max()))
            for got, right in zip(grads, grads64, strict=True):
                terms = n if right.dim() == 1 else 1
                close(f"{label} gradient", got, right, 64 * terms**0.5 * 2**-24 * float(right.abs().max() + 1) * 4)


def check_cross_entropy(device: str, generator: torch.Generator) -> None:
    for name, dtype in DTYPES.items():
        for num_classes in (2, 47, 1000, 5000):
            logits = (3 * torch.randn(60, num_classes, generator=generator, dtype=torch.float64)).to(dtype)
            rows = torch.randperm(60, generator=generator)[:25]
            labels = torch.randint(num_classes, (25,), generator=generator)
            weights, grad = torch.rand(num_classes, generator=generator), torch.rand(25, generator=generator)
            leaf = logits.to(device).requires_grad_()
            loss = cross_entropy_rows(leaf, labels.to(device), rows.to(device), weights.to(device))
            (g,) = torch.autograd.grad(loss, leaf, grad.to(device, loss.dtype))
            exact = logits.double().requires_grad_()
            right = cross_entropy_rows_reference(exact, labels, rows, weights.double())
            (right_g,) = torch.autograd.grad(right, exact, grad.double())
            eps = 2**-50 if dtype == torch.float64 else 2**-21
            close(f"cross-entropy {name} {num_classes}", loss, right, eps * 16 * float(logits.double().abs().max()))
            unit = torch.finfo(dtype).eps
            close(f"cross-entropy gradient {name} {num_classes}", g, right_g, unit + eps * 64)
            others = torch.ones(60, dtype=torch.bool)
            others[rows] = False
            if (g.cpu()[others] != 0).any():
                sys.exit(f"cross-entropy {name}: gradient in a row that does not count")


def same(label: str, mine: Tensor, right: Tensor) -> None:
    if mine.dtype != right.dtype or not torch.equal(mine.cpu(), right):
        count = int((mine.cpu() != right).sum())
        sys.exit(f"{label}: {count} of {right.numel()} values differ from the CPU's")


def close(label: str, mine: Tensor, right: Tensor, bound: float) -> None:
    error = float((mine.cpu().double() - right).abs().max())
    if not error <= bound:
        sys.exit(f"{label}: error {error:.3g} is above the bound {bound:.3g}")


# -- milliseconds --------------------------------------------------------------------------------------------------


def milliseconds(run: Callable[[], Any], repeats: int = 15) -> list[float]:
    """Sorted times of ``run`` on the device, after two warm-up calls."""
    for _ in range(2):
        run()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in pairs:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) for begin, end in pairs)


class Table:
    """Prints one row per measurement."""

    def __init__(self, bandwidth: float, shared: dict[str, Any]) -> None:
        self._bandwidth, self._shared = bandwidth, shared

    def row(self, what: str, who: str, times: list[float], num_bytes: int) -> None:
        floor = 1e3 * num_bytes / self._bandwidth
        median = statistics.median(times)
        fifth = len(times) // 5
        record = {
            "what": what,
            "who": who,
            "ms": round(median, 3),
            "p20": round(times[fifth], 3),
            "p80": round(times[-1 - fifth], 3),
            "floor_ms": round(floor, 3),
            "times_floor": round(median / floor, 2),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        }
        print(json.dumps(record | self._shared), flush=True)

    def both_ways(
        self, what: str, who: str, forward: Callable[[], Tensor], leaves: list[Tensor], grad: Tensor, bytes_: list[int]
    ) -> None:
        """Forward under autograd, then backward alone over the same graph."""
        torch.cuda.reset_peak_memory_stats()
        self.row(f"{what} forward", who, milliseconds(forward), bytes_[0])
        out = forward()
        times = milliseconds(lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True))
        self.row(f"{what} backward", who, times, bytes_[1])


def copy_bandwidth() -> float:
    """Bytes read and written per second by a copy of 1 GiB."""
    source = torch.empty(2**28, device="cuda")
    target = torch.empty_like(source)
    return 2 * 2**30 / (milliseconds(lambda: target.copy_(source))[7] * 1e-3)


def compiled(function: Callable[..., Tensor], wanted: bool) -> Callable[..., Tensor] | None:
    return torch.compile(function, dynamic=False) if wanted else None


def measure_kept_bits(table: Table, x: Tensor, grad: Tensor, ids: Tensor, at: str) -> None:
    """Dropout that writes its mask as bits, beside the one that makes it again."""
    from nugnn.kernels.epilogue import gpu

    mask = mask_arguments(P, KEY, ids)
    num_bytes = 2 * x.numel() * x.element_size() + x.numel() // 8
    torch.cuda.reset_peak_memory_stats()
    times = milliseconds(lambda: gpu.forward(x, None, None, None, "none", 1.0, mask, remake=False))
    table.row(f"dropout, {at} forward", "ours, bits kept", times, num_bytes)
    _, kept = gpu.forward(x, None, None, None, "none", 1.0, mask, remake=False)
    times = milliseconds(lambda: gpu.backward(grad, kept, None, None, None, None, "none", 1.0, mask, needs_sums=False))
    table.row(f"dropout, {at} backward", "ours, bits kept", times, num_bytes)


def measure_chain(table: Table, num_rows: int, width: int, name: str, compile_: bool) -> None:
    dtype = DTYPES[name]
    x = torch.randn(num_rows, width, device="cuda", dtype=dtype).requires_grad_()
    grad = torch.randn(num_rows, width, device="cuda", dtype=dtype)
    ids = torch.randperm(num_rows, device="cuda")
    bias, weight, shift = (torch.randn(width, device="cuda", dtype=dtype).requires_grad_() for _ in range(3))
    scale = torch.rand(num_rows, device="cuda")
    values = x.numel()
    size, bits = values * x.element_size(), values // 8
    at = f"{num_rows} x {width} {name}"

    def runs(
        what: str,
        ours: dict[str, Callable[[], Tensor]],
        plain: Callable[[], Tensor],
        leaves: list[Tensor],
        b: list[int],
    ) -> None:
        for who, run in ours.items():
            table.both_ways(f"{what}, {at}", who, run, leaves, grad, b)
        table.both_ways(f"{what}, {at}", "eager", plain, leaves, grad, b)
        fast = compiled(plain, compile_ and time.monotonic() - STARTED < 75)
        if fast is not None:
            table.both_ways(f"{what}, {at}", "compiled", fast, leaves, grad, b)

    runs(
        "dropout",
        {
            "ours": lambda: dropout_rows(x, P, KEY, ids),
            "ours, range of ids": lambda: dropout_rows(x, P, KEY, range(num_rows)),
        },
        lambda: F.dropout(x, P),
        [x],
        [2 * size, 2 * size],
    )
    measure_kept_bits(table, x.detach(), grad, ids, at)
    runs(
        "relu, dropout",
        {"ours": lambda: relu_dropout_rows(x, P, KEY, ids)},
        lambda: F.dropout(F.relu(x), P),
        [x],
        [2 * size + bits, 2 * size + bits],
    )
    runs(
        "row scale, bias, relu, dropout",
        {"ours": lambda: epilogue_rows(x, row_scale=scale, bias=bias, activation="relu", p=P, key=KEY, row_ids=ids)},
        lambda: F.dropout(F.relu(x * scale.to(dtype)[:, None] + bias), P),
        [x, bias],
        [2 * size + bits, 2 * size + bits],
    )
    runs(
        "bias, layer norm, relu, dropout",
        {
            "ours": lambda: epilogue_rows(
                x,
                bias=bias,
                layer_norm=True,
                norm_weight=weight,
                norm_bias=shift,
                activation="relu",
                p=P,
                key=KEY,
                row_ids=ids,
            )
        },
        lambda: F.dropout(F.relu(F.layer_norm(x + bias, (width,), weight, shift)), P),
        [x, bias, weight, shift],
        [2 * size + bits, 3 * size + bits],
    )


def measure_cross_entropy(
    table: Table, num_rows: int, num_classes: int, share: float, name: str, compile_: bool
) -> None:
    dtype = DTYPES[name]
    logits = torch.randn(num_rows, num_classes, device="cuda", dtype=dtype).requires_grad_()
    count = int(num_rows * share)
    rows = None if share == 1 else torch.randperm(num_rows, device="cuda")[:count].sort().values
    labels = torch.randint(num_classes, (count,), device="cuda")
    grad = torch.full((count,), 1 / count, device="cuda")
    size = logits.numel() * logits.element_size()
    bytes_ = [int(size * share), int(size * (1 + share))]
    what = f"cross-entropy, {num_rows} x {num_classes} {name}, {share:.0%} of rows"

    def plain() -> Tensor:
        picked = logits if rows is None else logits[rows]
        return F.cross_entropy(picked.float(), labels, reduction="none")

    table.both_ways(what, "ours", lambda: cross_entropy_rows(logits, labels, rows), [logits], grad, bytes_)
    table.both_ways(what, "eager", plain, [logits], grad, bytes_)
    fast = compiled(plain, compile_ and time.monotonic() - STARTED < 85)
    if fast is not None:
        table.both_ways(what, "compiled", fast, [logits], grad, bytes_)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_449_029)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--classes", type=int, default=47)
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "fp32"], choices=list(DTYPES))
    parser.add_argument("--no-compile", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    check("cuda")
    print(f"equal to the CPU after {time.monotonic() - STARTED:.0f} s", flush=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    shared = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": commit.stdout.strip()}
    bandwidth = copy_bandwidth()
    print(json.dumps({"what": "copy of 1 GiB", "tb_per_second": round(bandwidth / 1e12, 3)} | shared), flush=True)
    table = Table(bandwidth, {})
    torch.manual_seed(0)
    for name in options.dtypes:
        measure_cross_entropy(table, options.rows, options.classes, 1.0, name, not options.no_compile)
        measure_cross_entropy(table, options.rows, options.classes, 0.08, name, not options.no_compile)
        measure_chain(table, options.rows, options.width, name, not options.no_compile)
    print(f"done after {time.monotonic() - STARTED:.0f} s", flush=True)


if __name__ == "__main__":
    main()
