"""The compilation wrapper: disk cache keyed by all sources, no crash without one, threads of torch, balanced tasks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from fork_server import ForkServer
from nugnn.kernels._jit import row_tasks

RUN = "import sys; sys.path.insert(0, {!r}); import case_package.a as a; print(a.kernel(2.0), a.hits())"

TOGETHER = """
import os, sys
import numba, nugnn.kernels._jit
sys.path.insert(0, {!r})
waits, goes = os.pipe()
for _ in range(3):
    if os.fork() == 0:
        os.close(goes)
        os.read(waits, 1)  # until all are there
        import case_package.a as a
        print(a.kernel(2.0), a.hits(), flush=True)
        os._exit(0)
os.close(goes)
for _ in range(3):
    os.wait()
"""


def write_package(root: Path, helper_factor: int, constant: int) -> None:
    package = root / "case_package"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text("")
    (package / "b.py").write_text(
        "from nugnn.kernels._jit import jit\n"
        f"CONSTANT = {constant}\n"
        "@jit()\n"
        f"def helper(x):\n    return {helper_factor} * x\n"
    )
    (package / "a.py").write_text(
        "from nugnn.kernels._jit import jit\n"
        "from case_package.b import CONSTANT, helper\n"
        "@jit()\n"
        "def kernel(x):\n    return helper(x) + CONSTANT\n"
        "def hits():\n    return sum(kernel.stats.cache_hits.values())\n"
    )


Run = Callable[..., list[str]]


@pytest.fixture
def run(fork_server: ForkServer) -> Run:
    """What a process prints that has numba, and has seen neither the package nor a cache."""

    def run(root: Path, cache: Path, program: str = RUN) -> list[str]:
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONDONTWRITEBYTECODE": "1"}
        (root / "program.py").write_text(program.format(str(root)))
        result = fork_server.script(str(root / "program.py"), [], environment)
        assert result.returncode == 0, result.stderr
        return result.stdout.split()

    return run


def test_kernels_05_a_changed_helper_or_constant_is_noticed(run: Run, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    write_package(tmp_path, 3, 10)
    assert run(tmp_path, cache) == ["16.0", "0"]
    assert run(tmp_path, cache) == ["16.0", "1"]  # unchanged: from disk
    write_package(tmp_path, 5, 10)
    assert run(tmp_path, cache) == ["20.0", "0"]
    write_package(tmp_path, 5, 20)
    assert run(tmp_path, cache) == ["30.0", "0"]
    write_package(tmp_path, 3, 10)
    assert run(tmp_path, cache) == ["16.0", "1"]


def test_kernels_05_an_unwritable_cache_folder_does_not_crash(run: Run, tmp_path: Path) -> None:
    write_package(tmp_path, 3, 10)
    blocked = tmp_path / "a file, so that no folder can be made below it"
    blocked.write_text("")
    assert run(tmp_path, blocked) == ["16.0", "0"]
    assert not list((tmp_path / "case_package").glob("**/*.nbi")), "nothing is written beside the sources"


def test_kernels_05_damaged_cache_files_cost_a_compilation_only(run: Run, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    write_package(tmp_path, 3, 10)
    run(tmp_path, cache)
    files = list(cache.glob("**/*.nb?"))
    assert files
    for file in files:
        file.write_bytes(b"not what it was")
    assert run(tmp_path, cache) == ["16.0", "0"]


def test_of_several_processes_one_compiles(run: Run, tmp_path: Path) -> None:
    write_package(tmp_path, 3, 10)
    said = run(tmp_path, tmp_path / "cache", TOGETHER)
    assert said[::2] == ["16.0"] * 3 and sorted(said[1::2]) == ["0", "1", "1"]


def test_numba_is_not_imported_before_a_kernel_is_needed() -> None:
    code = (
        "import sys, nugnn, nugnn.kernels._jit\n"
        "import nugnn.kernels.philox, nugnn.kernels.dropout, nugnn.kernels.sparse_rows\n"
        "import nugnn.kernels.edge_softmax, nugnn.kernels.spmm, nugnn.kernels.sddmm\n"
        "print('numba' in sys.modules, 'dgl' in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]


def test_global_state_of_numba_is_left_alone() -> None:
    import numba

    from nugnn.kernels.philox import cpu

    before, threads = numba.config.CACHE_DIR, numba.get_num_threads()
    torch_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        out = np.empty((1, 1), np.int64)
        cpu.random_words(np.zeros(1, np.int64), 1, np.uint64(0), np.uint64(0), out)
    finally:
        torch.set_num_threads(torch_threads)
    assert out[0, 0] == 0x6627E8D5
    assert numba.config.CACHE_DIR == before
    assert numba.get_num_threads() == threads


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_row_tasks_cover_every_row_once_and_split_the_work(num_threads: int) -> None:
    degrees = np.array([0, 100, 0, 0, 1, 2, 50, 0])
    indptr = np.concatenate([[0], degrees.cumsum()])
    bounds = row_tasks(indptr, num_threads)
    assert bounds[0] == 0 and bounds[-1] == len(degrees) and (np.diff(bounds) >= 0).all()
    work = [int((degrees[a:b] + 1).sum()) for a, b in pairwise(bounds)]
    # A task can exceed its share by less than the row at its end: rows are not split.
    assert max(work) <= (degrees + 1).sum() / len(work) + degrees.max() + 1


def test_kernels_01_counts_and_offsets_past_31_bits() -> None:
    """Row pointers past 2**31 reach every loop; operands of stride 0 stand for arrays nobody could hold here."""
    from nugnn.kernels.sparse_rows.cpu import weighted_row_sums
    from nugnn.kernels.spmm import cpu
    from nugnn.kernels.spmm.dgl_index import index_dtype
    from nugnn.kernels.structure import Structure

    last = 2**31 + 5
    indptr = np.array([0, 0, 2**31, last], dtype=np.int64)
    bounds = row_tasks(indptr, 2)
    assert bounds[-1] == 3 and (np.diff(bounds) >= 0).all()

    tail = np.array([2**31, last], dtype=np.int64)  # one row: edges 2**31 .. 2**31 + 4
    zeros = np.broadcast_to(np.zeros((), np.int32), (last,))
    ones = np.broadcast_to(np.float32(1.5), (last, 1))
    out, winners = np.full((1, 1), np.nan, np.float32), np.full((1, 1), -7, np.int64)
    column = np.zeros(1, np.int64)
    task = np.array([0, 1])
    dense = np.ones((1, 1), np.float32)
    cpu.extreme(task, tail, zeros, dense, ones, column, column, cpu.COPY_RHS, np.float32(1), out, winners)
    assert out[0, 0] == 1.5 and winners[0, 0] == 2**31
    out[:] = np.nan
    weighted_row_sums(task, tail, zeros, np.empty(0, np.int32), ones[:, 0], dense, out)
    assert out[0, 0] == 5 * 1.5

    few = torch.zeros(2, dtype=torch.int64)
    many_edges = Structure(1, few, torch.empty(1).expand(2**31))
    assert index_dtype(many_edges) == torch.int64
    assert index_dtype(Structure(2**31, few, torch.empty(0))) == torch.int64
    assert index_dtype(Structure(2**31 - 1, few, torch.empty(0))) == torch.int32
