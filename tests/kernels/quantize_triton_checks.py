"""Laws of the Triton codec, run by `test_quantize.py` in a process of its own: interpreted, or on a GPU."""

from __future__ import annotations

import torch
from quantize_cases import KEY, special_rows
from torch import Tensor
from triton_laws import DEVICE, NUM_SHARES, run_laws

from nugnn.kernels.philox import derived_key
from nugnn.kernels.quantize import decode_rows, encode_rows, gpu, row_bytes

UNITS = {
    4: [(32, 1), (64, 2), (10, 3), (31, 4), (4, 8), (12, 8), (51, 5), (64, 6), (47, 6), (9, 7), (2052, 8), (1028, 7)],
    2: [(9, 5), (36, 3), (39, 6), (11, 7)],
    1: [(1, 3), (40, 1), (3, 2), (65, 4), (33, 8), (1025, 5), (65, 6)],
}
"""``(width, bits)`` by the bytes of the units in which such rows are written: less than a Philox block's eight values,
less than a group of 32, an odd number of words, more than a tile."""
CASES = [case for cases in UNITS.values() for case in cases] if DEVICE == "cpu" else [
    (width, bits) for width in (1, 4, 12, 33, 47, 100, 1024, 2052, 3001) for bits in range(1, 9)
]  # fmt: skip


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.cpu().isnan(), b.cpu().isnan()) and torch.equal(a.cpu().nan_to_num(7), b.cpu().nan_to_num(7))


def check_bytes_and_values_are_those_of_the_cpu(share: int) -> None:
    for width, bits in CASES[share::NUM_SHARES]:
        x = special_rows(width)[slice(8, 11) if DEVICE == "cpu" and width > 1000 else slice(None)]
        ids = torch.arange(100, 100 + len(x))
        for key in (None, KEY):
            wire, words = encode_rows(x, bits, key, ids), None if key is None else derived_key(key)
            there = gpu.encode(x.to(DEVICE), bits, words, ids.to(DEVICE))
            assert torch.equal(there.cpu(), wire), (width, bits, key)
            back = torch.empty(len(x), width, device=DEVICE)
            gpu.decode(back, there, width, bits)
            assert same(back, decode_rows(wire, width, bits)), (width, bits)


def check_row_ids_may_be_strided() -> None:
    x, strided = torch.randn(12, 64, generator=torch.Generator().manual_seed(0)), torch.arange(48, device=DEVICE)[::4]
    for bits in (5, 8):
        there = encode_rows(x.to(DEVICE), bits, KEY, strided)
        assert torch.equal(there.cpu(), encode_rows(x, bits, KEY, strided.cpu().clone())), bits


def check_a_row_with_nan_anywhere_is_nan() -> None:
    """In the interpreter a maximum always passes NaN on; on a GPU only if told to, from every tile."""
    is_cpu = DEVICE == "cpu"
    for width, bits in ((33, 8), (47, 6), (1028, 7), *(() if is_cpu else ((12, 8), (2052, 8), (64, 2), (65, 4)))):
        for dtype in (torch.float32, *(() if is_cpu else (torch.bfloat16, torch.float16))):
            x = torch.ones(12, width, dtype=dtype)  # every fourth row is a good one
            for column, place in enumerate((0, width // 2, width - 1)):
                for row, bad in enumerate((torch.nan, torch.inf, -torch.inf)):
                    x[4 * row + column, place] = bad
            is_good = torch.arange(12) % 4 == 3
            for words in (None, derived_key(KEY)):
                wire = gpu.encode(x.to(DEVICE), bits, words, torch.arange(12, device=DEVICE))
                back = decode_rows(wire.cpu(), width, bits)
                assert bool(back[~is_good].isnan().all()) and same(back[is_good], torch.ones(3, width)), (width, bits)


def check_rows_are_written_in_the_largest_units_that_they_consist_of() -> None:
    def unit(width: int, bits: int) -> int:
        return gpu.bytes_of_unit(torch.empty(3, row_bytes(width, bits), dtype=torch.uint8))

    assert all(unit(*case) == size for size, cases in UNITS.items() for case in cases)
    for bits in range(1, 9):  # bucket sizes that are usual, and widths
        assert all(unit(width, bits) == 4 for width in (32, 128, 256, 512, 1024))
    apart = torch.empty(100, dtype=torch.uint8)
    assert [gpu.bytes_of_unit(apart[start : start + 96].view(8, 12)) for start in (0, 1, 2, 4)] == [4, 1, 2, 4]


def check_rows_are_read_wherever_they_lie() -> None:
    """Of a row of a larger tensor, whose places are no multiples of units though its bytes are."""
    for width, bits in ((64, 6), (16, 4)):
        wire = encode_rows(special_rows(width), bits)
        size = wire.shape[1]
        for start in range(5):
            apart = torch.zeros(9, size + 5, dtype=torch.uint8, device=DEVICE)
            apart[6, start : start + size] = wire[1].to(DEVICE)
            back = torch.empty(1, width, device=DEVICE)
            gpu.decode(back, apart[6:7, start : start + size], width, bits)
            assert same(back, decode_rows(wire[1:2], width, bits)), (width, bits, start)


def check_kernels_09_nothing_is_read_behind_a_row_s_end() -> None:
    for width in (1, 3, 7, 33, 100):
        memory = torch.full((5 * width + 64,), 1e30)
        memory[: 5 * width] = torch.randn(5 * width, generator=torch.Generator().manual_seed(width))
        x = memory[: 5 * width].view(5, width)
        there = memory.to(DEVICE)[: 5 * width].view(5, width)
        for bits in range(1, 9):
            assert torch.equal(gpu.encode(there, bits, None, None).cpu(), encode_rows(x, bits)), (width, bits)


def check_half_types_are_read_as_they_are() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.randn(12, 12, generator=torch.Generator().manual_seed(0)).to(dtype)
        for bits in (5, 8):
            assert torch.equal(gpu.encode(x.to(DEVICE), bits, None, None).cpu(), encode_rows(x, bits)), (dtype, bits)


if __name__ == "__main__":
    run_laws(globals())
