# make install | train | test | test-slow | lint | lock. Everything happens in .venv; a second `make install` is instant.
SHELL := /bin/bash
BIN := .venv/bin
STAMP := .venv/.nugnn-installed
PYTHON ?= $(shell for p in python3.11 python3.12; do $$p -c 'import ensurepip' >/dev/null 2>&1 && echo $$p && break; done)

.PHONY: install train test test-slow lint lock

install: $(STAMP)

$(STAMP): requirements-dev.lock pyproject.toml
	@test -x $(BIN)/python || test -n "$(PYTHON)" || \
	  { echo "nugnn needs Python 3.11 or 3.12 with venv; name one: make install PYTHON=/path/to/python3.11" >&2; exit 2; }
	@echo "installing torch, dgl and what they need into .venv: some minutes, and nothing is printed meanwhile"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@# Triton comes with CUDA builds of torch, each its own version; a CPU build needs it for the interpreter's tests.
	@$(BIN)/python -c "import triton" 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --no-deps triton==3.6.0 || echo "triton is not to be had here; tests of Triton kernels will be skipped" >&2
	@touch $@
	@echo "installed in .venv; now: make train"

train: install
	$(BIN)/nugnn train --dataset digits --workers 2 --shares 0.7,0.3 --out runs/digits

# One OpenMP thread per process: the multi-process tests start up to five ranks, and oversubscribed OpenMP is 100x slower.
# Tests run beside each other, in a process for each core: at most TEST_PROCESSES, with their ranks up to 3 GiB each.
# Compiled modules are kept, whatever the environment says: hundreds of processes start.
TEST_PROCESSES ?= 4
PYTEST = env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} \
  $(BIN)/python -m pytest -n logical --maxprocesses $(TEST_PROCESSES) --dist worksteal

test: install
	$(PYTEST)

# Some take minutes alone: the limit of a test is there to end one that hangs.
test-slow: install
	$(PYTEST) -m 'slow and not gpu' --timeout 1800

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/link_tree.py
	MYPYPATH=.view $(BIN)/mypy -p nugnn
	cd .view && OMP_NUM_THREADS=1 PYTHONPATH=. ../$(BIN)/python -m pytest -c ../pyproject.toml --rootdir . \
	  --import-mode=prepend -p no:cacheprovider --doctest-modules --ignore-glob='*/gpu.py' nugnn

# Writes down what is installed now; run it after changing versions in .venv on purpose.
lock:
	$(BIN)/python tools/lock.py > requirements-dev.lock.new && mv requirements-dev.lock.new requirements-dev.lock
