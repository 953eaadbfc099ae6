"""Compressed halo rows: what arrives is what one process computes for any split, and is right in the mean."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from nugnn.comm import halo_exchange
from nugnn.comm.groups import Ranks
from nugnn.comm.halo_exchange import add_home, fetch_halo
from nugnn.comm.halo_feedback import HaloFeedback
from nugnn.comm.halo_traffic import HaloTraffic
from nugnn.comm.halo_transfer import HaloPlan
from nugnn.comm.halo_wire import WIRES, HaloWire, Travel
from nugnn.comm.overlap import overlapped_sum
from nugnn.datasets.graph_data import GraphData
from nugnn.kernels.philox import RandomKey
from nugnn.kernels.quantize import decode_rows, encode_rows
from shard_calls import make_data, shard_of, uneven_parts

SEED, STEP = 3, 5
COMPRESSED = WIRES[1:]
_BITS = {"int8": 8, "int4": 4, "int2": 2}


# -- a row ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", COMPRESSED)
def test_a_row_is_as_long_as_the_formula_says(name: str, dtype: torch.dtype) -> None:
    wire, key = HaloWire(name), RandomKey(0, 0, 0)
    for width in (1, 2, 3, 5, 8, 16, 33, 256):
        bits = _BITS.get(name, 16)
        formula = math.ceil(width * bits / 8) + (8 if name in _BITS else 2 if name == "fp16" else 0)
        plain = width * dtype.itemsize
        assert wire.row_bytes(width, dtype) == min(plain, formula)
        assert wire.compresses(width, dtype) == (formula < plain)
        rows = torch.randn(3, width).to(dtype)
        if wire.compresses(width, dtype):
            coded = wire.encode(rows, key, torch.arange(3))
            assert coded.shape == (3, formula)
            out = torch.full((3, width), torch.nan, dtype=dtype)
            wire.decode(coded, out)
            assert torch.isfinite(out).all()
    assert not wire.compresses(64, torch.int64) and not wire.compresses(64, torch.bool)
    assert not HaloWire().compresses(64, torch.float64)


def test_design_s_figures() -> None:
    # a 4-bit row is 4.0 times smaller than float32 at 16 values, 6.4 at 64, 7.5 at 256
    ratios = [4 * width / HaloWire("int4").row_bytes(width, torch.float32) for width in (16, 64, 256)]
    assert [round(ratio, 1) for ratio in ratios] == [4.0, 6.4, 7.5]


def _through(name: str, rows: Tensor) -> Tensor:
    wire = HaloWire(name)
    out = torch.empty_like(rows)
    wire.decode(wire.encode(rows, RandomKey(0, 0, 0), torch.arange(len(rows))), out)
    return out


def test_16_bits_neither_overflow_nor_underflow_in_silence() -> None:
    rows = torch.randn(40, 17, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows *= torch.logspace(-36, 37, 40, dtype=torch.float64)[:, None]
    rows = rows.float()
    for name, unit in (("fp16", 2.0**-11), ("bf16", 2.0**-8)):
        # to nearest; what is below float16's normal range under the row's scale is off by a step of 2**-24 of 2**14
        error = (_through(name, rows).double() - rows.double()).abs()
        smallest = 2.0**-38 * rows.double().abs().amax(1, keepdim=True)
        assert (error <= unit * rows.double().abs() + smallest).all()
    tiny = torch.tensor([[1e-44, -3e-42, 0.0], [0.0, 0.0, 0.0]])
    assert ((_through("fp16", tiny) - tiny).abs() <= 2.0**-149).all()


@pytest.mark.parametrize("name", ["fp16", "int8", "int2"])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_row_that_is_not_finite_comes_back_as_nan(name: str, value: float) -> None:
    rows = torch.ones(3, 20)
    rows[1, 7] = value
    out = _through(name, rows)
    assert torch.isnan(out[1]).all() and torch.equal(out[[0, 2]], rows[[0, 2]])
    wide = rows.double()
    wide[1, 7] = 1e200  # beyond float32
    assert torch.isnan(_through(name, wide)[1]).all()


def test_there_is_no_such_wire() -> None:
    with pytest.raises(ValueError, match="halo_wire 'int3' is not known; choose one of fp32, bf16"):
        HaloWire("int3")


# -- exchanges -----------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What a rank has of an exchange, rows of halo and inner nodes beside their ids."""

    halo_ids: Tensor
    halo: Tensor
    ids: Tensor
    gradient: Tensor
    traffic: HaloTraffic
    share_ids: Tensor


