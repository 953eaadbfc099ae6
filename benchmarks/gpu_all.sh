#!/usr/bin/env bash
# Everything for docs/performance.md in one call on a machine with a GPU, within about 610 seconds:
#
#     benchmarks/gpu_all.sh ROWS [PYTHON]
#
# Writes kernels.jsonl, epoch.jsonl, peers.jsonl and curve.jsonl, rows as they are measured, into the folder ROWS, which
# may hold rows of other runs, and the page made of them. A part that fails or runs out of its time leaves its rows and
# the others run on; the exit code is then 1. Needs no installation: the package is found through the link tree.
set -u
rows=${1:?usage: benchmarks/gpu_all.sh ROWS [PYTHON]}
python=${2:-python3}
cd "$(dirname "$0")/.."
mkdir -p "$rows"
"$python" tools/link_tree.py >/dev/null
export PYTHONPATH="$PWD/.view${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
status=0

part() { # part SECONDS SCRIPT OPTIONS...
  local seconds=$1 begin=$SECONDS
  shift
  timeout --signal=INT --kill-after=10 "$seconds" "$python" "benchmarks/$1" "${@:2}" --out "$rows" || {
    echo "$* ended with code $?" >&2
    status=1
  }
  echo "$1: $((SECONDS - begin)) s"
}

part 140 gpu_kernels.py --families products-like
part 210 gpu_epoch.py
part 120 gpu_peers.py
part 90 gpu_kernels.py --families mixed-like --without-bounds \
  --systems nugnn torch.sparse "cusparse alg2 pre" "cusparse alg3 pre"
part 50 gpu_epoch.py --curves --models sage --systems cusparse nugnn

"$python" benchmarks/report_performance.py "$rows" --page "$rows/performance.md" || status=1
exit $status
