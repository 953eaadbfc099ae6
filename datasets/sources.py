"""The named data sets: published counts, and where their files come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nugnn.datasets.download import RemoteFile
from nugnn.datasets.graph_data import Metric
from nugnn.datasets.planetoid import PARTS

Kind = Literal["files", "archive"]
BUILT_IN = ("digits", "products-like", "mixed-like")
"""Graphs that need no file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Files to download: those of the data set themselves, or one archive that holds them."""

    files: tuple[RemoteFile, ...]
    kind: Kind = "files"

    @property
    def num_bytes(self) -> int | None:
        """Size of the download, exact or rough; None when nobody states it."""
        sizes = [file.num_bytes or file.about_bytes for file in self.files]
        return None if None in sizes else sum(size for size in sizes if size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A named data set as its authors describe it; 0 where they do not, or where the reader decides."""

    name: str
    """Lower case, with ``-``."""
    num_nodes: int = 0
    num_edges: int = 0
    """Arcs as nuGNN counts them: an undirected edge twice, without the self-loops and duplicates that readers drop."""
    num_features: int = 0
    num_classes: int = 0
    split: tuple[int, int, int] | None = None
    """Sizes of train, val and test."""
    metric: Metric = "auto"
    source: Source | None = None
    note: str = ""
    """What a user should know whenever the data set is loaded."""

    @property
    def folder(self) -> str:
        """Name of the data set's folder, in a data folder and in the cache."""
        return self.name.replace("-", "_")


_PLANETOID = "https://github.com/kimiyoung/planetoid/raw/master/data/"
_SHCHUR = "https://github.com/shchur/gnn-benchmark/raw/master/data/npz/"
_GRAPH2GAUSS = "https://github.com/abojchevski/graph2gauss/raw/master/data/"
_HETEROPHILOUS = "https://github.com/yandex-research/heterophilous-graphs/raw/main/data/"
_DGL = "https://data.dgl.ai/dataset/"
_OGB = "https://snap.stanford.edu/ogb/data/nodeproppred/"
_GB = 1 << 30


def _planetoid(name: str) -> Source:
    return Source(files=tuple(RemoteFile(url=f"{_PLANETOID}ind.{name}.{part}") for part in PARTS))


def _file(url: str) -> Source:
    return Source(files=(RemoteFile(url=url),))


def _archive(url: str, about_gb: float | None = None) -> Source:
    about_bytes = None if about_gb is None else round(about_gb * _GB)
    return Source(files=(RemoteFile(url=url, about_bytes=about_bytes),), kind="archive")


def _published(
    name: str,
    counts: tuple[int, int, int, int] = (0, 0, 0, 0),
    split: tuple[int, int, int] | None = None,
    source: Source | None = None,
    metric: Metric = "auto",
    note: str = "",
) -> Published:
    num_nodes, num_edges, num_features, num_classes = counts
    return Published(
        name=name,
        num_nodes=num_nodes,
        num_edges=num_edges,
        num_features=num_features,
        num_classes=num_classes,
        split=split,
        metric=metric,
        source=source,
        note=note,
    )


_MAG_NOTE = (
    "ogbn-mag is used as its homogeneous paper graph: papers and the citations between them; authors, institutions and "
    "fields of study are left out"
)

