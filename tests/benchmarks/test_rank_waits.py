"""What is turned off is off, and only as long as a way lasts; rows, and one tiny run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import rank_waits
from harness import read_rows
from rank_waits import OFF, way

from nugnn.comm import gloo_threads
from nugnn.comm.direct_sums import DirectSums
from nugnn.comm.groups import Ranks
from nugnn.worker_cores import own_cores, stay_on

ROOT = Path(__file__).resolve().parents[2]


def _state() -> dict[str, Any]:
    """Of what ways change, in this process."""
    readers = {os.sched_getscheduler(thread) for thread in gloo_threads.reading_threads()}
    return {"cores": own_cores(), "batch": readers, "direct": DirectSums.takes, "yield": os.sched_yield}


def _changed(ranks: Ranks) -> dict[str, set[str]]:
    """By way: what is another than before, of a process that was tied to one core."""
    all_cores = own_cores()
    os.environ["NUGNN_CORES"] = str(all_cores[0])
    stay_on(all_cores[:1])
    gloo_threads.let_gloo_wait_its_turn()
    try:
        before, found = _state(), {}
        for name, off in OFF.items():
            with way(off, all_cores):
                inside = _state()
            found[name] = {what for what in before if inside[what] != before[what]}
            assert _state() == before, name
        return found
    finally:
        del os.environ["NUGNN_CORES"]
        stay_on(all_cores)


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="the system has no such policy")
def test_a_way_turns_off_what_it_says_and_nothing_stays_off(ranks: Any) -> None:
    if len(own_cores()) < 2:
        pytest.skip("with one core, a process is tied to it in any case")
    cloudpickle.register_pickle_by_value(rank_waits)  # other processes do not know the folder of the benchmarks
    try:
        found = ranks.run(2, _changed)
    finally:
        cloudpickle.unregister_pickle_by_value(rank_waits)
    assert found == [{name: set(off) for name, off in OFF.items()}] * 2


def test_ratios_are_of_the_same_round(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {name: [2e-3, 4e-3, 6e-3] for name in OFF} | {"product": [1e-3, 4e-3, 2e-3]}
    row = {"case": "mlp", "load": "alone", "round_seconds": seconds}
    assert rank_waits.ratios(row, "none") == [2.0, 1.0, 3.0]
    assert rank_waits.line(row).split() == ["mlp", "alone", "2.0", *["2.00"] * 5]
    said = rank_waits.summary([row, {"case": "cnn", "load": "beside", "error": "out of memory"}])
    assert said[-1] == "1 rows without a time" and said[1].split()[-4:] == ["alone", "2.00", "2.00", "2.00"]


def test_workers_of_the_product_train_in_every_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    rows = tmp_path / "rows.jsonl"
    options = "--samples 1 --graphs 1 --rounds 2 --steps 1 --scale 0.02".split()
    assert rank_waits.run(rank_waits.parse([*options, "--rows", str(rows)])) == 0
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [(row["number"], row["load"]) for row in found] == [
        (n, load) for n in (0, 1) for load in ("alone", "beside")
    ]
    for row in found:
        assert set(row["round_seconds"]) == set(OFF)
        assert all(len(each) == 2 and min(each) > 0 for each in row["round_seconds"].values())


def test_the_page_says_what_the_kept_rows_say() -> None:
    rows = read_rows(ROOT / "benchmarks/rows/rank_waits")
    assert rows and not any("error" in row for row in rows)
    assert rank_waits.report(rows) in (ROOT / "docs/replayer.md").read_text(encoding="utf-8")
