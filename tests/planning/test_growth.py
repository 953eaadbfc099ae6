"""Where a growing cluster stops helping is said in numbers that are those of its rows."""

from __future__ import annotations

from nugnn.planning.growth import Growth, are_longer, said_of_left_out, speed_ups, where_it_stops


def row(devices: int, seconds: float | None, halo: float = 0.1) -> Growth:
    parts = {"compute": 1 - halo, "halo": halo, "sync": 0.0, "wait": 0.0}
    return Growth(devices=devices, hosts=1, epoch_seconds=seconds, parts=None if seconds is None else parts)  # type: ignore[arg-type]


def test_speed_ups_are_over_the_first_that_fits() -> None:
    rows = [row(1, None), row(2, 8.0), row(4, 4.0)]
    assert speed_ups(rows) == [None, 1.0, 2.0]
    assert where_it_stops(rows) == "an epoch gets shorter up to 4 devices, the most that were asked for"


def test_of_a_single_epoch_nothing_is_said_to_get_shorter() -> None:
    assert where_it_stops([row(1, 8.0)]) == (
        "1 device: no other number was asked for, so nothing tells what more would bring"
    )
    assert where_it_stops([row(1, None), row(2, None), row(4, 8.0, 0.6)]) == (
        "4 devices: only these hold the data, so nothing tells what more would bring; exchanges take more than half of "
        "it from 4 devices on"
    )


def test_where_exchanges_take_over_is_said() -> None:
    rows = [row(1, 8.0), row(2, 5.0, 0.6), row(4, 4.9, 0.9)]
    assert where_it_stops(rows) == (
        "more than 2 devices bring little: with 4, exchanges take 90% of the epoch and waiting 0%; exchanges take more "
        "than half of it from 2 devices on"
    )
    assert where_it_stops([row(1, None)]) == "no cluster of these sizes holds the data"


def test_devices_that_wait_for_a_few_are_said_not_to_pay() -> None:
    few = Growth(
        devices=16, hosts=2, epoch_seconds=0.9, parts={"compute": 0.5, "halo": 0.0, "sync": 0.0, "wait": 0.5}, used=8
    )
    assert where_it_stops([row(8, 1.0), few]) == (
        "more than 8 devices bring little: with 16, larger shares do not pay over the links between hosts: 8 hold "
        "nearly all, and the others wait"
    )


def test_cards_that_bring_nothing_do_not_end_what_the_next_ones_bring() -> None:
    """As with pairs of a fast and a slow card: the verdict is that of the whole table."""
    growing = [row(1, 95.4), row(2, 95.3), row(4, 48.2), row(8, 24.2)]
    assert where_it_stops(growing) == (
        "an epoch gets shorter up to 8 devices, the most that were asked for, though hardly with 2"
    )
    flat = [row(16, 24.1), row(32, 25.0), row(64, 23.5)]
    assert where_it_stops([*growing, *flat]) == (
        "an epoch gets shorter up to 8 devices, though hardly with 2; more than 8 devices bring little: with 16, "
        "exchanges take 10% of the epoch and waiting 0%"
    )
    assert where_it_stops([*growing, *flat, row(128, 11.0, 0.7)]).endswith(
        "hardly with 2 and with 16 to 64; exchanges take more than half of it from 128 devices on"
    )
    assert where_it_stops([row(1, 1.0), row(2, 1.0)]).startswith("more than 1 device bring little: with 2, ")


def test_many_small_gains_are_one_that_is_worth_having() -> None:
    assert where_it_stops([row(1, 1.0), row(2, 0.97), row(4, 0.94)]).startswith("an epoch gets shorter up to 4 devices")


def test_epochs_that_are_longer_than_with_fewer_devices_are_told() -> None:
    rows = [row(1, None), row(2, 4.0), row(4, 2.0), row(8, 3.0), row(16, 2.0), row(32, 1.0)]
    assert are_longer(rows) == [False, False, False, True, False, False]


def test_devices_that_bring_nothing_are_one_sentence_for_all_sizes() -> None:
    """It was one for each size: five times the same 350 characters."""
    rows = [row(1, 4.0), row(2, 2.0), row(4, 2.5), row(8, 3.0)]
    assert said_of_left_out(rows, {1: (), 2: (), 4: ("of 4 devices, ...",), 8: ()}) == ("of 4 devices, ...",)
    assert said_of_left_out(rows, {1: (), 2: ()}) == () == said_of_left_out([row(1, None)], {})
    (said,) = said_of_left_out(rows, {1: (), 2: (), 4: ("of 4 devices, ...",), 8: ("of 8 devices, ...", "alone")})
    assert said.startswith("of 4 and 8 devices not all are worth having: ")
    assert "The shortest epoch is that of 2 devices, 2 s; " in said
