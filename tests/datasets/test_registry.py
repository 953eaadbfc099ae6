"""load: the order of places, tolerant spelling, downloads, and refusals that say where it looked."""

import dataclasses
import logging
import os
import shutil
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from loopback import serve, status, whole
from nugnn.datasets import GraphData, load, write_npz
from nugnn.datasets.download import RemoteFile
from nugnn.datasets.fetch import prepare
from nugnn.datasets.registry import info, list_datasets
from nugnn.datasets.sources import PUBLISHED, Source, normalised, source_of_file
from planetoid_files import small, write_raw

FOLDER = Path(os.environ.get("NUGNN_DATA") or Path(__file__).resolve().parents[2].parent / "shared" / "data")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """A cache folder that is not there yet, and no network but loopback."""
    folder = tmp_path_factory.mktemp("cache") / "datasets"
    monkeypatch.setenv("NUGNN_CACHE", str(folder))
    for variable in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv(variable.upper(), raising=False)
    for name, entry in PUBLISHED.items():
        if entry.source is not None:
            files = tuple(
                dataclasses.replace(file, url="http://127.0.0.1:9/" + file.file_name) for file in entry.source.files
            )
            monkeypatch.setitem(
                PUBLISHED, name, dataclasses.replace(entry, source=dataclasses.replace(entry.source, files=files))
            )
    return folder


