"""Every public graph method and function is on exactly one list, and does what its list says."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from typing import Any

import dgl
import dgl.nn.functional
import dgl.ops
import dgl.readout
import dgl.transforms
import numpy as np
import pytest
import torch

from exact_cases import FUNCTION_CASES, METHOD_CASES, TRANSFORM_CASES
from local_checks import FUNCTION_CHECKS, METHOD_CHECKS
from nugnn import seam, shard_lists
from nugnn.comm.groups import Ranks
from nugnn.comm.local_ranks import run_local_ranks
from nugnn.shard_fallback import close_remaining_methods
from nugnn.shard_graph import ShardGraph
from refused_calls import FUNCTION_CALLS, METHOD_CALLS, NEEDS_MORE, equal_results
from shard_calls import Case, assert_equal, joined, make_data, on_plain, on_rank, plain_of, shard_of

seam.install()

MODULES = (dgl, dgl.ops, dgl.nn.functional, dgl.readout, dgl.transforms)
METHOD_LISTS = (shard_lists.EXACT_METHODS, shard_lists.LOCAL_METHODS, shard_lists.REFUSED_METHODS)
FUNCTION_LISTS = (
    shard_lists.EXACT_FUNCTIONS,
    shard_lists.LOCAL_FUNCTIONS,
    shard_lists.REFUSED_FUNCTIONS,
    shard_lists.TAKES_NO_GRAPH,
)


def public_functions() -> Iterator[tuple[str, Any]]:
    """Every public function of DGL's modules that users call with a graph."""
    for module in MODULES:
        for name, value in vars(module).items():
            belongs = getattr(value, "__module__", None) or ""
            if not name.startswith("_") and inspect.isroutine(value) and belongs.split(".")[0] == "dgl":
                yield name, value


# -- completeness --------------------------------------------------------------------------------------------------


def test_every_method_is_on_one_list() -> None:
    names = [name for name in dir(dgl.DGLGraph) if not name.startswith("_")]
    counts = Counter(name for names_on_list in METHOD_LISTS for name in names_on_list)
    assert {name: counts[name] for name in names if counts[name] != 1} == {}
    assert set(counts) - set(names) == set(), "these no longer exist in DGL"


def test_every_function_is_on_one_list() -> None:
    names = {name for name, _ in public_functions()}
    counts = Counter(name for names_on_list in FUNCTION_LISTS for name in names_on_list)
    assert {name: counts[name] for name in names if counts[name] != 1} == {}
    assert set(counts) - names == set(), "these no longer exist in DGL"


def test_every_transform_is_on_one_list() -> None:
    names = {name for name, value in vars(dgl.transforms).items() if inspect.isclass(value)} - {"BaseTransform"}
    assert names == shard_lists.EXACT_TRANSFORMS | set(shard_lists.REFUSED_TRANSFORMS)
    assert not shard_lists.EXACT_TRANSFORMS & set(shard_lists.REFUSED_TRANSFORMS)
    assert set(TRANSFORM_CASES) == shard_lists.EXACT_TRANSFORMS


def test_what_takes_no_graph_says_so_and_takes_none() -> None:
    graph_names = {"g", "graph", "graphs", "g_list", "G", "A"}
    for name, function in public_functions():
        if name in shard_lists.TAKES_NO_GRAPH:
            assert shard_lists.TAKES_NO_GRAPH[name].startswith("takes no graph: ")
            if name not in ("get_global_func",):
                parameters = inspect.signature(function).parameters
                assert not graph_names & set(parameters), name


def test_each_list_has_its_tests() -> None:
    assert set(METHOD_CASES) == shard_lists.EXACT_METHODS
    assert set(FUNCTION_CASES) == shard_lists.EXACT_FUNCTIONS
    assert set(METHOD_CHECKS) == shard_lists.LOCAL_METHODS
    assert set(FUNCTION_CHECKS) == shard_lists.LOCAL_FUNCTIONS
    assert set(METHOD_CALLS) == set(shard_lists.REFUSED_METHODS)
    assert set(FUNCTION_CALLS) == set(shard_lists.REFUSED_FUNCTIONS)


