"""Fixtures for all tests."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import nugnn  # noqa: F401
import without  # before anything of nugnn
from fork_server import ForkServer
from rank_pool import RankPool

# the first call of a kernel compiles it, and a suite that draws other examples every time cannot be trusted
settings.register_profile("nugnn", deadline=None, derandomize=True)
settings.load_profile("nugnn")


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a name finds does not depend on who runs the tests: those that need files name the folder themselves."""
    monkeypatch.delenv("NUGNN_DATA", raising=False)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """The process that ranks and workers are forked from."""
    server = ForkServer()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def ranks(fork_server: ForkServer) -> Iterator[RankPool]:
    """Worker processes for tests that need several ranks; started by the first that asks."""
    if "nugnn.seam" not in without.NAMES:
        from nugnn.seam import install

        install()
    pool = RankPool(fork_server)
    yield pool
    pool.stop()


@pytest.fixture
def forked_workers(fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """`nugnn.launch` forks its workers from a process that has imported what they need: for what workers compute.

    Laws of how the launcher starts workers, and one run of `nugnn.fit` of each kind, use interpreters of their own.
    """
    from nugnn import launch

    stands_for = SimpleNamespace(**{**vars(subprocess), "Popen": fork_server.popen})
    monkeypatch.setattr(launch, "subprocess", stands_for)
