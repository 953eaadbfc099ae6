"""Damages small files of every format in thousands of ways and reads them: only a graph or a clean error may come out.

A clean error is a ``ValueError`` that names the file. Each target has seeds (small valid inputs) and mutations: bytes
changed anywhere, numbers and words replaced by awkward ones, lines moved; inside of zip and gzip files too. Anything
but a graph or a clean error is reported with the files that caused it.

    python benchmarks/fuzz_readers.py --inputs 200000
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gzip
import io
import json
import logging
import random
import resource
import shutil
import tempfile
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

Files = dict[str, bytes]

_NUMBERS = (
    *(b"0", b"1", b"2", b"-1", b"007", b"1.5", b"-0", b"1e3", b"1e400", b"1e39", b"nan", b"NaN", b"inf", b"-inf", b""),
    *(b"255", b"256", b"65536", b"2147483647", b"2147483648", b"4294967296", b"9223372036854775807", b"0x10"),
    *(b"9223372036854775808", b"18446744073709551616", b"99999999999999999999999", b"1_000", b"1,000", b"+3"),
)
_WORDS = (
    *(
        b",",
        b'"',
        b'""',
        b"\n",
        b"\r\n",
        b"\r",
        b"\t",
        b" ",
        b"  ",
        b"#",
        b"%",
        b"\0",
        b"\xff",
        b"\xc3\xa9",
        b"\xef\xbb\xbf",
    ),
    *(
        b"train",
        b"true",
        b"NA",
        b"null",
        b"src",
        b"label",
        b"feat_0",
        b"\x1a",
        b"{",
        b"}",
        b"[",
        b":",
        b"\\u0000",
        b"../",
    ),
)
_INTEGERS = (0, 1, 2, 3, 4, 7, 8, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
_ADDRESS_SPACE = 24 * 2**30
"""Bytes; a reader that believes a damaged length then fails at once instead of filling the machine."""


_SLOW_SECONDS = 10
"""Longer than any small file takes on a busy machine; such an input counts as a failure."""


def _read_path(path: Path) -> object:
    from nugnn.datasets.formats import read_path

    return read_path(path)


@dataclass(frozen=True)
class Target:
    """A reader to feed: its valid inputs, which file of an input to open, which files to damage (all), and how."""

    name: str
    seeds: tuple[Files, ...]
    opened: str
    mutable: tuple[str, ...] = ()
    read: Callable[[Path], object] = _read_path

    def files_to_damage(self, seed: Files) -> tuple[str, ...]:
        return self.mutable or tuple(seed)


@dataclass
class Outcome:
    """What came out of one target's inputs."""

    inputs: int = 0
    fine: int = 0
    refused: int = 0
    other: int = 0
    slowest_seconds: float = 0.0
    kinds: collections.Counter[str] = field(default_factory=collections.Counter)
    failures: list[tuple[Files, str]] = field(default_factory=list)