def test_a_new_method_of_dgl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dgl.DGLGraph, "brand_new", lambda self: self._graph.native_call(), raising=False)
    monkeypatch.setattr(dgl.DGLGraph, "new_property", property(lambda self: self._graph.native_call()), raising=False)
    close_remaining_methods(ShardGraph)
    try:

        def ask(ranks: Ranks) -> list[str]:
            graph = shard_of(ranks, make_data())
            with pytest.raises(NotImplementedError) as method:
                graph.brand_new()
            with pytest.raises(NotImplementedError) as value:
                _ = graph.new_property
            return [str(method.value), str(value.value)]

        for texts in run_local_ranks(2, ask):
            assert "DGLGraph.brand_new" in texts[0] and "DGLGraph.new_property" in texts[1]
            assert all("before nugnn.fit or nugnn.shard" in text for text in texts)
    finally:
        for name in ("brand_new", "new_property"):
            delattr(ShardGraph, name)


def test_a_new_function_of_dgl_is_refused_by_the_graph_index() -> None:
    def brand_new(graph: Any) -> Any:
        return graph._graph.find_all_triangles(0)

    with pytest.raises(NotImplementedError, match=r"find_all_triangles.*before nugnn\.fit"):
        brand_new(shard_of(Ranks(), make_data()))


# -- exact ---------------------------------------------------------------------------------------------------------


def _all_cases(ranks: Ranks, cases: dict[str, Case], data: Any) -> dict[str, Any]:
    return {variant: on_rank(ranks, case, data) for variant, case in cases.items()}


def _check_exact(ranks: Any, cases: dict[str, Case]) -> None:
    data = make_data()
    expected = {variant: joined([on_plain(case, data)]) for variant, case in cases.items()}
    for num_parts in (1, 3):
        parts = ranks.run(num_parts, _all_cases, cases, data)
        for variant in cases:
            try:
                # a sum runs over at most all edges
                assert_equal(expected[variant], joined([part[variant] for part in parts]), len(data.src))
            except AssertionError as error:
                raise AssertionError(f"{num_parts} parts, case {variant!r}: {error}") from error


@pytest.mark.parametrize("name", sorted(METHOD_CASES))
def test_exact_methods_equal_plain_dgl(ranks: Any, name: str) -> None:
    _check_exact(ranks, METHOD_CASES[name])


@pytest.mark.parametrize("name", sorted(FUNCTION_CASES))
def test_exact_functions_equal_plain_dgl(ranks: Any, name: str) -> None:
    _check_exact(ranks, FUNCTION_CASES[name])


@pytest.mark.parametrize("name", sorted(TRANSFORM_CASES))
def test_exact_transforms_equal_plain_dgl(ranks: Any, name: str) -> None:
    _check_exact(ranks, TRANSFORM_CASES[name])


# -- local ---------------------------------------------------------------------------------------------------------


def _run_checks(ranks: Ranks, checks: dict[str, Any], data: Any) -> None:
    for name, check in checks.items():
        graph = shard_of(ranks, data)
        try:
            check(graph, data)
        except Exception as error:
            raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("num_parts", [1, 3])
def test_local_methods_mean_the_rows_of_this_rank(ranks: Any, num_parts: int) -> None:
    ranks.run(num_parts, _run_checks, METHOD_CHECKS, make_data())


@pytest.mark.parametrize("num_parts", [1, 3])
def test_local_functions_mean_the_rows_of_this_rank(ranks: Any, num_parts: int) -> None:
    ranks.run(num_parts, _run_checks, FUNCTION_CHECKS, make_data())


# -- refused -------------------------------------------------------------------------------------------------------


def _refusals(ranks: Ranks, data: Any) -> dict[str, str]:
    graph = shard_of(ranks, data)
    texts = {}
    for kind, calls in (("method", METHOD_CALLS), ("function", FUNCTION_CALLS)):
        for name, call in calls.items():
            try:
                call(graph)
            except NotImplementedError as error:
                texts[f"{kind} {name}"] = str(error)
            except Exception as error:
                texts[f"{kind} {name}"] = f"{type(error).__name__} instead: {error}"
            else:
                texts[f"{kind} {name}"] = "was answered"
    return texts


