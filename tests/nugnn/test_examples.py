"""The examples, and the programs in README.md, do what they say."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from fork_server import ForkServer
from nugnn.check import ModelDiffers, run_check

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

_GRAPH = """
import nugnn, dgl, torch
from nugnn.datasets import load
data = load("digits")
graph = dgl.graph((data.src, data.dst), num_nodes=data.num_nodes)
graph.ndata["feat"], graph.ndata["label"] = data.features, data.labels
for split, ids in (("train", data.train_nodes), ("val", data.val_nodes), ("test", data.test_nodes)):
    graph.ndata[f"{split}_mask"] = torch.zeros(data.num_nodes, dtype=torch.bool).index_fill(0, ids, True)
graph = dgl.add_self_loop(graph)
"""
_RUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def _programs() -> list[str]:
    """Those of README.md, of a few epochs."""
    programs = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(programs) == 2 and "epochs=200" in programs[0] and "range(100)" in programs[1]
    return [program.replace("epochs=200", "epochs=2").replace("range(100)", "range(2)") for program in programs]


@pytest.mark.usefixtures("forked_workers")
def test_the_program_in_the_readme_that_fits_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That a script is one, is in `tests/nugnn/test_fit.py`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(f"{_GRAPH}\n{_programs()[0]}")
    result = runpy.run_path("program.py", run_name="__main__")["result"]
    assert result.logits.shape == (1797, 10) and len(result.history) == 2


def test_the_loop_in_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork_server: ForkServer) -> None:
    """Torchrun itself is in `tests/nugnn/test_session.py`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(f"{_programs()[1]}\nassert ranks.world_size == 2 and loss.isfinite()\n")
    done = fork_server.torchrun([*_RUN, str(tmp_path / "program.py")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("forked_workers")
def test_own_model_gives_the_same_on_one_worker_and_on_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["own_model.py", "3"])
    runpy.run_path(str(EXAMPLES / "own_model.py"), run_name="__main__")
    losses = [float(loss) for loss in re.findall(r"loss (\S+),", capsys.readouterr().out)]
    # Three steps in float32: sums of up to 1797 terms in another order are off by at most 1797 * 6e-8 = 1e-4 relative.
    assert len(losses) == 2 and losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_own_model_and_the_global_norm_pass_the_check() -> None:
    for name in ("own_model.py:Net", "global_norm.py:Global"):
        run_check(f"{EXAMPLES / name}")


def test_the_local_norm_is_named() -> None:
    with pytest.raises(ModelDiffers, match=r"^norm \(LocalPairNorm\)"):
        run_check(f"{EXAMPLES / 'global_norm.py:Local'}")