def save(path, num_nodes):
    """A graph told apart by its number of nodes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    labels = torch.arange(num_nodes) % 2
    src = torch.tensor([0])
    write_npz(GraphData(name="any", num_nodes=num_nodes, src=src, dst=src, labels=labels), path)
    return path


def test_path_of_a_file_or_of_its_folder_is_read(tmp_path):
    file = save(tmp_path / "mine" / "mine.npz", 3)
    for path in (file, str(file), file.parent):
        assert load(path).num_nodes == 3
    assert load(file).name == "mine"


def test_path_comes_before_a_name_under_the_data_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "cora.npz", 3)
    save(tmp_path / "data" / "cora.npz", 4)
    assert load("cora.npz", "data").num_nodes == 3
    assert load("cora", "data").num_nodes == 4


@pytest.mark.parametrize("stored", ["fb100_cornell5.npz", "fb100-cornell5/fb100-cornell5.npz", "FB100_Cornell5.npz"])
@pytest.mark.parametrize("asked", ["fb100_cornell5", "fb100-cornell5", "Fb100-CORNELL5"])
def test_names_match_whatever_their_case_and_dashes(tmp_path, stored, asked):
    save(tmp_path / stored, 3)
    assert load(asked, tmp_path).num_nodes == 3


def test_file_comes_before_folder_and_data_folder_before_built_in(tmp_path):
    save(tmp_path / "x" / "x.npz", 3)
    save(tmp_path / "digits" / "digits.npz", 5)
    assert load("x", tmp_path).num_nodes == 3
    assert load("digits", tmp_path).num_nodes == 5
    save(tmp_path / "x.npz", 4)
    assert load("x", tmp_path).num_nodes == 4


def test_array_file_called_like_a_built_in_graph_does_not_hide_it(tmp_path):
    np.savez(tmp_path / "digits.npz", x=np.zeros(3), y=np.zeros(3))
    assert load("digits", tmp_path).num_nodes == 1797
    np.savez(tmp_path / "mnist.npz", x=np.zeros(3), y=np.zeros(3))
    with pytest.raises(ValueError, match=r"mnist\.npz is not a graph.*it holds x, y"):
        load("mnist", tmp_path)


def test_broken_file_called_like_a_built_in_graph_is_an_error(tmp_path):
    (tmp_path / "digits.npz").write_bytes(b"<html>")
    with pytest.raises(ValueError, match=r"digits\.npz is not a complete"):
        load("digits", tmp_path)


def test_folder_called_like_a_dataset_is_no_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()
    assert load("digits").num_nodes == 1797
    with pytest.raises(ValueError, match=r"digits.*(is a folder without digits\.npz|holds no edges\.csv)"):
        load("./digits")


@pytest.mark.parametrize("name", ["products-like", "mixed_like", "Products_Like"])
def test_synthetic_arguments_reach_the_generator(name):
    data = load(f"{name}:200:600:3")
    assert (data.num_nodes, data.num_edges) == (200, 600)
    assert data.name == name.lower().replace("_", "-")
    assert load(f"{name}:200:600:4").content_hash() != data.content_hash()
    assert load(f"{name}:200").num_nodes == 200


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("products-like:many", r"whole numbers; write products-like\[:NODES"),
        ("products-like:200:600:1:9", "too many parts"),
        ("mixed-like:", "whole numbers"),
        ("digits:3", "unknown dataset 'digits:3'"),
    ],
)
def test_malformed_arguments_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        load(text)


@pytest.mark.parametrize(("typed", "meant"), [("digit", "digits"), ("product-like", "products-like"), ("coar", "cora")])
def test_near_miss_names_the_closest(typed, meant):
    with pytest.raises(ValueError, match=f"unknown dataset '{typed}': did you mean .*{meant}"):
        load(typed)


def test_near_miss_knows_the_data_folder(tmp_path):
    save(tmp_path / "company_graph.npz", 3)
    with pytest.raises(ValueError, match="did you mean company-graph"):
        load("compani-graph", tmp_path)


def test_an_unknown_name_is_refused_in_a_few_words_that_point_to_the_list(tmp_path):
    """It was followed by all names there are, some 700 characters."""
    with pytest.raises(ValueError, match="did you mean cora") as caught:
        load("corra", tmp_path)
    said = str(caught.value).replace(str(tmp_path), "FOLDER")
    assert said.endswith(
        "? it is not in FOLDER. `nugnn datasets list`, with the same --data-dir, shows all names; or give the path of "
        "a file or folder"
    )
    assert len(said) < 200
    with pytest.raises(ValueError, match=r"no data folder was given \(--data-dir\)\. `nugnn datasets list` shows all"):
        load("qqqqqqqq")


@pytest.mark.parametrize("name", ["cora", "digits", "products-like:100:600", "./digits.npz", "diggits"])
def test_missing_data_folder_is_named_whatever_is_asked_for_and_not_created(name, tmp_path):
    missing = tmp_path / "none"
    with pytest.raises(ValueError, match=r"none does not exist; correct --data-dir or NUGNN_DATA, or leave it out"):
        load(name, missing)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_data_folder(tmp_path):
    (tmp_path / "file").touch()
    for ask in (list_datasets, lambda folder: info("digits", folder), lambda folder: load("digits", folder)):
        with pytest.raises(ValueError, match=r"the data folder .*file is a file"):
            ask(tmp_path / "file")


def test_missing_path_is_named():
    with pytest.raises(ValueError, match=r"nowhere/graph\.npz: no such file"):
        load("nowhere/graph.npz")


def test_published_metric_is_set_by_name_unless_the_file_has_one(tmp_path):
    arrays = {"num_nodes": np.int64(2), "adj_indptr": np.array([0, 1, 2]), "adj_indices": np.array([1, 0])}
    arrays["label"] = np.array([0, 1])
    np.savez(tmp_path / "tolokers.npz", **arrays)
    assert load("tolokers", tmp_path).metric == "roc_auc"
    np.savez(tmp_path / "other.npz", **arrays)
    assert load("other", tmp_path).metric == "accuracy"
    np.savez(tmp_path / "tolokers.npz", **arrays, metric=np.array("accuracy"))
    assert load("tolokers", tmp_path).metric == "accuracy"


def offer(monkeypatch, name, server, *files, kind="files"):
    """Let the named data set come from the server."""
    source = Source(files=tuple(RemoteFile(url=f"{server.url}/{file}") for file in files), kind=kind)
    monkeypatch.setitem(PUBLISHED, name, dataclasses.replace(PUBLISHED[name], source=source))


def npz_bytes(folder, num_nodes):
    return save(folder / "offered.npz", num_nodes).read_bytes()


def zip_of(path, members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path.read_bytes()


def left_in(folder):
    return sorted(entry.name for entry in folder.rglob("*") if entry.is_file() and not entry.name.endswith(".lock"))


@pytest.fixture
def fake_ogb(monkeypatch):
    """Stands for the reader of OGB's layout: it notes its arguments and gives a graph of as many nodes as files."""
    module = types.ModuleType("nugnn.datasets.ogb")
    module.calls = []

    def read_ogb(folder, name=None, cache=None):
        module.calls.append((Path(folder), name, Path(cache)))
        src = torch.tensor([0])
        return GraphData(name=name, num_nodes=len(list(Path(folder).iterdir())), src=src, dst=src)

    module.read_ogb = read_ogb
    monkeypatch.setitem(sys.modules, "nugnn.datasets.ogb", module)
    return module


OGB_MEMBERS = {"arxiv/raw/edge.csv.gz": b"x", "arxiv/split/time/train.csv.gz": b"x", "arxiv/RELEASE_v1.txt": b""}


