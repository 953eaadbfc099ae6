"""Broken OGB folders: whatever a file holds, reading gives a graph or one ValueError that names the folder."""

from __future__ import annotations

import gzip
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from nugnn.datasets.ogb import read_ogb
from ogb_folders import write_binary_layout, write_csv_layout, write_mag_layout

ROUNDS = int(os.environ.get("NUGNN_FUZZ_ROUNDS", "500"))
"""Of the slow test."""
SPLICES = (
    b"-1",
    b"nan",
    b"1e9",
    b",",
    b"\n",
    b"\r",
    b"\x00",
    b"\xff",
    b'"',
    b"0x1",
    b" ",
    b"9" * 20,
    b"",
)


def broken(content: bytes, rng: np.random.Generator) -> bytes:
    """Cut, flipped, spliced or repeated."""
    place = int(rng.integers(len(content) + 1))
    kind = int(rng.integers(5))
    if kind == 0:
        return content[:place]
    if kind == 1:
        flipped = bytearray(content)
        for at in rng.integers(0, max(1, len(content)), int(rng.integers(1, 4))):
            if flipped:
                flipped[at] ^= 1 << int(rng.integers(8))
        return bytes(flipped)
    if kind == 2:
        return content[:place] + SPLICES[int(rng.integers(len(SPLICES)))] + content[place:]
    if kind == 3:
        end = min(len(content), place + int(rng.integers(1, 9)))
        return content[:place] + SPLICES[int(rng.integers(len(SPLICES)))] + content[end:]
    return content[:place] + content[place // 2 :]


def mutate(folder: Path, rng: np.random.Generator) -> None:
    """One file of the folder, outside or inside its compression."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = files[int(rng.integers(len(files)))]
    content = path.read_bytes()
    if path.suffix == ".gz" and rng.random() < 0.7:
        path.write_bytes(gzip.compress(broken(gzip.decompress(content), rng), 1))
    else:
        path.write_bytes(broken(content, rng))


def run(tmp_path: Path, layout: str, rounds: int) -> int:
    """How many of the broken folders were refused."""
    source = tmp_path / "source"
    if layout == "binary":
        write_binary_layout(source, compressed=True)
    elif layout == "mag":
        write_mag_layout(source)
    else:
        edges = np.array([[0, 1], [1, 2], [2, 2], [3, 0]])
        further = {"edge-feat": np.ones((4, 2)), "node_year": np.arange(4)}
        write_csv_layout(source, edges, 4, feat=np.ones((4, 3)) / 2, further=further)
    name = {"binary": "ogbn-papers100M", "mag": "ogbn-mag", "csv": "ogbn-arxiv"}[layout]
    refused = 0
    for seed in range(rounds):
        folder = tmp_path / "broken"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        mutate(folder, np.random.default_rng(seed))
        try:
            read_ogb(folder, name)
        except ValueError as error:
            refused += 1
            assert str(folder) in str(error), (seed, error)
            assert "\n" not in str(error), (seed, error)
    return refused


@pytest.mark.parametrize("layout", ["csv", "binary", "mag"])
def test_a_broken_file_is_a_value_error_that_names_it(tmp_path, layout):
    assert run(tmp_path, layout, 80) > 20


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", ["csv", "binary", "mag"])
def test_many_broken_files(tmp_path, layout):
    assert run(tmp_path, layout, ROUNDS) > ROUNDS // 5
