"""The tables of the page on communication are what the kept rows say."""

from __future__ import annotations

import pytest
import report_communication


def a_row(**changed: object) -> dict[str, object]:
    return {
        "kind": "gradient_sync", "way": "fp32", "link": "NVLink", "num_ranks": 2, "num_hosts": 1, "is_flat": False,
        "num_values": 1 << 25, "ms": 0.634, "machine": {"card": "a card", "code": "abc"},
    } | changed  # fmt: skip


def test_the_page_is_what_the_kept_rows_say() -> None:
    text = report_communication.PAGE.read_text(encoding="utf-8")
    assert report_communication.page(text, report_communication.tables(report_communication.KEPT)) == text


def test_a_page_without_its_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="0 times the marks"):
        report_communication.page("nothing", {"codec.py": ""})


def test_ways_are_columns_and_links_lines_and_the_last_row_counts() -> None:
    rows = [a_row(ms=9.0), a_row(way="4bit", ms=2.5), a_row(link="sockets", ms=46.71), a_row(), a_row(num_ranks=4)]
    table, of_four = report_communication.sync_tables(report_communication.latest(rows)).split("\n\n")[1::2]
    assert table.splitlines()[0] == "|  | fp32 | 4bit |"
    assert table.splitlines()[2:] == ["| NVLink | 0.63 | 2.50 |", "| sockets | 46.7 | - |"]
    assert of_four.splitlines()[2:] == ["| NVLink | 0.63 |"]


def test_rates_of_the_codec_stand_beside_the_copy_of_their_run() -> None:
    def row(bits: int, work: str, share: float, **changed: object) -> dict[str, object]:
        facts = {"kind": "codec", "bits": bits, "work": work, "num_values": 1 << 26, "bucket": 1024}
        facts |= {"copy_bytes_per_second": 4e12, "moved_bytes": 8e9, "median_ms": 2 / share}
        return facts | {"machine": {"card": "a card", "code": "abc"}} | changed

    rows = [row(6, "decode", 0.7), row(8, "encode, nearest", 0.95), row(6, "encode, nearest", 0.8)]
    rows.append(row(8, "decode", 0.5, error="wrong result"))
    text = report_communication.codec_tables(report_communication.latest(rows))
    assert text.startswith("a card, 64 Mi values in buckets of 1,024; a copy: 4.00 TB/s; code: abc.")
    assert text.splitlines()[-2:] == ["| 8 | 0.95 | - | - |", "| 6 | 0.80 | - | 0.70 |"]
