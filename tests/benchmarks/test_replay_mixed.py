"""Mixed steps beside what is predicted of them: the casts that run are those, and rows are whole whatever fails."""

from __future__ import annotations

import dataclasses
import functools
import random
import time
from pathlib import Path
from typing import Any

import mixed_steps
import pytest
import replay_mixed
import torch
from harness import read_rows
from inside_bytes import Allocator, BytesClock, bytes_inside, table_of, with_bytes_inside
from mixed_steps import Mixed, casts_of, without_the_rule
from replay_cases import NUM_CLASSES, Case, Setting, sample_setting

from nugnn.planning.casts import with_formats
from nugnn.planning.part_sizes import PartSizes
from nugnn.planning.step_laps import StepLaps
from nugnn.planning.times_of_steps import times_of
from nugnn.planning.trace import OperatorRecord, StepTrace
from nugnn.traced_step import run_steps, sample_trainer, trace_sample_step

ROOT = Path(__file__).resolve().parents[2]
BATCH = PartSizes(batch=64)
MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"hidden": 64, "layers": 3, "norm": "none"},
    "cnn": {"widths": (8, 16)},
    "transformer": {"width": 32, "layers": 2},
}


def _setting(kind: str, ranks: int = 1, **options: Any) -> Setting:
    return sample_setting(Case("samples", kind, MODELS[kind] | options, "fp32", BATCH, ((1.0, 1.0),)), "cpu", ranks)


def _recorded(setting: Setting, formats: dict[str, str], ranks: int = 1) -> StepTrace:
    return trace_sample_step(Mixed(setting.model, formats), setting.sample, num_classes=NUM_CLASSES, ranks=ranks)


@pytest.mark.parametrize(
    ("kind", "ranks", "options"),
    [*((kind, 1, {}) for kind in MODELS), ("mlp", 2, {"norm": "batch"}), ("cnn", 2, {}), ("transformer", 2, {})],
)
def test_the_step_that_runs_is_the_one_that_is_predicted(kind: str, ranks: int, options: dict[str, Any]) -> None:
    """On two ranks the statistics of batch norm are both ranks', and all that makes them is in their format."""
    setting = _setting(kind, ranks, **options)
    for seed in range(3):
        formats = mixed_steps.drawn_formats(setting.model, random.Random(seed))
        ran, said = _recorded(setting, formats, ranks).at(BATCH), with_formats(setting.trace, formats).at(BATCH)
        assert casts_of(ran) == casts_of(said)
        assert {each[:3] for each in casts_of(ran)} >= {
            ("forward", "float32", "bfloat16"), ("backward", "bfloat16", "float32"),
        }  # fmt: skip
        products = [
            [(r.op, r.phase, r.outputs[0].dtype) for r in t.operators if r.kind == "product"] for t in (ran, said)
        ]
        assert products[0] == products[1] and len({dtype for *_, dtype in products[0]}) == 2
        assert ran.saved_bytes() == said.saved_bytes() != setting.trace.saved_bytes(BATCH)
        assert said.peak_bytes() == pytest.approx(ran.peak_bytes(), rel=0.02)


def test_without_the_rule_everything_else_stays_in_float32() -> None:
    setting = _setting("mlp")
    formats = {"layers.1/linear": "bfloat16", "layers.4/linear": "bfloat16"}
    with_rule, without = (
        with_formats(setting.trace, each).at(BATCH) for each in (formats, without_the_rule(setting.trace, formats))
    )
    relu = [[r.outputs[0].dtype for r in trace.operators if r.op == "aten.relu"] for trace in (with_rule, without)]
    assert relu == [["bfloat16"] * 2, ["float32"] * 2]
    counts = [sum(casts_of(trace).values()) for trace in (with_rule, without)]
    assert counts[1] == counts[0] + 4  # between the two layers, there and back, of values and of gradients
    assert casts_of(_recorded(setting, formats).at(BATCH)) == casts_of(with_rule)


def test_a_step_of_one_format_is_as_ever_and_a_mixed_one_near_it() -> None:
    setting = _setting("cnn", dropout=0.0)  # whose masks follow the names of modules
    formats = dict.fromkeys(["features.3/conv", "classify/linear"], "bfloat16")
    losses, gradients = [], []
    for model in (setting.model, Mixed(setting.model, {}), Mixed(setting.model, formats)):
        trainer = sample_trainer(model, setting.sample, BATCH, num_classes=NUM_CLASSES)
        losses.append(float(run_steps(trainer, 1)[0]))
        gradients.append([p.grad for p in trainer.model.parameters()])
    assert losses[0] == losses[1] != losses[2] == pytest.approx(losses[0], rel=0.01)
    assert all(torch.equal(a, b) for a, b in zip(*gradients[:2], strict=True))
    assert all(x.dtype is torch.float32 for x in gradients[2])


