"""Writes docs/performance.md from the JSON rows of the GPU benchmarks, and from nothing else.

    python benchmarks/report_performance.py                     # from benchmarks/rows, which the repository keeps
    python benchmarks/report_performance.py ROWS [ROWS ...] --page PAGE

Each ROWS is a folder that `gpu_all.sh` has filled. Of rows that measure the same on the same card the last one counts.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from harness import ROOT, markdown, read_rows

Row = dict[str, Any]
KEPT = ROOT / "benchmarks" / "rows"
IDENTITY = ("kind", "system", "graph", "order", "dtype", "shape", "model", "seed")
EXPECTED_ON_H100 = {
    ("given", "fp32", 128): 23.2,
    ("given", "fp32", 256): 46.0,
    ("planted", "fp32", 128): 9.7,
    ("planted", "fp32", 256): 19.2,
    ("given", "bf16", 128): 14.7,
    ("given", "bf16", 256): 29.3,
    ("planted", "bf16", 128): 9.4,
    ("planted", "bf16", 256): 18.7,
}
"""Milliseconds of cuSPARSE in an earlier measurement on an H100, products-like; 10 % more is a bug of the benchmark."""
EXPECTED_EPOCH_ON_H100 = {("sage", "fp32"): 249.0, ("sage", "bf16"): 144.0}
_DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def latest(rows: Iterable[Row]) -> list[Row]:
    """One row for each measurement, in the order in which they first came."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        found[(row["machine"]["card"], *(row.get(name) for name in IDENTITY))] = row
    return list(found.values())


def page(rows: list[Row]) -> str:
    """The whole page, in Markdown."""
    parts = [
        "# Performance on GPUs",
        "Written by `python benchmarks/report_performance.py`; do not edit. Rows come from `benchmarks/gpu_all.sh` "
        "and the other commands of its section in `benchmarks/README.md`. "
        "Times are milliseconds, the median with the 20th and 80th percentile; CUDA events around each call, L2 "
        "written over before it. A result is checked before it is timed; what could not run says why. What was "
        "expected of each step, and what came of it: `performance-notes.md`. The rows are kept in `benchmarks/rows`; "
        "those with `restored` were lost but for their figures, on an earlier page or in the run's log.",
    ]
    partitions = [row for row in rows if row["kind"] == "partition"]
    rows = latest(row for row in rows if row["kind"] != "partition")
    for card in sorted({row["machine"]["card"] for row in rows}):
        of_card = [row for row in rows if row["machine"]["card"] == card]
        parts.append(f"## {card}")
        parts.append(machine_line(of_card))
        for section in (
            bounds,
            generation,
            products,
            all_products,
            beside,
            all_peers,
            baselines,
            epochs,
            scaling,
            curves,
        ):
            text = section(of_card, card)
            if text:
                parts.append(text)
    if partitions:
        parts += ["## Partition and order", *partitioning(partitions)]
    return "\n\n".join(parts) + "\n"


def partitioning(rows: list[Row]) -> list[str]:
    """Partitioners and orders beside METIS, a section for each graph and processor; medians over rounds."""
    sections: list[str] = []

    def case_of(row: Row) -> tuple[Any, ...]:
        return row["processor"], row["graph"], row["num_nodes"], row["num_edges"], row.get("balance", "nodes")

    newest = {case_of(row): row.get("code") for row in rows}  # rows of other code are no rounds of the same
    for case, code in newest.items():
        of_case: dict[tuple[str, int], list[Row]] = {}
        for row in rows:
            if case == case_of(row) and row["work"] != "spmm" and row.get("code") == code:
                of_case.setdefault((row["work"], row["threads"]), []).append(row)
        seconds = {job: statistics.median(row["seconds"] for row in of_job) for job, of_job in of_case.items()}
        metis = sum(seconds.get((work, 1), float("nan")) for work in ("partition:metis", "order:metis"))
        lines = []
        for (work, threads), of_job in of_case.items():
            what, _, method = work.partition(":")
            order = seconds.get(("order:started" if method == "clusters" else f"order:{method}", threads))
            order = seconds.get(("order:clusters", threads)) if order is None else order
            both = seconds[work, threads] + order if what == "partition" and order is not None else None
            lines.append([
                f"{what}: {method}" + (", beside other work" if of_job[-1].get("is_busy") else ""),
                str(threads),
                f"{seconds[work, threads]:.1f}",
                f"{of_job[-1]['cut']:.4f}" if "cut" in of_job[-1] else "-",
                f"{of_job[-1]['worst_edge_load']:.2f}" if "worst_edge_load" in of_job[-1] else "-",
                f"{max(row['grown_bytes'] for row in of_job) / 2**30:.2f}",
                "-" if both is None else f"{both:.1f}" + (f" ({both / metis:.2f})" if metis > 0 else ""),
            ])  # fmt: skip
        name, graph, num_nodes, num_edges, balance = case
        shares = ", ".join(f"{share:g}" for share in next(row for row in rows if case == case_of(row))["shares"])
        head = ["work", "threads", "seconds", "cut", "edges of the fullest part beside its share"]
        head += ["GiB beyond the graph", "with its order, s (of METIS' both)"]
        title = f"{graph}, {num_nodes} nodes, {num_edges} arcs; shares {shares} of the {balance}; {name}"
        sections.append(titled(title, head, lines))
    return sections


