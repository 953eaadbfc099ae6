"""Groups of ranks: what goes wrong is told at once, and what stands still shows where."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import worker_groups


def work(ranks: Any, item: str) -> int:
    if ranks.rank == 1:
        if item == "dies":
            os._exit(7)
        if item == "fails":
            raise ArithmeticError("of rank 1")
    if not item.startswith("/"):
        time.sleep(600)  # rank 0 waits for its peer
    if ranks.rank == 1:
        stand_still(item)
    return int(ranks.rank)


def stand_still(said: str) -> None:
    """Until the file ``said`` names this function."""
    end = time.monotonic() + 120
    while "stand_still" not in Path(said).read_text() and time.monotonic() < end:
        time.sleep(0.01)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    made = worker_groups.Group(work, 2, threads=1)
    yield made
    made.stop()


@pytest.mark.parametrize(("what", "told"), [("dies", "died"), ("fails", "ArithmeticError: of rank 1")])
def test_nobody_waits_for_the_peers_of_a_rank_that_failed(group: Any, what: str, told: str) -> None:
    begin = time.monotonic()
    with pytest.raises(worker_groups.WorkFailed, match=told):
        group.run(what)
    assert time.monotonic() - begin < 120  # rank 0 would go on for 600


def test_ranks_that_stand_still_show_their_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_groups, "_PATIENCE_SECONDS", 1.0)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    before = os.dup(2)
    with open(tmp_path / "said", "wb") as file:
        os.dup2(file.fileno(), 2)  # what ranks are started with
        try:
            group = worker_groups.Group(work, 2, threads=1)
        finally:
            os.dup2(before, 2)
            os.close(before)
    try:
        assert group.run(str(tmp_path / "said")) == [0, 1]
    finally:
        group.stop()
    assert "in stand_still" in (tmp_path / "said").read_text()


def test_a_rank_that_never_answers_is_given_up(group: Any) -> None:
    with pytest.raises(worker_groups.WorkFailed, match="no answer of"):
        group.run("waits", give_up_seconds=1.0)