def test_download_happens_once_and_is_found_in_the_cache_from_then_on(tmp_path, monkeypatch, cache):
    seen = []
    with serve(whole(npz_bytes(tmp_path, 5))) as server:
        offer(monkeypatch, "amazon-photo", server, "photo.npz")
        for _ in range(2):
            assert load("Amazon_Photo", progress=lambda *p: seen.append(p)).num_nodes == 5
        assert len(server.requests) == 1
    assert seen
    assert left_in(cache) == ["photo.npz"]
    assert prepare("amazon-photo") == cache / "amazon_photo"


def test_data_folder_comes_before_the_cache_and_the_cache_before_a_download(tmp_path, monkeypatch, cache):
    with serve(whole(npz_bytes(tmp_path, 5))) as server:
        offer(monkeypatch, "amazon-photo", server, "photo.npz")
        (tmp_path / "data").mkdir()
        save(cache / "amazon_photo.npz", 6)
        assert load("amazon-photo", tmp_path / "data").num_nodes == 6
        save(tmp_path / "data" / "amazon_photo.npz", 7)
        assert load("amazon-photo", tmp_path / "data").num_nodes == 7
        assert server.requests == []


def test_several_files_go_on_after_a_failure(tmp_path, monkeypatch, cache):
    raw = write_raw(tmp_path / "raw", "cora", small())
    files = sorted(path.name for path in raw.iterdir())
    contents = [path.read_bytes() for path in sorted(raw.iterdir())]
    answers = [whole(content) for content in contents]
    with serve(*answers[:3], status(404)) as server:
        offer(monkeypatch, "cora", server, *files)
        with pytest.raises(ValueError, match="404 Not Found") as caught:
            load("cora")
        first, *others = str(caught.value).splitlines()
        missing = [f"  {remote.url}" for remote in PUBLISHED["cora"].source.files[3:]]
    assert len(missing) == 5 and first.startswith(f"cannot download {missing[0].strip()} (") and first.endswith(")")
    assert others == [
        "5 of the 8 files are missing; fetch them by hand or on another machine, from",
        *missing,
        "and put them here into",
        f"  {cache / 'cora'}",
    ]
    assert left_in(cache) == files[:3]
    with serve(*answers[3:]) as server:
        offer(monkeypatch, "cora", server, *files)
        assert load("cora").num_nodes == 507
        assert [path for path, *_ in server.requests] == [f"/{file}" for file in files[3:]]
    assert load("cora", raw).num_nodes == 507, "the folder of the files may itself be the data folder"
    assert load(raw).num_nodes == 507


def test_archive_is_extracted_and_removed(tmp_path, monkeypatch, cache, fake_ogb):
    with serve(whole(zip_of(tmp_path / "a.zip", OGB_MEMBERS))) as server:
        offer(monkeypatch, "ogbn-arxiv", server, "arxiv.zip", kind="archive")
        for _ in range(2):
            assert load("OGBN_arxiv").num_nodes == 3
        assert len(server.requests) == 1
    assert fake_ogb.calls == [(cache / "ogbn_arxiv", "ogbn-arxiv", cache / "processed")] * 2
    assert left_in(cache) == ["RELEASE_v1.txt", "edge.csv.gz", "train.csv.gz"]


@pytest.mark.parametrize("folder", ["ogbn_arxiv", "OGBN-arxiv", "ogbn_arxiv_dgl", "ogbn_arxiv_pyg"])
def test_ogb_folder_is_found_by_name_and_by_path(tmp_path, fake_ogb, folder):
    (tmp_path / folder / "raw").mkdir(parents=True)
    (tmp_path / folder / "split").mkdir()
    for data in (load("ogbn-arxiv", tmp_path), load(tmp_path / folder)):
        assert data.num_nodes == 2
    assert [(path, normalised(name)[:10]) for path, name, _ in fake_ogb.calls] == [
        (tmp_path / folder, "ogbn-arxiv")
    ] * 2


@pytest.mark.parametrize("place", ["arxiv.zip", "ogbn_arxiv/arxiv.zip", "ogbn-arxiv.zip"])
def test_archive_in_the_data_folder_is_used_and_the_folder_stays_as_it_was(tmp_path, cache, fake_ogb, place):
    archive = tmp_path / "data" / place
    archive.parent.mkdir(parents=True)
    zip_of(archive, OGB_MEMBERS)
    for source in ("ogbn-arxiv", archive):
        assert load(source, tmp_path / "data").num_nodes == 3
    assert [path for path in (tmp_path / "data").rglob("*") if path.is_file()] == [archive]
    assert len({path for path, *_ in fake_ogb.calls}) == 1
    assert {name for _, name, _ in fake_ogb.calls} == {"ogbn-arxiv"}


