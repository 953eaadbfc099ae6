"""Limited workers: the same bits, within their cores and their memory; what cannot be kept is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nugnn
from exactness import NUM_CLASSES, NUM_FEATURES, make_graph
from nugnn import DeviceLimits, cli, limited
from nugnn.comm.groups import Ranks
from nugnn.config import TrainConfig
from nugnn.failure import WorkerFailed
from nugnn.fit_joined import _stay_apart, fit_joined
from nugnn.job import private_job_folder, write_job
from nugnn.launch import launch
from nugnn.limited import (
    apply_limits,
    check_on_devices,
    checked_limits,
    cores_of,
    cores_on,
    said_of,
    said_of_cores,
    threads_on,
)
from nugnn.options import ConfigError
from nugnn.process_state import HostMemory, host_memory
from nugnn.profile_run import limits_of_devices, profile_machine
from nugnn.sample_config import SampleConfig
from nugnn.worker_cores import divide_cores, equal_cores, fair_threads, own_cores, own_nodes
from nugnn.worker_environment import worker_environment

HERE = Path(__file__).resolve().parent
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


# -- what is asked -----------------------------------------------------------------------------------------------------


def test_limits_come_as_text_or_one_by_one() -> None:
    expected = (DeviceLimits(threads=1), DeviceLimits(), DeviceLimits(memory_fraction=0.5))
    assert checked_limits("threads=1;none;memory_fraction=0.5", 3) == expected
    assert checked_limits([DeviceLimits(threads=1), None, "memory_fraction=0.5"], 3) == expected
    assert checked_limits(None, 3) is None and checked_limits("none;none", 2) is None


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ("threads=1", "1 for 2 workers"),
        (["threads=1"] * 3, "3 for 2 workers"),
        ("threads=1;speed=3", "worker 1: limit 'speed=3' is not known"),
    ],
)
def test_limits_that_are_not_understood_are_refused(limits: Any, said: str) -> None:
    with pytest.raises(ValueError, match="limit") as refused:
        checked_limits(limits, 2)
    assert said in str(refused.value)


def test_a_limit_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="limits of a worker are 3"):
        checked_limits([3, None], 2)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("limits", "devices", "said"),
    [
        ("none;sms=8", [GPU, CPU], "limits of worker 1: sms=8, but it computes on the CPU"),
        ("memory_fraction=0.6;memory_fraction=0.5", [GPU, GPU], "on cuda:0 adds up to 1.1"),
        ("memory_fraction=0.6;memory_fraction=0.5", [CPU, CPU], "on cpu adds up to 1.1"),
        ("threads=100000;none", [CPU, CPU], "threads=100000: this host has"),
    ],
)
def test_what_workers_cannot_keep_is_refused_before_they_start(
    limits: str, devices: list[torch.device], said: str
) -> None:
    with pytest.raises(ValueError, match=r"limits|threads") as refused:
        check_on_devices(checked_limits(limits, 2) or (), devices)
    assert said in str(refused.value)


def test_memory_that_a_worker_needs_before_it_has_data_is_not_refused_by_its_death(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limited, "host_memory", lambda: HostMemory(0, 10 << 30, 0))
    monkeypatch.setattr(limited, "threads_on", lambda *_: (1, 5))
    with pytest.raises(
        ValueError, match=r"worker 0: .*0\.05 of 10\.00 GiB is 512\.00 MiB, and a worker takes"
    ) as refused:
        check_on_devices(checked_limits("memory_fraction=0.05;none", 2) or (), [CPU, CPU])
    assert str(refused.value).endswith("550.00 MiB before it has any data; give memory_fraction=0.054 or more")
    check_on_devices(checked_limits("memory_fraction=0.054;none", 2) or (), [CPU, CPU])
    with pytest.raises(ValueError, match=r"worker 1: .* give memory_fraction=0.062 or more"):  # stacks of its threads
        check_on_devices(checked_limits("none;memory_fraction=0.054", 2) or (), [CPU, CPU])


def test_two_workers_may_share_a_card() -> None:
    check_on_devices(checked_limits("sms=8,memory_fraction=0.6;sms=16,memory_fraction=0.4", 2) or (), [GPU, GPU])


@pytest.mark.parametrize("kind", [TrainConfig, SampleConfig])
def test_settings_have_one_spelling_and_a_resumed_run_may_change_them(kind: Any) -> None:
    name = "digits" if kind is TrainConfig else "digits-images"
    limited = kind(dataset=name, workers=2, limits=" threads=1, memory_fraction=.50 ; none")
    assert limited.limits == "memory_fraction=0.5,threads=1;none"
    assert kind(**limited.to_dict()) == limited
    assert limited.fixed_settings() == kind(dataset=name, workers=2).fixed_settings()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"limits": "threads=1"}, "--limits threads=1: 1 for --workers 2"),
        ({"limits": "none;sms=x"}, "--limits 'none;sms=x': worker 1: sms is 'x'"),
        ({"limits": "none;sms=8", "device": "cpu"}, "worker 1 computes on the CPU"),
        ({"limits": "none;sms=8", "device": "cuda:0,cpu"}, "worker 1 computes on the CPU"),
    ],
)
def test_settings_that_do_not_fit_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match="--limits") as refused:
        TrainConfig(dataset="digits", workers=2, **options)
    assert said in str(refused.value)


# -- cores -------------------------------------------------------------------------------------------------------------


def nodes_of(*sizes: tuple[int, int]) -> st.SearchStrategy[list[list[int]]]:
    """Numbers of cores in one or several nodes, as many in all as one of ``sizes`` allows."""
    least, most = sizes[0]
    cores = st.lists(st.integers(0, 50), min_size=least, max_size=most, unique=True)
    return st.tuples(cores, st.integers(0, most)).map(lambda both: [p for p in _in_two(*both) if p])


def _in_two(cores: list[int], first: int) -> tuple[list[int], list[int]]:
    return sorted(cores[:first]), sorted(cores[first:])


@given(threads=st.lists(st.none() | st.integers(1, 6), min_size=1, max_size=6), nodes=nodes_of((6, 20)))
def test_cores_are_divided_without_overlap_or_not_at_all(threads: list[int | None], nodes: list[list[int]]) -> None:
    divided, cores = divide_cores(threads, nodes), {core for node in nodes for core in node}
    asked = sum(count or 1 for count in threads)
    assert [each.is_limited for each in divided] == [count is not None for count in threads]
    assert all(each.threads == count for each, count in zip(divided, threads, strict=True) if count)
    if asked > len(cores):
        assert all(each.cores is None for each in divided)
        return
    held = [core for each in divided for core in each.cores or ()]
    assert len(set(held)) == len(held) and set(held) <= cores
    assert all(each.cores is not None and len(each.cores) == each.threads >= 1 for each in divided)
    others = [each.threads for each in divided if not each.is_limited]
    assert not others or (max(others) - min(others) <= 1 and len(held) == len(cores))


@given(workers=st.integers(1, 6), nodes=nodes_of((1, 20)), threads=st.none() | st.integers(1, 6))
def test_workers_alike_have_all_cores_among_them_or_none_of_their_own(
    workers: int, nodes: list[list[int]], threads: int | None
) -> None:
    given_threads = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    cores = {core for node in nodes for core in node}
    found = equal_cores(workers, nodes, given_threads)
    assert (found is None) == (workers == 1 or workers * (threads or 1) > len(cores))
    assert equal_cores(workers, nodes, given_threads | {"OMP_PLACES": "cores"}) is None
    if found is None:
        return
    held = [core for each in found for core in each.cores or ()]
    assert len(held) == len(cores) and set(held) == cores
    counts = [len(each.cores or ()) for each in found]
    assert counts == sorted(counts, reverse=True) and counts[0] - counts[-1] <= 1
    # they have the threads that they would have without cores of their own
    expected = fair_threads(workers, len(cores)) if threads is None else (threads,) * workers
    text = given_threads.get("OMP_NUM_THREADS")
    assert tuple(int(each.environment(text)["OMP_NUM_THREADS"]) for each in found) == expected
    # as many as there can be have all of theirs in one node
    if all(len(node) % counts[0] == 0 for node in nodes) and counts[0] == counts[-1]:
        assert all(any(set(each.cores or ()) <= set(node) for node in nodes) for each in found)


def describe_cores(folder: Path, nodes: list[list[list[int]]]) -> Path:
    """As the system does it: nodes of physical cores of threads."""
    for number, node in enumerate(nodes):
        for physical in node:
            for core in physical:
                (folder / f"cpu{core}" / "topology").mkdir(parents=True)
                (folder / f"cpu{core}" / f"node{number}").mkdir()
                text = ",".join(map(str, physical)) + "\n"
                (folder / f"cpu{core}" / "topology" / "thread_siblings_list").write_text(text)
    return folder


def test_workers_have_whole_physical_cores_of_one_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("nugnn.worker_cores.own_cores", lambda: tuple(range(12)))
    # as most systems number them: first one thread of each physical core, nodes in turns
    pairs = [[core, core + 6] for core in range(6)]
    system = describe_cores(tmp_path, [pairs[0::2], pairs[1::2]])
    nodes = own_nodes(system)
    assert nodes == ((0, 6, 2, 8, 4, 10), (1, 7, 3, 9, 5, 11))
    assert [each.cores for each in equal_cores(2, nodes, {}) or ()] == list(nodes)
    by_six = [set(each.cores or ()) for each in equal_cores(6, nodes, {}) or ()]
    assert sorted(map(sorted, by_six)) == pairs
    limited = divide_cores([4, 4, None], nodes)
    assert [each.cores for each in limited] == [(0, 6, 2, 8), (1, 7, 3, 9), (4, 10, 5, 11)]


def test_cores_stay_in_their_order_where_the_system_does_not_describe_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("nugnn.worker_cores.own_cores", lambda: (3, 5, 8))
    assert own_nodes(tmp_path / "nothing") == ((3, 5, 8),)
    (tmp_path / "cpu5" / "topology").mkdir(parents=True)
    (tmp_path / "cpu5" / "topology" / "thread_siblings_list").write_text("\n")
    assert own_nodes(tmp_path) == ((3, 5, 8),)
    (tmp_path / "cpu5" / "topology" / "thread_siblings_list").write_text("3-5\n")
    assert own_nodes(tmp_path) == ((3, 5, 8),)
    monkeypatch.setattr("nugnn.worker_cores.own_cores", lambda: (3, 4, 8))
    describe_cores(tmp_path, [[[3, 8]], [[4]]])
    assert own_nodes(tmp_path) == ((3, 8), (4,))


def test_workers_on_cpus_alone_are_tied_without_being_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    for name in ("OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("nugnn.limited.own_nodes", lambda: ((3, 5, 8, 9),))
    tied = cores_on([cpu, cpu], None)
    assert tied is not None and [each.cores for each in tied] == [(3, 5), (8, 9)]
    assert cores_on([cpu, cpu], (DeviceLimits(memory_fraction=0.5), DeviceLimits())) == tied
    assert cores_on([cpu, gpu], None) is cores_on([cpu], None) is None
    limits = (DeviceLimits(threads=1), DeviceLimits())
    assert cores_on([cpu, cpu], limits) == cores_of(limits) != tied
    assert threads_on([cpu, cpu], None) == (2, 2) and threads_on([cpu, cpu], limits) == (1, 3)
    assert threads_on([cpu, gpu, gpu], None) == (2, 1, 1) and threads_on([cpu], None) == (4,)
    monkeypatch.setenv("OMP_PROC_BIND", "false")
    assert cores_on([cpu, cpu], None) is None and threads_on([cpu] * 3, None) == (2, 1, 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_on([cpu, cpu], None) == (3, 3) and threads_on([cpu, cpu], limits) == (1, 3)


def test_joined_workers_run_on_their_cores_and_gloo_waits_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cores = cores_on([torch.device("cpu")] * 2, None)
    events: list[dict[str, Any]] = []
    with private_job_folder() as folder:
        write_job(folder, {"scenario": "place_threads"})
        launch(folder, 2, module="launch_scenarios", timeout=60, on_event=events.append, cores=cores)
    own = list(own_cores()) if cores is None else list(cores[0].cores or ())
    threads = events[0]["threads"]
    assert [where for _, where, _ in threads] == [own] * len(threads)
    assert [name for name, _, policy in threads if policy == os.SCHED_BATCH] == ["gloo_tcp_loop"] * 3
    assert {policy for name, _, policy in threads if name != "gloo_tcp_loop"} == {os.SCHED_OTHER}


def test_threads_that_are_not_limited_stay_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    limited, free = divide_cores([2, None], [range(8)])
    assert worker_environment(0, 2, 1, 1.0, limited)["OMP_NUM_THREADS"] == "2"
    assert worker_environment(1, 2, 1, 1.0, free)["OMP_NUM_THREADS"] == "7"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert worker_environment(1, 2, 1, 1.0, free)["OMP_NUM_THREADS"] == "6"


def test_a_worker_keeps_to_its_cores_and_ends_where_its_memory_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)
    events: list[dict[str, Any]] = []
    limits = (DeviceLimits(threads=1), DeviceLimits())
    with private_job_folder() as folder, pytest.raises(WorkerFailed, match="worker 1 of 2: out of memory") as failed:
        write_job(folder, {"scenario": "keep_limits", "room_bytes": 1 << 28})
        launch(folder, 2, module="launch_scenarios", timeout=60, on_event=events.append, cores=cores_of(limits))
    assert failed.value.exit_code == 3
    assert "can't allocate memory" in failed.value.message and " and may have " in failed.value.message
    (event,) = events
    cores = list(own_cores())
    tied = {"cores": cores[:1]} if len(cores) > 1 else {}
    assert event["places"] == [tied.get("cores", cores)] and event["variable"] == "1"
    assert event["holds"] == {"asked": "threads=1", "threads": 1} | tied


def test_memory_below_what_the_process_holds_is_refused() -> None:
    with pytest.raises(ValueError, match=r"before it has any data; give more"):
        apply_limits(DeviceLimits(memory_fraction=1e-6), CPU)


# -- training ----------------------------------------------------------------------------------------------------------


def train(limits: Any, workers: int = 2, epochs: int = 4, **options: Any) -> nugnn.FitResult:
    torch.manual_seed(0)
    model = nugnn.GNN("sage", NUM_FEATURES, NUM_CLASSES, hidden=8, dropout=0.5)
    data = make_graph(dtype=torch.float32)
    return nugnn.fit(model, data, epochs=epochs, workers=workers, limits=limits, check=False, device="cpu", **options)


@pytest.mark.usefixtures("forked_workers")
def test_limits_change_no_bit_and_are_reported() -> None:
    free, limited = train(None), train(["threads=1", DeviceLimits(memory_fraction=0.4)])
    assert torch.equal(free.logits, limited.logits)
    assert [epoch.loss for epoch in free.history] == [epoch.loss for epoch in limited.history]
    assert all("limits" not in report for report in free.rank_reports)
    first, second = (report["limits"] for report in limited.rank_reports)
    assert first["threads"] == 1 and first["asked"] == "threads=1" and "memory_bytes" not in first
    assert second["asked"] == "memory_fraction=0.4" and second["memory_bytes"] > 0


@pytest.mark.usefixtures("forked_workers")
def test_a_single_limited_worker_is_a_process_of_its_own(tmp_path: Path) -> None:
    """This process keeps its memory; and a run goes on with other limits than it began with."""
    begun = train("memory_fraction=0.4", workers=1, epochs=2, checkpoint_folder=tmp_path)
    assert begun.rank_reports[0]["limits"]["asked"] == "memory_fraction=0.4"
    gone_on = train("threads=1", workers=1, checkpoint_folder=tmp_path, resume=True)
    at_once = train("memory_fraction=0.3", workers=1)
    assert [epoch.loss for epoch in gone_on.history] == [epoch.loss for epoch in at_once.history]
    assert gone_on.rank_reports[0]["limits"]["threads"] == 1
    # in this process tensors lie at other addresses modulo 64, which decides how sums of products are rounded
    free = [epoch.loss for epoch in train(None, workers=1).history]
    assert free == pytest.approx([epoch.loss for epoch in at_once.history], rel=1e-5)


def _joined(ranks: Ranks, limits: str) -> list[dict[str, Any]] | None:
    before = os.sched_getaffinity(0), dict(os.environ)
    torch.manual_seed(0)
    model = nugnn.GNN("sage", NUM_FEATURES, NUM_CLASSES, hidden=8)
    try:
        result = fit_joined(
            model, make_graph(dtype=torch.float32), ranks, epochs=1, check=False, limits=limits, device="cpu"
        )
    finally:
        os.sched_setaffinity(0, before[0])
        os.environ.clear()
        os.environ.update(before[1])
    return None if result is None else result.rank_reports


def test_processes_that_torchrun_started_keep_their_limits_too(ranks: Any) -> None:
    reports, _ = ranks.run(2, _joined, "threads=1;none")
    assert reports[0]["limits"]["threads"] == 1 and reports[1]["limits"]["asked"] == "none"
    cores = list(own_cores())
    assert reports[0]["limits"].get("cores") == (cores[:1] if len(cores) > 1 else None)


def _tied(ranks: Ranks, cores: list[str], kind: str, is_limited: bool) -> list[int]:
    before = os.sched_getaffinity(0), dict(os.environ)
    os.environ["NUGNN_CORES"] = cores[ranks.rank]
    try:
        _stay_apart(ranks, [0, 1], torch.device(kind), is_limited=is_limited)
        assert ("NUGNN_CORES" in os.environ) == (os.sched_getaffinity(0) == {int(cores[ranks.rank])})
        return sorted(os.sched_getaffinity(0))
    finally:
        os.sched_setaffinity(0, before[0])
        os.environ.clear()
        os.environ.update(before[1])


@pytest.mark.skipif(len(own_cores()) < 2, reason="two processes on a core of their own each")
def test_processes_that_torchrun_started_share_no_core_or_choose_freely(ranks: Any) -> None:
    first, second, *_ = cores = own_cores()
    own = [str(first), str(second)]
    assert ranks.run(2, _tied, own, "cpu", False) == [[first], [second]]
    assert ranks.run(2, _tied, own, "cuda", False) == [list(cores)] * 2
    assert ranks.run(2, _tied, own, "cuda", True) == [[first], [second]]
    assert ranks.run(2, _tied, [str(first)] * 2, "cpu", False) == [list(cores)] * 2  # of two torchruns


def _threads_left(ranks: Ranks, cores: list[str], asked: str) -> tuple[int, str]:
    """Of a process that was given 4 threads and those cores before it knew of the others."""
    before = torch.get_num_threads(), dict(os.environ)
    os.environ |= {"NUGNN_CORES": cores[ranks.rank], "NUGNN_ASKED_THREADS": asked, "OMP_NUM_THREADS": "4"}
    torch.set_num_threads(4)
    try:
        _stay_apart(ranks, [0, 1], torch.device("cpu"), is_limited=False)
        return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]
    finally:
        torch.set_num_threads(before[0])
        os.environ.clear()
        os.environ.update(before[1])


@pytest.mark.skipif(not 2 <= len(own_cores()) < 8, reason="four threads each are to be more than the host has")
def test_processes_of_two_torchruns_have_no_more_threads_than_cores(ranks: Any) -> None:
    same, count = [str(own_cores()[0])] * 2, len(own_cores())
    fair = [((count + 1) // 2,) * 2, (count // 2,) * 2]
    assert ranks.run(2, _threads_left, same, "") == [(threads, str(threads)) for threads, _ in fair]
    assert ranks.run(2, _threads_left, same, "4") == [(4, "4")] * 2  # as their user said


def test_it_is_said_what_holds_in_another_way() -> None:
    limits = (DeviceLimits(sms=20), DeviceLimits(sms=16))
    reports = [{"limits": {"multiprocessors": 24}}, {"limits": {"multiprocessors": 16}}]
    assert said_of(limits, reports) == [
        "worker 0 has 24 multiprocessors where 20 were asked for: the GPU sets them apart in groups"
    ]
    crowded = (DeviceLimits(threads=len(own_cores())), DeviceLimits(threads=1))
    reports = [{"limits": {"threads": each.threads}} for each in crowded]
    assert said_of(crowded, reports) == said_of_cores(crowded)
    assert said_of(crowded, reports)[0].startswith("workers share cores")
    assert said_of(None, [{}, {}]) == []


def test_who_is_tied_to_a_core_counts_not_its_cores_for_the_others() -> None:
    # rank 0 of torchrun's, on one of its host's cores by now, reads what the workers of other hosts have
    far = DeviceLimits(threads=len(own_cores()) + 1)
    reports = [{"limits": {"threads": 1, "cores": [0]}}, {"limits": {"threads": far.threads, "cores": [0, 1]}}]
    assert said_of((DeviceLimits(threads=1), far), reports) == []


# -- profiles ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("forked_workers")
def test_a_limited_cpu_is_measured_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    host = host_memory()
    assert host is not None
    fraction = (1 << 30) / host.limit_bytes
    limits = f"threads=1,memory_fraction={fraction!r}"
    measured = profile_machine("cpu", seconds=0.5, on_stage=lambda _: None, limits=limits).machine.devices
    assert [(device.multiprocessors, device.memory_bytes) for device in measured] == [
        (1, int(fraction * host.limit_bytes))
    ]


def test_gpus_of_a_profile_share_one_limit_or_have_one_each() -> None:
    sms = DeviceLimits(sms=32)
    assert limits_of_devices("sms=32", "cuda", 2) == (sms, sms)
    assert limits_of_devices("none;sms=32", "cuda", 2) == (DeviceLimits(), sms)
    with pytest.raises(ValueError, match="3 for 2 devices"):
        limits_of_devices("none;none;sms=32", "cuda", 2)
    with pytest.raises(ValueError, match="threads has no effect"):
        limits_of_devices("threads=1", "cuda", 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--limits", "threads=1"], "add --device cpu or --device cuda"),
        (["--limits", "threads=0", "--device", "cpu"], "threads is 0"),
        (["--limits", "sms=8", "--device", "cpu"], "no multiprocessors"),
        (["--limits", "threads=1;none", "--device", "cpu"], "2 for 1 device"),
    ],
)
def test_a_profile_refuses_limits_without_effect(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["profile", *arguments])
    assert exit_.value.code == 2 and said in capsys.readouterr().err
