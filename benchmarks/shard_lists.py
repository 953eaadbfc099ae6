"""Prints how many public names of DGL a shard graph answers exactly, locally, or not at all.

Run: ``python benchmarks/shard_lists.py``.
"""

from __future__ import annotations

from nugnn import shard_lists


def main() -> None:
    """One line for each list."""
    rows = [
        ("exact", shard_lists.EXACT_METHODS, shard_lists.EXACT_FUNCTIONS),
        ("local", shard_lists.LOCAL_METHODS, shard_lists.LOCAL_FUNCTIONS),
        ("refused", shard_lists.REFUSED_METHODS, shard_lists.REFUSED_FUNCTIONS),
        ("takes no graph", (), shard_lists.TAKES_NO_GRAPH),
    ]
    print(f"{'list':<16}{'methods':>8}{'functions':>11}")
    for name, methods, functions in rows:
        print(f"{name:<16}{len(methods):>8}{len(functions):>11}")
    print(f"{'all':<16}{sum(len(r[1]) for r in rows):>8}{sum(len(r[2]) for r in rows):>11}")


if __name__ == "__main__":
    main()
