"""Shares are the best there are, found by trying all; memories are kept, or it is said what is lacking."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from nugnn.planning.in_words import in_bytes
from nugnn.planning.lacking import DoesNotFitError, fitting_factor
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.share_curves import relaxed_curves
from nugnn.planning.shares import plan_shares
from nugnn.planning.work_model import LinearCost, LinearWork

GIB = 2**30
NAMES = ("fixed", "inner", "edges", "halo", "sent", "train")


def random_work(rng: np.random.Generator, num_devices: int, num_nodes: int) -> LinearWork:
    def cost(scale: float) -> LinearCost:
        values = dict(zip(NAMES, rng.random(6) * scale, strict=True))
        values["fixed"] *= num_nodes / 10
        return LinearCost(**values)

    speeds = 10 ** rng.uniform(-0.5, 0.5, num_devices)
    return LinearWork(tuple(cost(s) for s in speeds), tuple(cost(100.0) for _ in range(num_devices)))


def sizes_at(inner: int, whole: PartSizes, halo_fraction: float, num_parts: int) -> PartSizes:
    """The documented assumptions, once more."""
    n, rest = whole.inner, whole.inner - inner
    if num_parts == 1:
        halo_fraction = 0
    return PartSizes(
        inner,
        round(inner / n * whole.edges),
        round(min(halo_fraction * inner, rest)),
        round(halo_fraction * min(inner, rest)),
        round(inner / n * whole.train),
    )


@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize("seed", range(25))
def test_no_division_into_whole_nodes_is_better(num_devices: int, seed: int) -> None:
    rng = np.random.default_rng([seed, num_devices])
    whole = PartSizes(60, 300, 0, 0, 30)
    halo_fraction = float(rng.choice([0, 0.3, 1, 2]))
    work = random_work(rng, num_devices, whole.inner)
    seconds, held = np.zeros((num_devices, 61)), np.zeros((num_devices, 61))
    for part, inner in itertools.product(range(num_devices), range(1, 61)):
        sizes = sizes_at(inner, whole, halo_fraction, num_devices)
        seconds[part, inner], held[part, inner] = work.seconds(part, sizes), work.bytes(part, sizes)
    step = np.abs(np.diff(seconds[:, 1:])).max()  # a share need not be of whole nodes
    byte_step = np.abs(np.diff(held[:, 1:])).max()
    limits = [float(held[p, 60]) * rng.uniform(0.4, 1.2) for p in range(num_devices)]

    def best(slack: float) -> float:
        divisions = itertools.product(range(1, 61), repeat=num_devices)
        return min(
            (
                max(seconds[p, n] for p, n in enumerate(division))
                for division in divisions
                if sum(division) == 60 and all(held[p, n] <= limits[p] + slack for p, n in enumerate(division))
            ),
            default=math.inf,
        )

    try:
        plan = plan_shares(work, whole, limits, halo_fraction=halo_fraction)
    except DoesNotFitError:
        assert best(-byte_step) == math.inf
        return
    assert plan.makespan <= best(-byte_step) + 3 * step
    assert plan.makespan >= best(2 * byte_step) - 3 * step
    assert math.isclose(math.fsum(plan.shares), 1)
    assert all(b <= limit * (1 + 1e-9) for b, limit in zip(plan.bytes, limits, strict=True))


def test_without_halo_and_fixed_costs_shares_are_speeds() -> None:
    seconds = (1.0, 2.0, 4.0, 10.0)
    work = LinearWork(tuple(LinearCost(inner=s) for s in seconds))
    plan = plan_shares(work, PartSizes(10_000, 50_000, 0, 0, 0), [math.inf] * 4)
    total = sum(1 / s for s in seconds)
    assert plan.shares == pytest.approx([1 / s / total for s in seconds])
    assert plan.seconds == pytest.approx([10_000 / total] * 4)
    assert plan.full == (False,) * 4


def test_equal_devices_get_equal_shares() -> None:
    work = LinearWork((LinearCost(fixed=3, inner=1, edges=2, halo=1, sent=2),) * 7)
    plan = plan_shares(work, PartSizes(1000, 9000, 0, 0, 0), [math.inf] * 7)
    assert plan.shares == pytest.approx([1 / 7] * 7)


@pytest.mark.parametrize("seed", range(10))
def test_permuted_devices_get_permuted_shares(seed: int) -> None:
    rng = np.random.default_rng(seed)
    work = random_work(rng, 6, 1000)
    whole = PartSizes(1000, 8000, 0, 0, 100)
    held = [work.bytes(p, PartSizes(1000, 8000, 0, 0, 100)) for p in range(6)]
    limits = [float(h) * rng.uniform(0.3, 1) for h in held]
    order = rng.permutation(6)
    permuted = LinearWork(tuple(work.seconds_of[p] for p in order), tuple(work.bytes_of[p] for p in order))
    plan = plan_shares(work, whole, limits)
    other = plan_shares(permuted, whole, [limits[p] for p in order])
    assert other.shares == pytest.approx([plan.shares[p] for p in order])
    assert other.full == tuple(plan.full[p] for p in order)


def test_a_full_memory_leaves_the_rest_to_others() -> None:
    work = LinearWork((LinearCost(inner=1),) * 3, (LinearCost(fixed=100, inner=10),) * 3)
    plan = plan_shares(work, PartSizes(1000, 0, 0, 0, 0), [100 + 10 * 100, math.inf, math.inf], halo_fraction=0)
    assert plan.shares == pytest.approx([0.1, 0.45, 0.45])
    assert plan.full == (True, False, False)
    assert plan.bytes[0] == pytest.approx(1100)


def test_a_device_that_is_slow_whatever_it_holds_gets_one_node_and_others_are_level() -> None:
    work = LinearWork((LinearCost(fixed=1e6, inner=1), LinearCost(inner=1), LinearCost(inner=3)))
    plan = plan_shares(work, PartSizes(1001, 0, 0, 0, 0), [math.inf] * 3)
    assert plan.shares == pytest.approx([1 / 1001, 750 / 1001, 250 / 1001])
    assert plan.makespan == pytest.approx(1e6 + 1)


def test_a_model_that_is_not_linear_is_levelled_too() -> None:
    class Launches:
        """A cost for every begun thousand of edges besides the edges."""

        def seconds(self, part: int, sizes: PartSizes) -> float:
            return (1 + part) * (sizes.edges + 500 * math.ceil(sizes.edges / 1000))

        def bytes(self, part: int, sizes: PartSizes) -> int:
            return 0

    plan = plan_shares(Launches(), PartSizes(100_000, 1_000_000, 0, 0, 0), [math.inf] * 3)
    work, whole = Launches(), PartSizes(100_000, 1_000_000, 0, 0, 0)
    seconds = [work.seconds(p, sizes_at(round(s * 100_000), whole, 0, 3)) for p, s in enumerate(plan.shares)]
    assert max(seconds) <= 1.05 * min(seconds)


def lacking_case() -> tuple[LinearWork, PartSizes, list[float]]:
    """1,000 nodes of 16 MiB each; a device of 4 GiB holds 248 of them beside 128 MiB, one of 2 GiB 120."""
    cost = LinearCost(fixed=128 * 2**20, inner=2**24)
    return LinearWork((LinearCost(inner=1),) * 3, (cost,) * 3), PartSizes(1000, 0, 0, 0, 0), [4 * GIB, 4 * GIB, 2 * GIB]


def test_what_is_lacking_is_said_in_numbers() -> None:
    work, whole, limits = lacking_case()
    with pytest.raises(DoesNotFitError) as raised:
        plan_shares(work, whole, limits, halo_fraction=0)
    message = str(raised.value)
    assert "the devices together hold 61.6% of it" in message
    # a third of the graph: 1000 / 3 nodes * 16 MiB + 128 MiB = 5.33 GiB
    assert "Device 0: 4.00 GiB hold 24.8%; its share by speed, 33.3%, needs 5.33 GiB, 1.33 GiB more." in message
    assert "Device 2: 2.00 GiB hold 12.0%; its share by speed, 33.3%, needs 5.33 GiB, 3.33 GiB more." in message
    assert "It would fit with 2 more like device 0 or 4 more like device 2" in message
    assert "took 0.61 of their bytes: numbers of 16 bits for 32 would do" in message


@pytest.mark.parametrize(("count", "device"), [(2, 0), (4, 2)])
def test_what_would_do_does(count: int, device: int) -> None:
    work, whole, limits = lacking_case()
    for more, fits in ((count - 1, False), (count, True)):
        larger = LinearWork(
            work.seconds_of + (work.seconds_of[device],) * more, work.bytes_of + (work.bytes_of[device],) * more
        )
        if fits:
            plan_shares(larger, whole, limits + [limits[device]] * more, halo_fraction=0)
        else:
            with pytest.raises(DoesNotFitError):
                plan_shares(larger, whole, limits + [limits[device]] * more, halo_fraction=0)


def test_the_factor_on_bytes_is_where_it_begins_to_fit() -> None:
    work, whole, limits = lacking_case()
    factor = fitting_factor(work, relaxed_curves(work, whole, 3, 0), limits)
    assert factor == pytest.approx(616 / 1000)
    for scale, fits in ((factor * 0.999, True), (factor * 1.001, False)):
        smaller = LinearWork(work.seconds_of, (LinearCost(fixed=128 * 2**20, inner=scale * 2**24),) * 3)
        if fits:
            plan_shares(smaller, whole, limits, halo_fraction=0)
        else:
            with pytest.raises(DoesNotFitError):
                plan_shares(smaller, whole, limits, halo_fraction=0)


def test_a_device_too_small_for_anything_is_named() -> None:
    work = LinearWork((LinearCost(inner=1),) * 2, (LinearCost(fixed=2 * GIB, inner=1),) * 2)
    with pytest.raises(DoesNotFitError) as raised:
        plan_shares(work, PartSizes(10, 0, 0, 0, 0), [GIB, 8 * GIB])
    assert "Device 0: 1.00 GiB do not hold a single node" in str(raised.value)
    assert "Smaller numbers would not do" in str(raised.value)
    assert "more like device" not in str(raised.value)  # the rest holds the graph; that device is what is wrong


@pytest.mark.parametrize(
    ("limits", "halo_fraction", "message"),
    [
        ([], 0, "limits is empty"),
        ([1, 0], 0, "the memory limit of device 1 is 0 bytes"),
        ([1, float("nan")], 0, "the memory limit of device 1 is nan bytes"),
        ([1] * 11, 0, "11 devices for 10 nodes"),
        ([1, 1], -1, "halo_fraction is -1"),
    ],
)
def test_malformed_arguments_are_refused(limits: list[float], halo_fraction: float, message: str) -> None:
    work = LinearWork((LinearCost(inner=1),) * 11)
    with pytest.raises(ValueError, match=message):
        plan_shares(work, PartSizes(10, 0, 0, 0, 0), limits, halo_fraction=halo_fraction)


def test_bytes_for_people() -> None:
    assert [in_bytes(x) for x in (12, 2048, 3 * 2**20, 5.5 * GIB)] == ["12 bytes", "2.00 KiB", "3.00 MiB", "5.50 GiB"]


def test_a_plan_for_many_devices_and_a_large_graph_takes_no_time_and_says_no_more_than_is_read() -> None:
    """64 devices and the counts of ogbn-papers100M."""
    rng = np.random.default_rng(0)
    costs = tuple(LinearCost(fixed=0.01, inner=1e-7 * f, edges=3e-9 * f, halo=3e-8) for f in 10 ** rng.random(64))
    work = LinearWork(costs, (LinearCost(fixed=1e9, inner=4000, edges=12, halo=2000),) * 64)
    whole = PartSizes(111_059_956, 3_231_371_744, 0, 0, 1_207_179)
    plan = plan_shares(work, whole, [32e9] * 64)
    assert min(plan.seconds) == pytest.approx(max(plan.seconds))
    with pytest.raises(DoesNotFitError) as raised:
        plan_shares(work, whole, [2e9] * 64)
    assert "And so on for 48 more." in str(raised.value) and len(str(raised.value).splitlines()) == 20
