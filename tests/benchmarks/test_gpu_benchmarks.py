"""The GPU benchmarks on a CPU at tiny sizes: every system right, a wrong one refused, every script run to its end."""

import nugnn  # noqa: F401  # lets dgl import under this torch

# isort: split
import argparse
import ctypes
import importlib.util
import math
import sys
from types import SimpleNamespace

import baselines
import cusparse
import gpu_activations
import gpu_epoch
import gpu_kernels
import gpu_peers
import harness
import plain_models
import pytest
import report_performance
import scaling
import torch

from nugnn import GNN
from nugnn.datasets.synthetic_device import device_graph
from nugnn.kernels.attention.reference import gatv2_attention_reference
from nugnn.kernels.spmm.reference import spmm_reference
from nugnn.kernels.structure import Structure

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:index_reduce")


@pytest.fixture(scope="module")
def graph():
    return device_graph("products-like", 400, 5_000, num_features=12, num_classes=5, device="cpu")


@pytest.fixture(scope="module")
def csr(graph):
    return baselines.Csr(graph.indptr.int(), graph.indices)


@pytest.mark.parametrize("system", ["nugnn", "torch.sparse"])
def test_products_are_right_where_they_run_on_a_cpu(csr, system):
    x = torch.randn(csr.num_nodes, 6, generator=torch.Generator().manual_seed(0))
    assert baselines.SampledSums(csr).problem(baselines.SYSTEMS[system](csr, x)(), x) is None