def targets() -> list[Target]:
    """All readers; a further one needs only its seeds here, and ``read`` where ``read_path`` does not know it."""
    graph = _small_graph()
    npz = _npz(graph)
    mtx = b"%%MatrixMarket matrix coordinate real general\n% c\n3 3 4\n1 2 0.5\n2 1 1e-3\n3 3 -2\n1 3 4\n"
    symmetric = b"%%MatrixMarket matrix coordinate pattern symmetric\n3 3 2\n2 1\n3 2\n"
    integer = b"%%MatrixMarket matrix coordinate integer general\n3 3 2\n2 1 7\n3 2 -1\n"
    snap = b"# Directed graph\n# Nodes: 6 Edges: 4\n# FromNodeId\tToNodeId\n0\t1\n1\t2\n2\t2\n4\t0\n"
    weighted = b"10 20 0.5\n20  30 1\n\n# note\n30 10 2e1\n"
    labels = b"0 1\n1 0\n2 1\n4 3\n"
    nodes = (
        b"id,feat_0,feat_1,label,split,year\n0,1.5,2,0,train,1999\n1,0,-1,1,val,2000\n2,3,1e-3,0,test,2001\n3,0,0,,,2\n"
    )
    named = b"id,x,label_0,label_1,train,val,test,_note\n"
    named += b'"a, b",1,0,1,1,0,0,h\nc,2,1,1,0,1,0,\n\xc3\xa9,3,0,0,0,0,1,"q""q"\n'
    edges = b"src,dst,weight,kind\n0,1,0.5,3\n1,2,1,4\n2,2,2,5\n"
    named_edges = b'\xef\xbb\xbfsource,target,w\r\n"a, b",c,1\r\nc,\xc3\xa9,2.5\r\n'
    metis = b"% a comment\n4 4\n2 3\n1 3\n1 2 4\n3\n"
    weights = b"3 2 111 2\n5 1 2 2 7\n6 3 4 1 7 3 9\n1 1 1 2 9\n"
    return [
        Target("npz", ({"g.npz": npz}, {"g.npz": _npz(graph, compressed=True)}), "g.npz"),
        Target("CSV edges", ({"e.csv": edges}, {"e.csv": named_edges}), "e.csv"),
        Target("CSV edges gzip", ({"e.csv.gz": _gz(edges)},), "e.csv.gz"),
        Target(
            "CSV folder",
            ({"nodes.csv": nodes, "edges.csv": edges}, {"nodes.csv": named, "edges.csv": named_edges}),
            ".",
        ),
        Target("METIS", ({"m.graph": metis}, {"m.graph": weights}, {"m.graph": b"3 1\n2\n1\n\n"}), "m.graph"),
        Target("METIS gzip", ({"m.graph.gz": _gz(metis)},), "m.graph.gz"),
        Target("Matrix Market", tuple({"a.mtx": text} for text in (mtx, symmetric, integer)), "a.mtx"),
        Target("Matrix Market gzip", ({"a.mtx.gz": _gz(mtx)},), "a.mtx.gz"),
        Target("SNAP", ({"s.txt": snap}, {"s.txt": weighted}), "s.txt"),
        Target("SNAP with labels", ({"s.txt": snap, "s-labels.txt": labels},), "s.txt"),
        Target("SNAP gzip", ({"s.txt.gz": _gz(weighted)},), "s.txt.gz"),
        *_dgl_targets(graph),
        *_ogb_targets(),
    ]


def fuzz(target: Target, num_inputs: int, rng: random.Random, folder: Path, *, most_failures: int = 5) -> Outcome:
    """Read ``num_inputs`` damaged inputs of one target.

    Args:
        target: What to damage.
        num_inputs: How many times.
        rng: Decides every input.
        folder: Empty, and left with the last input in it, which so survives a crash of the process.
        most_failures: How many bad inputs to keep.
    """
    outcome = Outcome()
    opened = folder / target.opened
    for _ in range(num_inputs):
        seed = rng.choice(target.seeds)
        damaged = dict(seed)
        for _ in range(1 if rng.random() < 0.8 else 2):
            name = rng.choice(target.files_to_damage(seed))
            damaged[name] = damage_file(
                name, damaged[name], rng, [other[name] for other in target.seeds if name in other]
            )
        for name in {name for other in target.seeds for name in other} - damaged.keys():
            (folder / name).unlink(missing_ok=True)
        for name, content in damaged.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        started = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                target.read(opened)
        except ValueError as error:
            if str(folder) in str(error) and "\n" not in str(error):
                outcome.refused += 1
            else:
                _note(outcome, damaged, error, most_failures)
        except Exception as error:  # the very thing to find
            _note(outcome, damaged, error, most_failures)
        else:
            outcome.fine += 1
        seconds = time.perf_counter() - started
        if seconds > _SLOW_SECONDS:
            _note(outcome, damaged, TimeoutError("it took longer than a small file may"), most_failures)
        outcome.slowest_seconds = max(outcome.slowest_seconds, seconds)
        outcome.inputs += 1
    return outcome


