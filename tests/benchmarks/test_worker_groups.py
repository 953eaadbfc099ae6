"""Groups of ranks: what goes wrong is told at once, and what stands still shows where."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import worker_groups


def work(ranks: Any, item: str) -> int:
    if ranks.rank == 1:
        if item == "dies":
            os._exit(7)
        if item == "fails":
            raise ArithmeticError("of rank 1")
        stand_still(3.0)
    elif item != "stands":
        stand_still(60.0)
    return int(ranks.rank)


def stand_still(seconds: float) -> None:
    time.sleep(seconds)


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
    assert time.monotonic() - begin < 50  # rank 0 would go on for 60


def test_ranks_that_stand_still_show_their_stacks(
    group: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker_groups, "_PATIENCE_SECONDS", 1.0)
    assert group.run("stands") == [0, 1]
    said = capfd.readouterr().err
    assert "stacks of rank 1" in said and "in stand_still" in said


def test_a_rank_that_never_answers_is_given_up(group: Any) -> None:
    with pytest.raises(worker_groups.WorkFailed, match="no answer of"):
        group.run("waits", give_up_seconds=1.0)
