"""The quicker interpreter makes the types of Triton's own, and refuses what that refuses."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from triton.language import core

import quick_interpreter as quick

_DTYPES = [core.float32, core.bfloat16, core.int1, core.int64, core.pointer_type(core.float16)]


def _made(make: Any, element_ty: Any, shape: Any) -> Any:
    made = object.__new__(core.block_type)
    make(made, element_ty, shape)
    return made


@pytest.mark.parametrize("shape", [[1], [4, 1], [8, 2, 16], [core.constexpr(4), 2], core.tuple([2, 4])], ids=str)
def test_block_types_are_the_same_the_first_time_and_later(shape: Any) -> None:
    for dtype in _DTYPES * 2:
        mine, plain = (_made(make, dtype, shape) for make in (quick._block_type, quick._plain_block_type))
        assert mine == plain and mine.element_ty is dtype and str(mine) == str(plain) and mine.numel == plain.numel
        assert all(type(size) is int for size in mine.shape)


@pytest.mark.parametrize("shape", [[3], [2, 6], [1 << 21], [2.0], [core.constexpr(5)], [], (4, 2), 4], ids=str)
def test_wrong_shapes_are_refused_in_the_same_words(shape: Any) -> None:
    _made(quick._block_type, core.float32, [2])
    said = []
    for make in (quick._block_type, quick._plain_block_type):
        with pytest.raises((TypeError, ValueError, AssertionError)) as caught:
            _made(make, core.float32, shape)
        said.append((caught.type, str(caught.value)))
    assert said[0] == said[1]


def test_arrays_have_the_same_types_and_constants_the_same_values() -> None:
    for dtype in [*_DTYPES, *(core.block_type(dtype, [2]) for dtype in _DTYPES)]:
        assert quick._get_np_dtype(dtype) == quick._plain_np_dtype(dtype)
    for value in (3, core.constexpr(3), [core.constexpr(1), 2], (core.constexpr(True),), "text", None):
        assert quick._unwrap_if_constexpr(value) == quick._plain_unwrap(value)


def test_tensors_have_the_same_sizes() -> None:
    for type_ in (core.float32, core.block_type(core.int32, [4, 2])):
        mine, plain = object.__new__(core.tensor), object.__new__(core.tensor)
        for tensor, make in ((mine, quick._tensor), (plain, quick._plain_tensor)):
            make(tensor, "a handle", type_)
        assert mine.shape.values == plain.shape.values and mine.numel.value == plain.numel.value
        assert (mine.handle, mine.type, mine.dtype) == (plain.handle, plain.type, plain.dtype)
