"""Two families, one trainer: without the adapter of one, the other's tests are as green as before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_TESTS = Path(__file__).parent
# what only one family uses; `dgl` and what wraps it go with graphs
_OF_GRAPHS = "dgl nugnn.graph_family nugnn.model_on_shard nugnn.shard_graph nugnn.session nugnn.seam nugnn.graph_index"
_OF_SAMPLES = "nugnn.sample_family nugnn.samples nugnn.batches nugnn.networks"


def _passed(without: str, *arguments: str) -> int:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        env={**os.environ, "NUGNN_WITHOUT": ",".join(without.split())},
        cwd=_TESTS.parents[1],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    return sum(line.count(".") for line in done.stdout.splitlines() if line.endswith("%]"))


def test_all_tests_of_samples_pass_without_graphs() -> None:
    assert _passed(_OF_GRAPHS, str(_TESTS / "test_sample_family.py"), str(_TESTS / "test_samples.py")) > 80


def test_graphs_train_without_samples() -> None:
    chosen = "3-metis-unequal or plain_dgl"
    assert _passed(_OF_SAMPLES, str(_TESTS / "test_exactness.py"), "-k", chosen) > 20


@pytest.mark.parametrize("names", [_OF_GRAPHS, _OF_SAMPLES])
def test_what_is_deleted_cannot_be_imported(names: str) -> None:
    for name in names.split():
        if name == "dgl":
            continue
        done = subprocess.run(
            [sys.executable, "-c", f"import without, {name}"],
            env={**os.environ, "NUGNN_WITHOUT": name, "PYTHONPATH": str(_TESTS.parent / "support")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert f"{name} was deleted" in done.stderr
