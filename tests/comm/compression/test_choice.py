"""What ``auto`` takes: the fastest way by measured sums, a more exact one among equals, the same on all ranks."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any
from unittest import mock

import torch

from nugnn.comm.compression import choice, gradient_sync
from nugnn.comm.compression.choice import CANDIDATES, Choice, choose, decided
from nugnn.comm.compression.gradient_sync import GradientSync
from nugnn.comm.groups import Ranks


def test_the_most_exact_way_that_is_as_fast_as_any() -> None:
    def name(*seconds: float) -> str:
        return decided(dict(zip(CANDIDATES, seconds, strict=True)), 7).name

    assert name(1.0, 1.0, 1.0, 1.0) == "fp32" and name(1.04, 1.0, 1.0, 1.0) == "fp32"
    assert name(2.0, 1.0, 0.5, 0.25) == "4bit" and name(2.0, 1.0, 0.26, 0.25) == "8bit"
    assert name(0.5, 0.3, 0.9, 0.9) == "bf16"  # the codec costs more than the link saves


def _chosen(ranks: Ranks, size: int) -> Choice:
    with mock.patch.multiple(choice, _FIRST_VALUES=3000, _MOST_VALUES=5000, _ROUNDS=2):
        return choose({"a": torch.zeros(size, 100), "b": torch.zeros(5000)}, ranks)


def test_ways_are_measured_and_all_ranks_choose_alike(ranks: Any) -> None:
    first, *others = ranks.run(3, _chosen, 200)
    assert all(other == first for other in others)
    assert set(first.seconds) == set(CANDIDATES) and first.num_values == 20_000
    assert all(seconds > 0 for seconds in first.seconds.values())
    assert first.as_text().startswith(f"grad_sync auto: {first.name}; a sum of 20000 values takes fp32 ")
    for nothing in ranks.run(2, _chosen, 5):
        assert nothing == Choice("fp32", {}, 0) and "no tensor is large enough" in nothing.as_text()


def _kept(ranks: Ranks) -> list[Any]:
    named = {"a": torch.nn.Parameter(torch.zeros(40, 50))}
    first, second, plain = (GradientSync("auto", named, ranks) for _ in range(3))
    slow = {"fp32": 4.0, "bf16": 2.0, "8bit": 1.0, "4bit": 0.5}
    with mock.patch.object(gradient_sync, "choose", return_value=decided(slow, 2000)) as asked:
        said = [first.prepare(), first.prepare()]
        assert asked.call_count == 1
    with mock.patch.object(gradient_sync, "choose", side_effect=AssertionError("it was chosen before")):
        second.load(first.shared_state(), {})
        said.append(second.prepare())
    with mock.patch.object(gradient_sync, "choose", return_value=Choice("fp32", {}, 0)):
        plain.open(1.0)
    assert plain.shared_state() == {"choice": asdict(Choice("fp32", {}, 0))}
    return [said, second.report()["choice"]["name"], second.report()["wire"], plain.report()["wire"]]  # type: ignore


def test_a_resumed_run_does_as_was_chosen(ranks: Any) -> None:
    for said, *names in ranks.run(2, _kept):
        assert len(set(said)) == 1 and said[0].startswith(
            "grad_sync auto: 4bit; a sum of 2000 values takes fp32 4e+03 ms"
        )
        assert names == ["4bit", "4bit", "fp32"]