def test_pyg_is_right_if_it_is_here(csr):
    pytest.importorskip("torch_geometric")
    x = torch.randn(csr.num_nodes, 6, generator=torch.Generator().manual_seed(0))
    assert baselines.SampledSums(csr).problem(baselines.pyg_edge_index(csr, x)(), x) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sampled_sums_see_one_missing_edge(csr, dtype):
    x = torch.randn(csr.num_nodes, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    sums = baselines.SampledSums(csr)
    right = torch.zeros(csr.num_nodes, 6, dtype=torch.float64)
    right.index_add_(0, torch.repeat_interleave(torch.arange(csr.num_nodes), csr.degrees), x[csr.indices].double())
    assert sums.problem(right.to(dtype), x) is None
    row = int(sums.rows[csr.degrees[sums.rows] > 0][0])
    right[row] -= x[csr.indices[csr.indptr[row]]].double()
    assert sums.problem(right.to(dtype), x) is not None
    assert int(csr.degrees.argmax()) in sums.rows.tolist()


class FakeLibrary:
    """Stands for libcusparse: takes every call, keeps its arguments."""

    def __init__(self, refused=None):
        self.calls, self.refused = {}, refused

    def __getattr__(self, name):
        def call(*arguments):
            self.calls[name] = arguments
            return 3 if name == self.refused else 0

        return call


@pytest.fixture
def fake_library(monkeypatch):
    fake = FakeLibrary()
    monkeypatch.setattr(cusparse, "library", lambda: fake)
    stream = argparse.Namespace(cuda_stream=5)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return fake


def test_cusparse_gets_the_matrix_once_and_preprocesses_only_when_asked(csr, fake_library):
    x = torch.ones(csr.num_nodes, 6, dtype=torch.bfloat16)
    product = baselines.cusparse("alg2", preprocess=False)(csr, x)
    _, rows, columns, entries, indptr, indices, *rest = fake_library.calls["cusparseCreateCsr"]
    assert [each.value for each in (rows, columns, entries)] == [csr.num_nodes, csr.num_nodes, csr.num_edges]
    assert [indptr.value, indices.value] == [csr.indptr.data_ptr(), csr.indices.data_ptr()]
    assert [each.value for each in rest[1:]] == [2, 2, 0, 14]  # int32 twice, base 0, bfloat16
    assert "cusparseSpMM_preprocess" not in fake_library.calls
    assert product() is product()  # a buffer that is kept
    assert product().shape == x.shape
    arguments = fake_library.calls["cusparseSpMM"]
    assert [each.value for each in arguments[8:10]] == [0, cusparse.ALGORITHMS["alg2"]]  # float32 accumulation
    baselines.cusparse("alg1", preprocess=True)(csr, x)
    assert fake_library.calls["cusparseSpMM_preprocess"][9].value == cusparse.ALGORITHMS["alg1"]


def test_a_product_takes_other_rows_and_gives_new_memory(csr, fake_library):
    x = torch.ones(csr.num_nodes, 6)
    product = cusparse.CuSparseProduct(csr.indptr, csr.indices, torch.ones(csr.num_edges), x, "alg3", preprocess=True)
    results = [product(torch.zeros(csr.num_nodes, 6)) for _ in range(2)]
    assert all(result.shape == x.shape for result in results)
    assert results[0].data_ptr() != results[1].data_ptr()
    assert fake_library.calls["cusparseDnMatSetValues"][1].value == results[1].data_ptr()


def test_the_widths_that_a_plain_model_sums_are_known_before(graph, csr):
    seen = []

    class Seen(plain_models.Adjacency):
        def multiply(self, norm, x, is_transposed):
            seen.append(x.shape[1])
            return super().multiply(norm, x, is_transposed)

    for kind, norm in (("sage", "mean"), ("gcn", "both")):
        model = plain_models.PlainModel(kind, 12, hidden=8, num_classes=5)
        adjacency = Seen(csr)
        adjacency.prepare(norm, torch.float32, model.summed_widths)
        del seen[:]
        model(adjacency, graph.features).sum().backward()
        assert seen[:3] == model.summed_widths
        assert set(seen[3:]) <= set(seen[:3])


def test_a_refusal_of_cusparse_is_an_error(csr, fake_library):
    fake_library.refused = "cusparseSpMM_bufferSize"
    with pytest.raises(cusparse.CuSparseError, match="cusparseSpMM_bufferSize gave status 3"):
        baselines.cusparse("alg3", preprocess=True)(csr, torch.ones(csr.num_nodes, 6))


def test_without_cuda_there_is_no_cusparse(csr):
    if "libcusparse" in open("/proc/self/maps").read():
        pytest.skip("this torch has CUDA")
    with pytest.raises(cusparse.CuSparseError, match="not loaded"):
        cusparse.library()
    assert ctypes.sizeof(ctypes.c_void_p) == 8


@pytest.mark.parametrize("kind", gpu_epoch.MODELS)
def test_plain_models_are_dgl_models_with_the_same_weights(graph, csr, kind):
    torch.manual_seed(0)
    settings = {"hidden": 6, "heads": 3} if kind == "gat" else {"hidden": 8, "heads": 1}
    mine = plain_models.PlainModel(kind, 12, **settings, num_classes=5, dropout=0.0).double()
    more = {"aggregator": "mean"} if kind == "sage" else {}
    theirs = GNN(kind, 12, 5, layers=3, dropout=0.0, **settings, **more).double()
    theirs.load_state_dict(mine.state_dict())
    x = graph.features.double()
    out = mine(plain_models.Adjacency(csr), x)
    expected = theirs(graph.to_host().to_dgl(), x)
    # float64, except that values of GCN's matrix and scores of attention pass through float32
    assert torch.allclose(out, expected, rtol=0, atol=2e-6 * float(expected.detach().abs().max()))
    for logits in (out, expected):
        torch.nn.functional.cross_entropy(logits, graph.labels).backward()
    gradients = dict(theirs.named_parameters())
    for name, parameter in mine.named_parameters():
        scale = float(gradients[name].grad.abs().max())
        assert torch.allclose(parameter.grad, gradients[name].grad, rtol=0, atol=1e-5 * scale + 1e-9), name


def test_reversed_edges_are_reversed(graph, csr):
    adjacency = plain_models.Adjacency(csr)
    reverse = adjacency.reverse.long()
    assert torch.equal(adjacency.destinations[reverse], csr.indices)
    assert torch.equal(csr.indices[reverse], adjacency.destinations)


@pytest.mark.parametrize("system", ["cusparse", "nugnn by id"])
@pytest.mark.parametrize("kind", gpu_epoch.MODELS)
def test_losses_without_dropout_agree_before_anything_is_timed(system, kind):
    assert gpu_epoch.problem_of(system, kind, CPU) is None


@pytest.mark.parametrize("kind", gpu_epoch.MODELS)
def test_losses_of_pyg_agree_if_it_is_here(kind):
    pytest.importorskip("torch_geometric")
    assert gpu_epoch.problem_of("pyg", kind, CPU) is None


def options(*given):
    return gpu_epoch.parse(["--device", "cpu", "--nodes", "400", "--arcs", "4000", "--epochs", "2", *given])


def test_a_system_with_another_loss_is_not_timed(monkeypatch):
    def wrong(kind, case, precision, dropout, rows, state):
        return gpu_epoch.plain(kind, case, precision, dropout, case.train_nodes, state)  # loss over other rows

    monkeypatch.setitem(gpu_epoch.SYSTEMS, "wrong", wrong)
    recorder, case = harness.Recorder(None, CPU), gpu_epoch.Case("products-like", 400, 4000, 0, CPU)
    gpu_epoch.measure(recorder, case, "wrong", "sage", "fp32", options())
    assert "wrong result: losses" in recorder.rows[0]["error"]
    assert "median_ms" not in recorder.rows[0]


def test_what_does_not_fit_is_tried_on_half_the_graph_with_nugnn_beside_it(monkeypatch):
    tried = []

    def measure(recorder, case, system, model, precision, arguments):
        tried.append((case.num_nodes, case.num_edges, system, model))
        return system != "pyg" or model == "gcn" or case.num_nodes <= 200

    monkeypatch.setattr(gpu_epoch, "measure", measure)
    given = options(
        "--nodes", "800", "--models", "sage", "gcn", "--systems", "pyg", "nugnn", "cusparse", "--precisions", "fp32"
    )
    gpu_epoch.measure_all(harness.Recorder(None, CPU), given, CPU)
    assert [each for each in tried if each[0] == 400] == [(400, 2000, s, "sage") for s in ("pyg", "nugnn")]
    assert [each for each in tried if each[0] == 200] == [(200, 1000, s, "sage") for s in ("pyg", "nugnn")]
    assert len([each for each in tried if each[0] == 800]) == len(tried) - 4 == 6


def test_the_kernels_of_an_epoch_are_named_with_their_times():
    recorder = harness.Recorder(None, CPU)
    given = options("--models", "sage", "--systems", "nugnn by id", "--precisions", "fp32", "bf16", "--kernels", "5")
    gpu_epoch.measure_all(recorder, given, CPU)
    for row in recorder.rows:
        times = [kernel["ms"] for kernel in row["kernels"]]
        assert len(times) == 5 and times == sorted(times, reverse=True) and times[-1] > 0
        assert all(kernel["calls"] >= 1 and kernel["name"] for kernel in row["kernels"])


def test_features_rounded_by_one_run_are_whole_again_for_the_next():
    case = gpu_epoch.Case("products-like", 400, 4000, 0, CPU)
    before = case.shard_graph("none").ndata["feat"].clone()
    gpu_epoch.ours("sage", case, "bf16", 0.0, None, gpu_epoch.first_weights("sage", case, 0), order="none")
    assert case._shard_graph[1].ndata["feat"].dtype == torch.bfloat16
    assert torch.equal(case.shard_graph("none").ndata["feat"], before)


def test_scripts_run_to_their_end_and_the_page_is_made_of_their_rows(tmp_path):
    small = [
        "--device",
        "cpu",
        "--nodes",
        "400",
        "--arcs",
        "4000",
        "--families",
        "products-like",
        "--out",
        str(tmp_path),
    ]
    systems = ["--systems", "nugnn", "torch.sparse", "cusparse alg2 pre", "turbo-gnn"]
    gpu_kernels.main([*small, *systems, "--widths", "8", "--budget-seconds", "0.001", "--without-bounds"])
    gpu_epoch.main([*small, "--epochs", "2", "--models", "sage", "--systems", "cusparse", "nugnn by id"])
    curve = ["--curves", "--curve-nodes", "400", "--curve-arcs", "4000", "--curve-epochs", "6", "--seeds", "2"]
    curve += ["--precisions", "fp32", "--systems", "cusparse", "nugnn by id", "--models", "sage"]
    gpu_epoch.main([*small, *curve])
    rows = harness.read_rows(tmp_path)
    assert {row["kind"] for row in rows} == {"generate", "order", "spmm", "epoch", "curve"}
    timed = [row for row in rows if row["kind"] == "spmm" and "median_ms" in row]
    assert {(row["system"], row["order"]) for row in timed} >= {("nugnn", "given"), ("torch.sparse", "planted")}
    curves = [row for row in rows if row["kind"] == "curve"]
    assert all(len(row["losses"]) == 6 and 0 < row["value"] < 1 for row in curves)
    report_performance.main([str(tmp_path), "--page", str(tmp_path / "page.md")])
    text = (tmp_path / "page.md").read_text()
    for title in ("SpMM (sum over in-edges), ms", "Epochs: 3 layers", "Accuracy: same first weights"):
        assert title in text
    assert "CuSparseError" in text
    assert "ModuleNotFoundError: No module named 'turbo_gnn'" in text


def a_row(**more):
    machine = {"card": "NVIDIA H100 80GB HBM3", "driver": "1", "cuda": "13", "torch": "2", "triton": "3", "python": "3"}
    row = {
        "kind": "spmm",
        "system": "nugnn",
        "graph": "products-like",
        "order": "given",
        "dtype": "bf16",
        "shape": "F=128",
    }
    row |= {"width": 128, "num_nodes": 1000, "num_edges": 50_000, "p20_ms": 1.0, "p80_ms": 9.0, "machine": machine}
    return row | {"median_ms": 5.0} | more


def test_the_page_compares_with_the_fastest_cusparse_and_takes_the_last_row():
    rows = [
        a_row(median_ms=9.0),
        a_row(),
        a_row(order="found", median_ms=4.0),
        a_row(order="planted", median_ms=3.0),
        a_row(system="torch.sparse", median_ms=16.0),
        a_row(system="cusparse alg2", median_ms=14.0),
        a_row(kind="bound", system="copy", shape="1 GiB", value=3e12),
        a_row(kind="bound", system="gather from cache", value=6e12),
    ]
    text = report_performance.page(rows)
    floor = (2 * 1000 * 256 + 4 * 50_000 + 4 * 1000) / 3e12 * 1e3
    gather = 50_000 * 256 / 6e12 * 1e3
    cells = ["products-like", "bf16", "128", "14.00 (cusparse alg2)", "5.00", "4.00", "3.00", "2.80×", "3.50×", "0.75×"]
    assert "| " + " | ".join([*cells, f"{floor:.2f}", f"{gather:.2f}"]) + " |" in text
    # 14.0 ms, earlier 14.7
    assert "| SpMM bf16 F=128, given order | 14.0 | 14.7 | yes |" in text
    assert "9.00 (1.00" not in text


def test_a_slow_baseline_is_called_one():
    text = report_performance.page([a_row(system="torch.sparse", median_ms=17.0)])
    assert "| SpMM bf16 F=128, given order | 17.0 | 14.7 | NO: more than 10 % slower |" in text
    elsewhere = a_row(system="torch.sparse", median_ms=17.0)
    elsewhere["machine"] = elsewhere["machine"] | {"card": "NVIDIA H200"}
    assert "as fast as they can be" not in report_performance.page([elsewhere])


def test_accuracies_are_compared_over_seeds():
    rows = [
        a_row(kind="curve", model="sage", system=system, dtype=dtype, seed=seed, value=value)
        for system, dtype, values in (("cusparse", "fp32", (0.70, 0.72)), ("nugnn", "bf16", (0.71, 0.73)))
        for seed, value in enumerate(values)
    ]
    text = report_performance.page(rows)
    error = math.sqrt(2 / 2 + 2 / 2)
    assert f"| sage | bf16 | nugnn | products-like | 2 | 72.00 ± 1.41 | +1.00 (standard error {error:.2f}) |" in text


def test_a_page_of_nothing_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="no rows"):
        report_performance.main([str(tmp_path), "--page", str(tmp_path / "page.md")])
    assert not (tmp_path / "page.md").exists()


