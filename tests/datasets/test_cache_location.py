"""The cache folder follows the environment: nuGNN's own variable, the desktop's, the home folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from nugnn.datasets.cache_location import cache_folder


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    monkeypatch.setenv("NUGNN_CACHE", "~/own")
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("NUGNN_CACHE")
    assert cache_folder() == tmp_path / "shared" / "nugnn" / "datasets"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / ".cache" / "nugnn" / "datasets"
