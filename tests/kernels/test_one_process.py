"""What several processes need one of them makes: nobody gets in beside it, and nobody waits for ever."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from nugnn.kernels._one_process import OneProcess


def test_one_after_the_other(tmp_path: Path) -> None:
    inside, most = [], []

    def work() -> None:
        lock = OneProcess(tmp_path / "lock", 60)
        for _ in range(20):
            assert lock.take()
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.001)
            inside.pop()
            lock.give_back()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 80


def test_a_process_that_ends_gives_it_back(tmp_path: Path) -> None:
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writes, b"1" if OneProcess(tmp_path / "lock", 0).take() else b"0")
        os._exit(0)
    assert os.read(reads, 1) == b"1"
    os.waitpid(child, 0)
    assert OneProcess(tmp_path / "lock", 60).take()


def test_whoever_waits_too_long_goes_on_without(tmp_path: Path) -> None:
    held, other = OneProcess(tmp_path / "lock", 0), OneProcess(tmp_path / "lock", 0.05)
    assert held.take() and not held.take()
    begin = time.monotonic()
    assert not other.take()
    assert time.monotonic() - begin >= 0.05
    other.give_back()  # of what it does not have
    assert not other.take()
    held.give_back()
    assert other.take()


@pytest.mark.parametrize("path", ["no folder/lock", "."])
def test_where_no_file_can_be_made_there_is_no_lock(tmp_path: Path, path: str) -> None:
    assert not OneProcess(tmp_path / path, 60).take()


def test_a_forked_child_does_not_keep_what_its_parent_gives_back(tmp_path: Path) -> None:
    held, other = OneProcess(tmp_path / "lock", 0), OneProcess(tmp_path / "lock", 0)
    assert held.take()
    (ends, says_end), (reads, writes) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writes, b"1" if other.take() else b"0")  # it does not hold it either
        os.read(ends, 1)
        os._exit(0)
    assert os.read(reads, 1) == b"0"
    held.give_back()
    assert other.take()  # while the child lives
    os.write(says_end, b"1")
    os.waitpid(child, 0)


def test_a_child_that_was_forked_while_a_thread_waited_keeps_nothing(tmp_path: Path) -> None:
    held, waits, other = (OneProcess(tmp_path / "lock", seconds) for seconds in (0, 60, 0))
    assert held.take()
    begin, before = threading.Event(), len(os.listdir("/proc/self/fd"))
    thread = threading.Thread(target=lambda: (begin.set(), waits.take()))
    thread.start()
    assert begin.wait(60)
    while len(os.listdir("/proc/self/fd")) == before:  # until it has the file open
        time.sleep(0.001)
    ends, says_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(says_end)
        os.read(ends, 1)  # it ends with its parent at the latest
        os._exit(0)
    held.give_back()
    thread.join()
    assert not other.take()
    waits.give_back()
    assert other.take()  # while the child lives, with its copy of the file
    os.write(says_end, b"1")
    os.waitpid(child, 0)
