"""Whatever the bytes, a reader gives a graph or a ValueError that names the file; the long run is a benchmark."""

import importlib.util
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nugnn.datasets import FORMATS, read_path

REPOSITORY = Path(__file__).parents[2]


def _benchmark():
    """``benchmarks/fuzz_readers.py``, which is no package."""
    spec = importlib.util.spec_from_file_location("fuzz_readers", REPOSITORY / "benchmarks" / "fuzz_readers.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz_readers"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


fuzz_readers = _benchmark()
TARGETS = fuzz_readers.targets()


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_damaged_files_give_a_graph_or_a_clean_error(tmp_path, target):
    outcome = fuzz_readers.fuzz(target, 200, random.Random(7), tmp_path)
    assert outcome.other == 0, outcome.kinds
    assert outcome.fine > 0, "some damage is harmless: otherwise the seed itself is refused"
    assert outcome.refused > 0


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_seeds_are_read(tmp_path, target):
    for number, seed in enumerate(target.seeds):
        for name, content in seed.items():
            path = tmp_path / str(number) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        assert target.read(tmp_path / str(number) / target.opened).num_nodes > 0


lines = st.lists(
    st.lists(st.one_of(st.integers(-2, 12).map(str), st.sampled_from(["", "src", "dst", "id", "nan", "x", "%", "#"]))),
    max_size=8,
)


@settings(max_examples=60)
@given(
    suffix=st.sampled_from([suffix for known in FORMATS for suffix in known.suffixes if not suffix.endswith(".gz")]),
    content=st.one_of(
        st.binary(max_size=200),
        st.tuples(lines, st.sampled_from([" ", ",", "\t"])).map(
            lambda drawn: "\n".join(drawn[1].join(words) for words in drawn[0]).encode()
        ),
    ),
)
def test_any_bytes_under_any_suffix(tmp_path_factory, suffix, content):
    path = tmp_path_factory.mktemp("any") / f"g{suffix}"
    path.write_bytes(content)
    try:
        data = read_path(path)
    except ValueError as error:
        assert str(path) in str(error)
    else:
        assert data.num_nodes > 0
