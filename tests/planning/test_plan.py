"""Plans go to JSON and back unchanged; one of something else is refused with what differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nugnn.planning.datasheet import sheet_of
from nugnn.planning.plan import Baseline, CutFacts, DataFacts, Plan, PlanError, PlannedDevice, PlannedSizes, read_plan
from nugnn.planning.plan_parts import digest, parts_bytes, parts_path, read_parts

PARTS = np.array([0, 1, 0, 0, 1, 0])
FACTS = DataFacts(name="six", content="abc", nodes=6, edges=20, train=3, features=4, classes=2)
MODEL = {"model": "gcn", "layers": 2, "hidden": 64}


def device(uuid: str | None, sizes: PlannedSizes, **changes: Any) -> PlannedDevice:
    values: dict[str, Any] = {
        "host": "a",
        "name": "NVIDIA H200",
        "kind": "cuda",
        "uuid": uuid,
        "multiprocessors": 132,
        "source": "measured",
        "share": sizes.inner / 6,
        "sizes": sizes,
        "seconds": {"compute": 0.5, "halo": 0.25, "sync": 0.0, "wait": 0.25},
        "memory_bytes": 100,
        "memory_limit_bytes": 1000,
    }
    return PlannedDevice(**{**values, **changes})


DEVICES = (
    device("GPU-1", PlannedSizes(inner=4, edges=13, halo=2, sent=2, train=2)),
    device("GPU-2", PlannedSizes(inner=2, edges=7, halo=2, sent=2, train=1), sms=32),
)
PLAN = Plan(
    family="graph",
    shares_by="auto",
    devices=DEVICES,
    step_seconds=1.0,
    baselines=(Baseline(name="even", shares=(0.5, 0.5), step_seconds=1.5, fits=True),),
    halo="counted",
    data=FACTS,
    model=MODEL,
    settings={"precision": "fp32"},
    cut=CutFacts(partitioner="metis", seed=0, sha256=digest(parts_bytes(PARTS))),
    versions={"nugnn": "0"},
    made="2026-01-01T00:00:00Z",
)
HERE = [sheet_of("H200").as_profile().model_copy(update={"uuid": uuid}) for uuid in ("GPU-1", "GPU-2")]


def test_a_plan_comes_back_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(PLAN.to_json())
    again = read_plan(file)
    assert again == PLAN and json.loads(file.read_text())["schema"] == "nugnn.plan/1"
    assert again.shares == pytest.approx((4 / 6, 2 / 6)) and again.epoch_seconds == 1.0
    assert again.devices[1].limits.sms == 32 and again.devices[0].busy_seconds == 0.75
    assert not again.is_simulated
    assert again.devices[0].sizes.sizes.local == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"schema": "nugnn.plan/2"},
            r"schema is 'nugnn.plan/2', must be 'nugnn.plan/1'; make it with: nugnn plan --plan-out",
        ),
        ({"devices": []}, "devices is empty: give one device at least; make it with"),
        ({"speed": 1}, "unknown field 'speed'; known: schema, family, .*, made; make it with"),
        ({"step_seconds": -1}, "step_seconds is -1, must be 0 or more"),
        ({"step_seconds": "1"}, "step_seconds is '1', must be a number"),
        ({"family": "samples"}, "family is samples, and data has 6 nodes"),
        ({"data": {**FACTS.model_dump(), "samples": 9}}, "family is graph, and data has 9 samples"),
        ({"halo": "guessed"}, "halo is 'guessed', must be 'counted', 'expected' or 'none'"),
        ({"data": {**FACTS.model_dump(), "nodes": 7}}, "devices hold 6 of 7"),
        ({"baselines": [{**PLAN.baselines[0].model_dump(), "shares": [1.0]}]}, "baseline even has 1 share"),
        ({"devices": [{**DEVICES[0].model_dump(), "share": 0.1}, DEVICES[1].model_dump()]}, "add up to 0.43"),
        (
            {
                "devices": [
                    each.model_dump() | {"share": share} for each, share in zip(DEVICES, (0.3, 0.7), strict=True)
                ]
            },
            "of device 0 do not agree: its share is 0.3, and 4 of 6 nodes are 0.6667; make the plan anew, or",
        ),
        (
            {"cut": {"partitioner": "metis", "seed": 0, "sha256": "../../x"}},
            "cut.sha256 is '../../x', must be text like",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(json.loads(PLAN.to_json()) | change))
    with pytest.raises(PlanError, match=message) as raised:
        read_plan(file)
    assert str(raised.value).startswith(str(file)) and "\n" not in str(raised.value)
    with pytest.raises(PlanError, match="no such file; "):
        read_plan(tmp_path / "none.json")


def test_a_plan_is_printed_in_a_line_for_each_device() -> None:
    head, *lines = str(PLAN).split("\n")
    assert head == "six: 1 s an epoch, predicted"
    assert [line.split("%")[0].split()[-1] for line in lines] == ["66.7", "33.3"]
    assert all(len(line) <= 80 for line in (head, *lines)) and len(repr(PLAN)) < 80
    many = tuple(device(None, PlannedSizes(inner=1, edges=1, train=1), share=1 / 20) for _ in range(20))
    facts = FACTS.model_copy(update={"nodes": 20, "edges": 20, "train": 20})
    whole = PLAN.model_copy(update={"devices": many, "data": facts})
    assert str(whole).count("\n") == 17 and str(whole).endswith("and 4 devices more")


def test_a_plan_of_this_run_is_accepted() -> None:
    PLAN.check(FACTS, MODEL, HERE)
    PLAN.check(FACTS.model_copy(update={"name": "renamed", "content": None}), {}, [None, None])
    PLAN.check(FACTS, MODEL | {"dropout": 0.5}, HERE)  # which it does not know of


@pytest.mark.parametrize(
    ("data", "model", "devices", "message"),
    [
        ({"nodes": 7}, {}, HERE, r"it is for six as it was \(6 nodes\), and this run has six as it is \(7 nodes\)"),
        (
            {"name": "new", "edges": 2600, "features": 5},
            {},
            HERE,
            r"six \(20 edges, 4 .*has new \(2,600 edges, 5 features\)",
        ),
        ({"content": "other"}, {}, HERE, "as many nodes and edges as six as it was, but not the same"),
        ({}, {"hidden": 32}, HERE, "for gcn with hidden 64, and this run has gcn with hidden 32"),
        ({}, {}, HERE[::-1], "worker 0 has GPU-2, and was planned for GPU-1"),
        ({}, {}, [sheet_of("T4").as_profile(), None], "worker 0 has Tesla T4, and was planned for NVIDIA H200"),
        ({}, {}, HERE[:1], "is for 2 workers, and there are 1; give --workers 2"),
    ],
)
def test_a_plan_of_something_else_is_refused(data: Any, model: Any, devices: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        PLAN.check(FACTS.model_copy(update=data), MODEL | model, devices)


def test_parts_lie_beside_the_plan_and_are_held_against_it(tmp_path: Path) -> None:
    file = tmp_path / "my.json"
    file.write_text(PLAN.to_json())
    with pytest.raises(PlanError, match=r"my\.parts\.npy cannot be read: .*keep both in one folder"):
        read_parts(PLAN, file)
    parts = parts_path(file)
    parts.write_bytes(parts_bytes(PARTS))
    assert read_parts(PLAN, file).tolist() == PARTS.tolist()
    parts.write_bytes(parts_bytes(1 - PARTS))
    with pytest.raises(PlanError, match=r"is not what my\.json was made with"):
        read_parts(PLAN, file)
    parts.write_bytes(bytes(10_000))
    with pytest.raises(PlanError, match="is larger than the parts of 6 nodes"):
        read_parts(PLAN, file)
    for content, message in ((b"junk", "is no file of parts"), (parts_bytes(PARTS[:5]), "has shape")):
        parts.write_bytes(content)
        cut = CutFacts(partitioner="metis", seed=0, sha256=digest(content))
        with pytest.raises(PlanError, match=message):
            read_parts(PLAN.model_copy(update={"cut": cut}), file)
    swapped = parts_bytes(1 - PARTS)
    parts.write_bytes(swapped)
    cut = CutFacts(partitioner="metis", seed=0, sha256=digest(swapped))
    with pytest.raises(PlanError, match="does not give the devices as many nodes"):
        read_parts(PLAN.model_copy(update={"cut": cut}), file)


def test_parts_take_as_few_bits_as_do() -> None:
    assert parts_bytes(np.arange(3)) == parts_bytes(np.arange(3, dtype=np.int32))
    assert len(parts_bytes(np.arange(1000) % 256)) < 1200 < len(parts_bytes(np.arange(1000))) < 2200
