"""The page on unequal devices is what the kept rows say."""

from __future__ import annotations

import report_unequal


def test_the_page_is_what_the_kept_rows_say() -> None:
    assert report_unequal.page(report_unequal.ROWS) == report_unequal.PAGE.read_text(encoding="utf-8")


def test_a_split_that_lost_is_named() -> None:
    def row(system: str, ms: float) -> dict[str, object]:
        facts = {"graph": "g", "model": "sage", "sms": 32, "alone_ms": [10.0, 30.0], "over_bound": ms / 7.5}
        facts |= {"gain_share": 0.5, "waits": [0.1, 0.2], "repeats": 10, "p20_ms": ms, "p80_ms": ms}
        return facts | {"system": system, "median_ms": ms, "machine": {"card": "a", "code": "c", "torch": "t"}}

    text = report_unequal.splits_table(
        [row("even", 20.0), row("flops", 10.0), row("bandwidth", 15.0), row("auto", 12.5), row("tuned", 8.0)]
    )
    assert "behind shares by FLOP/s** on SAGE 32" in text and "`tuned` beside the best of the three: 1.25" in text
    assert "| g | SAGE | 32 | 10.0 / 30.0 | 20.0 | 10.0 | 15.0 | 12.5 | 8.0 | 1.25 | 1.07 | 50% | 10% / 20% |" in text