def machine_line(rows: list[Row]) -> str:
    """Driver, versions and the code that the rows come from."""

    def all_of(name: str) -> str:
        return " and ".join(sorted({str(row["machine"].get(name)) for row in rows}))

    return (
        f"Driver {all_of('driver')}, CUDA {all_of('cuda')}, torch {all_of('torch')}, Triton {all_of('triton')}, "
        f"Python {all_of('python')}; code: {all_of('code')}."
    )


def bounds(rows: list[Row], card: str) -> str:
    """What the card can do."""
    of_kind = [row for row in rows if row["kind"] == "bound" and "value" in row]
    lines = [
        [row["system"], row.get("dtype") or "", row["shape"], f"{row['value'] / 1e12:.2f} TB/s"] for row in of_kind
    ]
    return titled("Bounds, measured", ["what", "type", "shape", "rate"], lines)


def generation(rows: list[Row], card: str) -> str:
    """Seconds and memory of the generator."""
    lines = [
        [row["graph"], row["shape"], f"{row['value']:.2f} s", gib(row)] for row in rows if row["kind"] == "generate"
    ]
    lines += [
        [row["graph"], f"order: {row['system'].split()[-1]}", outcome(row, lambda row: f"{row['value']:.1f} s"), ""]
        for row in rows
        if row["kind"] == "order"
    ]
    return titled("Making the graphs, and orders of their nodes", ["graph", "what", "time", "peak"], lines)


def products(rows: list[Row], card: str) -> str:
    """NuGNN beside the fastest cuSPARSE, with the bounds."""
    timed = {
        (row["graph"], row["dtype"], row["width"], row["order"], row["system"]): row
        for row in rows
        if row["kind"] == "spmm" and row.get("median_ms") is not None
    }
    lines = []
    for graph, dtype, width in dict.fromkeys(key[:3] for key in timed):

        def get(order: str, system: str, case: tuple[Any, ...] = (graph, dtype, width)) -> Row | None:
            return timed.get((*case, order, system))

        best = fastest_cusparse(timed, graph, dtype, width, "given")
        ours = {order: get(order, "nugnn") for order in ("given", "found", "planted")}
        cells = [graph, dtype, str(width), "-" if best is None else f"{best['median_ms']:.2f} ({best['system']})"]
        for row in ours.values():
            cells.append("-" if row is None else f"{row['median_ms']:.2f}")
        cells.append(ratio(best, ours["given"]))
        cells.append(ratio(best, ours["found"]))
        cells.append(ratio(ours["planted"], ours["found"]))
        some = best or ours["given"]
        cells += ["-", "-"] if some is None else [copy_floor(rows, some), gather_bound(rows, some)]
        lines.append(cells)
    head = ["graph", "type", "F", "best cuSPARSE, given order", "ours given", "ours found", "ours planted"]
    head += ["cuSPARSE / ours given", "cuSPARSE / ours found", "planted / found", "copy floor", "gather from L2"]
    said = (
        "`gather from L2`: all rows gathered at the rate that the L2 gave above. It is no bound where the first-level "
        "cache still has some of them."
    )
    return titled("SpMM (sum over in-edges), ms", head, lines, said)


