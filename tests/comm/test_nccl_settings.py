"""What NCCL is told, and when."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from nugnn.comm import groups
from nugnn.comm.groups import Ranks, join_ranks

REGISTERS = "NCCL_GRAPH_REGISTER"


def joined(monkeypatch: pytest.MonkeyPatch, numbers: list[int]) -> tuple[Ranks, list[str | None]]:
    """Ranks whose devices have ``numbers``, and the setting at each time that a group was made."""
    seen: list[str | None] = []

    def new_group(**_: Any) -> object:
        seen.append(os.environ.get(REGISTERS))
        return object()

    said: dict[str, Any] = {
        "is_initialized": True, "get_world_size": 2, "get_rank": 0, "is_nccl_available": True,
    }  # fmt: skip
    for name, value in said.items():
        monkeypatch.setattr(dist, name, lambda value=value: value)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(groups, "_device_numbers", lambda *_: numbers)
    monkeypatch.setattr(groups, "_of_all_ranks", lambda number, _: [number, number])
    monkeypatch.setattr(groups, "_all_read_each_other", lambda *_: True)
    for name in ("_first_on_the_gpu", "connect_directly", "_with_the_host"):
        monkeypatch.setattr(groups, name, mock.Mock(return_value=None))
    return join_ranks(device=torch.device("cpu")), seen


def test_recorded_exchanges_go_through_buffers_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REGISTERS, "x")
    monkeypatch.delenv(REGISTERS)  # and afterwards, whatever was set here
    ranks, seen = joined(monkeypatch, [7, 8])
    assert ranks.carries_cuda and seen == ["0", "0"]


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REGISTERS, "1")
    assert joined(monkeypatch, [7, 8])[1] == ["1", "1"]


def test_where_nothing_goes_through_nccl_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REGISTERS, "x")
    monkeypatch.delenv(REGISTERS)
    ranks, seen = joined(monkeypatch, [0, 8])
    assert not ranks.carries_cuda and seen == [None, None]
