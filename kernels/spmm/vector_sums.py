"""Sums over in-edges in numba: sums kept in vector registers, rows of the operand prefetched many edges ahead.

A gather of rows waits for memory unless some hundred cache lines are on their way at once. The processor looks ahead by
some ten edges; the prefetches here ask for rows 16 KiB of features ahead, past the ends of destinations, which the
indices in CSC order allow. The loop over edges is written in LLVM's vectors because numba keeps neither the sums of a
row in registers nor has a prefetch.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from nugnn.kernels._jit import jit

MOST_LANES = {4: 64, 8: 32}
"""Values of one vector by their bytes: two of them are the 512 bytes of a pass over the edges."""
_LINE_BYTES = 64
_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


class _Arrays:
    """Loads from the arrays of a call, each a type of numba and its value; an absent one is numba's None."""

    def __init__(self, context: Any, builder: Any, given: dict[str, tuple[Any, Any]]) -> None:
        self._builder = builder
        self.types = {name: kind for name, (kind, _) in given.items()}
        self._data = {
            name: context.make_array(kind)(context, builder, value).data
            for name, (kind, value) in given.items()
            if isinstance(kind, types.Array)
        }

    def has(self, name: str) -> bool:
        return name in self._data

    def pointer(self, name: str, position: Any) -> Any:
        return self._builder.gep(self._data[name], [position])

    def value(self, name: str, position: Any) -> Any:
        loaded = self._builder.load(self.pointer(name, position))
        if isinstance(loaded.type, ir.IntType) and loaded.type != _I64:
            return self._builder.sext(loaded, _I64)
        return loaded


@intrinsic
def _sum_row(  # type: ignore[no-untyped-def]
    typingctx, lanes, first, end, last, ahead, is_tail_fetched, x, indices, stride, c0, c1, weights, weight_stride,
    weight_column, entries, src_scale, dst_scale, out, place
):  # fmt: skip
    """``out[place + c] = dst_scale * sum of weights * (src_scale * x)`` for columns ``c0 + lane`` and ``c1 + lane``.

    ``last`` bounds the edges that may be prefetched; ``ahead = 0`` prefetches nothing. ``lanes`` is a power of 2.
    """
    integer = types.int64
    signature = types.void(
        integer, integer, integer, integer, integer, integer, x, indices, integer, integer, integer, weights, integer,
        integer, entries, src_scale, x.dtype, out, integer,
    )  # fmt: skip

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        names = (
            "lanes first end last ahead is_tail_fetched x indices stride c0 c1 weights weight_stride weight_column "
            "entries src_scale dst_scale out place"
        ).split()
        given = dict(zip(names, args, strict=True))
        kinds = dict(zip(names, signature.args, strict=True))
        arrays = _Arrays(
            context,
            builder,
            {name: (kinds[name], given[name]) for name in "x indices weights entries src_scale out".split()},
        )
        itemsize = x.dtype.bitwidth // 8
        done = builder.append_basic_block("row.done")
        # an unknown number of lanes cannot be asked for: `blocks_of` makes them
        switch = builder.switch(given["lanes"], done)
        count = 1
        while count <= MOST_LANES[itemsize]:
            block = builder.append_basic_block(f"row.lanes{count}")
            switch.add_case(ir.Constant(_I64, count), block)
            builder.position_at_end(block)
            _row_of_lanes(builder, arrays, given, context.get_value_type(x.dtype), itemsize, count)
            builder.branch(done)
            count *= 2
        builder.position_at_end(done)
        return context.get_dummy_value()

    return signature, codegen


