"""Laws of the Triton codec, run by `test_quantize.py` in a process of its own: interpreted, or on a GPU."""

from __future__ import annotations

import torch
from quantize_cases import KEY, special_rows
from torch import Tensor
from triton_laws import DEVICE, run_laws

from nugnn.kernels.philox import derived_key
from nugnn.kernels.quantize import decode_rows, encode_rows, gpu, gpu_words, row_bytes

IN_BYTES = [(1, 3), (9, 5), (65, 4), (33, 8), (1033, 7)]
IN_WORDS = [(32, 1), (64, 2), (31, 4), (4, 8), (12, 8), (2052, 8)]
"""Of less than a Philox block's eight values, an odd number of words, and more than a tile."""
CASES = IN_BYTES + IN_WORDS if DEVICE == "cpu" else [
    (width, bits) for width in (1, 4, 9, 12, 33, 64, 1024, 2052, 3001) for bits in range(1, 9)
]  # fmt: skip


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.cpu().isnan(), b.cpu().isnan()) and torch.equal(a.cpu().nan_to_num(7), b.cpu().nan_to_num(7))


def check_bytes_and_values_are_those_of_the_cpu() -> None:
    for width, bits in CASES:
        x, ids = special_rows(width), torch.arange(100, 112)
        for key in (None, KEY):
            wire, words = encode_rows(x, bits, key, ids), None if key is None else derived_key(key)
            there = gpu.encode(x.to(DEVICE), bits, words, ids.to(DEVICE))
            assert torch.equal(there.cpu(), wire), (width, bits, key)
            back = torch.empty(len(x), width, device=DEVICE)
            gpu.decode(back, there, width, bits)
            assert same(back, decode_rows(wire, width, bits)), (width, bits)


def check_rows_of_whole_words_are_made_word_by_word() -> None:
    def takes(width: int, bits: int) -> bool:
        return gpu_words.takes(torch.empty(3, row_bytes(width, bits), dtype=torch.uint8), bits)

    assert all(takes(*case) for case in IN_WORDS) and not any(takes(*case) for case in IN_BYTES)
    apart = torch.empty(100, dtype=torch.uint8)
    assert gpu_words.takes(apart[4:].view(8, 12), 4) and not gpu_words.takes(apart[2:98].view(8, 12), 4)


def check_half_types_are_read_as_they_are() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.randn(12, 12, generator=torch.Generator().manual_seed(0)).to(dtype)
        for bits in (5, 8):
            assert torch.equal(gpu.encode(x.to(DEVICE), bits, None, None).cpu(), encode_rows(x, bits)), (dtype, bits)


if __name__ == "__main__":
    run_laws(globals())
