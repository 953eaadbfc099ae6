"""Datasets, each as the same ``GraphData``."""

from nugnn.datasets.cache_location import cache_folder
from nugnn.datasets.digits import digits
from nugnn.datasets.fetch import prepare
from nugnn.datasets.formats import FORMATS, read_path
from nugnn.datasets.graph_data import GraphData, Metric
from nugnn.datasets.labels import class_ids
from nugnn.datasets.npz import read_npz, write_npz
from nugnn.datasets.registry import DatasetEntry, info, list_datasets, load
from nugnn.datasets.synthetic import mixed_like, planted_communities, products_like
from nugnn.datasets.transforms import make_undirected, normalize_features, self_loops

__all__ = [
    "FORMATS",
    "DatasetEntry",
    "GraphData",
    "Metric",
    "cache_folder",
    "class_ids",
    "digits",
    "info",
    "list_datasets",
    "load",
    "make_undirected",
    "mixed_like",
    "normalize_features",
    "planted_communities",
    "prepare",
    "products_like",
    "read_npz",
    "read_path",
    "self_loops",
    "write_npz",
]