def _row_of_lanes(builder: Any, arrays: _Arrays, given: dict[str, Any], scalar: Any, itemsize: int, lanes: int) -> None:
    """The loop over the edges of one destination with two sums of ``lanes`` values."""
    vector = ir.VectorType(scalar, lanes)
    entry = builder.block
    head, body = builder.append_basic_block("edges.head"), builder.append_basic_block("edges.body")
    fetch, add, store = (builder.append_basic_block(f"edges.{name}") for name in ("fetch", "add", "store"))
    columns = (given["c0"], given["c1"])

    def spread(value: Any) -> Any:
        single = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(_I32, 0))
        lane_of = ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes)
        return builder.shuffle_vector(single, ir.Constant(vector, ir.Undefined), lane_of)

    def weight_place(edge: Any) -> Any:
        row = arrays.value("entries", edge) if arrays.has("entries") else edge
        return builder.add(builder.mul(row, given["weight_stride"]), given["weight_column"])

    def row_start(source: Any) -> Any:
        return builder.mul(source, given["stride"])

    builder.branch(head)
    builder.position_at_end(head)
    edge = builder.phi(_I64)
    sums = [builder.phi(vector) for _ in columns]
    edge.add_incoming(given["first"], entry)
    for total in sums:
        total.add_incoming(ir.Constant(vector, None), entry)
    builder.cbranch(builder.icmp_signed("<", edge, given["end"]), body, store)

    builder.position_at_end(body)
    later = builder.add(edge, given["ahead"])
    is_far = builder.and_(
        builder.icmp_signed("<", later, given["last"]), builder.icmp_signed(">", given["ahead"], ir.Constant(_I64, 0))
    )
    builder.cbranch(is_far, fetch, add)

    builder.position_at_end(fetch)
    start = row_start(arrays.value("indices", later))
    for column in columns:
        for value in range(0, lanes, max(1, _LINE_BYTES // itemsize)):
            position = builder.add(builder.add(start, column), ir.Constant(_I64, value))
            _prefetch(builder, arrays.pointer("x", position))
    # rows that do not begin with a cache line end in one more
    with builder.if_then(builder.icmp_signed("!=", given["is_tail_fetched"], ir.Constant(_I64, 0))):
        position = builder.add(builder.add(start, columns[1]), ir.Constant(_I64, lanes - 1))
        _prefetch(builder, arrays.pointer("x", position))
    if arrays.has("weights") and arrays.has("entries"):  # else they are read in order
        _prefetch(builder, arrays.pointer("weights", weight_place(later)))
    builder.branch(add)

    builder.position_at_end(add)
    source = arrays.value("indices", edge)
    start = row_start(source)
    scale = spread(arrays.value("src_scale", source)) if arrays.has("src_scale") else None
    weight = spread(arrays.value("weights", weight_place(edge))) if arrays.has("weights") else None
    for column, total in zip(columns, sums, strict=True):
        place = arrays.pointer("x", builder.add(start, column))
        message = builder.load(builder.bitcast(place, vector.as_pointer()))
        message.align = itemsize
        for factor in (scale, weight):
            message = message if factor is None else builder.fmul(factor, message)
        total.add_incoming(builder.fadd(total, message), builder.block)
    edge.add_incoming(builder.add(edge, ir.Constant(_I64, 1)), builder.block)
    builder.branch(head)

    builder.position_at_end(store)
    factor = spread(given["dst_scale"])
    for column, total in zip(columns, sums, strict=True):
        place = arrays.pointer("out", builder.add(given["place"], column))
        written = builder.store(builder.fmul(factor, total), builder.bitcast(place, vector.as_pointer()))
        written.align = itemsize


def _prefetch(builder: Any, pointer: Any) -> None:
    """Ask for the cache line of an address, to be read, into all levels."""
    line = _I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [line, _I32, _I32, _I32])
    function = builder.module.declare_intrinsic("llvm.prefetch", (line,), kind)
    builder.call(function, [builder.bitcast(pointer, line), *(ir.Constant(_I32, value) for value in (0, 3, 1))])


@jit(parallel=True)
def vector_sums(  # type: ignore[no-untyped-def]
    bounds, indptr, indices, x, blocks, is_tail_fetched, weights, num_weights, entries, src_scale, dst_scale, out
):
    """``out[row] = dst_scale[row] * sum over k of weights[entries[k]] * (src_scale[s] * x[s])``, ``s = indices[k]``.

    Args:
        bounds: Tasks of rows, from `row_tasks`.
        indptr: ``(N + 1,)`` offsets of the output rows.
        indices: ``(E,)`` the row of the operand that each edge reads.
        x: ``(L * F,)`` operand.
        blocks: ``(passes, 5)`` int64 from `nugnn.kernels.spmm.sums.blocks_of`: lanes, two first columns, the column of
            the weight, how many edges ahead to prefetch.
        is_tail_fetched: 1 where rows do not begin with cache lines, else 0.
        weights: ``(E * num_weights,)`` or None for ones.
        num_weights: Of an edge.
        entries: ``(E,)`` the row of the weights of each edge here; None where it is the position.
        src_scale: ``(L,)`` or None for ones.
        dst_scale: ``(N,)``, of length 0 for ones.
        out: ``(N * F,)`` result.
    """
    num_rows = len(indptr) - 1
    stride = len(out) // num_rows
    one = x.dtype.type(1)
    for task in numba.prange(len(bounds) - 1):
        last = indptr[bounds[task + 1]]
        for block in range(len(blocks)):
            lanes, c0, c1, weight_column, ahead = blocks[block]
            for row in range(bounds[task], bounds[task + 1]):
                scale = dst_scale[row] if len(dst_scale) > 0 else one
                _sum_row(
                    lanes, indptr[row], indptr[row + 1], last, ahead, is_tail_fetched, x, indices, stride, c0, c1,
                    weights, num_weights, weight_column, entries, src_scale, scale, out, row * stride,
                )  # fmt: skip


@jit()
def by_source(indptr, indices, next_slot, destinations, entries):  # type: ignore[no-untyped-def]
    """Counting sort of the edges by source, by edge within one; ``next_slot`` starts as offsets of the sources.

    Writes the destination of each slot and, unless ``entries`` has length 0, its edge.
    """
    for row in range(len(indptr) - 1):
        for edge in range(indptr[row], indptr[row + 1]):
            slot = next_slot[indices[edge]]
            next_slot[indices[edge]] = slot + 1
            destinations[slot] = row
            if len(entries) > 0:
                entries[slot] = edge
