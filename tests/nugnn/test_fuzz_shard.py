"""Random calls on a shard graph end as in plain DGL or with an exception: no crash, no hang, no silent difference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_SUPPORT = Path(__file__).resolve().parent.parent / "support"


def fuzz(num_parts: int, seed: int, num_examples: int, folder: Path, timeout: float) -> dict[str, Any]:
    """Run `fuzz_shard.main` in a process of its own."""
    notes = folder / "call-in-progress"
    script = (
        f"import nugnn; from pathlib import Path; from fuzz_shard import main; "
        f"main({num_parts}, {seed}, {num_examples}, Path({str(notes)!r}))"
    )
    environment = {**os.environ, "PYTHONPATH": str(_SUPPORT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        pytest.fail(f"still running after {timeout} s, in {notes.read_text()}")
    assert done.returncode == 0, (
        f"the interpreter ended with {done.returncode} in {notes.read_text()}\n{done.stderr[-3000:]}"
    )
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert report["differences"] == []
    return report["counts"]  # type: ignore[no-any-return]


def _check(num_parts: int, seed: int, num_examples: int, folder: Path, timeout: float) -> None:
    counts = fuzz(num_parts, seed, num_examples, folder, timeout)
    calls = counts["answer"] + counts["error"]
    assert calls >= 12 * num_examples
    # calls that are answered are the ones that can differ: the generator must not degenerate into nonsense
    assert counts["answer"] >= calls / (4 if num_parts == 1 else 6), counts


def test_one_rank_beside_plain_dgl(tmp_path: Path) -> None:
    _check(1, 0, 100, tmp_path, 150)


def test_three_parts(tmp_path: Path) -> None:
    _check(3, 0, 25, tmp_path, 150)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(1, 9))
def test_one_rank_beside_plain_dgl_for_long(tmp_path: Path, seed: int) -> None:
    _check(1, seed, 700, tmp_path, 1000)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(1, 9))
def test_three_parts_for_long(tmp_path: Path, seed: int) -> None:
    _check(3, seed, 150, tmp_path, 1000)
