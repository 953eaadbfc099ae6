"""Shards on disk: what is written is read back bit for bit, and anything else is refused by file name."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from nugnn.datasets.graph_data import GraphData
from nugnn.partition import store
from nugnn.partition.assign import partition_nodes
from nugnn.partition.check import check_shards
from nugnn.partition.shard import Shard, build_shards, iter_shards
from nugnn.partition.store import ShardFileError, load_meta, load_shard, shard_file_name, write_shards

PARTS = 3
VERSIONS = {"tool": "1.0"}


def make(seed: int = 0, *, sparse: bool = True) -> tuple[GraphData, list[Shard]]:
    generator = torch.Generator().manual_seed(seed)
    src, dst = torch.randint(0, 40, (2, 200), generator=generator)
    features = torch.rand(40, 7, generator=generator) * (torch.rand(40, 7, generator=generator) < 0.4)
    data = GraphData(
        name="täst",
        num_nodes=40,
        src=src,
        dst=dst,
        features=features.to_sparse_csr() if sparse else features,
        labels=torch.randint(0, 2, (40, 3), generator=generator, dtype=torch.uint8),
        train_nodes=torch.arange(0, 20),
        val_nodes=torch.arange(20, 25),
        node_data={"a:b dense": torch.arange(40, dtype=torch.float16)},
        edge_data={"weight": torch.rand(200, 2, generator=generator), "kind": torch.arange(200) % 3 == 0},
    )
    assignment = partition_nodes(40, src, dst, [3, 2, 1], seed=seed)
    return data, build_shards(data, assignment)


@pytest.fixture
def folder(tmp_path):
    write_shards(tmp_path / "shards", make()[1], key="first", versions=VERSIONS, notes=["Merged 2 parallel edges."])
    return tmp_path / "shards"


def assert_same(left: Shard, right: Shard) -> None:
    for column in dataclasses.fields(Shard):
        first, second = getattr(left, column.name), getattr(right, column.name)
        if isinstance(first, torch.Tensor):
            assert first.dtype == second.dtype
            assert torch.equal(first, second), column.name
        elif isinstance(first, dict):
            assert first.keys() == second.keys()
            for name, rows in first.items():
                assert (rows.layout, rows.dtype, rows.shape) == (
                    second[name].layout,
                    second[name].dtype,
                    second[name].shape,
                )
                same = [rows.to_dense(), second[name].to_dense()] if rows.is_sparse_csr else [rows, second[name]]
                assert torch.equal(*same)
        else:
            assert first == second, column.name


@pytest.mark.parametrize("sparse", [False, True])
def test_what_is_written_is_read_back(tmp_path, sparse):
    data, shards = make(sparse=sparse)
    assignment = partition_nodes(40, data.src, data.dst, [3, 2, 1])
    write_shards(tmp_path, iter_shards(data, assignment), key="k", versions=VERSIONS, notes=["A note."])
    loaded = [load_shard(tmp_path, rank) for rank in range(PARTS)]
    check_shards(loaded)
    for written, read in zip(shards, loaded, strict=True):
        assert_same(written, read)
    meta = load_meta(tmp_path)
    assert (meta.key, meta.versions, meta.notes, meta.num_nodes, meta.num_edges) == (
        "k",
        VERSIONS,
        ("A note.",),
        40,
        200,
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["meta.json", *(shard_file_name(r, 3) for r in range(3))]


def test_writing_the_same_shards_twice_gives_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        write_shards(tmp_path / name, make()[1], key="k", versions=VERSIONS)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_a_rank_opens_only_its_own_file(folder):
    for rank in (0, 2):
        (folder / shard_file_name(rank, PARTS)).unlink()
    assert load_shard(folder, 1).rank == 1
    with pytest.raises(ShardFileError, match=r"shard-00000-of-00003\.safetensors is missing; delete the folder"):
        load_shard(folder, 0)
    with pytest.raises(ShardFileError, match="there is no rank 3"):
        load_shard(folder, 3)


def test_a_single_part_is_stored_too(tmp_path):
    data, _ = make()
    write_shards(tmp_path, build_shards(data, partition_nodes(40, data.src, data.dst, [1])), key="k", versions=VERSIONS)
    assert load_shard(tmp_path, 0).num_halo == 0


def test_a_truncated_file_is_refused(folder):
    path = folder / shard_file_name(1, PARTS)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ShardFileError, match=r"shard-00001-of-00003\.safetensors has \d+ bytes, meta\.json lists \d+"):
        load_shard(folder, 1)


@pytest.mark.parametrize("where", [3, 200, -1])
def test_one_changed_byte_is_noticed(folder, where):
    path = folder / shard_file_name(1, PARTS)
    content = bytearray(path.read_bytes())
    content[where] ^= 1
    path.write_bytes(content)
    with pytest.raises(ShardFileError, match=r"shard-00001.* is damaged or of another run; delete the folder"):
        load_shard(folder, 1)


def test_parts_of_different_runs_are_refused(folder, tmp_path):
    write_shards(tmp_path / "other", make(seed=1)[1], key="second", versions=VERSIONS)
    shutil.copy(tmp_path / "other" / shard_file_name(2, PARTS), folder)
    with pytest.raises(ShardFileError, match=r"shard-00002-of-00003\.safetensors .*of another run"):
        load_shard(folder, 2)
    assert load_shard(folder, 0).rank == 0


def forge(folder, rank: int, change_meta=None, change_tensors=None) -> None:
    """Change a shard or ``meta.json`` and make sizes and checksums agree again, as a careful stranger would."""
    path, meta_path = folder / shard_file_name(rank, PARTS), folder / "meta.json"
    if change_tensors:
        with store.safe_open(path, framework="pt") as file:
            header = file.metadata()
        tensors = load_file(path)
        change_tensors(tensors, header)
        save_file(tensors, path, metadata=header)
    meta = json.loads(meta_path.read_text())
    meta["parts"][rank] |= {"file_bytes": path.stat().st_size, "sha256": store._sha256(path)}
    if change_meta:
        change_meta(meta)
    meta_path.write_text(json.dumps(meta))


def header_entry(name, value):
    def change(tensors, header):
        header["nugnn"] = json.dumps(json.loads(header["nugnn"]) | {name: value})

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, header: tensors["indices"].fill_(10**6), "indices leaves the range"),
        (lambda tensors, header: tensors["node_data:feat:col"].fill_(7), "cannot be used"),
        (lambda tensors, header: tensors.pop("indptr"), "cannot be used: .*indptr"),
        (lambda tensors, header: tensors.pop("edge_data:weight:dense"), "cannot be used: .*weight"),
        (lambda tensors, header: header.pop("nugnn"), "cannot be used"),
        (
            header_entry("key", "second"),
            "made with key second, meta.json with first: the parts come from different runs",
        ),
        (header_entry("rank", 0), "it holds rank 0 of 3"),
        (header_entry("rank", True), "rank must be of type int, it is True"),
        (header_entry("schema_version", 0), "not of schema version 2"),
        (header_entry("num_train_global", 21), "num_train_global is 21 in the file and 20 in meta.json"),
        (header_entry("recv_splits", [-1, 0, 0]), "recv_splits must be counts"),
    ],
)
def test_a_consistent_forgery_of_a_shard_is_refused(folder, change, message):
    forge(folder, 1, change_tensors=change)
    with pytest.raises(ShardFileError, match=message) as caught:
        load_shard(folder, 1)
    assert "shard-00001-of-00003.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda meta: meta.update(schema_version=99), "has schema version 99, this program reads 2"),
        (lambda meta: meta.pop("key"), "key must be of type str, it is None"),
        (lambda meta: meta.update(num_nodes=41), "num_nodes of the parts sum to 40, of the graph it is 41"),
        (lambda meta: meta.update(num_edges=1), "num_edges of the parts sum to 200, of the graph it is 1"),
        (lambda meta: meta.update(parts=[]), "lists no parts"),
        (lambda meta: meta.update(parts={}), "parts must be of type list"),
        (lambda meta: meta["parts"].append(7), "an entry of parts is not an object"),
        (lambda meta: meta["parts"].pop(), "send and . receive counts|plans to send|sum to"),
        (lambda meta: meta["parts"][0].update(num_nodes="3"), "num_nodes must be of type int, it is '3'"),
        (lambda meta: meta["parts"][0].update(num_train=-1), "num_train of rank 0 is negative"),
        (lambda meta: meta["parts"][0].update(num_halo=10**9), "rank 0 has 1000000000 halo nodes but receives"),
        (lambda meta: meta["parts"][0]["send_splits"].__setitem__(1, 999), "rank 0 plans to send 999 rows to rank 1"),
    ],
)
def test_a_meta_file_that_contradicts_itself_is_refused(folder, change, message):
    forge(folder, 0, change_meta=change)
    with pytest.raises(ShardFileError, match=message) as caught:
        load_meta(folder)
    assert "meta.json" in str(caught.value)
    assert "delete the folder and partition again" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"[" * 100_000])
def test_a_meta_file_that_is_no_object_is_refused(folder, content):
    (folder / "meta.json").write_bytes(content)
    with pytest.raises(ShardFileError, match=r"meta\.json .*delete the folder and partition again"):
        load_meta(folder)


def test_an_interrupted_write_leaves_a_folder_that_is_refused(folder):
    def failing():
        yield make(seed=1)[1][0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shards(folder, failing(), key="second", versions=VERSIONS)
    with pytest.raises(ShardFileError, match=r"meta\.json does not exist: no finished set of shards lies there"):
        load_shard(folder, 2)
    assert not list(folder.glob(".*.unfinished"))


def test_incomplete_or_disordered_shards_are_not_written(tmp_path):
    shards = make()[1]
    with pytest.raises(ValueError, match="got 2 of 3 shards"):
        write_shards(tmp_path, shards[:2], key="k", versions=VERSIONS)
    with pytest.raises(ValueError, match="expected rank 0 of 3, got rank 1 of 3"):
        write_shards(tmp_path, shards[1:], key="k", versions=VERSIONS)
    broken = dataclasses.replace(shards[0], send_rows=shards[0].send_rows + 1000)
    with pytest.raises(ValueError, match="send_rows leaves the range"):
        write_shards(tmp_path, [broken, *shards[1:]], key="k", versions=VERSIONS)
    assert not (tmp_path / "meta.json").exists()