def scaling_options(*given):
    small = ["--device", "cpu", "--nodes", "400", "--arcs", "4000", "--hidden", "8", "--epochs", "2"]
    return scaling.parse([*small, *given])


def test_ranks_train_the_same_and_have_a_row_each(fork_server, monkeypatch):
    monkeypatch.setattr(scaling, "subprocess", SimpleNamespace(run=fork_server.torchrun))
    recorder = harness.Recorder(None, CPU)
    more = ("--hidden", "16", "--epochs", "6")  # in few epochs a float32 loss may hide the order of sums
    scaling.measure(recorder, scaling_options(*more, "--ranks", "1", "2", "--overlaps", "on", "off"))
    one, two, plain = recorder.rows
    assert not any("error" in row for row in recorder.rows)
    assert two["losses"] != plain["losses"]  # sums in another order
    assert len(one["losses"]) == 5 + 6
    assert [each["num_inner"] for each in one["ranks"]] == [400]
    assert sum(each["num_inner"] for each in two["ranks"]) == 400
    assert "| 2 | on | fp32 | none | 400 |" in report_performance.page(recorder.rows)


def test_ranks_with_other_losses_have_no_time(monkeypatch):
    def run(num_ranks, arguments):
        seen = {"samples_ms": [1.0], "peak_bytes": None, "nccl_ms": None, "halo_ms": 0.5}
        return [{"losses": [3.0, 2.0, 1.0 * num_ranks], **seen}]

    monkeypatch.setattr(scaling, "run", run)
    recorder = harness.Recorder(None, CPU)
    scaling.measure(recorder, scaling_options("--ranks", "1", "2"))
    assert recorder.rows[0]["median_ms"] == 1.0
    assert "wrong result" in recorder.rows[1]["error"]
    assert "median_ms" not in recorder.rows[1]


