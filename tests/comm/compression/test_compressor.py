"""Sums from step to step: what was summed and what is kept add up to the gradients, whatever happens in between."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from nugnn.comm.compression import compressor as module
from nugnn.comm.compression.compressor import Compressor
from nugnn.comm.compression.link import Link
from nugnn.comm.compression.low_rank import make_compressor
from nugnn.comm.compression.residuals import Residuals
from nugnn.comm.compression.rooms import RestRooms
from nugnn.comm.compression.settings import Compression
from nugnn.comm.groups import Ranks, groups_by_host
from nugnn.comm.local_ranks import run_local_ranks

SHAPES = {"a.weight": (40, 30), "a.bias": (30,), "b.weight": (9, 5, 5, 5), "c.weight": (33, 32)}


def _gradients(rank: int, step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    size = {"a": torch.ones(30), "b": torch.tensor(1 / 8), "c": 2.0 ** -torch.arange(32)}  # c: seldom input features
    return {name: torch.randn(shape, generator=draw) * size[name[0]] for name, shape in SHAPES.items()}


def _parameters() -> dict[str, Tensor]:
    return {name: torch.zeros(shape) for name, shape in SHAPES.items()}


class _Run:
    """Steps of a compressor on one rank, two groups of gradients each."""

    def __init__(self, ranks: Ranks, **settings: Any) -> None:
        if settings["wire"] in ("bf16", "powersgd"):
            settings.pop("bucket", None)  # they have none
        self.compressor = make_compressor(_parameters(), Compression(**settings), ranks.world_size)
        self.link = Link.of(ranks, groups=groups_by_host(ranks))
        self.groups = [["c.weight", "a.bias"], ["b.weight", "a.weight"]]

    def step(self, gradients: dict[str, Tensor], scale: float = 1.0, *, is_good: bool = True) -> dict[str, Tensor]:
        self.compressor.open(scale)
        sums = {}
        for names in self.groups:
            values = torch.cat([*(gradients[name].flatten() * scale for name in names), torch.ones(1)])
            self.compressor.sum_(values, names, [None] * len(names), 1, self.link)
            parts = values.split([*(gradients[name].numel() for name in names), 1])
            for name, part in zip(names, parts, strict=False):
                sums[name] = part.view(SHAPES[name]) / scale
        self.compressor.settle(self.link, is_good=is_good)
        return sums


def _total(of_ranks: list[dict[str, Tensor]], name: str) -> Tensor:
    return torch.stack([kept[name].double() for kept in of_ranks if name in kept]).sum(0)


@pytest.mark.parametrize("hosts", ["", "aabb", "ababab"])
@pytest.mark.parametrize("wire", ["bf16", "8bit", "4bit", "2bit", "1bit", "adaptive", "powersgd"])
def test_sums_and_what_is_kept_are_all_gradients(monkeypatch: pytest.MonkeyPatch, wire: str, hosts: str) -> None:
    """With loss scales that change, buckets laid out anew, steps left out, and bits chosen in between."""
    num_ranks = len(hosts) or 3
    monkeypatch.setattr(module, "FIRST_PLAN", 4)
    scales = [1.0, 2.0**16, 2.0**15, 2.0**15, 1.0, 1.0, 4.0, 4.0]

    def run(ranks: Ranks) -> tuple[list[dict[str, Tensor]], dict[str, Tensor], dict[str, int]]:
        run = _Run(ranks, wire=wire, error_feedback=True, bucket=64)
        sums = []
        for step, scale in enumerate(scales):
            if step == 2:
                run.groups = [["a.weight"], ["a.bias", "c.weight"], ["b.weight"]]
            out = run.step(_gradients(ranks.rank, step), scale, is_good=step != 3)
            if step != 3:
                sums.append(out)
        return sums, run.compressor.residuals, run.compressor.bits

    results = run_local_ranks(num_ranks, run, hosts=hosts)
    assert len({tuple(bits.items()) for *_, bits in results}) == 1
    if wire == "adaptive":
        assert set(results[0][2].values()) != {4}
    for name in SHAPES:
        for sums, *_ in results[1:]:
            assert all(torch.equal(a[name], b[name]) for a, b in zip(sums, results[0][0], strict=True))
        gradients = [
            _gradients(rank, step)[name].double() for rank in range(num_ranks) for step in range(8) if step != 3
        ]
        summed = torch.stack([step[name].double() for step in results[0][0]]).sum(0)
        kept = [residuals for _, residuals, _ in results]
        if name == "a.bias":
            assert not any(name in residuals for residuals in kept)  # it travels as float32
        else:
            summed = summed + _total(kept, name)
        # each of 7 steps: some 6 operations in float32 on values below 60, on 3 ranks; of more ranks they grow alike
        bound = 7 * 6 * num_ranks * 20 * num_ranks * 2.0**-24
        assert float((summed - torch.stack(gradients).sum(0)).abs().max()) <= bound


def test_what_rounding_leaves_out_stays_bounded() -> None:
    """|residual| <= range / (2 (2^b - 2)): a residual widens the range by at most a step, from 2 bits on."""

    def run(ranks: Ranks) -> float:
        run, most = _Run(ranks, wire="2bit", bucket=64), 0.0
        for step in range(30):
            run.step(_gradients(ranks.rank, step % 3))
            most = max(most, *(float(kept.abs().max()) for kept in run.compressor.residuals.values()))
        return most

    widest = max(float(g.max() - g.min()) for step in range(3) for r in (0, 1) for g in _gradients(r, step).values())
    # of a sum of two ranks' values, what they keep included
    assert max(run_local_ranks(2, run)) <= 2 * widest / (2 * (2**2 - 2))


@pytest.mark.parametrize("wire", ["4bit", "powersgd"])
def test_what_is_kept_takes_turns_in_two_tensors(wire: str) -> None:
    """A step that is left out is written where what was kept before does not lie."""

    def run(ranks: Ranks) -> None:
        run, places = _Run(ranks, wire=wire), set[int]()
        for step in range(8):
            before, own = run.compressor.residuals, dict(run.compressor._residuals._kept)
            is_good = step not in (3, 4)
            run.step(_gradients(ranks.rank, step), is_good=is_good)
            after = run.compressor.residuals
            if step:
                assert all(torch.equal(kept, after[name]) is not is_good for name, kept in before.items())
            if not is_good:
                assert all(run.compressor._residuals._kept[name] is kept for name, kept in own.items())
            places |= {kept.untyped_storage().data_ptr() for kept in run.compressor._residuals._kept.values()}
        assert len(places) == 2 * len(run.groups)

    run_local_ranks(2, run)


def test_rests_of_other_groups_are_forgotten() -> None:
    rooms, kept = RestRooms(), list[Tensor]()
    for size in (5, 5, 5, 7, 7):  # groups are laid out anew: what is kept may still lie in an old room
        room = rooms.room("a", torch.zeros(size), kept)
        assert len(room) == size and all(room.data_ptr() != x.data_ptr() for x in kept)
        kept = [*kept[-1:], room]
    rooms.room("b", torch.zeros(3), [])
    again = rooms.room("a", torch.zeros(7), kept[-1:])
    rooms.keep_groups(["b"])
    assert rooms.room("a", torch.zeros(7), kept).data_ptr() not in (again.data_ptr(), kept[-1].data_ptr())


@pytest.mark.parametrize("feeds_back", [True, False])
@pytest.mark.parametrize("wire", ["bf16", "8bit", "powersgd"])
def test_rests_are_held_where_they_are_fed_back(wire: str, feeds_back: bool) -> None:
    """The rest of a step whose error is measured alone is given up."""

    def run(ranks: Ranks) -> tuple[bool, bool]:
        run = _Run(ranks, wire=wire, error_feedback=feeds_back)
        run.step(_gradients(ranks.rank, 0))
        error = run.compressor.report()["buckets"]["c.weight"]["error"]
        return error is not None and error > 0, bool(run.compressor._rest_rooms._rooms)

    assert run_local_ranks(2, run) == [(True, feeds_back)] * 2


@pytest.mark.parametrize("wire", ["bf16", "fp16", "4bit", "powersgd"])
def test_an_error_that_is_not_finite_is_none(monkeypatch: pytest.MonkeyPatch, wire: str) -> None:
    """As in the first steps under a loss scale; JSON knows no NaN."""
    monkeypatch.setattr(module, "STEPS_BETWEEN_LOOKS", 2)

    def run(ranks: Ranks) -> list[list[float | None]]:
        run, errors = _Run(ranks, wire=wire), []
        for step in range(3):
            gradients = _gradients(ranks.rank, step)
            if step == 0:
                gradients["a.weight"][:] = math.inf
            run.step(gradients)
            report = json.loads(json.dumps(run.compressor.report(), allow_nan=False))
            errors.append([each["error"] for each in report["buckets"].values()])
        return errors

    for errors in run_local_ranks(2, run):
        assert errors[0] == errors[1] and errors[0][0] is not None and errors[0][1] is None
        assert all(error is not None and 0 < error < 1 for error in errors[2])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["a.weight", "a.bias"])
@pytest.mark.parametrize(("wire", "hosts"), [("4bit", ""), ("powersgd", ""), ("4bit", "aabb")])
def test_a_step_that_is_not_finite_on_one_rank_is_left_out_on_all(
    bad: float, where: str, wire: str, hosts: str
) -> None:
    def run(ranks: Ranks) -> tuple[bool, bool]:
        run = _Run(ranks, wire=wire)
        run.step(_gradients(ranks.rank, 0))
        before = {name: kept.clone() for name, kept in run.compressor.residuals.items()}
        gradients = _gradients(ranks.rank, 1)
        if ranks.rank == 1:
            gradients[where].view(-1)[3] = bad
        out = run.step(gradients)
        same = all(torch.equal(before[name], kept) for name, kept in run.compressor.residuals.items())
        return bool(torch.isfinite(out[where]).all()), same

    num_ranks = len(hosts) or 3
    assert run_local_ranks(num_ranks, run, hosts=hosts) == [(False, True)] * num_ranks


@pytest.mark.parametrize(("wire", "hosts"), [("3bit", ""), ("powersgd", ""), ("3bit", "aabb")])
def test_a_rank_without_a_gradient_keeps_what_it_owes(wire: str, hosts: str) -> None:
    """A parameter that nobody uses has the sum zero, and one that some use gets what these send."""

    def run(ranks: Ranks) -> list[Any]:
        run = _Run(ranks, wire=wire)
        first = run.step(_gradients(ranks.rank, 0))
        before = {name: kept.clone() for name, kept in run.compressor.residuals.items()}
        gradients = _gradients(ranks.rank, 1)
        gradients["a.weight"].zero_()
        if ranks.rank == 0:
            gradients["c.weight"].zero_()
        out = run.step(gradients)
        return [first, before, gradients, out, run.compressor.residuals]

    results = run_local_ranks(len(hosts) or 2, run, hosts=hosts)
    for _, before, _, out, after in results:
        assert not out["a.weight"].any() and torch.equal(before["a.weight"], after["a.weight"])
    owed = [_total([r[k] for r in results], "c.weight") for k in (1, 2, 3, 4)]
    error = owed[0] + owed[1] - owed[2] / len(results) - owed[3]  # before + gradients - sum - after
    assert float(error.abs().max()) < 1e-5


def test_what_is_owed_is_sent_with_a_gradient_of_either_sign() -> None:
    """bfloat16 leaves 2**-10 of 1 + 2**-10 out, which a gradient of -2**-10 pays."""

    def run(ranks: Ranks) -> list[float]:
        run, found = _Run(ranks, wire="bf16", error_feedback=True), []
        for value in (1 + 2**-10, -(2**-10)):
            sums = run.step({name: torch.full(shape, value) for name, shape in SHAPES.items()})
            found += [float(each["a.weight"].unique()) for each in (sums, run.compressor.residuals)]
        return found

    assert run_local_ranks(2, run) == [[2.0, 2**-10, 0.0, 0.0]] * 2


def test_stochastic_rounding_draws_anew_for_each_step_and_parameter() -> None:
    """So that the mean over steps is that of the gradients; to nearest nothing is drawn."""
    gradient = torch.randn(40 * 30, generator=torch.Generator().manual_seed(0))

    def run(ranks: Ranks, rounding: str) -> list[Tensor]:
        named = {"a": torch.zeros(40, 30), "b": torch.zeros(40, 30)}
        settings = Compression(wire="2bit", rounding=rounding, error_feedback=False)
        compressor, link, sums = make_compressor(named, settings, 2), Link.of(ranks), []
        for _ in range(2):
            compressor.open()
            for name in named:
                sums.append(gradient.clone())
                compressor.sum_(sums[-1], [name], [None], 0, link)
            compressor.settle(link)
        return sums

    for rounding in ("stochastic", "nearest"):
        first, *others = run_local_ranks(2, partial(run, rounding=rounding))[0]
        assert [torch.equal(first, other) for other in others] == [rounding == "nearest"] * 3


def test_bits_are_chosen_by_what_all_ranks_have_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever they are: gradients of which sizes rank 0 has does not matter."""
    monkeypatch.setattr(module, "FIRST_PLAN", 1)
    sizes = [{"a": 1e2, "b": 1e-2, "c": 1.0}, {"a": 1e-2, "b": 1e4, "c": 1.0}]

    def run(ranks: Ranks, order: int) -> dict[str, int]:
        own = (ranks.rank + order) % 2
        run = _Run(ranks, wire="adaptive", error_feedback=False)
        run.step({name: x * sizes[own][name[0]] for name, x in _gradients(own, 0).items()})
        bits: dict[str, int] = run.compressor.bits
        return bits

    found = [bits for order in range(2) for bits in run_local_ranks(2, partial(run, order=order))]
    assert found == [found[0]] * 4 and found[0]["b.weight"] > found[0]["a.weight"]