def fastest_cusparse(timed: dict[tuple[Any, ...], Row], graph: str, dtype: str, width: int, order: str) -> Row | None:
    """Of all ways to call it, the one with the smallest median."""
    rows = [
        row
        for key, row in timed.items()
        if key[:4] == (graph, dtype, width, order) and (key[4] == "torch.sparse" or key[4].startswith("cusparse"))
    ]
    return min(rows, key=lambda row: float(row["median_ms"]), default=None)


def copy_floor(rows: list[Row], row: Row) -> str:
    """Every input read once and the output written once at the copy rate."""
    rates = [other["value"] for other in rows if other["kind"] == "bound" and other["system"] == "copy"]
    if not rates:
        return "-"
    features = 2 * row["num_nodes"] * row["width"] * _DTYPE_BYTES[row["dtype"]]
    return f"{(features + 4 * row['num_edges'] + 4 * row['num_nodes']) / rates[-1] * 1e3:.2f}"


def gather_bound(rows: list[Row], row: Row) -> str:
    """A row for each edge at the rate of the cache."""
    rates = [
        other["value"]
        for other in rows
        if other["kind"] == "bound" and (other.get("dtype"), other.get("width")) == (row["dtype"], row["width"])
    ]
    if not rates:
        return "-"
    return f"{row['num_edges'] * row['width'] * _DTYPE_BYTES[row['dtype']] / rates[-1] * 1e3:.2f}"


def all_products(rows: list[Row], card: str) -> str:
    """Every system with its spread."""
    lines = [
        [row["graph"], row["order"], row["dtype"], str(row["width"]), row["system"], outcome(row, spread), gib(row)]
        for row in rows
        if row["kind"] == "spmm"
    ]
    text = titled("SpMM, every system", ["graph", "order", "type", "F", "system", "ms", "peak"], lines)
    for row in rows:
        if row["kind"] == "kernels" and "kernels" in row:
            names = ", ".join(f"`{name.replace('void ', '')[:60]}`" for name in row["kernels"])
            text += f"\n\nKernels of `{row['system']}`, {row['dtype']}: {names}."
    return text


def beside(rows: list[Row], card: str) -> str:
    """Others beside ours in the same order of nodes, and in the given one beside ours in the order that it finds."""
    timed: dict[tuple[str, ...], dict[str, dict[str, Row]]] = {}
    for row in rows:
        if row["kind"] not in ("spmm", "peers") or row.get("median_ms") is None:
            continue
        what = f"sum F={row['width']} fwd" if row["kind"] == "spmm" else f"{row['case']} {row['step']}"
        is_cusparse = row["system"] == "torch.sparse" or row["system"].startswith("cusparse")
        system = "cuSPARSE, fastest" if is_cusparse else row["system"]
        by_order = timed.setdefault((row["graph"], what, row["dtype"]), {}).setdefault(system, {})
        before = by_order.get(row["order"])
        if before is None or row["median_ms"] < before["median_ms"]:
            by_order[row["order"]] = row
    lines = []
    for case, systems in timed.items():
        ours = systems.pop("nugnn", {})
        for system, theirs in systems.items():
            same = [ratio(theirs.get(order), ours.get(order)) for order in ("given", "found", "planted")]
            times = [milliseconds(found.get(order)) for found in (theirs, ours) for order in ("given", "found")]
            both_orders = ratio(theirs.get("given"), ours.get("found"))
            lines.append([*case, system, *times, *same, both_orders])
    head = ["graph", "what", "type", "other", "other given", "other found", "ours given", "ours found"]
    head += ["other / ours, given", "other / ours, found", "other / ours, planted", "other given / ours found"]
    return titled("cuSPARSE, turbo-gnn and torch's scatter beside ours, ms", head, lines)


def milliseconds(row: Row | None) -> str:
    """The median alone."""
    return "-" if row is None else f"{row['median_ms']:.2f}"