def test_ranks_that_fail_say_why():
    recorder = harness.Recorder(None, CPU)
    scaling.measure(recorder, scaling_options("--ranks", "1", "--nodes", "3"))
    assert "3 nodes; it takes 64" in recorder.rows[0]["error"]


def test_activations_are_compared_by_their_losses(tmp_path):
    gpu_activations.main(
        [
            *("--device", "cpu", "--nodes", "400", "--arcs", "4000", "--epochs", "1", "--layers", "3", "--hidden", "8"),
            *("--precisions", "fp32", "--models", "blocks", "gat", "--out", str(tmp_path)),
        ]
    )
    rows = harness.read_rows(tmp_path)
    assert [row["system"] for row in rows] == ["keep", "recompute", "offload"] * 2
    for kept, again, moved in (rows[:3], rows[3:]):
        assert kept["losses"] == again["losses"] and kept["median_ms"] > 0 and again["median_ms"] > 0
        assert "on the CPU" in moved["error"] and "median_ms" not in moved


class FakeTurboGraph:
    """turbo-gnn's graph as `from_csr` takes it: int32, both directions."""

    def __init__(self, indptr, indices, quantile):
        self.structure, self.quantile = Structure(len(indptr) - 1, indptr.long(), indices), quantile

    @classmethod
    def from_csr(cls, fwd_indptr, fwd_indices, bwd_indptr, bwd_indices, quantile=0.99, index_dtype=None):
        given = (fwd_indptr, fwd_indices, bwd_indptr, bwd_indices)
        assert index_dtype == torch.int32 and all(each.dtype == torch.int32 for each in given)
        return cls(bwd_indptr, bwd_indices, quantile)

    def repartition(self, *, forward_huge_degree_threshold_quantile):
        graph = object.__new__(type(self))
        graph.structure, graph.quantile = self.structure, forward_huge_degree_threshold_quantile
        return graph


