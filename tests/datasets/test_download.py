"""download: what ends up under the target's name is the whole right file, or nothing, whatever the server does."""

import gzip
import hashlib
import io
import shutil
import socket
import subprocess
import sys
import threading
import traceback
import zipfile
from dataclasses import replace

import numpy as np
import pytest

from loopback import cut, serve, stall, status, whole
from nugnn.datasets.download import DownloadError, Patience, RemoteFile, download

CONTENT = np.random.default_rng(0).integers(0, 256, 300_000, dtype=np.uint8).tobytes()
QUICK = Patience(attempts=3, backoff_seconds=0.01)
"""Waits for a server that answers, however late: on busy cores its thread may come a second later."""
SHORT = replace(QUICK, read_seconds=1.0)
"""Where the server sends nothing any more."""
HTML = b"<!DOCTYPE html>\n<html><head><title>503 Service Unavailable</title></head></html>"


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    for variable in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv(variable.upper(), raising=False)


def zip_bytes(**files):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def fetch(server, folder, name="x.bin", patience=QUICK, **known):
    remote = RemoteFile(url=f"{server.url}/{name}", **known)
    return download(remote, folder / name, patience=patience)


def left_in(folder):
    return sorted(entry.name for entry in folder.iterdir() if not entry.name.endswith(".lock"))


def test_file_arrives_with_progress_and_is_not_asked_for_again(tmp_path):
    seen = []
    with serve(whole(CONTENT)) as server:
        remote = RemoteFile(url=f"{server.url}/data/x.bin?raw=1", sha256=hashlib.sha256(CONTENT).hexdigest())
        assert remote.file_name == "x.bin"
        target = tmp_path / "new" / "x.bin"
        for _ in range(2):
            assert download(remote, target, progress=lambda *p: seen.append(p), patience=QUICK) == target
        assert len(server.requests) == 1
    assert target.read_bytes() == CONTENT
    assert left_in(target.parent) == ["x.bin"]
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert seen == sorted(seen), "bytes only grow"


@pytest.mark.parametrize(
    ("first", "patience"),
    [(cut(CONTENT, 131_072), QUICK), (stall(CONTENT, 131_072), SHORT)],
    ids=["cut", "stalled"],
)
def test_cut_or_stalled_transfer_goes_on_where_it_ended(tmp_path, first, patience):
    with serve(first, whole(CONTENT)) as server:
        assert fetch(server, tmp_path, patience=patience).read_bytes() == CONTENT
        (_, begin, _), (_, rest, version) = server.requests
    assert begin is None
    assert rest == "bytes=131072-"
    assert version == '"v1"'


def test_next_call_goes_on_where_the_last_one_gave_up(tmp_path):
    with serve(cut(CONTENT, 49_152), status(503)) as server, pytest.raises(DownloadError, match="503"):
        fetch(server, tmp_path)
    port = server.server_port
    with serve(whole(CONTENT)) as again:
        again_url = again.url
        about = tmp_path / ".x.bin.part.json"
        about.write_text(about.read_text().replace(str(port), str(again.server_port)))
        assert fetch(again, tmp_path).read_bytes() == CONTENT
        assert again.requests == [("/x.bin", "bytes=49152-", '"v1"')], again_url
    assert left_in(tmp_path) == ["x.bin"]


def test_file_that_changed_between_the_parts_is_fetched_anew(tmp_path):
    other = CONTENT[::-1]
    with serve(cut(CONTENT, 131_072), whole(other, etag='"v2"')) as server:
        assert fetch(server, tmp_path).read_bytes() == other


@pytest.mark.parametrize("version", ['"v2"', '"v1"'], ids=["other version", "other length"])
def test_part_of_another_file_is_never_appended(tmp_path, version):
    """A server that ignores If-Range and answers 206 from what it has now."""
    other = CONTENT[::-1] if version == '"v2"' else CONTENT + b"more"

    def careless(handler):
        place = f"bytes 131072-{len(other) - 1}/{len(other)}"
        handler.head(206, len(other) - 131_072, Content_Range=place, ETag=version)
        handler.wfile.write(other[131_072:])

    with serve(cut(CONTENT, 131_072), careless, whole(other, etag=version)) as server:
        assert fetch(server, tmp_path).read_bytes() == other