@pytest.mark.parametrize("wire", ["2bit", "adaptive", "powersgd"])
def test_a_tensor_without_values_takes_part(wire: str) -> None:
    def run(ranks: Ranks) -> Tensor:
        named, values = {"none": torch.zeros(0, 9), "w": torch.zeros(20, 30)}, torch.full((600,), 1.0 + ranks.rank)
        run = make_compressor(named, Compression(wire=wire, least_size=0), 2)
        run.open()
        run.sum_(values, ["none", "w"], [None, None], 0, Link.of(ranks))
        return values

    for values in run_local_ranks(2, run):
        # equal values lie on a level; as a product of rank 2, whose columns have norm 1, they are rounded some 40 times
        assert float((values - 3).abs().max()) <= 3 * 40 * 2.0**-24


def test_state_goes_on_where_it_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PLAN", 2)
    ways = (("adaptive", "nearest", ""), ("4bit", "stochastic", ""), ("powersgd", "nearest", ""))
    for wire, rounding, hosts in (*ways, ("adaptive", "nearest", "aabb"), ("powersgd", "nearest", "aabb")):

        def run(ranks: Ranks, wire: str = wire, rounding: str = rounding) -> bool:
            whole, first = (_Run(ranks, wire=wire, rounding=rounding, bucket=64) for _ in range(2))
            for step in range(3):
                whole.step(_gradients(ranks.rank, step))
                first.step(_gradients(ranks.rank, step))
            second = _Run(ranks, wire=wire, rounding=rounding, bucket=64)
            second.compressor.load(first.compressor.shared_state(), first.compressor.residuals)
            same = True
            for step in range(3, 5):
                a, b = (r.step(_gradients(ranks.rank, step)) for r in (whole, second))
                same = same and all(torch.equal(a[name], b[name]) for name in SHAPES)
            steps = [r.compressor.report()["steps"] for r in (whole, first, second)]
            return same and steps == [5, 3, 2]

        assert all(run_local_ranks(len(hosts) or 2, run, hosts=hosts))
    one = Compressor(_parameters(), Compression(), 2)
    with pytest.raises(ValueError, match="state is of other parameters: d is not compressed here"):
        one.load({"step": 1, "bits": None, "arranged": {}}, {"d": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"a\.weight has shape \(3,\)"):
        one.load({"step": 1, "bits": None, "arranged": {}}, {"a.weight": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"is_across=True, bucket=7\) is none of these settings"):
        one.load({"step": 1, "bits": None, "arranged": {"a.weight": [True, 7]}}, {})
    of_few = Compressor(_parameters(), Compression(exact=["a.*"]), 2)
    with pytest.raises(ValueError, match=r"the state is of other settings: a\.weight was not compressed there"):
        one.load(of_few.shared_state(), {})


def test_what_is_kept_follows_the_order_in_which_values_come() -> None:
    """Channels last or first, what is kept of a value stays with it."""

    def run(ranks: Ranks) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        run = _Run(ranks, wire="3bit")
        run.step(_gradients(ranks.rank, 0))
        before = {name: kept.clone() for name, kept in run.compressor.residuals.items()}
        run.compressor.open()
        order = [0, 2, 3, 1]
        run.compressor.sum_(torch.zeros(9 * 125), ["b.weight"], [order], 0, run.link)
        run.compressor.settle(run.link)
        return before, run.compressor.residuals

    for before, after in run_local_ranks(2, run):
        assert torch.equal(before["b.weight"], after["b.weight"])


def test_what_is_kept_follows_the_way_in_which_tensors_are_arranged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three axes, in columns of like sizes and then in rows of such; at the change rank 1 has no gradient."""
    monkeypatch.setattr(module, "STEPS_BETWEEN_PLANS", 2)
    shape, rows, columns = (64, 5, 64), torch.arange(64)[:, None, None] // 8, torch.arange(5 * 64).view(5, 64) // 40

    def run(ranks: Ranks) -> list[Tensor]:
        compressor = Compressor({"w": torch.zeros(shape)}, Compression(wire="4bit"), 2)
        draw, link = torch.Generator().manual_seed(ranks.rank), Link.of(ranks)
        given, summed, found = torch.zeros(shape), torch.zeros(shape), list[Tensor]()
        for step in range(4):
            gradient = (torch.rand(shape, generator=draw) + 1) * 10.0 ** -(columns if step < 2 else rows)
            gradient *= not (step == 2 and ranks.rank == 1)
            values = gradient.flatten().clone()
            compressor.open()
            compressor.sum_(values, ["w"], [None], 0, link)
            compressor.settle(link)
            assert compressor.report()["arranged"]["w"][0] is (step < 2)
            given, summed = given + gradient, summed + values.view(shape)
            found.append(compressor.residuals["w"])
        return [given, summed, *found]

    (given, summed, *own), (others, same, *kept) = run_local_ranks(2, run)
    assert torch.equal(summed, same) and torch.equal(kept[1], kept[2]) and kept[1].any()
    # of each value 4 steps: some 6 operations in float32, on values below 4 of 2 ranks
    assert float((summed + own[-1] + kept[-1] - given - others).abs().max()) <= 4 * 6 * 2 * 4 * 2.0**-24


def test_residuals_are_given_and_taken_as_copies_and_nothing_else_stays() -> None:
    residuals = Residuals({"a": torch.zeros(2, 3), "b": torch.zeros(4)})
    for name in ("a", "b"):
        residuals.pack_as(name, None)
        residuals[name].fill_(1)
    given = residuals.copies()
    given["a"].fill_(2)
    assert residuals["a"].eq(1).all()
    residuals.load({"a": given["a"]})
    given["a"].fill_(3)
    assert residuals["a"].eq(2).all() and list(residuals.copies()) == ["a"]


@pytest.mark.parametrize("hosts", ["", "aab", "aabb"])
@pytest.mark.parametrize("wire", ["4bit", "adaptive"])
def test_the_report_counts_what_was_handed_over(monkeypatch: pytest.MonkeyPatch, wire: str, hosts: str) -> None:
    monkeypatch.setattr(module, "FIRST_PLAN", 2)

    def run(ranks: Ranks) -> tuple[dict[str, Any], int]:
        run = _Run(ranks, wire=wire)
        for step in range(2):
            run.step(_gradients(ranks.rank, step))
        return run.compressor.report(), run.link.sent_bytes

    for report, sent in run_local_ranks(len(hosts) or 2, run, hosts=hosts):
        # choosing bits: eight errors in float64 and an answer for each matrix, to each other rank
        plans = (len(SHAPES) - 1) * (8 * 8 + 1) * ((len(hosts) or 2) - 1) if wire == "adaptive" else 0
        assert report["sent_bytes"] == sent == plans + sum(b["sent_bytes"] for b in report["buckets"].values())
        assert (0 < report["sent_bytes_across_hosts"] <= sent) if hosts else (report["sent_bytes_across_hosts"] == 0)
        assert report["steps"] == 2 and set(report["buckets"]) == {"c.weight", "b.weight"}
        assert report["compressed_values"] == 40 * 30 + 9 * 125 + 33 * 32
        least = 0.0 if hosts else 0.001  # a rank's piece may be what travels as it is
        assert all(least <= b["error"] < 1 for b in report["buckets"].values())
        assert report["exchange_seconds"] > 0 and report["codec_seconds"] > 0


def test_buckets_hold_values_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and columns of ten sizes: within one bucket each value is off by at most half a level of its own size."""
    sizes = 10.0 ** -torch.arange(10).repeat_interleave(32).float()
    shapes = {"rows": (320, 64), "columns": (64, 320), "conv": (64, 320, 1), "pieces": (64, 512), "none": (64, 32)}
    pieces = 10.0 ** -((torch.arange(64)[:, None] + torch.arange(512) // 128) % 4).float()
    shapes |= {"vector": (20,)}
    monkeypatch.setattr(module, "STEPS_BETWEEN_PLANS", 3)

    def run(ranks: Ranks) -> tuple[list[dict[str, list[int]]], list[float]]:
        named = {name: torch.zeros(shape) for name, shape in shapes.items()}
        compressor, link = Compressor(named, Compression(error_feedback=False), 2), Link.of(ranks)
        draw = torch.Generator().manual_seed(ranks.rank)
        plans, worst = [], []
        for step in range(5):
            row = torch.rand(320, 64, generator=draw) + 1
            like_rows = row * sizes[:, None]
            of_each = {"rows": like_rows, "columns": like_rows.t(), "conv": like_rows.t()[..., None]}
            of_each["pieces"] = (torch.rand(64, 512, generator=draw) + 1) * pieces
            if step == 3:  # measured again: what overflows changes nothing
                of_each["columns"] = like_rows.t() * math.nan
            given = {name: of_each.get(name, named[name]).float() for name in shapes}
            compressor.open()
            values = torch.cat([x.flatten() for x in given.values()])
            exact = values.clone()
            compressor.sum_(values, list(shapes), [None] * len(shapes), 0, link)
            total = link.gather(exact.view(torch.uint8)).clone().view(torch.float32).view(2, -1).sum(0)
            compressor.settle(link)
            plans.append(compressor.report()["arranged"])
            worst.append(float(((values - total) / total).nan_to_num().abs().max()))
        return plans, worst

    for plans, worst in run_local_ranks(2, run):
        usual = {"rows": [False, 512], "none": [False, 512]}
        assert plans == [usual | {"columns": [True, 512], "conv": [True, 512], "pieces": [False, 128]}] * 5
        assert max(worst[:3]) < 0.1  # from 1 to 2 in 15 steps, twice; beside others ten times as large it is above 0.5
