"""Work beside the thread that hands it over: in order, errors where they are waited for."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from nugnn.comm.compression.lane import Lane


def test_work_is_done_in_order_beside_the_thread_and_errors_are_raised_at_the_wait() -> None:
    lane, done, told = Lane(torch.device("cpu")), [], []
    gate = threading.Event()

    def fail() -> None:
        raise ArithmeticError("of the second")

    waits = [
        lane.submit(lambda: (gate.wait(30), done.append(threading.current_thread().name))[1]),
        lane.submit(fail, told.append),
        lane.submit(lambda: done.append("third"), told.append),
    ]
    assert done == []
    gate.set()
    waits[0]()
    with pytest.raises(ArithmeticError, match="second"):
        waits[1]()
    waits[2]()
    assert done == ["nugnn-gradients", "third"] and [type(error) for error in told] == [ArithmeticError, type(None)]
    lane.close()
    deadline = time.monotonic() + 120
    while any(thread.name == "nugnn-gradients" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