def test_weights_in_another_format_are_let_go_when_backward_ends() -> None:
    model = Mixed(_setting("mlp").model, {"layers.1/linear": "bfloat16"})
    casts: list[list[torch.Tensor]] = []
    made = mixed_steps._Formats.__init__

    def seen(self: Any, formats: Any, own: list[torch.Tensor]) -> None:
        casts.append(own)
        made(self, formats, own)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixed_steps._Formats, "__init__", seen)
        out = model(torch.randn(8, 784))
    assert [x.dtype for x in casts[0]] == [torch.bfloat16] * 2
    out.sum().backward()
    assert casts == [[]]


def test_rows_are_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows_file = tmp_path / "rows.jsonl"
    arguments = "--count 2 --tests 1 --rounds 3 --batch-scale 0.2 --clock thread --seed 1 --rows"
    rows = replay_mixed.main([*arguments.split(), str(rows_file)])
    assert len(rows) == len(rows_file.read_text().splitlines()) == 2
    for row in rows:
        assert "error" not in row
        assert 0.4 < row["with_seconds"] / row["measured_seconds"] < 2.5  # other processes may be at work
        assert row["with_peak_bytes"] == pytest.approx(row["measured_peak_bytes"], rel=0.1)
        assert 0 < row["cast_seconds"] < row["with_seconds"]
        assert row["fp32_casts"] == 0 < row["with_casts"] and row["formats"]
        assert set(row["ladders"]) == {"fp32", "bf16"}
    table = capsys.readouterr().out[-len(replay_mixed.summary(rows)) - 1 :]
    assert "| all | 2 | 2 | 0 | " in table
    assert replay_mixed.main(["--report", str(rows_file)])[0]["case"] == rows[0]["case"]
    assert capsys.readouterr().out == table


def test_what_fails_is_a_row_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [each.name for each in replay_mixed.configurations(3, 5, 1, 0.1, "cpu")]
    started: list[str] = []

    def run(drawn_one: replay_mixed.Drawn, *others: Any) -> None:
        started.append(drawn_one.name)
        raise RuntimeError("as arranged")

    monkeypatch.setattr(replay_mixed, "run", run)
    arguments = "--count 3 --tests 1 --batch-scale 0.1 --seed 5".split()
    assert [row["error"] for row in replay_mixed.main(arguments)] == 3 * ["RuntimeError: as arranged"]
    assert started == names
    rows = replay_mixed.main([*arguments, "--budget", "0"])
    assert [(row["case"], row["error"]) for row in rows] == [(name, "not begun within 0 s") for name in names]
    assert len(started) == 3


