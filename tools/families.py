"""How much code graphs and samples share: modules and lines that a training run of each has loaded.

python tools/families.py            # counts
python tools/families.py --modules  # and their names
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

_GRAPHS = """
import nugnn
from nugnn.datasets.registry import load
nugnn.fit(nugnn.GNN("gcn", 64, 10, hidden=8), load("digits"), epochs=1)
"""
_SAMPLES = """
import nugnn
from nugnn.networks import CNN
from nugnn.datasets.samples import load_samples
nugnn.fit(CNN(1, 10, widths=[4]), load_samples("digits-images"), epochs=1)
"""
_LOADED = """
import sys
for name, module in sorted(sys.modules.items()):
    if name.partition(".")[0] == "nugnn" and getattr(module, "__file__", None):
        print(name, module.__file__)
"""


def loaded(program: str) -> dict[str, Path]:
    """Modules of this package that a program has loaded when it ends, with their files."""
    done = subprocess.run([sys.executable, "-c", program + _LOADED], capture_output=True, text=True, check=True)
    lines = (line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith("nugnn"))
    return {name: Path(file) for name, file in lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", action="store_true", help="their names, too")
    arguments = parser.parse_args()
    graphs, samples = loaded(_GRAPHS), loaded(_SAMPLES)
    for what, names in (
        ("both", graphs.keys() & samples.keys()),
        ("graphs alone", graphs.keys() - samples.keys()),
        ("samples alone", samples.keys() - graphs.keys()),
    ):
        files = {**graphs, **samples}
        lines = sum(len(files[name].read_text(encoding="utf-8").splitlines()) for name in names)
        print(f"{what:14} {len(names):4} modules {lines:7,} lines")
        if arguments.modules:
            print(*(f"    {name}" for name in sorted(names)), sep="\n")


if __name__ == "__main__":
    main()
