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


def check_row_ids_may_be_strided() -> None:
    x, strided = torch.randn(12, 64, generator=torch.Generator().manual_seed(0)), torch.arange(48, device=DEVICE)[::4]
    for bits in (5, 8):
        there = encode_rows(x.to(DEVICE), bits, KEY, strided)
        assert torch.equal(there.cpu(), encode_rows(x, bits, KEY, strided.cpu().clone())), bits


def check_a_row_with_nan_anywhere_is_nan() -> None:
    """In the interpreter a maximum always passes NaN on; on a GPU only if told to, from every tile."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for width, bits in ((12, 8), (33, 8), (2052, 8), (64, 2), (65, 4)):
            for place in (0, width // 2, width - 1):
                for bad in (torch.nan, torch.inf, -torch.inf):
                    x = torch.ones(3, width, dtype=dtype)
                    x[1, place] = bad
                    for words in (None, derived_key(KEY)):
                        wire = gpu.encode(x.to(DEVICE), bits, words, torch.arange(3, device=DEVICE))
                        back = decode_rows(wire.cpu(), width, bits)
                        assert bool(back[1].isnan().all()) and same(back[[0, 2]], torch.ones(2, width)), (width, place)


def check_rows_of_whole_words_are_made_word_by_word() -> None:
    def takes(width: int, bits: int) -> bool:
        return gpu_words.takes(torch.empty(3, row_bytes(width, bits), dtype=torch.uint8), bits)

    assert all(takes(*case) for case in IN_WORDS) and not any(takes(*case) for case in IN_BYTES)
    apart = torch.empty(100, dtype=torch.uint8)
    assert gpu_words.takes(apart[4:].view(8, 12), 4) and not gpu_words.takes(apart[2:98].view(8, 12), 4)


def check_kernels_09_nothing_is_read_behind_a_row_s_end() -> None:
    for width in (1, 3, 7, 33, 100):
        memory = torch.full((5 * width + 64,), 1e30)
        memory[: 5 * width] = torch.randn(5 * width, generator=torch.Generator().manual_seed(width))
        x = memory[: 5 * width].view(5, width)
        there = memory.to(DEVICE)[: 5 * width].view(5, width)
        for bits in (8, 4, 2, 1):
            assert torch.equal(gpu.encode(there, bits, None, None).cpu(), encode_rows(x, bits)), (width, bits)


def check_half_types_are_read_as_they_are() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.randn(12, 12, generator=torch.Generator().manual_seed(0)).to(dtype)
        for bits in (5, 8):
            assert torch.equal(gpu.encode(x.to(DEVICE), bits, None, None).cpu(), encode_rows(x, bits)), (dtype, bits)


if __name__ == "__main__":
    run_laws(globals())
