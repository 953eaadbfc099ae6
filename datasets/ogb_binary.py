"""OGB's binary layout, that of ogbn-papers100M: arrays in two ``.npz``, read block by block."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from nugnn.datasets.array_writers import ArrayWriter
from nugnn.datasets.npz_stream import NpzMember, npz_members
from nugnn.datasets.ogb_files import (
    OgbError,
    OgbFiles,
    all_there,
    allowed,
    at_least,
    check_finite,
    id_type,
    write_labels,
)


class BinaryFiles(OgbFiles):
    """The binary layout of ogbn-papers100M: ``raw/data.npz`` and ``raw/node-label.npz``."""

    def __init__(self, raw: Path, split: Path) -> None:
        super().__init__(split)
        self.path, self.label_path = raw / "data.npz", raw / "node-label.npz"
        self.members = npz_members(self.path)
        for name in ("edge_index", "num_nodes_list", "num_edges_list"):
            if name not in self.members:
                raise OgbError(f"{self.path} lacks {name}; it holds {', '.join(self.members) or 'nothing'}")
        for name in self.members:
            if not name.startswith(("node_", "edge_", "num_nodes_list", "num_edges_list")):
                raise OgbError(f"{self.path}: unknown array {name!r}; names begin with node_ or edge_")

    def sources(self) -> list[Path]:
        return all_there([self.path, self.label_path, *self.split_files().values()])

    def check_features(self, name: str, of_nodes: int, of_edges: bool) -> None:
        for array, wanted in (("node_feat", of_nodes), ("edge_feat", of_edges)):
            if wanted and array not in self.members:
                raise OgbError(
                    f"{self.path} lacks {array}, which {name} has; get the file again. Another graph in this layout "
                    "needs a folder of another name"
                )

    def num_nodes(self) -> int:
        return self._single("num_nodes_list", "nodes", least=1)

    def _single(self, name: str, what: str, least: int) -> int:
        member = self.members[name]
        if member.dtype.kind not in "iu" or int(np.prod(member.shape, dtype=object)) != 1:
            raise OgbError(
                f"{self.path}: {name} is {member.dtype} {member.shape}; expected one number of {what}: node data sets "
                "have one graph"
            )
        return at_least(int(next(member.blocks())[0]), what, self.path, least)

    def write(self, arrays: ArrayWriter) -> None:
        num_nodes, num_edges = self.num_nodes(), self._single("num_edges_list", "edges", least=0)
        self._write_edges(arrays, num_nodes, num_edges)
        for name, member in self.members.items():
            if name in ("edge_index", "num_nodes_list", "num_edges_list"):
                continue
            target = {"node_feat": "feat", "edge_feat": "edge_data.feat"}.get(name, f"{name[:4]}_data.{name}")
            self._write_rows(arrays, target, member, num_nodes if name.startswith("node_") else num_edges)
        members = npz_members(self.label_path)
        if "node_label" not in members:
            raise OgbError(f"{self.label_path} lacks node_label; it holds {', '.join(members) or 'nothing'}")
        member = members["node_label"]
        if len(member.shape) not in (1, 2) or member.shape[0] != num_nodes or 0 in member.shape:
            raise OgbError(f"{self.label_path}: node_label has shape {member.shape}; expected ({num_nodes}, tasks)")
        columns = member.shape[1] if len(member.shape) == 2 else 1
        blocks = (block.reshape(-1, columns).astype(np.float64) for block in member.row_blocks())
        write_labels(arrays, blocks, self.label_path, num_nodes)
        self.write_splits(arrays, num_nodes)

    def _write_edges(self, arrays: ArrayWriter, num_nodes: int, num_edges: int) -> None:
        member, dtype = self.members["edge_index"], id_type(num_nodes)
        if member.dtype.kind not in "iu" or member.shape != (2, num_edges):
            raise OgbError(
                f"{self.path}: edge_index is {member.dtype} {member.shape}; expected integers of shape "
                f"(2, {num_edges}), as num_edges_list says"
            )
        ends = [arrays.create(name, (num_edges,), dtype) for name in ("src", "dst")]
        place = 0
        for block in member.blocks():
            _check_binary_ids(self.path, block, place, num_nodes, num_edges, member.fortran_order)
            ids = block.astype(dtype)
            if member.fortran_order:  # source and target of an edge side by side
                first = place % 2
                ends[0].append(ids[first::2])
                ends[1].append(ids[1 - first :: 2])
            else:  # all sources, then all targets
                split = min(max(0, num_edges - place), len(ids))
                ends[0].append(ids[:split])
                ends[1].append(ids[split:])
            place += len(ids)
        for end in ends:
            end.close()

    def _write_rows(self, arrays: ArrayWriter, target: str, member: NpzMember, num_rows: int) -> None:
        if not member.shape or member.shape[0] != num_rows:
            raise OgbError(f"{self.path}: {member.name} has shape {member.shape}; expected {num_rows} rows")
        if target == "feat" and len(member.shape) != 2:
            raise OgbError(f"{self.path}: node_feat has shape {member.shape}; expected (nodes, features)")
        integers_to_float = target.endswith("feat") and member.dtype.kind != "f"
        column = arrays.create(target, member.shape, np.float32 if integers_to_float else member.dtype)
        row = 0
        for block in member.row_blocks():
            if target == "feat":
                check_finite(self.path, block, "node_feat, row {}, column {} is {}", row)
            column.append(block)
            row += len(block)
        column.close()


def _check_binary_ids(
    path: Path, ids: np.ndarray, first: int, num_nodes: int, num_edges: int, side_by_side: bool
) -> None:
    if len(ids) == 0 or (ids.min() >= 0 and ids.max() < num_nodes):
        return
    bad = int(((ids < 0) | (ids >= num_nodes)).argmax())
    end, edge = (first + bad) % 2, (first + bad) // 2
    if not side_by_side:
        end, edge = divmod(first + bad, num_edges)
    raise OgbError(
        f"{path}: edge_index, the {('source', 'target')[end]} of edge row {edge} is {ids[bad]}, out of range: "
        f"{allowed(num_nodes)}"
    )
