"""Ways for values to travel: bytes as promised, errors within what rounding explains, nothing hidden."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nugnn.comm.compression.settings import Compression, check_types
from nugnn.comm.compression.wire import WIRES, Wire
from nugnn.kernels.philox import RandomKey

SIZES = (0, 1, 2, 7, 31, 64, 65, 129, 1021)


def _through(wire: Wire, x: Tensor, key: RandomKey | None = None) -> Tensor:
    ids = torch.arange(-(-len(x) // wire.bucket))
    sent = wire.encode(x, key, ids if key is not None else None)
    assert sent.dtype == torch.uint8 and len(sent) == wire.num_bytes(len(x))
    out = torch.full_like(x, 7.0)
    wire.decode(sent, out)
    return out


@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize("size", SIZES)
def test_a_vector_comes_back_within_its_rounding(name: str, size: int) -> None:
    x = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 3
    wire = Wire(name, bucket=64)
    out = _through(wire, x)
    for a, b in zip(x.split(64), out.split(64), strict=True):
        span = float(a.max() - a.min()) if len(a) else 0.0
        if name == "fp32":
            bound = 0.0
        elif name in ("bf16", "fp16"):  # half a unit in the last of 8 or 11 digits
            bound = float(a.abs().max()) * 2.0 ** (-8 if name == "bf16" else -11) if len(a) else 0.0
        elif name == "1bit":  # within the range: a mean of some of the values
            bound = span
        else:  # half a step, and the rounding of five float32 operations on values of this size
            bound = span / (2**wire.bits - 1) / 2 + 5 * 2.0**-24 * (span + (float(a.abs().max()) if len(a) else 0))
        assert len(a) == 0 or float((a - b).abs().max()) <= bound


@pytest.mark.parametrize("name", WIRES)
def test_constants_come_back_as_they_were_and_overflow_is_seen(name: str) -> None:
    wire = Wire(name, bucket=64)
    for value in (0.0, 1.0, -0.375, 2.0**100):
        x = torch.full((130,), value)
        assert torch.equal(_through(wire, x), x)
    for bad in (float("nan"), float("inf"), -float("inf")):
        x = torch.ones(200)
        x[70] = bad
        out = _through(wire, x)
        assert not torch.isfinite(out[70]) and torch.equal(out[:64], x[:64]) and torch.equal(out[128:], x[128:])


def test_comm_01_16_bits_carry_large_and_tiny_gradients() -> None:
    """Nothing overflows in a sum, and values of 1e-8 are rounded like any others."""
    wire = Wire("fp16", bucket=64)
    for size in (1e-30, 1e-8, 30_000.0, 1e30):
        x = torch.rand(300, generator=torch.Generator().manual_seed(0)) * size
        assert float((_through(wire, x) - x).abs().max()) <= size * 2.0**-11


@pytest.mark.parametrize("tail", [1.0, 30.0])
def test_one_bit_leaves_out_less_than_there_is(tail: float) -> None:
    """Or else error feedback would grow without end: the two means take away what lies between classes."""
    x = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    x[::97] *= tail
    for part in (x, x.abs(), -(x / 10).exp()):
        rest = part - _through(Wire("1bit"), part)
        assert float(rest.norm()) < float(part.norm())


def test_stochastic_rounding_is_right_in_the_mean() -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(2))
    wire = Wire("2bit", bucket=64)
    mean = torch.stack([_through(wire, x, RandomKey(5, step, 1)) for step in range(1000)]).double().mean(0)
    step = float(x.max() - x.min()) / 3
    # a value's deviation is at most half a step; five of its mean's, which one value in 1.7 million exceeds
    assert float((mean - x).abs().max()) < 5 * step / 2 / 1000**0.5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"wire": "9bit"}, "cannot travel as '9bit'; choose one of fp32, bf16"),
        ({"bucket": 0}, "bucket is 0"),
        ({"wire": "adaptive", "bucket": 0}, "bucket is 0"),
        ({"rounding": "floor"}, "choose nearest or stochastic"),
        ({"wire": "bf16", "rounding": "stochastic"}, "has no effect on bf16"),
        ({"rounding": "stochastic", "error_feedback": True}, "choose one"),
        ({"wire": "fp32", "error_feedback": True}, "no effect on fp32"),
        ({"least_size": -1}, "least_size is -1"),
        ({"wire": "bf16", "bucket": 64}, "bucket 64 has no effect on bf16"),
        ({"wire": "powersgd", "bucket": 64}, "bucket 64 has no effect on powersgd"),
        ({"seed": 3}, "seed 3 has no effect on rounding to nearest"),
    ],
)
def test_what_is_not_allowed_or_has_no_effect_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Compression(**options)  # type: ignore[arg-type]


def test_only_matrices_of_some_size_are_compressed_and_none_of_float64() -> None:
    settings = Compression(wire="4bit")
    assert settings.takes(torch.zeros(32, 32)) and not settings.takes(torch.zeros(31, 33))
    assert not settings.takes(torch.zeros(5000)) and not Compression(wire="fp32").takes(torch.zeros(99, 99))
    with pytest.raises(ValueError, match=r"w is torch\.float64"):
        check_types({"w": torch.zeros(2, 2, dtype=torch.float64)})