def test_archive_that_the_message_asked_for_is_used(tmp_path, cache, fake_ogb):
    with pytest.raises(
        ValueError, match=r"arxiv\.zip \(127.0.0.1:9 cannot be reached\).*put it here as (\S+)"
    ) as caught:
        load("ogbn-arxiv")
    place = Path(str(caught.value).split()[-1])
    assert place == cache / "arxiv.zip"
    zip_of(place, OGB_MEMBERS)
    assert load("ogbn-arxiv").num_nodes == 3
    assert place.is_file(), "it is not ours to remove"
    place.unlink()
    assert load("ogbn-arxiv").num_nodes == 3


BROKEN = {
    "html": (b"<!DOCTYPE html>\n<html><head><title>503 Service Unavailable</title></head></html>", "it is a web page"),
    "empty": (b"", "it is empty"),
    "text": (b"hello", "it begins with b'hello'"),
    "cut": (None, "was cut off after"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_datasets_01_broken_archive_is_one_error_each_time_and_leaves_nothing(tmp_path, cache, kind):
    archive = tmp_path / "arxiv.zip"
    whole_zip = zip_of(archive, {name: os.urandom(500) for name in OGB_MEMBERS})
    content, hint = BROKEN[kind]
    archive.write_bytes(whole_zip[: len(whole_zip) // 2] if content is None else content)
    for source in ("ogbn-arxiv", archive):
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"arxiv\.zip is not a complete \.zip archive: .*{hint}.*again"):
                load(source, tmp_path)
    assert left_in(cache) == []
    assert [path.name for path in cache.rglob("*") if "extracting" in path.name] == []


def test_datasets_01_broken_download_is_not_kept(tmp_path, monkeypatch, cache, fake_ogb):
    good = zip_of(tmp_path / "a.zip", OGB_MEMBERS)
    for bad in (whole(BROKEN["html"][0]), whole(good[: len(good) // 2]), whole(b"")):
        with serve(bad) as server, pytest.raises(ValueError, match=r"cannot download .*arxiv\.zip"):
            offer(monkeypatch, "ogbn-arxiv", server, "arxiv.zip", kind="archive")
            load("ogbn-arxiv")
        assert left_in(cache) == []
    with serve(whole(good)) as server:
        offer(monkeypatch, "ogbn-arxiv", server, "arxiv.zip", kind="archive")
        assert load("ogbn-arxiv").num_nodes == 3


def test_interrupted_extraction_is_done_anew(tmp_path, monkeypatch, cache, fake_ogb):
    stale = cache / ".ogbn_arxiv.1.extracting"
    (stale / "raw").mkdir(parents=True)
    with serve(whole(zip_of(tmp_path / "a.zip", OGB_MEMBERS))) as server:
        offer(monkeypatch, "ogbn-arxiv", server, "arxiv.zip", kind="archive")
        assert load("ogbn-arxiv").num_nodes == 3
    assert not stale.exists()


@pytest.mark.parametrize("name", ["OGBN-Products", "ogbn_products", " Ogbn_Products "])
def test_cli_02_known_spellings_are_one_name(tmp_path, fake_ogb, name):
    (tmp_path / "ogbn_products" / "raw").mkdir(parents=True)
    (tmp_path / "ogbn_products" / "split").mkdir()
    assert load(name, tmp_path).name == "ogbn-products"


def test_cli_02_near_miss_is_refused_at_once_and_touches_nothing(tmp_path, cache, monkeypatch):
    import socket

    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("asked the network"))
    with pytest.raises(ValueError, match="unknown dataset 'ogbn-product': did you mean ogbn-products"):
        load("ogbn-product", tmp_path)
    with pytest.raises(ValueError, match="did you mean ogbn-products"):
        prepare("ogbn-product")
    assert list(tmp_path.iterdir()) == []
    assert not cache.exists()


def test_name_without_a_source_says_which_file_to_put_where(tmp_path, cache):
    with pytest.raises(ValueError, match=r"knows no address.*put the graph as penn94\.npz into .*datasets"):
        load("penn94", tmp_path)
    save(cache / "penn94.npz", 4)
    assert load("penn94", tmp_path).num_nodes == 4


def test_user_s_own_graph_in_the_cache_folder_is_found(cache):
    save(cache / "mine.npz", 4)
    assert load("mine").num_nodes == 4
    assert info("mine").where == "cache"


def test_counts_that_differ_from_the_published_ones_warn_once_with_both_numbers(tmp_path, caplog):
    save(tmp_path / "cora.npz", 3)
    with caplog.at_level(logging.WARNING, logger="nugnn.datasets"):
        assert load("cora", tmp_path).num_nodes == 3
    (record,) = caplog.records
    assert "3 nodes (published: 2,708), 1 edges (published: 10,556)" in record.getMessage()


STORED = (
    *("cora", "citeseer", "dblp", "amazon-computers", "amazon-photo", "coauthor-physics", "actor", "squirrel"),
    *("minesweeper", "tolokers", "wordnet", "blogcatalog-attr", "flickr-attr", "fb100-cornell5", "facebook-pages"),
)


@pytest.mark.parametrize("name", STORED)
def test_stored_public_graphs_have_the_published_counts(name, caplog):
    folder = PUBLISHED[name].folder
    if not (FOLDER / folder / f"{folder}.npz").is_file():
        pytest.skip(f"{folder}/{folder}.npz is not under {FOLDER}; name a folder of public graphs with NUGNN_DATA")
    load(name, FOLDER)
    assert caplog.records == []


def test_ogbn_mag_says_what_is_left_out(tmp_path, fake_ogb, caplog):
    (tmp_path / "ogbn_mag" / "raw").mkdir(parents=True)
    (tmp_path / "ogbn_mag" / "split").mkdir()
    load("ogbn-mag", tmp_path)
    assert "homogeneous paper graph" in caplog.text


def test_list_and_info_say_where_each_comes_from_and_make_nothing(tmp_path, cache):
    save(tmp_path / "company.npz", 3)
    save(tmp_path / "cora" / "cora.npz", 3)
    (tmp_path / "ogbn_arxiv_pyg" / "split").mkdir(parents=True)
    (tmp_path / "ogbn_arxiv_pyg" / "raw").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    entries = {entry.name: entry for entry in list_datasets(tmp_path)}
    where = {name: entries[name].where for name in ("digits", "company", "cora", "ogbn-arxiv", "ogbn-products", "ppi")}
    assert where == {
        "digits": "built-in",
        "company": "local",
        "cora": "local",
        "ogbn-arxiv": "local",
        "ogbn-products": "download",
        "ppi": "by hand",
    }
    assert "notes" not in entries
    assert entries["cora"].path == tmp_path / "cora"
    products = info("OGBN_products", tmp_path)
    assert products == entries["ogbn-products"]
    assert products.published.num_nodes == 2_449_029
    assert 1.3e9 < products.download_bytes < 1.6e9
    with pytest.raises(ValueError, match="did you mean ogbn-products"):
        info("ogbn-product")
    assert not cache.exists()


def test_too_little_space_for_archive_and_content_is_said_before_the_download(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 100_000_000_000))
    with pytest.raises(ValueError, match=r"ogbn-papers100m needs about 120\.6 GB.*has 100\.0 GB free"):
        load("ogbn-papers100M")


def test_cache_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NUGNN_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ValueError, match=r"the cache folder .*cache cannot be written \(.*NUGNN_CACHE"):
        load("cora")


PROCESS = """
import dataclasses, sys
from nugnn.datasets import load
from nugnn.datasets.download import RemoteFile
from nugnn.datasets.sources import PUBLISHED, Source
source = Source(files=(RemoteFile(url=sys.argv[1]),), kind="archive")
PUBLISHED["yelp"] = dataclasses.replace(PUBLISHED["yelp"], source=source)
sys.stdin.readline()
print(load("yelp").num_nodes)
"""


def test_two_processes_at_once_download_and_extract_once(tmp_path):
    content = zip_of(tmp_path / "a.zip", {"yelp/yelp.npz": npz_bytes(tmp_path, 5)})
    with serve(whole(content)) as server:
        command = [sys.executable, "-c", PROCESS, f"{server.url}/yelp.zip"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        processes = [subprocess.Popen(command, **pipes) for _ in range(2)]
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        assert [process.communicate(timeout=120)[0].strip() for process in processes] == ["5", "5"]
        assert len(server.requests) == 1


def test_table_of_sources_is_sound():
    for name, entry in PUBLISHED.items():
        assert name == normalised(entry.name)
        for file in entry.source.files if entry.source else ():
            assert file.file_name
            assert entry.source.kind == "files" or file.file_name.endswith(".zip")
    assert source_of_file("papers100M-bin.zip").name == "ogbn-papers100m"
    assert source_of_file("other.zip") is None
