"""Drafts lose nothing, are never slower by the model than shares by one number, and keep to memories or refuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nugnn.planning.baselines import baseline_shares
from nugnn.planning.cluster import Cluster, ClusterDevice
from nugnn.planning.datasheet import sheet_of
from nugnn.planning.draft import Draft, usable_bytes
from nugnn.planning.draft_batch import draft_of_batch
from nugnn.planning.draft_counts import draft_from_counts
from nugnn.planning.draft_cut import draft_with_cut
from nugnn.planning.expected_halo import ExpectedHalo
from nugnn.planning.forecast import Forecast
from nugnn.planning.lacking import DoesNotFitError
from nugnn.planning.links import Links
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.plan import SharesBy
from nugnn.planning.work_model import LinearCost, LinearWork, count_sizes
from work_alone import WorkAlone

WHOLE = PartSizes(inner=40_000, edges=900_000, train=4_000)
COST = LinearCost(fixed=1e-3, inner=2e-6, edges=2e-8, halo=1e-6, sent=5e-7)
BYTES = LinearCost(fixed=1e6, inner=1000, edges=12, halo=500)


def cluster(*names: str, hosts: tuple[int, ...] | None = None) -> Cluster:
    hosts = hosts or (0,) * len(names)
    devices = tuple(
        ClusterDevice(host=f"host-{host}", profile=sheet_of(name).as_profile())
        for name, host in zip(names, hosts, strict=True)
    )
    same = np.equal.outer(hosts, hosts)
    links = Links(np.where(same, 1e11, 1e9), np.where(same, 1e-5, 3e-5), hosts, {}, is_nccl=True)
    return Cluster(devices=devices, links=links)


def work_on(devices: Cluster, bytes_of: LinearCost = BYTES) -> LinearWork:
    """Seconds of nodes by FLOP/s, of edges by bandwidth: neither alone says how fast a device is."""
    fastest = sheet_of("H100").as_profile()
    costs = []
    for profile in devices.profiles:
        products = fastest.gemm_flops["fp32"] / profile.gemm_flops["fp32"]
        sums = fastest.gather_bytes / profile.gather_bytes
        costs.append(LinearCost(fixed=1e-3, inner=2e-6 * products, edges=1e-7 * sums, halo=1e-7 * sums))
    return LinearWork(tuple(costs), (bytes_of,) * len(costs))


def check(draft: Draft, work: LinearWork, devices: Cluster) -> None:
    slowest = max(work.seconds(rank, size) for rank, size in enumerate(draft.sizes))
    assert draft.forecast.step_seconds == pytest.approx(slowest, rel=1e-3)
    assert all(sum(each.values()) == pytest.approx(draft.forecast.step_seconds) for each in draft.forecast.seconds)
    assert draft.bytes == tuple(work.bytes(rank, size) for rank, size in enumerate(draft.sizes))
    assert all(held <= limit for held, limit in zip(draft.bytes, usable_bytes(devices), strict=True))
    assert [each.name for each in draft.baselines] == ["even", "flops", "bandwidth"]


MIXED = st.lists(st.sampled_from(["V100", "T4", "A100", "H100"]), min_size=1, max_size=6)


@given(MIXED, st.floats(0, 3))
def test_shares_from_counts_add_up_and_beat_baselines(names: list[str], halo: float) -> None:
    devices = cluster(*names)
    work = work_on(devices)
    draft = draft_from_counts(WorkAlone(work), WHOLE, devices, halo=ExpectedHalo(halo))
    check(draft, work, devices)
    for name in ("inner", "edges", "train"):
        assert sum(getattr(size, name) for size in draft.sizes) == getattr(WHOLE, name)
    assert draft.forecast.step_seconds <= min(each.step_seconds for each in draft.baselines)
    if len(set(names)) == 1:
        assert max(s.inner for s in draft.sizes) - min(s.inner for s in draft.sizes) <= 1
    alike = {name: draft.sizes[names.index(name)] for name in names}
    assert all(abs(size.inner - alike[name].inner) <= 1 for name, size in zip(names, draft.sizes, strict=True))


@dataclass(frozen=True)
class BetweenHosts(WorkAlone):
    """A second more for each further host that has more than next to nothing."""

    hosts: tuple[int, ...]

    def forecast(self, sizes: Sequence[PartSizes], sent_rows: npt.NDArray | None = None) -> Forecast:
        least = 0.01 * sum(size.inner for size in sizes) / len(sizes)
        used = {host for host, size in zip(self.hosts, sizes, strict=True) if size.inner > least}
        alone = super().forecast(sizes)
        return replace(alone, step_seconds=alone.step_seconds + len(used) - 1)

    def among(self, ranks: Sequence[int]) -> BetweenHosts:
        return BetweenHosts(super().among(ranks).work, tuple(self.hosts[rank] for rank in ranks))


@pytest.mark.parametrize("count", [4, 300])
def test_however_many_devices_there_are_fewer_of_them_are_looked_at(count: int) -> None:
    """A forecast of 300 devices costs more than may be spent on all sets of fewer."""
    hosts = tuple(rank // 2 for rank in range(count))
    devices = cluster(*["T4"] * count, hosts=hosts)
    draft = draft_from_counts(BetweenHosts(work_on(devices), hosts), WHOLE, devices, halo=ExpectedHalo(0.5))
    assert {host for host, size in zip(hosts, draft.sizes, strict=True) if size.inner > 1} == {0}


@pytest.mark.parametrize("name", ["even", "flops", "bandwidth"])
def test_shares_by_one_number_are_that_numbers(name: str) -> None:
    devices = cluster("H100", "T4", "A100")
    asked = baseline_shares(name, devices.profiles)
    assert sum(asked) == pytest.approx(1)
    draft = draft_from_counts(WorkAlone(work_on(devices)), WHOLE, devices, halo=0.5, shares_by=name)  # type: ignore[arg-type]
    assert [size.inner / WHOLE.inner for size in draft.sizes] == pytest.approx(asked, abs=1e-4)
    kept = next(each for each in draft.baselines if each.name == name)
    assert draft.forecast.step_seconds == pytest.approx(kept.step_seconds, rel=1e-3)
    split = draft_of_batch(WorkAlone(work_on(devices)), 64, devices, shares_by=name)  # type: ignore[arg-type]
    assert sum(size.batch for size in split.sizes) == 64


def test_given_shares_and_what_does_not_fit() -> None:
    devices = cluster("H100", "T4")
    draft = draft_from_counts(
        WorkAlone(work_on(devices)), WHOLE, devices, halo=0.5, shares_by="given", shares=[3.0, 1.0]
    )
    assert [size.inner for size in draft.sizes] == [30_000, 10_000]
    large = work_on(devices, LinearCost(inner=6e5))  # 24 GB, of which a T4 holds 15
    with pytest.raises(DoesNotFitError, match=r"1 x Tesla T4 on host-0 needs 16\.76 GiB and has .*--shares auto keeps"):
        draft_from_counts(WorkAlone(large), WHOLE, devices, halo=0.5, shares_by="given", shares=[1.0, 3.0])
    fitted = draft_from_counts(WorkAlone(large), WHOLE, devices, halo=0.5)
    check(fitted, large, devices)
    with pytest.raises(DoesNotFitError, match=r"the devices together hold .*\nNVIDIA H100.* on host-0: "):
        draft_from_counts(WorkAlone(work_on(devices, LinearCost(inner=1e7))), WHOLE, devices, halo=0.5)
    with pytest.raises(ValueError, match="1 share for 2 devices"):
        draft_from_counts(WorkAlone(large), WHOLE, devices, halo=0.5, shares_by="given", shares=[1.0])
    with pytest.raises(ValueError, match="2 devices for 1 node;"):
        draft_from_counts(WorkAlone(large), PartSizes(inner=1), devices, halo=0.5, shares_by="even")


def graph(seed: int, num_nodes: int = 600):
    rng = np.random.default_rng(seed)
    dst = rng.integers(0, num_nodes, 6000)
    src = np.where(rng.random(6000) < 0.8, dst + rng.integers(-9, 10, 6000), rng.integers(0, num_nodes, 6000))
    return num_nodes, src.clip(0, num_nodes - 1), dst, rng.permutation(num_nodes)[:60]


@pytest.mark.parametrize("shares_by", ["auto", "even"])
@pytest.mark.parametrize("has_graph", [False, True])
def test_more_devices_than_nodes_are_refused_in_words(shares_by: SharesBy, has_graph: bool) -> None:
    devices, none = cluster("T4", "A100", "H100"), np.zeros(0, np.int64)
    model = WorkAlone(work_on(devices))
    with pytest.raises(ValueError, match="3 devices for 2 nodes; every device needs at least one"):
        if has_graph:
            draft_with_cut(model, 2, none, none, none, devices, shares_by=shares_by, halo=ExpectedHalo())
        else:
            draft_from_counts(model, PartSizes(inner=2), devices, shares_by=shares_by, halo=ExpectedHalo())


@pytest.mark.parametrize("names", [("H100", "T4", "A100"), ("T4", "T4"), ("H100",), ("V100", "T4", "V100", "T4")])
def test_cut_parts_are_counted_and_beat_baselines(names: tuple[str, ...]) -> None:
    devices = cluster(*names, hosts=tuple(rank // 2 for rank in range(len(names))))
    work = work_on(devices)
    stages: list[str] = []
    draft = draft_with_cut(WorkAlone(work), *graph(0), devices, on_stage=stages.append)
    check(draft, work, devices)
    assert draft.part is not None and draft.sent_rows is not None
    _, src, dst, train = graph(0)
    assert draft.sizes == count_sizes(src, dst, draft.part, len(names), train)
    assert draft.sent_rows.sum(axis=1).tolist() == [size.sent for size in draft.sizes]
    assert draft.sent_rows.sum(axis=0).tolist() == [size.halo for size in draft.sizes]
    assert stages and all(stages)
    if len(set(names)) > 1:
        assert draft.forecast.step_seconds <= min(each.step_seconds for each in draft.baselines)
        assert "cutting the graph: by FLOP/s" in stages
    else:  # a moment's work: nothing but balance to find
        assert not any("FLOP/s" in stage for stage in stages)
    again = draft_with_cut(WorkAlone(work), *graph(0), devices)
    assert (again.part == draft.part).all()


def test_alike_devices_are_held_against_equal_shares_that_were_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = cluster("T4", "T4", "T4")
    stages: list[str] = []
    model = WorkAlone(work_on(devices))
    draft = draft_with_cut(model, *graph(0), devices, on_stage=stages.append)
    assert {f"cutting the graph: {way}" for way in ("by work", "evenly")} <= set(stages)
    assert draft.forecast.step_seconds <= min(each.step_seconds for each in draft.baselines)
    assert not any(each.is_ideal for each in draft.baselines)
    monkeypatch.setattr("nugnn.planning.draft_cut._FEW_EDGES", 10)
    stages.clear()
    large = draft_with_cut(model, *graph(0), devices, on_stage=stages.append)
    assert large.part is not None
    assert "cutting the graph: evenly" not in stages  # a large graph is cut once
    assert all(each.is_ideal for each in large.baselines)


def test_cut_by_clusters_a_draft_beats_its_baselines_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As large graphs are: with baselines among what it starts from."""
    monkeypatch.setattr("nugnn.partition.coarse._FEWEST_CLUSTERS", 40)
    devices = cluster("H100", "T4", "A100")
    work = work_on(devices)
    stages: list[str] = []
    draft = draft_with_cut(WorkAlone(work), *graph(0), devices, partitioner="clusters", on_stage=stages.append)
    check(draft, work, devices)
    assert draft.forecast.step_seconds <= min(each.step_seconds for each in draft.baselines)
    assert {f"cutting the graph: {way}" for way in ("by work", "by FLOP/s", "as its counts foresee")} <= set(stages)
    again = draft_with_cut(WorkAlone(work), *graph(0), devices, partitioner="clusters")
    assert draft.part is not None and (again.part == draft.part).all()


