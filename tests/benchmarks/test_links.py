"""Links of limited rate: the arithmetic of the model, namespaces that go whatever happens, and one tiny run in them."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import link_lab
import links
import pytest
from hypothesis import given
from hypothesis import strategies as st
from link_lab import Lab, build_commands, namespaces, rate_command

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "links.py"
seconds, sizes, rates = st.floats(1e-3, 10), st.floats(1e3, 1e9), st.floats(0.01, 100)


@given(local=seconds, sent=sizes, more_local=seconds, share=st.floats(0.01, 0.99))
def test_ways_take_the_same_time_where_they_cross(local: float, sent: float, more_local: float, share: float) -> None:
    exact, short = (local, sent), (local + more_local, share * sent)
    rate = links.predicted_crossover(exact, short)
    at_rate = [links.predicted_seconds(*side, rate) for side in (exact, short)]
    assert at_rate[0] == pytest.approx(at_rate[1], rel=1e-9)
    assert links.predicted_seconds(*short, rate / 2) < links.predicted_seconds(*exact, rate / 2)
    assert links.predicted_seconds(*short, 2 * rate) > links.predicted_seconds(*exact, 2 * rate)


def test_who_sends_less_and_computes_less_always_wins() -> None:
    assert links.predicted_crossover((1.0, 100.0), (1.0, 50.0)) == math.inf
    assert links.predicted_crossover((1.0, 50.0), (2.0, 100.0)) == 0
    assert links.predicted_crossover((1.0, 50.0), (0.5, 100.0)) == 0  # it wins above a rate, if at all


@given(local=seconds, more_local=seconds, crossing=st.floats(0.2, 5))
def test_what_is_measured_crosses_between_the_right_rates(local: float, more_local: float, crossing: float) -> None:
    sent = 1e9
    saved = crossing * links.PAYLOAD_SHARE * 1e9 * more_local / 8
    exact = {rate: links.predicted_seconds(local, sent + saved, rate) for rate in (0.1, 0.3, 1.0, 3.0, 10.0)}
    short = {rate: links.predicted_seconds(local + more_local, sent, rate) for rate in exact}
    found = links.measured_crossover(exact, short)
    below = max(rate for rate in exact if rate <= crossing)
    above = min(rate for rate in exact if rate >= crossing)
    assert below * (1 - 1e-9) <= found <= above * (1 + 1e-9)


def test_crossings_beyond_the_rates_are_said_to_be_there() -> None:
    assert links.measured_crossover({0.1: 2, 1: 2}, {0.1: 1, 1: 1}) == math.inf
    assert links.measured_crossover({0.1: 1, 1: 1}, {0.1: 2, 1: 2}) == 0


def _row(way: str, rate: float | None, seconds: float, sent: float, chosen: str | None = None) -> links.Row:
    local, spread = 0.5, (seconds, 0.9 * seconds, 12345.678)
    return links.Row(
        "mlp", 2, rate, 0.0956, way, *spread, 3, sent, 0.0, 1.002 * sent, local,
        links.predicted_seconds(local, sent, rate), chosen,
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
    lines = [line for rate in (None, 0.1, 1.0) for line in links.table([row for row in rows if row.rate == rate])]
    assert all(len(line) <= 80 for line in lines), max(lines, key=len)
    assert sum("95 % of fp32 is communication" in line for line in lines) == 1
    said = list(links.summary(rows))
    assert "auto at 0.1 Gb/s: 4bit, +5 % beside the fastest, 4bit" in said
    assert any(line.startswith("4bit beats fp32 at every rate; by the model") for line in said)
    assert any("1.002 to 1.002 times" in line for line in said)


def test_everything_is_made_inside_own_namespaces() -> None:
    names = namespaces(7, 3)
    commands = build_commands(7, 3)
    assert [command for command in commands if command[:3] == ["ip", "netns", "add"]] == [
        ["ip", "netns", "add", name] for name in names
    ]
    for command in commands[len(names) :]:
        assert command[:2] == ["ip", "-n"] and command[2] in names
    pairs = [command for command in commands if "veth" in command]
    assert len(pairs) == 3 and all(command[-2:] == ["netns", names[-1]] for command in pairs)
    assert len({link_lab.address(rank) for rank in range(200)}) == 200


@given(rates)
def test_the_bucket_holds_two_of_the_largest_packets_and_a_millisecond(rate: float) -> None:
    words = rate_command(rate)
    burst, bits = (int(words[words.index(name) + 1].rstrip("bit")) for name in ("burst", "rate"))
    assert bits == round(1e9 * rate)
    assert burst >= max(2 * 65536, math.floor(bits / 8 * 1e-3))
    assert burst / (bits / 8) <= max(1.01e-3, 131072 / (bits / 8))  # no more than that rides along for free


class Commands:
    """Notes what it is given, and which namespaces are there; one command may fail or be interrupted."""

    def __init__(self, stops_at: int | None = None, by: type[BaseException] | None = None) -> None:
        self.there: set[str] = set()
        self._count, self._stops_at, self._by = 0, stops_at, by

    def __call__(self, command: list[str]) -> None:
        self._count += 1
        if self._count - 1 == self._stops_at:
            if self._by is KeyboardInterrupt:
                raise KeyboardInterrupt
            raise subprocess.CalledProcessError(2, command, stderr=b"Operation not permitted")
        if command[:3] == ["ip", "netns", "add"]:
            self.there.add(command[3])
        if command[:3] == ["ip", "netns", "del"]:
            self.there.discard(command[3])


@pytest.mark.parametrize("ends_by", [None, RuntimeError, KeyboardInterrupt, SystemExit])
def test_namespaces_go_however_the_block_ends(ends_by: type[BaseException] | None, no_leftovers: None) -> None:
    commands = Commands()
    try:
        with Lab(2, commands):
            assert commands.there == set(namespaces(os.getpid(), 2))
            if ends_by is not None:
                raise ends_by
    except (RuntimeError, KeyboardInterrupt, SystemExit) as error:
        assert type(error) is ends_by
    assert commands.there == set()


@pytest.mark.parametrize("stops_at", [0, 2, 5, 16])
def test_namespaces_go_when_one_cannot_be_made(stops_at: int, no_leftovers: None) -> None:
    commands = Commands(stops_at, subprocess.CalledProcessError)
    with pytest.raises(RuntimeError, match=r"^ip .* failed: Operation not permitted"), Lab(2, commands):
        pass
    assert commands.there == set()
    commands = Commands(stops_at, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt), Lab(2, commands):
        pass
    assert commands.there == set()


@pytest.fixture
def no_leftovers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No namespaces of this machine are looked at."""
    monkeypatch.setattr(link_lab, "_NAMESPACES", tmp_path)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(link_lab.sys, "platform", "linux")
    monkeypatch.setattr(link_lab.shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    assert "tc is not installed; install iproute2" in str(link_lab.why_not())
    monkeypatch.setattr(link_lab.shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(link_lab.os, "geteuid", lambda: 1000)
    assert "run this as root" in str(link_lab.why_not())
    assert links.main(["--ranks", "2"]) == 2
    assert capsys.readouterr().err.startswith("links.py: network namespaces take root")
    monkeypatch.setattr(link_lab.sys, "platform", "darwin")
    assert "run this on Linux" in str(link_lab.why_not())


TINY = ["--ranks=2", "--rates", "1", "--models", "gnn", "--nodes=600", "--seconds=0"]


def _of(process: int) -> list[str]:
    folder = Path("/run/netns")
    return [path.name for path in folder.iterdir() if f"-{process}-" in path.name] if folder.is_dir() else []


@pytest.mark.slow
def test_a_tiny_run_sends_what_it_counts(lab_here: None, tmp_path: Path) -> None:
    found = tmp_path / "rows.jsonl"
    assert links.main([*TINY, "--columns", "fp32", "int4", f"--json={found}"]) == 0
    assert _of(os.getpid()) == []
    rows = [json.loads(line) for line in found.read_text().splitlines()]
    assert [(row["rate"], row["way"]) for row in rows] == [
        (None, "fp32"), (None, "int4"), (1.0, "fp32"), (1.0, "int4"),
    ]  # fmt: skip
    for row in rows:  # some barriers besides, and headers
        assert row["sent_bytes"] < row["interface_bytes"] < 1.1 * row["sent_bytes"] + 50_000
        assert row["rounds"] == 3 and row["p20"] <= row["seconds"] <= row["p80"]
    assert rows[0]["halo_bytes"] / rows[1]["halo_bytes"] == pytest.approx(
        (1024 + 188) / (136 + 32)
    )  # rows of 256 and 47


@pytest.mark.slow
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing(lab_here: None, by: signal.Signals) -> None:
    process = subprocess.Popen([sys.executable, str(SCRIPT), *TINY], stdout=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while len(_of(process.pid)) < 3 and time.monotonic() < until:
        time.sleep(0.05)
    assert len(_of(process.pid)) == 3
    process.send_signal(by)
    assert process.wait(60) == {signal.SIGINT: 130, signal.SIGTERM: 143}[by]
    assert _of(process.pid) == []
