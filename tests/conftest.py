"""Fixtures for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import nugnn  # noqa: F401
import without  # before anything of nugnn
from rank_pool import RankPool

# the first call of a kernel compiles it, and a suite that draws other examples every time cannot be trusted
settings.register_profile("nugnn", deadline=None, derandomize=True)
settings.load_profile("nugnn")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Worker processes for tests that need several ranks; started by the first that asks."""
    if "nugnn.seam" not in without.NAMES:
        from nugnn.seam import install

        install()
    pool = RankPool()
    yield pool
    pool.stop()