def test_a_cut_may_fit_where_expected_halo_would_not() -> None:
    devices = cluster("H100", "T4")
    num_nodes, src, dst, train = graph(0)
    near = abs(src - dst) < 10  # a band, whose cuts have hardly any halo
    tight = work_on(devices, LinearCost(inner=1.3e8, halo=1.3e8))
    whole = PartSizes(inner=num_nodes, edges=int(near.sum()), train=len(train))
    with pytest.raises(DoesNotFitError):
        draft_from_counts(WorkAlone(tight), whole, devices, halo=3.0)
    draft = draft_with_cut(WorkAlone(tight), num_nodes, src[near], dst[near], train, devices, halo=3.0)
    assert all(held <= limit for held, limit in zip(draft.bytes, usable_bytes(devices), strict=True))


def test_cut_by_one_number() -> None:
    devices = cluster("H100", "T4")
    work = work_on(devices)
    draft = draft_with_cut(WorkAlone(work), *graph(1), devices, shares_by="flops")
    asked = baseline_shares("flops", devices.profiles)
    assert [size.inner / 600 for size in draft.sizes] == pytest.approx(asked, abs=0.02)
    by_name = {each.name: each for each in draft.baselines}
    assert by_name["flops"].step_seconds == draft.forecast.step_seconds and not by_name["flops"].is_ideal  # this cut
    assert by_name["even"].is_ideal and by_name["bandwidth"].is_ideal
    alone = draft_with_cut(WorkAlone(work_on(cluster("T4"))), *graph(1), cluster("T4"))
    assert not any(each.is_ideal for each in alone.baselines)  # of one part nothing is cut
    with pytest.raises(DoesNotFitError, match="shares by even do not fit: 1 x Tesla T4 on host-0 needs"):
        draft_with_cut(WorkAlone(work_on(devices, LinearCost(inner=6e7))), *graph(1), devices, shares_by="even")


