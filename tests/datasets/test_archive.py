"""Archives: what an honest one holds arrives whole; a hostile or broken one is refused by name and leaves nothing."""

import gzip
import io
import os
import stat
import tarfile
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nugnn.datasets import archive as module
from nugnn.datasets import unpacking
from nugnn.datasets.archive import BrokenFileError, check_complete, extract
from nugnn.datasets.unpacking import UnpacksTooFarError

CONTENT = {"raw/edge.csv": os.urandom(5000), "raw/sub/x": b"", "split/train": b"1\n" * 3000}


def make_zip(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def make_tar(path, members):
    with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def make(path, members):
    return make_zip(path, members) if path.suffix == ".zip" else make_tar(path, members)


def content_of(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def nothing_left(folder, *allowed):
    return {entry.name for entry in folder.iterdir()} == set(allowed)


NAMES = ["a.zip", "a.tar", "a.tar.gz", "a.tgz"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("top", ["", "arxiv/"])
def test_content_arrives_whole_without_a_folder_around_it_all(tmp_path, name, top):
    noise = {"__MACOSX/raw/._edge.csv": b"x", ".DS_Store": b"x"}
    archive = make(tmp_path / name, {**{top + member: content for member, content in CONTENT.items()}, **noise})
    check_complete(archive)
    (tmp_path / "out").mkdir()
    extract(archive, tmp_path / "out")
    assert content_of(tmp_path / "out") == CONTENT
    assert nothing_left(tmp_path, name, "out")


def test_folder_within_a_folder_of_the_same_name(tmp_path):
    extract(make(tmp_path / "a.zip", {"x/x/y": b"1", "x/z": b"2"}), tmp_path / "out")
    assert content_of(tmp_path / "out") == {"x/y": b"1", "z": b"2"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "member", ["../evil", "a/../../evil", "/evil", "a/..", "C:/evil", "c:evil", "..\\evil", "a\\b"]
)
def test_member_outside_the_folder_is_refused(tmp_path, name, member):
    archive = make(tmp_path / name, {"good": b"x", member: b"x"})
    with pytest.raises(BrokenFileError, match=r"would be written outside its folder; archive refused"):
        extract(archive, tmp_path / "out")
    assert nothing_left(tmp_path, name)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_link_or_device_in_a_tar_is_refused(tmp_path, kind):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        info = tarfile.TarInfo("passwd")
        info.type, info.linkname = kind, "/etc/passwd"
        archive.addfile(info)
    with pytest.raises(BrokenFileError, match="'passwd' is a link or device"):
        extract(tmp_path / "a.tar", tmp_path / "out")
    assert nothing_left(tmp_path, "a.tar")


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFCHR, stat.S_IFIFO])
def test_link_or_device_in_a_zip_is_refused(tmp_path, kind):
    info = zipfile.ZipInfo("passwd")
    info.external_attr = (kind | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(info, "/etc/passwd")
    with pytest.raises(BrokenFileError, match="'passwd' is a link or device"):
        extract(tmp_path / "a.zip", tmp_path / "out")
    assert nothing_left(tmp_path, "a.zip")


def test_encrypted_repeated_and_colliding_members_are_refused(tmp_path):
    path = make_zip(tmp_path / "a.zip", {"x": b"1"})
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(content)
    with pytest.raises(BrokenFileError, match="encrypted"):
        extract(path, tmp_path / "out")
    with zipfile.ZipFile(path, "w") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("x", b"1")
        archive.writestr("x", b"2")
    with pytest.raises(BrokenFileError, match="holds 'x' twice"):
        extract(path, tmp_path / "out")
    with pytest.raises(ValueError, match="cannot be extracted"):
        extract(make_zip(path, {"x": b"1", "x/y": b"2"}), tmp_path / "out")
    with pytest.raises(BrokenFileError, match="holds no files"):
        extract(make_zip(path, {}), tmp_path / "out")
    assert nothing_left(tmp_path, "a.zip")


@pytest.mark.parametrize("name", ["a.zip", "a.tgz"])
def test_bomb_is_refused_before_it_is_written(tmp_path, monkeypatch, name):
    monkeypatch.setattr(unpacking, "_ALWAYS_BYTES", 1 << 20)
    monkeypatch.setattr(unpacking, "available_memory_bytes", lambda: 1 << 22)
    archive = make(tmp_path / name, {"zeros": bytes(4 << 20)})
    with pytest.raises(UnpacksTooFarError, match=r"more than 4,194,304 bytes from .* as a decompression bomb does"):
        extract(archive, tmp_path / "out")
    monkeypatch.setattr(module, "_MAX_MEMBERS", 5)
    with pytest.raises(BrokenFileError, match="more than 5 files"):
        extract(make(tmp_path / name, {f"f{i}": b"" for i in range(7)}), tmp_path / "out")
    assert nothing_left(tmp_path, name)


def test_too_little_space_and_a_full_target_are_named(tmp_path, monkeypatch):
    archive = make(tmp_path / "a.zip", CONTENT)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    with pytest.raises(ValueError, match="exists already and is not empty"):
        extract(archive, tmp_path / "out")
    assert content_of(tmp_path / "out") == {"mine": b"kept"}
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: module.shutil._ntuple_diskusage(1, 1, 0))
    with pytest.raises(ValueError, match=r"raw/edge\.csv needs 5,000 bytes and .* has 0 free"):
        extract(archive, tmp_path / "new")
    assert nothing_left(tmp_path, "a.zip", "out")


@pytest.mark.parametrize("name", NAMES)
def test_datasets_01_cut_anywhere_is_refused_and_leaves_nothing(tmp_path, name):
    whole = make(tmp_path / name, CONTENT).read_bytes()
    end = len(whole.rstrip(b"\0")) if name == "a.tar" else len(whole)  # a tar is padded with zeros
    for length in range(0, end, 397):
        (tmp_path / name).write_bytes(whole[:length])
        for act in (check_complete, lambda path: extract(path, tmp_path / "out")):
            with pytest.raises(BrokenFileError, match=name.replace(".", r"\.")):
                act(tmp_path / name)
        assert nothing_left(tmp_path, name), length


@given(place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255), name=st.sampled_from(["a.zip", "a.tgz"]))
def test_changed_byte_is_a_clean_error_or_harmless(tmp_path_factory, place, flip, name):
    folder = tmp_path_factory.mktemp("flip")
    path = make(folder / name, CONTENT)
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= flip
    path.write_bytes(content)
    try:
        extract(path, folder / "out")
    except ValueError as error:
        assert str(path) in str(error)
        assert nothing_left(folder, name)
    else:
        assert sorted(content_of(folder / "out").values()) == sorted(CONTENT.values())


def test_gz_is_read_to_its_end(tmp_path):
    path = tmp_path / "edge.csv.gz"
    whole = gzip.compress(b"0,1\n" * 10_000)
    path.write_bytes(whole)
    check_complete(path)
    for bad in (whole[: len(whole) // 2], whole[:-4] + b"\0\0\0\0", b"0,1\n", b"", b"<html>"):
        path.write_bytes(bad)
        with pytest.raises(BrokenFileError, match=r"edge\.csv\.gz is not a complete \.gz file"):
            check_complete(path)


def test_other_files_only_have_to_be_no_web_page(tmp_path):
    path = tmp_path / "ind.cora.x"
    path.write_bytes(b"\x80\x02")
    check_complete(path)
    path.write_bytes(b"\n\n<!DOCTYPE HTML><p>")
    with pytest.raises(BrokenFileError, match="a web page"):
        check_complete(path)
