"""Steps over links of limited rate: what is missing is said, and one tiny run in namespaces."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import link_lab
import links
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "links.py"


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(link_lab.sys, "platform", "linux")
    monkeypatch.setattr(link_lab.shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    assert "tc is not installed; install iproute2" in str(link_lab.why_not())
    monkeypatch.setattr(link_lab.shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(link_lab.os, "geteuid", lambda: 1000)
    assert "run this as root" in str(link_lab.why_not())
    assert links.main(["--ranks", "2"]) == 2
    assert capsys.readouterr().err.startswith("links.py: network namespaces take root")
    monkeypatch.setattr(link_lab.sys, "platform", "darwin")
    assert "run this on Linux" in str(link_lab.why_not())


TINY = ["--ranks=2", "--rates", "1", "--models", "gnn", "--nodes=600", "--seconds=0"]


def _of(process: int) -> list[str]:
    folder = Path("/run/netns")
    return [path.name for path in folder.iterdir() if f"-{process}-" in path.name] if folder.is_dir() else []


@pytest.mark.slow
def test_a_tiny_run_sends_what_it_counts(lab_here: None, tmp_path: Path) -> None:
    found = tmp_path / "rows.jsonl"
    assert links.main([*TINY, "--columns", "fp32", "int4", f"--json={found}"]) == 0
    assert _of(os.getpid()) == []
    rows = [json.loads(line) for line in found.read_text().splitlines()]
    assert [(row["rate"], row["way"]) for row in rows] == [
        (None, "fp32"), (None, "int4"), (1.0, "fp32"), (1.0, "int4"),
    ]  # fmt: skip
    for row in rows:  # some barriers besides, and headers
        assert row["sent_bytes"] < row["interface_bytes"] < 1.1 * row["sent_bytes"] + 50_000
        assert row["rounds"] == 3 and row["p20"] <= row["seconds"] <= row["p80"]
    assert rows[0]["halo_bytes"] / rows[1]["halo_bytes"] == pytest.approx(
        (1024 + 188) / (136 + 32)
    )  # rows of 256 and 47


@pytest.mark.slow
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing(lab_here: None, by: signal.Signals) -> None:
    process = subprocess.Popen([sys.executable, str(SCRIPT), *TINY], stdout=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while len(_of(process.pid)) < 3 and time.monotonic() < until:
        time.sleep(0.05)
    assert len(_of(process.pid)) == 3
    process.send_signal(by)
    assert process.wait(60) == {signal.SIGINT: 130, signal.SIGTERM: 143}[by]
    assert _of(process.pid) == []
