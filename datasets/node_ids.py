"""From the ids a user gave the nodes, numbers or text, to rows ``0 .. N - 1``, with the ids kept.

Shape suffixes: N nodes, E edges.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

Ids: TypeAlias = Any
"""int64 NumPy array, or an Arrow column of text without nulls."""

LONGEST_ID = 256
"""Characters of an id; they are kept as an array of text of one width."""


def number_nodes(src: Ids, dst: Ids, further: Ids | None = None) -> tuple[Ids, np.ndarray, np.ndarray]:
    """Number the distinct ids in ascending order, numbers by value and text by code points.

    Args:
        src: ``(E,)`` ids.
        dst: ``(E,)`` ids of the same kind.
        further: More ids that get a row.

    Returns:
        The ids of the rows, ``(N,)``, and the rows of ``src`` and ``dst``, int64.
    """
    lists = [src, dst] if further is None else [src, dst, further]
    if isinstance(src, np.ndarray):
        listed: Any = np.unique(np.concatenate([np.unique(ids) for ids in lists]))
    else:
        import pyarrow as pa

        distinct = pa.chunked_array([ids.unique() for ids in lists], type=pa.string()).unique()
        listed = _sorted_text(distinct)
    return listed, rows_of(src, listed), rows_of(dst, listed)


def rows_of(ids: Ids, listed: Ids) -> np.ndarray:
    """Row of each id in ``listed``, whose entries differ; -1 for one that is not there. int64."""
    if not isinstance(ids, np.ndarray):
        import pyarrow.compute as pc

        found = pc.index_in(ids, value_set=listed.combine_chunks())
        return np.asarray(found.fill_null(-1)).astype(np.int64)
    if not len(listed):
        return np.full(len(ids), -1)
    if _are_rows(listed):
        return np.where((ids >= 0) & (ids < len(listed)), ids, -1)
    order = np.argsort(listed, kind="stable")
    ascending = listed[order]
    place = np.searchsorted(ascending, ids).clip(max=len(listed) - 1)
    return np.where(ascending[place] == ids, order[place], -1)


def kept_ids(where: str, listed: Ids) -> np.ndarray | None:
    """The ids as ``GraphData.original_ids`` keeps them: None when they are the rows themselves.

    Raises:
        ValueError: an id of text is empty, too long or holds a NUL character.
    """
    if isinstance(listed, np.ndarray):
        return None if _are_rows(listed) else listed
    texts = listed.to_pylist()
    for text in texts:
        if not text or len(text) > LONGEST_ID or "\0" in text:
            problem = (
                f"has {len(text)} characters, {LONGEST_ID} are allowed" if len(text) > LONGEST_ID else "is not usable"
            )
            raise ValueError(f"{where}: the id {text!r:.80} {problem}; give every node a short text or a whole number")
    return np.array(texts, dtype=np.str_)


def check_claimed_nodes(where: str, num_nodes: int, num_entries: int) -> None:
    """Refuse a node count that leaves nearly all nodes isolated: one damaged digit would ask for terabytes."""
    limit = max(10_000_000, 100 * num_entries)
    if num_nodes > limit:
        raise ValueError(
            f"{where}: the header announces {num_nodes} nodes for {num_entries} edges; above {limit} nodes nearly all "
            "would be isolated, so the header is taken to be damaged"
        )


def _sorted_text(distinct: pa.Array) -> pa.ChunkedArray:
    import pyarrow as pa
    import pyarrow.compute as pc

    return pa.chunked_array([distinct.take(pc.array_sort_indices(distinct))], type=pa.string())


def _are_rows(listed: np.ndarray) -> bool:
    return bool(np.array_equal(listed, np.arange(len(listed))))