def _values(num_nodes: int, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(num_nodes, width, generator=generator, dtype=torch.float64).to(dtype)


def _exchange(
    ranks: Ranks, data: GraphData, parts: Tensor, name: str, width: int, dtype: torch.dtype, how: str
) -> Seen:
    graph = shard_of(ranks, data, parts)
    plan = graph.index.plan
    ids = graph.global_node_ids
    halo_ids = fetch_halo(ids, plan)[plan.num_inner :]
    x = _values(data.num_nodes, width, dtype)[ids].requires_grad_()
    traffic = HaloTraffic()
    travel = Travel(HaloWire(name), "here", SEED, STEP, traffic)
    with mock.patch.object(halo_exchange, "PADDED_DEVICES", {"cpu"} if how == "padded" else set()):
        if how == "sum":
            _, halo = overlapped_sum(graph.index.structure, x, plan, travel=travel)
            local = torch.cat([x, halo])
        else:
            local = fetch_halo(x, plan, "here", travel)
        local.backward(_values(data.num_nodes, width, dtype, ranks.rank + 1)[torch.cat([ids, halo_ids])])
    assert x.grad is not None
    assert plan.row_ids is not None
    return Seen(halo_ids, local[plan.num_inner :].detach(), ids, x.grad, traffic, plan.row_ids.returned)


def _reference(rows: Tensor, name: str, ids: Tensor, key_name: str) -> Tensor:
    """Rows as their readers get them, by the codec alone."""
    if name in _BITS:
        if len(rows) == 0 or 8 + math.ceil(rows.shape[1] * _BITS[name] / 8) >= rows.shape[1] * rows.element_size():
            return rows
        key = RandomKey(SEED, STEP, zlib.crc32(key_name.encode()))
        narrow = rows.float() if rows.dtype is torch.float64 else rows
        return decode_rows(encode_rows(narrow, _BITS[name], key, ids), rows.shape[1], _BITS[name]).to(rows.dtype)
    return _through(name, rows) if HaloWire(name).compresses(rows.shape[1], rows.dtype) else rows


def _shares(data: GraphData, parts: Tensor) -> dict[tuple[int, int], int]:
    """``(reader's part, node)`` to the smallest place, in the whole graph's CSC order, of the edges between them."""
    order = torch.argsort(data.dst.long(), stable=True)
    shares: dict[tuple[int, int], int] = {}
    for place, edge in enumerate(order.tolist()):
        source, part = int(data.src[edge]), int(parts[data.dst[edge]])
        if parts[source] != part:
            shares.setdefault((part, source), place)
    return shares


_SPLITS = {
    "2": lambda n: torch.arange(n) % 2,
    "2-uneven": lambda n: (torch.arange(n) > 5).long(),
    "3": lambda n: torch.arange(n) * 7 // 3 % 3,
}


@pytest.mark.parametrize("how", ["fetch", "padded", "sum"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("int4", torch.float32), ("int2", torch.bfloat16), ("int8", torch.float64), ("fp16", torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("split", _SPLITS)
def test_any_split_sends_what_one_process_computes(
    ranks: Any, split: str, name: str, dtype: torch.dtype, how: str
) -> None:
    data, width = make_data(), 19
    parts = _SPLITS[split](data.num_nodes)
    num_parts = int(split[0])
    seen: list[Seen] = ranks.run(num_parts, _exchange, data, parts, name, width, dtype, how)
    arrived = _reference(_values(data.num_nodes, width, dtype), name, torch.arange(data.num_nodes), "here")
    shares = _shares(data, parts)
    expected = {r: _values(data.num_nodes, width, dtype, r + 1) for r in range(num_parts)}
    # beside a sum, autograd adds the inner rows' own gradient to all that came
    sums = {r: values.clone() if how != "sum" else torch.zeros_like(values) for r, values in expected.items()}
    for reader in range(num_parts):  # in the order in which owners add
        nodes = [node for part, node in shares if part == reader]
        ids = torch.tensor([shares[reader, node] for node in nodes], dtype=torch.int64)
        sent = _reference(expected[reader][nodes], name, ids, "gradient of here")
        for node, row in zip(nodes, sent, strict=True):
            sums[int(parts[node])][node] += row
    for rank, mine in enumerate(seen):
        assert torch.equal(mine.halo, arrived[mine.halo_ids])
        assert mine.share_ids.tolist() == [shares[rank, node] for node in mine.halo_ids.tolist()]
        own = expected[rank] if how == "sum" else 0
        assert torch.equal(mine.gradient, (sums[rank] + own)[mine.ids])
    row = HaloWire(name).row_bytes(width, dtype)
    num_halo = sum(len(mine.halo) for mine in seen)
    assert sum(mine.traffic.forward for mine in seen) == sum(mine.traffic.gradient for mine in seen) == num_halo * row
    assert [mine.traffic.gradient for mine in seen] == [len(mine.halo) * row for mine in seen]


def test_shares_of_a_node_are_rounded_apart_and_part_numbers_do_not_count(ranks: Any) -> None:
    data = make_data()
    parts = _SPLITS["3"](data.num_nodes)
    assert len(set(_shares(data, parts).values())) == len(_shares(data, parts))
    first, renamed = (_shares(data, p) for p in (parts, (parts + 1) % 3))
    assert {((part + 1) % 3, node): place for (part, node), place in first.items()} == renamed
    seen = ranks.run(3, _exchange, data, (parts + 1) % 3, "int2", 8, torch.float32, "fetch")
    for rank, mine in enumerate(seen):
        assert mine.share_ids.tolist() == [renamed[rank, node] for node in mine.halo_ids.tolist()]


def _unchanged(ranks: Ranks) -> list[bool]:
    """Integers, masks, narrow rows, and all rows on a wire of float32: the exchange of before, in its bits."""
    graph = shard_of(ranks, make_data())
    plan, ids = graph.index.plan, graph.global_node_ids
    same = []
    for name, rows in [
        ("int2", ids[:, None].expand(-1, 9) * 12345),
        ("int2", ids[:, None] % torch.arange(1, 10) == 0),
        ("int2", _values(23, 2, torch.float32)[ids]),  # 8 bytes as they are, 9 in two bits
        ("int2", _values(23, 1, torch.float64)[ids].flatten()),
        ("bf16", _values(23, 9, torch.float16)[ids]),
        ("fp32", _values(23, 9, torch.float64)[ids]),
    ]:
        traffic = HaloTraffic()
        got = fetch_halo(rows.contiguous(), plan, "rows", Travel(HaloWire(name), "rows", traffic=traffic))
        same.append(torch.equal(got, fetch_halo(rows.contiguous(), plan)))
        same.append(traffic.forward == len(plan.send_rows) * rows[:1].numel() * rows.element_size())
    flat = _values(23, 1, torch.float32)[ids].flatten()
    halved = fetch_halo(flat, plan, "rows", Travel(HaloWire("bf16"), "rows"))
    same.append(torch.equal(halved[plan.num_inner :], fetch_halo(flat, plan)[plan.num_inner :].bfloat16().float()))
    return same


def test_what_a_wire_does_not_make_smaller_is_left_alone(ranks: Any) -> None:
    assert all(all(same) for same in ranks.run(3, _unchanged))


def _second_derivative(ranks: Ranks) -> tuple[int, int, int]:
    graph = shard_of(ranks, make_data())
    x = _values(23, 16, torch.float32)[graph.global_node_ids].requires_grad_()
    traffic = HaloTraffic()
    local = fetch_halo(x, graph.index.plan, "here", Travel(HaloWire("int4"), "here", traffic=traffic))
    (gradient,) = torch.autograd.grad((local**2).sum(), x, create_graph=True)
    before = traffic.gradient
    torch.autograd.grad(gradient.sum(), x)
    home = traffic.forward
    add_home(local.detach(), graph.index.plan, "home", Travel(HaloWire("int4"), "home", traffic=traffic))
    row = HaloWire("int4").row_bytes(16, torch.float32)
    back, there = graph.index.plan.num_halo * row, len(graph.index.plan.send_rows) * row
    return before - back, traffic.gradient - before - there - back, traffic.forward - home - back


def test_second_derivatives_and_sums_that_go_home_travel_as_the_rest(ranks: Any) -> None:
    assert ranks.run(3, _second_derivative) == [(0, 0, 0)] * 3


def _mean_over_steps(ranks: Ranks, num_steps: int) -> tuple[Tensor, ...]:
    """Means of gradients of ``sum of c[v] * (W x[u])`` over edges, by x and by W, and bounds of their errors."""
    width, name, delta = 12, "int2", 1e-9
    data = make_data()
    graph = shard_of(ranks, data)
    plan, ids, structure = graph.index.plan, graph.global_node_ids, graph.index.structure
    x = _values(23, width, torch.float32)[ids].requires_grad_()
    weight = _values(width, width, torch.float32, 50).requires_grad_()
    c = _values(23, width, torch.float32, 51)[ids]
    sums = [torch.zeros_like(x, dtype=torch.float64), torch.zeros_like(weight, dtype=torch.float64)]
    given = None
    for step in [None, *range(num_steps)]:
        travel = None if step is None else Travel(HaloWire(name), "here", SEED, step)
        local = fetch_halo(x, plan, "here", travel)
        out = torch.zeros_like(c).index_add(0, structure.dst, (local @ weight)[structure.indices.long()])
        gradients = torch.autograd.grad((out * c).sum(), (x, weight))
        gradients = (gradients[0], ranks.sum_(gradients[1].contiguous()))
        if step is None:
            given = gradients
        else:
            sums = [total + g for total, g in zip(sums, gradients, strict=True)]
    assert given is not None
    # Hoeffding: a mean of n sums of independent errors, each within an interval of length l, is off by more than t with
    # probability at most 2 exp(-2 n t**2 / sum of l**2). An error of rounding to two bits spans a third of its row.
    factor = math.sqrt(math.log(2 * 1000 / delta) / (2 * num_steps))
    reads = torch.zeros(plan.num_local, width).index_add(0, structure.indices.long(), c[structure.dst])
    shares = reads[plan.num_inner :] @ weight.detach().T
    spans = torch.zeros(plan.num_local)
    spans[plan.num_inner :] = ((shares.amax(1) - shares.amin(1)) / 3) ** 2
    bound_x = factor * add_home(spans, plan).sqrt()
    # all readers of a node get the same error: its weight in the sum is what all of them do with it
    read_by_others = reads.clone()
    read_by_others[: plan.num_inner] = 0
    factors = add_home(read_by_others, plan)
    span = ((x.amax(1) - x.amin(1)) / 3).detach()
    bound_w = factor * ranks.sum_(((span[:, None] * factors) ** 2).sum(0)).sqrt()
    errors = [total / num_steps - exact for total, exact in zip(sums, given, strict=True)]
    return errors[0].abs(), bound_x, errors[1].abs(), bound_w


def test_gradients_are_right_in_the_mean(ranks: Any) -> None:
    for error_x, bound_x, error_w, bound_w in ranks.run(3, _mean_over_steps, 100):
        noise = 1e-4  # float32 sums of fewer than 100 terms below 30, eps 6e-8
        assert (error_x <= bound_x[:, None] + noise).all()
        assert (error_w <= bound_w[None, :] + noise).all()
        assert error_w.max() > 0 and float(bound_w.max()) < 20


def test_a_plan_that_does_not_know_its_rows_cannot_round_at_random(ranks: Any) -> None:
    assert ranks.run(2, _nameless) == ["here: a wire of few bits needs a plan that knows who its rows are"] * 2


def _nameless(ranks: Ranks) -> str:
    plan = HaloPlan(2, torch.arange(1), ((0, 1), (1, 0))[ranks.rank], ((0, 1), (1, 0))[ranks.rank], ranks)
    try:
        fetch_halo(torch.ones(2, 30), plan, "here", Travel(HaloWire("int4"), "here"))
    except ValueError as error:
        return str(error)
    return ""


def test_uneven_parts_have_ranks_without_halo(ranks: Any) -> None:
    data = make_data()
    seen: list[Seen] = ranks.run(3, _exchange, data, uneven_parts(23, 3), "int4", 19, torch.float32, "fetch")
    assert [len(mine.halo) for mine in seen][-1] == 0


# -- error feedback ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
def test_what_was_sent_and_what_is_owed_add_up(name: str) -> None:
    send_rows, steps, wire = torch.tensor([0, 2, 3, 2]), 40, HaloWire(name)
    feedback = HaloFeedback(5, send_rows)
    generator = torch.Generator().manual_seed(0)
    wanted, sent, largest = torch.zeros(4, 21).double(), torch.zeros(4, 21).double(), 0.0
    for step in range(steps):
        x = torch.randn(5, 21, generator=generator)[send_rows]
        if step == 7:
            x[0, 3] = torch.nan
        coded = feedback.encode("a", x, wire)
        assert torch.equal(coded, feedback.encode("a", x, wire))  # until the step is settled
        out = torch.empty_like(x)
        wire.decode(coded, out)
        if step == 7:
            assert torch.isnan(out[0]).all() and torch.equal(out[1], out[3])
        if step in (7, 20):  # left out
            feedback.discard()
            continue
        feedback.settle()
        wanted, sent, largest = wanted + x, sent + out, max(largest, float(x.abs().max()))
    owed = feedback.rows()["a"]
    assert owed.shape == (5, 21) and not owed[[1, 4]].any() and owed[[0, 2, 3]].any(1).all()
    # each step rounds x + kept and x + kept - sent once, in float32, of values below twice the largest
    bound = steps * 2 * 2 * largest * 2.0**-24
    assert ((sent + owed[send_rows] - wanted).abs() <= bound).all()
    span = 2 * largest
    assert (owed.abs() <= span / (2 * (2 ** _BITS[name] - 2))).all()
    other = HaloFeedback(5, send_rows)
    other.load(feedback.rows())
    x = torch.randn(4, 21, generator=generator)
    assert torch.equal(other.encode("a", x, wire), feedback.encode("a", x, wire))
    assert not torch.equal(other.encode("b", x, wire), feedback.encode("a", x, wire))
    assert feedback.encode("a", x[:, :9], wire).shape == (4, wire.row_bytes(9, torch.float32))  # nothing is owed


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_keeps_what_is_owed_to_it(bad: float) -> None:
    """In a step that counts; the rows beside it owe what they left out."""
    feedback, wire, sent = HaloFeedback(3, torch.arange(3)), HaloWire("int2"), torch.empty(3, 21)
    first, second = torch.randn(2, 3, 21, generator=torch.Generator().manual_seed(0))
    feedback.encode("a", first, wire)
    before = feedback.rows()["a"]
    second[1, 4] = bad
    wire.decode(feedback.encode("a", second, wire), sent)
    after = feedback.rows()["a"]
    assert torch.equal(after[1], before[1]) and before[1].any()
    assert torch.equal(after[[0, 2]], (second + before - sent)[[0, 2]]) and not torch.equal(after[0], before[0])


def test_rows_that_were_not_sent_in_a_step_are_owed_what_they_were() -> None:
    """As in a step of evaluation, or of a layer that is left out now and then; `load` forgets what is under way."""
    feedback, wire = HaloFeedback(3, torch.arange(3)), HaloWire("int2")
    x = torch.randn(3, 21, generator=torch.Generator().manual_seed(0))
    feedback.encode("a", x, wire)
    before = feedback.rows()["a"]
    feedback.encode("b", x, wire)
    assert torch.equal(feedback.rows()["a"], before) and set(feedback.rows()) == {"a", "b"}
    feedback.encode("a", x, wire)
    feedback.load({"a": before})
    assert list(feedback.rows()) == ["a"] and torch.equal(feedback.rows()["a"], before)
