"""Tables of steps over slow links: what was to be reached and is not is bold, the last row of a measurement counts."""

from __future__ import annotations

from dataclasses import asdict

import link_rows
import link_tables
from link_rows import Row

SENT = {"fp32": 87e6, "bf16": 43e6, "4bit": 11e6, "auto": 11e6}


def rows(ranks: int = 2, **seconds: dict[float | None, float]) -> list[Row]:
    """Of a model whose step takes the processor 0.05 s; seconds by way and rate."""
    return [
        Row(
            "transformer", ranks, rate, 0.09, way, took, took, took, 3, SENT[way], 0.0, 1.01 * SENT[way], 0.05,
            link_rows.predicted_seconds(0.05, SENT[way], rate), "4bit" if way == "auto" else None,
        )
        for way, by_rate in seconds.items()
        for rate, took in by_rate.items()
    ]  # fmt: skip


def _row(way: str, rate: float | None, seconds: float, sent: float, chosen: str | None = None) -> Row:
    local, spread = 0.5, (seconds, 0.9 * seconds, 12345.678)
    return Row(
        "mlp", 2, rate, 0.0956, way, *spread, 3, sent, 0.0, 1.002 * sent, local,
        link_rows.predicted_seconds(local, sent, rate), chosen,
    )  # fmt: skip


def test_tables_fit_and_say_who_won() -> None:
    rows = [
        _row(way, rate, seconds / (rate or 10), sent, chosen)
        for rate in (None, 0.1, 1.0)
        for way, seconds, sent, chosen in (
            ("fp32", 1.0, 87e6, None), ("bf16", 0.6, 43e6, None), ("4bit", 0.2, 11e6, None),
            ("auto", 0.21, 11e6, "4bit"), ("ddp powersgd", 0.3, 1e6, None), ("longest", 0.5, 1e6, "fp32+int8"),
        )
    ]  # fmt: skip
    lines = [line for rate in (None, 0.1, 1.0) for line in link_tables.table([row for row in rows if row.rate == rate])]
    assert all(len(line) <= 80 for line in lines), max(lines, key=len)
    assert sum("95 % of fp32 is communication" in line for line in lines) == 1
    said = list(link_tables.summary(rows))
    assert "auto at 0.1 Gb/s: 4bit, +5 % beside the fastest, 4bit" in said
    assert any(line.startswith("4bit beats fp32 at every rate; by the model") for line in said)
    assert any("1.002 to 1.002 times" in line for line in said)


def test_a_goal_that_is_missed_is_bold_where_communication_is_nearly_all_of_a_step() -> None:
    found = rows(
        fp32={None: 0.1, 0.1: 8.0, 1.0: 0.3}, bf16={None: 0.1, 0.1: 4.0, 1.0: 0.2},
        auto={None: 0.1, 0.1: 2.3, 1.0: 0.1}, **{"4bit": {None: 0.1, 0.1: 2.0, 1.0: 0.1}},
    )  # fmt: skip
    _, slow, fast, unlimited = link_tables.verdict_table({("transformer", 2): found})
    assert slow == ["transformer", "2", "0.1", "99%", "**4.00**", "**2.00**", "4bit", "**+15%**, 4bit"]
    assert fast == ["transformer", "2", "1", "83%", "3.00", "2.00", "4bit", "+0%, 4bit"]
    assert unlimited[2] == "-" and unlimited[4:6] == ["1.00", "1.00"]


def test_steps_stand_beside_the_model() -> None:
    head, line, auto = link_tables.step_table(rows(fp32={None: 0.1, 0.1: 8.0}, auto={None: 0.1, 0.1: 1.2345}))
    assert head == ["way", "MB sent", "0.1 Gb/s", "no limit"]
    assert line == ["`fp32`", "87.00", f"8,000 ({1000 * link_rows.predicted_seconds(0.05, 87e6, 0.1):,.0f})", "100"]
    assert auto == ["`auto`", "", "1,234 4bit", "100 4bit"]


def test_the_last_row_of_a_measurement_counts() -> None:
    first, second = rows(fp32={0.1: 8.0}), rows(fp32={0.1: 7.0})
    kept = link_tables.rows_by_model(
        [asdict(row) | {"code": "abc"} for row in (*first, *rows(4, fp32={0.1: 9.0}), *second)]
    )
    assert {case: [row.seconds for row in found] for case, found in kept.items()} == {
        ("transformer", 2): [7.0], ("transformer", 4): [9.0],
    }  # fmt: skip


def test_crossings_are_those_of_the_script() -> None:
    found = rows(fp32={None: 0.1, 0.1: 8.0, 1.0: 0.1}, **{"4bit": {None: 0.1, 0.1: 2.0, 1.0: 0.2}})
    _, line = link_tables.said_of({("transformer", 2): found})
    measured, _ = link_rows.crossovers(found)["4bit", "fp32"]
    assert 0.1 < measured < 1 and line[2] == f"{measured:.2g} Gb/s"
    assert line[4:] == ["-", "-", "1.010 to 1.010"]


def test_auto_is_held_against_gradients_of_no_fewer_bits_than_it_takes() -> None:
    took = {"int4": 0.5, "int2": 0.2, "auto": 0.44}
    for more, best in ({}, "**+120%**, int2"), ({"int2+4bit": 0.4}, "+10%, int2+4bit"):
        cell = {way: _row(way, 1.0, seconds, 1e6) for way, seconds in (took | more).items()}
        assert link_tables.auto_cells(cell) == ["-", best]
