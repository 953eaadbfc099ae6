"""Quantized rows: bytes of the definition, errors within half a step, unbiased rounding, ends and constants exact."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nugnn.kernels.philox import RandomKey, random_words
from nugnn.kernels.quantize import (
    bucket_bytes,
    decode_buckets,
    decode_rows,
    encode_buckets,
    encode_rows,
    row_bytes,
)
from nugnn.kernels.quantize.reference import decode_reference, encode_reference, levels_reference

from .quantize_cases import KEY, NOT_FINITE, special_rows
from .triton_laws import run_checks

CHECKS = Path(__file__).with_name("quantize_triton_checks.py")
WIDTHS = (1, 2, 7, 8, 9, 33, 130, 1033)
UNIT = torch.finfo(torch.float32).eps / 2


@pytest.mark.parametrize("bits", range(1, 9))
def test_bytes_are_those_of_the_definition_and_errors_within_half_a_step(bits: int) -> None:
    ids = torch.arange(100, 112)
    for width in WIDTHS:
        x = special_rows(width)
        for key in (None, KEY):
            wire = encode_rows(x, bits, key, ids)
            assert wire.shape == (12, row_bytes(width, bits))
            words = None if key is None else random_words(key, ids, (width + 1) // 2)
            assert torch.equal(wire, encode_reference(x, bits, words))
            back = decode_rows(wire, width, bits)
            assert torch.equal(back.nan_to_num(7), decode_reference(wire, width, bits).nan_to_num(7))
            assert back[list(NOT_FINITE)].isnan().all()
            finite = [row for row in range(12) if row not in NOT_FINITE]
            exact, back = x[finite].double(), back[finite].double()
            low, high = exact.amin(1, keepdim=True), exact.amax(1, keepdim=True)
            step = (high - low) / (2**bits - 1)
            # Of a value's place the difference, its scale and the inverse are rounded, each by UNIT of at most 2**bits
            # steps, and of what comes back three operations more, the last one in units of the ends.
            slack = 8 * UNIT * (2**bits * step + low.abs() + high.abs()) + 2.0**-149
            assert ((back - exact).abs() <= step * (0.5 if key is None else 1) + slack).all(), width
            is_exact = (exact == low) | ((exact == high) & (key is None or bits < 8))
            assert (back == exact)[is_exact].all()
            assert (back[0] == 3.25).all()


@pytest.mark.parametrize("bits", range(1, 9))
def test_the_mean_over_all_draws_is_the_place_of_a_value(bits: int) -> None:
    top = 2**bits - 1
    halves = torch.arange(1 << 16)
    words = halves[:, None] | halves.flip(0)[:, None] << 16
    for row in (special_rows(8)[9], torch.linspace(0, 1, 8).square(), (1 - torch.logspace(-8, 0, 8)).flip(0)):
        exact = row.double()
        place = (exact - exact.min()) / (exact.max() - exact.min()) * top
        levels, _, _ = levels_reference(row.expand(1 << 16, 8), bits, words.expand(-1, 4))
        bias = (levels.double().mean(0) - place).abs()
        # Of the draw, and of the place that is drawn for: difference, range, inverse and product are rounded.
        assert (bias <= 2.0**-17 + 4 * UNIT * place * (1 + 2.0**-20)).all()
        assert ((levels - place).abs() < 1 + 4 * UNIT * place).all()


@pytest.mark.parametrize("bits", range(1, 9))
def test_a_value_that_is_a_level_stays_it_whatever_is_drawn(bits: int) -> None:
    halves = torch.arange(1 << 16)[:, None]
    for k in range(1 << bits):
        row = torch.tensor([0.0, float(2**bits - 1), float(k), float(k)])
        draws = (halves | halves << 16).expand(-1, 2) if k in (0, 2**bits - 1) else torch.tensor([[0, 0], [-1, -1]])
        levels, _, _ = levels_reference(row.expand(len(draws), 4), bits, draws & 0xFFFFFFFF)
        assert (levels == row.long()).all()


def test_a_value_is_drawn_for_alike_in_a_row_of_any_length() -> None:
    x = torch.rand(5, 1033, generator=torch.Generator().manual_seed(4))
    x[:, 0], x[:, 1] = -1, 2
    ids = torch.arange(5) * 2**33
    whole = encode_rows(x, 8, KEY, ids)[:, 8:]
    for width in (2, 3, 6, 7, 8, 9, 15, 16, 17, 1024, 1025, 1032):
        assert torch.equal(encode_rows(x[:, :width], 8, KEY, ids)[:, 8:], whole[:, :width]), width


def test_stochastic_rounding_has_no_bias_and_nearest_the_least_error() -> None:
    x = torch.rand(1000, 1000, generator=torch.Generator().manual_seed(0))
    x[:, 0], x[:, 1] = 0.0, 1.0
    for key, variance in ((None, 1 / 12), (KEY, 1 / 6)):
        error = (decode_rows(encode_rows(x, 4, key), 1000, 4) - x).double() * 15
        assert abs(float(error.mean())) < 0.01 and abs(float(error.var()) / variance - 1) < 0.05


def test_a_row_is_sent_alike_whoever_sends_it_and_each_step_differently() -> None:
    x, ids = torch.randn(40, 50, generator=torch.Generator().manual_seed(1)), torch.arange(500, 540)
    wire = encode_rows(x, 3, KEY, ids)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    assert torch.equal(encode_rows(x[order], 3, KEY, ids[order]), wire[order])
    assert torch.equal(
        encode_rows(x, 3, KEY, torch.arange(500, 660)[::4]), encode_rows(x, 3, KEY, 500 + 4 * torch.arange(40))
    )
    for other in (RandomKey(5, 4, 7), RandomKey(5, 3, 8), RandomKey(6, 3, 7)):
        assert not torch.equal(encode_rows(x, 3, other, ids), wire)


@pytest.mark.parametrize("bits", [1, 3, 4, 8])
def test_buckets_of_any_size(bits: int) -> None:
    for size in [*range(66), 257]:
        for bucket in (1, 8, 13, 64):
            x = torch.randn(size, generator=torch.Generator().manual_seed(size))
            wire = encode_buckets(x, bits, bucket, KEY)
            assert wire.shape == (bucket_bytes(size, bits, bucket),)
            back = decode_buckets(wire, size, bits, bucket)
            whole = size // bucket * bucket
            for number, part in enumerate(x.split(bucket)):  # none knows of its neighbours
                alone = encode_rows(part[None], bits, KEY, torch.tensor([number]))
                there = back[number * bucket : number * bucket + len(part)]
                assert torch.equal(there, decode_rows(alone, len(part), bits)[0])
            assert whole <= size == len(back)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_kernels_08_rows_of_zeros_come_back_as_zeros(bits: int) -> None:
    x = torch.randn(9, 40, generator=torch.Generator().manual_seed(bits))
    without = [decode_rows(encode_rows(x, bits, key), 40, bits) for key in (None, KEY)]
    x[4], x[6] = 0.0, -0.0
    others = [row for row in range(9) if row not in (4, 6)]
    for key, before in zip((None, KEY), without, strict=True):
        back = decode_rows(encode_rows(x, bits, key), 40, bits)
        assert torch.equal(back[[4, 6]], torch.zeros(2, 40)) and not bool(back[[4, 6]].signbit().any())
        assert torch.equal(back[others], before[others])
        for zeros in (torch.zeros(5, 7), -torch.zeros(5, 7)):
            assert torch.equal(decode_rows(encode_rows(zeros, bits, key), 7, bits), torch.zeros(5, 7))


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
@pytest.mark.parametrize("rows", [1, 5])
def test_kernels_09_the_last_partial_bucket_knows_nothing_of_what_lies_behind_it(rows: int, bits: int) -> None:
    for width in (1, 3, 7, 33, 100):
        size = rows * width
        memory = torch.full((size + 64,), 1e30)
        memory[:size] = torch.randn(size, generator=torch.Generator().manual_seed(width))
        x = memory[:size]
        for key in (None, KEY):
            wire = encode_buckets(x, bits, 32, key)
            last = size % 32
            # of each bucket two float32 ends and the bits of its values, in whole bytes
            assert wire.numel() == size // 32 * (8 + 4 * bits) + (8 + (last * bits + 7) // 8 if last else 0)
            back = decode_buckets(wire, size, bits, 32)
            assert back.shape == (size,)
            for bucket, there in zip(x.split(32), back.split(32), strict=True):
                step = (bucket.max() - bucket.min()) / (2**bits - 1)
                most = (0.5 if key is None else 1.0) * step + 8 * UNIT * bucket.abs().max()
                assert float((there - bucket).abs().max()) <= float(most)


def test_types_round_through_float32_and_wrong_sizes_are_refused() -> None:
    x = torch.randn(5, 20, generator=torch.Generator().manual_seed(3))
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(encode_rows(x.to(dtype), 4), encode_rows(x.to(dtype).float(), 4))
        wire = encode_rows(x, 4)
        assert torch.equal(decode_rows(wire, 20, 4, dtype), decode_rows(wire, 20, 4).to(dtype))
    assert encode_rows(torch.ones(0, 5), 4).shape == (0, row_bytes(5, 4))
    assert decode_rows(encode_rows(torch.ones(3, 0), 4), 0, 4).shape == (3, 0)
    for wrong, match in (
        (lambda: encode_rows(x, 9), "bits is 9"),
        (lambda: encode_rows(x.double(), 4), "float64"),
        (lambda: encode_rows(x, 4, KEY, torch.arange(4)), "row_ids"),
        (lambda: decode_rows(wire, 21, 4), "must be uint8"),
        (lambda: decode_buckets(wire.flatten(), 100, 4, 64), "must be"),
        (lambda: encode_buckets(x.flatten(), 4, 0), "positive bucket"),
    ):
        with pytest.raises(ValueError, match=match):
            wrong()


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@needs_triton
def test_triton_codec_in_the_interpreter() -> None:
    run_checks(CHECKS, "cpu")


@pytest.mark.gpu
def test_triton_codec_on_the_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    run_checks(CHECKS, "cuda")


@needs_triton
@pytest.mark.slow
def test_machine_code_fuses_no_product_with_a_sum(tmp_path: Path) -> None:
    script = Path(__file__).with_name("quantize_machine_code.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    result = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.split() == 4 * ["_encode_kernel", "_encode_kernel", "_decode_kernel"]
