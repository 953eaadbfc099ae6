"""Data sets of samples, images, text and tables, each as the same ``SampleData``."""

from nugnn.datasets.samples.preparation import SavedPreparation, load_preparation
from nugnn.datasets.samples.registry import load_samples
from nugnn.datasets.samples.sample_data import SampleData
from nugnn.datasets.samples.table_encoder import TableEncoder
from nugnn.datasets.samples.tensor_samples import TensorSamples
from nugnn.datasets.samples.text_encoder import TextEncoder

__all__ = [
    "SampleData",
    "SavedPreparation",
    "TableEncoder",
    "TensorSamples",
    "TextEncoder",
    "load_preparation",
    "load_samples",
]
