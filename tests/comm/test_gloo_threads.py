"""The threads in which gloo reads connections push nobody aside; a policy that somebody chose stays."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from nugnn.comm.gloo_threads import let_gloo_wait_its_turn
from nugnn.comm.groups import Ranks

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="the system has no such policy")


def _policies() -> dict[int, tuple[str, int]]:
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            thread = int(task.name)
            found[thread] = (task / "comm").read_text().strip(), os.sched_getscheduler(thread)
    return found


def _waiting(ranks: Ranks) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Of all threads, after one of gloo's was told by somebody else; those that others changed are as before again."""
    chosen = min(thread for thread, (name, _) in _policies().items() if name == "gloo_tcp_loop")
    before = os.sched_getscheduler(chosen)
    os.sched_setscheduler(chosen, os.SCHED_IDLE, os.sched_param(0))
    try:
        found = let_gloo_wait_its_turn()
        policies = _policies()
        of_gloo = [each for each in policies.values() if each[0] == "gloo_tcp_loop"]
        assert found == len(of_gloo) and policies[chosen][1] == os.SCHED_IDLE
        return [each for each in of_gloo if each[1] != os.SCHED_IDLE], [
            each for each in policies.values() if each[0] != "gloo_tcp_loop"
        ]
    finally:
        os.sched_setscheduler(chosen, before, os.sched_param(0))


def test_who_reads_connections_waits_its_turn_and_nobody_else(ranks: Any) -> None:
    for of_gloo, others in ranks.run(2, _waiting):
        assert len(of_gloo) >= 2 and {policy for _, policy in of_gloo} == {os.SCHED_BATCH}
        assert {policy for _, policy in others} == {os.SCHED_OTHER}