@given(MIXED, st.integers(6, 300))
def test_batches_add_up_and_beat_baselines(names: list[str], batch: int) -> None:
    devices = cluster(*names)
    costs = tuple(
        LinearCost(fixed=1e-3 / profile.gemm_flops["fp32"] * 1e13, train=1e10 / profile.gemm_flops["fp32"])
        for profile in devices.profiles
    )

    class OfBatches(LinearWork):
        def seconds(self, part: int, sizes: PartSizes) -> float:
            return self.seconds_of[part].fixed + self.seconds_of[part].train * sizes.batch

        def bytes(self, part: int, sizes: PartSizes) -> int:
            return 10**8 * sizes.batch

    work = OfBatches(costs)
    try:
        draft = draft_of_batch(WorkAlone(work), batch, devices)
    except DoesNotFitError as error:
        assert 10**8 * batch > sum(usable_bytes(devices)) - 10**8 * len(names), str(error)
        return
    check(draft, work, devices)
    assert sum(size.batch for size in draft.sizes) == batch
    fitting = [each.step_seconds for each in draft.baselines if each.fits]
    assert draft.forecast.step_seconds <= min(fitting, default=np.inf)


def test_a_batch_that_does_not_fit_is_refused_in_words() -> None:
    devices = cluster("H100", "T4")

    class OfBatches(LinearWork):
        def bytes(self, part: int, sizes: PartSizes) -> int:
            return 10**9 * sizes.batch

    work = OfBatches((LinearCost(train=1.0),) * 2)
    words = (
        r"shares by even do not fit: 1 x Tesla T4 on host-0 needs 29\.80 GiB and has .*; --shares auto keeps to the "
        "memories, and so may a smaller --batch-size or more --micro-batches"
    )
    with pytest.raises(DoesNotFitError, match=words):
        draft_of_batch(WorkAlone(work), 64, devices, shares_by="even")
