"""Element-wise kernels and losses on one GPU: their laws first, then milliseconds beside eager, compiled, copy.

    python benchmarks/gpu_elementwise.py                 # 2,449,029 x 256 in bfloat16 and float32; below 100 s
    python benchmarks/gpu_elementwise.py --rows 300000   # smaller
    python benchmarks/gpu_elementwise.py --no-compile    # without torch.compile, whose first call takes seconds

Results are one JSON row each: median, p20 and p80 of the milliseconds, bytes that have to move at the least, and their
time at the measured bandwidth of a copy. "ours" and the baselines run in turn, in the same process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from nugnn.kernels.cross_entropy import cross_entropy_rows
from nugnn.kernels.dropout import dropout_rows, mask_arguments, relu_dropout_rows
from nugnn.kernels.epilogue import epilogue_rows
from nugnn.kernels.philox import RandomKey

KEY = RandomKey(2**63 + 5, 3, 2**32 - 1)
P = 0.5
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16, "fp64": torch.float64}
STARTED = time.monotonic()


def check(dtypes: list[str]) -> None:
    """The laws of the kernels, on this GPU: bits where they have to equal the CPU's, derived bounds elsewhere."""
    others = [f":{str(dtype)[6:]}" for name, dtype in DTYPES.items() if name not in dtypes]
    checks = Path(__file__).resolve().parent.parent / "tests/kernels/elementwise_triton_checks.py"
    result = subprocess.run(
        [sys.executable, str(checks), "cuda", "--skip", *others], capture_output=True, text=True, check=False
    )
    print(result.stdout, end="", flush=True)
    if not result.stdout.rstrip().endswith("all hold"):
        sys.exit(result.stderr)


def commit() -> str:
    with contextlib.suppress(OSError):
        command = ["git", "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return ""


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
    if not wanted:
        return None
    # backward runs several times over one graph, which buffers that it may overwrite do not allow
    torch._functorch.config.donated_buffer = False
    return torch.compile(function, dynamic=False)


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
    check(options.dtypes)
    print(f"checked after {time.monotonic() - STARTED:.0f} s", flush=True)
    shared = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": commit()}
    bandwidth = copy_bandwidth()
    print(json.dumps({"what": "copy of 1 GiB", "tb_per_second": round(bandwidth / 1e12, 3)} | shared), flush=True)
    table = Table(bandwidth, shared)
    torch.manual_seed(0)
    for name in options.dtypes:
        measure_cross_entropy(table, options.rows, options.classes, 1.0, name, not options.no_compile)
        measure_cross_entropy(table, options.rows, options.classes, 0.08, name, not options.no_compile)
        measure_chain(table, options.rows, options.width, name, not options.no_compile)
    print(f"done after {time.monotonic() - STARTED:.0f} s", flush=True)


if __name__ == "__main__":
    main()
