"""Dense products on a device: operations a second by format, each product checked before it is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from nugnn.planning.fitting import WrongResult, largest_that_fits, reason
from nugnn.planning.profiles import Format
from nugnn.planning.timing import Rate, seconds_of, time_calls

_GPU_SIZES, _CPU_SIZES = (1024, 8192), (256, 4096)
"""Smallest and largest; 8192 keeps every multiprocessor of the largest cards busy."""
_REPEATS = 8
"""A product is as large as lets so many of them fit into the budget."""
_SLOW = 4
"""A CPU's bf16 that is so much slower than its fp32 is emulated: nobody would compute in it."""
_CHECKED_ROWS = 4
_DTYPES: dict[Format, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True, eq=False)
class Product:
    """``run() = a @ b``, both ``(n, n)`` in the format of the product; the result may be of another type."""

    a: Tensor
    b: Tensor
    run: Callable[[], Tensor]


def measure_products(device: torch.device, *, seconds: float, on_note: Callable[[str], None]) -> dict[Format, Rate]:
    """Operations a second of large products, by format; what the device cannot do is left out, with a note.

    Args:
        device: Where.
        seconds: Of timed calls, all formats together.
        on_note: Called with a sentence for the user.
    """
    wanted = formats_of(device)
    budget = seconds / len(wanted)
    rates: dict[Format, Rate] = {}
    for name in wanted:
        if device.type == "cpu" and name == "bf16" and _is_emulated(name, device, rates["fp32"]):
            on_note(f"bf16 products are left out: less than 1/{_SLOW} of the rate of fp32 on this CPU")
            continue
        try:
            rates[name] = measured_product(name, device, budget, on_note)
        except (RuntimeError, AttributeError, TypeError) as error:  # the last two: another torch, without the operator
            if name == "fp32":
                raise
            on_note(f"{name} products are left out: {reason(error)}")
    return rates


def formats_of(device: torch.device) -> tuple[Format, ...]:
    """What its kind of device may be able to do."""
    if device.type != "cuda":
        return ("fp32", "bf16")
    capability = torch.cuda.get_device_capability(device)
    since: Mapping[Format, tuple[int, int]] = {
        "fp32": (0, 0), "fp64": (0, 0), "tf32": (8, 0), "bf16": (8, 0), "fp16": (5, 3), "fp8": (8, 9), "int8": (7, 5)
    }  # fmt: skip
    return tuple(name for name, least in since.items() if capability >= least)


def measured_product(name: Format, device: torch.device, budget: float, on_note: Callable[[str], None]) -> Rate:
    """As large as the budget and memory allow; a product that is wrong raises `WrongResult`."""
    least, most = _GPU_SIZES if device.type == "cuda" else _CPU_SIZES

    def measure(size: int) -> Rate:
        return _rate(name, _size(name, least, size, device, budget), device, budget)

    with float32_rounding("high" if name == "tf32" else "highest"):
        return largest_that_fits(measure, most, least, f"{name} products, rows", on_note)


def _size(name: Format, least: int, most: int, device: torch.device, budget: float) -> int:
    """At most ``most``, twice the last one as long as its product takes less than its share of the budget."""
    n = least
    while n < most:
        product = make_product(name, n, device)
        product.run()
        if 8 * seconds_of(product.run, device) > budget / _REPEATS:  # twice the size is eight times the work
            break
        n *= 2
    return min(n, most)


def _rate(name: Format, size: int, device: torch.device, budget: float) -> Rate:
    product = make_product(name, size, device)
    check_product(name, product, product.run())
    return Rate.of(2 * size**3, time_calls(product.run, device, budget_seconds=budget))


def _is_emulated(name: Format, device: torch.device, plain: Rate) -> bool:
    return _SLOW * _rate(name, _CPU_SIZES[0], device, 0.01).per_second < plain.per_second


def make_product(name: Format, n: int, device: torch.device) -> Product:
    """Of random numbers: what a product draws of power, and with it its clock, depends on them."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(dtype: torch.dtype) -> Tensor:
        return torch.randn(n, n, generator=generator, device=device).to(dtype)

    if name == "fp8":
        one = torch.ones((), device=device)
        a, b = normal(torch.float8_e4m3fn), _by_columns(normal(torch.float8_e4m3fn))
        return Product(a, b, lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16))
    if name == "int8":
        draw = {"dtype": torch.int8, "generator": generator, "device": device}
        a, b = torch.randint(-127, 128, (n, n), **draw), _by_columns(torch.randint(-127, 128, (n, n), **draw))  # type: ignore[call-overload]
        return Product(a, b, lambda: torch._int_mm(a, b))
    a, b = normal(_DTYPES[name]), normal(_DTYPES[name])
    return Product(a, b, lambda: a @ b)


def _by_columns(x: Tensor) -> Tensor:
    """The same matrix, column after column in memory, as 8-bit products want their second operand."""
    return x.t().contiguous().t()


def check_product(name: Format, product: Product, result: Tensor) -> None:
    """Compare some rows with float64.

    The bound is that of sums in float32, n units of the sum of absolute products, and of the roundings of the format:
    tf32 rounds operands, Hopper adds products of fp8 in fewer bits, and the others round the result, or partial sums of
    it, which for random numbers are as large as that sum divided by the root of n.

    Raises:
        WrongResult: A value is off by more.
    """
    n = len(product.a)
    rows = torch.linspace(0, n - 1, _CHECKED_ROWS, device=result.device).long()
    is_short = name in ("fp8", "int8")  # few operators know them
    a, b = (x.float() if is_short else x for x in (product.a, product.b))
    a, b = a[rows].double(), b.double()
    exact, mass = a @ b, a.abs() @ b.abs()
    unit = 2.0**-53 if name == "fp64" else 0.0 if name == "int8" else 2.0**-24
    extra = {"tf32": 2.0**-9, "fp8": 2.0**-9}.get(name, 0.0)
    rounding = torch.finfo(result.dtype).eps if result.is_floating_point() else 0.0
    error = (result[rows].double() - exact).abs()
    bound = (n * unit + extra) * mass + rounding * (exact.abs() + 4 * mass / n**0.5)
    if not bool((error <= bound + 1e-9).all()):  # NaN compares false
        raise WrongResult(f"a product of {n} x {n} is off by {float(error.max()):.3g}")


@contextmanager
def float32_rounding(precision: str) -> Iterator[None]:
    """Products of float32 in TF32 (``high``) or not at all rounded (``highest``); as before afterwards."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
