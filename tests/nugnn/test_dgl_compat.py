"""``import dgl`` after ``import nugnn``: each order and condition in an interpreter of its own, with -W error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fresh_interpreters

_CONVOLUTION = """
import torch, dgl.nn
g = dgl.graph(([0, 1, 1], [1, 2, 0]))
x = torch.ones(3, 2, requires_grad=True)
dgl.nn.GraphConv(2, 2, norm="none")(g, x).sum().backward()
assert x.grad.shape == (3, 2)
"""


def run(code: str, *flags: str, fresh: bool = False, **variables: str | None) -> subprocess.CompletedProcess[str]:
    """Run ``code`` where every warning is an error; a variable of None is unset.

    Unless ``fresh`` or with flags, torch has been imported and the interpreter is one of `fresh_interpreters`.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("DGLBACKEND", None)
    for name, value in variables.items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    if not fresh and not flags:
        return fresh_interpreters.run(code, environment)
    return subprocess.run(
        [sys.executable, "-W", "error", *flags, "-c", code],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )


def assert_silent(result: subprocess.CompletedProcess[str]) -> None:
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_cli_03_importing_nugnn_loads_neither_torch_nor_dgl_nor_numpy() -> None:
    code = "import nugnn, sys; assert not {'torch', 'dgl', 'numpy'} & set(sys.modules)"
    assert_silent(run(code, fresh=True))


def test_graphs_are_read_without_what_reads_samples() -> None:
    code = "import nugnn.datasets, sys; assert 'nugnn.datasets.samples' not in sys.modules"
    assert_silent(run(code, fresh=True))


def test_dgl_after_nugnn_is_silent_and_leaves_the_home_alone(tmp_path: Path) -> None:
    assert_silent(run("import nugnn, dgl" + _CONVOLUTION, fresh=True, HOME=str(tmp_path)))
    assert list(tmp_path.iterdir()) == []


def test_without_nugnn_this_dgl_does_not_import() -> None:
    """Guards the other tests: once this fails, DGL works alone and the hook has nothing left to do."""
    assert run("import dgl", DGLBACKEND="pytorch").returncode == 1


def test_pandas_waits_for_its_first_use() -> None:
    code = (
        "import nugnn, sys, dgl\n"
        "assert 'pandas' not in sys.modules\n"
        "from dgl.data import movielens\n"
        "assert movielens.pd.DataFrame({'a': [1]}).shape == (1, 1)\n"
        "import pandas\n"
        "assert movielens.pd.DataFrame is pandas.DataFrame"
    )
    assert_silent(run(code))


def test_pandas_imported_before_is_the_one_dgl_gets() -> None:
    assert_silent(run("import pandas, nugnn, dgl\nassert dgl.data.movielens.pd is pandas"))


@pytest.mark.parametrize("home", ["/proc/nonexistent", None])
def test_unusable_home(home: str | None) -> None:
    assert_silent(run("import nugnn, dgl", fresh=True, HOME=home))


def test_invalid_backend_variable_is_replaced(tmp_path: Path) -> None:
    assert_silent(
        run("import nugnn, dgl; assert dgl.backend.backend_name == 'pytorch'", DGLBACKEND="", HOME=str(tmp_path))
    )
    assert list(tmp_path.iterdir()) == []


def test_sources_without_compiled_files_are_compiled_without_warnings(tmp_path: Path) -> None:
    code = """
import torch, numpy, pandas, networkx, scipy.sparse, tqdm, requests, psutil
import sys; sys.pycache_prefix = {prefix!r}
{first}
import dgl
"""
    assert_silent(run(code.format(prefix=str(tmp_path / "with"), first="import nugnn")))
    by_hand = "import types; sys.modules['dgl.graphbolt'] = types.ModuleType('dgl.graphbolt')"
    control = run(code.format(prefix=str(tmp_path / "without"), first=by_hand), DGLBACKEND="pytorch")
    assert "invalid escape sequence" in control.stderr


def test_dgl_that_failed_before_nugnn_works_afterwards() -> None:
    code = """
try:
    import dgl
except Exception:
    pass
else:
    raise SystemExit("expected to fail")
import nugnn, dgl
assert all(hasattr(dgl, name) for name in ("convert", "frame", "transforms", "udf", "ops", "nn"))
"""
    assert_silent(run(code + _CONVOLUTION, DGLBACKEND="pytorch"))


def test_dgl_imported_by_other_means_before_nugnn_is_kept() -> None:
    code = """
import sys, types
sys.modules["dgl.graphbolt"] = mine = types.ModuleType("dgl.graphbolt")
import dgl
first = dgl
import nugnn, dgl
assert dgl is first and sys.modules["dgl.graphbolt"] is mine
"""
    assert_silent(run(code + _CONVOLUTION, DGLBACKEND="pytorch"))


def test_second_install_adds_no_second_hook() -> None:
    assert_silent(
        run(
            "import sys, nugnn; n = len(sys.meta_path); nugnn._dgl_compat.install(); "
            "import importlib; assert len(sys.meta_path) == n"
        )
    )


@pytest.mark.parametrize(
    "statement", ["dgl.graphbolt.ItemSet", "from dgl.graphbolt import ItemSet", "import dgl.graphbolt.impl"]
)
def test_graphbolt_says_what_is_missing(statement: str) -> None:
    result = run(f"import nugnn, dgl\n{statement}")
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert "dgl.graphbolt is not available: DGL 2.1.0 has no binary of it for torch" in last