def fake_turbo_gnn(tried, missing_edges=0):
    """Its two functions with their own parameters, computed by the definitions; refuses some settings as it does."""

    def gatv2_aggr(
        graph, x, x_neighbors, attention_weights, negative_slope=0.2, grad_A_reduce_row_chunk_size=512
    ):  # fmt: skip
        assert grad_A_reduce_row_chunk_size in (32, 64, 128, 256, 512, 1024, 2048)
        return gatv2_attention_reference(graph.structure, x_neighbors, x, attention_weights, negative_slope)

    def reduction_aggr(
        graph, X, warps_per_block=8, edges_per_block_heavy_nodes=128, use_2d_kernel=False, features_per_block=32,
        tiles_y=8, reduce="min",
    ):  # fmt: skip
        tried.append((graph.quantile, warps_per_block, edges_per_block_heavy_nodes, use_2d_kernel))
        if use_2d_kernel and features_per_block == 256:
            raise RuntimeError("too many threads")
        assert features_per_block * tiles_y <= 1024 and reduce == "max"
        whole = graph.structure
        indices = whole.indices[: whole.num_edges - missing_edges]
        structure = Structure(whole.num_src, whole.indptr.clamp(max=len(indices)), indices)
        out = spmm_reference(structure, "copy_lhs", "max", X, None)
        return torch.where(out.isfinite(), out, 0)

    return argparse.Namespace(
        AdjacencyForwardBackwardWithNodeBuckets=FakeTurboGraph, gatv2_aggr=gatv2_aggr, reduction_aggr=reduction_aggr
    )


