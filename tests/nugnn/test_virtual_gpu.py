"""Limited GPUs: every kernel keeps to its multiprocessors, results are the same bits, processes end in good order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import nugnn
from exactness import NUM_CLASSES, NUM_FEATURES, make_graph
from nugnn.failure import WorkerFailed
from nugnn.models import GNN
from nugnn.profile_run import profile_machine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
SMS = 32

WHERE = """
    import json, sys
    import torch, triton
    import triton.language as tl
    from nugnn.kernels.green_context import limit_multiprocessors, new_stream, usable_multiprocessors

    NUM_PROGRAMS = 4096
    gpu = torch.device("cuda", 0)
    torch.cuda.set_device(gpu)

    @triton.jit
    def write_places(out):
        tl.store(out + tl.program_id(0), tl.extra.cuda.smid())

    def places():
        out = torch.full((NUM_PROGRAMS,), -1, dtype=torch.int32, device=gpu)
        write_places[(NUM_PROGRAMS,)](out)
        return out

    def used(out):
        torch.cuda.synchronize()
        assert int(out.min()) >= 0
        return int(out.unique().numel())

    class InBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(places())
            return grad

    found, seen = {"all": usable_multiprocessors(gpu)}, []
    found["free"] = used(places())
    a = torch.randn(512, 512, device=gpu)
    expected = (a @ a).cpu()
    torch.cuda.synchronize()
    found["granted"] = limit_multiprocessors(gpu, int(sys.argv[1]))
    found["usable"] = usable_multiprocessors(gpu)
    found["limited"] = used(places())
    x = torch.ones(8, device=gpu, requires_grad=True)
    InBackward.apply(x).sum().backward()
    found["backward"] = used(seen[0])
    further = new_stream(gpu)
    further.wait_stream(torch.cuda.current_stream(gpu))
    with torch.cuda.stream(further):
        found["further"] = used(places())
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=new_stream(gpu)):
        recorded = places()
    recorded.fill_(-1)
    graph.replay()
    found["recorded"] = used(recorded)
    found["same"] = torch.equal(expected, (a @ a).cpu())
    print(json.dumps(found))
"""


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(Path(nugnn.__file__).parents[1]), *filter(None, sys.path)])
    return {**os.environ, "PYTHONPATH": path}


@pytest.mark.parametrize("sms", [16, SMS, 64])
def test_every_kernel_stays_within_its_multiprocessors(tmp_path: Path, sms: int) -> None:
    """Forward, backward in autograd's thread, another stream, a recorded step; and the process ends in good order."""
    (tmp_path / "where.py").write_text(textwrap.dedent(WHERE))
    command = [sys.executable, str(tmp_path / "where.py"), str(sms)]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0 and "CUDA error" not in done.stderr, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["free"] > sms and found["free"] <= found["all"]
    assert sms <= found["granted"] == found["usable"] < sms + 16
    # with dynamic parallelism loaded, two more may be used, as CUDA's documentation says
    for where in ("limited", "backward", "further", "recorded"):
        assert 1 < found[where] <= found["granted"] + 2, (where, found)
    assert found["same"]


def train(limits: Any, device: str, *, kind: str = "sage", workers: int = 2, **options: Any) -> nugnn.FitResult:
    torch.manual_seed(0)
    model = GNN(kind, NUM_FEATURES, NUM_CLASSES, hidden=8, norm="batch", dropout=0.3)
    data = make_graph(dtype=torch.float32)
    fixed = {"epochs": 8, "check": False, "seed": 3, "shares": [0.6, 0.4][:workers]}
    return nugnn.fit(model, data, device=device, limits=limits, workers=workers, **fixed, **options)


def assert_same_bits(one: nugnn.FitResult, other: nugnn.FitResult) -> None:
    assert [epoch.loss for epoch in one.history] == [epoch.loss for epoch in other.history]
    assert torch.equal(one.logits, other.logits)


