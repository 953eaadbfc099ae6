"""The page on unequal devices is what the kept rows say."""

from __future__ import annotations

import pytest
import report_unequal
from unequal_figures import PLANNER


def test_the_page_is_what_the_kept_rows_say() -> None:
    assert report_unequal.page(report_unequal.ROWS) == report_unequal.PAGE.read_text(encoding="utf-8")


def row(system: str, ms: float, sms: int = 32, **more: object) -> dict[str, object]:
    facts = {"graph": "g", "model": "sage", "sms": sms, "alone_ms": [10.0, 30.0], "over_bound": ms / 7.5}
    facts |= {"gain_share": 0.5, "waits": [0.1, 0.2], "repeats": 10, "p20_ms": ms, "p80_ms": ms}
    facts |= {"system": system, "median_ms": ms, "machine": {"card": "a", "code": "c", "torch": "t"}}
    return facts | more


def splits(sms: int, auto: float, forecasts: tuple[float, ...], **more: object) -> list[dict[str, object]]:
    measured = [("even", 20.0), ("flops", 10.0), ("bandwidth", 15.0), ("auto", auto)]
    pairs = zip(measured, forecasts, strict=True)
    planned = [row(name, ms, sms, forecast_ms=said, over_halo_bound=1.5, **more) for (name, ms), said in pairs]
    return [*planned, row("tuned", 8.0, sms, forecast_ms=8.0, over_halo_bound=1.0, **more)]


STATIC = "20.0 | 10.0 | 15.0"


def old_and_random() -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    rows = [*splits(32, 12.5, (20.0, 10.0, 15.0, 12.0)), *splits(16, 9.0, (20.0, 10.0, 15.0, 9.0))]
    return rows, splits(32, 25.0, (20.0, 30.0, 30.0, 22.0))


def test_a_split_that_lost_is_shown_and_what_a_plan_keeps_stands_beside() -> None:
    first, second = report_unequal.splits_sections(*old_and_random()).split("\n### ")
    assert f"| 32 | 10.0 / 30.0 | {STATIC} | 12.5 (12.0) | 8.0 | flops | 1.00 | 1.33 | 1.50 | 50% |" in first
    assert f"| 16 | 10.0 / 30.0 | {STATIC} | 9.0 (9.0) | 8.0 | = | 1.11 | 1.20 | 1.50 | 50% |" in first
    assert "`plan` beside the best of the three: 1.00 to 1.11 times as fast" in first
    assert "`auto`: 0.80 to 1.11 times as fast" in first
    assert "10 of them, are off by 0.4% in the mean (-4.0% to +0.0%)" in first
    assert "the fastest of\nthe four in 2 of 2 cases, and elsewhere one that is at most 0.0% slower" in first
    assert "best of the three: 0.40 to 0.40 times as fast" in second


def test_where_the_products_planning_made_auto_it_is_the_plan_also_where_it_lost() -> None:
    new = [
        *splits(32, 12.5, (20.0, 10.0, 15.0, 12.0), planner=PLANNER),  # a plan that is slower, foreseen to be so
        *splits(16, 9.0, (20.0, 10.0, 15.0, 9.0), planner=PLANNER, gain_share=0.9),
    ]
    old, at_random = old_and_random()
    alone = report_unequal.splits_sections(new, at_random)
    assert f"| 32 | 10.0 / 30.0 | {STATIC} | 12.5 (12.0) | 8.0 | 0.80 | 1.67 | 1.50 | 50% |" in alone
    assert "`auto` beside the best of the three: 0.80 to 1.11 times as fast" in alone and "`plan`" not in alone
    assert "the fastest of the four in 1 of 2 cases, and elsewhere at most 25.0% slower" in alone
    assert "as this benchmark cuts them, in 1 cases" in alone
    assert "1 of 2 do, all with 16\nmultiprocessors." in alone
    assert "\nWith parts of which each ends as early as the other, when operators" in alone

    both = report_unequal.splits_sections([*new[:5], *old, *new[5:]], at_random)
    first, second = both.split("\n## ")
    assert alone.startswith(first)  # and of the same cases an older row took no newer one's place
    assert second.startswith("Two GPUs, one of them limited: parts that end together\n")
    assert "faster step, which the section above has." in second
    by_old = report_unequal.splits_sections(old, at_random)
    assert second[second.index("`over bound`") :] == by_old[by_old.index("`over bound`") :]


def test_a_planner_without_a_text_is_refused() -> None:
    old, at_random = old_and_random()
    with pytest.raises(ValueError, match=r"no text here: \['another'\]"):
        report_unequal.splits_sections([*old, row("auto", 1.0, planner="another")], at_random)
