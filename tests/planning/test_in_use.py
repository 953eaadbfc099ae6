"""A machine is called busy when others compute on its cores or GPUs while nothing of ours does, and not otherwise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict

import pytest

from nugnn.planning.in_use import (
    CoreUse,
    CoreUseWatch,
    CoreWait,
    longest_wait,
    said_of_others,
    said_of_use,
    said_of_waits,
    used_by_others,
    used_of_cores,
    used_of_gpus,
)


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


@pytest.mark.parametrize("text", ["", "cpu0 0 0 0 0 0 0 0 0 0 0", "cpu0 a b c d", "cpu0 5 0 0"])
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


def core_use(*cores: int, busy: float, own: float) -> CoreUse:
    return CoreUse(cores=cores, busy=busy, own=own)


def test_who_computes_on_ones_cores_is_counted_since_it_was_asked() -> None:
    load = (90, 50, 100)
    read = reader(*(stat(*load, at=hundreds) for hundreds in (1, 2, 4, 9)))
    own, now = iter([3.0, 3.6, 3.6, 4.6]), iter([10.0, 11.0, 20.0, 22.5])
    watch = CoreUseWatch({1, 0}, read, lambda: next(own), lambda: next(now))
    assert watch.use == core_use(0, 1, busy=0.7, own=pytest.approx(0.3))
    watch.restart()
    assert watch.use == core_use(0, 1, busy=0.7, own=pytest.approx(0.2))


@pytest.mark.parametrize("text", ["", "cpu0 a b c d", "cpu0 5 0 0", "cpu1 5 0 0 5 0 0 0 0"])
def test_a_system_that_does_not_count_ones_cores_says_nothing_of_them(text: str) -> None:
    now = iter([0.0, 5.0])
    assert CoreUseWatch({0}, lambda: text, lambda: 0.0, lambda: next(now)).use is None


@pytest.mark.parametrize(("before", "after"), [((50,), (90,)), ((50, 50), (90,)), ((50,), (90, 90))])
def test_some_of_ones_cores_say_nothing_of_all(before: tuple[int, ...], after: tuple[int, ...]) -> None:
    """Containers may show other cores, and a core may go or come: its counts since the start are none of this time."""
    texts = [stat(*before, at=1), stat(*after, at=9)]
    now = iter([0.0, 5.0])
    assert CoreUseWatch({0, 1}, reader(*texts), lambda: 0.0, lambda: next(now)).use is None
    assert used_of_cores({0, 1}, seconds=0.0, read=reader(*texts)) is None


def test_a_moment_says_nothing_of_others_in_hundredths_of_a_second() -> None:
    now = iter([0.0, 0.2])
    assert CoreUseWatch({0}, reader(stat(100, at=1), stat(100, at=2)), lambda: 0.0, lambda: next(now)).use is None


def test_this_process_is_not_taken_for_others() -> None:
    """Threads and children that have ended are its own, too; whoever else is on this machine, computes beside it."""
    watch = CoreUseWatch(os.sched_getaffinity(0))
    subprocess.run([sys.executable, "-c", "sum(range(10_000_000))"], check=True)
    thread = threading.Thread(target=lambda: sum(range(10_000_000)))
    begin = time.perf_counter()
    thread.start()
    while time.perf_counter() - begin < 0.5 or thread.is_alive():
        pass
    if (use := watch.use) is not None:  # of a system that counts
        assert use == CoreUse.from_plain(json.loads(json.dumps(asdict(use))))
        # hundredths of a second, on each core twice, of half a second and more
        assert 0.0 < use.own <= use.busy + 0.1


def test_processes_on_the_same_cores_are_no_others_to_each_other() -> None:
    both = [core_use(0, 1, busy=0.74, own=0.4), core_use(0, 1, busy=0.75, own=0.3)]
    assert used_by_others(both, [1, 1]) is None
    beside = core_use(2, busy=0.9, own=0.5)
    assert used_by_others([*both, beside], [1, 1, 1]) == ((2,), "40 %")
    assert used_by_others([beside, *both[:1]], [1, 2]) == ((2,), "40 %")  # of 0 and 1 it is 34 %
    assert used_by_others([*both, beside], [1, 1, 0]) is None  # its work is on a GPU
    assert used_by_others([both[0], core_use(0, 1, busy=0.75, own=0.1)], [2, 0]) == ((0, 1), "25 %")


def test_others_may_have_the_cores_that_are_not_needed() -> None:
    """Two threads on eight cores: 70 % leave 2.4 of them, 77 % leave 1.84, and 75 % just enough."""
    eight = tuple(range(8))

    def others(share: float, threads: int) -> tuple[tuple[int, ...], str] | None:
        return used_by_others([core_use(*eight, busy=0.2 + share, own=0.2)], [threads])

    assert others(0.7, 2) is others(0.77, 2) is None and others(0.78, 2) == (eight, "78 %")
    assert others(0.2, 8) == others(0.2, 11) == (eight, "20 %") and others(0.2, 6) is None
    said = said_of_others([None], [core_use(*eight, busy=0.9, own=0.3)], [8], 8)
    assert said == "others computed on cores 0-7 for 60 % of the time"
    said = said_of_others([None], [core_use(0, 1, busy=0.9, own=0.3)], [3], 8)
    assert said == "others computed on cores 0, 1 for 60 % of the time"


def test_many_cores_are_named_in_few_words() -> None:
    use = core_use(*range(64), 66, 67, busy=0.9, own=0.1)
    said = said_of_others([None], [use], [66], 66)
    assert said == "others computed on cores 0-63, 66, 67 for 80 % of the time"


def test_cores_of_which_not_all_is_known_are_not_judged() -> None:
    busy = core_use(0, busy=0.9, own=0.1)
    assert used_by_others([busy], [1]) == ((0,), "80 %")
    assert used_by_others([busy, None], [1, 1]) is used_by_others([], []) is None
    assert used_by_others([busy, core_use(0, 1, busy=0.9, own=0.1)], [1, 1]) is None
    assert CoreUse.from_plain(None) is None


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