def all_peers(rows: list[Row], card: str) -> str:
    """Attention and maxima of every system with spread and memory."""
    lines = [
        [
            row["graph"],
            row["order"],
            row["case"],
            row["step"],
            row["dtype"],
            row["system"],
            outcome(row, spread),
            own_peak(row),
        ]
        for row in rows
        if row["kind"] == "peers"
    ]
    head = ["graph", "order", "what", "step", "type", "system", "ms", "own peak / inputs"]
    said = (
        "`own peak / inputs`: what a call has allocated at most beyond what stands between calls, operands among that, "
        "as a multiple of the operands; with the operands themselves it is one more."
    )
    return titled("Attention and maxima, every system", head, lines, said)


def own_peak(row: Row) -> str:
    """Most memory that a call adds to what stands before it, as a multiple of its operands."""
    if row.get("peak_bytes") is None or row.get("held_bytes") is None:
        return "-"
    return f"{(row['peak_bytes'] - row['held_bytes']) / row['input_bytes']:.2f}×"


def baselines(rows: list[Row], card: str) -> str:
    """The baselines beside an earlier measurement on the same kind of card."""
    if "H100" not in card:
        return ""
    timed = {
        (row["graph"], row["dtype"], row["width"], row["order"], row["system"]): row
        for row in rows
        if row["kind"] == "spmm" and row.get("median_ms") is not None
    }
    lines = []
    for (order, dtype, width), expected in EXPECTED_ON_H100.items():
        best = fastest_cusparse(timed, "products-like", dtype, width, order)
        if best is not None:
            lines.append([f"SpMM {dtype} F={width}, {order} order", *reproduced(best["median_ms"], expected)])
    for row in rows:
        key = (row.get("model"), row.get("dtype"))
        if row["kind"] == "epoch" and row["system"] == "cusparse" and key in EXPECTED_EPOCH_ON_H100:
            if row.get("median_ms") is not None and row["graph"] == "products-like":
                lines.append([f"epoch {' '.join(key)}", *reproduced(row["median_ms"], EXPECTED_EPOCH_ON_H100[key])])
    return titled("Are the baselines as fast as they can be?", ["what", "ms", "earlier", "verdict"], lines)


def reproduced(median_ms: float, expected_ms: float) -> list[str]:
    """Columns of the table of baselines."""
    verdict = "yes" if median_ms <= 1.1 * expected_ms else "NO: more than 10 % slower"
    return [f"{median_ms:.1f}", f"{expected_ms:.1f}", verdict]


def epochs(rows: list[Row], card: str) -> str:
    """Training epochs, each beside cuSPARSE in the same precision on the same graph, as usual and tuned."""
    of_kind = [row for row in rows if row["kind"] == "epoch"]
    case = ("graph", "model", "dtype", "num_nodes")
    timed = {(row["system"], *(row[name] for name in case)): row for row in of_kind if row.get("median_ms") is not None}
    lines = []
    for row in of_kind:
        same = None if row.get("median_ms") is None else row
        cells = [row["model"], row["dtype"], row["system"], row["graph"], f"{row['num_nodes']:,}"]
        beside = [timed.get((system, *(row[name] for name in case))) for system in ("cusparse", "cusparse tuned")]
        cells.append({True: "yes", False: "no", None: "-"}[row.get("cuda_graphs")])
        lines.append([*cells, outcome(row, spread), gib(row), *(ratio(base, same) for base in beside)])
    head = ["model", "precision", "system", "graph", "nodes", "CUDA graphs", "ms of an epoch", "peak"]
    head += ["cuSPARSE / this", "tuned cuSPARSE / this"]
    said = (
        "CUDA graphs: whether steps were recorded; rows without a word are older than that column, and those of nuGNN "
        "among them ran with `cuda_graphs` on, which records or fails."
    )
    return titled("Epochs: 3 layers, dropout 0.5, Adam, loss over all nodes", head, lines, said)