@pytest.mark.parametrize("etag", [None, 'W/"weak"'])
def test_without_a_version_to_compare_it_starts_anew(tmp_path, etag):
    with serve(cut(CONTENT, 131_072, etag=etag), whole(CONTENT, etag=etag)) as server:
        assert fetch(server, tmp_path).read_bytes() == CONTENT
        assert [asked for _, asked, _ in server.requests] == [None, None]


def test_server_without_ranges_starts_anew(tmp_path):
    def no_ranges(handler):
        handler.head(200, len(CONTENT), ETag='"v1"')
        handler.wfile.write(CONTENT)

    with serve(cut(CONTENT, 131_072), no_ranges) as server:
        assert fetch(server, tmp_path).read_bytes() == CONTENT


def test_range_not_satisfiable_starts_anew(tmp_path):
    with serve(cut(CONTENT, 131_072), status(416), whole(CONTENT)) as server:
        assert fetch(server, tmp_path).read_bytes() == CONTENT


def test_passing_errors_are_tried_again_and_the_wait_asked_for_is_kept(tmp_path):
    with serve(status(500), status(429, Retry_After="0"), whole(CONTENT)) as server:
        assert fetch(server, tmp_path).read_bytes() == CONTENT
        assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("answers", "num_requests", "reason"),
    [
        ([status(404)], 1, "the server answers 404 Not Found"),
        ([status(403)], 1, "the server answers 403"),
        ([status(500)], 3, "the server answers 500"),
        ([cut(CONTENT, 16_384)], 3, "broke after 16,384 bytes"),
        ([cut(CONTENT, 16_384, etag=None)], 3, "broke after 16,384 bytes"),
        ([stall(CONTENT, 16_384)], 3, "sent nothing for 1 s after 16,384 bytes"),
        ([whole(HTML)], 1, "a web page in place of the file"),
        ([whole(b"hello", content_type="text/html; charset=utf-8")], 1, "a web page in place of the file"),
        ([whole(b"")], 2, "it is empty"),
        ([status(302, Location="file:///etc/hostname")], 1, "not http or https"),
        ([status(302, Location="/again")], None, "sends on and on"),
    ],
)
def test_failure_is_one_sentence_that_says_what_to_put_where(tmp_path, answers, num_requests, reason):
    with serve(*answers) as server:
        with pytest.raises(DownloadError) as caught:
            fetch(server, tmp_path, patience=SHORT if "sent nothing" in reason else QUICK)
        assert num_requests in (None, len(server.requests))
        url = f"{server.url}/x.bin"
    message = str(caught.value)
    assert reason in message
    assert url in message
    assert message.endswith(f"put it here as {tmp_path / 'x.bin'}")
    assert "\n" not in message
    assert "x.bin" not in left_in(tmp_path)


@pytest.mark.parametrize(
    ("known", "reason"),
    [
        ({"num_bytes": 5}, "offers 300,000 bytes where 5 are known"),
        ({"sha256": "0" * 64}, "its sha256 is .* where 000"),
        ({"about_bytes": 10**18}, "more bytes are needed and .* free"),
    ],
)
def test_wrong_size_wrong_hash_and_too_little_space(tmp_path, known, reason):
    answer = whole(CONTENT) if "about_bytes" not in known else cut(CONTENT, 10, declared=False)
    with serve(answer) as server, pytest.raises(DownloadError, match=reason):
        fetch(server, tmp_path, **known)
    assert left_in(tmp_path) == []


