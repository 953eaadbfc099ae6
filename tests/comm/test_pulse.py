"""The stamp of a worker, written by one and read by another."""

from __future__ import annotations

from pathlib import Path

import pytest

from nugnn.comm.pulse import SIZE, Pulse, Stamp, create, read


def test_what_is_stamped_is_read(tmp_path: Path) -> None:
    seen = create(tmp_path / "pulse-0")
    assert (tmp_path / "pulse-0").stat().st_size == SIZE and read(seen) == Stamp(0, False, None)
    pulse = Pulse.open(tmp_path / "pulse-0")
    pulse.beat()
    assert read(seen) == Stamp(1, False, None)
    pulse.begin_step()
    assert read(seen) == Stamp(2, True, None)
    with pulse.waiting("halo exchange 3 (layers.0/spmm)"):
        assert read(seen) == Stamp(2, True, "halo exchange 3 (layers.0/spmm)")
    assert read(seen) == Stamp(3, True, None)


def test_a_wait_goes_on_when_one_inside_it_is_over() -> None:
    """Otherwise who waits there counts as who hangs."""
    memory = bytearray(SIZE)
    pulse = Pulse(memory)
    with pulse.waiting("measuring what rows that travel take"):
        with pulse.waiting("a sum"):
            assert read(memory).waits_in == "a sum"
        assert read(memory).waits_in == "measuring what rows that travel take"
    assert read(memory).waits_in is None


def test_waits_of_two_threads_end_in_any_order() -> None:
    """As of the thread that sums gradients, and of the one that waits for it."""
    memory = bytearray(SIZE)
    pulse = Pulse(memory)
    aside, here = pulse.waiting("a sum of codes"), pulse.waiting("gradients of all workers")
    aside.__enter__()
    here.__enter__()
    aside.__exit__(None, None, None)
    assert read(memory).waits_in == "gradients of all workers"
    here.__exit__(None, None, None)
    assert read(memory).waits_in is None


def test_a_wait_that_fails_is_over_too() -> None:
    memory = bytearray(SIZE)
    pulse = Pulse(memory)
    with pytest.raises(RuntimeError), pulse.waiting("x"):
        raise RuntimeError
    assert read(memory).waits_in is None


def test_names_of_any_length_fit() -> None:
    memory = bytearray(SIZE)
    with Pulse(memory).waiting("é" * 1000):
        text = read(memory).waits_in
    assert text is not None and text.startswith("é" * 100) and len(memory) == SIZE