def scaling(rows: list[Row], card: str) -> str:
    """Several ranks beside one."""
    of_kind = [row for row in rows if row["kind"] == "scaling"]
    single = {
        (row["graph"], row["dtype"], row["num_nodes"], row["order"]): row
        for row in of_kind
        if row["num_ranks"] == 1 and row.get("median_ms") is not None
    }
    lines = []
    for row in of_kind:
        is_timed = row.get("median_ms") is not None
        beside = single.get((row["graph"], row["dtype"], row["num_nodes"], row["order"]))
        nccl = max((answer["nccl_ms"] or 0.0 for answer in row.get("ranks", [])), default=0.0)
        exposed = max((answer["halo_ms"] for answer in row.get("ranks", [])), default=0.0)
        shares = [f"{ms / row['median_ms']:.0%}" if is_timed and ms else "-" for ms in (nccl, exposed)]
        cells = [row["graph"], str(row["num_ranks"]), row.get("overlap", "off") if row["num_ranks"] > 1 else "-"]
        cells.append(row["dtype"])
        cells += [row["order"], f"{row['num_nodes']:,}", outcome(row, spread)]
        lines.append([*cells, ratio(beside, row if is_timed else None), *shares, gib(row)])
    head = ["graph", "ranks", "overlap", "precision", "order", "nodes", "ms of an epoch", "beside one"]
    head += ["NCCL kernels", "waits for halo rows", "largest peak"]
    return titled("Several GPUs: SAGE, equal shares, the same losses", head, lines)


def curves(rows: list[Row], card: str) -> str:
    """Test accuracy over seeds."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row["kind"] == "curve":
            groups.setdefault((row["model"], row["graph"], row["system"], row["dtype"]), []).append(row)
    lines = []
    for (model, graph, system, dtype), members in groups.items():
        values = [100 * row["value"] for row in members if "value" in row]
        is_base = (system, dtype) == ("cusparse", "fp32")
        beside = [] if is_base else groups.get((model, graph, "cusparse", "fp32"), [])
        base = [100 * row["value"] for row in beside if "value" in row]
        text = next((row["error"] for row in members if "error" in row), "")
        if values:
            text = mean_and_deviation(values)
        lines.append([model, dtype, system, graph, str(len(values)), text, difference(values, base)])
    head = ["model", "precision", "system", "graph", "seeds", "test accuracy, %", "beside cuSPARSE fp32"]
    sizes = {f"{row['num_nodes']:,}" for members in groups.values() for row in members}
    said = (
        f"Graphs of {', '.join(sorted(sizes))} nodes, loss over train nodes: accuracy is that of test nodes, which a "
        "loss over all nodes, as in the epochs above, would have seen."
    )
    return titled("Accuracy: same first weights, epoch of the best validation accuracy", head, lines, said)


def mean_and_deviation(values: list[float]) -> str:
    """As in ``71.2 ± 0.3``."""
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{deviation}"


def difference(values: list[float], base: list[float]) -> str:
    """Difference of means, with its standard error (Welch)."""
    if len(values) < 2 or len(base) < 2:
        return "-"
    error = (statistics.variance(values) / len(values) + statistics.variance(base) / len(base)) ** 0.5
    return f"{statistics.mean(values) - statistics.mean(base):+.2f} (standard error {error:.2f})"


def outcome(row: Row, show: Callable[[Row], str]) -> str:
    """What a row came to, or why it did not."""
    return str(row["error"]).replace("|", "/") if "error" in row else show(row)


def spread(row: Row) -> str:
    """Median and percentiles."""
    return f"{row['median_ms']:.2f} ({row['p20_ms']:.2f}-{row['p80_ms']:.2f})"


def ratio(slow: Row | None, fast: Row | None) -> str:
    """How many times as long the first takes."""
    return "-" if slow is None or fast is None else f"{slow['median_ms'] / fast['median_ms']:.2f}×"


def gib(row: Row) -> str:
    """Peak memory."""
    most = row.get("peak_bytes")
    return "-" if most is None else f"{most / 2**30:.2f} GiB"


def titled(title: str, head: list[str], lines: list[list[str]], said: str = "") -> str:
    """A section with a table, and what is to be said about it; nothing without lines."""
    if not lines:
        return ""
    return "\n\n".join(part for part in (f"### {title}", markdown(head, lines), said) if part)


def main(given: list[str] | None = None) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", type=Path, metavar="ROWS", default=[KEPT])
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "performance.md")
    arguments = parser.parse_args(given)
    rows = [row for folder in arguments.rows for row in read_rows(folder)]
    if not rows:
        raise SystemExit(f"no rows in {', '.join(map(str, arguments.rows))}; run benchmarks/gpu_all.sh first")
    arguments.page.write_text(page(rows), encoding="utf-8")
    print(f"{arguments.page}: {len(rows)} rows")


if __name__ == "__main__":
    main()
