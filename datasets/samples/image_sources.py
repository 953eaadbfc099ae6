"""Named sets of small images: where they lie, and where their files come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from nugnn.datasets.archive import extract
from nugnn.datasets.download import DownloadError, Progress, RemoteFile, download, locked
from nugnn.sample_sets import PublishedImages

NPZ_KEYS = ("x_train", "y_train", "x_test", "y_test")
"""Arrays of a set that lies in one ``.npz``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSet:
    """A published set of images and where its files come from.

    Sizes and hashes are those that TensorFlow Datasets checks (``tensorflow_datasets/url_checksums``).
    """

    name: PublishedImages
    folders: tuple[str, ...]
    """Names under which it lies in a data folder, in any spelling of case and ``-``; the whole set first."""
    class_names: tuple[str, ...]
    files: tuple[RemoteFile, ...]
    kind: str = "idx"
    """``idx`` or ``cifar``: what the files are."""


def _idx_files(address: str, *known: tuple[str, int, str]) -> tuple[RemoteFile, ...]:
    return tuple(RemoteFile(url=f"{address}{name}.gz", num_bytes=size, sha256=sha256) for name, size, sha256 in known)


_SOURCES: dict[str, ImageSet] = {
    known.name: known
    for known in (
        ImageSet(
            name="mnist",
            folders=("mnist", "mnist-test"),
            class_names=tuple("0123456789"),
            files=_idx_files(
                "https://storage.googleapis.com/cvdf-datasets/mnist/",
                (
                    "train-images-idx3-ubyte",
                    9_912_422,
                    "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                ),
                ("train-labels-idx1-ubyte", 28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
                (
                    "t10k-images-idx3-ubyte",
                    1_648_877,
                    "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                ),
                ("t10k-labels-idx1-ubyte", 4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
            ),
        ),
        ImageSet(
            name="fashion-mnist",
            folders=("fashion-mnist", "fashionmnist", "dataset-fashion-mnist", "fashion-mnist-small"),
            class_names=(
                *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
                *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
            ),
            files=_idx_files(
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
                (
                    "train-images-idx3-ubyte",
                    26_421_880,
                    "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
                ),
                ("train-labels-idx1-ubyte", 29_515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
                (
                    "t10k-images-idx3-ubyte",
                    4_422_102,
                    "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
                ),
                ("t10k-labels-idx1-ubyte", 5_148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
            ),
        ),
        ImageSet(
            name="cifar10",
            folders=("cifar10", "cifar-10", "cifar-10-batches-bin"),
            class_names=(
                *("airplane", "automobile", "bird", "cat", "deer"),
                *("dog", "frog", "horse", "ship", "truck"),
            ),
            files=(
                RemoteFile(
                    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                    num_bytes=170_052_171,
                    sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                ),
            ),
            kind="cifar",
        ),
    )
}
IMAGE_SETS = {name: _SOURCES[name] for name in get_args(PublishedImages)}


def is_unfinished(known: ImageSet, folder: Path) -> bool:
    """Whether a download into this folder was interrupted."""
    have = [(folder / remote.file_name).is_file() for remote in known.files]
    return any(have) and not all(have)


def fetched(known: ImageSet, data_dir: Path | None, store: Path, progress: Progress | None) -> Path:
    """The folder in the cache with the files as published; what is missing is downloaded."""
    folder = store / known.folders[0].replace("-", "_")
    if known.kind == "idx":
        for remote in known.files:
            _fetch(known, remote, folder / remote.file_name, progress)
        return folder
    (remote,) = known.files
    try:
        store.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            if folder.is_dir():
                return folder
            by_hand = [place / remote.file_name for place in (data_dir, store) if place is not None]
            archive = next((path for path in by_hand if path.is_file()), None)
            if archive is not None:
                extract(archive, folder)
            else:
                archive = _fetch(known, remote, store / remote.file_name, progress)
                extract(archive, folder)
                archive.unlink()
    except OSError as error:
        raise ValueError(
            f"the cache folder {store} cannot be written ({error.strerror or error}); name another with NUGNN_CACHE"
        ) from error
    return folder


def _fetch(known: ImageSet, remote: RemoteFile, target: Path, progress: Progress | None) -> Path:
    try:
        return download(remote, target, progress=progress)
    except DownloadError as error:
        names = ", ".join(file.file_name for file in known.files)
        version = " (the binary version, not the pickled one)" if known.kind == "cifar" else ""
        raise DownloadError(
            f"{known.name} is not on this machine: {error}. Wanted are {names}{version} from "
            f"{remote.url.rpartition('/')[0]}/, or an .npz with {', '.join(NPZ_KEYS)}, in the folder "
            "that --data-dir names"
        ) from error