def test_stub_survives_tools_that_walk_all_modules() -> None:
    code = """
import nugnn, dgl, pickle, inspect, sys
stub = sys.modules["dgl.graphbolt"]
assert not hasattr(stub, "ItemSet") and not hasattr(stub, "__wrapped__")
def function(): pass
function.__module__ = None                     # pickle now asks every module for the name
pickle.dumps(function)
inspect.getmodule(lambda: None)
"""
    assert_silent(run(code, fresh=True))  # pickle looks for the function in the module __main__


@pytest.mark.parametrize("statement", ["g.adj()", "import dgl.sparse", "from dgl import sparse"])
def test_sparse_names_the_replacement_and_the_replacement_works(statement: str) -> None:
    code = f"""
import nugnn, dgl
g = dgl.graph(([0, 1], [1, 2]))
assert g.adj_external(scipy_fmt="csr").nnz == 2 and len(g.adj_tensors("csc")) == 3
for attempt in range(2):                       # the same answer again
    try:
        {statement}
    except ImportError as error:
        assert "adj_external(scipy_fmt='csr')" in str(error) and "libdgl_sparse_pytorch_" in str(error), error
    else:
        raise SystemExit("no error")
"""
    assert_silent(run(code))


def test_sparse_matrices_are_made_without_a_warning_and_keep_the_users_setting() -> None:
    code = """
import warnings
warnings.simplefilter("error")
import nugnn, dgl, torch
g = dgl.graph(([0, 1], [1, 2]))
adj = g.adj_external()
assert adj.layout is torch.sparse_coo and adj.to_dense().tolist() == [[0, 1, 0], [0, 0, 1], [0, 0, 0]]
assert g.inc("in").to_dense().tolist() == [[0, 0], [1, 0], [0, 1]]
values = torch.ones(1)
sparse_matrix = dgl.backend.sparse_matrix
sparse_matrix(values, ("coo", torch.tensor([[5], [5]])), (3, 3))
with torch.sparse.check_sparse_tensor_invariants():
    try:
        sparse_matrix(values, ("coo", torch.tensor([[5], [5]])), (3, 3))
    except RuntimeError as error:
        assert "size" in str(error), error
    else:
        raise SystemExit("the user's check was not made")
try:
    sparse_matrix(values, ("csr", values, values), (3, 3))
except TypeError as error:
    assert "COO" in str(error), error
"""
    assert_silent(run(code))


_OTHER_DGL = """
import sys
from pathlib import Path
root = Path({root!r})
(root / "dgl" / "graphbolt").mkdir(parents=True)
(root / "dgl" / "__init__.py").write_text("from . import graphbolt")
(root / "dgl" / "graphbolt" / "__init__.py").write_text("real = True")
if {binary}:
    import importlib.metadata
    version = importlib.metadata.version("torch").split("+")[0]
    suffix = "dylib" if sys.platform == "darwin" else "so"
    (root / "dgl" / "graphbolt" / f"libgraphbolt_pytorch_{{version}}.{{suffix}}").touch()
if {datapipes}:
    (root / "torchdata").mkdir()
    (root / "torchdata" / "__init__.py").touch()
    (root / "torchdata" / "datapipes.py").touch()
sys.path.insert(0, str(root))
import nugnn, dgl
assert hasattr(dgl.graphbolt, "real") is {kept}
"""


@pytest.mark.parametrize(
    ("binary", "datapipes", "kept"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_a_dgl_with_its_own_working_graphbolt_keeps_it(
    tmp_path: Path, binary: bool, datapipes: bool, kept: bool
) -> None:
    assert_silent(run(_OTHER_DGL.format(root=str(tmp_path), binary=binary, datapipes=datapipes, kept=kept)))


def test_require_dgl_names_the_missing_package() -> None:
    code = """
import sys, nugnn._dgl_compat as compat
class Hide:
    def find_spec(self, name, path, target=None):
        if name == {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hide())
try:
    compat.require_dgl()
except ImportError as error:
    assert {text!r} in str(error), error
else:
    raise SystemExit("no error")
"""
    assert_silent(run(code.format(hidden="dgl", text="DGL is not installed")))
    assert_silent(run(code.format(hidden="networkx", text="needs the missing package 'networkx'")))


def test_require_dgl_returns_dgl() -> None:
    assert_silent(run("from nugnn._dgl_compat import require_dgl; assert require_dgl().__version__"))


def test_a_function_named_like_its_module_stays_the_function() -> None:
    code = """
import nugnn, sys, types
nugnn._EXPORTS["probe"] = "nugnn.probe"
module = types.ModuleType("nugnn.probe")
module.probe = lambda: 7
nugnn.probe = module                           # what the import system does after loading nugnn/probe.py
assert nugnn.probe() == 7
"""
    assert_silent(run(code))


def test_every_public_name_resolves() -> None:
    assert_silent(run("import nugnn\nfor name in nugnn.__all__: getattr(nugnn, name)", "-W", "default"))


def test_datasets_are_an_attribute_that_is_imported_on_first_use() -> None:
    code = """
import sys, nugnn
assert "nugnn.datasets" not in sys.modules and "torch" not in sys.modules
assert "datasets" in dir(nugnn) and nugnn.datasets.GraphData is nugnn.GraphData
assert nugnn.datasets is sys.modules["nugnn.datasets"]
assert nugnn.Interrupted is sys.modules["nugnn.interrupt"].Interrupted
assert nugnn.load_weights is sys.modules["nugnn.weights"].load_weights
"""
    assert_silent(run(code, fresh=True))