def peers(*given):
    small = ("--device", "cpu", "--nodes", "300", "--arcs", "3000", "--budget-seconds", "0", "--orders", "given")
    return gpu_peers.main([*small, *given]).rows


def test_peers_are_called_as_they_are_written_searched_and_checked(monkeypatch, tmp_path):
    tried = []
    monkeypatch.setitem(sys.modules, "turbo_gnn", fake_turbo_gnn(tried))
    rows = [row for row in peers("--dtypes", "fp32", "--out", str(tmp_path)) if row["kind"] == "peers"]
    assert [row.get("error") for row in rows] == [None] * 14
    assert {(row["system"], row["case"], row["step"]) for row in rows} == {
        *((s, c, p) for s in ("nugnn", "turbo-gnn") for c, _ in gpu_peers.CASES for p in ("fwd", "f+b")),
        *(("torch scatter", "max F=64", p) for p in ("fwd", "f+b")),
    }
    assert {quantile for quantile, *_ in tried} == {-1, 0.9, 0.95, 0.99, 0.999}
    assert {warps for _, warps, *_ in tried} == {1, 2, 4}  # four bytes for a thread: 128 features fill four warps
    report_performance.main([str(tmp_path), "--page", str(tmp_path / "page.md")])
    text = (tmp_path / "page.md").read_text()
    assert "### cuSPARSE, turbo-gnn and torch's scatter beside ours" in text
    assert text.count("| given | GATv2 4x32 | f+b | fp32 |") == 2


def test_a_peer_that_misses_edges_has_no_time(monkeypatch):
    monkeypatch.setitem(sys.modules, "turbo_gnn", fake_turbo_gnn([], missing_edges=1500))
    for row in peers("--dtypes", "fp32", "--systems", "turbo-gnn"):
        if row["kind"] == "peers":
            assert ("error" in row) == row["case"].startswith("max")
            assert "sampled maxima differ" in row["error"] or "column" in row["error"] if "error" in row else True


def test_a_peer_that_is_not_here_says_so_and_bfloat16_ties_go_to_any_neighbour():
    rows = [row for row in peers("--dtypes", "bf16") if row["kind"] == "peers"]
    assert {row["system"]: row.get("error") for row in rows} == {
        "nugnn": None,
        "turbo-gnn": "ModuleNotFoundError: No module named 'turbo_gnn'",
    }


