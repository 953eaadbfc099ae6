"""The checker: each law, broken on purpose, is reported by name."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from nugnn.datasets.graph_data import GraphData
from nugnn.partition.assign import partition_nodes
from nugnn.partition.check import check_exchange_counts, check_shards
from nugnn.partition.shard import Shard, build_shards


@pytest.fixture
def shards() -> list[Shard]:
    """A ring of 12 nodes with chords and a double edge, in 3 parts."""
    here = torch.arange(12)
    data = GraphData(
        name="ring",
        num_nodes=12,
        src=torch.cat([here, (here + 1) % 12, here, here[:1]]),
        dst=torch.cat([(here + 1) % 12, here, (here + 5) % 12, here[1:2]]),
        features=torch.arange(24.0).reshape(12, 2),
        labels=here % 3,
        train_nodes=here[::2],
        val_nodes=here[1::4],
        edge_data={"weight": torch.arange(37.0)},
    )
    parts = partition_nodes(12, data.src, data.dst, [5, 4, 3], method="random", seed=1)
    return build_shards(data, parts)


def test_sound_shards_pass(shards):
    check_shards(shards)
    assert min(shard.num_halo for shard in shards) >= 2


def flipped(rows):
    return rows.flip(0)


def first_set_to(value):
    def change(rows):
        changed = rows.clone()
        changed[0] = value
        return changed

    return change


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("global_node_ids", flipped, "global_node_ids is not strictly ascending"),
        ("global_node_ids", first_set_to(-1), "global_node_ids leaves the range 0..11"),
        ("global_node_ids", lambda rows: rows.int(), "global_node_ids must be int64"),
        ("global_edge_ids", first_set_to(99), "global_edge_ids leaves the range 0..36"),
        ("global_edge_ids", flipped, "not in the order of their global ids"),
        ("indptr", first_set_to(1), "indptr must run from 0"),
        ("indptr", lambda rows: torch.cat([rows[:1], rows[2:3], rows[1:2], rows[3:]]), "indptr decreases"),
        ("indices", first_set_to(1000), "indices leaves the range"),
        ("indices", torch.zeros_like, "a halo node is the source of no edge"),
        ("indices", lambda rows: rows.float(), "indices must be int32 or int64"),
        ("halo_global_ids", flipped, "halo_global_ids is not strictly ascending within a peer"),
        ("halo_global_ids", first_set_to(12), "halo_global_ids leaves the range"),
        ("recv_splits", lambda splits: (*splits[:-1], splits[-1] + 1), "recv_splits sum to"),
        ("recv_splits", lambda splits: splits[:-1], "recv_splits must be 3 counts"),
        ("send_splits", lambda splits: (*splits[:-1], splits[-1] + 1), "send_rows must be int64 of shape"),
        ("send_rows", flipped, "send_rows is not strictly ascending within a peer"),
        ("send_rows", first_set_to(11), "send_rows leaves the range"),
        ("out_degrees", lambda rows: rows + 1, "out_degrees on rank 0 are not those of the whole graph"),
        ("train_rows", lambda rows: rows.repeat(2), "train_rows is not strictly ascending"),
        ("train_rows", lambda rows: rows[1:], "the shards hold 5 train nodes, the whole graph 6"),
        ("val_rows", first_set_to(5), "val_rows leaves the range"),
        ("node_data", lambda data: {"feat": data["feat"][1:]}, "node_data 'feat' has"),
        ("edge_data", lambda data: {"weight": data["weight"][1:]}, "edge_data 'weight' has"),
        ("num_train_global", lambda total: 0, "the whole graph has 0"),
        ("num_val_global", lambda total: total + 1, "num_val_global is 3 on rank 1 and 4 on rank 0"),
        ("name", lambda name: "other", "name is 'ring' on rank 1 and 'other' on rank 0"),
        ("rank", lambda rank: 7, "the rank must lie in 0 to 2"),
    ],
)
def test_a_broken_law_is_named(shards, name, change, message):
    shards[0] = dataclasses.replace(shards[0], **{name: change(getattr(shards[0], name))})
    with pytest.raises(ValueError, match=message):
        check_shards(shards)


def test_missing_and_doubled_nodes_and_edges_are_found(shards):
    with pytest.raises(ValueError, match="expected ranks 0 to 2 in order, got"):
        check_shards(shards[:2])
    doubled = shards[1].global_edge_ids.clone()
    doubled[0] = next(edge for edge in shards[0].global_edge_ids.tolist() if edge < int(doubled[0]))
    shards[1] = dataclasses.replace(shards[1], global_edge_ids=doubled)
    with pytest.raises(ValueError, match=r"edge \d+ lies in [02] shards, it must lie in one"):
        check_shards(shards)


def test_other_rows_than_the_peer_expects_are_found(shards):
    sender = shards[0]
    first = sender.send_rows.split(list(sender.send_splits))[1]
    unsent = next(row for row in range(sender.num_inner) if row not in first.tolist() and row < int(first[-1]))
    changed = sender.send_rows.clone()
    start = sender.send_splits[0]
    changed[start : start + len(first)] = torch.cat([first[first != first[0]], torch.tensor([unsent])]).sort().values
    shards[0] = dataclasses.replace(sender, send_rows=changed)
    with pytest.raises(ValueError, match="rank 0 sends other nodes to rank 1 than that one expects"):
        check_shards(shards)


def test_halo_03_counts_that_do_not_match_name_the_pair_and_both_counts():
    with pytest.raises(ValueError, match="rank 0 plans to send 2 rows to rank 1, which plans to receive 3"):
        check_exchange_counts(recv_splits=[[0, 1], [3, 0]], send_splits=[[0, 2], [1, 0]])
    with pytest.raises(ValueError, match="rank 1 lists 1 send and 2 receive counts for 2 ranks"):
        check_exchange_counts(recv_splits=[[0, 1], [3, 0]], send_splits=[[0, 3], [1]])
    check_exchange_counts(recv_splits=[[0, 1], [3, 0]], send_splits=[[0, 3], [1, 0]])
