"""Processes joined by links of a chosen rate: network namespaces of this machine, a bridge, and a token bucket each.

Every rank lives in a namespace of its own with one interface, ``eth0``; a bridge in one more namespace joins them. All
interfaces are made inside these namespaces, so nothing of the machine's own network is seen or changed. What a rank
sends passes a token bucket (``tbf``); what it receives is limited by those who send. Namespaces carry the number of the
process that made them: they go when it ends, and what a killed one has left goes when the next one starts.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

PREFIX = "nugnn-links"
INTERFACE = "eth0"
_LATENCY_MS = 50
"""A packet that would wait longer for its tokens is dropped; TCP keeps its queue far shorter."""
_LEAST_BURST_BYTES = 128 << 10
"""Two packets of the largest size (64 KiB) that a sender hands over at once."""
_BURST_SECONDS = 1e-3
_NAMESPACES = Path("/run/netns")


def address(rank: int) -> str:
    """Of a rank, inside."""
    return f"10.77.0.{rank + 1}"


def namespaces(owner: int, num_ranks: int) -> list[str]:
    """Of the ranks, then that of the bridge."""
    return [*(f"{PREFIX}-{owner}-{rank}" for rank in range(num_ranks)), f"{PREFIX}-{owner}-hub"]


def build_commands(owner: int, num_ranks: int) -> list[list[str]]:
    """What makes the namespaces, the bridge and the interfaces.

    >>> [" ".join(command) for command in build_commands(7, 1)][3:6]  # doctest: +NORMALIZE_WHITESPACE
    ['ip -n nugnn-links-7-hub link set br0 up',
     'ip -n nugnn-links-7-0 link add eth0 type veth peer name rank0 netns nugnn-links-7-hub',
     'ip -n nugnn-links-7-hub link set rank0 master br0']
    """
    *own, hub = namespaces(owner, num_ranks)
    commands = [f"ip netns add {name}" for name in (*own, hub)]
    commands += [f"ip -n {hub} link add br0 type bridge", f"ip -n {hub} link set br0 up"]
    for rank, name in enumerate(own):
        commands += [
            f"ip -n {name} link add {INTERFACE} type veth peer name rank{rank} netns {hub}",
            f"ip -n {hub} link set rank{rank} master br0",
            f"ip -n {hub} link set rank{rank} up",
            f"ip -n {name} address add {address(rank)}/24 dev {INTERFACE}",
            f"ip -n {name} link set {INTERFACE} up",
            f"ip -n {name} link set lo up",
        ]
    return [command.split() for command in commands]


def teardown_commands(names: Sequence[str]) -> list[list[str]]:
    """What removes namespaces, and with them all interfaces inside."""
    return [["ip", "netns", "del", name] for name in names]


def rate_command(gbit_per_second: float | None) -> list[str]:
    """What limits, inside a rank's namespace, all it sends from then on; lifts the limit when None.

    >>> " ".join(rate_command(0.1))
    'tc qdisc replace dev eth0 root tbf rate 100000000bit burst 131072b latency 50ms'
    """
    if gbit_per_second is None:
        return f"tc qdisc replace dev {INTERFACE} root noqueue".split()
    rate = round(1e9 * gbit_per_second)
    burst = max(_LEAST_BURST_BYTES, round(rate / 8 * _BURST_SECONDS))
    return f"tc qdisc replace dev {INTERFACE} root tbf rate {rate}bit burst {burst}b latency {_LATENCY_MS}ms".split()


def why_not() -> str | None:
    """What keeps this process from making such links; None where nothing does."""
    if sys.platform != "linux":
        return "links are limited by network namespaces and tc, which are Linux's; run this on Linux"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"the program {tool} is not installed; install iproute2"
    if os.geteuid() != 0:
        return "network namespaces take root; run this as root, or in a container that gives CAP_NET_ADMIN to root"
    return None


def leftovers(names: Sequence[str], is_running: Callable[[int], bool]) -> list[str]:
    """Which of ``names`` are namespaces of processes that do not run any more.

    >>> leftovers(["nugnn-links-7-0", "nugnn-links-8-hub", "vpn", "nugnn-links-x-0"], lambda process: process == 8)
    ['nugnn-links-7-0']
    """
    found = [(name, re.fullmatch(rf"{PREFIX}-(\d+)-(?:\d+|hub)", name)) for name in names]
    return [name for name, match in found if match and not is_running(int(match[1]))]


class Lab:
    """Namespaces while a ``with`` block runs, and the processes in them.

    Args:
        num_ranks: Namespaces with an interface each.
        run: Runs a command and raises `subprocess.CalledProcessError` where it fails.

    Raises:
        RuntimeError: On entry, where namespaces or links cannot be made; nothing is left then.
    """

    def __init__(self, num_ranks: int, run: Callable[[list[str]], Any] | None = None) -> None:
        self._num_ranks, self._run = num_ranks, _checked if run is None else run
        self._names = namespaces(os.getpid(), num_ranks)
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Lab:
        there = [path.name for path in _NAMESPACES.iterdir()] if _NAMESPACES.is_dir() else []
        self._remove(leftovers(there, _is_running))
        try:
            for command in build_commands(os.getpid(), self._num_ranks):
                self._run(command)
        except subprocess.CalledProcessError as error:
            self._remove(self._names)
            said = (error.stderr or b"").decode(errors="replace").strip()
            raise RuntimeError(f"{' '.join(error.cmd)} failed: {said}; links of limited rate need it") from error
        except BaseException:
            self._remove(self._names)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would leave half of them
        try:
            self._end_processes()
        finally:
            self._remove(self._names)
            signal.signal(signal.SIGINT, before)

    def start(self, rank: int, command: Sequence[str], log: Path, environment: dict[str, str]) -> None:
        """Start a process in the namespace of ``rank``.

        It is in a session of its own, out of reach of Ctrl-C; its standard input ends when this process does.
        """
        with open(log, "wb") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self._names[rank], *command],
                stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT,
                env=environment, start_new_session=True,
            )  # fmt: skip
        self._processes.append(process)

    def codes(self) -> list[int | None]:
        """Of the processes: how each ended, None for one that runs."""
        return [process.poll() for process in self._processes]

    def _end_processes(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
            if process.stdin is not None:
                process.stdin.close()

    def _remove(self, names: Sequence[str]) -> None:
        """All of them, whatever becomes of each."""
        for command in teardown_commands(names):
            for pause in (0.0, 0.2, 1.0):
                time.sleep(pause)
                try:
                    self._run(command)
                    break
                except subprocess.CalledProcessError as error:
                    if not (_NAMESPACES / command[-1]).exists():
                        break
                    print(f"{' '.join(error.cmd)}: {(error.stderr or b'').decode(errors='replace')}", file=sys.stderr)


def _checked(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, start_new_session=True)  # Ctrl-C is for us alone


def _is_running(process: int) -> bool:
    return Path(f"/proc/{process}").exists()
