"""The examples, and the programs in README.md, do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.parametrize(
    ("before", "after", "command"),
    [
        (_GRAPH, "assert result.logits.shape == (1797, 10) and len(result.history) == 2", (sys.executable,)),
        ("", "assert ranks.world_size == 2 and loss.isfinite()", _TORCHRUN),
    ],
    ids=["fit", "own loop"],
)
def test_the_programs_in_the_readme_run(before: str, after: str, command: tuple[str, ...], tmp_path: Path) -> None:
    programs = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    program = programs[0 if before else 1]
    assert len(programs) == 2 and ("epochs=200" in program or "range(100)" in program)
    short = program.replace("epochs=200", "epochs=2").replace("range(100)", "range(2)")
    (tmp_path / "program.py").write_text(f"{before}\n{short}\n{after}\n")
    done = subprocess.run(
        [*command, str(tmp_path / "program.py")],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_own_model_gives_the_same_on_one_worker_and_on_two(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "own_model.py"), "3"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\S+),", done.stdout)]
    # Three steps in float32: sums of up to 1797 terms in another order are off by at most 1797 * 6e-8 = 1e-4 relative.
    assert len(losses) == 2 and losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_own_model_and_the_global_norm_pass_the_check() -> None:
    for name in ("own_model.py:Net", "global_norm.py:Global"):
        run_check(f"{EXAMPLES / name}")


def test_the_local_norm_is_named() -> None:
    with pytest.raises(ModelDiffers, match=r"^norm \(LocalPairNorm\)"):
        run_check(f"{EXAMPLES / 'global_norm.py:Local'}")