def test_on_a_gpu_steps_that_cannot_be_recorded_run_as_ever(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (one,) = replay_mixed.configurations(1, 1, 1, 0.1, "cpu")
    step = replay_mixed.settings_of(one, "cpu")
    told = step.mixed.trace.model_copy(update={"device": "cuda"})
    step = dataclasses.replace(step, mixed=dataclasses.replace(step.mixed, trace=told))
    nothing = Allocator(lambda: 0, lambda: 0, lambda: None)
    monkeypatch.setattr(replay_mixed, "bytes_inside", functools.partial(bytes_inside, allocator=nothing))
    found = replay_mixed._measured(step, 2, time.thread_time, torch.device("cpu"))
    assert "this worker does not compute on a GPU" in capsys.readouterr().out
    assert found.are_captured == [False] and found.seconds[0] > 0
    assert [[sizes for sizes, _ in ladder] for ladder in found.ladders] == 2 * [list(step.mixed.ladder)]
    assert found.inside is not None
    trace = step.single.trace.at(step.mixed.tests[0])
    assert with_bytes_inside(trace, found.inside) == trace


def test_bytes_inside_are_those_beyond_what_an_operator_finds_or_leaves() -> None:
    held, most = iter((100, 160, 160, 40)), iter((190, 165))
    forgotten: list[bool] = []
    clock = BytesClock(Allocator(lambda: next(held), lambda: next(most), lambda: forgotten.append(True)))
    clock.open()
    for number in range(2):
        clock.begin(number)
        clock.end()
    assert clock.close() == [30.0, 5.0] and len(forgotten) == 2


def test_operators_of_a_mixed_step_take_inside_what_they_took_in_the_step_of_their_format() -> None:
    setting, names = _setting("cnn"), ["features.3/conv", "classify/linear"]
    all_half = dict.fromkeys(mixed_steps.names_of(setting.model), "bfloat16")
    traces, each_sample = [setting.trace, _recorded(setting, all_half)], [10_000_000, 30_000_000]
    sizes = [PartSizes(batch=4), PartSizes(batch=64)]
    other = [(f"aten.other{number}", 1e9) for number in range(4)]  # a trainer may do more than is in the trace, or less
    found = []
    for trace, inside in zip(traces, each_sample, strict=True):
        ran = [[(r.op, inside * size.batch * _is_forward_conv(r)) for r in trace.operators[1:]] for size in sizes]
        found.append([(size, _in_two_lists([*other, *each])) for size, each in zip(sizes, ran, strict=True)])
    at = PartSizes(batch=16)
    some = torch.device("cpu")
    times = times_of(setting.trace, [(at, _laps(setting.trace))], some)
    table = table_of(traces, found, times)
    mixed = with_formats(setting.trace, dict.fromkeys(names, "bfloat16")).at(at)
    whole = with_bytes_inside(mixed, table)
    for record, live, more in zip(mixed.operators, mixed.live_bytes(), whole.live_bytes(), strict=True):
        is_half = record.outputs and record.outputs[0].dtype == "bfloat16"
        assert more - live == _is_forward_conv(record) * 16 * each_sample[bool(is_half)]


def _in_two_lists(pairs: list[tuple[str, float]]) -> tuple[list[str], list[float]]:
    return [name for name, _ in pairs], [value for _, value in pairs]


def _is_forward_conv(record: OperatorRecord) -> bool:
    return record.op == "aten.convolution"


def _laps(trace: StepTrace) -> StepLaps:
    return StepLaps(tuple(r.op for r in trace.operators), 2 * ((1e-3,) * len(trace.operators),), (1.0, 1.0), (1.0, 1.0))


def test_a_step_with_other_casts_has_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(model: torch.nn.Module, formats: dict[str, str]) -> Mixed:
        is_mixed = 0 < len(formats) < len(mixed_steps.names_of(model))
        return Mixed(model, dict(list(formats.items())[1:]) if is_mixed else formats)

    monkeypatch.setattr(replay_mixed, "Mixed", other)
    (row,) = replay_mixed.main("--count 1 --tests 1 --batch-scale 0.1 --seed 1".split())
    assert row["error"].startswith("ValueError: the step makes other casts than predicted")
    assert "measured_seconds" not in row


def test_configurations_follow_from_the_seed_alone() -> None:
    def drawn(count: int, seed: int) -> list[replay_mixed.Drawn]:
        return replay_mixed.configurations(count, seed, 2, 1.0, "cpu")

    twelve = drawn(12, 0)
    assert twelve[:5] == drawn(5, 0) != drawn(5, 1)
    assert len({(each.name, *sorted(each.formats)) for each in twelve}) == 12
    assert all(0 < len(each.formats) < each.num_operators for each in twelve)
    assert {each.case.kind for each in twelve} == {"mlp", "cnn", "transformer"}


def test_means_are_of_absolute_errors() -> None:
    rows = [
        {"case": case, "model": "mlp", "formats": {}, "measured_seconds": 1.0, "measured_peak_bytes": 100}
        | {"with_seconds": 1 + a, "without_seconds": 1 + b, "with_peak_bytes": 101, "without_peak_bytes": 90}
        for case, a, b in (("a", 0.1, 0.2), ("b", -0.3, 0.4))
    ]
    failed = {"case": "c", "model": "cnn", "formats": {}, "error": "out of memory"}
    figures = "2 | 2 | {} | 20.0 %, 30.0 % | 30.0 %, 40.0 % | 1.00 %, 1.00 % | 10.00 %, 10.00 % |"
    assert replay_mixed.summary([*rows, failed]).splitlines()[2:] == [
        "| cnn | 0 | 0 | 1 | - | - | - | - |",
        f"| mlp | {figures.format(0)}",
        f"| all | {figures.format(1)}",
    ]


def test_the_page_says_what_the_kept_rows_say() -> None:
    page = (ROOT / "docs/replayer.md").read_text(encoding="utf-8")
    rows = read_rows(ROOT / "benchmarks/rows/replay_mixed")
    files = sorted({row["file"] for row in rows})
    assert "cpu.jsonl" in files
    for file in files:
        assert replay_mixed.summary([row for row in rows if row["file"] == file]) in page
