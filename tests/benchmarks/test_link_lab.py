"""Links of limited rate: everything is made inside own namespaces, which go whatever happens."""

from __future__ import annotations

import math
import os
import subprocess
from pathlib import Path

import link_lab
import pytest
from hypothesis import given
from hypothesis import strategies as st
from link_lab import Lab, build_commands, namespaces, rate_command


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


@given(st.floats(0.01, 100))
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
