"""The page on unequal devices is what the kept rows say."""

from __future__ import annotations

import report_unequal


def test_the_page_is_what_the_kept_rows_say() -> None:
    assert report_unequal.page(report_unequal.ROWS) == report_unequal.PAGE.read_text(encoding="utf-8")


def row(system: str, ms: float, sms: int = 32, **more: object) -> dict[str, object]:
    facts = {"graph": "g", "model": "sage", "sms": sms, "alone_ms": [10.0, 30.0], "over_bound": ms / 7.5}
    facts |= {"gain_share": 0.5, "waits": [0.1, 0.2], "repeats": 10, "p20_ms": ms, "p80_ms": ms}
    facts |= {"system": system, "median_ms": ms, "machine": {"card": "a", "code": "c", "torch": "t"}}
    return facts | more


def test_a_split_that_lost_is_shown_and_what_the_product_planned_stands_apart() -> None:
    planned = {"forecast_ms": 12.0, "over_halo_bound": 1.5}
    static = [("even", 20.0), ("flops", 10.0), ("bandwidth", 15.0)]
    ours = [row(name, ms, **planned) for name, ms in (*static, ("auto", 12.5), ("tuned", 8.0))]
    earlier = [row(name, ms, sms) for sms in (32, 16) for name, ms in (*static, ("auto", 9.0))]
    random_parts = [row(name, ms, **planned) for name, ms in (*static, ("auto", 25.0), ("tuned", 9.0))]
    text = report_unequal.splits_section([*earlier, *ours], random_parts)
    first, second, third = text.split("\n### ")
    line = "| g | SAGE | 32 | 10.0 / 30.0 | 20.0 | 10.0 | 15.0 | 12.5 (12.0) | 8.0 | 0.80 | 1.67 | 1.50 | 50% |"
    assert line in first and "| 16 |" not in first
    assert "best of the three: 0.80 to 0.80 times as fast" in first and "off by -4.0% to -4.0%" in first
    assert "best of the three: 0.40 to 0.40 times as fast" in second
    assert "| 16 |" in third and "| 32 |" not in third and "| 9.0 | - | 1.11 |" in third