def test_ratios_are_of_the_same_order_and_of_the_given_one_beside_ours_found():
    case = {"kind": "peers", "case": "max F=64", "step": "f+b", "shape": "max64 f+b", "dtype": "fp32"}
    case |= {"input_bytes": 100, "held_bytes": 500, "peak_bytes": 750}
    times = {"nugnn": {"given": 10.0, "found": 5.0}, "turbo-gnn": {"given": 30.0, "found": 20.0}}
    rows = [
        a_row(**case | {"system": system, "order": order, "median_ms": ms})
        for system, orders in times.items()
        for order, ms in orders.items()
    ]
    text = report_performance.page(rows)
    cells = ["products-like", "max F=64 f+b", "fp32", "turbo-gnn", "30.00", "20.00", "10.00", "5.00"]
    assert "| " + " | ".join([*cells, "3.00×", "4.00×", "-", "6.00×"]) + " |" in text
    assert "| found | max F=64 | f+b | fp32 | turbo-gnn | 20.00 (1.00-9.00) | 2.50× |" in text


def test_partitioners_stand_beside_metis_on_the_page() -> None:
    def row(work: str, threads: int, seconds: float, **more: object) -> dict[str, object]:
        of_graph = {"graph": "products-like", "num_nodes": 9, "num_edges": 20, "processor": "a processor"}
        of_graph |= {"shares": [0.6, 0.4]}
        return {"kind": "partition", "work": work, "threads": threads, "seconds": seconds, "grown_bytes": 1 << 30} | (
            of_graph | more
        )

    rows = [
        row("partition:metis", 1, 60.0, cut=0.2),
        row("order:metis", 1, 40.0),
        row("partition:clusters", 1, 20.0, cut=0.1),
        row("partition:clusters", 1, 22.0, cut=0.1),
        row("partition:clusters", 1, 90.0, cut=0.1),
        row("order:started", 1, 3.0),
        row("partition:kaminpar", 1, 30.0, cut=0.1),
        row("order:clusters", 1, 5.0),
    ]
    rows.append(row("partition:metis", 1, 70.0, cut=0.3, balance="edges", worst_edge_load=1.5))
    text = report_performance.page([*rows, row("spmm", 2, 0.0)])
    assert "products-like, 9 nodes, 20 arcs; shares 0.6, 0.4 of the nodes; a processor" in text
    assert "| partition: metis | 1 | 60.0 | 0.2000 | - | 1.00 | 100.0 (1.00) |" in text
    assert "| partition: clusters | 1 | 22.0 | 0.1000 | - | 1.00 | 25.0 (0.25) |" in text
    assert "| partition: kaminpar | 1 | 30.0 | 0.1000 | - | 1.00 | 35.0 (0.35) |" in text
    assert "shares 0.6, 0.4 of the edges; a processor" in text
    assert "| partition: metis | 1 | 70.0 | 0.3000 | 1.50 | 1.00 | - |" in text


def test_the_page_is_what_the_kept_rows_say():
    rows = harness.read_rows(report_performance.KEPT)
    assert (harness.ROOT / "docs" / "performance.md").read_text(encoding="utf-8") == report_performance.page(rows)


def test_the_page_of_dgl_s_modules_is_what_the_kept_rows_say():
    spec = importlib.util.spec_from_file_location("conformance_script", harness.ROOT / "benchmarks" / "conformance.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    rows = harness.read_rows(script.KEPT)
    assert script.PAGE.read_text(encoding="utf-8") == script.page(rows)
    assert all(row["is_same"] for row in rows) and len({row["machine"]["card"] for row in rows}) == 2


@pytest.mark.parametrize("system", ["cusparse tuned", "nugnn anew"])
@pytest.mark.parametrize("kind", ["sage", "gcn"])
def test_epochs_that_keep_other_sums_have_the_losses_of_the_plain_model(system, kind):
    assert gpu_epoch.problem_of(system, kind, CPU) is None
