"""Limits of devices: one spelling for each, and nothing out of range."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nugnn.planning.limits import DeviceLimits, format_limits, parse_limits

LIMITS = st.builds(
    DeviceLimits,
    sms=st.none() | st.integers(1, 10**6),
    memory_fraction=st.none() | st.floats(1e-6, 1.0),
    threads=st.none() | st.integers(1, 10**6),
)


@given(st.lists(LIMITS, min_size=1, max_size=5))
def test_what_is_written_is_read_back(limits: list[DeviceLimits]) -> None:
    assert parse_limits(format_limits(limits)) == tuple(limits)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"sms": value} for value in (0, -1, 1.0, True, "8")),
        *({"threads": value} for value in (0, -3, 2.5)),
        *({"memory_fraction": value} for value in (0, 0.0, -0.1, 1.0001, float("nan"), float("inf"), "half", True)),
    ],
    ids=str,
)
def test_what_is_out_of_range_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        DeviceLimits(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sms=0", "worker 0: sms is 0"),
        ("none;sms=1.5", "worker 1: sms is '1.5'"),
        ("none;memory_fraction=2", "worker 1: memory_fraction is 2.0; it must be"),
        ("threads=" + "9" * 30, "worker 0: threads is"),
        ("cores=3", "limit 'cores=3' is not known"),
        ("sms", "limit 'sms' has no value; write sms=VALUE"),
        ("", "worker 0: no limit is given; write none"),
        ("sms=8;", "worker 1: no limit is given"),
        ("sms=8,sms=9", "sms is given twice"),
        ("sms=8,none", "limit 'none' is not known"),
    ],
)
def test_a_wrong_text_is_refused_and_says_whose(text: str, said: str) -> None:
    with pytest.raises(ValueError, match="worker") as refused:
        parse_limits(text)
    assert said in str(refused.value)


def test_no_limits_have_a_name() -> None:
    assert str(DeviceLimits()) == "none" and DeviceLimits.parse(" none ").is_none
    assert not DeviceLimits(threads=1).is_none