def damage_file(name: str, content: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    """The content with one to three mutations; of zip and gzip mostly inside, so that the checksum is right."""
    with contextlib.suppress(Exception):  # damaged before: then its bytes are all there is
        if name.endswith(".gz") and rng.random() < 0.7:
            return _gz(damage(gzip.decompress(content), rng, []))
        if name.endswith(".npz") and rng.random() < 0.8:
            return _damage_member(content, rng)
    return damage(content, rng, others)


def damage(content: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    """One to three mutations of plain bytes."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        content = rng.choice(_MUTATIONS)(content, rng, others)
    return content


def _place(content: bytes, rng: random.Random) -> int:
    """Anywhere; half the time where a long run of zeros is not."""
    if content and rng.random() < 0.5:
        nonzero = [i for i in rng.choices(range(len(content)), k=20) if content[i]]
        if nonzero:
            return nonzero[0]
    return rng.randrange(len(content) + 1)


def _flip(content: bytes, rng: random.Random, _: list[bytes]) -> bytes:
    if not content:
        return content
    i = min(_place(content, rng), len(content) - 1)
    return content[:i] + bytes([content[i] ^ (1 << rng.randrange(8))]) + content[i + 1 :]


def _insert(content: bytes, rng: random.Random, _: list[bytes]) -> bytes:
    i = _place(content, rng)
    return content[:i] + rng.randbytes(rng.randrange(1, 9)) + content[i:]


def _insert_word(content: bytes, rng: random.Random, _: list[bytes]) -> bytes:
    i = _place(content, rng)
    return content[:i] + rng.choice(_WORDS + _NUMBERS) + content[i:]


def _delete(content: bytes, rng: random.Random, _: list[bytes]) -> bytes:
    i = _place(content, rng)
    return content[:i] + content[i + rng.choice((1, 1, 2, 8, 64)) :]


def _repeat(content: bytes, rng: random.Random, _: list[bytes]) -> bytes:
    i = _place(content, rng)
    return content[:i] + content[i : i + rng.choice((1, 8, 40))] * rng.choice((2, 3, 50)) + content[i:]


def _cut(content: bytes, rng: random.Random, _: list[bytes]) -> bytes:
    return content[: _place(content, rng)]


def _splice(content: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    other = rng.choice(others) if others else content
    return content[: _place(content, rng)] + other[_place(other, rng) :]


def _replace_number(content: bytes, rng: random.Random, _: list[bytes]) -> bytes:
    """Another number in place of a run of digits."""
    i = _place(content, rng)
    while i < len(content) and not 48 <= content[i] <= 57:
        i += 1
    end = i
    while end < len(content) and 48 <= content[end] <= 57:
        end += 1
    return content[:i] + rng.choice(_NUMBERS) + content[end:]


def _overwrite_integer(content: bytes, rng: random.Random, _: list[bytes]) -> bytes:
    i, width = _place(content, rng), rng.choice((1, 4, 8))
    number = rng.choice(_INTEGERS) % 2 ** (8 * width)
    return content[:i] + number.to_bytes(width, "little") + content[i + width :]


def _move_lines(content: bytes, rng: random.Random, _: list[bytes]) -> bytes:
    lines = content.split(b"\n")
    i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
    kind = rng.randrange(4)
    if kind == 0:
        lines[i], lines[j] = lines[j], lines[i]
    elif kind == 1:
        lines.insert(i, lines[j])
    elif kind == 2:
        del lines[i]
    else:
        lines.insert(i, b"")
    return b"\n".join(lines)


_MUTATIONS: tuple[Callable[[bytes, random.Random, list[bytes]], bytes], ...] = (
    *(_flip, _insert, _insert_word, _delete, _repeat, _cut, _splice, _overwrite_integer),
    *(_replace_number, _replace_number, _replace_number, _move_lines),
)


def _damage_member(content: bytes, rng: random.Random) -> bytes:
    """An .npz with one member damaged, dropped, doubled under another name or swapped, and right checksums."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = rng.choice(list(members))
    kind = rng.randrange(8)
    if kind == 0:
        del members[name]
    elif kind == 1:
        members[rng.choice(list(members))] = members[name]
    elif kind == 2:
        members[rng.choice(("x.npy", "node_data.x.npy", "edge_data.x.npy", "label.npy", "metric.npy"))] = members[name]
    else:
        members[name] = damage(members[name], rng, list(members.values()))
    return _zip(members)


def _note(outcome: Outcome, files: Files, error: BaseException, most: int) -> None:
    outcome.other += 1
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    kind = f"{type(error).__name__}{place}: {str(error)[:150]}"
    outcome.kinds[kind] += 1
    if len(outcome.failures) < most and outcome.kinds[kind] == 1:
        outcome.failures.append((files, kind))


def _small_graph():  # type: ignore[no-untyped-def]
    import torch

    from nugnn.datasets import GraphData

    return GraphData(
        name="small",
        num_nodes=5,
        src=torch.tensor([0, 1, 1, 2, 4]),
        dst=torch.tensor([1, 2, 2, 2, 0]),
        features=torch.arange(10.0).reshape(5, 2),
        labels=torch.tensor([0, 1, 2, -1, 0]),
        train_nodes=torch.tensor([0, 1]),
        val_nodes=torch.tensor([2]),
        test_nodes=torch.tensor([4]),
        node_data={"year": torch.arange(5)},
        edge_data={"weight": torch.tensor([1.0, 2.0, 0.5, 4.0, 5.0])},
    )


def _gz(content: bytes) -> bytes:
    return gzip.compress(content, 1, mtime=0)


def _zip(members: Files, compressed: bool = False) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return buffer.getvalue()


def _npz(graph, compressed: bool = False) -> bytes:  # type: ignore[no-untyped-def]
    from nugnn.datasets import write_npz

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "g.npz"
        write_npz(graph, path)
        with zipfile.ZipFile(path) as archive:
            return _zip({name: archive.read(name) for name in archive.namelist()}, compressed)


def _dgl_targets(graph) -> Iterator[Target]:  # type: ignore[no-untyped-def]
    """What DGL and write_dgl_partition write of the small graph."""
    import nugnn  # noqa: F401  # lets dgl import

    # isort: split
    import dgl

    from nugnn.partition.assign import partition_nodes
    from nugnn.partition.dgl_partition import write_dgl_partition

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        graphs = []
        for formats in ("coo", "csr", "csc"):
            dgl.save_graphs(str(folder / "g.bin"), [graph.to_dgl()], formats=formats)
            graphs.append({"g.bin": (folder / "g.bin").read_bytes()})
        (folder / "g.bin").unlink()
        parts = partition_nodes(5, graph.src, graph.dst, [1, 1], method="given", parts=[0, 1, 0, 1, 1])
        description = write_dgl_partition(graph, parts, folder)
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        files[description.name] = json.dumps(json.loads(files[description.name]), separators=(",", ":")).encode()
        without = {name: content for name, content in files.items() if name != "nugnn.npz"}
    yield Target("DGL graph", tuple(graphs), "g.bin")
    yield Target("DGL partition, JSON", (files,), description.name, (description.name,))
    yield Target(
        "DGL partition, parts", (without,), description.name, tuple(n for n in without if n != description.name)
    )
    yield Target("DGL partition, nugnn.npz", (files,), description.name, ("nugnn.npz",))


def _ogb_targets() -> Iterator[Target]:
    """OGB's raw files: gzipped CSV, with and without what is optional; and the arrays of its largest graph."""
    from nugnn.datasets.ogb import read_ogb

    counts = {"num-node-list": b"4\n", "num-edge-list": b"5\n", "edge": b"0,1\n1,2\n2,2\n3,0\n0,1\n"}
    features = {"node-feat": b"0.5,1\n-2,1e-3\n0,0\n3,4.25\n", "node_year": b"2010\n2011\n2012\n2013\n"}
    features |= {"edge-feat": b"1,0\n0.5,2\n3,1\n0,0\n1,1\n", "node-label": b"0\n1\nnan\n1\n"}
    split = {f"split/time/{part}.csv.gz": _gz(f"{row}\n".encode()) for row, part in enumerate(("train", "valid"))}
    split |= {"split/time/test.csv.gz": _gz(b"3\n")}

    def packed(tables: Files) -> Files:
        return {f"raw/{name}.csv.gz": _gz(text) for name, text in tables.items()} | split

    seeds = (packed(counts | features), packed(counts | {"node-label": b"0,1\n1,0\n1,1\n0,0\n"}))
    yield Target("OGB CSV", seeds, ".", read=lambda folder: read_ogb(folder, "fuzzed"))
    arrays = {
        "edge_index": np.array([[0, 1, 2, 3], [1, 2, 3, 0]]),
        "num_nodes_list": np.array([4]),
        "num_edges_list": np.array([4]),
        "node_feat": np.arange(12, dtype=np.float32).reshape(4, 3),
        "node_year": np.arange(2010, 2014).reshape(4, 1),
    }
    binary = tuple(
        {
            "raw/data.npz": _saved(arrays, compressed),
            "raw/node-label.npz": _saved({"node_label": np.array([[0], [1], [np.nan], [1]], np.float32)}, compressed),
        }
        | split
        for compressed in (True, False)
    )
    yield Target("OGB binary", binary, ".", read=lambda folder: read_ogb(folder, "ogbn-papers100M"))


def _saved(arrays: dict[str, np.ndarray], compressed: bool) -> bytes:
    buffer = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(buffer, **arrays)
    return buffer.getvalue()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=200_000, help="of all readers together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="targets whose name contains this")
    parser.add_argument("--save", type=Path, default=Path("fuzz_failures"), help="where inputs that fail are kept")
    options = parser.parse_args()
    import torch

    import nugnn  # noqa: F401

    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    chosen = [target for target in targets() if options.only in target.name]
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
    each = -(-options.inputs // max(1, len(chosen)))
    print(
        f"{'reader':<26}{'inputs':>9}{'fine':>9}{'refused':>9}{'other':>7}{'slowest s':>11}{'seconds':>9}", flush=True
    )
    total = Outcome()
    for target in chosen:
        base = Path("/dev/shm") if Path("/dev/shm").is_dir() else None  # no disk is worn out
        folder = Path(tempfile.mkdtemp(prefix="fuzz_", dir=base))
        started = time.perf_counter()
        found = fuzz(target, each, random.Random(f"{options.seed} {target.name}"), folder)
        shutil.rmtree(folder)
        print(
            f"{target.name:<26}{found.inputs:>9}{found.fine:>9}{found.refused:>9}{found.other:>7}"
            f"{found.slowest_seconds:>11.3f}{time.perf_counter() - started:>9.1f}",
            flush=True,
        )
        for kind, count in found.kinds.most_common():
            print(f"    {count} x {kind}", flush=True)
        for number, (files, _) in enumerate(found.failures):
            for name, content in files.items():
                path = options.save / f"{target.name.replace(' ', '_')}_{number}" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        for attribute in ("inputs", "fine", "refused", "other"):
            setattr(total, attribute, getattr(total, attribute) + getattr(found, attribute))
        total.slowest_seconds = max(total.slowest_seconds, found.slowest_seconds)
    print(
        f"{'all':<26}{total.inputs:>9}{total.fine:>9}{total.refused:>9}{total.other:>7}{total.slowest_seconds:>11.3f}"
    )
    if total.other:
        print(f"inputs that fail are kept in {options.save}")
    return 1 if total.other else 0


if __name__ == "__main__":
    raise SystemExit(main())
