"""A machine is called busy when others compute on its cores or GPUs while nothing of ours does, and not otherwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nugnn.planning.in_use import CoreWait, longest_wait, said_of_use, said_of_waits, used_of_cores, used_of_gpus


def stat(*busy_of_100: int, at: int) -> str:
    """As the system counts, after ``at`` times a hundred ticks; all of the first kind, or of the fourth."""
    cores = [f"cpu{core} {at * busy} 0 0 {at * (100 - busy)} 0 0 0 0 0 0" for core, busy in enumerate(busy_of_100)]
    return "\n".join(["cpu  1 2 3 4 5 6 7 8 9 10", *cores, "intr 5", "ctxt 7"])


def reader(*texts: str) -> Callable[[], str]:
    each = iter(texts)
    return lambda: next(each)


@pytest.mark.parametrize(("cores", "used"), [({0, 1}, 0.5), ({0}, 1.0), ({1}, 0.0), ({1, 2}, 0.1)])
def test_the_load_is_that_of_ones_own_cores_now(cores: set[int], used: float) -> None:
    """Others' cores, and what was before, do not count."""
    load = (100, 0, 20)
    read = reader(stat(*load, at=7), stat(*load, at=8))
    assert used_of_cores(cores, seconds=0.0, read=read) == pytest.approx(used)


def test_waiting_for_disks_is_no_work_and_what_a_host_takes_is() -> None:
    before, after = "cpu0 0 0 0 0 0 0 0 0 0 0", "cpu0 0 0 0 20 60 0 0 20 0 0"
    assert used_of_cores({0}, seconds=0.0, read=reader(before, after)) == pytest.approx(0.2)


@pytest.mark.parametrize("text", ["", "cpu0 0 0 0 0 0 0 0 0 0 0", "cpu0 a b c d"])
def test_a_system_that_says_nothing_is_not_called_busy(text: str) -> None:
    assert used_of_cores({0}, seconds=0.0, read=reader(text, text)) is None
    assert said_of_use(None, {}) is None


def test_gpus_are_known_by_uuid_and_those_that_say_nothing_are_left_out() -> None:
    lines = "GPU-5d3a, 37\nGPU-5d3b, 0\nGPU-5d3c, [N/A]\n"
    assert used_of_gpus(lambda: lines) == {"GPU-5d3a": 0.37, "GPU-5d3b": 0.0}
    assert used_of_gpus(lambda: "") == {}


def test_a_thread_waits_for_a_core_for_as_long_as_the_system_says_since_it_was_asked() -> None:
    read, now = (
        reader("5 1000000000 1", "6 3000000000 2", "6 3000000000 2", "9 3500000000 3"),
        iter([10.0, 14.0, 14.0, 24.0]),
    )
    wait = CoreWait(read, lambda: next(now))
    assert wait.share == 0.5
    wait.restart()
    assert wait.share == 0.05


@pytest.mark.parametrize("text", ["", "5", "a b c"])
def test_a_system_that_counts_no_waits_says_nothing(text: str) -> None:
    assert CoreWait(lambda: text).share is None


def test_workers_that_wait_for_each_other_are_not_judged() -> None:
    assert longest_wait([0.05, None, 0.234, 0.2], threads=4, cores=4) == (2, "23 %")
    assert longest_wait([0.05, None, 0.234, 0.2], threads=5, cores=4) is None
    assert longest_wait([0.05, None, 0.1], threads=3, cores=4) is None
    assert longest_wait([None], threads=1, cores=4) is longest_wait([], threads=0, cores=4) is None


def test_a_rate_that_was_measured_beside_others_is_named() -> None:
    waited = {"gemm_flops.fp32": 0.05, "gemm_flops.bf16": 0.31, "stream_bytes": 0.12}
    beside = said_of_waits(waited)
    assert beside == "others had its cores for up to 31 % of the time while gemm_flops.bf16, stream_bytes were measured"
    assert said_of_use(0.02, {"gemm_flops.bf16": 0.03}, beside) == (
        f"{beside}; its rates may be too low, measure again when it is idle"
    )
    assert said_of_waits({"gemm_flops.fp32": 0.1}) is None