def test_refused_names_say_what_to_use_instead(ranks: Any) -> None:
    for texts in ranks.run(3, _refusals, make_data()):
        for kind, instead in (
            ("method", shard_lists.REFUSED_METHODS),
            ("function", shard_lists.REFUSED_FUNCTIONS),
        ):
            for name, replacement in instead.items():
                text = texts[f"{kind} {name}"]
                assert "has no exact meaning on one part" in text, f"{kind} {name}: {text}"
                assert replacement in text and name in text


def test_refused_transforms_say_where_to_use_them() -> None:
    def ask(ranks: Ranks) -> dict[str, str]:
        texts = {}
        for name in shard_lists.REFUSED_TRANSFORMS:
            transform = object.__new__(getattr(dgl.transforms, name))
            with pytest.raises(NotImplementedError) as raised:
                transform(shard_of(ranks, make_data()))
            texts[name] = str(raised.value)
        return texts

    for texts in run_local_ranks(2, ask):
        assert all(f"dgl.transforms.{name}" in text and "before nugnn.fit" in text for name, text in texts.items())


@pytest.mark.parametrize("name", sorted(set(METHOD_CALLS) - shard_lists.NEVER_ANSWERED - NEEDS_MORE))
def test_on_one_rank_refused_methods_answer_like_dgl(name: str) -> None:
    _compare_on_one_rank(METHOD_CALLS[name])


@pytest.mark.parametrize("name", sorted(set(FUNCTION_CALLS) - shard_lists.NEVER_ANSWERED_FUNCTIONS - NEEDS_MORE))
def test_on_one_rank_refused_functions_answer_like_dgl(name: str) -> None:
    _compare_on_one_rank(FUNCTION_CALLS[name])


def _compare_on_one_rank(call: Any) -> None:
    data = make_data()
    shard = shard_of(Ranks(), data)
    plain = plain_of(data, shard.global_edge_ids)
    expected, answer = _seeded(call, plain), _seeded(call, shard)
    if isinstance(expected, Exception):
        assert type(answer) is type(expected)
    else:
        assert equal_results(expected, answer), (expected, answer)


def _seeded(call: Any, graph: Any) -> Any:
    dgl.seed(3)
    np.random.seed(3)  # eigenvectors of SciPy start from it
    try:
        return call(graph)
    except dgl.DGLError as error:
        return error


@pytest.mark.parametrize("name", sorted(shard_lists.NEVER_ANSWERED))
def test_the_graph_is_never_changed_in_place(name: str) -> None:
    with pytest.raises(NotImplementedError):
        METHOD_CALLS[name](shard_of(Ranks(), make_data()))


@pytest.mark.parametrize("name", sorted(shard_lists.NEVER_ANSWERED_FUNCTIONS))
def test_functions_that_end_the_interpreter_are_never_called(name: str) -> None:
    with pytest.raises(NotImplementedError, match=r"nugnn\.partition"):
        FUNCTION_CALLS[name](shard_of(Ranks(), make_data()))


def test_a_block_whose_edges_come_from_no_nodes_is_refused() -> None:
    """DGL counts no source node whatever ``src_nodes`` names, and then reads, and ends the interpreter at times."""
    graph = shard_of(Ranks(), make_data())
    for include in (True, False):
        with pytest.raises(dgl.DGLError, match="to_block: leave src_nodes out"):
            dgl.to_block(graph, include_dst_in_src=include, src_nodes=graph.nodes())
    assert dgl.to_block(graph).num_edges() == graph.num_edges()


def test_an_edge_alone_is_no_id_to_filter_edges() -> None:
    """As in DGL, which takes a number for a node and not for an edge."""
    data = make_data()
    shard = shard_of(Ranks(), data)
    for graph in (shard, plain_of(data, shard.global_edge_ids)):
        assert graph.filter_nodes(lambda batch: torch.ones(batch.batch_size()), 0).tolist() == [0]
        assert graph.filter_edges(lambda batch: torch.ones(batch.batch_size()), [0]).tolist() == [0]
        for edge in (0, None):
            with pytest.raises(ValueError, match="edges"):
                graph.filter_edges(lambda batch: torch.ones(batch.batch_size()), edge)
