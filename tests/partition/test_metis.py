"""The METIS path: what it is given, and what is done about a bad answer."""

from __future__ import annotations

import ctypes
import os
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nugnn.partition import metis
from nugnn.partition.assign import partition_nodes


def grid(side: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.arange(side * side).reshape(side, side)
    here = np.concatenate([ids[:, :-1].ravel(), ids[:-1].ravel()])
    there = np.concatenate([ids[:, 1:].ravel(), ids[1:].ravel()])
    return np.concatenate([here, there]), np.concatenate([there, here])


def test_partition_08_index_width_follows_the_edges_too():
    assert metis.index_dtype(90_000_000, 2_200_000_000) == torch.int64
    assert metis.index_dtype(10, 2**30) == torch.int64
    assert metis.index_dtype(10, 2**30 - 1) == torch.int32
    assert metis.index_dtype(2**31, 0) == torch.int64


def test_partition_08_a_32_bit_build_is_refused_before_arrays_are_touched(monkeypatch):
    monkeypatch.setattr(metis, "_metis_index_bytes", lambda: 4)

    class Huge:
        """Stands for 2**30 ids; reading any of them fails the test."""

        def __len__(self) -> int:
            return 2**30

        def __array__(self, *args, **options):
            pytest.fail("the ids were read")

    with pytest.raises(ValueError, match="need 64-bit indices, but the installed METIS has 32-bit ones"):
        partition_nodes(1000, Huge(), Huge(), [1, 1])
    assert partition_nodes(36, *grid(6), [1, 1]).node_counts == (18, 18)  # a small graph still goes through


@pytest.mark.parametrize(("last", "problem"), [(-1, "part -1 for node 890"), (3, "part 3 for node 890")])
def test_partition_09_a_partial_or_out_of_range_answer_is_detected(monkeypatch, last, problem):
    def stub(adjacency, *args, **options):
        parts = np.arange(adjacency.shape[0]) % 3
        parts[-10:] = last
        return parts

    monkeypatch.setattr(metis, "call_metis", stub)
    result = partition_nodes(900, *grid(30), [3, 2, 1])
    assert result.node_counts == (450, 300, 150)
    discarded = [note for note in result.notes if problem in note and "(10 entries outside 0..2)" in note]
    assert len(discarded) == 3
    assert "fell back to cutting a breadth-first order" in result.notes[-1]
    assert result.edge_cut < 2 * 30 * 2 * 2  # 2 cuts of about one row or column of 30 nodes; twice that, both ways


@pytest.mark.parametrize("answer", [np.zeros(899, np.int64), np.zeros(900), np.zeros((900, 1), np.int64)])
def test_answers_of_the_wrong_shape_or_type_are_discarded(monkeypatch, answer):
    monkeypatch.setattr(metis, "call_metis", lambda *args, **options: answer)
    result = partition_nodes(900, *grid(30), [1, 1])
    assert result.node_counts == (450, 450)
    assert len([note for note in result.notes if "discarded and retried" in note]) == 3


def test_a_native_error_leads_to_the_other_method(monkeypatch):
    native, calls = metis.call_metis, []

    def failing_once(*args, **options):
        calls.append(options["recursive"])
        if len(calls) == 1:
            raise RuntimeError("METIS_ERROR_MEMORY")
        return native(*args, **options)

    monkeypatch.setattr(metis, "call_metis", failing_once)
    result = partition_nodes(900, *grid(30), [1, 2])
    assert calls == [True, False]
    assert result.node_counts[0] == pytest.approx(300, abs=6)
    assert "METIS recursive bisection with seed 0 failed (METIS_ERROR_MEMORY)" in result.notes[0]


def test_many_parts_start_with_k_way(monkeypatch):
    native, calls = metis.call_metis, []

    def recording(*args, **options):
        calls.append(options["recursive"])
        return native(*args, **options)

    monkeypatch.setattr(metis, "call_metis", recording)
    result = partition_nodes(900, *grid(30), range(1, 13))
    assert calls[0] is False
    for rank, count in enumerate(result.node_counts):
        target = 900 * (rank + 1) / 78
        assert abs(count - target) <= max(0.02 * target, 1)


@pytest.mark.parametrize("shares", [[1e-9, 1], [0.4, 1e-9, 0.6, 1e-9], [1e-9, 1, 1e-9]])
def test_parts_of_a_single_node_are_filled_without_a_complaint(shares, capfd):
    result = partition_nodes(900, *grid(30), shares)
    tiny = [rank for rank, share in enumerate(shares) if share < 1e-6]
    assert [result.node_counts[rank] for rank in tiny] == [1] * len(tiny)
    for count, share in zip(result.node_counts, shares, strict=True):
        assert count == 1 or abs(count - 900 * share / sum(shares)) <= 0.02 * count + len(tiny)
    assert "".join(capfd.readouterr()) == ""


def test_a_part_of_a_single_node_has_few_neighbours():
    """Of nodes that weigh the same, and of which the first one is read by all others."""
    src, dst = grid(30)
    others = np.arange(1, 900)
    src, dst = np.concatenate([src, np.zeros(899, np.int64)]), np.concatenate([dst, others])
    result = partition_nodes(900, src, dst, [1e-9, 1])
    (node,) = np.flatnonzero(result.part.numpy() == 0)
    num_neighbours = np.diff(metis.symmetric_graph(900, src, dst, None).adjacency.indptr)
    assert num_neighbours[node] == num_neighbours.min() < num_neighbours[0]


@pytest.mark.parametrize("stray", [0, 2])
def test_an_answer_off_target_is_repaired_near_its_cut(monkeypatch, stray):
    """Columns 0-17 | 18-29 of a 30 x 30 grid, halves asked: columns 15-17 must move, along the boundary."""

    def stub(adjacency, *args, **options):
        parts = (np.arange(900) % 30 >= 18).astype(np.int64)
        parts[:stray] = 1
        return parts

    monkeypatch.setattr(metis, "call_metis", stub)
    result = partition_nodes(900, *grid(30), [1, 1])
    assert abs(result.node_counts[0] - 450) <= 9
    assert "repaired by moving" in result.notes[0]
    # A straight cut is 60 arcs, both ways. Moved layer by layer it stays below twice that; 81 nodes moved from
    # anywhere would add about 81 * 8.
    assert result.edge_cut <= 120


def test_native_complaints_stay_out_of_standard_output(capfd):
    libc = ctypes.CDLL(None)
    with metis._native_stdout_to_stderr():
        libc.puts(b"***Cannot bisect a graph with 0 vertices!")  # which empty parts say, too
        libc.puts(b"Memory allocation failed for something")
    libc.puts(b"result")
    libc.fflush(None)
    output = capfd.readouterr()
    assert output.out == "result\n"
    assert output.err == "Memory allocation failed for something\n"


class _Noting:
    """A lock that says when somebody waits for it."""

    def __init__(self, somebody_waits):
        self._lock, self._somebody_waits = threading.Lock(), somebody_waits

    def __enter__(self):
        if not self._lock.acquire(blocking=False):
            self._somebody_waits.set()
            self._lock.acquire()

    def __exit__(self, *_):
        self._lock.release()


def test_two_cuts_at_once_give_standard_output_back(capfd, monkeypatch):
    """A cut for a run that has ended may go on while the next one cuts: the second to come waits for the first."""
    inside, come, left = threading.Event(), threading.Event(), threading.Event()
    monkeypatch.setattr(metis, "_redirecting", _Noting(come))
    before = os.readlink("/proc/self/fd/1") if os.path.exists("/proc/self/fd/1") else ""

    def first():
        with metis._native_stdout_to_stderr():
            inside.set()
            come.wait(60)  # to the door; were it to come in between, this one would leave before it
        left.set()

    def second():
        inside.wait(60)
        with metis._native_stdout_to_stderr():
            come.set()
            left.wait(60)

    threads = [threading.Thread(target=each) for each in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.write(1, b"a result\n")
    assert capfd.readouterr().out == "a result\n"
    assert not before or os.readlink("/proc/self/fd/1") == before


def test_without_a_folder_for_files_a_graph_is_cut_all_the_same(monkeypatch):
    def nowhere():
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(metis.tempfile, "TemporaryFile", nowhere)
    ends = torch.arange(199)
    assert min(partition_nodes(200, ends, ends + 1, [0.5, 0.5], method="metis").node_counts) > 0


@pytest.mark.parametrize("seed", range(4))
def test_small_parts_beside_each_other_are_filled_without_a_complaint(monkeypatch, seed, capfd):
    """k-way leaves both empty, and says so."""
    native, calls = metis.call_metis, []

    def recording(*args, **options):
        calls.append(options["recursive"])
        return native(*args, **options)

    monkeypatch.setattr(metis, "call_metis", recording)
    shares = [4, 4, *[145] * 7]
    result = partition_nodes(1024, *grid(32), shares, seed=seed)
    assert set(calls) == {True} and "".join(capfd.readouterr()) == ""
    for count, target in zip(result.node_counts, shares, strict=True):
        assert abs(count - target) <= max(0.02 * target, 1)
    assert result.notes == () or "repaired" in result.notes[0]


def test_a_node_that_outweighs_two_parts_makes_no_complaint(capfd):
    weights = np.ones(900)
    weights[465] = 3000.0  # two of twelve parts would be 650
    result = partition_nodes(900, *grid(30), [1] * 12, node_weights=weights)
    assert "".join(capfd.readouterr()) == "" and min(result.node_counts) > 0


@given(num_nodes=st.integers(4, 10**9), num_parts=st.integers(2, 64), ratio=st.floats(1, 6))
def test_parts_of_about_equal_shares_are_cut_as_they_were(num_nodes, num_parts, ratio):
    if num_nodes >= 4 * num_parts:
        assert not metis.starves_in_k_way(num_nodes, metis.normalise_shares([1, *[ratio] * (num_parts - 1)]))


def test_tiny_graphs_do_without_metis(monkeypatch):
    monkeypatch.setattr(metis, "call_metis", lambda *args, **options: pytest.fail("METIS was called"))
    result = partition_nodes(9, *grid(3), [1, 1, 1])
    assert result.node_counts == (3, 3, 3)
    assert "9 nodes are too few for METIS" in result.notes[0]


def test_everything_in_one_part_is_repaired(monkeypatch):
    monkeypatch.setattr(metis, "call_metis", lambda adjacency, *args, **options: np.ones(adjacency.shape[0], np.int64))
    result = partition_nodes(900, *grid(30), [5, 3, 1])
    for count, target in zip(result.node_counts, (500, 300, 100), strict=True):
        assert abs(count - target) <= max(0.02 * target, 1)
    assert "part 0 is empty" in result.notes[0]


@settings(deadline=None, max_examples=200)
@given(
    weights=st.one_of(
        st.lists(st.floats(1e-300, 1e300), min_size=1, max_size=40),
        st.lists(st.integers(1, 2**52), min_size=1, max_size=40),
    ),
    limit=st.integers(100, 2**40),
)
def test_integer_weights_never_vanish_never_overflow_and_keep_order(weights, limit):
    weights = np.array(weights)
    scaled = metis.integer_weights(weights, limit)
    assert scaled.dtype == np.int64
    assert (scaled >= 1).all()
    assert sum(scaled.tolist()) <= limit
    order = np.argsort(weights, kind="stable")
    assert (np.diff(scaled[order]) >= 0).all()


def test_integer_weights_keep_small_integers_and_zeros():
    assert metis.integer_weights(np.array([3, 1, 2]), 10).tolist() == [3, 1, 2]
    scaled = metis.integer_weights(np.array([0.0, 1e-6, 2e-6]), 3_003)
    assert scaled.tolist() == [0, 1000, 2000]


def test_the_symmetric_graph_counts_what_it_drops():
    src = np.array([0, 0, 1, 2, 2, 3])
    dst = np.array([1, 1, 0, 2, 3, 0])
    graph = metis.symmetric_graph(4, src, dst, np.array([1, 10, 100, 7, 3, 5]))
    assert graph.num_merged == 1
    expected = np.zeros((4, 4), int)
    expected[0, 1] = expected[1, 0] = 111
    expected[2, 3] = expected[3, 2] = 3
    expected[3, 0] = expected[0, 3] = 5
    assert (graph.adjacency.toarray() == expected).all()
