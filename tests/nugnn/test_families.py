"""Two families, one trainer: without the adapter of one, the other's tests are as green as before."""

from __future__ import annotations

import os
import re
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
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    return sum(line.count(".") for line in done.stdout.splitlines() if line.endswith("%]"))


_SAMPLE_TESTS = [str(_TESTS / name) for name in ("test_sample_family.py", "test_samples.py")]
_GRAPH_TESTS = [str(_TESTS / "test_exactness.py")]


def test_samples_train_without_graphs() -> None:
    assert _passed(_OF_GRAPHS, *_SAMPLE_TESTS, "-k", "mlp or split or sampler") > 10


def test_graphs_train_without_samples() -> None:
    assert _passed(_OF_SAMPLES, *_GRAPH_TESTS, "-k", "3-metis-unequal and (gcn or gat)") > 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("without", "tests"), [(_OF_GRAPHS, _SAMPLE_TESTS), (_OF_SAMPLES, _GRAPH_TESTS)])
def test_all_tests_of_one_family_pass_without_the_other(without: str, tests: list[str]) -> None:
    assert _passed(without, *tests) > 50


def test_what_both_begin_with_loads_neither_partitions_nor_networks() -> None:
    program = "import sys, nugnn.fit; print(*(name for name in sys.modules if name.startswith('nugnn.')))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    own = ("nugnn.partition", "nugnn.shares", *_OF_GRAPHS.split(), *_OF_SAMPLES.split())
    assert "nugnn.train_rank" in loaded and not [name for name in loaded if name.startswith(own)]


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


@pytest.mark.slow
def test_the_architecture_page_counts_what_families_share() -> None:
    """Within 3 %, for a page is not written at every commit."""
    root = _TESTS.parents[1]
    done = subprocess.run(
        [sys.executable, str(root / "tools" / "families.py")], capture_output=True, text=True, check=True
    )
    page = (root / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for what in ("both", "graphs alone", "samples alone"):
        found = re.search(rf"^{what} +(\d+) modules +([\d,]+) lines", done.stdout, re.MULTILINE)
        told = re.search(rf"^\| {what} \| (\d+) \| ([\d,]+) \|", page, re.MULTILINE)
        assert found is not None and told is not None, what
        for pair in zip(found.groups(), told.groups(), strict=True):
            counted, stated = (int(number.replace(",", "")) for number in pair)
            assert abs(stated - counted) <= 0.03 * counted, f"{what}: the page has {stated}, there are {counted}"