_TABLE = (
    # name, (nodes, arcs, features, classes), (train, val, test), source
    _published("cora", (2_708, 10_556, 1_433, 7), (140, 500, 1000), _planetoid("cora")),
    _published("citeseer", (3_327, 9_104, 3_703, 6), (120, 500, 1000), _planetoid("citeseer")),
    _published("pubmed", (19_717, 88_648, 500, 3), (60, 500, 1000), _planetoid("pubmed")),
    _published("cora-full", (19_793, 126_842, 8_710, 70), None, _file(f"{_SHCHUR}cora_full.npz")),
    _published("dblp", (17_716, 105_734, 1_639, 4), None, _file(f"{_GRAPH2GAUSS}dblp.npz")),
    _published(
        "amazon-computers", (13_752, 491_722, 767, 10), None, _file(f"{_SHCHUR}amazon_electronics_computers.npz")
    ),
    _published("amazon-photo", (7_650, 238_162, 745, 8), None, _file(f"{_SHCHUR}amazon_electronics_photo.npz")),
    _published("coauthor-cs", (18_333, 163_788, 6_805, 15), None, _file(f"{_SHCHUR}ms_academic_cs.npz")),
    _published("coauthor-physics", (34_493, 495_924, 8_415, 5), None, _file(f"{_SHCHUR}ms_academic_phy.npz")),
    _published("reddit", (232_965, 114_615_892, 602, 41), (153_431, 23_831, 55_703), _archive(f"{_DGL}reddit.zip")),
    _published("flickr", (89_250, 899_756, 500, 7), (44_625, 22_312, 22_313), _archive(f"{_DGL}flickr.zip")),
    _published("yelp", (716_847, 13_954_819, 300, 100), (537_635, 107_527, 71_685), _archive(f"{_DGL}yelp.zip")),
    _published("actor", (7_600, 53_318, 932, 5), (3648, 2432, 1520), _file(f"{_HETEROPHILOUS}actor.npz")),
    _published("chameleon", (2_277, 62_742, 2_325, 5), None, _file(f"{_HETEROPHILOUS}chameleon.npz")),
    _published("squirrel", (5_201, 396_706, 2_089, 5), (2496, 1664, 1041), _file(f"{_HETEROPHILOUS}squirrel.npz")),
    _published("cornell", (183, 0, 1_703, 5), None, _file(f"{_HETEROPHILOUS}cornell.npz")),
    _published("texas", (183, 0, 1_703, 5), None, _file(f"{_HETEROPHILOUS}texas.npz")),
    _published("wisconsin", (251, 0, 1_703, 5), None, _file(f"{_HETEROPHILOUS}wisconsin.npz")),
    _published("roman-empire", (22_662, 65_854, 300, 18), None, _file(f"{_HETEROPHILOUS}roman_empire.npz")),
    _published("amazon-ratings", (24_492, 186_100, 300, 5), None, _file(f"{_HETEROPHILOUS}amazon_ratings.npz")),
    _published(
        "minesweeper", (10_000, 78_804, 7, 2), (5000, 2500, 2500), _file(f"{_HETEROPHILOUS}minesweeper.npz"), "roc_auc"
    ),
    _published(
        "tolokers", (11_758, 1_038_000, 10, 2), (5879, 2939, 2940), _file(f"{_HETEROPHILOUS}tolokers.npz"), "roc_auc"
    ),
    _published("questions", (48_921, 307_080, 301, 2), None, _file(f"{_HETEROPHILOUS}questions.npz"), "roc_auc"),
    _published(
        "ogbn-arxiv",
        (169_343, 1_166_243, 128, 40),
        (90_941, 29_799, 48_603),
        _archive(f"{_OGB}arxiv.zip", 0.08),
    ),
    _published(
        "ogbn-products",
        (2_449_029, 123_718_280, 100, 47),
        (196_615, 39_323, 2_213_091),
        _archive(f"{_OGB}products.zip", 1.38),
    ),
    _published(
        "ogbn-proteins",
        (132_534, 79_122_504, 0, 112),
        (86_619, 21_236, 24_679),
        _archive(f"{_OGB}proteins.zip", 0.21),
        "roc_auc",
    ),
    _published(
        "ogbn-mag",
        (736_389, 5_416_271, 128, 349),
        (629_571, 64_879, 41_939),
        _archive(f"{_OGB}mag.zip", 0.4),
        note=_MAG_NOTE,
    ),
    _published(
        "ogbn-papers100m",
        (111_059_956, 1_615_685_872, 128, 172),
        (1_207_179, 125_265, 214_338),
        _archive(f"{_OGB}papers100M-bin.zip", 56.17),
    ),
    # no source that nuGNN reads: the graph has to be put there by hand
    _published("wordnet", (117_659, 367_578, 1_024, 45), (70_595, 23_532, 23_532)),
    _published("blogcatalog-attr", (5_196, 343_486, 8_189, 6)),
    _published("flickr-attr", (7_575, 479_476, 12_047, 9)),
    _published("fb100-cornell5", (18_660, 1_581_554, 347, 6)),
    _published("facebook-pages", (22_470, 341_646, 4_714, 4)),
    *(_published(name) for name in ("wiki-cs", "ppi", "penn94", "genius", "pokec")),
)

PUBLISHED: dict[str, Published] = {entry.name: entry for entry in _TABLE}
"""By normalised name."""


def normalised(name: str) -> str:
    """One spelling for names that differ in case, ``-`` and ``_``.

    >>> normalised("OGBN_Products")
    'ogbn-products'
    """
    return name.strip().lower().replace("_", "-")


def source_of_file(file_name: str) -> Published | None:
    """The data set whose archive goes by that name, if any."""
    for entry in PUBLISHED.values():
        if entry.source is not None and entry.source.kind == "archive":
            if entry.source.files[0].file_name.lower() == file_name.lower():
                return entry
    return None