def test_known_size_is_checked_where_the_server_names_none(tmp_path):
    with (
        serve(cut(CONTENT, 16_384, declared=False)) as server,
        pytest.raises(DownloadError, match="it has 16,384 bytes"),
    ):
        fetch(server, tmp_path, num_bytes=len(CONTENT))
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("name", ["a.zip", "a.npz", "a.gz"])
@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_datasets_01_archive_that_is_damaged_never_gets_its_name(tmp_path, name, damage):
    payload = CONTENT[:20_000]
    good = gzip.compress(payload) if name.endswith(".gz") else zip_bytes(**{"edges.npy": payload})
    middle = len(good) // 2
    bad = good[:middle] if damage == "cut" else good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :]
    for _ in range(2):
        with (
            serve(whole(bad)) as server,
            pytest.raises(DownloadError, match=rf"what arrived is not a complete {name[1:]}"),
        ):
            fetch(server, tmp_path, name)
        assert left_in(tmp_path) == []
    with serve(whole(bad), whole(good)) as server:
        assert fetch(server, tmp_path, name).read_bytes() == good


@pytest.mark.parametrize("url", ["ftp://host/x.bin", "file:///etc/hostname", "x.bin"])
def test_only_http_and_https_are_downloaded(tmp_path, url):
    with pytest.raises(DownloadError, match="only http and https"):
        download(RemoteFile(url=url), tmp_path / "sub" / "x.bin")
    assert list(tmp_path.iterdir()) == []


def test_without_a_network_it_says_so_at_once(tmp_path, monkeypatch):
    def no_name(*args, **kwargs):
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", no_name)
    with pytest.raises(DownloadError, match=r"https://data\.example/x\.zip \(the name data\.example is not found, as"):
        download(RemoteFile(url="https://data.example/x.zip"), tmp_path / "x.zip", patience=QUICK)


def test_refused_connection_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/x.zip"
        with pytest.raises(DownloadError, match="cannot be reached") as caught:
            download(RemoteFile(url=url), tmp_path / "x.zip", patience=QUICK)
    printed = "".join(traceback.format_exception(caught.value))
    assert "urllib3" not in printed and printed.count("Traceback") == 1  # the sentence alone, not below pages of others


def test_full_disk_and_unwritable_folder_are_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(DownloadError, match="fails: "):
        download(RemoteFile(url="http://127.0.0.1/x"), tmp_path / "file" / "x")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))
    with serve(whole(CONTENT)) as server, pytest.raises(DownloadError, match="300,000 more bytes are needed"):
        fetch(server, tmp_path)


PROCESS = """
import sys
from pathlib import Path
from nugnn.datasets.download import RemoteFile, download
sys.stdin.readline()
print(len(download(RemoteFile(url=sys.argv[1]), Path(sys.argv[2])).read_bytes()))
"""


def test_two_processes_at_once_download_once(tmp_path):
    with serve(whole(CONTENT)) as server:
        command = [sys.executable, "-c", PROCESS, f"{server.url}/x.bin", str(tmp_path / "x.bin")]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        processes = [subprocess.Popen(command, **pipes) for _ in range(2)]
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        assert [process.communicate(timeout=60)[0].strip() for process in processes] == ["300000"] * 2
        assert len(server.requests) == 1


def test_a_client_that_leaves_early_is_no_traceback(capfd):
    """The server of these tests: what it prints would stand among the failures of others."""
    with serve(whole(bytes(64 << 20))) as server:
        serving = set(threading.enumerate())
        with socket.create_connection(("127.0.0.1", server.server_port)) as client:
            client.sendall(b"GET /x.bin HTTP/1.1\r\nHost: x\r\n\r\n")
            assert client.recv(10)
        for thread in set(threading.enumerate()) - serving:
            thread.join(10)
    assert capfd.readouterr().err == ""


def test_an_error_of_the_server_itself_is_shown(capfd):
    with serve(lambda handler: 1 / 0) as server, socket.create_connection(("127.0.0.1", server.server_port)) as client:
        client.sendall(b"GET /x.bin HTTP/1.1\r\nHost: x\r\n\r\n")
        assert not client.recv(10)
    assert "ZeroDivisionError" in capfd.readouterr().err
