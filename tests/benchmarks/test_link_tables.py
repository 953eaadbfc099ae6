"""Tables of steps over slow links: what was to be reached and is not is bold, the last row of a measurement counts."""

from __future__ import annotations

from dataclasses import asdict

import link_tables
import links

SENT = {"fp32": 87e6, "bf16": 43e6, "4bit": 11e6, "auto": 11e6}


def rows(ranks: int = 2, **seconds: dict[float | None, float]) -> list[links.Row]:
    """Of a model whose step takes the processor 0.05 s; seconds by way and rate."""
    return [
        links.Row(
            "transformer", ranks, rate, 0.09, way, took, took, took, 3, SENT[way], 0.0, 1.01 * SENT[way], 0.05,
            links.predicted_seconds(0.05, SENT[way], rate), "4bit" if way == "auto" else None,
        )
        for way, by_rate in seconds.items()
        for rate, took in by_rate.items()
    ]  # fmt: skip


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
    assert line == ["`fp32`", "87.00", f"8,000 ({1000 * links.predicted_seconds(0.05, 87e6, 0.1):,.0f})", "100"]
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
    measured, _ = links.crossovers(found)["4bit", "fp32"]
    assert 0.1 < measured < 1 and line[2] == f"{measured:.2g} Gb/s"
    assert line[4:] == ["-", "-", "1.010 to 1.010"]
