"""The shard cache: a change of any option is another entry (datasets-08)."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest
import torch

from nugnn.datasets.graph_data import GraphData
from nugnn.partition import cache
from nugnn.partition.cache import cached_shards, partition_key
from nugnn.partition.check import check_shards
from nugnn.partition.store import load_meta, load_shard, shard_file_name


@pytest.fixture
def data() -> GraphData:
    here = torch.arange(30)
    return GraphData(
        name="ring",
        num_nodes=30,
        src=torch.cat([here, (here + 1) % 30]),
        dst=torch.cat([(here + 1) % 30, here]),
        labels=here % 2,
        train_nodes=here[:10],
    )


BASE = {"data_hash": "d", "shares": [1, 2], "method": "metis", "seed": 0, "versions": {"pymetis": "1"}}


@pytest.mark.parametrize(
    "change",
    [
        {"data_hash": "e"},
        {"shares": [1, 3]},
        {"shares": [2, 1]},
        {"shares": [1, 2, 1]},
        {"method": "random"},
        {"seed": 1},
        {"parts": [0, 1]},
        {"parts": [1, 0]},
        {"edge_weights": [1.0, 2.0]},
        {"edge_weights": [1, 2]},
        {"node_weights": "degree"},
        {"node_weights": np.ones(4)},
        {"node_weights": np.ones((2, 2))},
        {"tolerance": 0.03},
        {"order": "auto"},
        {"versions": {"pymetis": "2"}},
        {"versions": {"pymetis": "1", "numpy": "2"}},
    ],
    ids=str,
)
def test_every_option_changes_the_key(change):
    assert partition_key(**BASE | change) != partition_key(**BASE)


def test_the_key_is_stable_and_arrays_count_by_content():
    assert partition_key(**BASE) == partition_key(**BASE | {"shares": (2.0, 4.0)})
    as_tensor = partition_key(**BASE, node_weights=torch.ones(4, dtype=torch.float64))
    assert as_tensor == partition_key(**BASE, node_weights=np.ones(4))
    keys = {partition_key(**BASE | {"edge_weights": weights}) for weights in ([1, 2], [2, 1], [1, 2, 1], None)}
    assert len(keys) == 4
    assert set(cache.tool_versions()) == {"nugnn", "pymetis", "numpy", "scipy"}


def test_datasets_08_the_same_options_hit_and_others_miss(data, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="nugnn.partition.cache")
    first = cached_shards(tmp_path, data, [2, 1])
    assert "partition cache miss" in caplog.text
    caplog.clear()
    stamp = (first / "meta.json").stat().st_mtime_ns
    assert cached_shards(tmp_path, data, [2, 1]) == first
    assert (first / "meta.json").stat().st_mtime_ns == stamp
    assert "partition cache hit" in caplog.text
    assert "miss" not in caplog.text
    shards = [load_shard(first, rank) for rank in range(2)]
    check_shards(shards)
    assert shards[0].num_inner == 20

    doubled = dataclasses.replace(
        data, src=torch.cat([data.src, data.src[:30]]), dst=torch.cat([data.dst, data.dst[:30]])
    )
    twice = cached_shards(tmp_path, doubled, [2, 1])
    three = cached_shards(tmp_path, data, [1, 1, 1])
    assert len({first, twice, three}) == 3
    assert load_meta(twice).num_edges == 90
    assert load_meta(first).num_edges == 60
    assert load_meta(three).num_parts == 3
    assert any("30 parallel edges" in note for note in load_meta(twice).notes)


@pytest.mark.parametrize("damage", ["meta gone", "shard gone", "shard cut", "other key"])
def test_an_unusable_entry_is_made_again(data, tmp_path, caplog, damage):
    caplog.set_level(logging.INFO, logger="nugnn.partition.cache")
    folder = cached_shards(tmp_path, data, [2, 1], method="random", seed=3)
    shard, meta = folder / shard_file_name(1, 2), folder / "meta.json"
    if damage == "meta gone":
        meta.unlink()
    elif damage == "shard gone":
        shard.unlink()
    elif damage == "shard cut":
        shard.write_bytes(shard.read_bytes()[:-1])
    else:
        meta.write_text(meta.read_text().replace(folder.name, "0" * 64))
    caplog.clear()
    assert cached_shards(tmp_path, data, [2, 1], method="random", seed=3) == folder
    assert "partition cache miss" in caplog.text
    assert load_shard(folder, 1).num_inner == 10