@TWO
@pytest.mark.parametrize("cuda_graphs", ["off", "on"])
@pytest.mark.parametrize("kind", ["sage", "gcn", "gat"])
def test_a_limited_card_beside_a_whole_one_changes_no_bit(kind: str, cuda_graphs: Any) -> None:
    options: dict[str, Any] = {"kind": kind, "cuda_graphs": cuda_graphs}
    free, limited = train(None, "cuda", **options), train(f"none;sms={SMS}", "cuda", **options)
    assert_same_bits(free, limited)
    first, second = (report["limits"] for report in limited.rank_reports)
    assert first == {"asked": "none"} and second == {"asked": f"sms={SMS}", "multiprocessors": SMS}


@TWO
@pytest.mark.parametrize("grad_sync", ["4bit", "powersgd"])
def test_compressed_gradients_beside_the_limit(grad_sync: str) -> None:
    """Their lane has a thread and a stream of its own."""
    free, limited = (train(limits, "cuda", grad_sync=grad_sync) for limits in (None, f"sms={SMS};sms=16"))
    assert_same_bits(free, limited)


def test_workers_share_a_card_by_multiprocessors_and_memory() -> None:
    device = "cuda:0,cuda:0"
    free, limited = train(None, device), train("sms=64,memory_fraction=0.3;sms=32,memory_fraction=0.2", device)
    assert_same_bits(free, limited)
    memory = torch.cuda.get_device_properties(0).total_memory
    held = [report["limits"]["memory_bytes"] for report in limited.rank_reports]
    assert held == pytest.approx([0.3 * memory, 0.2 * memory], rel=1e-6)


@pytest.mark.parametrize(
    ("limits", "exit_code", "words"),
    [
        ("memory_fraction=0.000001", 3, "out of memory"),
        ("sms=100000", 2, r"100000 multiprocessors of .*, which has \d+"),
    ],
)
def test_more_than_there_is_ends_the_run(limits: str, exit_code: int, words: str) -> None:
    with pytest.raises(WorkerFailed, match=words) as failed:
        train(limits, "cuda:0", workers=1)
    assert failed.value.exit_code == exit_code


@pytest.mark.parametrize(
    ("workers", "with_torchrun"),  # one process under torchrun is no torchrun to nugnn
    [(1, False), pytest.param(2, False, marks=TWO), pytest.param(2, True, marks=TWO)],
)
def test_a_run_from_the_shell_ends_in_good_order(tmp_path: Path, workers: int, with_torchrun: bool) -> None:
    starter = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)] if with_torchrun else []
    command = [sys.executable, *starter, "-m", "nugnn", "train", "--dataset", "digits", "--epochs", "3", "--json"]
    command += ["--device", "cuda", "--limits", ";".join(["none", f"sms={SMS}"][-workers:]), "--out", "out"]
    command += [] if with_torchrun else ["--workers", str(workers)]
    done = subprocess.run(
        command, env=_environment(), capture_output=True, text=True, timeout=250, check=False, cwd=tmp_path
    )
    assert done.returncode == 0 and "CUDA error" not in done.stderr, done.stderr[-3000:]
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["ranks"][-1]["limits"]["multiprocessors"] == SMS
    for log in (tmp_path / "out").glob("logs/*.log"):
        assert "CUDA error" not in log.read_text() and "Segmentation" not in log.read_text()


def test_a_limited_card_is_measured_as_one() -> None:
    def rates(limits: str | None) -> list[Any]:
        return list(profile_machine("cuda", seconds=3.0, on_stage=lambda _: None, limits=limits).machine.devices)

    for free, limited in zip(rates(None), rates(f"sms={SMS},memory_fraction=0.5"), strict=True):
        assert limited.multiprocessors == SMS < free.multiprocessors
        assert limited.memory_bytes == pytest.approx(free.memory_bytes / 2, rel=1e-6)
        # rates are not compared: other tests may be using the card
        assert limited.gemm_flops.keys() == free.gemm_flops.keys() and limited.uuid == free.uuid
